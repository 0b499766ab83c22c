"""Ranks of held-out items among the candidates, and metrics of these ranks.

The rank of one target (a held-out item) is a count: how many candidates score higher, how many the
same. So nothing is sorted, and ties are kept. The kernel releases the interpreter lock and only
reads the scores: callers run batches of users on threads.

A `Metric` gives each user a value in [0, 1] from the ranks of the user's targets: the exact
expectation under uniformly random tie-breaking, so a model that scores all items alike gets exactly
the value of chance. Values of users add up exactly, so an evaluation can be federated. A
`ListMetric` describes the lists of all users together. ``hr@10`` is the metric that the entry point
``hr`` of the group ``hushrec.metrics`` names, with the cut-off 10.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from hushrec.aggregation import RANK_BINS, Tally, exact_sum
from hushrec.config import find
from hushrec.data.views import Ragged
from hushrec.errors import ConfigError, DivergedError, InputError, RunError
from hushrec.kernels.jit import njit
from hushrec.kernels.ragged import FloatArray, IntArray, LongArray, checked_lists

Values = NDArray[np.float64]
"""One number per user."""
ROUNDING = 1e-9
"""How far rounding may take a value out of [0, 1]."""


@dataclass(frozen=True, eq=False)
class Ranks:
    """Rank of each held-out item, ties kept: any metric at any k can be computed from it."""

    users: IntArray
    """Global user numbers, in the order given; each has at least one target."""
    indptr: LongArray
    """The targets of ``users[j]`` are rows ``indptr[j]:indptr[j + 1]``."""
    targets: IntArray
    """Item numbers."""
    ahead: IntArray
    """Candidates scored strictly higher than the target, other targets included."""
    tied: IntArray
    """Other candidates scored exactly equal, other targets included."""
    candidates: IntArray
    """Size of the user's candidate set, targets included."""
    repeated: NDArray[np.int8] | None = None
    """1 for targets that are in the user's history; None where those are no candidates."""

    def __post_init__(self) -> None:
        arrays = [array for array in vars(self).values() if array is not None]
        if not (
            all(array.ndim == 1 and array.dtype.kind in "iu" for array in arrays)
            and len(self.indptr) > 0
            and len(self.users) == len(self.candidates) == len(self.indptr) - 1
            and len(self.targets) == len(self.ahead) == len(self.tied) == self.indptr[-1]
            and self.indptr[0] == 0
            and np.all(np.diff(self.indptr) > 0)
            and (self.repeated is None or len(self.repeated) == len(self.targets))
        ):
            raise InputError("ranks: the arrays do not fit together")

    @classmethod
    def concat(cls, parts: Sequence[Ranks]) -> Ranks:
        """Join the ranks of several batches of users, in the order given."""
        none = np.zeros(0, np.int32)
        joined: dict[str, Any] = {
            field.name: np.concatenate([none, *(getattr(part, field.name) for part in parts)])
            for field in fields(cls)
            if field.name != "repeated" or any(part.repeated is not None for part in parts)
        }
        sizes = [np.zeros(1, np.int64), *(np.diff(part.indptr) for part in parts)]
        return cls(**joined | {"indptr": np.cumsum(np.concatenate(sizes))})

    def to_arrays(self, prefix: str = "") -> dict[str, NDArray[np.generic]]:
        """Return the arrays under ``prefix + field name``, ready for npz or safetensors."""
        return {prefix + name: array for name, array in vars(self).items() if array is not None}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], prefix: str = "") -> Ranks:
        """Read back what `to_arrays` wrote."""
        try:
            stored: dict[str, Any] = {
                f.name: arrays[prefix + f.name] for f in fields(cls) if f.name != "repeated"
            }
        except KeyError as missing:
            raise RunError(f"stored ranks lack {missing}") from None
        return cls(**stored, repeated=arrays.get(f"{prefix}repeated"))


def rank_full(scores: FloatArray, users: IntArray, seen: Ragged, targets: Ragged) -> Ranks:
    """Rank each user's targets among all items the user has not seen.

    Row ``j`` of ``scores[user, item]`` and of both lists belongs to ``users[j]``. A target is a
    candidate even if it was also seen; seen items may repeat. Users without a target are left out.
    """
    return _rank(scores, users, seen, targets, True)


def rank_sampled(scores: FloatArray, users: IntArray, sample: Ragged, targets: Ragged) -> Ranks:
    """Rank targets among a user's sampled items and targets, each once; rows as in `rank_full`."""
    return _rank(scores, users, sample, targets, False)


