"""The network of PrivRec and its rivals: features, or ids, through an MLP to one score (eq. 1).

All parameters of a network are one flat vector, so that a proximal term, a step and an upload are
one operation each; `Network.shapes` says where what is. The first layer is written as a sum of what
the user and what the item contribute: a client's own part is worked out once per step, not once
per sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec import kernels, neural
from hushrec.aggregate import RowStack
from hushrec.clients import TrainView
from hushrec.data.features import encode
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

    def first_layer(self, params: neural.Params, side: Literal["user", "item"]) -> Tensor:
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

    def logits(self, params: neural.Params, users: Tensor, items: Tensor) -> Tensor:
        """Score [clients, samples] from features [clients, 1 or samples, …] (equation 1).

        Without the output's sigmoid: the loss and the ranking take logits.
        """
        from_user = torch.bmm(users, self.first_layer(params, "user"))
        from_item = torch.bmm(items, self.first_layer(params, "item"))
        return self.rest(params, from_user, from_item)

    def rest(self, params: neural.Params, from_user: Tensor, from_item: Tensor) -> Tensor:
        """Go on from what users and items contribute to the first layer."""
        first = torch.relu(from_item + (from_user + params["first/bias"][:, None]))
        return neural.mlp(params, first)[..., 0]


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
        users.fields,
        users.numbers,
        items.fields,
        items.numbers,
        config.d,
        config.hidden,
    )


def proximal(
    theta: Tensor, received: Tensor, mu: float, kind: Literal["squared", "norm"]
) -> Tensor:
    """Return mu/2 times the squared distance from what was received, or the distance (eq. 7)."""
    apart = theta - received
    squares = (apart * apart).sum(1)
    # The root has no gradient at 0, where every client starts; the shift gives it one, 0.
    return mu / 2 * (squares if kind == "squared" else (squares + 1e-12).sqrt())


@dataclass(frozen=True)
class Descent:
    """Minibatch SGD on many copies of a network at once, in place and without a graph.

    The gradient of every layer is one product that goes straight into the parameters; autograd
    writes it out first, and moving the parameters through memory is what a step costs. The tests
    hold it to `Network.logits`, which NN-SELF differentiates twice.
    """

    network: Network
    lr: float
    mu: float = 0.0
    kind: Literal["squared", "norm"] = "squared"

    def step(
        self,
        theta: Tensor,
        received: Tensor,
        users: Tensor,
        items: Tensor,
        batch: neural.Batch,
        item_rate: float | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Move the copies ``theta`` [clients, size] one step downhill.

        Returns each client's mean cross-entropy before it and, with ``item_rate``, how far the
        inputs ``items`` themselves should move, for methods whose inputs are trained.
        """
        pull = self._pull(theta, received, batch.active) if self.mu else None
        params = self.network.unpack(theta)
        tables = {side: self.network.first_layer(params, side) for side in ("user", "item")}
        hidden = torch.baddbmm(params["first/bias"][:, None], users, tables["user"])
        outputs = [torch.relu_(torch.bmm(items, tables["item"]) + hidden)]
        depth = len(self.network.hidden)
        for k in range(depth):
            bias, weight = params[f"layer{k}/bias"][:, None], params[f"layer{k}/weight"]
            outputs.append(torch.baddbmm(bias, outputs[-1], weight))
            if k < depth - 1:
                outputs[-1].relu_()
        logits = outputs.pop()[..., 0]
        losses = neural.mean_bce(logits, batch)
        error = ((torch.sigmoid(logits) - batch.labels) * batch.weights)[..., None]
        for k in range(depth - 1, -1, -1):
            weight, below = params[f"layer{k}/weight"], outputs[k]
            passed = torch.bmm(error, weight.transpose(1, 2))
            weight.baddbmm_(below.transpose(1, 2), error, alpha=-self.lr)
            params[f"layer{k}/bias"].sub_(error.sum(1), alpha=self.lr)
            error = passed.mul_(below > 0)
        moved = None
        if item_rate is not None:
            moved = torch.bmm(error, tables["item"].transpose(1, 2)).mul_(-item_rate)
        summed = error.sum(1, keepdim=True)
        params["first/bias"].sub_(summed[:, 0], alpha=self.lr)
        one_user = users.shape[1] == 1
        self._first(params, "user", torch.bmm(users.transpose(1, 2), summed if one_user else error))
        self._first(params, "item", torch.bmm(items.transpose(1, 2), error))
        if pull is not None:
            theta.sub_(pull)
        return losses, moved

    def _pull(self, theta: Tensor, received: Tensor, active: Tensor) -> Tensor:
        """Return what the proximal term takes off, for clients that are not done."""
        apart, strength = theta - received, self.lr * self.mu * active
        if self.kind == "norm":
            strength = strength / (2 * ((apart * apart).sum(1) + 1e-12).sqrt())
        return apart.mul_(strength[:, None])

    def _first(self, params: neural.Params, side: Literal["user", "item"], table: Tensor) -> None:
        """Carry the gradient of a side's first-layer table to weights and embeddings."""
        d, start = self.network.d, 0
        weights = params[f"first/{side}"]
        fields = self.network.user_fields if side == "user" else self.network.item_fields
        for k, size in enumerate(fields):
            gradient, own = table[:, start : start + size], weights[:, k * d : (k + 1) * d]
            embedding = params[f"{side}{k}"]
            passed = torch.bmm(gradient, own.transpose(1, 2))
            own.baddbmm_(embedding.transpose(1, 2), gradient, alpha=-self.lr)
            embedding.sub_(passed, alpha=self.lr)
            start += size
        weights[:, len(fields) * d :].sub_(table[:, start:], alpha=self.lr)


