"""The best unseen items of each row of scores."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hushrec.errors import DivergedError, InputError
from hushrec.kernels.jit import njit

IntArray = NDArray[np.int32]
LongArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


def top_k(
    scores: FloatArray, seen_indptr: LongArray, seen_items: IntArray, count: int
) -> tuple[IntArray, FloatArray]:
    """Return each row's best unseen items and their scores, ties broken by lower item number.

    Both results are ``[user, rank]``. Where a row has fewer than ``count`` candidates, the rest
    is item -1 with score -inf.
    """
    if count < 1:
        raise InputError(f"k = {count}: a list has at least 1 item")
    rows, n_items = scores.shape
    seen_indptr, seen_items = checked_lists("seen", seen_indptr, seen_items, rows, n_items)
    items = np.full((rows, count), -1, np.int32)
    best = np.full((rows, count), -np.inf, scores.dtype)
    bad_row = _top_k_kernel(scores, seen_indptr, seen_items, items, best)
    if bad_row >= 0:
        raise DivergedError(f"row {bad_row} has a score that is not a finite number")
    return items, best


def checked_lists(
    name: str, indptr: LongArray, items: IntArray, rows: int, n_items: int
) -> tuple[LongArray, IntArray]:
    """Check lists of items, one per row, and fix their types: kernels do not check bounds."""
    indptr = np.ascontiguousarray(indptr, np.int64)
    items = np.ascontiguousarray(items, np.int32)
    if (
        len(indptr) != rows + 1
        or indptr[0] != 0
        or indptr[-1] != len(items)
        or np.any(np.diff(indptr) < 0)
    ):
        raise InputError(f"{name}_indptr does not divide {len(items)} items among {rows} rows")
    if len(items) and not (items.min() >= 0 and items.max() < n_items):
        raise InputError(f"{name}_items must be item numbers from 0 to {n_items - 1}")
    return indptr, items


@njit(cache=True, nogil=True)
def _top_k_kernel(
    scores: FloatArray,
    seen_indptr: LongArray,
    seen_items: IntArray,
    items: IntArray,
    best: FloatArray,
) -> int:
    """Fill the last two arrays; return the first row with a non-finite candidate, or -1."""
    rows, n_items = scores.shape
    last = items.shape[1] - 1
    seen = np.full(n_items, -1, np.int64)
    for row in range(rows):
        for item in seen_items[seen_indptr[row] : seen_indptr[row + 1]]:
            seen[item] = row
        for item in range(n_items):
            if seen[item] == row:
                continue
            score = scores[row, item]
            if not np.isfinite(score):
                return row
            # Items come in ascending order, so letting only a strictly higher score pass
            # another item is the tie rule.
            if score <= best[row, last]:
                continue
            rank = last
            while rank > 0 and best[row, rank - 1] < score:
                best[row, rank] = best[row, rank - 1]
                items[row, rank] = items[row, rank - 1]
                rank -= 1
            best[row, rank] = score
            items[row, rank] = item
    return -1
