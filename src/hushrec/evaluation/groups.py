"""Groups of users, and whether a difference between two methods is real.

Intervals and paired tests are over users, corrected for many comparisons. Groups of users (FedRKG,
Lim et al., 2025, section 6.3) are made from the training interactions alone, among the evaluated
users:

- **cold** and **warm**: the 30 % with the fewest and with the most training interactions;
- **distinct** and **followers**: the 30 % with the smallest and with the largest share of their
  training interactions on popular items, the 30 % of the catalogue with the most of them.

The paper does not say how low a share makes a user distinct; 30 % is its other cut. Ties at a cut
are broken by the user's number, so that a group has the same members in every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.stats import wilcoxon

from hushrec.data.interactions import Interactions
from hushrec.data.splitting import Split, SplitConfig
from hushrec.data.views import Ragged, TrainView
from hushrec.errors import ConfigError, InputError
from hushrec.evaluation.metrics import Ranks, per_user

Values = NDArray[np.float64]

_CHUNK = 1 << 20
"""Random numbers held at once: small enough to stay in the cache, large enough to vectorise."""
RESAMPLES, RESAMPLED_VALUES = 2_000, 50_000_000
"""Resamples of an interval, and values drawn for one at most."""


@dataclass(frozen=True)
class PairedTest:
    """Two methods compared on the same users."""

    difference: float
    """Mean of ``a - b``."""
    low: float
    high: float
    """Ends of the 95 % bootstrap interval of the difference."""
    p_value: float
    """Two-sided."""
    n: int
    """Number of users."""


def bootstrap_interval(
    values: Values, *, level: float = 0.95, resamples: int | None = None, seed: int = 0
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean, resampling users.

    By default there are 2,000 resamples, and fewer beyond 25,000 users.
    """
    values = _checked(values)
    if resamples is None:
        resamples = max(200, min(RESAMPLES, RESAMPLED_VALUES // len(values)))
    if not 0 < level < 1:
        raise ConfigError(f"the level of an interval lies between 0 and 1, not {level}")
    rng = np.random.default_rng(seed)
    n = len(values)
    means = np.empty(resamples)
    for part in _chunks(resamples, n):
        means[part] = values[rng.integers(0, n, (part.stop - part.start, n), np.int32)].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired_test(
    a: Values,
    b: Values,
    *,
    method: Literal["randomisation", "wilcoxon"] = "randomisation",
    resamples: int = 10_000,
    seed: int = 0,
) -> PairedTest:
    """Test whether ``a`` and ``b``, values of the same users in the same order, differ.

    ``randomisation`` swaps the two methods at random for each user and asks how often the mean
    difference is at least as large as the observed one. ``wilcoxon`` is the signed-rank test with
    Pratt's rule for users without a difference.
    """
    a, b = _checked(a), _checked(b)
    if len(a) != len(b):
        raise InputError(f"a paired test needs the same users: {len(a)} against {len(b)} values")
    difference = a - b
    if method == "randomisation":
        p_value = _sign_flip(difference, resamples, seed)
    elif method == "wilcoxon":
        ranked = difference.any()
        p_value = float(wilcoxon(difference, zero_method="pratt").pvalue) if ranked else 1.0
    else:
        raise ConfigError(f"unknown test '{method}'; known: randomisation, wilcoxon")
    low, high = bootstrap_interval(difference, seed=seed)
    return PairedTest(float(difference.mean()), low, high, p_value, len(difference))


def holm(p_values: Sequence[float] | Values) -> Values:
    """Return Holm's adjusted p-values, for the family-wise error rate, in the order given."""
    p = np.asarray(p_values, np.float64)
    if not np.all((p >= 0) & (p <= 1)):
        raise InputError("p-values lie between 0 and 1")
    order = np.argsort(p)
    adjusted = np.empty(len(p))
    adjusted[order] = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    return np.minimum(adjusted, 1)


def _sign_flip(difference: Values, resamples: int, seed: int) -> float:
    rng = np.random.default_rng(seed)
    n = len(difference)
    total = difference.sum()
    # Sums that are equal on paper differ in the last bits; those count as at least as large.
    threshold = abs(total) - 1e-12 * np.abs(difference).sum()
    extreme = 0
    for part in _chunks(resamples, n):
        random_bytes = rng.integers(0, 256, (part.stop - part.start, (n + 7) // 8), np.uint8)
        kept = np.unpackbits(random_bytes, axis=1, count=n).astype(np.float64)
        extreme += int(np.count_nonzero(np.abs(2 * (kept @ difference) - total) >= threshold))
    # The observed assignment is one of the possible ones, hence the + 1: p is never 0.
    return (extreme + 1) / (resamples + 1)


def _chunks(resamples: int, n: int) -> list[slice]:
    if resamples < 1:
        raise ConfigError(f"at least 1 resample is needed, not {resamples}")
    rows = max(1, _CHUNK // n)
    return [slice(first, min(first + rows, resamples)) for first in range(0, resamples, rows)]


def _checked(values: Values) -> Values:
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or len(values) == 0 or not np.all(np.isfinite(values)):
        raise InputError("a test needs one finite value for each of at least one user")
    return values


MOST_RATINGS, LARGEST_RATING, LIKED = 41, 100, 0.8
"""A scale of ratings has at most so many different values, and none larger; from this share of the
largest one on a rating means that somebody liked the item."""


def split_notes(data: Interactions, config: SplitConfig) -> list[str]:
    """Return what to know before training: low ratings count as liked, or rows are baskets."""
    notes: list[str] = []
    if not len(data):
        return notes
    low, high = float(data.value.min()), float(data.value.max())
    if config.drop_below is None and config.positive_above is None and low < high <= LARGEST_RATING:
        found = np.unique(data.value)
        if len(found) <= MOST_RATINGS:
            liked = float(found[found >= min(LIKED * high, high)].min())
            notes.append(
                f"all {len(data):,} rows count as liked, values from {low:g} to {high:g} among "
                f"them: split.drop_below = {liked:g} keeps those of {liked:g} and more"
            )
    if data.has_baskets and not config.next_basket:
        notes.append(
            "rows of one time are baskets, and items are bought again: split.kind = next-basket "
            "predicts the next basket"
        )
    return notes


FEW_USERS, FEW_SHARE = 100, 0.1
"""Evaluated users, and their share of all users, below which a mean is marked."""
TIED_SHARE = 0.05
"""Share of evaluated users with tied ends from which a mean is marked."""


def few_users_mark(evaluated: int, users: int, *, drawn: bool = False) -> list[str]:
    """Return the mark of figures of few users; ``drawn`` ones stand for all, whatever the share."""
    few = evaluated < FEW_USERS or (not drawn and evaluated < FEW_SHARE * users)
    return [f"{evaluated:,} of {users:,} users are evaluated"] if few else []


def split_marks(split: Split) -> list[str]:
    """Return why the figures of a split are not what they seem, a sentence each.

    The words before a colon are its short form.
    """
    evaluated, data = split.evaluated("test"), split.data
    if not split.config.hold_out:
        return []  # no figures
    drawn = split.config.order == "random"
    marks = few_users_mark(len(evaluated), split.n_users, drawn=split.config.kind == "unseen-users")
    if not data.in_order:
        held_out = "the holdout is drawn" if drawn else "the order of its lines decides the holdout"
        return [*marks, f"the file has no times: {held_out}"]
    tied = 0.0 if drawn else _tied_share(split, evaluated)
    if tied >= TIED_SHARE:
        marks.append(
            f"{100 * tied:.0f} % of users have ties at the end: the order of lines in the file "
            "decides what is held out"
        )
    return marks


def _tied_share(split: Split, evaluated: NDArray[np.int64]) -> float:
    """Return the share of evaluated users who have a test row and another row of the same time."""
    data, n_users = split.data.merged(), split.n_users

    def are_in(part: Ragged) -> NDArray[np.bool_]:
        owner = np.repeat(np.arange(n_users), part.lengths)
        pair = data.user.astype(np.int64) * data.n_items + data.item
        return np.isin(pair, owner * data.n_items + part.values)

    tests = are_in(split.test)
    others = ~(tests | are_in(split.disliked))
    first = np.full(n_users, np.iinfo(np.int64).max)
    np.minimum.at(first, data.user[tests], data.time[tests])
    tied = np.zeros(n_users, np.bool_)
    tied[data.user[others & (data.time == first[data.user])]] = True
    return float(tied[evaluated].mean()) if len(evaluated) else 0.0


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
        mean=_mean(values),
        sd=float(values.std()) if len(values) else 0.0,
        worst_tenth=_mean(np.sort(values)[:tenth]),
        groups={name: _mean(values[members]) for name, members in groups.items()},
    )


def group_means(ranks: Ranks, groups: Groups) -> dict[str, dict[str, float]]:
    """Return the mean of the reported metrics in each group."""
    values = {name: per_user(ranks, name) for name in GROUP_METRICS}
    return {
        group: {name: _mean(value[members]) for name, value in values.items()}
        for group, members in groups.items()
    }


def rank_changes(before: Ranks, after: Ranks) -> dict[str, float]:
    """Return the shares of users whose held-out items rank better, worse, or the same.

    FedRKG, table 4, counts users whose aggregate score improved; which that is, it does not say.
    Here it is the AUC, which changes whenever a held-out item passes another item.
    """
    change = per_user(after, "auc") - per_user(before, "auc")
    return {
        "improved": _mean(change > 0),
        "declined": _mean(change < 0),
        "unchanged": _mean(change == 0),
    }


def _mean(values: NDArray[Any]) -> float:
    """Return the mean; 0 of nobody, which is no error where privacy is promised."""
    return float(values.mean()) if len(values) else 0.0


AWAY = 0.01
"""Distance from 1/2 beyond which a gate counts as away from it."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def gates_by_user(gates: NDArray[np.float32], popular: NDArray[np.bool_]) -> dict[str, Values]:
    """Return statistics of each user's gates, so that the gates [users, items] need not be kept.

    ``squares`` is the mean squared distance from 1/2; ``logit`` and ``popular_logit`` are means of
    the inverse sigmoid over all and over the popular items (FedRKG, tables D.4 and D.3).
    """
    apart = gates.astype(np.float64) - 0.5
    smallest = np.finfo(np.float32).tiny  # gates that round to 0 or 1 get a finite logit
    inside = np.clip(gates.astype(np.float64), smallest, 1 - 2.0**-24)
    logits = np.log(inside) - np.log1p(-inside)
    return {
        "mean": 0.5 + apart.mean(axis=1),
        "squares": (apart**2).mean(axis=1),
        "popular": 0.5 + apart[:, popular].mean(axis=1),
        "away": (abs(apart) > AWAY).mean(axis=1),
        "logit": logits.mean(axis=1),
        "popular_logit": logits[:, popular].mean(axis=1),
    }


def gate_statistics(parts: Sequence[Mapping[str, Values]], groups: Groups) -> dict[str, Any]:
    """Return the statistics that metrics.jsonl holds of a guidance round, from all batches."""
    users = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    mean = float(users["mean"].mean())
    variance = float(users.pop("squares").mean()) - (mean - 0.5) ** 2
    quantiles = np.quantile(users["mean"], QUANTILES)
    return {
        "mean": mean,
        "sd": float(np.sqrt(max(0.0, variance))),
        "away": float(users["away"].mean()),
        "user_quantiles": {
            f"{q:g}": float(value) for q, value in zip(QUANTILES, quantiles, strict=True)
        },
        "groups": {
            group: {name: float(values[members].mean()) for name, values in users.items()}
            for group, members in groups.items()
        },
    }
