"""Networks of clients: over item rows, over features, and the network of LIPM and pFedMe.

A row network scores an item by f(q_i), or by f([p_u, q_i]) with a client vector p_u; f is an MLP
with ReLU between its layers.

A feature network is the MLP of PrivRec (eq. 1) over the features, or ids, of user and item. Its
parameters are one flat vector, so that a proximal term, a step and an upload are one operation
each; `FeatureNetwork.shapes` gives the order. The first layer is a sum of a user part, computed
once per step, and an item part.

The network of LIPM and pFedMe is an MLP over user, item, their product and optionally an interest,
the state of a gated recurrent unit over rounds (`methods.lipm`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import ClientRows
from hushrec.data.views import TrainView
from hushrec.kernels import feature_networks, ragged, row_networks
from hushrec.kernels.draws import DeviceSamples, Pace
from hushrec.kernels.feature_networks import NetworkLayout, ProximalDescent, Side
from hushrec.streams import Round, Streams
from hushrec.training import tensors
from hushrec.training.samples import Descent, draw_device_samples
from hushrec.training.silo_network import pack_flat, unpack_flat
from hushrec.training.tensors import GROUP, Array, Arrays, Params, SampleBatch, Tensor, torch

ITEM_BLOCK = 1024
"""Items scored at a time, few enough for the processor cache."""


def initial_row_network(n_in: int, hidden: tuple[int, ...], streams: Streams) -> dict[str, Array]:
    """Draw the initial score function of all devices."""
    return tensors.initial_mlp([n_in, *hidden, 1], streams, "init/score-function")


def row_logits(params: Params, rows: Tensor) -> Tensor:
    """Score rows [clients, samples, d] by each client's network: [clients, samples]."""
    if "vector" in params:
        # The vector is the same for all rows, so its contribution to the first layer is a bias.
        vector, weight = params["vector"], params["layer0/weight"]
        share = torch.bmm(vector[:, None], weight[:, : vector.shape[1]])[:, 0]
        params = {
            **params,
            "layer0/weight": weight[:, vector.shape[1] :],
            "layer0/bias": params["layer0/bias"] + share,
        }
    return tensors.mlp(params, rows)[..., 0]


def row_loss(params: Params, rows: Params, batch: tensors.DeviceBatch) -> Tensor:
    """Return each client's mean binary cross-entropy."""
    return tensors.mean_bce(row_logits(params, rows["items"]), batch)


class Pull(NamedTuple):
    """A term of the loss that draws every row of a client towards the row of its own target."""

    targets: Array
    """[clients, items, d]"""
    step: float
    """Share of the distance that a step takes away."""


