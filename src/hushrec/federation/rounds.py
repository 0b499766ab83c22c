"""The loop over rounds, and its callbacks: hooks for checkpoints, logs, displays and stopping.

A callback inherits from `Callback` and overrides the hooks that it needs::

    class PrintLoss(hushrec.Callback):
        def on_round_end(self, record):
            print(record.round, record.loss)

    hushrec.train(data, callbacks=[PrintLoss()])
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from threadpoolctl import ThreadpoolController

from hushrec.aggregation import Evaluation
from hushrec.data.splitting import Part
from hushrec.errors import ConfigError, DivergedError, StoppedError
from hushrec.evaluation.evaluator import EvaluationConfig, PartRanks
from hushrec.evaluation.groups import group_means, rank_changes
from hushrec.federation.backends import ALGEBRA_THREADS, Backend, Collected, Simulation
from hushrec.federation.client import Task
from hushrec.federation.experiment import Experiment
from hushrec.federation.guard import GuardState, PhaseFigures, RoundFigures, is_finite
from hushrec.io.codec import Count, Metrics, Number, Positive, Stored, Tables
from hushrec.methods.base import Method, Shared, is_marked
from hushrec.privacy.budgets import Ledger
from hushrec.privacy.plan import Plan
from hushrec.privacy.protection import Protection
from hushrec.streams import SecretRound


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
    not_applied: str = ""
    """Why the total was not applied (`federation.guard`)."""
    up_bytes: Count = 0
    """Uploaded by all clients up to and including this round."""
    down_bytes: Count = 0
    seconds: Positive = 0.0


class RoundRecord(RoundLine):
    """A round as callbacks receive it: its line of metrics.jsonl, and how far the run is."""

    rounds: int = Field(exclude=True)
    """Rounds of the experiment."""
    selected_round: int = Field(exclude=True)
    """The best evaluated round so far; 0 before the first one."""
    selected_value: float = Field(exclude=True)
    """Its validation value."""


@dataclass(frozen=True)
class EvaluationRecord:
    """An evaluation of the validation items as callbacks receive it."""

    round: int
    valid: Tables
    """Metrics by candidate set and name: ``valid["full"]["ndcg@10"]``."""
    noised: float | None
    """The noised value that selects the round, where validation queries are charged to a budget."""
    shared: Shared
    """The shared parameters that were evaluated."""


@dataclass(frozen=True)
class TrainingResult:
    """The result of a complete training as callbacks receive it."""

    rounds: int
    """Rounds that were trained."""
    selected_round: int
    valid: Tables
    """Validation metrics of the selected round by candidate set and name."""
    test: Tables
    """Test metrics of the selected round."""
    up_bytes: int
    down_bytes: int
    seconds: float


class Callback:
    """Base class of all callbacks; every hook does nothing.

    A hook may call `stop` or `interrupt`. Callbacks change no parameters and draw no random
    numbers of the run: with or without them a run gives the same bits.
    """

    requested: Literal["stop", "interrupt"] | None = None
    """What this callback asks for; cleared when training begins."""

    def on_begin(self, experiment: Experiment) -> None:
        """Training begins, from the first round or from a checkpoint."""

    def on_evaluation(self, evaluation: EvaluationRecord) -> Mapping[str, Any] | None:
        """The validation items were evaluated; may return more entries for the round's record."""

    def on_round_end(self, record: RoundRecord) -> None:
        """A round is over, its evaluation included."""

    def on_interrupt(self) -> None:
        """Training is interrupted between two rounds, and may be resumed later."""

    def on_end(self, result: TrainingResult) -> None:
        """All rounds are over, and the selected round was evaluated on the test items."""

    def stop(self) -> None:
        """End training after this round; the best evaluated round is the result.

        Refused where privacy is guaranteed, as the end of the run would depend on people's data.
        """
        self.requested = "stop"

    def interrupt(self) -> None:
        """Raise `StoppedError` after this round; a run with a folder is saved, to be resumed."""
        self.requested = "interrupt"


class History(Callback):
    """Keeps the records of all rounds in memory."""

    def __init__(self) -> None:
        self.records: list[RoundRecord] = []

    def on_round_end(self, record: RoundRecord) -> None:
        """Keep the record."""
        self.records.append(record)


