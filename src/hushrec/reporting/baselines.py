"""The method beside its yardsticks: headline, tables, and how its users differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.api import Run
from hushrec.evaluation.evaluator import chance_ranks, popularity_ranks
from hushrec.evaluation.metrics import per_user, summarise
from hushrec.evaluation.ranking import Ranks
from hushrec.evaluation.significance import bootstrap_interval
from hushrec.io.memory import usable_cores
from hushrec.methods.baselines import Popularity
from hushrec.reporting import plots
from hushrec.reporting.plots import Bar, Dot
from hushrec.reporting.wording import marked, metric_name, signed

LIST_LENGTH = 10
SMALLEST_GROUP = 5
"""Users that a group must have to be shown."""
GROUPS = {
    "cold": "the 30 % of the users with the fewest training items",
    "warm": "the 30 % of the users with the most training items",
    "distinct": "the 30 % with the smallest share of their training items among popular ones",
    "followers": "the 30 % with the largest share of their training items among popular ones",
}
RESAMPLES = 2_000
RESAMPLED_VALUES = 50_000_000
"""Values drawn for one interval at most; beyond 25,000 users fewer resamples do."""
LAST_PLACES = (1, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
"""Last place of each bin of the histogram; one more bin takes the rest."""
EXPLAINED = {
    "hr@10": "how often a held-out item is among the first ten",
    "ndcg@10": "the same, worth more the closer to the top it is",
}


@dataclass(frozen=True)
class Contender:
    """Who is ranked: the method itself, popularity, or chance."""

    name: str
    ranks: Mapping[str, Ranks]
    is_method: bool = False
    is_chance: bool = False


class Field:
    """The method among the yardsticks, on the same users and the same candidates."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @cached_property
    def contenders(self) -> list[Contender]:
        """The method first; popularity is not its own yardstick."""
        method = Contender(self.run.experiment.method, self.run.ranks["test"], is_method=True)
        chance = chance_ranks(method.ranks)
        others = [] if self.popularity is None else [self.popularity]
        return [method, *others, Contender("chance", chance, is_chance=True)]

    @property
    def method(self) -> Contender:
        """What the run trained."""
        return self.contenders[0]

    @cached_property
    def popularity(self) -> Contender | None:
        """The same list for everybody; None where that is what the run trained."""
        if isinstance(self.run.model.method, Popularity):
            return None
        ranks = popularity_ranks(self.run.evaluator(usable_cores()), "test")
        return Contender("popularity", ranks)

    @property
    def one_target(self) -> bool:
        """Whether every user has exactly one item to be found."""
        full = self.method.ranks["full"]
        return len(full.targets) == len(full.users)


def headline(field: Field, name: str) -> dict[str, Any]:
    """Say what one metric is, and how it stands against popularity and chance."""
    values = {c.name: per_user(c.ranks["full"], name) for c in field.contenders}
    rows = [_dot(contender, values[contender.name]) for contender in field.contenders]
    label = metric_name(name)
    others = values.get("popularity") if field.popularity else None
    return {
        "name": label,
        "explained": EXPLAINED[name],
        "method": rows[0],
        "times_chance": rows[0].value / rows[-1].value if rows[-1].value else None,
        "against": None if others is None else _against(values[field.method.name], others),
        "plot": plots.dots(rows, marked(field.run.summary, f"{label} at full ranking")),
    }


def _against(mine: NDArray[np.float64], theirs: NDArray[np.float64]) -> dict[str, Any]:
    low, high = _interval(mine - theirs)
    verdict = "above" if low > 0 else "below" if high < 0 else "not clearly different from"
    return {
        "verdict": verdict,
        "difference": signed(float(np.mean(mine - theirs))),
        "interval": f"{signed(low)} to {signed(high)}",
    }


