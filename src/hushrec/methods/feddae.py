"""FedDAE: federated dual-encoder variational autoencoder (Li et al., AAAI 2025).

A history x in {0, 1}^m is encoded twice, by a global encoder phi and by a local one phi_u, and a
gate psi_u on x mixes both:

    a = tanh(W x' + b), (mu, log sigma^2) = V a + c      each encoder; x' = x / |x| with dropout
    (w1, w2) = softmax(G dropout(relu(F x + f)) + g)     the gate
    z = w1 z_l + w2 z_g, with z_k = mu_k + sigma_k e, e ~ N(0, I)
    loss = -sum_i x_i log softmax(theta(z))_i + kl KL(N(mu, sigma^2) || N(0, I))

with mu = w1 mu_l + w2 mu_g, sigma^2 = w1^2 sigma_l^2 + w2^2 sigma_g^2, and theta a decoder
d -> 2d -> m with tanh. The score is theta(mu), without dropout.

Shared: phi and theta. Private: phi_u and psi_u. A round on a device: some plain gradient steps on
all four; the device uploads the sums of its gradients of phi and theta. Server: one step of Adam
along their mean, whose moments stay on the server.

What an upload reveals: rows of phi differ from 0 at the client's items alone, and the gradient of
the decoder's output bias is |x|_1 softmax - x. So one raw upload is the history. Only a sum over
clients (`privacy.mode = distributed`, `hushrec federate init --secure`) or noise protects it.

Without ``personal`` both encoders are shared and the gate stays at its first draw: what the
authors' code computes, because it saves phi_u and psi_u and never loads them.

Deviations from the paper: devices take plain gradient steps, not Adam's. No negatives are drawn, so
both protocols give the same bits. First layers of phi_u and psi_u are only read at the client's own
items and only move there: a device keeps these rows, and computes the first draw of any other row
from a public key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat

from hushrec.aggregation import ClientRows, Total, Update
from hushrec.config import Count, Width
from hushrec.data.views import Ragged, TrainView
from hushrec.io import require_memory
from hushrec.kernels import draws
from hushrec.methods import base, forms
from hushrec.methods.base import Array, Between, Fitted, OneOf, Scores, SearchSpace, Shared
from hushrec.methods.shared.options import adam_step, first_moments
from hushrec.private import PerClient, PerClientRows, Private, PrivateFields, rows_at, rows_in
from hushrec.streams import Round, Streams
from hushrec.training import tensors
from hushrec.training.tensors import Params, Tensor, torch

ROWS = "rows"
"""First layers as a table with a row for each item: shared, private, and in an upload."""
MOMENTS = ("steps", "first", "second")
"""State of Adam, which stays on the server."""


class FedDAEConfig(base.MethodConfig):
    """Options of FedDAE."""

    d: Width = 32
    """Width of the latent vector; hidden layers of encoders and decoder have 2d units."""
    personal: bool = True
    """Whether devices keep a local encoder and a gate. False: both encoders are shared and the gate
    is not trained, as in the authors' code."""
    lr: PositiveFloat = 0.003
    """Learning rate on devices; the loss is a sum over the items of a history."""
    epochs: Count = 1
    """Gradient steps of a device per round."""
    server_lr: PositiveFloat = 1e-3
    """Learning rate of the server's Adam."""
    decay: NonNegativeFloat = 0.0
    """Weight decay of the server's Adam, decoupled."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of the inputs of both encoders, and of the gate's hidden units, that a step leaves
    out."""
    kl: NonNegativeFloat = 0.0
    """Weight of the Kullback-Leibler term."""
    anneal: bool = False
    """Whether that weight grows as tanh(round / 10)."""


