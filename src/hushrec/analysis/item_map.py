"""Maps of the item tables that one user scores with (PFedRec, figure 2; FedRAP, figure 5).

A map is made by exact t-SNE (van der Maaten and Hinton, 2008). Its time grows with the square of
the number of items, about ten seconds for 1,700. Only the initial positions are random, so a seed
reproduces the map.

`liked_nearby` measures whether a user's liked items form a cluster: the share of liked items among
the ten nearest neighbours of each liked item. It uses the item vectors, not the map.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from hushrec.api import Run
from hushrec.errors import ConfigError, RunError
from hushrec.kernels.jit import njit
from hushrec.methods.base import ItemTables

Matrix = NDArray[np.float64]

STEPS, EARLY = 500, 150
"""Gradient steps, and how many of them use early exaggeration."""
EXAGGERATION = 12.0


def tsne(points: NDArray[np.floating], *, perplexity: float = 30.0, seed: int = 0) -> Matrix:
    """Return the t-SNE embedding of the points in the plane, [points, 2].

    ``perplexity`` is roughly the number of neighbours of a point; few points bound it.
    """
    count = len(points)
    if count < 4:
        raise ValueError(f"a map needs four points, not {count}")
    distances = cdist(points, points, "sqeuclidean")
    near = affinities(distances, math.log(min(perplexity, (count - 1) / 3)))
    near = (near + near.T) / (2 * count)
    positions = np.random.default_rng(seed).normal(0, 1e-4, (count, 2))
    rate = max(count / EXAGGERATION / 4, 50.0)
    velocity, gains = np.zeros_like(positions), np.ones_like(positions)
    for step in range(STEPS):
        early = step < EARLY
        slope = _slope(positions, near, EXAGGERATION if early else 1.0)
        gains = np.where(slope * velocity < 0, gains + 0.2, np.maximum(gains * 0.8, 0.01))
        velocity = (0.5 if early else 0.8) * velocity - rate * gains * slope
        positions = positions + velocity
        positions -= positions.mean(axis=0)
    return positions


@njit(cache=True, nogil=True)
def affinities(distances: Matrix, entropy: float) -> Matrix:
    """Return p(j | i), each row with the bandwidth that gives it this entropy (equation 1)."""
    count = len(distances)
    out = np.zeros((count, count))
    for i in range(count):
        nearest = np.inf
        for j in range(count):
            if j != i:
                nearest = min(nearest, distances[i, j])
        low, high, precision = 0.0, np.inf, 1.0
        for _ in range(64):
            total, weighted = 0.0, 0.0
            for j in range(count):
                if j != i:
                    apart = distances[i, j] - nearest  # the largest weight is 1: none underflows
                    out[i, j] = math.exp(-apart * precision)
                    total += out[i, j]
                    weighted += apart * out[i, j]
            reached = math.log(total) + precision * weighted / total
            if abs(reached - entropy) < 1e-6:
                break
            if reached > entropy:
                low = precision
                precision = precision * 2 if high == np.inf else (low + high) / 2
            else:
                high = precision
                precision = (low + high) / 2
        out[i] /= total
    return out


@njit(cache=True, nogil=True)
def _slope(positions: Matrix, near: Matrix, exaggeration: float) -> Matrix:
    """Return the gradient of the Kullback-Leibler divergence by the embedding (equation 5)."""
    count = len(positions)
    kernel_sum = 0.0
    pull, push = np.zeros((count, 2)), np.zeros((count, 2))
    for i in range(count):
        for j in range(i):
            dx, dy = positions[i, 0] - positions[j, 0], positions[i, 1] - positions[j, 1]
            kernel = 1 / (1 + dx * dx + dy * dy)
            kernel_sum += 2 * kernel
            attraction, repulsion = near[i, j] * kernel, kernel * kernel
            pull[i, 0] += attraction * dx
            pull[i, 1] += attraction * dy
            pull[j, 0] -= attraction * dx
            pull[j, 1] -= attraction * dy
            push[i, 0] += repulsion * dx
            push[i, 1] += repulsion * dy
            push[j, 0] -= repulsion * dx
            push[j, 1] -= repulsion * dy
    return 4 * (exaggeration * pull - push / kernel_sum)


NEAREST = 10
LIKED = 20
"""Least number of training items of the user whose map is shown."""
GRID = 1000
"""Coordinates on a map are whole numbers from 0 to this."""


def item_map(run: Run) -> dict[str, Any]:
    """Map the item tables that one user, drawn by the seed, scores with.

    By name of a table: ``places``, the coordinates of all items, and ``together``, the result of
    `liked_nearby`. Besides: the user, the items ``liked`` in training and ``held_out``, and
    ``chance``, the value of ``together`` for random vectors.
    """
    if not isinstance(run.model.method, ItemTables):
        raise ConfigError(f"{run.model.method.name} has no item vectors to show on a map")
    user, train, model = shown_user(run), run.split.train, run.model
    liked = np.unique(train.positives[user])
    tables = run.model.method.item_tables(model.shared, model.private.read(np.array([user])))
    maps = {
        name: {
            "places": on_grid(tsne(table, seed=run.experiment.seed)).tolist(),
            "together": liked_nearby(table, liked),
        }
        for name, table in tables.items()
    }
    return {
        "user": str(run.data.users[user]),
        "liked": liked.tolist(),
        "held_out": np.unique(run.split.test[user]).tolist(),
        "chance": (len(liked) - 1) / (train.n_items - 1),
        **maps,
    }


def shown_user(run: Run) -> int:
    """Draw a training user with enough items."""
    eligible = run.split.training_users
    eligible = eligible[run.split.train.positives.lengths[eligible] >= LIKED]
    if not len(eligible):
        raise RunError(f"no user has {LIKED} training items to show on a map")
    return int(np.random.default_rng(run.experiment.seed).choice(eligible))


def liked_nearby(table: NDArray[np.floating], liked: NDArray[np.integer]) -> float:
    """Return the share of liked items among the nearest neighbours of each liked item."""
    distances = cdist(table, table, "sqeuclidean")
    np.fill_diagonal(distances, np.inf)
    nearest = np.argsort(distances[liked], axis=1, kind="stable")[:, :NEAREST]
    return float(np.isin(nearest, liked).mean())


def on_grid(positions: NDArray[np.float64]) -> NDArray[np.int64]:
    """Scale a map to whole numbers; its proportions stay."""
    low, high = positions.min(axis=0), positions.max(axis=0)
    size = max(high - low) or 1.0
    centred = (positions - (low + high) / 2) / size
    return np.asarray(np.rint(GRID * (centred + 0.5)), np.int64)
