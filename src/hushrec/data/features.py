"""Features as numbers: what a method that knows no ids sees of users and items.

A category becomes a row of weights over its field's vocabulary, to be multiplied with a table of
embeddings: all weight on one category, or spread evenly over several (the mean of their
embeddings). Entry 0 of every vocabulary is "unknown": a missing category, and everything about a
user that the data does not know. A number is scaled to -1 … 1 by its declared range, which is
public; one that is missing, or lies outside, is 0, or the nearer end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.data.interactions import Categorical, Column, Features, MultiCategorical, Numeric
from hushrec.data.views import TrainView
from hushrec.errors import ConfigError, DataError, nearest

MOST_CATEGORIES = 5_000
"""A field with more of them is an id in disguise."""
MOST_GROUPS = 128
"""Categories of a feature above which it is left out: its sums would be too many to trust."""

Array = NDArray[Any]
KINDS: Mapping[str, type[Column]] = {
    kind.__name__: kind for kind in (Categorical, MultiCategorical, Numeric)
}


@dataclass(frozen=True)
class Encoded:
    """Features as a matrix: weights over each categorical field's vocabulary, then the numbers."""

    rows: NDArray[np.float32]
    """[rows, all vocabularies + numbers]; the weights of a field sum to one."""
    fields: tuple[int, ...]
    """Length of each vocabulary, "unknown" included."""
    numbers: int
    """Count of the numeric fields."""


def encode(features: Features, rows: NDArray[Any], owner: str) -> Encoded:
    """Encode these rows of the columns; a row beyond the last one is unknown in every field.

    ``owner`` is "user" or "item" and says whose columns they are in an error.
    """
    bags, numbers = [], []
    for name, column in features.items():
        at = np.minimum(rows, len(column))
        if isinstance(column, Numeric):
            scaled = _scaled(column, name, owner) if len(column) else np.zeros(0)
            numbers.append(np.append(scaled, 0)[at][:, None])
        else:
            bags.append(_bag(column, f"{owner} feature '{name}'")[at])
    parts = [*bags, *numbers, np.zeros((len(rows), 0))]
    sizes = tuple(bag.shape[1] for bag in bags)
    return Encoded(np.hstack(parts).astype(np.float32), sizes, len(numbers))


def _bag(column: Categorical | MultiCategorical, what: str) -> NDArray[np.float32]:
    """Return each row's weights of "unknown" and of every category; the last row is unknown."""
    size = 1 + len(column.names)
    if size > MOST_CATEGORIES:
        raise DataError(
            f"{what} has {size - 1:,} categories, at most {MOST_CATEGORIES:,} are taken: it looks "
            "like an id; leave it out, or group its values"
        )
    weights = np.zeros((len(column) + 1, size), np.float32)
    if isinstance(column, Categorical):
        weights[np.arange(len(column)), np.maximum(column.codes, -1) + 1] = 1
        weights[-1, 0] = 1
    else:
        weights[:-1, 1:] = column.flags
        count = weights.sum(1)
        weights /= np.maximum(count, 1)[:, None]
        weights[:, 0] = count == 0
    return weights


def _scaled(column: Numeric, name: str, owner: str) -> Array:
    low, high = column.low, column.high
    if low is None or high is None:
        if owner == "user":
            raise DataError(
                f"user feature '{name}' is a number without a range: declare it, as in "
                f"--user-feature {name}:number:0:100; a range found in people's data would give "
                "some of it away"
            )
        # The catalogue is public, so its own range is.
        low, high = float(np.nanmin(column.values)), float(np.nanmax(column.values))
    span = (high - low) / 2 or 1.0
    scaled = np.clip((column.values.astype(np.float64) - low) / span - 1, -1, 1)
    return np.nan_to_num(scaled, nan=0.0)


def of_newcomer(columns: Features, known: Mapping[str, str]) -> Features:
    """Return the columns of one new user with these features; others are unknown."""
    for name in known:
        if name not in columns:
            raise ConfigError(f"no user feature '{name}'{nearest(name, columns)}")
    return {
        name: _column_of(column, [_entry(column, name, known[name]) if name in known else None])
        for name, column in columns.items()
    }


def _entry(column: Column, name: str, given: str) -> float | str | list[str]:
    if isinstance(column, Numeric):
        try:
            return float(given)
        except ValueError:
            raise ConfigError(f"user feature '{name}' = '{given}': expected a number") from None
    names, words = column.names.tolist(), given.split("|")
    for word in words:
        if word not in names:
            raise ConfigError(f"user feature '{name}' has no value '{word}'{nearest(word, names)}")
    if isinstance(column, MultiCategorical):
        return words
    if len(words) > 1:
        raise ConfigError(f"user feature '{name}' takes one value, not {len(words)}")
    return words[0]


