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

DECAY_FIRST, DECAY_SECOND = 0.9, 0.999
"""Decays of Adam's moments."""


@njit(cache=True, nogil=True, inline="always")
def matrix(flat: Array, start: int, rows: int, columns: int) -> Array:
    """Return a part of a flat array as a matrix."""
    return flat[start : start + rows * columns].reshape((rows, columns))


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
def backpropagate(weights: Array, error: Array, buffer: Array, passed: Array) -> None:
    """Fill ``passed`` with the errors times a layer's weights, transposed in ``buffer``."""
    transposed = matrix(buffer, 0, weights.shape[1], weights.shape[0])
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


Held = tuple[Array, Array, Array, Array, float]
"""Values, Adam's two moments, anchors, and the weight of half the squared distance from them."""


@njit(cache=True, nogil=True)
def take_step(
    values: Array, first: Array, second: Array, gradient: Array, rate: float, adam: Any
) -> None:
    """Take one step in place: SGD where ``adam`` is None, else Adam (Kingma and Ba).

    For Adam ``rate`` and ``adam`` are the rate and the factor on the squares of
    `training.silo_network.Optimiser.factors`; ``first`` and ``second`` are its moments.
    """
    if adam is None:
        for k in range(len(values)):
            values[k] -= np.float32(rate) * gradient[k]
    else:
        spread, tiny = np.float32(adam), np.float32(1e-8)
        for k in range(len(values)):
            mean = np.float32(DECAY_FIRST) * first[k] + np.float32(1 - DECAY_FIRST) * gradient[k]
            square = (
                np.float32(DECAY_SECOND) * second[k]
                + np.float32(1 - DECAY_SECOND) * gradient[k] * gradient[k]
            )
            first[k], second[k] = mean, square
            values[k] -= np.float32(rate) * mean / (np.sqrt(spread * square) + tiny)


@njit(cache=True, nogil=True)
def step_of_server(
    network: Array, first: Array, second: Array, gradient: Array, kept: Any, rate: float
) -> tuple[Array, Array, Array]:
    """Return network and moments after a step of Adam in one pass, for millions of entries.

    ``kept`` holds the decays of both moments, one less their powers (the corrections of the bias),
    what keeps the division finite, and the factor of weight decay.
    """
    decay1, decay2, whole1, whole2, small, shrunk = kept
    moved, mean, square = np.empty_like(network), np.empty_like(first), np.empty_like(second)
    for k in range(len(network)):
        g = gradient[k]
        mean[k] = decay1 * first[k] + (1 - decay1) * g
        square[k] = decay2 * second[k] + (1 - decay2) * (g * g)
        step = mean[k] / whole1 / (np.sqrt(square[k] / whole2) + small)
        moved[k] = np.float32(shrunk) * network[k] - rate * step
    return moved, mean, square


@njit(cache=True, nogil=True)
def step_networks(
    held: Held, gradient: Array, start: int, active: Array, rate: float, adam: Any
) -> None:
    """Take one step of the active clients on the parameter at offset ``start``."""
    values, first, second, anchors, pull = held
    end = start + gradient.shape[1]
    for c in range(len(values)):
        if active[c] > 0:
            mine, own = values[c, start:end], gradient[c]
            if pull > 0:
                own = own + np.float32(pull) * (mine - anchors[c, start:end])
            take_step(mine, first[c, start:end], second[c, start:end], own, rate, adam)


@njit(cache=True, nogil=True)
def step_rows(
    held: Held, gradient: Array, index: Array, summed: Array, rate: float, adam: Any
) -> None:
    """Take one step on the distinct rows of ``index``, each with the sum of its gradients.

    ``summed`` is a zero buffer, [rows, width + 1], zeroed again at the end: the sums, and a mark.
    """
    values, first, second, anchors, pull = held
    width = values.shape[1]
    for k in range(len(index)):
        summed[index[k], width] = 1
        for j in range(width):
            summed[index[k], j] += gradient[k, j]
    for r in index:
        if summed[r, width] > 0:
            if pull > 0:
                for j in range(width):
                    summed[r, j] += np.float32(pull) * (values[r, j] - anchors[r, j])
            take_step(values[r], first[r], second[r], summed[r, :width], rate, adam)
            summed[r] = 0
