"""Bundles: a model in the form that `hushrec.serving.recommender` serves on a device.

A bundle holds the parameters that scores need, in half precision by default, the catalogue and the
scoring options (docs/devices.md has the format). The bundle of a model that scores from shared
parameters and a history holds no user data. The bundle of one user holds that user's history and,
where scores need them, that user's own parameters, and nothing of other users.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import numpy as np
from safetensors.numpy import save

from hushrec.data.views import TrainView
from hushrec.errors import ConfigError, RunError, refuse_unknown
from hushrec.io.codec import Array
from hushrec.io.files import (
    atomic_folder,
    checked_path,
    remove,
    require_empty,
    write_bytes,
    writing,
)
from hushrec.kernels.mixture import PairTable
from hushrec.methods.base import Exports, ExportsUser, Method
from hushrec.methods.forms import (
    DeviceForm,
    Ensemble,
    ItemCounts,
    ItemFactors,
    ItemNetworks,
    ItemWeights,
)
from hushrec.serving.model import Model
from hushrec.serving.recommender import FORMAT, MANIFEST, MODEL

PAIRS_KEPT = 600
"""Default number of weights per item: the bundle of an ML-1M model stays below 10 MB."""


def can_export(method: Method) -> bool:
    """Return whether models of a method are exported without a user, for any history."""
    return isinstance(method, Exports)


class BundleForm(TypedDict, total=False):
    """Options of a bundle."""

    user: str | int | None
    """Id of the user whose bundle it is, with that user's history and own parameters; None for a
    bundle that serves any history."""
    neighbours: int | None
    """Largest weights kept per item and table; None for the default of the precision."""
    precision: Literal["half", "single"]
    overwrite: bool
    """Whether an existing bundle is replaced; other folders are never overwritten."""


def export(model: Model, path: str | Path, **options: Unpack[BundleForm]) -> Path:
    """Write a model as a bundle; each item of item pairs keeps ``neighbours`` largest weights.

    By default single precision keeps all weights, and the scores are those of the model: bit by bit
    for item pairs and counts, up to rounding for others. Half precision keeps as many as suit a
    device. The bundle of one ``user`` can be read by its owner only.
    """
    refuse_unknown("export", options, BundleForm.__annotations__)
    folder = checked_path(path)
    replaces = folder.is_dir() and {file.name for file in folder.iterdir()} == {MODEL, MANIFEST}
    if replaces and not options.get("overwrite", False):
        why = f"{folder} holds a bundle: choose another folder, or replace it with"
        raise RunError(f"{why} overwrite=True", command=f"{why} --overwrite")
    if not replaces:
        require_empty(folder)
    user, precision = options.get("user"), options.get("precision", "half")
    manifest, content = contents(model, user, options.get("neighbours"), precision)
    text, secret = json.dumps(manifest, ensure_ascii=False, indent=1), user is not None
    new, old = (folder.with_name(f".{folder.name}.{mark}") for mark in ("new", "replaced"))
    if replaces:
        remove(new)
    with atomic_folder(new if replaces else folder, secret=secret) as fresh:
        write_bytes(fresh / MODEL, content, secret=secret)
        write_bytes(fresh / MANIFEST, text.encode(), secret=secret)
    if replaces:
        with writing(folder):
            remove(old)
            folder.rename(old)
            new.rename(folder)
        remove(old)
    return folder


class BundleContents(NamedTuple):
    """What the two files of a bundle hold."""

    manifest: dict[str, Any]
    model: bytes


def contents(
    model: Model,
    user: str | int | None = None,
    neighbours: int | None = None,
    precision: Literal["half", "single"] = "half",
) -> BundleContents:
    """Return the manifest and the arrays of a bundle."""
    if neighbours is not None and neighbours < 1:
        raise ConfigError(f"neighbours = {neighbours}: must be at least 1")
    described, history = _described(model, user)
    form = _Form(neighbours, halved=precision == "half")
    if neighbours is not None and isinstance(described, Ensemble):
        raise ConfigError(
            f"{model.method.name} has tables for devices already: train with the option neighbours"
        )
    if neighbours is None and form.halved:
        form.neighbours = PAIRS_KEPT
    header = _header(described, form)
    data, popularity, personal = model.data, model.popularity, {}
    if history is not None:
        form.tensors["history"] = history.positives.values.astype(np.int32)
        personal = {"user": str(user)}
        # The popular items are for somebody without a history.
        if not model.without_history(history).any():
            popularity = None
    if popularity is not None:
        form.put("popularity", popularity)
    content = save(form.tensors)
    fixed = isinstance(described, ItemNetworks)
    if isinstance(described, ItemCounts):
        fixed = described.own == 0
    manifest = {
        "format": FORMAT,
        "method": model.method.name,
        **header,
        "personal": history is not None,
        **personal,
        "scores": "fixed" if fixed else "from history",
        "popular": popularity is not None,
        "repeats": data.repeats,
        "model_bytes": len(content),
        "model_sha256": hashlib.sha256(content).hexdigest(),
        "items": [str(item) for item in data.items],
        "titles": [data.title(number) for number in range(len(data.items))],
    }
    return BundleContents(manifest, content)


def _described(model: Model, user: str | int | None) -> tuple[DeviceForm, TrainView | None]:
    """Return how a device scores, and the history of its user, if it is the device of one."""
    method, shared = model.method, model.method.serving(model.shared)
    if not isinstance(method, Exports | ExportsUser):
        raise ConfigError(
            f"{method.name} has no form for devices: a method that inherits Exports or ExportsUser "
            "says how a device scores"
        )
    if user is None:
        if isinstance(method, Exports):
            return method.device_form(shared, model.data.clients), None
        why = f"{method.name} scores with parameters of single users: export the bundle of one user"
        raise ConfigError(f"{why} with user=…", command=f"{why} with --user ID")
    if str(user) not in model.data.user_index:
        raise ConfigError(f"user '{user}' is unknown to this model: only its users have bundles")
    users = model.indices([user])
    history, holders = model.data.history(users), model.data.holders
    if not isinstance(method, Exports):
        if holders is None or not method.traits.silos:
            return method.user_form(shared, model.private_of(users), history), history
        silo = model.private.read(model.data.client_index[users])
        history = replace(history, holders=holders[users])
        return method.user_form(shared, silo, history), history
    described = method.device_form(shared, model.data.clients)
    missing = None
    if isinstance(described, ItemFactors) and described.reads_values:
        missing = "ratings"
    elif isinstance(described, Ensemble) and model.data.repeats:
        missing = "baskets"
    if missing is not None:
        why = f"{method.name} reads the {missing} of a history, which a bundle does not hold"
        then = "export the bundle for all, and give it histories on the devices"
        raise ConfigError(f"{why}: leave out user, {then}", command=f"{why}: omit --user, {then}")
    return described, history


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

    def put_rows(self, name: str, rows: Array) -> float:
        """Add item rows [items, d]; return the scale that they are divided by, as of tables."""
        scale = float(np.float32(max(np.abs(rows).max(initial=0), 1e-30))) if self.halved else 1.0
        self.put(name, rows / scale)
        return scale

    def put_exact(self, name: str, array: Array) -> None:
        """Add a small array in single precision."""
        self.tensors[name] = np.ascontiguousarray(array, np.float32)


def _header(described: DeviceForm, form: _Form) -> dict[str, Any]:
    """Add the tensors of a form; return its keys of the manifest."""
    if isinstance(described, ItemWeights):
        header = _pairs(described, form)
    elif isinstance(described, Ensemble):
        header = _mixture(described, form)
    elif isinstance(described, ItemCounts):
        form.put("scores", described.scores)
        header = {"model": "counts", "own": float(described.own)}
    elif isinstance(described, ItemFactors):
        header = _factors(described, form)
    else:
        header = _networks(described, form)
    for name, array in form.tensors.items():
        if not np.isfinite(array).all():
            raise ConfigError(
                f"the model cannot be exported: '{name}' has numbers that are NaN or infinite"
            )
    return header


def _pairs(pairs: ItemWeights, form: _Form) -> dict[str, Any]:
    form.put("shares", pairs.shares)
    form.tensors["known"] = pairs.known.astype(np.uint8)
    return {
        "model": "pairs",
        "because": pairs.because,
        "recency": pairs.recency,
        "recent": pairs.recent,
        "popularity": pairs.popularity,
        "scale": form.put_table("", pairs.neighbours, pairs.weights),
    }


def _mixture(mixture: Ensemble, form: _Form) -> dict[str, Any]:
    experts: dict[str, list[dict[str, Any]]] = {}
    for expert, (words, parts) in mixture.experts.items():
        experts[expert] = []
        for number, part in enumerate(parts):
            arrays, name = dict(part.arrays), f"{expert}/{number}/"
            entry = {"kind": part.kind, "because": words, **part.options}
            for key, array in arrays.items():
                if key in PairTable._fields[:2]:  # the index, which all tables have in common
                    form.tensors[f"pairs/{key}"] = array
                elif array.dtype == np.int8:
                    form.tensors[name + key] = array
                else:
                    form.put(name + key, array)
            experts[expert].append(entry)
    form.put("mixture/weights", mixture.weights / mixture.scale[:-1])
    for key in ("center", "scale"):
        form.put(f"mixture/{key}", getattr(mixture, key))
    form.tensors["mixture/networks"] = mixture.networks  # small, and in full precision
    reranked, hidden = mixture.reranked, mixture.hidden
    return {"model": "mixture", "experts": experts, "reranked": reranked, "hidden": hidden}


def _factors(factors: ItemFactors, form: _Form) -> dict[str, Any]:
    header = {"model": "factors", "scale": form.put_rows("items", factors.items)}
    if factors.ridge is not None:
        names = ("ridge", "unseen", "frequency", "factor")
        return {**header, "vector": "solved", **{n: float(getattr(factors, n)) for n in names}}
    known = np.ones(len(factors.items)) if factors.known is None else factors.known
    form.tensors["known"] = known.astype(np.uint8)
    return {**header, "vector": "sum", "recency": factors.recency, "recent": factors.recent}


def _networks(networks: ItemNetworks, form: _Form) -> dict[str, Any]:
    branches = []
    for number, branch in enumerate(networks.branches):
        branches.append({"scale": form.put_rows(f"{number}/rows", branch.rows)})
        for layer, (weight, bias) in enumerate(branch.layers):
            form.put_exact(f"{number}/{layer}/weight", weight)
            form.put_exact(f"{number}/{layer}/bias", bias)
        branches[-1]["layers"] = len(branch.layers)
    return {"model": "network", "branches": branches}
