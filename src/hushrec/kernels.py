"""The fused loops. Each runs a whole stack of clients on one thread without the interpreter.

Everything here is a pure function of its arguments, written twice: here for speed, and in
``tests/reference.py`` the way one device would do it. The tests hold the two equal. Kernels
release the interpreter lock, so the backend runs several of them at once, one chunk of clients
each; nothing in a chunk depends on another chunk.

Client stacks are ragged arrays: client c owns ``values[indptr[c]:indptr[c + 1]]``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Array = NDArray[Any]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)

ANY_ORDER = {"reassoc", "contract", "nsz"}
"""Additions of one expression may be reordered into vector lanes: the same way on every call, since
the compiled code is the same. NaN and infinity keep their meaning."""

# ---------------------------------------------------------------- random numbers by address


@njit(cache=True, nogil=True, inline="always")
def mix(word: np.uint64) -> np.uint64:
    """Return the finaliser of SplitMix64: every input bit reaches every output bit."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@njit(cache=True, nogil=True, inline="always")
def draw(key: Array, user: int, position: int) -> np.uint64:
    """Return the position-th 64-bit number of a user's stream under a key of `rng.Streams`."""
    counter = mix(key[0] + np.uint64(user) * GOLDEN)
    return mix(mix(counter + np.uint64(position) * GOLDEN) ^ key[1])


@njit(cache=True, nogil=True, inline="always")
def below(word: np.uint64, bound: int) -> Any:
    """Map a random word to 0 … bound-1 (multiply and shift; the bias is below bound / 2^32)."""
    return np.int64(((word >> np.uint64(32)) * np.uint64(bound)) >> np.uint64(32))


# ---------------------------------------------------------------- negatives


@njit(cache=True, nogil=True, inline="always")
def nth_outside(excluded: Array, n: Any) -> Any:
    """Return the n-th item, from 0, that is not in the ascending list ``excluded``."""
    # How many exclusions come before it: a binary search whose only branch is its length.
    before, size = 0, len(excluded)
    while size > 0:
        half = (size + 1) >> 1
        middle = before + half - 1
        before += half if excluded[middle] - middle <= n else 0
        size -= half
    return n + before


@njit(cache=True, nogil=True)
def list_outside(excluded: Array, n_items: int, out: Array) -> None:
    """Fill ``out[n]`` with what ``nth_outside(excluded, n)`` returns, for every n."""
    next_excluded, n = 0, 0
    for item in range(n_items):
        if next_excluded < len(excluded) and excluded[next_excluded] == item:
            next_excluded += 1
        else:
            out[n] = item
            n += 1


@njit(cache=True, nogil=True)
def draw_outside(
    key: Array, users: Array, excluded_indptr: Array, excluded: Array, n_items: int, count: Array
) -> tuple[Array, Array]:
    """Draw ``count[c]`` items uniformly, with repeats, outside client c's ascending exclusions.

    A client whose exclusions cover the catalogue gets none. Returns (indptr, items).
    """
    indptr = np.zeros(len(users) + 1, np.int64)
    for c in range(len(users)):
        pool = n_items - (excluded_indptr[c + 1] - excluded_indptr[c])
        indptr[c + 1] = indptr[c] + (count[c] if pool > 0 else 0)
    items = np.empty(indptr[-1], np.int32)
    for c in range(len(users)):
        outside = excluded[excluded_indptr[c] : excluded_indptr[c + 1]]
        pool = n_items - len(outside)
        for position in range(indptr[c + 1] - indptr[c]):
            n = below(draw(key, users[c], position), pool)
            items[indptr[c] + position] = nth_outside(outside, n)
    return indptr, items


# ---------------------------------------------------------------- ragged stacks


@njit(cache=True, nogil=True)
def take_ragged(indptr: Array, values: Array, rows: Array) -> tuple[Array, Array]:
    """Return the ragged array of these rows, in this order."""
    out_indptr = np.zeros(len(rows) + 1, np.int64)
    for r in range(len(rows)):
        out_indptr[r + 1] = out_indptr[r] + indptr[rows[r] + 1] - indptr[rows[r]]
    out = np.empty(out_indptr[-1], values.dtype)
    for r in range(len(rows)):
        out[out_indptr[r] : out_indptr[r + 1]] = values[indptr[rows[r]] : indptr[rows[r] + 1]]
    return out_indptr, out


