"""LIPM: federated recommendation guided by local interests (Zhu, Cui, Xing and Wang).

A client is a silo of users, or one user. The recommender is an MLP over a user's embedding, an
item's, their entrywise product and, with ``lipm``, the user's interest. Shared: item table Q,
network, query q. Private: user embeddings, interests, and the change of the network by fine-tuning.

A round with ``lipm`` (section 3.1; the paper's equations are not numbered):

- Fine-tuning after the download, theta_i = theta - lambda grad L_i: some SGD steps on the network.
  The client trains from there with Adam; the change by fine-tuning is kept and added to the newest
  network for scoring.
- Interest, u(t) = GRU(x(t), u(t-1)): t counts rounds, x is the mean embedding of a user's
  ``recent`` last training items. u is an input of the MLP or, with ``meets_items``, added to the
  user's embedding. A silo's interest is the mean of its users'.
- Fusion, phi_i = f(theta_i, u_i): the deltas of item rows times a gate 2 sigma(W u_i), which starts
  at 1. W is trained last, to lower the client's loss with the gated deltas.
- Aggregation, a_i = softmax(g(u_i)): g(u) = <q, u> / ``temperature``, bounded by ``weight_bound``.
  A client uploads its deltas times w = exp(g - bound), at most 1, and w itself (`OWN_WEIGHT`); the
  server divides by the sum of w. Clipping applies to the deltas before weighting.
- ``matching`` adds the cross-entropy of <u M, q_i>, interest and item only, with M trained.

Deviations from the paper: it prints a plus in the fine-tuning step. It does not train g, so q keeps
its initial value. It names a "matching degree" in the loss without defining it.

Beyond the paper, ``averages`` = K > 1 gives each silo its own mix of K averages in place of one
global model. Each average has a query q_k; the shares of a silo are s(u) = softmax over k of
<q_k, u> / ``temperature``. A silo uploads s_k times its delta for each k, and s; average k adds the
sum of these over the sum S_k of s_k; a silo starts from, and scores with, the sum of s_k(u) times
average k. So silo j counts for silo i with weight sum_k s_k(u_i) s_k(u_j) / S_k, and the server
sees sums only. Every average costs an upload and a download of the model's size.

Without ``lipm`` this is federated averaging of the MLP, the paper's baseline, optionally with the
same fine-tuning (``tuned_baseline``). DPPS (section 3.2) is the ``privacy`` section with personal
budgets, and ``guidance`` here. The interest leaves a client only through the gate and g, that is
within the clipped and noised upload.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from hushrec.aggregation import OWN_WEIGHT, ClientRows, Total, Update
from hushrec.config import Count, Share, Width
from hushrec.data.views import Ragged, TrainView
from hushrec.kernels.ragged import add_scattered
from hushrec.methods import base, forms
from hushrec.methods.base import Array, Between, Fitted, OneOf, Scores, SearchSpace, Shared
from hushrec.methods.shared.options import PerceptronConfig
from hushrec.private import PerClient, PerClientRows, Private, PrivateFields, rows_in
from hushrec.streams import Round, Streams
from hushrec.training.networks import Perceptron
from hushrec.training.samples import draw_silo_samples
from hushrec.training.silo_network import Optimiser, SiloModel, SiloProblem, train_silo_networks
from hushrec.training.tensors import torch


def mixed_networks(network: Array, shares: Array | None, clients: int) -> Array:
    """Return each silo's mix of networks, or the only network for all silos."""
    return mixed_rows(network[..., None, :], shares, np.zeros(clients, int), np.arange(clients))


def mixed_rows(table: Array, shares: Array | None, ids: Array, owner: Array) -> Array:
    """Return rows of the table, each mixed by the shares of its silo."""
    if shares is None:
        return np.asarray(table[ids])
    out = np.zeros((len(ids), table.shape[-1]), np.float32)
    for k, average in enumerate(table):
        out += shares[owner, k][:, None] * average[ids]
    return out