def train_copies(
    descent: Descent,
    theta: NDArray[np.float32],
    users: NDArray[np.float32],
    items: NDArray[np.float32],
    samples: neural.Samples,
    batch: int,
    item_rate: float | None = None,
) -> tuple[NDArray[np.float32], RowStack, NDArray[np.float64]]:
    """Train a copy of theta for each client on its samples.

    ``users`` has a row of inputs per client, ``items`` one per item. With ``item_rate`` the items
    are a table that is trained as well, each client's rows apart. Returns the copies, the touched
    rows of that table as the clients left them, and each client's mean loss before its steps.
    """
    n_clients, width = len(samples.indptr) - 1, items.shape[1]
    copies, losses = np.repeat(theta[None], n_clients, 0), np.zeros(n_clients)
    indptr, ids, place = kernels.places(samples.indptr, samples.items, len(items))
    rows = items[ids] if item_rate is not None else np.zeros((0, width), np.float32)
    received, mine, inputs = map(torch.from_numpy, (theta, users, items))
    for clients in neural.groups(samples, batch):
        state = torch.from_numpy(copies[clients])
        total, steps = torch.zeros(neural.GROUP), torch.zeros(neural.GROUP)
        owned = [slice(indptr[c], indptr[c + 1]) for c in clients]
        if item_rate is not None:
            local = torch.zeros(neural.GROUP, max(own.stop - own.start for own in owned), width)
            for g, own in enumerate(owned):
                local[g, : own.stop - own.start] = torch.from_numpy(rows[own])
        for step, slots in neural.batches(samples, place, clients, batch):
            index = slots[..., None].expand(-1, -1, width)
            theirs = inputs[step.items] if item_rate is None else local.gather(1, index)
            before, moved = descent.step(
                state, received, mine[step.clients][:, None], theirs, step, item_rate
            )
            if moved is not None:
                local.scatter_add_(1, index, moved)
            total += before
            steps += step.active
        real = np.unique(clients)
        copies[real] = state.numpy()[: len(real)]
        losses[real] = (total / steps.clamp(min=1)).numpy()[: len(real)]
        if item_rate is not None:
            for g in range(len(real)):
                rows[owned[g]] = local[g, : owned[g].stop - owned[g].start].numpy()
    if item_rate is None:
        indptr, ids = np.zeros(n_clients + 1, np.int64), ids[:0]
    return copies, RowStack(indptr, ids, rows), losses
