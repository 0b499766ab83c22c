"""Sums of losses and metrics, exact to the last bit: the same in any order, and on any node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hushrec.errors import MessageError
from hushrec.io.codec import HEADER_BYTES, ArrayGroup, ArraySpec, Count, Message, check_arrays

STEPS = 2**128
"""Metrics and losses are summed in whole steps of 1 / STEPS: exactly, so in any order."""
PLACES = 32
"""Bins of the histogram of ranks: bin b counts ranks from 2^b on."""
LARGEST_LOSS = 2.0**100
"""A larger loss, or one that is NaN, counts as lost."""


def exact_sum(values: NDArray[np.float64]) -> int:
    """Return the sum of numbers in steps; bits of them below 2^-105 are dropped."""
    # The larger bits first, and of what is left the larger ones. Small numbers have none above.
    levels: tuple[int, ...] = (20, 62, 104)
    if np.abs(values).max(initial=0.0) >= 2.0**20:
        levels = (-64, -22, *levels)
    total = 0
    for shift in levels:
        whole = np.rint(values * 2.0**shift)
        values = values - whole * 2.0**-shift
        total += int(whole.astype(np.int64).sum()) << (128 - shift)
    return total


@dataclass(frozen=True)
class LossSum:
    """Mean losses of clients, summed exactly."""

    steps: int = 0
    clients: int = 0
    lost: int = 0
    """Clients whose loss is NaN or larger than `LARGEST_LOSS`."""

    @classmethod
    def of(cls, losses: NDArray[np.float64]) -> LossSum:
        """Sum up each client's mean loss."""
        valid = losses[np.abs(losses) < LARGEST_LOSS]
        return cls(exact_sum(valid), len(losses), len(losses) - len(valid))

    def merge(self, other: LossSum) -> LossSum:
        """Return the sum over both groups of clients."""
        clients, lost = self.clients + other.clients, self.lost + other.lost
        return LossSum(self.steps + other.steps, clients, lost)

    @property
    def mean(self) -> float | None:
        """The mean loss; None without a valid one."""
        valid = self.clients - self.lost
        return self.steps / (STEPS * valid) if valid else None


@dataclass(frozen=True)
class Tally:
    """Metrics of a node's users for one candidate set: sums and a histogram, no user's own."""

    users: int
    sums: Mapping[str, int]
    """Of each metric, in steps."""
    places: NDArray[np.int64]
    """Users by the rank of their best held-out item: bin b from 2^b on."""

    def merge(self, other: Tally) -> Tally:
        """Return the tally over both groups of users."""
        if not self.users or not other.users:
            return self if self.users else other
        sums = {name: total + other.sums[name] for name, total in self.sums.items()}
        return Tally(self.users + other.users, sums, self.places + other.places)

    def mean(self, name: str) -> float:
        """Return the mean of a metric."""
        return self.sums[name] / (STEPS * self.users)

    def means(self) -> dict[str, float]:
        """Return the mean of every metric."""
        return {name: self.mean(name) for name in self.sums}


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of a node's users on their held-out items."""

    tallies: Mapping[str, Tally]
    """By candidate set."""

    def merge(self, other: Evaluation) -> Evaluation:
        """Return the evaluation of both nodes' users."""
        merged = {**self.tallies}
        for name, tally in other.tallies.items():
            merged[name] = merged[name].merge(tally) if name in merged else tally
        return Evaluation(merged)

    @property
    def users(self) -> int:
        """Number of evaluated users."""
        return max((tally.users for tally in self.tallies.values()), default=0)

    def means(self) -> dict[str, dict[str, float]]:
        """Return the mean of every metric for each candidate set."""
        return {name: tally.means() for name, tally in self.tallies.items()}

    def to_bytes(self) -> bytes:
        """Encode the sums and histograms."""
        return EvaluationMessage(
            {name: tally.users for name, tally in self.tallies.items()},
            {name: dict(tally.sums) for name, tally in self.tallies.items()},
            {name: tally.places for name, tally in self.tallies.items()},
        ).to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes, names: Mapping[str, list[str]]) -> Evaluation:
        """Decode them; ``names`` are the metrics of each candidate set."""
        sent = EvaluationMessage.from_bytes(data)
        if not sent.users.keys() == sent.sums.keys() == names.keys():
            raise MessageError("the evaluation is not of the candidate sets that were asked for")
        specs = dict.fromkeys(names, ArraySpec("int64", (PLACES,)))
        check_arrays("evaluation", sent.places, specs)
        tallies = {}
        for candidates, metrics in names.items():
            users, sums = sent.users[candidates], sent.sums[candidates]
            if sorted(sums) != sorted(metrics if users else []):
                raise MessageError("the evaluation is not of the metrics that were asked for")
            if not all(0 <= value <= users * STEPS for value in sums.values()):
                raise MessageError("a metric lies between 0 and 1: the evaluation's does not")
            if sent.places[candidates].sum() != users:
                raise MessageError("the evaluation's places do not fit its users")
            own = {name: sums[name] for name in metrics if users}
            tallies[candidates] = Tally(users, own, sent.places[candidates])
        return cls(tallies)


@dataclass(frozen=True)
class EvaluationMessage(Message, kind="evaluation", most_bytes=4 * HEADER_BYTES):
    """An `Evaluation` as it travels: users, sums and histograms of each candidate set."""

    users: Mapping[str, Count]
    sums: Mapping[str, Mapping[str, int]]
    places: ArrayGroup
