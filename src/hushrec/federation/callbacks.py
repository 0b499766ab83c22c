"""Callbacks: hooks into training, for checkpoints, logs, displays and early stopping.

A callback inherits from `Callback` and overrides the hooks that it needs::

    class PrintLoss(hushrec.Callback):
        def on_round_end(self, record):
            print(record.round, record.loss)

    hushrec.train(data, callbacks=[PrintLoss()])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from hushrec.evaluation.evaluator import PartRanks
from hushrec.evaluation.groups import rank_changes
from hushrec.federation.backends.base import Simulation
from hushrec.federation.experiment import Experiment
from hushrec.io.stored import Count, Metrics, Number, Positive, Stored, Tables
from hushrec.methods.base import Method, Shared, is_marked


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


class GroupMetrics(Callback):
    """Adds the validation metrics of groups of users to the record, in a simulation."""

    def __init__(self, backend: Simulation) -> None:
        self.backend = backend

    def on_evaluation(self, evaluation: EvaluationRecord) -> Mapping[str, Any]:
        """Return the metrics by group, at full ranking."""
        assert self.backend.evaluator is not None, "it has evaluated"
        return {"groups": self.backend.evaluator.group_means(self.backend.ranks["valid"])}


class GuidanceMetrics(Callback):
    """Adds what a guidance round did to the clients (FedRKG): its gates, and who moved."""

    def __init__(self, backend: Simulation, method: Method) -> None:
        self.backend, self.method = backend, method
        self.before: tuple[int, PartRanks] | None = None
        """The last evaluation: its round and ranks; unknown after a resumption."""

    def on_evaluation(self, evaluation: EvaluationRecord) -> Mapping[str, Any]:
        """Return the statistics of the gates, and the shares of users that moved."""
        evaluator, ranks, before = self.backend.evaluator, self.backend.ranks["valid"], self.before
        assert evaluator is not None, "it has evaluated"
        self.before = evaluation.round, ranks
        if not is_marked(self.method, evaluation.round):
            return {}
        model = evaluator.model(self.method, evaluation.shared, self.backend.store)
        entries: dict[str, Any] = {"gates": evaluator.gate_statistics(model)}
        if before is not None and before[0] == evaluation.round - 1:
            entries["moved"] = rank_changes(before[1]["full"], ranks["full"])
        return entries
