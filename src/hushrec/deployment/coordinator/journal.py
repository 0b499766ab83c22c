"""Recovery journal of secure aggregation: what the coordinator needs after a restart.

The journal holds the number of the last sum, as a node begins no number twice, and the sum of the
round in progress from the moment that nodes reveal shares of it: they reveal shares for one sum of
a round only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec.errors import RunError
from hushrec.io.codec import ArraySpec, Count, Message
from hushrec.io.files import write_bytes, writing


class RecoveryJournal:
    """A journal in a folder of the coordinator's; one process writes it at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def next_number(self) -> int:
        """Return a number above all before it, from 1 on; it is on the disk before it is used."""
        file = self.folder / "sum-number"
        try:
            number = 1 + int(file.read_text("ascii") if file.exists() else 0)
        except (OSError, ValueError):
            raise RunError(f"{file} is damaged: the run cannot go on with secure sums") from None
        self._write(file, str(number).encode())
        return number

    def write(self, entry: JournalEntry) -> None:
        """Write an entry in place of the one before."""
        self._write(self._file, entry.to_bytes())

    def read(self) -> JournalEntry | None:
        """Return the last entry."""
        return JournalEntry.from_bytes(self._file.read_bytes()) if self._file.exists() else None

    def clear(self) -> None:
        """Remove the entry, once its round is in a checkpoint."""
        self._file.unlink(missing_ok=True)

    @property
    def _file(self) -> Path:
        return self.folder / "sum-kept"

    def _write(self, file: Path, data: bytes) -> None:
        with writing(file):
            self.folder.mkdir(mode=0o700, exist_ok=True)
        write_bytes(file, data, secret=True)


@dataclass(frozen=True, eq=False)
class JournalEntry(Message, kind="journal-entry", most_bytes=2**32):
    """A secure sum that is about to be opened, or was opened."""

    number: Count
    about: Annotated[str, Field(max_length=1000)]
    """What was summed."""
    server: bytes = b""
    """The server's state before the last stage."""
    message: bytes = b""
    """What nodes are sent in the last stage."""
    total: Annotated[NDArray[np.int64] | None, ArraySpec("int64", ("words",), optional=True)] = None
    """The sum, once it is opened."""
    survivors: tuple[str, ...] = ()
    """Names of the nodes that are in it."""
