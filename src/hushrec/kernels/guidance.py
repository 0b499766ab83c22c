"""FedRKG's gate: training on a device's samples, and fusion of local and global item rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hushrec.kernels.inner_product import ANY_ORDER, dot, sigmoid
from hushrec.kernels.jit import njit
from hushrec.kernels.row_networks import RowSamples

Array = NDArray[Any]


class Frozen(NamedTuple):
    """Frozen parameters: local tables [clients, items, d], global table, vectors and biases."""

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
def fit_gates(
    samples: RowSamples,
    frozen: Frozen,
    gate_weights: Array,
    gate_biases: Array,
    batch: int,
    rate: Any,
    beta: Any,
    clip: Any,
) -> None:
    """Train every client's gate on fused rows, in place, with all other parameters frozen.

    SGD on the batch-mean BCE (FedRKG, eq. 7 and 8), with gradients clipped to norm ``clip``. Row
    indices of the samples are item ids: a client's rows are its whole table.
    """
    indptr, items, labels, epochs = samples
    tables, guidance, vectors, biases = frozen
    d, one = tables.shape[2], guidance.dtype.type(1)
    pull = 2 * (one - beta)
    gradient = np.empty(3 * d, guidance.dtype)
    for c in range(len(tables)):
        own, vector, weights = tables[c], vectors[c], gate_weights[c]
        length = (indptr[c + 1] - indptr[c]) // epochs
        for begin in range(indptr[c], indptr[c + 1], max(1, length)):
            for first in range(begin, begin + length, batch):
                size = min(batch, begin + length - first)
                gradient[:] = 0
                bias_gradient = guidance.dtype.type(0)
                for s in range(first, first + size):
                    row, mean = own[items[s]], guidance[items[s]]
                    opened = open_gate(weights, gate_biases[c], row, mean)
                    reach = pull * dot(mean, vector)
                    logit = beta * dot(row, vector) + opened * reach + biases[c]
                    error = guidance.dtype.type(sigmoid(logit)[0]) - np.int64(labels[s])
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


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def fused_tables(tables: Array, guidance: Array, weights: Array, biases: Array, beta: Any) -> Array:
    """Return the rows ``beta * row + 2 * (1 - beta) * gate * guidance`` (FedRKG, eq. 6)."""
    clients, n_items, d = tables.shape
    pull = 2 * (guidance.dtype.type(1) - beta)
    fused = np.empty(tables.shape, guidance.dtype)
    for c in range(clients):
        for item in range(n_items):
            row, mean = tables[c, item], guidance[item]
            opened = open_gate(weights[c], biases[c], row, mean)
            for k in range(d):
                fused[c, item, k] = beta * row[k] + pull * opened * mean[k]
    return fused


@njit(cache=True, nogil=True)
def open_gates(weights: Array, biases: Array, tables: Array, guidance: Array) -> Array:
    """Return every client's gate of every item: [clients, items]."""
    out = np.empty((len(tables), len(guidance)), guidance.dtype)
    for c in range(len(tables)):
        for item in range(len(guidance)):
            out[c, item] = open_gate(weights[c], biases[c], tables[c, item], guidance[item])
    return out
