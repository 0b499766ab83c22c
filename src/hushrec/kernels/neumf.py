"""One pass of NeuMF over pooled samples: the network over rows, and the products beside it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hushrec.kernels.inner_product import ANY_ORDER
from hushrec.kernels.scores import Room, Shape, backward, forward, judge, new_room

Array = NDArray[Any]


class Rates(NamedTuple):
    """How far a step goes."""

    layers: float
    rows: float
    decay: float


@njit(cache=True, nogil=True)
def fit_neumf(
    users: Array,
    items: Array,
    products: Array,
    theta: Array,
    sample_user: Array,
    sample_item: Array,
    labels: Array,
    batch: int,
    widths: Array,
    rates: Rates,
) -> float:
    """Go through the samples once, in batches, and move everything in place; return the mean loss.

    A row of ``users`` and ``items`` has the d numbers of the products, then the d of the network.
    ``products`` are their weights in the last layer, ``theta`` the network up to it; ``widths``
    are 2d, those of the hidden layers, and 1.
    """
    shape, d, total = Shape(0, widths), len(products), 0.0
    room = new_room(min(batch, max(1, len(labels))), 1, len(theta), shape)
    before = np.empty((2, min(batch, max(1, len(labels))), d), np.float32)
    for a in range(0, len(labels), batch):
        b = min(a + batch, len(labels))
        mean = take_step(
            users,
            items,
            products,
            theta,
            sample_user[a:b],
            sample_item[a:b],
            labels[a:b],
            shape,
            rates,
            room,
            before,
        )
        total += mean * (b - a)
    return total / max(1, len(labels))


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def take_step(
    users: Array,
    items: Array,
    products: Array,
    theta: Array,
    user: Array,
    item: Array,
    labels: Array,
    shape: Shape,
    rates: Rates,
    room: Room,
    before: Array,
) -> float:
    """Take one step on a batch, in place; return the mean cross-entropy before it.

    A row moves by the sum over its samples, the layers by the mean over the batch; ``before`` has
    room for the rows of the products as they were.
    """
    n, d = len(labels), len(products)
    inputs = room.outputs[: 2 * n * d].reshape((n, 2 * d))
    for s in range(n):
        inputs[s, :d] = users[user[s], d:]
        inputs[s, d:] = items[item[s], d:]
        before[0, s] = users[user[s], :d]
        before[1, s] = items[item[s], :d]
    logits = forward(theta, n, shape, room)
    for s in range(n):
        for j in range(d):
            logits[s] += products[j] * before[0, s, j] * before[1, s, j]
    last = n * shape.widths[:-1].sum()
    loss = judge(logits, labels, room.errors[last:])
    backward(theta, n, shape, True, True, room)
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