class FedDAE(
    base.Method,
    base.ExportsUser,
    base.ItemTables,
    base.ModelFacts,
    base.Tunable,
):
    """Two encoders, one of them private, and a shared decoder; raw uploads reveal histories."""

    name = "feddae"
    Config = FedDAEConfig
    config: FedDAEConfig
    traits = base.Traits(batch_interactions=2048, unexplained=base.NETWORK)
    search: ClassVar[SearchSpace] = {
        "server_lr": Between(1e-3, 0.03),
        "lr": Between(1e-4, 0.1),
        "kl": OneOf((0.0, 0.03, 0.1, 0.3, 1.0)),
        "dropout": OneOf((0.3, 0.5, 0.7)),
    }

    @property
    def phases(self) -> tuple[base.Phase, ...]:
        """One phase, which says what the server reads from a raw upload."""
        uploads = (
            "gradients of the encoder's rows of its items and of the decoder; the server reads the "
            "client's items from them, unless sums are secure or noise is added"
        )
        (train,) = super().phases
        return (replace(train, uploads=uploads),)

    # ------------------------------------------------------------ parameters

    def _shapes(self, n_items: int) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of all parameters but the first layers' rows."""
        d, wide = self.config.d, 2 * self.config.d
        encoder = {"hidden/bias": (wide,), "out/weight": (wide, wide), "out/bias": (wide,)}
        gate = {"hidden/bias": (d,), "out/weight": (d, 2), "out/bias": (2,)}
        decoder = {
            "hidden/weight": (d, wide),
            "hidden/bias": (wide,),
            "out/weight": (n_items, wide),
            "out/bias": (n_items,),
        }
        parts = {"global": encoder, "local": encoder, "gate": gate, "decoder": decoder}
        return {f"{p}/{name}": s for p, shapes in parts.items() for name, s in shapes.items()}

    def _is_private(self, name: str) -> bool:
        return self.config.personal and name.startswith(("local/", "gate/"))

    def _uploaded(self, n_items: int) -> list[str]:
        """Return the names of the parameters whose gradients are uploaded, rows aside."""
        names = self._shapes(n_items)
        return [n for n in names if not (self._is_private(n) or n.startswith("gate/"))]

    @property
    def _shared_width(self) -> int:
        """Columns of the rows (global encoder, local encoder, gate) that are shared."""
        return (2 if self.config.personal else 4) * self.config.d

    def _draw(self, n_items: int, streams: Streams) -> dict[str, Array]:
        """Draw all parameters but rows from U(-b, b), b = 1 / sqrt(inputs of the layer)."""
        d, generator, drawn = self.config.d, streams.generator("init/network"), {}
        inputs = {"hidden": n_items, "out": 2 * d}
        for name, shape in self._shapes(n_items).items():
            part, layer, _ = name.split("/")
            n_in = d if (part, layer) in (("gate", "out"), ("decoder", "hidden")) else inputs[layer]
            bound = 1 / math.sqrt(n_in)
            drawn[name] = generator.uniform(-bound, bound, shape).astype(np.float32)
        return drawn

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the shared parameters; the key of the first draw of other rows is public."""
        m, d = view.n_items, self.config.d
        require_memory(8 * 4 * m * 7 * d, f"an autoencoder of width d={d}", "a smaller d")
        key = streams.key("init/rows").view(np.int64)
        every = np.arange(m, dtype=np.int32)
        rows = first_rows(key, every, 5 * d, m)[:, : self._shared_width]
        network = {n: a for n, a in self._draw(m, streams).items() if not self._is_private(n)}
        shared = {ROWS: rows, **network, "key": key}
        return {**shared, **first_moments(self._flat(shared, m))}

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep the local encoder and the gate, of their first layers the own items' rows."""
        if not self.config.personal:
            return {}
        drawn = self._draw(view.n_items, streams)
        network = {n: PerClient(a) for n, a in drawn.items() if self._is_private(n)}
        return {ROWS: PerClientRows(view.positives.lengths, 3 * self.config.d), **network}

    def _flat(self, arrays: Mapping[str, Array], n_items: int) -> Array:
        names = [ROWS, *self._uploaded(n_items)]
        return np.concatenate([np.asarray(arrays[name]).ravel() for name in names])

    # ------------------------------------------------------------ a round

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train encoders, gate and decoder; upload the gradients of shared parameters."""
        m, width = view.n_items, self._shared_width
        items = view.positives.union(Ragged.empty(len(view)))
        rows, noise = self._rows(shared, private, items), self._noise(items, view, now)
        names = self._uploaded(m)
        kept = {n: np.array(private[n]) for n in private if n != ROWS}
        dense = {n: np.zeros((len(view), *shared[n].shape), np.float32) for n in names}
        sent, losses = np.zeros((len(rows), width), np.float32), np.zeros(len(view))
        for clients, real in tensors.groups_in_order(len(view)):
            state = self._state(shared, kept, clients)
            owned = [slice(items.indptr[c], items.indptr[c + 1]) for c in clients]
            group = _Group(state, [rows[own] for own in owned], _histories(items, clients, m))
            totals, moved = self._train(group, [noise[c] for c in clients], set(names), now.number)
            for g, c in enumerate(clients[:real]):
                for name in names:
                    dense[name][c] = totals[name][g].numpy()
                for name in kept:
                    kept[name][c] = group.state[name][g].numpy()
                rows[owned[g]], sent[owned[g]] = group.rows[g], moved[g][:, :width]
                losses[c] = float(totals["loss"][g]) / max(1, len(moved[g]))
        update = Update(len(view), {ROWS: ClientRows(items.indptr, items.values, sent)}, dense)
        if self.config.personal:
            own_rows = np.ascontiguousarray(rows[:, width:])
            return Fitted(
                update, {ROWS: ClientRows(items.indptr, items.values, own_rows), **kept}, losses
            )
        return Fitted(update, {}, losses)

    def _train(
        self, group: _Group, noise: list[list[_Noise]], uploaded: set[str], number: int
    ) -> tuple[dict[str, Tensor], list[Array]]:
        """Take the steps of a round; return sums of gradients, with the mean loss, and of rows.

        The state and rows of the group move.
        """
        config, state, rows = self.config, group.state, group.rows
        totals: dict[str, Tensor] = {"loss": torch.zeros(tensors.GROUP)}
        moved = [np.zeros_like(own) for own in rows]
        weight = config.kl * (math.tanh(number / 10) if config.anneal else 1.0)
        for epoch in range(config.epochs):
            now = [of_client[epoch] for of_client in noise]
            parts = [(n.inputs * own).sum(0) for n, own in zip(now, rows, strict=True)]
            sums = torch.from_numpy(np.stack(parts)).requires_grad_()
            for tensor in state.values():
                tensor.requires_grad_()
            hidden, normal = (torch.from_numpy(np.stack([n[k] for n in now])) for k in (1, 2))
            losses = self._loss(state, sums, group.histories, hidden, normal, weight)
            of_sums, *gradients = torch.autograd.grad(losses.sum(), [sums, *state.values()])
            totals["loss"] = totals["loss"] + losses.detach() / config.epochs
            for name, gradient in zip(list(state), gradients, strict=True):
                tensor = state[name].detach()
                if name in uploaded:
                    totals[name] = totals[name] + gradient if epoch else gradient
                # The copies of shared parameters are not needed after the last step.
                if name not in uploaded or epoch < config.epochs - 1:
                    tensor = tensor - config.lr * gradient
                state[name] = tensor
            for g, n in enumerate(now):
                step = n.inputs * of_sums[g].numpy()
                moved[g] += step
                rows[g] = rows[g] - np.float32(config.lr) * step
        return totals, moved

    def _loss(
        self, state: Params, sums: Tensor, x: Tensor, kept: Tensor, normal: Tensor, weight: float
    ) -> Tensor:
        """Return the loss of each client of a group."""
        mixed = self._encode(state, sums, kept)
        (w1, w2), ((local, log_l), (common, log_g)) = mixed.weights, mixed.parts
        by_local, by_global = normal.unbind(1)
        z = w1 * (local + torch.exp(log_l / 2) * by_local)
        z = z + w2 * (common + torch.exp(log_g / 2) * by_global)
        losses = -(x * torch.log_softmax(decode(state, z)[1], 1)).sum(1)
        if not weight:
            return losses
        variance = w1**2 * torch.exp(log_l) + w2**2 * torch.exp(log_g)
        divergence = (mixed.mean**2 + variance - 1 - torch.log(variance)).sum(1) / 2
        return losses + weight * divergence

    def _encode(self, state: Params, sums: Tensor, kept: Tensor | None = None) -> _Mixed:
        """Run encoders and gate on the first layers' sums [clients, 5d]."""
        d = self.config.d
        by_global, by_local, by_gate = torch.split(sums, [2 * d, 2 * d, d], 1)
        hidden = torch.relu(by_gate + state["gate/hidden/bias"])
        mix = torch.softmax(layer(state, "gate/out", hidden if kept is None else hidden * kept), 1)
        parts = []
        for name, total in (("local", by_local), ("global", by_global)):
            activation = torch.tanh(total + state[f"{name}/hidden/bias"])
            out = layer(state, f"{name}/out", activation)
            parts.append((out[:, :d], out[:, d:]))
        return _Mixed([mix[:, :1], mix[:, 1:]], parts)

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Take one step of Adam along the mean of the gradients."""
        config, rows = self.config, shared[ROWS]
        n_items = len(rows)
        summed = {ROWS: total.table(ROWS, *rows.shape), **total.dense}
        mean = self._flat(summed, n_items) / total.clients
        flat = self._flat(shared, n_items)
        moved, moments = adam_step(flat, shared, mean, config.server_lr, config.decay)
        names = [ROWS, *self._uploaded(n_items)]
        ends = np.cumsum([shared[name].size for name in names])[:-1]
        parts = zip(names, np.split(moved, ends), strict=True)
        return {**shared, **{n: p.reshape(shared[n].shape) for n, p in parts}, **moments}

    def download(self, shared: Shared) -> Shared:
        """Send the network; Adam's moments stay on the server."""
        return {name: array for name, array in shared.items() if name not in MOMENTS}

    serving = download

    # ------------------------------------------------------------ scoring

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Decode the mixed mean of both encoders."""
        scores = np.empty((len(history), history.n_items), np.float32)
        for clients, real, _, logits in self._decoded(shared, private, history):
            scores[clients[:real]] = logits.numpy()[:real]
        return scores

    def user_form(self, shared: Shared, private: Private, history: TrainView) -> forms.ItemNetworks:
        """Return the decoder's last layer, with the hidden layer of the history at export."""
        ((_, _, hidden, _),) = self._decoded(shared, private, history)
        rows = np.column_stack([shared["decoder/out/weight"], shared["decoder/out/bias"]])
        vector = np.append(hidden[0].numpy(), np.float32(1))
        return forms.ItemNetworks([forms.RowNetwork.of(rows, {"vector": vector})])

    def _decoded(
        self, shared: Shared, private: Private, history: TrainView
    ) -> Iterator[tuple[Array, int, Tensor, Tensor]]:
        """Yield groups of clients: (padded clients, number, hidden layers, scores of all items)."""
        items = history.positives.union(Ragged.empty(len(history)))
        rows = self._rows(shared, private, items)
        of_encoder = np.repeat([True, True, False], np.array([2, 2, 1]) * self.config.d)
        network = {name: np.asarray(private[name]) for name in private if name != ROWS}
        with torch.no_grad():
            for clients, real in tensors.groups_in_order(len(history)):
                state = self._state(shared, network, clients)
                own = [rows[items.indptr[c] : items.indptr[c + 1]] for c in clients]
                scale = [np.where(of_encoder, _unit(len(r)), np.float32(1)) for r in own]
                sums = np.stack([(s * r).sum(0) for s, r in zip(scale, own, strict=True)])
                mean = self._encode(state, torch.from_numpy(sums)).mean
                yield clients, real, *decode(state, mean)

    def item_tables(self, shared: Shared, private: Private) -> dict[str, Array]:
        """Return the decoder's and the global encoder's rows of all items."""
        wide = 2 * self.config.d
        return {"decoder": shared["decoder/out/weight"], "encoder": shared[ROWS][:, :wide]}

    def facts(self, shared: Shared) -> Mapping[str, float]:
        """Return the spread of the decoder's output bias, which is popularity on its own."""
        return {"deviation of the decoder's output bias": float(shared["decoder/out/bias"].std())}

    # ------------------------------------------------------------ what both need

    def _rows(self, shared: Shared, private: Private, items: Ragged) -> Array:
        """Return the first layers' rows at the clients' items: [entries, 5d]."""
        d, width, n_items = self.config.d, self._shared_width, len(shared[ROWS])
        rows = np.empty((len(items.values), 5 * d), np.float32)
        rows[:, :width] = shared[ROWS][items.values]
        if self.config.personal:
            rows[:, width:], known = rows_at(rows_in(private, ROWS), items)
        else:
            known = np.zeros(len(rows), bool)
        new = items.values[~known]
        rows[~known, width:] = first_rows(shared["key"], new, 5 * d, n_items)[:, width:]
        return rows

    def _state(self, shared: Shared, own: Mapping[str, Array], clients: Array) -> dict[str, Tensor]:
        """Return the parameters of a group of clients."""
        state = {}
        for name in self._shapes(len(shared[ROWS])):
            if name in own:
                state[name] = torch.from_numpy(own[name][clients])
            else:
                received = torch.from_numpy(shared[name])
                state[name] = received.expand(tensors.GROUP, *received.shape)
        return state

    def _noise(self, items: Ragged, view: TrainView, now: Round) -> list[list[_Noise]]:
        """Draw dropout and normal numbers of every client and step, from the client's stream."""
        d, left_out, drawn = self.config.d, self.config.dropout, []
        for c, user in enumerate(view.users.tolist()):
            generator = now.streams.generator("fit", now.number, user)
            steps, n = [], int(items.lengths[c])
            for _ in range(self.config.epochs):
                kept = (generator.random((n, 2)) >= left_out) * _unit(n) / (1 - left_out)
                inputs = np.repeat(np.column_stack([kept, np.ones(n)]), [2 * d, 2 * d, d], 1)
                hidden = (generator.random(d) >= left_out) / (1 - left_out)
                normal = generator.standard_normal((2, d))
                steps.append(_Noise(*(a.astype(np.float32) for a in (inputs, hidden, normal))))
            drawn.append(steps)
        return drawn


