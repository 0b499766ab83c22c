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
what an item is credited with only because it keeps popular company. The power keeps the most
popular pairs, whose counts vary most, from ruling the fit: the square root gives counts that are
Poisson the same variance.

Under `--privacy central` the sums are those of `PrivateFedNext`, and so are the defaults.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec import pair_kernels
from hushrec.aggregate import RowStack, Update
from hushrec.clients import Ragged, TrainView
from hushrec.methods.base import Fitted, Private, Shared
from hushrec.methods.item_pairs import (
    TABLE,
    Block,
    ItemPairs,
    ItemPairsConfig,
    Vector,
    solve_symmetric,
)
from hushrec.methods.private_pairs import PrivatePairs, PrivatePairsConfig
from hushrec.rng import Streams


class FedNextConfig(ItemPairsConfig):
    """Options of FedNext."""

    window: Annotated[int, Field(ge=1)] = 30
    """How many steps later an item still counts as following."""
    power: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Sums are taken to this power before the regression; 1 leaves them alone."""
    gram: Annotated[float, Field(ge=0, le=1)] = 0.4
    """How much of A + Aᵀ is correlation of past items; 0 treats items as unrelated."""


class PrivateFedNextConfig(PrivatePairsConfig):
    """Options of FedNext under noise."""

    window: Annotated[int, Field(ge=1)] = 30
    """How many steps later an item of the head still counts as following."""
    fade: Annotated[float, Field(ge=0)] = 0.85
    """An item that comes g steps later weighs g^-fade."""
    gram: Annotated[float, Field(ge=0, le=1)] = 0.2
    """How much of A + Aᵀ is correlation of past items; 0 treats items as unrelated."""


class PrivateFedNext(PrivatePairs):
    """FedNext under differential privacy: see `methods.private_pairs`."""

    name = "fednext"
    Config = PrivateFedNextConfig

    def pairs(self, past: Ragged, size: int) -> tuple[NDArray[Any], ...]:
        """Count what followed what."""
        by_gap = gaps(self.config.window, self.config.fade)
        counted = self.config.counted
        return pair_kernels.following_pairs(past.indptr, past.values, size, by_gap, counted)

    def solve(self, block: Block) -> Block:
        """Solve the ridge regression of what comes next on the recent history."""
        return regression(block, self.config.gram, self.config.ridge)


class FedNext(ItemPairs):
    """Ridge regression of the next item on the recent history, from one round of sums."""

    name = "fednext"
    Config = FedNextConfig
    under_noise = PrivateFedNext

    def fit(
        self, shared: Shared, private: Private, view: TrainView, streams: Streams, round_number: int
    ) -> Fitted:
        """Upload what followed what, and how often each item was met."""
        past = view.positives
        indptr, keys, weights = pair_kernels.following_pairs(
            past.indptr, past.values, view.n_items, gaps(self.config.window)
        )
        return Fitted(Update(len(view), rows={TABLE: RowStack(indptr, keys, weights)}), {})

    def solve(self, block: Block) -> Block:
        """Solve the ridge regression of what comes next on the recent history."""
        powered = np.maximum(block, 0.0) ** self.config.power
        return regression(powered, self.config.gram, self.config.ridge)

    def alone(self, pairs: Vector, counts: Vector) -> Vector:
        """Return what pairs weigh by themselves: the regression with ``gram = 0``."""
        power = self.config.power
        weights: Vector = np.maximum(pairs, 0.0) ** power / (counts**power + self.config.ridge)
        return weights


def regression(powered: Block, gram: float, ridge: float) -> Block:
    """Return (D + gram · (F + Fᵀ) + ridge · I)⁻¹ F of the powered sums D + F."""
    counts = np.diag(powered).copy()
    np.fill_diagonal(powered, 0.0)
    matrix = gram * (powered + powered.T)
    np.fill_diagonal(matrix, counts + ridge)
    return solve_symmetric(matrix, powered)


def gaps(window: int, fade: float = 1.0) -> NDArray[np.float32]:
    """Return the weight of an item that comes 1, 2, … window steps later."""
    return (np.arange(1.0, window + 1) ** -fade).astype(np.float32)
