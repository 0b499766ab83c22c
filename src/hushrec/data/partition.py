"""Partitions of users: into silos of similar taste, and over the nodes of a federation.

A silo is a client with several users. Each silo draws a mix of tastes q ~ Dirichlet(alpha * p),
where p is the mix of the whole population, and is filled with users by it, one at a time and silo
after silo, so that all silos have one size (Hsu, Qi and Brown 2019). A small alpha makes silos of
one taste, a large alpha makes silos similar. A user's taste is the category that is most
overrepresented in its training items: a genre or, where items have no genres, a popularity group.
Held-out items are not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from scipy.special import rel_entr

from hushrec.config import Settings
from hushrec.data.interactions import MultiCategorical
from hushrec.data.views import TrainView
from hushrec.errors import ConfigError
from hushrec.streams import Streams

ALPHAS = {"low": 100.0, "medium": 1.0, "high": 0.1}
"""Concentration of the Dirichlet distribution for each degree of difference."""
POPULARITY_GROUPS = 10


class SilosConfig(Settings):
    """Which users share a client."""

    kind: Literal["none", "dirichlet"] = "none"
    """Every user is a client; or silos of users with similar taste."""
    count: Annotated[int, Field(ge=1)] = 100
    """Number of silos."""
    degree: Literal["low", "medium", "high"] = "medium"
    """How much silos differ in taste: alpha 100, 1 or 0.1."""
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Concentration of the mix of tastes, in place of `degree`."""


@dataclass(frozen=True)
class Tastes:
    """How many training interactions every user has in every category."""

    counts: NDArray[np.float64]
    """[users, categories]; an item in several categories counts for a part in each."""
    names: tuple[str, ...]
    over: str
    """What the categories are."""


def hold(view: TrainView, config: SilosConfig, streams: Streams) -> NDArray[np.int32]:
    """Return the silo of every user."""
    if config.count > len(view):
        raise ConfigError(f"silos.count = {config.count} exceeds the {len(view)} users")
    generator = streams.generator("silos")
    counts = tastes(view).counts
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1e-12)
    spread = shares.std(0)
    leading = ((shares - shares.mean(0)) / np.where(spread > 0, spread, np.inf)).argmax(1)
    n_categories = int(leading.max()) + 1
    share = np.bincount(leading, minlength=n_categories) / len(leading)
    alpha = config.alpha or ALPHAS[config.degree]
    # A Dirichlet draw from gammas; a tiny alpha may leave none of them above zero.
    mixes = generator.gamma(alpha * share, size=(config.count, n_categories)) + 1e-300
    waiting = [generator.permutation(np.flatnonzero(leading == c)) for c in range(n_categories)]
    left = np.array([len(users) for users in waiting])
    holder = np.empty(len(view), np.int32)
    for turn in range(len(view)):
        silo = turn % config.count
        # A taste without remaining users is replaced by the others of the silo.
        weights = np.cumsum(np.where(left > 0, mixes[silo], 0.0))
        taste = int(np.searchsorted(weights, generator.random() * weights[-1], side="right"))
        left[taste] -= 1
        holder[waiting[taste][left[taste]]] = silo
    return holder


def tastes(view: TrainView) -> Tastes:
    """Count every user's training interactions by genre, or by how popular the items are."""
    positives = view.positives
    user = np.repeat(np.arange(len(view)), positives.lengths)
    for name, column in view.item_features.items():
        if isinstance(column, MultiCategorical):
            flags = column.flags[positives.values].astype(np.float64)
            flags /= np.maximum(flags.sum(1, keepdims=True), 1)
            counts = np.zeros((len(view), flags.shape[1]))
            np.add.at(counts, user, flags)
            return Tastes(counts, tuple(column.names.tolist()), name)
    # Groups of items with about as many interactions each, the most popular first.
    popularity = np.bincount(positives.values, minlength=view.n_items)
    order = np.argsort(-popularity, kind="stable")
    before = np.cumsum(popularity[order]) - popularity[order]
    group = np.empty(view.n_items, np.int64)
    group[order] = before * POPULARITY_GROUPS // max(1, len(positives.values))
    counts = np.zeros((len(view), POPULARITY_GROUPS))
    np.add.at(counts, (user, np.minimum(group, POPULARITY_GROUPS - 1)[positives.values]), 1)
    names = tuple(f"tenth {k + 1}" for k in range(POPULARITY_GROUPS))
    return Tastes(counts, names, "popularity of items")


def mixes_of(found: Tastes, holders: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return the distribution over categories of each silo's interactions."""
    counts = np.zeros((int(holders.max()) + 1, found.counts.shape[1]))
    np.add.at(counts, holders, found.counts)
    return np.asarray(counts / np.maximum(counts.sum(1, keepdims=True), 1e-12))


def divergences(found: Tastes, holders: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return the Jensen-Shannon divergence of each silo from the population, in bits."""
    mixes = mixes_of(found, holders)
    overall = found.counts.sum(0) / max(found.counts.sum(), 1e-12)
    middle = (mixes + overall) / 2
    nats = (rel_entr(mixes, middle) + rel_entr(overall, middle)).sum(axis=1) / 2
    return np.asarray(nats / np.log(2))


def facts(view: TrainView, holders: NDArray[np.int32]) -> dict[str, Any]:
    """Return the sizes of the silos and how much they differ, for summary.json."""
    found = tastes(view)
    apart, users = divergences(found, holders), np.bincount(holders)
    rows = np.bincount(holders, view.positives.lengths)
    return {
        "count": len(users),
        "users": {"min": int(users.min()), "max": int(users.max())},
        "train_rows": {"min": int(rows.min()), "max": int(rows.max())},
        "divergence": {
            "measure": f"Jensen-Shannon divergence from everybody in bits, over {found.over}",
            "mean": float(apart.mean()),
            "max": float(apart.max()),
        },
    }


Deal = Literal["random", "in-order"]


def deal_users(
    count: int, nodes: int, how: Deal, seed: int, holders: NDArray[np.int32] | None = None
) -> NDArray[np.int64]:
    """Return the node of each user; nodes get as many as each other, or one more.

    ``holders`` is the silo of each user where silos are dealt out, whole ones.
    """
    parts = count if holders is None else int(holders.max()) + 1
    if nodes > parts:
        what = "users" if holders is None else "silos"
        raise ConfigError(f"{parts} {what} are too few for {nodes} nodes: use fewer nodes")
    order = np.arange(parts)
    if how == "random":
        order = Streams(seed).generator("federation/deal").permutation(parts)
    node = np.empty(parts, np.int64)
    for number, dealt in enumerate(np.array_split(order, nodes)):
        node[dealt] = number
    return node if holders is None else node[holders]
