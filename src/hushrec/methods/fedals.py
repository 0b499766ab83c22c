"""FedALS: implicit alternating least squares, exactly, from sums over clients.

The loss is that of iALS (Hu, Koren, Volinsky 2008, in the form of Rendle et al. 2022),

    sum over touched (u, i) of (1 - <p_u, q_i>)²  +  unseen · sum over all (u, i) of <p_u, q_i>²
    +  sum over users of ridge_u |p_u|²  +  sum over items of ridge_i |q_i|²,

with ridge_u = ridge · (items of u + unseen · m)^frequency, and ridge_i alike with users. A device
solves for its own p_u from the received items; no vector is kept, it follows from the history. The
items need p_u only through sums: for each item over its users of p pᵀ, p and 1, and over everybody
of p pᵀ. A round is therefore one exact step of the centralised algorithm for users and for items.

What one client uploads determines its p_u: that is why these sums are meant to be added up by
secure aggregation, or to carry noise, before anybody reads them.

`PrivateFedALS` replaces it where noise is added to sums, under user-level differential privacy.
iALS needs a d × d matrix for every item, and noise on all of them leaves nothing. With equal
weights for touched and untouched pairs these matrices are one and the same, and an alternating step
is

    p_u = sum over the items i of u of q_i,      q_i = sum over the users u of i of p_u,

up to a change of basis that `orthonormal` undoes: the power iteration for the leading factors of
the interaction matrix, which bears noise well (Hardt and Price 2014, "The Noisy Power Method";
private ALS with per-item matrices is Chien et al. 2021). So only d numbers for every item travel:

1. A first round finds the head (`shared.denoising`) with a small share of the budget, ``counting``.
2. In every later round a device scales p_u to norm 1 and uploads p_u / sqrt(n) for each of its n
   items of the head, which has norm 1. Rounds share the rest of the budget equally.

On the device the g-th last item weighs g^-recency in p_u when it scores, which costs nothing.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat

from hushrec.aggregation import ClientRows, Total, Update
from hushrec.config import Count, Share, Width
from hushrec.data.views import Ragged, TrainView
from hushrec.io import require_memory
from hushrec.kernels.jit import njit
from hushrec.kernels.ragged import recent_vectors
from hushrec.methods import base, forms
from hushrec.methods.base import Array, Fitted, Method, MethodConfig, Phase, Reason, Scores, Shared
from hushrec.methods.baselines import distinct_items
from hushrec.methods.shared.denoising import find_head, head_phase, only
from hushrec.methods.statistics.pair_weights import (
    SIMILAR,
    gram,
    reasons_from,
    solve_users,
    solved_reasons,
)
from hushrec.private import Private
from hushrec.streams import Round, Streams
from hushrec.training.samples import score_inner_product


class PrivateFedALSConfig(MethodConfig):
    """Options of FedALS under noise."""

    d: Width = 16
    """Width of a user and of an item vector."""
    passes: Count = 3
    """Alternating steps; there is one round more, the first."""
    recency: NonNegativeFloat = 0.9
    """On the device: the g-th last item weighs g^-recency; 0 ignores the order."""
    recent: Count = 100
    """On the device: how many of the last items are scored from."""
    counting: Annotated[float, Field(gt=0, lt=1)] = 1 / 16
    """Share of the budget that the first round spends, to find the head."""
    price: PositiveFloat = 2.0
    """What an item in the head costs; a lower price makes the head larger (`shared.denoising`)."""


class PrivateFedALS(Method, base.Explains, base.Exports):
    """The power iteration over devices, on the items that are seen through the noise."""

    name = "fedals"
    Config = PrivateFedALSConfig
    config: PrivateFedALSConfig
    upload_norm = 1.0

    @property
    def phases(self) -> tuple[Phase, ...]:
        """One round for counts, with little of the budget; the steps share the rest."""
        counting, passes, download = self.config.counting, self.config.passes, self.download
        uploads = "its vector for each of its items in the head, scaled to norm 1"
        fit, learn, left = self._fit_vectors, self._learn_items, 1 - counting
        steps = Phase("power iteration", passes, uploads, fit, learn, download, budget=left)
        return head_phase(counting, self._find_head, download), steps

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the item vectors; there is no head yet."""
        drawn = streams.generator("init/items").standard_normal((view.n_items, self.config.d))
        return {
            "items": drawn,
            "head": np.zeros(view.n_items, np.bool_),
            "shares": np.zeros(view.n_items, np.float32),
        }

    def download(self, shared: Shared) -> Shared:
        """Send the head and its vectors."""
        return {"items": shared["items"], "head": shared["head"]}

    serving = download

    def _fit_vectors(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        items = distinct_items(only(view.positives, shared["head"]))
        ones = np.ones(max(1, int(items.lengths.max(initial=1))))
        vectors = recent_vectors(items.indptr, items.values, shared["items"], ones)
        lengths = np.sqrt((vectors**2).sum(axis=1)) * np.sqrt(items.lengths)
        each = vectors / np.maximum(lengths, 1e-30)[:, None]
        rows = np.repeat(each, items.lengths, axis=0).astype(np.float32)
        uploads = ClientRows(items.indptr, items.values, rows)
        return Fitted(Update(len(view), rows={"items": uploads}), {})

    def _find_head(self, shared: Shared, total: Total, number: int) -> Shared:
        """Find the head from the counts, by the noise of a step."""
        spent, left, *_ = self.budget_shares
        noise_std, n_items = total.noise_std * np.sqrt(spent / left), len(shared["items"])
        found = find_head(total, n_items, noise_std, self.config.price, n_items)
        return {**found, "items": orthonormal(shared["items"], found["head"])}

    def _learn_items(self, shared: Shared, total: Total, number: int) -> Shared:
        """Take a step; vectors outside the head are 0."""
        new = total.table("items", *shared["items"].shape)
        return {**shared, "items": orthonormal(new, shared["head"])}

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Score by the factors of the last items of the head."""
        past = only(history.positives, shared["head"])
        vectors = recent_vectors(past.indptr, past.values, shared["items"], self._by_lag)
        return score_inner_product(shared["items"], vectors)

    @property
    def _by_lag(self) -> Array:
        """Weights of the last items, the very last first."""
        return np.arange(1.0, self.config.recent + 1) ** -self.config.recency

    def contributions(
        self, shared: Shared, private: Private, history: TrainView, items: NDArray[np.int32]
    ) -> list[list[Reason]]:
        """Find the item of the history that adds most: a score is a sum over the last items."""
        past, table, by_lag = only(history.positives, shared["head"]), shared["items"], self._by_lag
        out = []
        for client, listed in enumerate(items):
            mine = past[client][::-1][: len(by_lag)]
            influence = by_lag[: len(mine), None] * (table[mine] @ table[listed].T)
            found = reasons_from(SIMILAR, mine, influence.astype(np.float32))
            out.append([r if i >= 0 else Reason() for r, i in zip(found, listed, strict=True)])
        return out

    def device_form(self, shared: Shared, view: TrainView) -> forms.ItemFactors:
        """Return the item vectors and how the last items of the head are summed."""
        recency, recent = self.config.recency, self.config.recent
        return forms.ItemFactors(
            shared["items"], known=shared["head"], recency=recency, recent=recent
        )


def orthonormal(items: Array, head: NDArray[np.bool_]) -> Array:
    """Return an orthonormal basis of the head's columns, 0 outside the head."""
    out = np.zeros_like(items)
    basis = np.linalg.qr(items[head])[0]
    out[np.flatnonzero(head), : basis.shape[1]] = basis
    return out


SOLVED_AT_ONCE = 4096
"""Items whose systems are in memory together."""


class FedALSConfig(MethodConfig):
    """Options of FedALS."""

    d: Width = 32
    """Width of a user and of an item vector."""
    unseen: PositiveFloat = 0.3
    """Weight of a pair that nobody touched, against 1 for a touched one."""
    ridge: PositiveFloat = 0.003
    """Regularisation; see the loss."""
    frequency: Share = 1.0
    """How far regularisation grows with the number of interactions: 0 not at all, 1 in step."""
    init_std: PositiveFloat = 0.1
    """Standard deviation of the item vectors before training, over sqrt(d)."""


class FedALS(Method, base.Explains, base.Exports, base.Tunable):
    """Implicit ALS: users solve on their devices, items from summed statistics."""

    name = "fedals"
    Config = FedALSConfig
    config: FedALSConfig
    traits = base.Traits(rounds=10)
    under_noise = PrivateFedALS

    search: ClassVar[base.SearchSpace] = {
        "d": base.OneOf((16, 32, 64)),
        "unseen": base.Between(0.01, 1.0),
        "ridge": base.Between(3e-4, 0.1),
        "frequency": base.OneOf((0.0, 0.5, 1.0)),
    }

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the item vectors."""
        d = self.config.d
        width = d * (d + 1) // 2 + d + 1
        require_memory(4 * 8 * view.n_items * width, f"item statistics of d={d}", "a smaller d")
        drawn = streams.generator("init/items").standard_normal((view.n_items, d))
        return {"items": drawn * (self.config.init_std / np.sqrt(d))}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Solve for the clients' vectors; upload each as statistics of the items it touched."""
        touched = distinct_items(view.positives)
        vectors = self.vectors(shared["items"], touched)
        rows, squares = statistics(vectors, touched.indptr)
        uploads = ClientRows(touched.indptr, touched.values, rows)
        return Fitted(Update(len(view), rows={"items": uploads}, dense={"users": squares}), {})

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Solve for every item; one that nobody touched gets the vector 0."""
        config, d = self.config, self.config.d
        solved = np.zeros_like(shared["items"])
        if "items" in total.rows:
            ids, summed = total.rows["items"]
            everybody = config.unseen * unpacked(total.dense["users"][None], d)[0]
            for start in range(0, len(ids), SOLVED_AT_ONCE):
                part = summed[start : start + SOLVED_AT_ONCE]
                weight = np.maximum(part[:, -1], 0.0) + config.unseen * total.clients
                ridge = config.ridge * weight**config.frequency
                matrix = unpacked(part, d) + everybody + ridge[:, None, None] * np.eye(d)
                right = part[:, -1 - d : -1, None]
                solved[ids[start : start + len(part)]] = np.linalg.solve(matrix, right)[:, :, 0]
        return {"items": solved}

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Solve for the client's vector from its history and score with it."""
        vectors = self.vectors(shared["items"], distinct_items(history.positives))
        return score_inner_product(shared["items"], vectors)

    def contributions(
        self, shared: Shared, private: Private, history: TrainView, items: NDArray[np.int32]
    ) -> list[list[Reason]]:
        """Find the item of the history that adds most to the score."""
        table, touched = shared["items"], distinct_items(history.positives)
        everything, ridge = self._system(table, touched)
        return solved_reasons(table, everything, touched, items, ridge)

    def device_form(self, shared: Shared, view: TrainView) -> forms.ItemFactors:
        """Return the item vectors and the system of `vectors`."""
        config = self.config
        return forms.ItemFactors(
            shared["items"], ridge=config.ridge, unseen=config.unseen, frequency=config.frequency
        )

    def vectors(self, items: Array, touched: Ragged) -> Array:
        """Solve for the vectors of clients that touched these items."""
        everything, ridge = self._system(items, touched)
        return np.asarray(solve_users(items, everything, touched.indptr, touched.values, ridge))

    def _system(self, items: Array, touched: Ragged) -> tuple[Array, Array]:
        """Return the part of the clients' matrices that untouched pairs make, and the ridge."""
        config = self.config
        weight = touched.lengths + config.unseen * len(items)
        return config.unseen * gram(items), config.ridge * weight**config.frequency


def unpacked(rows: Array, d: int) -> Array:
    """Return the symmetric matrices whose upper triangles the rows begin with."""
    out = np.empty((len(rows), d, d))
    upper = np.triu_indices(d)
    out[:, upper[0], upper[1]] = rows[:, : len(upper[0])]
    out[:, upper[1], upper[0]] = rows[:, : len(upper[0])]
    return out


@njit(cache=True, nogil=True)
def statistics(vectors: Array, indptr: Array) -> tuple[Array, Array]:
    """Return for every touched item the upper triangle of p pᵀ, p and 1; and p pᵀ per client."""
    clients, d = vectors.shape
    triangle = d * (d + 1) // 2
    rows = np.empty((indptr[-1], triangle + d + 1), np.float32)
    squares = np.empty((clients, triangle), np.float32)
    for c in range(clients):
        n = 0
        for a in range(d):
            for b in range(a, d):
                squares[c, n] = vectors[c, a] * vectors[c, b]
                n += 1
        for r in range(indptr[c], indptr[c + 1]):
            rows[r, :triangle] = squares[c]
            rows[r, triangle : triangle + d] = vectors[c]
            rows[r, triangle + d] = 1.0
    return rows, squares
