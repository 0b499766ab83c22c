"""Popularity: the same list for everybody, by how many users touched an item.

The counts are a sum over users, so one round of uploads gives them; nothing is private.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hushrec import kernels
from hushrec.aggregate import ClientRows, Total, Update
from hushrec.clients import Ragged, TrainView
from hushrec.methods.base import Fitted, Method, Private, Shared, Traits
from hushrec.rng import Round, Streams


def distinct_items(positives: Ragged) -> Ragged:
    """Return each client's items once, ascending."""
    none = Ragged.empty(len(positives))
    pair = (positives.indptr, positives.values, none.indptr, none.values)
    return Ragged(*kernels.sorted_union(*pair))


class Popularity(Method):
    """Recommend what most users touched: the yardstick to beat."""

    name = "popularity"
    traits = Traits(rounds=1, learns=False)

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Start from zero counts."""
        return {"counts": np.zeros(view.n_items, np.float32)}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Upload a one for every item of the client."""
        touched = distinct_items(view.positives)
        ones = np.ones((len(touched.values), 1), np.float32)
        uploads = ClientRows(touched.indptr, touched.values, ones)
        return Fitted(Update(len(view), rows={"counts": uploads}), {})

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Replace the counts by this round's."""
        counts = np.zeros_like(shared["counts"])
        if "counts" in total.rows:
            ids, summed = total.rows["counts"]
            counts[ids] = summed[:, 0]
        return {"counts": counts}

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Score by count."""
        return np.tile(shared["counts"], (len(history), 1))
