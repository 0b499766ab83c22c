"""Experts over single items: popularity, and transitions between public categories of items.

Categories are features of the catalogue such as years or genres; an item with several values of a
feature has a share in each.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from hushrec.aggregation import KeyedRows
from hushrec.data.features import category_columns, category_shares
from hushrec.data.views import TrainView
from hushrec.kernels import mixture
from hushrec.methods.base import Scores, Shared
from hushrec.methods.baselines import distinct_items
from hushrec.methods.statistics.experts import Expert, Part
from hushrec.methods.statistics.pair_weights import Keys, Sums, fading

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
        keys, ones = items.values.astype(np.int64), np.ones((len(items.values), 1), np.float32)
        return KeyedRows(items.indptr, keys, ones, space=view.n_items)

    def learn(self, model: Shared, keys: Keys, sums: Sums) -> Shared:
        """Divide by the mean."""
        shares = np.zeros_like(model["shares"])
        counts = np.maximum(sums[:, 0], 0.0)
        shares[keys] = counts / max(counts.sum(), 1e-12) * len(shares)
        return {"shares": shares}

    def score(self, model: Shared, view: TrainView, out: Scores) -> None:
        """Score every client alike: by shares over the largest share, and by logarithms."""
        out[:, 0] = model["shares"] / max(model["shares"].max(), np.float32(1))
        out[:, 1] = np.log(model["shares"] + np.float32(FLOOR))

    def parts(self, model: Shared) -> tuple[Part, ...]:
        """Return the same scores for bundles."""
        return (Part("shares", {"floor": FLOOR}, model),)


WINDOW = 5
"""Steps within which a category follows another, at 1/steps."""
LATEST = (1, 5, 0)
"""Scores are means over the last item, the last five and all."""
SMOOTHING = 0.5
"""Added to every sum."""


class Categories(Expert):
    """Scores how much more often an item's categories follow those of the past than by chance."""

    name = "categories"

    def is_applicable(self, view: TrainView) -> bool:
        """Need at least one categorical feature of items."""
        return bool(category_columns(view))

    def init(self, view: TrainView) -> Shared:
        """Take each item's shares of all categories."""
        members, sizes = category_shares(view)
        return {"members": members, "sizes": sizes, "said": np.zeros(members.T.shape, np.float32)}

    def scores(self, model: Shared) -> tuple[str, ...]:
        """One for each feature and stretch of the past."""
        spans = "last", "last five", "all"
        return tuple(f"feature {n}, {span}" for n in range(len(model["sizes"])) for span in spans)

    def count(self, view: TrainView) -> KeyedRows:
        """Count transitions between categories."""
        past, (members, sizes) = view.positives, category_shares(view)
        pairs = mixture.following_groups(past.indptr, past.values, members, sizes, fading(WINDOW))
        return KeyedRows(*pairs, space=members.shape[1] ** 2)

    def learn(self, model: Shared, keys: Keys, sums: Sums) -> Shared:
        """Take the logarithm of counts over their expectation by chance."""
        groups, start = model["members"].shape[1], 0
        counted, said = np.zeros(groups**2), np.zeros_like(model["said"])
        counted[keys] = np.maximum(sums[:, 0], 0.0)
        for size in model["sizes"]:
            mine = slice(start, start + size)
            found = counted.reshape(groups, groups)[mine, mine] + SMOOTHING
            chance = found.sum(1, keepdims=True) * found.sum(0, keepdims=True) / found.sum()
            said[mine] = np.log(found / chance) @ model["members"][:, mine].T
            start += size
        return {**model, "said": said}

    def score(self, model: Shared, view: TrainView, out: Scores) -> None:
        """Average over the past items and over an item's categories."""
        past, learnt = view.positives, (model["members"], model["sizes"], model["said"])
        mixture.score_groups(past.indptr, past.values, *learnt, np.array(LATEST), out)

    def parts(self, model: Shared) -> tuple[Part, ...]:
        """Return the same scores for bundles."""
        options = {"sizes": model["sizes"].tolist(), "latest": list(LATEST)}
        return (Part("groups", options, {n: model[n] for n in ("members", "said")}),)
