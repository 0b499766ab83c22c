"""Recommend on a device from a bundle and a history, without training and without a network.

This folder needs numpy and the standard library only and imports nothing else of hushrec, so it can
be copied to a device as it is. `hushrec.serving.bundle` writes what it reads.

::

    recommender = Recommender.load("bundle")
    recommender.touch("1193")
    recommender.recommend(10)

A bundle is a folder with `manifest.json` and `model.safetensors`. Sizes, types, ranges and the
digest are checked before anything is used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .models import BundleModel, Mixture, Pairs, largest
from .reading import FORMAT as FORMAT
from .reading import MANIFEST, MODEL, Array, Given, catalogue, one_of, parse_tensors, read_manifest
from .reading import BundleError as BundleError


@dataclass(frozen=True)
class Suggestion:
    """One item of a recommendation list."""

    item: str
    title: str
    score: float
    because: str = ""
    """Expert with the largest contribution to the score; empty unless the model mixes experts."""


class Recommender:
    """A model and one user's history, oldest first."""

    def __init__(
        self, manifest: dict[str, Any], tensors: dict[str, Array], history: Iterable[str] = ()
    ) -> None:
        self.items, self.titles = catalogue(manifest)
        given = Given(manifest, dict(tensors), len(self.items))
        kind = one_of(manifest, "model", ("pairs", "mixture"))
        self._model: BundleModel = Pairs(given) if kind == "pairs" else Mixture(given)
        if given.tensors:
            raise BundleError(f"the model has unknown tensors {sorted(given.tensors)}")
        self._number = {item: number for number, item in enumerate(self.items)}
        self._history: dict[int, None] = {}
        for item in history:
            self.touch(item)

    @classmethod
    def load(cls, path: str | Path, history: Iterable[str] = ()) -> Recommender:
        """Read and check a bundle."""
        folder = Path(path)
        manifest = read_manifest(folder / MANIFEST)
        model = folder / MODEL
        if not model.is_file() or model.stat().st_size != manifest["model_bytes"]:
            raise BundleError(f"{model} is missing or not of the size the manifest says")
        content = model.read_bytes()
        if hashlib.sha256(content).hexdigest() != manifest["model_sha256"]:
            raise BundleError(f"{model} is not the file the manifest describes")
        return cls(manifest, parse_tensors(content), history)

    @property
    def history(self) -> list[str]:
        """Items that the user touched, oldest first, each once."""
        return [self.items[number] for number in self._history]

    def touch(self, item: str) -> bool:
        """Add an interaction to the history; False if the item is not in the catalogue."""
        number = self._number.get(item)
        if number is None:
            return False
        self._history.pop(number, None)
        self._history[number] = None
        return True

    def recommend(self, k: int = 10) -> list[Suggestion]:
        """Return the best k items not touched yet; ties go to the earlier one in the catalogue."""
        if k < 1:
            raise ValueError(f"k = {k}: a list has at least 1 item")
        past = np.array(list(reversed(self._history)), np.int64)
        with np.errstate(over="ignore", invalid="ignore"):
            scores, experts = self._model.score(past)
        if not np.isfinite(scores).all():
            raise BundleError("the model has scores that are NaN or infinite")
        scores[past] = -np.inf
        best = largest(scores, min(k, len(scores) - len(past)))
        best = best[np.argsort(-scores[best], kind="stable")]
        return [
            Suggestion(self.items[n], self.titles[n], float(scores[n]), expert)
            for n, expert in zip(best, experts(best), strict=True)
        ]
