"""Descent of networks that score an item by its row, fused: a client's whole training.

The score is f(q), or f([p, q]) where the client has a vector p of its own; f has ReLU between its
layers. A client is trained from its first sample to its last before the next one begins, so its
parameters and rows stay in the cache and none of its bits depends on the others.

A client's parameters lie in one flat vector: p, then weights [inputs, outputs] and biases of every
layer. p is the same for all samples, so its share of the first layer is a bias.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hushrec.kernels import ANY_ORDER
from hushrec.kernels.networks import descend, inner, product, rectify

Array = NDArray[Any]


class Shape(NamedTuple):
    """The sizes of a client's network."""

    vector: int
    """Width of p; 0 without one."""
    widths: NDArray[np.int64]
    """Of the item row, of the hidden layers, and 1."""


class Rates(NamedTuple):
    """How far a step goes."""

    vector: float
    network: float
    items: float
    clip: float
    """Largest norm of the gradient of all that a step moves; infinite without a limit."""


class Room(NamedTuple):
    """What a step writes its intermediate results to."""

    outputs: Array
    """Of every layer, the item rows first, one after the other: [samples, width] each."""
    errors: Array
    """Derivatives of the loss by those, before the ReLU."""
    gradient: Array
    """Of the flat parameters."""
    by_row: Array
    """Of the client's rows; 0 between steps."""
    turned: Array
    """The weights of a layer, outputs first."""


@njit(cache=True, nogil=True)
def train_clients(
    theta: Array,
    rows: Array,
    rows_indptr: Array,
    indptr: Array,
    place: Array,
    labels: Array,
    epochs: int,
    batch: int,
    shape: Shape,
    rates: Rates,
    two_steps: bool,
) -> Array:
    """Train each client's parameters and rows in place; return its mean loss before its steps.

    Client c has the samples ``indptr[c]:indptr[c + 1]``, which go through ``epochs`` passes of the
    same length and name its rows from 0 on. A batch takes one joint step or, with ``two_steps``,
    one on the rows after that on the parameters.
    """
    losses = np.zeros(len(theta))
    most = max(1, np.diff(rows_indptr).max()) if len(theta) else 1
    room = new_room(min(batch, max(1, len(labels))), most, theta.shape[1], shape)
    for c in range(len(theta)):
        length = (indptr[c + 1] - indptr[c]) // epochs
        own = rows[rows_indptr[c] : rows_indptr[c + 1]]
        steps = 0
        for epoch in range(epochs):
            start, end = indptr[c] + epoch * length, indptr[c] + (epoch + 1) * length
            for a in range(start, end, batch):
                b = min(a + batch, end)
                losses[c] += take_step(
                    theta[c], own, place[a:b], labels[a:b], shape, rates, True, not two_steps, room
                )
                if two_steps:
                    take_step(
                        theta[c], own, place[a:b], labels[a:b], shape, rates, False, True, room
                    )
                steps += 1
        losses[c] /= max(1, steps)
    return losses


