"""What stays on a client: how a method declares its private parameters."""

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
    """One private parameter of every client."""

    @abstractmethod
    def nbytes(self, clients: int) -> int:
        """Return its size for so many clients."""

    @abstractmethod
    def to_arrays(self, name: str, value: Array | ClientRows) -> dict[str, Array]:
        """Write a value of it as plain arrays, for a file."""

    @abstractmethod
    def from_arrays(self, name: str, arrays: Mapping[str, Array]) -> Array | ClientRows:
        """Read back what `to_arrays` wrote."""


@dataclass(frozen=True)
class PerClient(PrivateField):
    """A private array of fixed shape; a client that was never trained holds ``initial``."""

    initial: Array

    def nbytes(self, clients: int) -> int:
        """Return the size of so many arrays."""
        return clients * self.initial.nbytes

    def to_arrays(self, name: str, value: Array | ClientRows) -> dict[str, Array]:
        """Write the array."""
        return {name: np.asarray(value)}

    def from_arrays(self, name: str, arrays: Mapping[str, Array]) -> Array | ClientRows:
        """Read the array."""
        return arrays[name]


@dataclass(frozen=True)
class PerClientTable(PerClient):
    """A private table [rows, width]: `fit` may give back only the rows it changed, a ClientRows.

    It is read whole, but not copied where that can be avoided, and must not be written to.
    """


@dataclass(frozen=True)
class PerClientRows(PrivateField):
    """Private table rows, at most ``capacity[client]`` of them; none before the first training."""

    capacity: NDArray[np.int64]
    width: int

    def nbytes(self, clients: int) -> int:
        """Return the size of all rows there may be, ids included."""
        return int(self.capacity.sum()) * (4 * self.width + 4)

    def to_arrays(self, name: str, value: Array | ClientRows) -> dict[str, Array]:
        """Write ids, rows and whose they are."""
        assert isinstance(value, ClientRows), f"'{name}' is kept as rows"
        return {f"{name}.indptr": value.indptr, f"{name}.ids": value.ids, name: value.rows}

    def from_arrays(self, name: str, arrays: Mapping[str, Array]) -> Array | ClientRows:
        """Read them back."""
        return ClientRows(arrays[f"{name}.indptr"], arrays[f"{name}.ids"], arrays[name])


PrivateFields = Mapping[str, PrivateField]
