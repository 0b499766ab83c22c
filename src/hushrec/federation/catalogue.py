"""The public list of items, and of what may be said of items and users: the same on every node."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hushrec.clients import Protocol, Ragged, TrainView
from hushrec.data.interactions import (
    Categorical,
    Column,
    Features,
    Interactions,
    MultiCategorical,
    Numeric,
    StrArray,
)
from hushrec.errors import MessageError
from hushrec.frame import Array, Arrays, pack, unpack

KINDS: Mapping[str, type[Column]] = {
    kind.__name__: kind for kind in (Categorical, MultiCategorical, Numeric)
}
NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Catalogue:
    """What is public of the data before anybody trains."""

    items: StrArray
    titles: StrArray | None = None
    item_features: Features = field(default_factory=dict)
    user_features: Features = field(default_factory=dict)
    """Categories and ranges of what is known of users, and no user."""
    context: Features = field(default_factory=dict)
    """The same of what is known of an interaction."""

    @classmethod
    def of(cls, data: Interactions) -> Catalogue:
        """Take what is public from interactions, and none of their rows."""
        return cls(
            data.items,
            data.titles,
            data.item_features,
            {name: column.take(NO_ROWS) for name, column in data.user_features.items()},
            {name: column.take(NO_ROWS) for name, column in data.context.items()},
        )

    @property
    def digest(self) -> str:
        """Identify the catalogue: two that differ in anything have different digests."""
        return hashlib.blake2b(self.to_bytes(), digest_size=16).hexdigest()

    def nobody(self, protocol: Protocol, *, silos: bool) -> TrainView:
        """Return what training sees of no client at all."""
        usual = {name: c for name, c in self.context.items() if isinstance(c, Categorical)}
        return TrainView(
            users=NO_ROWS.astype(np.int32),
            n_items=len(self.items),
            positives=Ragged.empty(0),
            times=Ragged.empty(0, np.int64),
            values=Ragged.empty(0, np.float32),
            never_negative=Ragged.empty(0) if protocol == "published" else None,
            user_features={**self.user_features, **usual},
            item_features=self.item_features,
            holders=NO_ROWS.astype(np.int32) if silos else None,
        )

    def to_bytes(self) -> bytes:
        """Write it; equal catalogues are equal bytes."""
        arrays: dict[str, Array] = {"items": _text(self.items)}
        if self.titles is not None:
            arrays["titles"] = _text(self.titles)
        owners = {"item": self.item_features, "user": self.user_features, "row": self.context}
        columns: dict[str, list[dict[str, Any]]] = {}
        for owner, features in owners.items():
            columns[owner] = []
            for name, column in features.items():
                said, parts = _column_to(column)
                columns[owner].append({"name": name, **said})
                arrays |= {f"{owner}/{name}/{part}": array for part, array in parts.items()}
        arrays["columns"] = _text(columns)
        return pack("catalogue", {}, arrays)

    @classmethod
    def from_bytes(cls, data: bytes) -> Catalogue:
        """Read it back."""
        _, arrays = unpack("catalogue", data)
        try:
            said = json.loads(arrays["columns"].tobytes())
            features = {
                owner: {each["name"]: _column_from(owner, each, arrays) for each in said[owner]}
                for owner in ("item", "user", "row")
            }
            titles = _strings(arrays["titles"]) if "titles" in arrays else None
            items = _strings(arrays["items"])
        except (KeyError, TypeError, ValueError) as error:
            raise MessageError(f"the catalogue is damaged: {type(error).__name__}") from None
        if len(items) < 2 or len(np.unique(items)) != len(items):
            raise MessageError("the catalogue needs two items or more, each once")
        return cls(items, titles, features["item"], features["user"], features["row"])


def _text(value: object) -> Array:
    """Write names as an array of bytes: a header would be too small for them."""
    plain = value.tolist() if isinstance(value, np.ndarray) else value
    return np.frombuffer(json.dumps(plain).encode(), np.uint8)


def _strings(array: Array) -> StrArray:
    return np.array(json.loads(array.tobytes()), np.str_)


def _column_to(column: Column) -> tuple[dict[str, Any], dict[str, Array]]:
    said: dict[str, Any] = {"kind": type(column).__name__}
    parts: dict[str, Array] = {}
    for part, value in vars(column).items():
        if not isinstance(value, np.ndarray):
            said[part] = value
        else:
            parts[part] = _text(value) if value.dtype.kind == "U" else value
    return said, parts


def _column_from(owner: str, said: Mapping[str, Any], arrays: Arrays) -> Column:
    kind, name = KINDS[said["kind"]], said["name"]
    facts = {part: value for part, value in said.items() if part not in ("kind", "name")}
    prefix = f"{owner}/{name}/"
    parts = {key.removeprefix(prefix): a for key, a in arrays.items() if key.startswith(prefix)}
    found: dict[str, Any] = {
        part: _strings(a) if part == "names" else a for part, a in parts.items()
    }
    return kind(**facts, **found)