def _rank(
    scores: FloatArray, users: IntArray, listed: Ragged, targets: Ragged, listed_are_seen: bool
) -> Ranks:
    rows, n_items = scores.shape
    if len(users) != rows:
        raise InputError(f"{len(users)} users for {rows} rows of scores")
    what = "seen" if listed_are_seen else "sample"
    listed_lists = checked_lists(what, listed.indptr, listed.values, rows, n_items)
    indptr, items = checked_lists("target", targets.indptr, targets.values, rows, n_items)
    sizes = np.diff(indptr)
    pairs = np.repeat(np.arange(rows), sizes) * n_items + items
    if len(np.unique(pairs)) < len(pairs):
        raise InputError("a user's targets must differ from each other")
    lists = (*listed_lists, indptr, items)
    bad_row, ahead, tied, candidates = _rank_kernel(scores, *lists, listed_are_seen)
    if bad_row >= 0:
        raise DivergedError(f"user {users[bad_row]} has a score that is not a finite number")
    evaluated = sizes > 0
    starts = np.append(0, np.cumsum(sizes[evaluated]))
    ids = np.asarray(users, np.int32)[evaluated]
    return Ranks(ids, starts, items, ahead, tied, candidates[evaluated])


@njit(cache=True, nogil=True)
def _rank_kernel(
    scores: FloatArray,
    listed_indptr: LongArray,
    listed_items: IntArray,
    target_indptr: LongArray,
    targets: IntArray,
    listed_are_seen: bool,
) -> tuple[int, IntArray, IntArray, IntArray]:
    """Return the first row with a non-finite candidate, or -1; ahead, tied and candidates."""
    rows, n_items = scores.shape
    ahead, tied = np.zeros(len(targets), np.int32), np.zeros(len(targets), np.int32)
    candidates = np.zeros(rows, np.int32)
    # What an item is to the current row; the row number itself serves as the mark, so that the
    # marks never need clearing.
    listed = np.full(n_items, -1, np.int64)
    # One entry more than items: each score is written first, and kept or overwritten after.
    pool = np.empty(n_items + 1, scores.dtype)
    for row in range(rows):
        first, last = target_indptr[row], target_indptr[row + 1]
        if first == last:
            continue
        size = 0
        if listed_are_seen:
            for item in listed_items[listed_indptr[row] : listed_indptr[row + 1]]:
                listed[item] = row
            for target in targets[first:last]:
                listed[target] = -1
            for item in range(n_items):
                pool[size] = scores[row, item]
                size += listed[item] != row
        else:
            for item in listed_items[listed_indptr[row] : listed_indptr[row + 1]]:
                pool[size] = scores[row, item]
                size += listed[item] != row
                listed[item] = row
            for target in targets[first:last]:
                pool[size] = scores[row, target]
                size += listed[target] != row
                listed[target] = row
        for entry in range(size):
            if not np.isfinite(pool[entry]):
                return row, ahead, tied, candidates
        candidates[row] = size
        for index in range(first, last):
            own = scores[row, targets[index]]
            higher = np.int32(0)
            equal = np.int32(0)
            for entry in range(size):
                higher += pool[entry] > own
                equal += pool[entry] == own
            ahead[index] = higher
            tied[index] = equal - 1
    return -1, ahead, tied, candidates


@dataclass(frozen=True)
class Metric(ABC):
    """A value in [0, 1] for each user, computed from ranks."""

    has_cutoff: ClassVar[bool] = True
    """False for a metric of the whole ranking, which is written without ``@k``."""

    k: int = 0
    """The cut-off: the length of the list that counts."""

    @abstractmethod
    def values(self, ranks: Ranks) -> Values:
        """Return the value for each of ``ranks.users``: the expectation under random ties."""

    def cut(self, ranks: Ranks) -> int:
        """Return the cut-off, or the length of the longest candidate list if that is less."""
        return min(self.k, int(ranks.candidates.max(initial=1)))


@dataclass(frozen=True)
class ListMetric(ABC):
    """A value for the lists of all users together; no single user has one."""

    k: int
    """The length of the lists."""

    @abstractmethod
    def value(self, top_items: NDArray[np.int32], item_counts: NDArray[np.integer]) -> float:
        """Return the value of the lists ``top_items[user, rank]``, where -1 is an empty rank.

        ``item_counts`` has the number of training interactions of each item of the catalogue.
        """


def metric_name(metric: str) -> str:
    """Write a metric's name as people do: HR@10."""
    return metric.upper() if metric[:2] in ("hr", "nd", "mr", "au") else metric.capitalize()


def parse_metric(name: str) -> Metric | ListMetric:
    """Return the metric of a name such as ``ndcg@10``, ``auc`` or ``coverage@10``."""
    kind, _, cut = name.partition("@")
    metric = find("metrics", kind)
    if not isinstance(metric, type) or not issubclass(metric, Metric | ListMetric):
        raise ConfigError(f"entry point '{kind}' of hushrec.metrics: no class of a metric")
    if issubclass(metric, Metric) and not metric.has_cutoff:
        if name != kind:
            raise ConfigError(f"metric '{name}': {kind} looks at the whole ranking, write '{kind}'")
        return metric()
    if not re.fullmatch("[1-9][0-9]*", cut):
        raise ConfigError(f"metric '{name}': write a whole number from 1 on, as in '{kind}@10'")
    return metric(int(cut))


