"""The method beside the baselines: headline, tables of metrics, and the spread over users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.api import Run
from hushrec.evaluation.evaluator import chance_ranks, popularity_ranks
from hushrec.evaluation.groups import bootstrap_interval
from hushrec.evaluation.metrics import Ranks, metric_name, per_user, summarise
from hushrec.io import usable_cores
from hushrec.methods.baselines import Popularity
from hushrec.reporting import plots
from hushrec.reporting.plots import Bar, Dot
from hushrec.reporting.tables import marked, signed, signed_interval, verdict

LIST_LENGTH = 10
SMALLEST_GROUP = 5
"""Users that a group must have to be shown."""
GROUPS = {
    "cold": "the 30 % of the users with the fewest training items",
    "warm": "the 30 % of the users with the most training items",
    "distinct": "the 30 % with the smallest share of their training items among popular ones",
    "followers": "the 30 % with the largest share of their training items among popular ones",
}
LAST_RANKS = (1, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
"""Last rank of each bin of the histogram; one more bin takes the rest."""
EXPLAINED = {
    "hr@10": "how often a held-out item is among the first ten",
    "ndcg@10": "the same, worth more the closer to the top it is",
}


@dataclass(frozen=True)
class RankedMethod:
    """Test ranks of the trained method, of popularity, or of chance."""

    name: str
    ranks: Mapping[str, Ranks]
    is_method: bool = False
    is_chance: bool = False


class MethodAndBaselines:
    """The method and the baselines, on the same users and the same candidates."""

    def __init__(self, run: Run) -> None:
        ranks = run.ranks["test"]
        self.run = run
        self.method = RankedMethod(run.experiment.method, ranks, is_method=True)
        self.popularity: RankedMethod | None = None
        if not isinstance(run.model.method, Popularity):  # which is no baseline of itself
            popular = popularity_ranks(run.evaluator(usable_cores()), "test")
            self.popularity = RankedMethod("popularity", popular)
        chance = RankedMethod("chance", chance_ranks(ranks), is_chance=True)
        self.all = [each for each in (self.method, self.popularity, chance) if each]
        self.one_target = len(ranks["full"].targets) == len(ranks["full"].users)


def headline(compared: MethodAndBaselines, name: str) -> dict[str, Any]:
    """Return one metric with its interval, beside popularity and chance."""
    values = {c.name: per_user(c.ranks["full"], name) for c in compared.all}
    rows = [_dot(ranked, values[ranked.name]) for ranked in compared.all]
    label, against = metric_name(name), None
    if compared.popularity:
        difference = values[compared.method.name] - values["popularity"]
        low, high = bootstrap_interval(difference)
        against = {
            "verdict": verdict(low, high),
            "difference": signed(float(difference.mean())),
            "interval": signed_interval(low, high),
        }
    return {
        "name": label,
        "explained": EXPLAINED[name],
        "method": rows[0],
        "times_chance": rows[0].value / rows[-1].value if rows[-1].value else None,
        "against": against,
        "plot": plots.dots(rows, marked(compared.run.summary, f"{label} at full ranking")),
    }


def metric_tables(compared: MethodAndBaselines) -> list[dict[str, Any]]:
    """Return a table for each candidate set, full ranking first."""
    config = compared.run.experiment.evaluation
    # Of one target recall is the hit rate.
    kinds = ["hr", *([] if compared.one_target else ["recall"]), "ndcg", "mrr", "precision"]
    names = [*(f"{kind}@{k}" for kind in kinds for k in config.k), "auc"]
    tables = []
    for candidates in sorted(compared.method.ranks, key=lambda name: name != "full"):
        means = [summarise(c.ranks[candidates], names) for c in compared.all]
        table = {
            "full": candidates == "full",
            "sampled": config.sampled,
            "names": [c.name for c in compared.all],
            "cuts": config.k,
            "rows": [
                (metric_name(kind), [[mean[f"{kind}@{k}"] for k in config.k] for mean in means])
                for kind in kinds
            ],
            "auc": [mean["auc"] for mean in means],
        }
        tables.append(table)
    return tables


def spread(compared: MethodAndBaselines) -> dict[str, Any]:
    """Return the distribution of the ranks, and the metrics of groups of users."""
    shown = compared.all[:-1]
    label = marked(compared.run.summary, "Rank of the held-out item, share of items")
    return {
        "plot": plots.bars(_rank_bars(shown), [ranked.name for ranked in shown], label),
        "tail": [_tail(ranked) for ranked in shown],
        "groups": _groups(compared, shown),
    }


def _rank_bars(shown: Sequence[RankedMethod]) -> list[Bar]:
    """Return the share of held-out items in each bin of ranks, of the method and of popularity."""
    longest = int(shown[0].ranks["full"].candidates.max())
    last = [rank for rank in LAST_RANKS if rank < longest]
    shares = []
    for ranked in shown:
        expected = _expected_rank(ranked.ranks["full"])
        counts = np.bincount(np.searchsorted(last, expected), minlength=len(last) + 1)
        shares.append((counts / len(expected)).tolist())
    bars = []
    for low, high, share, *other in zip([0, *last], [*last, longest], *shares, strict=True):
        name = f"{high:,}" if low + 1 == high else f"{low + 1:,}–{high:,}"
        bars.append(Bar(name, share, other[0] if other else None, strong=high <= LIST_LENGTH))
    return bars


def _tail(ranked: RankedMethod) -> dict[str, Any]:
    """Return the ranks of typical users, and the AUC of the worst tenth."""
    ranks = ranked.ranks["full"]
    best = np.minimum.reduceat(_expected_rank(ranks), ranks.indptr[:-1])
    auc = np.sort(per_user(ranks, "auc"))
    tenth = max(1, len(auc) // 10)
    return {
        "name": ranked.name,
        "median": float(np.median(best)),
        "late": float(np.quantile(best, 0.9)),
        "auc": float(auc.mean()),
        "worst_auc": float(auc[:tenth].mean()),
        "worst_users": tenth,
    }


def _groups(compared: MethodAndBaselines, shown: Sequence[RankedMethod]) -> list[dict[str, Any]]:
    """Compare groups of users, two by two on the same axis."""
    groups = compared.run.evaluator(1).groups("test")
    if min(map(len, groups.values())) < SMALLEST_GROUP:
        return []
    values = [per_user(c.ranks["full"], "hr@10") for c in shown]
    rows = {
        name: [_dot(c, v[members]) for c, v in zip(shown, values, strict=True)]
        for name, members in groups.items()
    }
    top = plots.dots_top(row for each in rows.values() for row in each) or 1.0
    labels = {name: marked(compared.run.summary, f"HR@10 of {name} users") for name in groups}
    return [
        {
            "name": name,
            "explained": GROUPS[name],
            "users": len(members),
            "plot": plots.dots(rows[name], labels[name], top),
        }
        for name, members in groups.items()
    ]


def _expected_rank(ranks: Ranks) -> NDArray[np.float64]:
    return np.asarray(ranks.ahead + ranks.tied / 2 + 1, np.float64)


def _dot(ranked: RankedMethod, values: NDArray[np.float64]) -> Dot:
    mean = float(values.mean())
    if ranked.is_chance:
        return Dot(ranked.name, mean, note="expected")
    return Dot(ranked.name, mean, bootstrap_interval(values), strong=ranked.is_method)
