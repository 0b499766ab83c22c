"""Bytes of a file as text, gzip or not; what is no text is refused by line and byte."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path

from hushrec.errors import DataError

LONGEST_LINE = 1 << 20
"""Bytes; a longer line means that the file is not what it seems."""


def read_text(path: Path, encoding: str = "utf-8") -> tuple[str, list[str]]:
    """Return the text with plain line ends, and the notes."""
    raw = read_bytes(path, LONGEST_LINE)
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


def read_rows(
    path: Path, delimiter: str, *, encoding: str = "utf-8", header: bool = False
) -> list[list[str]]:
    """Return the fields of every line of a known, unquoted file."""
    text, _ = read_text(path, encoding)
    lines = text.rstrip("\n").split("\n")
    return [line.split(delimiter) for line in lines[1 if header else 0 :]]


def open_file(path: Path) -> io.BufferedIOBase:
    """Open a file for reading, unpacked."""
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


def read_bytes(path: Path, longest_line: int | None = None) -> bytes:
    """Return the unpacked content; stop at the first line that is too long."""
    chunks = []
    open_line = 0
    lines = 1
    try:
        with open_file(path) as stream:
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