@njit(cache=True, nogil=True)
def sorted_union(
    first_indptr: Array, first: Array, second_indptr: Array, second: Array
) -> tuple[Array, Array]:
    """Return, for every client, the ascending distinct values of two ragged arrays."""
    clients = len(first_indptr) - 1
    indptr = np.zeros(clients + 1, np.int64)
    out = np.empty(len(first) + len(second), first.dtype)
    end = 0
    for c in range(clients):
        start = end
        for k in range(first_indptr[c], first_indptr[c + 1]):
            out[end] = first[k]
            end += 1
        for k in range(second_indptr[c], second_indptr[c + 1]):
            out[end] = second[k]
            end += 1
        out[start:end].sort()
        kept = start
        for k in range(start, end):
            if k == start or out[k] != out[k - 1]:
                out[kept] = out[k]
                kept += 1
        end = kept
        indptr[c + 1] = end
    return indptr, out[:end].copy()


# ---------------------------------------------------------------- inner-product models


@njit(cache=True, nogil=True, fastmath=ANY_ORDER, inline="always")
def dot(left: Array, right: Array) -> Any:
    """Return the inner product; lanes may be added in any order, the same on every call."""
    total = left.dtype.type(0)
    for k in range(len(left)):
        total += left[k] * right[k]
    return total


