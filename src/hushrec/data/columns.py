"""Columns of text as numbers, and data in memory as columns.

Ids, values, times and titles are converted block by block. Errors are raised when all rows were
read, with file, line and column, so they do not depend on the size of the blocks.

Data frames, Arrow tables, sparse matrices and dicts of columns are read as the rows of a file are.
Frames are recognised by their attributes, so no library of frames is imported: they have column
names (``columns`` or ``column_names``) and ``frame[name]``. Objects with nothing but Arrow's stream
interface are read by pyarrow.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.data.interactions import IntArray, StrArray, id_order
from hushrec.data.tables import ROWS, Block, Table
from hushrec.data.text import is_number
from hushrec.errors import DataError
from hushrec.io.codec import imported

LONGEST_ID = 1_000
"""Characters; numpy stores every id of a vocabulary as wide as the longest."""
MOST_ID_BYTES = 2 << 30
"""Of a vocabulary in memory."""
LONGEST_TITLE = 300
WHOLE = 2.0**53
"""Beyond this, a floating-point number of seconds is not exact."""


class Ids:
    """A column of user or item ids."""

    def __init__(self, table: Table, column: int) -> None:
        self.table, self.column = table, column
        self._codes: list[IntArray] = []
        self._numbers: defaultdict[str, int] = defaultdict()
        self._numbers.default_factory = self._numbers.__len__
        self._before = 0

    def take(self, entries: list[str]) -> None:
        """Convert the next rows."""
        self._before = len(self._numbers)
        codes = np.fromiter(map(self._numbers.__getitem__, entries), np.int32, len(entries))
        self._codes.append(codes)

    def new_rows(self) -> list[int]:
        """Return the rows of the last block in which an id came for the first time."""
        codes, rows = np.unique(self._codes[-1], return_index=True)
        return list(map(int, rows[codes >= self._before]))

    def result(self) -> tuple[IntArray, StrArray]:
        """Return codes and vocabulary, numbered in the order of the ids."""
        codes = np.concatenate(self._codes)
        longest = "" if "" in self._numbers else max(self._numbers, key=len)
        row = int((codes == self._numbers[longest]).argmax())
        where = f"{self.table.at(row, self.column)}:"
        if not longest:
            raise DataError(f"{where} empty id")
        if len(longest) > LONGEST_ID:
            raise DataError(
                f"{where} an id of {len(longest):,} characters; at most {LONGEST_ID:,} are accepted"
            )
        if len(longest) * len(self._numbers) * np.dtype("U1").itemsize > MOST_ID_BYTES:
            raise DataError(
                f"{where} an id of {len(longest):,} characters among {len(self._numbers):,}, which "
                "are all stored as wide; shorten the longest ids"
            )
        ids = np.array(list(self._numbers), dtype=np.str_)
        self.order = id_order(ids)
        return np.argsort(self.order).astype(np.int32)[codes], ids[self.order]


class Titles:
    """A column of item titles; the first row of an item has its title."""

    def __init__(self, items: Ids, column: int) -> None:
        self._items, self.column = items, column
        self._titles: list[str] = []

    def take(self, entries: list[str]) -> None:
        """Take the titles of the next rows, after their items."""
        self._titles += [entries[row][:LONGEST_TITLE] for row in self._items.new_rows()]

    def result(self) -> StrArray:
        """Return the titles in the order of the items, whose `result` is called before."""
        return np.array(self._titles, dtype=np.str_)[self._items.order]


class Values:
    """A column of ratings, weights or counts."""

    def __init__(self, table: Table, column: int) -> None:
        self.table, self.column = table, column
        self._values: list[NDArray[np.float64]] = []

    def take(self, entries: list[str]) -> None:
        """Convert the next rows."""
        self._values.append(_parsed(float, entries))

    def result(self) -> NDArray[np.float32]:
        """Return the values."""
        with np.errstate(over="ignore"):
            narrow = np.concatenate(self._values).astype(np.float32)
        finite = np.isfinite(narrow)
        if not finite.all():
            entries = enumerate(self.table.entries(self.column))
            no_number = next((row for row, entry in entries if not is_number(entry)), None)
            if no_number is not None:
                raise self.table.not_a("a number", no_number, self.column)
            raise self.table.not_a("a finite number", int(finite.argmin()), self.column)
        return narrow


class Times:
    """A column of times: whole numbers as they are; else seconds, from numbers or ISO dates."""

    def __init__(self, table: Table, column: int) -> None:
        self.table, self.column = table, column
        self._blocks: list[NDArray[Any]] = []
        self._parse: Callable[[str], float] = int

    def take(self, entries: list[str]) -> None:
        """Convert the next rows."""
        if self._parse is int:
            try:
                self._blocks.append(np.fromiter(map(int, entries), np.int64, len(entries)))
                return
            except (ValueError, OverflowError):
                # All rows are seconds, those that came before too.
                self._parse = float if self._blocks or is_number(entries[0]) else _iso_seconds
        self._blocks.append(_parsed(self._parse, entries))

    def numbers(self) -> NDArray[Any]:
        """Return the numbers as they are in the column; dates are seconds, others NaN."""
        return np.concatenate(self._blocks)

    def result(self) -> NDArray[np.int64]:
        """Return whole seconds, or microseconds where some time has a fraction."""
        times = self.numbers()
        if self._parse is int:
            return times
        table, column = self.table, self.column
        exact = np.abs(times) < WHOLE
        if not exact.all():
            kind = "a number" if self._parse is float else "a number or an ISO date like 2020-01-31"
            raise table.not_a(kind, int(exact.argmin()), column, what="time ")
        if (times == np.floor(times)).all():
            return times.astype(np.int64)
        if np.abs(times).max() * 1e6 >= 2**63:
            raise DataError(
                f"{table.path}, {table.label(column)}: times too large to keep fractions"
            )
        table.notes.append("times have fractions of a second: kept in microseconds")
        return np.rint(times * 1e6).astype(np.int64)


def read_columns(table: Table, *converters: Ids | Titles | Values | Times | None) -> None:
    """Feed its column to each converter, all in one pass over the table."""
    present = [converter for converter in converters if converter is not None]
    for block in table.blocks([converter.column for converter in present]):
        for entries, converter in zip(block, present, strict=True):
            converter.take(entries)


def _parsed(parse: Callable[[str], float], entries: list[str]) -> NDArray[np.float64]:
    """Parse entries, all at once if possible; what cannot be parsed is NaN."""

    def number_or_nan(entry: str) -> float:
        try:
            return parse(entry)
        except (ValueError, OverflowError):
            return np.nan

    try:
        return np.fromiter(map(parse, entries), np.float64, len(entries))
    except (ValueError, OverflowError):
        return np.array([number_or_nan(entry) for entry in entries])


def _iso_seconds(entry: str) -> float:
    moment = datetime.fromisoformat(entry)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


NAME = "frame"
"""Name of data that is given none."""


def frame_table(frame: object, name: str = NAME) -> Table:
    """Make a table of something with named columns, or of a sparse matrix [users, items]."""
    columns = _columns(frame, name)
    arrays, names = list(columns.values()), [str(column) for column in columns]
    if len({len(array) for array in arrays}) != 1:
        raise DataError(f"{name}: its columns differ in length")
    rows = len(arrays[0])
    if not rows:
        raise DataError(f"{name}: no rows")

    def blocks(wanted: Sequence[int]) -> Iterator[Block]:
        for start in range(0, rows, ROWS):
            part = slice(start, start + ROWS)
            yield [_as_text(arrays[k][part], f"{name}, column '{names[k]}'") for k in wanted]

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
        if not hasattr(frame, "__arrow_c_stream__"):
            raise DataError(
                f"{name}: a {type(frame).__name__} is no data; give a file, a name, a data frame, "
                "an Arrow table, a sparse matrix, or a dict of columns"
            )
        frame = imported("pyarrow", "an Arrow stream", "parquet").table(frame)
        named = frame.column_names
    return {column: _array(frame[column], name, column) for column in named}


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
    return [e.strip() if type(e) is str else _entry(e, where) for e in entries.tolist()]


def _entry(entry: Any, where: str) -> str:
    if isinstance(entry, str | bytes):
        return (entry.decode("utf-8", "replace") if isinstance(entry, bytes) else entry).strip()
    if hasattr(entry, "__len__"):
        raise DataError(f"{where}: a {type(entry).__name__} where one entry is expected")
    missing = entry is None or type(entry).__name__ in ("NAType", "NaTType")
    if missing or (isinstance(entry, float) and math.isnan(entry)):
        return ""
    if isinstance(entry, bool) or (isinstance(entry, float) and entry.is_integer()):
        return str(int(entry))  # whole numbers in a column with gaps are floats
    return entry.isoformat() if isinstance(entry, date) else str(entry)
