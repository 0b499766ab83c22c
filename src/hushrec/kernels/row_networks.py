"""Fused SGD of networks over item rows and of NeuMF, and FedRKG's gates over item rows.

The score is f(q), or f([p, q]) with a client vector p; f is an MLP with ReLU between its layers.
Clients are trained one after the other, so that parameters and rows stay in the processor cache and
a client's result does not depend on the others.

A client's parameters are one flat vector: p, then weights [inputs, outputs] and biases of every
layer. p is the same for all samples, so its contribution to the first layer is a bias.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hushrec.kernels.draws import DeviceSamples
from hushrec.kernels.inner_product import ANY_ORDER, dot, sigmoid
from hushrec.kernels.jit import Array, njit
from hushrec.kernels.layers import (
    add_product,
    backpropagate,
    cross_entropy_errors,
    inner,
    matrix,
    rectify,
    subtract_product,
    zero_inactive,
)


class Shape(NamedTuple):
    """Layer widths of a client's network."""

    vector: int
    """Width of p; 0 without one."""
    widths: Array
    """Widths of the item row, of the hidden layers, and 1."""


class NetworkRates(NamedTuple):
    """Learning rates and gradient clipping of a row network."""

    vector: float
    network: float
    items: float
    clip: float
    """Bound of the norm of the joint gradient of a step; infinite without clipping."""
    pull: float = 0.0
    """Share of its distance from its target by which a step moves every row of the client."""


class NetworkBuffers(NamedTuple):
    """Intermediate results of a step."""

    outputs: Array
    """Item rows and outputs of all layers, [samples, width] each."""
    errors: Array
    """Gradient of the loss by the outputs before ReLU."""
    gradient: Array
    """Gradient of the flat parameters."""
    by_row: Array
    """Gradient of the client's rows; 0 between steps."""
    transposed: Array
    """Transposed weights of a layer."""


@njit(cache=True, nogil=True)
def fit_row_networks(
    theta: Array,
    rows: Array,
    rows_indptr: Array,
    samples: DeviceSamples,
    batch: int,
    shape: Shape,
    rates: NetworkRates,
    two_steps: bool,
    targets: Any = None,
) -> Array:
    """Train each client's parameters and rows in place; return its mean loss before each step.

    A batch takes one joint step or, with ``two_steps``, a step on the parameters and then one on
    the rows. ``targets``, one for each row, are what `NetworkRates.pull` moves rows towards;
    without them its branch is removed at compilation.
    """
    indptr, row, labels, epochs = samples
    losses = np.zeros(len(theta))
    most = max(1, np.diff(rows_indptr).max()) if len(theta) else 1
    buffers = new_network_buffers(min(batch, max(1, len(labels))), most, theta.shape[1], shape)
    for c in range(len(theta)):
        length = (indptr[c + 1] - indptr[c]) // epochs
        own = rows[rows_indptr[c] : rows_indptr[c + 1]]
        own_targets = None if targets is None else targets[rows_indptr[c] : rows_indptr[c + 1]]
        steps = 0
        for epoch in range(epochs):
            start, end = indptr[c] + epoch * length, indptr[c] + (epoch + 1) * length
            for a in range(start, end, batch):
                b = min(a + batch, end)
                taken, given = row[a:b], labels[a:b]
                losses[c] += step_row_network(
                    theta[c],
                    own,
                    taken,
                    given,
                    shape,
                    rates,
                    True,
                    not two_steps,
                    buffers,
                    own_targets,
                )
                if two_steps:
                    step_row_network(
                        theta[c],
                        own,
                        taken,
                        given,
                        shape,
                        rates,
                        False,
                        True,
                        buffers,
                        own_targets,
                    )
                steps += 1
        losses[c] /= max(1, steps)
    return losses


