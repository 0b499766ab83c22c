"""Interactive demonstrations: the evaluation leak, and privacy sliders.

**The leak.** The negative counter learns nothing: it counts how often each item was drawn as a
negative and ranks the least drawn items first. The published protocol draws negatives from the
items outside *all* of a user's interactions, held-out ones included, so held-out items are never
drawn and the counter ranks them first. The honest protocol draws from the items outside the
training interactions, and the counter stays at chance.

**The sliders.** Epsilon for a noise multiplier, a population, a sampling rate and a number of
rounds, by the accountant of every run (`privacy.accountant`). A request holds the position of each
slider, an index into its `stops`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from hushrec.api import train
from hushrec.data.views import Protocol
from hushrec.errors import ConfigError, HushrecError
from hushrec.federation.rounds import Callback, EvaluationRecord
from hushrec.privacy.accountant import Everybody, Gaussian, Poisson, Sampling, epsilon_of

ROUNDS = 20
NEGATIVES = 40
"""Drawn per training item and round. Published code draws 4, in 100 rounds: half as many in all."""
METHOD = "negative-counter"
SETTINGS = {"negatives": NEGATIVES, "evaluation.every": 1, "evaluation.patience": 0}
METRIC, CANDIDATES = "hr@10", "sampled99"
PROTOCOLS: tuple[Protocol, ...] = ("honest", "published")
LARGEST_DELTA = 1e-5
VERDICTS = {
    1: "strong",
    4: "what many releases aim at",
    10: "weak: it bounds the worst case loosely",
    math.inf: "next to none",
}
"""How an epsilon up to each number is usually judged."""


# ------------------------------------------------------------ the leak


@dataclass(frozen=True)
class LeakResult:
    """Results of the negative counter under one protocol so far."""

    points: tuple[tuple[int, float], ...] = ()
    """Validation HR@10 by round."""
    test: float | None = None
    """HR@10 on the test items, after the last round."""
    chance: float | None = None


@dataclass(frozen=True)
class LeakState:
    """State of the demonstration."""

    running: bool = False
    results: dict[Protocol, LeakResult] = field(default_factory=dict)
    problem: str = ""


class LeakDemo:
    """Trains the negative counter under both protocols, in a thread, one run at a time."""

    def __init__(self, working: threading.Lock) -> None:
        """``working`` is held while something is computed."""
        self._working, self._changing = working, threading.Lock()
        self.state = LeakState()

    def start(self) -> None:
        """Start again, unless it is running."""
        with self._changing:
            if self.state.running:
                return
            self.state = LeakState(running=True)
        threading.Thread(target=self._run, name="leak", daemon=True).start()

    def _run(self) -> None:
        problem = ""
        try:
            for protocol in PROTOCOLS:
                callbacks = [_HitRates(partial(self._update, protocol))]
                given: dict[str, Any] = {"settings": SETTINGS, "callbacks": callbacks}
                with self._working:
                    run = train("demo", METHOD, protocol=protocol, rounds=ROUNDS, **given)
                assert run.summary.baselines is not None, "of a simulation"
                chance = _hit_rate(run.summary.baselines.chance)
                self._update(protocol, test=_hit_rate(run.metrics), chance=chance)
        except HushrecError as error:
            problem = str(error)
        finally:
            with self._changing:
                self.state = replace(self.state, running=False, problem=problem)

    def _update(self, protocol: Protocol, **new: Any) -> None:
        with self._changing:
            results = self.state.results
            changed = replace(results.get(protocol, LeakResult()), **new)
            self.state = replace(self.state, results={**results, protocol: changed})


class _HitRates(Callback):
    """Shows the hit rates of all evaluations so far."""

    def __init__(self, show: Callable[..., None]) -> None:
        self.show = show
        self.points: tuple[tuple[int, float], ...] = ()

    def on_evaluation(self, evaluation: EvaluationRecord) -> None:
        """Add the hit rate of this evaluation."""
        self.points += ((evaluation.round, _hit_rate(evaluation.valid)),)
        self.show(points=self.points)


def _hit_rate(tables: Any) -> float:
    return float(tables[CANDIDATES][METRIC])


# ------------------------------------------------------------ privacy sliders


@dataclass(frozen=True)
class Slider:
    """A slider over a list of values."""

    name: str
    label: str
    help: str
    stops: tuple[float, ...]
    start: int
    unit: str = ""

    def text(self, position: int) -> str:
        """Format the value at a position."""
        value = self.stops[position]
        return f"{value:,.0f}{self.unit}" if value >= 10 else f"{value:g}{self.unit}"


SLIDERS = (
    Slider(
        "noise",
        "Noise multiplier",
        "Standard deviation of the noise on a sum, over the most that one user can move it.",
        (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 7, 10, 15, 20, 30),
        5,
    ),
    Slider(
        "users",
        "Users",
        "Everybody who could take part.",
        (100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 10_000_000),
        4,
    ),
    Slider(
        "share",
        "Take part in a round",
        "Each user by chance; nobody is told who did.",
        (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
        4,
        "\N{NO-BREAK SPACE}%",
    ),
    Slider(
        "rounds",
        "Rounds",
        "Every noised sum that is released costs.",
        (1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000),
        4,
    ),
)


@dataclass(frozen=True)
class SliderGuarantee:
    """The guarantee at one setting of the sliders."""

    epsilon: float
    delta: float
    unsampled: float
    """Epsilon if everybody took part in every round."""
    posterior: float
    """Largest posterior probability that a user's data is in, after the release, from even odds."""
    verdict: str


def slider_positions(query: Mapping[str, str]) -> dict[str, int]:
    """Return the position of each slider; its start where the query does not name it."""
    positions = {}
    for slider in SLIDERS:
        text = query.get(slider.name, str(slider.start))
        last = len(slider.stops) - 1
        if not (text.isascii() and text.isdigit() and len(text) < 4 and int(text) <= last):
            raise ConfigError(f"{slider.name}: expected a whole number from 0 to {last}")
        positions[slider.name] = int(text)
    return positions


@lru_cache(256)
def slider_guarantee(noise: int, users: int, share: int, rounds: int) -> SliderGuarantee:
    """Return the guarantee at these positions of the sliders."""
    multiplier, population, percent, count = (
        slider.stops[position]
        for slider, position in zip(SLIDERS, (noise, users, share, rounds), strict=True)
    )
    delta = min(LARGEST_DELTA, 1 / (10 * population))
    sampling: Sampling = Everybody() if percent == 100 else Poisson(percent / 100)
    epsilon, unsampled = (
        epsilon_of(Gaussian(multiplier, drawn, "zero-out-one"), int(count), delta)
        for drawn in (sampling, Everybody())
    )
    posterior = 1 / (1 + math.exp(-min(epsilon, 700)))
    verdict = next(words for most, words in VERDICTS.items() if epsilon <= most)
    return SliderGuarantee(epsilon, delta, unsampled, posterior, verdict)
