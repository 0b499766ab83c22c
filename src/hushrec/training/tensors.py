"""Batched training of one small network per client with torch autograd.

Every parameter has a leading client axis, so a layer of all clients is one batched product. The
clients' losses are independent, so the gradient of their sum is each client's own gradient.

Clients are trained `GROUP` at a time on ``batch`` samples at a time, padded with clients and
samples of weight 0. All products then have the same shape, and a client's result does not depend on
the others, because rounding may depend on the shape. Each product uses one thread; the backend runs
several batches of clients at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import ClientRows
from hushrec.errors import MissingExtraError
from hushrec.kernels import ragged
from hushrec.kernels.draws import DeviceSamples
from hushrec.streams import Streams

try:
    # Methods import torch from here, for the error below.
    import torch as torch
except ImportError as error:
    raise MissingExtraError("a neural network", "neural") from error
from torch import Tensor as Tensor

torch.set_num_threads(1)

GROUP = 8
"""Clients per batched product."""

Array = NDArray[Any]
Params = Mapping[str, Tensor]
Arrays = Mapping[str, Array]


@dataclass(frozen=True)
class SampleBatch:
    """A batch of samples of `GROUP` clients: [clients, samples]."""

    labels: Tensor
    weights: Tensor
    """One over the size of the client's batch, 0 for padding; a weighted sum is a mean."""

    @property
    def active(self) -> Tensor:
        """1 for a client with samples in this step, 0 for one that has finished."""
        return (self.weights[:, 0] > 0).float()


@dataclass(frozen=True)
class DeviceBatch(SampleBatch):
    """A batch of samples of devices with one user each."""

    clients: Tensor
    """Indices of the clients; padding repeats the last one."""
    items: Tensor
    """Item of each sample; arbitrary for padding."""


LossOf = Callable[[Params, Params, DeviceBatch], Tensor]
"""(parameters, table rows of each sample, batch) -> loss of each client, [clients]."""


class DescentStep(NamedTuple):
    """One gradient step on a batch: the rates of the parameters and tables that it updates."""

    rates: Mapping[str, float]
    clip: float | None = None
    """Bound of the norm of each client's gradient."""


