"""Tables of text: CSV and its relatives, JSON lines or Parquet, gzip or not.

Whatever its format, a file becomes a `Table` of text columns, and `choose_columns` says which of
them are users, items, values, times. What is harmless is handled and noted, what is not is refused
with the file, the line and the column.
"""

from __future__ import annotations

import csv
import io
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hushrec.data import guesses
from hushrec.data.text import open_file, read_bytes, read_text
from hushrec.errors import DataError, MissingExtraError, nearest

_SPELT_OUT = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "pipe": "|", "space": " "}


@dataclass
class Table:
    """Columns of text, each read on demand, and where their rows came from."""

    path: Path
    names: list[str] | None
    """None for a file without a header."""
    width: int
    rows: int
    column: Callable[[int], list[str]]
    where: Callable[[int], str]
    """Row number to "line 7"."""
    notes: list[str] = field(default_factory=list)
    text_only: bool = False
    """The first line has neither a known name nor a number: a header, or ids without one."""

    def label(self, column: int) -> str:
        """Name a column for a message."""
        return f"column '{self.names[column]}'" if self.names else f"column {column}"

    def at(self, row: int, column: int) -> str:
        """Name file, line and column for a message."""
        return f"{self.path}, {self.where(row)}, {self.label(column)}"


@dataclass(frozen=True)
class Columns:
    """Which columns to take, each by name or number from 0; what is None is recognised."""

    user: str | int | None = None
    item: str | int | None = None
    value: str | int | None = None
    time: str | int | None = None
    title: str | int | None = None
    delimiter: str | None = None

    def asked(self) -> dict[str, str | int]:
        """Return the columns that were asked for, by what they hold."""
        named = {name: at for name, at in asdict(self).items() if name != "delimiter"}
        return {role: column for role, column in named.items() if column is not None}

    @property
    def by_number(self) -> bool:
        """Whether some column is asked for by number, as nobody does who sees a header."""
        return any(map(_is_number_of_column, self.asked().values()))


RECOGNISED = Columns()
"""Nothing is asked for: all columns have their usual names, or places."""


def read_table(path: Path, columns: Columns = RECOGNISED) -> Table:
    """Read a file of any known format."""
    if _is_parquet(path):
        return _parquet_table(path)
    text, notes = read_text(path)
    if not text.strip():
        raise DataError(f"{path}: the file is empty")
    if text.lstrip()[0] in "{[" and columns.delimiter is None:
        return _json_table(path, text, notes)
    return _delimited_table(path, text, notes, columns)


def _delimited_table(path: Path, text: str, notes: list[str], columns: Columns) -> Table:
    asked = columns.delimiter
    delimiter = guesses.delimiter_of(text) if asked is None else _SPELT_OUT.get(asked, asked)
    if delimiter is None or delimiter not in guesses.head_of(text)[0]:
        raise DataError(f"{path}: only one column found{guesses.delimiter_hint(text, asked)}")
    # Only one-character delimiters know quoting; a plain split is several times faster.
    split = _split_quoted if '"' in text and len(delimiter) == 1 else _split_plain
    flat, width, lines, blank = split(path, text, delimiter)
    if blank:
        notes.append(_blank_note(blank))
    first = [name.strip() for name in flat[:width]]
    known = any(guesses.role_of(name) for name in first)
    header = guesses.is_header(first) and (known or not columns.by_number)
    if not header:
        notes.append("no header line: columns taken by position")
    skip = int(header)
    rows = len(lines) - skip
    if rows == 0:
        raise DataError(f"{path}: only a header line, no rows under it")
    return Table(
        path=path,
        names=first if header else None,
        width=width,
        rows=rows,
        column=lambda k: [entry.strip() for entry in flat[skip * width + k :: width]],
        where=lambda row: f"line {lines[row + skip]}",
        notes=notes,
        text_only=header and not known,
    )


_Split = tuple[list[str], int, Sequence[int], int]
"""All fields in one list, the fields per row, the line number of each row, the blank lines."""


def _split_plain(path: Path, text: str, delimiter: str) -> _Split:
    lines = text.rstrip("\n").split("\n")
    total = len(lines)
    numbers: Sequence[int] = range(1, total + 1)
    if not all(map(str.strip, lines)):
        numbers = [number for number, line in zip(numbers, lines, strict=True) if line.strip()]
        lines = [lines[number - 1] for number in numbers]
    counts = [line.count(delimiter) for line in lines]
    for number, count in zip(numbers, counts, strict=True):
        if count != counts[0]:
            raise _wrong_width(path, number, count + 1, counts[0] + 1)
    flat = delimiter.join(lines).split(delimiter)
    return flat, counts[0] + 1, numbers, total - len(lines)


def _split_quoted(path: Path, text: str, delimiter: str) -> _Split:
    flat: list[str] = []
    numbers: list[int] = []
    width = blank = 0
    stream = io.StringIO(text.rstrip("\n"), newline="\n")
    reader = csv.reader(stream, delimiter=delimiter, strict=True, skipinitialspace=True)
    end = 0
    try:
        for row in reader:
            # A quoted field may span lines; a row is named by the line it starts on.
            start, end = end + 1, reader.line_num
            if not row or (len(row) == 1 and not row[0].strip()):
                blank += 1
                continue
            width = width or len(row)
            if len(row) != width:
                raise _wrong_width(path, start, len(row), width)
            flat += row
            numbers.append(start)
    except csv.Error as error:
        raise DataError(
            f"{path}, line {end + 1}: a quoted field does not end as it should ({error}); "
            "write a quote inside quotes twice"
        ) from None
    return flat, width, numbers, blank


