"""Recommend on a device: a bundle, a history, no training, no network.

This folder needs numpy and the standard library only and imports nothing else of hushrec, so it can
be copied to a device as it is. `hushrec.serving.bundle` writes what it reads.

::

    recommender = Recommender.load("bundle")
    recommender.touch("1193")
    recommender.recommend(10)

A bundle is a folder of `manifest.json` and `model.safetensors`. Nothing of it is believed before it
has been checked: sizes, types, ranges and the digest.
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
    """One line of a list."""

    item: str
    title: str
    score: float
    because: str = ""
    """Who spoke for it most, where the model is a mixture."""


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
            raise BundleError(f"the model holds {sorted(given.tensors)}, which nothing needs")
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

    def recommend(self, k: int = 10) -> list[Suggestion]:
        """Return the best k items not touched yet; ties go to the earlier one in the catalogue."""
        if k < 1:
            raise ValueError(f"a list needs at least 1 place, not {k}")
        past = np.array(list(reversed(self._history)), np.int64)
        with np.errstate(over="ignore", invalid="ignore"):
            scores, voices = self._model.score(past)
        if not np.isfinite(scores).all():
            raise BundleError("the model's numbers are so large that its scores are none")
        scores[past] = -np.inf
        best = largest(scores, min(k, len(scores) - len(past)))
        best = best[np.argsort(-scores[best], kind="stable")]
        return [
            Suggestion(self.items[n], self.titles[n], float(scores[n]), voice)
            for n, voice in zip(best, voices(best), strict=True)
        ]
