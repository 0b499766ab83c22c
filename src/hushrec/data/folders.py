"""Where the files of a data set lie, and whether they are the ones we know.

A data set is looked for as ``<root>/<folder>/<file>`` under the folder named by the environment
variable ``HUSHREC_DATA`` and then under the cache.
"""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hushrec.data.interactions import StrArray
from hushrec.data.text import Heard, read_rows, unheard

FileState = Literal["ok", "differs", "missing"]


@dataclass(frozen=True)
class Folder:
    """Files by name, each plain or gzip; remembers what was asked for and absent."""

    path: Path
    absent: list[str] = field(default_factory=list)
    heard: Heard = unheard
    """Told how far reading the interactions is."""

    def get(self, name: str) -> Path | None:
        """Return the path of a file, or None."""
        for candidate in (self.path / name, self.path / f"{name}.gz"):
            if candidate.is_file():
                return candidate
        return None

    def rows(
        self, name: str, delimiter: str, *, encoding: str = "utf-8", header: bool = False
    ) -> dict[str, list[str]]:
        """Return the lines of a side file by their first field, nothing if it is absent."""
        path = self.get(name)
        if path is None:
            self.absent.append(name)
            return {}
        rows = read_rows(path, delimiter, encoding=encoding, header=header)
        return {row[0]: row for row in rows}

    def lines_of(
        self, ids: StrArray, name: str, delimiter: str, encoding: str = "utf-8"
    ) -> list[list[str]]:
        """Return the line of each id, nothing if the file is absent."""
        rows = self.rows(name, delimiter, encoding=encoding)
        return [rows[one] for one in ids] if rows else []

    def state(self, name: str, sha256: str) -> FileState:
        """Return whether a file is there and has this checksum, unpacked."""
        path = self.get(name)
        if path is None:
            return "missing"
        digest = hashlib.sha256()
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            try:
                while chunk := stream.read(1 << 20):
                    digest.update(chunk)
            except (OSError, EOFError):
                return "differs"
        return "ok" if digest.hexdigest() == sha256 else "differs"


def cache_dir() -> Path:
    """Return the folder for downloads and imports."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "hushrec"
    except RuntimeError:
        # A user without a home: a place where nothing is found and nothing can be made.
        return Path(os.devnull) / "hushrec"


def roots(data_dir: str | Path | None) -> Iterator[Path]:
    """Return the folders to look in, the nearest first."""
    for root in (data_dir, os.environ.get("HUSHREC_DATA")):
        if root:
            yield Path(root)
    yield cache_dir()
