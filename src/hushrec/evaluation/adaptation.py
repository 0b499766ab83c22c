"""The adaptation curve: metrics of unseen users by the number of interactions they adapt on.

Users that training left out are folded in from their first 0, 1, 2, 5, … interactions, and their
held-out items are ranked each time. Users and candidates stay the same along the curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.data.splitting import Part
from hushrec.data.views import Ragged, TrainView, chunks
from hushrec.errors import ConfigError
from hushrec.evaluation.evaluator import Evaluator
from hushrec.evaluation.metrics import summarise
from hushrec.evaluation.ranking import Ranks, rank_full
from hushrec.serving.model import Model

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
