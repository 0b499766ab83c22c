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
from numpy.typing import NDArray

from hushrec.kernels.inner_product import ANY_ORDER
from hushrec.kernels.jit import njit
from hushrec.kernels.layers import (
    add_product,
    cross_entropy_errors,
    inner,
    rectify,
    subtract_product,
)

Array = NDArray[Any]


class Shape(NamedTuple):
    """The sizes of a client's network."""

    vector: int
    """Width of p; 0 without one."""
    widths: NDArray[np.int64]
    """Of the item row, of the hidden layers, and 1."""


class NetworkRates(NamedTuple):
    """How far a step goes."""

    vector: float
    network: float
    items: float
    clip: float
    """Largest norm of the gradient of all that a step moves; infinite without a limit."""


class RowSamples(NamedTuple):
    """Samples in the order in which they are gone through."""

    indptr: Array
    """Client c has those from ``indptr[c]`` to ``indptr[c + 1]``."""
    places: Array
    """Of each sample's item among the client's rows, from 0 on."""
    labels: Array
    epochs: int
    """Passes, of the same length each."""


class NetworkRoom(NamedTuple):
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
def fit_row_networks(
    theta: Array,
    rows: Array,
    rows_indptr: Array,
    samples: RowSamples,
    batch: int,
    shape: Shape,
    rates: NetworkRates,
    two_steps: bool,
) -> Array:
    """Train each client's parameters and rows in place; return its mean loss before its steps.

    A batch takes one joint step or, with ``two_steps``, one on the rows after that on the
    parameters.
    """
    indptr, place, labels, epochs = samples
    losses = np.zeros(len(theta))
    most = max(1, np.diff(rows_indptr).max()) if len(theta) else 1
    room = new_network_room(min(batch, max(1, len(labels))), most, theta.shape[1], shape)
    for c in range(len(theta)):
        length = (indptr[c + 1] - indptr[c]) // epochs
        own = rows[rows_indptr[c] : rows_indptr[c + 1]]
        steps = 0
        for epoch in range(epochs):
            start, end = indptr[c] + epoch * length, indptr[c] + (epoch + 1) * length
            for a in range(start, end, batch):
                b = min(a + batch, end)
                losses[c] += step_row_network(
                    theta[c], own, place[a:b], labels[a:b], shape, rates, True, not two_steps, room
                )
                if two_steps:
                    step_row_network(
                        theta[c], own, place[a:b], labels[a:b], shape, rates, False, True, room
                    )
                steps += 1
        losses[c] /= max(1, steps)
    return losses


@njit(cache=True, nogil=True)
def new_network_room(samples: int, rows: int, parameters: int, shape: Shape) -> NetworkRoom:
    """Return room for steps of up to this many samples and rows."""
    total, largest = samples * shape.widths.sum(), (shape.widths[:-1] * shape.widths[1:]).max()
    return NetworkRoom(
        np.empty(total, np.float32),
        np.empty(total, np.float32),
        np.zeros(parameters, np.float32),
        np.zeros((rows, shape.widths[0]), np.float32),
        np.empty(largest, np.float32),
    )


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def step_row_network(
    theta: Array,
    own: Array,
    place: Array,
    labels: Array,
    shape: Shape,
    rates: NetworkRates,
    moves_network: bool,
    moves_rows: bool,
    room: NetworkRoom,
) -> float:
    """Take one step on a batch, in place; return the mean cross-entropy before it."""
    n, width, v = len(labels), shape.widths[0], shape.vector
    rows = room.outputs[: n * width].reshape((n, width))
    for s in range(n):
        rows[s] = own[place[s]]
    logits = row_network_forward(theta, n, shape, room)
    loss = cross_entropy_errors(logits, labels, room.errors[n * shape.widths[:-1].sum() :])
    row_network_backward(theta, n, shape, moves_network, moves_rows, room)
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
def row_network_forward(theta: Array, n: int, shape: Shape, room: NetworkRoom) -> Array:
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
            add_product(
                theta[:v].reshape((1, v)), theta[share:start].reshape((v, widths[1])), out[:1]
            )
        for s in range(1, n):
            out[s] = out[0]
        add_product(below, weights, out)
        if k < depth - 1:
            rectify(out)
        start += size + widths[k + 1]
    return room.outputs[at : at + n]


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def row_network_backward(
    theta: Array, n: int, shape: Shape, of_network: bool, of_rows: bool, room: NetworkRoom
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
            subtract_product(below, error, np.float32(-1), gradient)
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
            add_product(error, turned, passed)
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
