"""One network per client, a client being a silo of users: batched tensors, Adam, sparse rows.

What `hushrec.neural` is to devices, with two more things that silos need: samples of many users in
one client's batch, and Adam. Its moments start anew in every round, so nothing of them is at rest.
Rows of tables move only in the steps that look them up ("lazy" Adam): a step costs what its batch
holds, not the catalogue. The rules that keep a client's bits the same in any company are those of
`hushrec.neural`: one shape for every product, filled up with clients and samples that weigh
nothing; an entry that fills up looks up a spare row that nobody reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hushrec import kernels
from hushrec.aggregate import ClientRows
from hushrec.clients import Ragged, TrainView
from hushrec.kernels import silos as silo_kernels
from hushrec.kernels.silos import (
    adam_factors,
    adam_flat,
    adam_rows,
    descend_flat,
    descend_rows,
    follow_rows,
)
from hushrec.negatives import PURPOSE
from hushrec.neural import GROUP, Array, Arrays, Params, Tensor, torch
from hushrec.rng import Round

LANES = 16
"""Flat parameters are a multiple of this long: vector units then have no remainder to treat."""

EVERYTHING = frozenset({"network", "users", "items"})
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Adam:
    """Kingma and Ba's rule; on table rows, only in the steps that look them up."""

    rate: float
    first: float = 0.9
    second: float = 0.999
    tiny: float = 1e-8

    def factors(self, number: int) -> tuple[float, float, float, float, float]:
        """Return what the kernels need of the step of this number."""
        return adam_factors(self.rate, self.first, self.second, self.tiny, number)


@dataclass(frozen=True)
class Descent:
    """Plain gradient steps."""

    rate: float


@dataclass(frozen=True)
class Moreau:
    """Steps of Adam on every batch, drawn back to anchors that then follow (see `pfedme`)."""

    adam: Adam
    steps: int
    """Steps on a batch."""
    pull: float
    """Weight of half the squared distance from the anchors in the loss."""
    share: float
    """Share of the way that the anchors follow after a batch."""


Rule = Adam | Descent | Moreau


@dataclass(frozen=True)
class SiloSamples:
    """A stack of clients' samples of a round, and the order in which the epochs go through them."""

    indptr: NDArray[np.int64]
    """Where each client's samples would begin if there were one epoch."""
    users: NDArray[np.int64]
    """Place of each sample's user among its client's users."""
    items: NDArray[np.int32]
    labels: NDArray[np.float32]
    order: Ragged
    """Positions of each client's samples in the arrays, epoch after epoch."""
    epochs: int
    touched: Ragged
    """Distinct items of each client, in the order of their first use."""
    places: NDArray[np.int64]
    """Place of each sample's item among the client's touched ones."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Samples of each client in one epoch."""
        lengths: NDArray[np.int64] = np.diff(self.indptr)
        return lengths


def draw_samples(view: TrainView, negatives: int, epochs: int, now: Round) -> SiloSamples:
    """Draw each user's samples from its own stream, and shuffle them client by client.

    Every epoch has negatives of its own: a silo would learn the same ones by heart.
    """
    excluded = view.excluded()
    of_user, items, labels, drawn = kernels.draw_samples(
        now.key(PURPOSE),
        view.users,
        view.positives.indptr,
        view.positives.values,
        excluded.indptr,
        excluded.values,
        view.n_items,
        negatives * epochs,
    )
    clients = view.client_indptr
    first_user = np.repeat(clients[:-1], np.diff(clients))
    users = np.repeat(np.arange(len(view)) - first_user, np.diff(of_user))
    touched = kernels.places(of_user[clients], items, view.n_items)
    # Who has touched every item has no negatives.
    per_epoch = np.where(drawn > 0, 1 + negatives, 1) * view.positives.lengths
    indptr = np.concatenate([[0], np.cumsum(per_epoch)])[clients]
    key = now.key("silo/order")
    none_used = np.zeros(len(indptr) - 1, np.int64)
    shuffled = kernels.shuffled_epochs(key, view.clients, indptr, none_used, epochs)
    at = silo_kernels.samples_of_epochs(
        *shuffled, indptr, of_user, view.positives.lengths, clients, per_epoch, negatives, epochs
    )
    order = Ragged(shuffled[0], at)
    return SiloSamples(
        indptr, users, items, labels, order, epochs, Ragged(*touched[:2]), touched[2]
    )


@dataclass(frozen=True)
class Step:
    """One batch of `GROUP` clients: [clients, samples]."""

    labels: Tensor
    weights: Tensor
    """One over the size of the client's batch; 0 where it is filled up, so sums are means."""
    active: Tensor
    """1 for a client that has samples in this step, 0 for one that is done."""


