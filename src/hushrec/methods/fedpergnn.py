"""FedPerGNN: a graph network over one's history and its other readers (Wu et al., 2022).

Nature Communications 13; the preprint is "FedGNN" (2021). Device u has a graph: its own node e_u,
its items, and for each item i the other users who have it, whose embeddings are fixed. One layer:

    n_i = V mean(e_v of the other users v of item i)
    h_i = A [n_i ; W q_i]
    h_u = B [sum_i softmax_i(<U e_u, h_i> / sqrt(d)) h_i ; U e_u]
    score of item j: <h_u, W q_j>

Shared: item table Q, the maps A, B, U, V, W, and the neighbours N. Private: e_u. A round on a
device: the gradient of the binary cross-entropy of all its samples; a step of Adam on e_u; the
device uploads the gradients of Q's touched rows and of the maps. Server: one step of Adam along
their mean.

Neighbours as sums, in place of the paper's third party. In the paper devices send e_u with item ids
under one common key to a third party, which matches ids and returns the neighbours' embeddings: it
learns the whole graph up to the names of items, which their popularity gives away, and embeddings
go to strangers. Here a device uploads, at its items, the row [e_u, 1] less what it uploaded there
before; the server adds up to N [m, d + 1] and sends N to all; a device takes its own share out and
divides by the count. V is linear, so values and gradients are those of literal lists of neighbours
of any length. Only positives of the training are matched.

What an upload reveals: rows of N are at the client's items alone and hold e_u, so a raw upload
names both. In sums, or with noise added to the sum, it does not; then one bound holds for the whole
upload, and a user's share of N is part of what is protected. The server sends no row of N of an
item with fewer than ``fewest`` users. The paper's pseudo items and Laplace noise per
coordinate, which compose over millions of coordinates and all rounds, are left out.

Deviations from the paper and its code: binary cross-entropy on sampled negatives in place of
squared errors of ratings; Adam in place of SGD; the mean in place of graph attention over
neighbours; dropout of items of the history. The authors' code cannot learn: labels are divided by
100 and rounded to 0, and the mask of its attention is inverted; PFedRec's table has it at chance.
Under clipping or for a folded-in user, the share that a device takes out is not exactly what
arrived; of an item with k other users this changes the mean by a part in k.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat

from hushrec.aggregation import ClientRows, Total, Update
from hushrec.config import Width
from hushrec.data.views import Ragged, TrainView
from hushrec.methods import base, forms
from hushrec.methods.base import Array, Between, Fitted, OneOf, Scores, SearchSpace, Shared
from hushrec.methods.shared.options import Negatives, adam_step, first_moments
from hushrec.private import PerClient, PerClientRows, Private, PrivateFields, rows_at, rows_in
from hushrec.streams import Round, Streams
from hushrec.training import samples as training
from hushrec.training.tensors import Params, Tensor, torch

ROWS, NEIGHBOURS = "items", "neighbours"
"""Q and N, in the shared parameters and in an upload."""
MOMENTS = ("steps", "first", "second")
"""State of Adam: that of the network stays on the server, that of e_u on the device."""


class FedPerGNNConfig(base.MethodConfig):
    """Options of FedPerGNN; a round is one step of Adam."""

    d: Width = 32
    """Width of embeddings and hidden states."""
    negatives: Negatives = 4
    """Negatives per positive, drawn again in every round."""
    lr: PositiveFloat = 0.01
    """Learning rate of the server's Adam."""
    vector_lr: PositiveFloat = 0.03
    """Learning rate of the device's Adam on its embedding."""
    decay: NonNegativeFloat = 0.0
    """Weight decay of both, decoupled."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Share of the history that a step leaves out of the graph."""
    expand_after: Annotated[int, Field(ge=0)] = 0
    """Rounds without neighbours; the paper has two thirds of all."""
    fewest: Annotated[int, Field(ge=1)] = 3
    """Users of an item from which on its row of N is sent to devices. The row of an item with two
    users would show either of them the embedding of the other."""
    init_std: PositiveFloat = 0.1
    """Standard deviation of the initial item rows and user embedding."""


