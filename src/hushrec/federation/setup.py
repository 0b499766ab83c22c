"""Builds everything a run needs before its first round, each part once.

`Setup` holds what follows from the experiment and from public data: the method, the public view,
the secret streams and the privacy plan. The coordinator and every node of a federation build it
with `set_up_public`, and come to the same plan. `set_up` adds the data of a split, which a
simulation holds as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hushrec.config import find
from hushrec.data.splitting import Split
from hushrec.data.views import TrainView
from hushrec.errors import ConfigError
from hushrec.evaluation.evaluator import Evaluator
from hushrec.federation.backends import THIS_MACHINE, Machine, Simulation
from hushrec.federation.client import NO_CLIENTS, Task
from hushrec.federation.experiment import Experiment
from hushrec.federation.rounds import ServerState, Training
from hushrec.methods.base import Method, Shared
from hushrec.methods.relations import Relates
from hushrec.privacy.budgets import personal_budgets
from hushrec.privacy.calibration import gradient_noise_plan, make_plan
from hushrec.privacy.config import check_declared, check_privacy, public_facts
from hushrec.privacy.plan import SILO, NoPlan, Plan, Schedule
from hushrec.privacy.protection import Mechanism, Protection
from hushrec.private import PrivateStore
from hushrec.streams import SecretStreams, Streams, new_key


@dataclass(frozen=True)
class SimulatedTraining(Training):
    """A training whose clients are all in this process."""

    backend: Simulation


@dataclass(frozen=True)
class Setup:
    """The method, its public view and the privacy plan of a run."""

    experiment: Experiment
    task: Task
    plan: Plan
    key: str = field(repr=False)
    """Of the noise; good for this experiment and this data only: elsewhere it gives other noise."""
    data: str
    """Digest of the data, to which the key is bound."""

    def first_state(self, n_clients: int, shared: Shared | None = None) -> ServerState:
        """Return the server's state before the first round."""
        return ServerState(
            self.task.initial if shared is None else shared,
            self.data,
            self.key,
            protection=self.plan.protection.state,
            ledger=self.plan.first_ledger(n_clients),
        )


@dataclass(frozen=True)
class SimulationSetup(Setup):
    """The setup of a run whose users are all in one split."""

    split: Split
    view: TrainView
    """Training view of all clients."""
    clients: NDArray[np.int64]
    """The population that cohorts are drawn from."""
    shared: Shared
    """The shared parameters before the first round."""

    def start(
        self, machine: Machine = THIS_MACHINE, scratch: Path | None = None, key: str | None = None
    ) -> tuple[SimulatedTraining, ServerState]:
        """Return the training with its backend, and the state before the first round.

        ``scratch`` is a folder for private parameters that outgrow the memory; ``key`` is that of
        the noise of a run that is resumed.
        """
        if key is not None:
            secret = _secret_streams(self.experiment, key, self.data)
            changed = replace(self, key=key, task=replace(self.task, secret=secret))
            return changed.start(machine, scratch)
        experiment, task, plan = self.experiment, self.task, self.plan
        fields = task.method.private_fields(self.view, self.shared, task.streams)
        n_clients = len(self.view.clients)
        store = PrivateStore.create(fields, n_clients, experiment.store, scratch)
        tolerant, threads = experiment.privacy.promises, machine.n_threads
        evaluator = Evaluator(self.split, experiment.evaluation, task.streams, threads, tolerant)
        view = replace(self.view, noise=plan.deviations)
        backend = find("backends", machine.backend)(task, view, store, evaluator, machine)
        parts = experiment, task, plan, self.clients, backend, self.split.newcomers
        return SimulatedTraining(*parts), self.first_state(n_clients, self.shared)


