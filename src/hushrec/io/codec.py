"""The form of every message and stored value: a safetensors file of one kind.

Arrays, and a header with their names and a few facts. Whoever reads one says which kind it must be
and how large it may be before it is even looked at; what it then holds is the reader's to check.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from hushrec.errors import MessageError

Array = NDArray[Any]
Arrays = Mapping[str, Array]

FORMAT = "hushrec-1"
HEADER_BYTES = 2**16
"""Largest header: names and shapes of the arrays, and the facts."""
LARGEST = 2**30
"""Largest message where nothing tighter is known."""


def pack(kind: str, facts: Mapping[str, Any], arrays: Arrays) -> bytes:
    """Write a message of a kind."""
    # One entry: safetensors writes several in any order, and equal messages are equal bytes.
    said = {FORMAT: json.dumps({"kind": kind, "facts": facts})}
    whole = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    return bytes(save(whole, metadata=said))


def unpack(kind: str, data: bytes, most: int = LARGEST) -> tuple[dict[str, Any], dict[str, Array]]:
    """Read a message that must be of a kind, and no larger than so many bytes."""
    if len(data) > most:
        raise MessageError(f"the {kind} has {len(data):,} bytes, more than the {most:,} allowed")
    said = _header(data, kind)
    if said.get("kind") != kind:
        raise MessageError(f"the message is no {kind} of this version of hushrec")
    try:
        facts, arrays = said["facts"], load(data)
    except (ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise MessageError(f"the {kind} is damaged: {type(error).__name__}") from None
    if not isinstance(facts, dict):
        raise MessageError(f"the {kind} is damaged: its facts are no table")
    return facts, arrays


def kind_of(data: bytes) -> str:
    """Return what a message says it is, for a reader that takes several kinds."""
    return str(_header(data, "message").get("kind"))


def payload(data: bytes) -> int:
    """Return the bytes of a message's arrays, its header left out."""
    return len(data) - 8 - int.from_bytes(data[:8], "little")


def _header(data: bytes, kind: str) -> dict[str, Any]:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(HEADER_BYTES, len(data) - 8):
        raise MessageError(f"the {kind} is no message of hushrec: it has no header")
    try:
        entries = json.loads(data[8 : 8 + size])["__metadata__"]
        if FORMAT not in entries:
            raise MessageError(f"the message is no {kind} of this version of hushrec")
        said = json.loads(entries[FORMAT])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise MessageError(f"the {kind} is damaged: {type(error).__name__}") from None
    return said if isinstance(said, dict) else {}


# ------------------------------------------------------------ what facts and arrays must be


def whole_in(facts: Mapping[str, Any], name: str) -> int:
    """Return a whole number among the facts."""
    value = facts.get(name) if isinstance(facts, Mapping) else None
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > 2**300:
        raise MessageError(f"the message says no whole number for '{name}'")
    return value


def count_in(facts: Mapping[str, Any], name: str) -> int:
    """Return a count among the facts."""
    value = whole_in(facts, name)
    if value < 0:
        raise MessageError(f"the message counts {value} for '{name}'")
    return value


def text_in(facts: Mapping[str, Any], name: str, longest: int = 200) -> str:
    """Return a short text among the facts."""
    value = facts.get(name)
    if not isinstance(value, str) or len(value) > longest:
        raise MessageError(f"the message says no text for '{name}'")
    return value


def check_finite(array: Array, name: str) -> None:
    """Refuse numbers that are none."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise MessageError(f"'{name}' holds numbers that are not finite")
