"""Tables of text: CSV and its relatives, JSON lines or Parquet, gzip or not.

Whatever its format, a file becomes a `Table` of text columns, and `choose_columns` says which of
them are users, items, values, times. What is harmless is handled and noted, what is not is refused
with the file, the line and the column.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hushrec.errors import DataError, MissingExtraError, nearest

LONGEST_LINE = 1 << 20
"""Bytes; a longer line means that the file is not what it seems."""

# Normalised names (lower case, only letters and digits), the most telling first.
_NAMES = {
    "user": (
        *("userid", "user", "uid", "username", "reviewerid", "customerid", "memberid"),
        *("accountid", "customer", "visitorid", "sessionid"),
    ),
    "item": (
        *("itemid", "item", "iid", "movieid", "movie", "artistid", "artist", "asin"),
        *("parentasin", "productid", "product", "trackid", "track", "songid", "song"),
        *("bookid", "book", "isbn", "newsid", "articleid", "appid", "app", "gameid", "sku"),
    ),
    "value": (
        *("rating", "value", "weight", "score", "count", "cnt", "stars", "overall"),
        *("playcount", "plays", "listens", "clicks", "strength"),
    ),
    "time": (
        *("timestamp", "time", "datetime", "date", "ts", "unixreviewtime", "unixtime"),
        *("createdat", "ratedat", "epoch"),
    ),
    "title": ("title", "itemtitle", "itemname", "movietitle", "artistname", "producttitle"),
}
_POSITIONS = ("user", "item", "value", "time")
_DELIMITERS = ("\t", "::", ";", "|", ",")
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


def read_table(path: Path, delimiter: str | None = None, *, by_number: bool = False) -> Table:
    """Read a file of any known format; ``by_number``: columns are asked for by number."""
    if _is_parquet(path):
        return _parquet_table(path)
    text, notes = read_text(path)
    if not text.strip():
        raise DataError(f"{path}: the file is empty")
    if text.lstrip()[0] in "{[" and delimiter is None:
        return _json_table(path, text, notes)
    return _delimited_table(path, text, notes, delimiter, by_number)


def read_rows(
    path: Path, delimiter: str, *, encoding: str = "utf-8", header: bool = False
) -> list[list[str]]:
    """Return the fields of every line of a known, unquoted file."""
    text, _ = read_text(path, encoding)
    lines = text.rstrip("\n").split("\n")
    return [line.split(delimiter) for line in lines[1 if header else 0 :]]


def _open(path: Path) -> io.BufferedIOBase:
    if path.is_dir():
        raise DataError(f"{path}: is a folder; give a file in it")
    try:
        return gzip.GzipFile(path) if _is_gzip(path) else path.open("rb")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None


def _is_gzip(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(2) == b"\x1f\x8b"


def _read_bytes(path: Path, longest_line: int | None = None) -> bytes:
    """Return the unpacked content; stop at the first line that is too long."""
    chunks = []
    open_line = 0
    lines = 1
    try:
        with _open(path) as stream:
            while chunk := stream.read(LONGEST_LINE):
                chunks.append(chunk)
                first_end = chunk.find(b"\n")
                open_line += len(chunk) if first_end < 0 else first_end
                if longest_line is not None and open_line > longest_line:
                    raise DataError(
                        f"{path}, line {lines}: longer than {longest_line:,} bytes; "
                        "expected one interaction per line"
                    )
                if first_end >= 0:
                    open_line = len(chunk) - chunk.rfind(b"\n") - 1
                    lines += chunk.count(b"\n")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip file ({error}); get it again") from None
    return b"".join(chunks)


def read_text(path: Path, encoding: str = "utf-8") -> tuple[str, list[str]]:
    """Return the text with plain line ends, and the notes."""
    raw = _read_bytes(path, LONGEST_LINE)
    notes = ["gzip unpacked"] if _is_gzip(path) else []
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: not UTF-8 text at byte {error.start}; if it is latin-1, "
            "convert it first: iconv -f latin1 -t utf8"
        ) from None
    if "\0" in text:
        raise DataError(f"{path}: not text, there is a zero byte at byte {raw.index(0)}")
    if text.startswith("\ufeff"):
        text = text[1:]
        notes.append("byte-order mark removed")
    if "\r" in text:
        notes.append("Windows line ends (CRLF) read as line ends")
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text, notes


def _delimited_table(
    path: Path, text: str, notes: list[str], delimiter: str | None, by_number: bool
) -> Table:
    asked = delimiter
    if delimiter is None:
        delimiter = _guess_delimiter(text)
    else:
        delimiter = _SPELT_OUT.get(delimiter, delimiter)
    if delimiter is None or delimiter not in _head(text)[0]:
        raise DataError(f"{path}: only one column found{_delimiter_hint(text, asked)}")
    # Only one-character delimiters know quoting; a plain split is several times faster.
    split = _split_quoted if '"' in text and len(delimiter) == 1 else _split_plain
    flat, width, lines, blank = split(path, text, delimiter)
    if blank:
        notes.append(_blank_note(blank))
    first = [name.strip() for name in flat[:width]]
    known = any(_role(name) for name in first)
    header = _is_header(first) and (known or not by_number)
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
        stored = parquet.read_table(arrow.BufferReader(_read_bytes(path)))
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
    with _open(path) as stream:
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


# ------------------------------------------------------------------------- headers, delimiters


def _normal(name: str) -> str:
    """Lower-case letters and digits only; RecBole's ``user_id:token`` is ``userid``."""
    return re.sub(r"[\W_]", "", name.split(":")[0].lower())


