"""Fused minibatch SGD of an MLP over sparse features.

Clients are trained one after the other, each on its own copy of the parameters, so that the copy
stays in the processor cache and a client's result does not depend on the others. Zeros in feature
rows are skipped. Embeddings enter the first layer linearly, so the contribution of a feature is one
row of a table that is computed once per step for the features that occur.

The backward pass updates a parameter as soon as no lower layer needs its old value, together with
the proximal term, so that a step passes over the parameters once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hushrec.kernels.draws import DeviceSamples
from hushrec.kernels.inner_product import ANY_ORDER
from hushrec.kernels.jit import Array, njit
from hushrec.kernels.layers import (
    add_product,
    backpropagate,
    cross_entropy_errors,
    inner,
    matrix,
    pull_towards,
    rectify,
    squared_errors,
    subtract_product,
    zero_inactive,
)
from hushrec.kernels.row_networks import Shape, row_network_forward


class Side(NamedTuple):
    """Offsets of the user's, or the item's, parameters in the flat vector."""

    embeddings: int
    """Offset of the embeddings of all categories, in the order of columns."""
    weights: int
    """Offset of the first-layer weights: `d` rows per field, then one row per numeric feature."""
    fields: Array
    """First column of each categorical field and of the numeric features, and the column count."""


class FeatureTable(NamedTuple):
    """Contributions to the first layer of the features that occur in a batch, one row each."""

    row_of: Array
    """Row of each feature column; -1 if it does not occur."""
    columns: Array
    """Feature column of each row."""
    ends: Array
    """End of the rows of each field, and of the numeric features."""
    embeddings: Array
    """Embeddings before the step, one row per category that occurs."""
    rows: Array
    gradient: Array
    passed: Array
    """Gradient of the embeddings."""


@njit(cache=True, nogil=True)
def new_feature_table(columns: int, fields: int, d: int, first: int) -> FeatureTable:
    """Allocate the feature table of a side."""
    return FeatureTable(
        np.empty(columns, np.int64),
        np.empty(columns, np.int64),
        np.empty(fields, np.int64),
        np.empty((columns, d), np.float32),
        np.empty((columns, first), np.float32),
        np.empty((columns, first), np.float32),
        np.empty((columns, d), np.float32),
    )


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def fill_feature_table(
    theta: Array,
    rows: Array,
    chosen: Array,
    side: Side,
    d: int,
    everything: bool,
    table: FeatureTable,
) -> None:
    """Compute the contribution of each feature that occurs to the first layer.

    The row of a category is its embedding times the weights. ``everything`` includes all columns,
    for item rows that are trained and do not stay 0.
    """
    first, n_fields = table.rows.shape[1], len(side.fields) - 2
    table.row_of[:] = -1
    for s in range(len(chosen)):
        if everything or (s > 0 and chosen[s] == chosen[s - 1]):
            continue
        for c in range(rows.shape[1]):
            if rows[chosen[s], c] != 0:
                table.row_of[c] = 0
    end = 0
    for k in range(n_fields + 1):
        begin = end
        for c in range(side.fields[k], side.fields[k + 1]):
            if everything or table.row_of[c] == 0:
                table.row_of[c], table.columns[end] = end, c
                end += 1
        table.ends[k] = end
        at = side.weights + k * d * first
        if k == n_fields:
            for r in range(begin, end):
                number = at + (table.columns[r] - side.fields[k]) * first
                table.rows[r] = theta[number : number + first]
            continue
        for r in range(begin, end):
            embedding = side.embeddings + table.columns[r] * d
            table.embeddings[r] = theta[embedding : embedding + d]
        weights = matrix(theta, at, d, first)
        table.rows[begin:end] = 0
        add_product(table.embeddings[begin:end], weights, table.rows[begin:end])
    table.gradient[:end] = 0


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def add_features(rows: Array, row: int, table: FeatureTable, out: Array) -> None:
    """Add the contribution of a row of features to the first layer."""
    for c in range(rows.shape[1]):
        x, r = rows[row, c], table.row_of[c]
        if x != 0:
            for j in range(len(out)):
                out[j] += x * table.rows[r, j]


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def add_feature_gradient(rows: Array, row: int, error: Array, table: FeatureTable) -> None:
    """Add the contribution of a row of features to the gradient of the table."""
    for c in range(rows.shape[1]):
        x, r = rows[row, c], table.row_of[c]
        if x != 0:
            for j in range(len(error)):
                table.gradient[r, j] += x * error[j]


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def step_first_layer(
    theta: Array, received: Array, side: Side, d: int, lr: Any, pull: Any, table: FeatureTable
) -> None:
    """Update a side's weights and embeddings from the gradient of its feature table."""
    first, n_fields = table.rows.shape[1], len(side.fields) - 2
    begin = 0
    for k in range(n_fields):
        end, at = table.ends[k], side.weights + k * d * first
        weights = matrix(theta, at, d, first)
        for r in range(begin, end):
            for i in range(d):
                table.passed[r, i] = inner(table.gradient[r], weights[i])
        pull_towards(theta[at : at + d * first], received[at : at + d * first], pull)
        subtract_product(table.embeddings[begin:end], table.gradient[begin:end], lr, weights)
        begin = end
    start = side.embeddings
    stop = start + side.fields[n_fields] * d
    pull_towards(theta[start:stop], received[start:stop], pull)
    for r in range(begin):
        for i in range(d):
            theta[start + table.columns[r] * d + i] -= lr * table.passed[r, i]
    at = side.weights + n_fields * d * first
    stop = at + (side.fields[n_fields + 1] - side.fields[n_fields]) * first
    pull_towards(theta[at:stop], received[at:stop], pull)
    for r in range(begin, table.ends[n_fields]):
        number = at + (table.columns[r] - side.fields[n_fields]) * first
        for j in range(first):
            theta[number + j] -= lr * table.gradient[r, j]