def _blank_note(blank: int) -> str:
    return f"{blank:,} blank line{'s' * (blank > 1)} skipped"


def _wrong_width(path: Path, line: int, found: int, expected: int) -> DataError:
    return DataError(
        f"{path}, line {line}: {found} field{'s' * (found > 1)} where line 1 has {expected}; "
        "mend the line, or quote fields that contain the delimiter"
    )


def _json_table(path: Path, text: str, notes: list[str]) -> Table:
    lines = text.rstrip("\n").split("\n")
    numbers = [number for number, line in enumerate(lines, 1) if line.strip()]
    if len(numbers) < len(lines):
        notes.append(_blank_note(len(lines) - len(numbers)))
    records: list[dict[str, Any]] = []
    for number in numbers:
        try:
            record = json.loads(lines[number - 1])
        except (ValueError, RecursionError) as error:  # a number may be too long to read
            raise DataError(f"{path}, line {number}: invalid JSON ({error})") from None
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {number}: expected one JSON object per line")
        records.append(record)
    names = list(records[0])

    def column(k: int) -> list[str]:
        found = []
        for number, record in zip(numbers, records, strict=True):
            if names[k] not in record:
                raise DataError(f"{path}, line {number}: column '{names[k]}' is missing")
            found.append(_as_text(record[names[k]]))
        return found

    return Table(
        path=path,
        names=names,
        width=len(names),
        rows=len(records),
        column=column,
        where=lambda row: f"line {numbers[row]}",
        notes=notes,
    )


def _parquet_table(path: Path) -> Table:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise MissingExtraError("Parquet", "parquet") from None
    try:
        stored = parquet.read_table(arrow.BufferReader(read_bytes(path)))
    except arrow.ArrowException as error:
        reason = str(error).split("\n")[0]
        raise DataError(f"{path}: damaged Parquet file ({reason}); get it again") from None
    if stored.num_rows == 0:
        raise DataError(f"{path}: only a header, no rows")
    return Table(
        path=path,
        names=list(stored.column_names),
        width=stored.num_columns,
        rows=stored.num_rows,
        column=lambda k: [_as_text(entry) for entry in stored.column(k).to_pylist()],
        where=lambda row: f"row {row + 1}",
    )


def _as_text(entry: object) -> str:
    return "" if entry is None else str(entry).strip()


def _is_parquet(path: Path) -> bool:
    with open_file(path) as stream:
        try:
            return stream.read(4) == b"PAR1"
        except (OSError, EOFError, zlib.error):
            return False  # reading the whole file will say what is wrong


def is_structured(path: Path) -> bool:
    """Say whether a file is Parquet or JSON lines."""
    if _is_parquet(path):
        return True
    text, _ = read_text(path)
    return text.lstrip().startswith("{")


def choose_columns(table: Table, columns: Columns, required: tuple[str, ...]) -> dict[str, int]:
    """Return the column number of every role that the file has."""
    asked = {role: find_asked(table, role, at) for role, at in columns.asked().items()}
    free = [k for k in range(table.width) if k not in asked.values()]
    if table.names is None:
        found = {role: k for k, role in enumerate(guesses.POSITIONS) if k in free}
    else:
        found = guesses.columns_by_name({k: table.names[k] for k in free})
    chosen = found | asked
    for role in required:
        if role not in chosen:
            headerless = "; if there is no header line, --user 0 --item 1"
            raise DataError(
                f"{table.path}: no {role} column among {_quoted(table.names or [])}; "
                f"name it: {guesses.IMPORT} --{role} COLUMN{headerless if table.text_only else ''}"
            )
    return chosen


def find_asked(table: Table, role: str, wanted: str | int) -> int:
    """Return the number of a column asked for by name or number; ``role`` is for the message."""
    names = table.names or []
    if isinstance(wanted, str) and wanted in names:
        return names.index(wanted)
    folded = [name.lower() for name in names]
    if isinstance(wanted, str) and wanted.lower() in folded:
        return folded.index(wanted.lower())
    if _is_number_of_column(wanted):
        if 0 <= int(wanted) < table.width:
            return int(wanted)
        raise DataError(
            f"{table.path}: no column {wanted} for {role}; columns are numbered 0 to "
            f"{table.width - 1}"
        )
    if not names:
        raise DataError(
            f"{table.path}: no header line, so column '{wanted}' cannot be found; give the "
            f"{role} column by number, 0 to {table.width - 1}"
        )
    raise DataError(
        f"{table.path}: no column '{wanted}' for {role}; found {_quoted(names)}"
        f"{nearest(str(wanted), names)}"
    )


def _quoted(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _is_number_of_column(wanted: str | int) -> bool:
    return isinstance(wanted, int) or wanted.isdecimal()