class SimulationMetrics(Callback):
    """Adds what only a simulation knows to the record of a round.

    These are validation metrics of groups of users and, of a guidance round (FedRKG), the
    statistics of the gates and the shares of users whose AUC improved or declined.
    """

    def __init__(self, backend: Simulation, method: Method) -> None:
        self.backend, self.method = backend, method
        self.before: tuple[int, PartRanks] | None = None
        """The last evaluation: its round and ranks; unknown after a resumption."""

    def on_evaluation(self, evaluation: EvaluationRecord) -> Mapping[str, Any]:
        """Return the additional entries."""
        evaluator, ranks, before = self.backend.evaluator, self.backend.ranks["valid"], self.before
        assert evaluator is not None, "it has evaluated"
        self.before = evaluation.round, ranks
        entries: dict[str, Any] = {"groups": group_means(ranks["full"], evaluator.groups("valid"))}
        if is_marked(self.method, evaluation.round):
            model = evaluator.model(self.method, evaluation.shared, self.backend.store)
            entries["gates"] = evaluator.gate_statistics(model)
            if before is not None and before[0] == evaluation.round - 1:
                entries["moved"] = rank_changes(before[1]["full"], ranks["full"])
        return entries


SelectedBy = Literal["validation", "noised validation", "last round"]


@dataclass
class ServerState:
    """What a round changes on the server, and a checkpoint holds."""

    shared: Shared
    data: str
    """Digest of the split; a checkpoint is of no use with another one."""
    key: str | None = None
    """Of the noise; kept until the run is complete, so that it can be resumed."""
    round: int = 0
    selected_round: int = 0
    selected_value: float = -np.inf
    selected_shared: Shared = field(default_factory=dict)
    stale_evaluations: int = 0
    up_bytes: int = 0
    down_bytes: int = 0
    seconds: float = 0.0
    account: Sequence[Mapping[str, Any]] = ()
    """History of the privacy accountant."""
    protection: Mapping[str, float] = field(default_factory=dict)
    """State of the privacy mechanisms."""
    ledger: Ledger | None = None
    """What each client has spent, where clients have personal budgets."""
    guard: GuardState = field(default_factory=GuardState)
    """What the guard knows of the rounds so far."""

    def select(self, value: float, *, regular: bool) -> bool:
        """Keep this round if it is the best so far; ``regular`` ones count for the patience."""
        better = value > self.selected_value
        if better:
            self.selected_round, self.selected_value = self.round, value
            self.selected_shared, self.stale_evaluations = self.shared, 0
        else:
            self.stale_evaluations += regular
        return better


@dataclass(frozen=True)
class Training:
    """What the loop works with: the experiment, the task, the privacy plan and the clients."""

    experiment: Experiment
    task: Task
    plan: Plan
    clients: NDArray[np.int64]
    """The population that cohorts are drawn from."""
    backend: Backend
    newcomers: bool = False
    """Whether users are evaluated that training leaves out."""

    @property
    def protects(self) -> bool:
        """Whether privacy is guaranteed: then people's data may not stop the run."""
        return self.experiment.privacy.promises

    @property
    def evaluates(self) -> bool:
        """Whether there are held-out items; a final model trains on everything."""
        return self.experiment.split.hold_out

    @property
    def selected_by(self) -> SelectedBy:
        """What selects the round."""
        if not self.evaluates:
            return "last round"
        if not self.protects:
            return "validation"
        return "last round" if self.plan.validation_queries is None else "noised validation"

    def serving(self, shared: Shared) -> Shared:
        """Return the parameters that score; newcomers are folded in, which takes all of them."""
        return shared if self.newcomers else self.task.method.serving(shared)


