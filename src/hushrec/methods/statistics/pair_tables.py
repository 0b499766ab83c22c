"""Compact tables of item-to-item weights, for devices: several tables, one index of pairs.

The server learns tables in a *long* form, ``neighbours`` and ``weights``, each item's strongest
ones (`pair_weights`). `packed` keeps the pairs that matter most over all tables: the column of a
pair as the gap to the pair before, in one byte, and a weight of every table as a whole number from
-15 to 15 (0 to 127 in a table without negative weights), whose square times the item's scale is the
weight. Rounding to so few levels costs less accuracy than leaving pairs out does.

Pairs compete over the whole catalogue, so popular items keep more of them than others. The number
of pairs follows from the catalogue's size alone, so that all arrays have public shapes; bytes
travel deflated (`federation.client.Download`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.data.views import TrainView
from hushrec.kernels.jit import njit
from hushrec.kernels.mixture import PairTable
from hushrec.methods.base import Array, Scores, Shared
from hushrec.methods.statistics import pair_weights
from hushrec.methods.statistics.experts import Expert, Model

PAIRS, LONG = "pairs", "long"
"""Names of the index of packed tables, and of long tables between rounds of counting, among the
shared parameters."""
LONGEST = 1000
"""Weights of an item in a long table."""
MOST_PAIRS = 3_800_000
"""Most pairs of a model: about 9 MB, deflated."""
SIGNED, UNSIGNED = 15, 127
"""Levels of a table with and without negative weights: counts need more, as their logarithms are
scored."""
POPULARITY_POWER, FLOOR = 0.25, np.float32(0.05)
"""A pair counts more the more popular its first item is: that item is in more histories."""


def capacity(n_items: int, neighbours: int) -> int:
    """Return the number of pairs that are kept, of so many per item on average."""
    return max(1, min(n_items * min(neighbours, n_items), MOST_PAIRS))


def empty_index(n_items: int, pairs: int) -> Shared:
    """Return the index of no pairs."""
    return {"starts": np.zeros(n_items + 1, np.int32), "gaps": np.zeros(pairs, np.uint8)}


def empty_table(n_items: int, pairs: int) -> Shared:
    """Return a table without weights."""
    return {"codes": np.zeros(pairs, np.int8), "scales": np.zeros(n_items, np.float32)}


def packed(
    index: Shared, long: Sequence[Shared], shares: NDArray[np.float32]
) -> tuple[Shared, list[Shared]]:
    """Pack long tables: return the index of their pairs, of the same shape, and the tables.

    ``shares`` is the popularity of every item, 1 on average.
    """
    neighbours = np.stack([table["neighbours"] for table in long])
    weights = np.stack([table["weights"] for table in long])
    indptr, ids, importance = union_of_tables(
        neighbours, weights, np.array([_typical(table) for table in weights], np.float32)
    )
    importance *= np.repeat((shares + FLOOR) ** np.float32(POPULARITY_POWER), np.diff(indptr))
    slots = len(index["gaps"])
    kept = _most_important(indptr, ids, importance, slots)
    levels = np.where((weights < 0).any(axis=(1, 2)), SIGNED, UNSIGNED)
    starts, gaps = np.zeros_like(index["starts"]), np.zeros_like(index["gaps"])
    codes = np.zeros((len(long), slots), np.int8)
    scales = np.zeros(weights.shape[:2], np.float32)
    pack_tables(
        indptr, ids, kept, neighbours, weights, levels, PairTable(starts, gaps, codes, scales)
    )
    tables: list[Shared] = [
        {"codes": own, "scales": scale} for own, scale in zip(codes, scales, strict=True)
    ]
    return {"starts": starts, "gaps": gaps}, tables


def _typical(weights: NDArray[np.float32]) -> float:
    """Return the size of a typical weight: in these units, weights of all tables count alike."""
    present = weights[weights != 0].astype(np.float64)
    return float(np.sqrt((present**2).mean())) if len(present) else 1.0


def _most_important(
    indptr: Array, ids: Array, importance: NDArray[np.float32], slots: int
) -> NDArray[np.bool_]:
    """Choose as many pairs as fit; a long way to the next pair takes several slots."""
    order, count = np.argsort(-importance, kind="stable"), slots  # ties go to the lower item
    while True:
        kept = np.zeros(len(ids), np.bool_)
        kept[order[:count]] = True
        missing = slots_of(indptr, ids, kept) - slots
        if missing <= 0:
            return kept
        count -= int(missing)


def weights_of(table: PairTable, item: int) -> Scores:
    """Return the weight from an item to every item."""
    first, everything = np.array([item], np.int32), np.arange(len(table.scales), dtype=np.int32)
    return np.asarray(packed_weights(first, everything, table)[0])


# ---------------------------------------------------------------- the models of several experts

Tree = Mapping[str, Any]
"""Models of experts by name, and the index of their tables."""


def empty_models(experts: Sequence[Expert], view: TrainView, neighbours: int) -> dict[str, Any]:
    """Return experts without counts, whose tables hold so many pairs per item."""
    pairs, tree = capacity(view.n_items, neighbours), dict[str, Any]()
    for expert in experts:
        tables = {name: empty_table(view.n_items, pairs) for name in expert.tables}
        tree[expert.name] = {**expert.init(view), **tables}
    has_tables = any(expert.tables for expert in experts)
    return {**tree, PAIRS: empty_index(view.n_items, pairs if has_tables else 0)}


def ready_models(
    experts: Sequence[Expert], tree: Tree, view: TrainView | None
) -> list[tuple[Expert, Model]]:
    """Return models to score with: tables by their index, and what the catalogue gives."""
    found: list[tuple[Expert, Model]] = []
    for expert in (each for each in experts if each.name in tree):
        model, public = tree[expert.name], {} if view is None else expert.public(view)
        tables = {name: PairTable(**tree[PAIRS], **model[name]) for name in expert.tables}
        found.append((expert, {**model, **public, **tables}))
    return found


def long_models(experts: Sequence[Expert], tree: Tree) -> list[tuple[Expert, Model]]:
    """Return models to learn, tables in the long form of the counting so far."""
    n_items, so_far = len(tree[PAIRS]["starts"]) - 1, tree.get(LONG, {})
    return [
        (expert, {**tree[expert.name], **(so_far.get(expert.name) or long_tables(expert, n_items))})
        for expert in experts
        if expert.name in tree
    ]


def long_tables(expert: Expert, n_items: int) -> dict[str, Shared]:
    """Return the tables of an expert in long form, without weights."""
    sizes = n_items, LONGEST, expert.config.dense_items
    return {name: pair_weights.empty_table(*sizes) for name in expert.tables}


def counted_models(
    before: Sequence[tuple[Expert, Model]], learnt: Mapping[str, Model], tree: Tree, last: bool
) -> dict[str, Any]:
    """Return experts after a round of counting; tables are packed after the last one.

    ``before`` is what `long_models` returned, and ``learnt`` what became of some of it.
    """
    models = {expert.name: learnt.get(expert.name, model) for expert, model in before}
    own, long = dict[str, Any](), dict[str, dict[str, Shared]]()
    for expert, _ in before:
        model = models[expert.name]
        arrays = {name: array for name, array in model.items() if name not in expert.tables}
        own[expert.name] = {**tree[expert.name], **arrays}
        long[expert.name] = {name: model[name] for name in expert.tables}
    if not last:
        return {**own, PAIRS: tree[PAIRS], LONG: long}
    names = [(name, table) for name, tables in long.items() for table in tables]
    if not names:
        return {**own, PAIRS: tree[PAIRS]}
    everything = np.ones(len(tree[PAIRS]["starts"]) - 1, np.float32)
    shares = own.get("popularity", {}).get("shares", everything)
    index, tables = packed(tree[PAIRS], [long[name][table] for name, table in names], shares)
    for (name, table), packed_table in zip(names, tables, strict=True):
        own[name][table] = packed_table
    return {**own, PAIRS: index}


# ---------------------------------------------------------------- kernels

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
