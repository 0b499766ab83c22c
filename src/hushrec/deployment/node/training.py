"""A node's share of a run: its users, the backend they train in, training and recommendations.

Everything is worked out from the node's own contract and data. The server says how many clients
there are, which numbers the clients of this node have and, where clients have personal budgets,
what those are after rounding down. It cannot ask for less noise than the contract has. The caller
stores the results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import UploadShape
from hushrec.aggregation.statistics import Evaluation
from hushrec.data.splitting import Share, Split, split_share
from hushrec.data.views import TrainView
from hushrec.deployment.node.database import NodeDatabase
from hushrec.deployment.node.runs import NodeRun, NodeRuns
from hushrec.errors import ConfigError, MessageError, RunError
from hushrec.evaluation.evaluator import Evaluator
from hushrec.federation.backends import THIS_MACHINE, InProcess, Machine
from hushrec.federation.experiment import Experiment
from hushrec.federation.requests import Assignment, EvaluationRequest, TrainRequest
from hushrec.federation.setup import Setup, set_up_public
from hushrec.federation.sums import NodeSum, round_shape
from hushrec.io.codec import Arrays
from hushrec.privacy.budgets import by_feature
from hushrec.privacy.plan import Plan
from hushrec.privacy.protection import Protection
from hushrec.private import PrivateFields, PrivateStore
from hushrec.serving.model import Recommendation
from hushrec.streams import SecretStreams, Streams


@dataclass(frozen=True)
class Engine:
    """The node's clients, ready to train and to be evaluated."""

    backend: InProcess
    plan: Plan
    places: Mapping[int, int]
    """Index of each client in the backend, by its number in the run."""
    kept: Mapping[int, int]
    """The same index by the client's number in the store."""
    training: NDArray[np.int64]
    """Clients with something to train on, by their numbers in the run."""


def split_of(store: NodeDatabase, run: NodeRun, assignment: Assignment | None = None) -> Split:
    """Split the node's own interactions; before there are assignment, users are numbered from 0."""
    order = sorted(run.members, key=lambda user: run.members[user])
    places = np.array([run.members[user] for user in order], np.int64)
    data = store.interactions({user: k for k, user in enumerate(order)}, run.upto)
    if data is None:
        raise MessageError("this node holds no interaction with an item of the catalogue")
    own = np.array([run.clients[place] for place in places.tolist()], np.int64)
    if assignment is None:
        numbers, clients, population = np.arange(len(places)), own, len(places)
    else:
        if places.max() >= len(assignment.users) or own.max() >= len(assignment.clients):
            raise MessageError("the server numbers fewer users than this node has enrolled")
        numbers, clients = assignment.users[places], assignment.clients[own]
        population = assignment.population
    holders = clients.astype(np.int32) if store.contract.silos else None
    experiment = store.contract.experiment
    share = Share(numbers, population, holders)
    return split_share(data, experiment.split, Streams(experiment.seed), share)


@dataclass(frozen=True)
class Ready:
    """All parts of an engine but the private parameters."""

    setup: Setup
    view: TrainView
    fields: PrivateFields
    evaluator: Evaluator
    training: NDArray[np.int64]


class Engines:
    """Makes the engine that answers a message.

    The setup is worked out once for a run, and the split once unless a user is removed; private
    parameters are read from the file for each message.
    """

    def __init__(self, store: NodeDatabase, machine: Machine) -> None:
        self.store = store
        self.machine = machine
        self._setup: tuple[str, Setup] | None = None
        self._ready: tuple[object, Ready] | None = None

    def setup(self, assignment: Assignment) -> Setup:
        """Return the setup of a run, from the contract and the server's assignment."""
        if self._setup is None or self._setup[0] != assignment.digest:
            contract, budgets = self.store.contract, _told_budgets(self.store, assignment)
            key, public = self.store.noise_key, contract.public
            self._setup = (
                assignment.digest,
                set_up_public(
                    contract.experiment, public, key, assignment.run, assignment.training, budgets
                ),
            )
        return self._setup[1]

    def of(self, run: NodeRun, assignment: Assignment) -> Engine:
        """Return the engine of a run, with empty private parameters."""
        key = run.id, assignment.digest, run.upto, run.members, run.clients
        if self._ready is None or self._ready[0] != key:
            self._ready = key, self._make_ready(run, assignment)
        ready = self._ready[1]
        setup, view = ready.setup, ready.view
        experiment = setup.experiment
        private = PrivateStore.create(ready.fields, len(view.clients), experiment.store, None)
        backend = InProcess(setup.task, view, private, ready.evaluator, self.machine)
        places = {number: place for place, number in enumerate(view.clients.tolist())}
        kept = {
            client: places[number]
            for client, number in enumerate(assignment.clients.tolist())
            if number in places
        }
        return Engine(backend, setup.plan, places, kept, ready.training)

    def _make_ready(self, run: NodeRun, assignment: Assignment) -> Ready:
        contract = self.store.contract
        experiment = contract.experiment
        split = split_of(self.store, run, assignment)
        view = split.train_view(experiment.protocol)
        setup = self.setup(assignment)
        task, plan = setup.task, setup.plan
        _check_budgets(self.store, view, assignment)
        deviations = None if plan.deviations is None else plan.deviations[view.clients]
        fields = task.method.private_fields(view, task.initial, task.streams)
        tolerant, threads = experiment.privacy.promises, self.machine.n_threads
        evaluator = Evaluator(split, experiment.evaluation, task.streams, threads, tolerant)
        training = split.training_clients
        numbers = training if contract.silos else view.clients[training].astype(np.int64)
        return Ready(setup, replace(view, noise=deviations), fields, evaluator, numbers)