@njit(cache=True, nogil=True)
def new_network_buffers(samples: int, rows: int, parameters: int, shape: Shape) -> NetworkBuffers:
    """Allocate buffers for batches of up to this many samples and rows."""
    total, largest = samples * shape.widths.sum(), (shape.widths[:-1] * shape.widths[1:]).max()
    return NetworkBuffers(
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
    row: Array,
    labels: Array,
    shape: Shape,
    rates: NetworkRates,
    moves_network: bool,
    moves_rows: bool,
    buffers: NetworkBuffers,
    targets: Any = None,
) -> float:
    """Take one step on a batch, in place; return the mean cross-entropy before it."""
    n, width, v = len(labels), shape.widths[0], shape.vector
    rows, errors = matrix(buffers.outputs, 0, n, width), matrix(buffers.errors, 0, n, width)
    for s in range(n):
        rows[s] = own[row[s]]
    logits = row_network_forward(theta, n, shape, buffers.outputs)
    loss = cross_entropy_errors(logits, labels, buffers.errors[n * shape.widths[:-1].sum() :])
    row_network_backward(theta, n, shape, moves_network, moves_rows, buffers)
    squares = np.float32(0)
    if moves_network:
        squares += inner(buffers.gradient, buffers.gradient)
    if moves_rows:
        for s in range(n):
            for j in range(width):
                buffers.by_row[row[s], j] += errors[s, j]
        for s in range(n):  # the samples of a row add up: sum |sum g|^2 = sum <g, sum g>
            squares += inner(errors[s], buffers.by_row[row[s]])
    factor = min(np.float32(1), np.float32(rates.clip) / (np.sqrt(squares) + np.float32(1e-6)))
    if moves_network:
        for k in range(v):
            theta[k] -= np.float32(rates.vector) * factor * buffers.gradient[k]
        for k in range(v, len(theta)):
            theta[k] -= np.float32(rates.network) * factor * buffers.gradient[k]
    if moves_rows:
        if targets is not None:  # before the gradient's step, whose errors are of these rows
            for r in range(len(own)):
                for j in range(width):
                    own[r, j] += np.float32(rates.pull) * (targets[r, j] - own[r, j])
        for s in range(n):
            for j in range(width):
                own[row[s], j] -= np.float32(rates.items) * factor * errors[s, j]
        for s in range(n):
            buffers.by_row[row[s]] = 0
    return loss


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def row_network_forward(theta: Array, n: int, shape: Shape, outputs: Array) -> Array:
    """Run the network on the n input rows at the front of ``outputs``; return the logits."""
    widths, v, depth = shape.widths, shape.vector, len(shape.widths) - 1
    at, start = 0, v
    for k in range(depth):
        below = matrix(outputs, at, n, widths[k])
        at += n * widths[k]
        out = matrix(outputs, at, n, widths[k + 1])
        if k == 0:
            start += v * widths[1]
        weights = matrix(theta, start, widths[k], widths[k + 1])
        start += weights.size + widths[k + 1]
        out[0] = theta[start - widths[k + 1] : start]
        if k == 0 and v > 0:
            add_product(matrix(theta, 0, 1, v), matrix(theta, v, v, widths[1]), out[:1])
        for s in range(1, n):
            out[s] = out[0]
        add_product(below, weights, out)
        if k < depth - 1:
            rectify(out)
    return outputs[at : at + n]


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def row_network_backward(
    theta: Array, n: int, shape: Shape, of_network: bool, of_rows: bool, buffers: NetworkBuffers
) -> None:
    """Backpropagate the errors to the item rows, and fill the gradient of the parameters."""
    widths, v, depth = shape.widths, shape.vector, len(shape.widths) - 1
    if of_network:
        buffers.gradient[:] = 0
    at, end = n * widths[:-1].sum(), len(theta)
    for k in range(depth - 1, -1, -1):
        bias = end - widths[k + 1]
        end = bias - widths[k] * widths[k + 1]
        error = matrix(buffers.errors, at, n, widths[k + 1])
        at -= n * widths[k]
        below = matrix(buffers.outputs, at, n, widths[k])
        if of_network:
            gradient = matrix(buffers.gradient, end, widths[k], widths[k + 1])
            subtract_product(below, error, np.float32(-1), gradient)
            for s in range(n):
                for j in range(widths[k + 1]):
                    buffers.gradient[bias + j] += error[s, j]
        if k > 0 or of_rows:
            weights = matrix(theta, end, widths[k], widths[k + 1])
            passed = matrix(buffers.errors, at, n, widths[k])
            backpropagate(weights, error, buffers.transposed, passed)
            if k > 0:
                zero_inactive(below, passed)
    if of_network and v > 0:
        # The vector's contribution is a bias of the first layer and has the gradient of the bias.
        first = widths[1]
        bias = v + (v + widths[0]) * first
        summed = buffers.gradient[bias : bias + first]
        for i in range(v):
            row = v + i * first
            buffers.gradient[i] = inner(theta[row : row + first], summed)
            for j in range(first):
                buffers.gradient[row + j] = theta[i] * summed[j]


