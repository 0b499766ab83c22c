"""Forms for devices: how a method scores, as a few kinds of arithmetic over arrays.

A method with such a form inherits `base.Exports` or `base.ExportsUser`. `hushrec.serving.bundle`
writes a form, and `hushrec.serving.recommender` computes it with numpy alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Part:
    """Some of an expert's scores, of a kind that `serving.recommender` can compute."""

    kind: str
    options: Mapping[str, Any]
    arrays: Mapping[str, Array]


@dataclass(frozen=True)
class ItemWeights:
    """Form for devices: popularity plus item-to-item weights from the latest items."""

    neighbours: Array
    """Items that each item has weights to: [items, neighbours]."""
    weights: Array
    shares: Array
    """Each item's share of all interactions: [items]."""
    known: Array
    """Whether an item of a history counts: [items]."""
    because: str
    """What a large weight from an item of the history says, as "often after {}"."""
    recency: float
    """The g-th last item weighs g^-recency."""
    recent: int
    """How many of the last items count."""
    popularity: float
    """Factor of the shares."""


@dataclass(frozen=True)
class Ensemble:
    """Form for devices: a weighted sum of expert scores, and networks that rerank the best."""

    experts: Mapping[str, tuple[str, Sequence[Part]]]
    """For each expert the words of its reason, and its scores in parts."""
    weights: Array
    center: Array
    scale: Array
    networks: Array
    """Parameters: [networks, parameters of one]; the mean of their outputs counts."""
    hidden: int
    reranked: int
    """How many of the best items the networks score; 0 leaves them out."""


@dataclass(frozen=True)
class ItemCounts:
    """Form for devices: a score for every item, plus the user's own count of the item."""

    scores: Array
    own: float = 0.0
    """What every occurrence of an item in the history adds to its score."""


@dataclass(frozen=True)
class ItemFactors:
    """Form for devices: inner products of item vectors with a vector from the history.

    The vector x solves ``(unseen G + Σ q qᵀ + r I) x = factor · Σ q`` with the sums over the
    distinct items of the history, G the sum of q qᵀ over all m items, and
    ``r = ridge · (distinct items + unseen · m)^frequency``. Without ``ridge`` it is the sum over
    the ``recent`` last known items, the g-th last times g^-recency.
    """

    items: Array
    """Item vectors q: [items, d]."""
    ridge: float | None = None
    unseen: float = 0.0
    frequency: float = 0.0
    factor: float = 1.0
    known: Array | None = None
    """Whether an item of a history counts in the sum: [items]; None: all do."""
    recency: float = 0.0
    recent: int = 1
    reads_values: bool = False
    """Whether the run reads the values of a user's interactions, which no bundle holds."""


Layer = tuple[Array, Array]
"""Weights [inputs, outputs] and biases [outputs] of a dense layer."""


@dataclass(frozen=True)
class RowNetwork:
    """Dense layers with ReLU between them over the row of an item; the last one has one output."""

    rows: Array
    """Item rows: [items, inputs of the first layer]."""
    layers: Sequence[Layer]

    @classmethod
    def of(cls, rows: Array, parameters: Mapping[str, Array]) -> RowNetwork:
        """Return the network of one client's parameters.

        These are "layer0/weight", "layer0/bias", … and, if the client's vector precedes the row in
        the first layer's inputs, "vector". Without layers the score is the inner product with
        "vector" plus "bias", if there is one.
        """
        vector = parameters.get("vector")
        count = sum(name.startswith("layer") for name in parameters) // 2
        if not count:
            bias = np.reshape(parameters.get("bias", np.zeros(1, np.float32)), 1)
            return cls(rows, [(np.asarray(vector)[:, None], bias)])
        layers = [
            (parameters[f"layer{k}/weight"], parameters[f"layer{k}/bias"]) for k in range(count)
        ]
        if vector is not None:
            # The vector is the same for all items, so its part of the first layer is a bias.
            weight, bias = layers[0]
            layers[0] = weight[len(vector) :], bias + vector @ weight[: len(vector)]
        return cls(rows, layers)


@dataclass(frozen=True)
class ItemNetworks:
    """Form for devices: the sum of networks over item rows; no score depends on the history."""

    branches: Sequence[RowNetwork]


DeviceForm = ItemWeights | Ensemble | ItemCounts | ItemFactors | ItemNetworks
"""What `hushrec.serving.bundle` writes and `hushrec.serving.recommender` computes."""