def shared_out(touched: Ragged, deltas: Array, network: Array, shares: Array) -> Update:
    """Return each silo's delta times its share, for every average."""
    rows = {}
    for k, mine in enumerate(shares.T):
        weighted = deltas * np.repeat(mine, touched.lengths)[:, None]
        rows[f"items{k}"] = ClientRows(touched.indptr, touched.values, weighted)
    dense = {"network": shares[:, :, None] * network[:, None], "shares": shares}
    return Update(len(shares), rows, dense)


class LIPMConfig(PerceptronConfig):
    """Options of LIPM."""

    lipm: bool = True
    """Whether interests guide the aggregation; without, plain federated averaging."""
    interest: Width = 16
    """Width of the interest."""
    recent: Count = 20
    """Number of last training items whose mean embedding is the input of the GRU."""
    temperature: PositiveFloat = 1.0
    """Temperature of the softmax over interest scores."""
    weight_bound: PositiveFloat = 1.0
    """Bound of the interest score, so that weights differ by a factor of at most exp(2 bound)."""
    gate_steps: NonNegativeInt = 10
    """Number of steps on the gate per round."""
    tune_rate: PositiveFloat = 0.05
    """Learning rate of the fine-tuning after the download (lambda)."""
    tune_steps: NonNegativeInt = 10
    """Number of fine-tuning steps."""
    tuned_baseline: bool = False
    """Without ``lipm``: whether clients fine-tune after the download, for a baseline with the same
    steps."""
    meets_items: bool = False
    """Whether the interest is added to the user's embedding, which is multiplied with the item's,
    and not a separate input of the MLP."""
    matching: NonNegativeFloat = 0.0
    """Weight of the matching of interests and items in the loss."""
    averages: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of averages on the server, of which each silo has its own mix."""
    guidance: Share = 0.0
    """Share of its last noise that a client subtracts from its next upload (gamma of DPPS)."""

    @model_validator(mode="after")
    def _averages_need_interests(self) -> Self:
        if self.averages > 1 and not self.lipm:
            raise ValueError("averages > 1 are mixed by interests: use lipm = true")
        if self.averages > 1 and self.guidance:
            raise ValueError("guidance subtracts the noise of one delta: use averages = 1")
        return self


class LIPM(base.Method, base.ExportsUser, base.Tunable):
    """An MLP recommender of silos, aggregated with weights from local interests."""

    name = "lipm"
    Config = LIPMConfig
    config: LIPMConfig
    traits = base.Traits(rounds=50, silos=True, unexplained=base.NETWORK)

    @property
    def search(self) -> SearchSpace:
        """Search space of the paper, and of LIPM's own options."""
        usual: SearchSpace = {"lr": Between(1e-4, 2e-2), "decay": Between(1e-3, 0.3)}
        if self.tunes:
            steps = OneOf((0, 3, 10, 30))
            usual = {**usual, "tune_rate": Between(1e-3, 1.0), "tune_steps": steps}
        if not self.config.lipm:
            return usual
        return {
            **usual,
            "temperature": Between(0.02, 2.0),
            "interest": OneOf((8, 16, 32)),
            "recent": OneOf((5, 20, 100)),
            "matching": OneOf((0.0, 0.1, 1.0)),
            "meets_items": OneOf((False, True)),
        }

    @property
    def tunes(self) -> bool:
        """Whether clients fine-tune the received network."""
        return self.config.lipm or self.config.tuned_baseline

    @property
    def perceptron(self) -> Perceptron:
        """The network."""
        c = self.config
        guided = (c.interest, c.matching, c.meets_items) if c.lipm else ()
        return Perceptron(c.d, c.hidden, *guided)

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the item table, the network and the query."""
        c, shared = self.config, initial_model(self.config, self.perceptron, view, streams)
        if c.lipm:
            shape = (c.interest,) if c.averages == 1 else (c.averages, c.interest)
            query = streams.generator("init/query").standard_normal(shape)
            shared["query"] = (query / np.sqrt(c.interest)).astype(np.float32)
        if c.averages > 1:
            for name in ("items", "network"):
                shared[name] = np.repeat(shared[name][None], c.averages, 0)
        return shared

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep rows of the silo's users and, with ``lipm``, the change by fine-tuning."""
        c = self.config
        n_users = np.diff(view.client_indptr)
        fields: dict[str, PerClient | PerClientRows] = {"users": PerClientRows(n_users, c.d)}
        if c.lipm:
            fields["interests"] = PerClientRows(n_users, c.interest)
        if self.tunes:
            fields["tuned"] = PerClient(np.zeros(shared["network"].shape[-1], np.float32))
        if c.guidance:
            fields["last_round"] = PerClient(np.zeros((), np.int32))
        return fields

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Fine-tune, train, gate and weight; upload deltas."""
        c, table = self.config, shared["items"]
        samples = draw_silo_samples(view, c.negatives, c.epochs, now)
        shares = self._shares(shared, private, view)
        received = mixed_networks(shared["network"], shares, len(view.clients))
        owner = np.repeat(np.arange(len(view.clients)), samples.touched.lengths)
        rows_before = mixed_rows(table, shares, samples.touched.values, owner)
        start = SiloModel(received, user_rows(private, "users", view), rows_before)
        fixed: dict[str, Array] = {}
        if c.lipm:
            fixed["behaviour"] = recent_behaviour(table, view, c.recent, shares)
            fixed["interest"] = user_rows(private, "interests", view)
        perceptron, indptr = self.perceptron, view.client_indptr
        problem = SiloProblem(
            perceptron.shapes, perceptron.loss, samples, c.batch, fixed, indptr, c.decay
        )
        kept: dict[str, Any] = {}
        if self.tunes:
            tuned = self._tuned(problem, start)
            kept["tuned"], start = tuned - received, start._replace(network=tuned)
        trained, _, losses = train_silo_networks(problem, start, Optimiser(c.lr))
        kept["users"] = ClientRows(indptr, view.users, trained.users)
        network, deltas = trained.network, trained.items - start.items
        dense: dict[str, Array] = {"network": network - received}
        if c.lipm:
            interests = perceptron.interests(network, fixed, indptr)
            kept["interests"] = ClientRows(indptr, view.users, interests)
            mean = client_means(interests, view)
            whole = trained._replace(items=np.concatenate([start.items, deltas], 1))
            network = self._with_gate(problem, whole, np.repeat(mean, np.diff(indptr), 0))
            gates = perceptron.unpack(network)["gate"].numpy()
            # Not a matrix product, whose rounding may depend on the number of clients.
            gate = 2 / (1 + np.exp(-(mean[:, :, None] * gates).sum(1)))
            deltas = deltas * np.repeat(gate, samples.touched.lengths, 0)
            if c.averages > 1:
                own = self._own_shares(shared["query"], mean)
                update = shared_out(samples.touched, deltas, network - received, own)
                return Fitted(update, kept, losses)
            scores = self.interest_scores(shared["query"], mean)
            weights = np.exp(scores - np.float32(c.weight_bound))
            deltas = deltas * np.repeat(weights, samples.touched.lengths)[:, None]
            dense[OWN_WEIGHT] = weights - np.float32(0.5)
            dense["network"] = weights[:, None] * (network - received)
        rows = ClientRows(samples.touched.indptr, samples.touched.values, deltas)
        update = Update(len(view.clients), {"items": rows}, dense)
        if c.guidance:
            kept["last_round"] = np.full(len(view.clients), now.number, np.int32)
            update = self._guided(update, np.asarray(private["last_round"]), view, now)
        return Fitted(update, kept, losses)

    def _tuned(self, problem: SiloProblem, start: SiloModel) -> Array:
        """Take some SGD steps on the received network, except on the gate."""
        optimiser, steps = Optimiser(self.config.tune_rate, adam=False), self.config.tune_steps
        head = set(problem.shapes) - {"gate"}
        done = train_silo_networks(problem, start, optimiser, only=head, steps=steps)
        return done.model.network

    def _with_gate(self, problem: SiloProblem, start: SiloModel, interests: Array) -> Array:
        """Take some steps on the gate only, with the loss of the gated deltas.

        The items of ``start`` are received rows concatenated with their deltas; ``interests`` are
        those of each user's silo.
        """
        fixed = {**problem.fixed, "client": interests}
        gated = replace(problem, loss=self.perceptron.gated_loss, fixed=fixed, decay=0.0)
        optimiser, steps = Optimiser(self.config.lr), self.config.gate_steps
        done = train_silo_networks(gated, start, optimiser, only={"gate"}, steps=steps)
        return done.model.network

    def _guided(self, update: Update, last_round: Array, view: TrainView, now: Round) -> Update:
        """Subtract a share of each client's last noise (section 3.2, gradient - gamma * noise).

        The correction applies to the round's delta, not to each gradient, which Adam would rescale.
        Clipping follows, so the privacy accounting does not change.
        """
        if now.past_noise is None:
            return update
        n_items, given, gamma = view.n_items, update.rows["items"], np.float32(self.config.guidance)
        rows = np.zeros((update.clients, n_items, self.config.d), np.float32)
        add_scattered(rows, given.indptr, given.ids, given.rows)
        network = update.dense["network"].copy()
        for number in np.unique(last_round[last_round > 0]).tolist():
            who = np.flatnonzero(last_round == number)
            mine = view.take_clients(who)
            rows[who] -= gamma * now.past_noise("items", rows.shape[1:], mine, number)
            network[who] -= gamma * now.past_noise("network", network.shape[1:], mine, number)
        ids = np.tile(np.arange(n_items, dtype=np.int32), update.clients)
        indptr = np.arange(update.clients + 1) * n_items
        whole = ClientRows(indptr, ids, rows.reshape(-1, self.config.d))
        return Update(update.clients, {"items": whole}, {**update.dense, "network": network})

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Add the weighted mean of the deltas."""
        if self.config.averages > 1:
            return self._apply_averages(shared, total)
        weights = total.clients
        if self.config.lipm:
            # Noise may push the sum outside the range of client weights, whose bound is public.
            least = total.clients * np.exp(-2 * self.config.weight_bound)
            weights = total.clients / 2 + float(total.dense[OWN_WEIGHT])
            weights = float(np.clip(weights, least, total.clients))
        items = shared["items"] + total.table("items", *shared["items"].shape) / weights
        network = shared["network"] + total.dense["network"] / weights
        return {**shared, "items": items.astype(np.float32), "network": network.astype(np.float32)}

    def _apply_averages(self, shared: Shared, total: Total) -> Shared:
        """Add to each average the mean delta, weighted by the silos' shares."""
        items, network = (shared[name].astype(np.float64) for name in ("items", "network"))
        # Noisy sums of shares are bounded below; an average without shares stays unchanged.
        weights = np.maximum(total.dense["shares"], 1e-3 * total.clients)
        for k, weight in enumerate(weights):
            items[k] += total.table(f"items{k}", *items[k].shape) / weight
            network[k] += total.dense["network"][k] / weight
        return {**shared, "items": items.astype(np.float32), "network": network.astype(np.float32)}

    def _shares(self, shared: Shared, private: Private, view: TrainView) -> Array | None:
        """Return each silo's shares from its last interests; None for one average."""
        if self.config.averages == 1:
            return None
        mean = client_means(user_rows(private, "interests", view), view)
        return self._own_shares(shared["query"], mean)

    def _own_shares(self, queries: Array, interests: Array) -> Array:
        """Return the shares s(u), [silos, averages]."""
        scores = (interests[:, None] * queries).sum(-1) / np.float32(self.config.temperature)
        powers = np.exp(scores - scores.max(1, keepdims=True, initial=-np.inf))
        return np.asarray(powers / powers.sum(1, keepdims=True))

    def interest_scores(self, query: Array, interests: Array) -> Array:
        """Return the bounded interest scores g(u_i)."""
        scores = (interests * query).sum(1) / np.float32(self.config.temperature)
        bound = self.config.weight_bound
        return np.asarray(np.clip(scores, -bound, bound))

    def serving(self, shared: Shared) -> Shared:
        """Return the item table, the network and, with several averages, the query."""
        names = ("items", "network") if self.config.averages == 1 else ("items", "network", "query")
        return {name: shared[name] for name in names}

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Score with the newest network plus the client's last change by fine-tuning."""
        network, table_of, users, interests = self._served(shared, private, history)
        return score_silos(self.perceptron, network, table_of, users, history, interests)

    def user_form(self, shared: Shared, private: Private, history: TrainView) -> forms.ItemNetworks:
        """Return the client's network with the user's embedding and interest."""
        network, table_of, users, interests = self._served(shared, private, history)
        own = (users[0],) if interests is None else (users[0], interests[0])
        layers = self.perceptron.layers_of(network[0], *own)
        return forms.ItemNetworks([forms.RowNetwork(table_of(0), layers)])

    def _served(
        self, shared: Shared, private: Private, history: TrainView
    ) -> tuple[Array, Callable[[int], Array], Array, Array | None]:
        """Return networks, item tables, user embeddings and interests that clients score with."""
        shares = self._shares(shared, private, history)
        network = mixed_networks(shared["network"], shares, len(history.clients))
        if self.tunes:
            network = network + np.asarray(private["tuned"])
        interests = user_rows(private, "interests", history) if self.config.lipm else None
        every = np.arange(history.n_items)

        def table_of(client: int) -> Array:
            return mixed_rows(shared["items"], shares, every, np.full_like(every, client))

        return network, table_of, user_rows(private, "users", history), interests


