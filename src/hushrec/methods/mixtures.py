"""Several averages in place of one model, of which each client has its own mix (LIPM)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregate import ClientRows, Update
from hushrec.clients import Ragged


def mixed(
    arrays: NDArray[np.float32], shares: NDArray[np.float32] | None, clients: int
) -> NDArray[np.float32]:
    """Return each silo's mix of averages, or for everybody the one that there is."""
    if shares is None:
        return np.repeat(arrays[None], clients, 0)
    out = np.zeros((clients, *arrays.shape[1:]), np.float32)
    for k, average in enumerate(arrays):
        out += shares[:, k].reshape(-1, *[1] * average.ndim) * average
    return out


def mixed_rows(
    table: NDArray[np.float32],
    shares: NDArray[np.float32] | None,
    ids: NDArray[Any],
    owner: NDArray[np.int64],
) -> NDArray[np.float32]:
    """Return rows of the table, each as its silo's mix of averages has it."""
    if shares is None:
        rows: NDArray[np.float32] = table[ids]
        return rows
    out = np.zeros((len(ids), table.shape[-1]), np.float32)
    for k, average in enumerate(table):
        out += shares[owner, k][:, None] * average[ids]
    return out


def shared_out(
    touched: Ragged,
    deltas: NDArray[np.float32],
    network: NDArray[np.float32],
    shares: NDArray[np.float32],
) -> Update:
    """Return each silo's delta, share by share, for every average."""
    rows = {
        f"items{k}": ClientRows(
            touched.indptr,
            touched.values,
            deltas * np.repeat(shares[:, k], touched.lengths)[:, None],
        )
        for k in range(shares.shape[1])
    }
    dense = {"network": shares[:, :, None] * network[:, None], "shares": shares}
    return Update(len(shares), rows, dense)
