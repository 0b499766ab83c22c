"""The steps of Adam and of plain descent, fused: one pass over the rows that a batch looked up.

Without fast-math, so that an entry's bits do not depend on where it stands.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Array = NDArray[Any]


@njit(cache=True, nogil=True)
def adam(
    values: Array,
    first: Array,
    second: Array,
    gradient: Array,
    factors: tuple[float, float, float, float, float],
) -> None:
    """Take one step, in place. ``factors``: see `adam_factors`."""
    keep_first, keep_second = np.float32(factors[0]), np.float32(factors[1])
    new_first, new_second = np.float32(1 - factors[0]), np.float32(1 - factors[1])
    rate, spread, tiny = np.float32(factors[2]), np.float32(factors[3]), np.float32(factors[4])
    for k in range(len(values)):
        mean = keep_first * first[k] + new_first * gradient[k]
        square = keep_second * second[k] + new_second * gradient[k] * gradient[k]
        first[k], second[k] = mean, square
        values[k] -= rate * mean / (np.sqrt(spread * square) + tiny)


@njit(cache=True, nogil=True)
def adam_rows(
    table: Array,
    first: Array,
    second: Array,
    summed: Array,
    index: Array,
    gradient: Array,
    factors: tuple[float, float, float, float, float],
) -> None:
    """Take one step on the rows of ``index``, each once, with the sum of its gradients.

    ``summed`` is room for those sums, [rows, width + 1], zero before and after.
    """
    width = table.shape[1]
    add_gradients(summed, index, gradient)
    for k in range(len(index)):
        r = index[k]
        if summed[r, width] > 0:
            adam(table[r], first[r], second[r], summed[r, :width], factors)
            summed[r] = 0


@njit(cache=True, nogil=True)
def descend_rows(table: Array, summed: Array, index: Array, gradient: Array, rate: float) -> None:
    """Take one plain step on the rows of ``index``, each once, with the sum of its gradients."""
    width = table.shape[1]
    add_gradients(summed, index, gradient)
    for k in range(len(index)):
        r = index[k]
        if summed[r, width] > 0:
            for j in range(width):
                table[r, j] -= np.float32(rate) * summed[r, j]
            summed[r] = 0


@njit(cache=True, nogil=True)
def add_gradients(summed: Array, index: Array, gradient: Array) -> None:
    """Add up the gradients of each row, and mark it in the last column."""
    width = gradient.shape[1]
    for k in range(len(index)):
        r = index[k]
        summed[r, width] = 1
        for j in range(width):
            summed[r, j] += gradient[k, j]


def adam_factors(
    rate: float, first: float, second: float, tiny: float, number: int
) -> tuple[float, float, float, float, float]:
    """Return (decays, corrected rate, correction of the squares, tiny) of a step."""
    return first, second, rate / (1 - first**number), 1 / (1 - second**number), tiny