def train_row_networks(
    view: TrainView,
    now: Round,
    table: Array,
    params: Arrays,
    pace: Pace,
    descent: Descent,
    vector_rate: float = 1.0,
    pull: Pull | None = None,
) -> tuple[dict[str, Array], ClientRows, NDArray[np.float64]]:
    """Train a batch of clients.

    Clients start from ``table`` [items, d], or from their own tables [clients, items, d]. The
    vector's rate is ``vector_rate`` times that of the other parameters. Returns the parameters, the
    touched rows after training, and each client's mean cross-entropy before each step.
    """
    descent.check(np.dtype(np.float32))
    samples = draw_device_samples(view, pace.negatives, pace.epochs, now)
    indptr, ids, sample_rows = ragged.number_by_first_use(
        samples.indptr, samples.items, view.n_items
    )
    owner = np.repeat(np.arange(len(view)), np.diff(indptr))
    rows = np.ascontiguousarray(table[ids] if table.ndim == 2 else table[owner, ids])
    order = ["vector"] if "vector" in params else []
    order += [f"layer{k}/{part}" for k in range(len(params) // 2) for part in ("weight", "bias")]
    shapes = {name: params[name].shape[1:] for name in order}
    flat = [params[name].reshape(len(view), math.prod(shapes[name])) for name in order]
    theta = np.ascontiguousarray(np.concatenate(flat, 1))
    widths = [table.shape[-1], *(params[name].shape[1] for name in order if "bias" in name)]
    n_vector = params["vector"].shape[1] if "vector" in params else 0
    clip = np.inf if descent.clip is None else descent.clip
    losses = row_networks.fit_row_networks(
        theta,
        rows,
        indptr,
        samples._replace(items=sample_rows),
        pace.batch,
        row_networks.Shape(n_vector, np.array(widths)),
        row_networks.NetworkRates(
            descent.own * vector_rate, descent.own, descent.item, clip, pull.step if pull else 0.0
        ),
        descent.two_steps,
        None if pull is None else pull.targets[owner, ids],
    )
    trained = unpack_flat(torch.from_numpy(theta), shapes)
    arrays = {name: part.numpy() for name, part in trained.items()}
    return arrays, ClientRows(indptr, ids, rows), losses


def score_row_networks(
    params: Arrays, table: Array, own: Array | ClientRows | None = None
) -> NDArray[np.float32]:
    """Score every item for every client: [clients, items].

    ``table`` is shared, [items, d], with each client's ``own`` rows written into it, or
    [clients, items, d].
    """
    n_clients, n_items = len(next(iter(params.values()))), table.shape[-2]
    scores = np.empty((n_clients, n_items), np.float32)
    for clients, real in tensors.groups_in_order(n_clients):
        state = {name: torch.from_numpy(array[clients]) for name, array in params.items()}
        shape = (GROUP, *table.shape[-2:])
        tables = np.array(np.broadcast_to(table, shape) if table.ndim == 2 else table[clients])
        if isinstance(own, ClientRows):
            slots = np.arange(GROUP)
            ragged.put_rows(tables, slots, clients, own.indptr, own.ids, own.rows)
        for first in range(0, n_items, ITEM_BLOCK):
            block = slice(first, first + ITEM_BLOCK)
            with torch.no_grad():
                logits = row_logits(state, torch.from_numpy(tables[:, block]))
            scores[clients[:real], block] = logits[:real].numpy()
    return scores


def gated_loss(loss_of: tensors.LossOf, beta: float) -> tensors.LossOf:
    """Return the loss on the fused rows ``beta P + 2 (1 - beta) g P_g`` (FedRKG, eq. 6)."""

    def loss(params: Params, rows: Params, batch: tensors.DeviceBatch) -> Tensor:
        own, mean = rows["items"], rows["guidance"]
        logit = torch.cat([own, mean, own - mean], -1) @ params["gate"][..., None]
        opened = torch.sigmoid(logit + params["gate_bias"][:, None, None])
        return loss_of(params, {"items": beta * own + 2 * (1 - beta) * opened * mean}, batch)

    return loss


# ---------------------------------------------------------------- features


@dataclass(frozen=True)
class FeatureNetwork:
    """Sizes of a feature network, from which the layout of its flat parameters follows."""

    user_fields: tuple[int, ...]
    """Vocabulary size of each categorical user field."""
    user_numbers: int
    item_fields: tuple[int, ...]
    item_numbers: int
    d: int
    hidden: tuple[int, ...]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the parameters, in the order of the flat vector."""
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
            bias = name.endswith("bias")
            part = np.zeros(shape) if bias else generator.standard_normal(shape)
            if "/" in name:
                part *= math.sqrt(2 / (inputs if name.startswith("first") else shape[0]))
            parts.append(part.ravel())
        return np.concatenate(parts).astype(np.float32)

    @cached_property
    def layout(self) -> NetworkLayout:
        """Offsets of the parameters, for the kernels."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes.values()])
        start = dict(zip(self.shapes, (int(end) for end in (0, *ends)), strict=False))
        users = np.cumsum([0, *self.user_fields, self.user_numbers])
        items = np.cumsum([0, *self.item_fields, self.item_numbers])
        return NetworkLayout(
            self.d,
            Side(0, start["first/user"], users),
            Side(sum(self.user_fields) * self.d, start["first/item"], items),
            start["first/bias"],
            np.array([*self.hidden, 1]),
        )

    def unpack(self, theta: Tensor) -> dict[str, Tensor]:
        """Split flat vectors [clients, size] into parameters with a leading client axis."""
        return unpack_flat(theta, self.shapes)

    def first_layer(self, params: Params, side: Literal["user", "item"]) -> Tensor:
        """Return the contribution of each feature of a side, [clients, features, width].

        The row of a category is its embedding times the first layer's weights; this table is
        cheaper than embedding every sample.
        """
        weights = params[f"first/{side}"]
        n_fields = len(self.user_fields if side == "user" else self.item_fields)
        fields, numbers = weights[:, : n_fields * self.d], weights[:, n_fields * self.d :]
        rows = [
            torch.bmm(params[f"{side}{k}"], fields[:, k * self.d : (k + 1) * self.d])
            for k in range(n_fields)
        ]
        return torch.cat([*rows, numbers], 1)

    def logits(self, params: Params, users: Tensor, items: Tensor) -> Tensor:
        """Return the logits [clients, samples] of features [clients, 1 or samples, …] (eq. 1)."""
        from_user = torch.bmm(users, self.first_layer(params, "user"))
        from_item = torch.bmm(items, self.first_layer(params, "item"))
        first = torch.relu(from_item + (from_user + params["first/bias"][:, None]))
        return tensors.mlp(params, first)[..., 0]

    def layers_of(self, theta: Array, user: Array) -> list[tuple[Array, Array]]:
        """Return one client's network over the features of items, for a user with these features.

        The user's part of the first layer is a bias.
        """
        params = self.unpack(torch.from_numpy(theta[None].copy()))
        bias = torch.from_numpy(user) @ self.first_layer(params, "user")[0] + params["first/bias"]
        weight = self.first_layer(params, "item")[0]
        return [(weight.numpy(), bias[0].numpy()), *tensors.mlp_layers(params)]


def proximal(
    theta: Tensor, received: Tensor, mu: float, kind: Literal["squared", "norm"]
) -> Tensor:
    """Return mu/2 times the (squared) distance from the received parameters (eq. 7)."""
    apart = theta - received
    squares = (apart * apart).sum(1)
    # The root has no gradient at 0, where every client starts; the shift makes it 0.
    return mu / 2 * (squares if kind == "squared" else (squares + 1e-12).sqrt())


def train_feature_networks(
    network: FeatureNetwork,
    descent: ProximalDescent,
    theta: NDArray[np.float32],
    features: tuple[NDArray[np.float32], NDArray[np.float32]],
    samples: DeviceSamples,
    batch: int,
    users_of_samples: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.float32], ClientRows, NDArray[np.float64]]:
    """Train a copy of theta for each client on its samples.

    ``features`` are the feature rows of users and of items; ``users_of_samples`` are given where a
    client has several users. If ``descent.item_lr`` is positive, item rows are trained as well,
    separately by each client. Returns the copies, the touched item rows after training, and each
    client's mean loss before each step.
    """
    n_clients, (users, items) = len(samples.indptr) - 1, features
    indptr, ids, sample_item = np.zeros(n_clients + 1, np.int64), samples.items[:0], samples.items
    if descent.item_lr:
        indptr, ids, sample_item = ragged.number_by_first_use(
            samples.indptr, samples.items, len(items)
        )
        items = items[ids]
    copies = np.repeat(theta[None], n_clients, 0)
    owner = users_of_samples
    if owner is None:
        owner = np.repeat(np.arange(n_clients), np.diff(samples.indptr))
    losses = feature_networks.fit_feature_networks(
        copies,
        theta,
        users,
        items,
        indptr,
        owner,
        samples._replace(items=sample_item.astype(np.int64)),
        batch,
        network.layout,
        descent,
    )
    return copies, ClientRows(indptr, ids, items[: len(ids)]), losses


BLOCK = 64
"""Users of a client whose interests are computed in one product."""


@dataclass(frozen=True)
class Perceptron:
    """Sizes, loss and scores of the network."""

    d: int
    """Embedding width."""
    hidden: tuple[int, ...]
    interest: int = 0
    """Width of the interest; 0 without one."""
    matching: float = 0.0
    """Weight of the loss of matching interests and items directly."""
    meets_items: bool = False
    """Whether the interest is added to the user embedding, which is multiplied with the item's
    entry by entry, and not a separate input of the first layer."""

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the parameters, in the order of the flat vector."""
        d, width, first = self.d, self.interest, self.hidden[0]
        shapes: dict[str, tuple[int, ...]] = {
            "user": (d, first),
            "item": (d, first),
            "product": (d, first),
            "bias": (first,),
            **tensors.mlp_shapes([*self.hidden, 1]),
        }
        if self.interest:
            shapes |= {
                "interest": (width, d if self.meets_items else first),
                "gru/input": (d, 3 * width),
                "gru/state": (width, 3 * width),
                "gru/input_bias": (3 * width,),
                "gru/state_bias": (3 * width,),
                "gate": (width, d),
            }
        if self.matching:
            shapes["match"] = (width, d)
        return shapes

    def initial(self, streams: Streams) -> NDArray[np.float32]:
        """Draw the flat initial parameters; the gate starts at 1."""
        generator = streams.generator("init/network")
        drawn = {}
        for name, shape in self.shapes.items():
            n_in = self.d if name == "bias" else shape[0]
            if name.startswith("gru/"):
                n_in = self.interest
            bound = 0.0 if name == "gate" else 1 / np.sqrt(n_in)
            drawn[name] = generator.uniform(-bound, bound, shape)
        return pack_flat(drawn, self.shapes)

    def unpack(self, flat: NDArray[np.float32]) -> dict[str, Tensor]:
        """Return named views of flat parameters, [clients, …]."""
        return unpack_flat(torch.from_numpy(flat), self.shapes)

    def loss(self, p: Params, rows: Params, fixed: Params, step: SampleBatch) -> Tensor:
        """Return each client's binary cross-entropy, plus that of matching interest and item."""
        loss = tensors.mean_bce(self.logits(p, rows["users"], rows["items"], fixed), step)
        if not self.matching:
            return loss
        interest = gru(p, fixed["behaviour"], fixed["interest"])
        degree = (torch.bmm(interest, p["match"]) * rows["items"]).sum(-1)
        return loss + self.matching * tensors.mean_bce(degree, step)

    def gated_loss(self, p: Params, rows: Params, fixed: Params, step: SampleBatch) -> Tensor:
        """Return the loss where item rows are the received rows plus gated deltas."""
        received, deltas = rows["items"].chunk(2, -1)
        gate = 2 * torch.sigmoid(torch.bmm(fixed["client"], p["gate"]))
        return tensors.mean_bce(
            self.logits(p, rows["users"], received + gate * deltas, fixed), step
        )

    def logits(self, p: Params, users: Tensor, items: Tensor, fixed: Params) -> Tensor:
        """Return the logits of samples: [clients, samples]."""
        interest = gru(p, fixed["behaviour"], fixed["interest"]) if self.interest else None
        if interest is not None and self.meets_items:
            users, interest = torch.baddbmm(users, interest, p["interest"]), None
        out = torch.baddbmm(p["bias"][:, None], users, p["user"])
        out = torch.baddbmm(out, items, p["item"])
        out = torch.baddbmm(out, users * items, p["product"])
        if interest is not None:
            out = torch.baddbmm(out, interest, p["interest"])
        return tensors.mlp(p, torch.relu(out))[..., 0]

    def score_user(
        self, p: Params, table: Tensor, user: Tensor, interest: Tensor | None = None
    ) -> NDArray[np.float32]:
        """Score every item for one user under one client's network."""
        guides = None if interest is None else interest[None] @ p["interest"][0]
        if guides is not None and self.meets_items:
            user, guides = user + guides[0], None
        own = user[None] @ p["user"][0] + p["bias"]
        if guides is not None:
            own = own + guides
        # An item row enters by itself and multiplied with the user embedding.
        items = table @ (p["item"][0] + user[:, None] * p["product"][0])
        out = torch.relu((items + own)[None])
        return np.asarray(tensors.mlp(p, out)[0, :, 0])

    def layers_of(
        self, network: Array, user: Array, interest: Array | None = None
    ) -> list[tuple[Array, Array]]:
        """Return one client's network over item rows, for one user, as `score_user` uses it."""
        p = self.unpack(network[None])
        named = {name: p[name][0].numpy() for name in ("user", "item", "product", "bias")}
        bias = named["bias"]
        if interest is not None:
            guides = interest @ p["interest"][0].numpy()
            user, bias = (user + guides, bias) if self.meets_items else (user, bias + guides)
        weight = named["item"] + user[:, None] * named["product"]
        return [(weight, user @ named["user"] + bias), *tensors.mlp_layers(p)]

    def interests(
        self, network: NDArray[np.float32], fixed: Arrays, indptr: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Return the interest of every user after a round."""
        out = np.zeros_like(fixed["interest"])
        for filled, real in tensors.groups_in_order(len(indptr) - 1):
            p, clients = self.unpack(network[filled]), filled[:real]
            for first in range(0, int(np.diff(indptr)[clients].max()), BLOCK):
                starts = np.minimum(indptr[clients] + first, indptr[clients + 1])
                ends = np.minimum(starts + BLOCK, indptr[clients + 1])
                cut = [slice(a, b) for a, b in zip(starts, ends, strict=True)]
                both = fixed["behaviour"], fixed["interest"]
                given = (torch.from_numpy(tensors.padded(rows, cut, BLOCK)) for rows in both)
                after = gru(p, *given).numpy()
                for number, own in enumerate(cut):
                    out[own] = after[number, : own.stop - own.start]
        return out


def gru(p: Params, inputs: Tensor, state: Tensor) -> Tensor:
    """Take one step of each client's gated recurrent unit: [clients, users, width]."""
    given = torch.baddbmm(p["gru/input_bias"][:, None], inputs, p["gru/input"])
    before = torch.baddbmm(p["gru/state_bias"][:, None], state, p["gru/state"])
    width = state.shape[-1]
    gates = torch.sigmoid(given[..., : 2 * width] + before[..., : 2 * width])
    reset, update = gates[..., :width], gates[..., width:]
    new = torch.tanh(given[..., 2 * width :] + reset * before[..., 2 * width :])
    return new + update * (state - new)
