"""What hushrec wrote and reads back: nothing of it is believed before it was checked.

Files of a run are edited, cut short, copied from elsewhere. Each is read here, up to a size, into
the types that its readers rely on; what does not fit is a `RunError` that names file and key.
"""

from __future__ import annotations

import json
import tomllib
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from hushrec.errors import RunError

LARGEST_TEXT = 256 << 20
"""Bytes of a text file; a run of a million rounds has fewer."""
LARGEST_ARRAYS = 16 << 30
"""Bytes of all arrays of a file, unpacked."""


class Stored(BaseModel):
    """Types of what is relied on; what else is there is left alone."""

    model_config = ConfigDict(strict=True, extra="allow")


def read_text(path: Path) -> str:
    """Read a text file of ours."""
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
    """Read an object from a JSON file."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str, where: str) -> dict[str, Any]:
    """Read a JSON object; ``where`` is for the message."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers too long to be read
        raise RunError(f"{where} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise RunError(f"{where} is damaged: not an object")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    try:
        return tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged: {error}") from None


def checked(kind: type[Stored], value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return what was read if it has the types of ``kind``; else name the key that has not."""
    try:
        TypeAdapter(kind).validate_python(dict(value))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise RunError(f"{where} is damaged: it lacks '{key}'") from None
        said = first["msg"].removeprefix("Value error, ")
        named = f"'{key}': " if key else ""
        raise RunError(f"{where} is damaged: {named}{said}") from None
    except RecursionError:
        raise RunError(f"{where} is damaged: nested too deeply") from None
    return dict(value)


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Read an npz file; no pickle, and no more than fits."""
    try:
        with ZipFile(path) as packed:
            size = sum(entry.file_size for entry in packed.infolist())
        if size > LARGEST_ARRAYS:
            raise RunError(f"{path} is damaged: it says that it holds {size:,} bytes")
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except (ValueError, OSError, EOFError, KeyError, BadZipFile, zlib.error) as error:
        raise RunError(f"{path} is damaged: {error}") from None
    except (MemoryError, NotImplementedError, RuntimeError, OverflowError) as error:
        # A size that no memory has, a packing that nobody used, a password.
        raise RunError(f"{path} is damaged: {error!r}") from None
