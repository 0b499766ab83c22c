"""THE loop. Everything hushrec trains goes through here, one numbered round at a time.

This is the server's side of a run. It knows the shared parameters, the account and what the clients
send; where the clients are is the backend's affair, and where anything is written the journal's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from threadpoolctl import ThreadpoolController

from hushrec.aggregation.statistics import Evaluation, LossSum
from hushrec.errors import DivergedError, StoppedError
from hushrec.evaluation.evaluator import EvaluationConfig
from hushrec.federation.backends.base import Backend
from hushrec.federation.client import Task
from hushrec.federation.experiment import Experiment
from hushrec.io.stored import Count, Metrics, Number, Positive, Stored, Tables
from hushrec.methods.base import Shared, is_marked, stage_of
from hushrec.privacy.budgets import Ledger
from hushrec.privacy.plan import Plan
from hushrec.streams import SecretRound, SecretStreams, Streams

SelectedBy = Literal["validation", "noised validation", "last round"]
ALGEBRA_THREADS = 2
"""Of the server's linear algebra, on every machine: its last bits depend on their number."""


@dataclass
class ServerState:
    """All that a round changes on the server; what a checkpoint holds."""

    shared: Shared
    data: str
    """Digest of the split; a checkpoint is of no use with another one."""
    key: str | None = None
    """Of the noise: as long as the run goes on, so that it can go on with the same."""
    round: int = 0
    selected_round: int = 0
    selected_value: float = -np.inf
    selected_shared: Shared = field(default_factory=dict)
    stale_looks: int = 0
    up_bytes: int = 0
    down_bytes: int = 0
    seconds: float = 0.0
    account: Sequence[Mapping[str, Any]] = ()
    """History of the accountant: what the rounds so far cost."""
    protection: Mapping[str, float] = field(default_factory=dict)
    """What the mechanisms carry from round to round."""
    ledger: Ledger | None = None
    """What each client spent, where clients have budgets of their own."""

    def select(self, value: float, *, regular: bool) -> bool:
        """Keep this round if it is the best so far, and say whether it is.

        Only regular looks count as stale: patience is about those.
        """
        better = value > self.selected_value
        if better:
            self.selected_round, self.selected_value = self.round, value
            self.selected_shared, self.stale_looks = self.shared, 0
        else:
            self.stale_looks += regular
        return better

    def take_last(self) -> None:
        """Keep this round, whatever it is worth: nobody's data decides."""
        self.selected_round, self.selected_shared = self.round, self.shared

    def is_stale(self, config: EvaluationConfig) -> bool:
        """Say whether the last so many looks were no better than one before them."""
        return 0 < config.effective_patience <= self.stale_looks


@dataclass(frozen=True)
class Training:
    """What the loop works with: what was asked for, how privacy is given, and the clients."""

    experiment: Experiment
    task: Task
    plan: Plan
    clients: NDArray[np.int64]
    """The population that cohorts are drawn from."""
    backend: Backend
    newcomers: bool = False
    """Whether users are looked at that training leaves out."""

    @property
    def protects(self) -> bool:
        """Whether privacy is promised: then nobody's data may stop the run."""
        return self.experiment.privacy.promises

    @property
    def selected_by(self) -> SelectedBy:
        """What decides which round is shipped."""
        if not self.protects:
            return "validation"
        return "last round" if self.plan.validation_queries is None else "noised validation"

    @property
    def coins(self) -> Streams | SecretStreams:
        """What cohorts are drawn with: where privacy is promised, nobody knows who took part."""
        return self.task.secret if self.protects else self.task.streams

    def serving(self, shared: Shared) -> Shared:
        """Return what is sent to be scored with; newcomers fold themselves in, which takes all."""
        return shared if self.newcomers else self.task.method.serving(shared)


class RoundLine(Stored):
    """One round: a line of metrics.jsonl."""

    round: Count
    clients: Count = 0
    """Size of the cohort."""
    loss: Number | None
    """Mean training loss of the clients that report one."""
    valid: Tables | None
    """Validation metrics, in rounds with an evaluation."""
    groups: Tables | None = None
    """Validation metrics of groups of users, at full ranking."""
    gates: dict[str, Any] | None = None
    """Statistics of the gates after a guidance round (FedRKG)."""
    moved: Metrics | None = None
    """Shares of users whose AUC improved or declined in a guidance round."""
    noised: Number | None = None
    """The noised validation value that selects the round under privacy."""
    phase: str = ""
    """What the round does, of a method with several phases."""
    zeroed_out: Count = 0
    """Uploads with NaN or infinite values, which count as zero."""
    lost: bool = False
    """Whether the secure sum of the round could not be opened."""
    up_bytes: Count = 0
    """Uploaded by all clients up to and including this round."""
    down_bytes: Count = 0
    seconds: Positive = 0.0


class RoundReport(RoundLine):
    """A round as a progress display or a log sees it: its line, and how far the run is."""

    rounds: int = Field(exclude=True)
    selected_round: int = Field(exclude=True)
    selected_value: float = Field(exclude=True)


