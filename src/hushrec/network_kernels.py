"""Minibatch descent of a network of features, fused: a client's whole training without a tensor.

A client's copy of the parameters is trained from its first sample to its last before the next
client begins, so that the copy stays in the cache, nobody waits for a longer client, and no bit of
a client depends on the others. Rows of features are mostly zeros, which are skipped. Every inner
loop runs over the width of a layer, which lies side by side in memory.

The backward pass leaves a parameter as soon as nothing below it needs its old value; the pull of
the proximal term is taken just before, so that a step goes through the parameters once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hushrec.kernels import ANY_ORDER

Array = NDArray[Any]


class Side(NamedTuple):
    """Where the parameters of the users, or of the items, are in the flat vector."""

    embeddings: int
    """The first embedding; those of all categories follow one another, in the order of columns."""
    weights: int
    """The first row of first-layer weights."""
    categories: int
    """Columns of features that are categories; the others are numbers."""
    row_of: NDArray[np.int64]
    """First row of weights of each column: `d` rows for a category, one for a number."""
    rows: int
    """All rows of weights."""


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


class Descent(NamedTuple):
    """The rates of a step."""

    lr: float
    mu: float
    """Weight of the proximal term."""
    squared: bool
    """Whether that term is the squared distance, or the distance."""
    item_lr: float
    """Rate of the rows of items; 0 where they are features, which do not move."""


@njit(cache=True, nogil=True)
def train_clients(
    theta: Array,
    received: Array,
    users: Array,
    items: Array,
    indptr: Array,
    sample_user: Array,
    sample_item: Array,
    labels: Array,
    epochs: int,
    batch: int,
    layout: Layout,
    descent: Descent,
    own_indptr: Array,
) -> Array:
    """Train each row of ``theta`` in place; return the clients' mean losses before their steps.

    Client c has the samples ``indptr[c]:indptr[c + 1]``, which go through ``epochs`` passes of the
    same length. ``users`` and ``items`` are rows of features. Where items are trained, client c's
    are ``items[own_indptr[c]:own_indptr[c + 1]]``, and its samples name them from 0 on.
    """
    losses = np.zeros(len(theta))
    room = rooms(min(batch, max(1, len(labels))), users.shape[1], items.shape[1], layout)
    for c in range(len(theta)):
        length = (indptr[c + 1] - indptr[c]) // epochs
        own = items[own_indptr[c] : own_indptr[c + 1]] if descent.item_lr > 0 else items
        steps = 0
        for epoch in range(epochs):
            start, end = indptr[c] + epoch * length, indptr[c] + (epoch + 1) * length
            for a in range(start, end, batch):
                b = min(a + batch, end)
                losses[c] += take_step(
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


class Room(NamedTuple):
    """What a step writes its intermediate results to."""

    outputs: Array
    """Of every layer, one beside the other, [samples, sum of widths]."""
    errors: Array
    """Derivatives of the loss by those, before the ReLU."""
    turned: Array
    """The weights of a layer, outputs first."""
    user_table: Array
    item_table: Array
    user_gradient: Array
    item_gradient: Array
    user_used: Array
    item_used: Array
    passed: Array
    """Gradients of embeddings, a row per column of features."""
    base: Array
    """What bias and user contribute to the first layer."""


@njit(cache=True, nogil=True)
def rooms(samples: int, user_columns: int, item_columns: int, layout: Layout) -> Room:
    """Return room for a step of this many samples."""
    first, total = layout.widths[0], layout.widths.sum()
    widest = 0
    for k in range(len(layout.widths) - 1):
        widest = max(widest, layout.widths[k] * layout.widths[k + 1])
    columns = max(user_columns, item_columns)
    return Room(
        np.empty((samples, total), np.float32),
        np.empty((samples, total), np.float32),
        np.empty(widest, np.float32),
        np.empty((user_columns, first), np.float32),
        np.empty((item_columns, first), np.float32),
        np.empty((user_columns, first), np.float32),
        np.empty((item_columns, first), np.float32),
        np.empty(user_columns, np.bool_),
        np.empty(item_columns, np.bool_),
        np.empty((columns, layout.d), np.float32),
        np.empty(first, np.float32),
    )


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def take_step(
    theta: Array,
    received: Array,
    users: Array,
    items: Array,
    sample_user: Array,
    sample_item: Array,
    labels: Array,
    layout: Layout,
    descent: Descent,
    room: Room,
) -> float:
    """Take one step on a batch, in place; return the mean cross-entropy before it."""
    n, first = len(labels), layout.widths[0]
    lr = np.float32(descent.lr)
    pull = strength_of_pull(theta, received, descent)
    room.user_used[:] = False
    room.item_used[:] = descent.item_lr > 0  # what is 0 now need not stay 0
    make_table(theta, users, sample_user, layout.user, layout.d, room.user_table, room.user_used)
    make_table(theta, items, sample_item, layout.item, layout.d, room.item_table, room.item_used)
    loss = forward(theta, users, items, sample_user, sample_item, labels, layout, room)
    backward(theta, received, n, layout, lr, pull, room)
    # The first layer: what each feature's row of the table is to blame for.
    room.user_gradient[:] = 0
    room.item_gradient[:] = 0
    bias = theta[layout.first_bias : layout.first_bias + first]
    draw_near(bias, received[layout.first_bias : layout.first_bias + first], pull)
    for s in range(n):
        error = room.errors[s, :first]
        for j in range(first):
            bias[j] -= lr * error[j]
        add_outer(room.item_gradient, items[sample_item[s]], error)
    s = 0
    while s < n:  # one user's samples at a time: a client's are all of one
        room.base[:] = 0
        user = sample_user[s]
        while s < n and sample_user[s] == user:
            error = room.errors[s, :first]
            for j in range(first):
                room.base[j] += error[j]
            s += 1
        add_outer(room.user_gradient, users[user], room.base)
    if descent.item_lr > 0:
        rate = np.float32(descent.item_lr)
        for s in range(n):
            error, row = room.errors[s, :first], items[sample_item[s]]
            for c in range(len(row)):
                total = np.float32(0)
                for j in range(first):
                    total += error[j] * room.item_table[c, j]
                row[c] -= rate * total
    move_side(theta, received, layout.user, layout.d, first, lr, pull, room.user_gradient,
              room.user_used, room.passed)  # fmt: skip
    move_side(theta, received, layout.item, layout.d, first, lr, pull, room.item_gradient,
              room.item_used, room.passed)  # fmt: skip
    return loss


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def strength_of_pull(theta: Array, received: Array, descent: Descent) -> Any:
    """Return the share of the way back to ``received`` that a step takes."""
    strength = np.float32(descent.lr * descent.mu)
    if descent.mu == 0 or descent.squared:
        return strength
    squares = np.float32(0)
    for k in range(len(theta)):
        apart = theta[k] - received[k]
        squares += apart * apart
    return np.float32(strength / (2 * np.sqrt(squares + np.float32(1e-12))))


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def draw_near(values: Array, anchors: Array, pull: Any) -> None:
    """Take the pull's share of the way to the anchors."""
    if pull > 0:
        for k in range(len(values)):
            values[k] -= pull * (values[k] - anchors[k])


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def make_table(
    theta: Array, rows: Array, chosen: Array, side: Side, d: int, table: Array, used: Array
) -> None:
    """Mark the features that occur, and work out what each adds to the first layer.

    Embeddings enter it linearly, so a category's embedding times its weights is one row.
    """
    first = table.shape[1]
    for s in range(len(chosen)):
        if s > 0 and chosen[s] == chosen[s - 1]:
            continue
        row = rows[chosen[s]]
        for c in range(len(row)):
            used[c] |= row[c] != 0
    for c in range(len(used)):
        if not used[c]:
            continue
        at = side.weights + side.row_of[c] * first
        out = table[c]
        if c >= side.categories:
            out[:] = theta[at : at + first]
            continue
        out[:] = 0
        for i in range(d):
            x = theta[side.embeddings + c * d + i]
            weights = theta[at + i * first : at + (i + 1) * first]
            for j in range(first):
                out[j] += x * weights[j]


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def add_inner(out: Array, row: Array, table: Array) -> None:
    """Add a row of features times their table."""
    for c in range(len(row)):
        x = row[c]
        if x != 0:
            for j in range(len(out)):
                out[j] += x * table[c, j]


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def add_outer(table: Array, row: Array, error: Array) -> None:
    """Add what a row of features gives the gradient of their table."""
    for c in range(len(row)):
        x = row[c]
        if x != 0:
            for j in range(len(error)):
                table[c, j] += x * error[j]


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def forward(
    theta: Array,
    users: Array,
    items: Array,
    sample_user: Array,
    sample_item: Array,
    labels: Array,
    layout: Layout,
    room: Room,
) -> float:
    """Fill the outputs of all layers and the error of the last; return the mean cross-entropy."""
    n, first, depth = len(labels), layout.widths[0], len(layout.widths) - 1
    loss = 0.0
    for s in range(n):
        if s == 0 or sample_user[s] != sample_user[s - 1]:
            room.base[:] = theta[layout.first_bias : layout.first_bias + first]
            add_inner(room.base, users[sample_user[s]], room.user_table)
        out = room.outputs[s, :first]
        out[:] = room.base
        add_inner(out, items[sample_item[s]], room.item_table)
        for j in range(first):
            out[j] = max(out[j], np.float32(0))
        at = first
        for k in range(depth):
            width, below = layout.widths[k + 1], out
            out = room.outputs[s, at : at + width]
            out[:] = theta[layout.biases[k] : layout.biases[k] + width]
            for i in range(len(below)):
                start = layout.weights[k] + i * width
                weights, x = theta[start : start + width], below[i]
                for j in range(width):
                    out[j] += x * weights[j]
            if k < depth - 1:
                for j in range(width):
                    out[j] = max(out[j], np.float32(0))
            at += width
        logit = np.float64(out[0])
        loss += max(logit, 0.0) - logit * labels[s] + np.log1p(np.exp(-abs(logit)))
        room.errors[s, at - 1] = (1 / (1 + np.exp(-logit)) - labels[s]) / n
    return loss / n


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def backward(
    theta: Array, received: Array, n: int, layout: Layout, lr: Any, pull: Any, room: Room
) -> None:
    """Carry the errors down to the first layer, moving the layers above it."""
    at = layout.widths.sum()
    for k in range(len(layout.widths) - 2, -1, -1):
        above, below = layout.widths[k + 1], layout.widths[k]
        at -= above
        start = layout.weights[k]
        weights = theta[start : start + below * above].reshape((below, above))
        bias = theta[layout.biases[k] : layout.biases[k] + above]
        turned = room.turned[: below * above].reshape((above, below))
        for i in range(below):
            for j in range(above):
                turned[j, i] = weights[i, j]
        draw_near(
            theta[start : start + below * above], received[start : start + below * above], pull
        )
        draw_near(bias, received[layout.biases[k] : layout.biases[k] + above], pull)
        for s in range(n):
            error = room.errors[s, at : at + above]
            passed, out = room.errors[s, at - below : at], room.outputs[s, at - below : at]
            passed[:] = 0
            for j in range(above):
                for i in range(below):
                    passed[i] += error[j] * turned[j, i]
                bias[j] -= lr * error[j]
            for i in range(below):
                if out[i] > 0:
                    x = lr * out[i]
                    for j in range(above):
                        weights[i, j] -= x * error[j]
                else:
                    passed[i] = 0


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def move_side(
    theta: Array,
    received: Array,
    side: Side,
    d: int,
    first: int,
    lr: Any,
    pull: Any,
    gradient: Array,
    used: Array,
    passed: Array,
) -> None:
    """Carry the gradient of a side's table to its weights and embeddings, and move both."""
    for c in range(side.categories):
        if used[c]:
            at = side.weights + side.row_of[c] * first
            for i in range(d):
                weights = theta[at + i * first : at + (i + 1) * first]
                total = np.float32(0)
                for j in range(first):
                    total += gradient[c, j] * weights[j]
                passed[c, i] = total
    end = side.weights + side.rows * first
    draw_near(theta[side.weights : end], received[side.weights : end], pull)
    for c in range(len(used)):
        if used[c]:
            at = side.weights + side.row_of[c] * first
            for i in range(d if c < side.categories else 1):
                x = theta[side.embeddings + c * d + i] if c < side.categories else np.float32(1)
                weights = theta[at + i * first : at + (i + 1) * first]
                for j in range(first):
                    weights[j] -= lr * x * gradient[c, j]
    end = side.embeddings + side.categories * d
    draw_near(theta[side.embeddings : end], received[side.embeddings : end], pull)
    for c in range(side.categories):
        if used[c]:
            for i in range(d):
                theta[side.embeddings + c * d + i] -= lr * passed[c, i]
