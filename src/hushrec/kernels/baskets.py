"""Kernels over baskets: the rows of one client and time, and how items come again in them.

Every kernel treats each client by itself and in a fixed order, so a client's numbers are the same
in any batch.
"""

from __future__ import annotations

import numpy as np

from hushrec.kernels.jit import Array, njit


@njit(cache=True, nogil=True)
def last_baskets(indptr: Array, times: Array) -> Array:
    """Return the number of each client's rows at its last time."""
    out = np.zeros(len(indptr) - 1, np.int64)
    for c in range(len(out)):
        last = indptr[c + 1]
        for p in range(last - 1, indptr[c] - 1, -1):
            if times[p] != times[last - 1]:
                break
            out[c] += 1
    return out


@njit(cache=True, nogil=True, inline="always")
def bucket_of(count: int, ago: int, counts: Array, agos: Array) -> int:
    """Return the bucket of an item that is in so many baskets, the last of them so many ago.

    ``counts`` and ``agos`` are the ends of all buckets but the last.
    """
    return int(np.searchsorted(counts, count) * (len(agos) + 1) + np.searchsorted(agos, ago))


@njit(cache=True, nogil=True)
def count_repeats(
    indptr: Array, items: Array, times: Array, n_items: int, counts: Array, agos: Array
) -> tuple[Array, Array, Array]:
    """Return, ragged by client, how often items came again: ascending keys and rows of three.

    Rows of one time are a basket. A key below ``n_items`` is an item: the number of baskets after
    the first one with it, how many of them have it too, and whether the last basket has it. The
    other keys, ``n_items`` + bucket (`bucket_of`), are states of an item before a basket: how often
    an item was in the state, and how often it was then in the basket.
    """
    n_buckets = (len(counts) + 1) * (len(agos) + 1)
    clients = len(indptr) - 1
    out_indptr = np.zeros(clients + 1, np.int64)
    keys = np.empty(len(items) + clients * n_buckets, np.int64)
    rows = np.zeros((len(keys), 3), np.float32)
    first, last = np.zeros(n_items, np.int64), np.zeros(n_items, np.int64)
    n = np.zeros(n_items, np.int64)
    end = 0
    for c in range(clients):
        start, stop = indptr[c], indptr[c + 1]
        own = np.empty(stop - start, np.int64)
        states = np.zeros((n_buckets, 2), np.float32)
        size, basket, p = 0, 0, start
        while p < stop:
            for k in range(size):
                state = bucket_of(n[own[k]], basket - last[own[k]], counts, agos)
                states[state, 0] += 1
            while True:
                item = items[p]
                if n[item]:
                    states[bucket_of(n[item], basket - last[item], counts, agos), 1] += 1
                else:
                    own[size], first[item] = item, basket
                    size += 1
                n[item] += 1
                last[item] = basket
                p += 1
                if p == stop or times[p] != times[p - 1]:
                    break
            basket += 1
        for item in np.sort(own[:size]):
            keys[end] = item
            rows[end, 0], rows[end, 1] = basket - 1 - first[item], n[item] - 1
            rows[end, 2] = last[item] == basket - 1
            n[item] = 0
            end += 1
        for state in range(n_buckets):
            if states[state, 0]:
                keys[end], rows[end, :2] = n_items + state, states[state]
                end += 1
        out_indptr[c + 1] = end
    return out_indptr, keys[:end].copy(), rows[:end].copy()


@njit(cache=True, nogil=True)
def score_own_items(
    indptr: Array,
    items: Array,
    times: Array,
    rates: Array,
    states: Array,
    counts: Array,
    agos: Array,
    out: Array,
) -> None:
    """Fill nine scores of a client's own items; those of all others stay 0.

    With n baskets that have the item, the last of them g baskets ago and the first h (the latest
    basket is 1 ago): 1, log(1 + n), log(1 + sum of 1/ago), log(g), log(n / h), log of g over the
    mean number of baskets between two with the item, (h - g) / (n - 1), the rates of the item and
    of its state (`bucket_of`), and log of the client's share of items that came again.
    """
    for c in range(len(indptr) - 1):
        own, length = out[c], indptr[c + 1] - indptr[c]
        ago, distinct = 1, 0
        for p in range(indptr[c + 1] - 1, indptr[c] - 1, -1):
            if p + 1 < indptr[c + 1] and times[p] != times[p + 1]:
                ago += 1
            item = items[p]
            if own[0, item] == 0:
                own[0, item] = 1
                own[3, item] = ago
                distinct += 1
            own[1, item] += 1
            own[2, item] += np.float32(1) / np.float32(ago)
            own[4, item] = ago
        loyalty = np.float32(np.log((length - distinct + 1.0) / (length + 4.0)))
        for p in range(indptr[c], indptr[c + 1]):
            item = items[p]
            if own[0, item] == 1:
                n, g, h = own[1, item], own[3, item], own[4, item]
                own[0, item] = 2  # done
                own[1, item] = np.log(np.float32(1) + n)
                own[2, item] = np.log(np.float32(1) + own[2, item])
                own[3, item] = np.log(g)
                own[4, item] = np.log(n / h)
                own[5, item] = np.log(g * (n - 1) / (h - g)) if n > 1 else np.float32(0)
                own[6, item] = rates[item]
                own[7, item] = states[bucket_of(int(n), int(g), counts, agos)]
                own[8, item] = loyalty
        for p in range(indptr[c], indptr[c + 1]):
            own[0, items[p]] = 1
