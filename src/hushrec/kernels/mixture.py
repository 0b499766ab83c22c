"""Kernels of the mixture of experts: scores by lag, candidates, fitting and applying the mixture.

Every kernel treats each client by itself and in a fixed order, so a client's numbers are the same
in any batch.

A client has held-out prediction *tasks*, blocks of candidates of which the first is the target: a
row of scores each, then the log weight of what the row stands for. A block's unused rows have log
weight `NONE`.

Scores are a slice of a larger array, which compiled loops do not know to be contiguous: they are
added up in a row of their own, and moved once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hushrec.kernels.draws import draw
from hushrec.kernels.jit import Array, njit
from hushrec.kernels.layers import add_product, subtract_product
from hushrec.kernels.ragged import best_of

NONE = np.float32(-1e30)
"""Log weight of a row that is no candidate."""
STEEPNESS = 1.702
"""Of the sigmoid in the hidden layers: with it they are close to GELU."""


class PairTable(NamedTuple):
    """Item-to-item weights in a few bits (`methods.statistics.pair_tables`).

    The entries of item i are those from ``starts[i]`` on. An entry's column is the one of the entry
    before, from -1 on, plus its gap plus 1; its weight is its code times the code's size, times the
    item's scale.
    """

    starts: Array
    gaps: Array
    codes: Array
    scales: Array


@njit(cache=True, nogil=True)
def add_by_lag(
    out: Array, indptr: Array, items: Array, table: PairTable, ends: Array, by_place: Array
) -> None:
    """Add the weights from each client's last items, by how far back they are.

    ``out[c, b]`` takes the g-th last items with ``ends[b - 1] < g <= ends[b]``, each times
    ``by_place[g - 1]``, or times 1 past its end; where ``ends[b]`` is 0 the bucket has no end.
    """
    n_items = out.shape[2]
    squares = np.empty(256, np.float32)
    for code in range(-128, 128):
        squares[np.uint8(code)] = code * abs(code)
    for c in range(len(indptr) - 1):
        last, length = indptr[c + 1], indptr[c + 1] - indptr[c]
        start = 0
        for bucket in range(len(ends)):
            end = min(ends[bucket], length) if ends[bucket] else length
            if end <= start:
                break
            mine = np.zeros(n_items, np.float32)
            for g in range(start + 1, end + 1):
                item = items[last - g]
                weight = table.scales[item]
                if g <= len(by_place):
                    weight *= by_place[g - 1]
                column = np.uint32(0)
                for k in range(table.starts[item], table.starts[item + 1]):
                    column += np.uint32(table.gaps[k])
                    mine[column] += weight * squares[np.uint8(table.codes[k])]
                    column += np.uint32(1)
            out[c, bucket] += mine
            start = end


@njit(cache=True, nogil=True)
def log_of_sum(parts: Array, floor: float, out: Array) -> None:
    """Fill ``out[c, j]`` with log(max(sum of ``parts[c, :, j]``, 0) + ``floor``)."""
    for c in range(parts.shape[0]):
        total = np.zeros(parts.shape[2], np.float32)
        for b in range(parts.shape[1]):
            total += parts[c, b]
        for j in range(len(total)):
            total[j] = np.log(max(total[j], np.float32(0)) + np.float32(floor))
        out[c] = total


@njit(cache=True, nogil=True)
def score_vectors(vectors: Array, columns: Array, out: Array) -> None:
    """Add the inner product of a client's vector and an item's column to ``out[c, j]``."""
    for c in range(len(vectors)):
        mine = np.zeros(columns.shape[1], np.float32)
        for a in range(len(columns)):
            weight, column = vectors[c, a], columns[a]
            for j in range(len(column)):
                mine[j] += weight * column[j]
        out[c] += mine


@njit(cache=True, nogil=True)
def following_groups(
    indptr: Array, items: Array, members: Array, sizes: Array, by_gap: Array
) -> tuple[Array, Array, Array]:
    """Return, ragged by client, which group followed which: keys a·(all groups) + b, ascending.

    ``members[i]`` are an item's shares of the groups of all fields one after the other, ``sizes``
    the fields' numbers of groups; groups of different fields are not paired.
    """
    groups, clients, capacity = members.shape[1], len(indptr) - 1, np.sum(sizes**2)
    out_indptr = np.zeros(clients + 1, np.int64)
    keys = np.empty(clients * capacity, np.int64)
    found = np.empty((clients * capacity, 1), np.float32)
    sums = np.zeros((groups, groups), np.float32)
    end = 0
    for c in range(clients):
        sums[:] = 0
        last = indptr[c + 1]
        for p in range(indptr[c], last):
            for q in range(p + 1, min(p + len(by_gap) + 1, last)):
                weight, start = by_gap[q - p - 1], 0
                for field in range(len(sizes)):
                    stop = start + sizes[field]
                    for a in range(start, stop):
                        share = members[items[p], a]
                        if share:
                            for b in range(start, stop):
                                sums[a, b] += weight * share * members[items[q], b]
                    start = stop
        for a in range(groups):
            for b in range(groups):
                if sums[a, b]:
                    keys[end], found[end, 0] = a * groups + b, sums[a, b]
                    end += 1
        out_indptr[c + 1] = end
    return out_indptr, keys[:end].copy(), found[:end].copy()


@njit(cache=True, nogil=True)
def choose_candidates(
    prior: Array, seen: Array, target: int, top: int, others: int, key: Array, user: int
) -> tuple[Array, Array]:
    """Return the target, the best items but for those seen, some others, and their log weights.

    The rest is cut into as many runs as are drawn, and one item is drawn of each: it stands for
    its run, so a sum over what is returned estimates the sum over all untouched items.
    """
    untouched = np.ones(len(prior), np.bool_)
    untouched[seen] = False
    untouched[target] = False
    rest = np.flatnonzero(untouched)
    size = min(len(rest), top + others) + 1
    found, log_weights = np.empty(size, np.int32), np.zeros(size, np.float32)
    found[0] = target
    if len(rest) <= top + others:
        found[1:] = rest
        return found, log_weights
    found[1 : top + 1] = rest[best_of(prior[rest], top, -np.inf)]
    untouched[found[1 : top + 1]] = False
    rest = np.flatnonzero(untouched)
    for k in range(others):
        start, stop = k * len(rest) // others, (k + 1) * len(rest) // others
        word = draw(key, user, k)
        found[top + 1 + k] = rest[start + np.int64(word % np.uint64(stop - start))]
        log_weights[top + 1 + k] = np.log(stop - start)
    return found, log_weights


@njit(cache=True, nogil=True)
def score_groups(
    indptr: Array,
    items: Array,
    members: Array,
    sizes: Array,
    relations: Array,
    latest: Array,
    out: Array,
) -> None:
    """Fill a score for each field and each number of last items, where 0 is all of them.

    A score is the mean over those items of ``members[i] · relations · members[j]``, over the groups
    of its field: ``relations[a, b]`` is the weight from group a to group b.
    """
    n_items, groups, spans = len(members), members.shape[1], len(latest)
    field_of = np.repeat(np.arange(len(sizes)), sizes)
    # Items have few groups: these are gone through once for everybody.
    starts = np.zeros(n_items + 1, np.int64)
    own = np.empty(n_items * groups, np.int64)
    for j in range(n_items):
        starts[j + 1] = starts[j]
        for b in range(groups):
            if members[j, b]:
                own[starts[j + 1]] = b
                starts[j + 1] += 1
    for c in range(len(indptr) - 1):
        length = indptr[c + 1] - indptr[c]
        for span in range(spans):
            used = min(length, latest[span]) if latest[span] else length
            past = np.zeros(groups, np.float32)
            for p in range(indptr[c + 1] - used, indptr[c + 1]):
                past += members[items[p]]
            onwards = np.zeros(groups, np.float32)
            for a in range(groups):
                if past[a]:
                    weight = past[a] / np.float32(used)
                    for b in range(groups):
                        if field_of[a] == field_of[b]:
                            onwards[b] += weight * relations[a, b]
            mine = np.zeros((len(sizes), n_items), np.float32)
            for j in range(n_items):
                for k in range(starts[j], starts[j + 1]):
                    mine[field_of[own[k]], j] += members[j, own[k]] * onwards[own[k]]
            for field in range(len(sizes)):
                out[c, field * spans + span] = mine[field]


# ---------------------------------------------------------------- fitting and reranking


class Reranker(NamedTuple):
    """The networks that rerank candidates, by the mean of their outputs."""

    center: Array
    scale: Array
    """Inputs are scores less their center, over their scale."""
    flat: Array
    """Parameters: [networks, parameters of one]."""
    hidden: int
    """Width of both hidden layers."""
    best: int
    """Number of candidates that are reranked."""


@njit(cache=True, nogil=True)
def weigh(scores: Array, weights: Array, out: Array) -> None:
    """Add ``scores[c, f, j] · weights[f]`` to ``out[c, j]``, one score after the other."""
    for c in range(scores.shape[0]):
        for f in range(scores.shape[1]):
            weight, row = weights[f], scores[c, f]
            if weight:
                for j in range(len(row)):
                    out[c, j] += weight * row[j]


@njit(cache=True, nogil=True)
def softmax(logits: Array) -> Any:
    """Turn logits into shares, in place; return the logarithm of their sum."""
    highest = np.max(logits)
    total = 0.0
    for k in range(len(logits)):
        logits[k] = np.exp(logits[k] - highest)
        total += logits[k]
    for k in range(len(logits)):
        logits[k] /= np.float32(total)
    return highest + np.log(total)


@njit(cache=True, nogil=True)
def score_moments(indptr: Array, rows: Array, block: int) -> tuple[Array, Array]:
    """Return who has tasks, and per such client: candidates, sums of scores, and of squares.

    All are divided by the size of a block, so that sums over a million clients stay small.
    """
    width = rows.shape[1] - 1
    has = np.zeros(len(indptr), np.int64)
    out = np.zeros((len(indptr) - 1, 1 + 2 * width), np.float32)
    n = 0
    for c in range(len(indptr) - 1):
        if indptr[c + 1] > indptr[c]:
            for r in range(indptr[c], indptr[c + 1]):
                if rows[r, width] > NONE:
                    out[n, 0] += 1
                    for f in range(width):
                        out[n, 1 + f] += rows[r, f]
                        out[n, 1 + width + f] += rows[r, f] ** 2
            out[n] /= np.float32(block)
            n += 1
        has[c + 1] = n
    return has, out[:n].copy()


@njit(cache=True, nogil=True)
def newton_sums(
    indptr: Array, rows: Array, block: int, weights: Array, scale: Array
) -> tuple[Array, Array]:
    """Return who has tasks, and per such client: their number, loss, gradient and Hessian.

    The loss is the cross-entropy of the target under the softmax of the weighed scores; the
    Hessian is an upper triangle. Scores are divided by ``scale``.
    """
    width = len(weights)
    triangle = width * (width + 1) // 2
    has = np.zeros(len(indptr), np.int64)
    out = np.zeros((len(indptr) - 1, 2 + width + triangle), np.float32)
    scaled = np.empty((block, width), np.float32)
    n = 0
    for c in range(len(indptr) - 1):
        for start in range(indptr[c], indptr[c + 1], block):
            logits = rows[start : start + block, -1].copy()
            for r in range(block):
                for f in range(width):
                    scaled[r, f] = rows[start + r, f] / scale[f]
                    logits[r] += weights[f] * scaled[r, f]
            target = logits[0]
            log_sum = softmax(logits)
            mean = np.zeros(width, np.float32)
            second = np.zeros((width, width), np.float32)
            for r in range(block):
                share = logits[r]
                if share > np.float32(1e-12):
                    for f in range(width):
                        part = share * scaled[r, f]
                        mean[f] += part
                        for g in range(f, width):
                            second[f, g] += part * scaled[r, g]
            out[n, 0] += 1
            out[n, 1] += log_sum - target
            end = 2 + width
            for f in range(width):
                out[n, 2 + f] += mean[f] - scaled[0, f]
                for g in range(f, width):
                    out[n, end] += second[f, g] - mean[f] * mean[g]
                    end += 1
        n += indptr[c + 1] > indptr[c]
        has[c + 1] = n
    return has, out[:n].copy()


def first_networks(generator: np.random.Generator, count: int, inputs: int, hidden: int) -> Array:
    """Return networks that have learnt nothing: the weights of their outputs are zero."""
    starts, zeros = [], np.zeros(hidden)
    for _ in range(count):
        first = generator.standard_normal((inputs, hidden)) / np.sqrt(inputs)
        second = generator.standard_normal((hidden, hidden)) / np.sqrt(hidden)
        parts = (first.ravel(), zeros, second.ravel(), zeros, zeros, np.ones(1))
        starts.append(np.concatenate(parts))
    return np.stack(starts).astype(np.float32)


@njit(cache=True, nogil=True)
def layers_of(flat: Array, inputs: int, hidden: int) -> Any:
    """Return views of a network's parameters: two hidden layers, the last one, the multiplier."""
    a = inputs * hidden
    b = a + hidden
    c = b + hidden * hidden
    d = c + hidden
    e = d + hidden
    return (
        flat[:a].reshape(inputs, hidden),
        flat[a:b],
        flat[b:c].reshape(hidden, hidden),
        flat[c:d],
        flat[d:e],
        flat[e:],
    )