class NetworkLayout(NamedTuple):
    """Offsets of a network's parameters in the flat vector."""

    d: int
    """Embedding width."""
    user: Side
    item: Side
    first_bias: int
    """Offset of the bias of the first layer; the layers above follow, weights before biases."""
    widths: Array
    """Widths of the hidden layers, and 1."""


class ProximalDescent(NamedTuple):
    """Rates of SGD with a proximal term."""

    lr: float
    mu: float
    """Weight of the proximal term."""
    squared: bool
    """Whether that term is the squared distance, not the distance."""
    item_lr: float
    """Rate of item rows; 0 if they are features, which are not trained."""
    linear: bool = False
    """Whether the output is a rating (half the squared error), not a logit (cross-entropy)."""


class FeatureBuffers(NamedTuple):
    """Intermediate results of a step."""

    user: FeatureTable
    item: FeatureTable
    outputs: Array
    """Outputs of all layers, [samples, width] each."""
    errors: Array
    """Gradient of the loss by the outputs before ReLU."""
    transposed: Array
    """Transposed weights of a layer."""
    base: Array
    """The user's contribution to the first layer."""


@njit(cache=True, nogil=True)
def fit_feature_networks(
    theta: Array,
    received: Array,
    users: Array,
    items: Array,
    own_indptr: Array,
    sample_user: Array,
    samples: DeviceSamples,
    batch: int,
    layout: NetworkLayout,
    descent: ProximalDescent,
) -> Array:
    """Train each row of ``theta`` in place; return the clients' mean losses before each step.

    ``users`` and ``items`` are feature rows. If item rows are trained, client c owns
    ``items[own_indptr[c]:own_indptr[c + 1]]``, and its samples index them from 0.
    """
    indptr, sample_item, labels, epochs = samples
    losses = np.zeros(len(theta))
    buffers = new_feature_buffers(
        min(batch, max(1, len(labels))), users.shape[1], items.shape[1], layout
    )
    for c in range(len(theta)):
        length = (indptr[c + 1] - indptr[c]) // epochs
        own = items[own_indptr[c] : own_indptr[c + 1]] if descent.item_lr > 0 else items
        steps = 0
        for epoch in range(epochs):
            start, end = indptr[c] + epoch * length, indptr[c] + (epoch + 1) * length
            for a in range(start, end, batch):
                b = min(a + batch, end)
                losses[c] += step_feature_network(
                    theta[c],
                    received,
                    users,
                    own,
                    sample_user[a:b],
                    sample_item[a:b],
                    labels[a:b],
                    layout,
                    descent,
                    buffers,
                )
                steps += 1
        losses[c] /= max(1, steps)
    return losses


