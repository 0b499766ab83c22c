"""Counter-based random numbers, and draws of negatives, samples and shuffled epochs."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hushrec.kernels.jit import Array, njit

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class ClientData(NamedTuple):
    """A batch of clients: their ids, positives, and items excluded as negatives."""

    users: Array
    indptr: Array
    items: Array
    """Positives of client c: ``items[indptr[c]:indptr[c + 1]]``."""
    excluded_indptr: Array
    excluded: Array
    """Excluded items, ascending for each client."""


class Pace(NamedTuple):
    """Local training of a round: negatives, epochs and batch size."""

    negatives: int
    """Negatives per positive."""
    epochs: int
    batch: int
    """Samples per step."""


class DeviceSamples(NamedTuple):
    """The samples of a batch of devices, in training order; device c has those from ``indptr[c]``
    to ``indptr[c + 1]``."""

    indptr: NDArray[np.int64]
    items: NDArray[Any]
    """Item of each sample or, for kernels that train rows, its index among the device's rows."""
    labels: NDArray[np.float32]
    epochs: int
    """Number of epochs, all of the same length."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of samples of each device in one epoch."""
        return np.asarray(np.diff(self.indptr) // self.epochs)


@njit(cache=True, nogil=True, inline="always")
def mix(word: np.uint64) -> np.uint64:
    """Return the finaliser of SplitMix64, in which each input bit affects all output bits."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@njit(cache=True, nogil=True, inline="always")
def draw(key: Array, user: int, position: int) -> np.uint64:
    """Return the 64-bit number at a position of a user's stream (`streams.Streams.key`)."""
    counter = mix(key[0] + np.uint64(user) * GOLDEN)
    return mix(mix(counter + np.uint64(position) * GOLDEN) ^ key[1])


@njit(cache=True, nogil=True)
def draw_each(key: Array, users: Array, positions: Array) -> Array:
    """Return the numbers at these positions of these users' streams."""
    out = np.empty(len(users), np.uint64)
    for k in range(len(users)):
        out[k] = draw(key, users[k], positions[k])
    return out


@njit(cache=True, nogil=True, inline="always")
def below(word: np.uint64, bound: int) -> Any:
    """Map a random word to 0 … bound-1 (multiply and shift; the bias is below bound / 2^32)."""
    return np.int64(((word >> np.uint64(32)) * np.uint64(bound)) >> np.uint64(32))


@njit(cache=True, nogil=True, inline="always")
def nth_outside(excluded: Array, n: Any) -> Any:
    """Return the n-th item, from 0, that is not in the ascending list ``excluded``."""
    # A branch-free binary search for the number of exclusions before the item.
    before, size = 0, len(excluded)
    while size > 0:
        half = (size + 1) >> 1
        middle = before + half - 1
        before += half if excluded[middle] - middle <= n else 0
        size -= half
    return n + before


@njit(cache=True, nogil=True)
def list_outside(excluded: Array, n_items: int, out: Array) -> None:
    """Fill ``out[n]`` with ``nth_outside(excluded, n)`` for every n."""
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


@njit(cache=True, nogil=True)
def draw_distinct_outside(
    key: Array, users: Array, excluded_indptr: Array, excluded: Array, n_items: int, count: int
) -> tuple[Array, Array]:
    """Draw ``count`` different items outside each client's exclusions, or all of them if fewer."""
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


@njit(cache=True, nogil=True)
def list_samples(
    key: Array, data: ClientData, n_items: int, negatives: int
) -> tuple[Array, Array, Array, Array]:
    """Return every client's samples of a round: each positive, followed by its negatives.

    The draws are those of `fit_inner_product`. Returns (indptr, items, labels, and the number of
    draws from each client's stream).
    """
    users, indptr, items, excluded_indptr, excluded = data
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
    """Return each client's sample order, epoch after epoch, as (indptr, sample indices).

    ``used`` is the number of earlier draws from each client's stream. Each epoch shuffles the order
    of the previous one.
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
