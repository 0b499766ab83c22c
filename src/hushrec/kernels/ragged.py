"""Ragged arrays of client rows: selection, differences, exact sums, clipping, noise, top items."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.errors import DivergedError, InputError
from hushrec.kernels.jit import Array, njit

IntArray = NDArray[np.int32]
LongArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


@njit(cache=True, nogil=True)
def take_ragged(indptr: Array, values: Array, rows: Array) -> tuple[Array, Array]:
    """Return the ragged array of these rows."""
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
    """Copy entries from ``source_start[r]`` on to ``target[start[r]:end[r]]``, for every r."""
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
    """Number each client's items by first use: (indptr, distinct items, number of every entry)."""
    out_indptr = np.zeros_like(indptr)
    out, number = np.empty(len(items), np.int32), np.empty(len(items), np.int64)
    number_of = np.full(n_items, -1, np.int64)
    end = 0
    for c in range(len(indptr) - 1):
        start = end
        for p in range(indptr[c], indptr[c + 1]):
            if number_of[items[p]] < 0:
                number_of[items[p]] = end - start
                out[end] = items[p]
                end += 1
            number[p] = number_of[items[p]]
        for k in range(start, end):
            number_of[out[k]] = -1
        out_indptr[c + 1] = end
    return out_indptr, out[:end].copy(), number


@njit(cache=True, nogil=True)
def put_rows(
    tables: Array, slots: Array, clients: Array, indptr: Array, ids: Array, rows: Array
) -> None:
    """Write the rows of ``clients[n]`` into its table ``tables[slots[n]]``, for every n."""
    for n in range(len(clients)):
        for r in range(indptr[clients[n]], indptr[clients[n] + 1]):
            tables[slots[n], ids[r], :] = rows[r]


@njit(cache=True, nogil=True)
def add_scattered(dense: Array, indptr: Array, ids: Array, rows: Array) -> None:
    """Add each client's rows to its own dense table: ``dense`` is [clients, n_rows, width]."""
    for c in range(len(dense)):
        for entry in range(indptr[c], indptr[c + 1]):
            dense[c, ids[entry]] += rows[entry]


@njit(cache=True, nogil=True)
def recent_vectors(indptr: Array, items: Array, table: Array, by_place: Array) -> Array:
    """Return the sum of each client's last items' rows, the g-th last times ``by_place[g - 1]``."""
    out = np.zeros((len(indptr) - 1, table.shape[1]), table.dtype)
    for c in range(len(indptr) - 1):
        last = indptr[c + 1]
        for g in range(1, min(len(by_place), last - indptr[c]) + 1):
            for k in range(table.shape[1]):
                out[c, k] += by_place[g - 1] * table[items[last - g], k]
    return out


@njit(cache=True, nogil=True)
def changed_rows(
    indptr: Array, ids: Array, rows: Array, base: Array, factors: Array, above: Any
) -> tuple[Array, Array, Array]:
    """Return the differences ``rows[r] - factors[c] * base[ids[r]]`` of each client c.

    Rows whose entries are all at most ``above`` are omitted. Returns (indptr, ids, differences).
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
def add_rows(total: Array, touched: Array, ids: Array, rows: Array, base: Array) -> bool:
    """Add ``rows[r] - base[ids[r]]`` to a fixed-point table (2^-32 steps).

    An empty base means zeros. Returns False on overflow or NaN.
    """
    limit = 2.0**62
    fits: Any = True
    zeros = np.zeros(rows.shape[1], rows.dtype)
    for r in range(len(ids)):
        touched[ids[r]] = True
        target = total[ids[r]]
        row = rows[r]
        before = base[ids[r]] if len(base) else zeros
        # The inner loop has no early exit, so that it is vectorised.
        for k in range(len(row)):
            steps = np.float64(row[k] - before[k]) * 4294967296.0
            fits &= abs(steps) < limit  # false for NaN as well
            target[k] += np.int64(steps + (0.5 if steps >= 0 else -0.5))
            fits &= abs(target[k]) < 4611686018427387904
    return bool(fits)


@njit(cache=True, nogil=True)
def add_dense(total: Array, blocks: Array) -> bool:
    """Add every client's block to a fixed-point sum; return False on overflow or NaN."""
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


# ---------------------------------------------------------------- clipping and noise


@njit(cache=True, nogil=True)
def add_powers(sums: Array, indptr: Array, rows: Array, power: int) -> None:
    """Add the absolute values (power 1) or squares (power 2) of each client's rows to its sum."""
    for c in range(len(sums)):
        for entry in range(indptr[c], indptr[c + 1]):
            for k in range(rows.shape[1]):
                value = np.float64(rows[entry, k])
                sums[c] += value * value if power == 2 else abs(value)


