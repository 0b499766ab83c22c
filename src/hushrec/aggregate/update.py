"""What clients upload, and what a round's uploads come to.

Rows with 32-bit ids are rows of a table of the catalogue's length, and so is their sum. Rows with
64-bit ids are keys of a space too large for a table, pairs of items for one; their sum holds the
keys that came, sorted, and takes memory for the distinct ones only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec import kernels
from hushrec.aggregate.shape import UploadShape

OWN_WEIGHT = "weight"
"""A dense array of this name says how much each client counts: its weight, of 0 to 1, less a half.
Everything else in the upload was multiplied by the weight. Clipping bounds what there was before,
so that it leaves clients' weights as they are; an upload of zeros counts half."""


@dataclass(frozen=True)
class ClientRows:
    """Rows of a table, ragged by client: client c owns entries ``indptr[c]`` to ``indptr[c+1]``."""

    indptr: NDArray[np.int64]
    ids: NDArray[np.int32] | NDArray[np.int64]
    """Row numbers of a table as int32, or keys of an open space as int64."""
    rows: NDArray[np.float32]
    """[entries, width]"""
    base: NDArray[np.float32] | None = None
    """Where given, what is meant are the rows' differences from this table's. The sum takes them as
    it goes; `differences` writes them out."""
    space: int | None = None
    """Number of keys that exist, where keys are of a closed space, which noise can cover."""

    def differences(self) -> ClientRows:
        """Return the rows with their differences written out, as they travel."""
        if self.base is None:
            return self
        written = kernels.row_differences(self.rows, self.ids, self.base)
        return ClientRows(self.indptr, self.ids, written)

    @property
    def nbytes(self) -> int:
        """Size of ids and rows on the wire."""
        return self.ids.nbytes + self.rows.nbytes

    @property
    def keyed(self) -> bool:
        """True if the ids are keys and not the rows of a table."""
        return self.ids.dtype == np.int64


@dataclass(frozen=True)
class Update:
    """What a stack of clients uploads: sparse table deltas and dense deltas, [clients, …]."""

    clients: int
    rows: Mapping[str, ClientRows] = field(default_factory=dict)
    dense: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    whole: UploadShape | None = None
    """Where given, each upload travels whole, in this shape, though only its rows that are not zero
    are written out here: a sum of whole numbers is the same, and what is sent tells nothing by its
    size."""
    emptied: int = 0
    """Uploads that held a number which is none, and count as zero."""

    @property
    def nbytes(self) -> int:
        """Bytes of all the clients' messages together."""
        if self.whole is not None:
            return self.clients * self.whole.nbytes
        sparse = sum(stack.nbytes for stack in self.rows.values())
        return sparse + sum(array.nbytes for array in self.dense.values())


@dataclass(frozen=True)
class Steps:
    """Whole steps of the exact sum for every entry of some arrays: noise, which is no upload."""

    tables: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    spaces: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    """[keys, width] for every key of a closed space"""
    dense: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)

    def plus(self, other: Steps) -> Steps:
        """Return the sum of both, which are of the same arrays."""
        return Steps(
            *(
                {name: array + theirs[name] for name, array in mine.items()}
                for mine, theirs in (
                    (self.tables, other.tables),
                    (self.spaces, other.spaces),
                    (self.dense, other.dense),
                )
            )
        )


@dataclass(frozen=True)
class Total:
    """The sum over the clients of a round, as numbers."""

    clients: float
    """What a mean divides by: the number of uploads or, where that number could tell that somebody
    was there, the expected one."""
    rows: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]]
    """For each table: the touched row ids, ascending, and the sum of their deltas."""
    dense: Mapping[str, NDArray[np.float64]]
    noise_std: float = 0.0
    """Standard deviation of the Gaussian noise that every entry carries; public."""
