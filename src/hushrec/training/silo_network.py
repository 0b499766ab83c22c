"""Networks of silos: one per client, with samples of many users, batched tensors and sparse rows.

Like `training.tensors`, but a client's batch has samples of several users, and the optimiser is
Adam, SGD, or Adam with a Moreau envelope. Optimiser states start again in every round. Table rows
are updated only in steps whose batch contains them (lazy Adam), so a step costs as much as its
batch, not as the catalogue. Padding uses a spare row that is never read.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import ClientRows
from hushrec.data.views import TrainView
from hushrec.kernels.layers import (
    adam_network,
    adam_rows,
    descend_network,
    descend_rows,
    follow_rows,
)
from hushrec.training.samples import SiloSamples
from hushrec.training.tensors import (
    GROUP,
    Array,
    Arrays,
    Params,
    SampleBatch,
    Tensor,
    groups_by_length,
    torch,
)


class OptimiserState:
    """Networks or table rows of a group, with the state of the optimiser."""

    def __init__(self, values: Array, optimiser: Optimiser, *, moves: bool, shared: bool) -> None:
        self.values = values
        self.anchors = values.copy() if optimiser.anchored and shared else values
        """Anchors of a Moreau envelope; private parameters have none."""
        shape = values.shape if moves else (0, 0)
        self.first, self.second = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.summed = np.zeros((shape[0], shape[1] + 1), np.float32)
        """Buffer for sums of row gradients and a mark; 0 between steps."""


@dataclass(frozen=True)
class Optimiser(ABC):
    """Update of parameters by a gradient; ``number`` counts steps from 1."""

    anchored: ClassVar[bool] = False
    """Whether shared parameters have anchors, which follow them."""

    @property
    def repeats(self) -> int:
        """Number of steps on each batch."""
        return 1

    @abstractmethod
    def move_network(
        self, held: OptimiserState, gradient: Array, start: int, active: Array, number: int
    ) -> None:
        """Update the parameter at offset ``start`` of the active clients."""

    @abstractmethod
    def move_rows(self, held: OptimiserState, gradient: Array, index: Array, number: int) -> None:
        """Update the distinct rows of ``index``, each with the sum of its gradients."""

    def move_anchors(
        self, network: OptimiserState, items: OptimiserState, active: Array, index: Array
    ) -> None:
        """Move the anchors after a batch; by default there are none."""
        return


@dataclass(frozen=True)
class PlainSGD(Optimiser):
    """Plain SGD."""

    rate: float

    def move_network(
        self, held: OptimiserState, gradient: Array, start: int, active: Array, number: int
    ) -> None:
        """Take an SGD step."""
        descend_network(held.values, gradient, start, active, self.rate)

    def move_rows(self, held: OptimiserState, gradient: Array, index: Array, number: int) -> None:
        """Take an SGD step."""
        descend_rows(held.values, held.summed, index, gradient, self.rate)


@dataclass(frozen=True)
class LazyAdam(Optimiser):
    """Adam (Kingma and Ba); table rows are updated only in steps whose batch contains them."""

    rate: float
    first: float = 0.9
    second: float = 0.999
    tiny: float = 1e-8

    @property
    def pull(self) -> float:
        """Weight of half the squared distance from the anchors in the loss."""
        return 0.0

    def factors(self, number: int) -> tuple[float, float, float, float, float]:
        """Return (two decays, corrected rate, correction of the squares, tiny) of a step."""
        rate, spread = self.rate / (1 - self.first**number), 1 / (1 - self.second**number)
        return self.first, self.second, rate, spread, self.tiny

    def move_network(
        self, held: OptimiserState, gradient: Array, start: int, active: Array, number: int
    ) -> None:
        """Take an Adam step."""
        factors, moments = self.factors(number), (held.first, held.second)
        adam_network(
            held.values, *moments, gradient, start, active, factors, held.anchors, self.pull
        )

    def move_rows(self, held: OptimiserState, gradient: Array, index: Array, number: int) -> None:
        """Take an Adam step."""
        factors, moments = self.factors(number), (held.first, held.second)
        pull = self.pull if held.anchors is not held.values else 0.0
        adam_rows(held.values, *moments, held.summed, index, gradient, factors, held.anchors, pull)


@dataclass(frozen=True)
class MoreauAdam(LazyAdam):
    """Steps of LazyAdam on every batch, drawn back to anchors that then follow (see `pfedme`)."""

    anchored: ClassVar[bool] = True
    steps: int = 1
    """Number of steps on each batch."""
    weight: float = 0.0
    """Weight of half the squared distance from the anchors in the loss."""
    share: float = 1.0
    """Share of the distance by which the anchors follow after a batch."""

    @property
    def repeats(self) -> int:
        """Number of steps on each batch."""
        return self.steps

    @property
    def pull(self) -> float:
        """Weight of half the squared distance from the anchors in the loss."""
        return self.weight

    def move_anchors(
        self, network: OptimiserState, items: OptimiserState, active: Array, index: Array
    ) -> None:
        """Move the anchors of the active networks and of the rows of ``index``."""
        for c in np.flatnonzero(active):
            network.anchors[c] += np.float32(self.share) * (network.values[c] - network.anchors[c])
        follow_rows(items.anchors, items.values, items.summed, index, self.share)


LANES = 16
"""Flat parameters are padded to a multiple of this length, for vector instructions."""

EVERYTHING = frozenset({"network", "users", "items"})
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

    @property
    def owned(self) -> dict[str, NDArray[np.int64]]:
        """Offsets of the clients' rows in each table."""
        return {"users": self.user_indptr, "items": self.samples.touched.indptr}


