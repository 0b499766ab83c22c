"""Data in memory as a `Table`: data frames, Arrow tables, sparse matrices, dicts of columns.

Frames are recognised by their attributes, so no library of frames is imported: they have column
names (``columns`` or ``column_names``) and ``frame[name]``. Objects with nothing but Arrow's stream
interface are read by pyarrow. The rows are then read as those of a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.data.tables import ROWS, Block, Table
from hushrec.errors import DataError, MissingExtraError

NAME = "frame"
"""Name of data that is given none."""


def frame_table(frame: object, name: str = NAME) -> Table:
    """Make a table of something with named columns, or of a sparse matrix [users, items]."""
    columns = _columns(frame, name)
    lengths = {len(column) for column in columns.values()}
    if len(lengths) != 1:
        raise DataError(f"{name}: its columns differ in length")
    (rows,) = lengths
    if not rows:
        raise DataError(f"{name}: no rows")
    arrays, names = list(columns.values()), [str(column) for column in columns]

    def blocks(wanted: Sequence[int]) -> Iterator[Block]:
        for start in range(0, rows, ROWS):
            yield [
                _as_text(arrays[k][start : start + ROWS], f"{name}, column '{names[k]}'")
                for k in wanted
            ]

    return Table(Path(name), names, len(names), rows, blocks, lambda row: f"row {row}")


def _columns(frame: Any, name: str) -> dict[Any, NDArray[Any]]:
    if hasattr(frame, "tocoo"):
        matrix = frame.tocoo()
        if matrix.ndim != 2:
            raise DataError(f"{name}: a sparse matrix has a row per user and a column per item")
        return {"user": matrix.row, "item": matrix.col, "value": matrix.data}
    if isinstance(frame, Mapping):
        return {column: _array(entries, name, column) for column, entries in frame.items()}
    if hasattr(frame, "collect"):
        raise DataError(f"{name}: this frame is lazy; give what its collect() returns")
    named = getattr(frame, "column_names", getattr(frame, "columns", None))
    if named is None or callable(named):
        frame = _from_arrow_stream(frame, name)
        named = frame.column_names
    return {column: _array(frame[column], name, column) for column in named}


def _from_arrow_stream(frame: Any, name: str) -> Any:
    if not hasattr(frame, "__arrow_c_stream__"):
        raise DataError(
            f"{name}: a {type(frame).__name__} is no data; give a file, a name, a data frame, an "
            "Arrow table, a sparse matrix, or a dict of columns"
        )
    try:
        import pyarrow
    except ImportError:
        raise MissingExtraError("an Arrow stream", "parquet") from None
    return pyarrow.table(frame)


def _array(entries: Any, name: str, column: object) -> NDArray[Any]:
    array = np.asarray(entries.to_numpy() if hasattr(entries, "to_numpy") else entries)
    if array.ndim != 1:
        raise DataError(f"{name}, column '{column}': one entry is expected in each row")
    return array


def _as_text(entries: NDArray[Any], where: str) -> list[str]:
    """Write entries as a file would have them; missing ones are empty."""
    if entries.dtype.kind == "M":
        micro = entries.astype("datetime64[us]")
        entries = np.where(np.isnat(micro), np.nan, micro.astype(np.int64) / 1e6)
    return [
        entry.strip() if type(entry) is str else _entry(entry, where) for entry in entries.tolist()
    ]


def _entry(entry: Any, where: str) -> str:
    if isinstance(entry, str | bytes):
        return (entry.decode("utf-8", "replace") if isinstance(entry, bytes) else entry).strip()
    if hasattr(entry, "__len__"):
        raise DataError(f"{where}: a {type(entry).__name__} where one entry is expected")
    if entry is None or type(entry).__name__ in ("NAType", "NaTType"):
        return ""
    if isinstance(entry, float) and math.isnan(entry):
        return ""
    if isinstance(entry, bool) or (isinstance(entry, float) and entry.is_integer()):
        return str(int(entry))  # whole numbers in a column with gaps are floats
    return entry.isoformat() if isinstance(entry, date) else str(entry)
