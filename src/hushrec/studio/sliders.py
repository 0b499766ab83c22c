"""Privacy as sliders: how much noise, how many users, how many of them a round, for how long.

Sliders stop at round numbers, a place on each scale; what is asked for is the place. Epsilon is the
accountant's, the one of every run (`privacy.accountant`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from hushrec.errors import ConfigError
from hushrec.privacy.accountant import Everybody, Gaussian, Poisson, Sampling, epsilon_of

LARGEST_DELTA = 1e-5


@dataclass(frozen=True)
class Scale:
    """A slider."""

    name: str
    label: str
    help: str
    stops: tuple[float, ...]
    start: int
    unit: str = ""

    def said(self, place: int) -> str:
        """Write the value at a place."""
        value = self.stops[place]
        text = f"{value:,.0f}" if value >= 10 else f"{value:g}"
        return f"{text}{self.unit}"


SCALES = (
    Scale(
        "noise",
        "Noise multiplier",
        "Standard deviation of the noise on a sum, over the most that one user can move it.",
        (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 7, 10, 15, 20, 30),
        5,
    ),
    Scale(
        "users",
        "Users",
        "Everybody who could take part.",
        (100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 10_000_000),
        4,
    ),
    Scale(
        "share",
        "Take part in a round",
        "Each user by chance; nobody is told who did.",
        (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
        4,
        "\N{NO-BREAK SPACE}%",
    ),
    Scale(
        "rounds",
        "Rounds",
        "Every noised sum that is released costs.",
        (1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000),
        4,
    ),
)


@dataclass(frozen=True)
class Answer:
    """What a setting guarantees."""

    epsilon: float
    delta: float
    unsampled: float
    """What epsilon would be if everybody took part in every round."""
    belief: float
    """Of somebody who thought it even odds that a user's data is in, after the release; at most."""
    verdict: str


def places(given: Mapping[str, str]) -> dict[str, int]:
    """Return where each slider stands; those that are not named stand at their start."""
    found = {}
    for scale in SCALES:
        text = given.get(scale.name, str(scale.start))
        last = len(scale.stops) - 1
        if not (text.isascii() and text.isdigit() and len(text) < 4 and int(text) <= last):
            raise ConfigError(f"{scale.name}: expected a whole number from 0 to {last}")
        found[scale.name] = int(text)
    return found


@lru_cache(256)
def answer(noise: int, users: int, share: int, rounds: int) -> Answer:
    """Return what is guaranteed where the sliders stand."""
    multiplier, population, percent, count = (
        scale.stops[place]
        for scale, place in zip(SCALES, (noise, users, share, rounds), strict=True)
    )
    delta = min(LARGEST_DELTA, 1 / (10 * population))
    sampling: Sampling = Everybody() if percent == 100 else Poisson(percent / 100)
    epsilon, unsampled = (
        epsilon_of(Gaussian(multiplier, drawn, "zero-out-one"), int(count), delta)
        for drawn in (sampling, Everybody())
    )
    belief = 1 / (1 + math.exp(-min(epsilon, 700)))
    return Answer(epsilon, delta, unsampled, belief, _verdict(epsilon))


def _verdict(epsilon: float) -> str:
    """Say what an epsilon is usually held to be; there is no law."""
    for most, words in (
        (1, "strong"),
        (4, "what many releases aim at"),
        (10, "weak: it bounds the worst case loosely"),
    ):
        if epsilon <= most:
            return words
    return "next to none"