def initial_model(
    config: PerceptronConfig, perceptron: Perceptron, view: TrainView, streams: Streams
) -> dict[str, Array]:
    """Draw the item table and the network."""
    table = streams.generator("init/items").standard_normal((view.n_items, config.d))
    items = (config.init_std * table).astype(np.float32)
    return {"items": items, "network": perceptron.initial(streams)}


def score_silos(
    perceptron: Perceptron,
    networks: Array,
    table_of: Callable[[int], Array],
    users: Array,
    history: TrainView,
    interests: Array | None = None,
) -> Scores:
    """Score all items for every user, with its silo's network and item table."""
    scores = np.zeros((len(history), history.n_items), np.float32)
    for client, (start, end) in enumerate(pairwise(history.client_indptr)):
        table = torch.from_numpy(table_of(client))
        params = perceptron.unpack(networks[client : client + 1])
        for k in range(start, end):
            interest = None if interests is None else torch.from_numpy(interests[k])
            scores[k] = perceptron.score_user(params, table, torch.from_numpy(users[k]), interest)
    return scores


def recent_behaviour(
    table: Array, view: TrainView, recent: int, shares: Array | None = None
) -> Array:
    """Return the mean embedding of each user's last training items."""
    client = np.repeat(np.arange(len(view.clients)), np.diff(view.client_indptr))
    out = np.zeros((len(view), table.shape[-1]), np.float32)
    for k in range(len(view)):
        last = view.positives[k][-recent:]
        if len(last):
            owner = np.full(len(last), client[k])
            out[k] = mixed_rows(table, shares, last, owner).mean(0)
    return out


def client_means(rows: Array, view: TrainView) -> Array:
    """Return the mean over each client's users."""
    means = [rows[start:end].mean(0) for start, end in pairwise(view.client_indptr)]
    return np.array(means, np.float32).reshape(len(view.clients), rows.shape[1])


def user_rows(private: Private, name: str, view: TrainView) -> Array:
    """Return each user's row of a private field; zeros before its first training."""
    kept = rows_in(private, name)
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