class _Group(NamedTuple):
    """A group of clients in training; state and rows are replaced step by step."""

    state: dict[str, Tensor]
    rows: list[Array]
    """First layers' rows of each client's items: [items, 5d]."""
    histories: Tensor
    """[clients, items], 1 for an item of the history."""


class _Noise(NamedTuple):
    """Random numbers of one step of a client."""

    inputs: NDArray[np.float32]
    """Factor of every entry of the rows: dropout over |x| for encoders, 1 for the gate."""
    hidden: NDArray[np.float32]
    """Dropout of the gate's hidden units."""
    normal: NDArray[np.float32]
    """Noise of the local and the global code: [2, d]."""


class _Mixed(NamedTuple):
    """Encodings (mean, log variance) of the local and the global encoder, and their weights."""

    weights: list[Tensor]
    parts: list[tuple[Tensor, Tensor]]

    @property
    def mean(self) -> Tensor:
        """The mixed mean."""
        (w1, w2), ((local, _), (common, _)) = self.weights, self.parts
        return w1 * local + w2 * common


def layer(params: Params, name: str, inputs: Tensor) -> Tensor:
    """Apply each client's dense layer to its input: [clients, width]."""
    bias = params[f"{name}/bias"]
    return torch.baddbmm(bias[:, None], inputs[:, None], params[f"{name}/weight"])[:, 0]


