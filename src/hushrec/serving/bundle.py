"""Bundles: a shared model in the form that `hushrec.serving.recommender` serves on a device.

A bundle holds the shared parameters, in half precision by default, the catalogue and the scoring
options. It holds no user data.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
from safetensors.numpy import save

from hushrec.errors import ConfigError, RunError, refuse_unknown
from hushrec.io.codec import Array
from hushrec.io.files import atomic_folder, checked_path, remove, require_empty, writing
from hushrec.methods.base import Method, Shared
from hushrec.methods.statistics.fedmix import FedMix
from hushrec.methods.statistics.pair_weights import ItemPairs
from hushrec.serving.model import Model
from hushrec.serving.recommender import FORMAT, MANIFEST, MODEL

PAIRS_KEPT, MIXTURE_KEPT = 600, 300
"""Default number of weights per item and table, with one table and with four: the bundle of an
ML-1M model stays below 20 MB."""


def can_export(method: Method) -> bool:
    """Return whether models of a method can be exported."""
    return isinstance(method, (ItemPairs, FedMix))


class BundleForm(TypedDict, total=False):
    """Options of a bundle."""

    neighbours: int | None
    """Largest weights kept per item and table; None for the default of the precision."""
    precision: Literal["half", "single"]
    overwrite: bool
    """Whether an existing bundle is replaced; other folders are never overwritten."""


def export(model: Model, path: str | Path, **options: Unpack[BundleForm]) -> Path:
    """Write a model as a bundle; each item keeps its ``neighbours`` largest weights.

    By default single precision keeps all weights, and the scores are those of the model: bit by bit
    for item pairs, up to rounding for a mixture. Half precision keeps as many as suit a device.
    """
    refuse_unknown("export", options, BundleForm.__annotations__)
    neighbours, precision = options.get("neighbours"), options.get("precision", "half")
    if neighbours is not None and neighbours < 1:
        raise ConfigError(f"neighbours = {neighbours}: must be at least 1")
    folder = checked_path(path)
    replaces = folder.is_dir() and {file.name for file in folder.iterdir()} == {MODEL, MANIFEST}
    if replaces and not options.get("overwrite", False):
        why = f"{folder} holds a bundle: choose another folder, or replace it with"
        raise RunError(f"{why} overwrite=True", command=f"{why} --overwrite")
    if not replaces:
        require_empty(folder)
    method, form = model.method, _Form(neighbours, halved=precision == "half")
    if neighbours is None and form.halved:
        form.neighbours = MIXTURE_KEPT if isinstance(method, FedMix) else PAIRS_KEPT
    if isinstance(method, FedMix):
        header = _mixture(method, model.shared, form)
    elif isinstance(method, ItemPairs):
        header = _pairs(method, model.shared, form)
    else:
        raise ConfigError(
            f"a bundle holds a mixture or item-to-item weights, which {method.name} does not have; "
            "use fedmix, fednext or fedease"
        )
    data, popularity = model.data, model.popularity
    if popularity is not None:
        form.put("popularity", popularity)
    content = save(form.tensors)
    manifest = {
        "format": FORMAT,
        "method": method.name,
        **header,
        "popular": popularity is not None,
        "repeats": data.repeats,
        "model_bytes": len(content),
        "model_sha256": hashlib.sha256(content).hexdigest(),
        "items": [str(item) for item in data.items],
        "titles": [data.title(number) for number in range(len(data.items))],
    }
    new, old = (folder.with_name(f".{folder.name}.{mark}") for mark in ("new", "replaced"))
    if replaces:
        remove(new)
    with atomic_folder(new if replaces else folder) as fresh:
        (fresh / MODEL).write_bytes(content)
        (fresh / MANIFEST).write_text(json.dumps(manifest, ensure_ascii=False, indent=1), "utf-8")
    if replaces:
        with writing(folder):
            remove(old)
            folder.rename(old)
            new.rename(folder)
        remove(old)
    return folder


@dataclass
class _Form:
    """Number format of a bundle, and the tensors written so far."""

    neighbours: int | None
    halved: bool
    tensors: dict[str, Array] = field(default_factory=dict)

    def put(self, name: str, array: Array) -> None:
        """Add an array in the bundle's precision; a short one, [n], always in single precision."""
        dtype = np.float16 if self.halved and array.ndim > 1 else np.float32
        self.tensors[name] = np.ascontiguousarray(array, dtype)

    def put_table(self, name: str, ids: Array, weights: Array) -> float:
        """Add the largest item-to-item weights; return the scale that they are divided by."""
        if self.neighbours is not None and self.neighbours < ids.shape[1]:
            order = np.argsort(-np.abs(weights), axis=1, kind="stable")
            best = np.sort(order[:, : self.neighbours], axis=1)
            ids, weights = (np.take_along_axis(array, best, 1) for array in (ids, weights))
        # Divided by the largest: half precision is finest below 1, and nothing overflows.
        largest = np.float32(max(np.abs(weights).max(initial=0), 1e-30))
        scale = float(largest) if self.halved else 1.0
        small = len(ids) <= 2**16
        self.tensors[f"{name}neighbours"] = ids.astype(np.uint16 if small else np.int32)
        self.put(f"{name}weights", weights / np.float32(scale))
        return scale


def _pairs(method: ItemPairs, shared: Shared, form: _Form) -> dict[str, Any]:
    form.put("shares", shared["shares"])
    # Under noise only items of the head have weights, and only they count in a history.
    known = shared.get("head", np.ones(len(shared["shares"]), np.bool_))
    form.tensors["known"] = known.astype(np.uint8)
    return {
        "model": "pairs",
        "because": method.because,
        "recency": float(shared["scalars"][0]),
        "recent": method.config.recent,
        "popularity": float(shared["scalars"][1]),
        "scale": form.put_table("", shared["neighbours"], shared["weights"]),
    }


def _mixture(method: FedMix, shared: Shared, form: _Form) -> dict[str, Any]:
    experts: dict[str, list[dict[str, Any]]] = {}
    for expert, model in method.active(shared):
        parts = expert.parts(model)
        if parts is None:
            raise ConfigError(f"expert '{expert.name}' cannot be exported: it has no Expert.parts")
        experts[expert.name] = []
        for number, part in enumerate(parts):
            arrays, name = dict(part.arrays), f"{expert.name}/{number}/"
            words = expert.because or expert.name
            entry = {"kind": part.kind, "because": words, **part.options}
            if part.kind == "lags":
                table = arrays.pop("neighbours"), arrays.pop("weights")
                entry["scale"] = form.put_table(name, *table)
            for key, array in arrays.items():
                form.put(name + key, array)
            experts[expert.name].append(entry)
    weights, (center, scale, network, hidden, best) = method.network(shared)
    form.put("mixture/weights", weights / scale[:-1])
    for key, array in (("center", center), ("scale", scale), ("network", network)):
        form.put(f"mixture/{key}", array)
    reranked = best if method.reranks(shared) else 0
    return {"model": "mixture", "experts": experts, "reranked": reranked, "hidden": hidden}
