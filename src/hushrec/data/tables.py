"""Files as tables of text: CSV and its relatives, JSON lines and Parquet, gzip or not.

A file of any format becomes a `Table` of text columns, which is read in blocks. `Table.choose`
finds the columns of users, items, values and times. Harmless irregularities are handled and noted;
others are refused with file, line and column.
"""

from __future__ import annotations

import csv
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from hushrec.data import text as guesses
from hushrec.data.text import Content, OnProgress, no_progress
from hushrec.errors import DataError, listed, nearest
from hushrec.io.codec import imported

Block = list[list[str]]
"""Entries of some columns, for the rows of one block."""
ROWS = 1 << 16
"""Rows per block of columnar data."""
BLOCK = 1 << 20
"""Characters per block of text: lists of strings take ten times the size of their file."""
_SPELT_OUT = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "pipe": "|", "space": " "}
READING, CHECKING = 0.1, 0.3
"""Fractions of the work that are done after reading a file, and after checking its lines."""


@dataclass
class Table:
    """Columns of text, read on demand, and the lines of their rows."""

    path: Path
    names: list[str] | None
    """None for a file without a header."""
    width: int
    rows: int
    blocks: Callable[[Sequence[int]], Iterator[Block]]
    where: Callable[[int], str]
    """Row number to "line 7"."""
    notes: list[str] = field(default_factory=list)
    text_only: bool = False
    """The first line has neither a known name nor a number: a header, or ids without one."""
    types: list[str] | None = None
    """RecBole's types of the columns (token, token_seq, float, float_seq), of an atomic file."""

    def entries(self, column: int) -> Iterator[str]:
        """Return the entries of a column."""
        return chain.from_iterable(block[0] for block in self.blocks([column]))

    def label(self, column: int) -> str:
        """Name a column for a message."""
        return f"column '{self.names[column]}'" if self.names else f"column {column}"

    def at(self, row: int, column: int) -> str:
        """Name file, line and column for a message."""
        return f"{self.path}, {self.where(row)}, {self.label(column)}"

    def not_a(self, kind: str, row: int, column: int, what: str = "") -> DataError:
        """Return the error "… is not a number", or not of another kind, about one entry."""
        entry = next(islice(self.entries(column), row, None))
        return DataError(f"{self.at(row, column)}: {what}{entry!r} is not {kind}")

    def choose(self, columns: Columns, *required: str) -> dict[str, int]:
        """Return the column number of each role (user, item, value, time, title) the table has."""
        given = {role: self.find(role, at) for role, at in columns.given().items()}
        free = [k for k in range(self.width) if k not in given.values()]
        if self.names is None:
            chosen = {role: k for k, role in enumerate(guesses.POSITIONS) if k in free} | given
        else:
            names = {k: self.names[k] for k in free}
            chosen = guesses.columns_by_name(names, atomic=self.types is not None) | given
        for role in required:
            if role not in chosen:
                headerless = "; if there is no header line, --user 0 --item 1"
                raise DataError(
                    f"{self.path}: no {role} column among {listed(self.names or [])}; name it: "
                    f"{guesses.IMPORT} --{role} COLUMN{headerless if self.text_only else ''}"
                )
        return chosen

    def find(self, role: str, wanted: str | int) -> int:
        """Return the number of a column given by name or number; ``role`` is for the message."""
        names, last = self.names or [], self.width - 1
        if isinstance(wanted, str):
            folded = [name.lower() for name in names]
            for spelling, among in ((wanted, names), (wanted.lower(), folded)):
                if spelling in among:
                    return among.index(spelling)
        if _is_number_of_column(wanted):
            if int(wanted) in range(self.width):
                return int(wanted)
            problem = f"no column {wanted} for {role}; columns are numbered 0 to {last}"
        elif names:
            close = nearest(str(wanted), names)
            problem = f"no column '{wanted}' for {role}; found {listed(names)}{close}"
        else:
            problem = (
                f"no header line, so column '{wanted}' cannot be found; give the {role} column by "
                f"number, 0 to {last}"
            )
        raise DataError(f"{self.path}: {problem}")


