"""Baselines of item-to-item weights on pooled data: EASE, ItemKNN and a Markov chain.

The server holds everybody's data, so none of these is federated or private. `fedease` and `fednext`
are the federated methods of this family. A score is a sum of weights from items of the history,

    score(j) = sum over the items i of the history of W[i, j],

over all of them, in any order (EASE, ItemKNN), or over the last ones (Markov chain). W has all
pairs of items, as published, so that memory grows with the square of the catalogue.

Let X [users, items] be 1 where a user touched an item, G = XᵀX, and c_i = G[i, i] the number of
users who touched i.

**EASE** (Steck 2019, "Embarrassingly Shallow Autoencoders for Sparse Data", eq. 8): with
P = (G + ridge · I)⁻¹,

    W[i, j] = -P[i, j] / P[j, j],    W[j, j] = 0.

**ItemKNN** (Sarwar et al. 2001, "Item-based collaborative filtering recommendation algorithms",
section 3.1; with shrinkage as in Ferrari Dacrema et al. 2019, "Are we really making much
progress?"). An item j is scored from its ``neighbours`` most similar items i, by

    W[i, j] = G[i, j] / (sqrt(c_i c_j) + shrinkage)        (cosine), or
    W[i, j] = G[i, j] / (c_i + shrinkage)                  (conditional),

the second of which is co-occurrence: the share of the users of i who touched j too (Deshpande and
Karypis 2004, "Item-based top-N recommendation algorithms", section 4.1.2).

**Markov chain** (first order, as the personalised one of Rendle et al. 2010 begins): with N[i, j]
the number of times that j came right after i,

    W[i, j] = N[i, j] / c_i,

from the last item alone. With ``window`` > 1 an item that came g steps later counts 1/g: the
sequential rules of Ludewig and Jannach 2018 ("Evaluation of session-based recommendation
algorithms", section 3.1).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

import numpy as np
import scipy.sparse
from numpy.typing import NDArray
from pydantic import NonNegativeFloat, PositiveFloat

from hushrec.aggregation import KeyedRows, Total, Update
from hushrec.config import Count
from hushrec.data.views import Ragged, TrainView
from hushrec.io import require_memory
from hushrec.kernels import pairs as pair_kernels
from hushrec.methods import base, forms
from hushrec.methods.base import (
    Fitted,
    Method,
    MethodConfig,
    Phase,
    Reason,
    Scores,
    Shared,
    Traits,
)
from hushrec.methods.baselines import distinct_items
from hushrec.methods.statistics import pair_weights
from hushrec.methods.statistics.pair_weights import Sums
from hushrec.private import Private
from hushrec.streams import Round, Streams

PAIRS = "pairs"
MATRICES = 5
"""Square matrices of float64 over all items that are in memory while weights are worked out."""


class CentralPairs(Method, base.Explains, base.Exports, base.ItemNeighbours, base.ItemPopularity):
    """Base of the family: the server counts pairs of items over everybody's pooled data."""

    traits = Traits(pooled=True, repeats=False)
    because: ClassVar[str] = "often together with {}"
    """What a large weight from an item of the history says."""

    @abstractmethod
    def count(self, view: TrainView) -> tuple[NDArray[np.int64], Sums]:
        """Return keys i · m + j of pairs, each once, and their sums; (i, i) counts item i."""

    @abstractmethod
    def weigh(self, sums: Sums, counts: Sums) -> Sums:
        """Return the weights from sums [items, items], which may be changed, and counts."""

    @property
    def popularity(self) -> float:
        """How much an item's share of all interactions adds to its score."""
        return 0.0

    def last_items(self) -> int | None:
        """Return how many of the last items are scored from; None: all."""
        return None

    @property
    def phases(self) -> tuple[Phase, ...]:
        """One round counts."""

        def apply(shared: Shared, total: Total, number: int) -> Shared:
            return self.apply(shared, total)

        return (Phase("count", 1, "everybody's items", self.fit, apply),)

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Start from no weights."""
        m = view.n_items
        require_memory(8 * MATRICES * m * m, f"weights between all {m} items", "fewer items")
        return {"weights": np.zeros((m, m), np.float32), "shares": np.zeros(m, np.float32)}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Count pairs over everybody's items."""
        keys, sums = self.count(view)
        rows = KeyedRows(
            np.array([0, len(keys)]),
            keys,
            sums[:, None].astype(np.float32),
            space=max(1, view.n_items**2),
        )
        return Fitted(Update(1, rows={PAIRS: rows}), {})

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Work out the weights."""
        m = len(shared["shares"])
        sums = np.zeros((m, m))
        keys, rows = total.rows[PAIRS]
        sums.reshape(-1)[keys] = rows[:, 0]
        counts = np.diag(sums).copy()
        weights = self.weigh(sums, counts)
        np.fill_diagonal(weights, 0.0)
        shares = counts / max(counts.sum(), 1.0)
        return {"weights": weights.astype(np.float32), "shares": shares.astype(np.float32)}

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Add up the weights from the items of the history."""
        table, past = shared["weights"], self._past(history)
        scores = np.tile(shared["shares"] * np.float32(self.popularity), (len(history), 1))
        for client in range(len(history)):
            scores[client] += table[past[client]].sum(axis=0, dtype=np.float64).astype(np.float32)
        return scores

    def _past(self, history: TrainView) -> Ragged:
        """Return the items that each client is scored from."""
        last = self.last_items()
        if last is None:
            return distinct_items(history.positives)
        return pair_weights.latest(history.positives, last)

    def contributions(
        self, shared: Shared, private: Private, history: TrainView, items: NDArray[np.int32]
    ) -> list[list[Reason]]:
        """Compare the weights from the history with popularity above the mean."""
        prior = (shared["shares"] - shared["shares"].mean()) * self.popularity
        out, last = [], self.last_items()
        for client, listed in enumerate(items):
            mine, known = history.positives[client][::-1][:last], listed[listed >= 0]
            weights = shared["weights"][mine[:, None], known]
            reasons = pair_weights.lifted_reasons(self.because, mine, weights, prior[known])
            out.append([*reasons, *[Reason()] * (len(listed) - len(known))])
        return out

    def item_neighbours(self, shared: Shared, item: int) -> Scores:
        """Return the weights from an item."""
        return np.asarray(shared["weights"][item])

    def item_popularity(self, shared: Shared) -> Scores:
        """Return the shares of all interactions."""
        return np.asarray(shared["shares"])

    def device_form(self, shared: Shared, view: TrainView) -> forms.ItemWeights:
        """Return the weights that are not 0, as many for each item as the item with most has."""
        table, m = shared["weights"], view.n_items
        width = max(1, int((table != 0).sum(axis=1).max(initial=0)))
        order = np.sort(np.argsort(table == 0, axis=1, kind="stable")[:, :width], axis=1)
        return forms.ItemWeights(
            neighbours=order.astype(np.int32),
            weights=np.take_along_axis(table, order, axis=1),
            shares=shared["shares"],
            known=np.ones(m, np.bool_),
            because=self.because,
            recency=0.0,
            recent=self.last_items() or m,
            popularity=self.popularity,
        )