@njit(cache=True, nogil=True)
def distinct_rows(indptr: Array, ids: Array, n_rows: int) -> bool:
    """Return whether all ids are valid and distinct within each client."""
    last_client = np.full(n_rows, -1)
    for c in range(len(indptr) - 1):
        for entry in range(indptr[c], indptr[c + 1]):
            row = ids[entry]
            if row < 0 or row >= n_rows or last_client[row] == c:
                return False
            last_client[row] = c
    return True


@njit(cache=True, nogil=True)
def ascending_keys(indptr: Array, keys: Array, space: int) -> bool:
    """Return whether each client's keys are valid and strictly ascending."""
    for c in range(len(indptr) - 1):
        last = -1
        for entry in range(indptr[c], indptr[c + 1]):
            if keys[entry] <= last or keys[entry] >= space:
                return False
            last = keys[entry]
    return True


@njit(cache=True, nogil=True)
def draw_whole(
    out: Array,
    start: int,
    end: int,
    words: Array,
    thresholds: Array,
    guide: Array,
    bits: int,
    scale: float,
    gaussian: bool,
) -> tuple[int, int, bool]:
    """Fill ``out[start:end]`` with samples of a `discrete.Law` while random words are left.

    Returns (end of the filled part, words used for it, whether the next sample is undecided in
    64-bit arithmetic). Words of an unfinished sample count as unused.
    """
    margin = 2.0**-50
    low_bits = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    spare = np.uint64(63 - bits)
    spare_bits = (np.uint64(1) << spare) - np.uint64(1)
    cell = 2.0 ** -(63 - bits)
    used = at = 0
    done = start
    while done < end:
        if at + 3 > len(words):
            break
        first, second = words[at], words[at + 1]
        at += 2
        block = guide[first >> np.uint64(54)]
        while block < len(thresholds) and thresholds[block] < first:
            block += 1
        if block == len(thresholds) or thresholds[block] == first:
            return done, used, True
        begin = block << bits
        offset = np.int64(second & low_bits)
        if gaussian:
            exponent = (offset / scale) * ((offset + 2 * begin) / scale) / 2
        else:
            exponent = offset / scale
        chance = np.float64((second >> np.uint64(bits)) & spare_bits) * cell
        # exp(-x) is at least 1 - x, which nearly always decides.
        accepted = chance + cell <= 1.0 - exponent - margin
        if not accepted:
            accept = math.exp(-exponent)
            accepted = chance + cell <= accept - margin
            if not accepted and chance < accept + margin:
                if chance > accept - margin or chance + cell < accept + margin:
                    return done, used, True
                # These bits do not decide; 53 more do, or the sample is undecided.
                chance += np.float64(words[at] >> np.uint64(11)) * 2.0**-53 * cell
                at += 1
                if abs(chance - accept) <= margin + 2.0**-53 * cell:
                    return done, used, True
                accepted = chance < accept
        negative = second >> np.uint64(63) == np.uint64(1)
        if accepted and not (negative and begin + offset == 0):
            out[done] = -(begin + offset) if negative else begin + offset
            done += 1
            used = at
    return done, used, False


@njit(cache=True, nogil=True)
def add_steps(values: Array, steps: Array) -> None:
    """Add noise to values, both multiples of 2^-32, and then round to 32-bit floats."""
    for k in range(len(values)):
        # Only values that were not clipped before can exceed this range.
        own = np.int64(min(max(np.float64(values[k]) * 4294967296.0, -(2.0**61)), 2.0**61))
        values[k] = np.float32(np.float64(own + steps[k]) / 4294967296.0)


@njit(cache=True, nogil=True)
def scale_to_grid(rows: Array, factors: Array) -> Array:
    """Return ``rows[r] * factors[r]``, rounded to 32 bits and truncated to multiples of 2^-32."""
    out = np.empty(rows.shape, np.float32)
    for r in range(len(rows)):
        for k in range(rows.shape[1]):
            scaled = np.float64(np.float32(rows[r, k] * factors[r]))
            out[r, k] = np.float32(np.trunc(scaled * 4294967296.0) / 4294967296.0)
    return out


# ---------------------------------------------------------------- top items


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
    scores: Array, seen_indptr: Array, seen_items: Array, items: Array, best: Array
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


@njit(cache=True, nogil=True)
def best_of(values: Array, count: int, above: Any) -> Array:
    """Return the ascending indices of the largest values ``above`` a bound; ties to the earlier."""
    if len(values) <= count:
        return np.flatnonzero(values > above)
    bound = np.partition(values, len(values) - count)[len(values) - count]
    spare = count - np.sum(values > bound)
    out = np.empty(count, np.int64)
    n = 0
    for k in range(len(values)):
        taken = values[k] > bound
        if values[k] == bound and spare > 0:
            spare -= 1
            taken = True
        if taken and values[k] > above:
            out[n] = k
            n += 1
    return out[:n]
