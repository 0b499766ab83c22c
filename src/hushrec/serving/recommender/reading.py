"""Read a bundle's two files, and refuse whatever is not what it should be."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT = "hushrec-bundle-4"
MANIFEST, MODEL = "manifest.json", "model.safetensors"
MOST_BYTES = 2**30
"""A larger file is refused: a device has no use for it."""
LARGEST = 1e30
"""Of a number: single precision knows hardly more."""
DTYPES: dict[str, np.dtype[Any]] = {
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "U8": np.dtype("u1"),
    "U16": np.dtype("<u2"),
    "I32": np.dtype("<i4"),
}
Array = NDArray[Any]


class BundleError(ValueError):
    """The bundle is not what it should be."""


@dataclass(frozen=True)
class Given:
    """A manifest and the tensors that nothing has taken yet."""

    manifest: dict[str, Any]
    tensors: dict[str, Array]
    n_items: int

    def take(self, name: str, kinds: Sequence[str], *shape: int | None) -> Array:
        """Return a tensor of one of these types and this shape; None is any length."""
        if name not in self.tensors:
            raise BundleError(f"the model has no '{name}'")
        found = self.tensors.pop(name)
        if found.dtype not in [DTYPES[kind] for kind in kinds]:
            raise BundleError(f"'{name}' has the type {found.dtype}")
        fits = [wanted in (None, size) for wanted, size in zip(shape, found.shape, strict=False)]
        if len(shape) != found.ndim or not all(fits):
            raise BundleError(f"'{name}' has the shape {found.shape}, not {shape}")
        if not np.isfinite(found).all():
            raise BundleError(f"'{name}' has a number that is not finite")
        return found


def catalogue(manifest: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the items and their titles."""
    items, titles = manifest.get("items"), manifest.get("titles")
    for name, texts in (("items", items), ("titles", titles)):
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise BundleError(f"'{name}' is not a list of texts")
    assert isinstance(items, list)
    assert isinstance(titles, list)
    if not items or len(set(items)) != len(items) or len(titles) != len(items):
        raise BundleError("the items are not a catalogue: each once, each with its title")
    return items, titles


def experts(manifest: Mapping[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the parts of every expert, by name."""
    experts = manifest.get("experts")
    if not isinstance(experts, dict) or not experts:
        raise BundleError("'experts' are not named parts")
    for parts in experts.values():
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise BundleError("an expert is not a list of parts")
    return list(experts.items())


def one_of(options: Mapping[str, Any], name: str, allowed: Iterable[str]) -> str:
    """Return a word that must be one of a few."""
    value = options.get(name)
    if not isinstance(value, str) or value not in allowed:
        raise BundleError(f"'{name}' is none of {', '.join(allowed)}")
    return value


def number(options: Mapping[str, Any], name: str) -> float:
    """Return a finite number that must not be negative."""
    value: Any = options.get(name)
    if type(value) not in (int, float) or not 0 <= value <= LARGEST:  # true for NaN as well
        raise BundleError(f"'{name}' is not a number from 0 to {LARGEST:g}")
    return float(value)


def floor(options: Mapping[str, Any], name: str = "floor") -> float:
    """Return a number that logarithms can be taken of."""
    value = number(options, name)
    if value < 1e-30:
        raise BundleError(f"'{name}' = {value!r} is not above 0")
    return value


def whole(options: Mapping[str, Any], name: str, least: int) -> int:
    """Return a whole number."""
    value = options.get(name)
    if type(value) is not int or not least <= value <= 10**6:
        raise BundleError(f"'{name}' is not a number of items")
    return value


def wholes(options: Mapping[str, Any], name: str, least: int) -> list[int]:
    """Return a list of whole numbers."""
    values = options.get(name)
    if not isinstance(values, list) or not values:
        raise BundleError(f"'{name}' is not a list of numbers")
    return [whole({name: value}, name, least) for value in values]


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest, and check what the model file is checked by."""
    if not path.is_file() or path.stat().st_size > MOST_BYTES:
        raise BundleError(f"{path} is missing or too large")
    try:
        manifest = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is not JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise BundleError(f"{path} is not a bundle of the format {FORMAT}")
    size = manifest.get("model_bytes")
    if type(size) is not int or not 8 <= size <= MOST_BYTES:
        raise BundleError(f"{path}: 'model_bytes' is not a size")
    if not isinstance(manifest.get("model_sha256"), str):
        raise BundleError(f"{path}: 'model_sha256' is not a digest")
    return manifest


def parse_tensors(content: bytes) -> dict[str, NDArray[Any]]:
    """Read a safetensors file: the length of a JSON header, the header, the numbers."""
    start = 8 + int.from_bytes(content[:8], "little")
    if start > len(content):
        raise BundleError("the model's header is longer than its file")
    try:
        header = json.loads(content[8:start])
        out, end = {}, start
        for name, spec in sorted(
            ((n, s) for n, s in header.items() if n != "__metadata__"),
            key=lambda pair: pair[1]["data_offsets"],
        ):
            dtype, shape = DTYPES[spec["dtype"]], tuple(spec["shape"])
            first, last = (start + offset for offset in spec["data_offsets"])
            if first != end or last - first != dtype.itemsize * math.prod(shape):
                raise BundleError(f"'{name}' does not have the size its header says")
            if any(type(n) is not int or n < 0 for n in shape) or last > len(content):
                raise BundleError(f"'{name}' has an impossible shape")
            out[name] = np.frombuffer(content[first:last], dtype).reshape(shape)
            end = last
    except (UnicodeDecodeError, json.JSONDecodeError, AttributeError, RecursionError) as error:
        raise BundleError(f"the model's header cannot be read: {error}") from None
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, BundleError):
            raise
        raise BundleError(f"the model's header is malformed: {error!r}") from None
    if end != len(content):
        raise BundleError("the model has bytes that belong to nothing")
    return out
