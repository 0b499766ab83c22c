"""One user of a finished run: what they had, what they are recommended, and why.

The list is the one that the user was tested with, so a held-out item in it is a hit. Why is asked
twice: whose voice spoke for an item, of methods that mix several (`Explains`), and which item of
the history speaks for it. The latter is tried out, one item of the history left out at a time;
where scores do not read the history, it is the nearest one in the item table that the user scores
with (`ItemTables`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hushrec.analysis.run import table_scorers
from hushrec.api import Run
from hushrec.data.views import Ragged, TrainView
from hushrec.errors import ConfigError
from hushrec.kernels.top_k import top_k
from hushrec.methods.base import ItemTables, OwnTable
from hushrec.methods.baselines import distinct_items
from hushrec.serving.model import Scorer

LEFT_OUT = 30
"""Latest items of a history that are tried out."""


@dataclass(frozen=True)
class Listed:
    """One line of a list."""

    title: str
    score: float
    held_out: bool
    """Whether it is what the user was tested with."""
    voice: str = ""
    because: str = ""
    """Title of the item of the history that speaks for it most."""


@dataclass(frozen=True)
class HeldOut:
    """An item that the user was tested with."""

    title: str
    place: int
    candidates: int


@dataclass(frozen=True)
class OneUser:
    """Everything that is shown of a user."""

    user: str
    history: list[str]
    """Titles, latest first."""
    held_out: list[HeldOut]
    lists: dict[str, list[Listed]]
    """The run's own list first; others beside it, the last one popularity."""
    asked: str
    """How it was found out what speaks for an item; empty where it cannot be."""


def one_user(run: Run, user: str, count: int = 10) -> OneUser:
    """Return what a user of the run had and gets."""
    data, split, model = run.split.data, run.split, run.model
    if user not in model.data.user_index:
        raise ConfigError(f"user '{user}' is unknown to this run")
    number = model.data.user_index[user]
    view = split.history("test").take(np.array([number]))
    aim = set(split.test[number].tolist())

    def listed(scores: NDArray[np.float32]) -> NDArray[np.int32]:
        seen = view.positives
        found = top_k(scores, seen.indptr, seen.values, min(count, data.n_items))[0]
        return found[:, found[0] >= 0]

    def lines(scores: NDArray[np.float32]) -> list[Listed]:
        items = listed(scores)[0].tolist()
        return [Listed(data.title(i), float(scores[0, i]), i in aim) for i in items]

    scores = _scores(run, number, view)
    best = listed(scores)
    own = lines(scores)
    experts = model.experts(view, best)[0]
    own = [replace(line, voice=expert) for line, expert in zip(own, experts, strict=True)]
    because, asked = _because(run, number, view, scores, best[0])
    if because is not None:
        past = view.positives[0][because].tolist()
        own = [replace(a, because=data.title(b)) for a, b in zip(own, past, strict=True)]
    lists = {run.experiment.method: own}
    if isinstance(model.method, OwnTable) and model.method.own_table:
        _, shared, lent = table_scorers(run).values()
        lists["with the server’s table"] = lines(_scores(run, number, view, shared))
        lists["with another user’s table"] = lines(_scores(run, number, view, lent))
    lists["popularity"] = lines(_popularity(run)[None])
    history = [data.title(item) for item in view.positives[0][::-1].tolist()]
    return OneUser(user, history, _held_out(run, number), lists, asked)


def some_users(run: Run, count: int = 6) -> list[str]:
    """Return some users that were tested, from the least to the most active."""
    users = run.ranks["test"]["full"].users
    order = users[np.argsort(run.split.train.positives.lengths[users], kind="stable")]
    places = np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int)
    return [str(run.split.data.users[order[place]]) for place in places]


def _scores(
    run: Run, number: int, view: TrainView, score: Scorer | None = None
) -> NDArray[np.float32]:
    return run.model.scores(np.array([number]), view, score)


def _popularity(run: Run) -> NDArray[np.float32]:
    """Return how many training users each item has."""
    touched = distinct_items(run.split.train.positives.take(run.split.training_users))
    return np.bincount(touched.values, minlength=run.split.data.n_items).astype(np.float32)


def _held_out(run: Run, number: int) -> list[HeldOut]:
    """Return where the user's test items landed."""
    ranks = run.ranks["test"]["full"]
    found = np.flatnonzero(ranks.users == number)
    if not len(found):
        return []
    row = int(found[0])
    inside = slice(int(ranks.indptr[row]), int(ranks.indptr[row + 1]))
    return [
        HeldOut(run.split.data.title(int(item)), int(ahead) + 1, int(ranks.candidates[row]))
        for item, ahead in zip(ranks.targets[inside], ranks.ahead[inside], strict=True)
    ]


def _because(
    run: Run,
    number: int,
    view: TrainView,
    scores: NDArray[np.float32],
    items: NDArray[np.int32],
) -> tuple[NDArray[np.int64] | None, str]:
    """Return the place in the history that speaks for each item most, and how it was found."""
    size = len(view.positives[0])
    tried = np.arange(max(0, size - LEFT_OUT), size)
    if len(tried) > 1:
        without = [
            _scores(run, number, _without(view, place))[0, items] for place in tried.tolist()
        ]
        drops = scores[0, items] - np.array(without)
        if drops.any():
            return tried[drops.argmax(axis=0)], "its score falls most without it"
    model = run.model
    if len(tried) and isinstance(model.method, ItemTables):
        private = model.private_of(np.array([number]))
        table = next(iter(model.method.item_tables(model.shared, private).values()))
        table = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
        near = table[view.positives[0][tried]] @ table[items].T
        return tried[near.argmax(axis=0)], "nearest in the item table of this user"
    return None, ""


def _without(view: TrainView, place: int) -> TrainView:
    """Return one client without one item of its history."""

    def cut(rows: Ragged) -> Ragged:
        values = np.delete(rows.values, place)
        return Ragged(np.array([0, len(values)]), values)

    return replace(
        view, positives=cut(view.positives), times=cut(view.times), values=cut(view.values)
    )