Loss = Callable[[Params, Params, Params, Step], Tensor]
"""(network, looked-up rows that learn, looked-up rows that do not, batch) -> loss per client."""


@dataclass(frozen=True)
class Problem:
    """What a stack of clients trains, and on what."""

    shapes: Shapes
    """Of the network's parameters, which lie one after the other in a flat array."""
    loss: Loss
    samples: SiloSamples
    batch: int
    fixed: Mapping[str, Array]
    """For every user of the stack a row that the loss looks up and nothing trains."""
    user_indptr: NDArray[np.int64]
    """Where each client's users begin among those rows."""
    decay: float = 0.0
    """Weight of the mean squared rows that the samples look up, beside the loss."""


def flat_size(shapes: Shapes) -> int:
    """Return the length of a flat array of parameters, spare room included."""
    return -(-sum(math.prod(shape) for shape in shapes.values()) // LANES) * LANES


def unpack(flat: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    """Return named views of flat parameters, [clients, …]."""
    out, start = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        out[name] = flat[:, start : start + size].view(-1, *shape)
        start += size
    return out


def pack(arrays: Arrays, shapes: Shapes) -> NDArray[np.float32]:
    """Lay named arrays one after the other."""
    flat = np.zeros(flat_size(shapes), np.float32)
    joined = np.concatenate([np.asarray(arrays[name], np.float32).ravel() for name in shapes])
    flat[: len(joined)] = joined
    return flat


@dataclass(frozen=True)
class Trained:
    """What a stack of clients has after training."""

    network: NDArray[np.float32]
    """[clients, flat]"""
    users: NDArray[np.float32]
    """A row for every user of the stack."""
    items: NDArray[np.float32]
    """A row for every touched item of every client."""
    losses: NDArray[np.float64]
    """Mean loss of each client before its steps."""
    anchors: tuple[NDArray[np.float32], NDArray[np.float32]]
    """Under `Moreau`, the anchors of the network and of the items; else where they started."""


def train(
    problem: Problem,
    network: NDArray[np.float32],
    users: NDArray[np.float32],
    items: NDArray[np.float32],
    rule: Rule,
    *,
    moves: frozenset[str] = EVERYTHING,
    only: Sequence[str] | None = None,
    steps: int | None = None,
) -> Trained:
    """Train a stack of clients; nothing is changed in place.

    ``network`` is [clients, flat], ``users`` has a row per user of the stack and ``items`` one per
    touched item. ``moves`` says which of them learn, ``only`` which parameters of the network,
    and ``steps`` stops a client before its last one.
    """
    samples = problem.samples
    n_clients = len(samples.indptr) - 1
    anchors = network.copy(), items.copy()
    done = Trained(network.copy(), users.copy(), items.copy(), np.zeros(n_clients), anchors)
    owned = {"users": problem.user_indptr, "items": samples.touched.indptr}
    for clients, real in groups(samples.lengths):
        group = _Group(problem, done, owned, clients, real, rule, moves, only)
        for number, batch in enumerate(group.batches(steps), start=1):
            group.step(number, *batch)
        group.give_back(done)
    return done


def groups(lengths: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Cut a stack into groups of about as many steps: (clients, filled up; how many are real)."""
    order = np.argsort(lengths, kind="stable")
    for start in range(0, len(order), GROUP):
        group = np.sort(order[start : start + GROUP])
        yield np.append(group, np.full(GROUP - len(group), group[-1])), len(group)


class _Table:
    """Rows that a group looks up: [clients * (most + 1), width]; each client's last is spare."""

    def __init__(
        self, rows: Array, indptr: NDArray[np.int64], clients: NDArray[np.int64], real: int
    ) -> None:
        self.owned = [slice(indptr[c], indptr[c + 1]) for c in clients[:real]]
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

    def give_back(self, rows: Array) -> None:
        whole = self.values.view(GROUP, self.most + 1, -1).numpy()
        for place, own in enumerate(self.owned):
            rows[own] = whole[place, : own.stop - own.start]


class _Group:
    """`GROUP` clients in training."""

    def __init__(
        self,
        problem: Problem,
        state: Trained,
        owned: Mapping[str, NDArray[np.int64]],
        clients: NDArray[np.int64],
        real: int,
        rule: Rule,
        moves: frozenset[str],
        only: Sequence[str] | None,
    ) -> None:
        self.problem, self.clients, self.real = problem, clients, real
        self.rule, self.moves, self.only = rule, moves, only
        self.flat = torch.from_numpy(state.network[clients])
        self.network = {
            name: part.detach().requires_grad_("network" in moves)
            for name, part in unpack(self.flat, problem.shapes).items()
        }
        own = {"users": state.users, "items": state.items}
        self.tables = {n: _Table(own[n], owned[n], clients, real) for n in ("users", "items")}
        self.fixed = {
            name: _Table(rows, owned["users"], clients, real)
            for name, rows in problem.fixed.items()
        }
        self.total = torch.zeros(GROUP, dtype=torch.float64)
        self.count = np.zeros(GROUP)
        self.moments: dict[str, tuple[Array, Array]] = {}
        self.anchor = self.flat.numpy().copy()
        self.item_anchors = self.tables["items"].values.numpy()
        if isinstance(rule, Moreau):
            self.item_anchors = self.item_anchors.copy()
        if not isinstance(rule, Descent):
            held = {"network": self.flat, **{n: t.values for n, t in self.tables.items()}}
            shapes = {name: held[name].shape for name in moves}
            self.moments = {
                n: (np.zeros(s, np.float32), np.zeros(s, np.float32)) for n, s in shapes.items()
            }
        sizes = {name: self.tables[name].values.shape for name in moves - {"network"}}
        self.summed = {
            n: np.zeros((rows, width + 1), np.float32) for n, (rows, width) in sizes.items()
        }

    def batches(self, limit: int | None) -> Iterator[tuple[Step, Tensor, Tensor]]:
        samples, size = self.problem.samples, self.problem.batch
        lengths = np.where(np.arange(GROUP) < self.real, samples.lengths[self.clients], 0)
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
                torch.from_numpy(samples.labels[at]),
                torch.from_numpy(weights.astype(np.float32)),
                torch.from_numpy((sizes > 0).astype(np.float32)),
            )
            yield (
                step,
                self.tables["users"].index(samples.users[at], valid),
                self.tables["items"].index(samples.places[at], valid),
            )

    def step(self, number: int, step: Step, users: Tensor, items: Tensor) -> None:
        rule = self.rule
        if not isinstance(rule, Moreau):
            self.total += self._descend(number, step, users, items) * step.active
            return
        for k in range(rule.steps):
            losses = self._descend((number - 1) * rule.steps + k + 1, step, users, items)
            if k == 0:
                self.total += losses * step.active
        for c in np.flatnonzero(step.active.numpy()):
            self.anchor[c] += np.float32(rule.share) * (self.flat[c].numpy() - self.anchor[c])
        table = self.tables["items"].values.numpy()
        follow_rows(self.item_anchors, table, self.summed["items"], items.numpy(), rule.share)

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
            self._move_rows(number, name, index[name], decayed)
        return losses.detach().double()

    def _move_network(
        self, number: int, parts: Mapping[str, Tensor], active: NDArray[np.float32]
    ) -> None:
        """Step on each parameter where it lies; who is done stays, moments or not."""
        values, rule, start = self.flat.numpy(), self.rule, 0
        for name, gradient in parts.items():
            own = gradient.reshape(GROUP, -1).numpy()
            if self.only is None or name in self.only:
                if isinstance(rule, Descent):
                    descend_flat(values, own, start, active, rule.rate)
                else:
                    pull = rule.pull if isinstance(rule, Moreau) else 0.0
                    factors = _adam(rule).factors(number)
                    moments = self.moments["network"]
                    adam_flat(values, *moments, own, start, active, factors, self.anchor, pull)
            start += own.shape[1]

    def _move_rows(self, number: int, name: str, index: Tensor, gradient: Tensor) -> None:
        values, summed, rule = self.tables[name].values.numpy(), self.summed[name], self.rule
        rows = gradient.reshape(-1, values.shape[1]).numpy()
        if isinstance(rule, Descent):
            descend_rows(values, summed, index.numpy(), rows, rule.rate)
        else:
            factors = _adam(rule).factors(number)
            pull = rule.pull if isinstance(rule, Moreau) and name == "items" else 0.0
            held = self.item_anchors if pull else values
            at = index.numpy()
            adam_rows(values, *self.moments[name], summed, at, rows, factors, held, pull)

    def give_back(self, done: Trained) -> None:
        real = self.clients[: self.real]
        done.network[real] = self.flat[: self.real].numpy()
        done.losses[real] = self.total.numpy()[: self.real] / np.maximum(1, self.count[: self.real])
        self.tables["users"].give_back(done.users)
        self.tables["items"].give_back(done.items)
        if isinstance(self.rule, Moreau):
            done.anchors[0][real] = self.anchor[: self.real]
            self.tables["items"].values = torch.from_numpy(self.item_anchors)
            self.tables["items"].give_back(done.anchors[1])


def _adam(rule: Adam | Moreau) -> Adam:
    return rule.adam if isinstance(rule, Moreau) else rule


def bce(logits: Tensor, step: Step) -> Tensor:
    """Return each client's mean binary cross-entropy."""
    entropy = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, step.labels, reduction="none"
    )
    return (entropy * step.weights).sum(1)


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
