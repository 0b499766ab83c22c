"""What an upload looks like: names, widths and sizes, which follow from public things alone.

What clients upload, and what a round's uploads come to.

Rows with 32-bit ids are rows of a table of the catalogue's length, and so is their sum. Rows with
64-bit ids are keys of a space too large for a table, pairs of items for one; their sum holds the
keys that came, sorted, and takes memory for the distinct ones only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hushrec import kernels
from hushrec.errors import ConfigError

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class UploadShape:
    """What every client of a method uploads, written out whole; the same for all data."""

    n_rows: int
    tables: Mapping[str, int]
    """Width of each table of ``n_rows`` rows."""
    dense: Mapping[str, tuple[int, ...]]
    spaces: Mapping[str, tuple[int | None, int]] = field(default_factory=dict)
    """Number of keys, and width, of each space of keys; None for an open one."""

    @classmethod
    def of(cls, nobody: Update, n_rows: int) -> UploadShape:
        """Read the shape from the update of a stack of no clients."""
        if nobody.rows.keys() & nobody.dense.keys():
            raise ConfigError("a table and a dense array of an upload need different names")
        return cls(
            n_rows,
            {name: rows.rows.shape[1] for name, rows in nobody.rows.items() if not rows.keyed},
            {name: array.shape[1:] for name, array in nobody.dense.items()},
            {
                name: (rows.space, rows.rows.shape[1])
                for name, rows in nobody.rows.items()
                if rows.keyed
            },
        )

    def require_closed(self) -> UploadShape:
        """Refuse what noise cannot cover; return the shape."""
        for name, (keys, _) in self.spaces.items():
            if keys is None:
                raise ConfigError(
                    f"'{name}' has no row for every item but keys of an open space, and noise "
                    "cannot cover every key: use another method, or privacy.mode = none"
                )
        return self

    @property
    def whole(self) -> dict[str, tuple[int, ...]]:
        """Shape of every table, closed space and dense array of one upload written out whole."""
        tables = {name: (self.n_rows, width) for name, width in self.tables.items()}
        spaces = {name: (keys or 0, width) for name, (keys, width) in self.spaces.items()}
        return {**tables, **spaces, **self.dense}

    @property
    def entries(self) -> int:
        """Count the numbers of one upload; of an open space, one row."""
        sizes = [int(np.prod(shape)) for shape in self.dense.values()]
        sizes += [(keys or 1) * width for keys, width in self.spaces.values()]
        return self.n_rows * sum(self.tables.values()) + sum(sizes)

    @property
    def parts(self) -> int:
        """Count what `RowClip` bounds one by one: rows of tables and spaces, and dense arrays."""
        keys = sum(keys or 1 for keys, _ in self.spaces.values())
        return self.n_rows * len(self.tables) + len(self.dense) + keys

    @property
    def nbytes(self) -> int:
        """Bytes of one upload written out whole, as float32: its size tells nothing."""
        return 4 * self.entries


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
    zeroed_out: int = 0
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
