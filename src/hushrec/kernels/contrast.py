"""Supervised contrast of item rows, and cosines of a client's rows with those of another one.

The loss of Khosla et al. (2020) over n rows v_i of length 1, each with a cluster, at temperature t:

    sum over i of  -(t / 0.5) mean over z of [v_i.v_z / t - log sum over a of exp(v_i.v_a / t)]

where z runs over the other rows of i's cluster, and a over all other rows. Rows that are alone in
their cluster are no anchors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hushrec.kernels.jit import Array, njit

ANY_ORDER = {"reassoc", "contract", "nsz"}
"""Fast-math flags: additions may be reordered for vector instructions, in the same way on every
call of the same compiled code. NaN and infinity keep their meaning."""
SHORTEST = 1e-12
"""Shortest length that a row is divided by."""


class Contrast(NamedTuple):
    """The term of a client's loss that contrasts item rows."""

    labels: Array
    """Cluster of every item."""
    weight: Any
    """Factor on the sum over anchors."""
    temperature: Any
    whole: bool
    """Whether all rows are contrasted in every step, and not those of its batch."""


class ContrastBuffers(NamedTuple):
    """Intermediate results of a step."""

    slots: Array
    """The rows that are contrasted, as indices among the client's rows."""
    marked: Array
    """Whether a row is among them; False between steps."""
    units: Array
    """The rows divided by their lengths."""
    alike: Array
    """exp((v_i.v_a - 1) / t) of all pairs."""
    gradient: Array
    """Gradient of the term by the rows."""


@njit(cache=True, nogil=True)
def new_contrast_buffers(most: int, rows: int, d: int) -> ContrastBuffers:
    """Allocate buffers for up to ``most`` contrasted rows of a client with so many rows."""
    return ContrastBuffers(
        np.empty(most, np.int64),
        np.zeros(rows, np.bool_),
        np.empty((most, d), np.float32),
        np.empty((most, most), np.float32),
        np.empty((most, d), np.float32),
    )


@njit(cache=True, nogil=True)
def contrast_rows(
    rows: Array, ids: Array, taken: Array, contrast: Contrast, buffers: ContrastBuffers
) -> int:
    """Fill the gradient of the term by a client's rows; return how many rows are contrasted.

    ``ids`` are the items of the rows, ``taken`` the samples of the batch (2 * row + label).
    """
    slots, marked = buffers.slots, buffers.marked
    n = 0
    if contrast.whole:
        n = len(rows)
        for r in range(n):
            slots[r] = r
    else:
        for s in range(len(taken)):
            r = taken[s] >> 1
            if not marked[r]:
                marked[r] = True
                slots[n] = r
                n += 1
        for i in range(n):
            marked[slots[i]] = False
    fill_contrast_gradient(rows, ids, n, contrast, buffers)
    return n


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def fill_contrast_gradient(
    rows: Array, ids: Array, n: int, contrast: Contrast, buffers: ContrastBuffers
) -> None:
    """Fill the gradient of the term by the first n of ``buffers.slots``."""
    slots, units, alike, out = buffers.slots, buffers.units, buffers.alike, buffers.gradient
    d, labels = rows.shape[1], contrast.labels
    lengths, totals = np.empty(n, np.float32), np.zeros(n, np.float32)
    cluster, others = np.empty(n, np.int64), np.zeros(n, np.int64)
    for i in range(n):
        row, square = rows[slots[i]], np.float32(0)
        for k in range(d):
            square += row[k] * row[k]
        lengths[i] = max(np.sqrt(square), np.float32(SHORTEST))
        for k in range(d):
            units[i, k] = row[k] / lengths[i]
        cluster[i] = labels[ids[slots[i]]]
    sharp = np.float32(1) / contrast.temperature
    for i in range(n):
        for j in range(i):
            near = np.float32(0)
            for k in range(d):
                near += units[i, k] * units[j, k]
            alike[i, j] = (near - np.float32(1)) * sharp
            others[i] += cluster[i] == cluster[j]
            others[j] += cluster[i] == cluster[j]
    for i in range(n):
        for j in range(i):
            alike[i, j] = np.exp(alike[i, j])
            totals[i] += alike[i, j]
            totals[j] += alike[i, j]
    factor = np.float32(2) * contrast.weight  # (t / 0.5) / t
    out[:n] = 0
    for i in range(n):
        for j in range(i):
            pull = np.float32(0)  # by i as anchor of j, and by j as anchor of i
            if others[i] > 0:
                pull += alike[i, j] / totals[i]
            if others[j] > 0:
                pull += alike[i, j] / totals[j]
            if cluster[i] == cluster[j]:
                pull -= np.float32(1) / others[i] + np.float32(1) / others[j]
            pull *= factor
            for k in range(d):
                out[i, k] += pull * units[j, k]
                out[j, k] += pull * units[i, k]
    for i in range(n):
        along = np.float32(0)
        for k in range(d):
            along += out[i, k] * units[i, k]
        for k in range(d):
            out[i, k] = (out[i, k] - along * units[i, k]) / lengths[i]


@njit(cache=True, nogil=True, fastmath=ANY_ORDER)
def mean_cosines(tables: Array, core: Array, items: Array) -> Array:
    """Return each client's mean cosine of its rows of some items with the rows of ``core``."""
    out = np.zeros(len(tables))
    for c in range(len(tables)):
        for item in items:
            product, own, other = 0.0, 0.0, 0.0
            for k in range(core.shape[1]):
                mine, theirs = np.float64(tables[c, item, k]), np.float64(core[item, k])
                product += mine * theirs
                own += mine * mine
                other += theirs * theirs
            if own > 0 and other > 0:
                out[c] += product / np.sqrt(own * other)
        out[c] /= max(1, len(items))
    return out
