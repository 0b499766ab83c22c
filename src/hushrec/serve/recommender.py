"""Recommend on a device: a bundle, a history, no training, no network.

This file needs numpy and the standard library only and imports nothing of hushrec, so it can be
copied to a device as it is. `hushrec.serve.bundle` writes what it reads.

::

    recommender = Recommender.load("bundle")
    recommender.touch("1193")
    recommender.recommend(10)

A bundle is a folder of `manifest.json` and `model.safetensors`. Nothing of it is believed before it
has been checked: sizes, types, ranges and the digest.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT = "hushrec-bundle-2"
MANIFEST, MODEL = "manifest.json", "model.safetensors"
MOST_BYTES = 2**30
"""A larger file is refused: a device has no use for it."""
LARGEST = 1e30
"""Of a number, and of a score: single precision knows hardly more."""
_DTYPES: dict[str, np.dtype[Any]] = {
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "U8": np.dtype("u1"),
    "U16": np.dtype("<u2"),
    "I32": np.dtype("<i4"),
}
_TENSORS = {
    "neighbours": ("U16", "I32"),
    "weights": ("F16", "F32"),
    "shares": ("F32",),
    "known": ("U8",),
}


class BundleError(ValueError):
    """The bundle is not what it should be."""


@dataclass(frozen=True)
class Suggestion:
    """One line of a list."""

    item: str
    title: str
    score: float


class Recommender:
    """A model of item-to-item weights and one user's history, oldest first."""

    def __init__(
        self,
        manifest: dict[str, Any],
        tensors: dict[str, NDArray[Any]],
        history: Iterable[str] = (),
    ) -> None:
        _check_model(manifest, tensors)
        self.items: list[str] = manifest["items"]
        self.titles: list[str] = manifest["titles"]
        scale = np.float32(manifest["scale"])
        self._neighbours = tensors["neighbours"]
        self._weights = tensors["weights"]
        self._scale = scale
        self._known = tensors["known"]
        self._prior = tensors["shares"] * np.float32(manifest["popularity"])
        places = np.arange(1, manifest["recent"] + 1)
        self._by_place = (places ** -float(manifest["recency"])).astype(np.float32)
        self._number = {item: number for number, item in enumerate(self.items)}
        self._history: dict[int, None] = {}
        for item in history:
            self.touch(item)

    @classmethod
    def load(cls, path: str | Path, history: Iterable[str] = ()) -> Recommender:
        """Read and check a bundle."""
        folder = Path(path)
        manifest = _read_manifest(folder / MANIFEST)
        model = folder / MODEL
        if not model.is_file() or model.stat().st_size != manifest["model_bytes"]:
            raise BundleError(f"{model} is missing or not of the size the manifest says")
        content = model.read_bytes()
        if hashlib.sha256(content).hexdigest() != manifest["model_sha256"]:
            raise BundleError(f"{model} is not the file the manifest describes")
        return cls(manifest, _parse_tensors(content), history)

    @property
    def history(self) -> list[str]:
        """What the user touched, oldest first, each item once."""
        return [self.items[number] for number in self._history]

    def touch(self, item: str) -> bool:
        """Take a new interaction, at once; False if the item is not in the catalogue."""
        number = self._number.get(item)
        if number is None:
            return False
        self._history.pop(number, None)
        self._history[number] = None
        return True

    def scores(self) -> NDArray[np.float32]:
        """Score every item by what was touched last."""
        scores = self._prior.copy()
        known = (item for item in reversed(self._history) if self._known[item])
        for weight, item in zip(self._by_place, known, strict=False):
            row = self._weights[item].astype(np.float32) * self._scale
            # An item's neighbours differ from each other, but for places left empty, which name
            # the item itself: it is in the history and not recommended.
            scores[self._neighbours[item]] += weight * row
        return scores

    def recommend(self, k: int = 10) -> list[Suggestion]:
        """Return the best k items not touched yet; ties go to the earlier one in the catalogue."""
        if k < 1:
            raise ValueError(f"a list needs at least 1 place, not {k}")
        scores = self.scores()
        scores[list(self._history)] = -np.inf
        k = min(k, len(scores) - len(self._history))
        if k == 0:
            return []
        bound = np.partition(scores, len(scores) - k)[len(scores) - k]
        best = np.flatnonzero(scores >= bound)
        best = best[np.argsort(-scores[best], kind="stable")][:k]
        return [Suggestion(self.items[n], self.titles[n], float(scores[n])) for n in best]


def _read_manifest(path: Path) -> dict[str, Any]:
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


def _parse_tensors(content: bytes) -> dict[str, NDArray[Any]]:
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
            dtype, shape = _DTYPES[spec["dtype"]], tuple(spec["shape"])
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


def _check_model(manifest: dict[str, Any], tensors: dict[str, NDArray[Any]]) -> None:
    items, titles = manifest.get("items"), manifest.get("titles")
    for name, texts in (("items", items), ("titles", titles)):
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise BundleError(f"'{name}' is not a list of texts")
    assert isinstance(items, list)
    assert isinstance(titles, list)
    n_items = len(items)
    if n_items == 0 or len(set(items)) != n_items or len(titles) != n_items:
        raise BundleError("the items are not a catalogue: each once, each with its title")
    for name in ("recency", "popularity", "scale"):
        value: Any = manifest.get(name)
        if type(value) not in (int, float) or not 0 <= value <= LARGEST:  # true for NaN as well
            raise BundleError(f"'{name}' is not a number from 0 to {LARGEST:g}")
    recent = manifest.get("recent")
    if type(recent) is not int or not 1 <= recent <= 10**6:
        raise BundleError("'recent' is not a number of items")
    if tensors.keys() != _TENSORS.keys():
        raise BundleError(f"the model holds {sorted(tensors)}, not {sorted(_TENSORS)}")
    for name, kinds in _TENSORS.items():
        if tensors[name].dtype not in [_DTYPES[kind] for kind in kinds]:
            raise BundleError(f"'{name}' has the type {tensors[name].dtype}")
    neighbours, weights, shares, known = (tensors[name] for name in _TENSORS)
    if neighbours.ndim != 2 or len(neighbours) != n_items or weights.shape != neighbours.shape:
        raise BundleError("neighbours and weights are not one row per item")
    if shares.shape != (n_items,) or known.shape != (n_items,):
        raise BundleError("shares and known are not one number per item")
    if neighbours.size and not (neighbours.min() >= 0 and neighbours.max() < n_items):
        raise BundleError("a neighbour is not in the catalogue")
    if not (np.isfinite(weights).all() and np.isfinite(shares).all()):
        raise BundleError("a weight is not a finite number")
    largest = float(np.abs(weights).max(initial=0)) * manifest["scale"] * recent
    largest += float(np.abs(shares).max(initial=0)) * manifest["popularity"]
    if largest > LARGEST:
        raise BundleError("the weights are so large that scores would be infinite")
