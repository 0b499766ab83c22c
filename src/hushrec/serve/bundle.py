"""Write what a device needs to recommend, and nothing else: `hushrec.serve.recommender` reads it.

A bundle holds the shared item-to-item weights, half precision by default, the catalogue's names and
the options that score from a history. No user is in it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from hushrec.disk import filling, require_empty
from hushrec.errors import ConfigError
from hushrec.methods.base import Method, Shared
from hushrec.methods.item_pairs import ItemPairs
from hushrec.paths import checked
from hushrec.serve.recommender import FORMAT, MANIFEST, MODEL


class Catalogue(Protocol):
    """The items that a model is of."""

    @property
    def items(self) -> NDArray[np.str_]:
        """Their ids."""
        ...

    def title(self, item: int) -> str:
        """Return what to print for an item."""
        ...


class Trained(Protocol):
    """What is exported: a run, or anything that has its model and its catalogue."""

    @property
    def method(self) -> Method:
        """How the model scores."""
        ...

    @property
    def shared(self) -> Shared:
        """The model."""
        ...

    @property
    def data(self) -> Catalogue:
        """The catalogue."""
        ...


def export(
    run: Trained,
    path: str | Path,
    *,
    neighbours: int | None = 600,
    precision: Literal["half", "single"] = "half",
) -> Path:
    """Write a run's model as a bundle; each item keeps its ``neighbours`` largest weights.

    ``neighbours=None, precision="single"`` gives the scores of the run to the bit.
    """
    if not isinstance(run.method, ItemPairs):
        raise ConfigError(
            f"a bundle holds item-to-item weights, which {run.method.name} does not have; "
            "use fednext or fedease"
        )
    if neighbours is not None and neighbours < 1:
        raise ConfigError(f"neighbours = {neighbours}: must be at least 1")
    folder = checked(path)
    require_empty(folder)
    ids, weights = _largest(run.shared["neighbours"], run.shared["weights"], neighbours)
    n_items, scale = len(ids), 1.0
    if precision == "half":
        # Relative to the largest: half precision is finest below 1, and nothing overflows.
        scale = float(np.float32(max(np.abs(weights).max(), 1e-30)))
        weights = (weights / np.float32(scale)).astype(np.float16)
    tensors: dict[str, NDArray[Any]] = {
        "neighbours": ids.astype(np.uint16 if n_items <= 2**16 else np.int32),
        "weights": weights,
        "shares": run.shared["shares"],
        # Under noise only the items of the head have weights, and only they are counted back.
        "known": run.shared.get("head", np.ones(n_items, np.bool_)).astype(np.uint8),
    }
    content = save(tensors)
    config = run.method.config
    data = run.data
    manifest = {
        "format": FORMAT,
        "method": run.method.name,
        "recency": float(run.shared["scalars"][0]),
        "recent": config.recent,
        "popularity": float(run.shared["scalars"][1]),
        "scale": scale,
        "model_bytes": len(content),
        "model_sha256": hashlib.sha256(content).hexdigest(),
        "items": [str(item) for item in data.items],
        "titles": [data.title(number) for number in range(n_items)],
    }
    with filling(folder) as fresh:
        (fresh / MODEL).write_bytes(content)
        (fresh / MANIFEST).write_text(json.dumps(manifest, ensure_ascii=False, indent=1), "utf-8")
    return folder


def _largest(
    ids: NDArray[np.int32], weights: NDArray[np.float32], count: int | None
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    if count is None or count >= ids.shape[1]:
        return ids, np.ascontiguousarray(weights)
    best = np.sort(np.argsort(-np.abs(weights), axis=1, kind="stable")[:, :count], axis=1)
    return np.take_along_axis(ids, best, 1), np.take_along_axis(weights, best, 1)
