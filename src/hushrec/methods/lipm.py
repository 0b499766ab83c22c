"""LIPM: federated recommendation guided by local interests (Zhu, Cui, Xing and Wang).

A client is a silo of users, or one user. The recommender is a perceptron over a user's embedding,
an item's, their product entry by entry and, with LIPM, the user's interest. Shared: item table Q,
network. Private: user embeddings, interests, and how the network was tuned. Adam, started anew in
every round.

With ``lipm`` (section 3.1; the equations have no numbers, so they are named here):

- Interest, u(t) = GRU(x(t), u(t-1)): t counts rounds, x is the mean embedding of a user's
  ``recent`` last training items. The scorer sees u. A silo's interest is the mean of its users'.
- Aggregation, a_i = softmax(g(u_i)): g(u) = <q, u> / ``temperature`` against a query q that the
  server holds, bounded by ``weight_bound``. Nothing in the paper trains g, so q stays as drawn. A
  client uploads exp(g)-fold deltas and exp(g) - 1, and the server divides by the sum of exp(g).
- Fusion, phi_i = f(theta_i, u_i): the deltas of item rows times a gate 2 sigma(W u_i), one at the
  start. W is trained, after the rest, to lower the client's loss under the gated deltas.
- Fine-tuning after the download, theta_i = theta - lambda grad L_i (the paper prints a plus): some
  plain steps on the network. The client trains from there, and what the steps changed is kept and
  added to the newest network when the client scores.

Without ``lipm`` this is federated averaging of the perceptron, the paper's baseline. DPPS (section
3.2) is the ``privacy`` section: personal budgets, with ``guidance`` here. The interest leaves a
client only through the gate and g, that is in the clipped and noised upload.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec import silo_networks as networks
from hushrec.aggregate import ClientRows, Total, Update
from hushrec.clients import TrainView
from hushrec.methods.base import (
    Fitted,
    Method,
    MethodConfig,
    PerClient,
    PerClientRows,
    Private,
    PrivateFields,
    Shared,
)
from hushrec.neural import GROUP, Params, Tensor, torch
from hushrec.privacy.kernels import add_scattered
from hushrec.rng import PastNoise, Round, Streams

BLOCK = 64
"""Users of a client whose interests are worked out in one product."""


class PerceptronConfig(MethodConfig):
    """Options of the perceptron and of its training on a client."""

    d: Annotated[int, Field(ge=1)] = 64
    """Embedding dimensions."""
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = (64, 32)
    """Widths of the hidden layers."""
    lr: Annotated[float, Field(gt=0)] = 5e-3
    """Rate of Adam."""
    batch: Annotated[int, Field(ge=1)] = 128
    epochs: Annotated[int, Field(ge=1)] = 5
    """Passes over a client's samples in a round."""
    negatives: Annotated[int, Field(ge=1)] = 1
    """Negatives per positive, drawn afresh in every epoch."""
    decay: Annotated[float, Field(ge=0)] = 0.05
    """Weight of the squared embeddings in the loss, so that silos do not learn theirs by heart."""
    init_std: Annotated[float, Field(gt=0)] = 0.1
    """Deviation of the first item table."""


