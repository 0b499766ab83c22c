"""FedEASE: the linear item-to-item model EASE (Steck 2019), exactly, from one round of sums.

EASE needs the data X [users, items] only through XᵀX: how many users touched both i and j. That is
a sum over devices of pairs of their own items. With P = (XᵀX + ridge · I)⁻¹ the weights are

    W[i, j] = -P[i, j] / P[j, j],    W[j, j] = 0,

the ridge regression of every item on all the others. With ``recency = 0`` and ``recent`` as long as
the longest history the scores are those of EASE; by default the device lets its last items count
more, which EASE as published cannot and which more than doubles its accuracy on MovieLens.

Under `--privacy central` the sums are those of `PrivateFedEASE`, and so are the defaults: of the
latest items only, as pairs of a long history are many and each would get little of its norm.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat

from hushrec.aggregation import FixedPoint, KeyedRows
from hushrec.data.views import Ragged, TrainView
from hushrec.kernels import pairs as pair_kernels
from hushrec.methods.base import Between, OneOf, SearchSpace, Tunable
from hushrec.methods.baselines import distinct_items
from hushrec.methods.statistics import pair_weights
from hushrec.methods.statistics.pair_weights import ExactPairs, ItemPairsConfig, Keys, Sums
from hushrec.methods.statistics.private_pairs import PrivatePairs, PrivatePairsConfig


class FedEASEConfig(ItemPairsConfig):
    """Options of FedEASE."""

    ridge: PositiveFloat = 500.0
    """Added to the diagonal of XᵀX, in users: larger trusts single items less."""
    recency: NonNegativeFloat = 0.8
    """On the device: the g-th last item weighs g^-recency; 0 ignores the order, as EASE does."""
    popularity: NonNegativeFloat = 0.0
    """On the device: how much an item's share of all interactions adds to its score."""


class PrivateFedEASEConfig(PrivatePairsConfig):
    """Options of FedEASE under noise."""

    ridge: PositiveFloat = 40.0
    """Added to the diagonal of the system; uploads have norm 1 here, so units differ."""
    power: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Sums are taken to this power; 1 is EASE."""
    recency: NonNegativeFloat = 0.8
    """On the device: the g-th last item weighs g^-recency; 0 ignores the order, as EASE does."""
    popularity: NonNegativeFloat = 0.0
    """On the device: how much an item's share of all interactions adds to its score."""
    latest: Annotated[int, Field(ge=2)] = 50
    """How many of its last items of the head a device makes pairs of."""


class PrivateFedEASE(PrivatePairs):
    """FedEASE under differential privacy: see `statistics.private_pairs`."""

    name = "fedease"
    because = "often together with {}"
    Config = PrivateFedEASEConfig
    config: PrivateFedEASEConfig
    ordered = False

    def pairs(self, past: Ragged, size: int) -> tuple[NDArray[Any], ...]:
        """Count a one for every pair of the client's latest items."""
        items = distinct_items(pair_weights.latest(past, self.config.latest))
        indptr, keys, ones = pair_kernels.common_pairs(items.indptr, items.values, size)
        alone = keys // max(size, 1) == keys % max(size, 1)
        return indptr, keys, np.where(alone[:, None], np.float32(self.config.counted), ones)

    def solve(self, *blocks: Sums) -> Sums:
        """Regress every item on all the others; the block is an upper triangle."""
        (block,) = blocks
        return pair_weights.ease_weights(block + np.triu(block, 1).T, self.config.ridge)


class FedEASE(ExactPairs, Tunable):
    """EASE from the sum of the clients' item pairs, scored from recent history."""

    name = "fedease"
    because = "often together with {}"
    Config = FedEASEConfig
    config: FedEASEConfig
    under_noise = PrivateFedEASE

    search: ClassVar[SearchSpace] = {
        "ridge": Between(50.0, 5000.0),
        "recency": Between(0.2, 1.5, log=False),
        "recent": OneOf((20, 50, 100, 200)),
    }

    def count(self, view: TrainView) -> KeyedRows:
        """Count the pairs of each client's distinct items, and the items themselves."""
        items = distinct_items(view.positives)
        pairs = pair_kernels.common_pairs(items.indptr, items.values, view.n_items)
        return KeyedRows(*pairs, space=view.n_items**2, grid=FixedPoint(bits=0))

    def solve(self, *blocks: Sums) -> Sums:
        """Regress every item on all the others; the block is an upper triangle."""
        (block,) = blocks
        return pair_weights.ease_weights(block + np.triu(block, 1).T, self.config.ridge)

    def weigh_outside(self, keys: Keys, sums: Sums, counts: Sums) -> tuple[Keys, Sums]:
        """Regress either item of a pair on the other alone."""
        keys, sums = pair_weights.both_ways(keys, sums, len(counts))
        return keys, sums / (counts[keys // len(counts)] + self.config.ridge)
