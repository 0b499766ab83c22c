"""How a batch moves the networks and rows of silos: Adam, plain descent, and a Moreau envelope.

Moments start anew in every round, so nothing of them is at rest. Rows of tables move only in the
steps that look them up ("lazy" Adam): a step costs what its batch holds, not the catalogue.

One network per client, a client being a silo of users: batched tensors and sparse rows.

What `training.tensors` is to devices, with two more things that silos need: samples of many users
in one client's batch, and the rules of `training.rules`. What keeps a client's bits the same in any
company is the same: one shape for every product, filled up with clients and samples that weigh
nothing; an entry that fills up looks up a spare row that nobody reads.
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
from hushrec.kernels.silo_steps import (
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
    Step,
    Tensor,
    groups_by_length,
    torch,
)


class Held:
    """A group's networks, or the rows of its tables, and what a rule remembers of them."""

    def __init__(self, values: Array, rule: Rule, *, moves: bool, shared: bool) -> None:
        self.values = values
        self.anchors = values.copy() if rule.anchored and shared else values
        """What an envelope draws them back to; what nobody else has is in no envelope."""
        shape = values.shape if moves else (0, 0)
        self.first, self.second = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.summed = np.zeros((shape[0], shape[1] + 1), np.float32)
        """Room for the sums of the gradients of rows, and a mark; 0 between steps."""


@dataclass(frozen=True)
class Rule(ABC):
    """What a step does with a gradient; ``number`` counts steps from 1."""

    anchored: ClassVar[bool] = False
    """Whether parameters that are shared have anchors, which follow them."""

    @property
    def repeats(self) -> int:
        """Steps on one batch."""
        return 1

    @abstractmethod
    def move_network(
        self, held: Held, gradient: Array, start: int, active: Array, number: int
    ) -> None:
        """Step on the parameter that begins at ``start``; who is not active stays."""

    @abstractmethod
    def move_rows(self, held: Held, gradient: Array, index: Array, number: int) -> None:
        """Step on the rows of ``index``, each once, with the sum of its gradients."""

    def move_anchors(self, network: Held, items: Held, active: Array, index: Array) -> None:
        """Let anchors follow after a batch; without any, nothing."""
        return


@dataclass(frozen=True)
class PlainDescent(Rule):
    """Plain gradient steps."""

    rate: float

    def move_network(
        self, held: Held, gradient: Array, start: int, active: Array, number: int
    ) -> None:
        """Go against the gradient."""
        descend_network(held.values, gradient, start, active, self.rate)

    def move_rows(self, held: Held, gradient: Array, index: Array, number: int) -> None:
        """Go against the gradient."""
        descend_rows(held.values, held.summed, index, gradient, self.rate)


@dataclass(frozen=True)
class Adam(Rule):
    """Kingma and Ba's rule; on table rows, only in the steps that look them up."""

    rate: float
    first: float = 0.9
    second: float = 0.999
    tiny: float = 1e-8

    @property
    def pull(self) -> float:
        """Weight of half the squared distance from the anchors in the loss; without any, 0."""
        return 0.0

    def factors(self, number: int) -> tuple[float, float, float, float, float]:
        """Return (decays, corrected rate, correction of the squares, tiny) of a step."""
        rate, spread = self.rate / (1 - self.first**number), 1 / (1 - self.second**number)
        return self.first, self.second, rate, spread, self.tiny

    def move_network(
        self, held: Held, gradient: Array, start: int, active: Array, number: int
    ) -> None:
        """Take the moments' step."""
        factors, moments = self.factors(number), (held.first, held.second)
        adam_network(
            held.values, *moments, gradient, start, active, factors, held.anchors, self.pull
        )

    def move_rows(self, held: Held, gradient: Array, index: Array, number: int) -> None:
        """Take the moments' step."""
        factors, moments = self.factors(number), (held.first, held.second)
        pull = self.pull if held.anchors is not held.values else 0.0
        adam_rows(held.values, *moments, held.summed, index, gradient, factors, held.anchors, pull)


