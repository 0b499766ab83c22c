"""FedRKG's gate: trained on a device's samples, and committed for all items."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hushrec.kernels.draws import Pace, Stack, below, draw, nth_outside
from hushrec.kernels.inner_product import ANY_ORDER, dot, sigmoid

Array = NDArray[Any]


class Frozen(NamedTuple):
    """What guidance reads: own tables [clients, items, d], their mean, vectors and biases."""

    tables: Array
    guidance: Array
    vectors: Array
    biases: Array


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def open_gate(weights: Array, bias: Any, row: Array, guidance: Array) -> Any:
    """Return FedRKG's gate, sigmoid(<weights, [row, guidance, row - guidance]> + bias)."""
    d = len(row)
    total = bias
    for k in range(d):
        apart = row[k] - guidance[k]
        total += weights[k] * row[k] + weights[d + k] * guidance[k] + weights[2 * d + k] * apart
    return row.dtype.type(sigmoid(total)[0])


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def commit_guidance(
    key: Array,
    stack: Stack,
    frozen: Frozen,
    gate_weights: Array,
    gate_biases: Array,
    pace: Pace,
    rate: Any,
    beta: Any,
    clip: Any,
) -> Array:
    """Train every client's gate on fused rows, then return the fused tables of all items.

    A fused row is ``beta * row + 2 * (1 - beta) * gate * guidance`` (FedRKG, eq. 6). Gates are
    trained by SGD on the batch-mean BCE with everything else frozen (eq. 7 and 8), on negatives
    drawn for the purpose, with gradients of norm ``clip`` at most. Weights and biases of the gates
    change in place; zero epochs leave them alone.
    """
    users, indptr, items, excluded_indptr, excluded = stack
    tables, guidance, vectors, biases = frozen
    negatives, epochs, batch = pace
    clients, n_items, d = tables.shape
    one = guidance.dtype.type(1)
    pull = 2 * (one - beta)
    longest = 0
    for c in range(clients):
        longest = max(longest, (indptr[c + 1] - indptr[c]) * (1 + negatives))
    sample = np.empty(longest, np.int64)  # 2 * item + label
    gradient = np.empty(3 * d, guidance.dtype)
    fused = np.empty(tables.shape, guidance.dtype)
    for c in range(clients):
        own, vector, weights = tables[c], vectors[c], gate_weights[c]
        outside = excluded[excluded_indptr[c] : excluded_indptr[c + 1]]
        pool = n_items - len(outside)
        samples, position = 0, 0
        for p in range(indptr[c], indptr[c + 1] if epochs else indptr[c]):
            sample[samples] = 2 * np.int64(items[p]) + 1
            samples += 1
            for _ in range(negatives if pool > 0 else 0):
                drawn = nth_outside(outside, below(draw(key, users[c], position), pool))
                sample[samples] = 2 * np.int64(drawn)
                position += 1
                samples += 1
        for _ in range(epochs):
            for last in range(samples - 1, 0, -1):
                other = below(draw(key, users[c], position), last + 1)
                position += 1
                sample[last], sample[other] = sample[other], sample[last]
            for first in range(0, samples, batch):
                size = min(batch, samples - first)
                gradient[:] = 0
                bias_gradient = guidance.dtype.type(0)
                for s in range(first, first + size):
                    row, mean = own[sample[s] >> 1], guidance[sample[s] >> 1]
                    opened = open_gate(weights, gate_biases[c], row, mean)
                    reach = pull * dot(mean, vector)
                    logit = beta * dot(row, vector) + opened * reach + biases[c]
                    error = guidance.dtype.type(sigmoid(logit)[0]) - (sample[s] & 1)
                    step = guidance.dtype.type(error / size * reach * opened * (one - opened))
                    bias_gradient += step
                    for k in range(d):
                        gradient[k] += step * row[k]
                        gradient[d + k] += step * mean[k]
                        gradient[2 * d + k] += step * (row[k] - mean[k])
                norm = np.sqrt(dot(gradient, gradient) + bias_gradient**2)
                scaled = rate * min(one, clip / (norm + guidance.dtype.type(1e-6)))
                for k in range(3 * d):
                    weights[k] -= scaled * gradient[k]
                gate_biases[c] -= scaled * bias_gradient
        for item in range(n_items):
            opened = open_gate(weights, gate_biases[c], own[item], guidance[item])
            for k in range(d):
                fused[c, item, k] = beta * own[item, k] + pull * opened * guidance[item, k]
    return fused


@njit(cache=True, nogil=True)
def open_gates(weights: Array, biases: Array, tables: Array, guidance: Array) -> Array:
    """Return every client's gate of every item: [clients, items]."""
    out = np.empty((len(tables), len(guidance)), guidance.dtype)
    for c in range(len(tables)):
        for item in range(len(guidance)):
            out[c, item] = open_gate(weights[c], biases[c], tables[c, item], guidance[item])
    return out
