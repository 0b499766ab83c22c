"""Is a difference real? Intervals and paired tests over users, corrected for many comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.stats import wilcoxon

from hushrec.errors import ConfigError, InputError

Values = NDArray[np.float64]

_CHUNK = 1 << 20
"""Random numbers held at once: small enough to stay in the cache, large enough to vectorise."""


@dataclass(frozen=True)
class PairedTest:
    """Two methods compared on the same users."""

    difference: float
    """Mean of ``a - b``."""
    low: float
    high: float
    """Ends of the 95 % bootstrap interval of the difference."""
    p_value: float
    """Two-sided."""
    n: int
    """Number of users."""


def bootstrap_interval(
    values: Values, *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean, resampling users."""
    values = _checked(values)
    if not 0 < level < 1:
        raise ConfigError(f"the level of an interval lies between 0 and 1, not {level}")
    _require_resamples(resamples)
    rng = np.random.default_rng(seed)
    n = len(values)
    means = np.empty(resamples)
    for part in _chunks(resamples, n):
        means[part] = values[rng.integers(0, n, (part.stop - part.start, n), np.int32)].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired_test(
    a: Values,
    b: Values,
    *,
    method: Literal["randomisation", "wilcoxon"] = "randomisation",
    resamples: int = 10_000,
    seed: int = 0,
) -> PairedTest:
    """Test whether ``a`` and ``b``, values of the same users in the same order, differ.

    ``randomisation`` swaps the two methods at random for each user and asks how often the mean
    difference is at least as large as the observed one. ``wilcoxon`` is the signed-rank test with
    Pratt's rule for users without a difference.
    """
    a, b = _checked(a), _checked(b)
    if len(a) != len(b):
        raise InputError(f"a paired test needs the same users: {len(a)} against {len(b)} values")
    difference = a - b
    if method == "randomisation":
        p_value = _sign_flip(difference, resamples, seed)
    elif method == "wilcoxon":
        p_value = _signed_rank(difference)
    else:
        raise ConfigError(f"unknown test '{method}'; known: randomisation, wilcoxon")
    low, high = bootstrap_interval(difference, seed=seed)
    return PairedTest(float(difference.mean()), low, high, p_value, len(difference))


def holm(p_values: Sequence[float] | Values) -> Values:
    """Return Holm's adjusted p-values, in the order given.

    Rejecting where they are at most alpha keeps the chance of any false rejection at alpha.
    """
    p = np.asarray(p_values, np.float64)
    if not np.all((p >= 0) & (p <= 1)):
        raise InputError("p-values lie between 0 and 1")
    order = np.argsort(p)
    adjusted = np.empty(len(p))
    adjusted[order] = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    return np.minimum(adjusted, 1)


def _sign_flip(difference: Values, resamples: int, seed: int) -> float:
    _require_resamples(resamples)
    rng = np.random.default_rng(seed)
    n = len(difference)
    total = difference.sum()
    # Sums that are equal on paper differ in the last bits; those count as at least as large.
    threshold = abs(total) - 1e-12 * np.abs(difference).sum()
    extreme = 0
    for part in _chunks(resamples, n):
        random_bytes = rng.integers(0, 256, (part.stop - part.start, (n + 7) // 8), np.uint8)
        kept = np.unpackbits(random_bytes, axis=1, count=n).astype(np.float64)
        extreme += int(np.count_nonzero(np.abs(2 * (kept @ difference) - total) >= threshold))
    # The observed assignment is one of the possible ones, hence the + 1: p is never 0.
    return (extreme + 1) / (resamples + 1)


def _signed_rank(difference: Values) -> float:
    if not difference.any():
        return 1.0
    return float(wilcoxon(difference, zero_method="pratt").pvalue)


def _chunks(resamples: int, n: int) -> list[slice]:
    rows = max(1, _CHUNK // n)
    return [slice(first, min(first + rows, resamples)) for first in range(0, resamples, rows)]


def _checked(values: Values) -> Values:
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or len(values) == 0 or not np.all(np.isfinite(values)):
        raise InputError("a test needs one finite value for each of at least one user")
    return values


def _require_resamples(resamples: int) -> None:
    if resamples < 1:
        raise ConfigError(f"at least 1 resample is needed, not {resamples}")