def decode(params: Params, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the decoder's hidden layer and the scores of all items."""
    hidden = torch.tanh(layer(params, "decoder/hidden", z))
    rows, bias = params["decoder/out/weight"], params["decoder/out/bias"]
    return hidden, torch.baddbmm(bias[:, :, None], rows, hidden[:, :, None])[:, :, 0]


def first_rows(key: Array, items: Array, width: int, n_items: int) -> Array:
    """Return the first draw of these items' rows from U(-b, b), b = 1 / sqrt(number of items).

    Every number has its own address, so a device draws the rows that it needs and no others.
    """
    address = np.repeat(items.astype(np.int64), width), np.tile(np.arange(width), len(items))
    words = draws.draw_each(key.view(np.uint64), *address)
    unit = (words >> np.uint64(40)).astype(np.float64) / 2.0**24
    return ((2 * unit - 1) / math.sqrt(n_items)).astype(np.float32).reshape(len(items), width)


def _unit(n: int) -> np.float32:
    """Return 1 / |x| of a history of n items."""
    return np.float32(1 / math.sqrt(max(1, n)))


def _histories(items: Ragged, clients: Array, n_items: int) -> Tensor:
    x = torch.zeros((len(clients), n_items))
    for g, c in enumerate(clients):
        x[g, items[c].astype(np.int64)] = 1
    return x
