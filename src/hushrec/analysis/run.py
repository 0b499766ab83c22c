"""What a finished run says beyond its means, from what it stored; nothing is trained again.

- `whose_table`: inference with the own, the server's and another user's table (PFedRec, Zhang et
  al., 2023, figure 3);
- `groups_of`: how groups of users fare (`groups`);
- `guidance_effects`: what each guidance round did to each group (FedRKG, Lim et al., 2025, table
  4), and the statistics of the gates (tables D.3 and D.4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.api import Run
from hushrec.data.splitting import Part
from hushrec.data.views import TrainView
from hushrec.errors import ConfigError, RunError
from hushrec.evaluation.groups import WATCHED, Spread, spread
from hushrec.evaluation.metrics import per_user, summarise
from hushrec.methods.base import Guided, OwnTable, Private, Shared, no_own_table
from hushrec.serving.model import Scorer
from hushrec.streams import Streams

TABLES = ("own", "global", "random")


def whose_table(run: Run, part: Part = "test", threads: int = 1) -> dict[str, dict[str, Any]]:
    """Score with the own table, the server's, and another user's drawn at random.

    Only the table changes hands; everybody keeps their own vector or score function. Users that
    take part in training lend theirs, each to one other.
    """
    evaluator = run.evaluator(threads)
    found = {}
    for name, score in table_scorers(run).items():
        ranks = evaluator.rank(run.model, part, score)
        found[name] = {c: summarise(r, evaluator.config.metric_names()) for c, r in ranks.items()}
    return found


def table_scorers(run: Run) -> dict[str, Scorer | None]:
    """Return how to score with each of `TABLES`; None is the method's own way."""
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
    """Return who lends every user a table: a random circle, so nobody gets their own back."""
    if len(run.split.training_users) < 2:
        raise RunError("another user's table needs a second user")
    generator = Streams(run.experiment.seed).generator("analyse/lenders")
    circle = generator.permutation(run.split.training_users)
    lender = generator.choice(circle, run.split.n_users)  # for those that lend none themselves
    lender[circle] = np.roll(circle, 1)
    return lender


def groups_of(
    run: Run, part: Part = "test", names: Sequence[str] = (*WATCHED, "auc")
) -> dict[str, Spread]:
    """Return how each metric at full ranking differs between groups of users."""
    evaluator, ranks = run.evaluator(1), run.ranks[part]["full"]
    return {name: spread(per_user(ranks, name), evaluator.groups(part)) for name in names}


@dataclass(frozen=True)
class GuidanceEffect:
    """What one guidance round did, on the validation items at full ranking."""

    round: int
    """The round that began with the commit."""
    metric: str
    before: Mapping[str, float]
    """By group, at the end of the round before; ``all`` are all users."""
    after: Mapping[str, float]
    gates: Mapping[str, Any] | None
    """Statistics of the gates after the commit."""
    moved: Mapping[str, float] | None = None
    """Shares of users that improved, declined and stayed; None where the run was resumed between
    the two looks."""


def guidance_effects(
    run: Run, metric: str = "ndcg@10", lines: Sequence[Mapping[str, Any]] | None = None
) -> list[GuidanceEffect]:
    """Return the effect of every guidance round of a run, oldest first."""
    method = run.model.method
    if not isinstance(method, Guided):
        raise ConfigError(f"{method.name} has no guidance rounds")
    if lines is None:
        lines = run.folder.read_metrics() if run.folder else []
    by_round = {line["round"]: line for line in lines}
    return [
        GuidanceEffect(
            number,
            metric,
            _by_group(by_round[number - 1], metric),
            _by_group(line, metric),
            line.get("gates"),
            line.get("moved"),
        )
        for number, line in sorted(by_round.items())
        if method.marks(number) and _has_groups(line) and _has_groups(by_round.get(number - 1))
    ]


def _has_groups(line: Mapping[str, Any] | None) -> bool:
    return line is not None and bool(line.get("groups"))


def _by_group(line: Mapping[str, Any], metric: str) -> dict[str, float]:
    groups = {name: values[metric] for name, values in line["groups"].items()}
    return {"all": line["valid"]["full"][metric], **groups}