def train_tensors(
    params: Arrays,
    tables: Arrays,
    loss_of: LossOf,
    steps: Sequence[DescentStep],
    samples: DeviceSamples,
    batch: int,
    n_items: int,
) -> tuple[dict[str, Array], dict[str, ClientRows], NDArray[np.float64]]:
    """Train a batch of clients by SGD.

    ``params`` have a leading client axis. ``tables`` are shared initial tables [items, …], or the
    clients' own, [clients, items, …]. On every batch the ``steps`` are taken in order. Nothing is
    changed in place.

    Returns the parameters, the touched rows of every table after training, and each client's mean
    loss before each first step.
    """
    indptr, ids, row = ragged.number_by_first_use(samples.indptr, samples.items, n_items)
    trained = {name: np.array(array, np.float32) for name, array in params.items()}
    widths = {name: table.shape[-1] for name, table in tables.items()}
    rows = {name: np.empty((len(ids), width), np.float32) for name, width in widths.items()}
    losses = np.zeros(len(samples.indptr) - 1)
    for clients, real in groups_by_length(samples.lengths):
        state = {name: torch.from_numpy(array[clients]) for name, array in trained.items()}
        owned = [slice(indptr[c], indptr[c + 1]) for c in clients]
        most = max(1, *(own.stop - own.start for own in owned))
        local = {}
        for name, table in tables.items():
            received = np.zeros((GROUP, most, widths[name]), np.float32)
            for g, (c, own) in enumerate(zip(clients, owned, strict=True)):
                source = table if table.ndim == 2 else table[c]
                received[g, : own.stop - own.start] = source[ids[own]]
            local[name] = torch.from_numpy(received)
        total = torch.zeros(GROUP, dtype=torch.float64)
        for taken, slots in batches(samples, row, clients, batch):
            for number, descent in enumerate(steps):
                loss = _step(state, local, loss_of, descent, taken, slots)
                if number == 0:
                    total += loss.double() * taken.active
        count = np.maximum(1, -(-samples.lengths // batch) * samples.epochs)
        for g, c in enumerate(clients[:real]):
            losses[c] = float(total[g]) / count[c]
            for name, tensor in state.items():
                trained[name][c] = tensor[g].numpy()
            for name, tensor in local.items():
                rows[name][owned[g]] = tensor[g, : owned[g].stop - owned[g].start].numpy()
    return trained, {n: ClientRows(indptr, ids, array) for n, array in rows.items()}, losses


def _step(
    state: dict[str, Tensor],
    local: dict[str, Tensor],
    loss_of: LossOf,
    descent: DescentStep,
    step: DeviceBatch,
    slots: Tensor,
) -> Tensor:
    """Take one gradient step; return the clients' losses before it."""
    looked_up = {
        name: table.gather(1, slots[..., None].expand(-1, -1, table.shape[-1]))
        for name, table in local.items()
    }
    moving = {name: (state if name in state else looked_up)[name] for name in descent.rates}
    for tensor in moving.values():
        tensor.requires_grad_()
    losses = loss_of(state, looked_up, step)
    gradients = torch.autograd.grad((losses * step.active).sum(), list(moving.values()))
    if descent.clip is not None:
        squared = torch.zeros(GROUP)
        for name, gradient in zip(moving, gradients, strict=True):
            own = gradient
            if name in local:
                # The samples of a row add up: sum |sum g|^2 = sum <g, sum g>, in one shape for all.
                index = slots[..., None].expand_as(gradient)
                summed = torch.zeros_like(local[name]).scatter_add_(1, index, gradient)
                own = summed.gather(1, index)
            squared += (gradient * own).reshape(GROUP, -1).sum(1)
        factor = torch.clamp(descent.clip / (squared.sqrt() + 1e-6), max=1)
        gradients = tuple(g * factor.view(-1, *[1] * (g.ndim - 1)) for g in gradients)
    for (name, tensor), gradient in zip(moving.items(), gradients, strict=True):
        if name in state:
            state[name] = tensor.detach() - descent.rates[name] * gradient
        else:
            index = slots[..., None].expand_as(gradient)
            local[name].scatter_add_(1, index, -descent.rates[name] * gradient)
    return losses.detach()


def groups_by_length(lengths: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Yield groups of similar sample counts: (padded clients, number without padding)."""
    order = np.argsort(lengths, kind="stable")
    for start in range(0, len(order), GROUP):
        group = np.sort(order[start : start + GROUP])
        yield np.append(group, np.full(GROUP - len(group), group[-1])), len(group)


def batches(
    samples: DeviceSamples, row: NDArray[np.int64], clients: NDArray[np.int64], batch: int
) -> Iterator[tuple[DeviceBatch, Tensor]]:
    """Yield a group's batches, with the index of each sample's item among the client's rows."""
    real = len(np.unique(clients))
    lengths = np.where(np.arange(GROUP) < real, samples.lengths[clients], 0)
    starts = samples.indptr[clients]
    whole = torch.from_numpy(clients)
    for epoch in range(samples.epochs):
        for first in range(0, int(lengths.max(initial=0)), batch):
            sizes = np.clip(lengths - first, 0, batch)
            valid = np.arange(batch) < sizes[:, None]
            at = (starts + epoch * lengths + first)[:, None] + np.arange(batch)
            at = np.where(valid, at, 0)
            yield (
                DeviceBatch(
                    torch.from_numpy(samples.labels[at]),
                    mean_weights(sizes, valid),
                    whole,
                    torch.from_numpy(samples.items[at].astype(np.int64)),
                ),
                torch.from_numpy(np.where(valid, row[at], 0)),
            )


def padded(rows: Array, owned: Sequence[slice], length: int) -> NDArray[np.float32]:
    """Return each client's rows, padded with zeros: [clients of a group, length, width]."""
    out = np.zeros((GROUP, length, rows.shape[1]), np.float32)
    for number, own in enumerate(owned):
        out[number, : own.stop - own.start] = rows[own]
    return out


def mean_weights(sizes: NDArray[np.int64], valid: NDArray[np.bool_]) -> Tensor:
    """Return weights that turn a sum over each client's valid samples into their mean."""
    weights = np.where(valid, 1 / np.maximum(sizes, 1)[:, None], 0.0)
    return torch.from_numpy(weights.astype(np.float32))


def mean_bce(logits: Tensor, batch: SampleBatch) -> Tensor:
    """Return each client's mean binary cross-entropy."""
    entropy = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, batch.labels, reduction="none"
    )
    return (entropy * batch.weights).sum(1)


def mlp_shapes(widths: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the weights and biases of an MLP, input width first."""
    shapes: dict[str, tuple[int, ...]] = {}
    for number, (n_in, n_out) in enumerate(pairwise(widths)):
        shapes[f"layer{number}/weight"] = (n_in, n_out)
        shapes[f"layer{number}/bias"] = (n_out,)
    return shapes


def initial_mlp(widths: Sequence[int], streams: Streams, purpose: str) -> dict[str, Array]:
    """Draw weights and biases from U(-1/sqrt(inputs), 1/sqrt(inputs))."""
    generator = streams.generator(purpose)
    drawn = {}
    for name, shape in mlp_shapes(widths).items():
        bound = 1 / math.sqrt(widths[int(name.removeprefix("layer").split("/")[0])])
        drawn[name] = generator.uniform(-bound, bound, shape).astype(np.float32)
    return drawn


def mlp(params: Params, inputs: Tensor) -> Tensor:
    """Run each client's network on its inputs [clients, samples, width]; ReLU between layers."""
    depth = sum(name.startswith("layer") for name in params) // 2
    out = inputs
    for number in range(depth):
        weight, bias = params[f"layer{number}/weight"], params[f"layer{number}/bias"]
        out = torch.baddbmm(bias[:, None, :], out, weight)
        if number < depth - 1:
            out = torch.relu(out)
    return out


def mlp_layers(params: Params) -> list[tuple[Array, Array]]:
    """Return the weights and biases of the network of a batch of one client, first layer first."""
    depth = sum(name.startswith("layer") for name in params) // 2
    names = [(f"layer{k}/weight", f"layer{k}/bias") for k in range(depth)]
    return [(params[w][0].numpy(), params[b][0].numpy()) for w, b in names]


def groups_in_order(n_clients: int) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Yield groups of clients in order: (padded clients, number without padding)."""
    return groups_by_length(np.zeros(n_clients, np.int64))


def repeat(arrays: Arrays, clients: int) -> dict[str, Array]:
    """Return the received parameters repeated for every client."""
    return {n: np.broadcast_to(a, (clients, *a.shape)) for n, a in arrays.items()}
