"""Client updates, their shape, and the total of a round.

An upload holds sparse rows of tables with one row per item (`ClientRows`), sparse rows under keys
of a declared space, for example pairs of items (`KeyedRows`), and dense arrays. The sum over
clients of keyed rows takes memory for the distinct keys only.

The shape of an upload (`UploadShape`) follows from public facts, never from a client's data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hushrec import kernels
from hushrec.errors import ConfigError


@dataclass(frozen=True)
class UploadShape:
    """Names and sizes of the arrays that every client uploads; the same for all data."""

    n_rows: int
    tables: Mapping[str, int]
    """Width of each table of ``n_rows`` rows."""
    dense: Mapping[str, tuple[int, ...]]
    spaces: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Number of keys, and width, of the rows of each key space."""

    @classmethod
    def of(cls, update: Update, n_rows: int) -> UploadShape:
        """Read the shape from an update; that of a batch of no clients will do."""
        if update.rows.keys() & update.dense.keys():
            raise ConfigError("a table and a dense array of an upload need different names")
        tables, spaces = {}, {}
        for name, rows in update.rows.items():
            width = rows.rows.shape[1]
            if isinstance(rows, KeyedRows):
                spaces[name] = rows.space, width
            else:
                tables[name] = width
        dense = {name: array.shape[1:] for name, array in update.dense.items()}
        return cls(n_rows, tables, dense, spaces)

    @property
    def sparse(self) -> dict[str, tuple[int, int]]:
        """Number of rows, and width, of every table and key space."""
        tables = {name: (self.n_rows, width) for name, width in self.tables.items()}
        return {**tables, **self.spaces}

    @property
    def whole(self) -> dict[str, tuple[int, ...]]:
        """Shape of every table, key space and dense array of one upload in dense form."""
        return {**self.sparse, **self.dense}

    @property
    def entries(self) -> int:
        """Count the numbers of one upload in dense form."""
        return sum(math.prod(shape) for shape in self.whole.values())

    @property
    def parts(self) -> int:
        """Count what `RowClip` bounds one by one: rows of tables and spaces, and dense arrays."""
        return sum(count for count, _ in self.sparse.values()) + len(self.dense)

    @property
    def nbytes(self) -> int:
        """Bytes of one upload in dense form, as float32."""
        return 4 * self.entries


OWN_WEIGHT = "weight"
"""A dense array of this name says how much each client counts: its weight, of 0 to 1, less a half.
Everything else in the upload was multiplied by the weight. Clipping bounds what there was before,
so that it leaves clients' weights as they are; an upload of zeros counts half."""


@dataclass(frozen=True)
class ClientRows:
    """Rows of a table, ragged by client: client c owns entries ``indptr[c]`` to ``indptr[c+1]``."""

    id_dtype: ClassVar[type[np.integer[Any]]] = np.int32

    indptr: NDArray[np.int64]
    ids: NDArray[np.int32] | NDArray[np.int64]
    """Row numbers of the table, int32; the keys of `KeyedRows` are int64."""
    rows: NDArray[np.float32]
    """[entries, width]"""
    base: NDArray[np.float32] | None = None
    """Where given, what is meant are the rows' differences from this table's. The sum takes them as
    it goes; `differences` writes them out."""

    def __post_init__(self) -> None:
        """Refuse ids of the wrong width: keys need a declared space."""
        if self.ids.dtype != self.id_dtype:
            raise TypeError(
                f"ids of {type(self).__name__} are {np.dtype(self.id_dtype)}, not "
                f"{self.ids.dtype}: row numbers of a table are int32 (ClientRows), keys of a "
                "declared space int64 (KeyedRows)"
            )

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


@dataclass(frozen=True)
class KeyedRows(ClientRows):
    """Rows under the keys 0 to ``space - 1``, ragged by client.

    A secure sum and noise cover every key, so the number of keys is public and always declared.
    """

    id_dtype: ClassVar[type[np.integer[Any]]] = np.int64

    space: int = field(kw_only=True)
    """Number of keys that exist: n² for pairs of n items, 1 for one row per client."""


@dataclass(frozen=True)
class Update:
    """What a batch of clients uploads: sparse table deltas and dense deltas, [clients, …]."""

    clients: int
    rows: Mapping[str, ClientRows] = field(default_factory=dict)
    dense: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    whole: UploadShape | None = None
    """Where given, each upload is sent in dense form, in this shape, so that its size tells
    nothing; here, only its rows that are not zero are kept, whose exact sum is the same."""
    zeroed_out: int = 0
    """Uploads that held NaN or infinite values, and were zeroed out."""

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
    """[keys, width] for every key of a space."""
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
