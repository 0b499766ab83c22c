"""`Accountant`: epsilon of a history of noisy sums, computed by dp-accounting.

An event has a neighbour relation, a sampling scheme and a noise multiplier: the standard deviation
of the noise divided by the L2 sensitivity *under that relation*. Combinations without a composition
theorem are refused.

=============  ===================  ==============================================================
sampling       neighbours           analysis
=============  ===================  ==============================================================
`Poisson`      zero-out-one         privacy loss distributions
`FixedSize`    replace-one          privacy loss distributions (`fixed_size`)
`Everybody`    either               T Gaussians of multiplier z are one of z / sqrt(T), exactly
=============  ===================  ==============================================================

Zero-out-one: the data of one user is zeroed out, and the number of users is public. Analyses of
add-or-remove-one apply, because the upload of a user without data is zero: both compare a sum with
a user's upload and the same sum without it (docs/guarantees.md).

Noise on a `Grid` is discrete; `discreteness` computes what that adds to epsilon. The accountant
draws no noise and holds only its history.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from hushrec.aggregation import STEPS_PER_UNIT
from hushrec.errors import ConfigError

Values = NDArray[np.float64]
History = Sequence[Mapping[str, Any]]
"""The events of an accountant as JSON values."""
Neighbours = Literal["zero-out-one", "replace-one"]
"""Neighbouring data sets: one user's data is zeroed out, or replaced by any other."""

ORDERS = (*range(2, 65), 80, 96, 128, 192, 256)
"""Rényi orders; each gives a bound on epsilon, of which the smallest is used."""
WIDEST_LOSS, WIDEST_SUM = 150.0, 50_000.0
"""Largest privacy loss of one event, and of all, whose distribution is computed in seconds."""
LEAST_NOISE = 1e-9
"""Smallest positive noise multiplier; squares of smaller ones underflow."""
KEPT_BACK = 1e-3
"""Share of delta reserved for discrete noise, and largest relative increase of epsilon by it."""


def sensitivity(clip: float, neighbours: Neighbours) -> float:
    """Return the L2 sensitivity of a sum of uploads of norm <= clip."""
    return clip if neighbours == "zero-out-one" else 2 * clip


@dataclass(frozen=True)
class Poisson:
    """Every client takes part independently with this probability."""

    probability: float

    def __post_init__(self) -> None:
        _require(0 < self.probability <= 1, "the probability of a Poisson sample lies in (0, 1]")

    def __str__(self) -> str:
        return f"Poisson, each client with probability {self.probability:.6g}"


@dataclass(frozen=True)
class FixedSize:
    """Exactly ``size`` of ``population`` clients, without replacement."""

    size: int
    population: int

    def __post_init__(self) -> None:
        _require(
            1 <= self.size <= self.population,
            f"a cohort of {self.size} cannot be drawn from {self.population} clients",
        )

    def __str__(self) -> str:
        return f"fixed-size, {self.size} of {self.population} clients without replacement"


@dataclass(frozen=True)
class Everybody:
    """All clients take part in every round: no amplification by sampling."""

    def __str__(self) -> str:
        return "none, every client may take part in every round"


Sampling = Poisson | FixedSize | Everybody
SAMPLING = {"poisson": Poisson, "fixed": FixedSize, "none": Everybody}


@dataclass(frozen=True)
class Grid:
    """The grid of discrete Gaussian noise."""

    deviation: float
    """Standard deviation of the noise in grid steps, or a lower bound of it."""
    entries: int
    """Number of noised entries in one event, or an upper bound of it."""