@dataclass(frozen=True)
class Columns:
    """Columns by role, each by name or number from 0; None is recognised by its usual name."""

    user: str | int | None = None
    item: str | int | None = None
    value: str | int | None = None
    time: str | int | None = None
    title: str | int | None = None
    delimiter: str | None = None

    def given(self) -> dict[str, str | int]:
        """Return the columns that are given, by role."""
        given = {role: column for role, column in vars(self).items() if column is not None}
        return {role: column for role, column in given.items() if role != "delimiter"}


RECOGNISED = Columns()
"""All columns are recognised, by their usual names or positions."""


def read_table(
    path: Path, columns: Columns = RECOGNISED, progress: OnProgress = no_progress
) -> Table:
    """Read a file of any known format."""
    return make_table(guesses.read_content(path, _between(0, READING, progress)), columns, progress)


def make_table(
    content: Content, columns: Columns = RECOGNISED, progress: OnProgress = no_progress
) -> Table:
    """Make a table of the content of a file, which is used up."""
    if content.is_parquet:
        return _parquet_table(content)
    text = content.as_text()
    content.raw = b""  # twice the same takes twice the memory
    if not text.strip():
        raise DataError(f"{content.path}: the file is empty")
    if text.lstrip()[0] in "{[" and columns.delimiter is None:
        return _json_table(content.path, text, content.notes, progress)
    return _delimited_table(content.path, text, content.notes, columns, progress)


def line_blocks(text: str, progress: OnProgress = no_progress) -> Iterator[list[str]]:
    """Cut a text into lists of whole lines."""
    start, end = 0, len(text.rstrip("\n"))
    while start <= end:
        stop = text.find("\n", start + BLOCK, end)
        stop = end if stop < 0 else stop
        yield text[start:stop].split("\n")
        progress(stop / end)
        start = stop + 1


def _between(low: float, high: float, progress: OnProgress) -> OnProgress:
    """Return the callback for a part of the work."""
    return lambda share: progress(low + (high - low) * share)


def _delimited_table(
    path: Path, text: str, notes: list[str], columns: Columns, progress: OnProgress
) -> Table:
    given = columns.delimiter
    delimiter = guesses.delimiter_of(text) if given is None else _SPELT_OUT.get(given, given)
    if not delimiter or delimiter not in guesses.head_of(text)[0]:
        raise DataError(f"{path}: only one column found{guesses.delimiter_hint(text, given)}")
    # Only one-character delimiters know quoting; a plain split is several times faster.
    quoted = '"' in text and len(delimiter) == 1
    lines = (_Quoted if quoted else _Plain)(path, text, delimiter)
    numbers: array[int] = array("q")
    first: list[str] = []
    blank = 0
    for rows, at, skipped in lines.blocks(_between(READING, CHECKING, progress)):
        first = first or [name.strip() for name in lines.fields(rows[:1])]
        widths = lines.widths(rows)
        if set(widths) - {len(first)}:
            row, width = next((k, w) for k, w in enumerate(widths) if w != len(first))
            raise DataError(
                f"{path}, line {at[row]}: {width} field{'s' * (width > 1)} where line 1 has "
                f"{len(first)}; mend the line, or quote fields that contain the delimiter"
            )
        numbers.extend(at)
        blank += skipped
    _note_blank(notes, blank)
    known = any(guesses.role_of(name) for name in first)
    # Columns that are given by number suggest that the file has no header.
    by_number = any(map(_is_number_of_column, columns.given().values()))
    header = guesses.is_header(first) and (known or not by_number)
    if not header:
        notes.append("no header line: columns taken by position")
    skip, width = int(header), len(first)
    if len(numbers) == skip:
        raise DataError(f"{path}: only a header line, no rows under it")

    def blocks(wanted: Sequence[int]) -> Iterator[Block]:
        first_row = skip
        for rows, _, _ in lines.blocks(_between(CHECKING, 1, progress)):
            if rows:
                fields = lines.fields(rows[first_row:])
                first_row = 0
                yield [list(map(str.strip, fields[k::width])) for k in wanted]

    def where(row: int) -> str:
        return f"line {numbers[row + skip]}"

    typed = guesses.atomic_types(first) if header else None
    names, text_only = first if header else None, header and not known
    if typed is not None:
        names = [name for name, _ in typed]
    types = None if typed is None else [kind for _, kind in typed]
    return Table(path, names, width, len(numbers) - skip, blocks, where, notes, text_only, types)


