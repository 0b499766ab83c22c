"""The loops of clipping and of local noise; twins of them are in ``tests/privacy``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.kernels.jit import njit

Array = NDArray[Any]


@njit(cache=True, nogil=True)
def add_powers(sums: Array, indptr: Array, rows: Array, power: int) -> None:
    """Add to each client's sum the absolute values (power 1) or squares (2) of its rows."""
    for c in range(len(sums)):
        for entry in range(indptr[c], indptr[c + 1]):
            for k in range(rows.shape[1]):
                value = np.float64(rows[entry, k])
                sums[c] += value * value if power == 2 else abs(value)


@njit(cache=True, nogil=True)
def distinct_rows(indptr: Array, ids: Array, n_rows: int) -> bool:
    """Say whether all ids are rows of the table and no client names a row twice."""
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
    """Say whether all keys are of the space and each client's ascend, none of them twice."""
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
    """Fill ``out[start:end]`` with numbers of a `discrete.Law`, as far as these words go.

    Returns (numbers filled so far, words used for them, whether the next one is in doubt): of
    numbers that were begun and not finished, the words count as not used.
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
                # So many bits do not decide; 53 more do, or nothing here does.
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
    """Add whole steps of 2^-32 to numbers that are whole steps; only then round to 32 bits."""
    for k in range(len(values)):
        # Only what nobody clipped is ever cut off here.
        own = np.int64(min(max(np.float64(values[k]) * 4294967296.0, -(2.0**61)), 2.0**61))
        values[k] = np.float32(np.float64(own + steps[k]) / 4294967296.0)


@njit(cache=True, nogil=True)
def scale_to_grid(rows: Array, factors: Array) -> Array:
    """Return ``rows[r] * factors[r]`` rounded to 32 bits and cut off to whole steps of 2^-32."""
    out = np.empty(rows.shape, np.float32)
    for r in range(len(rows)):
        for k in range(rows.shape[1]):
            scaled = np.float64(np.float32(rows[r, k] * factors[r]))
            out[r, k] = np.float32(np.trunc(scaled * 4294967296.0) / 4294967296.0)
    return out
