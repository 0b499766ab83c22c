"""Minibatch descent of a network of features, fused: a client's whole training without a tensor.

A client's copy of the parameters is trained from its first sample to its last before the next
client begins, so that the copy stays in the cache, nobody waits for a longer client, and no bit of
a client depends on the others. Rows of features are mostly zeros, which are skipped. Every inner
loop runs over the width of a layer, which lies side by side in memory; `product` and `descend` go
four rows at a time, so that a sum is written once for four terms.

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
    """The first row of first-layer weights: `d` for each field, then one for each number."""
    fields: NDArray[np.int64]
    """First column of each categorical field, and of the numbers, and the number of columns."""


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


class Table(NamedTuple):
    """What the features of a side that occur in a batch add to the first layer, a row each."""

    place: Array
    """Row of each column of features; -1 where it does not occur."""
    columns: Array
    """Column of each row."""
    ends: Array
    """Rows up to the end of each field, and of the numbers."""
    embeddings: Array
    """The embeddings as they were before the step, a row per category that occurs."""
    rows: Array
    gradient: Array
    passed: Array
    """The gradient of the embeddings."""


class Room(NamedTuple):
    """What a step writes its intermediate results to."""

    user: Table
    item: Table
    outputs: Array
    """Of every layer, one after the other, [samples, width] each."""
    errors: Array
    """Derivatives of the loss by those, before the ReLU."""
    turned: Array
    """The weights of a layer, outputs first."""
    base: Array
    """A row of the first layer's width."""


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
    room = new_room(min(batch, max(1, len(labels))), users.shape[1], items.shape[1], layout)
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


@njit(cache=True, nogil=True)
def new_room(samples: int, user_columns: int, item_columns: int, layout: Layout) -> Room:
    """Return room for steps of up to this many samples."""
    first, total = layout.widths[0], samples * layout.widths.sum()
    return Room(
        new_table(user_columns, len(layout.user.fields), layout.d, first),
        new_table(item_columns, len(layout.item.fields), layout.d, first),
        np.empty(total, np.float32),
        np.empty(total, np.float32),
        np.empty((layout.widths[:-1] * layout.widths[1:]).max(), np.float32),
        np.empty(first, np.float32),
    )


