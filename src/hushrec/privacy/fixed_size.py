"""Privacy loss of a noisy sum over a fixed-size sample, under replace-one.

A sample of share γ, drawn without replacement, holds the changed user with probability γ. Given the
others in it, the three possible sums (with the user's data, with its replacement, with another user
in its place) lie within the sensitivity of each other. So for α >= 1 the hockey-stick divergence
between neighbours is at most that of ((1 - γ) Q + γ P, Q), P and Q being Gaussians one sensitivity
apart (Zhu, Dong, Wang 2022, theorem 11), and for α < 1 it follows, as the relation is symmetric:
H(α) = 1 - α + α H(1 / α). The pair of distributions with exactly this profile has

* losses l > 0 as of (1 - γ) Q + γ P against Q, with the probabilities of the first,
* losses -l with the probabilities of the second,
* and the loss 0 with what is left.

It dominates a round, and its products dominate rounds one after the other (theorem 10), also
adaptive ones, as long as a round is a function of the data and of earlier releases.
docs/guarantees.md has the proof. γ = 1 is a plain Gaussian.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

FARTHEST = 9.0
"""Deviations of the noise beyond which the loss counts as infinite; of mass 10^-19."""


def composed_epsilon(
    events: Iterable[tuple[float, float, int]], delta: float, step: float
) -> float:
    """Return an upper bound of the epsilon of (multiplier, share, count) events at this delta."""
    whole: Any = None
    for multiplier, share, count in events:
        part = _losses(multiplier, share, step).self_compose(count)
        whole = part if whole is None else whole.compose(part)
    return float(whole.get_epsilon_for_delta(delta))


def _losses(multiplier: float, share: float, step: float) -> Any:
    """Return the losses on a grid; each moves to its two neighbours so that no profile falls.

    The mass of a cell goes to both ends so that the masses of both distributions are kept, which
    interpolates the profile between the points of the grid from above, as it is convex ("connect
    the dots", Doroshenko et al. 2022).
    """
    from dp_accounting.pld.pld_pmf import DensePLDPmf

    apart = 1 / multiplier
    largest = math.log1p(share * math.expm1(min(apart * FARTHEST + apart**2 / 2, 700.0)))
    cells = max(1, math.ceil(largest / step))
    ends = step * np.arange(cells + 1, dtype=np.float64)
    # Where the loss exceeds each end; beyond the last one it is infinite.
    where = (np.log1p(np.expm1(ends) / share) + apart**2 / 2) / apart
    of_q, of_p = norm.sf(where), norm.sf(where - apart)
    of_mix = (1 - share) * of_q + share * of_p
    first, second = -np.diff(of_mix), -np.diff(of_q)
    upper = _upper_part(first, second, ends)
    # Mirrored, the two distributions change places, and so do the ends of a cell.
    lower = _upper_part(second, first, -ends)
    masses = np.zeros(2 * cells + 1)
    masses[cells + 1 :] += upper
    masses[cells:-1] += first - upper
    masses[:cells] += lower[::-1]
    masses[1 : cells + 1] += (second - lower)[::-1]
    masses[0] += of_q[-1]  # the most negative losses, rounded up
    masses[cells] += max(0.0, 1 - masses.sum() - of_mix[-1])
    return DensePLDPmf(step, -cells, masses, float(of_mix[-1]), pessimistic_estimate=True)


def _upper_part(
    mass: NDArray[np.float64], other: NDArray[np.float64], ends: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the mass that goes to the second end of each cell, so that ``other`` is kept too."""
    near, far = np.exp(-ends[:-1]), np.exp(-ends[1:])
    return np.asarray(np.clip((mass * near - other) / (near - far), 0, mass))
