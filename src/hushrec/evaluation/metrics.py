"""Metrics from ranks: exact expectations when ties are broken at random.

The names are a contract: ``hr@k``, ``ndcg@k``, ``recall@k``, ``precision@k``, ``mrr@k``, ``auc``,
and ``hits@k`` and ``ndcg1@k``, which rank each target by itself.
Every value is what uniformly random tie-breaking gives on average, computed, not drawn, so a model
that scores everything alike gets exactly the value of chance.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from hushrec.aggregation.statistics import PLACES, Tally, exact_sum
from hushrec.errors import ConfigError, InputError, nearest
from hushrec.evaluation.ranking import Ranks

Values = NDArray[np.float64]

_AT_K = ("hr", "ndcg", "recall", "precision", "mrr", "hits", "ndcg1")
OF_LISTS = ("coverage", "popularity_bias")
"""Metrics of everybody's lists together; no user has a value of their own."""


class Metric(NamedTuple):
    """A metric name, taken apart."""

    kind: str
    k: int | None
    """The cut-off; None for ``auc``, which looks at the whole ranking."""


def parse_metric(name: str, *, lists: bool = False) -> Metric:
    """Take a metric name such as ``ndcg@10`` apart; with ``lists``, one of `OF_LISTS` too."""
    if name == "auc":
        return Metric("auc", None)
    kind, _, cut = name.partition("@")
    if kind == "auc":
        raise ConfigError(f"metric '{name}': auc looks at the whole ranking, write 'auc'")
    if kind in OF_LISTS and not lists:
        raise ConfigError(f"metric '{name}' is one of lists, no user has a value of it")
    if kind not in _AT_K + OF_LISTS:
        known = [*_AT_K, "auc", *(OF_LISTS if lists else ())]
        raise ConfigError(f"unknown metric '{name}'{nearest(kind, known)}")
    if not re.fullmatch("[1-9][0-9]*", cut):
        raise ConfigError(
            f"metric '{name}': the cut-off must be a whole number from 1 on, as in '{kind}@10'"
        )
    return Metric(kind, int(cut))


def per_user(ranks: Ranks, name: str) -> Values:
    """Return the metric's value for each of ``ranks.users``."""
    kind, k = parse_metric(name)
    if k is None:
        return _auc(ranks)
    # Places beyond the longest candidate list are empty and would only need memory.
    cut = min(k, int(ranks.candidates.max(initial=1)))
    if kind in ("hr", "mrr"):
        return _of_first_target(ranks, kind, cut)
    n_targets = np.diff(ranks.indptr)
    if kind in ("hits", "ndcg1"):
        places = np.arange(2, cut + 2)
        gain = _running_sum(np.ones(cut) if kind == "hits" else 1 / np.log2(places))
        return _expected_total(gain, _alone(ranks)) / n_targets
    if kind == "ndcg":
        gain = _running_sum(1 / np.log2(np.arange(2, cut + 2)))
        ideal = gain[np.minimum(n_targets, cut)]
        return _expected_total(gain, ranks) / ideal
    hits = _expected_total(_running_sum(np.ones(cut)), ranks)
    return hits / n_targets if kind == "recall" else hits / k


def tally(ranks: Ranks, names: Iterable[str]) -> Tally:
    """Sum each named metric up over users, and count users by the place of their best target."""
    users = len(ranks.users)
    # Rounding can take a metric past 1 by its last bit, and nobody counts for more than one.
    sums = {name: exact_sum(per_user(ranks, name).clip(0, 1)) for name in names if users}
    places = np.zeros(PLACES, np.int64)
    if users:
        best = np.minimum.reduceat(ranks.ahead, ranks.indptr[:-1]).astype(np.int64) + 1
        places += np.bincount(np.log2(best).astype(np.int64), minlength=PLACES)
    return Tally(users, sums, places)


def summarise(ranks: Ranks, names: Iterable[str]) -> dict[str, float]:
    """Return the mean over users of each named metric."""
    if not len(ranks.users):
        raise InputError("no user could be evaluated: nobody has a held-out item")
    return tally(ranks, names).means()


def coverage(top_items: NDArray[np.int32], n_items: int) -> float:
    """Return the share of the catalogue that appears in anybody's list.

    ``top_items[user, place]`` comes from `top_k`; -1 is an empty place.
    """
    if n_items < 1:
        raise InputError("coverage needs a catalogue of at least one item")
    return len(np.unique(top_items[top_items >= 0])) / n_items