@dataclass(frozen=True)
class Gaussian:
    """A sum over sampled clients with Gaussian noise."""

    multiplier: float
    """Standard deviation of the noise over the L2 sensitivity under `neighbours`."""
    sampling: Sampling
    neighbours: Neighbours
    grid: Grid | None = None
    """The grid of discrete noise; None for continuous noise."""

    def __post_init__(self) -> None:
        _require(self.multiplier >= 0, "a noise multiplier is not negative")
        if 0 < self.multiplier < LEAST_NOISE:
            raise ConfigError(
                f"a noise multiplier of {self.multiplier:g} is too small: use 0, or more"
            )
        accounted = {Poisson: ("zero-out-one", "fixed-size"), FixedSize: ("replace-one", "Poisson")}
        fits, other = accounted.get(type(self.sampling), (self.neighbours, ""))
        if self.neighbours != fits:
            raise ConfigError(
                f"this sampling is accounted for under {fits}: use neighbours = {fits}, or {other} "
                f"sampling for {self.neighbours}"
            )

    def at(self, multiplier: float) -> Gaussian:
        """Return the same event with another noise multiplier."""
        if self.grid is None or self.multiplier == 0:
            return replace(self, multiplier=multiplier)
        deviation = self.grid.deviation * multiplier / self.multiplier
        return replace(self, multiplier=multiplier, grid=replace(self.grid, deviation=deviation))


@dataclass(frozen=True)
class Pure:
    """An (epsilon, 0)-DP event, such as Laplace noise."""

    epsilon: float

    def __post_init__(self) -> None:
        _require(self.epsilon >= 0, "epsilon is not negative")


Event = Gaussian | Pure
EventAt = Callable[[float], Gaussian]
"""The event of a noise multiplier."""


def discrete_gaussian(apart: float, neighbours: Neighbours, entries: int) -> EventAt:
    """Return the event of discrete noise on ``entries`` numbers of sensitivity ``apart``."""
    return lambda multiplier: Gaussian(
        multiplier, Everybody(), neighbours, Grid(multiplier * apart * STEPS_PER_UNIT, entries)
    )


class Accountant:
    """A history of events; equal events are counted, because their order does not matter."""

    def __init__(self, history: Iterable[Mapping[str, Any]] = ()) -> None:
        self._entries: dict[Event, int] = {}
        for entry in history:
            self.record(_event(entry), entry["count"])

    def record(self, event: Event, count: int = 1) -> Self:
        """Add ``count`` equal events, and return the accountant."""
        _require(count >= 0, "an event cannot happen a negative number of times")
        if count:
            self._entries[event] = self._entries.get(event, 0) + count
        return self

    def history(self) -> list[dict[str, Any]]:
        """Return the history as JSON values; `Accountant(history)` restores the accountant."""
        return [{**_plain(event), "count": count} for event, count in self._entries.items()]

    def epsilon(self, delta: float) -> float:
        """Return an upper bound of the epsilon of all events together at this delta."""
        _require(0 < delta < 1, f"delta = {delta}: must lie between 0 and 1")
        entries = self._entries.items()
        pure = sum(event.epsilon * count for event, count in entries if isinstance(event, Pure))
        gaussians = [(event, count) for event, count in entries if isinstance(event, Gaussian)]
        if len({event.neighbours for event, _ in gaussians}) > 1:
            raise ConfigError("one accountant cannot hold two neighbour relations")
        if not gaussians:
            return pure
        grids = [(event.grid, count) for event, count in gaussians if event.grid is not None]
        kept_back = KEPT_BACK if grids else 0.0
        continuous = pure + _gaussian_epsilon(gaussians, delta * (1 - kept_back))
        return continuous + discreteness(grids, continuous, delta)


def without_amplification(history: History) -> list[dict[str, Any]] | None:
    """Return the history for somebody who sees who was drawn; None if nobody is drawn."""
    sampled = [entry.get("sampling", {}).get("kind") in ("poisson", "fixed") for entry in history]
    if not any(sampled):
        return None
    return [
        {**entry, "sampling": {"kind": "none"}} if drawn else dict(entry)
        for entry, drawn in zip(history, sampled, strict=True)
    ]


