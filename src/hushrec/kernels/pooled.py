"""The yardsticks on pooled data, one pass each: matrix factorisation, and NeuMF."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hushrec.kernels.draws import Stack, below, draw, list_samples
from hushrec.kernels.inner_product import ANY_ORDER, dot, sigmoid
from hushrec.kernels.jit import njit
from hushrec.kernels.layers import cross_entropy_errors
from hushrec.kernels.row_networks import (
    NetworkRoom,
    Shape,
    new_network_room,
    row_network_backward,
    row_network_forward,
)

Array = NDArray[Any]


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def fit_pooled(
    key: Array, stack: Stack, table: Array, vectors: Array, negatives: int, rate: Any, decay: Any
) -> float:
    """One pass of sample-by-sample SGD over everybody's data; both tables change in place."""
    d = table.shape[1]
    sampled, items, labels, _ = list_samples(key, stack, len(table), negatives)
    n = len(items)
    client = np.repeat(np.arange(len(sampled) - 1), np.diff(sampled))
    item = np.where(labels > 0, items, -1 - items)  # below zero marks a negative
    server = -1
    for last in range(n - 1, 0, -1):
        other = below(draw(key, server, last), last + 1)
        client[last], client[other] = client[other], client[last]
        item[last], item[other] = item[other], item[last]
    loss = 0.0
    for s in range(n):
        label = 1 if item[s] >= 0 else 0
        row = table[item[s] if label else -1 - item[s]]
        vector = vectors[client[s]]
        logit = dot(row, vector)
        predicted, grown = sigmoid(logit)
        loss += max(logit, table.dtype.type(0)) - label * logit + np.log(grown)
        error = table.dtype.type(predicted - label)
        for k in range(d):
            step = rate * (error * row[k] + decay * vector[k])
            row[k] -= rate * (error * vector[k] + decay * row[k])
            vector[k] -= step
    return loss / n if n else 0.0


class NeuMFModel(NamedTuple):
    """What is trained, in place."""

    users: Array
    """Rows of the d numbers of the products, then the d of the network."""
    items: Array
    products: Array
    """The weights of the products in the last layer."""
    theta: Array
    """The network up to that layer."""


class NeuMFRates(NamedTuple):
    """How far a step goes."""

    layers: float
    rows: float
    decay: float


@njit(cache=True, nogil=True)
def fit_neumf(
    model: NeuMFModel,
    sample_user: Array,
    sample_item: Array,
    labels: Array,
    batch: int,
    widths: Array,
    rates: NeuMFRates,
) -> float:
    """Go through the samples once, in batches; return the mean loss.

    ``widths`` are 2d, those of the hidden layers, and 1.
    """
    products, theta = model.products, model.theta
    shape, d, total = Shape(0, widths), len(products), 0.0
    room = new_network_room(min(batch, max(1, len(labels))), 1, len(theta), shape)
    before = np.empty((2, min(batch, max(1, len(labels))), d), np.float32)
    for a in range(0, len(labels), batch):
        b = min(a + batch, len(labels))
        mean = step_neumf(
            model, sample_user[a:b], sample_item[a:b], labels[a:b], shape, rates, room, before
        )
        total += mean * (b - a)
    return total / max(1, len(labels))


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def step_neumf(
    model: NeuMFModel,
    user: Array,
    item: Array,
    labels: Array,
    shape: Shape,
    rates: NeuMFRates,
    room: NetworkRoom,
    before: Array,
) -> float:
    """Take one step on a batch, in place; return the mean cross-entropy before it.

    A row moves by the sum over its samples, the layers by the mean over the batch; ``before`` has
    room for the rows of the products as they were.
    """
    users, items, products, theta = model
    n, d = len(labels), len(products)
    inputs = room.outputs[: 2 * n * d].reshape((n, 2 * d))
    for s in range(n):
        inputs[s, :d] = users[user[s], d:]
        inputs[s, d:] = items[item[s], d:]
        before[0, s] = users[user[s], :d]
        before[1, s] = items[item[s], :d]
    logits = row_network_forward(theta, n, shape, room)
    for s in range(n):
        for j in range(d):
            logits[s] += products[j] * before[0, s, j] * before[1, s, j]
    last = n * shape.widths[:-1].sum()
    loss = cross_entropy_errors(logits, labels, room.errors[last:])
    row_network_backward(theta, n, shape, True, True, room)
    passed = room.errors[: 2 * n * d].reshape((n, 2 * d))
    row_rate, kept = np.float32(rates.rows), np.float32(rates.decay)
    for s in range(n):
        error = n * room.errors[last + s]
        for j in range(d):
            left, right = before[0, s, j], before[1, s, j]
            weighted = error * products[j]
            users[user[s], j] -= row_rate * (weighted * right + kept * left)
            items[item[s], j] -= row_rate * (weighted * left + kept * right)
            users[user[s], d + j] -= row_rate * (n * passed[s, j] + kept * inputs[s, j])
            items[item[s], d + j] -= row_rate * (n * passed[s, d + j] + kept * inputs[s, d + j])
    rate = np.float32(rates.layers)
    for j in range(d):
        summed = np.float32(0)
        for s in range(n):
            summed += room.errors[last + s] * before[0, s, j] * before[1, s, j]
        products[j] -= rate * summed
    for k in range(len(theta)):
        theta[k] -= rate * room.gradient[k]
    return loss