def _note_blank(notes: list[str], blank: int) -> None:
    if blank:
        notes.append(f"{blank:,} blank line{'s' * (blank > 1)} skipped")


_Rows = tuple[list[Any], Sequence[int], int]
"""Rows that are not blank, the line that each starts on, and how many blank lines were skipped."""


@dataclass(frozen=True)
class _Plain:
    """Rows are lines, with fields between delimiters."""

    path: Path
    text: str
    delimiter: str

    def blocks(self, progress: OnProgress) -> Iterator[_Rows]:
        """Return all rows, some at a time."""
        before = 0
        for lines in line_blocks(self.text, progress):
            numbers: Sequence[int] = range(before + 1, before + 1 + len(lines))
            before += len(lines)
            filled = lines
            if not all(map(str.strip, lines)):
                numbers = [n for n, line in zip(numbers, lines, strict=True) if line.strip()]
                filled = [line for line in lines if line.strip()]
            yield filled, numbers, len(lines) - len(filled)

    def widths(self, rows: list[Any]) -> list[int]:
        """Return the number of fields of each row."""
        return [line.count(self.delimiter) + 1 for line in rows]

    def fields(self, rows: list[Any]) -> list[str]:
        """Return the fields of all these rows, one after the other."""
        return self.delimiter.join(rows).split(self.delimiter) if rows else []


class _Quoted(_Plain):
    """Rows are lists of fields; a field may be quoted, and then contain anything."""

    def blocks(self, progress: OnProgress) -> Iterator[_Rows]:
        """Return all rows, some at a time; refuse quotes that do not end."""
        lines = (f"{line}\n" for line in chain.from_iterable(line_blocks(self.text, progress)))
        reader = csv.reader(lines, delimiter=self.delimiter, strict=True, skipinitialspace=True)
        rows: list[list[str]] = []
        numbers: list[int] = []
        blank = end = 0
        try:
            for row in reader:
                start, end = end + 1, reader.line_num
                if not row or (len(row) == 1 and not row[0].strip()):
                    blank += 1
                    continue
                rows.append(row)
                numbers.append(start)
                if len(rows) == ROWS:
                    yield rows, numbers, blank
                    rows, numbers, blank = [], [], 0
        except csv.Error as error:
            yield rows, numbers, blank  # rows before it come first, with their errors
            raise DataError(
                f"{self.path}, line {end + 1}: a quoted field does not end as it should ({error}); "
                "write a quote inside quotes twice"
            ) from None
        yield rows, numbers, blank

    def widths(self, rows: list[Any]) -> list[int]:
        """Return the number of fields of each row."""
        return list(map(len, rows))

    def fields(self, rows: list[Any]) -> list[str]:
        """Return the fields of all these rows, one after the other."""
        return list(chain.from_iterable(rows))


