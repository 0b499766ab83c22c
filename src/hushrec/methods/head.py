"""The first round of what trains under noise: which items are popular enough to be seen through it.

A device uploads its items, scaled to norm 1. The server keeps the *head*: items so popular that two
of them meet by chance often enough to stand out of the noise of the rounds to come,

    count² / (all counts) > visible · (deviation of that noise).

What is asked for later is asked for the head alone, so noise covers nothing that would be noise
only, and a device's bounded upload is not spent on it. The head is a function of noised counts.
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


def find_head(total: Total, n_items: int, noise_std: float, visible: float, most: int) -> Shared:
    """Return the head and every item's share of the counts; the deviation is of rounds to come."""
    counts = np.zeros(n_items)
    if COUNTS in total.rows:
        ids, summed = total.rows[COUNTS]
        counts[ids] = np.maximum(summed[:, 0], 0.0)
    bound = np.sqrt(visible * noise_std * counts.sum())
    size = np.clip((counts > bound).sum(), 2, most)  # two items make a pair
    head = np.zeros(n_items, np.bool_)
    head[np.argsort(-counts, kind="stable")[:size]] = True
    return {"head": head, "shares": (counts / max(counts.sum(), 1e-12)).astype(np.float32)}


def only(items: Ragged, kept: NDArray[np.bool_]) -> Ragged:
    """Return each client's items that are kept, in their order."""
    mine = kept[items.values]
    ends = np.concatenate([[0], np.cumsum(mine)])
    return Ragged(ends[items.indptr], items.values[mine])
