"""Experts over pairs of items: transitions, recent transitions and co-occurrence.

`Transitions` is `fednext`'s regression of the next item, with one score for each lag.
`RecentTransitions` has a short window, and plain transition counts beside it. The long window has
more data; the short one is more specific, and its counts keep what the regression smooths away: how
often exactly this item followed that one.

`Cooccurrence` has EASE weights and low-rank factors from one Gram matrix. A client uploads the
pairs of its latest items. The server solves EASE (`fedease`) for item-to-item weights, and takes
the leading eigenvectors of the sums, each divided by the roots of both items' counts, as item
vectors. A client solves for its own vector from its history, as in implicit ALS (`fedals`), so
nothing but the pairs is ever sent.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import KeyedRows
from hushrec.data.views import Ragged, TrainView
from hushrec.kernels import experts as kernels
from hushrec.kernels import pairs as pair_kernels
from hushrec.methods.base import Shared
from hushrec.methods.baselines import distinct_items
from hushrec.methods.fedals import gram, solve_users
from hushrec.methods.statistics.experts import (
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
    strongest,
)
from hushrec.methods.statistics.pair_weights import ease_weights, fading, transition_weights

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
            past.indptr, past.values, view.n_items, fading(self.config.window)
        )
        return KeyedRows(*pairs, space=view.n_items**2)

    def learn(self, model: Shared, keys: NDArray[np.int64], sums: NDArray[np.float64]) -> Shared:
        """Regress the next item on the recent history."""
        config = self.config
        head = Head.of(keys, sums[:, 0], len(model["neighbours"]), config.dense_items)
        weights = transition_weights(powered(head.block, config.power), config.gram, config.ridge)
        pairs, values = head.outside
        alone = weights_alone(head.counts[pairs // head.n_items], values, config)
        return kept_table(model, head, weights, pairs, alone)

    def extend(self, model: Shared, keys: NDArray[np.int64], sums: NDArray[np.float64]) -> Shared:
        """Weigh pairs that are not both in the head by their own sums."""
        pairs, values, counts = rest(keys, sums[:, 0], len(model["neighbours"]))
        return extended_table(model, pairs, weights_alone(counts, values, self.config))

    def score(self, model: Shared, view: TrainView, out: NDArray[np.float32]) -> None:
        """Add up the weights from the client's last items, by lag."""
        past, fade = view.positives, fading(int(LAGS[-1]))
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


WINDOW, GRAM, RECENT_RIDGE = 3, 0.2, 20.0
RECENT_LAGS = np.array([1, 2, 5])
RECENT_FLOOR = 0.003
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
        return *(f"up to {lag} back" for lag in RECENT_LAGS), "log of all", *counted

    def count(self, view: TrainView) -> KeyedRows:
        """Count transitions within a few steps, and the items themselves."""
        past = view.positives
        pairs = pair_kernels.following_pairs(past.indptr, past.values, view.n_items, fading(WINDOW))
        return KeyedRows(*pairs, space=view.n_items**2)

    def learn(self, model: Shared, keys: NDArray[np.int64], sums: NDArray[np.float64]) -> Shared:
        """Regress the next item, and keep the counts themselves."""
        n_items = len(model["neighbours"])
        head = Head.of(keys, sums[:, 0], n_items, self.config.dense_items)
        weights = transition_weights(powered(head.block, 0.5), GRAM, RECENT_RIDGE)
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
        past, end = view.positives, len(RECENT_LAGS)
        by_place = np.ones(0, np.float32)
        table = model["neighbours"], model["weights"]
        kernels.add_by_lag(out[:, :end], past.indptr, past.values, *table, RECENT_LAGS, by_place)
        kernels.log_of_sum(out[:, :end], RECENT_FLOOR, out[:, end])
        counted, table = out[:, end + 1 :], (model["followers"], model["counts"])
        kernels.add_by_lag(counted, past.indptr, past.values, *table, COUNTED, by_place)
        for lag in range(len(COUNTED)):
            kernels.log_of_sum(counted[:, lag : lag + 1], COUNT_FLOOR, counted[:, lag])

    def parts(self, model: Shared) -> tuple[Part, ...]:
        """Return the same scores for bundles."""
        weights = {name: model[name] for name in ("neighbours", "weights")}
        counts = {"neighbours": model["followers"], "weights": model["counts"]}
        by_weight = {
            "ends": RECENT_LAGS.tolist(),
            "recency": 0.0,
            "floor": RECENT_FLOOR,
            "logs": "sum",
        }
        by_count = {"ends": COUNTED.tolist(), "recency": 0.0, "floor": COUNT_FLOOR, "logs": "each"}
        return Part("lags", by_weight, weights), Part("lags", by_count, counts)


def _alone(counts: Array, sums: Array) -> Array:
    weights: Array = np.sqrt(np.maximum(sums, 0.0)) / (np.sqrt(counts) + RECENT_RIDGE)
    return weights


ENDS = np.array([10, 50, 0])
"""The last items of the scores by weights; the last score has no end."""
PAIR_FLOOR = 0.02
"""Added before logarithms."""
UNSEEN, OWN_RIDGE = 0.1, 0.0003
"""Of a client's own vector: weight of untouched items, and regularisation, as in FedALS."""
RECENT = 20
"""Items whose vectors are added up for the score of recent factors."""
SWEEPS = 12
"""Steps of the subspace iteration that finds the eigenvectors."""