@njit(cache=True, nogil=True)
def new_table(columns: int, fields: int, d: int, first: int) -> Table:
    """Return room for the table of a side."""
    return Table(
        np.empty(columns, np.int64),
        np.empty(columns, np.int64),
        np.empty(fields, np.int64),
        np.empty((columns, d), np.float32),
        np.empty((columns, first), np.float32),
        np.empty((columns, first), np.float32),
        np.empty((columns, d), np.float32),
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
    n, first, lr = len(labels), layout.widths[0], np.float32(descent.lr)
    pull = strength_of_pull(theta, received, descent)
    fill_table(theta, users, sample_user, layout.user, layout.d, False, room.user)
    fill_table(theta, items, sample_item, layout.item, layout.d, descent.item_lr > 0, room.item)
    bias = theta[layout.first_bias : layout.first_bias + first]
    lowest = room.outputs[: n * first].reshape((n, first))
    for s in range(n):
        if s == 0 or sample_user[s] != sample_user[s - 1]:  # a client's samples are all of one user
            room.base[:] = bias
            add_features(users, sample_user[s], room.user, room.base)
        lowest[s] = room.base
        add_features(items, sample_item[s], room.item, lowest[s])
    rectify(lowest)
    loss = upper_layers(theta, received, labels, layout, lr, pull, room)
    errors = room.errors[: n * first].reshape((n, first))
    draw_near(bias, received[layout.first_bias : layout.first_bias + first], pull)
    for s in range(n):
        blame_features(items, sample_item[s], errors[s], room.item)
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
        blame_features(users, user, room.base, room.user)
    if descent.item_lr > 0:
        for s in range(n):
            for c in range(items.shape[1]):
                part = inner(errors[s], room.item.rows[c])
                items[sample_item[s], c] -= np.float32(descent.item_lr) * part
    move_side(theta, received, layout.user, layout.d, lr, pull, room.user)
    move_side(theta, received, layout.item, layout.d, lr, pull, room.item)
    return loss


# ---------------------------------------------------------------- the first layer


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def fill_table(
    theta: Array, rows: Array, chosen: Array, side: Side, d: int, everything: bool, table: Table
) -> None:
    """Find the features that occur and work out what each adds to the first layer.

    Embeddings enter it linearly, so a category's embedding times its weights is one row.
    ``everything`` takes all columns: those of trained rows do not stay 0.
    """
    first, n_fields = table.rows.shape[1], len(side.fields) - 2
    table.place[:] = -1
    for s in range(len(chosen)):
        if everything or (s > 0 and chosen[s] == chosen[s - 1]):
            continue
        for c in range(rows.shape[1]):
            if rows[chosen[s], c] != 0:
                table.place[c] = 0
    end = 0
    for k in range(n_fields + 1):
        begin = end
        for c in range(side.fields[k], side.fields[k + 1]):
            if everything or table.place[c] == 0:
                table.place[c], table.columns[end] = end, c
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
        weights = theta[at : at + d * first].reshape((d, first))
        table.rows[begin:end] = 0
        product(table.embeddings[begin:end], weights, table.rows[begin:end])
    table.gradient[:end] = 0


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def add_features(rows: Array, row: int, table: Table, out: Array) -> None:
    """Add what a row of features contributes to the first layer."""
    for c in range(rows.shape[1]):
        x, r = rows[row, c], table.place[c]
        if x != 0:
            for j in range(len(out)):
                out[j] += x * table.rows[r, j]


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def blame_features(rows: Array, row: int, error: Array, table: Table) -> None:
    """Add what a row of features gives the gradient of the table."""
    for c in range(rows.shape[1]):
        x, r = rows[row, c], table.place[c]
        if x != 0:
            for j in range(len(error)):
                table.gradient[r, j] += x * error[j]


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def move_side(
    theta: Array, received: Array, side: Side, d: int, lr: Any, pull: Any, table: Table
) -> None:
    """Carry the gradient of a side's table to its weights and embeddings, and move both."""
    first, n_fields = table.rows.shape[1], len(side.fields) - 2
    begin = 0
    for k in range(n_fields):
        end, at = table.ends[k], side.weights + k * d * first
        weights = theta[at : at + d * first].reshape((d, first))
        for r in range(begin, end):
            for i in range(d):
                table.passed[r, i] = inner(table.gradient[r], weights[i])
        draw_near(theta[at : at + d * first], received[at : at + d * first], pull)
        descend(table.embeddings[begin:end], table.gradient[begin:end], lr, weights)
        begin = end
    start = side.embeddings
    stop = start + side.fields[n_fields] * d
    draw_near(theta[start:stop], received[start:stop], pull)
    for r in range(begin):
        for i in range(d):
            theta[start + table.columns[r] * d + i] -= lr * table.passed[r, i]
    at = side.weights + n_fields * d * first
    stop = at + (side.fields[n_fields + 1] - side.fields[n_fields]) * first
    draw_near(theta[at:stop], received[at:stop], pull)
    for r in range(begin, table.ends[n_fields]):
        number = at + (table.columns[r] - side.fields[n_fields]) * first
        for j in range(first):
            theta[number + j] -= lr * table.gradient[r, j]


# ---------------------------------------------------------------- the layers above it


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def upper_layers(
    theta: Array,
    received: Array,
    labels: Array,
    layout: Layout,
    lr: Any,
    pull: Any,
    room: Room,
) -> float:
    """Go on from the first layer's outputs, move the layers above it, leave its errors.

    Returns the mean cross-entropy.
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
        product(below, weights.reshape((widths[k], widths[k + 1])), out)
        if k < depth - 1:
            rectify(out)
    loss = 0.0
    for s in range(n):
        logit = np.float64(room.outputs[at + s])
        loss += max(logit, 0.0) - logit * labels[s] + np.log1p(np.exp(-abs(logit)))
        room.errors[at + s] = (1 / (1 + np.exp(-logit)) - labels[s]) / n
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
        product(error, turned, passed)
        for s in range(n):
            for i in range(widths[k]):
                passed[s, i] *= np.float32(below[s, i] > 0)
        draw_near(theta[start : start + size], received[start : start + size], pull)
        descend(below, error, lr, weights)
        start = layout.biases[k]
        bias = theta[start : start + widths[k + 1]]
        draw_near(bias, received[start : start + widths[k + 1]], pull)
        for s in range(n):
            for j in range(widths[k + 1]):
                bias[j] -= lr * error[s, j]
    return loss / n


# ---------------------------------------------------------------- loops over a width


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
    # The root has no gradient at 0, where every client starts; the shift gives it one, 0.
    return np.float32(strength / (2 * np.sqrt(squares + np.float32(1e-12))))


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def draw_near(values: Array, anchors: Array, pull: Any) -> None:
    """Take the pull's share of the way to the anchors."""
    if pull > 0:
        for k in range(len(values)):
            values[k] -= pull * (values[k] - anchors[k])


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def rectify(values: Array) -> None:
    """Set what is below 0 to 0."""
    for s in range(values.shape[0]):
        for j in range(values.shape[1]):
            values[s, j] = max(values[s, j], np.float32(0))


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def inner(first: Array, second: Array) -> Any:
    """Return the inner product."""
    total = np.float32(0)
    for j in range(len(first)):
        total += first[j] * second[j]
    return total


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def product(rows: Array, weights: Array, out: Array) -> None:
    """Add rows times weights."""
    depth, width = weights.shape
    fours = depth - depth % 4
    for s in range(len(rows)):
        for i in range(0, fours, 4):
            a, b, c, d = rows[s, i], rows[s, i + 1], rows[s, i + 2], rows[s, i + 3]
            for j in range(width):
                out[s, j] += (a * weights[i, j] + b * weights[i + 1, j]) + (
                    c * weights[i + 2, j] + d * weights[i + 3, j]
                )
        for i in range(fours, depth):
            a = rows[s, i]
            for j in range(width):
                out[s, j] += a * weights[i, j]


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def descend(rows: Array, errors: Array, rate: Any, weights: Array) -> None:
    """Take a rate times the rows' products with their errors off the weights."""
    depth, width = weights.shape
    fours = len(rows) - len(rows) % 4
    for i in range(depth):
        for s in range(0, fours, 4):
            a, b = rate * rows[s, i], rate * rows[s + 1, i]
            c, d = rate * rows[s + 2, i], rate * rows[s + 3, i]
            for j in range(width):
                weights[i, j] -= (a * errors[s, j] + b * errors[s + 1, j]) + (
                    c * errors[s + 2, j] + d * errors[s + 3, j]
                )
        for s in range(fours, len(rows)):
            a = rate * rows[s, i]
            for j in range(width):
                weights[i, j] -= a * errors[s, j]