def discreteness(grids: list[tuple[Grid, int]], epsilon: float, delta: float) -> float:
    """Return what discrete noise adds to the epsilon of continuous noise (guarantees.md, lemma 4).

    Rounding continuous noise to whole steps costs nothing, because the data are whole steps. Within
    R deviations, the probabilities of rounded and of discrete noise of s steps differ by a factor
    of at most exp(R² / 8 s²) per entry; R is chosen so that the tails cost a millionth of delta.
    """
    draws = sum(count * grid.entries for grid, count in grids)
    if not draws or math.isinf(epsilon):
        return 0.0
    squared_reach = 2 * (epsilon + math.log(1e6 * draws / delta))
    coarseness = sum(count * grid.entries / grid.deviation**2 for grid, count in grids)
    added = squared_reach / 4 * coarseness
    return added if added <= KEPT_BACK * min(1.0, epsilon) else math.inf


def epsilon_of(event: Event, rounds: int, delta: float) -> float:
    """Return the epsilon of ``rounds`` equal events."""
    return Accountant().record(event, rounds).epsilon(delta)


def noise_for(
    epsilon: float, delta: float, rounds: int, event_at: EventAt, beside: History = ()
) -> float:
    """Return the smallest noise multiplier, within 0.1 %, that keeps ``rounds`` below epsilon.

    ``event_at`` returns the event of a round for a multiplier; ``beside`` is a history that is
    charged to the same epsilon.
    """
    _require(0 < epsilon < math.inf, f"epsilon = {epsilon}: must be positive")
    _require(rounds >= 1, f"rounds = {rounds}: must be at least 1")

    def spent(multiplier: float) -> float:
        # The search needs a finite value where epsilon has no bound.
        return min(Accountant(beside).record(event_at(multiplier), rounds).epsilon(delta), 1e12)

    enough = 1.0
    while spent(enough) > epsilon:
        enough *= 2
        if enough > 2.0**40:
            raise ConfigError(
                f"no noise gives epsilon {epsilon:g} at delta {delta:g} in {rounds} rounds under "
                "this analysis: use a larger epsilon or delta"
            )
    short = enough / 2
    while spent(short) <= epsilon:
        enough, short = short, short / 2
    if isinstance(event_at(short).sampling, Poisson) and _too_wide(short, rounds):
        return enough  # a smaller one may suffice, but its epsilon cannot be computed
    # On logarithmic scales epsilon is nearly linear in the noise.
    ends = math.log(short), math.log(enough)
    found = brentq(lambda z: math.log(max(spent(math.exp(z)), 1e-12) / epsilon), *ends, xtol=5e-4)
    multiplier = math.exp(found)
    while spent(multiplier) > epsilon:
        multiplier *= 1.0005
    return multiplier


@lru_cache(maxsize=256)
def renyi_curve(multiplier: float, sampling: FixedSize) -> Values:
    """Return the Rényi DP of one noisy sum over a fixed-size sample, replace-one, at `ORDERS`."""
    # Importing dp-accounting takes a second, and most commands do not need it.
    import dp_accounting as dp
    from dp_accounting.rdp import RdpAccountant

    analysis = RdpAccountant(ORDERS, dp.NeighboringRelation.REPLACE_ONE)
    noisy = dp.GaussianDpEvent(multiplier)
    analysis.compose(dp.SampledWithoutReplacementDpEvent(sampling.population, sampling.size, noisy))
    return np.asarray(analysis.rdp)


def _gaussian_epsilon(events: list[tuple[Gaussian, int]], delta: float) -> float:
    if any(event.multiplier == 0 for event, _ in events):
        return math.inf
    kinds = {type(event.sampling) for event, _ in events}
    if kinds == {Everybody}:
        from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

        information = sum(count / event.multiplier**2 for event, count in events)
        return float(get_epsilon_gaussian(1 / math.sqrt(information), delta))
    if FixedSize not in kinds:
        return _by_privacy_loss(events, delta)
    if not any(_too_wide(event.multiplier, count) for event, count in events):
        return _refined(lambda step: _of_fixed_size(events, delta, step), fine=3e-4)
    # It has a bound also where privacy loss distributions are too wide to compute.
    return renyi_epsilon(events, delta)