def user_metric(name: str) -> Metric:
    """Return the metric of a name; refuse metrics of lists, of which no user has a value."""
    metric = parse_metric(name)
    if isinstance(metric, ListMetric):
        raise ConfigError(f"metric '{name}' is one of lists, no user has a value of it")
    return metric


def per_user(ranks: Ranks, name: str) -> Values:
    """Return the metric's value for each of ``ranks.users``."""
    values = user_metric(name).values(ranks)
    in_range = (values >= -ROUNDING) & (values <= 1 + ROUNDING)
    if values.shape != ranks.users.shape or not in_range.all():
        raise ConfigError(f"metric '{name}' must give each user one value between 0 and 1")
    return values


def tally(ranks: Ranks, names: Iterable[str]) -> Tally:
    """Sum each named metric over users, and count users by the rank of their best target."""
    users = len(ranks.users)
    # Rounding can take a metric past 1 by its last bit, and no user counts for more than one.
    sums = {name: exact_sum(per_user(ranks, name).clip(0, 1)) if users else 0 for name in names}
    rank_counts = np.zeros(RANK_BINS, np.int64)
    if users:
        best = np.minimum.reduceat(ranks.ahead, ranks.indptr[:-1]).astype(np.int64) + 1
        rank_counts += np.bincount(np.log2(best).astype(np.int64), minlength=RANK_BINS)
    return Tally(users, sums, rank_counts)


def summarise(ranks: Ranks, names: Iterable[str]) -> dict[str, float]:
    """Return the mean over users of each named metric."""
    if not len(ranks.users):
        raise InputError("no user could be evaluated: nobody has a held-out item")
    return tally(ranks, names).means()


def expected_gain(
    ranks: Ranks, gains: Values, counted: NDArray[Any] | np.bool_ = np.True_
) -> Values:
    """Return each user's expected sum of gains over the targets, ties broken at random.

    ``gains[r]`` is the gain of a target at rank ``r + 1``; later ranks gain nothing, and neither do
    targets that are not ``counted``.
    """
    total, last = np.append(0, np.cumsum(gains)), len(gains)  # of the first r ranks
    size = ranks.tied + 1  # a target takes each rank of its tied group with equal probability
    of_group = total[np.minimum(ranks.ahead + size, last)] - total[np.minimum(ranks.ahead, last)]
    return np.add.reduceat(of_group / size * counted, ranks.indptr[:-1])


class HitRate(Metric):
    """``hr@k``: 1 if any target is in the top k, else 0."""

    def values(self, ranks: Ranks) -> Values:
        """Place the targets of the best tied group one after the other.

        If all targets before it missed the top k, the next one has one rank less to choose from.
        """
        _, size, n_targets, slots = _best_group(ranks, self.cut(ranks))
        value = np.zeros(len(size))
        for placed in range(n_targets.max(initial=0)):
            chance = np.minimum(slots / np.maximum(size - placed, 1), 1)
            value += np.where(placed < n_targets, (1 - value) * chance, 0)
        return value


class ReciprocalRank(Metric):
    """``mrr@k``: 1 / rank of the first target, 0 beyond k."""

    def values(self, ranks: Ranks) -> Values:
        """Walk down the ranks of the best tied group that holds a target."""
        ahead, size, n_targets, slots = _best_group(ranks, self.cut(ranks))
        value = np.zeros(len(ahead))
        missed = np.ones(len(ahead))  # probability that no target came up yet
        for rank in range(slots.max(initial=0)):
            chance = np.minimum(n_targets / np.maximum(size - rank, 1), 1)
            value += np.where(rank < slots, missed * chance / (ahead + rank + 1), 0)
            missed *= 1 - chance
        return value


class NDCG(Metric):
    """``ndcg@k``: sum of 1 / log2(rank + 1) of targets in the top k, relative to the ideal list."""

    def values(self, ranks: Ranks) -> Values:
        """Divide the expected gain by the gain of the first ranks."""
        gains = _discounts(self.cut(ranks))
        ideal: Values = np.cumsum(gains)[np.minimum(np.diff(ranks.indptr), len(gains)) - 1]
        return expected_gain(ranks, gains) / ideal


class Recall(Metric):
    """``recall@k``: targets in the top k, over the number of targets."""

    def values(self, ranks: Ranks) -> Values:
        """Divide the expected number of hits."""
        return expected_gain(ranks, np.ones(self.cut(ranks))) / np.diff(ranks.indptr)


