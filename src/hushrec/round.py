"""THE loop. Everything hushrec trains goes through here, one numbered round at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.backends.inprocess import InProcess, usable_cores
from hushrec.clients import TrainView
from hushrec.config import Experiment
from hushrec.errors import ConfigError, DivergedError, RunError, StoppedError
from hushrec.evaluate.evaluator import Evaluator, PartRanks
from hushrec.methods.base import Method, Private, Shared
from hushrec.methods.capabilities import SharesBudget, is_marked
from hushrec.privacy.accountant import Accountant
from hushrec.privacy.budgets import Ledger
from hushrec.privacy.config import check_privacy
from hushrec.privacy.guarantee import SILO, unprotected
from hushrec.privacy.plan import (
    Plan,
    make_plan,
    personal_budgets,
)
from hushrec.privacy.protection import Protection, UploadShape
from hushrec.rng import Round, SecretRound, SecretStreams, Streams
from hushrec.run_folder import FINAL, RunFolder
from hushrec.split import Part, Split
from hushrec.store import PrivateStore

CHECKPOINT_SECONDS = 20.0
LEDGER = "ledger"
"""File of a checkpoint with what each client spent."""


@dataclass(frozen=True)
class Machine:
    """What does not change a result: how many threads, how large the stacks, how often to save."""

    threads: int | None = None
    chunk: int | None = None
    checkpoint_seconds: float = CHECKPOINT_SECONDS

    def __post_init__(self) -> None:
        for name, value in (("threads", self.threads), ("chunk", self.chunk)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} = {value}: must be at least 1")

    @property
    def n_threads(self) -> int:
        """Number of threads to use."""
        return self.threads or usable_cores()


THIS_MACHINE = Machine()


@dataclass
class State:
    """All that a round changes; what a checkpoint holds."""

    shared: Shared
    store: PrivateStore
    data: str
    """Digest of the split; a checkpoint is of no use with another one."""
    round: int = 0
    selected_round: int = 0
    selected_value: float = -np.inf
    selected_shared: Shared = field(default_factory=dict)
    selected_store: PrivateStore | None = None
    stale_looks: int = 0
    up_bytes: int = 0
    down_bytes: int = 0
    seconds: float = 0.0
    account: list[dict[str, Any]] = field(default_factory=list)
    """History of the accountant: what the rounds so far cost."""
    protection: Mapping[str, float] = field(default_factory=dict)
    """What the mechanisms carry from round to round."""
    ledger: Ledger | None = None
    """What each client spent, where clients have budgets of their own."""

    NUMBERS = (
        "data",
        "round",
        "selected_round",
        "selected_value",
        "stale_looks",
        "up_bytes",
        "down_bytes",
        "seconds",
        "account",
        "protection",
    )


@dataclass(frozen=True)
class RoundReport:
    """What a progress display or a log wants to know of a round."""

    round: int
    rounds: int
    loss: float | None
    valid: Mapping[str, Mapping[str, float]] | None
    seconds: float
    selected_round: int
    selected_value: float


@dataclass(frozen=True)
class Outcome:
    """A trained model at its selected round, and where it put the held-out items."""

    method: Method
    shared: Shared
    store: PrivateStore
    evaluator: Evaluator
    ranks: Mapping[str, PartRanks]
    state: State
    privacy: Mapping[str, Any]
    """What the run guarantees, as summary.json says it."""


def run_rounds(
    experiment: Experiment,
    split: Split,
    plan: Plan | None,
    *,
    machine: Machine = THIS_MACHINE,
    folder: RunFolder | None = None,
    resume: bool = False,
    on_round: Callable[[RoundReport], None] = lambda report: None,
    should_stop: Callable[[], bool] = lambda: False,
    parts: tuple[Part, ...] = ("valid", "test"),
) -> Outcome:
    """Train to the end or an early stop; score the test items once, at the selected round.

    Without "test" among ``parts`` they are not scored at all.
    """
    streams = Streams(experiment.seed)
    method = experiment.make_method()
    if method.traits.pooled and experiment.cohort.kind != "all":
        raise ConfigError(f"{method.name} pools all data: cohort.kind must be 'all'")
    view = split.train_view(experiment.protocol)
    evaluator = Evaluator(split, experiment.evaluation, streams, machine.n_threads)

    shared = method.init(view, streams)
    fields = method.private_fields(view, shared, streams)
    place = folder.path if folder else None
    store = PrivateStore.create(fields, len(view.clients), experiment.store, place)
    stack = plan.stack if plan else Protection()
    state = State(shared, store, split.digest(), protection=stack.state)
    state.ledger = Ledger.empty(len(view.clients)) if plan and plan.budgets else None
    if folder and resume:
        restore(state, folder)
    stack, accountant = stack.with_state(state.protection), Accountant(state.account)
    if plan and plan.deviations is not None:
        view = replace(view, noise=plan.deviations)
    backend = InProcess(view, store, machine.threads, machine.chunk)

    saved_at = time.monotonic()
    while state.round < experiment.rounds and not _is_stale(state, experiment):
        began = time.perf_counter()
        number = state.round + 1
        # 1. Who takes part.
        drawn = experiment.cohort.draw(len(split.training_clients), streams, number)
        cohort = split.training_clients[drawn]
        if plan and plan.budgets and state.ledger and plan.uploads([number]):
            cohort, state.ledger = plan.budgets.admitted(state.ledger, cohort)
        # 2. Download, 3. fit, 4. protect, 5. sum: on the clients, whatever the backend.
        if plan and plan.shares:
            nobody = store.read(np.zeros(0, np.int64))
            shape = upload_shape(method, state.shared, nobody, view, streams, number)
            stack = stack.for_layout(shape)
        outcome = backend.run_clients(method, state.shared, stack, cohort, streams, number)
        # 6. Undo the server's side of the stack and apply the sum.
        total, stack = stack.finish(
            outcome.summed.total(), SecretRound(number, SecretStreams(experiment.seed))
        )
        if total.clients:
            state.shared = method.apply(state.shared, total)
        # 7. Account for the privacy and for the messages.
        if plan and plan.event is not None:
            for charged in plan.uploads([number]):
                accountant.record(plan.event_of(charged))
        state.account, state.protection = accountant.history(), stack.state
        if not method.traits.pooled:
            state.up_bytes += outcome.summed.up_bytes
            state.down_bytes += outcome.down_bytes
        state.round = number
        loss = _mean_loss(outcome.losses, number)
        # 8. Look at the validation items; the best look selects the round.
        valid = groups = None
        regular = number % experiment.evaluation.every == 0 or number == experiment.rounds
        if regular or is_marked(method, number) or is_marked(method, number + 1):
            ranks = evaluator.rank(method, state.shared, store, "valid")
            valid, groups = evaluator.summarise(ranks), evaluator.group_means(ranks)
            _select(state, evaluator.selection_value(ranks), regular)
        seconds = time.perf_counter() - began
        state.seconds += seconds
        # 9. Record, and save from time to time.
        if folder:
            folder.append_metrics(
                {
                    "round": number,
                    "clients": len(cohort),
                    "loss": loss,
                    "valid": valid,
                    "groups": groups,
                    "gates": evaluator.watch_gates(method, state.shared, store)
                    if is_marked(method, number)
                    else None,
                    "up_bytes": state.up_bytes,
                    "down_bytes": state.down_bytes,
                    "seconds": seconds,
                }
            )
        best = state.selected_round, state.selected_value
        on_round(RoundReport(number, experiment.rounds, loss, valid, seconds, *best))
        stopping = should_stop()  # asked once: what is said to be saved is saved
        if folder and (stopping or time.monotonic() - saved_at > machine.checkpoint_seconds):
            save(state, folder)
            saved_at = time.monotonic()
        if stopping and state.round < experiment.rounds:
            where = f"; go on with: --resume --out {folder.path}" if folder else ""
            raise StoppedError(f"stopped after round {number}{where}")

    selected = state.selected_store
    assert selected is not None, "the last round is always looked at"
    chosen = (method, state.selected_shared, selected)
    ranks_by_part: dict[str, PartRanks] = {part: evaluator.rank(*chosen, part) for part in parts}
    if folder:
        files = chain(_tensors("selected", *chosen[1:]), _ledger(state))
        folder.save_checkpoint(FINAL, _numbers(state), files)
    traits = method.traits
    privacy = (
        plan.statement(state.account, state.round, state.ledger)
        if plan
        else unprotected(pooled=traits.pooled, up_bytes=state.up_bytes, reveals=traits.reveals)
    )
    return Outcome(*chosen, evaluator, ranks_by_part, state, privacy)


def plan_privacy(experiment: Experiment, split: Split) -> Plan | None:
    """Find how the run gives the privacy that is asked for, or refuse it; None if none is."""
    config, cohort, method = experiment.privacy, experiment.cohort, experiment.make_method()
    population = len(split.training_clients)
    check_privacy(config, cohort, type(method), population)
    if config.mode == "none":
        return None
    view, streams = split.train_view(experiment.protocol), Streams(experiment.seed)
    nobody = np.zeros(0, np.int64)
    shared, unseen = method.init(view, streams), method.init(view.take(nobody), streams)
    if any(not np.array_equal(array, unseen[name]) for name, array in shared.items()):
        raise ConfigError(
            f"{method.name} starts from shared parameters that depend on the users' data, which no "
            "noise covers: use another method, or privacy.mode = none"
        )
    private = PrivateStore(method.private_fields(view, shared, streams), len(view.clients)).read(
        nobody
    )
    # Nobody's data decides what is uploaded when: it is asked of a stack of no clients.
    shapes = {
        number: upload_shape(method, shared, private, view, streams, number)
        for number in range(1, experiment.rounds + 1)
    }
    shares, upload_norm = (
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
    plan = make_plan(
        config,
        cohort,
        first,
        population,
        experiment.rounds,
        silent=frozenset(shapes.keys() - speaking.keys()) if speaking else frozenset(),
        own=personal_budgets(config, view, split.data.users, split.training_clients),
        shares=shares,
        upload_norm=upload_norm,
    )
    return plan if split.holders is None else replace(plan, unit=SILO)


def upload_shape(
    method: Method,
    shared: Shared,
    private: Private,
    view: TrainView,
    streams: Streams,
    number: int,
) -> UploadShape:
    """Return what everybody uploads in a round: it follows from what is sent to everybody.

    ``private`` is that of a stack of no clients.
    """
    nobody = view.take(np.zeros(0, np.int64))
    fitted = method.fit(method.download(shared), private, nobody, Round(number, streams))
    return UploadShape.of(fitted.update, view.n_items)


def save(state: State, folder: RunFolder) -> None:
    """Write a checkpoint from which the run can go on."""

    def files() -> Iterator[tuple[str, Mapping[str, NDArray[Any]]]]:
        yield from _tensors("current", state.shared, state.store)
        if state.selected_store is not None:
            yield from _tensors("selected", state.selected_shared, state.selected_store)
        yield from _ledger(state)

    folder.save_checkpoint(f"round-{state.round:06d}", _numbers(state), files())


def restore(state: State, folder: RunFolder) -> None:
    """Go back to the newest checkpoint, or to the start if there is none."""
    name = folder.checkpoint_name()
    if name == FINAL and (folder.path / "summary.json").exists():
        raise RunError(f"{folder.path} is finished; there is nothing to resume")
    if name is None:
        folder.rewind_metrics(0)
        return
    numbers = folder.read_checkpoint(name)
    if numbers.get("data") != state.data:
        raise RunError(f"{folder.path} was trained on other data than is given now")
    for key in State.NUMBERS:
        setattr(state, key, numbers[key])
    if state.ledger is not None:
        state.ledger = Ledger(**folder.read_tensors(name, f"{LEDGER}.safetensors"))
    if name != FINAL:  # else it died just before its summary: only the test is left to do
        state.shared = load_model(folder, name, "current", numbers["files"], state.store)
    if state.selected_round:
        state.selected_store = PrivateStore.beside(state.store)
        state.selected_shared = load_model(
            folder, name, "selected", numbers["files"], state.selected_store
        )
    folder.rewind_metrics(state.round)


def load_model(
    folder: RunFolder, name: str, role: str, files: Mapping[str, str], store: PrivateStore
) -> Shared:
    """Read the shared parameters of a checkpoint, and the private ones into a store."""
    for file in sorted(files):
        if file.startswith(f"{role}-private-"):
            store.restore(folder.read_tensors(name, file))
    return folder.read_tensors(name, f"{role}-shared.safetensors")


def _tensors(
    role: str, shared: Shared, store: PrivateStore
) -> Iterator[tuple[str, Mapping[str, NDArray[Any]]]]:
    yield f"{role}-shared", shared
    for number, part in enumerate(store.tensors()):
        yield f"{role}-private-{number:05d}", part


def _ledger(state: State) -> Iterator[tuple[str, Mapping[str, NDArray[Any]]]]:
    if state.ledger is not None:
        yield LEDGER, vars(state.ledger)


def _numbers(state: State) -> dict[str, Any]:
    return {key: getattr(state, key) for key in State.NUMBERS}


def _select(state: State, value: float, regular: bool) -> None:
    """Keep the best round; only regular looks count as stale, as patience is about those."""
    if value > state.selected_value:
        state.selected_round, state.selected_value = state.round, value
        state.selected_shared = state.shared
        state.selected_store = state.store.snapshot(state.selected_store)
        state.stale_looks = 0
    else:
        state.stale_looks += regular


def _is_stale(state: State, experiment: Experiment) -> bool:
    patience = experiment.evaluation.patience
    return 0 < patience <= state.stale_looks


def _mean_loss(losses: NDArray[np.float64], round_number: int) -> float | None:
    if not len(losses):
        return None
    loss = float(losses.mean())
    if not np.isfinite(loss):
        raise DivergedError(
            f"the training loss of round {round_number} is not a number: use a smaller lr"
        )
    return loss
