"""`SumBook`: what the server must not forget of its secure sums when it is started again.

Numbers of sums, which ascend: a node begins none twice. And the sum of the round in progress,
from the moment that nodes reveal what opens it: they do so once, for one sum of a round.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec.errors import RunError
from hushrec.io.codec import ArraySpec, Count, Message
from hushrec.io.files import write_bytes, writing


class SumBook(Protocol):
    """Where sums are written down."""

    def next_number(self) -> int:
        """Return a number above all before it, from 1 on; it is never returned again."""
        ...

    def keep(self, kept: bytes) -> None:
        """Keep this in place of what was kept before."""
        ...

    def kept(self) -> bytes | None:
        """Return what was kept last."""
        ...

    def clear(self) -> None:
        """Keep nothing: the last round is in a checkpoint."""
        ...


class MemoryBook:
    """A book that ends with the process."""

    def __init__(self) -> None:
        self.number = 0
        self.last: bytes | None = None

    def next_number(self) -> int:
        """Count on."""
        self.number += 1
        return self.number

    def keep(self, kept: bytes) -> None:
        """Keep it in memory."""
        self.last = kept

    def kept(self) -> bytes | None:
        """Return what was kept last."""
        return self.last

    def clear(self) -> None:
        """Forget it."""
        self.last = None


class FileBook:
    """A book in a folder of the server's; one process writes it at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def next_number(self) -> int:
        """Count on, on the disk first."""
        file = self.folder / "sum-number"
        try:
            number = 1 + int(file.read_text("ascii") if file.exists() else 0)
        except (OSError, ValueError):
            raise RunError(f"{file} is damaged: the run cannot go on with secure sums") from None
        self._write(file, str(number).encode())
        return number

    def keep(self, kept: bytes) -> None:
        """Keep it on the disk."""
        self._write(self.folder / "sum-kept", kept)

    def kept(self) -> bytes | None:
        """Return what was kept last."""
        file = self.folder / "sum-kept"
        return file.read_bytes() if file.exists() else None

    def clear(self) -> None:
        """Remove it from the disk."""
        (self.folder / "sum-kept").unlink(missing_ok=True)

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
