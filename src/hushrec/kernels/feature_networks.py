"""Minibatch descent of a network of features, fused: a client's whole training without a tensor.

A client's copy of the parameters is trained from its first sample to its last before the next
client begins, so that the copy stays in the cache, nobody waits for a longer client, and no bit of
a client depends on the others. Rows of features are mostly zeros, which are skipped.

The backward pass leaves a parameter as soon as nothing below it needs its old value; the pull of
the proximal term is taken just before, so that a step goes through the parameters once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hushrec.kernels.inner_product import ANY_ORDER
from hushrec.kernels.jit import njit
from hushrec.kernels.layers import (
    FeatureTable,
    Side,
    add_feature_gradient,
    add_features,
    add_product,
    cross_entropy_errors,
    fill_feature_table,
    inner,
    new_feature_table,
    pull_towards,
    rectify,
    squared_errors,
    step_first_layer,
    subtract_product,
)

Array = NDArray[Any]


class Layout(NamedTuple):
    """Where everything is in the flat vector of a network's parameters."""

    d: int
    """Width of an embedding."""
    user: Side
    item: Side
    first_bias: int
    widths: NDArray[np.int64]
    """Widths of the hidden layers, and 1."""
    weights: NDArray[np.int64]
    """The first weight of each layer after the first."""
    biases: NDArray[np.int64]


class Inputs(NamedTuple):
    """Rows of features, or of a table that is trained."""

    users: Array
    items: Array
    own_indptr: Array
    """Where items are trained: client c has those from ``own_indptr[c]`` to ``own_indptr[c + 1]``,
    and its samples name them from 0 on."""


class FeatureSamples(NamedTuple):
    """Samples in the order in which they are gone through."""

    indptr: Array
    """Client c has those from ``indptr[c]`` to ``indptr[c + 1]``."""
    users: Array
    items: Array
    labels: Array
    epochs: int
    """Passes, of the same length each."""


class ProximalDescent(NamedTuple):
    """The rates of a step."""

    lr: float
    mu: float
    """Weight of the proximal term."""
    squared: bool
    """Whether that term is the squared distance, or the distance."""
    item_lr: float
    """Rate of the rows of items; 0 where they are features, which do not move."""
    linear: bool = False
    """Whether the output is a rating as it is, under half the squared error, or a probability."""


class FeatureRoom(NamedTuple):
    """What a step writes its intermediate results to."""

    user: FeatureTable
    item: FeatureTable
    outputs: Array
    """Of every layer, one after the other, [samples, width] each."""
    errors: Array
    """Derivatives of the loss by those, before the ReLU."""
    turned: Array
    """The weights of a layer, outputs first."""
    base: Array
    """A row of the first layer's width."""


@njit(cache=True, nogil=True)
def fit_feature_networks(
    theta: Array,
    received: Array,
    inputs: Inputs,
    samples: FeatureSamples,
    batch: int,
    layout: Layout,
    descent: ProximalDescent,
) -> Array:
    """Train each row of ``theta`` in place; return the clients' mean losses before their steps."""
    users, items, own_indptr = inputs
    indptr, sample_user, sample_item, labels, epochs = samples
    losses = np.zeros(len(theta))
    room = new_feature_room(min(batch, max(1, len(labels))), users.shape[1], items.shape[1], layout)
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
                    room,
                )
                steps += 1
        losses[c] /= max(1, steps)
    return losses


