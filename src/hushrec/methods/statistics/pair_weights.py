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
from itertools import product
from typing import Annotated, ClassVar

import numpy as np
import scipy.linalg
from numpy.typing import NDArray
from pydantic import Field

from hushrec.aggregation import KeyedRows, Total, Update
from hushrec.data.views import TrainView
from hushrec.errors import DivergedError
from hushrec.io import require_memory
from hushrec.kernels import pairs as pair_kernels
from hushrec.methods.base import (
    Fitted,
    Method,
    MethodConfig,
    Phase,
    Private,
    Shared,
    Traits,
    download_nothing,
    upload_nothing,
)
from hushrec.streams import Round, Streams

TABLE = "pairs"
TABLE_ENTRIES = 2**24
"""Most weights that a model holds: 128 MB."""
SELECT_SCALARS = "select scalars"
"""Name of the phase that tries values of recency and popularity, and uploads nothing."""
RECENCIES, POPULARITIES = (1.0, 0.8), (0.1, 1.0, 20.0)
"""What is tried where an option leaves it open, in this order."""

Block = NDArray[np.float64]
Vector = NDArray[np.float64]


class ItemPairsConfig(MethodConfig):
    """Options of every member of the family."""

    ridge: Annotated[float, Field(gt=0)] = 100.0
    """Added to the diagonal of the system, in counts: larger trusts single items less."""
    recency: Annotated[float, Field(ge=0)] | None = None
    """On the device: the g-th last item weighs g^-recency; 0 ignores the order.  [1.0 or 0.8,
    chosen on validation items]"""
    recent: Annotated[int, Field(ge=1)] = 100
    """On the device: how many of the last items are scored from."""
    popularity: Annotated[float, Field(ge=0)] | None = None
    """On the device: how much an item's share of all interactions adds to its score.  [0.1, 1 or
    20, chosen on validation items]"""
    neighbours: Annotated[int, Field(ge=1)] = 4000
    """Weights kept per item, the largest in size; never more than 2^24 in the whole model."""
    dense_items: Annotated[int, Field(ge=2)] = 4000
    """Items up to which the system is solved in full; beyond, these many most popular ones."""


class ItemPairs(Method):
    """Base of the family: weights and their scalars, and how a device scores with them."""

    Config: ClassVar[type[MethodConfig]] = ItemPairsConfig
    config: ItemPairsConfig

    def scalars(self) -> list[tuple[float, float]]:
        """Return the pairs of recency and popularity to try."""
        recency, popularity = self.config.recency, self.config.popularity
        return list(
            product(
                RECENCIES if recency is None else [recency],
                POPULARITIES if popularity is None else [popularity],
            )
        )

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Start from no weights at all."""
        n_items = view.n_items
        kept = max(1, min(self.config.neighbours, n_items, TABLE_ENTRIES // n_items))
        head = min(self.config.dense_items, n_items)
        require_memory(
            4 * 8 * head**2, f"a system of dense_items={head} items", "a smaller dense_items"
        )
        return {
            "neighbours": np.tile(np.arange(n_items, dtype=np.int32)[:, None], kept),
            "weights": np.zeros((n_items, kept), np.float32),
            "shares": np.zeros(n_items, np.float32),
            "scalars": np.array(self.scalars()[0]),
        }

    @abstractmethod
    def solve(self, *blocks: Block) -> Block:
        """Return the head's weights from its sums, a block for every number that a pair has.

        The diagonal of the first holds counts.
        """

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Add up the weights from the client's last items."""
        recency, popularity = shared["scalars"]
        prior = shared["shares"] * np.float32(popularity)
        scores = np.tile(prior, (len(history), 1))
        past = history.positives
        pair_kernels.add_from_history(
            scores,
            past.indptr,
            past.values,
            shared["neighbours"],
            shared["weights"],
            fading(self.config.recent, recency),
        )
        return scores