@dataclass(frozen=True)
class Moreau(Adam):
    """Steps of Adam on every batch, drawn back to anchors that then follow (see `pfedme`)."""

    anchored: ClassVar[bool] = True
    steps: int = 1
    """Steps on a batch."""
    weight: float = 0.0
    """Of half the squared distance from the anchors in the loss."""
    share: float = 1.0
    """Share of the way that the anchors follow after a batch."""

    @property
    def repeats(self) -> int:
        """Steps on one batch."""
        return self.steps

    @property
    def pull(self) -> float:
        """Weight of half the squared distance from the anchors in the loss."""
        return self.weight

    def move_anchors(self, network: Held, items: Held, active: Array, index: Array) -> None:
        """Let the anchors of the active networks and of the rows of ``index`` follow."""
        for c in np.flatnonzero(active):
            network.anchors[c] += np.float32(self.share) * (network.values[c] - network.anchors[c])
        follow_rows(items.anchors, items.values, items.summed, index, self.share)


LANES = 16
"""Flat parameters are a multiple of this long: vector units then have no remainder to treat."""

EVERYTHING = frozenset({"network", "users", "items"})
Shapes = Mapping[str, tuple[int, ...]]

SiloLoss = Callable[[Params, Params, Params, Step], Tensor]
"""(network, looked-up rows that learn, looked-up rows that do not, batch) -> loss per client."""


@dataclass(frozen=True)
class SiloProblem:
    """What a stack of clients trains, and on what."""

    shapes: Shapes
    """Of the network's parameters, which lie one after the other in a flat array."""
    loss: SiloLoss
    samples: SiloSamples
    batch: int
    fixed: Mapping[str, Array]
    """For every user of the stack a row that the loss looks up and nothing trains."""
    user_indptr: NDArray[np.int64]
    """Where each client's users begin among those rows."""
    decay: float = 0.0
    """Weight of the mean squared rows that the samples look up, beside the loss."""

    @property
    def owned(self) -> dict[str, NDArray[np.int64]]:
        """Where each client's rows begin in every table."""
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
    """Lay named arrays one after the other, and fill up the last lanes."""
    joined = np.concatenate([np.asarray(arrays[name], np.float32).ravel() for name in shapes])
    return np.pad(joined, (0, -len(joined) % LANES))


class SiloModel(NamedTuple):
    """The parameters of a stack of clients."""

    network: NDArray[np.float32]
    """[clients, flat]"""
    users: NDArray[np.float32]
    """A row for every user of the stack."""
    items: NDArray[np.float32]
    """A row for every touched item of every client."""

    def copy(self) -> SiloModel:
        """Return the same numbers in arrays of their own."""
        return SiloModel(*(array.copy() for array in self))


class Trained(NamedTuple):
    """What a stack of clients has after training."""

    model: SiloModel
    anchors: SiloModel
    """Where the rule's anchors ended; without any, the model."""
    losses: NDArray[np.float64]
    """Mean loss of each client before its steps."""


def train_silo_networks(
    problem: SiloProblem,
    start: SiloModel,
    rule: Rule,
    *,
    moves: frozenset[str] = EVERYTHING,
    only: Collection[str] | None = None,
    steps: int | None = None,
) -> Trained:
    """Train a stack of clients; nothing is changed in place.

    ``moves`` says which fields of the model learn, ``only`` which parameters of the network, and
    ``steps`` stops a client before its last one.
    """
    done = Trained(start.copy(), start.copy(), np.zeros(len(start.network)))
    for clients, real in groups_by_length(problem.samples.lengths):
        group = _Group(problem, start, clients, real, rule, moves, only)
        for number, batch in enumerate(group.batches(steps)):
            group.take_step(number, *batch)
        group.give_back(done)
    return done


class _Table:
    """Rows that a group looks up: [clients * (most + 1), width]; each client's last is spare."""

    def __init__(self, rows: Array, indptr: NDArray[np.int64], real: NDArray[np.int64]) -> None:
        self.owned = [slice(indptr[c], indptr[c + 1]) for c in real]
        self.most = max([own.stop - own.start for own in self.owned], default=0)
        values = np.zeros((GROUP, self.most + 1, rows.shape[1]), np.float32)
        for place, own in enumerate(self.owned):
            values[place, : own.stop - own.start] = rows[own]
        self.values = torch.from_numpy(values.reshape(-1, rows.shape[1]))
        self.base = (np.arange(GROUP) * (self.most + 1))[:, None]

    def index(self, place: NDArray[np.int64], valid: NDArray[np.bool_]) -> Tensor:
        """Return where the rows of these places lie, [clients, samples] flattened."""
        return torch.from_numpy((self.base + np.where(valid, place, self.most)).reshape(-1))

    def look_up(self, index: Tensor) -> Tensor:
        return self.values.index_select(0, index).view(GROUP, -1, self.values.shape[1])

    def give_back(self, values: Array, rows: Array) -> None:
        whole = values.reshape(GROUP, self.most + 1, -1)
        for place, own in enumerate(self.owned):
            rows[own] = whole[place, : own.stop - own.start]