def _role(name: str) -> str | None:
    return next((role for role, names in _NAMES.items() if _normal(name) in names), None)


def is_number(entry: str) -> bool:
    """Say whether a text is a number."""
    try:
        float(entry)
    except ValueError:
        return False
    return True


def _is_header(first: list[str]) -> bool:
    """Headers do not contain numbers or dates."""
    return not any(is_number(entry) or re.match(r"\d{4}-\d\d-\d\d", entry) for entry in first)


def _head(text: str, lines: int = 10) -> list[str]:
    """Return the first lines that are not blank, without what is quoted."""
    found: list[str] = []
    for line in _lines(text):
        if line.strip():
            found.append(re.sub(r'"[^"]*"', "", line))
        if len(found) == lines:
            break
    return found


def _lines(text: str) -> Iterator[str]:
    start = 0
    while start <= len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield text[start:end]
        start = end + 1


def _guess_delimiter(text: str) -> str | None:
    """Return what splits the first lines most evenly, known column names weighing most."""
    head = _head(text)
    counts = {d: [line.count(d) for line in head] for d in _DELIMITERS}
    present = [d for d in _DELIMITERS if counts[d][0]]
    if not present:
        return " " if " " in head[0].strip() else None

    def fit(delimiter: str) -> tuple[bool, int]:
        known = any(_role(name) for name in head[0].split(delimiter))
        return known, sum(count == counts[delimiter][0] for count in counts[delimiter])

    return max(present, key=fit)


_IMPORT = "hushrec data import …"


def _delimiter_hint(text: str, asked: str | None) -> str:
    guess = _guess_delimiter(text)
    if guess is not None and guess != asked:
        return f" with delimiter {asked!r}; {guess!r} looks right: {_IMPORT} --delimiter {guess!r}"
    marks = Counter(re.findall(r"[^\w\s.\-\"']", _head(text)[0]))
    if marks:
        mark = marks.most_common(1)[0][0]
        return f"; {mark!r} looks like the delimiter: {_IMPORT} --delimiter {mark!r}"
    return f"; say what separates the fields: {_IMPORT} --delimiter MARK"


def is_item_header(line: str) -> bool:
    """Say whether a line is the usual name of an item column, alone."""
    # "Movie: The Sequel" is a title, not a typed column name.
    return _normal(line.replace(":", "")) in _NAMES["item"]


def looks_like_a_table(lines: list[str]) -> bool:
    """Tell a table from one id per line, where an id may well contain a comma."""
    delimiter = _guess_delimiter("\n".join(lines[:10]))
    if delimiter is None or delimiter == " ":
        return False
    first = [entry.strip().strip('"') for entry in lines[0].split(delimiter)]
    if any(_role(name) == "item" for name in first):
        return True
    return len(first) >= 3 and is_number(first[2])


def choose_columns(
    table: Table, asked: dict[str, str | int | None], required: tuple[str, ...]
) -> dict[str, int]:
    """Return the column number of every role that the file has."""
    chosen = {
        role: find_asked(table, role, wanted)
        for role, wanted in asked.items()
        if wanted is not None
    }
    free = [k for k in range(table.width) if k not in chosen.values()]
    if table.names is None:
        for role, position in zip(_POSITIONS, range(table.width), strict=False):
            if role not in chosen and position in free:
                chosen[role] = position
    else:
        normal = {_normal(table.names[k]): k for k in reversed(free)}
        for role, names in _NAMES.items():
            match = next((normal[name] for name in names if name in normal), None)
            if role not in chosen and match is not None:
                chosen[role] = match
    for role in required:
        if role not in chosen:
            headerless = "; if there is no header line, --user 0 --item 1"
            raise DataError(
                f"{table.path}: no {role} column among {_quoted(table.names or [])}; "
                f"name it: {_IMPORT} --{role} COLUMN{headerless if table.text_only else ''}"
            )
    return chosen


def is_column_number(wanted: str | int | None) -> bool:
    """Say whether a column is asked for by number, not by name."""
    return isinstance(wanted, int) or (isinstance(wanted, str) and wanted.isdecimal())


def find_asked(table: Table, role: str, wanted: str | int) -> int:
    """Return the number of a column asked for by name or number; ``role`` is for the message."""
    names = table.names or []
    if isinstance(wanted, str) and wanted in names:
        return names.index(wanted)
    folded = [name.lower() for name in names]
    if isinstance(wanted, str) and wanted.lower() in folded:
        return folded.index(wanted.lower())
    if is_column_number(wanted):
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
