"""Networks of silos: one per client, with samples of many users, batched tensors and sparse rows.

Like `training.tensors`, but a client's batch has samples of several users, and the optimiser is
Adam, SGD, or Adam with a Moreau envelope. Optimiser states start again in every round. Table rows
are updated only in steps whose batch contains them (lazy Adam), so a step costs as much as its
batch, not as the catalogue. Padding uses a spare row that is never read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hushrec.kernels import layers
from hushrec.training.samples import SiloSamples
from hushrec.training.tensors import (
    GROUP,
    Array,
    Arrays,
    Params,
    SampleBatch,
    Tensor,
    groups_by_length,
    mean_weights,
    padded,
    torch,
)


@dataclass(frozen=True)
class Optimiser:
    """Adam (Kingma and Ba) or plain SGD, possibly with a Moreau envelope (see `pfedme`)."""

    rate: float
    adam: bool = True
    repeats: int = 1
    """Number of steps on each batch."""
    pull: float = 0.0
    """Weight of half the squared distance from the anchors in the loss."""
    follow: float | None = None
    """Share of the distance by which anchors follow after a batch; None without anchors."""

    def factors(self, number: int) -> tuple[float, float | None]:
        """Return the rate of a step, counted from 1, and Adam's correction of the squares."""
        if not self.adam:
            return self.rate, None
        return self.rate / (1 - layers.DECAY_FIRST**number), 1 / (1 - layers.DECAY_SECOND**number)


class OptimiserState:
    """Networks or table rows of a group, with the state of the optimiser."""

    def __init__(self, values: Array, optimiser: Optimiser, *, moves: bool, shared: bool) -> None:
        self.values, self.optimiser = values, optimiser
        anchored = shared and optimiser.follow is not None
        self.anchors = values.copy() if anchored else values
        """Anchors of a Moreau envelope; private parameters have none."""
        shape = values.shape if moves else (0, 0)
        self.first, self.second = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.summed = np.zeros((shape[0], shape[1] + 1), np.float32)
        self._held = values, self.first, self.second, self.anchors, optimiser.pull * anchored

    def move_network(self, gradient: Array, start: int, active: Array, number: int) -> None:
        """Update the parameter at offset ``start`` of the active clients."""
        factors = self.optimiser.factors(number)
        layers.step_networks(self._held, gradient, start, active, *factors)

    def move_rows(self, gradient: Array, index: Array, number: int) -> None:
        """Update the distinct rows of ``index``, each with the sum of its gradients."""
        factors = self.optimiser.factors(number)
        layers.step_rows(self._held, gradient, index, self.summed, *factors)

    def move_anchors(self, rows: Array) -> None:
        """Let the anchors of these rows follow."""
        if self.anchors is not self.values:
            share = np.float32(self.optimiser.follow)
            self.anchors[rows] += share * (self.values[rows] - self.anchors[rows])


LANES = 16
"""Flat parameters are padded to a multiple of this length, for vector instructions."""

Shapes = Mapping[str, tuple[int, ...]]

SiloLoss = Callable[[Params, Params, Params, SampleBatch], Tensor]
"""(network, trained rows of the samples, fixed rows of the samples, batch) -> loss per client."""


@dataclass(frozen=True)
class SiloProblem:
    """Loss and samples of a batch of clients."""

    shapes: Shapes
    """Shapes of the network's parameters, in the order of the flat vector."""
    loss: SiloLoss
    samples: SiloSamples
    batch: int
    fixed: Mapping[str, Array]
    """Rows of every user that enter the loss and are not trained."""
    user_indptr: NDArray[np.int64]
    """Offsets of the clients' users in those rows."""
    decay: float = 0.0
    """Weight of the mean squared norm of the samples' rows, added to the loss."""