def metric_tables(field: Field) -> list[dict[str, Any]]:
    """Return a table for each candidate set, full ranking first."""
    cuts = field.run.experiment.evaluation.k
    # Of one target recall is the hit rate.
    kinds = ["hr", *([] if field.one_target else ["recall"]), "ndcg", "mrr", "precision"]
    tables = []
    for candidates in sorted(field.method.ranks, key=lambda name: name != "full"):
        names = [*(f"{kind}@{k}" for kind in kinds for k in cuts), "auc"]
        means = [summarise(c.ranks[candidates], names) for c in field.contenders]
        tables.append(
            {
                "full": candidates == "full",
                "sampled": field.run.experiment.evaluation.sampled,
                "names": [c.name for c in field.contenders],
                "cuts": cuts,
                "rows": [
                    (metric_name(kind), [[mean[f"{kind}@{k}"] for k in cuts] for mean in means])
                    for kind in kinds
                ],
                "auc": [mean["auc"] for mean in means],
            }
        )
    return tables


def spread(field: Field) -> dict[str, Any]:
    """Show where held-out items landed, and who is served well or badly."""
    popularity = field.popularity
    places = _expected_place(field.method.ranks["full"])
    others = None if popularity is None else _expected_place(popularity.ranks["full"])
    shown = [c for c in field.contenders if not c.is_chance]
    return {
        "plot": plots.bars(
            _place_bars(places, others, int(field.method.ranks["full"].candidates.max())),
            [contender.name for contender in shown],
            marked(field.run.summary, "Place of the held-out item, share of items"),
        ),
        "tail": [_tail(contender) for contender in shown],
        "groups": _groups(field, shown),
    }


def _place_bars(
    places: NDArray[np.float64], others: NDArray[np.float64] | None, longest: int
) -> list[Bar]:
    last = [place for place in LAST_PLACES if place < longest]
    mine = np.bincount(np.searchsorted(last, places), minlength=len(last) + 1) / len(places)
    theirs: Sequence[float | None] = [None] * len(mine)
    if others is not None:
        counts = np.bincount(np.searchsorted(last, others), minlength=len(last) + 1)
        theirs = [float(share) for share in counts / len(others)]
    bars = []
    for number, (share, other) in enumerate(zip(mine, theirs, strict=True)):
        low = last[number - 1] + 1 if number else 1
        high = last[number] if number < len(last) else longest
        name = f"{low:,}" if low == high else f"{low:,}–{high:,}"
        bars.append(Bar(name, float(share), other, strong=high <= LIST_LENGTH))
    return bars


def _tail(contender: Contender) -> dict[str, Any]:
    """Say how the typical and the worst-served users fare."""
    ranks = contender.ranks["full"]
    best = np.minimum.reduceat(_expected_place(ranks), ranks.indptr[:-1])
    auc = np.sort(per_user(ranks, "auc"))
    tenth = max(1, len(auc) // 10)
    return {
        "name": contender.name,
        "median": float(np.median(best)),
        "late": float(np.quantile(best, 0.9)),
        "auc": float(auc.mean()),
        "worst_auc": float(auc[:tenth].mean()),
        "worst_users": tenth,
    }


def _groups(field: Field, shown: Sequence[Contender]) -> list[dict[str, Any]]:
    """Compare groups of users, two by two on the same axis."""
    groups = field.run.evaluator(1).groups("test")
    if min(map(len, groups.values())) < SMALLEST_GROUP:
        return []
    values = [per_user(c.ranks["full"], "hr@10") for c in shown]
    rows = {
        name: [_dot(c, v[members]) for c, v in zip(shown, values, strict=True)]
        for name, members in groups.items()
    }
    top = plots.dots_top(row for each in rows.values() for row in each) or 1.0
    return [
        {
            "name": name,
            "explained": GROUPS[name],
            "users": len(members),
            "plot": plots.dots(
                rows[name], marked(field.run.summary, f"HR@10 of {name} users"), top
            ),
        }
        for name, members in groups.items()
    ]


def _expected_place(ranks: Ranks) -> NDArray[np.float64]:
    return np.asarray(ranks.ahead + ranks.tied / 2 + 1, np.float64)


def _dot(contender: Contender, values: NDArray[np.float64]) -> Dot:
    return Dot(
        contender.name,
        float(values.mean()),
        None if contender.is_chance else _interval(values),
        "expected" if contender.is_chance else "",
        strong=contender.is_method,
    )


def _interval(values: NDArray[np.float64]) -> tuple[float, float]:
    resamples = max(200, min(RESAMPLES, RESAMPLED_VALUES // len(values)))
    return bootstrap_interval(values, resamples=resamples)