@njit(cache=True, nogil=True)
def new_feature_room(
    samples: int, user_columns: int, item_columns: int, layout: Layout
) -> FeatureRoom:
    """Return room for steps of up to this many samples."""
    first, total = layout.widths[0], samples * layout.widths.sum()
    return FeatureRoom(
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
    layout: Layout,
    descent: ProximalDescent,
    room: FeatureRoom,
) -> float:
    """Take one step on a batch, in place; return the mean cross-entropy before it."""
    n, first, lr = len(labels), layout.widths[0], np.float32(descent.lr)
    pull = proximal_pull(theta, received, descent)
    fill_feature_table(theta, users, sample_user, layout.user, layout.d, False, room.user)
    fill_feature_table(
        theta, items, sample_item, layout.item, layout.d, descent.item_lr > 0, room.item
    )
    bias = theta[layout.first_bias : layout.first_bias + first]
    lowest = room.outputs[: n * first].reshape((n, first))
    for s in range(n):
        if s == 0 or sample_user[s] != sample_user[s - 1]:  # a client's samples are all of one user
            room.base[:] = bias
            add_features(users, sample_user[s], room.user, room.base)
        lowest[s] = room.base
        add_features(items, sample_item[s], room.item, lowest[s])
    rectify(lowest)
    loss = step_upper_layers(theta, received, labels, layout, lr, pull, descent.linear, room)
    errors = room.errors[: n * first].reshape((n, first))
    pull_towards(bias, received[layout.first_bias : layout.first_bias + first], pull)
    for s in range(n):
        add_feature_gradient(items, sample_item[s], errors[s], room.item)
        for j in range(first):
            bias[j] -= lr * errors[s, j]
    s = 0
    while s < n:
        user = sample_user[s]
        room.base[:] = 0
        while s < n and sample_user[s] == user:
            for j in range(first):
                room.base[j] += errors[s, j]
            s += 1
        add_feature_gradient(users, user, room.base, room.user)
    if descent.item_lr > 0:
        for s in range(n):
            for c in range(items.shape[1]):
                part = inner(errors[s], room.item.rows[c])
                items[sample_item[s], c] -= np.float32(descent.item_lr) * part
    step_first_layer(theta, received, layout.user, layout.d, lr, pull, room.user)
    step_first_layer(theta, received, layout.item, layout.d, lr, pull, room.item)
    return loss


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def step_upper_layers(
    theta: Array,
    received: Array,
    labels: Array,
    layout: Layout,
    lr: Any,
    pull: Any,
    linear: bool,
    room: FeatureRoom,
) -> float:
    """Go on from the first layer's outputs, move the layers above it, leave its errors.

    Returns the mean loss: cross-entropy or, with ``linear``, half the squared error.
    """
    n, depth, widths = len(labels), len(layout.widths) - 1, layout.widths
    at = 0
    for k in range(depth):
        below = room.outputs[at : at + n * widths[k]].reshape((n, widths[k]))
        at += n * widths[k]
        out = room.outputs[at : at + n * widths[k + 1]].reshape((n, widths[k + 1]))
        out[:] = theta[layout.biases[k] : layout.biases[k] + widths[k + 1]]
        size = widths[k] * widths[k + 1]
        weights = theta[layout.weights[k] : layout.weights[k] + size]
        add_product(below, weights.reshape((widths[k], widths[k + 1])), out)
        if k < depth - 1:
            rectify(out)
    if linear:
        loss = squared_errors(room.outputs[at : at + n], labels, room.errors[at:])
    else:
        loss = cross_entropy_errors(room.outputs[at : at + n], labels, room.errors[at:])
    for k in range(depth - 1, -1, -1):
        error = room.errors[at : at + n * widths[k + 1]].reshape((n, widths[k + 1]))
        at -= n * widths[k]
        below = room.outputs[at : at + n * widths[k]].reshape((n, widths[k]))
        passed = room.errors[at : at + n * widths[k]].reshape((n, widths[k]))
        start, size = layout.weights[k], widths[k] * widths[k + 1]
        weights = theta[start : start + size].reshape((widths[k], widths[k + 1]))
        turned = room.turned[:size].reshape((widths[k + 1], widths[k]))
        for i in range(widths[k]):
            for j in range(widths[k + 1]):
                turned[j, i] = weights[i, j]
        passed[:] = 0
        add_product(error, turned, passed)
        for s in range(n):
            for i in range(widths[k]):
                passed[s, i] *= np.float32(below[s, i] > 0)
        pull_towards(theta[start : start + size], received[start : start + size], pull)
        subtract_product(below, error, lr, weights)
        start = layout.biases[k]
        bias = theta[start : start + widths[k + 1]]
        pull_towards(bias, received[start : start + widths[k + 1]], pull)
        for s in range(n):
            for j in range(widths[k + 1]):
                bias[j] -= lr * error[s, j]
    return loss


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def proximal_pull(theta: Array, received: Array, descent: ProximalDescent) -> Any:
    """Return the share of the way back to ``received`` that a step takes."""
    strength = np.float32(descent.lr * descent.mu)
    if descent.mu == 0 or descent.squared:
        return strength
    squares = np.float32(0)
    for k in range(len(theta)):
        apart = theta[k] - received[k]
        squares += apart * apart
    # The root has no gradient at 0, where every client starts; the shift gives it one, 0.
    return np.float32(strength / (2 * np.sqrt(squares + np.float32(1e-12))))