def unpack_flat(flat: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    """Return named views of flat parameters, [clients, …]."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    pieces: tuple[Tensor, ...] = torch.split(flat[:, : sum(sizes)], sizes, 1)
    return {
        name: piece.view(len(flat), *shape)
        for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
    }


def pack_flat(arrays: Arrays, shapes: Shapes) -> NDArray[np.float32]:
    """Return named arrays as one flat vector, padded to `LANES`."""
    joined = np.concatenate([np.asarray(arrays[name], np.float32).ravel() for name in shapes])
    return np.pad(joined, (0, -len(joined) % LANES))


class SiloModel(NamedTuple):
    """Parameters of a batch of silos."""

    network: NDArray[np.float32]
    """[clients, flat]"""
    users: NDArray[np.float32]
    """One row per user."""
    items: NDArray[np.float32]
    """One row per client and touched item."""


class TrainedSilos(NamedTuple):
    """Result of training a batch of silos."""

    model: SiloModel
    anchors: SiloModel
    """Final anchors of the optimiser; the model if it has none."""
    losses: NDArray[np.float64]
    """Mean loss of each client before each step."""


def train_silo_networks(
    problem: SiloProblem,
    start: SiloModel,
    optimiser: Optimiser,
    *,
    only: Collection[str] | None = None,
    steps: int | None = None,
) -> TrainedSilos:
    """Train a batch of silos; nothing is changed in place.

    With ``only``, these parameters of the network are trained, and no rows; ``steps`` is the
    largest number of steps of a client.
    """
    done = TrainedSilos(deepcopy(start), deepcopy(start), np.zeros(len(start.network)))
    for clients, real in groups_by_length(problem.samples.lengths):
        group = _Group(problem, start, clients, real, optimiser, only)
        for number, batch in enumerate(group.batches(steps)):
            group.take_step(number, *batch)
        group.give_back(done)
    return done


class _Table:
    """Rows of a group: [clients * (most + 1), width]; each client's last row is spare."""

    def __init__(self, rows: Array, indptr: NDArray[np.int64], real: NDArray[np.int64]) -> None:
        self.owned = [slice(indptr[c], indptr[c + 1]) for c in real]
        self.most = max([own.stop - own.start for own in self.owned], default=0)
        values = padded(rows, self.owned, self.most + 1)
        self.values = torch.from_numpy(values.reshape(-1, rows.shape[1]))
        self.base = (np.arange(GROUP) * (self.most + 1))[:, None]

    def index(self, rows: NDArray[np.int64], valid: NDArray[np.bool_]) -> Tensor:
        """Return flat indices of these rows, [clients, samples] flattened."""
        return torch.from_numpy((self.base + np.where(valid, rows, self.most)).reshape(-1))

    def look_up(self, index: Tensor) -> Tensor:
        return self.values.index_select(0, index).view(GROUP, -1, self.values.shape[1])

    def give_back(self, values: Array, rows: Array) -> None:
        whole = values.reshape(GROUP, self.most + 1, -1)
        for number, own in enumerate(self.owned):
            rows[own] = whole[number, : own.stop - own.start]


class _Group:
    """`GROUP` clients in training."""

    def __init__(
        self,
        problem: SiloProblem,
        start: SiloModel,
        clients: NDArray[np.int64],
        real: int,
        optimiser: Optimiser,
        only: Collection[str] | None,
    ) -> None:
        self.problem, self.clients, self.real = problem, clients, clients[:real]
        self.optimiser, self.only = optimiser, only
        flat = torch.from_numpy(start.network[clients])
        parts = unpack_flat(flat, problem.shapes)
        self.network = {name: part.detach().requires_grad_() for name, part in parts.items()}
        indptr = problem.user_indptr
        self.tables = {
            "users": _Table(start.users, indptr, self.real),
            "items": _Table(start.items, problem.samples.touched.indptr, self.real),
        }
        self.fixed = {name: _Table(rows, indptr, self.real) for name, rows in problem.fixed.items()}
        values = {"network": flat, **{name: t.values for name, t in self.tables.items()}}
        self.held = {}
        for name, array in values.items():
            moves, is_shared = only is None or name == "network", name != "users"
            state = OptimiserState(array.numpy(), optimiser, moves=moves, shared=is_shared)
            self.held[name] = state
        self.total = torch.zeros(GROUP, dtype=torch.float64)
        self.count = np.zeros(GROUP)

    def batches(self, limit: int | None) -> Iterator[tuple[SampleBatch, Tensor, Tensor]]:
        samples, size = self.problem.samples, self.problem.batch
        lengths = np.where(np.arange(GROUP) < len(self.real), samples.lengths[self.clients], 0)
        starts = samples.order.indptr[self.clients]
        # Clients start their next epoch independently, so step n is the n-th step of each.
        per_epoch = np.maximum(1, -(-lengths // size))
        last = int((per_epoch * (lengths > 0)).max()) * samples.epochs
        for number in range(last if limit is None else min(last, limit)):
            epoch, first = number // per_epoch, number % per_epoch * size
            sizes = np.where(epoch < samples.epochs, np.clip(lengths - first, 0, size), 0)
            self.count += sizes > 0
            valid = np.arange(size) < sizes[:, None]
            at = (starts + epoch * lengths + first)[:, None] + np.arange(size)
            at = samples.order.values[np.where(valid, at, 0)]
            yield (
                SampleBatch(torch.from_numpy(samples.labels[at]), mean_weights(sizes, valid)),
                self.tables["users"].index(samples.users[at], valid),
                self.tables["items"].index(samples.rows[at], valid),
            )

    def take_step(self, number: int, step: SampleBatch, users: Tensor, items: Tensor) -> None:
        """Take the optimiser's steps on one batch; ``number`` counts batches from 0."""
        for k in range(self.optimiser.repeats):
            losses = self._descend(number * self.optimiser.repeats + k + 1, step, users, items)
            if k == 0:
                self.total += losses * step.active
        self.held["network"].move_anchors(np.flatnonzero(step.active.numpy()))
        self.held["items"].move_anchors(np.unique(items.numpy()))

    def _descend(self, number: int, step: SampleBatch, users: Tensor, items: Tensor) -> Tensor:
        """Take one step; return the clients' losses before it."""
        index = {"users": users, "items": items}
        rows = {name: table.look_up(index[name]) for name, table in self.tables.items()}
        fixed = {name: table.look_up(users) for name, table in self.fixed.items()}
        learning = list(rows) if self.only is None else []
        moving = [*self.network.values(), *(rows[name].requires_grad_() for name in learning)]
        losses = self.problem.loss(self.network, rows, fixed, step)
        summed = (losses * step.active).sum()
        gradients = torch.autograd.grad(summed, moving, materialize_grads=True)
        offset = 0
        for name, gradient in zip(self.network, gradients, strict=False):
            own = gradient.reshape(GROUP, -1).numpy()
            if self.only is None or name in self.only:
                self.held["network"].move_network(own, offset, step.active.numpy(), number)
            offset += own.shape[1]
        shrink = (2 * self.problem.decay * step.weights)[..., None]
        for name, gradient in zip(learning, gradients[len(self.network) :], strict=True):
            decayed = torch.addcmul(gradient, rows[name].detach(), shrink)
            flat = decayed.reshape(-1, decayed.shape[-1]).numpy()
            self.held[name].move_rows(flat, index[name].numpy(), number)
        return losses.detach().double()

    def give_back(self, done: TrainedSilos) -> None:
        """Write the results of these clients."""
        held, real = self.held, len(self.real)
        done.losses[self.real] = self.total.numpy()[:real] / np.maximum(1, self.count[:real])
        done.model.network[self.real] = held["network"].values[:real]
        done.anchors.network[self.real] = held["network"].anchors[:real]
        for name, table in self.tables.items():
            table.give_back(held[name].values, getattr(done.model, name))
            table.give_back(held[name].anchors, getattr(done.anchors, name))
