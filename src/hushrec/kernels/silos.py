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
def adam_flat(
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
            adam(values[c, start:end], first[c, start:end], second[c, start:end], own, factors)


@njit(cache=True, nogil=True)
def descend_flat(values: Array, gradient: Array, start: int, active: Array, rate: float) -> None:
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
    add_gradients(summed, index, gradient)
    for k in range(len(index)):
        r = index[k]
        if summed[r, width] > 0:
            if pull > 0:
                for j in range(width):
                    summed[r, j] += np.float32(pull) * (table[r, j] - anchors[r, j])
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


@njit(cache=True, nogil=True)
def samples_of_epochs(
    order_indptr: Array,
    order: Array,
    indptr: Array,
    of_user: Array,
    positives: Array,
    clients: Array,
    per_epoch: Array,
    negatives: int,
    epochs: int,
) -> Array:
    """Turn positions among one epoch's samples into positions among all that were drawn.

    A user's drawn samples are each positive followed by the negatives of all epochs; its samples
    of an epoch are each positive followed by the negatives of that one.
    """
    out = np.empty_like(order)
    for c in range(len(clients) - 1):
        length = indptr[c + 1] - indptr[c]
        whose = np.empty(length, np.int64)
        first = np.empty(length, np.int64)
        k = 0
        for user in range(clients[c], clients[c + 1]):
            whose[k : k + per_epoch[user]] = user
            first[k : k + per_epoch[user]] = k
            k += per_epoch[user]
        for p in range(order_indptr[c], order_indptr[c + 1]):
            epoch = (p - order_indptr[c]) // length
            user = whose[order[p] - indptr[c]]
            place = order[p] - indptr[c] - first[order[p] - indptr[c]]
            width = per_epoch[user] // positives[user]
            positive, number = place // width, place % width
            drawn_width = 1 if width == 1 else 1 + negatives * epochs
            offset = 0 if number == 0 else epoch * negatives + number
            out[p] = of_user[user] + positive * drawn_width + offset
    return out
