"""Bytes of a file as text, gzip or not; what is no text is refused by line and byte.

A file is opened and read once, so that a pipe will do.
"""

from __future__ import annotations

import gzip
import io
import os
import stat
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

from hushrec.errors import DataError

LONGEST_LINE = 1 << 20
"""Bytes; a longer line means that the file is not what it seems."""
MOST_BYTES = 8 << 30
"""Of a file, unpacked; more than that is no file of interactions, or never ends."""
PATIENCE = 10.0
"""Seconds that a pipe may have nobody who writes into it."""
PARQUET = b"PAR1"

Heard = Callable[[float], None]
"""Told what share of the work is done."""


def unheard(share: float) -> None:
    """Tell nobody."""


@dataclass
class Content:
    """What was in a file."""

    path: Path
    raw: bytes
    notes: list[str] = field(default_factory=list)

    @property
    def is_parquet(self) -> bool:
        """Whether it is Parquet; else it is text."""
        return self.raw.startswith(PARQUET)

    def as_text(self, encoding: str = "utf-8") -> str:
        """Return the text with plain line ends; what was handled is noted."""
        raw, path = self.raw, self.path
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


def read_content(path: Path, heard: Heard = unheard) -> Content:
    """Read a file once, unpacked; stop at the first line that is too long."""
    try:
        with open_file(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            packed = stream.peek(2)[:2] == b"\x1f\x8b"
            unpacked = gzip.GzipFile(fileobj=stream) if packed else stream
            raw = _read_all(path, unpacked, lambda: heard(stream.tell() / size if size else 0.0))
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


def is_stream(path: Path) -> bool:
    """Say whether a path can be read only once."""
    try:
        return path.exists() and not path.is_file() and not path.is_dir()
    except (OSError, ValueError):
        return False


def _open_pipe(path: Path) -> io.BufferedReader:
    """Open a pipe, and wait for somebody to write into it, but not for ever."""
    opened: list[io.BufferedReader] = []
    waiting = Thread(target=lambda: opened.append(path.open("rb")), daemon=True)
    waiting.start()
    waiting.join(PATIENCE)
    if not opened:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # lets the thread go
        raise DataError(f"{path}: is a pipe that nobody writes into")
    return opened[0]


def _read_all(path: Path, stream: io.BufferedIOBase, heard: Callable[[], None]) -> bytes:
    chunks: list[bytes] = []
    total = open_line = 0
    lines = 1
    while chunk := stream.read(LONGEST_LINE):
        chunks.append(chunk)
        heard()
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