@njit(cache=True, nogil=True)
def pulled_tables(table: Array, targets: Array, shares: Array) -> Array:
    """Return ``table`` moved by each client's share of the distance to its target, for all rows."""
    out = np.empty_like(targets)
    for c in range(len(targets)):
        for i in range(len(table)):
            for k in range(table.shape[1]):
                out[c, i, k] = table[i, k] + shares[c] * (targets[c, i, k] - table[i, k])
    return out


# ---------------------------------------------------------------- NeuMF


class NeuMFModel(NamedTuple):
    """Parameters of NeuMF, trained in place."""

    users: Array
    """User rows: the d entries of the GMF part, then the d entries of the MLP part."""
    items: Array
    products: Array
    """Output weights of the GMF part."""
    theta: Array
    """Flat parameters of the MLP part."""


@njit(cache=True, nogil=True)
def fit_neumf(
    model: NeuMFModel,
    sample_user: Array,
    sample_item: Array,
    labels: Array,
    batch: int,
    widths: Array,
    rates: tuple[float, float, float],
) -> float:
    """Train on the samples once, in batches; return the mean loss.

    ``widths`` are 2d, the widths of the hidden layers, and 1; ``rates`` those of the layers and of
    the rows, and the weight decay.
    """
    shape, most, total = Shape(0, widths), min(batch, max(1, len(labels))), 0.0
    buffers = new_network_buffers(most, 1, len(model.theta), shape)
    before = np.empty((2, most, len(model.products)), np.float32)
    for a in range(0, len(labels), batch):
        b = min(a + batch, len(labels))
        mean = step_neumf(
            model, sample_user[a:b], sample_item[a:b], labels[a:b], shape, rates, buffers, before
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
    rates: tuple[float, float, float],
    buffers: NetworkBuffers,
    before: Array,
) -> float:
    """Take one step on a batch, in place; return the mean cross-entropy before it.

    A row takes the sum of the gradients of its samples, the layers their mean. ``before`` is a
    buffer for the GMF rows before the step.
    """
    users, items, products, theta = model
    n, d = len(labels), len(products)
    inputs, passed = matrix(buffers.outputs, 0, n, 2 * d), matrix(buffers.errors, 0, n, 2 * d)
    for s in range(n):
        inputs[s, :d] = users[user[s], d:]
        inputs[s, d:] = items[item[s], d:]
        before[0, s] = users[user[s], :d]
        before[1, s] = items[item[s], :d]
    logits = row_network_forward(theta, n, shape, buffers.outputs)
    for s in range(n):
        for j in range(d):
            logits[s] += products[j] * before[0, s, j] * before[1, s, j]
    last = n * shape.widths[:-1].sum()
    loss = cross_entropy_errors(logits, labels, buffers.errors[last:])
    row_network_backward(theta, n, shape, True, True, buffers)
    rate, row_rate, kept = np.float32(rates[0]), np.float32(rates[1]), np.float32(rates[2])
    for s in range(n):
        error = n * buffers.errors[last + s]
        for j in range(d):
            left, right = before[0, s, j], before[1, s, j]
            weighted = error * products[j]
            users[user[s], j] -= row_rate * (weighted * right + kept * left)
            items[item[s], j] -= row_rate * (weighted * left + kept * right)
            users[user[s], d + j] -= row_rate * (n * passed[s, j] + kept * inputs[s, j])
            items[item[s], d + j] -= row_rate * (n * passed[s, d + j] + kept * inputs[s, d + j])
    for j in range(d):
        summed = np.float32(0)
        for s in range(n):
            summed += buffers.errors[last + s] * before[0, s, j] * before[1, s, j]
        products[j] -= rate * summed
    for k in range(len(theta)):
        theta[k] -= rate * buffers.gradient[k]
    return loss


# ---------------------------------------------------------------- FedRKG's gates


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
    samples: DeviceSamples,
    tables: Array,
    guidance: Array,
    vectors: Array,
    biases: Array,
    gate_weights: Array,
    gate_biases: Array,
    batch: int,
    rate: Any,
    beta: Any,
    clip: Any,
) -> None:
    """Train every client's gate on fused rows, in place, with all other parameters frozen.

    SGD on the batch-mean BCE (FedRKG, eq. 7 and 8), with gradients clipped to norm ``clip``.
    ``tables`` are the clients' own, [clients, items, d].
    """
    indptr, items, labels, epochs = samples
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