@njit(cache=True, nogil=True, inline="always")
def sigmoid(logit: float) -> tuple[float, float]:
    """Return 1 / (1 + exp(-logit)), and 1 + exp(-|logit|), whose logarithm the loss needs."""
    shrunk = np.exp(-abs(logit))
    grown = 1.0 + shrunk
    return (1.0 if logit >= 0 else shrunk) / grown, grown


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
    """Scale the errors down to a gradient of norm ``limit`` by rows, vector and bias together.

    ``row_error`` is zero before and after. Returns the factor; 1 leaves the errors as they are.
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
    users: Array,
    indptr: Array,
    items: Array,
    excluded_indptr: Array,
    excluded: Array,
    table: Array,
    own_table: Array,
    vectors: Array,
    biases: Array,
    negatives: int,
    epochs: int,
    batch: int,
    rate: Any,
    item_rate: Any,
    with_bias: bool,
    two_steps: bool,
    read_only: Any = None,
    additive: Any = None,
    rate_decay: Any = None,
    clip: Any = None,
) -> tuple[Array, Array, Array, Array]:
    """Train ``sigmoid(<row_i, vector> + bias)`` on every client, by SGD on the batch-mean BCE.

    Each client starts from the received ``table``, or from its own table where ``own_table`` has
    one per client (it is then updated in place), draws ``negatives`` per positive once, and in
    every epoch shuffles and goes through its samples in batches. A batch takes one step on
    (vector, bias) at ``rate`` and one on the item rows at ``item_rate``: at once, or, with
    ``two_steps``, the second with the new vector (PFedRec, algorithm 1, lines 8 to 11).

    Options that are None cost nothing: the compiler leaves their branches out.

    - ``read_only``: own tables that are left as they are; the caller keeps the returned rows.
    - ``additive``, FedRAP's (personal tables [clients, items, d], their scales [clients],
      difference, sparsity, squared, decay): the score is ``<common_i + personal_i, vector> +
      bias``. The batch's loss also has -difference * mean((personal - common)^2) and sparsity *
      mean(|common|), or of its square where ``squared``: means over the entries of the rows of the
      batch's samples. ``decay`` is the weight decay of the vector, the bias and all rows in play.
      The returned rows are twice as wide: a common row and a personal one, side by side. The
      personal tables are only read.
    - ``rate_decay``: both rates shrink by this factor after every batch, afresh in each round.
    - ``clip``: the largest norm of the gradient of the BCE by all parameters together.

    ``vectors`` and ``biases`` are updated in place. Returns the touched rows, ragged by client:
    (indptr, item ids ascending by first use, new rows, mean loss of each client before its steps).
    """
    clients, n_items, d = len(users), table.shape[0], table.shape[1]
    keeps_own = own_table.shape[0] > 0
    zero = table.dtype.type(0)

    capacity = 0
    longest = 0
    for c in range(clients):
        length = (indptr[c + 1] - indptr[c]) * (1 + negatives)
        longest = max(longest, length)
        capacity += min(length, n_items)
    out_indptr = np.zeros(clients + 1, np.int64)
    out_items = np.empty(capacity, np.int32)
    out_rows = np.empty((capacity, d if additive is None else 2 * d), table.dtype)
    losses = np.zeros(clients, np.float64)

    slot_of = np.full(n_items, -1, np.int32)  # item -> its place among this client's rows
    free = np.empty(n_items, np.int32)  # the items outside a client's exclusions, where listed
    sample = np.empty(longest, np.int32)  # 2 * slot + label
    logit = np.empty(min(batch, longest), table.dtype)
    error = np.empty_like(logit)
    gradient = np.empty(d, table.dtype)
    row_error = np.zeros(min(longest, n_items), table.dtype)  # sums over the samples of a row
    row_count = np.zeros_like(row_error)

    for c in range(clients):
        user = users[c]
        own_rate, row_rate = rate, item_rate
        start = out_indptr[c]
        n_rows = 0
        samples = 0
        position = 0  # in this client's stream

        outside = excluded[excluded_indptr[c] : excluded_indptr[c + 1]]
        pool = n_items - len(outside)
        # Many draws pay for listing the pool once; few are better searched for.
        listed = (indptr[c + 1] - indptr[c]) * negatives * 8 > n_items
        if listed:
            list_outside(outside, n_items, free)
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
                    if keeps_own:
                        out_rows[start + slot, :] = own_table[c, item, :]
                    elif read_only is not None:
                        out_rows[start + slot, :] = read_only[c, item, :]
                    elif additive is not None:
                        out_rows[start + slot, :d] = table[item, :]
                        out_rows[start + slot, d:] = additive[0][c, item, :] * additive[1][c]
                    else:
                        out_rows[start + slot, :] = table[item, :]
                sample[samples] = 2 * slot + (k == 0)
                samples += 1
        rows = out_rows[start : start + n_rows]
        vector = vectors[c]
        bias = biases[c]

        # The loss is log(1 + exp(logit)) - label * logit; the logarithms are taken of products.
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
                # Short loops of one kind each: the compiler turns them into wide instructions.
                for s in range(size):
                    row = rows[sample[first + s] >> 1]
                    if additive is None:
                        logit[s] = dot(row, vector) + bias
                    else:
                        logit[s] = dot(row[:d], vector) + dot(row[d:], vector) + bias
                for s in range(size):
                    label = table.dtype.type(sample[first + s] & 1)
                    predicted, grown = sigmoid(logit[s])
                    error[s] = (table.dtype.type(predicted) - label) * share
                    bias_gradient += error[s]
                    loss += max(logit[s], zero) - label * logit[s]
                    product *= grown
                    if product > 1e200:
                        loss += np.log(product)
                        product = 1.0
                for s in range(size):
                    row = rows[sample[first + s] >> 1]
                    for k in range(d):
                        if additive is None:
                            gradient[k] += error[s] * row[k]
                        else:
                            gradient[k] += error[s] * (row[k] + row[d + k])
                if clip is not None:
                    shrunk = clip_errors(
                        clip,
                        error,
                        sample[first : first + size],
                        row_error,
                        vector,
                        gradient,
                        bias_gradient if with_bias else zero,
                    )
                    for k in range(d):
                        gradient[k] *= shrunk
                    bias_gradient *= shrunk
                if additive is not None:
                    for k in range(d):
                        gradient[k] += additive[5] * vector[k]
                    bias_gradient += additive[5] * bias
                if two_steps:
                    for k in range(d):
                        vector[k] -= own_rate * gradient[k]
                    if with_bias:
                        bias -= own_rate * bias_gradient
                    for s in range(size):
                        row = rows[sample[first + s] >> 1]
                        if additive is None:
                            logit[s] = dot(row, vector) + bias
                        else:
                            logit[s] = dot(row[:d], vector) + dot(row[d:], vector) + bias
                    for s in range(size):
                        label = table.dtype.type(sample[first + s] & 1)
                        predicted, _ = sigmoid(logit[s])
                        error[s] = (table.dtype.type(predicted) - label) * share
                    if clip is not None:
                        gradient[:] = zero
                        bias_gradient = zero
                        for s in range(size):
                            bias_gradient += error[s]
                            row = rows[sample[first + s] >> 1]
                            for k in range(d):
                                gradient[k] += error[s] * row[k]
                        clip_errors(
                            clip,
                            error,
                            sample[first : first + size],
                            row_error,
                            vector,
                            gradient,
                            bias_gradient if with_bias else zero,
                        )
                if additive is None:
                    for s in range(size):
                        row = rows[sample[first + s] >> 1]
                        step = row_rate * error[s]
                        for k in range(d):
                            row[k] -= step * vector[k]
                else:
                    _, _, difference, sparsity, squared, decay = additive
                    row_error[:n_rows] = zero
                    row_count[:n_rows] = zero
                    for s in range(size):
                        row_error[sample[first + s] >> 1] += error[s]
                        row_count[sample[first + s] >> 1] += share / d
                    for slot in range(n_rows):
                        row = rows[slot]
                        apart = 2 * difference * row_count[slot]
                        sparse = sparsity * row_count[slot]
                        for k in range(d):
                            common, personal = row[k], row[d + k]
                            pull = 2 * common if squared else np.sign(common)
                            along = row_error[slot] * vector[k]
                            away = apart * (personal - common)
                            row[k] -= row_rate * (along + away + sparse * pull + decay * common)
                            row[d + k] -= row_rate * (along - away + decay * personal)
                if not two_steps:
                    for k in range(d):
                        vector[k] -= own_rate * gradient[k]
                    if with_bias:
                        bias -= own_rate * bias_gradient
                if rate_decay is not None:
                    own_rate *= rate_decay
                    row_rate *= rate_decay

        biases[c] = bias
        for slot in range(n_rows if keeps_own else 0):
            own_table[c, out_items[start + slot], :] = rows[slot]
        losses[c] = (loss + np.log(product)) / (epochs * samples) if samples else 0.0
        out_indptr[c + 1] = start + n_rows
        for slot in range(n_rows):
            item = np.int64(out_items[start + slot])
            slot_of[item] = -1
    end = out_indptr[-1]
    return out_indptr, out_items[:end], out_rows[:end], losses


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def gate(weights: Array, bias: Any, row: Array, guidance: Array) -> Any:
    """Return FedRKG's gate, sigmoid(<weights, [row, guidance, row - guidance]> + bias)."""
    d = len(row)
    total = bias
    for k in range(d):
        apart = row[k] - guidance[k]
        total += weights[k] * row[k] + weights[d + k] * guidance[k] + weights[2 * d + k] * apart
    return row.dtype.type(sigmoid(total)[0])


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def guide(
    key: Array,
    users: Array,
    indptr: Array,
    items: Array,
    excluded_indptr: Array,
    excluded: Array,
    tables: Array,
    guidance: Array,
    vectors: Array,
    biases: Array,
    gate_weights: Array,
    gate_biases: Array,
    negatives: int,
    epochs: int,
    batch: int,
    rate: Any,
    beta: Any,
    clip: Any,
) -> Array:
    """Train every client's gate on fused rows, then return the fused tables of all items.

    A fused row is ``beta * row + 2 * (1 - beta) * gate * guidance`` (FedRKG, eq. 6). Gates are
    trained by SGD on the batch-mean BCE with everything else frozen (eq. 7 and 8), on negatives
    drawn for the purpose, with gradients of norm ``clip`` at most. Weights and biases of the gates
    change in place; zero epochs leave them alone.
    """
    clients, n_items, d = tables.shape
    one = guidance.dtype.type(1)
    pull = 2 * (one - beta)
    longest = 0
    for c in range(clients):
        longest = max(longest, (indptr[c + 1] - indptr[c]) * (1 + negatives))
    sample = np.empty(longest, np.int64)  # 2 * item + label
    gradient = np.empty(3 * d, guidance.dtype)
    fused = np.empty(tables.shape, guidance.dtype)
    for c in range(clients):
        own, vector, weights = tables[c], vectors[c], gate_weights[c]
        outside = excluded[excluded_indptr[c] : excluded_indptr[c + 1]]
        pool = n_items - len(outside)
        samples, position = 0, 0
        for p in range(indptr[c], indptr[c + 1] if epochs else indptr[c]):
            sample[samples] = 2 * np.int64(items[p]) + 1
            samples += 1
            for _ in range(negatives if pool > 0 else 0):
                drawn = nth_outside(outside, below(draw(key, users[c], position), pool))
                sample[samples] = 2 * np.int64(drawn)
                position += 1
                samples += 1
        for _ in range(epochs):
            for last in range(samples - 1, 0, -1):
                other = below(draw(key, users[c], position), last + 1)
                position += 1
                sample[last], sample[other] = sample[other], sample[last]
            for first in range(0, samples, batch):
                size = min(batch, samples - first)
                gradient[:] = 0
                bias_gradient = guidance.dtype.type(0)
                for s in range(first, first + size):
                    row, mean = own[sample[s] >> 1], guidance[sample[s] >> 1]
                    opened = gate(weights, gate_biases[c], row, mean)
                    reach = pull * dot(mean, vector)
                    logit = beta * dot(row, vector) + opened * reach + biases[c]
                    error = guidance.dtype.type(sigmoid(logit)[0]) - (sample[s] & 1)
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
        for item in range(n_items):
            opened = gate(weights, gate_biases[c], own[item], guidance[item])
            for k in range(d):
                fused[c, item, k] = beta * own[item, k] + pull * opened * guidance[item, k]
    return fused


