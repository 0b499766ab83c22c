"""Analyses of a finished run, from what it stored; nothing is trained again.

- `metrics_by_table`: metrics with the user's own item table, the server's, and another user's
  (PFedRec, Zhang et al., 2023, figure 3);
- `metrics_by_group`: metrics by group of users (`hushrec.evaluation.groups`);
- `guidance_effects`: metrics of each group before and after each guidance round (FedRKG, Lim et
  al., 2025, table 4), and the statistics of the gates (tables D.3 and D.4);
- `adaptation_curve`: metrics of unseen users by the number of interactions they are folded in from;
- one user: history, recommendations, and explanations. The list is the one of the test, so a
  held-out item in it is a hit. Each item has two explanations: the expert with the largest
  contribution, where the method mixes experts (`Explains`), and the item of the history with the
  largest influence. The influence is the drop of the score without that item of the history; where
  scores do not depend on the history, the nearest item in the user's item table is named instead
  (`ItemTables`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.api import Run
from hushrec.data.splitting import Part
from hushrec.data.views import Ragged, TrainView, chunks
from hushrec.errors import ConfigError, RunError
from hushrec.evaluation.evaluator import Evaluator
from hushrec.evaluation.groups import GROUP_METRICS, Spread, spread
from hushrec.evaluation.metrics import Ranks, per_user, rank_full, summarise
from hushrec.federation.rounds import RoundLine
from hushrec.kernels.ragged import top_k
from hushrec.methods.base import Guided, ItemTables, OwnTable, Shared, no_own_table
from hushrec.private import Private
from hushrec.serving.model import Model, Scorer
from hushrec.streams import Streams

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
    """Return the history, test items and lists of a user of the run.

    If the data has changed since training, the lists are made from the whole history in the run
    folder, test items included.
    """
    data, model = run.model.data, run.model
    if user not in data.user_index:
        raise ConfigError(f"user '{user}' is unknown to this run")
    number = np.array([data.user_index[user]])
    if run.data_changes() is None:
        view = run.split.history("test").take(number)
        held_out = set(run.split.test[int(number[0])].tolist())
    else:
        view, held_out = data.history(number), set()

    def listed(scores: NDArray[np.float32]) -> list[Listed]:
        items = top_items(scores, view, count).tolist()
        return [Listed(data.title(i), float(scores[0, i]), i in held_out) for i in items]

    scores = model.list_scores(view, model.scores(number, view))
    best, own = top_items(scores, view, count), listed(scores)
    reasons = model.reasons(view, best[None], partial(model.private_of, number))[0]
    own = [replace(line, expert=why.expert) for line, why in zip(own, reasons, strict=True)]
    because, influence = _because(model, number, view, scores, best)
    if because is not None:
        past = view.positives[0][because].tolist()
        own = [
            replace(line, because=data.title(item)) for line, item in zip(own, past, strict=True)
        ]
    lists = {run.experiment.method: own}
    if isinstance(model.method, OwnTable) and model.method.own_table:
        _, shared, lent = table_scorers(run).values()
        lists["with the server’s table"] = listed(model.scores(number, view, shared))
        lists["with another user’s table"] = listed(model.scores(number, view, lent))
    popularity = data.popularity()
    if popularity is not None:
        lists["popularity"] = listed(popularity[None])
    history = [data.title(item) for item in view.positives[0][::-1].tolist()]
    return OneUser(user, history, _held_out(run, int(number[0])), lists, influence)


def top_items(scores: NDArray[np.float32], view: TrainView, count: int) -> NDArray[np.int32]:
    """Return the items with the largest scores that the one client of the view may be shown."""
    seen = view.seen
    best = top_k(scores, seen.indptr, seen.values, min(count, view.n_items))[0].reshape(-1)
    return best[best >= 0]


def targets_of(ranks: Ranks, row: int) -> list[tuple[int, int, int]]:
    """Return of each test item of a user: candidates ahead of it, the item, candidates tied."""
    rows = slice(int(ranks.indptr[row]), int(ranks.indptr[row + 1]))
    columns = ranks.ahead[rows], ranks.targets[rows], ranks.tied[rows]
    return list(zip(*(column.tolist() for column in columns), strict=True))


def some_users(run: Run, count: int = 6) -> list[str]:
    """Return some evaluated users, from the least to the most active; of a final model any."""
    data = run.model.data
    users = run.ranks["test"]["full"].users if run.ranks else np.flatnonzero(data.trained)
    order = users[np.argsort(data.train.positives.lengths[users], kind="stable")]
    return [str(data.users[order[n]]) for n in evenly_spread(len(order), count)]


def evenly_spread(size: int, most: int) -> list[int]:
    """Return at most so many positions of a list, the first and the last among them."""
    positions: list[int] = np.linspace(0, size - 1, min(most, size)).round().astype(int).tolist()
    return positions


def _held_out(run: Run, number: int) -> list[HeldOut]:
    if not run.ranks:  # of a final model
        return []
    ranks, data = run.ranks["test"]["full"], run.model.data
    return [
        HeldOut(data.title(item), ahead + 1, int(ranks.candidates[row]))
        for row in np.flatnonzero(ranks.users == number).tolist()
        for ahead, item, _ in targets_of(ranks, row)
    ]


def _because(
    model: Model,
    number: NDArray[np.int64],
    view: TrainView,
    scores: NDArray[np.float32],
    items: NDArray[np.int32],
) -> tuple[NDArray[np.int64] | None, str]:
    """Return the history position with the largest influence on each item, and the measure."""
    history = view.positives[0]
    tried = np.arange(max(0, len(history) - LEFT_OUT), len(history))
    if len(tried) > 1:
        all_but_one = (np.delete(np.arange(len(history)), position) for position in tried)
        shorter = (_with_rows(view, np.array([0, len(kept)]), kept) for kept in all_but_one)
        without = [model.scores(number, each)[0, items] for each in shorter]
        drops = scores[0, items] - np.array(without)
        if drops.any():
            return tried[drops.argmax(axis=0)], "its score falls most without it"
    if len(tried) and isinstance(model.method, ItemTables):
        tables = model.method.item_tables(model.shared, model.private_of(number))
        table = next(iter(tables.values()))
        table = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
        near = table[history[tried]] @ table[items].T
        return tried[near.argmax(axis=0)], "nearest in the item table of this user"
    return None, ""


def _with_rows(view: TrainView, indptr: NDArray[Any], rows: NDArray[Any]) -> TrainView:
    """Return the clients with these rows of their histories only."""
    positives, times, values = (
        Ragged(indptr, column.values[rows]) for column in (view.positives, view.times, view.values)
    )
    return replace(view, positives=positives, times=times, values=values, _excluded=None)


TABLES = ("own", "global", "random")


def metrics_by_table(run: Run, part: Part = "test", threads: int = 1) -> dict[str, dict[str, Any]]:
    """Return metrics with the user's own item table, the server's, and a random other user's.

    Only the table is exchanged; users keep their own vector or score function. Users that take part
    in training lend their table to one other user each.
    """
    evaluator = run.evaluator(threads)
    return {
        name: evaluator.summarise(evaluator.rank(run.model, part, score))
        for name, score in table_scorers(run).items()
    }


def table_scorers(run: Run) -> dict[str, Scorer | None]:
    """Return a scorer for each of `TABLES`; None is the method's own `Method.score`."""
    method = run.model.method
    if not isinstance(method, OwnTable) or not method.own_table:
        raise no_own_table(method.name)
    lender = _lenders(run)

    def with_global(shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        return run.model.method.score(*method.with_global_table(shared, private), history)

    def with_lent(shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        lent = run.model.private.read(lender[history.users])
        swapped = {**private, **{name: lent[name] for name in method.own_table}}
        return run.model.method.score(shared, swapped, history)

    return dict(zip(TABLES, (None, with_global, with_lent), strict=True))


def _lenders(run: Run) -> NDArray[np.int64]:
    """Return the user whose table each user gets: a random cycle, so that none keeps their own."""
    trained = np.flatnonzero(run.model.data.trained)
    if len(trained) < 2:
        raise RunError("another user's table needs a second user")
    generator = Streams(run.experiment.seed).generator("analyse/lenders")
    cycle = generator.permutation(trained)
    lender = generator.choice(cycle, len(run.model.data.users))  # for users that lend none
    lender[cycle] = np.roll(cycle, 1)
    return lender


def metrics_by_group(
    run: Run, part: Part = "test", names: Sequence[str] = (*GROUP_METRICS, "auc")
) -> dict[str, Spread]:
    """Return each metric under full ranking by group of users."""
    evaluator, ranks = run.evaluator(1), run.ranks[part]["full"]
    return {name: spread(per_user(ranks, name), evaluator.groups(part)) for name in names}


@dataclass(frozen=True)
class GuidanceEffect:
    """Metrics before and after one guidance round, on validation items under full ranking."""

    round: int
    """The round that began with the guidance commit."""
    metric: str
    before: Mapping[str, float]
    """Metric by group at the end of the round before; ``all`` is the mean over all users."""
    after: Mapping[str, float]
    gates: Mapping[str, Any] | None
    """Statistics of the gates after the commit."""
    moved: Mapping[str, float] | None = None
    """Shares of users that improved, declined and stayed the same; None if the run was resumed
    between the two evaluations."""


def guidance_effects(
    run: Run, metric: str = "ndcg@10", lines: Sequence[RoundLine] | None = None
) -> list[GuidanceEffect]:
    """Return the effect of every guidance round of a run, oldest first."""
    method = run.model.method
    if not isinstance(method, Guided):
        raise ConfigError(f"{method.name} has no guidance rounds")
    if lines is None:
        lines = run.folder.read_metrics() if run.folder else []
    by_round = {line.round: line for line in lines}
    measured = {
        number: {"all": line.valid["full"][metric]}
        | {name: values[metric] for name, values in line.groups.items()}
        for number, line in sorted(by_round.items())
        if line.groups and line.valid
    }
    return [
        GuidanceEffect(number, metric, measured[number - 1], after, line.gates, line.moved)
        for number, after in measured.items()
        if method.marks(number) and number - 1 in measured and (line := by_round[number])
    ]


# ------------------------------------------------------------ the adaptation curve

COUNTS = (0, 1, 2, 5, 10, 20)


def adaptation_curve(
    evaluator: Evaluator,
    model: Model,
    part: Part,
    metrics: Sequence[str],
    counts: Sequence[int] = COUNTS,
) -> dict[str, Any]:
    """Return the metrics after each number of interactions, under full ranking.

    The users are those that training left out and that have enough rows for the largest number.
    """
    users = evaluator.users[part]
    enough = evaluator.split.train.positives.lengths[users] >= max(counts)
    users = users[enough & ~evaluator.data.trained[users]]
    if not len(users):
        raise ConfigError(
            f"the adaptation curve needs users that training left out, with {max(counts)} "
            "interactions or more; train with --set split.kind=unseen-users"
        )
    points: list[dict[str, float]] = []
    for count in counts:
        ranks = _ranks_after(evaluator, model, part, users, count)
        points.append({"interactions": count, **summarise(ranks, metrics)})
    return {"part": part, "users": len(users), "points": points}


def _ranks_after(
    evaluator: Evaluator, model: Model, part: Part, users: NDArray[np.int64], count: int
) -> Ranks:
    parts = []
    for batch in chunks(users, model.batch_size):
        whole = evaluator.split.train.take(batch)
        scores = model.scores_of_new(first_rows(whole, count))
        aim, seen = evaluator.split.heldout(part).take(batch), evaluator.seen(batch, whole)
        parts.append(rank_full(scores, whole.users, seen, aim))
    return Ranks.concat(parts)


def first_rows(view: TrainView, count: int) -> TrainView:
    """Return the clients with their first ``count`` interactions only."""
    lengths = np.minimum(view.positives.lengths, count)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    owner = np.repeat(np.arange(len(view)), lengths)
    at = np.arange(indptr[-1]) - indptr[owner] + view.positives.indptr[owner]
    return _with_rows(view, indptr, at)
