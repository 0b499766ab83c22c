"""FedNext: what comes next, from one round of sums over what followed what.

A device counts over its own history, in time order: A[i, j] gains 1/g where j came g <= window
steps after i, and A[i, i] gains 1 where it met i. The sum over devices is all that the server ever
needs. It takes every sum to the same ``power``, calls the diagonal D and the rest F, and regresses
what comes next on the recent history,

    W = (D + gram · (F + Fᵀ) + ridge · I)⁻¹ F.

Why this is that regression: let x be a history in which an item weighs the less the further back it
is. Over all devices and moments, A holds the products of x with the item that comes next; and
A + Aᵀ, with the counts on the diagonal, holds the products of x with itself up to scale, which is
what `gram` is for. Plain transition counts are the limit of a large ridge; the inverse takes away
what an item is credited with only because it occurs with popular items. The power keeps the most
popular pairs, whose counts vary most, from ruling the fit: the square root gives counts that are
Poisson the same variance.

Some items occur together in any order. So a client also counts C[i, j], the share 1 - g / (window +
1) where j came g <= window steps after i: of the windows of that length that hold i, those that
hold j too. C + Cᵀ with the counts on the diagonal is therefore XᵀX over all windows, and
``cooccurrence`` times the weights that EASE (`fedease`) gives to it are added to W.

Under `--privacy central` the sums are those of `PrivateFedNext`, and so are the defaults.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat

from hushrec.aggregation import KeyedRows
from hushrec.config import Count, Share
from hushrec.data.views import Ragged, TrainView
from hushrec.kernels import pairs as pair_kernels
from hushrec.methods.base import Between, OneOf, SearchSpace, Tunable
from hushrec.methods.statistics import pair_weights
from hushrec.methods.statistics.pair_weights import ExactPairs, ItemPairsConfig, Keys, Sums, fading
from hushrec.methods.statistics.private_pairs import PrivatePairs, PrivatePairsConfig


class FedNextConfig(ItemPairsConfig):
    """Options of FedNext."""

    window: Count = 30
    """How many steps later an item still counts as following."""
    power: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Sums are taken to this power before the regression; 1 leaves them alone."""
    gram: Share = 0.4
    """How much of A + Aᵀ is correlation of past items; 0 treats items as unrelated."""
    cooccurrence: NonNegativeFloat = 0.2
    """How much the weights of co-occurrence add to those of transitions."""
    cooccurrence_ridge: PositiveFloat = 300.0
    """Ridge of the co-occurrence regression, in counts."""


class PrivateFedNextConfig(PrivatePairsConfig):
    """Options of FedNext under noise."""

    window: Count = 30
    """How many steps later an item of the head still counts as following."""
    fade: NonNegativeFloat = 0.85
    """An item that comes g steps later weighs g^-fade."""
    reverse: Share = 0.3
    """Share of a pair's weight that is added to its reverse: co-occurrence matters more than order,
    and two sums tell more of a pair through the noise than one."""
    gram: Share = 0.3
    """How much of A + Aᵀ is correlation of past items; 0 treats items as unrelated."""
    tilt: Share = 0.15
    """In an upload, a pair weighs count^-tilt of each of its items as much; 0 treats all alike."""


class PrivateFedNext(PrivatePairs):
    """FedNext under differential privacy: see `statistics.private_pairs`."""

    name = "fednext"
    because = "often after {}"
    Config = PrivateFedNextConfig
    config: PrivateFedNextConfig

    def pairs(self, past: Ragged, size: int) -> tuple[NDArray[Any], ...]:
        """Count what followed what."""
        config, by_gap = self.config, fading(self.config.window, self.config.fade)
        return pair_kernels.following_pairs(
            past.indptr, past.values, size, by_gap, config.counted, config.reverse
        )

    def solve(self, *blocks: Sums) -> Sums:
        """Solve the ridge regression of what comes next on the recent history."""
        (block,) = blocks
        return pair_weights.transition_weights(block, self.config.gram, self.config.ridge)


class FedNext(ExactPairs, Tunable):
    """Ridge regression of the next item on the recent history, from one round of sums."""

    name = "fednext"
    because = "often after {}"
    Config = FedNextConfig
    config: FedNextConfig
    under_noise = PrivateFedNext

    search: ClassVar[SearchSpace] = {
        "window": OneOf((10, 20, 30, 50)),
        "power": Between(0.25, 1.0),
        "gram": Between(0.1, 1.0),
        "ridge": Between(10.0, 1000.0),
        "cooccurrence": Between(0.02, 2.0),
        "cooccurrence_ridge": Between(30.0, 3000.0),
    }

    def count(self, view: TrainView) -> KeyedRows:
        """Count transitions and co-occurrence within the window, and items."""
        past = view.positives
        pairs = pair_kernels.following_pairs(
            past.indptr, past.values, view.n_items, fading(self.config.window), together=True
        )
        return KeyedRows(*pairs, space=view.n_items**2)

    def solve(self, *blocks: Sums) -> Sums:
        """Solve the regression of the next item, and that of co-occurrence."""
        config, (following, together) = self.config, blocks
        powered = np.maximum(following, 0.0) ** config.power
        weights = pair_weights.transition_weights(powered, config.gram, config.ridge)
        if config.cooccurrence:
            gram = together + together.T
            np.fill_diagonal(gram, np.diag(together))
            ease = pair_weights.ease_weights(gram, config.cooccurrence_ridge)
            weights += config.cooccurrence * ease
        return weights

    def weigh_outside(self, keys: Keys, sums: Sums, counts: Sums) -> tuple[Keys, Sums]:
        """Return the weights of the regression with ``gram = 0``."""
        mine, config = counts[keys // len(counts)], self.config
        return keys, pair_weights.weights_alone(sums, mine, config.power, config.ridge)
