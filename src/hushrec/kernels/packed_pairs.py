"""Kernels over packed tables of item-to-item weights: packing them, and reading single weights."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hushrec.kernels.jit import Array, njit


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


FAR = 256
"""Columns that one entry can move on."""


@njit(cache=True, nogil=True)
def union_of_tables(neighbours: Array, weights: Array, units: Array) -> tuple[Array, Array, Array]:
    """Return, ragged by item, the columns of all tables' weights, ascending, and their sizes.

    ``neighbours`` and ``weights`` are [tables, items, …]; a pair's size is the sum over tables of
    its weights' sizes, each over the table's unit.
    """
    tables, n_items, width = weights.shape
    indptr = np.zeros(n_items + 1, np.int64)
    ids = np.empty(min(tables * width, n_items) * n_items, np.int32)
    sums = np.empty(len(ids), np.float32)
    end = 0
    for i in range(n_items):
        row = np.zeros(n_items, np.float32)
        for t in range(tables):
            for k in range(width):
                row[neighbours[t, i, k]] += abs(weights[t, i, k]) / units[t]
        for j in range(n_items):
            if row[j] > 0:
                ids[end], sums[end] = j, row[j]
                end += 1
        indptr[i + 1] = end
    return indptr, ids[:end].copy(), sums[:end].copy()


@njit(cache=True, nogil=True)
def slots_of(indptr: Array, ids: Array, kept: Array) -> int:
    """Return how many entries the kept pairs take, with those that only move on."""
    slots = 0
    for i in range(len(indptr) - 1):
        column = -1
        for k in range(indptr[i], indptr[i + 1]):
            if kept[k]:
                slots += 1 + (ids[k] - column - 1) // FAR
                column = ids[k]
    return slots


@njit(cache=True, nogil=True)
def pack_tables(
    indptr: Array,
    ids: Array,
    kept: Array,
    neighbours: Array,
    weights: Array,
    levels: Array,
    out: PairTable,
) -> None:
    """Fill the common index, and codes and scales of every table, from tables in long form."""
    tables, n_items, width = weights.shape
    row = np.zeros((tables, n_items), np.float32)
    end = 0
    for i in range(n_items):
        row[:] = 0
        for t in range(tables):
            for k in range(width):
                if weights[t, i, k] != 0:
                    row[t, neighbours[t, i, k]] = weights[t, i, k]
        most = np.zeros(tables, np.float32)
        for k in range(indptr[i], indptr[i + 1]):
            if kept[k]:
                for t in range(tables):
                    most[t] = max(most[t], abs(row[t, ids[k]]))
        column = -1
        for k in range(indptr[i], indptr[i + 1]):
            if kept[k]:
                gap = ids[k] - column - 1
                while gap >= FAR:
                    out.gaps[end] = FAR - 1
                    end += 1
                    gap -= FAR
                out.gaps[end] = gap
                for t in range(tables):
                    if most[t] > 0:
                        share = np.float64(row[t, ids[k]]) / np.float64(most[t])
                        code = np.rint(np.sqrt(abs(share)) * levels[t])
                        out.codes[t, end] = np.int8(code if share >= 0 else -code)
                column = ids[k]
                end += 1
        for t in range(tables):
            out.scales[t, i] = most[t] / np.float32(levels[t] * levels[t])
        out.starts[i + 1] = end


@njit(cache=True, nogil=True)
def packed_weights(first: Array, second: Array, table: PairTable) -> Array:
    """Return the weights from each first item to each second one, which are distinct."""
    index = np.full(len(table.scales), -1)
    for at in range(len(second)):
        index[second[at]] = at
    out = np.zeros((len(first), len(second)), np.float32)
    for row in range(len(first)):
        item, column = first[row], np.int64(-1)
        for k in range(table.starts[item], table.starts[item + 1]):
            column += np.int64(table.gaps[k]) + 1
            code = np.int64(table.codes[k])
            if code and index[column] >= 0:
                out[row, index[column]] = table.scales[item] * np.float32(code * abs(code))
    return out
