"""The guard of a training: rounds whose loss or total is far outside of the last ones do not count.

A figure of a round is outside where it is not finite, or larger than both `GuardConfig.factor`
times the median of the last applied rounds of its phase and twice the largest of the phase so far.
The figures are the mean training loss and the L2 norm of the total over its clients. The first
rounds of a phase have nothing to be compared with: there the norm has to keep to what clipping and
noise allow, where uploads are clipped.

Where privacy is guaranteed, the guard sees the noised total alone. What it decides is then
post-processing of what the round releases anyway, and costs nothing. It does not see the loss,
which no noise covers. Of a secure sum it sees the opened total.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from hushrec.aggregation import LossSum, Total
from hushrec.config import Settings
from hushrec.io.codec import Arrays, Count, Number, Stored

CLIPPED_SLACK = 2.0
"""Clients that a clipped total may have, over the expected ones: cohorts are drawn."""
NOISE_DEVIATIONS = 10.0
"""A norm of noise above its expected one by so many deviations does not happen."""
LARGEST_GROWTH = 2.0
"""A figure below so many times the largest of its phase is never outside."""


class GuardConfig(Settings):
    """Which rounds do not count."""

    active: bool = True
    """Whether rounds are checked. Without it all are applied, and a loss that is not finite ends
    the run."""
    loss_factor: Annotated[float, Field(ge=2, le=1e9)] = 20.0
    """A round is not applied where its loss is more than so many times the median of the last
    ones; where privacy is guaranteed, the loss is not looked at."""
    norm_factor: Annotated[float, Field(ge=2, le=1e9)] = 10.0
    """The same of the norm of its total, over its clients."""
    window: Annotated[int, Field(ge=1, le=1000)] = 8
    """Applied rounds of the phase that the median is of."""
    stop_after: Annotated[int, Field(ge=1, le=1000)] = 3
    """So many rounds in a row that are not applied end the run."""


class NotApplied(Stored):
    """A round whose total was not applied."""

    round: Count
    why: str


class PhaseFigures(Stored):
    """Figures of the applied rounds of a phase."""

    losses: list[Number] = Field(default_factory=list)
    """Of the last ones."""
    norms: list[Number] = Field(default_factory=list)
    largest_loss: Number = 0.0
    """Of all of them."""
    largest_norm: Number = 0.0

    def plus(self, figures: RoundFigures, window: int) -> PhaseFigures:
        """Return the figures with another applied round."""
        losses = [] if figures.loss is None else [figures.loss]
        return PhaseFigures(
            losses=[*self.losses, *losses][-window:],
            norms=[*self.norms, figures.norm][-window:],
            largest_loss=max(self.largest_loss, *losses, 0.0),
            largest_norm=max(self.largest_norm, figures.norm),
        )


class GuardState(Stored):
    """What the guard knows of the rounds so far; part of a checkpoint."""

    phases: dict[str, PhaseFigures] = Field(default_factory=dict)
    in_a_row: Count = 0
    """Rounds up to the last one that were not applied."""
    not_applied: list[NotApplied] = Field(default_factory=list)

    def after(
        self, number: int, why: str, phase: str, figures: RoundFigures | None, window: int
    ) -> GuardState:
        """Return the state after a round, which was not applied if there is a reason ``why``."""
        if why:
            skipped = [*self.not_applied, NotApplied(round=number, why=why)]
            return GuardState(phases=self.phases, in_a_row=self.in_a_row + 1, not_applied=skipped)
        phases = dict(self.phases)
        if figures is not None:
            phases[phase] = phases.get(phase, PhaseFigures()).plus(figures, window)
        return GuardState(phases=phases, in_a_row=0, not_applied=self.not_applied)


@dataclass(frozen=True)
class RoundFigures:
    """What the guard sees of a round."""

    norm: float
    """L2 norm of the total over its clients."""
    bound: float
    """Largest norm that clipping and noise allow; infinite where nothing is clipped."""
    loss: float | None = None
    """Mean training loss; None where there is none, or where it must not be looked at."""
    lost: int = 0
    """Clients whose loss is not finite."""

    @classmethod
    def of(cls, total: Total, clip: float | None, loss: LossSum | None) -> RoundFigures:
        """Measure a round's total; ``clip`` bounds the norm of an upload, ``loss`` is None where
        privacy is guaranteed."""
        arrays = [*(rows for _, rows in total.rows.values()), *total.dense.values()]
        square = math.fsum(float(np.vdot(array, array)) for array in arrays)
        clients, entries = max(total.clients, 1.0), sum(array.size for array in arrays)
        bound = math.inf
        if clip is not None:
            noise = total.noise_std * (math.sqrt(entries) + NOISE_DEVIATIONS)
            bound = (CLIPPED_SLACK * (clients + NOISE_DEVIATIONS) * clip + noise) / clients
        mean, lost = (None, 0) if loss is None else (loss.mean, loss.lost)
        return cls(math.sqrt(square) / clients, bound, mean, lost)

    def reason(self, config: GuardConfig, before: PhaseFigures) -> str:
        """Return why the round must not be applied; empty if it may."""
        if self.lost:
            return f"the loss of {self.lost:,} clients is not finite"
        if not math.isfinite(self.norm):
            return "its total is not finite"
        if self.norm > self.bound:
            return (
                f"the norm of its total is {self.norm:.4g} a client, and clipping and noise allow "
                f"{self.bound:.4g}"
            )
        if self.loss is not None:
            largest = _largest(before.losses, before.largest_loss, config.loss_factor)
            if self.loss > largest:
                return _outside("loss", self.loss, before.losses, largest)
        largest = _largest(before.norms, before.largest_norm, config.norm_factor)
        if self.norm > largest:
            return _outside("norm", self.norm, before.norms, largest)
        return ""


def is_finite(arrays: Arrays) -> bool:
    """Return whether all numbers are finite."""
    return all(
        bool(np.isfinite(array).all()) for array in arrays.values() if array.dtype.kind == "f"
    )


def rounds_in_words(numbers: Iterable[int]) -> str:
    """Write numbers of rounds: "round 4", "rounds 4, 5 and 9 to 12"."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    words: list[str] = []
    for span in spans:
        short = len(span) < 3
        words += map(str, span) if short else [f"{span[0]} to {span[-1]}"]
    single = len(spans) == 1 and len(spans[0]) == 1
    return f"round{'' if single else 's'} {in_words(words)}"


def in_words(names: Sequence[str]) -> str:
    """Write a list: "a", "a and b", "a, b and c"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _largest(last: Sequence[float], largest: float, factor: float) -> float:
    """Return the largest figure that is not outside; infinite without rounds to compare with."""
    if not last or largest <= 0:
        return math.inf
    return max(factor * statistics.median(last), LARGEST_GROWTH * largest)


def _outside(what: str, value: float, last: Sequence[float], largest: float) -> str:
    rounds = "round" if len(last) == 1 else f"{len(last)} rounds"
    return (
        f"its {what} is {value:.4g}, where the last {rounds} had {statistics.median(last):.4g} "
        f"(median) and {largest:.4g} is the limit"
    )