class Precision(Metric):
    """``precision@k``: targets in the top k, over k, also where there are fewer candidates."""

    def values(self, ranks: Ranks) -> Values:
        """Divide the expected number of hits."""
        return expected_gain(ranks, np.ones(self.cut(ranks))) / self.k


class F1(Metric):
    """``f1@k``: harmonic mean of recall and precision, 2 · hits / (k + number of targets)."""

    def values(self, ranks: Ranks) -> Values:
        """Divide the expected number of hits."""
        hits = 2 * expected_gain(ranks, np.ones(self.cut(ranks)))
        return np.asarray(hits / (self.k + np.diff(ranks.indptr)))


class RepeatRecall(Metric):
    """``recall_repeat@k``: targets in the top k that the user had before, over all targets."""

    def values(self, ranks: Ranks) -> Values:
        """Count targets of the history; with those of `NewRecall` they add up to recall."""
        repeated = np.False_ if ranks.repeated is None else ranks.repeated > 0
        return expected_gain(ranks, np.ones(self.cut(ranks)), repeated) / np.diff(ranks.indptr)


class NewRecall(Metric):
    """``recall_new@k``: targets in the top k that are new to the user, over all targets."""

    def values(self, ranks: Ranks) -> Values:
        """Count targets that are not in the history."""
        new = np.True_ if ranks.repeated is None else ranks.repeated == 0
        return expected_gain(ranks, np.ones(self.cut(ranks)), new) / np.diff(ranks.indptr)


class SingleTargetHits(Recall):
    """``hits@k``: recall where each target is ranked among non-targets only, as in PrivRec."""

    def values(self, ranks: Ranks) -> Values:
        """Average over the targets."""
        return super().values(_without_other_targets(ranks))


class SingleTargetNDCG(Metric):
    """``ndcg1@k``: mean of 1 / log2(rank + 1), each target ranked among non-targets only."""

    def values(self, ranks: Ranks) -> Values:
        """Average over the targets."""
        alone = _without_other_targets(ranks)
        return expected_gain(alone, _discounts(self.cut(ranks))) / np.diff(ranks.indptr)


class AUC(Metric):
    """``auc``: probability that a target outscores a non-target candidate, ties counted half."""

    has_cutoff: ClassVar[bool] = False

    def values(self, ranks: Ranks) -> Values:
        """Count pairs of a target and a non-target; without non-targets the value is 0.5."""
        n_targets = np.diff(ranks.indptr)
        n_others = ranks.candidates - n_targets
        beaten_by = np.add.reduceat(ranks.ahead + ranks.tied / 2, ranks.indptr[:-1])
        # Every pair of targets was counted exactly once: by its lower member, or half by each.
        beaten_by -= n_targets * (n_targets - 1) / 2
        share = beaten_by / np.maximum(n_targets * n_others, 1)
        return np.where(n_others > 0, 1 - share, 0.5)


class Coverage(ListMetric):
    """``coverage@k``: share of the catalogue that is in the list of some user."""

    def value(self, top_items: NDArray[np.int32], item_counts: NDArray[np.integer]) -> float:
        """Count the distinct items."""
        if len(item_counts) < 1:
            raise InputError("coverage needs a catalogue of at least one item")
        return len(np.unique(top_items[top_items >= 0])) / len(item_counts)


class PopularityBias(ListMetric):
    """``popularity_bias@k``: mean popularity percentile of the recommended items, in [0, 1].

    The percentile of an item is the share of the catalogue with fewer training interactions, where
    items with equally many (itself among them) count half. Recommending every item equally often
    gives 0.5; recommending only the most popular ones comes close to 1.
    """

    def value(self, top_items: NDArray[np.int32], item_counts: NDArray[np.integer]) -> float:
        """Average over the ranks of all lists."""
        recommended = top_items[top_items >= 0]
        if len(recommended) == 0:
            raise InputError("popularity bias needs at least one recommended item")
        percentile = (rankdata(item_counts) - 0.5) / len(item_counts)
        return float(percentile[recommended].mean())


def _discounts(cut: int) -> Values:
    return np.asarray(1 / np.log2(np.arange(2, cut + 2)))


def _best_group(ranks: Ranks, k: int) -> tuple[NDArray[np.int_], ...]:
    """Return the best tied group with a target: candidates ahead, size, targets, top-k ranks."""
    starts = ranks.indptr[:-1]
    ahead = np.minimum.reduceat(ranks.ahead, starts)
    in_best = ranks.ahead == np.repeat(ahead, np.diff(ranks.indptr))
    size = np.maximum.reduceat(np.where(in_best, ranks.tied, 0), starts) + 1
    n_targets = np.add.reduceat(in_best, starts, dtype=np.int64)
    return ahead, size, n_targets, np.clip(k - ahead, 0, size)


def _without_other_targets(ranks: Ranks) -> Ranks:
    """Rank each target among the non-target candidates, as if it were the only target.

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
