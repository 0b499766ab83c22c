"""The items as one user sees them, on a map (PFedRec, figure 2; FedRAP, figure 5).

Whether the items that a user likes lie together is said by a number too: of the nearest ten of each
of them, the share that the user likes as well. It is taken in the item vectors' own space, so it
owes nothing to the map.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.analyse.tsne import squared_distances, tsne
from hushrec.errors import ConfigError, RunError
from hushrec.methods.capabilities import ItemTables
from hushrec.run import Run

NEAREST = 10
LIKED = 20
"""Training items that the shown user has at least."""
GRID = 1000
"""Places on a map are whole numbers from 0 to this."""


def item_map(run: Run) -> dict[str, Any]:
    """Map the item tables that one user, drawn by the seed, scores with.

    By the name of a table: ``places`` of all items, and how much of what is near a liked item is
    liked, ``together``. Beside them the user, the items ``liked`` in training and ``held_out``, and
    what ``together`` is by ``chance``.
    """
    if not isinstance(run.method, ItemTables):
        raise ConfigError(f"{run.method.name} has no item vectors to show on a map")
    user, train = shown_user(run), run.split.train
    liked = np.unique(train.positives[user])
    found: dict[str, Any] = {
        "user": str(run.data.users[user]),
        "liked": liked.tolist(),
        "held_out": np.unique(run.split.test[user]).tolist(),
        "chance": (len(liked) - 1) / (train.n_items - 1),
    }
    tables = run.method.item_tables(run.shared, run.store.read(np.array([user])))
    for name, table in tables.items():
        together = liked_nearby(table, liked)
        places = on_grid(tsne(table, seed=run.experiment.seed)).tolist()
        found[name] = {"places": places, "together": together}
    return found


def shown_user(run: Run) -> int:
    """Draw a user that trains and has enough items."""
    able = run.split.training_users
    able = able[run.split.train.positives.lengths[able] >= LIKED]
    if not len(able):
        raise RunError(f"nobody has {LIKED} training items to show on a map")
    return int(np.random.default_rng(run.experiment.seed).choice(able))


def liked_nearby(table: NDArray[np.floating], liked: NDArray[np.integer]) -> float:
    """Return the share of liked items among the nearest of each liked one."""
    distances = squared_distances(np.asarray(table, np.float64))
    np.fill_diagonal(distances, np.inf)
    nearest = np.argsort(distances[liked], axis=1, kind="stable")[:, :NEAREST]
    return float(np.isin(nearest, liked).mean())


def on_grid(places: NDArray[np.float64]) -> NDArray[np.int64]:
    """Put a map onto whole numbers; its shape stays."""
    low, high = places.min(axis=0), places.max(axis=0)
    size = max(high - low) or 1.0
    centred = (places - (low + high) / 2) / size
    return np.asarray(np.rint(GRID * (centred + 0.5)), np.int64)
