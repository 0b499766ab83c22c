"""Analyses of a finished run, from what it stored; nothing is trained again.

- `metrics_by_table`: metrics with the user's own item table, the server's, and another user's
  (PFedRec, Zhang et al., 2023, figure 3);
- `metrics_by_group`: metrics by group of users (`hushrec.evaluation.groups`);
- `guidance_effects`: metrics of each group before and after each guidance round (FedRKG, Lim et
  al., 2025, table 4), and the statistics of the gates (tables D.3 and D.4);
- `adaptation_curve`: metrics of unseen users by the number of interactions they are folded in from.
  Users and candidates stay the same along the curve.
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
from hushrec.evaluation.metrics import per_user, summarise
from hushrec.evaluation.ranking import Ranks, rank_full
from hushrec.federation.callbacks import RoundLine
from hushrec.methods.base import Guided, OwnTable, Private, Shared, no_own_table
from hushrec.serving.model import Model, Scorer
from hushrec.streams import Streams

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
        parts.append(
            rank_full(scores, view.users, seen.indptr, seen.values, aim.indptr, aim.values)
        )
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
