"""Bytes of a file as text, and what can be recognised in it.

A file is opened once and read from beginning to end, so a pipe can be read too. Gzip is unpacked.
Delimiter, header line and the roles of columns (user, item, …) are guessed from the first lines.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from threading import Thread

from hushrec.errors import DataError

LONGEST_LINE = 1 << 20
"""Bytes; a longer line means that the file is not what it seems."""
MOST_BYTES = 8 << 30
"""Largest size of a file, unpacked; larger ones are no interactions, or do not end."""
PATIENCE = 10.0
"""Seconds to wait for a writer to open a pipe."""
PARQUET = b"PAR1"

OnProgress = Callable[[float], None]
"""Called with the fraction of the work that is done."""


def no_progress(share: float) -> None:
    """Report nothing."""


@dataclass
class Content:
    """The unpacked content of a file."""

    path: Path
    raw: bytes
    notes: list[str] = field(default_factory=list)

    @property
    def is_parquet(self) -> bool:
        """Whether it is Parquet; else it is text."""
        return self.raw.startswith(PARQUET)

    def as_text(self, encoding: str = "utf-8") -> str:
        """Return the text with plain line ends; conversions are noted."""
        try:
            text = self.raw.decode(encoding)
        except UnicodeDecodeError as error:
            line = self.raw.count(b"\n", 0, error.start) + 1
            raise DataError(
                f"{self.path}, line {line}: not UTF-8 text at byte {error.start}; if it is "
                "latin-1, convert it first: iconv -f latin1 -t utf8"
            ) from None
        if "\0" in text:
            first = self.raw.index(0)
            raise DataError(f"{self.path}: not text, there is a zero byte at byte {first}")
        if text.startswith("\ufeff"):
            text = text[1:]
            self.notes.append("byte-order mark removed")
        if "\r" in text:
            self.notes.append("Windows line ends (CRLF) read as line ends")
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        return text


def read_rows(
    path: Path, delimiter: str, *, encoding: str = "utf-8", header: bool = False
) -> list[list[str]]:
    """Return the fields of every line of a known, unquoted file."""
    lines = read_content(path).as_text(encoding).rstrip("\n").split("\n")
    return [line.split(delimiter) for line in lines[1 if header else 0 :]]


def read_content(path: Path, progress: OnProgress = no_progress) -> Content:
    """Read a file once, unpacked; stop at the first line that is too long."""
    try:
        with open_file(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            packed = stream.peek(2)[:2] == b"\x1f\x8b"
            unpacked = gzip.GzipFile(fileobj=stream) if packed else stream
            raw = _read_all(path, unpacked, lambda: progress(stream.tell() / size if size else 0.0))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip file ({error}); get it again") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
    return Content(path, raw, ["gzip unpacked"] if packed else [])


def open_file(path: Path) -> io.BufferedReader:
    """Open a file or a pipe for reading; refuse what has no end."""
    try:
        kind = path.stat().st_mode
        if stat.S_ISDIR(kind):
            raise DataError(f"{path}: is a folder; give a file in it")
        if stat.S_ISFIFO(kind):
            return _open_pipe(path)
        stream = path.open("rb")
        if not stat.S_ISREG(kind) and not stream.isatty():
            stream.close()
            raise DataError(f"{path}: is a device; give a file")
        return stream
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except ValueError:
        raise DataError(f"{path}: is no path") from None


def _open_pipe(path: Path) -> io.BufferedReader:
    """Open a pipe; give up if no writer opens it in time."""
    opened: list[io.BufferedReader] = []
    waiting = Thread(target=lambda: opened.append(path.open("rb")), daemon=True)
    waiting.start()
    waiting.join(PATIENCE)
    if not opened:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # lets the thread go
        raise DataError(f"{path}: is a pipe without a writer")
    return opened[0]


def _read_all(path: Path, stream: io.BufferedIOBase, progress: Callable[[], None]) -> bytes:
    chunks: list[bytes] = []
    total = open_line = 0
    lines = 1
    while chunk := stream.read(LONGEST_LINE):
        chunks.append(chunk)
        progress()
        total += len(chunk)
        if total > MOST_BYTES:
            raise DataError(f"{path}: more than {MOST_BYTES:,} bytes; split the file")
        if chunks[0].startswith(PARQUET):
            continue
        first_end = chunk.find(b"\n")
        open_line += len(chunk) if first_end < 0 else first_end
        if open_line > LONGEST_LINE:
            raise DataError(
                f"{path}, line {lines}: longer than {LONGEST_LINE:,} bytes; "
                "expected one interaction per line"
            )
        if first_end >= 0:
            open_line = len(chunk) - chunk.rfind(b"\n") - 1
            lines += chunk.count(b"\n")
    return b"".join(chunks)


# Normalised names (lower case, only letters and digits), the most telling first.
_NAMES = {
    "user": "userid user uid username reviewerid customerid memberid accountid customer visitorid "
    "sessionid",
    "item": "itemid item iid movieid movie artistid artist asin parentasin productid product "
    "trackid track songid song bookid book isbn newsid articleid appid app gameid sku",
    "value": "rating value weight score count cnt stars overall playcount plays listens clicks "
    "strength",
    "time": "timestamp time datetime date ts unixreviewtime unixtime createdat ratedat epoch",
    "title": "title itemtitle itemname movietitle artistname producttitle",
}
_ATOMIC_NAMES = {"value": "label", "title": "name"}
"""Further names of columns in RecBole's atomic files."""
_TYPED = re.compile(r"(.+):(token|token_seq|float|float_seq)")
"""A column of an atomic file: its name and its type."""
_FEATURES = {"genres": "genres genre categories category tags", "year": "year releaseyear"}
"""Columns that describe items: sets of categories, and a year."""
NO_GENRES = "(no genres listed)"
"""What MovieLens writes for films without genres."""
POSITIONS = ("user", "item", "value", "time")
_DELIMITERS = ("\t", "::", ";", "|", ",")
IMPORT = "hushrec data import …"
"""The command with options for everything that is guessed."""