def renyi_epsilon(events: Sequence[tuple[Gaussian, int]], delta: float) -> float:
    """Return epsilon by Rényi DP (Wang, Balle, Kasiviswanathan 2019), the analysis of DP-PrivRec.

    It is a bound too, and about twice as large as that of privacy loss distributions.
    """
    from dp_accounting.rdp import compute_epsilon

    curve = np.zeros(len(ORDERS))
    for event, count in events:
        if isinstance(event.sampling, FixedSize):
            curve += count * renyi_curve(event.multiplier, event.sampling)
        else:
            curve += count * np.array(ORDERS) / (2 * event.multiplier**2)
    return float(compute_epsilon(ORDERS, curve, delta)[0])


def _by_privacy_loss(events: list[tuple[Gaussian, int]], delta: float) -> float:
    if any(_too_wide(event.multiplier, count) for event, count in events):
        return math.inf
    return _refined(lambda step: _on_grid(events, delta, step))


def _refined(epsilon_on: Callable[[float], float], fine: float = 1e-4) -> float:
    """Return the epsilon on a grid of losses.

    Every grid gives an upper bound. The coarse one is ten times as fast and within 0.3 % unless
    epsilon is small, where the fine one is fast enough.
    """
    coarse = epsilon_on(1e-3)
    return coarse if coarse > 1 else epsilon_on(fine)


def _of_fixed_size(events: list[tuple[Gaussian, int]], delta: float, step: float) -> float:
    from hushrec.privacy.fixed_size import composed_epsilon

    shares = [
        event.sampling.size / event.sampling.population
        if isinstance(event.sampling, FixedSize)
        else 1.0
        for event, _ in events
    ]
    parts = [(e.multiplier, share, n) for (e, n), share in zip(events, shares, strict=True)]
    return composed_epsilon(parts, delta, step)


def _too_wide(multiplier: float, count: int) -> bool:
    """Return whether the privacy loss distribution is too wide to compute (epsilon in hundreds)."""
    reach = 0.5 / multiplier**2 + 10 / multiplier
    return reach > WIDEST_LOSS or reach * math.sqrt(count) > WIDEST_SUM


def _on_grid(events: list[tuple[Gaussian, int]], delta: float, step: float) -> float:
    import dp_accounting as dp
    from dp_accounting.pld import PLDAccountant

    # REPLACE_ONE would double the sensitivity, which our multipliers already contain.
    analysis = PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE, step)
    for event, count in events:
        noisy: Any = dp.GaussianDpEvent(event.multiplier)
        if isinstance(event.sampling, Poisson):
            noisy = dp.PoissonSampledDpEvent(event.sampling.probability, noisy)
        analysis.compose(noisy, count)
    return float(analysis.get_epsilon(delta))


def _plain(event: Event) -> dict[str, Any]:
    if isinstance(event, Pure):
        return {"event": "pure", "epsilon": event.epsilon}
    kind = next(name for name, of in SAMPLING.items() if isinstance(event.sampling, of))
    plain = {
        "event": "gaussian" if event.grid is None else "discrete gaussian",
        "multiplier": event.multiplier,
        "neighbours": event.neighbours,
        "sampling": {"kind": kind, **asdict(event.sampling)},
    }
    return plain if event.grid is None else {**plain, "grid": asdict(event.grid)}


def _event(entry: Mapping[str, Any]) -> Event:
    if entry["event"] == "pure":
        return Pure(entry["epsilon"])
    sampling = dict(entry["sampling"])
    kind = SAMPLING[sampling.pop("kind")]
    grid = Grid(**entry["grid"]) if "grid" in entry else None
    return Gaussian(entry["multiplier"], kind(**sampling), entry["neighbours"], grid)


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)