class FedPerGNN(base.Method, base.ExportsUser, base.ItemTables, base.Tunable):
    """A graph layer over a history and its other users, as sums; raw uploads name the items."""

    name = "fedpergnn"
    Config = FedPerGNNConfig
    config: FedPerGNNConfig
    traits = base.Traits(
        unexplained=base.NETWORK,
        training_only=frozenset(MOMENTS),
        reveals=frozenset({"vector", "share"}),
    )
    search: ClassVar[SearchSpace] = {
        "lr": Between(1e-3, 0.03),
        "vector_lr": Between(3e-3, 0.1),
        "dropout": OneOf((0.2, 0.5, 0.8)),
    }

    @property
    def phases(self) -> tuple[base.Phase, ...]:
        """One phase, which says what the server reads from a raw upload."""
        uploads = (
            "gradients of item rows and maps, and its embedding at its items for the sum over "
            "neighbours; the server reads both, unless sums are secure or noise is added"
        )
        (train,) = super().phases
        return (replace(train, uploads=uploads),)

    def _shapes(self) -> dict[str, tuple[int, int]]:
        """Return the maps, which rows are multiplied with: W, V, A, U and B."""
        d = self.config.d
        square = dict.fromkeys(("item", "neighbour", "user"), (d, d))
        return {**square, "join": (2 * d, d), "top": (2 * d, d)}

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw Q from N(0, init_std) and the maps from U(-b, b) (Glorot); N is 0."""
        config = self.config
        items = training.initial_table(config.d, config.init_std, view.n_items, streams)
        generator, maps = streams.generator("init/network"), {}
        for name, shape in self._shapes().items():
            bound = math.sqrt(6 / sum(shape))
            maps[name] = generator.uniform(-bound, bound, shape).astype(np.float32)
        learnt = {ROWS: items, **maps}
        neighbours = np.zeros((view.n_items, config.d + 1), np.float32)
        return {**learnt, NEIGHBOURS: neighbours, **first_moments(_flat(learnt, list(learnt)))}

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep the embedding, its moments, and the own share of N."""
        d = self.config.d
        return {
            "vector": PerClient(training.first_vector(d, self.config.init_std, streams)),
            "share": PerClientRows(view.positives.lengths, d + 1),
            "steps": PerClient(np.zeros(1, np.int64)),
            **{name: PerClient(np.zeros(d)) for name in ("first", "second")},
        }

    # ------------------------------------------------------------ a round

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Take the gradient of all samples; move the embedding, upload gradients and shares."""
        config, names = self.config, list(self._shapes())
        samples = training.draw_device_samples(view, config.negatives, 1, now)
        history = view.positives.union(Ragged.empty(len(view)))
        means, shares = self._others(shared, private, history)
        kept = {name: np.array(private[name]) for name in ("vector", *MOMENTS)}
        maps = {name: torch.from_numpy(shared[name]).requires_grad_() for name in names}
        dense = {n: np.zeros((len(view), *shared[n].shape), np.float32) for n in names}
        touched, rows, losses = [], [], np.zeros(len(view))
        added = -shares
        for c, user in enumerate(view.users.tolist()):
            own = slice(history.indptr[c], history.indptr[c + 1])
            mine = slice(samples.indptr[c], samples.indptr[c + 1])
            coins = now.streams.generator("dropout", now.number, user).random(own.stop - own.start)
            used = np.flatnonzero(coins >= config.dropout) + own.start
            both = np.concatenate([history.values[used], samples.items[mine]])
            items, slots = np.unique(both, return_inverse=True)
            table = torch.from_numpy(shared[ROWS][items]).requires_grad_()
            vector = torch.from_numpy(kept["vector"][c].copy()).requires_grad_()
            at = torch.from_numpy(slots)
            state = self._state(maps, vector, table[at[: len(used)]], means[used])
            logits = table[at[len(used) :]] @ maps["item"] @ state
            labels = torch.from_numpy(samples.labels[mine])
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                logits, labels, reduction="sum"
            ) / max(1, len(labels))
            moving = [vector, table, *maps.values()]
            of_vector, of_table, *gradients = torch.autograd.grad(loss, moving)
            for name, gradient in zip(names, gradients, strict=True):
                dense[name][c] = gradient.numpy()
            touched.append(items.astype(np.int32))
            rows.append(of_table.numpy())
            losses[c] = float(loss.detach())
            before = {name: kept[name][c] for name in MOMENTS}
            rate, decay = config.vector_lr, config.decay
            kept["vector"][c], after = adam_step(
                kept["vector"][c], before, of_vector.numpy(), rate, decay
            )
            for name, array in after.items():
                kept[name][c] = array
            if now.number > config.expand_after:
                added[own] += np.append(kept["vector"][c], np.float32(1))
        if now.number <= config.expand_after:
            added[:] = 0
        indptr = np.cumsum([0, *(len(ids) for ids in touched)], dtype=np.int64)
        sent = ClientRows(
            indptr,
            np.concatenate([np.zeros(0, np.int32), *touched]),
            np.concatenate([np.zeros((0, config.d), np.float32), *rows]),
        )
        at_items = history.indptr, history.values
        uploads = {ROWS: sent, NEIGHBOURS: ClientRows(*at_items, added)}
        share = ClientRows(*at_items, shares + added)
        return Fitted(Update(len(view), uploads, dense), {**kept, "share": share}, losses)

    def _others(
        self, shared: Shared, private: Private, history: Ragged
    ) -> tuple[Array, NDArray[np.float32]]:
        """Return the mean embedding of the other users of each item, and the own share of N."""
        shares, _ = rows_at(rows_in(private, "share"), history)
        rest = shared[NEIGHBOURS][history.values] - shares
        # Less than half a user is rounding, or noise.
        count = rest[:, -1:]
        return np.where(count > 0.5, rest[:, :-1] / np.maximum(count, 0.5), 0), shares

    def _state(self, maps: Params, vector: Tensor, rows: Tensor, means: Array) -> Tensor:
        """Return h_u from the rows of the history and the means of their other users."""
        neighbours = torch.from_numpy(np.ascontiguousarray(means, np.float32))
        hidden = torch.cat([neighbours @ maps["neighbour"], rows @ maps["item"]], 1) @ maps["join"]
        user = vector @ maps["user"]
        weights = torch.softmax(hidden @ user / math.sqrt(len(user)), 0)
        return torch.cat([weights @ hidden, user]) @ maps["top"]

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Take one step of Adam along the mean of the gradients; add the shares to N."""
        config, names = self.config, [ROWS, *self._shapes()]
        summed = {ROWS: total.table(ROWS, *shared[ROWS].shape), **total.dense}
        mean = _flat(summed, names) / total.clients
        moved, moments = adam_step(_flat(shared, names), shared, mean, config.lr, config.decay)
        ends = np.cumsum([shared[name].size for name in names])[:-1]
        parts = zip(names, np.split(moved, ends), strict=True)
        learnt = {name: part.reshape(shared[name].shape) for name, part in parts}
        shares = total.table(NEIGHBOURS, *shared[NEIGHBOURS].shape)
        neighbours = (shared[NEIGHBOURS] + shares).astype(np.float32)
        return {**learnt, NEIGHBOURS: neighbours, **moments}

    def download(self, shared: Shared) -> Shared:
        """Send the network, and N of items with enough users; moments stay on the server."""
        neighbours = shared[NEIGHBOURS]
        enough = neighbours[:, -1:] > self.config.fewest - 0.5  # noise and rounding aside
        sent = {name: array for name, array in shared.items() if name not in MOMENTS}
        return {**sent, NEIGHBOURS: np.where(enough, neighbours, np.float32(0))}

    serving = download

    # ------------------------------------------------------------ scoring

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Score all items with the state of each client's graph."""
        states, rows = self._states(shared, private, history), self._rows(shared)
        scores = [(rows @ torch.from_numpy(state)).numpy() for state in states]
        return np.stack([np.zeros(history.n_items, np.float32), *scores])[1:]

    def _states(self, shared: Shared, private: Private, history: TrainView) -> Array:
        """Return h_u of every client."""
        items = history.positives.union(Ragged.empty(len(history)))
        means, _ = self._others(self.download(shared), private, items)
        maps = {name: torch.from_numpy(shared[name]) for name in self._shapes()}
        vectors = np.asarray(private["vector"])
        states = np.zeros((len(history), self.config.d), np.float32)
        for c in range(len(history)):
            own = slice(items.indptr[c], items.indptr[c + 1])
            rows = torch.from_numpy(shared[ROWS][items.values[own]])
            state = self._state(maps, torch.from_numpy(vectors[c].copy()), rows, means[own])
            states[c] = state.numpy()
        return states

    def _rows(self, shared: Shared) -> Tensor:
        return torch.from_numpy(shared[ROWS]) @ torch.from_numpy(shared["item"])

    def item_tables(self, shared: Shared, private: Private) -> dict[str, Array]:
        """Return the rows W q_j."""
        return {"shared": self._rows(shared).numpy()}

    def user_form(self, shared: Shared, private: Private, history: TrainView) -> forms.ItemNetworks:
        """Return the rows W q_j with h_u of the history at export."""
        (state,) = self._states(shared, private, history)
        rows = self._rows(shared).numpy()
        return forms.ItemNetworks([forms.RowNetwork.of(rows, {"vector": state})])


def _flat(arrays: Any, names: list[str]) -> Array:
    return np.concatenate([np.asarray(arrays[name]).ravel() for name in names])
