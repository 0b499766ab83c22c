"""Published data sets by name: one file each, found through the entry point group.

A module of this package, or of another one, holds a `DataSet`: its files with their checksums, its
terms, and the function that reads the files. A line in the entry point group ``hushrec.datasets``
gives it its name. The files are searched as ``<root>/<folder>/<file>``, plain or gzip, below the
folder that the environment variable ``HUSHREC_DATA`` names, and then below the cache.
"""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from hushrec.config import find, names
from hushrec.data.interactions import Interactions, StrArray
from hushrec.data.reading import read_interactions
from hushrec.data.text import OnProgress, no_progress, read_rows
from hushrec.errors import ConfigError

FileState = Literal["ok", "differs", "missing"]
NO_TERMS = "no licence text came with it; terms not established"


@dataclass(frozen=True)
class DataFolder:
    """The files of a data set, each plain or gzip; it records which ones were absent."""

    path: Path
    absent: list[str] = field(default_factory=list)
    progress: OnProgress = no_progress
    """Called with the fraction of the interactions that is read."""

    def get(self, name: str) -> Path | None:
        """Return the path of a file, or None."""
        candidates = (self.path / name, self.path / f"{name}.gz")
        return next(filter(Path.is_file, candidates), None)

    def interactions(self, name: str) -> Interactions:
        """Read the file of interactions, which every folder that was found has."""
        return read_interactions(self.get(name) or self.path / name, progress=self.progress)

    def lines(self, name: str, delimiter: str, *, header: bool = False) -> list[list[str]]:
        """Return the fields of each line of a file that is there."""
        return read_rows(self.get(name) or self.path / name, delimiter, header=header)

    def rows(
        self, name: str, delimiter: str, *, encoding: str = "utf-8", header: bool = False
    ) -> dict[str, list[str]]:
        """Return the fields of each line of a side file by its first field; {} without the file."""
        path = self.get(name)
        if path is None:
            self.absent.append(name)
            return {}
        rows = read_rows(path, delimiter, encoding=encoding, header=header)
        return {row[0]: row for row in rows}

    def rows_of(
        self, ids: StrArray, name: str, delimiter: str, encoding: str = "utf-8"
    ) -> list[list[str]]:
        """Return the fields of each id's line in a side file; [] without the file."""
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


@dataclass(frozen=True)
class DataSet:
    """One named data set; of its files the first has the interactions, the others may be absent."""

    name: str
    title: str
    licence: str
    citation: str
    users: int
    items: int
    rows: int
    loader: Callable[[DataFolder], Interactions]
    """Reads the files."""
    files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each file's unpacked content, by file name; empty for generated data."""
    url: str | None = None
    """A zip archive with the files."""
    shared_folder: str | None = None
    """Folder of the files where several data sets share an archive; by default the name."""

    def find(self, data_dir: str | Path | None = None) -> DataFolder | None:
        """Return the folder that has the data set, or None."""
        # The official archives unpack into a folder of their own.
        archive = PurePosixPath(self.url or self.folder).name.removesuffix(".zip")
        roots = (data_dir, os.environ.get("HUSHREC_DATA"), cache_dir())
        for root in [Path(root) for root in roots if root]:
            for inside in (self.folder, f"{self.folder}/{self.folder}", archive):
                folder = DataFolder(root / inside)
                if folder.get(self.interactions_file):
                    return folder
        return None

    def states(self, folder: DataFolder | None) -> dict[str, FileState]:
        """Return for each file whether it is there and is the published one."""
        return {
            name: folder.state(name, sha256) if folder else "missing"
            for name, sha256 in self.files.items()
        }

    @property
    def folder(self) -> str:
        """The folder of its files, below a root."""
        return self.shared_folder or self.name

    @property
    def interactions_file(self) -> str:
        """The name of the first file."""
        return next(iter(self.files))


def cache_dir() -> Path:
    """Return the folder for downloads and imports."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "hushrec"
    except RuntimeError:
        # A user without a home directory: this path holds nothing and cannot be created.
        return Path(os.devnull) / "hushrec"


class _Catalog(Mapping[str, DataSet]):
    """The installed data sets by name; each is imported when it is first used."""

    def __getitem__(self, name: str) -> DataSet:
        if name not in names("datasets"):
            raise KeyError(name)
        dataset = find("datasets", name)
        if not isinstance(dataset, DataSet) or dataset.name != name:
            raise ConfigError(f"entry point '{name}' of hushrec.datasets: no DataSet of that name")
        return dataset

    def __iter__(self) -> Iterator[str]:
        return iter(names("datasets"))

    def __len__(self) -> int:
        return len(names("datasets"))


CATALOG: Mapping[str, DataSet] = _Catalog()