def usual(column: Categorical, owner: NDArray[np.int32], n_owners: int) -> Categorical:
    """Return each owner's most frequent category among its rows; the lower code wins a tie.

    It turns features of interactions, such as the weather, into a feature of the user, which is
    known before a recommendation is made.
    """
    counts = np.zeros((n_owners, len(column.names)), np.int32)
    known = column.codes >= 0
    np.add.at(counts, (owner[known], column.codes[known]), 1)
    codes = np.where(counts.any(1), counts.argmax(1), -1).astype(np.int32)
    return replace(column, codes=codes)


# ------------------------------------------------------------ columns as plain arrays


def features_to_arrays(owners: Mapping[str, Features]) -> dict[str, Array]:
    """Write the columns of several owners ("item", "user", …); "columns" describes the arrays."""
    columns: dict[str, list[dict[str, Any]]] = {owner: [] for owner in owners}
    arrays: dict[str, Array] = {}
    for owner, features in owners.items():
        for name, column in features.items():
            header: dict[str, Any] = {"name": name, "kind": type(column).__name__}
            for part, value in vars(column).items():
                if isinstance(value, np.ndarray):
                    text = value.dtype.kind == "U"
                    arrays[f"{owner}/{name}/{part}"] = text_to_array(value) if text else value
                else:
                    header[part] = value
            columns[owner].append(header)
    return {**arrays, "columns": text_to_array(columns)}


def features_from_arrays(
    owners: Iterable[str], arrays: Mapping[str, Array]
) -> dict[str, dict[str, Column]]:
    """Read back what `features_to_arrays` wrote; damaged arrays are KeyError or ValueError."""
    columns = json.loads(arrays["columns"].tobytes())
    return {
        owner: {header["name"]: _read_column(owner, header, arrays) for header in columns[owner]}
        for owner in owners
    }


def _read_column(owner: str, header: Mapping[str, Any], arrays: Mapping[str, Array]) -> Column:
    facts = {part: value for part, value in header.items() if part not in ("kind", "name")}
    prefix = f"{owner}/{header['name']}/"
    parts: dict[str, Any] = {
        key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)
    }
    if "names" in parts:
        parts["names"] = array_to_strings(parts["names"])
    return KINDS[header["kind"]](**facts, **parts)


def text_to_array(value: object) -> Array:
    """Write names as an array of bytes: a file's header would be too small for them."""
    plain = value.tolist() if isinstance(value, np.ndarray) else value
    return np.frombuffer(json.dumps(plain).encode(), np.uint8)


def array_to_strings(array: Array) -> NDArray[np.str_]:
    """Read back the names that `text_to_array` wrote."""
    return np.array(json.loads(array.tobytes()), np.str_)


# ------------------------------------------------------------ rows of features as JSON


def rows_to_json(features: Features, count: int) -> list[str]:
    """Encode the known features of each row as JSON."""
    rows: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, column in features.items():
        for row, value in zip(rows, _values_of(column), strict=True):
            if value is not None:
                row[name] = value
    return [json.dumps(row) for row in rows]


def _values_of(column: Column) -> list[Any]:
    if isinstance(column, Categorical):
        return [None if code < 0 else str(column.names[code]) for code in column.codes]
    if isinstance(column, MultiCategorical):
        return [column.names[flags].tolist() for flags in column.flags]
    return [None if np.isnan(value) else float(value) for value in column.values]


def columns_from_json(vocabulary: Features, rows: Iterable[str]) -> dict[str, Column]:
    """Decode rows as columns with the catalogue's categories; other categories are unknown."""
    entries = [json.loads(row) for row in rows]
    return {
        name: _column_of(column, [row.get(name) for row in entries])
        for name, column in vocabulary.items()
    }


def _column_of(kind: Column, entries: list[Any]) -> Column:
    if isinstance(kind, Numeric):
        values = [np.nan if entry is None else entry for entry in entries]
        return replace(kind, values=np.array(values, np.float32))
    codes_of = {str(name): code for code, name in enumerate(kind.names)}
    if isinstance(kind, Categorical):
        codes = [-1 if entry is None else codes_of.get(entry, -1) for entry in entries]
        return replace(kind, codes=np.array(codes, np.int32))
    flags = np.zeros((len(entries), len(kind.names)), np.bool_)
    for row, entry in enumerate(entries):
        flags[row, [codes_of[name] for name in entry or () if name in codes_of]] = True
    return replace(kind, flags=flags)


def category_columns(view: TrainView) -> list[Categorical | MultiCategorical]:
    """Return the features that are used: categories, and not too many of them."""
    found, groups = [], 0
    for column in view.item_features.values():
        if isinstance(column, (Categorical, MultiCategorical)):
            more = 1 + len(column.names)
            # No more pairs of categories than pairs of items: a small catalogue knows no more.
            if more <= MOST_GROUPS and groups + more <= view.n_items:
                found.append(column)
                groups += more
    return found


def category_shares(view: TrainView) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return each item's weights of all categories, "unknown" included, and each feature's size."""
    parts = [_bag(column, "item feature")[:-1] for column in category_columns(view)]
    sizes = np.array([part.shape[1] for part in parts], np.int64)
    return np.concatenate([np.zeros((view.n_items, 0), np.float32), *parts], axis=1), sizes