def activity_of(view: TrainView) -> NDArray[np.int64]:
    """Count the training interactions of each client."""
    return np.diff(view.positives.indptr[view.client_indptr])


def declared_by(experiment: Experiment, split: Split) -> NDArray[np.float64]:
    """Return the budgets that users declare; those who do not train declare none."""
    feature = experiment.privacy.budget_feature
    assert feature is not None, "checked"
    features = split.train.user_features
    return by_feature(features, feature, split.data.users, split.members)


def _told_budgets(store: NodeDatabase, assignment: Assignment) -> NDArray[np.float64] | None:
    """Return the personal budgets that a node needs: those of its clients, and the largest."""
    if (assignment.epsilon is None) != (store.contract.experiment.privacy.budgets is None):
        raise MessageError("the server and this node do not agree on who has a budget")
    if assignment.epsilon is None:
        return None
    own = np.zeros(assignment.population + 1)
    own[assignment.clients], own[-1] = assignment.epsilon, assignment.largest_epsilon
    return own


def _check_budgets(store: NodeDatabase, view: TrainView, assignment: Assignment) -> None:
    """Refuse budgets outside of the contract."""
    config, own = store.contract.experiment.privacy, _told_budgets(store, assignment)
    if own is None or assignment.epsilon is None:
        return
    if config.budgets == "activity":
        assert config.epsilon_min is not None and config.epsilon_max is not None, "checked"
        kept = (assignment.epsilon == 0) | (assignment.epsilon >= config.epsilon_min)
        if not kept.all() or assignment.largest_epsilon > config.epsilon_max:
            raise MessageError("the server gives budgets outside of the agreed range")
    else:
        assert config.budget_feature is not None, "checked"
        declared = view.user_features[config.budget_feature]
        limit = np.nan_to_num(np.asarray(declared.values, np.float64))  # type: ignore[union-attr]
        if (own[view.clients] > limit).any():
            raise MessageError("the server gives a client a larger budget than it declared")


@dataclass(frozen=True, eq=False)
class TrainedRound:
    """The results of a training round."""

    sum: NodeSum
    private: PrivateStore
    clients: Mapping[int, int]
    """Clients that took part, with their indices in the private store."""
    charged: bool
    """Whether the round is charged to their privacy budgets."""
    protection: Protection
    secret: SecretStreams


