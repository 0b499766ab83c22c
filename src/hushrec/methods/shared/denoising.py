"""Training under noise: denoising of noisy sums, and the head of the catalogue.

**Denoising** is empirical Bayes. It reads noised sums only, so it spends no privacy budget. A sum
y = θ + noise has θ >= 0 and Gaussian noise of known deviation. Sums of one group (pairs of items of
similar popularity, say) have one unknown prior. The prior that explains the group's y best among
all distributions on a grid is found by expectation-maximisation (the nonparametric maximum
likelihood of Kiefer and Wolfowitz 1956, in the empirical Bayes of Robbins 1956), and θ^p is
estimated by its posterior mean. So where a group is mostly empty, a sum has to stand far above the
noise to be believed, and in a full group it has not; no threshold is chosen by hand.

**The head** is the set of items that are popular enough to be seen through the noise. In a first
round a device uploads its items, scaled to norm 1, and the server keeps the most popular ones.
Later rounds ask about the head alone: an item outside it is never found, and each one inside
lowers the signal of all others, because an upload's norm is bounded and noise is added to every
entry. So the head has the size h with the greatest

    log(share of all counts that it covers) - price · h · (deviation of noise to come) / clients,

which puts an item in if its share of what is covered exceeds the price of noise per device. The hit
rate falls about as exp(-price · h · noise / clients) with the size of the head, whatever epsilon
(`experiments/privacy-utility/tuning.md`). The head is a function of noised counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import ClientRows, Total, Update
from hushrec.data.views import Ragged, TrainView
from hushrec.methods.base import Fitted, Phase, Shared
from hushrec.methods.baselines import distinct_items, where
from hushrec.private import Private
from hushrec.streams import Round

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


COUNTS = "counts"


def head_phase(
    budget: float,
    apply: Callable[[Shared, Total, int], Shared],
    download: Callable[[Shared], Shared],
) -> Phase:
    """Return the phase that counts items for the head, with a share of the privacy budget."""
    uploads = "its items, scaled to norm 1"

    def fit(shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        return Fitted(count_items(view), {})

    return Phase("count", 1, uploads, fit, apply, download, budget=budget)


def count_items(view: TrainView) -> Update:
    """Return each client's items, scaled to norm 1."""
    items = distinct_items(view.positives)
    each = np.repeat(np.maximum(items.lengths, 1) ** -0.5, items.lengths)
    uploads = ClientRows(items.indptr, items.values, each[:, None].astype(np.float32))
    return Update(len(view), rows={COUNTS: uploads})


def find_head(total: Total, n_items: int, noise_std: float, price: float, most: int) -> Shared:
    """Return the head and every item's share of the counts; the deviation is of rounds to come."""
    counts = np.maximum(total.table(COUNTS, n_items, 1)[:, 0], 0.0)
    shares = counts / max(counts.sum(), 1e-12)
    by_count = np.argsort(-counts, kind="stable")
    covered = np.log(np.maximum(np.cumsum(shares[by_count]), 1e-12))
    cost = price * noise_std / max(total.clients, 1) * np.arange(1, n_items + 1)
    size = np.clip(np.argmax(covered - cost) + 1, 2, most)  # two items make a pair
    head = np.zeros(n_items, np.bool_)
    head[by_count[:size]] = True
    return {"head": head, "shares": shares.astype(np.float32)}


def only(items: Ragged, kept: NDArray[np.bool_]) -> Ragged:
    """Return each client's items that are kept, in their order."""
    return where(items, kept[items.values])