@njit(cache=True, nogil=True)
def new_room(samples: int, rows: int, parameters: int, shape: Shape) -> Room:
    """Return room for steps of up to this many samples and rows."""
    total, largest = samples * shape.widths.sum(), (shape.widths[:-1] * shape.widths[1:]).max()
    return Room(
        np.empty(total, np.float32),
        np.empty(total, np.float32),
        np.zeros(parameters, np.float32),
        np.zeros((rows, shape.widths[0]), np.float32),
        np.empty(largest, np.float32),
    )


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def take_step(
    theta: Array,
    own: Array,
    place: Array,
    labels: Array,
    shape: Shape,
    rates: Rates,
    moves_network: bool,
    moves_rows: bool,
    room: Room,
) -> float:
    """Take one step on a batch, in place; return the mean cross-entropy before it."""
    n, width, v = len(labels), shape.widths[0], shape.vector
    rows = room.outputs[: n * width].reshape((n, width))
    for s in range(n):
        rows[s] = own[place[s]]
    logits = forward(theta, n, shape, room)
    loss = judge(logits, labels, room.errors[n * shape.widths[:-1].sum() :])
    backward(theta, n, shape, moves_network, moves_rows, room)
    errors = room.errors[: n * width].reshape((n, width))
    squares = np.float32(0)
    if moves_network:
        squares += inner(room.gradient, room.gradient)
    if moves_rows:
        for s in range(n):
            for j in range(width):
                room.by_row[place[s], j] += errors[s, j]
        for s in range(n):  # the samples of a row add up: sum |sum g|^2 = sum <g, sum g>
            squares += inner(errors[s], room.by_row[place[s]])
    factor = min(np.float32(1), np.float32(rates.clip) / (np.sqrt(squares) + np.float32(1e-6)))
    if moves_network:
        for k in range(v):
            theta[k] -= np.float32(rates.vector) * factor * room.gradient[k]
        for k in range(v, len(theta)):
            theta[k] -= np.float32(rates.network) * factor * room.gradient[k]
    if moves_rows:
        for s in range(n):
            for j in range(width):
                own[place[s], j] -= np.float32(rates.items) * factor * errors[s, j]
        for s in range(n):
            room.by_row[place[s]] = 0
    return loss


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def forward(theta: Array, n: int, shape: Shape, room: Room) -> Array:
    """Fill the outputs from the rows, which lie before them; return the last ones, the logits."""
    widths, v, depth = shape.widths, shape.vector, len(shape.widths) - 1
    at, start = 0, v
    for k in range(depth):
        below = room.outputs[at : at + n * widths[k]].reshape((n, widths[k]))
        at += n * widths[k]
        out = room.outputs[at : at + n * widths[k + 1]].reshape((n, widths[k + 1]))
        share = start
        if k == 0:
            start += v * widths[1]
        size = widths[k] * widths[k + 1]
        weights = theta[start : start + size].reshape((widths[k], widths[k + 1]))
        out[0] = theta[start + size : start + size + widths[k + 1]]
        if k == 0 and v > 0:
            product(theta[:v].reshape((1, v)), theta[share:start].reshape((v, widths[1])), out[:1])
        for s in range(1, n):
            out[s] = out[0]
        product(below, weights, out)
        if k < depth - 1:
            rectify(out)
        start += size + widths[k + 1]
    return room.outputs[at : at + n]


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def judge(logits: Array, labels: Array, errors: Array) -> float:
    """Fill the derivatives of the mean cross-entropy by the logits; return that mean."""
    n, loss = len(labels), 0.0
    for s in range(n):
        logit = np.float64(logits[s])
        loss += max(logit, 0.0) - logit * labels[s] + np.log1p(np.exp(-abs(logit)))
        errors[s] = (1 / (1 + np.exp(-logit)) - labels[s]) / n
    return loss / n


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def backward(
    theta: Array, n: int, shape: Shape, of_network: bool, of_rows: bool, room: Room
) -> None:
    """Carry the errors down to the item rows, and leave the gradient of the parameters."""
    widths, v, depth = shape.widths, shape.vector, len(shape.widths) - 1
    if of_network:
        room.gradient[:] = 0
    at, end = n * widths[:-1].sum(), len(theta)
    for k in range(depth - 1, -1, -1):
        size = widths[k] * widths[k + 1]
        bias, start = end - widths[k + 1], end - widths[k + 1] - size
        error = room.errors[at : at + n * widths[k + 1]].reshape((n, widths[k + 1]))
        at -= n * widths[k]
        below = room.outputs[at : at + n * widths[k]].reshape((n, widths[k]))
        if of_network:
            gradient = room.gradient[start : start + size].reshape((widths[k], widths[k + 1]))
            descend(below, error, np.float32(-1), gradient)
            for s in range(n):
                for j in range(widths[k + 1]):
                    room.gradient[bias + j] += error[s, j]
        if k > 0 or of_rows:
            weights = theta[start : start + size].reshape((widths[k], widths[k + 1]))
            turned = room.turned[:size].reshape((widths[k + 1], widths[k]))
            for i in range(widths[k]):
                for j in range(widths[k + 1]):
                    turned[j, i] = weights[i, j]
            passed = room.errors[at : at + n * widths[k]].reshape((n, widths[k]))
            passed[:] = 0
            product(error, turned, passed)
            if k > 0:
                for s in range(n):
                    for i in range(widths[k]):
                        passed[s, i] *= np.float32(below[s, i] > 0)
        end = start
    if of_network and v > 0:
        # The vector's share is a bias of the first layer: it has that bias' gradient.
        first = widths[1]
        bias = v + (v + widths[0]) * first
        summed = room.gradient[bias : bias + first]
        for i in range(v):
            row = v + i * first
            room.gradient[i] = inner(theta[row : row + first], summed)
            for j in range(first):
                room.gradient[row + j] = theta[i] * summed[j]