class NodeTrainer:
    """Trains and evaluates the node's clients."""

    def __init__(self, runs: NodeRuns, machine: Machine) -> None:
        self.runs = runs
        self.store = runs.store
        self.engines = Engines(runs.store, machine)

    def shape(self, request: TrainRequest) -> UploadShape:
        """Return the shape of a sum of this round, which depends on no client's data."""
        task = self.engines.setup(request.assignment).task
        phase = task.method.phase_of(request.download.round)
        check_received(phase.download(task.initial), request.download.common)
        common = request.download.to(np.zeros(0, np.int64))
        return round_shape(task, task.protection_of(common), request.download)

    def train(self, run: NodeRun, request: TrainRequest) -> TrainedRound:
        """Train the requested clients whose privacy budget allows another upload."""
        engine = self.engines.of(run, request.assignment)
        backend, task, number = engine.backend, engine.backend.task, request.download.round
        phase = task.method.phase_of(number)
        check_received(phase.download(task.initial), request.download.common)
        if self.store.contract.secure is not None:
            _check_everybody(engine, request)
        able = self._affordable(run, engine, request)
        # The backend knows its clients by index, and takes them in ascending order.
        indices = np.array([engine.places[c] for c in request.clients[able].tolist()], np.int64)
        order = np.argsort(indices)
        download = request.download.to(able[order])
        here = set(indices.tolist())
        clients = {client: index for client, index in engine.kept.items() if index in here}
        self.runs.load(run, clients, backend.store)
        protection = task.protection_of(download.to(able[:0]))
        collected = backend.train(download, protection, indices[order])
        found = NodeSum(
            run.id,
            number,
            collected.summed,
            collected.loss,
            collected.up_bytes,
            collected.zeroed_out,
        )
        charged = _costs(engine.plan, number)
        return TrainedRound(found, backend.store, clients, charged, protection, task.secret)

    def evaluate(self, run: NodeRun, request: EvaluationRequest) -> Evaluation:
        """Evaluate the node's users with the newest or the selected private parameters."""
        run = self.runs.select(run, request.selected)
        engine = self.engines.of(run, request.assignment)
        backend, serving = engine.backend, request.serving
        check_received(backend.task.method.serving(backend.task.initial), serving)
        self.runs.load(run, engine.kept, backend.store, selected=request.with_selected)
        evaluation = backend.evaluate(serving, request.part)
        if request.with_selected:
            self.runs.keep_model(run, request.to_bytes())
        return evaluation

    def _affordable(self, run: NodeRun, engine: Engine, request: TrainRequest) -> NDArray[np.int64]:
        """Return which requested clients are here and have budget left, by the ledger."""
        budgets, number = engine.plan.budgets, request.download.round
        spent: Mapping[int, int] = {}
        if budgets is not None and _costs(engine.plan, number):
            by_index = {index: client for client, index in engine.kept.items()}
            paid = self.runs.spent(run, number)
            spent = {index: paid.get(client, 0) for index, client in by_index.items()}
        indices = [engine.places.get(client) for client in request.clients.tolist()]
        return np.array(
            [
                k
                for k, index in enumerate(indices)
                if index is not None and (budgets is None or spent.get(index, 0) < budgets.uploads)
            ],
            np.int64,
        )


def check_received(known: Arrays, received: Arrays) -> None:
    """Refuse parameters with other dtypes or shapes than the initial ones."""
    for name, array in known.items():
        if name not in received:
            raise MessageError(f"the server sent no '{name}'")
        came = received[name]
        if (came.dtype, came.shape) != (array.dtype, array.shape):
            raise MessageError(
                f"'{name}' is {came.dtype}{came.shape}, not {array.dtype}{array.shape}"
            )


def _check_everybody(engine: Engine, request: TrainRequest) -> None:
    """Refuse to train some clients only: a sum over few clients would reveal their uploads.

    Clients with budgets of their own may have used them up, and add noise of their own.
    """
    if engine.plan.budgets is None and not np.isin(engine.training, request.clients).all():
        raise MessageError("the server asks for some of this node's clients, and it is all or none")


def _costs(plan: Plan, number: int) -> bool:
    """Return whether uploads of this round are charged to privacy budgets."""
    accounted = plan.event is not None or plan.budgets is not None
    return accounted and number not in plan.silent


def recommend(store: NodeDatabase, user: str, k: int = 10) -> list[Recommendation]:
    """Return the best k items that a user of this node has not touched.

    Interactions since the run count immediately. Users that came to the node since are folded in.
    """
    runs, number = NodeRuns(store), store.number_of(user)
    if number is None:
        raise ConfigError(f"{store.path} has no user '{user}': add what they touched first")
    served = runs.newest_model()
    if served is None:
        raise RunError(f"{store.path} has no model yet: it comes with the end of a run")
    run, request = served[0], EvaluationRequest.from_bytes(served[1])
    now = replace(run, upto=store.latest())
    engine = Engines(store, THIS_MACHINE).of(now, request.assignment)
    runs.load(run, engine.kept, engine.backend.store, selected=True)
    evaluator = engine.backend.evaluator
    assert evaluator is not None, "a node's backend has an evaluator"
    private = engine.backend.store
    model = evaluator.model(engine.backend.task.method, request.serving, private)
    history = None if number in run.members else store.items_of(number)
    return model.recommend(user, k, history)
