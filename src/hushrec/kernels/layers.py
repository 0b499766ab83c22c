"""The products of small layers: inner loops over a width, which lies side by side in memory.

`add_product` and `subtract_product` go four rows at a time, so that a sum is written once for four
terms.

The first layer of a network of features: sparse rows, embeddings, and their gradients.

Embeddings enter it linearly, so what a feature adds to the layer is one row of a table that is
worked out once per step, for the features that occur.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hushrec.kernels.inner_product import ANY_ORDER
from hushrec.kernels.jit import njit

Array = NDArray[Any]


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
def add_product(rows: Array, weights: Array, out: Array) -> None:
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
def subtract_product(rows: Array, errors: Array, rate: Any, weights: Array) -> None:
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


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def cross_entropy_errors(logits: Array, labels: Array, errors: Array) -> float:
    """Fill the derivatives of the mean cross-entropy by the logits; return that mean."""
    n, loss = len(labels), 0.0
    for s in range(n):
        logit = np.float64(logits[s])
        loss += max(logit, 0.0) - logit * labels[s] + np.log1p(np.exp(-abs(logit)))
        errors[s] = (1 / (1 + np.exp(-logit)) - labels[s]) / n
    return loss / n


@njit(cache=True, nogil=True)
def squared_errors(outputs: Array, labels: Array, errors: Array) -> float:
    """Fill the derivatives of half the mean squared error by the outputs; return that half."""
    n, loss = len(labels), 0.0
    for s in range(n):
        apart = np.float64(outputs[s]) - labels[s]
        loss += apart * apart / 2
        errors[s] = apart / n
    return loss / n


class Side(NamedTuple):
    """Where the parameters of the users, or of the items, are in the flat vector."""

    embeddings: int
    """The first embedding; those of all categories follow one another, in the order of columns."""
    weights: int
    """The first row of first-layer weights: `d` for each field, then one for each number."""
    fields: NDArray[np.int64]
    """First column of each categorical field, and of the numbers, and the number of columns."""


class FeatureTable(NamedTuple):
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


@njit(cache=True, nogil=True)
def new_feature_table(columns: int, fields: int, d: int, first: int) -> FeatureTable:
    """Return room for the table of a side."""
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
        add_product(table.embeddings[begin:end], weights, table.rows[begin:end])
    table.gradient[:end] = 0


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def add_features(rows: Array, row: int, table: FeatureTable, out: Array) -> None:
    """Add what a row of features contributes to the first layer."""
    for c in range(rows.shape[1]):
        x, r = rows[row, c], table.place[c]
        if x != 0:
            for j in range(len(out)):
                out[j] += x * table.rows[r, j]


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def add_feature_gradient(rows: Array, row: int, error: Array, table: FeatureTable) -> None:
    """Add what a row of features gives the gradient of the table."""
    for c in range(rows.shape[1]):
        x, r = rows[row, c], table.place[c]
        if x != 0:
            for j in range(len(error)):
                table.gradient[r, j] += x * error[j]


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def step_first_layer(
    theta: Array, received: Array, side: Side, d: int, lr: Any, pull: Any, table: FeatureTable
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


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def pull_towards(values: Array, anchors: Array, pull: Any) -> None:
    """Take the pull's share of the way to the anchors."""
    if pull > 0:
        for k in range(len(values)):
            values[k] -= pull * (values[k] - anchors[k])