@njit(cache=True, nogil=True)
def new_feature_buffers(
    samples: int, user_columns: int, item_columns: int, layout: NetworkLayout
) -> FeatureBuffers:
    """Allocate buffers for batches of up to this many samples."""
    first, total = layout.widths[0], samples * layout.widths.sum()
    return FeatureBuffers(
        new_feature_table(user_columns, len(layout.user.fields), layout.d, first),
        new_feature_table(item_columns, len(layout.item.fields), layout.d, first),
        np.empty(total, np.float32),
        np.empty(total, np.float32),
        np.empty((layout.widths[:-1] * layout.widths[1:]).max(), np.float32),
        np.empty(first, np.float32),
    )


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def step_feature_network(
    theta: Array,
    received: Array,
    users: Array,
    items: Array,
    sample_user: Array,
    sample_item: Array,
    labels: Array,
    layout: NetworkLayout,
    descent: ProximalDescent,
    buffers: FeatureBuffers,
) -> float:
    """Take one step on a batch, in place; return the mean loss before it."""
    n, first, lr = len(labels), layout.widths[0], np.float32(descent.lr)
    pull = proximal_pull(theta, received, descent)
    fill_feature_table(theta, users, sample_user, layout.user, layout.d, False, buffers.user)
    fill_feature_table(
        theta, items, sample_item, layout.item, layout.d, descent.item_lr > 0, buffers.item
    )
    bias = theta[layout.first_bias : layout.first_bias + first]
    lowest = matrix(buffers.outputs, 0, n, first)
    for s in range(n):
        if s == 0 or sample_user[s] != sample_user[s - 1]:  # a client's samples are all of one user
            buffers.base[:] = bias
            add_features(users, sample_user[s], buffers.user, buffers.base)
        lowest[s] = buffers.base
        add_features(items, sample_item[s], buffers.item, lowest[s])
    rectify(lowest)
    loss = step_upper_layers(theta, received, labels, layout, lr, pull, descent.linear, buffers)
    errors = matrix(buffers.errors, 0, n, first)
    pull_towards(bias, received[layout.first_bias : layout.first_bias + first], pull)
    for s in range(n):
        add_feature_gradient(items, sample_item[s], errors[s], buffers.item)
        for j in range(first):
            bias[j] -= lr * errors[s, j]
    s = 0
    while s < n:
        user = sample_user[s]
        buffers.base[:] = 0
        while s < n and sample_user[s] == user:
            for j in range(first):
                buffers.base[j] += errors[s, j]
            s += 1
        add_feature_gradient(users, user, buffers.base, buffers.user)
    if descent.item_lr > 0:
        for s in range(n):
            for c in range(items.shape[1]):
                part = inner(errors[s], buffers.item.rows[c])
                items[sample_item[s], c] -= np.float32(descent.item_lr) * part
    step_first_layer(theta, received, layout.user, layout.d, lr, pull, buffers.user)
    step_first_layer(theta, received, layout.item, layout.d, lr, pull, buffers.item)
    return loss


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def step_upper_layers(
    theta: Array,
    received: Array,
    labels: Array,
    layout: NetworkLayout,
    lr: Any,
    pull: Any,
    linear: bool,
    buffers: FeatureBuffers,
) -> float:
    """Run forward and backward above the first layer, update these layers, fill its errors.

    Returns the mean loss: cross-entropy or, with ``linear``, half the squared error.
    """
    n, widths = len(labels), layout.widths
    upper = theta[layout.first_bias + widths[0] :]
    outputs = row_network_forward(upper, n, Shape(0, widths), buffers.outputs)
    at, end = n * widths[:-1].sum(), len(theta)
    if linear:
        loss = squared_errors(outputs, labels, buffers.errors[at:])
    else:
        loss = cross_entropy_errors(outputs, labels, buffers.errors[at:])
    for k in range(len(widths) - 2, -1, -1):
        error = matrix(buffers.errors, at, n, widths[k + 1])
        at -= n * widths[k]
        below = matrix(buffers.outputs, at, n, widths[k])
        passed = matrix(buffers.errors, at, n, widths[k])
        bias = theta[end - widths[k + 1] : end]
        start = end - len(bias) - widths[k] * widths[k + 1]
        weights = matrix(theta, start, widths[k], widths[k + 1])
        backpropagate(weights, error, buffers.transposed, passed)
        zero_inactive(below, passed)
        pull_towards(theta[start:end], received[start:end], pull)
        subtract_product(below, error, lr, weights)
        end = start
        for s in range(n):
            for j in range(widths[k + 1]):
                bias[j] -= lr * error[s, j]
    return loss


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def proximal_pull(theta: Array, received: Array, descent: ProximalDescent) -> Any:
    """Return the share by which the proximal term moves the parameters towards ``received``."""
    strength = np.float32(descent.lr * descent.mu)
    if descent.mu == 0 or descent.squared:
        return strength
    squares = np.float32(0)
    for k in range(len(theta)):
        apart = theta[k] - received[k]
        squares += apart * apart
    # The root has no gradient at 0, where every client starts; the shift makes it 0.
    return np.float32(strength / (2 * np.sqrt(squares + np.float32(1e-12))))
