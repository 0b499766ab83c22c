"""Kernels of the mixture of experts: scores by lag, candidates, and counts without the last items.

Every kernel treats each client by itself and in a fixed order, so a client's numbers are the same
in any stack. `kernels.mixture` fits what these prepare.

Scores are a slice of a larger array, which compiled loops do not know to lie together: they are
added up in a row of their own, and moved once.
"""

from __future__ import annotations

import numpy as np

from hushrec.kernels.draws import draw
from hushrec.kernels.jit import Array, njit
from hushrec.kernels.pairs import key_order


@njit(cache=True, nogil=True)
def add_by_lag(
    out: Array,
    indptr: Array,
    items: Array,
    neighbours: Array,
    weights: Array,
    ends: Array,
    by_place: Array,
) -> None:
    """Add the neighbours of each client's last items, by how far back they are.

    ``out[c, b]`` takes the g-th last items with ``ends[b - 1] < g <= ends[b]``, each times
    ``by_place[g - 1]``, or times 1 past its end; where ``ends[b]`` is 0 the bucket has no end.
    """
    n_items = out.shape[2]
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
                weight = by_place[g - 1] if g <= len(by_place) else np.float32(1)
                for k in range(neighbours.shape[1]):
                    mine[np.uint32(neighbours[item, k])] += weight * weights[item, k]
            out[c, bucket] += mine
            start = end


@njit(cache=True, nogil=True)
def log_of_sum(parts: Array, floor: float, out: Array) -> None:
    """Fill ``out[c, j]`` with the logarithm of the sum of ``parts[c, :, j]``, at least ``floor``.

    The floor is added, so that nothing is a cliff.
    """
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
def recent_vectors(indptr: Array, items: Array, table: Array, by_place: Array) -> Array:
    """Return the sum of each client's last items' rows, the g-th last times ``by_place[g - 1]``."""
    out = np.zeros((len(indptr) - 1, table.shape[1]), np.float32)
    for c in range(len(indptr) - 1):
        last = indptr[c + 1]
        for g in range(1, min(len(by_place), last - indptr[c]) + 1):
            row = table[items[last - g]]
            for a in range(len(row)):
                out[c, a] += by_place[g - 1] * row[a]
    return out


@njit(cache=True, nogil=True)
def following_groups(
    indptr: Array, items: Array, members: Array, sizes: Array, by_gap: Array
) -> tuple[Array, Array, Array]:
    """Return, ragged by client, which group followed which: keys a·(all groups) + b, ascending.

    ``members[i]`` are an item's shares of the groups of all fields one after the other, ``sizes``
    the fields' numbers of groups; groups of different fields are not paired.
    """
    groups = members.shape[1]
    capacity = 0
    for field in range(len(sizes)):
        capacity += sizes[field] ** 2
    clients = len(indptr) - 1
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
def what_is_more(
    indptr: Array, keys: Array, rows: Array, less_indptr: Array, less_keys: Array, less: Array
) -> tuple[Array, Array, Array]:
    """Return, ragged by client, by how much rows exceed others of the same key, if at all."""
    width = rows.shape[1]
    out_indptr = np.zeros(len(indptr), np.int64)
    out_keys = np.empty(len(keys) + len(less_keys), np.int64)
    out = np.zeros((len(out_keys), width), np.float32)
    end = 0
    for c in range(len(indptr) - 1):
        n, n_less = indptr[c + 1] - indptr[c], less_indptr[c + 1] - less_indptr[c]
        both = np.empty(n + n_less, np.int64)
        both[:n] = keys[indptr[c] : indptr[c + 1]]
        both[n:] = less_keys[less_indptr[c] : less_indptr[c + 1]]
        order = key_order(both)
        sums = np.zeros(width)
        for k in range(len(order)):
            r = order[k]
            for column in range(width):
                if r < n:
                    sums[column] += rows[indptr[c] + r, column]
                else:
                    sums[column] -= less[less_indptr[c] + r - n, column]
            if k + 1 == len(order) or both[order[k + 1]] != both[r]:
                if np.any(sums != 0):
                    out_keys[end] = both[r]
                    for column in range(width):
                        out[end, column] = sums[column]
                    end += 1
                sums[:] = 0
        out_indptr[c + 1] = end
    return out_indptr, out_keys[:end].copy(), out[:end].copy()


@njit(cache=True, nogil=True)
def choose_candidates(
    prior: Array, seen: Array, target: int, top: int, others: int, key: Array, user: int
) -> tuple[Array, Array]:
    """Return the target, the best untouched items, some of the rest, and their log weights.

    The rest is cut into as many runs as are drawn, and one item is drawn of each: it stands for
    its run, so a sum over what is returned estimates the sum over all untouched items.
    """
    n_items = len(prior)
    untouched = np.ones(n_items, np.bool_)
    untouched[seen] = False
    untouched[target] = False
    rest = np.flatnonzero(untouched)
    size = min(len(rest), top + others) + 1
    found, log_weights = np.empty(size, np.int32), np.zeros(size, np.float32)
    found[0] = target
    if len(rest) < top + others + 1:
        found[1:] = rest
        return found, log_weights
    values = prior[rest]
    bound = np.partition(values, len(values) - top)[len(values) - top]
    spare = top - np.sum(values > bound)
    end = 1
    for k in range(len(rest)):
        taken = values[k] > bound
        if values[k] == bound and spare > 0:
            spare -= 1
            taken = True
        if taken:
            found[end] = rest[k]
            untouched[rest[k]] = False
            end += 1
    rest = np.flatnonzero(untouched)
    for k in range(others):
        start, stop = k * len(rest) // others, (k + 1) * len(rest) // others
        word = draw(key, user, k)
        found[end] = rest[start + np.int64(word % np.uint64(stop - start))]
        log_weights[end] = np.log(stop - start)
        end += 1
    return found, log_weights


@njit(cache=True, nogil=True)
def score_groups(
    indptr: Array,
    items: Array,
    members: Array,
    sizes: Array,
    said: Array,
    latest: Array,
    out: Array,
) -> None:
    """Fill a score for each field and each number of last items, where 0 is all of them.

    A score is the mean over those items of ``members[i] · said``, over the groups of its field:
    ``said[a, j]`` is what group a says of item j.
    """
    groups, spans = members.shape[1], len(latest)
    for c in range(len(indptr) - 1):
        length = indptr[c + 1] - indptr[c]
        for span in range(spans):
            used = min(length, latest[span]) if latest[span] else length
            past = np.zeros(groups, np.float32)
            for p in range(indptr[c + 1] - used, indptr[c + 1]):
                for a in range(groups):
                    past[a] += members[items[p], a]
            a = 0
            for field in range(len(sizes)):
                mine = np.zeros(out.shape[2], np.float32)
                for _ in range(sizes[field]):
                    if past[a]:
                        weight, row = past[a] / np.float32(used), said[a]
                        for j in range(len(row)):
                            mine[j] += weight * row[j]
                    a += 1
                out[c, field * spans + span] = mine
