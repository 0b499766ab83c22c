"""Item popularity expert."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import KeyedRows
from hushrec.data.views import TrainView
from hushrec.methods.base import Shared
from hushrec.methods.baselines import distinct_items
from hushrec.methods.statistics.experts.base import Expert, Part

FLOOR = 0.03
"""Added to an item's share, in those of a mean item, before the logarithm."""


class PopularityExpert(Expert):
    """An item's share of all interactions, and its logarithm."""

    name = "popularity"
    start: ClassVar[dict[str, float]] = {"log share": 0.1}

    def init(self, view: TrainView) -> Shared:
        """Start from nothing."""
        return {"shares": np.zeros(view.n_items, np.float32)}

    def scores(self, model: Shared) -> tuple[str, ...]:
        """The share and its logarithm."""
        return "share", "log share"

    def count(self, view: TrainView) -> KeyedRows:
        """Upload a one for every item of the client."""
        items = distinct_items(view.positives)
        ones = np.ones((len(items.values), 1), np.float32)
        keys = items.values.astype(np.int64)
        return KeyedRows(items.indptr, keys, ones, space=view.n_items)

    def learn(self, model: Shared, keys: NDArray[np.int64], sums: NDArray[np.float64]) -> Shared:
        """Divide by the mean."""
        shares = np.zeros_like(model["shares"])
        counts = np.maximum(sums[:, 0], 0.0)
        shares[keys] = counts / max(counts.sum(), 1e-12) * len(shares)
        return {"shares": shares}

    def score(self, model: Shared, view: TrainView, out: NDArray[np.float32]) -> None:
        """Give everybody the same: in those of the most popular item, and in logarithms."""
        out[:, 0] = model["shares"] / max(model["shares"].max(), np.float32(1))
        out[:, 1] = np.log(model["shares"] + np.float32(FLOOR))

    def parts(self, model: Shared) -> tuple[Part, ...]:
        """Return the same scores for bundles."""
        return (Part("shares", {"floor": FLOOR}, model),)
