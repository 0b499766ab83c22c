"""The training loop of every run, one numbered round at a time.

This is the server's side. It knows the shared parameters, the privacy accountant and the uploads;
the backend knows where the clients are, and callbacks write checkpoints and logs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from hushrec.aggregation.statistics import Evaluation, LossSum
from hushrec.data.splitting import Part
from hushrec.errors import ConfigError, DivergedError, StoppedError
from hushrec.evaluation.evaluator import EvaluationConfig
from hushrec.federation.backends.base import Backend
from hushrec.federation.callbacks import Callback, EvaluationRecord, RoundRecord, TrainingResult
from hushrec.federation.client import Task
from hushrec.federation.experiment import Experiment
from hushrec.methods.base import Shared, is_marked
from hushrec.privacy.budgets import Ledger
from hushrec.privacy.plan import Plan
from hushrec.streams import SecretRound, SecretStreams, Streams

SelectedBy = Literal["validation", "noised validation", "last round"]
ALGEBRA_THREADS = 2
"""Threads of the server's linear algebra on every machine: the last bits depend on them."""


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

    def select(self, value: float, *, regular: bool) -> bool:
        """Keep this round if it is the best so far, and say whether it is.

        Only regular evaluations count for the patience.
        """
        better = value > self.selected_value
        if better:
            self.selected_round, self.selected_value = self.round, value
            self.selected_shared, self.stale_evaluations = self.shared, 0
        else:
            self.stale_evaluations += regular
        return better

    def take_last(self) -> None:
        """Keep this round, whatever its value."""
        self.selected_round, self.selected_shared = self.round, self.shared


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
    def selected_by(self) -> SelectedBy:
        """What selects the round."""
        if not self.protects:
            return "validation"
        return "last round" if self.plan.validation_queries is None else "noised validation"

    @property
    def coins(self) -> Streams | SecretStreams:
        """The streams that draw cohorts; secret ones where privacy is guaranteed."""
        return self.task.secret if self.protects else self.task.streams

    def serving(self, shared: Shared) -> Shared:
        """Return the parameters that score; newcomers are folded in, which takes all of them."""
        return shared if self.newcomers else self.task.method.serving(shared)


class EarlyStopping(Callback):
    """Ends training after ``evaluation.patience`` evaluations without improvement."""

    def __init__(self, config: EvaluationConfig, state: ServerState) -> None:
        self.config, self.state = config, state

    def on_begin(self, experiment: Experiment) -> None:
        """Train no more where a resumed run had come to its end."""
        self._check()

    def on_round_end(self, record: RoundRecord) -> None:
        """Compare the number of evaluations without improvement with the patience."""
        self._check()

    def _check(self) -> None:
        if 0 < self.config.effective_patience <= self.state.stale_evaluations:
            self.stop()


def run_rounds(training: Training, state: ServerState, callbacks: Sequence[Callback] = ()) -> None:
    """Train to the end or an early stop; the state then holds the selected round."""
    experiment, task, plan = training.experiment, training.task, training.plan
    backend = training.backend
    callbacks = (EarlyStopping(experiment.evaluation, state), *callbacks)
    for callback in callbacks:
        callback.requested = None
        callback.on_begin(experiment)
    method, libraries = task.method, ThreadpoolController()
    while state.round < experiment.rounds:
        if state.round and _is_stopped(training, callbacks):
            break
        began, number = time.perf_counter(), state.round + 1
        phase = method.phase_of(number)
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
                    state.shared = phase.apply(state.shared, total, number)
        # 7. Account for the privacy and for the messages; a lost sum may have been seen.
        state.account = plan.charge(state.account, number)
        if not method.traits.pooled:
            state.up_bytes += collected.up_bytes
            state.down_bytes += collected.down_bytes
        state.round = number
        loss = collected.loss.mean if training.protects else _mean_loss(collected.loss, number)
        # 8. Evaluate the validation items and select the round.
        seen = _evaluate(training, state, callbacks) if _is_due(training, number) else {}
        # 9. Tell the callbacks: checkpoints, logs, displays.
        seconds = time.perf_counter() - began
        state.seconds += seconds
        if len(method.phases) > 1:
            seen["phase"] = phase.name
        if collected.zeroed_out:
            seen["zeroed_out"] = collected.zeroed_out
        if collected.lost:
            seen["lost"] = True
        record = RoundRecord(
            round=number,
            clients=len(cohort),
            loss=loss,
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
        interrupted = any(callback.requested == "interrupt" for callback in callbacks)
        if interrupted and number < experiment.rounds:
            for callback in callbacks:
                callback.on_interrupt()
            raise StoppedError(f"stopped after round {number}")
    if not state.selected_round:  # a callback stopped it before the first evaluation
        _evaluate(training, state, callbacks)


def finish(
    training: Training, state: ServerState, callbacks: Sequence[Callback]
) -> dict[Part, Evaluation]:
    """Evaluate the selected round on the validation and test items, and end the callbacks."""
    serving = training.serving(state.selected_shared)
    parts: tuple[Part, ...] = ("valid", "test")
    results = {part: training.backend.evaluate(serving, part, selected=True) for part in parts}
    result = TrainingResult(
        state.round,
        state.selected_round,
        results["valid"].means(),
        results["test"].means(),
        state.up_bytes,
        state.down_bytes,
        state.seconds,
    )
    for callback in callbacks:
        callback.on_end(result)
    return results


def _is_stopped(training: Training, callbacks: Sequence[Callback]) -> bool:
    """Say whether a callback ends the training; refuse that where privacy is guaranteed."""
    for callback in callbacks:
        if callback.requested != "stop":
            continue
        # The setup has checked that patience follows noised validation queries alone.
        if training.protects and not isinstance(callback, EarlyStopping):
            raise ConfigError(
                f"{type(callback).__name__} stops the run, and no noise covers what that tells of "
                "people's data: let all rounds run, or use privacy.mode = none"
            )
        return True
    return False


def _is_due(training: Training, number: int) -> bool:
    """Say whether a round is evaluated: regularly, or before and after a guidance round."""
    experiment, method = training.experiment, training.task.method
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
            state.take_last()
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


def _mean_loss(loss: LossSum, number: int) -> float | None:
    if loss.lost:
        raise DivergedError(
            f"the training loss of round {number} is not a number: use a smaller lr"
        )
    return loss.mean
