"""One user of a finished run: history, recommendations, and explanations.

The list is the one of the test, so a held-out item in it is a hit. Each item has two explanations:
the expert with the largest contribution, where the method mixes experts (`Explains`), and the item
of the history with the largest influence. The influence is the drop of the score without that item
of the history; where scores do not depend on the history, the nearest item in the user's item table
is named instead (`ItemTables`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hushrec.analysis.run import table_scorers
from hushrec.api import Run
from hushrec.data.views import Ragged, TrainView
from hushrec.errors import ConfigError
from hushrec.kernels.ragged import top_k
from hushrec.methods.base import ItemTables, OwnTable
from hushrec.methods.baselines import distinct_items
from hushrec.serving.model import Scorer

LEFT_OUT = 30
"""Latest items of a history whose influence is measured."""


@dataclass(frozen=True)
class Listed:
    """One item of a list."""

    title: str
    score: float
    held_out: bool
    """Whether it is a test item of this user."""
    expert: str = ""
    """Expert with the largest contribution to the score."""
    because: str = ""
    """Title of the item of the history with the largest influence."""


@dataclass(frozen=True)
class HeldOut:
    """A test item of the user."""

    title: str
    rank: int
    candidates: int


@dataclass(frozen=True)
class OneUser:
    """History, test items and lists of a user."""

    user: str
    history: list[str]
    """Titles, latest first."""
    held_out: list[HeldOut]
    lists: dict[str, list[Listed]]
    """Lists by name: the run's own first, popularity last."""
    influence: str
    """How the influence of items in the history was measured; empty if it cannot be."""


def one_user(run: Run, user: str, count: int = 10) -> OneUser:
    """Return the history, test items and lists of a user of the run."""
    data, split, model = run.split.data, run.split, run.model
    if user not in model.data.user_index:
        raise ConfigError(f"user '{user}' is unknown to this run")
    number = model.data.user_index[user]
    view = split.history("test").take(np.array([number]))
    aim = set(split.test[number].tolist())

    def listed(scores: NDArray[np.float32]) -> NDArray[np.int32]:
        seen = view.positives
        items = top_k(scores, seen.indptr, seen.values, min(count, data.n_items))[0]
        return items[:, items[0] >= 0]

    def lines(scores: NDArray[np.float32]) -> list[Listed]:
        items = listed(scores)[0].tolist()
        return [Listed(data.title(i), float(scores[0, i]), i in aim) for i in items]

    scores = _scores(run, number, view)
    best = listed(scores)
    own = lines(scores)
    experts = model.experts(view, best)[0]
    own = [replace(line, expert=expert) for line, expert in zip(own, experts, strict=True)]
    because, influence = _because(run, number, view, scores, best[0])
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
    return OneUser(user, history, _held_out(run, number), lists, influence)


def some_users(run: Run, count: int = 6) -> list[str]:
    """Return some evaluated users, from the least to the most active."""
    users = run.ranks["test"]["full"].users
    order = users[np.argsort(run.split.train.positives.lengths[users], kind="stable")]
    positions = np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int)
    return [str(run.split.data.users[user]) for user in order[positions]]


def _scores(
    run: Run, number: int, view: TrainView, score: Scorer | None = None
) -> NDArray[np.float32]:
    return run.model.scores(np.array([number]), view, score)


def _popularity(run: Run) -> NDArray[np.float32]:
    """Return the number of training users of each item."""
    touched = distinct_items(run.split.train.positives.take(run.split.training_users))
    return np.bincount(touched.values, minlength=run.split.data.n_items).astype(np.float32)


def _held_out(run: Run, number: int) -> list[HeldOut]:
    """Return the ranks of the user's test items."""
    ranks = run.ranks["test"]["full"]
    rows = np.flatnonzero(ranks.users == number)
    if not len(rows):
        return []
    row = int(rows[0])
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
    """Return the history position with the largest influence on each item, and the measure."""
    size = len(view.positives[0])
    tried = np.arange(max(0, size - LEFT_OUT), size)
    if len(tried) > 1:
        without = [
            _scores(run, number, _without(view, position))[0, items] for position in tried.tolist()
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


def _without(view: TrainView, position: int) -> TrainView:
    """Return one client without one item of its history."""

    def cut(rows: Ragged) -> Ragged:
        values = np.delete(rows.values, position)
        return Ragged(np.array([0, len(values)]), values)

    return replace(
        view, positives=cut(view.positives), times=cut(view.times), values=cut(view.values)
    )