@njit(cache=True, nogil=True)
def gates(weights: Array, biases: Array, tables: Array, guidance: Array) -> Array:
    """Return every client's gate of every item: [clients, items]."""
    out = np.empty((len(tables), len(guidance)), guidance.dtype)
    for c in range(len(tables)):
        for item in range(len(guidance)):
            out[c, item] = gate(weights[c], biases[c], tables[c, item], guidance[item])
    return out


@njit(cache=True, nogil=True)
def put_rows(
    tables: Array, slots: Array, clients: Array, indptr: Array, ids: Array, rows: Array
) -> None:
    """Write rows of some clients of a ragged stack into their tables, ``tables[slots[n]]``."""
    for n in range(len(clients)):
        for r in range(indptr[clients[n]], indptr[clients[n] + 1]):
            tables[slots[n], ids[r], :] = rows[r]


@njit(cache=True, nogil=True)
def changed_rows(
    indptr: Array, ids: Array, rows: Array, base: Array, factors: Array, above: Any
) -> tuple[Array, Array, Array]:
    """Return ``rows[r] - factors[c] * base[ids[r]]`` of each client c, where any entry is large.

    Rows all of whose entries are at most ``above`` are left out: (indptr, ids, differences).
    """
    out_indptr = np.zeros_like(indptr)
    out_ids = np.empty_like(ids)
    out = np.empty((len(ids), rows.shape[1]), rows.dtype)
    end = 0
    for c in range(len(indptr) - 1):
        for r in range(indptr[c], indptr[c + 1]):
            large = False
            for k in range(rows.shape[1]):
                out[end, k] = rows[r, k] - factors[c] * base[ids[r], k]
                large |= not abs(out[end, k]) <= above  # true for NaN as well
            out_ids[end] = ids[r]
            end += large
        out_indptr[c + 1] = end
    return out_indptr, out_ids[:end].copy(), out[:end].copy()