@njit(cache=True, nogil=True)
def soften(values: Array, slopes: Array) -> None:
    """Multiply every value by its sigmoid, a smooth rectifier; fill its derivatives."""
    for r in range(values.shape[0]):
        for a in range(values.shape[1]):
            value = values[r, a]
            gate = np.float32(1) / (np.float32(1) + np.exp(np.float32(-STEEPNESS) * value))
            values[r, a] = value * gate
            slopes[r, a] = gate + np.float32(STEEPNESS) * value * gate * (np.float32(1) - gate)


@njit(cache=True, nogil=True)
def forward(inputs: Array, flat: Array, hidden: Array, slopes: Array, out: Array) -> None:
    """Add the network's output for each row to ``out``; fill its two layers and their slopes."""
    w1, b1, w2, b2, w3, _ = layers_of(flat, inputs.shape[1], hidden.shape[2])
    hidden[0] = b1
    add_product(inputs, w1, hidden[0])
    soften(hidden[0], slopes[0])
    hidden[1] = b2
    add_product(hidden[0], w2, hidden[1])
    soften(hidden[1], slopes[1])
    for r in range(len(out)):
        total = np.float32(0)
        for a in range(len(w3)):
            total += hidden[1, r, a] * w3[a]
        out[r] += total


@njit(cache=True, nogil=True)
def back(
    inputs: Array, flat: Array, hidden: Array, slopes: Array, errors: Array, gradient: Array
) -> None:
    """Add the derivatives by the network's parameters, whose outputs have these errors."""
    width = hidden.shape[2]
    _, _, w2, _, w3, _ = layers_of(flat, inputs.shape[1], width)
    g1, h1, g2, h2, g3, _ = layers_of(gradient, inputs.shape[1], width)
    above = np.empty_like(hidden[1])
    below = np.zeros_like(hidden[0])
    for r in range(len(errors)):
        for a in range(width):
            g3[a] += errors[r] * hidden[1, r, a]
            above[r, a] = errors[r] * w3[a] * slopes[1, r, a]
            h2[a] += above[r, a]
    add_product(above, np.ascontiguousarray(w2.T), below)
    for r in range(len(errors)):
        for a in range(width):
            below[r, a] *= slopes[0, r, a]
            h1[a] += below[r, a]
    subtract_product(hidden[0], above, np.float32(-1), g2)
    subtract_product(inputs, below, np.float32(-1), g1)


