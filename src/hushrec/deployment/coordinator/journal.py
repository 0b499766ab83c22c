"""`SumBook`: what the server must not forget of its secure sums when it is started again.

Numbers of sums, which ascend: a node begins none twice. And the sum of the round in progress,
from the moment that nodes reveal what opens it: they do so once, for one sum of a round.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hushrec.errors import MessageError, RunError
from hushrec.io.codec import Array, pack, text_in, unpack, whole_in
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
class KeptSum:
    """A sum that was about to be opened, or was."""

    number: int
    about: str
    """What was summed."""
    server: bytes = b""
    """The sum before its last stage."""
    told: bytes = b""
    """What nodes are told in it."""
    total: NDArray[np.int64] | None = None
    """What it came to."""
    survivors: str = ""
    """Names of the nodes that are in it, one a line."""

    def to_bytes(self) -> bytes:
        """Write it."""
        parts = {"server": self.server, "told": self.told, "survivors": self.survivors.encode()}
        arrays: dict[str, Array] = {
            name: np.frombuffer(data, np.uint8) for name, data in parts.items()
        }
        if self.total is not None:
            arrays["total"] = self.total
        return pack("kept-sum", {"number": self.number, "about": self.about}, arrays)

    @classmethod
    def from_bytes(cls, data: bytes) -> KeptSum:
        """Read it back."""
        facts, arrays = unpack("kept-sum", data, 2**32)
        try:
            server, told, survivors = (
                arrays[name].tobytes() for name in ("server", "told", "survivors")
            )
            names = survivors.decode()
        except (KeyError, UnicodeDecodeError):
            raise MessageError("the kept secure sum is damaged") from None
        number, about = whole_in(facts, "number"), text_in(facts, "about", 1000)
        return cls(number, about, server, told, arrays.get("total"), names)
