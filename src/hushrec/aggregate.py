"""What clients upload, and its exact sum.

Sums are kept in fixed point: every entry becomes a whole multiple of 2^-32 and whole numbers add
exactly, in any order. So a sum does not depend on threads, chunks or silos, and it is the form
that secure aggregation needs. The step is a thousandth of what a float32 near 1 can resolve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec import kernels
from hushrec.errors import DivergedError

STEPS_PER_UNIT = 2.0**32
ID_BYTES = 4


@dataclass(frozen=True)
class RowStack:
    """Rows of a table, ragged by client: client c owns entries ``indptr[c]`` to ``indptr[c+1]``."""

    indptr: NDArray[np.int64]
    ids: NDArray[np.int32]
    rows: NDArray[np.float32]
    """[entries, width]"""
    base: NDArray[np.float32] | None = None
    """Where given, the stack stands for the rows' differences from this table's. The sum takes
    them as it goes; `differences` writes them out."""

    def differences(self) -> RowStack:
        """Return the stack with its differences written out, as they travel."""
        if self.base is None:
            return self
        written = kernels.row_differences(self.rows, self.ids, self.base)
        return RowStack(self.indptr, self.ids, written)

    @property
    def nbytes(self) -> int:
        """Size of ids and rows on the wire."""
        return len(self.ids) * ID_BYTES + self.rows.nbytes


@dataclass(frozen=True)
class Update:
    """What a stack of clients uploads: sparse table deltas and dense deltas, [clients, …]."""

    clients: int
    rows: Mapping[str, RowStack] = field(default_factory=dict)
    dense: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all the clients' messages together."""
        sparse = sum(stack.nbytes for stack in self.rows.values())
        return sparse + sum(array.nbytes for array in self.dense.values())


@dataclass(frozen=True)
class Total:
    """The sum over the clients of a round, as numbers."""

    clients: int
    rows: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]]
    """For each table: the touched row ids, ascending, and the sum of their deltas."""
    dense: Mapping[str, NDArray[np.float64]]


class ExactSum:
    """A running sum that updates are folded into as they arrive."""

    def __init__(self, n_rows: int) -> None:
        self.n_rows = n_rows
        self.clients = 0
        self.up_bytes = 0
        self._rows: dict[str, tuple[NDArray[np.int64], NDArray[np.bool_]]] = {}
        self._dense: dict[str, NDArray[np.int64]] = {}

    def add(self, update: Update) -> None:
        """Fold in the uploads of a stack of clients."""
        self.clients += update.clients
        self.up_bytes += update.nbytes
        for name, stack in update.rows.items():
            if name not in self._rows:
                shape = (self.n_rows, stack.rows.shape[1])
                self._rows[name] = np.zeros(shape, np.int64), np.zeros(self.n_rows, np.bool_)
            total, touched = self._rows[name]
            base = stack.rows[:0] if stack.base is None else stack.base
            self._check(kernels.add_rows(total, touched, stack.ids, stack.rows, base), name)
        for name, array in update.dense.items():
            steps = np.rint(np.asarray(array, np.float64) * STEPS_PER_UNIT)
            self._check(bool((abs(steps) < 2.0**62).all()), name)  # false for NaN as well
            before = self._dense.get(name, np.zeros(array.shape[1:], np.int64))
            self._check(bool((abs(before + steps.sum(axis=0)) < 2.0**62).all()), name)
            self._dense[name] = before + steps.astype(np.int64).sum(axis=0)

    def merge(self, other: ExactSum) -> None:
        """Fold in another running sum, which is used up."""
        self.clients += other.clients
        self.up_bytes += other.up_bytes
        for name, (total, touched) in other._rows.items():
            if name not in self._rows:
                self._rows[name] = total, touched
                continue
            mine, mine_touched = self._rows[name]
            ids = np.flatnonzero(touched)
            mine[ids] += total[ids]
            mine_touched[ids] = True
            self._check(bool((abs(mine[ids]) < 2**62).all()), name)
        for name, dense in other._dense.items():
            self._dense[name] = self._dense.get(name, np.zeros_like(dense)) + dense
            self._check(bool((abs(self._dense[name]) < 2**62).all()), name)

    def total(self) -> Total:
        """Return the sum as numbers."""
        rows = {}
        for name, (total, touched) in self._rows.items():
            ids = np.flatnonzero(touched)
            rows[name] = ids, kernels.rows_as_numbers(total, ids)
        dense = {name: array / STEPS_PER_UNIT for name, array in self._dense.items()}
        return Total(self.clients, rows, dense)

    @staticmethod
    def _check(ok: bool, name: str) -> None:
        if not ok:
            raise DivergedError(
                f"the update of '{name}' is not a number or too large to sum: training diverged; "
                "use a smaller learning rate"
            )
