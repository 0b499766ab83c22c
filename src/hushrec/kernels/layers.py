"""Dense layers and optimiser steps of small networks.

The inner loops run over a layer's width, which is contiguous in memory. `add_product` and
`subtract_product` take four rows at a time, so that a sum is written once for four terms. Optimiser
steps are compiled without fast-math: the result of an entry does not depend on its position.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hushrec.kernels.inner_product import ANY_ORDER
from hushrec.kernels.jit import Array, njit


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def rectify(values: Array) -> None:
    """Apply ReLU in place."""
    for s in range(values.shape[0]):
        for j in range(values.shape[1]):
            values[s, j] = max(values[s, j], np.float32(0))


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def inner(first: Array, second: Array) -> Any:
    """Return the inner product."""
    total = np.float32(0)
    for j in range(len(first)):
        total += first[j] * second[j]
    return total


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def add_product(rows: Array, weights: Array, out: Array) -> None:
    """Add the product of rows and weights to ``out``."""
    depth, width = weights.shape
    fours = depth - depth % 4
    for s in range(len(rows)):
        for i in range(0, fours, 4):
            a, b, c, d = rows[s, i], rows[s, i + 1], rows[s, i + 2], rows[s, i + 3]
            for j in range(width):
                out[s, j] += (a * weights[i, j] + b * weights[i + 1, j]) + (
                    c * weights[i + 2, j] + d * weights[i + 3, j]
                )
        for i in range(fours, depth):
            a = rows[s, i]
            for j in range(width):
                out[s, j] += a * weights[i, j]


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def subtract_product(rows: Array, errors: Array, rate: Any, weights: Array) -> None:
    """Subtract ``rate`` times the product of transposed rows and errors from the weights."""
    depth, width = weights.shape
    fours = len(rows) - len(rows) % 4
    for i in range(depth):
        for s in range(0, fours, 4):
            a, b = rate * rows[s, i], rate * rows[s + 1, i]
            c, d = rate * rows[s + 2, i], rate * rows[s + 3, i]
            for j in range(width):
                weights[i, j] -= (a * errors[s, j] + b * errors[s + 1, j]) + (
                    c * errors[s + 2, j] + d * errors[s + 3, j]
                )
        for s in range(fours, len(rows)):
            a = rate * rows[s, i]
            for j in range(width):
                weights[i, j] -= a * errors[s, j]


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def cross_entropy_errors(logits: Array, labels: Array, errors: Array) -> float:
    """Fill ``errors`` with the gradient of the mean cross-entropy; return that loss."""
    n, loss = len(labels), 0.0
    for s in range(n):
        logit = np.float64(logits[s])
        loss += max(logit, 0.0) - logit * labels[s] + np.log1p(np.exp(-abs(logit)))
        errors[s] = (1 / (1 + np.exp(-logit)) - labels[s]) / n
    return loss / n


@njit(cache=True, nogil=True)
def squared_errors(outputs: Array, labels: Array, errors: Array) -> float:
    """Fill ``errors`` with the gradient of half the mean squared error; return that loss."""
    n, loss = len(labels), 0.0
    for s in range(n):
        apart = np.float64(outputs[s]) - labels[s]
        loss += apart * apart / 2
        errors[s] = apart / n
    return loss / n


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def pull_towards(values: Array, anchors: Array, pull: Any) -> None:
    """Move the values towards the anchors by the share ``pull``."""
    if pull > 0:
        for k in range(len(values)):
            values[k] -= pull * (values[k] - anchors[k])


@njit(cache=True, nogil=True)
def backpropagate(weights: Array, error: Array, transposed: Array, passed: Array) -> None:
    """Fill ``passed`` with the errors times the transposed weights of a layer."""
    for i in range(weights.shape[0]):
        for j in range(weights.shape[1]):
            transposed[j, i] = weights[i, j]
    passed[:] = 0
    add_product(error, transposed, passed)


@njit(cache=True, nogil=True)
def zero_inactive(outputs: Array, errors: Array) -> None:
    """Set the errors of inactive ReLUs, whose output is 0, to 0."""
    for s in range(errors.shape[0]):
        for i in range(errors.shape[1]):
            errors[s, i] *= np.float32(outputs[s, i] > 0)


# ---------------------------------------------------------------- optimisers


@njit(cache=True, nogil=True)
def adam_step(
    values: Array,
    first: Array,
    second: Array,
    gradient: Array,
    factors: tuple[float, float, float, float, float],
) -> None:
    """Take one Adam step in place; ``factors`` as in `training.silo_network.LazyAdam.factors`."""
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
    """Take one Adam step of the active clients on the parameter at offset ``start``."""
    end = start + gradient.shape[1]
    for c in range(len(values)):
        if active[c] > 0:
            own = gradient[c]
            if pull > 0:
                own = own + np.float32(pull) * (values[c, start:end] - anchors[c, start:end])
            adam_step(values[c, start:end], first[c, start:end], second[c, start:end], own, factors)


@njit(cache=True, nogil=True)
def descend_network(values: Array, gradient: Array, start: int, active: Array, rate: float) -> None:
    """Take one SGD step of the active clients on the parameter at offset ``start``."""
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
    """Take one Adam step on the distinct rows of ``index``, each with the sum of its gradients.

    ``summed`` is a zero buffer for the sums, [rows, width + 1], zeroed again at the end. ``pull``
    is the weight of the squared distance of a row from its anchor.
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
    """Take one SGD step on the distinct rows of ``index``, each with the sum of its gradients."""
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
    """Move the anchors of the distinct rows of ``index`` towards the rows by ``share``."""
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
    """Sum the gradients of each row, and mark the row in the last column."""
    width = gradient.shape[1]
    for k in range(len(index)):
        r = index[k]
        summed[r, width] = 1
        for j in range(width):
            summed[r, j] += gradient[k, j]
