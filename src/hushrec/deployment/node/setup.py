"""A node's share of a run: its users, numbered as the server says, and what they train with.

Everything is worked out here, from the node's own agreement and data: the server says how many
clients there are, which numbers this node's have and, where clients have budgets, what is left of
theirs after rounding down. It cannot ask for less noise than the agreement has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hushrec.data.splitting import Share, Split, split_share
from hushrec.data.views import TrainView
from hushrec.deployment.node.database import NodeStore
from hushrec.deployment.node.runs import NodeRun
from hushrec.errors import MessageError
from hushrec.evaluation.evaluator import Evaluator
from hushrec.federation.backends.simulation import InProcess, Machine
from hushrec.federation.client import Task
from hushrec.federation.experiment import Experiment
from hushrec.federation.requests import Assignment
from hushrec.federation.setup import agreed_plan, agreed_task, check_asked
from hushrec.privacy.budgets import by_feature
from hushrec.privacy.plan import Plan
from hushrec.private import PrivateFields
from hushrec.private.store import PrivateStore
from hushrec.streams import Streams


@dataclass(frozen=True)
class Engine:
    """The node's clients, ready to train and to be looked at."""

    backend: InProcess
    plan: Plan
    places: Mapping[int, int]
    """Where each client is in the backend, by its number in the run."""
    kept: Mapping[int, int]
    """The same by its number in the store."""
    training: NDArray[np.int64]
    """Clients with something to train on, by their numbers in the run."""


def split_of(store: NodeStore, run: NodeRun, terms: Assignment | None = None) -> Split:
    """Split the node's own interactions; before there are terms, users are numbered from 0."""
    order = sorted(run.members, key=lambda user: run.members[user])
    places = np.array([run.members[user] for user in order], np.int64)
    data = store.interactions({user: k for k, user in enumerate(order)}, run.upto)
    if data is None:
        raise MessageError("this node holds no interaction with an item of the catalogue")
    own = np.array([run.clients[place] for place in places.tolist()], np.int64)
    if terms is None:
        numbers, clients, population = np.arange(len(places)), own, len(places)
    else:
        if places.max() >= len(terms.users) or own.max() >= len(terms.clients):
            raise MessageError("the server numbers fewer users than this node told it of")
        numbers, clients = terms.users[places], terms.clients[own]
        population = terms.population
    holders = clients.astype(np.int32) if store.agreement.silos else None
    experiment = store.agreement.experiment
    share = Share(numbers, population, holders)
    return split_share(data, experiment.split, Streams(experiment.seed), share)


def task_of(store: NodeStore, terms: Assignment) -> tuple[Task, Plan]:
    """Return what the node's clients train by, from the agreement and what the server says."""
    experiment = store.agreement.experiment
    check_asked(experiment, terms.training)
    task = agreed_task(experiment, store.agreement.nobody, store.noise_key, terms.run)
    plan = agreed_plan(experiment, task, terms.training, _told_budgets(experiment, terms))
    return replace(task, protection=plan.protection), plan


@dataclass(frozen=True)
class Ready:
    """All that an engine is made of but the private parameters."""

    task: Task
    plan: Plan
    view: TrainView
    fields: PrivateFields
    evaluator: Evaluator
    training: NDArray[np.int64]


class Engines:
    """Makes the engine for a message.

    What it is made of stays the same during a run, unless somebody is forgotten, so it is kept for
    the next message; private parameters are read from the file each time.
    """

    def __init__(self, store: NodeStore, machine: Machine) -> None:
        self.store = store
        self.machine = machine
        self._kept: tuple[object, Ready] | None = None

    def of(self, run: NodeRun, terms: Assignment) -> Engine:
        """Make everything ready but the private parameters."""
        key = run.id, terms.digest, run.upto, run.members, run.clients
        if self._kept is None or self._kept[0] != key:
            self._kept = key, self._ready(run, terms)
        ready, experiment = self._kept[1], self.store.agreement.experiment
        view = ready.view
        private = PrivateStore.create(ready.fields, len(view.clients), experiment.store, None)
        backend = InProcess(ready.task, view, private, ready.evaluator, self.machine)
        places = {number: place for place, number in enumerate(view.clients.tolist())}
        kept = {
            client: places[number]
            for client, number in enumerate(terms.clients.tolist())
            if number in places
        }
        return Engine(backend, ready.plan, places, kept, ready.training)

    def _ready(self, run: NodeRun, terms: Assignment) -> Ready:
        agreement = self.store.agreement
        experiment = agreement.experiment
        split = split_of(self.store, run, terms)
        view = split.train_view(experiment.protocol)
        task, plan = task_of(self.store, terms)
        _check_budgets(experiment, view, terms)
        deviations = None if plan.deviations is None else plan.deviations[view.clients]
        fields = task.method.private_fields(view, task.initial, task.streams)
        tolerant, threads = experiment.privacy.promises, self.machine.n_threads
        evaluator = Evaluator(split, experiment.evaluation, task.streams, threads, tolerant)
        training = split.training_clients
        numbers = training if agreement.silos else view.clients[training].astype(np.int64)
        return Ready(task, plan, replace(view, noise=deviations), fields, evaluator, numbers)


def activity_of(view: TrainView) -> NDArray[np.int64]:
    """Count the training interactions of each client."""
    return np.diff(view.positives.indptr[view.client_indptr])


def declared_by(experiment: Experiment, split: Split) -> NDArray[np.float64]:
    """Return the budgets that users declare; those who do not train declare none."""
    feature = experiment.privacy.budget_feature
    assert feature is not None, "checked"
    features = split.train.user_features
    return by_feature(features, feature, split.data.users, split.members)


def _told_budgets(experiment: Experiment, terms: Assignment) -> NDArray[np.float64] | None:
    """Return everybody's budgets as far as a node needs them: its own, and the largest."""
    if (terms.epsilon is None) != (experiment.privacy.budgets is None):
        raise MessageError("the server and this node do not agree on who has a budget")
    if terms.epsilon is None:
        return None
    own = np.zeros(terms.population + 1)
    own[terms.clients], own[-1] = terms.epsilon, terms.largest_epsilon
    return own


def _check_budgets(experiment: Experiment, view: TrainView, terms: Assignment) -> None:
    """Refuse budgets that were not agreed."""
    config, own = experiment.privacy, _told_budgets(experiment, terms)
    if own is None or terms.epsilon is None:
        return
    if config.budgets == "activity":
        assert config.epsilon_min is not None and config.epsilon_max is not None, "checked"
        kept = (terms.epsilon == 0) | (terms.epsilon >= config.epsilon_min)
        if not kept.all() or terms.largest_epsilon > config.epsilon_max:
            raise MessageError("the server gives budgets outside of the agreed range")
    else:
        assert config.budget_feature is not None, "checked"
        declared = view.user_features[config.budget_feature]
        limit = np.nan_to_num(np.asarray(declared.values, np.float64))  # type: ignore[union-attr]
        if (own[view.clients] > limit).any():
            raise MessageError("the server gives a client a larger budget than it declared")
