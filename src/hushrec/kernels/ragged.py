"""Ragged stacks of rows: taking, comparing and writing them, and their exact sums."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.kernels.jit import njit

Array = NDArray[Any]


@njit(cache=True, nogil=True)
def take_ragged(indptr: Array, values: Array, rows: Array) -> tuple[Array, Array]:
    """Return the ragged array of these rows, in this order."""
    out_indptr = np.zeros(len(rows) + 1, np.int64)
    for r in range(len(rows)):
        out_indptr[r + 1] = out_indptr[r] + indptr[rows[r] + 1] - indptr[rows[r]]
    out = np.empty(out_indptr[-1], values.dtype)
    for r in range(len(rows)):
        out[out_indptr[r] : out_indptr[r + 1]] = values[indptr[rows[r]] : indptr[rows[r] + 1]]
    return out_indptr, out


@njit(cache=True, nogil=True)
def copy_ragged(
    source: Array, source_start: Array, target: Array, start: Array, end: Array
) -> None:
    """Copy, for every r, the entries from ``source_start[r]`` on to ``target[start[r]:end[r]]``."""
    for r in range(len(start)):
        first = source_start[r]
        target[start[r] : end[r]] = source[first : first + end[r] - start[r]]


@njit(cache=True, nogil=True)
def sorted_union(
    first_indptr: Array, first: Array, second_indptr: Array, second: Array
) -> tuple[Array, Array]:
    """Return, for every client, the ascending distinct values of two ragged arrays."""
    clients = len(first_indptr) - 1
    indptr = np.zeros(clients + 1, np.int64)
    out = np.empty(len(first) + len(second), first.dtype)
    end = 0
    for c in range(clients):
        start = end
        for k in range(first_indptr[c], first_indptr[c + 1]):
            out[end] = first[k]
            end += 1
        for k in range(second_indptr[c], second_indptr[c + 1]):
            out[end] = second[k]
            end += 1
        out[start:end].sort()
        kept = start
        for k in range(start, end):
            if k == start or out[k] != out[k - 1]:
                out[kept] = out[k]
                kept += 1
        end = kept
        indptr[c + 1] = end
    return indptr, out[:end].copy()


@njit(cache=True, nogil=True)
def number_by_first_use(indptr: Array, items: Array, n_items: int) -> tuple[Array, Array, Array]:
    """Number each client's distinct items in the order of their first use.

    Returns (indptr, the distinct items, the number of every entry).
    """
    out_indptr = np.zeros_like(indptr)
    out, place = np.empty(len(items), np.int32), np.empty(len(items), np.int64)
    place_of = np.full(n_items, -1, np.int64)
    end = 0
    for c in range(len(indptr) - 1):
        start = end
        for p in range(indptr[c], indptr[c + 1]):
            if place_of[items[p]] < 0:
                place_of[items[p]] = end - start
                out[end] = items[p]
                end += 1
            place[p] = place_of[items[p]]
        for k in range(start, end):
            place_of[out[k]] = -1
        out_indptr[c + 1] = end
    return out_indptr, out[:end].copy(), place


@njit(cache=True, nogil=True)
def put_rows(
    tables: Array, slots: Array, clients: Array, indptr: Array, ids: Array, rows: Array
) -> None:
    """Write rows of some clients of a ragged stack into their tables, ``tables[slots[n]]``."""
    for n in range(len(clients)):
        for r in range(indptr[clients[n]], indptr[clients[n] + 1]):
            tables[slots[n], ids[r], :] = rows[r]


@njit(cache=True, nogil=True)
def add_scattered(dense: Array, indptr: Array, ids: Array, rows: Array) -> None:
    """Add each client's rows to its own whole table: dense is [clients, n_rows, width]."""
    for c in range(len(dense)):
        for entry in range(indptr[c], indptr[c + 1]):
            for k in range(rows.shape[1]):
                dense[c, ids[entry], k] += rows[entry, k]


@njit(cache=True, nogil=True)
def changed_rows(
    indptr: Array, ids: Array, rows: Array, base: Array, factors: Array, above: Any
) -> tuple[Array, Array, Array]:
    """Return ``rows[r] - factors[c] * base[ids[r]]`` of each client c, where any entry is large.

    Rows all of whose entries are at most ``above`` are left out: (indptr, ids, differences).
    """
    out_indptr = np.zeros_like(indptr)
    out_ids = np.empty_like(ids)
    out = np.empty((len(ids), rows.shape[1]), rows.dtype)
    end = 0
    for c in range(len(indptr) - 1):
        for r in range(indptr[c], indptr[c + 1]):
            large = False
            for k in range(rows.shape[1]):
                out[end, k] = rows[r, k] - factors[c] * base[ids[r], k]
                large |= not abs(out[end, k]) <= above  # true for NaN as well
            out_ids[end] = ids[r]
            end += large
        out_indptr[c + 1] = end
    return out_indptr, out_ids[:end].copy(), out[:end].copy()


@njit(cache=True, nogil=True)
def row_differences(rows: Array, ids: Array, table: Array) -> Array:
    """Return ``rows[r] - table[ids[r]]``."""
    out = np.empty_like(rows)
    for r in range(len(ids)):
        for k in range(rows.shape[1]):
            out[r, k] = rows[r, k] - table[ids[r], k]
    return out


@njit(cache=True, nogil=True)
def add_rows(total: Array, touched: Array, ids: Array, rows: Array, base: Array) -> bool:
    """Add ``rows[r] - base[ids[r]]`` to a fixed-point table (2^-32 steps).

    An empty base counts as zeros. Returns False if a number does not fit.
    """
    limit = 2.0**62
    fits: Any = True
    zeros = np.zeros(rows.shape[1], rows.dtype)
    for r in range(len(ids)):
        touched[ids[r]] = True
        target = total[ids[r]]
        row = rows[r]
        before = base[ids[r]] if len(base) else zeros
        # No way out of the inner loop: that is what lets it run on whole registers.
        for k in range(len(row)):
            steps = np.float64(row[k] - before[k]) * 4294967296.0
            fits &= abs(steps) < limit  # false for NaN as well
            target[k] += np.int64(steps + (0.5 if steps >= 0 else -0.5))
            fits &= abs(target[k]) < 4611686018427387904
    return bool(fits)


@njit(cache=True, nogil=True)
def add_dense(total: Array, blocks: Array) -> bool:
    """Add every client's block of numbers to a fixed-point sum; False if one does not fit."""
    limit = 2.0**62
    fits: Any = True
    for c in range(len(blocks)):
        block = blocks[c]
        for k in range(len(total)):
            steps = np.rint(np.float64(block[k]) * 4294967296.0)
            fits &= abs(steps) < limit  # false for NaN as well
            total[k] += np.int64(steps)
            fits &= abs(total[k]) < 4611686018427387904
    return bool(fits)


@njit(cache=True, nogil=True)
def rows_as_numbers(total: Array, ids: Array) -> Array:
    """Return these rows of a fixed-point table as numbers."""
    out = np.empty((len(ids), total.shape[1]), np.float64)
    for r in range(len(ids)):
        for k in range(total.shape[1]):
            out[r, k] = total[ids[r], k] / 4294967296.0
    return out


@njit(cache=True, nogil=True)
def add_mean(table: Array, ids: Array, summed: Array, clients: float) -> None:
    """Add ``summed[r] / clients`` to the row ``ids[r]`` of a table."""
    for r in range(len(ids)):
        for k in range(table.shape[1]):
            table[ids[r], k] += table.dtype.type(summed[r, k] / clients)
