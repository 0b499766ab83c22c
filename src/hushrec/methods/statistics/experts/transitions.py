"""Item transition expert: `fednext`'s regression of the next item, with one score for each lag."""

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
    ExpertsConfig,
    Head,
    Part,
    empty_table,
    extended_table,
    kept_table,
    powered,
    rest,
)
from hushrec.methods.statistics.fednext import gaps, regression
from hushrec.methods.statistics.pair_weights import by_place

LAGS = np.array([1, 2, 3, 4, 6, 10, 20, 50, 200])
"""The g-th last items up to which one score reaches; the next one begins after it."""
FLOOR = 0.001
"""Added before the logarithm."""


class Transitions(Expert):
    """Scores the next item from the last item, the one before, and so on, and from all of them."""

    name = "transitions"
    counted = "head and rest"
    start: ClassVar[dict[str, float]] = {"log of all": 1.0}

    def init(self, view: TrainView) -> Shared:
        """Start from no weights."""
        return empty_table(view.n_items, self.config)

    def scores(self, model: Shared) -> tuple[str, ...]:
        """One for each run of lags, and the logarithm of their sum."""
        return *(f"up to {lag} back" for lag in LAGS), "log of all"

    def count(self, view: TrainView) -> KeyedRows:
        """Count transitions within the window, 1/steps each, and the items themselves."""
        past = view.positives
        pairs = pair_kernels.following_pairs(
            past.indptr, past.values, view.n_items, gaps(self.config.window)
        )
        return KeyedRows(*pairs, space=view.n_items**2)

    def learn(self, model: Shared, keys: NDArray[np.int64], sums: NDArray[np.float64]) -> Shared:
        """Regress the next item on the recent history."""
        config = self.config
        head = Head.of(keys, sums[:, 0], len(model["neighbours"]), config.dense_items)
        weights = regression(powered(head.block, config.power), config.gram, config.ridge)
        pairs, values = head.outside
        alone = weights_alone(head.counts[pairs // head.n_items], values, config)
        return kept_table(model, head, weights, pairs, alone)

    def extend(self, model: Shared, keys: NDArray[np.int64], sums: NDArray[np.float64]) -> Shared:
        """Weigh pairs that are not both in the head by their own sums."""
        pairs, values, counts = rest(keys, sums[:, 0], len(model["neighbours"]))
        return extended_table(model, pairs, weights_alone(counts, values, self.config))

    def score(self, model: Shared, view: TrainView, out: NDArray[np.float32]) -> None:
        """Add up the weights from the client's last items, by lag."""
        past, fade = view.positives, by_place(int(LAGS[-1]), 1.0)
        table = model["neighbours"], model["weights"]
        kernels.add_by_lag(out[:, :-1], past.indptr, past.values, *table, LAGS, fade)
        kernels.log_of_sum(out[:, :-1], FLOOR, out[:, -1])

    def parts(self, model: Shared) -> tuple[Part, ...]:
        """Return the same scores for bundles."""
        options = {"ends": LAGS.tolist(), "recency": 1.0, "floor": FLOOR, "logs": "sum"}
        return (Part("lags", options, model),)


def weights_alone(counts: Array, sums: Array, config: ExpertsConfig) -> Array:
    """Return what pairs weigh by themselves: the regression with ``gram = 0``."""
    power = config.power
    weights: Array = np.maximum(sums, 0.0) ** power / (counts**power + config.ridge)
    return weights