class LIPMConfig(PerceptronConfig):
    """Options of LIPM."""

    lipm: bool = True
    """Interests guide the aggregation; without, plain federated averaging."""
    interest: Annotated[int, Field(ge=1)] = 16
    """Dimensions of the interest."""
    recent: Annotated[int, Field(ge=1)] = 20
    """Last training items that make a user's current behaviour."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the score of an interest before the softmax."""
    weight_bound: Annotated[float, Field(gt=0)] = 1.0
    """Bound of that score, so that no client outweighs another by more than exp(2 bounds)."""
    gate_steps: Annotated[int, Field(ge=0)] = 10
    """Steps on the gate in a round."""
    tune_rate: Annotated[float, Field(gt=0)] = 0.05
    """Lambda: rate of the fine-tuning after the download."""
    tune_steps: Annotated[int, Field(ge=0)] = 10
    """Steps of it."""
    guidance: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Gamma: share of its own last noise that a client takes back in its next upload (DPPS)."""


class LIPM(Method):
    """A perceptron over silos, aggregated under the guidance of local interests."""

    name = "lipm"
    Config = LIPMConfig
    default_rounds = 50
    silos = True

    # ------------------------------------------------------------ parameters

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name the network's parameters, in the order in which they lie."""
        c: LIPMConfig = self.config
        first, *more = c.hidden
        shapes: dict[str, tuple[int, ...]] = {
            "user": (c.d, first),
            "item": (c.d, first),
            "product": (c.d, first),
            "bias": (first,),
        }
        for number, (n_in, n_out) in enumerate(zip(c.hidden, [*more, 1], strict=True)):
            shapes |= {f"layer{number}/weight": (n_in, n_out), f"layer{number}/bias": (n_out,)}
        if c.lipm:
            shapes |= {
                "interest": (c.interest, first),
                "gru/input": (c.d, 3 * c.interest),
                "gru/state": (c.interest, 3 * c.interest),
                "gru/input_bias": (3 * c.interest,),
                "gru/state_bias": (3 * c.interest,),
                "gate": (c.interest, c.d),
            }
        return shapes

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the item table, the network and the query; the gate starts at one."""
        c: LIPMConfig = self.config
        generator = streams.generator("init/network")
        drawn = {}
        for name, shape in self.shapes.items():
            n_in = c.d if name == "bias" else shape[0]
            if name.startswith("gru/"):
                n_in = c.interest
            bound = 0.0 if name == "gate" else 1 / np.sqrt(n_in)
            drawn[name] = generator.uniform(-bound, bound, shape)
        table = streams.generator("init/items").standard_normal((view.n_items, c.d))
        shared = {
            "items": (c.init_std * table).astype(np.float32),
            "network": networks.pack(drawn, self.shapes),
        }
        if c.lipm:
            query = streams.generator("init/query").standard_normal(c.interest)
            shared["query"] = (query / np.sqrt(c.interest)).astype(np.float32)
        return shared

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep a row for every user of the silo, and with LIPM what fine-tuning changed."""
        c: LIPMConfig = self.config
        n_users = np.diff(view.client_indptr)
        fields: dict[str, PerClient | PerClientRows] = {"users": PerClientRows(n_users, c.d)}
        if c.lipm:
            fields["interests"] = PerClientRows(n_users, c.interest)
            fields["tuned"] = PerClient(np.zeros_like(shared["network"]))
        if c.guidance:
            fields["last_round"] = PerClient(np.zeros((), np.int32))
        return fields

    # ------------------------------------------------------------ a round

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Tune, train, gate and weigh; upload deltas."""
        c: LIPMConfig = self.config
        table, n_clients = shared["items"], len(view.clients)
        samples = networks.draw_samples(view, c.negatives, c.epochs, now)
        received = np.repeat(shared["network"][None], n_clients, 0)
        users, items = _rows(private, "users", view), table[samples.touched.values]
        fixed: dict[str, NDArray[Any]] = {}
        if c.lipm:
            fixed["behaviour"] = recent_behaviour(table, view, c.recent)
            fixed["interest"] = _rows(private, "interests", view)
        problem = networks.Problem(
            self.shapes, self.loss, samples, c.batch, fixed, view.client_indptr, c.decay
        )
        start, kept = received, {}
        if c.lipm:
            head = [name for name in self.shapes if name != "gate"]
            start = networks.train(
                problem,
                received,
                users,
                items,
                networks.Descent(c.tune_rate),
                moves=frozenset({"network"}),
                only=head,
                steps=c.tune_steps,
            ).network
            kept["tuned"] = start - received
        trained = networks.train(problem, start, users, items, networks.Adam(c.lr))
        network, deltas = trained.network, trained.items - items
        own = ClientRows(view.client_indptr, view.users, trained.users)
        private_after: dict[str, Any] = {"users": own, **kept}
        dense: dict[str, NDArray[Any]] = {}
        if c.lipm:
            interests = self._interests(network, fixed, view)
            private_after["interests"] = ClientRows(view.client_indptr, view.users, interests)
            mean = client_means(interests, view)
            network = self._train_gate(problem, network, trained.users, items, deltas, mean, view)
            gates = networks.unpack(torch.from_numpy(network), self.shapes)["gate"].numpy()
            # Not a product of matrices, whose rounding may depend on how many clients there are.
            gate = 2 / (1 + np.exp(-(mean[:, :, None] * gates).sum(1)))
            deltas = deltas * np.repeat(gate, samples.touched.lengths, 0)
            weights = np.exp(self.interest_scores(shared["query"], mean))
            deltas = deltas * np.repeat(weights, samples.touched.lengths)[:, None]
            dense["weight"] = weights - np.float32(1)
            dense["network"] = weights[:, None] * (network - received)
        else:
            dense["network"] = network - received
        rows = ClientRows(samples.touched.indptr, samples.touched.values, deltas)
        update = Update(n_clients, {"items": rows}, dense)
        if c.guidance:
            private_after["last_round"] = np.full(n_clients, now.number, np.int32)
            last = np.asarray(private["last_round"])
            update = self._guided(update, last, view, now.past_noise, table.shape)
        return Fitted(update, private_after, trained.losses)

    def _guided(
        self,
        update: Update,
        last_round: NDArray[np.int32],
        view: TrainView,
        past_noise: PastNoise | None,
        table: tuple[int, ...],
    ) -> Update:
        """Take back a share of each client's last noise (section 3.2, gradient - gamma * noise).

        A round's delta stands for its gradients. Corrected here, and not step by step, Adam cannot
        scale the correction away; and what is clipped afterwards holds it, so the account stands.
        """
        if past_noise is None:
            return update
        n_items, width = table
        rows, dense = np.zeros((update.clients, n_items, width), np.float32), dict(update.dense)
        given = update.rows["items"]
        add_scattered(rows, given.indptr, given.ids, given.rows)
        for number in np.unique(last_round[last_round > 0]).tolist():
            who = np.flatnonzero(last_round == number)
            mine = view.take_clients(who)
            gamma = np.float32(self.config.guidance)
            rows[who] -= gamma * past_noise("items", (n_items, width), mine, number)
            network = dense["network"].copy()
            network[who] -= gamma * past_noise("network", network.shape[1:], mine, number)
            dense["network"] = network
        ids = np.tile(np.arange(n_items, dtype=np.int32), update.clients)
        indptr = np.arange(update.clients + 1) * n_items
        whole = ClientRows(indptr, ids, rows.reshape(-1, width))
        return Update(update.clients, {"items": whole}, dense)

    def _train_gate(
        self,
        problem: networks.Problem,
        network: NDArray[np.float32],
        users: NDArray[np.float32],
        items: NDArray[np.float32],
        deltas: NDArray[np.float32],
        mean: NDArray[np.float32],
        view: TrainView,
    ) -> NDArray[np.float32]:
        """Take some steps on the gate alone, under the loss of the gated deltas."""
        c: LIPMConfig = self.config
        of_client = np.repeat(mean, np.diff(view.client_indptr), 0)
        gated = networks.Problem(
            problem.shapes,
            self._gated_loss,
            problem.samples,
            c.batch,
            {**problem.fixed, "client": of_client},
            problem.user_indptr,
        )
        return networks.train(
            gated,
            network,
            users,
            np.concatenate([items, deltas], 1),
            networks.Adam(c.lr),
            moves=frozenset({"network"}),
            only=["gate"],
            steps=c.gate_steps,
        ).network

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Add the weighted mean of the deltas."""
        weights = total.clients
        if self.config.lipm:
            # Noise may push the sum to where no clients' weights can be; their bound is public.
            bound = np.exp(self.config.weight_bound)
            weights += float(total.dense["weight"])
            weights = float(np.clip(weights, total.clients / bound, total.clients * bound))
        items = shared["items"].astype(np.float64)
        ids, summed = total.rows["items"]
        items[ids] += summed / weights
        network = shared["network"] + total.dense["network"] / weights
        return {
            **shared,
            "items": items.astype(np.float32),
            "network": network.astype(np.float32),
        }

    # ------------------------------------------------------------ the network

    def loss(self, p: Params, rows: Params, fixed: Params, step: networks.Step) -> Tensor:
        """Return each client's binary cross-entropy."""
        return networks.bce(self._logits(p, rows["users"], rows["items"], fixed), step)

    def _gated_loss(self, p: Params, rows: Params, fixed: Params, step: networks.Step) -> Tensor:
        received, deltas = rows["items"].chunk(2, -1)
        gate = 2 * torch.sigmoid(torch.bmm(fixed["client"], p["gate"]))
        return networks.bce(self._logits(p, rows["users"], received + gate * deltas, fixed), step)

    def _logits(self, p: Params, users: Tensor, items: Tensor, fixed: Params) -> Tensor:
        out = torch.baddbmm(p["bias"][:, None], users, p["user"])
        out = torch.baddbmm(out, items, p["item"])
        out = torch.baddbmm(out, users * items, p["product"])
        if self.config.lipm:
            interest = gru(p, fixed["behaviour"], fixed["interest"])
            out = torch.baddbmm(out, interest, p["interest"])
        return upper_layers(p, out, len(self.config.hidden))

    def _interests(
        self, network: NDArray[np.float32], fixed: dict[str, NDArray[Any]], view: TrainView
    ) -> NDArray[np.float32]:
        """Return the interest of every user after this round."""
        out = np.zeros_like(fixed["interest"])
        indptr = view.client_indptr
        for start in range(0, len(indptr) - 1, GROUP):
            clients = np.arange(start, min(start + GROUP, len(indptr) - 1))
            filled = np.append(clients, np.full(GROUP - len(clients), start))
            p = networks.unpack(torch.from_numpy(network[filled]), self.shapes)
            for first in range(0, int(np.diff(indptr)[clients].max()), BLOCK):
                cut = [
                    slice(
                        min(indptr[k] + first, indptr[k + 1]),
                        min(indptr[k] + first + BLOCK, indptr[k + 1]),
                    )
                    for k in clients
                ]
                given = {n: _filled(fixed[n], cut) for n in ("behaviour", "interest")}
                after = gru(p, given["behaviour"], given["interest"]).numpy()
                for place, own in enumerate(cut):
                    out[own] = after[place, : own.stop - own.start]
        return out

    def interest_scores(
        self, query: NDArray[np.float32], interests: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Return g(u_i), bounded."""
        c: LIPMConfig = self.config
        scores = (interests * query).sum(1) / np.float32(c.temperature)
        bounded: NDArray[np.float32] = np.clip(scores, -c.weight_bound, c.weight_bound)
        return bounded

    # ------------------------------------------------------------ scoring

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Score with the newest network, tuned as the client last tuned it."""
        c: LIPMConfig = self.config
        scores = np.zeros((len(history), history.n_items), np.float32)
        users, indptr = _rows(private, "users", history), history.client_indptr
        network = np.repeat(shared["network"][None], len(indptr) - 1, 0)
        interests = None
        if c.lipm:
            network = network + np.asarray(private["tuned"])
            interests = _rows(private, "interests", history)
        table = torch.from_numpy(shared["items"])
        for client in range(len(indptr) - 1):
            flat = torch.from_numpy(network[client : client + 1])
            p = networks.unpack(flat, self.shapes)
            for k in range(indptr[client], indptr[client + 1]):
                interest = None if interests is None else torch.from_numpy(interests[k])
                scores[k] = score_user(p, table, torch.from_numpy(users[k]), interest, c.hidden)
        return scores


def score_user(
    p: Params, table: Tensor, user: Tensor, interest: Tensor | None, hidden: Sequence[int]
) -> NDArray[np.float32]:
    """Score every item for one user under one client's network."""
    own = user[None] @ p["user"][0] + p["bias"]
    if interest is not None:
        own = own + interest[None] @ p["interest"][0]
    # An item's row meets the user twice: by itself, and entry by entry.
    items = table @ (p["item"][0] + user[:, None] * p["product"][0])
    scores: NDArray[np.float32] = upper_layers(p, (items + own)[None], len(hidden))[0].numpy()
    return scores


def upper_layers(p: Params, first: Tensor, depth: int) -> Tensor:
    """Run what comes after the first layer's sums, [clients, samples, width] -> logits."""
    out = torch.relu(first)
    for number in range(depth):
        bias = p[f"layer{number}/bias"]
        out = torch.baddbmm(bias[:, None], out, p[f"layer{number}/weight"])
        if number < depth - 1:
            out = torch.relu(out)
    return out[..., 0]


def gru(p: Params, inputs: Tensor, state: Tensor) -> Tensor:
    """Take one step of each client's gated recurrent unit: [clients, users, width]."""
    given = torch.baddbmm(p["gru/input_bias"][:, None], inputs, p["gru/input"])
    before = torch.baddbmm(p["gru/state_bias"][:, None], state, p["gru/state"])
    width = state.shape[-1]
    gates = torch.sigmoid(given[..., : 2 * width] + before[..., : 2 * width])
    reset, update = gates[..., :width], gates[..., width:]
    new = torch.tanh(given[..., 2 * width :] + reset * before[..., 2 * width :])
    return new + update * (state - new)


def recent_behaviour(
    table: NDArray[np.float32], view: TrainView, recent: int
) -> NDArray[np.float32]:
    """Return the mean embedding of each user's last training items."""
    positives = view.positives
    out = np.zeros((len(view), table.shape[1]), np.float32)
    for k in range(len(view)):
        last = positives[k][-recent:]
        if len(last):
            out[k] = table[last].mean(0)
    return out


def client_means(rows: NDArray[np.float32], view: TrainView) -> NDArray[np.float32]:
    """Return the mean over each client's users."""
    indptr = view.client_indptr
    means = [rows[a:b].mean(0) for a, b in pairwise(indptr)]
    return np.array(means, np.float32).reshape(len(indptr) - 1, rows.shape[1])


def _rows(private: Private, name: str, view: TrainView) -> NDArray[np.float32]:
    kept = private[name]
    assert isinstance(kept, ClientRows)
    return networks.rows_of_users(kept, view)


def _filled(rows: NDArray[np.float32], cut: Sequence[slice]) -> Tensor:
    filled = np.zeros((GROUP, BLOCK, rows.shape[1]), np.float32)
    for place, own in enumerate(cut):
        filled[place, : own.stop - own.start] = rows[own]
    return torch.from_numpy(filled)
