"""Recent transition expert: `experts.transitions` over a short window, and plain transition counts.

The long window has more data; the short one is more specific, and its counts keep what the
regression smooths away: how often exactly this item followed that one.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import KeyedRows
from hushrec.data.views import TrainView
from hushrec.kernels import experts as kernels
from hushrec.kernels import pairs as pair_kernels
from hushrec.methods.base import Shared
from hushrec.methods.statistics.experts.base import (
    Array,
    Expert,
    Head,
    Part,
    empty_table,
    extended_table,
    kept_table,
    powered,
    rest,
    strongest,
)
from hushrec.methods.statistics.fednext import gaps, regression

WINDOW, GRAM, RIDGE = 3, 0.2, 20.0
LAGS = np.array([1, 2, 5])
FLOOR = 0.003
COUNTED = np.array([1, 2, 3])
"""Lags of the scores by counts."""
COUNT_FLOOR = 0.1
"""Added to a count before its logarithm: between no transition and one."""


class RecentTransitions(Expert):
    """Scores what came right after the last items, by regression and by counts."""

    name = "recent-transitions"
    counted = "head and rest"
    start: ClassVar[dict[str, float]] = {}

    def init(self, view: TrainView) -> Shared:
        """Start from no weights and no counts."""
        table, counts = (empty_table(view.n_items, self.config) for _ in range(2))
        return {**table, "followers": counts["neighbours"], "counts": counts["weights"]}

    def scores(self, model: Shared) -> tuple[str, ...]:
        """Weights by lag, the logarithm of their sum, and logarithms of counts by lag."""
        counted = (f"log count, {lag} back" for lag in COUNTED)
        return *(f"up to {lag} back" for lag in LAGS), "log of all", *counted

    def count(self, view: TrainView) -> KeyedRows:
        """Count transitions within a few steps, and the items themselves."""
        past = view.positives
        pairs = pair_kernels.following_pairs(past.indptr, past.values, view.n_items, gaps(WINDOW))
        return KeyedRows(*pairs, space=view.n_items**2)

    def learn(self, model: Shared, keys: NDArray[np.int64], sums: NDArray[np.float64]) -> Shared:
        """Regress the next item, and keep the counts themselves."""
        n_items = len(model["neighbours"])
        head = Head.of(keys, sums[:, 0], n_items, self.config.dense_items)
        weights = regression(powered(head.block, 0.5), GRAM, RIDGE)
        pairs, values = head.outside
        alone = _alone(head.counts[pairs // n_items], values)
        counted = strongest(model, keys, np.maximum(sums[:, 0], 0.0), n_items)
        return {
            **kept_table(model, head, weights, pairs, alone),
            "followers": counted["neighbours"],
            "counts": counted["weights"],
        }

    def extend(self, model: Shared, keys: NDArray[np.int64], sums: NDArray[np.float64]) -> Shared:
        """Weigh pairs that are not both in the head by their own sums."""
        pairs, values, counts = rest(keys, sums[:, 0], len(model["neighbours"]))
        followers = {"neighbours": model["followers"], "weights": model["counts"]}
        counted = extended_table(followers, pairs, np.maximum(values, 0.0))
        return {
            **extended_table(model, pairs, _alone(counts, values)),
            "followers": counted["neighbours"],
            "counts": counted["weights"],
        }

    def score(self, model: Shared, view: TrainView, out: NDArray[np.float32]) -> None:
        """Add up the weights, and look up the counts."""
        past, end = view.positives, len(LAGS)
        by_place = np.ones(0, np.float32)
        table = model["neighbours"], model["weights"]
        kernels.add_by_lag(out[:, :end], past.indptr, past.values, *table, LAGS, by_place)
        kernels.log_of_sum(out[:, :end], FLOOR, out[:, end])
        counted, table = out[:, end + 1 :], (model["followers"], model["counts"])
        kernels.add_by_lag(counted, past.indptr, past.values, *table, COUNTED, by_place)
        for lag in range(len(COUNTED)):
            kernels.log_of_sum(counted[:, lag : lag + 1], COUNT_FLOOR, counted[:, lag])

    def parts(self, model: Shared) -> tuple[Part, ...]:
        """Return the same scores for bundles."""
        weights = {name: model[name] for name in ("neighbours", "weights")}
        counts = {"neighbours": model["followers"], "weights": model["counts"]}
        by_weight = {"ends": LAGS.tolist(), "recency": 0.0, "floor": FLOOR, "logs": "sum"}
        by_count = {"ends": COUNTED.tolist(), "recency": 0.0, "floor": COUNT_FLOOR, "logs": "each"}
        return Part("lags", by_weight, weights), Part("lags", by_count, counts)


def _alone(counts: Array, sums: Array) -> Array:
    weights: Array = np.sqrt(np.maximum(sums, 0.0)) / (np.sqrt(counts) + RIDGE)
    return weights
