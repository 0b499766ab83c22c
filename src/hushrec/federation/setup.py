"""Everything a run needs before its first round: the task, the plan, the clients, the state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hushrec.config import find
from hushrec.data.splitting import Split
from hushrec.data.views import TrainView
from hushrec.errors import ConfigError
from hushrec.evaluation.evaluator import Evaluator
from hushrec.federation.backends.base import Simulation
from hushrec.federation.backends.simulation import Machine
from hushrec.federation.client import Task
from hushrec.federation.experiment import Experiment
from hushrec.federation.rounds import Server, State
from hushrec.methods.base import Method, SharesBudget
from hushrec.privacy.calibration import Schedule, gradient_noise_plan, make_plan, personal_budgets
from hushrec.privacy.config import check_declared, check_privacy, public_facts
from hushrec.privacy.plan import SILO, NoPlan, Plan
from hushrec.privacy.protection import Mechanism, Protection
from hushrec.private.store import PrivateStore
from hushrec.streams import SecretStreams, Streams, new_key


@dataclass(frozen=True)
class Prepared(Server):
    """A server whose clients are all in this process."""

    backend: Simulation


def make_task(
    experiment: Experiment,
    split: Split,
    protection: Protection = Protection(),  # noqa: B008 - a frozen value
    key: str | None = None,
) -> Task:
    """Return what clients and server agree on; without a ``key``, noise comes from a new one.

    A key is good for this experiment and this data only: used elsewhere, it gives other noise.
    """
    nobody = split.train_view(experiment.protocol).take(np.zeros(0, np.int64))
    return agreed_task(experiment, nobody, key or new_key(), split.digest(), protection)


def agreed_task(
    experiment: Experiment,
    nobody: TrainView,
    key: str,
    bound_to: str,
    protection: Protection = Protection(),  # noqa: B008 - a frozen value
) -> Task:
    """Return the task of whoever has this key, for noise of their own; ``nobody`` is public."""
    seeded = experiment.privacy.noise_seed
    secret = (
        SecretStreams.from_key(key, experiment.to_toml(), bound_to)
        if seeded is None
        else SecretStreams(seeded)
    )
    return Task(experiment.make_method(), protection, Streams(experiment.seed), secret, nobody)


def prepare(
    experiment: Experiment,
    split: Split,
    plan: Plan,
    machine: Machine,
    place: Path | None = None,
    key: str | None = None,
) -> tuple[Prepared, State]:
    """Return a server with everybody in this process, and its state before the first round.

    ``place`` is a folder for private parameters that outgrow the memory, ``key`` that of the noise
    of a run that goes on.
    """
    key = key or new_key()
    task = make_task(experiment, split, plan.protection, key)
    method, streams = task.method, task.streams
    if method.traits.pooled and experiment.cohort.kind != "all":
        raise ConfigError(f"{method.name} pools all data: cohort.kind must be 'all'")
    view = split.train_view(experiment.protocol)
    shared = method.init(view, streams)
    fields = method.private_fields(view, shared, streams)
    store = PrivateStore.create(fields, len(view.clients), experiment.store, place)
    tolerant, threads = experiment.privacy.promises, machine.n_threads
    evaluator = Evaluator(split, experiment.evaluation, streams, threads, tolerant)
    make_backend = find("backends", machine.backend)
    backend = make_backend(task, replace(view, noise=plan.deviations), store, evaluator, machine)
    server = Prepared(
        experiment, task, plan, population_of(experiment, split), backend, split.newcomers
    )
    protection, ledger = plan.protection.state, plan.first_ledger(len(view.clients))
    return server, State(shared, split.digest(), key, protection=protection, ledger=ledger)


def population_of(experiment: Experiment, split: Split) -> NDArray[np.int64]:
    """Return the clients that cohorts are drawn from; under privacy nobody's data decides it."""
    return split.member_clients if experiment.privacy.promises else split.training_clients


def plan_privacy(experiment: Experiment, split: Split) -> Plan:
    """Find how the run gives the privacy that is asked for, or refuse it."""
    config, method = experiment.privacy, experiment.make_method()
    clients = population_of(experiment, split)
    check_asked(experiment, len(clients))
    view, task = split.train_view(experiment.protocol), make_task(experiment, split)
    if not config.promises:
        return agreed_plan(experiment, task, len(clients))
    shared = method.init(view, task.streams)
    if any(not np.array_equal(array, task.initial[name]) for name, array in shared.items()):
        raise ConfigError(
            f"{method.name} starts from shared parameters that depend on the users' data, which no "
            "noise covers: use another method, or privacy.mode = none"
        )
    undeclared = check_declared(config, split.data, view.user_features)
    own = personal_budgets(config, view, split.data.users, clients)
    return agreed_plan(experiment, task, len(clients), own, undeclared)


