"""Training and scoring of models whose score is an inner product of item row and vector."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hushrec.kernels import draws
from hushrec.kernels.contrast import ANY_ORDER as ANY_ORDER
from hushrec.kernels.contrast import contrast_rows, new_contrast_buffers
from hushrec.kernels.draws import ClientData, Pace, below, draw, nth_outside
from hushrec.kernels.jit import Array, njit


class InnerProductModel(NamedTuple):
    """Initial parameters of a batch of clients; vectors and biases are trained in place."""

    table: Array
    """The received rows, [items, d]."""
    vectors: Array
    biases: Array
    with_bias: bool
    """Whether the biases are trained."""


class Rates(NamedTuple):
    """Learning rates, in the dtype of the table."""

    own: Any
    """Rate of vector and bias."""
    item: Any
    """Rate of the item rows."""
    decay: Any
    """Factor on both rates after every batch; rates start again in each round."""


class Additive(NamedTuple):
    """FedRAP's personal item tables and the additional terms of its objective."""

    tables: Array
    """Personal tables, [clients, items, d]; only read."""
    scales: Array
    """Factor on each client's table."""
    difference: Any
    """Weight of -mean((personal - common)^2)."""
    ridge: Any
    """Weight of mean(common^2)."""
    decay: Any
    """Weight decay of the vector, the bias and all touched rows."""
    own_rate: Any
    """Rate of personal rows, as a share of the item rate."""


@njit(cache=True, nogil=True, fastmath=ANY_ORDER, inline="always")
def dot(left: Array, right: Array) -> Any:
    """Return the inner product."""
    total = left.dtype.type(0)
    for k in range(len(left)):
        total += left[k] * right[k]
    return total


@njit(cache=True, nogil=True, inline="always")
def sigmoid(logit: float) -> tuple[float, float]:
    """Return 1 / (1 + exp(-logit)) and, for the loss, 1 + exp(-|logit|)."""
    shrunk = np.exp(-abs(logit))
    grown = 1.0 + shrunk
    return (1.0 if logit >= 0 else shrunk) / grown, grown


