"""The network of PrivRec and its rivals: features, or ids, through an MLP to one score (eq. 1).

All parameters of a network are one flat vector, so that a proximal term, a step and an upload are
one operation each; `FeatureNetwork.shapes` says where what is. The first layer is written as a sum
of what the user and what the item contribute: a client's own part is worked out once per step, not
once per sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hushrec import kernels
from hushrec.aggregation import ClientRows
from hushrec.data.features import encode
from hushrec.data.views import TrainView
from hushrec.errors import ConfigError
from hushrec.kernels.feature_networks import (
    FeatureSamples,
    Inputs,
    Layout,
    ProximalDescent,
    fit_feature_networks,
)
from hushrec.kernels.layers import Side
from hushrec.streams import Streams
from hushrec.training import tensors
from hushrec.training.samples import DeviceSamples
from hushrec.training.tensors import Tensor, torch

Array = NDArray[Any]


@dataclass(frozen=True)
class FeatureNetwork:
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
            **tensors.mlp_shapes((*self.hidden, 1)),
        }

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

    @cached_property
    def layout(self) -> Layout:
        """The places of the parameters, for the kernels."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes.values()])
        start = dict(zip(self.shapes, (int(end) for end in (0, *ends)), strict=False))
        depth = range(len(self.hidden))

        def side(name: str, embeddings: int, fields: tuple[int, ...], numbers: int) -> Side:
            columns = np.cumsum([0, *fields, numbers])
            return Side(embeddings, start[f"first/{name}"], columns)

        return Layout(
            self.d,
            side("user", 0, self.user_fields, self.user_numbers),
            side("item", sum(self.user_fields) * self.d, self.item_fields, self.item_numbers),
            start["first/bias"],
            np.array([*self.hidden, 1]),
            np.array([start[f"layer{k}/weight"] for k in depth]),
            np.array([start[f"layer{k}/bias"] for k in depth]),
        )

    def unpack(self, theta: Tensor) -> dict[str, Tensor]:
        """Cut the flat vectors [clients, size] into parameters with a leading client axis."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        pieces = torch.split(theta, sizes, dim=1)
        return {
            name: piece.reshape(len(theta), *shape)
            for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }

    def first_layer(self, params: tensors.Params, side: Literal["user", "item"]) -> Tensor:
        """Return what each feature of a side adds to the first layer, [clients, features, width].

        Embeddings enter the first layer linearly, so a category's embedding times its weights is
        one row: a table of as many rows as categories is cheaper than embedding every sample.
        """
        weights = params[f"first/{side}"]
        n_fields = len(self.user_fields if side == "user" else self.item_fields)
        fields, numbers = weights[:, : n_fields * self.d], weights[:, n_fields * self.d :]
        rows = [
            torch.bmm(params[f"{side}{k}"], fields[:, k * self.d : (k + 1) * self.d])
            for k in range(n_fields)
        ]
        return torch.cat([*rows, numbers], 1)

    def logits(self, params: tensors.Params, users: Tensor, items: Tensor) -> Tensor:
        """Score [clients, samples] from features [clients, 1 or samples, …] (equation 1).

        Without the output's sigmoid: the loss and the ranking take logits.
        """
        from_user = torch.bmm(users, self.first_layer(params, "user"))
        from_item = torch.bmm(items, self.first_layer(params, "item"))
        first = torch.relu(from_item + (from_user + params["first/bias"][:, None]))
        return tensors.mlp(params, first)[..., 0]


def feature_network_of(
    view: TrainView, d: int, hidden: tuple[int, ...], method: str
) -> FeatureNetwork:
    """Return the network for these features; refuse data without any."""
    nobody = np.zeros(0, np.int64)
    users = encode(view.user_features, nobody, "user")
    items = encode(view.item_features, nobody, "item")
    if not view.item_features:
        raise ConfigError(
            f"{method} knows items by their features alone, and this data has none: use data with "
            "item features (ml-1m, ml-100k, frappe, demo), or give yours with 'hushrec data import "
            "… --items FILE --item-feature COLUMN'"
        )
    return FeatureNetwork(users.fields, users.numbers, items.fields, items.numbers, d, hidden)


def proximal(
    theta: Tensor, received: Tensor, mu: float, kind: Literal["squared", "norm"]
) -> Tensor:
    """Return mu/2 times the squared distance from what was received, or the distance (eq. 7)."""
    apart = theta - received
    squares = (apart * apart).sum(1)
    # The root has no gradient at 0, where every client starts; the shift gives it one, 0.
    return mu / 2 * (squares if kind == "squared" else (squares + 1e-12).sqrt())


def train_feature_networks(
    network: FeatureNetwork,
    descent: ProximalDescent,
    theta: NDArray[np.float32],
    features: tuple[NDArray[np.float32], NDArray[np.float32]],
    samples: DeviceSamples,
    batch: int,
) -> tuple[NDArray[np.float32], ClientRows, NDArray[np.float64]]:
    """Train a copy of theta for each client on its samples.

    ``features`` are a row of inputs per client, and one per item. Where the descent has a rate for
    them, the items are a table that is trained as well, each client's rows apart. Returns the
    copies, the touched rows of that table as the clients left them, and each client's mean loss
    before its steps.
    """
    n_clients, (users, items) = len(samples.indptr) - 1, features
    indptr, ids, sample_item = np.zeros(n_clients + 1, np.int64), samples.items[:0], samples.items
    if descent.item_lr:
        indptr, ids, sample_item = kernels.number_by_first_use(
            samples.indptr, samples.items, len(items)
        )
        items = items[ids]
    copies = np.repeat(theta[None], n_clients, 0)
    owner = np.repeat(np.arange(n_clients), np.diff(samples.indptr))
    losses = fit_feature_networks(
        copies,
        theta,
        Inputs(users, items, indptr),
        FeatureSamples(
            samples.indptr, owner, sample_item.astype(np.int64), samples.labels, samples.epochs
        ),
        batch,
        network.layout,
        descent,
    )
    return copies, ClientRows(indptr, ids, items[: len(ids)]), losses


def train_pooled_network(
    network: FeatureNetwork,
    descent: ProximalDescent,
    theta: NDArray[np.float32],
    features: tuple[NDArray[np.float32], NDArray[np.float32]],
    samples: DeviceSamples,
    order: NDArray[np.int64],
    batch: int,
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Train one copy of theta, [1, size], on everybody's samples in this order; and its loss."""
    copy = theta[None].copy()
    owner = np.repeat(np.arange(len(samples.lengths)), samples.lengths)[order]
    items = samples.items[order].astype(np.int64)
    whole = FeatureSamples(np.array([0, len(order)]), owner, items, samples.labels[order], 1)
    inputs = Inputs(*features, np.zeros(2, np.int64))
    loss = fit_feature_networks(copy, theta, inputs, whole, batch, network.layout, descent)
    return copy, loss