def common_users(view: TrainView) -> tuple[NDArray[np.int64], Sums]:
    """Return keys and values of XᵀX where it is not 0: whole numbers, so in any order the same."""
    items, m = distinct_items(view.positives), view.n_items
    ones = np.ones(len(items.values))
    x = scipy.sparse.csr_array((ones, items.values, items.indptr), shape=(len(items), m))
    gram = scipy.sparse.coo_array(x.T @ x)
    return gram.row.astype(np.int64) * m + gram.col, gram.data


class EASEConfig(MethodConfig):
    """Options of EASE."""

    ridge: PositiveFloat = 500.0
    """Added to the diagonal of XᵀX, in users: larger trusts single items less (λ of the paper)."""


class EASE(CentralPairs, base.Tunable):
    """Ridge regression of every item on the others; pooled: the server holds everybody's data."""

    name = "ease"
    Config = EASEConfig
    config: EASEConfig
    search: ClassVar[base.SearchSpace] = {"ridge": base.Between(10.0, 5000.0)}

    def count(self, view: TrainView) -> tuple[NDArray[np.int64], Sums]:
        """Count users who touched both items."""
        return common_users(view)

    def weigh(self, sums: Sums, counts: Sums) -> Sums:
        """Invert XᵀX + ridge · I."""
        return pair_weights.ease_weights(sums, self.config.ridge)