@njit(cache=True, nogil=True)
def network_sums(
    indptr: Array, rows: Array, block: int, weights: Array, network: Reranker
) -> tuple[Array, Array]:
    """Return who took part, and per such client: tasks, and the gradient of every network.

    ``weights`` has two rows: the weights of scores in the mixture, and those with which candidates
    were chosen. Only tasks count whose target would have been chosen, and is among the ``best``
    candidates of the mixture: the networks rerank only those, and must not learn that a target is
    an item that does not belong there. Each network has a loss of its own.
    """
    center, scale, flat, hidden, best = network
    width = len(center)
    has = np.zeros(len(indptr), np.int64)
    size = flat.shape[1]
    out = np.zeros((len(indptr) - 1, 1 + flat.size), np.float32)
    layers = np.empty((2, best, hidden), np.float32)
    slopes = np.empty_like(layers)
    inputs = np.empty((best, width), np.float32)
    n = 0
    for c in range(len(indptr) - 1):
        took_part = False
        for start in range(indptr[c], indptr[c + 1], block):
            mixed, chosen_by = np.zeros(block, np.float32), np.zeros(block, np.float32)
            bound = np.float32(np.inf)
            for r in range(block):
                for f in range(weights.shape[1]):
                    score = rows[start + r, f] / scale[f]
                    mixed[r] += weights[0, f] * score
                    chosen_by[r] += weights[1, f] * score
                if r and rows[start + r, width] == 0:
                    bound = min(bound, chosen_by[r])
                if rows[start + r, width] == NONE:
                    mixed[r] = NONE
            chosen = best_of(mixed, best, NONE)
            if len(chosen) == 0 or chosen[0] != 0 or chosen_by[0] < bound:
                continue
            took_part, count = True, len(chosen)
            out[n, 0] += 1
            for k in range(count):
                for f in range(width):
                    inputs[k, f] = (rows[start + chosen[k], f] - center[f]) / scale[f]
            own, up, slope = inputs[:count], layers[:, :count], slopes[:, :count]
            for e in range(len(flat)):
                gradient = out[n, 1 + e * size : 1 + (e + 1) * size]
                errors = flat[e, -1] * mixed[chosen]
                forward(own, flat[e], up, slope, errors)
                softmax(errors)
                errors[0] -= 1
                for k in range(count):
                    gradient[-1] += errors[k] * mixed[chosen[k]]
                back(own, flat[e], up, slope, errors, gradient)
        n += took_part
        has[c + 1] = n
    return has, out[:n].copy()


