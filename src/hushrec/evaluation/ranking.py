"""Ranks of held-out items among the candidates.

The rank of one target is a count (how many candidates score higher, how many the same), so nothing
is sorted, and ties are kept for the metrics to average over. The kernels release the interpreter
lock and only read the scores: callers run batches of users on threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.errors import DivergedError, InputError, RunError
from hushrec.kernels.jit import njit
from hushrec.kernels.ragged import checked_lists

IntArray = NDArray[np.int32]
LongArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


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

    def __post_init__(self) -> None:
        flat = all(
            getattr(self, field.name).ndim == 1
            and np.issubdtype(getattr(self, field.name).dtype, np.integer)
            for field in fields(self)
        )
        if not (
            flat
            and len(self.indptr) > 0
            and len(self.users) == len(self.candidates) == len(self.indptr) - 1
            and len(self.targets) == len(self.ahead) == len(self.tied) == self.indptr[-1]
            and self.indptr[0] == 0
            and np.all(np.diff(self.indptr) > 0)
        ):
            raise InputError("ranks: the arrays do not fit together")

    @classmethod
    def concat(cls, parts: Sequence[Ranks]) -> Ranks:
        """Join the ranks of several batches of users, in the order given."""
        sizes = [np.zeros(1, np.int64), *(np.diff(part.indptr) for part in parts)]

        def joined(name: str) -> IntArray:
            return np.concatenate([np.zeros(0, np.int32), *(getattr(part, name) for part in parts)])

        return cls(
            users=joined("users"),
            indptr=np.cumsum(np.concatenate(sizes)),
            targets=joined("targets"),
            ahead=joined("ahead"),
            tied=joined("tied"),
            candidates=joined("candidates"),
        )

    def to_arrays(self, prefix: str = "") -> dict[str, NDArray[np.generic]]:
        """Return the arrays under ``prefix + field name``, ready for npz or safetensors."""
        return {prefix + field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[np.generic]], prefix: str = "") -> Ranks:
        """Read back what `to_arrays` wrote."""
        try:
            stored: dict[str, Any] = {f.name: arrays[prefix + f.name] for f in fields(cls)}
        except KeyError as missing:
            raise RunError(f"stored ranks lack {missing}") from None
        return cls(**stored)


def rank_full(
    scores: FloatArray,
    users: IntArray,
    seen_indptr: LongArray,
    seen_items: IntArray,
    target_indptr: LongArray,
    target_items: IntArray,
) -> Ranks:
    """Rank each user's targets among all items the user has not seen.

    Row ``j`` of ``scores[user, item]`` and of both CSR lists belongs to ``users[j]``. A target is
    a candidate even if it was also seen; ``seen_items`` may repeat. Users without a target are
    left out.
    """
    return _rank(scores, users, seen_indptr, seen_items, target_indptr, target_items, True)


def rank_sampled(
    scores: FloatArray,
    users: IntArray,
    sample_indptr: LongArray,
    sample_items: IntArray,
    target_indptr: LongArray,
    target_items: IntArray,
) -> Ranks:
    """Rank each user's targets among the user's sampled items only.

    As `rank_full`, but the candidates are the sampled items plus the targets, each counted once.
    """
    return _rank(scores, users, sample_indptr, sample_items, target_indptr, target_items, False)


def _rank(
    scores: FloatArray,
    users: IntArray,
    listed_indptr: LongArray,
    listed_items: IntArray,
    target_indptr: LongArray,
    target_items: IntArray,
    listed_are_seen: bool,
) -> Ranks:
    rows, n_items = scores.shape
    if len(users) != rows:
        raise InputError(f"{len(users)} users for {rows} rows of scores")
    listed = "seen" if listed_are_seen else "sample"
    listed_indptr, listed_items = checked_lists(listed, listed_indptr, listed_items, rows, n_items)
    target_indptr, targets = checked_lists("target", target_indptr, target_items, rows, n_items)
    pairs = np.repeat(np.arange(rows), np.diff(target_indptr)) * n_items + targets
    if len(np.unique(pairs)) < len(pairs):
        raise InputError("a user's targets must differ from each other")
    ahead = np.zeros(len(targets), np.int32)
    tied = np.zeros(len(targets), np.int32)
    candidates = np.zeros(rows, np.int32)
    bad_row = _rank_kernel(
        scores,
        listed_indptr,
        listed_items,
        target_indptr,
        targets,
        listed_are_seen,
        ahead,
        tied,
        candidates,
    )
    if bad_row >= 0:
        raise DivergedError(f"user {users[bad_row]} has a score that is not a finite number")
    sizes = np.diff(target_indptr)
    evaluated = sizes > 0
    return Ranks(
        users=np.asarray(users, np.int32)[evaluated],
        indptr=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[evaluated])]),
        targets=targets,
        ahead=ahead,
        tied=tied,
        candidates=candidates[evaluated],
    )


@njit(cache=True, nogil=True)
def _rank_kernel(
    scores: FloatArray,
    listed_indptr: LongArray,
    listed_items: IntArray,
    target_indptr: LongArray,
    targets: IntArray,
    listed_are_seen: bool,
    ahead: IntArray,
    tied: IntArray,
    candidates: IntArray,
) -> int:
    """Fill the last three arrays; return the first row with a non-finite candidate, or -1."""
    rows, n_items = scores.shape
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
                return row
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
    return -1
