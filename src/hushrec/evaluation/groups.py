"""Groups of users that fare differently (FedRKG, Lim et al., 2025, section 6.3), and the worst off.

All groups come from the training interactions alone, over the users that are looked at:

- **cold** and **warm**: the 30 % with the fewest and with the most training interactions;
- **distinct** and **followers**: the 30 % with the smallest and with the largest share of their
  training interactions on popular items, the 30 % of the catalogue with the most of them.

The paper does not say how low a share makes a user distinct; 30 % is its other cut. Who stands at a
cut is decided by the user's number, so that a group has the same members in every run.
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
"""Of the users in a group, and of the catalogue that counts as popular."""
WATCHED = ("hr@5", "ndcg@5", "hr@10", "ndcg@10")
"""What is measured per group."""

Groups = Mapping[str, NDArray[np.int64]]
"""Positions among the users that are looked at."""


def popular_items(train: TrainView) -> NDArray[np.bool_]:
    """Say of every item whether it is among the 30 % with the most training interactions."""
    counts = np.bincount(train.positives.values, minlength=train.n_items)
    popular = np.zeros(train.n_items, bool)
    popular[np.argsort(-counts, kind="stable")[: _cut(train.n_items)]] = True
    return popular


def user_groups(train: TrainView, users: NDArray[np.integer]) -> dict[str, NDArray[np.int64]]:
    """Sort these users into groups; each is a list of positions in ``users``, ascending."""
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
    """How one metric differs between users."""

    mean: float
    sd: float
    """Standard deviation over users."""
    worst_tenth: float
    """Mean over the tenth of the users with the lowest values."""
    groups: Mapping[str, float]
    """Mean over each group."""


def spread(values: NDArray[np.float64], groups: Groups) -> Spread:
    """Say how the values of the users differ."""
    tenth = max(1, len(values) // 10)
    return Spread(
        mean=float(values.mean()),
        sd=float(values.std()),
        worst_tenth=float(np.sort(values)[:tenth].mean()),
        groups={name: float(values[members].mean()) for name, members in groups.items()},
    )


def group_means(ranks: Ranks, groups: Groups) -> dict[str, dict[str, float]]:
    """Return the mean of the watched metrics in each group."""
    values = {name: per_user(ranks, name) for name in WATCHED}
    return {
        group: {name: float(value[members].mean()) for name, value in values.items()}
        for group, members in groups.items()
    }


def moved(before: Ranks, after: Ranks) -> dict[str, float]:
    """Return the shares of users whose held-out items came to stand better, worse, or the same.

    FedRKG, table 4, counts users whose aggregate score improved; which that is, it does not say.
    Here it is the AUC, which any step of a held-out item past another one changes.
    """
    change = per_user(after, "auc") - per_user(before, "auc")
    return {
        "improved": float((change > 0).mean()),
        "declined": float((change < 0).mean()),
        "unchanged": float((change == 0).mean()),
    }


AWAY = 0.01
"""A gate further than this from 1/2 is away from it."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class GateSums:
    """What is kept of some users' gates, [users] each, so that all gates never exist at once."""

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
    def of(cls, gates: NDArray[np.float32], popular: NDArray[np.bool_]) -> GateSums:
        """Sum up gates [users, items]."""
        apart = gates.astype(np.float64) - 0.5
        shut = np.finfo(np.float32).tiny  # a gate that rounds to 0 or 1 still has a logit
        inside = np.clip(gates.astype(np.float64), shut, 1 - 2.0**-24)
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
    def concat(cls, parts: list[GateSums]) -> GateSums:
        """Put the sums of several chunks one after the other."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def statistics(self, groups: Groups) -> dict[str, Any]:
        """Return what metrics.jsonl keeps of a guidance round."""
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
