"""What noisy sums say of the sums: empirical Bayes. It reads noised sums only: no privacy is spent.

A sum y = θ + noise with θ >= 0 and Gaussian noise of known deviation. Sums of one group (pairs of
items of similar popularity, say) have one unknown prior. The prior that explains the group's y best
among all distributions on a grid is found by expectation-maximisation (the nonparametric maximum
likelihood of Kiefer and Wolfowitz 1956, in the empirical Bayes of Robbins 1956), and θ^p is
estimated by its posterior mean. So where a group is mostly empty, a sum has to stand far above the
noise to be believed, and in a full group it has not; no threshold is chosen by hand.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

CELLS = 300
"""Cells of the histogram of a group's sums."""
SUPPORT = 60
"""Values above 0 that the prior may take."""
STEPS = 60
"""Steps of expectation-maximisation."""
SMALLEST_GROUP = 500
"""Groups of fewer sums are joined with the next one."""

Vector = NDArray[np.float64]


def expected_powers(
    noisy: Vector, noise_std: float, groups: NDArray[np.int64], power: float
) -> Vector:
    """Return E[θ^power | noisy], each group by its own prior; groups are numbered by likeness."""
    if noise_std == 0.0:
        return np.asarray(np.maximum(noisy, 0.0) ** power)
    out = np.empty(len(noisy))
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    first = 0
    for start in [*starts[1:], len(noisy)]:
        if start - first >= SMALLEST_GROUP or start == len(noisy):
            mine = order[first:start]
            out[mine] = _by_one_prior(noisy[mine], noise_std, power)
            first = start
    return out


def _by_one_prior(noisy: Vector, noise_std: float, power: float) -> Vector:
    if not len(noisy):
        return noisy
    # Cells grow away from 0, as sums are many near 0 and few beyond.
    lowest, highest = np.arcsinh(np.array([noisy.min(), noisy.max()]) / noise_std)
    edges = np.sinh(np.linspace(lowest - 1e-9, highest + 1e-9, CELLS + 1)) * noise_std
    counts = np.histogram(noisy, edges)[0]
    middles = ((edges[1:] + edges[:-1]) / 2)[counts > 0]
    counts = counts[counts > 0]
    above = np.geomspace(0.01 * noise_std, max(noisy.max(), noise_std), SUPPORT)
    values = np.concatenate([[0.0], above])
    exponent = -0.5 * ((middles[:, None] - values) / noise_std) ** 2
    # Only ratios within a cell count; so scaled, they do not underflow far from every value.
    likelihood = np.exp(exponent - exponent.max(axis=1, keepdims=True))
    prior: NDArray[Any] = np.full(len(values), 1 / len(values))
    for _ in range(STEPS):
        joint = likelihood * prior
        prior = counts @ (joint / joint.sum(axis=1, keepdims=True)) / counts.sum()
    joint = likelihood * prior
    means = joint @ values**power / joint.sum(axis=1)
    return np.asarray(np.interp(noisy, middles, means))
