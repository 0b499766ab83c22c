"""The products of small layers: inner loops over a width, which lies side by side in memory.

`add_product` and `subtract_product` go four rows at a time, so that a sum is written once for four
terms.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.compiled import njit
from hushrec.kernels.inner_product import ANY_ORDER

Array = NDArray[Any]


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def rectify(values: Array) -> None:
    """Set what is below 0 to 0."""
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
    """Add rows times weights."""
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
    """Take a rate times the rows' products with their errors off the weights."""
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
    """Fill the derivatives of the mean cross-entropy by the logits; return that mean."""
    n, loss = len(labels), 0.0
    for s in range(n):
        logit = np.float64(logits[s])
        loss += max(logit, 0.0) - logit * labels[s] + np.log1p(np.exp(-abs(logit)))
        errors[s] = (1 / (1 + np.exp(-logit)) - labels[s]) / n
    return loss / n


@njit(cache=True, nogil=True)
def squared_errors(outputs: Array, labels: Array, errors: Array) -> float:
    """Fill the derivatives of half the mean squared error by the outputs; return that half."""
    n, loss = len(labels), 0.0
    for s in range(n):
        apart = np.float64(outputs[s]) - labels[s]
        loss += apart * apart / 2
        errors[s] = apart / n
    return loss / n
