"""What trials prove: lower bounds of epsilon, with a confidence.

With a threshold that was chosen on one half of the trials, the other half gives true and false
positive rates with Clopper-Pearson bounds, and (epsilon, delta)-DP would need
TPR <= e^epsilon FPR + delta:

    epsilon >= log((TPR_low - delta) / FPR_high)        (or the same for "not there")

Where all rounds are plain Gaussians the claim is more than one epsilon: it is a trade-off curve
with one parameter, mu. Then mu >= z(TPR_low) - z(FPR_high), and the epsilon of that mu at the run's
delta is a second, sharper bound (Dong, Roth, Su 2022).

Bounds are printed at 95 %. A claim is called contradicted only at 99.99 %, shared out among all
that is asked at once: else one honest run in twenty or so would fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import beta, binom, norm

from hushrec.privacy.accountant import Everybody, Gaussian, epsilon_of

CONFIDENCE = 0.95
CERTAIN = 0.9999
THRESHOLDS = 200
MOST_GUESSED = 30.0
"""Epsilon beyond which no number of guesses is asked about."""

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Trials:
    """The attacker's statistic in each world, larger if the canary is there."""

    there: Values
    absent: Values


def certain_among(tests: int) -> float:
    """Return the confidence of each of so many tests, so that all together are certain."""
    return 1 - (1 - CERTAIN) / max(1, tests)


def lower_bound(trials: Trials, delta: float, confidence: float) -> tuple[float, float, float]:
    """Return a lower bound of epsilon, and the TPR and FPR it rests on."""
    return _bounded(
        trials, confidence, lambda low, high: np.log(np.maximum(low - delta, 1e-300) / high)
    )


def gaussian_bound(trials: Trials, delta: float, confidence: float) -> float:
    """Return the epsilon at delta of the smallest Gaussian trade-off that fits the trials."""
    mu, _, _ = _bounded(trials, confidence, lambda low, high: norm.ppf(low) - norm.ppf(high))
    if mu <= 0:
        return 0.0
    return epsilon_of(Gaussian(1 / mu, Everybody(), "replace-one"), 1, delta)


def most_provable(trials: int, delta: float) -> float:
    """Return the largest bound that so many trials can give: an attacker that never errs."""
    low, high = clopper_pearson(np.array([trials // 4, 0]), trials // 4, CONFIDENCE)
    return math.log(max(low[0] - delta, 1e-300) / high[1])


def guessing_bound(
    right: int, guesses: int, coins: int, delta: float, confidence: float, apart: int = 1
) -> float:
    """Return the epsilon that so many right guesses of coins in one run prove.

    Coins are fair and independent, each decides between two data sets that are ``apart`` neighbours
    from each other, and what is guessed is what one run released. Then right guesses are hardly
    more than those of coins that fall right with probability e^epsilon / (1 + e^epsilon), however
    they depend on each other (Steinke, Nasr, Jagielski 2023, theorem 5.2).
    """
    most = np.arange(1, coins + 1)

    def chance(epsilon: float) -> float:
        between = apart * epsilon
        # Steps of a path between data sets: their deltas add up, each times what comes after it.
        slack = delta * sum(math.exp(step * epsilon) for step in range(apart))
        likely = binom(guesses, 1 / (1 + math.exp(-between)))
        beyond = float(likely.sf(right - 1))
        more = float(((likely.sf(right - 1 - most) - beyond) / most).max())
        return beyond + 2 * coins * min(slack, 1.0) * more

    if not guesses or chance(0.0) >= 1 - confidence:
        return 0.0
    if chance(MOST_GUESSED) < 1 - confidence:
        return MOST_GUESSED
    return float(brentq(lambda eps: chance(eps) - (1 - confidence), 0.0, MOST_GUESSED, xtol=1e-4))


def judged(
    trials: Trials,
    claimed: float,
    delta: float,
    *,
    gaussian: bool = True,
    certain: float = CERTAIN,
) -> dict[str, Any]:
    """Hold a claim against trials; ``gaussian`` says that all of it is plain Gaussian noise."""
    lower, true, false = lower_bound(trials, delta, CONFIDENCE)
    surely = lower_bound(trials, delta, certain)[0]
    sharper = None
    if gaussian and delta > 0:
        sharper = gaussian_bound(trials, delta, CONFIDENCE)
        surely = max(surely, gaussian_bound(trials, delta, certain))
    count = len(trials.there) + len(trials.absent)
    return {
        "claimed_epsilon": claimed,
        "delta": delta,
        "lower_bound": lower,
        "gaussian_lower_bound": sharper,
        "most_provable": most_provable(count, delta),
        "tpr": true,
        "fpr": false,
        "trials": count,
        "certain_lower_bound": surely,
        "contradicted": surely > claimed,
    }


def _bounded(
    trials: Trials, confidence: float, value: Callable[[Values, Values], Values]
) -> tuple[float, float, float]:
    """Choose threshold and side on one half of the trials; judge them on the other."""
    halves = [(trials.there[k::2], trials.absent[k::2]) for k in (0, 1)]
    (one, zero), (one_test, zero_test) = halves
    best, chosen = -math.inf, (1.0, 0.0)
    for side in (1.0, -1.0):
        # "Not there" is the same question with the worlds and the sign exchanged.
        hit, miss = (one, zero) if side > 0 else (-zero, -one)
        thresholds = np.quantile(np.concatenate([hit, miss]), np.linspace(0, 1, THRESHOLDS))
        thresholds = np.unique(np.concatenate([thresholds, np.sort(miss)[-10:]]))
        values = value(*_rates(hit, miss, thresholds, confidence))
        if values.max() > best:
            best, chosen = float(values.max()), (side, float(thresholds[values.argmax()]))
    side, threshold = chosen
    hit, miss = (one_test, zero_test) if side > 0 else (-zero_test, -one_test)
    low, high = _rates(hit, miss, np.array([threshold]), confidence)
    found = max(0.0, float(value(low, high)[0]))
    return found, float((hit > threshold).mean()), float((miss > threshold).mean())


def _rates(
    hit: Values, miss: Values, thresholds: Values, confidence: float
) -> tuple[Values, Values]:
    """Return the lower end of TPR and the upper end of FPR at each threshold."""
    true = len(hit) - np.searchsorted(np.sort(hit), thresholds, "right")
    false = len(miss) - np.searchsorted(np.sort(miss), thresholds, "right")
    return (
        clopper_pearson(true, len(hit), confidence)[0],
        clopper_pearson(false, len(miss), confidence)[1],
    )


def clopper_pearson(hits: NDArray[Any], n: int, confidence: float) -> tuple[Values, Values]:
    """Return bounds of a probability; both rates together hold with this confidence."""
    tail = (1 - confidence) / 2
    low = np.where(hits > 0, beta.ppf(tail, np.maximum(hits, 1), n - hits + 1), 0.0)
    high = np.where(hits < n, beta.ppf(1 - tail, hits + 1, np.maximum(n - hits, 1)), 1.0)
    return np.clip(low, 1e-300, 1), np.clip(high, 1e-300, 1)