def short_name(data: str) -> str:
    """Return what people call data: its name, or the stem of its file, which is a whole path."""
    path = Path(data)
    stem = path.name.removesuffix(".gz").rsplit(".", 1)[0]
    return (stem or path.name) if path.is_absolute() else data


def is_number(entry: str) -> bool:
    """Return whether a text is a number."""
    try:
        float(entry)
    except ValueError:
        return False
    return True


def is_header(first: list[str]) -> bool:
    """Return whether a line is a header: one without numbers and dates."""
    return not any(is_number(entry) or re.match(r"\d{4}-\d\d-\d\d", entry) for entry in first)


def columns_by_name(names: Mapping[int, str], *, atomic: bool = False) -> dict[str, int]:
    """Return the column of every role that is among these names; of equal names the first.

    ``atomic`` says that they are those of an atomic file, whose authors use further names.
    """
    numbers = {_normal(name): number for number, name in reversed(list(names.items()))}
    more = _ATOMIC_NAMES if atomic else {}
    usual = {role: f"{known} {more.get(role, '')}" for role, known in _NAMES.items()}
    return _most_telling(numbers, usual)


def atomic_types(header: Iterable[str]) -> list[tuple[str, str]] | None:
    """Return name and type of each column, ``user_id:token``; None where some have no type."""
    found = [_TYPED.fullmatch(name) for name in header]
    return None if None in found else [(each[1], each[2]) for each in found if each]


def features_by_name(names: Iterable[str]) -> dict[str, int]:
    """Return the column of every usual feature of items that is among these names."""
    return _most_telling({_normal(name): k for k, name in enumerate(names)}, _FEATURES)


def _most_telling(numbers: Mapping[str, int], usual: Mapping[str, str]) -> dict[str, int]:
    known = {what: [n for n in names.split() if n in numbers] for what, names in usual.items()}
    return {what: numbers[names[0]] for what, names in known.items() if names}


def role_of(name: str) -> str | None:
    """Return the role (user, item, …) of a column of this name, or None."""
    return next((role for role, usual in _NAMES.items() if _normal(name) in usual.split()), None)


def delimiter_of(text: str) -> str | None:
    """Return the delimiter that splits the first lines evenly, and best one with known names."""
    head = head_of(text)
    counts = {d: [line.count(d) for line in head] for d in _DELIMITERS}
    present = [d for d in _DELIMITERS if counts[d][0]]
    if not present:
        return " " if " " in head[0].strip() else None

    def fit(delimiter: str) -> tuple[bool, int]:
        known = any(role_of(name) for name in head[0].split(delimiter))
        return known, sum(count == counts[delimiter][0] for count in counts[delimiter])

    return max(present, key=fit)


def delimiter_hint(text: str, given: str | None) -> str:
    """Return the hint of an error about a file with one column only."""
    guess = delimiter_of(text)
    if guess is not None and guess != given:
        return f" with delimiter {given!r}; {guess!r} looks right: {IMPORT} --delimiter {guess!r}"
    marks = Counter(re.findall(r"[^\w\s.\-\"']", head_of(text)[0]))
    if marks:
        mark = marks.most_common(1)[0][0]
        return f"; {mark!r} looks like the delimiter: {IMPORT} --delimiter {mark!r}"
    return f"; say what separates the fields: {IMPORT} --delimiter MARK"


def looks_like_a_table(lines: list[str]) -> bool:
    """Return whether lines are a table, and not one id each, which may contain a comma."""
    delimiter = delimiter_of("\n".join(lines[:10]))
    if delimiter is None or delimiter == " ":
        return False
    first = [entry.strip().strip('"') for entry in lines[0].split(delimiter)]
    named = any(role_of(name) == "item" for name in first)
    return named or (len(first) >= 3 and is_number(first[2]))


def _normal(name: str) -> str:
    """Lower-case letters and digits only; RecBole's ``user_id:token`` is ``userid``."""
    typed = _TYPED.fullmatch(name)
    return re.sub(r"[\W_]", "", (typed[1] if typed else name).lower())


def head_of(text: str, lines: int = 10) -> list[str]:
    """Return the first lines that are not blank, with quoted text removed."""
    found = islice(re.finditer(r"^.*\S.*$", text, re.MULTILINE), lines)
    return [re.sub(r'"[^"]*"', "", line.group()) for line in found]
