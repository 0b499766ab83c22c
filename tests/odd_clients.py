"""Odd populations of clients, for the tests of kernels and of training."""

import numpy as np

from hushrec.data.views import Ragged, TrainView

N_ITEMS = 25


def ragged(rows, dtype=np.int32):
    flat = [value for row in rows for value in row]
    return Ragged(np.cumsum([0, *map(len, rows)]), np.array(flat, dtype))


def population(repeats=False):
    """Seven devices: one positive, every item, all but one, and ordinary ones."""
    rng = np.random.default_rng(5)
    rows = [
        [3],
        list(range(N_ITEMS)),
        [i for i in range(N_ITEMS) if i != 11],
        *(rng.permutation(N_ITEMS)[:n].tolist() for n in (2, 5, 9, 14)),
    ]
    if repeats:
        rows[4] = rows[4] + rows[4][:3] + rows[4][:1]
        rows[0] = [3, 3, 3]
    pos = ragged(rows)
    return TrainView(
        users=np.array([0, 4, 5, 6, 17, 900, 2**31 - 1], np.int32),
        n_items=N_ITEMS,
        positives=pos,
        times=Ragged(pos.indptr, np.arange(len(pos.values))),
        values=Ragged(pos.indptr, np.ones(len(pos.values), np.float32)),
    )
