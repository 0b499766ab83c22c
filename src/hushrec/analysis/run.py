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
from hushrec.methods.base import Guided, ItemTables, OwnTable, Private, Shared, no_own_table
from hushrec.methods.baselines import distinct_items
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


TABLES = ("own", "global", "random")


def metrics_by_table(run: Run, part: Part = "test", threads: int = 1) -> dict[str, dict[str, Any]]:
    """Return metrics with the user's own item table, the server's, and a random other user's.

    Only the table is exchanged; users keep their own vector or score function. Users that take part
    in training lend their table to one other user each.
    """
    evaluator = run.evaluator(threads)
    metrics = {}
    for name, score in table_scorers(run).items():
        ranks = evaluator.rank(run.model, part, score)
        metrics[name] = evaluator.summarise(ranks)
    return metrics


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
    if len(run.split.training_users) < 2:
        raise RunError("another user's table needs a second user")
    generator = Streams(run.experiment.seed).generator("analyse/lenders")
    cycle = generator.permutation(run.split.training_users)
    lender = generator.choice(cycle, run.split.n_users)  # for users that lend none
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
    return [
        GuidanceEffect(
            number,
            metric,
            _by_group(by_round[number - 1], metric),
            _by_group(line, metric),
            line.gates,
            line.moved,
        )
        for number, line in sorted(by_round.items())
        if method.marks(number) and _has_groups(line) and _has_groups(by_round.get(number - 1))
    ]


def _has_groups(line: RoundLine | None) -> bool:
    return line is not None and bool(line.groups) and bool(line.valid)


def _by_group(line: RoundLine, metric: str) -> dict[str, float]:
    assert line.groups is not None and line.valid is not None, "checked by _has_groups"
    groups = {name: values[metric] for name, values in line.groups.items()}
    return {"all": line.valid["full"][metric], **groups}


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
    split = evaluator.split
    users = evaluator.evaluated_users(part)
    enough = split.train.positives.lengths[users] >= max(counts)
    users = users[enough & ~evaluator.data.trained[users]]
    if not len(users):
        raise ConfigError(
            f"the adaptation curve needs users that training left out, with {max(counts)} "
            "interactions or more; train with --set split.kind=unseen-users"
        )
    points = [
        {
            "interactions": count,
            **summarise(_ranks_after(evaluator, model, part, users, count), metrics),
        }
        for count in counts
    ]
    return {"part": part, "users": len(users), "points": points}


def _ranks_after(
    evaluator: Evaluator,
    model: Model,
    part: Part,
    users: NDArray[np.int64],
    count: int,
) -> Ranks:
    parts = []
    for batch in chunks(users, model.batch_size):
        whole = evaluator.split.train.take(batch)
        view = first_rows(whole, count)
        scores = model.scores_of_new(view)
        aim, seen = evaluator.split.heldout(part).take(batch), evaluator.seen(batch, whole)
        parts.append(rank_full(scores, view.users, seen, aim))
    return Ranks.concat(parts)


def first_rows(view: TrainView, count: int) -> TrainView:
    """Return the clients with their first ``count`` interactions only."""
    lengths = np.minimum(view.positives.lengths, count)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    owner = np.repeat(np.arange(len(view)), lengths)
    at = np.arange(indptr[-1]) - indptr[owner] + view.positives.indptr[owner]
    return replace(
        view,
        positives=Ragged(indptr, view.positives.values[at]),
        times=Ragged(indptr, view.times.values[at]),
        values=Ragged(indptr, view.values.values[at]),
        _excluded=None,
    )