def _json_table(path: Path, text: str, notes: list[str], progress: OnProgress) -> Table:
    def records(progress: OnProgress) -> Iterator[list[tuple[int, dict[str, Any]]]]:
        """Return line numbers and records, some at a time."""
        before = 0
        for lines in line_blocks(text, progress):
            numbered = enumerate(lines, before + 1)
            yield [(n, _record(path, n, line)) for n, line in numbered if line.strip()]
            before += len(lines)

    numbers: array[int] = array("q")
    names: list[str] = []
    for block in records(_between(READING, CHECKING, progress)):
        names = names or next((list(record) for _, record in block if record), [])
        numbers.extend(number for number, _ in block)
    count = len(numbers)
    _note_blank(notes, text.rstrip("\n").count("\n") + 1 - count)

    def blocks(wanted: Sequence[int]) -> Iterator[Block]:
        for block in records(_between(CHECKING, 1, progress)):
            rows = [[_json_entry(path, n, entry, names[k]) for k in wanted] for n, entry in block]
            if rows:
                yield [list(column) for column in zip(*rows, strict=True)]

    return Table(path, names, len(names), count, blocks, lambda row: f"line {numbers[row]}", notes)


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # a number may be too long to read
        raise DataError(f"{path}, line {number}: invalid JSON ({error})") from None
    if not isinstance(record, dict):
        raise DataError(f"{path}, line {number}: expected one JSON object per line")
    return record


def _json_entry(path: Path, number: int, record: dict[str, Any], name: str) -> str:
    if name not in record:
        raise DataError(f"{path}, line {number}: column '{name}' is missing")
    entry = record[name]
    if isinstance(entry, dict | list):
        kind = "an object" if isinstance(entry, dict) else "a list"
        raise DataError(
            f"{path}, line {number}, column '{name}': {kind} where one entry is expected; write a "
            "line for each, or choose another column"
        )
    return "" if entry is None else str(entry).strip()


def _parquet_table(content: Content) -> Table:
    path, arrow = content.path, imported("pyarrow", "Parquet", "parquet")
    parquet = imported("pyarrow.parquet", "Parquet", "parquet")
    try:
        stored = parquet.read_table(arrow.BufferReader(content.raw))
    except (arrow.ArrowException, OSError) as error:
        reason = str(error).split("\n")[0]
        raise DataError(f"{path}: damaged Parquet file ({reason}); get it again") from None
    if stored.num_rows == 0:
        raise DataError(f"{path}: only a header, no rows")
    names = [str(name) for name in stored.column_names]

    def blocks(wanted: Sequence[int]) -> Iterator[Block]:
        where = {k: f"{path}, column '{names[k]}'" for k in wanted}
        columns = [_arrow_texts(arrow, where[k], stored.column(k)) for k in wanted]
        return map(list, zip(*columns, strict=True))

    return Table(path, names, len(names), stored.num_rows, blocks, lambda row: f"row {row + 1}")


def _arrow_texts(arrow: Any, where: str, column: Any) -> Iterator[list[str]]:
    """Return the entries of a column as text, block by block; refuse what is not one entry."""
    kind = column.type
    shown = str(kind) if len(str(kind)) < 100 else str(kind)[:99] + "…"
    if arrow.types.is_nested(kind):
        raise DataError(
            f"{where}: holds {shown}, and one entry is expected in each row; write a row for each, "
            "or choose another column"
        )
    if arrow.types.is_timestamp(kind) and kind.unit == "ns":  # Python holds microseconds
        column = column.cast(arrow.timestamp("us", kind.tz), safe=False)
    try:
        for start in range(0, len(column), ROWS):
            entries = column.slice(start, ROWS).to_pylist()
            texts = (entry.decode() if isinstance(entry, bytes) else entry for entry in entries)
            yield ["" if text is None else str(text).strip() for text in texts]
    except (ValueError, OverflowError, TypeError) as error:
        # Dates of the year 300000, zones that do not exist, bytes that are no text.
        raise DataError(
            f"{where}: {shown} that cannot be read ({error}); write the column as text or numbers"
        ) from None


def _is_number_of_column(wanted: str | int) -> bool:
    # A longer one is no column of any file, and too long a one cannot be read.
    return isinstance(wanted, int) or (wanted.isdecimal() and len(wanted) < 10)
