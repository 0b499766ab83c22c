"""A node's share of a run: its users, the backend they train in, training and recommendations.

Everything is worked out from the node's own contract and data. The server says how many clients
there are, which numbers the clients of this node have and, where clients have personal budgets,
what those are after rounding down. It cannot ask for less noise than the contract has. The caller
stores the results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import Evaluation, UploadShape
from hushrec.data.splitting import Share, Split, split_share
from hushrec.data.views import TrainView
from hushrec.deployment.node.database import NodeDatabase
from hushrec.deployment.node.runs import FinishedRound, NodeRun, NodeRuns
from hushrec.errors import ConfigError, MessageError, RunError
from hushrec.evaluation.evaluator import Evaluator
from hushrec.federation.backends import THIS_MACHINE, InProcess, Machine
from hushrec.federation.requests import Assignment, EvaluationRequest, TrainRequest
from hushrec.federation.setup import Setup, set_up_public
from hushrec.federation.sums import NodeSum, round_shape
from hushrec.io.codec import Arrays
from hushrec.private import PrivateFields, PrivateStore
from hushrec.serving.data import Recommendation
from hushrec.serving.model import Model
from hushrec.streams import SecretRound, Streams

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Engine:
    """The node's clients, ready to train and to be evaluated, but for the private parameters."""

    setup: Setup
    view: TrainView
    fields: PrivateFields
    evaluator: Evaluator
    indices: Mapping[int, int]
    """Index of each client in the backend, by its number in the run."""
    kept: Mapping[int, int]
    """The same index by the client's number in the store."""
    training: Numbers
    """Clients with something to train on, by their numbers in the run."""

    def backend(self, machine: Machine) -> InProcess:
        """Return a backend with empty private parameters."""
        kind = self.setup.experiment.store
        private = PrivateStore.create(self.fields, len(self.view.clients), kind, None)
        return InProcess(self.setup.task, self.view, private, self.evaluator, machine)

    def costs(self, number: int) -> bool:
        """Return whether uploads of this round are charged to privacy budgets."""
        plan = self.setup.plan
        accounted = plan.event is not None or plan.budgets is not None
        return accounted and number not in plan.silent


def split_of(store: NodeDatabase, run: NodeRun, assignment: Assignment | None = None) -> Split:
    """Split the node's own interactions; without an assignment, users are numbered from 0."""
    order = sorted(run.members, key=run.members.__getitem__)
    indices = np.array([run.members[user] for user in order], np.int64)
    data = store.interactions({user: k for k, user in enumerate(order)}, run.upto)
    if data is None:
        raise MessageError("this node holds no interaction with an item of the catalogue")
    clients = np.array([run.clients[index] for index in indices.tolist()], np.int64)
    numbers, population = np.arange(len(indices)), len(indices)
    if assignment is not None:
        if indices.max() >= len(assignment.users) or clients.max() >= len(assignment.clients):
            raise MessageError("the server numbers fewer users than this node has enrolled")
        numbers, clients = assignment.users[indices], assignment.clients[clients]
        population = assignment.population
    experiment, silos = store.contract.experiment, store.contract.silos
    share = Share(numbers, population, clients.astype(np.int32) if silos else None)
    return split_share(data, experiment.split, Streams(experiment.seed), share)


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