# ---------------------------------------------------------------- exact sums


@njit(cache=True, nogil=True)
def add_rows(total: Array, touched: Array, ids: Array, rows: Array, base: Array) -> bool:
    """Add ``rows[r] - base[ids[r]]`` to a fixed-point table (2^-32 steps).

    An empty base counts as zeros. Returns False if a number does not fit.
    """
    limit = 2.0**62
    fits: Any = True
    zeros = np.zeros(rows.shape[1], rows.dtype)
    for r in range(len(ids)):
        touched[ids[r]] = True
        target = total[ids[r]]
        row = rows[r]
        before = base[ids[r]] if len(base) else zeros
        # No way out of the inner loop: that is what lets it run on whole registers.
        for k in range(len(row)):
            steps = np.float64(row[k] - before[k]) * 4294967296.0
            fits &= abs(steps) < limit  # false for NaN as well
            target[k] += np.int64(steps + (0.5 if steps >= 0 else -0.5))
            fits &= abs(target[k]) < 4611686018427387904
    return bool(fits)


@njit(cache=True, nogil=True)
def add_dense(total: Array, blocks: Array) -> bool:
    """Add every client's block of numbers to a fixed-point sum; False if one does not fit."""
    limit = 2.0**62
    fits: Any = True
    for c in range(len(blocks)):
        block = blocks[c]
        for k in range(len(total)):
            steps = np.rint(np.float64(block[k]) * 4294967296.0)
            fits &= abs(steps) < limit  # false for NaN as well
            total[k] += np.int64(steps)
            fits &= abs(total[k]) < 4611686018427387904
    return bool(fits)


