"""Kernels over pairs of items: what a client counts, and exact sums over keys too many for a table.

A pair (i, j) of a catalogue of m items is the key i·m + j. All kernels release the interpreter
lock, so threads work on their own clients at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hushrec.errors import ConfigError
from hushrec.kernels.jit import Array, njit
from hushrec.kernels.ragged import best_of

DIGIT_BITS = 11
"""A pass of the radix sort orders by this many bits: its counters fit the first-level cache."""


@njit(cache=True, nogil=True)
def key_order(keys: Array) -> Array:
    """Return the stable order that sorts keys, none below 0, by radix."""
    n = len(keys)
    order, other = np.arange(n), np.empty(n, np.int64)
    largest = keys.max() if n else 0
    shift = 0
    while largest >> shift:
        start = np.zeros((1 << DIGIT_BITS) + 1, np.int64)
        for k in range(n):
            start[((keys[k] >> shift) & ((1 << DIGIT_BITS) - 1)) + 1] += 1
        for digit in range(1, len(start)):
            start[digit] += start[digit - 1]
        for k in range(n):
            digit = (keys[order[k]] >> shift) & ((1 << DIGIT_BITS) - 1)
            other[start[digit]] = order[k]
            start[digit] += 1
        order, other = other, order
        shift += DIGIT_BITS
    return order


STEPS_PER_UNIT = 2.0**32
"""Steps of exact sums."""


@dataclass(frozen=True)
class FixedPoint:
    """What a key space declares of its rows: multiples of 2^-bits, and a bound.

    A client's rows of one key add up to ``largest`` at most, in size. The declaration is public,
    and uploads that do not keep to it are refused, so a secure sum may use narrower words and is
    still the exact sum.
    """

    bits: int
    largest: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.bits <= 32 and 1 <= self.largest < 2**30):
            raise ConfigError(
                f"a grid of {self.bits} bits up to {self.largest} cannot be summed: use 0 to 32 "
                "bits, and a largest value from 1 on and below 2^30"
            )

    @property
    def unit(self) -> int:
        """Steps of the exact sum between two points of the grid."""
        return int(STEPS_PER_UNIT) >> self.bits

    @property
    def most(self) -> int:
        """Steps of the exact sum in ``largest``."""
        return int(STEPS_PER_UNIT) * self.largest

    def round(self, values: Array) -> Array:
        """Return the nearest points of the grid, as float32."""
        scale = 2.0**self.bits
        return (np.rint(values.astype(np.float64) * scale) / scale).astype(np.float32)


@njit(cache=True, nogil=True)
def keeps_grid(indptr: Array, keys: Array, rows: Array, unit: int, most: int) -> bool:
    """Say whether rows are multiples of ``unit`` steps of 2^-32, and each client's sums by key at
    most ``most`` steps."""
    width = rows.shape[1]
    for c in range(len(indptr) - 1):
        mine = keys[indptr[c] : indptr[c + 1]]
        ascending = True
        for k in range(1, len(mine)):
            ascending &= mine[k] > mine[k - 1]
        order = np.arange(len(mine)) if ascending else key_order(mine)
        own = np.zeros(width, np.int64)
        for k in range(len(order)):
            if k and mine[order[k]] != mine[order[k - 1]]:
                own[:] = 0
            for column in range(width):
                steps: Any = np.float64(rows[indptr[c] + order[k], column]) * 4294967296.0
                if not abs(steps) <= most or np.int64(steps) != steps or np.int64(steps) % unit:
                    return False
                own[column] += np.int64(steps)
                if abs(own[column]) > most:
                    return False
    return True


@njit(cache=True, nogil=True)
def sum_by_key(keys: Array, rows: Array) -> tuple[Array, Array, bool]:
    """Sum rows by key in fixed point (2^-32 steps): ascending keys, sums, and whether all fit."""
    n, width = rows.shape
    order = key_order(keys)
    out_keys = np.empty(n, np.int64)
    out = np.zeros((n, width), np.int64)
    fits = True
    last = -1
    for k in range(n):
        r = order[k]
        if last < 0 or keys[r] != out_keys[last]:
            last += 1
            out_keys[last] = keys[r]
        for column in range(width):
            steps: Any = np.float64(rows[r, column]) * 4294967296.0
            if not abs(steps) < 2.0**62:  # true for NaN as well
                fits = False
                steps = 0.0
            out[last, column] += np.int64(steps + (0.5 if steps >= 0 else -0.5))
            fits &= abs(out[last, column]) < 4611686018427387904
    return out_keys[: last + 1].copy(), out[: last + 1].copy(), fits


@njit(cache=True, nogil=True)
def merge_sums(
    keys: Array, sums: Array, other_keys: Array, other_sums: Array
) -> tuple[Array, Array, bool]:
    """Merge two sums of ascending keys, steps or numbers; the flag is False if one does not fit."""
    a, b, n = 0, 0, 0
    while a < len(keys) and b < len(other_keys):
        first, second = keys[a], other_keys[b]
        a += first <= second
        b += second <= first
        n += 1
    n += len(keys) - a + len(other_keys) - b
    out_keys = np.empty(n, np.int64)
    out = np.empty((n, sums.shape[1]), sums.dtype)
    fits = True
    a, b = 0, 0
    for k in range(n):
        mine = b == len(other_keys) or (a < len(keys) and keys[a] <= other_keys[b])
        others = a == len(keys) or (b < len(other_keys) and other_keys[b] <= keys[a])
        out_keys[k] = keys[a] if mine else other_keys[b]
        for column in range(out.shape[1]):
            value = sums[a, column] if mine else 0
            if others:
                value += other_sums[b, column]
            out[k, column] = value
            fits &= abs(value) < 4611686018427387904
        a += mine
        b += others
    return out_keys, out, fits


# ---------------------------------------------------------------- sums as bytes
# A whole number of 0 to 2^63 - 1 is written in base 128, the lowest digit first, in as few digits
# as it needs; every digit but the last has 128 added (LEB128). A number with a sign is doubled, and
# a negative one becomes odd (zigzag), so that small numbers take one byte.

MOST_DIGITS = 9


@njit(cache=True, nogil=True)
def _digits(number: int) -> int:
    count = 1
    while number >= 128:
        number >>= 7
        count += 1
    return count


@njit(cache=True, nogil=True)
def _write_number(data: Array, at: int, number: int) -> int:
    while number >= 128:
        data[at] = (number & 127) | 128
        number >>= 7
        at += 1
    data[at] = number
    return at + 1


@njit(cache=True, nogil=True)
def _read_number(data: Array, at: int) -> tuple[Any, int]:
    """Return a number and where the next one begins; -1 if it has too few or too many digits."""
    number = np.int64(0)
    for digit in range(MOST_DIGITS):
        if at + digit >= len(data):
            return np.int64(-1), at
        byte = np.int64(data[at + digit])
        number |= (byte & 127) << np.int64(7 * digit)
        if byte < 128:
            shortest = byte > 0 or digit == 0
            return (number if shortest else np.int64(-1)), at + digit + 1
    return np.int64(-1), at


@njit(cache=True, nogil=True)
def write_keys(keys: Array) -> Array:
    """Write ascending keys as the numbers of keys that were left out before each."""
    size, last = 0, np.int64(-1)
    for key in keys:
        size += _digits(key - last - 1)
        last = key
    data = np.empty(size, np.uint8)
    at, last = 0, np.int64(-1)
    for key in keys:
        at = _write_number(data, at, key - last - 1)
        last = key
    return data


@njit(cache=True, nogil=True)
def read_keys(data: Array, keys: Array, space: int) -> bool:
    """Fill in what `write_keys` wrote; False unless the data are so many keys below ``space``."""
    at, last = 0, np.int64(-1)
    for k in range(len(keys)):
        gap, at = _read_number(data, at)
        if gap < 0 or gap >= space - 1 - last:
            return False
        last += gap + 1
        keys[k] = last
    return at == len(data)


@njit(cache=True, nogil=True)
def write_steps(rows: Array, shifts: Array) -> Array:
    """Write numbers below 2^62 in size; those of a column are multiples of 2^shift."""
    n, width = rows.shape
    size = 0
    for k in range(n):
        for column in range(width):
            value = rows[k, column] >> shifts[column]
            size += _digits(2 * value if value >= 0 else -2 * value - 1)
    data = np.empty(size, np.uint8)
    at = 0
    for k in range(n):
        for column in range(width):
            value = rows[k, column] >> shifts[column]
            at = _write_number(data, at, 2 * value if value >= 0 else -2 * value - 1)
    return data


@njit(cache=True, nogil=True)
def read_steps(data: Array, rows: Array, shifts: Array) -> bool:
    """Fill in what `write_steps` wrote; False unless the data are so many numbers below 2^62."""
    n, width = rows.shape
    at = 0
    for k in range(n):
        for column in range(width):
            number, at = _read_number(data, at)
            value = number >> 1 if number & 1 == 0 else -(number >> 1) - 1
            if number < 0 or abs(value) > np.int64(4611686018427387903) >> shifts[column]:
                return False
            rows[k, column] = value << shifts[column]
    return at == len(data)


@njit(cache=True, nogil=True)
def subtract_by_key(
    indptr: Array, keys: Array, rows: Array, less_indptr: Array, less_keys: Array, less: Array
) -> tuple[Array, Array, Array]:
    """Return, ragged by client, rows minus others of the same key where the result is not 0."""
    width = rows.shape[1]
    out_indptr = np.zeros(len(indptr), np.int64)
    out_keys = np.empty(len(keys) + len(less_keys), np.int64)
    out = np.zeros((len(out_keys), width), np.float32)
    end = 0
    for c in range(len(indptr) - 1):
        n, n_less = indptr[c + 1] - indptr[c], less_indptr[c + 1] - less_indptr[c]
        both = np.empty(n + n_less, np.int64)
        both[:n] = keys[indptr[c] : indptr[c + 1]]
        both[n:] = less_keys[less_indptr[c] : less_indptr[c + 1]]
        order = key_order(both)
        sums = np.zeros(width)
        for k in range(len(order)):
            r = order[k]
            for column in range(width):
                if r < n:
                    sums[column] += rows[indptr[c] + r, column]
                else:
                    sums[column] -= less[less_indptr[c] + r - n, column]
            if k + 1 == len(order) or both[order[k + 1]] != both[r]:
                if np.any(sums != 0):
                    out_keys[end], out[end] = both[r], sums
                    end += 1
                sums[:] = 0
        out_indptr[c + 1] = end
    return out_indptr, out_keys[:end].copy(), out[:end].copy()


# ---------------------------------------------------------------- what a client counts


@njit(cache=True, nogil=True)
def following_pairs(
    indptr: Array,
    items: Array,
    n_items: int,
    by_gap: Array,
    counted: float = 1.0,
    reverse: float = 0.0,
    together: bool = False,
) -> tuple[Array, Array, Array]:
    """Return, ragged by client, what followed what: keys and weights.

    Item j, g steps after item i, gives the pair (i, j) the weight ``by_gap[g - 1]``, and none past
    its end, and (j, i) ``reverse`` times as much; every occurrence of i gives (i, i) the weight
    ``counted``. So the diagonal holds counts. With ``together`` there is a second weight, the share
    of the windows around i that hold both: 1 - g / (window + 1).
    """
    window = len(by_gap)
    out_indptr = np.zeros(len(indptr), np.int64)
    for c in range(len(indptr) - 1):
        n = indptr[c + 1] - indptr[c]
        full = max(0, n - window)
        rest = n - full
        pairs = full * window + rest * (rest - 1) // 2
        out_indptr[c + 1] = out_indptr[c] + n + pairs * (2 if reverse else 1)
    keys = np.empty(out_indptr[-1], np.int64)
    weights = np.ones((out_indptr[-1], 2 if together else 1), np.float32)
    end = 0
    for c in range(len(indptr) - 1):
        last = indptr[c + 1]
        for p in range(indptr[c], last):
            row = np.int64(items[p]) * n_items
            keys[end] = row + items[p]
            weights[end, 0] = counted
            end += 1
            for q in range(p + 1, min(p + window + 1, last)):
                if items[q] != items[p]:
                    keys[end] = row + items[q]
                    weights[end, 0] = by_gap[q - p - 1]
                    if together:
                        weights[end, 1] = 1.0 - (q - p) / (window + 1.0)
                    end += 1
                    if reverse:
                        keys[end] = np.int64(items[q]) * n_items + items[p]
                        weights[end] = reverse * weights[end - 1]
                        end += 1
        out_indptr[c + 1] = end  # fewer than foreseen where an item comes again soon
    return out_indptr, keys[:end], weights[:end]


@njit(cache=True, nogil=True)
def common_pairs(indptr: Array, items: Array, n_items: int) -> tuple[Array, Array, Array]:
    """Return, ragged by client, every pair i <= j of its items, which must ascend: keys, ones."""
    out_indptr = np.zeros(len(indptr), np.int64)
    for c in range(len(indptr) - 1):
        n = indptr[c + 1] - indptr[c]
        out_indptr[c + 1] = out_indptr[c] + n * (n + 1) // 2
    keys = np.empty(out_indptr[-1], np.int64)
    end = 0
    for c in range(len(indptr) - 1):
        for p in range(indptr[c], indptr[c + 1]):
            row = np.int64(items[p]) * n_items
            for q in range(p, indptr[c + 1]):
                keys[end] = row + items[q]
                end += 1
    return out_indptr, keys, np.ones((end, 1), np.float32)


@njit(cache=True, nogil=True)
def scaled_to_norm_one(indptr: Array, keys: Array, weights: Array) -> tuple[Array, Array, Array]:
    """Sum each client's weights by key, keys ascending, and scale them to an L2 norm of 1."""
    out_indptr = np.zeros(len(indptr), np.int64)
    out_keys = np.empty(len(keys), np.int64)
    out = np.empty((len(keys), 1), np.float32)
    end = 0
    for c in range(len(indptr) - 1):
        first = end
        mine = keys[indptr[c] : indptr[c + 1]]
        order = key_order(mine)
        sums = np.zeros(len(mine))
        for r in order:
            if end == first or mine[r] != out_keys[end - 1]:
                out_keys[end] = mine[r]
                end += 1
            sums[end - 1 - first] += weights[indptr[c] + r, 0]
        norm = max(np.sqrt(np.sum(sums * sums)), 1e-30)  # weights may all be 0
        for k in range(end - first):
            out[first + k, 0] = sums[k] / norm
        out_indptr[c + 1] = end
    return out_indptr, out_keys[:end].copy(), out[:end].copy()