def run_rounds(training: Training, state: ServerState, callbacks: Sequence[Callback] = ()) -> None:
    """Train to the end or an early stop; the state then holds the selected round."""
    experiment, task, plan = training.experiment, training.task, training.plan
    for callback in callbacks:
        callback.requested = None
        callback.on_begin(experiment)
    method, libraries = task.method, ThreadpoolController()
    while state.round < experiment.rounds:
        if state.round and _is_stopped(training, state, callbacks):
            break
        began, number = time.perf_counter(), state.round + 1
        phase = method.phase_of(number)
        # 1. Who takes part; drawn in secret where privacy is guaranteed.
        streams = task.secret if training.protects else task.streams
        drawn = experiment.cohort.draw(len(training.clients), streams, number)
        cohort, state.ledger = plan.admit(training.clients[drawn], state.ledger, number)
        # 2. What they receive.
        download = task.download(number, state.shared, cohort, state.protection)
        protection = task.protection_of(download.to(cohort[:0]))
        # 3. Fit, 4. protect, 5. sum: on the clients, whatever the backend.
        collected = training.backend.train(download, protection, cohort)
        # 6. Undo the server's side of the protection and apply the sum, unless the guard refuses.
        with libraries.limit(limits=ALGEBRA_THREADS, user_api="blas"):
            not_applied = _apply(training, state, protection, collected, number)
        # 7. Account for the privacy and for the messages; a lost sum may have been seen.
        state.account = plan.charged(state.account, [number]).history()
        if not method.traits.pooled:
            state.up_bytes += collected.up_bytes
            state.down_bytes += collected.down_bytes
        state.round = number
        if collected.loss.lost and not (training.protects or experiment.guard.active):
            raise DivergedError(f"the loss of round {number} is not finite: use a smaller lr")
        # 8. Evaluate the validation items and select the round.
        seen = _evaluate(training, state, callbacks) if _is_due(training, number) else {}
        # 9. Tell the callbacks: checkpoints, logs, displays.
        seconds = time.perf_counter() - began
        state.seconds += seconds
        named = phase.name if len(method.phases) > 1 else ""
        told = {"phase": named, "zeroed_out": collected.zeroed_out, "lost": collected.lost}
        told["not_applied"] = not_applied
        seen |= {name: value for name, value in told.items() if value}
        record = RoundRecord(
            round=number,
            clients=len(cohort),
            loss=collected.loss.mean,
            **{"valid": None, **seen},
            up_bytes=state.up_bytes,
            down_bytes=state.down_bytes,
            seconds=seconds,
            rounds=experiment.rounds,
            selected_round=state.selected_round,
            selected_value=state.selected_value,
        )
        for callback in callbacks:
            callback.on_round_end(record)
        if experiment.guard.active and state.guard.in_a_row >= experiment.guard.stop_after:
            raise DivergedError(
                f"{state.guard.in_a_row} rounds in a row were not applied, the last one because "
                f"{not_applied}: use a smaller lr, or find the node that sends such sums; all "
                "rounds are saved, and guard.active = false applies everything"
            )
        interrupted = any(callback.requested == "interrupt" for callback in callbacks)
        if interrupted and number < experiment.rounds:
            for callback in callbacks:
                callback.on_interrupt()
            raise StoppedError(f"stopped after round {number}")
    if not training.evaluates:
        state.selected_round, state.selected_shared = state.round, state.shared
        training.backend.keep_selected()
    elif not state.selected_round:  # a callback stopped it before the first evaluation
        _evaluate(training, state, callbacks)


def _apply(
    training: Training,
    state: ServerState,
    protection: Protection,
    collected: Collected,
    number: int,
) -> str:
    """Apply the sum of a round to the state; return why not, where the guard refuses it."""
    method, config = training.task.method, training.experiment.guard
    phase, why, figures = method.phase_of(number), "its secure sum is lost", None
    kind = f"{phase.name}, guided" if is_marked(method, number) else phase.name
    if not collected.lost:
        secret = SecretRound(number, training.task.secret)
        total, following = protection.finish(collected.summed, secret, shared=collected.noised)
        why, shared = "", state.shared
        if config.active and total.clients:
            # No noise covers the loss: under a guarantee it decides nothing.
            loss = None if training.protects else collected.loss
            figures = RoundFigures.of(total, protection.norm_of(number), loss)
            why = figures.reason(config, state.guard.phases.get(kind, PhaseFigures()))
        if total.clients and not why:
            shared = phase.apply(state.shared, total, number)
            if config.active and not is_finite(shared):
                why = "parameters are not finite after it"
        if not why:
            state.shared, state.protection = shared, following.state
        elif min(training.experiment.rounds, phase.rounds) == 1 or method.budget_shares:
            raise DivergedError(
                f"round {number} cannot be applied because {why}, and {method.name} cannot do "
                "without it: use a smaller lr, or find the node that sends such sums"
            )
    state.guard = state.guard.after(number, why, kind, figures, config.window)
    return why