@njit(cache=True, nogil=True)
def rows_as_numbers(total: Array, ids: Array) -> Array:
    """Return these rows of a fixed-point table as numbers."""
    out = np.empty((len(ids), total.shape[1]), np.float64)
    for r in range(len(ids)):
        for k in range(total.shape[1]):
            out[r, k] = total[ids[r], k] / 4294967296.0
    return out


@njit(cache=True, nogil=True)
def add_mean(table: Array, ids: Array, summed: Array, clients: float) -> None:
    """Add ``summed[r] / clients`` to the row ``ids[r]`` of a table."""
    for r in range(len(ids)):
        for k in range(table.shape[1]):
            table[ids[r], k] += table.dtype.type(summed[r, k] / clients)


@njit(cache=True, nogil=True)
def row_differences(rows: Array, ids: Array, table: Array) -> Array:
    """Return ``rows[r] - table[ids[r]]``."""
    out = np.empty_like(rows)
    for r in range(len(ids)):
        for k in range(rows.shape[1]):
            out[r, k] = rows[r, k] - table[ids[r], k]
    return out


@njit(cache=True, nogil=True)
def copy_ragged(
    source: Array, source_start: Array, target: Array, start: Array, end: Array
) -> None:
    """Copy, for every r, the entries from ``source_start[r]`` on to ``target[start[r]:end[r]]``."""
    for r in range(len(start)):
        first = source_start[r]
        target[start[r] : end[r]] = source[first : first + end[r] - start[r]]


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def rescore_own_rows(
    scores: Array, indptr: Array, ids: Array, rows: Array, vectors: Array, biases: Array
) -> None:
    """Replace each client's scores of the items it holds its own rows of."""
    for c in range(len(indptr) - 1):
        for r in range(indptr[c], indptr[c + 1]):
            scores[c, ids[r]] = dot(rows[r], vectors[c]) + biases[c]


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def inner_products(table: Array, vectors: Array, biases: Array) -> Array:
    """Return ``<table[i], vectors[c]> + biases[c]`` as [clients, items].

    Not a matrix product of the BLAS, whose rounding depends on where a row stands in a block: here
    a score depends on its row and vector alone, so ranks do not change with chunks or threads.
    """
    scores = np.empty((len(vectors), len(table)), table.dtype)
    for c in range(len(vectors)):
        for i in range(len(table)):
            scores[c, i] = dot(table[i], vectors[c]) + biases[c]
    return scores


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def fit_pooled(
    key: Array,
    users: Array,
    indptr: Array,
    items: Array,
    excluded_indptr: Array,
    excluded: Array,
    table: Array,
    vectors: Array,
    negatives: int,
    rate: Any,
    decay: Any,
) -> float:
    """One pass of sample-by-sample SGD over everybody's data; both tables change in place."""
    n_items, d = table.shape
    samples = len(items) * (1 + negatives)
    client = np.empty(samples, np.int32)
    item = np.empty(samples, np.int32)
    n = 0
    for c in range(len(users)):
        outside = excluded[excluded_indptr[c] : excluded_indptr[c + 1]]
        pool = n_items - len(outside)
        position = 0
        for p in range(indptr[c], indptr[c + 1]):
            client[n], item[n] = c, items[p]
            n += 1
            if pool > 0:
                for _ in range(negatives):
                    drawn = nth_outside(outside, below(draw(key, users[c], position), pool))
                    client[n], item[n] = c, -1 - drawn  # below zero marks a negative
                    position += 1
                    n += 1
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


