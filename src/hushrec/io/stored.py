"""Bounded, checked reading of stored files, and `Stored`, the base class of their types.

Files of a run may be edited, cut short or copied from elsewhere. A file is read up to a maximum
size and validated against its class; a file that does not match raises a `RunError` that names the
file and the key.
"""

from __future__ import annotations

import json
import tomllib
import zlib
from pathlib import Path
from typing import Annotated, Any, TypeVar
from zipfile import BadZipFile, ZipFile

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hushrec.errors import RunError

LARGEST_TEXT = 256 << 20
"""Largest text file in bytes; metrics.jsonl of a million rounds is smaller."""
LARGEST_ARRAYS = 16 << 30
"""Largest total size in bytes of the unpacked arrays of one file."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(allow_inf_nan=False, ge=-1e300, le=1e300)]
Positive = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1e300)]
Metrics = dict[str, Number]
Tables = dict[str, Metrics]
"""Metrics by candidate set: ``tables["full"]["hr@10"]``."""


class Stored(BaseModel):
    """Base class of what is written as JSON and read back; unknown keys are kept as they are."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    def as_dict(self) -> dict[str, Any]:
        """Return the object that is written; fields that were never set are left out."""
        return self.model_dump(exclude_unset=True)

    def to_json(self, indent: int | None = None) -> str:
        """Return the JSON text that `parse` reads."""
        return json.dumps(self.as_dict(), indent=indent)


StoredT = TypeVar("StoredT", bound=Stored)


def parse(kind: type[StoredT], text: str, where: str) -> StoredT:
    """Read ``kind`` from JSON; ``where`` names the source in the error message."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        problem = first["msg"].removeprefix("Value error, ")
        if first["type"] == "missing":
            problem = f"it lacks '{key}'"
        elif first["type"] == "model_type" and not key:
            problem = "not an object"
        elif key:
            problem = f"'{key}': {problem}"
        raise RunError(f"{where} is damaged: {problem}") from None


def read_stored(kind: type[StoredT], path: Path) -> StoredT:
    """Read a JSON file as ``kind``."""
    return parse(kind, read_text(path), str(path))


def read_text(path: Path) -> str:
    """Read a UTF-8 text file of bounded size."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_TEXT + 1)
        if len(content) > LARGEST_TEXT:
            raise RunError(f"{path} is damaged: larger than {LARGEST_TEXT:,} bytes")
        return content.decode()
    except UnicodeDecodeError as error:
        raise RunError(f"{path} is damaged: not UTF-8 text at byte {error.start}") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file whose keys are checked elsewhere."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:  # also numbers too long to be read
        raise RunError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise RunError(f"{path} is damaged: not an object")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    try:
        return tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged: {error}") from None


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Read an npz file of bounded size, without pickle."""
    try:
        with ZipFile(path) as packed:
            size = sum(entry.file_size for entry in packed.infolist())
        if size > LARGEST_ARRAYS:
            raise RunError(f"{path} is damaged: it declares {size:,} bytes of arrays")
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except (ValueError, OSError, EOFError, KeyError, BadZipFile, zlib.error) as error:
        raise RunError(f"{path} is damaged: {error}") from None
    except (MemoryError, NotImplementedError, RuntimeError, OverflowError) as error:
        # A size that exceeds the memory, an unknown compression, a password.
        raise RunError(f"{path} is damaged: {error!r}") from None
