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
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec.aggregate import ClientRows, Total, Update
from hushrec.clients import Ragged, TrainView
from hushrec.compiled import njit
from hushrec.memory import require_memory
from hushrec.methods.base import Fitted, Method, MethodConfig, Private, Shared, Traits
from hushrec.methods.capabilities import Between, OneOf, SearchSpace, Tunable
from hushrec.methods.popularity import distinct_items
from hushrec.methods.private_als import PrivateFedALS
from hushrec.rng import Round, Streams
from hushrec.settings import Width
from hushrec.training.inner_product import score_inner_product

Array = NDArray[Any]
SOLVED_AT_ONCE = 4096
"""Items whose systems are in memory together."""


class FedALSConfig(MethodConfig):
    """Options of FedALS."""

    d: Width = 32
    """Width of a user and of an item vector."""
    unseen: Annotated[float, Field(gt=0)] = 0.3
    """Weight of a pair that nobody touched, against 1 for a touched one."""
    ridge: Annotated[float, Field(gt=0)] = 0.003
    """Regularisation; see the loss."""
    frequency: Annotated[float, Field(ge=0, le=1)] = 1.0
    """How far regularisation grows with the number of interactions: 0 not at all, 1 in step."""
    init_std: Annotated[float, Field(gt=0)] = 0.1
    """Standard deviation of the item vectors before training, over sqrt(d)."""


class FedALS(Method, Tunable):
    """Implicit ALS: users solve on their devices, items from summed statistics."""

    name = "fedals"
    Config = FedALSConfig
    config: FedALSConfig
    traits = Traits(rounds=10)
    under_noise = PrivateFedALS

    @property
    def search(self) -> SearchSpace:
        """How wide vectors are, what unseen pairs weigh, and how they are held small."""
        return {
            "d": OneOf((16, 32, 64)),
            "unseen": Between(0.01, 1.0),
            "ridge": Between(3e-4, 0.1),
            "frequency": OneOf((0.0, 0.5, 1.0)),
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

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Solve for the client's vector from its history and score with it."""
        vectors = self.vectors(shared["items"], distinct_items(history.positives))
        return score_inner_product(shared["items"], vectors)

    def vectors(self, items: Array, touched: Ragged) -> Array:
        """Solve for the vectors of clients that touched these items."""
        config = self.config
        everything = config.unseen * gram(items)
        weight = touched.lengths + config.unseen * len(items)
        ridge = config.ridge * weight**config.frequency
        return np.asarray(solve_users(items, everything, touched.indptr, touched.values, ridge))


def unpacked(rows: Array, d: int) -> Array:
    """Return the symmetric matrices whose upper triangles the rows begin with."""
    out = np.empty((len(rows), d, d))
    upper = np.triu_indices(d)
    out[:, upper[0], upper[1]] = rows[:, : len(upper[0])]
    out[:, upper[1], upper[0]] = rows[:, : len(upper[0])]
    return out


@njit(cache=True, nogil=True)
def gram(items: Array) -> Array:
    """Return the sum of q qᵀ over the items; in a fixed order, unlike a matrix product."""
    d = items.shape[1]
    out = np.zeros((d, d))
    for i in range(len(items)):
        for a in range(d):
            for b in range(d):
                out[a, b] += items[i, a] * items[i, b]
    return out


@njit(cache=True, nogil=True)
def solve_users(
    items: Array, everything: Array, indptr: Array, touched: Array, ridge: Array
) -> Array:
    """Return each client's vector, by Cholesky, whatever the other clients are."""
    d = items.shape[1]
    out, column = np.zeros((len(indptr) - 1, d)), np.empty(d)
    for c in range(len(indptr) - 1):
        matrix, x = everything.copy(), out[c]
        for p in range(indptr[c], indptr[c + 1]):
            row = items[touched[p]]
            for a in range(d):
                x[a] += row[a]
                for b in range(a + 1):
                    matrix[a, b] += row[a] * row[b]
        for a in range(d):
            matrix[a, a] += ridge[c]
        for k in range(d):
            matrix[k, k] = np.sqrt(matrix[k, k])
            for a in range(k + 1, d):
                matrix[a, k] /= matrix[k, k]
                column[a] = matrix[a, k]
            for a in range(k + 1, d):
                for b in range(k + 1, a + 1):
                    matrix[a, b] -= column[a] * column[b]
        for a in range(d):
            for k in range(a):
                x[a] -= matrix[a, k] * x[k]
            x[a] /= matrix[a, a]
        for a in range(d - 1, -1, -1):
            for k in range(a + 1, d):
                x[a] -= matrix[k, a] * x[k]
            x[a] /= matrix[a, a]
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