@njit(cache=True, nogil=True)
def rerank(
    mixed: Array, scores: Array, lengths: Array, seen_indptr: Array, seen: Array, network: Reranker
) -> None:
    """Rerank each client's best untouched items by the networks; all others stay below them."""
    center, scale, flat, hidden, best = network
    width = len(center)
    layers = np.empty((2, best, hidden), np.float32)
    slopes = np.empty_like(layers)
    inputs = np.empty((best, width), np.float32)
    for c in range(len(mixed)):
        open_to = mixed[c].copy()
        open_to[seen[seen_indptr[c] : seen_indptr[c + 1]]] = NONE
        chosen = best_of(open_to, best, NONE)
        size = len(chosen)
        if size == 0:
            continue
        for k in range(size):
            for f in range(width - 1):
                inputs[k, f] = (scores[c, f, chosen[k]] - center[f]) / scale[f]
            inputs[k, width - 1] = (lengths[c] - center[width - 1]) / scale[width - 1]
        logits, lowest_before = np.zeros(size, np.float32), np.min(mixed[c, chosen])
        for e in range(len(flat)):
            logits += flat[e, -1] * mixed[c, chosen]
            forward(inputs[:size], flat[e], layers[:, :size], slopes[:, :size], logits)
        logits /= np.float32(len(flat))
        shift = np.min(logits) - lowest_before
        for j in range(mixed.shape[1]):
            mixed[c, j] += min(shift, np.float32(0))
        for k in range(size):
            mixed[c, chosen[k]] = logits[k]