# ---------------------------------------------------------------- item-to-item weights


@njit(cache=True, nogil=True)
def fill_head_block(block: Array, place: Array, keys: Array, values: Array, n_items: int) -> None:
    """Write the pairs of items that have a place into a dense block."""
    for k in range(len(keys)):
        i, j = place[keys[k] // n_items], place[keys[k] % n_items]
        if i >= 0 and j >= 0:
            block[i, j] = values[k]


@njit(cache=True, nogil=True)
def keep_strongest(
    block: Array,
    head: Array,
    place: Array,
    keys: Array,
    values: Array,
    n_items: int,
    neighbours: Array,
    weights: Array,
) -> None:
    """Keep each item's weights that are largest in size, by item number, ties to the lower one.

    Where an item has fewer than there are places, the rest name the item itself, with weight 0.
    A pair of head items has its weight in ``block``; other pairs have theirs under ascending keys.
    """
    found_item = np.empty(n_items, np.int32)
    found_weight = np.empty(n_items, np.float64)
    key = 0
    for i in range(n_items):
        n = 0
        if place[i] >= 0:
            for k in range(len(head)):
                if block[place[i], k] != 0.0:
                    found_item[n], found_weight[n] = head[k], block[place[i], k]
                    n += 1
        while key < len(keys) and keys[key] // n_items == i:
            found_item[n], found_weight[n] = keys[key] % n_items, values[key]
            n += 1
            key += 1
        _keep_row(i, found_item[:n], found_weight[:n], neighbours[i], weights[i])


@njit(cache=True, nogil=True)
def _keep_row(item: int, ids: Array, found: Array, neighbours: Array, weights: Array) -> None:
    """Write an item's strongest weights by number, then itself with weight 0."""
    order = np.argsort(ids)
    kept = order[best_of(np.abs(found[order]), len(neighbours), -1.0)]
    neighbours[: len(kept)], weights[: len(kept)] = ids[kept], found[kept]
    neighbours[len(kept) :], weights[len(kept) :] = item, 0


@njit(cache=True, nogil=True)
def add_to_strongest(
    keys: Array, values: Array, n_items: int, neighbours: Array, weights: Array
) -> None:
    """Let further pairs, under ascending keys, compete with the weights that items have kept."""
    width = neighbours.shape[1]
    ids = np.empty(n_items + width, np.int32)
    found = np.empty(n_items + width, np.float64)
    key = 0
    while key < len(keys):
        item, n = keys[key] // n_items, 0
        while key < len(keys) and keys[key] // n_items == item:
            ids[n], found[n] = keys[key] % n_items, values[key]
            n += 1
            key += 1
        for k in range(width):
            if weights[item, k] != 0:
                ids[n], found[n] = neighbours[item, k], weights[item, k]
                n += 1
        _keep_row(item, ids[:n], found[:n], neighbours[item], weights[item])


@njit(cache=True, nogil=True)
def add_from_history(
    scores: Array, indptr: Array, items: Array, neighbours: Array, weights: Array, by_place: Array
) -> None:
    """Add the neighbours of each client's last items, the g-th last times ``by_place[g - 1]``."""
    for c in range(len(indptr) - 1):
        last = indptr[c + 1]
        for p in range(last - 1, max(indptr[c], last - len(by_place)) - 1, -1):
            item, weight = items[p], by_place[last - 1 - p]
            for k in range(neighbours.shape[1]):
                scores[c, neighbours[item, k]] += weight * weights[item, k]


@njit(cache=True, nogil=True)
def weights_between(first: Array, second: Array, neighbours: Array, weights: Array) -> Array:
    """Return the weights from each first item to each second one, which are distinct."""
    index = np.full(len(neighbours), -1)
    for at in range(len(second)):
        index[second[at]] = at
    out = np.zeros((len(first), len(second)), np.float32)
    for row in range(len(first)):
        for k in range(neighbours.shape[1]):
            at = index[neighbours[first[row], k]]
            if at >= 0:
                out[row, at] += weights[first[row], k]
    return out