class _Group:
    """`GROUP` clients in training."""

    def __init__(
        self,
        problem: SiloProblem,
        start: SiloModel,
        clients: NDArray[np.int64],
        real: int,
        rule: Rule,
        moves: frozenset[str],
        only: Collection[str] | None,
    ) -> None:
        self.problem, self.clients, self.real = problem, clients, clients[:real]
        self.rule, self.moves, self.only = rule, moves, only
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
            name: Held(array.numpy(), rule, moves=name in moves, shared=name != "users")
            for name, array in values.items()
        }
        self.total = torch.zeros(GROUP, dtype=torch.float64)
        self.count = np.zeros(GROUP)

    def batches(self, limit: int | None) -> Iterator[tuple[Step, Tensor, Tensor]]:
        samples, size = self.problem.samples, self.problem.batch
        lengths = np.where(np.arange(GROUP) < len(self.real), samples.lengths[self.clients], 0)
        starts = samples.order.indptr[self.clients]
        # Everybody goes on to the next epoch by itself, so the n-th step is everybody's n-th.
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
            step = Step(
                torch.from_numpy(samples.labels[at]), torch.from_numpy(weights.astype(np.float32))
            )
            yield (
                step,
                self.tables["users"].index(samples.users[at], valid),
                self.tables["items"].index(samples.places[at], valid),
            )

    def take_step(self, number: int, step: Step, users: Tensor, items: Tensor) -> None:
        """Take the rule's steps on the batch of this number, from 0."""
        for k in range(self.rule.repeats):
            losses = self._descend(number * self.rule.repeats + k + 1, step, users, items)
            if k == 0:
                self.total += losses * step.active
        network, rows = self.held["network"], self.held["items"]
        self.rule.move_anchors(network, rows, step.active.numpy(), items.numpy())

    def _descend(self, number: int, step: Step, users: Tensor, items: Tensor) -> Tensor:
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
            self.rule.move_rows(self.held[name], flat, index[name].numpy(), number)
        return losses.detach().double()

    def _move_network(
        self, number: int, parts: Mapping[str, Tensor], active: NDArray[np.float32]
    ) -> None:
        """Step on each parameter where it lies; who is done stays, moments or not."""
        start = 0
        for name, gradient in parts.items():
            own = gradient.reshape(GROUP, -1).numpy()
            if self.only is None or name in self.only:
                self.rule.move_network(self.held["network"], own, start, active, number)
            start += own.shape[1]

    def give_back(self, done: Trained) -> None:
        """Write what these clients came to."""
        held, real = self.held, len(self.real)
        done.losses[self.real] = self.total.numpy()[:real] / np.maximum(1, self.count[:real])
        done.model.network[self.real] = held["network"].values[:real]
        done.anchors.network[self.real] = held["network"].anchors[:real]
        for name, table in self.tables.items():
            table.give_back(held[name].values, getattr(done.model, name))
            table.give_back(held[name].anchors, getattr(done.anchors, name))


def rows_of_users(kept: ClientRows, view: TrainView) -> NDArray[np.float32]:
    """Return the row that each user's client keeps of it; zeros before its first training."""
    rows = np.zeros((len(view), kept.rows.shape[1]), np.float32)
    client = np.repeat(np.arange(len(view.clients)), np.diff(view.client_indptr))
    wanted = (client << 32) + view.users
    owner = np.repeat(np.arange(len(kept.indptr) - 1), np.diff(kept.indptr))
    known = (owner << 32) + kept.ids
    if len(known):
        # Clients keep their users in ascending order.
        place = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        found = known[place] == wanted
        rows[found] = kept.rows[place[found]]
    return rows