def check_asked(experiment: Experiment, population: int) -> None:
    """Refuse what cannot be promised to so many clients, whatever their data."""
    config = experiment.privacy
    check_privacy(config, experiment.cohort, type(experiment.make_method()), population)
    dates = experiment.split.valid_from, experiment.split.test_from
    if config.promises and experiment.split.kind == "time" and None in dates:
        raise ConfigError(
            "a date that is a share of everybody's rows moves with each of them, and no noise "
            "covers what it lets into training: give split.valid_from and split.test_from, or "
            "another split.kind"
        )
    _check_looks(experiment)


def agreed_plan(
    experiment: Experiment,
    task: Task,
    population: int,
    own: NDArray[np.float64] | None = None,
    undeclared: tuple[str, ...] = (),
) -> Plan:
    """Find the plan from what everybody knows: a node comes to the same one as the server.

    ``own`` are the clients' personal budgets, by number, where they have any; ``undeclared`` is
    what everybody knows and should not, where that is accepted (`check_declared`).
    """
    config, method = experiment.privacy, task.method
    if not config.promises:
        return NoPlan(
            Protection().after(_layers(experiment, task)),
            pooled=method.traits.pooled,
            reveals=method.traits.reveals,
        )
    keeps_private = bool(method.private_fields(task.nobody, task.initial, task.streams))
    if config.on_sums and experiment.cohort.kind == "fixed" and keeps_private:
        raise ConfigError(
            f"{method.name} keeps private parameters, so what a client uploads depends on the "
            "rounds it was in, and the analysis of fixed-size cohorts does not cover that: use "
            "cohort.kind = poisson"
        )
    if config.mode == "local-gradients":
        plan = gradient_noise_plan(
            config, experiment.cohort, method, task.nobody, experiment.rounds, population
        )
    else:
        schedule = replace(
            upload_schedule(method, task, experiment.rounds),
            validation_rounds=experiment.evaluation.evaluation_rounds(experiment.rounds),
        )
        plan = make_plan(config, experiment.cohort, schedule, population, own)
    plan = replace(
        plan,
        protection=plan.protection.after(_layers(experiment, task)),
        public=_public(experiment, task, population, undeclared),
        undeclared=undeclared,
    )
    return plan if task.nobody.holders is None else replace(plan, unit=SILO)


def _public(
    experiment: Experiment, task: Task, population: int, undeclared: tuple[str, ...]
) -> tuple[str, ...]:
    """Name everything that a guarantee takes as known to everybody."""
    facts = [*public_facts(task.nobody, undeclared), f"the number of clients, {population:,}"]
    if experiment.split.kind == "time":
        facts.append("the dates of the split")
    return tuple(facts)


def _check_looks(experiment: Experiment) -> None:
    """Refuse that validation items, which are somebody's, decide anything that is not paid for."""
    config, privacy = experiment.evaluation, experiment.privacy
    if privacy.selection_share is None:
        if privacy.promises and config.patience:
            raise ConfigError(
                f"evaluation.patience = {config.patience} would let somebody's validation items "
                "end the run, which no noise covers: leave it out, and all rounds are run, or pay "
                "for looks with privacy.selection_share = 0.1"
            )
        return
    if config.users:
        raise ConfigError(
            f"evaluation.users = {config.users}: who is drawn depends on who else has validation "
            "items, so one user could move a look by more than their score: leave it out, or leave "
            "out privacy.selection_share"
        )
    if experiment.silos.kind != "none":
        raise ConfigError(
            "a silo would move a look by the scores of all its users: leave out "
            "privacy.selection_share, and the last round is shipped"
        )


def _layers(experiment: Experiment, task: Task) -> list[Mechanism]:
    """Make the layers of other packages, for the shape of the first round's uploads."""
    if not experiment.privacy.layers:
        return []
    shape = task.upload_shape(task.download(1, task.initial))
    return [find("mechanisms", name)(shape) for name in experiment.privacy.layers]


def upload_schedule(method: Method, task: Task, rounds: int) -> Schedule:
    """Return what is uploaded when: nobody's data decides it, so it is asked of no clients."""
    sent = task.download(1, task.initial)
    shapes = {
        number: task.upload_shape(replace(sent, round=number)) for number in range(1, rounds + 1)
    }
    shares, norm = (
        (method.budget_shares(), method.upload_norm)
        if isinstance(method, SharesBudget)
        else ((), None)
    )
    # Rounds that share a budget out say themselves that they upload, and each its own shape.
    speaking = {number: shape for number, shape in shapes.items() if shape.entries or shares}
    first = next(iter(speaking.values()), shapes[1])
    if not shares and any(shape != first for shape in speaking.values()):
        raise ConfigError(
            f"{method.name} uploads something else in some rounds than in others, which is not "
            "accounted for: use another method, or privacy.mode = none"
        )
    silent = frozenset(shapes.keys() - speaking.keys()) if speaking else frozenset()
    most = max(shape.entries for shape in shapes.values())
    if shares:  # what came out of a round may shape the next; pairs of items are the most there is
        most = max(most, task.nobody.n_items**2)
    return Schedule(first, rounds, silent, shares, norm, most)
