"""The steps of Adam and of plain descent, fused: one pass over the rows that a batch looked up.

Without fast-math, so that an entry's bits do not depend on where it stands.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.kernels.jit import njit

Array = NDArray[Any]


@njit(cache=True, nogil=True)
def adam_step(
    values: Array,
    first: Array,
    second: Array,
    gradient: Array,
    factors: tuple[float, float, float, float, float],
) -> None:
    """Take one step, in place. ``factors``: see `training.rules.Adam`."""
    keep_first, keep_second = np.float32(factors[0]), np.float32(factors[1])
    new_first, new_second = np.float32(1 - factors[0]), np.float32(1 - factors[1])
    rate, spread, tiny = np.float32(factors[2]), np.float32(factors[3]), np.float32(factors[4])
    for k in range(len(values)):
        mean = keep_first * first[k] + new_first * gradient[k]
        square = keep_second * second[k] + new_second * gradient[k] * gradient[k]
        first[k], second[k] = mean, square
        values[k] -= rate * mean / (np.sqrt(spread * square) + tiny)


@njit(cache=True, nogil=True)
def adam_network(
    values: Array,
    first: Array,
    second: Array,
    gradient: Array,
    start: int,
    active: Array,
    factors: tuple[float, float, float, float, float],
    anchors: Array,
    pull: float,
) -> None:
    """Take one step of the active clients on the parameter that begins at ``start``."""
    end = start + gradient.shape[1]
    for c in range(len(values)):
        if active[c] > 0:
            own = gradient[c]
            if pull > 0:
                own = own + np.float32(pull) * (values[c, start:end] - anchors[c, start:end])
            adam_step(values[c, start:end], first[c, start:end], second[c, start:end], own, factors)


@njit(cache=True, nogil=True)
def descend_network(values: Array, gradient: Array, start: int, active: Array, rate: float) -> None:
    """Take one plain step of the active clients on the parameter that begins at ``start``."""
    for c in range(len(values)):
        if active[c] > 0:
            for k in range(gradient.shape[1]):
                values[c, start + k] -= np.float32(rate) * gradient[c, k]


@njit(cache=True, nogil=True)
def adam_rows(
    table: Array,
    first: Array,
    second: Array,
    summed: Array,
    index: Array,
    gradient: Array,
    factors: tuple[float, float, float, float, float],
    anchors: Array,
    pull: float,
) -> None:
    """Take one step on the rows of ``index``, each once, with the sum of its gradients.

    ``summed`` is room for those sums, [rows, width + 1], zero before and after. ``pull`` draws a
    row towards its anchor.
    """
    width = table.shape[1]
    sum_row_gradients(summed, index, gradient)
    for k in range(len(index)):
        r = index[k]
        if summed[r, width] > 0:
            if pull > 0:
                for j in range(width):
                    summed[r, j] += np.float32(pull) * (table[r, j] - anchors[r, j])
            adam_step(table[r], first[r], second[r], summed[r, :width], factors)
            summed[r] = 0


@njit(cache=True, nogil=True)
def descend_rows(table: Array, summed: Array, index: Array, gradient: Array, rate: float) -> None:
    """Take one plain step on the rows of ``index``, each once, with the sum of its gradients."""
    width = table.shape[1]
    sum_row_gradients(summed, index, gradient)
    for k in range(len(index)):
        r = index[k]
        if summed[r, width] > 0:
            for j in range(width):
                table[r, j] -= np.float32(rate) * summed[r, j]
            summed[r] = 0


@njit(cache=True, nogil=True)
def follow_rows(anchors: Array, table: Array, summed: Array, index: Array, share: float) -> None:
    """Move the anchors of these rows, each once, a share of the way to the rows."""
    width = table.shape[1]
    for k in range(len(index)):
        summed[index[k], width] = 1
    for k in range(len(index)):
        r = index[k]
        if summed[r, width] > 0:
            for j in range(width):
                anchors[r, j] += np.float32(share) * (table[r, j] - anchors[r, j])
            summed[r, width] = 0


@njit(cache=True, nogil=True)
def sum_row_gradients(summed: Array, index: Array, gradient: Array) -> None:
    """Add up the gradients of each row, and mark it in the last column."""
    width = gradient.shape[1]
    for k in range(len(index)):
        r = index[k]
        summed[r, width] = 1
        for j in range(width):
            summed[r, j] += gradient[k, j]
