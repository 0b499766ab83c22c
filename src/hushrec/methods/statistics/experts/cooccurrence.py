"""Item co-occurrence expert: EASE weights and low-rank factors from one Gram matrix.

A client uploads the pairs of its latest items. The server solves EASE (`fedease`) for item-to-item
weights, and takes the leading eigenvectors of the sums, each divided by the roots of both items'
counts, as item vectors. A client solves for its own vector from its history, as in implicit ALS
(`fedals`), so nothing but the pairs is ever sent.
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
from hushrec.methods.statistics.experts.base import Expert, Head, Part, empty_table, kept_table
from hushrec.methods.statistics.fedease import regression
from hushrec.methods.statistics.pair_weights import by_place

ENDS = np.array([10, 50, 0])
"""The last items of the scores by weights; the last score has no end."""
FLOOR = 0.02
"""Added before logarithms."""
UNSEEN, RIDGE = 0.1, 0.0003
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
        weights = regression(block, config.cooccurrence_ridge)
        table = kept_table(model, head, weights, both, alone)
        return {**table, "vectors": vectors, "products": gram(vectors)}

    def score(self, model: Shared, view: TrainView, out: NDArray[np.float32]) -> None:
        """Add up weights from the history, and solve for the client's vector."""
        past, vectors = view.positives, model["vectors"]
        table, ones = (model["neighbours"], model["weights"]), np.ones(0, np.float32)
        kernels.add_by_lag(out[:, :3], past.indptr, past.values, *table, ENDS, ones)
        kernels.log_of_sum(out[:, :3], FLOOR, out[:, 3])
        touched = distinct_items(past)
        ridge = RIDGE * (touched.lengths + UNSEEN * view.n_items)
        everything = UNSEEN * model["products"]
        own = solve_users(vectors, everything, touched.indptr, touched.values, ridge)
        columns = np.ascontiguousarray(vectors.T)
        kernels.score_vectors(own.astype(np.float32), columns, out[:, 4])
        kernels.log_of_sum(out[:, 4:5], FLOOR, out[:, 5])
        recent = kernels.recent_vectors(past.indptr, past.values, vectors, by_place(RECENT, 1.0))
        kernels.score_vectors(recent, columns, out[:, 6])

    def parts(self, model: Shared) -> tuple[Part, ...]:
        """Return the same scores for bundles."""
        weights = {name: model[name] for name in ("neighbours", "weights")}
        by_weight = {"ends": ENDS.tolist(), "recency": 0.0, "floor": FLOOR, "logs": "sum"}
        factors = {"unseen": UNSEEN, "ridge": RIDGE, "floor": FLOOR, "recent": RECENT}
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