@njit(cache=True, nogil=True)
def draw_distinct_outside(
    key: Array, users: Array, excluded_indptr: Array, excluded: Array, n_items: int, count: int
) -> tuple[Array, Array]:
    """Draw ``count`` different items outside client c's ascending exclusions, or all there are."""
    indptr = np.zeros(len(users) + 1, np.int64)
    items = np.empty(len(users) * count, np.int32)
    drawn_for = np.full(n_items, -1, np.int64)
    end = 0
    for c in range(len(users)):
        outside = excluded[excluded_indptr[c] : excluded_indptr[c + 1]]
        pool = n_items - len(outside)
        wanted = end + min(count, pool)
        position = 0
        while end < wanted:
            n = position if pool <= count else below(draw(key, users[c], position), pool)
            position += 1
            item = nth_outside(outside, n)
            if drawn_for[item] != c:
                drawn_for[item] = c
                items[end] = item
                end += 1
        indptr[c + 1] = end
    return indptr, items[:end]


# ---------------------------------------------------------------- samples, for methods in tensors


@njit(cache=True, nogil=True)
def draw_samples(
    key: Array,
    users: Array,
    indptr: Array,
    items: Array,
    excluded_indptr: Array,
    excluded: Array,
    n_items: int,
    negatives: int,
) -> tuple[Array, Array, Array, Array]:
    """List every client's samples of a round: each positive, followed by its negatives.

    The draws are those of `fit_inner_product`. Returns (indptr, items, labels, and how many numbers
    each client's stream has given).
    """
    count = np.diff(indptr) * negatives
    drawn_indptr, drawn = draw_outside(key, users, excluded_indptr, excluded, n_items, count)
    used = np.diff(drawn_indptr)
    out_indptr = indptr - indptr[0] + drawn_indptr
    out, labels = np.empty(out_indptr[-1], np.int32), np.zeros(out_indptr[-1], np.float32)
    for c in range(len(users)):
        end, next_drawn = out_indptr[c], drawn_indptr[c]
        for p in range(indptr[c], indptr[c + 1]):
            out[end], labels[end] = items[p], 1
            end += 1
            for _ in range(negatives if used[c] else 0):
                out[end] = drawn[next_drawn]
                end += 1
                next_drawn += 1
    return out_indptr, out, labels, used


@njit(cache=True, nogil=True)
def shuffled_epochs(
    key: Array, users: Array, indptr: Array, used: Array, epochs: int
) -> tuple[Array, Array]:
    """Return the order in which each client goes through its samples, epoch after epoch.

    ``used`` is how many numbers of a client's stream are spent. Returns (indptr, positions in the
    arrays that ``indptr`` cuts); each epoch shuffles the order of the one before.
    """
    out_indptr = (indptr - indptr[0]) * epochs
    out = np.empty(out_indptr[-1], np.int64)
    for c in range(len(users)):
        order = np.arange(indptr[c], indptr[c + 1])
        position, end = used[c], out_indptr[c]
        for _ in range(epochs):
            for last in range(len(order) - 1, 0, -1):
                other = below(draw(key, users[c], position), last + 1)
                position += 1
                order[last], order[other] = order[other], order[last]
            out[end : end + len(order)] = order
            end += len(order)
    return out_indptr, out


@njit(cache=True, nogil=True)
def places(indptr: Array, items: Array, n_items: int) -> tuple[Array, Array, Array]:
    """Number each client's distinct items in the order of their first use.

    Returns (indptr, the distinct items, the number of every entry).
    """
    out_indptr = np.zeros_like(indptr)
    out, place = np.empty(len(items), np.int32), np.empty(len(items), np.int64)
    place_of = np.full(n_items, -1, np.int64)
    end = 0
    for c in range(len(indptr) - 1):
        start = end
        for p in range(indptr[c], indptr[c + 1]):
            if place_of[items[p]] < 0:
                place_of[items[p]] = end - start
                out[end] = items[p]
                end += 1
            place[p] = place_of[items[p]]
        for k in range(start, end):
            place_of[out[k]] = -1
        out_indptr[c + 1] = end
    return out_indptr, out[:end].copy(), place
