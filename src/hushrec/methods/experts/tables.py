"""Tables of item-to-item weights: sums over pairs as a dense head, and what is kept of a solution.

As in `methods.item_pairs`: up to ``dense_items`` items a system is solved as it is, beyond for the
most popular ones, and other pairs weigh what their own sums say. So nothing takes memory for all
pairs of a large catalogue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.kernels import pairs as pair_kernels
from hushrec.memory import require_memory
from hushrec.methods.base import Shared
from hushrec.methods.experts.base import ExpertsConfig
from hushrec.methods.item_pairs import TABLE_ENTRIES

Array = NDArray[Any]


@dataclass(frozen=True)
class Head:
    """Sums over pairs: those of the most popular items as a square block, the others as keys."""

    n_items: int
    counts: NDArray[np.float64]
    """The sums of (i, i): how often each item was met."""
    items: NDArray[np.int64]
    """The most popular items, in the catalogue's order."""
    place: NDArray[np.int64]
    """Where each item is among them, or -1."""
    block: NDArray[np.float64]
    outside: tuple[NDArray[np.int64], NDArray[np.float64]]
    """Ascending keys and sums of all pairs of two items that are not both in the head."""

    @classmethod
    def of(
        cls, keys: NDArray[np.int64], sums: NDArray[np.float64], n_items: int, most: int
    ) -> Head:
        """Put sums over pairs in order; ties of popularity go to the lower item."""
        first, second = keys // n_items, keys % n_items
        counts = np.zeros(n_items)
        counts[first[first == second]] = np.maximum(sums[first == second], 0.0)
        by_count = np.argsort(-counts, kind="stable")[:most]
        items = np.sort(by_count[counts[by_count] > 0])
        place = np.full(n_items, -1)
        place[items] = np.arange(len(items))
        block = np.zeros((len(items), len(items)))
        pair_kernels.fill_head_block(block, place, keys, sums, n_items)
        far = (first != second) & ((place[first] < 0) | (place[second] < 0))
        return cls(n_items, counts, items, place, block, (keys[far], sums[far]))


def powered(block: NDArray[np.float64], power: float) -> Array:
    """Take sums to a power; in single precision, which is enough here and solves twice as fast."""
    return (np.maximum(block, 0.0) ** power).astype(np.float32)


def empty_table(n_items: int, config: ExpertsConfig) -> Shared:
    """Return a table of no weights; what is kept per item follows from the catalogue's size."""
    head = min(config.dense_items, n_items)
    require_memory(
        4 * 8 * head**2, f"a system of dense_items={head} items", "a smaller dense_items"
    )
    kept = max(1, min(config.neighbours, n_items, TABLE_ENTRIES // n_items))
    return {
        "neighbours": np.tile(np.arange(n_items, dtype=np.int32)[:, None], kept),
        "weights": np.zeros((n_items, kept), np.float32),
    }


def kept_table(
    table: Shared, head: Head, weights: Array, keys: NDArray[np.int64], values: Array
) -> Shared:
    """Keep each item's strongest weights, of the head's solution and of the pairs outside it."""
    kept = {name: np.zeros_like(table[name]) for name in ("neighbours", "weights")}
    np.fill_diagonal(weights, 0.0)
    pair_kernels.keep_strongest(
        weights,
        head.items,
        head.place,
        keys,
        values,
        head.n_items,
        kept["neighbours"],
        kept["weights"],
    )
    return kept


def rest(
    keys: NDArray[np.int64], sums: NDArray[np.float64], n_items: int
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the pairs among these sums, theirs, and the counts of the items that come first."""
    alone = keys // n_items == keys % n_items
    counts = np.zeros(n_items)
    counts[keys[alone] // n_items] = np.maximum(sums[alone], 0.0)
    pairs = keys[~alone]
    return pairs, sums[~alone], counts[pairs // n_items]


def extended_table(table: Shared, keys: NDArray[np.int64], values: Array) -> Shared:
    """Keep each item's strongest weights of those it has and of further pairs."""
    kept = {name: table[name].copy() for name in ("neighbours", "weights")}
    pair_kernels.add_to_strongest(keys, values, len(kept["weights"]), **kept)
    return kept


def strongest(table: Shared, keys: NDArray[np.int64], values: Array, n_items: int) -> Shared:
    """Keep each item's largest sums as they are, itself left out."""
    kept = {name: np.zeros_like(table[name]) for name in ("neighbours", "weights")}
    others = keys // n_items != keys % n_items
    nobody, nowhere = np.zeros(0, np.int64), np.full(n_items, -1)
    pair_kernels.keep_strongest(
        np.zeros((0, 0)),
        nobody,
        nowhere,
        keys[others],
        values[others],
        n_items,
        kept["neighbours"],
        kept["weights"],
    )
    return kept
