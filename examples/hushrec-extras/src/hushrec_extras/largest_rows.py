"""Largest rows: a device sends only the rows of its upload that changed most.

Half of the rows of every table travel. Under noise this acts before clipping, so the guarantee is
that of the noise, whatever was left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hushrec.extend import ClientRows, Mechanism, SecretRound, TrainView, Update, UploadShape


@dataclass(frozen=True)
class LargestRows(Mechanism):
    """Keep the larger half of every client's rows."""

    shape: UploadShape

    def protect(self, update: Update, view: TrainView, secret: SecretRound) -> Update:
        """Leave the smaller half out, each client by itself."""
        return replace(update, rows={name: _larger(rows) for name, rows in update.rows.items()})


def _larger(rows: ClientRows) -> ClientRows:
    sizes = np.abs(rows.rows).sum(1)
    kept = []
    for start, end in zip(rows.indptr[:-1], rows.indptr[1:], strict=True):
        by_size = np.argsort(-sizes[start:end], kind="stable")[: -(-(end - start) // 2)]
        kept.append(start + np.sort(by_size))
    places = np.concatenate([np.zeros(0, np.int64), *kept])
    indptr = np.cumsum([0, *map(len, kept)])
    return replace(rows, indptr=indptr, ids=rows.ids[places], rows=rows.rows[places])
