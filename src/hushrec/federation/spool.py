"""The uploaded tables of a cohort, for a server that relates clients by them.

Tables are spooled by blocks of items, in memory or on file as the clients' own tables are. The
server holds one table per client of the cohort, for one round.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import Update
from hushrec.methods.base import Array
from hushrec.methods.relations import Relates

BLOCK = 128
"""Items per block: a block of 6,000 tables of width 32 takes 100 MB."""
MAPPED_BYTES = 128 * 2**20
"""Bytes of spooled tables on file that are written before their pages are released."""


class Spool:
    """The uploaded tables of a cohort, by blocks of items."""

    def __init__(
        self, method: Relates, clients: int, shape: tuple[int, ...], folder: Path | None = None
    ) -> None:
        """Keep tables of this shape in memory, or in files of ``folder``."""
        self.method, self.clients, self.folder = method, clients, folder
        self.bounds = [(a, min(a + BLOCK, shape[0])) for a in range(0, shape[0], BLOCK)]
        self.blocks: list[Array] = []
        for first, last in self.bounds:
            size = (clients, last - first, *shape[1:])
            if folder is None or not clients:
                self.blocks.append(np.empty(size, np.float32))
            else:
                file = folder / f"uploads-{first}"
                self.blocks.append(np.memmap(file, np.float32, "w+", shape=size))
        self._written, self._counting = 0, threading.Lock()

    def __iter__(self) -> Iterator[Array]:
        """Yield the blocks, and release the pages of each after its use."""
        for block in self.blocks:
            yield block
            _release(block)

    def put(self, places: NDArray[np.int64], update: Update) -> None:
        """Store the uploads of the clients at these places of the cohort."""
        tables = update.dense[self.method.uploaded]
        for (first, last), block in zip(self.bounds, self.blocks, strict=True):
            block[places] = tables[:, first:last]
        self._count(tables)

    def relate(self) -> Update:
        """Replace the uploads by the answers; return the answers' sum as one upload of all."""
        if not self.clients:
            return Update(0)
        self.method.relate(self)
        total = np.concatenate([block.sum(axis=0, dtype=np.float64) for block in self])
        return Update(self.clients, dense={self.method.uploaded: total[None]})

    def take(self, places: NDArray[np.int64]) -> Array:
        """Return the answers to the clients at these places."""
        tables = np.concatenate([block[places] for block in self.blocks], axis=1)
        self._count(tables)
        return tables

    def close(self) -> None:
        """Remove the files."""
        for (first, _), block in zip(self.bounds, self.blocks, strict=True):
            if isinstance(block, np.memmap) and self.folder is not None:
                (self.folder / f"uploads-{first}").unlink()
        self.blocks.clear()

    def _count(self, tables: Array) -> None:
        with self._counting:
            self._written += tables.nbytes
            if self._written > MAPPED_BYTES:
                self._written = 0
                for block in self.blocks:
                    _release(block)


def _release(block: Array) -> None:
    """Release the memory pages of a block on file; its contents stay there."""
    if isinstance(block, np.memmap):
        block._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
