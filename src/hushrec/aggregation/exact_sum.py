"""Exact sum of client updates, in fixed point.

Every entry becomes a whole multiple of 2^-32, and whole numbers add exactly, in any order. So a sum
does not depend on threads, batches or silos, and it has the form that secure aggregation needs. The
step is a thousandth of what a float32 near 1 can resolve.

A sum is filled as uploads arrive and never holds one table per client. Sums of different threads or
nodes are merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec import kernels
from hushrec.aggregation.update import KeyedRows, Steps, Total, Update, UploadShape
from hushrec.errors import DivergedError
from hushrec.kernels import pairs as pair_kernels

STEPS_PER_UNIT = 2.0**32


class _KeyedSum:
    """An exact sum over 64-bit keys: a few sorted runs, each at least twice the next one's size.

    So an entry is merged a number of times that grows with the logarithm of the total only.
    """

    def __init__(self) -> None:
        self.runs: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []

    def add(self, keys: NDArray[Any], rows: NDArray[Any]) -> bool:
        """Fold rows in; False if a number does not fit."""
        distinct, sums, fits = pair_kernels.sum_by_key(keys, rows)
        return bool(fits) and self._push(distinct, sums)

    def merge(self, other: _KeyedSum) -> bool:
        """Fold another sum in; False if a number does not fit."""
        ok = True
        for run in other.runs:
            ok &= self._push(*run)
        return ok

    def total(self) -> tuple[NDArray[np.int64], NDArray[np.int64], bool]:
        """Return the ascending keys, their sums in steps, and whether those fit."""
        keys, sums = self.runs[-1]
        ok = True
        for more in reversed(self.runs[:-1]):
            keys, sums, fits = pair_kernels.merge_sums(keys, sums, *more)
            ok &= bool(fits)
        return keys, sums, ok

    def _push(self, keys: NDArray[np.int64], sums: NDArray[np.int64]) -> bool:
        ok = True
        while self.runs and len(self.runs[-1][0]) < 2 * len(keys):
            keys, sums, fits = pair_kernels.merge_sums(*self.runs.pop(), keys, sums)
            ok &= bool(fits)
        self.runs.append((keys, sums))
        return ok


class ExactSum:
    """Running sum of updates."""

    def __init__(self, n_rows: int) -> None:
        self.n_rows = n_rows
        self.clients = 0
        self._rows: dict[str, tuple[NDArray[np.int64], NDArray[np.bool_]]] = {}
        self._keyed: dict[str, _KeyedSum] = {}
        self._dense: dict[str, NDArray[np.int64]] = {}

    def add(self, update: Update) -> None:
        """Fold in the uploads of a batch of clients."""
        self.clients += update.clients
        for name, sent in update.rows.items():
            if isinstance(sent, KeyedRows):
                assert sent.base is None, "keys have no table to differ from"
                keyed = self._keyed.setdefault(name, _KeyedSum())
                self._check(keyed.add(sent.ids, sent.rows), name)
                continue
            if name not in self._rows:
                shape = (self.n_rows, sent.rows.shape[1])
                self._rows[name] = np.zeros(shape, np.int64), np.zeros(self.n_rows, np.bool_)
            total, touched = self._rows[name]
            base = sent.rows[:0] if sent.base is None else sent.base
            self._check(kernels.add_rows(total, touched, sent.ids, sent.rows, base), name)
        for name, array in update.dense.items():
            total = self._dense.setdefault(name, np.zeros(array.shape[1:], np.int64))
            flat = array.reshape(len(array), total.size)
            self._check(kernels.add_dense(total.reshape(-1), flat), name)

    def add_steps(self, steps: Steps) -> None:
        """Add whole steps to every entry of some arrays: exactly, as everything here."""
        noise = ExactSum(self.n_rows)
        noise._rows = {
            name: (table, np.ones(self.n_rows, np.bool_)) for name, table in steps.tables.items()
        }
        for name, rows in steps.spaces.items():
            noise._keyed[name] = _KeyedSum()
            noise._keyed[name].runs.append((np.arange(len(rows)), rows))
        noise._dense = dict(steps.dense)
        self.merge(noise)

    def merge(self, other: ExactSum) -> None:
        """Fold in another running sum, which is used up."""
        self.clients += other.clients
        for name, (total, touched) in other._rows.items():
            if name not in self._rows:
                self._rows[name] = total, touched
                continue
            mine, mine_touched = self._rows[name]
            ids = np.flatnonzero(touched)
            mine[ids] += total[ids]
            mine_touched[ids] = True
            self._check(bool((abs(mine[ids]) < 2**62).all()), name)
        for name, keyed in other._keyed.items():
            self._check(self._keyed.setdefault(name, _KeyedSum()).merge(keyed), name)
        for name, dense in other._dense.items():
            self._dense[name] = self._dense.get(name, np.zeros_like(dense)) + dense
            self._check(bool((abs(self._dense[name]) < 2**62).all()), name)

    def to_arrays(self) -> dict[str, NDArray[np.int64]]:
        """Return the sum in whole steps, for a message: the touched rows of tables and spaces."""
        arrays: dict[str, NDArray[np.int64]] = {}
        for name, (total, touched) in self._rows.items():
            ids = np.flatnonzero(touched)
            arrays |= {f"ids/{name}": ids, f"rows/{name}": total[ids]}
        for name, keyed in self._keyed.items():
            keys, steps, fits = keyed.total()
            self._check(fits, name)
            arrays |= {f"ids/{name}": keys, f"rows/{name}": steps}
        return arrays | {f"dense/{name}": array for name, array in self._dense.items()}

    @classmethod
    def from_arrays(
        cls, shape: UploadShape, clients: int, arrays: Mapping[str, NDArray[np.int64]]
    ) -> ExactSum:
        """Read back what `to_arrays` wrote, of uploads of this shape."""
        made = cls(shape.n_rows)
        made.clients = clients
        for name, array in arrays.items():
            part, _, name = name.partition("/")
            if part == "dense":
                made._dense[name] = array
            elif part == "rows" and name in shape.tables:
                total = np.zeros((shape.n_rows, shape.tables[name]), np.int64)
                touched, ids = np.zeros(shape.n_rows, np.bool_), arrays[f"ids/{name}"]
                total[ids], touched[ids] = array, True
                made._rows[name] = total, touched
            elif part == "rows":
                made._keyed[name] = _KeyedSum()
                made._keyed[name].runs.append((arrays[f"ids/{name}"], array))
        return made

    def total(self) -> Total:
        """Return the sum as numbers."""
        rows = {}
        for name, (total, touched) in self._rows.items():
            ids = np.flatnonzero(touched)
            rows[name] = ids, kernels.rows_as_numbers(total, ids)
        for name, keyed in self._keyed.items():
            keys, steps, fits = keyed.total()
            self._check(fits, name)
            rows[name] = keys, steps / STEPS_PER_UNIT
        dense = {name: array / STEPS_PER_UNIT for name, array in self._dense.items()}
        return Total(self.clients, rows, dense)

    @staticmethod
    def _check(ok: bool, name: str) -> None:
        if not ok:
            raise DivergedError(
                f"the update of '{name}' is not a number or too large to sum: training diverged; "
                "use a smaller learning rate"
            )
