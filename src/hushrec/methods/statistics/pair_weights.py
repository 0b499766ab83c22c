"""The family that scores from item-to-item weights: options, the large catalogue, scoring.

A member uploads sums over pairs of items, sparse, in one round. The server turns the sums into
weights W, and a device scores an item j by what it touched last:

    score(j) = sum over its last items i of g(i)^(-recency) · W[i, j]
               + popularity · (share of all interactions that fall on j),

where g counts back from the item touched last, which has g = 1. So the history and its order never
leave the device, a new interaction counts at once, and nothing is trained on the device.

**Choosing recency and popularity.** They act on the device alone, so they can be chosen without
counting again. Where an option is None, the first round counts, and each of the next ones, which
upload nothing, tries another pair of values: the loop keeps the round that finds the devices'
validation items best.

**Large catalogues.** W solves a linear system over all items. Up to ``dense_items`` items it is
solved as it is. Beyond, it is solved for the ``dense_items`` most popular ones (the head) on their
own, and every other pair gets the weight that its own sum alone suggests, the pair over (count of i
+ ridge): the solution of the same system with a diagonal matrix. Each item keeps its strongest
weights only. So memory grows with m and with the pairs that occur, not with m².
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, ClassVar

import numpy as np
import scipy.linalg
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat

from hushrec.aggregation import KeyedRows, Total, Update
from hushrec.config import Count
from hushrec.data.views import Ragged, TrainView
from hushrec.errors import DivergedError
from hushrec.io import require_memory
from hushrec.kernels import pairs as pair_kernels
from hushrec.kernels.jit import Array, njit
from hushrec.methods import base, forms
from hushrec.methods.base import (
    IDLE,
    POPULAR,
    Fitted,
    Method,
    MethodConfig,
    Phase,
    Reason,
    Scores,
    Shared,
    Traits,
)
from hushrec.methods.baselines import where
from hushrec.private import Private
from hushrec.streams import Round, Streams

TABLE = "pairs"
TABLE_ENTRIES = 2**24
"""Most weights that a model holds: 128 MB."""
SELECT_SCALARS = "select scalars"
"""Name of the phase that tries values of recency and popularity, and uploads nothing."""
RECENCIES, POPULARITIES = (1.0, 0.8), (0.1, 1.0, 20.0)
"""What is tried where an option leaves it open, in this order."""

Keys = NDArray[np.int64]
"""Of pairs of items: (i, j) is the key i · m + j."""
Sums = NDArray[np.float64]


class ItemPairsConfig(MethodConfig):
    """Options of every member of the family."""

    ridge: PositiveFloat = 100.0
    """Added to the diagonal of the system, in counts: larger trusts single items less."""
    recency: Annotated[float, Field(ge=0)] | None = None
    """On the device: the g-th last item weighs g^-recency; 0 ignores the order.  [1.0 or 0.8,
    chosen on validation items]"""
    recent: Count = 100
    """On the device: how many of the last items are scored from."""
    popularity: Annotated[float, Field(ge=0)] | None = None
    """On the device: how much an item's share of all interactions adds to its score.  [0.1, 1 or
    20, chosen on validation items]"""
    neighbours: Count = 4000
    """Weights kept per item, the largest in size; never more than 2^24 in the whole model."""
    dense_items: Annotated[int, Field(ge=2)] = 4000
    """Items up to which the system is solved in full; beyond, these many most popular ones."""


class ItemPairs(Method, base.Explains, base.Exports, base.ItemNeighbours, base.ItemPopularity):
    """Base of the family: weights and their scalars, and how a device scores with them."""

    Config: ClassVar[type[MethodConfig]] = ItemPairsConfig
    config: ItemPairsConfig
    traits = Traits(repeats=False)
    because: ClassVar[str]
    """What a large weight from an item of the history says, as "often after {}"."""

    def scalars(self) -> list[tuple[float, float]]:
        """Return the pairs of recency and popularity to try."""
        recency, popularity = self.config.recency, self.config.popularity
        recencies = RECENCIES if recency is None else [recency]
        return list(product(recencies, POPULARITIES if popularity is None else [popularity]))

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Start from no weights at all."""
        return {
            **empty_table(view.n_items, self.config.neighbours, self.config.dense_items),
            "shares": np.zeros(view.n_items, np.float32),
            "scalars": np.array(self.scalars()[0]),
        }

    @abstractmethod
    def solve(self, *blocks: Sums) -> Sums:
        """Return the head's weights from its sums, a block for every number that a pair has.

        The diagonal of the first holds counts.
        """

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Add up the weights from the client's last items."""
        recency, popularity = shared["scalars"]
        scores = np.tile(shared["shares"] * np.float32(popularity), (len(history), 1))
        past = self.weighted(shared, history.positives)
        table, by_lag = (
            (shared["neighbours"], shared["weights"]),
            fading(self.config.recent, recency),
        )
        pair_kernels.add_from_history(scores, past.indptr, past.values, *table, by_lag)
        return scores

    def weighted(self, shared: Shared, past: Ragged) -> Ragged:
        """Return the items of histories that have weights."""
        return past

    def contributions(
        self, shared: Shared, private: Private, history: TrainView, items: NDArray[np.int32]
    ) -> list[list[Reason]]:
        """Compare the weights from the history with popularity above the mean."""
        recency, popularity = shared["scalars"]
        prior = (shared["shares"] - shared["shares"].mean()) * popularity
        table, recent = (shared["neighbours"], shared["weights"]), self.config.recent
        past, out = self.weighted(shared, history.positives), []
        for client, listed in enumerate(items):
            mine = np.ascontiguousarray(past[client][::-1][:recent])  # one form of the kernel
            weights = pair_kernels.weights_between(mine, listed[listed >= 0], *table)
            weights *= fading(len(mine), recency)[:, None]
            known = lifted_reasons(self.because, mine, weights, prior[listed[listed >= 0]])
            out.append([*known, *[Reason()] * (len(listed) - len(known))])
        return out

    def item_neighbours(self, shared: Shared, item: int) -> Scores:
        """Return the weights of the table."""
        return weights_of(shared, item)

    def item_popularity(self, shared: Shared) -> Scores:
        """Return the shares of all interactions."""
        return np.asarray(shared["shares"])

    def device_form(self, shared: Shared, view: TrainView) -> forms.ItemWeights:
        """Return the weights; under noise only items of the head have some, and count."""
        recency, popularity = map(float, shared["scalars"])
        return forms.ItemWeights(
            neighbours=shared["neighbours"],
            weights=shared["weights"],
            shares=shared["shares"],
            known=shared.get("head", np.ones(len(shared["shares"]), np.bool_)),
            because=self.because,
            recency=recency,
            recent=self.config.recent,
            popularity=popularity,
        )