class Journal(Protocol):
    """Where a run is written down."""

    def record(self, line: RoundLine) -> None:
        """Write the line of a round."""
        ...

    def save(self, state: ServerState, *, now: bool) -> None:
        """Save what the run can go on from: now, or if it is time."""
        ...


class NoJournal:
    """Writes nothing down."""

    def record(self, line: RoundLine) -> None:
        """Forget it."""

    def save(self, state: ServerState, *, now: bool) -> None:
        """Forget it."""


class Notes(NoJournal):
    """Remembers the rounds of a run that is only in memory."""

    def __init__(self) -> None:
        self.lines: list[RoundLine] = []

    def record(self, line: RoundLine) -> None:
        """Remember it."""
        self.lines.append(line)


def run_rounds(
    training: Training,
    state: ServerState,
    journal: Journal,
    on_round: Callable[[RoundReport], None] = lambda report: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Train to the end or an early stop; the state then holds the selected round."""
    experiment, task, plan, backend = (
        training.experiment,
        training.task,
        training.plan,
        training.backend,
    )
    method, libraries = task.method, ThreadpoolController()
    while state.round < experiment.rounds and not state.is_stale(experiment.evaluation):
        began, number = time.perf_counter(), state.round + 1
        # 1. Who takes part.
        drawn = experiment.cohort.draw(len(training.clients), training.coins, number)
        cohort, state.ledger = plan.admit(training.clients[drawn], state.ledger, number)
        # 2. What they receive.
        download = task.download(number, state.shared, cohort, state.protection)
        protection = task.protection_of(download.to(cohort[:0]))
        # 3. Fit, 4. protect, 5. sum: on the clients, whatever the backend.
        collected = backend.train(download, protection, cohort)
        # 6. Undo the server's side of the protection and apply the sum.
        if not collected.lost:
            secret = SecretRound(number, task.secret)
            total, following = protection.finish(collected.summed, secret, shared=collected.noised)
            state.protection = following.state
            if total.clients:
                with libraries.limit(limits=ALGEBRA_THREADS, user_api="blas"):
                    state.shared = method.apply(state.shared, total)
        # 7. Account for the privacy and for the messages; a lost sum may have been seen.
        state.account = plan.charge(state.account, number)
        if not method.traits.pooled:
            state.up_bytes += collected.up_bytes
            state.down_bytes += collected.down_bytes
        state.round = number
        loss = collected.loss.mean if training.protects else _mean_loss(collected.loss, number)
        # 8. Look at the validation items and select the round.
        seen = _evaluate(training, state)
        # 9. Record, and save from time to time.
        seconds = time.perf_counter() - began
        state.seconds += seconds
        if phase := stage_of(method, number):
            seen["phase"] = phase
        if collected.zeroed_out:
            seen["zeroed_out"] = collected.zeroed_out
        if collected.lost:
            seen["lost"] = True
        report = RoundReport(
            round=number,
            clients=len(cohort),
            loss=loss,
            **seen,
            up_bytes=state.up_bytes,
            down_bytes=state.down_bytes,
            seconds=seconds,
            rounds=experiment.rounds,
            selected_round=state.selected_round,
            selected_value=state.selected_value,
        )
        journal.record(report)
        on_round(report)
        stopping = should_stop()  # asked once: what is said to be saved is saved
        journal.save(state, now=stopping)
        if stopping and state.round < experiment.rounds:
            raise StoppedError(f"stopped after round {number}")


def _evaluate(training: Training, state: ServerState) -> dict[str, Any]:
    """Look at the validation items, if it is time, and select the round; say what was seen.

    The best look selects. Under privacy only noised looks may, which are paid for; without them the
    last round is shipped, and looks are for the log.
    """
    experiment, method, backend = training.experiment, training.task.method, training.backend
    config, number, paid = experiment.evaluation, state.round, training.plan.validation_queries
    regular = number in config.evaluation_rounds(experiment.rounds)
    if not (regular or is_marked(method, number) or is_marked(method, number + 1)):
        return {"valid": None}
    looked = backend.evaluate(training.serving(state.shared), "valid")
    seen = {"valid": looked.means(), **backend.describe(state.shared, number)}
    better = False
    if not training.protects:
        better = state.select(selection_value(looked, config), regular=regular)
    elif paid is None:
        better = number == experiment.rounds
        if better:
            state.take_last()
    elif regular:
        secret = SecretRound(number, training.task.secret)
        seen["noised"] = paid.value(looked.tallies[config.candidates], config.select, secret)
        better = state.select(seen["noised"], regular=True)
    if better:
        backend.keep_selected()
    return seen


def selection_value(looked: Evaluation, config: EvaluationConfig) -> float:
    """Return the value by which rounds are compared."""
    return looked.tallies[config.candidates].mean(config.select)


def _mean_loss(loss: LossSum, number: int) -> float | None:
    if loss.lost:
        raise DivergedError(
            f"the training loss of round {number} is not a number: use a smaller lr"
        )
    return loss.mean
