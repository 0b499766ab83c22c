"""Everything a run needs before its first round: the task, the plan, the clients, the state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hushrec.backends.base import Simulation
from hushrec.backends.inprocess import Machine
from hushrec.client import Task
from hushrec.config import Experiment
from hushrec.errors import ConfigError
from hushrec.evaluate.evaluator import Evaluator
from hushrec.methods.base import Method
from hushrec.methods.capabilities import SharesBudget
from hushrec.privacy.calibrate import Schedule, make_plan, personal_budgets
from hushrec.privacy.config import check_privacy
from hushrec.privacy.guarantee import SILO
from hushrec.privacy.plan import NoPlan, Plan
from hushrec.privacy.protection import Mechanism, Protection
from hushrec.registry import find
from hushrec.rng import SecretStreams, Streams, new_key
from hushrec.round import Server, State
from hushrec.split import Split
from hushrec.store import PrivateStore


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
    seeded = experiment.privacy.noise_seed
    if seeded is None:
        bound_to = experiment.to_toml(), split.digest()
        secret = SecretStreams.from_key(key or new_key(), *bound_to)
    else:
        secret = SecretStreams(seeded)
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
    server = Prepared(experiment, task, plan, split.training_clients, backend, split.newcomers)
    protection, ledger = plan.protection.state, plan.first_ledger(len(view.clients))
    return server, State(shared, split.digest(), key, protection=protection, ledger=ledger)


def plan_privacy(experiment: Experiment, split: Split) -> Plan:
    """Find how the run gives the privacy that is asked for, or refuse it."""
    config, cohort, method = experiment.privacy, experiment.cohort, experiment.make_method()
    population = len(split.training_clients)
    check_privacy(config, cohort, type(method), population)
    dates = experiment.split.valid_from, experiment.split.test_from
    if config.promises and experiment.split.kind == "time" and None in dates:
        raise ConfigError(
            "a date that is a share of everybody's rows moves with each of them, and no noise "
            "covers what it lets into training: give split.valid_from and split.test_from, or "
            "another split.kind"
        )
    view, task = split.train_view(experiment.protocol), make_task(experiment, split)
    if not config.promises:
        return NoPlan(
            Protection().after(_layers(experiment, task)),
            pooled=method.traits.pooled,
            reveals=method.traits.reveals,
        )
    shared = method.init(view, task.streams)
    if any(not np.array_equal(array, task.initial[name]) for name, array in shared.items()):
        raise ConfigError(
            f"{method.name} starts from shared parameters that depend on the users' data, which no "
            "noise covers: use another method, or privacy.mode = none"
        )
    schedule = upload_schedule(method, task, experiment.rounds)
    own = personal_budgets(config, view, split.data.users, split.training_clients)
    plan = make_plan(config, cohort, schedule, population, own)
    plan = replace(plan, protection=plan.protection.after(_layers(experiment, task)))
    return plan if split.holders is None else replace(plan, unit=SILO)


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
        number: task.upload_shape(replace(sent, round=number)).require_closed()
        for number in range(1, rounds + 1)
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
    return Schedule(first, rounds, silent, shares, norm)