@njit(cache=True, nogil=True, fastmath=ANY_ORDER, inline="always")
def fill_logits(
    logit: Array, rows: Array, taken: Array, vector: Array, bias: Any, additive: Any
) -> None:
    """Fill the logits of the samples of a batch."""
    d = len(vector)
    for s in range(len(taken)):
        row = rows[taken[s] >> 1]
        if additive is None:
            logit[s] = dot(row, vector) + bias
        else:
            logit[s] = dot(row[:d], vector) + dot(row[d:], vector) + bias


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def clip_errors(
    limit: Any,
    error: Array,
    sample: Array,
    row_error: Array,
    vector: Array,
    gradient: Array,
    bias_gradient: Any,
) -> Any:
    """Clip the joint gradient of rows, vector and bias to norm ``limit`` by scaling the errors.

    ``row_error`` is a zero buffer, zeroed again at the end. Returns the factor.
    """
    for s in range(len(sample)):
        row_error[sample[s] >> 1] += error[s]
    squared = error.dtype.type(0)
    for s in range(len(sample)):
        squared += row_error[sample[s] >> 1] ** 2
        row_error[sample[s] >> 1] = 0  # a row counts once
    squared = squared * dot(vector, vector) + dot(gradient, gradient) + bias_gradient**2
    one = error.dtype.type(1)
    factor = min(one, limit / (np.sqrt(squared) + error.dtype.type(1e-6)))
    if factor < one:
        for s in range(len(sample)):
            error[s] *= factor
    return factor


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def fit_inner_product(
    key: Array,
    data: ClientData,
    model: InnerProductModel,
    pace: Pace,
    rates: Rates,
    two_steps: bool,
    own_tables: Any = None,
    additive: Any = None,
    clip: Any = None,
    contrast: Any = None,
) -> tuple[Array, Array, Array, Array]:
    """Train ``sigmoid(<row_i, vector> + bias)`` on every client, by SGD on the batch-mean BCE.

    Each client starts from the received table, draws its negatives once, and shuffles its samples
    in every epoch. A batch takes one step on (vector, bias) and one on the item rows: jointly, or,
    with ``two_steps``, the second with the new vector (PFedRec, algorithm 1, lines 8 to 11).

    The branches of options that are None are removed at compilation.

    - ``own_tables``: initial tables of the clients, [clients, items, d], in place of the received
      table; only read.
    - ``additive``, an `Additive`: the score is ``<common_i + personal_i, vector> + bias``. Its
      means are over the entries of the rows of the batch's samples. Returned rows are twice as
      wide: a common row followed by a personal row.
    - ``clip``: bound of the norm of the joint BCE gradient.
    - ``contrast``, a `Contrast`: the term is added to the loss of the item rows.

    Returns the touched rows, ragged by client: (indptr, item ids by first use, new rows, mean loss
    of each client before its steps).
    """
    users, indptr, items, excluded_indptr, excluded = data
    table, vectors, biases, with_bias = model
    negatives, epochs, batch = pace
    clients, n_items, d = len(users), table.shape[0], table.shape[1]
    zero = table.dtype.type(0)

    capacity, longest = 0, 0
    for c in range(clients):
        length = (indptr[c + 1] - indptr[c]) * (1 + negatives)
        longest = max(longest, length)
        capacity += min(length, n_items)
    if contrast is not None:
        most = n_items if contrast.whole else min(batch, longest, n_items)
        buffers = new_contrast_buffers(most, n_items, d)
        capacity = max(capacity, clients * n_items if contrast.whole else 0)
    out_indptr = np.zeros(clients + 1, np.int64)
    out_items = np.empty(capacity, np.int32)
    out_rows = np.empty((capacity, d if additive is None else 2 * d), table.dtype)
    losses = np.zeros(clients, np.float64)

    slot_of = np.full(n_items, -1, np.int32)  # item -> index among this client's rows
    free = np.empty(n_items, np.int32)  # items outside a client's exclusions, if listed
    sample = np.empty(longest, np.int32)  # 2 * slot + label
    logit = np.empty(min(batch, longest), table.dtype)
    error = np.empty_like(logit)
    gradient = np.empty(d, table.dtype)
    row_error = np.zeros(min(longest, n_items), table.dtype)  # sums over the samples of a row
    row_count = np.zeros_like(row_error)

    for c in range(clients):
        user = users[c]
        own_rate, row_rate = rates.own, rates.item
        start, n_rows, samples = out_indptr[c], 0, 0
        position = 0  # in this client's stream

        if contrast is not None:
            for whole in range(n_items if contrast.whole else 0):
                slot_of[whole] = whole
                out_items[start + whole] = whole
                out_rows[start + whole] = (
                    table[whole] if own_tables is None else own_tables[c, whole]
                )
                n_rows += 1
        outside = excluded[excluded_indptr[c] : excluded_indptr[c + 1]]
        pool = n_items - len(outside)
        # For many draws it is faster to list the pool once than to search for each draw.
        listed = (indptr[c + 1] - indptr[c]) * negatives * 8 > n_items
        if listed:
            draws.list_outside(outside, n_items, free)
        for p in range(indptr[c], indptr[c + 1]):
            for k in range(1 + negatives if pool > 0 else 1):
                if k == 0:
                    item = np.int64(items[p])
                else:
                    n = below(draw(key, user, position), pool)
                    item = np.int64(free[n]) if listed else nth_outside(outside, n)
                    position += 1
                slot = slot_of[item]
                if slot < 0:
                    slot = n_rows
                    n_rows += 1
                    slot_of[item] = slot
                    out_items[start + slot] = item
                    row = out_rows[start + slot]
                    row[:d] = table[item] if own_tables is None else own_tables[c, item]
                    if additive is not None:
                        row[d:] = additive.tables[c, item] * additive.scales[c]
                sample[samples] = 2 * slot + (k == 0)
                samples += 1
        rows = out_rows[start : start + n_rows]
        vector, bias = vectors[c], biases[c]

        # Loss: log(1 + exp(logit)) - label * logit, with one logarithm for many factors.
        loss, product = 0.0, 1.0
        for _ in range(epochs):
            for last in range(samples - 1, 0, -1):
                other = below(draw(key, user, position), last + 1)
                position += 1
                sample[last], sample[other] = sample[other], sample[last]
            for first in range(0, samples, batch):
                size = min(batch, samples - first)
                share = table.dtype.type(1) / table.dtype.type(size)
                gradient[:] = zero
                bias_gradient = zero
                taken = sample[first : first + size]
                # Short separate loops, which the compiler vectorises.
                fill_logits(logit, rows, taken, vector, bias, additive)
                for s in range(size):
                    label = table.dtype.type(taken[s] & 1)
                    predicted, grown = sigmoid(logit[s])
                    error[s] = (table.dtype.type(predicted) - label) * share
                    bias_gradient += error[s]
                    loss += max(logit[s], zero) - label * logit[s]
                    product *= grown
                    if product > 1e200:
                        loss += np.log(product)
                        product = 1.0
                for s in range(size):
                    row = rows[taken[s] >> 1]
                    for k in range(d):
                        if additive is None:
                            gradient[k] += error[s] * row[k]
                        else:
                            gradient[k] += error[s] * (row[k] + row[d + k])
                if clip is not None:
                    of_bias = bias_gradient if with_bias else zero
                    shrunk = clip_errors(clip, error, taken, row_error, vector, gradient, of_bias)
                    for k in range(d):
                        gradient[k] *= shrunk
                    bias_gradient *= shrunk
                if additive is not None:
                    for k in range(d):
                        gradient[k] += additive.decay * vector[k]
                    bias_gradient += additive.decay * bias
                if two_steps:
                    for k in range(d):
                        vector[k] -= own_rate * gradient[k]
                    if with_bias:
                        bias -= own_rate * bias_gradient
                    fill_logits(logit, rows, taken, vector, bias, additive)
                    for s in range(size):
                        label = table.dtype.type(taken[s] & 1)
                        predicted, _ = sigmoid(logit[s])
                        error[s] = (table.dtype.type(predicted) - label) * share
                    if clip is not None:
                        gradient[:] = zero
                        bias_gradient = zero
                        for s in range(size):
                            bias_gradient += error[s]
                            row = rows[taken[s] >> 1]
                            for k in range(d):
                                gradient[k] += error[s] * row[k]
                        of_bias = bias_gradient if with_bias else zero
                        clip_errors(clip, error, taken, row_error, vector, gradient, of_bias)
                if contrast is not None:
                    near = contrast_rows(
                        rows, out_items[start : start + n_rows], taken, contrast, buffers
                    )
                if additive is None:
                    for s in range(size):
                        row = rows[taken[s] >> 1]
                        step = row_rate * error[s]
                        for k in range(d):
                            row[k] -= step * vector[k]
                    if contrast is not None:
                        for s in range(near):
                            row = rows[buffers.slots[s]]
                            for k in range(d):
                                row[k] -= row_rate * buffers.gradient[s, k]
                else:
                    _, _, difference, ridge, decay, personal_rate = additive
                    own_row_rate = row_rate * personal_rate
                    row_error[:n_rows] = zero
                    row_count[:n_rows] = zero
                    for s in range(size):
                        row_error[taken[s] >> 1] += error[s]
                        row_count[taken[s] >> 1] += share / d
                    for slot in range(n_rows):
                        row = rows[slot]
                        apart = 2 * difference * row_count[slot]
                        shrink = 2 * ridge * row_count[slot] + decay
                        for k in range(d):
                            common, personal = row[k], row[d + k]
                            along = row_error[slot] * vector[k]
                            away = apart * (personal - common)
                            row[k] -= row_rate * (along + away + shrink * common)
                            row[d + k] -= own_row_rate * (along - away + decay * personal)
                if not two_steps:
                    for k in range(d):
                        vector[k] -= own_rate * gradient[k]
                    if with_bias:
                        bias -= own_rate * bias_gradient
                own_rate *= rates.decay
                row_rate *= rates.decay

        biases[c] = bias
        losses[c] = (loss + np.log(product)) / (epochs * samples) if samples else 0.0
        out_indptr[c + 1] = start + n_rows
        for slot in range(n_rows):
            slot_of[out_items[start + slot]] = -1
    end = out_indptr[-1]
    return out_indptr, out_items[:end], out_rows[:end], losses


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def inner_products(table: Array, vectors: Array, biases: Array) -> Array:
    """Return ``<table[i], vectors[c]> + biases[c]`` as [clients, items].

    Unlike a BLAS product, whose rounding depends on a row's position, a score depends on its row
    and vector only: ranks do not change with batches or threads.
    """
    scores = np.empty((len(vectors), len(table)), table.dtype)
    for c in range(len(vectors)):
        for i in range(len(table)):
            scores[c, i] = dot(table[i], vectors[c]) + biases[c]
    return scores


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def rescore_own_rows(
    scores: Array, indptr: Array, ids: Array, rows: Array, vectors: Array, biases: Array
) -> None:
    """Replace each client's scores of items for which it has its own row."""
    for c in range(len(indptr) - 1):
        for r in range(indptr[c], indptr[c + 1]):
            scores[c, ids[r]] = dot(rows[r], vectors[c]) + biases[c]


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def fit_pooled(
    key: Array,
    data: ClientData,
    table: Array,
    vectors: Array,
    negatives: int,
    rate: Any,
    decay: Any,
) -> float:
    """Train matrix factorisation for one epoch of SGD on pooled data, in place; return the loss."""
    d = table.shape[1]
    sampled, items, labels, _ = draws.list_samples(key, data, len(table), negatives)
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