class ItemKNNConfig(MethodConfig):
    """Options of ItemKNN."""

    neighbours: Count = 100
    """Most similar items that an item is scored from."""
    shrinkage: NonNegativeFloat = 10.0
    """Added to the denominator, in users: larger trusts pairs of rare items less."""
    similarity: Literal["cosine", "conditional"] = "cosine"
    """Cosine of the items' columns of X, or the share of the users of the history's item who
    touched the other one too."""


class ItemKNN(CentralPairs, base.Tunable):
    """Nearest neighbours of items; pooled: the server holds everybody's data."""

    name = "itemknn"
    Config = ItemKNNConfig
    config: ItemKNNConfig
    search: ClassVar[base.SearchSpace] = {
        "neighbours": base.OneOf((20, 50, 100, 200, 500)),
        "shrinkage": base.Between(1.0, 1000.0),
    }

    def count(self, view: TrainView) -> tuple[NDArray[np.int64], Sums]:
        """Count users who touched both items."""
        return common_users(view)

    def weigh(self, sums: Sums, counts: Sums) -> Sums:
        """Return the similarities of every item's nearest neighbours; ties to the lower item."""
        cosine = self.config.similarity == "cosine"
        size = np.sqrt(np.outer(counts, counts)) if cosine else counts[:, None]
        similar = np.divide(
            sums, size + self.config.shrinkage, out=np.zeros_like(sums), where=sums > 0
        )
        np.fill_diagonal(similar, 0.0)
        far = np.argsort(-similar, axis=0, kind="stable")[self.config.neighbours :]
        np.put_along_axis(similar, far, 0.0, axis=0)
        return similar


class MarkovChainConfig(MethodConfig):
    """Options of the Markov chain."""

    window: Count = 1
    """How many steps later an item still counts as following, 1/g after g steps; 1: a chain of the
    first order."""
    recent: Count = 1
    """How many of the last items are scored from."""
    popularity: NonNegativeFloat = 0.01
    """How much an item's share of all interactions adds to its score; a small number decides among
    items that never followed."""


class MarkovChain(CentralPairs, base.Tunable):
    """What came after the last item before; pooled: the server holds everybody's data."""

    name = "markov"
    Config = MarkovChainConfig
    config: MarkovChainConfig
    because = "often after {}"
    search: ClassVar[base.SearchSpace] = {
        "window": base.OneOf((1, 2, 5, 10)),
        "recent": base.OneOf((1, 2, 5, 10)),
        "popularity": base.Between(1e-4, 10.0),
    }

    @property
    def popularity(self) -> float:
        """Return the option."""
        return self.config.popularity

    def last_items(self) -> int:
        """Return the option."""
        return self.config.recent

    def count(self, view: TrainView) -> tuple[NDArray[np.int64], Sums]:
        """Count what followed what, and items."""
        past, by_gap = view.positives, pair_weights.fading(self.config.window)
        _, keys, weights = pair_kernels.following_pairs(
            past.indptr, past.values, view.n_items, by_gap
        )
        found, where = np.unique(keys, return_inverse=True)
        return found, np.bincount(where, weights[:, 0], len(found)).astype(np.float64)

    def weigh(self, sums: Sums, counts: Sums) -> Sums:
        """Divide by how often the first item was met."""
        return np.divide(sums, counts[:, None], out=np.zeros_like(sums), where=sums > 0)
