"""Metrics by group of users (FedRKG, Lim et al., 2025, section 6.3), and statistics of gates.

Groups are made from the training interactions alone, among the evaluated users:

- **cold** and **warm**: the 30 % with the fewest and with the most training interactions;
- **distinct** and **followers**: the 30 % with the smallest and with the largest share of their
  training interactions on popular items, the 30 % of the catalogue with the most of them.

The paper does not say how low a share makes a user distinct; 30 % is its other cut. Ties at a cut
are broken by the user's number, so that a group has the same members in every run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.data.views import TrainView
from hushrec.evaluation.metrics import per_user
from hushrec.evaluation.ranking import Ranks

SHARE = 0.3
"""Share of the users in a group, and of the catalogue that counts as popular."""
GROUP_METRICS = ("hr@5", "ndcg@5", "hr@10", "ndcg@10")
"""Metrics that are reported by group."""

Groups = Mapping[str, NDArray[np.int64]]
"""Positions among the evaluated users, by group."""


def popular_items(train: TrainView) -> NDArray[np.bool_]:
    """Return whether each item is among the 30 % with the most training interactions."""
    counts = np.bincount(train.positives.values, minlength=train.n_items)
    popular = np.zeros(train.n_items, bool)
    popular[np.argsort(-counts, kind="stable")[: _cut(train.n_items)]] = True
    return popular


def user_groups(train: TrainView, users: NDArray[np.integer]) -> dict[str, NDArray[np.int64]]:
    """Group these users; each group holds positions in ``users``, ascending."""
    lengths = train.positives.lengths
    on_popular = np.append(0, np.cumsum(popular_items(train)[train.positives.values]))
    indptr = train.positives.indptr
    share = (on_popular[indptr[1:]] - on_popular[indptr[:-1]]) / np.maximum(lengths, 1)
    size = _cut(len(users))

    def ends(values: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        order = np.argsort(values[users], kind="stable")
        return np.sort(order[:size]), np.sort(order[len(order) - size :])

    (cold, warm), (distinct, followers) = ends(lengths), ends(share)
    return {"cold": cold, "warm": warm, "distinct": distinct, "followers": followers}


def _cut(count: int) -> int:
    return max(1, int(SHARE * count)) if count else 0


@dataclass(frozen=True)
class Spread:
    """Distribution of one metric over users."""

    mean: float
    sd: float
    """Standard deviation over users."""
    worst_tenth: float
    """Mean over the tenth of the users with the lowest values."""
    groups: Mapping[str, float]
    """Mean over each group."""


def spread(values: NDArray[np.float64], groups: Groups) -> Spread:
    """Summarise the values of the users."""
    tenth = max(1, len(values) // 10)
    return Spread(
        mean=float(values.mean()),
        sd=float(values.std()),
        worst_tenth=float(np.sort(values)[:tenth].mean()),
        groups={name: float(values[members].mean()) for name, members in groups.items()},
    )


def group_means(ranks: Ranks, groups: Groups) -> dict[str, dict[str, float]]:
    """Return the mean of the reported metrics in each group."""
    values = {name: per_user(ranks, name) for name in GROUP_METRICS}
    return {
        group: {name: float(value[members].mean()) for name, value in values.items()}
        for group, members in groups.items()
    }


def rank_changes(before: Ranks, after: Ranks) -> dict[str, float]:
    """Return the shares of users whose held-out items rank better, worse, or the same.

    FedRKG, table 4, counts users whose aggregate score improved; which that is, it does not say.
    Here it is the AUC, which changes whenever a held-out item passes another item.
    """
    change = per_user(after, "auc") - per_user(before, "auc")
    return {
        "improved": float((change > 0).mean()),
        "declined": float((change < 0).mean()),
        "unchanged": float((change == 0).mean()),
    }


AWAY = 0.01
"""Distance from 1/2 beyond which a gate counts as away from it."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class GateStatistics:
    """Statistics of each user's gates, [users] each: the gates [users, items] need not be kept."""

    mean: NDArray[np.float64]
    squares: NDArray[np.float64]
    """Mean squared distance from 1/2."""
    away: NDArray[np.float64]
    popular: NDArray[np.float64]
    """Mean over the popular items."""
    logit: NDArray[np.float64]
    """Mean of the inverse sigmoid (FedRKG, table D.4)."""
    popular_logit: NDArray[np.float64]
    """The same over the popular items (table D.3)."""

    @classmethod
    def of(cls, gates: NDArray[np.float32], popular: NDArray[np.bool_]) -> GateStatistics:
        """Summarise gates [users, items]."""
        apart = gates.astype(np.float64) - 0.5
        smallest = np.finfo(np.float32).tiny  # gates that round to 0 or 1 get a finite logit
        inside = np.clip(gates.astype(np.float64), smallest, 1 - 2.0**-24)
        logits = np.log(inside) - np.log1p(-inside)
        return cls(
            0.5 + apart.mean(axis=1),
            (apart**2).mean(axis=1),
            (abs(apart) > AWAY).mean(axis=1),
            0.5 + apart[:, popular].mean(axis=1),
            logits.mean(axis=1),
            logits[:, popular].mean(axis=1),
        )

    @classmethod
    def concat(cls, parts: list[GateStatistics]) -> GateStatistics:
        """Join the statistics of several batches."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def statistics(self, groups: Groups) -> dict[str, Any]:
        """Return the statistics that metrics.jsonl holds of a guidance round."""
        mean = float(self.mean.mean())
        variance = float(self.squares.mean()) - (mean - 0.5) ** 2
        return {
            "mean": mean,
            "sd": float(np.sqrt(max(0.0, variance))),
            "away": float(self.away.mean()),
            "user_quantiles": {
                f"{q:g}": float(value)
                for q, value in zip(QUANTILES, np.quantile(self.mean, QUANTILES), strict=True)
            },
            "groups": {
                name: {
                    "mean": float(self.mean[members].mean()),
                    "popular": float(self.popular[members].mean()),
                    "away": float(self.away[members].mean()),
                    "logit": float(self.logit[members].mean()),
                    "popular_logit": float(self.popular_logit[members].mean()),
                }
                for name, members in groups.items()
            },
        }