class ExactPairs(ItemPairs):
    """Base of the members without noise: clients count once, all pairs that they have."""

    traits = Traits(exact_sums=True)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """One round counts, and tries the first scalars; each other pair of scalars takes one."""
        count = Phase(
            "count",
            1,
            "sums over pairs of its items",
            self._fit_counts,
            self._learn_weights,
            download_nothing,
        )
        others = len(self.scalars()) - 1
        select = Phase(
            SELECT_SCALARS, others, "nothing", upload_nothing, self._next_scalars, download_nothing
        )
        return (count, select) if others else (count,)

    def _fit_counts(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        return Fitted(Update(len(view), rows={TABLE: self.count(view)}), {})

    @abstractmethod
    def count(self, view: TrainView) -> KeyedRows:
        """Return what each client counts over pairs of its items; (i, j) is the key i · m + j."""

    def _next_scalars(self, shared: Shared, total: Total, number: int) -> Shared:
        """Take the scalars that this round tries."""
        return {**shared, "scalars": np.array(self.scalars()[number - 1])}

    def _learn_weights(self, shared: Shared, total: Total, number: int) -> Shared:
        """Turn the sums into weights."""
        kept = {name: np.zeros_like(array) for name, array in shared.items()}
        kept["neighbours"][:] = np.arange(len(shared["shares"]))[:, None]
        kept["scalars"] = shared["scalars"]
        keys, summed = total.rows[TABLE]
        values, n_items = summed[:, 0], len(shared["shares"])
        first, second = keys // n_items, keys % n_items
        counts = np.zeros(n_items)
        counts[first[first == second]] = np.maximum(values[first == second], 0.0)
        kept["shares"][:] = counts / max(counts.sum(), 1e-12)

        # The head: the most popular items, ties to the lower number, in the catalogue's order.
        by_count = np.argsort(-counts, kind="stable")[: self.config.dense_items]
        head = np.sort(by_count[counts[by_count] > 0])
        place = np.full(n_items, -1)
        place[head] = np.arange(len(head))
        blocks = np.zeros((summed.shape[1], len(head), len(head)))
        for block, column in zip(blocks, summed.T, strict=True):
            pair_kernels.fill_head_block(block, place, keys, column, n_items)
        weights = self.solve(*blocks)
        np.fill_diagonal(weights, 0.0)
        # Whatever is not in the block: the same system, as if it were diagonal.
        outside = (first != second) & ((place[first] < 0) | (place[second] < 0))
        keys, values = self.directed(keys[outside], values[outside], n_items)
        values = self.alone(values, counts[keys // n_items])
        pair_kernels.keep_strongest(
            weights, head, place, keys, values, n_items, kept["neighbours"], kept["weights"]
        )
        return kept

    def alone(self, pairs: Vector, counts: Vector) -> Vector:
        """Return what pairs (i, j) weigh outside the head, from their sums and i's counts."""
        weights: Vector = pairs / (counts + self.config.ridge)
        return weights

    def directed(
        self, keys: NDArray[np.int64], values: Vector, n_items: int
    ) -> tuple[NDArray[np.int64], Vector]:
        """Return the sums as ordered pairs, what speaks for what, keys ascending."""
        return keys, values


def fading(length: int, exponent: float = 1.0) -> NDArray[np.float32]:
    """Return g^-exponent for g = 1, 2, … length."""
    return (np.arange(1, length + 1) ** -float(exponent)).astype(np.float32)


def solve_symmetric(matrix: Block, right: Block) -> Block:
    """Solve by Cholesky, or as a symmetric system where rounding or noise made it indefinite."""
    for kind in ("pos", "sym"):
        try:
            return np.asarray(scipy.linalg.solve(matrix, right, assume_a=kind, check_finite=False))
        except scipy.linalg.LinAlgError:
            continue
    raise DivergedError("the sums over pairs give no weights: use a larger ridge")


def ease_weights(gram: Block, ridge: float) -> Block:
    """Return EASE's weights from XᵀX, which is changed."""
    gram[np.diag_indices_from(gram)] += ridge
    inverse = np.linalg.inv(gram)
    return -inverse / np.diag(inverse)


def transition_weights(powered: Block, gram: float, ridge: float) -> Block:
    """Return (D + gram · (F + Fᵀ) + ridge · I)⁻¹ F of the powered sums D + F."""
    counts = np.diag(powered).copy()
    np.fill_diagonal(powered, 0.0)
    matrix = gram * (powered + powered.T)
    np.fill_diagonal(matrix, counts + ridge)
    return solve_symmetric(matrix, powered)
