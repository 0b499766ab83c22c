"""Nested parameters of a method: trees of named arrays.

Messages, checkpoints, digests and byte counts hold flat names; the names of a path are joined here,
and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]
Tree = Mapping[str, Any]
"""Names to arrays, or to further trees."""


def joined(*path: str) -> str:
    """Return the flat name of a path."""
    return "/".join(path)


def flatten(tree: Tree) -> dict[str, Array]:
    """Return the arrays of a tree by their flat names."""
    out: dict[str, Array] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            out |= {joined(name, below): array for below, array in flatten(value).items()}
        else:
            out[name] = value
    return out


def unflatten(flat: Mapping[str, Array]) -> dict[str, Any]:
    """Return the tree that `flatten` wrote."""
    tree: dict[str, Any] = {}
    for name, array in flat.items():
        *path, last = name.split("/")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = array
    return tree
