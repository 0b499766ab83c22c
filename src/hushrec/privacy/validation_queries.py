"""Looks at validation items that are paid for: what may select a round under privacy.

At a look every user's score on its own validation items, a metric between 0 and 1, enters the sum

    sum over users of (score - 1/2),        who has no validation item adding nothing,

which gets discrete Gaussian noise in whole steps of the exact sums. One user moves it by a half if
emptied, by one if replaced. When the looks are is known before the first round; everybody is asked
in each, so nothing is amplified, and whatever else a user's score depends on (parameters that it
keeps, rounds that it was drawn in) is its own. Looks select and stop by the noised values alone.

They take part of the budget: by themselves, ``privacy.selection_share`` of epsilon. The noise on
the sums of the rounds is then what keeps looks and rounds together within epsilon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hushrec.aggregation.exact_sum import STEPS_PER_UNIT
from hushrec.aggregation.statistics import STEPS, Tally
from hushrec.privacy.accountant import (
    Accountant,
    Everybody,
    Gaussian,
    Grid,
    Neighbours,
    noise_for,
    sensitivity,
)
from hushrec.privacy.discrete import law
from hushrec.privacy.noise import steps_of
from hushrec.streams import SecretRound

HALF = 0.5
"""How far a user's score can be from the middle."""


@dataclass(frozen=True)
class Looks:
    """The looks of a run."""

    rounds: frozenset[int]
    """After which there is one, known beforehand."""
    event: Gaussian
    """What one adds to the account."""
    clients: float
    """The population, which a mean divides by: how many have validation items is not public."""

    @classmethod
    def within(
        cls,
        epsilon: float,
        delta: float,
        rounds: frozenset[int],
        neighbours: Neighbours,
        clients: float,
    ) -> Looks:
        """Return looks that by themselves keep within epsilon."""

        def event_at(multiplier: float) -> Gaussian:
            deviation = multiplier * sensitivity(HALF, neighbours) * STEPS_PER_UNIT
            return Gaussian(multiplier, Everybody(), neighbours, Grid(deviation, 1))

        return cls(rounds, event_at(noise_for(epsilon, delta, len(rounds), event_at)), clients)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the sum of scores."""
        return self.event.multiplier * sensitivity(HALF, self.event.neighbours)

    def history(self) -> list[dict[str, Any]]:
        """Return what all of them add to the account."""
        accountant = Accountant()
        accountant.record(self.event, len(self.rounds))
        return accountant.history()

    def value(self, tally: Tally, metric: str, secret: SecretRound) -> float:
        """Return the noised mean of a metric; who has no validation item counts as a half."""
        drawn = law("gaussian", steps_of(self.noise_std)).draw(secret.words("privacy/look"), 1)
        noised = summed(tally, metric) + int(drawn[0])
        return HALF + noised / STEPS_PER_UNIT / self.clients

    def __str__(self) -> str:
        return (
            f"{len(self.rounds)} looks at everybody's validation items, a number between 0 and 1 "
            f"for each user, with discrete Gaussian noise of deviation {self.noise_std:.4g} on "
            "their sum, select the round"
        )


def summed(tally: Tally, metric: str) -> int:
    """Return the sum over users of (score - 1/2), in whole steps of the noise.

    Rounding it down keeps to the bound: two sums that are so many whole steps apart stay so.
    """
    doubled = 2 * tally.sums.get(metric, 0) - STEPS * tally.users
    return doubled * int(STEPS_PER_UNIT) // (2 * STEPS)
