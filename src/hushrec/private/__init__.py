"""Private parameters: what stays on a client, as methods declare it; `store` keeps it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import ClientRows

Array = NDArray[Any]
Private = Mapping[str, "Array | ClientRows"]


class PrivateField(ABC):
    """Declaration of a private parameter that every client has."""

    @abstractmethod
    def nbytes(self, clients: int) -> int:
        """Return its size in bytes for a number of clients."""

    @abstractmethod
    def to_arrays(self, name: str, value: Array | ClientRows) -> dict[str, Array]:
        """Return a value as named arrays, for a file."""

    @abstractmethod
    def from_arrays(self, name: str, arrays: Mapping[str, Array]) -> Array | ClientRows:
        """Read back what `to_arrays` wrote."""


@dataclass(frozen=True)
class PerClient(PrivateField):
    """A private array of fixed shape; ``initial`` until the client first trains."""

    initial: Array

    def nbytes(self, clients: int) -> int:
        """Return the size of one array per client."""
        return clients * self.initial.nbytes

    def to_arrays(self, name: str, value: Array | ClientRows) -> dict[str, Array]:
        """Return the array under the field's name."""
        return {name: np.asarray(value)}

    def from_arrays(self, name: str, arrays: Mapping[str, Array]) -> Array | ClientRows:
        """Read the array."""
        return arrays[name]


@dataclass(frozen=True)
class PerClientTable(PerClient):
    """A private table [rows, width] of which `fit` may return only the changed rows (`ClientRows`).

    `fit` reads the whole table, often without a copy, and must not write to it.
    """


@dataclass(frozen=True)
class PerClientRows(PrivateField):
    """At most ``capacity[client]`` private table rows; none until the client first trains."""

    capacity: NDArray[np.int64]
    width: int

    def nbytes(self, clients: int) -> int:
        """Return the size of all rows at full capacity, ids included."""
        return int(self.capacity.sum()) * (4 * self.width + 4)

    def to_arrays(self, name: str, value: Array | ClientRows) -> dict[str, Array]:
        """Return row offsets of the clients, row ids and rows."""
        assert isinstance(value, ClientRows), f"'{name}' is kept as rows"
        return {f"{name}.indptr": value.indptr, f"{name}.ids": value.ids, name: value.rows}

    def from_arrays(self, name: str, arrays: Mapping[str, Array]) -> Array | ClientRows:
        """Read rows back."""
        return ClientRows(arrays[f"{name}.indptr"], arrays[f"{name}.ids"], arrays[name])


PrivateFields = Mapping[str, PrivateField]