class ExactPairs(ItemPairs):
    """Base of the members without noise: clients count once, all pairs that they have."""

    traits = Traits(exact_sums=True, repeats=False)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """One round counts, and tries the first scalars; each other pair of scalars takes one."""
        sends, others = "sums over pairs of its items", len(self.scalars()) - 1
        count = Phase("count", 1, sends, self._fit_counts, self._learn_weights, lambda shared: {})
        select = replace(IDLE, name=SELECT_SCALARS, rounds=others, apply=self._next_scalars)
        return (count, select) if others else (count,)

    def _fit_counts(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        return Fitted(Update(len(view), rows={TABLE: self.count(view)}), {})

    @abstractmethod
    def count(self, view: TrainView) -> KeyedRows:
        """Return what each client counts over pairs of its items."""

    def _next_scalars(self, shared: Shared, total: Total, number: int) -> Shared:
        return {**shared, "scalars": np.array(self.scalars()[number - 1])}

    def _learn_weights(self, shared: Shared, total: Total, number: int) -> Shared:
        head = Head.of(*total.rows[TABLE], len(shared["shares"]), self.config.dense_items)
        weights = self.solve(*head.blocks)
        outside = self.weigh_outside(*head.outside, head.counts)
        shares = (head.counts / max(head.counts.sum(), 1e-12)).astype(np.float32)
        return {**shared, **strongest(shared, *outside, head.items, weights), "shares": shares}

    @abstractmethod
    def weigh_outside(self, keys: Keys, sums: Sums, counts: Sums) -> tuple[Keys, Sums]:
        """Return what ordered pairs outside the head weigh by their own sums, keys ascending.

        The system is solved as if it were diagonal; ``counts`` are those of all items.
        """


@dataclass(frozen=True)
class Head:
    """Sums over pairs: those of the most popular items as square blocks, the others as keys."""

    counts: Sums
    """The sums of (i, i): how often each item was met."""
    items: NDArray[np.int64]
    """The most popular items, in the catalogue's order."""
    blocks: Sums
    """Sums [numbers of a pair, head items, head items]."""
    outside: tuple[Keys, Sums]
    """Ascending keys of all pairs of two items that are not both in the head, and first sums."""

    @classmethod
    def of(cls, keys: Keys, sums: Sums, n_items: int, most: int) -> Head:
        """Put sums over pairs in order; ties of popularity go to the lower item."""
        first, second = keys // n_items, keys % n_items
        counts = np.zeros(n_items)
        counts[first[first == second]] = np.maximum(sums[first == second, 0], 0.0)
        by_count = np.argsort(-counts, kind="stable")[:most]
        items = np.sort(by_count[counts[by_count] > 0])
        index = _index_among(items, n_items)
        blocks = np.zeros((sums.shape[1], len(items), len(items)))
        for block, column in zip(blocks, sums.T, strict=True):
            pair_kernels.fill_head_block(block, index, keys, column, n_items)
        far = (first != second) & ((index[first] < 0) | (index[second] < 0))
        return cls(counts, items, blocks, (keys[far], sums[far, 0]))


def _index_among(items: NDArray[np.int64], n_items: int) -> NDArray[np.int64]:
    """Return the index of each item of the catalogue among these, or -1."""
    index = np.full(n_items, -1)
    index[items] = np.arange(len(items))
    return index


def empty_table(n_items: int, neighbours: int, dense_items: int) -> Shared:
    """Return a table of no weights; what is kept per item follows from the catalogue's size."""
    head = min(dense_items, n_items)
    require_memory(
        4 * 8 * head**2, f"a system of dense_items={head} items", "a smaller dense_items"
    )
    kept = max(1, min(neighbours, n_items, TABLE_ENTRIES // n_items))
    return {
        "neighbours": np.tile(np.arange(n_items, dtype=np.int32)[:, None], kept),
        "weights": np.zeros((n_items, kept), np.float32),
    }


def strongest(
    table: Shared, keys: Keys, values: Array, items: NDArray[np.int64], weights: Array
) -> Shared:
    """Keep each item's strongest weights: those among the head's items, and those of pairs."""
    n_items = len(table["neighbours"])
    kept = {name: np.zeros_like(table[name]) for name in ("neighbours", "weights")}
    np.fill_diagonal(weights, 0.0)
    index = _index_among(items, n_items)
    pair_kernels.keep_strongest(weights, items, index, keys, values, n_items, **kept)
    return kept


def both_ways(keys: Keys, values: Sums, n_items: int) -> tuple[Keys, Sums]:
    """Return unordered pairs as pairs of either order, keys ascending."""
    both = np.concatenate([keys, keys % n_items * n_items + keys // n_items])
    order = np.argsort(both)
    return both[order], np.concatenate([values, values])[order]


def reasons_from(
    words: str, past: NDArray[np.int32], influence: NDArray[np.float32], expert: str = ""
) -> list[Reason]:
    """Return the item of one history with the largest influence on each item, if it is above 0.

    ``influence`` is [items of the history, items].
    """
    if not len(past):
        return [Reason(words, expert)] * influence.shape[1]
    best, most = past[influence.argmax(axis=0)], influence.max(axis=0)
    found = np.where(most > 0, best, -1).tolist()
    return [Reason(words, expert, item) for item in found]


def lifted_reasons(
    words: str, past: NDArray[np.int32], weights: NDArray[np.float32], prior: Array
) -> list[Reason]:
    """Return reasons of weights [items of the history, items]; popularity where it adds more."""
    reasons, lifted = reasons_from(words, past, weights), weights.sum(axis=0) >= prior
    return [reason if more else POPULAR for reason, more in zip(reasons, lifted, strict=True)]


def solved_reasons(
    items: Array,
    everything: Array,
    touched: Ragged,
    listed: NDArray[np.int32],
    ridge: Array,
) -> list[list[Reason]]:
    """Return the touched item that adds most to each score by the vectors of `solve_users`.

    A vector is A⁻¹ times the sum of the touched items' vectors, so a score is a sum over them (Hu,
    Koren and Volinsky 2008, section 5). ``listed`` is [clients, items]; -1 is no item.
    """
    out = []
    for client, some in enumerate(listed):
        own = items[touched[client]]
        influence = solved_influence(own, everything, items[some], ridge[client])
        found = reasons_from(SIMILAR, touched[client], influence.astype(np.float32))
        out.append([r if i >= 0 else Reason() for r, i in zip(found, some, strict=True)])
    return out


def solved_influence(own: Array, everything: Array, listed: Array, ridge: float) -> Array:
    """Return what each touched item, a row of ``own``, adds to scores: [touched, listed]."""
    matrix = everything + own.T @ own + ridge * np.eye(own.shape[1])
    return np.asarray(own @ np.linalg.solve(matrix, listed.T))


SIMILAR = "similar to {}"
"""What a large product of the vectors of two items says."""


def weights_of(table: Shared, item: int) -> Scores:
    """Return the weight from an item to every item."""
    out = np.zeros(len(table["neighbours"]), np.float32)
    np.add.at(out, table["neighbours"][item], table["weights"][item])
    return out


def latest(items: Ragged, count: int) -> Ragged:
    """Return each client's last items."""
    ends = np.repeat(items.indptr[1:], items.lengths)
    return where(items, np.arange(len(items.values)) >= ends - count)


def weights_alone(sums: Sums, counts: Sums, power: float, ridge: float) -> Sums:
    """Return what pairs weigh by themselves: `transition_weights` with ``gram = 0``."""
    return np.asarray(np.maximum(sums, 0.0) ** power / (counts**power + ridge))


def fading(length: int, exponent: float = 1.0) -> NDArray[np.float32]:
    """Return g^-exponent for g = 1, 2, … length."""
    return (np.arange(1, length + 1) ** -float(exponent)).astype(np.float32)


def solve_symmetric(matrix: Sums, right: Sums) -> Sums:
    """Solve by Cholesky, or as a symmetric system where rounding or noise made it indefinite."""
    for kind in ("pos", "sym"):
        try:
            return np.asarray(scipy.linalg.solve(matrix, right, assume_a=kind, check_finite=False))
        except scipy.linalg.LinAlgError:
            continue
    raise DivergedError("the sums over pairs give no weights: use a larger ridge")


def ease_weights(gram: Sums, ridge: float) -> Sums:
    """Return EASE's weights from XᵀX, which is changed."""
    gram[np.diag_indices_from(gram)] += ridge
    inverse = np.linalg.inv(gram)
    return -inverse / np.diag(inverse)


def transition_weights(powered: Sums, gram: float, ridge: float) -> Sums:
    """Return (D + gram · (F + Fᵀ) + ridge · I)⁻¹ F of the powered sums D + F."""
    counts = np.diag(powered).copy()
    np.fill_diagonal(powered, 0.0)
    matrix = gram * (powered + powered.T)
    np.fill_diagonal(matrix, counts + ridge)
    return solve_symmetric(matrix, powered)


@njit(cache=True, nogil=True)
def gram(items: Array) -> Array:
    """Return the sum of q qᵀ over the items; in a fixed order, unlike a matrix product."""
    d = items.shape[1]
    out = np.zeros((d, d))
    for i in range(len(items)):
        for a in range(d):
            for b in range(d):
                out[a, b] += items[i, a] * items[i, b]
    return out


@njit(cache=True, nogil=True)
def solve_users(
    items: Array, everything: Array, indptr: Array, touched: Array, ridge: Array
) -> Array:
    """Return each client's vector, by Cholesky, whatever the other clients are."""
    d = items.shape[1]
    out, column = np.zeros((len(indptr) - 1, d)), np.empty(d)
    for c in range(len(indptr) - 1):
        matrix, x = everything.copy(), out[c]
        for p in range(indptr[c], indptr[c + 1]):
            row = items[touched[p]]
            for a in range(d):
                x[a] += row[a]
                for b in range(a + 1):
                    matrix[a, b] += row[a] * row[b]
        for a in range(d):
            matrix[a, a] += ridge[c]
        for k in range(d):
            matrix[k, k] = np.sqrt(matrix[k, k])
            for a in range(k + 1, d):
                matrix[a, k] /= matrix[k, k]
                column[a] = matrix[a, k]
            for a in range(k + 1, d):
                for b in range(k + 1, a + 1):
                    matrix[a, b] -= column[a] * column[b]
        for a in range(d):
            for k in range(a):
                x[a] -= matrix[a, k] * x[k]
            x[a] /= matrix[a, a]
        for a in range(d - 1, -1, -1):
            for k in range(a + 1, d):
                x[a] -= matrix[k, a] * x[k]
            x[a] /= matrix[a, a]
    return out