def set_up(experiment: Experiment, split: Split) -> SimulationSetup:
    """Work out the setup of a simulation; refuse what cannot be drawn or guaranteed."""
    config, method = experiment.privacy, experiment.make_method()
    clients = split.member_clients if config.promises else split.training_clients
    if method.traits.pooled and experiment.cohort.kind != "all":
        raise ConfigError(f"{method.name} pools all data: cohort.kind must be 'all'")
    if method.traits.reads_times and not split.data.has_time:
        raise ConfigError(
            f"{method.name} needs to know when items were touched, and {split.data.name} has no "
            "times: use popularity, or data with times"
        )
    experiment.cohort.draw(len(clients), Streams(experiment.seed), 1)
    check_supported(experiment, type(method), len(clients))
    view, data, key = split.train_view(experiment.protocol), split.digest(), new_key()
    task = _task(experiment, method, view.take(NO_CLIENTS), key, data)
    shared = method.init(view, task.streams)
    budgets: NDArray[np.float64] | None = None
    undeclared: tuple[str, ...] = ()
    if config.promises:
        if any(not np.array_equal(array, task.initial[name]) for name, array in shared.items()):
            raise ConfigError(
                f"{method.name} starts from shared parameters that depend on the users' data, "
                "which no noise covers: use another method, or privacy.mode = none"
            )
        undeclared = check_declared(config, split.data, view.user_features)
        budgets = personal_budgets(config, view, split.data.users, clients)
    plan = _find_plan(experiment, task, len(clients), budgets, undeclared)
    task = replace(task, protection=plan.protection)
    return SimulationSetup(experiment, task, plan, key, data, split, view, clients, shared)


def set_up_public(
    experiment: Experiment,
    public: TrainView,
    key: str,
    data: str,
    population: int,
    budgets: NDArray[np.float64] | None = None,
) -> Setup:
    """Work out the setup from what is public: a node comes to the same one as the coordinator.

    ``key`` is the own one of whoever calls, and ``data`` a digest that it is bound to. ``budgets``
    are the clients' personal budgets, by number, where they have any.
    """
    method = experiment.make_method()
    check_supported(experiment, type(method), population)
    task = _task(experiment, method, public, key, data)
    plan = _find_plan(experiment, task, population, budgets)
    return Setup(experiment, replace(task, protection=plan.protection), plan, key, data)


def make_task(
    experiment: Experiment,
    split: Split,
    protection: Protection = Protection(),  # noqa: B008 - a frozen value
    key: str | None = None,
) -> Task:
    """Return the task of a simulation with another protection or key than its run had."""
    public = split.train_view(experiment.protocol).take(NO_CLIENTS)
    task = _task(experiment, experiment.make_method(), public, key or new_key(), split.digest())
    return replace(task, protection=protection)


def _task(experiment: Experiment, method: Method, public: TrainView, key: str, data: str) -> Task:
    secret = _secret_streams(experiment, key, data)
    return Task(method, Protection(), Streams(experiment.seed), secret, public)


def _secret_streams(experiment: Experiment, key: str, data: str) -> SecretStreams:
    seeded = experiment.privacy.noise_seed
    if seeded is not None:
        return SecretStreams(seeded)
    return SecretStreams.from_key(key, experiment.to_toml(), data)


def check_supported(experiment: Experiment, method: type[Method], population: int) -> None:
    """Refuse what cannot be guaranteed to so many clients, whatever their data."""
    config, evaluation = experiment.privacy, experiment.evaluation
    check_privacy(config, experiment.cohort, method, population)
    if experiment.split.next_basket and not method.traits.repeats:
        raise ConfigError(
            f"{method.name} scores items that a user does not have yet, and a next basket holds "
            "items that are bought again: use fedmix or personal-frequency, or another split.kind"
        )
    dates, dated = (experiment.split.valid_from, experiment.split.test_from), _dated(experiment)
    if config.promises and dated and None in dates:
        raise ConfigError(
            "a date that is a share of everybody's rows moves with each of them, and no noise "
            "covers what it lets into training: give split.valid_from and split.test_from, or "
            "another split.kind"
        )
    # Validation queries that select or stop are charged to the privacy budget.
    if config.selection_share is None:
        if config.promises and evaluation.patience:
            raise ConfigError(
                f"evaluation.patience = {evaluation.patience} would let users' validation items "
                "end the run, which no noise covers: leave it out, and all rounds are run, or "
                "charge the validation queries to the budget with privacy.selection_share = 0.1"
            )
        return
    if evaluation.users:
        raise ConfigError(
            f"evaluation.users = {evaluation.users}: who is drawn depends on who else has "
            "validation items, so one user could move a validation query by more than their "
            "score: leave it out, or leave out privacy.selection_share"
        )
    if experiment.silos.kind != "none":
        raise ConfigError(
            "a silo would move a validation query by the scores of all its users: leave out "
            "privacy.selection_share, and the last round is shipped"
        )