def finish(
    training: Training, state: ServerState, callbacks: Sequence[Callback]
) -> dict[Part, Evaluation]:
    """Evaluate the selected round on the validation and test items, and end the callbacks."""
    serving = training.serving(state.selected_shared)
    parts: tuple[Part, ...] = ("valid", "test") if training.evaluates else ()
    results = {part: training.backend.evaluate(serving, part, selected=True) for part in parts}
    measured = {part: result.means() for part, result in results.items()}
    valid, test = measured.get("valid", {}), measured.get("test", {})
    spent = state.up_bytes, state.down_bytes, state.seconds
    result = TrainingResult(state.round, state.selected_round, valid, test, *spent)
    for callback in callbacks:
        callback.on_end(result)
    return results


def _is_stopped(training: Training, state: ServerState, callbacks: Sequence[Callback]) -> bool:
    """Say whether patience or a callback ends the training; refuse a callback under privacy."""
    if _is_stale(training, state):
        return True
    stopping = [callback for callback in callbacks if callback.requested == "stop"]
    if stopping and training.protects:
        raise ConfigError(
            f"{type(stopping[0]).__name__} stops the run, and no noise covers what that tells of "
            "people's data: let all rounds run, or use privacy.mode = none"
        )
    return bool(stopping)


PATIENCE = 75
"""Evaluations without improvement after which a run stops, unless option or method say other."""
FEWEST_STALE = 2
"""Evaluations without improvement that a method's own patience waits for at least."""


def _is_stale(training: Training, state: ServerState) -> bool:
    """Say whether evaluations have not improved for as long as the patience lasts."""
    config, method = training.experiment.evaluation, training.task.method
    stale = state.stale_evaluations
    # Under privacy, the setup has checked that patience follows noised validation queries alone.
    if config.patience is not None:
        return 0 < config.patience <= stale
    if method.traits.patience is None or training.protects:
        return stale >= PATIENCE
    # What earlier phases learn may show in the last one only.
    before = sum(phase.rounds for phase in method.phases[:-1])
    in_last_phase = state.round // config.every - before // config.every
    patience = max(FEWEST_STALE, math.ceil(method.traits.patience / config.every))
    return min(stale, in_last_phase) >= patience


def _is_due(training: Training, number: int) -> bool:
    """Say whether a round is evaluated: regularly, or before and after a guidance round."""
    experiment, method = training.experiment, training.task.method
    if not training.evaluates:
        return False
    regular = number in experiment.evaluation.evaluation_rounds(experiment.rounds)
    return regular or is_marked(method, number) or is_marked(method, number + 1)


def _evaluate(
    training: Training, state: ServerState, callbacks: Sequence[Callback]
) -> dict[str, Any]:
    """Evaluate the validation items and select the round; return the entries of its record.

    The best evaluation selects. Under privacy only noised validation queries select, which are
    charged to the budget; without them the last round is selected, and evaluations are for the log.
    """
    experiment, backend = training.experiment, training.backend
    config, number, queries = experiment.evaluation, state.round, training.plan.validation_queries
    regular = number in config.evaluation_rounds(experiment.rounds)
    evaluation = backend.evaluate(training.serving(state.shared), "valid")
    entries: dict[str, Any] = {"valid": evaluation.means()}
    better = False
    if not training.protects:
        better = state.select(selection_value(evaluation, config), regular=regular)
    elif queries is None:
        better = number == experiment.rounds
        if better:
            state.selected_round, state.selected_shared = number, state.shared
    elif regular:
        secret = SecretRound(number, training.task.secret)
        tally = evaluation.tallies[config.candidates]
        entries["noised"] = queries.value(tally, config.select, secret)
        better = state.select(entries["noised"], regular=True)
    if better:
        backend.keep_selected()
    record = EvaluationRecord(number, entries["valid"], entries.get("noised"), state.shared)
    for callback in callbacks:
        entries |= callback.on_evaluation(record) or {}
    return entries


def selection_value(evaluation: Evaluation, config: EvaluationConfig) -> float:
    """Return the value by which rounds are compared."""
    return evaluation.tallies[config.candidates].mean(config.select)