class NodeTrainer:
    """Trains and evaluates the node's clients.

    The setup is worked out once for a run, and the split once unless a user is removed; private
    parameters are read from the file for each message.
    """

    def __init__(self, runs: NodeRuns, machine: Machine) -> None:
        self.runs = runs
        self.store = runs.store
        self.machine = machine
        self._setup: tuple[str, Setup] | None = None
        self._engine: tuple[object, Engine] | None = None

    def setup(self, assignment: Assignment) -> Setup:
        """Return the setup of a run, from the contract and the server's assignment."""
        digest = assignment.digest
        if self._setup is None or self._setup[0] != digest:
            contract, key = self.store.contract, self.store.noise_key
            experiment, public, run = contract.experiment, contract.public, assignment.run
            clients, budgets = assignment.training, _told_budgets(self.store, assignment)
            setup = set_up_public(experiment, public, key, run, clients, budgets)
            self._setup = digest, setup
        return self._setup[1]

    def engine(self, run: NodeRun, assignment: Assignment) -> Engine:
        """Return the node's clients in a run; they are kept until its users change."""
        key = run.id, assignment.digest, run.upto, run.members, run.clients
        if self._engine is not None and self._engine[0] == key:
            return self._engine[1]
        contract, split = self.store.contract, split_of(self.store, run, assignment)
        experiment, setup = contract.experiment, self.setup(assignment)
        task, deviations = setup.task, setup.plan.deviations
        view = split.train_view(experiment.protocol)
        _check_budgets(self.store, view, assignment)
        fields = task.method.private_fields(view, task.initial, task.streams)
        tolerant, threads = experiment.privacy.promises, self.machine.n_threads
        evaluator = Evaluator(split, experiment.evaluation, task.streams, threads, tolerant)
        training = split.training_clients
        numbers = training if contract.silos else view.clients[training].astype(np.int64)
        indices = {number: index for index, number in enumerate(view.clients.tolist())}
        assigned = enumerate(assignment.clients.tolist())
        kept = {client: indices[number] for client, number in assigned if number in indices}
        if deviations is not None:
            view = replace(view, noise=deviations[view.clients])
        engine = Engine(setup, view, fields, evaluator, indices, kept, numbers)
        self._engine = key, engine
        return engine

    def shape(self, request: TrainRequest) -> UploadShape:
        """Return the shape of a sum of this round, which depends on no client's data."""
        task = self.setup(request.assignment).task
        phase = task.method.phase_of(request.download.round)
        check_received(phase.download(task.initial), request.download.common)
        common = request.download.to(np.zeros(0, np.int64))
        return round_shape(task, task.protection_of(common), request.download)

    def train(
        self, run: NodeRun, request: TrainRequest, digest: str, share: str | None = None
    ) -> tuple[NodeSum, FinishedRound]:
        """Train the requested clients whose privacy budget allows another upload.

        ``digest`` is that of the request. ``share`` names the random stream of this node's share of
        distributed noise, which is added to the sum. The result is to be stored with its reply.
        """
        engine, number = self.engine(run, request.assignment), request.download.round
        backend, task = engine.backend(self.machine), engine.setup.task
        check_received(task.method.phase_of(number).download(task.initial), request.download.common)
        complete = np.isin(engine.training, request.clients).all()
        # A secure sum over few clients would reveal their uploads. Clients with budgets of their
        # own may have used them up, and add noise of their own.
        personal = engine.setup.plan.budgets is not None
        if self.store.contract.secure is not None and not personal and not complete:
            raise MessageError("the server asks for some of this node's clients: it must be all")
        able = self._affordable(run, engine, request)
        # The backend knows its clients by index, and takes them in ascending order.
        indices = np.array([engine.indices[c] for c in request.clients[able].tolist()], np.int64)
        order = np.argsort(indices)
        download = request.download.to(able[order])
        here = set(indices.tolist())
        clients = {client: index for client, index in engine.kept.items() if index in here}
        self.runs.load(run, clients, backend.store)
        protection = task.protection_of(download.to(able[:0]))
        found = backend.train(download, protection, indices[order])
        summed = NodeSum(run.id, number, found.summed, found.loss, found.up_bytes, found.zeroed_out)
        selected, charged = max(run.selected, request.selected), engine.costs(number)
        done = FinishedRound(number, selected, digest, b"", backend.store, clients, charged)
        if share is not None:
            for steps in protection.shares(SecretRound(number, task.secret).of(share)):
                summed.summed.add_steps(steps)
        return summed, done

    def evaluate(self, run: NodeRun, request: EvaluationRequest) -> Evaluation:
        """Evaluate the node's users with the newest or the selected private parameters."""
        run = self.runs.select(run, request.selected)
        engine = self.engine(run, request.assignment)
        backend, serving = engine.backend(self.machine), request.serving
        check_received(backend.task.method.serving(backend.task.initial), serving)
        self.runs.load(run, engine.kept, backend.store, selected=request.with_selected)
        evaluation = backend.evaluate(serving, request.part)
        if request.with_selected:
            self.runs.keep_model(run, request.to_bytes())
        return evaluation

    def keep_model(self, run: NodeRun, request: EvaluationRequest) -> None:
        """Keep the model of a run whose last evaluation this node was not in."""
        run = self.runs.select(run, request.selected)
        task = self.engine(run, request.assignment).backend(self.machine).task
        check_received(task.method.serving(task.initial), request.serving)
        self.runs.keep_model(run, request.to_bytes())

    def _affordable(self, run: NodeRun, engine: Engine, request: TrainRequest) -> Numbers:
        """Return which requested clients are here and have budget left, by the ledger."""
        budgets, number = engine.setup.plan.budgets, request.download.round
        spent: Mapping[int, int] = {}
        if budgets is not None and engine.costs(number):
            paid = self.runs.spent(run, number)
            spent = {index: paid.get(client, 0) for client, index in engine.kept.items()}
        indices = [engine.indices.get(client) for client in request.clients.tolist()]
        most = math.inf if budgets is None else budgets.uploads
        able = [k for k, i in enumerate(indices) if i is not None and spent.get(i, 0) < most]
        return np.array(able, np.int64)


def check_received(known: Arrays, received: Arrays) -> None:
    """Refuse parameters with other dtypes or shapes than the initial ones."""
    for name, own in known.items():
        if name not in received:
            raise MessageError(f"the server sent no '{name}'")
        sent = received[name]
        if (sent.dtype, sent.shape) != (own.dtype, own.shape):
            raise MessageError(f"'{name}' is {sent.dtype}{sent.shape}, not {own.dtype}{own.shape}")


def recommend(store: NodeDatabase, user: str, k: int = 10) -> list[Recommendation]:
    """Return the best k items that a user of this node has not touched.

    Interactions since the run count immediately. Users that came to the node since are folded in.
    """
    model, history = _served(store, user)
    return model.recommend(user, k, history)


def model_of(store: NodeDatabase, user: str) -> Model:
    """Return the model of a user of this node, with what the user touched until now."""
    model, new = _served(store, user)
    if new is not None:
        raise ConfigError(
            f"user '{user}' came to {store.path} after its last run: their parameters are made in "
            "the next one"
        )
    return model


def _served(store: NodeDatabase, user: str) -> tuple[Model, list[str] | None]:
    """Return the model of the last run and, of a user that came since, the history."""
    runs, number = NodeRuns(store), store.number_of(user)
    if number is None:
        raise ConfigError(f"{store.path} has no user '{user}': add what they touched first")
    served = runs.newest_model()
    if served is None:
        raise RunError(f"{store.path} has no model yet: it comes with the end of a run")
    run, request = served[0], EvaluationRequest.from_bytes(served[1])
    now = replace(run, upto=store.latest())
    engine = NodeTrainer(runs, THIS_MACHINE).engine(now, request.assignment)
    private = engine.backend(THIS_MACHINE).store
    runs.load(run, engine.kept, private, selected=True)
    model = engine.evaluator.model(engine.setup.task.method, request.serving, private)
    return model, None if number in run.members else store.items_of(number)