def unpack_flat(flat: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    """Return named views of flat parameters, [clients, …]."""
    out, start = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        out[name] = flat[:, start : start + size].view(-1, *shape)
        start += size
    return out


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

    def copy(self) -> SiloModel:
        """Return a copy."""
        return SiloModel(*(array.copy() for array in self))


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
    moves: frozenset[str] = EVERYTHING,
    only: Collection[str] | None = None,
    steps: int | None = None,
) -> TrainedSilos:
    """Train a batch of silos; nothing is changed in place.

    ``moves`` are the trained fields of the model, ``only`` the trained parameters of the network,
    and ``steps`` is the largest number of steps of a client.
    """
    done = TrainedSilos(start.copy(), start.copy(), np.zeros(len(start.network)))
    for clients, real in groups_by_length(problem.samples.lengths):
        group = _Group(problem, start, clients, real, optimiser, moves, only)
        for number, batch in enumerate(group.batches(steps)):
            group.take_step(number, *batch)
        group.give_back(done)
    return done


class _Table:
    """Rows of a group: [clients * (most + 1), width]; each client's last row is spare."""

    def __init__(self, rows: Array, indptr: NDArray[np.int64], real: NDArray[np.int64]) -> None:
        self.owned = [slice(indptr[c], indptr[c + 1]) for c in real]
        self.most = max([own.stop - own.start for own in self.owned], default=0)
        values = np.zeros((GROUP, self.most + 1, rows.shape[1]), np.float32)
        for number, own in enumerate(self.owned):
            values[number, : own.stop - own.start] = rows[own]
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
        moves: frozenset[str],
        only: Collection[str] | None,
    ) -> None:
        self.problem, self.clients, self.real = problem, clients, clients[:real]
        self.optimiser, self.moves, self.only = optimiser, moves, only
        flat = torch.from_numpy(start.network[clients])
        self.network = {
            name: part.detach().requires_grad_("network" in moves)
            for name, part in unpack_flat(flat, problem.shapes).items()
        }
        rows, owned = {"users": start.users, "items": start.items}, problem.owned
        self.tables = {name: _Table(rows[name], owned[name], self.real) for name in rows}
        self.fixed = {
            name: _Table(rows, owned["users"], self.real) for name, rows in problem.fixed.items()
        }
        values = {"network": flat, **{name: t.values for name, t in self.tables.items()}}
        self.held = {
            name: OptimiserState(
                array.numpy(), optimiser, moves=name in moves, shared=name != "users"
            )
            for name, array in values.items()
        }
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
            weights = np.where(valid, 1 / np.maximum(sizes, 1)[:, None], 0.0)
            step = SampleBatch(
                torch.from_numpy(samples.labels[at]), torch.from_numpy(weights.astype(np.float32))
            )
            yield (
                step,
                self.tables["users"].index(samples.users[at], valid),
                self.tables["items"].index(samples.rows[at], valid),
            )

    def take_step(self, number: int, step: SampleBatch, users: Tensor, items: Tensor) -> None:
        """Take the optimiser's steps on one batch; ``number`` counts batches from 0."""
        for k in range(self.optimiser.repeats):
            losses = self._descend(number * self.optimiser.repeats + k + 1, step, users, items)
            if k == 0:
                self.total += losses * step.active
        network, rows = self.held["network"], self.held["items"]
        self.optimiser.move_anchors(network, rows, step.active.numpy(), items.numpy())

    def _descend(self, number: int, step: SampleBatch, users: Tensor, items: Tensor) -> Tensor:
        """Take one step; return the clients' losses before it."""
        index = {"users": users, "items": items}
        rows = {name: table.look_up(index[name]) for name, table in self.tables.items()}
        fixed = {name: table.look_up(users) for name, table in self.fixed.items()}
        learning = [name for name in ("users", "items") if name in self.moves]
        moving = list(self.network.values()) if "network" in self.moves else []
        moving += [rows[name].requires_grad_() for name in learning]
        losses = self.problem.loss(self.network, rows, fixed, step)
        summed = (losses * step.active).sum()
        gradients = list(torch.autograd.grad(summed, moving, materialize_grads=True))
        if "network" in self.moves:
            parts = dict(zip(self.network, gradients, strict=False))
            gradients = gradients[len(parts) :]
            self._move_network(number, parts, step.active.numpy())
        shrink = (2 * self.problem.decay * step.weights)[..., None]
        for name, gradient in zip(learning, gradients, strict=True):
            decayed = torch.addcmul(gradient, rows[name].detach(), shrink)
            flat = decayed.reshape(-1, decayed.shape[-1]).numpy()
            self.optimiser.move_rows(self.held[name], flat, index[name].numpy(), number)
        return losses.detach().double()

    def _move_network(
        self, number: int, parts: Mapping[str, Tensor], active: NDArray[np.float32]
    ) -> None:
        """Update each parameter in place; clients that have finished stay unchanged."""
        start = 0
        for name, gradient in parts.items():
            own = gradient.reshape(GROUP, -1).numpy()
            if self.only is None or name in self.only:
                self.optimiser.move_network(self.held["network"], own, start, active, number)
            start += own.shape[1]

    def give_back(self, done: TrainedSilos) -> None:
        """Write the results of these clients."""
        held, real = self.held, len(self.real)
        done.losses[self.real] = self.total.numpy()[:real] / np.maximum(1, self.count[:real])
        done.model.network[self.real] = held["network"].values[:real]
        done.anchors.network[self.real] = held["network"].anchors[:real]
        for name, table in self.tables.items():
            table.give_back(held[name].values, getattr(done.model, name))
            table.give_back(held[name].anchors, getattr(done.anchors, name))


def rows_of_users(kept: ClientRows, view: TrainView) -> NDArray[np.float32]:
    """Return each user's row kept by its client; zeros before its first training."""
    rows = np.zeros((len(view), kept.rows.shape[1]), np.float32)
    client = np.repeat(np.arange(len(view.clients)), np.diff(view.client_indptr))
    wanted = (client << 32) + view.users
    owner = np.repeat(np.arange(len(kept.indptr) - 1), np.diff(kept.indptr))
    known = (owner << 32) + kept.ids
    if len(known):
        # Clients keep their users in ascending order.
        index = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        known_user = known[index] == wanted
        rows[known_user] = kept.rows[index[known_user]]
    return rows
