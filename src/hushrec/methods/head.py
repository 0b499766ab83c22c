"""The first round of what trains under noise: which items are popular enough to be seen through it.

A device uploads its items, scaled to norm 1. The server keeps the *head*, the most popular items.
What is asked for later is asked for the head alone: an item outside it is never found, and each one
inside thins out what is known of all others, as their uploads are bounded together and noise is
not. So the head has the size h with the greatest

    log(share of all counts that it covers) - price · h · (deviation of noise to come) / clients,

which puts an item in if its share of what is covered exceeds the price of noise per device. What is
found falls about as exp(-price · h · noise / clients) with the size of the head, whatever epsilon
(`experiments/privacy-utility/tuning.md`). The head is a function of noised counts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregate import ClientRows, Total, Update
from hushrec.clients import Ragged, TrainView
from hushrec.methods.base import Shared
from hushrec.methods.popularity import distinct_items

COUNTS = "counts"


def count_items(view: TrainView) -> Update:
    """Upload each client's items, scaled to norm 1."""
    items = distinct_items(view.positives)
    each = np.repeat(np.maximum(items.lengths, 1) ** -0.5, items.lengths)
    uploads = ClientRows(items.indptr, items.values, each[:, None].astype(np.float32))
    return Update(len(view), rows={COUNTS: uploads})


def find_head(total: Total, n_items: int, noise_std: float, price: float, most: int) -> Shared:
    """Return the head and every item's share of the counts; the deviation is of rounds to come."""
    counts = np.zeros(n_items)
    if COUNTS in total.rows:
        ids, summed = total.rows[COUNTS]
        counts[ids] = np.maximum(summed[:, 0], 0.0)
    shares = counts / max(counts.sum(), 1e-12)
    by_count = np.argsort(-counts, kind="stable")
    covered = np.log(np.maximum(np.cumsum(shares[by_count]), 1e-12))
    cost = price * noise_std / max(total.clients, 1) * np.arange(1, n_items + 1)
    size = np.clip(np.argmax(covered - cost) + 1, 2, most)  # two items make a pair
    head = np.zeros(n_items, np.bool_)
    head[by_count[:size]] = True
    return {"head": head, "shares": shares.astype(np.float32)}


def only(items: Ragged, kept: NDArray[np.bool_]) -> Ragged:
    """Return each client's items that are kept, in their order."""
    mine = kept[items.values]
    ends = np.concatenate([[0], np.cumsum(mine)])
    return Ragged(ends[items.indptr], items.values[mine])
