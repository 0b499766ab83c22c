"""The network of PrivRec and its rivals: features, or ids, through an MLP to one score (eq. 1).

All parameters of a network are one flat vector, so that a proximal term, a step and an upload are
one operation each; `Network.shapes` says where what is. The first layer is written as a sum of what
the user and what the item contribute: a client's own part is worked out once per step, not once
per sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec import neural
from hushrec.clients import TrainView
from hushrec.data.features import Encoded, encode
from hushrec.errors import ConfigError
from hushrec.methods.base import MethodConfig
from hushrec.neural import Tensor, torch
from hushrec.rng import Streams

Array = NDArray[Any]


class NetworkConfig(MethodConfig):
    """Options of every method with this network."""

    d: Annotated[int, Field(ge=1)] = 64
    """Width of an embedding."""
    hidden: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] = (
        64,
        32,
        16,
        8,
    )
    """Widths of the hidden layers."""
    lr: Annotated[float, Field(gt=0)] = 0.05
    """Rate of a step on the device (alpha1)."""
    epochs: Annotated[int, Field(ge=1)] = 5
    """Passes over the client's samples per round (E2)."""
    batch: Annotated[int, Field(ge=1)] = 32
    """Samples per step; the loss is a mean over them."""
    positive_above: float | None = None
    """A training row with a value above this is a positive, any other a negative.  [all positive]
    """
    negatives: Annotated[int, Field(ge=0, le=1000)] = 4
    """Items without a training row that are drawn as negatives, per row, afresh every round."""
    adapt_epochs: Annotated[int, Field(ge=0)] = 5
    """Passes over its samples that a device fine-tunes its copy for before it scores."""


@dataclass(frozen=True)
class Network:
    """The sizes of a network, and with them the places of its parameters in the flat vector."""

    user_fields: tuple[int, ...]
    """Length of the vocabulary of each categorical field of a user."""
    user_numbers: int
    item_fields: tuple[int, ...]
    item_numbers: int
    d: int
    hidden: tuple[int, ...]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes, in the order of the flat vector."""
        d, first = self.d, self.hidden[0]
        users = {f"user{k}": (size, d) for k, size in enumerate(self.user_fields)}
        items = {f"item{k}": (size, d) for k, size in enumerate(self.item_fields)}
        return {
            **users,
            **items,
            "first/user": (d * len(users) + self.user_numbers, first),
            "first/item": (d * len(items) + self.item_numbers, first),
            "first/bias": (first,),
            **neural.mlp_shapes((*self.hidden, 1)),
        }

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def initial(self, streams: Streams) -> NDArray[np.float32]:
        """Draw embeddings from N(0, 1), weights for layers of ReLUs (He et al. 2015), biases 0."""
        generator = streams.generator("init/network")
        inputs = self.shapes["first/user"][0] + self.shapes["first/item"][0]
        parts = []
        for name, shape in self.shapes.items():
            if name.endswith("bias"):
                parts.append(np.zeros(shape))
                continue
            drawn = generator.standard_normal(shape)
            if "/" in name:
                drawn *= math.sqrt(2 / (inputs if name.startswith("first") else shape[0]))
            parts.append(drawn)
        return np.concatenate([part.reshape(-1) for part in parts]).astype(np.float32)

    def unpack(self, theta: Tensor) -> dict[str, Tensor]:
        """Cut the flat vectors [clients, size] into parameters with a leading client axis."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        pieces = torch.split(theta, sizes, dim=1)
        return {
            name: piece.reshape(len(theta), *shape)
            for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }

    def logits(self, params: neural.Params, users: Tensor, items: Tensor) -> Tensor:
        """Score [clients, samples] from embedded users, [clients, 1 or samples, width], and items.

        Equation 1, without the output's sigmoid: the loss and the ranking take logits.
        """
        bias = params["first/bias"][:, None]
        first = torch.bmm(items, params["first/item"]) + torch.baddbmm(
            bias, users, params["first/user"]
        )
        return neural.mlp(params, torch.relu(first))[..., 0]

    def embedded(self, params: neural.Params, side: str, features: Features) -> Tensor:
        """Embed categories, put numbers beside them: [clients, rows, width]."""
        parts = [torch.bmm(bag, params[f"{side}{k}"]) for k, bag in enumerate(features.bags)]
        return torch.cat([*parts, features.numbers], -1)


@dataclass(frozen=True)
class Features:
    """Encoded rows as tensors."""

    bags: Sequence[Tensor]
    numbers: Tensor

    @classmethod
    def of(cls, encoded: Encoded) -> Features:
        """Turn encoded rows into tensors, [rows, …]."""
        bags = [torch.from_numpy(bag) for bag in encoded.bags]
        return cls(bags, torch.from_numpy(encoded.numbers))

    def take(self, rows: Tensor) -> Features:
        """Return these rows, in the shape of ``rows``."""
        return Features([bag[rows] for bag in self.bags], self.numbers[rows])


def network_of(config: NetworkConfig, view: TrainView, name: str) -> Network:
    """Return the network for these features; refuse data without any."""
    nobody = np.zeros(0, np.int64)
    users = encode(view.user_features, nobody, "user")
    items = encode(view.item_features, nobody, "item")
    if not view.item_features:
        raise ConfigError(
            f"{name} knows items by their features alone, and this data has none: use data with "
            "item features (ml-1m, ml-100k, frappe, demo), or give yours with 'hushrec data import "
            "… --items FILE --item-feature COLUMN'"
        )
    return Network(
        users.sizes,
        users.numbers.shape[1],
        items.sizes,
        items.numbers.shape[1],
        config.d,
        config.hidden,
    )


def proximal(
    theta: Tensor, received: Tensor, mu: float, kind: Literal["squared", "norm"]
) -> Tensor:
    """Return mu/2 times the squared distance from what was received, or the distance (eq. 7)."""
    squares = ((theta - received) ** 2).sum(1)
    # The root has no gradient at 0, where every client starts; the shift gives it one, 0.
    return mu / 2 * (squares if kind == "squared" else (squares + 1e-12).sqrt())