def _find_plan(
    experiment: Experiment,
    task: Task,
    population: int,
    budgets: NDArray[np.float64] | None,
    undeclared: tuple[str, ...] = (),
) -> Plan:
    """Find the privacy plan; ``undeclared`` are facts from people's rows (`check_declared`)."""
    config, method, rounds = experiment.privacy, task.method, experiment.rounds
    cohort, validation = experiment.cohort, experiment.evaluation.evaluation_rounds(rounds)
    if not config.promises:
        traits, protection = method.traits, Protection().after(_layers(experiment, task))
        singly = isinstance(method, Relates)
        return NoPlan(protection, pooled=traits.pooled, reveals=traits.reveals, seen_singly=singly)
    keeps_private = bool(method.private_fields(task.public, task.initial, task.streams))
    if config.on_sums and cohort.kind == "fixed" and keeps_private:
        raise ConfigError(
            f"{method.name} keeps private parameters, so what a client uploads depends on the "
            "rounds it was in, and the analysis of fixed-size cohorts does not cover that: use "
            "cohort.kind = poisson"
        )
    if config.mode == "local-gradients":
        plan = gradient_noise_plan(config, cohort, method, task.public, rounds, population)
    else:
        schedule = replace(upload_schedule(task, rounds), validation_rounds=validation)
        plan = make_plan(config, cohort, schedule, population, budgets)
    public = [*public_facts(task.public, undeclared), f"the number of clients, {population:,}"]
    if _dated(experiment):
        public.append("the dates of the split")
    plan = replace(
        plan,
        protection=plan.protection.after(_layers(experiment, task)),
        public=tuple(public),
        undeclared=undeclared,
    )
    return plan if task.public.holders is None else replace(plan, unit=SILO)


def _dated(experiment: Experiment) -> bool:
    """Say whether dates decide what is held out."""
    return experiment.split.kind == "time" and experiment.split.hold_out


def _layers(experiment: Experiment, task: Task) -> list[Mechanism]:
    """Make the mechanisms of other packages, for the shape of the first round's uploads."""
    if not experiment.privacy.layers:
        return []
    config = experiment.privacy
    if config.mode == "local-gradients":
        raise ConfigError(
            "under local-gradients an upload already carries its noise, and a layer could put the "
            "client's data back: leave out privacy.layers, or use privacy.mode = local-gaussian"
        )
    shape = task.upload_shape(task.download(1, task.initial))
    layers = [find("mechanisms", name)(shape) for name in config.layers]
    for name, layer in zip(config.layers, layers, strict=True):
        if config.on_sums and type(layer).receive is not Mechanism.receive:
            raise ConfigError(
                f"layer '{name}' weights uploads after they are clipped, so the sum has no bound: "
                "leave it out, or use privacy.mode = local-gaussian"
            )
    return layers


def upload_schedule(task: Task, rounds: int) -> Schedule:
    """Return the upload shape of every round, which the public view alone decides."""
    method = task.method
    downloads = (task.download(number, task.initial) for number in range(1, rounds + 1))
    shapes = {download.round: task.upload_shape(download) for download in downloads}
    shares = method.budget_shares
    # Rounds that share out a budget all upload, each with a shape of its own.
    uploading = {number: shape for number, shape in shapes.items() if shape.entries or shares}
    first = next(iter(uploading.values()), shapes[1])
    if not shares and any(shape != first for shape in uploading.values()):
        raise ConfigError(
            f"{method.name} uploads something else in some rounds than in others, which is not "
            "accounted for: use another method, or privacy.mode = none"
        )
    silent = frozenset(shapes.keys() - uploading.keys()) if uploading else frozenset()
    most = max(shape.entries for shape in shapes.values())
    if shares:  # a round's sum may decide the next shape; pairs of items are the largest one
        most = max(most, task.public.n_items**2)
    return Schedule(first, rounds, silent, shares, method.upload_norm, most)