def popularity_bias(top_items: NDArray[np.int32], item_counts: NDArray[np.integer]) -> float:
    """Return the mean popularity percentile of the recommended items, between 0 and 1.

    The percentile of an item is the share of the catalogue with fewer training interactions, where
    items with equally many (itself among them) count half. Recommending every item equally often
    gives 0.5; recommending only the most popular ones comes close to 1.
    """
    recommended = top_items[top_items >= 0]
    if len(recommended) == 0:
        raise InputError("popularity bias needs at least one recommended item")
    percentile = (rankdata(item_counts) - 0.5) / len(item_counts)
    return float(percentile[recommended].mean())


def _running_sum(gain_at_place: Values) -> Values:
    return np.concatenate([np.zeros(1), np.cumsum(gain_at_place)])


def _expected_total(gain: Values, ranks: Ranks) -> Values:
    """Return each user's expected gain: a target gains the mean over its tied group's places.

    ``gain[r]`` is the gain of the first ``r`` places together; places beyond its end gain nothing.
    """
    last = len(gain) - 1
    size = ranks.tied + 1
    of_group = gain[np.minimum(ranks.ahead + size, last)] - gain[np.minimum(ranks.ahead, last)]
    return _summed_over_targets(ranks, of_group / size)


def _alone(ranks: Ranks) -> Ranks:
    """Rank each target among the candidates that are no targets, as if it were the only one.

    Of a user's targets, those with fewer candidates ahead score higher, and those with as many tie.
    """
    owner = np.repeat(np.arange(len(ranks.users)), np.diff(ranks.indptr))
    order = np.lexsort((ranks.ahead, owner))
    group = owner[order] * (np.int64(ranks.ahead.max(initial=0)) + 1) + ranks.ahead[order]
    first = np.searchsorted(group, group, side="left") - ranks.indptr[owner[order]]
    size = np.searchsorted(group, group, side="right") - np.searchsorted(group, group, side="left")
    ahead, tied = ranks.ahead.copy(), ranks.tied.copy()
    ahead[order] -= first.astype(np.int32)
    tied[order] -= (size - 1).astype(np.int32)
    return replace(ranks, ahead=ahead, tied=tied)


def _summed_over_targets(ranks: Ranks, values: NDArray[np.generic]) -> Values:
    return np.add.reduceat(values, ranks.indptr[:-1], dtype=np.float64)


def _of_first_target(ranks: Ranks, kind: str, k: int) -> Values:
    """Expected hit, or expected reciprocal rank, of the first target within the top k.

    Only the best tied group that holds a target matters. It follows ``ahead`` other items and has
    ``size`` members in random order, ``n_targets`` of them targets.
    """
    starts = ranks.indptr[:-1]
    ahead = np.minimum.reduceat(ranks.ahead, starts)
    in_best = ranks.ahead == np.repeat(ahead, np.diff(ranks.indptr))
    size = np.maximum.reduceat(np.where(in_best, ranks.tied, 0), starts) + 1
    n_targets = np.add.reduceat(in_best, starts, dtype=np.int64)
    slots = np.clip(k - ahead, 0, size)
    value = np.zeros(len(ahead))
    if kind == "hr":
        # Place one target after the other; if all before it missed the slots, the next one has
        # the choice among one place less.
        for placed in range(n_targets.max(initial=0)):
            chance = np.minimum(slots / np.maximum(size - placed, 1), 1)
            value += np.where(placed < n_targets, (1 - value) * chance, 0)
        return value
    # Walk down the places of the group; `missed` is the chance that no target came up yet.
    missed = np.ones(len(ahead))
    for place in range(slots.max(initial=0)):
        chance = np.minimum(n_targets / np.maximum(size - place, 1), 1)
        value += np.where(place < slots, missed * chance / (ahead + place + 1), 0)
        missed *= 1 - chance
    return value


def _auc(ranks: Ranks) -> Values:
    """Probability that a target beats a candidate that is no target; ties count half."""
    n_targets = np.diff(ranks.indptr)
    n_others = ranks.candidates - n_targets
    beaten_by = _summed_over_targets(ranks, ranks.ahead + ranks.tied / 2)
    # Every pair of targets was counted exactly once: by its lower member, or half by each.
    beaten_by -= n_targets * (n_targets - 1) / 2
    share = beaten_by / np.maximum(n_targets * n_others, 1)
    return np.where(n_others > 0, 1 - share, 0.5)