class Cooccurrence(Expert):
    """Scores items by co-occurrence with the last items, and by item and user vectors."""

    name = "cooccurrence"
    counted = "head"
    start: ClassVar[dict[str, float]] = {"log of the factors": 0.3}

    def init(self, view: TrainView) -> Shared:
        """Start from no weights and no vectors."""
        vectors = np.zeros((view.n_items, self.config.factors), np.float32)
        products = np.zeros((self.config.factors, self.config.factors))
        table = empty_table(view.n_items, self.config)
        return {**table, "vectors": vectors, "products": products}

    def scores(self, model: Shared) -> tuple[str, ...]:
        """Weights by lag, their logarithm, and the factors."""
        weights = "last 10", "11 to 50 back", "further back", "log of all"
        return *weights, "factors", "log of the factors", "recent factors"

    def count(self, view: TrainView) -> KeyedRows:
        """Count the pairs of each client's latest items, and the items themselves."""
        items = distinct_items(_latest(view.positives, self.config.latest))
        pairs = pair_kernels.common_pairs(items.indptr, items.values, view.n_items)
        return KeyedRows(*pairs, space=view.n_items**2)

    def learn(self, model: Shared, keys: NDArray[np.int64], sums: NDArray[np.float64]) -> Shared:
        """Solve EASE, and find the vectors."""
        n_items, config = len(model["neighbours"]), self.config
        head = Head.of(keys, sums[:, 0], n_items, config.dense_items)
        block = head.block + np.triu(head.block, 1).T
        vectors = np.zeros_like(model["vectors"])
        vectors[head.items] = leading_vectors(block, config.factors)
        pairs, values = head.outside
        both = np.concatenate([pairs, pairs % n_items * n_items + pairs // n_items])
        order = np.argsort(both)
        both, values = both[order], np.concatenate([values, values])[order]
        alone = values / (head.counts[both // n_items] + config.cooccurrence_ridge)
        weights = ease_weights(block, config.cooccurrence_ridge)
        table = kept_table(model, head, weights, both, alone)
        return {**table, "vectors": vectors, "products": gram(vectors)}

    def score(self, model: Shared, view: TrainView, out: NDArray[np.float32]) -> None:
        """Add up weights from the history, and solve for the client's vector."""
        past, vectors = view.positives, model["vectors"]
        table, ones = (model["neighbours"], model["weights"]), np.ones(0, np.float32)
        kernels.add_by_lag(out[:, :3], past.indptr, past.values, *table, ENDS, ones)
        kernels.log_of_sum(out[:, :3], PAIR_FLOOR, out[:, 3])
        touched = distinct_items(past)
        ridge = OWN_RIDGE * (touched.lengths + UNSEEN * view.n_items)
        everything = UNSEEN * model["products"]
        own = solve_users(vectors, everything, touched.indptr, touched.values, ridge)
        columns = np.ascontiguousarray(vectors.T)
        kernels.score_vectors(own.astype(np.float32), columns, out[:, 4])
        kernels.log_of_sum(out[:, 4:5], PAIR_FLOOR, out[:, 5])
        recent = kernels.recent_vectors(past.indptr, past.values, vectors, fading(RECENT))
        kernels.score_vectors(recent, columns, out[:, 6])

    def parts(self, model: Shared) -> tuple[Part, ...]:
        """Return the same scores for bundles."""
        weights = {name: model[name] for name in ("neighbours", "weights")}
        by_weight = {"ends": ENDS.tolist(), "recency": 0.0, "floor": PAIR_FLOOR, "logs": "sum"}
        factors = {"unseen": UNSEEN, "ridge": OWN_RIDGE, "floor": PAIR_FLOOR, "recent": RECENT}
        return (
            Part("lags", by_weight, weights),
            Part("factors", factors, {"vectors": model["vectors"]}),
        )


def _latest(items: Ragged, count: int) -> Ragged:
    """Return each client's last items."""
    start = np.maximum(items.indptr[:-1], items.indptr[1:] - count)
    kept = np.arange(len(items.values)) >= np.repeat(start, items.lengths)
    return Ragged(np.concatenate([[0], np.cumsum(kept)])[items.indptr], items.values[kept])


def leading_vectors(gram: NDArray[np.float64], count: int) -> NDArray[np.float32]:
    """Return items' vectors whose products are nearest to the sums over the roots of the counts."""
    size = len(gram)
    out = np.zeros((size, count), np.float32)
    if size == 0:
        return out
    roots = 1 / np.sqrt(np.diag(gram) + 1.0)
    scaled = gram * roots[:, None] * roots
    # The start is any fixed one; a few spare columns make the wanted ones converge.
    wide = min(size, count + 16)
    basis: Any = np.cos(np.outer(np.arange(1, size + 1), np.arange(1, wide + 1)) * 0.7)
    for _ in range(SWEEPS):
        basis = _orthonormal(scaled @ basis)
    values, turns = np.linalg.eigh(basis.T @ scaled @ basis)
    kept = min(count, len(values))
    leading = basis @ turns[:, ::-1][:, :kept]
    out[:, :kept] = leading * np.sqrt(np.maximum(values[::-1][:kept], 0.0))
    return out


def _orthonormal(columns: Any) -> Any:
    """Return an orthonormal basis of what columns span; much faster than QR for few columns."""
    columns = columns / np.maximum(np.sqrt((columns**2).sum(axis=0)), 1e-300)
    values, turns = np.linalg.eigh(columns.T @ columns)
    kept = values > 1e-12 * values[-1]
    return columns @ (turns[:, kept] / np.sqrt(values[kept]))
