"""`PrivateStore`: private parameters at rest, in memory and, beyond a budget, on file.

A store never leaves the clients' side. In a simulation it holds the parameters of all users and can
outgrow memory. A user gets a slot at its first write: in memory while the budget lasts, then in
sparse memory-mapped files whose pages are released from time to time. The cost grows with the
users that took part, not with the population.
"""

from __future__ import annotations

import mmap
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import singledispatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec.aggregation import ClientRows
from hushrec.config import Settings
from hushrec.errors import ConfigError, InputError
from hushrec.io.memory import require_memory
from hushrec.kernels import ragged
from hushrec.private import (
    PerClient,
    PerClientRows,
    PerClientTable,
    Private,
    PrivateField,
    PrivateFields,
)

Array = NDArray[Any]
Kept = Array | ClientRows


class Segment:
    """Slots for a share of all users, in memory or in a folder; slots never move."""

    def __init__(
        self, columns: Iterable[Column | RowsColumn], slots: int, share: float, folder: Path | None
    ) -> None:
        self.folder = folder
        self.slots = slots
        self.used = 0
        self.values: dict[str, Array] = {}
        self.ids: dict[str, Array] = {}
        self.used_rows: dict[str, int] = {}
        self.ready_rows: dict[str, int] = {}
        for column in columns:
            column.allocate(self, share)


class Written(NamedTuple):
    """The users of one segment in one call of `PrivateStore.write`."""

    segment: Segment
    slots: Array
    users: Array
    mine: Array
    """Their positions among all users of the call."""
    new: Array
    """Whether each of them is written for the first time."""
    here: slice | Array
    """`mine` and `slots` as slices where possible, which numpy copies faster."""
    there: slice | Array


class Column:
    """Storage of an array of fixed shape for every user."""

    in_order: ClassVar[bool] = False
    """Whether slots follow the order of users, so that consecutive users are one slice."""

    def __init__(self, spec: PerClient, name: str) -> None:
        self.spec, self.name = spec, name

    def allocate(self, segment: Segment, share: float) -> None:
        """Allocate a segment's share of all users."""
        initial = self.spec.initial
        shape = (segment.slots, *initial.shape)
        segment.values[self.name] = allocate_zeros(segment.folder, self.name, shape, initial.dtype)

    def room(self, segment: Segment, users: Array) -> int:
        """Return how many of these users, from the first on, still fit."""
        return len(users)

    def assign(self, segment: Segment, users: Array) -> None:
        """Give new users their room on a segment."""

    def expect(self, users: Array, value: Kept) -> None:
        """Refuse a value that does not fit its declaration, before anything is written."""

    def read(self, store: PrivateStore, users: Array) -> Kept:
        """Return these users' values: a copy, or a read-only view."""
        values = np.empty((len(users), *self.spec.initial.shape), self.spec.initial.dtype)
        for segment, mine in store.by_segment(users):
            store.use(segment, len(mine) * self.spec.initial.nbytes)
            here = all_or_span(mine, len(users))
            values[here] = segment.values[self.name][span(store.slot[users[mine]])]
        values[~store.visited[users]] = self.spec.initial
        return values

    def write(self, to: Written, value: Kept) -> None:
        """Write the values of the users of a segment."""
        to.segment.values[self.name][to.there] = np.asarray(value)[to.here]


class TableColumn(Column):
    """Storage of a table for every user: read in place, written by its changed rows."""

    in_order = True

    def read(self, store: PrivateStore, users: Array) -> Kept:
        """Return a read-only view if these users have consecutive slots, else a copy."""
        slots, segment = span(store.slot[users]), store.one_segment(users)
        if isinstance(slots, slice) and segment is not None:
            values: Array = segment.values[self.name][slots]
            store.use(segment, values.nbytes)
        else:
            values = np.asarray(super().read(store, users))
        values.flags.writeable = False
        return values

    def write(self, to: Written, value: Kept) -> None:
        """Write whole tables, or changed rows."""
        if not isinstance(value, ClientRows):
            super().write(to, value)
            return
        target = to.segment.values[self.name]
        target[to.slots[to.new]] = self.spec.initial
        ragged.put_rows(target, to.slots, to.mine, value.indptr, value.ids, value.rows)


class RowsColumn:
    """Storage of a variable number of table rows for every user."""

    in_order: ClassVar[bool] = False

    def __init__(self, spec: PerClientRows, name: str, n_users: int) -> None:
        self.spec, self.name = spec, name
        self.start = np.zeros(n_users, np.int64)
        self.count = np.zeros(n_users, np.int64)

    def allocate(self, segment: Segment, share: float) -> None:
        """Allocate a segment's share of all rows."""
        name, entries = self.name, int(self.spec.capacity.sum() * share)
        int32, float32 = np.dtype(np.int32), np.dtype(np.float32)
        segment.ids[name] = allocate_zeros(segment.folder, f"{name}.ids", (entries,), int32)
        segment.values[name] = allocate_zeros(
            segment.folder, name, (entries, self.spec.width), float32
        )
        segment.used_rows[name] = 0
        segment.ready_rows[name] = 0 if segment.folder is None else entries

    def room(self, segment: Segment, users: Array) -> int:
        """Return how many of these users, from the first on, still fit."""
        needed = segment.used_rows[self.name] + np.cumsum(self.spec.capacity[users])
        return int(np.searchsorted(needed, len(segment.ids[self.name]), side="right"))

    def assign(self, segment: Segment, users: Array) -> None:
        """Assign rows of a segment to new users.

        The first access to memory is slow, so a growing segment touches half as much again ahead of
        its use; most rounds then find the memory of new users ready.
        """
        name, ends = self.name, np.cumsum(self.spec.capacity[users])
        self.start[users] = segment.used_rows[name] + ends - self.spec.capacity[users]
        segment.used_rows[name] += int(ends[-1]) if len(users) else 0
        used, ready = segment.used_rows[name], segment.ready_rows[name]
        if used > ready:
            segment.ready_rows[name] = min(len(segment.ids[name]), used + used // 2)
            segment.values[name][ready : segment.ready_rows[name]] = 0

    def expect(self, users: Array, value: Kept) -> None:
        """Refuse more rows than declared."""
        assert isinstance(value, ClientRows), f"'{self.name}' is kept as rows"
        count = np.diff(value.indptr)
        if (count > self.spec.capacity[users]).any():
            raise InputError(f"a method keeps more rows of '{self.name}' than it declared")
        self.count[users] = count

    def read(self, store: PrivateStore, users: Array) -> Kept:
        """Return a copy of these users' rows."""
        indptr = np.concatenate([[0], np.cumsum(self.count[users])])
        ids = np.empty(indptr[-1], np.int32)
        rows = np.empty((indptr[-1], self.spec.width), np.float32)
        for segment, mine in store.by_segment(users):
            start, end = self.start[users[mine]], indptr[mine + 1]
            ragged.copy_ragged(segment.ids[self.name], start, ids, indptr[mine], end)
            ragged.copy_ragged(segment.values[self.name], start, rows, indptr[mine], end)
        return ClientRows(indptr, ids, rows)

    def write(self, to: Written, value: Kept) -> None:
        """Write the rows of the users of a segment."""
        assert isinstance(value, ClientRows), f"'{self.name}' is kept as rows"
        start, first = self.start[to.users], value.indptr[to.mine]
        end = start + self.count[to.users]
        ragged.copy_ragged(value.ids, first, to.segment.ids[self.name], start, end)
        ragged.copy_ragged(value.rows, first, to.segment.values[self.name], start, end)


@singledispatch
def column_of(spec: PrivateField, name: str, n_users: int) -> Column | RowsColumn:
    """Return the storage of a declared field."""
    raise InputError(f"'{name}' is declared as {type(spec).__name__}, which no store supports")


@column_of.register
def _(spec: PerClient, name: str, n_users: int) -> Column:
    return Column(spec, name)


@column_of.register
def _(spec: PerClientTable, name: str, n_users: int) -> Column:
    return TableColumn(spec, name)


@column_of.register
def _(spec: PerClientRows, name: str, n_users: int) -> RowsColumn:
    return RowsColumn(spec, name, n_users)


def allocate_zeros(folder: Path | None, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return zeros in memory or in a sparse file; neither takes space before it is written to."""
    if folder is None or 0 in shape:
        return np.zeros(shape, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    return np.memmap(folder / f"{name}.private", dtype, "w+", shape=shape)


def span(indices: Array) -> slice | Array:
    """Return a slice for consecutive indices, which numpy copies faster."""
    if len(indices) and (np.diff(indices) == 1).all():
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return indices


def all_or_span(mine: Array, count: int) -> slice | Array:
    """Return ascending positions among ``count`` as a slice, where they are consecutive."""
    return slice(None) if len(mine) == count else span(mine)


WORKSPACE = ".private-"
"""Prefix of the temporary folder of file-backed parameters, removed with the store."""
PART_BYTES = 96 * 2**20
"""Bytes of private parameters that are copied or saved at a time."""
MAPPED_BYTES = 256 * 2**20
"""Bytes of file-backed parameters that are used before their pages are released."""


class StoreConfig(Settings):
    """Where private parameters are kept during a simulation."""

    kind: Literal["auto", "memory", "file"] = "auto"
    """`auto` uses memory up to the budget and files beyond it."""
    budget_gb: Annotated[float, Field(gt=0)] = 1.5
    """Memory for the parameters of the current and of the selected round together."""


class PrivateStore:
    """Private parameters by user and field; an unwritten user has the field's initial value."""

    def __init__(
        self,
        fields: PrivateFields,
        n_users: int,
        folder: Path | None = None,
        memory_bytes: float | None = None,
    ) -> None:
        """Keep ``memory_bytes`` in memory and the rest in ``folder``; all in memory without one."""
        self.fields = fields
        self.n_users = n_users
        self.folder = folder
        self.memory_bytes = memory_bytes
        self.workspace: TemporaryDirectory[str] | None = None
        self.visited = np.zeros(n_users, bool)
        self.columns = {name: column_of(spec, name, n_users) for name, spec in fields.items()}
        size = store_bytes(fields, n_users)
        self.bytes_per_user = max(1, size // max(1, n_users))
        share = 1.0
        if folder is not None and size:
            share = min(1.0, (memory_bytes or 0) / size)
        columns = self.columns.values()
        self._segments = [Segment(columns, int(n_users * share), share, None)]
        if share < 1:
            self._segments.append(Segment(columns, n_users, 1.0, folder))
        self._segment_of = np.full(n_users, -1, np.int8)  # -1: none yet
        self.slot = np.zeros(n_users, np.int64)
        self._placing = threading.Lock()
        # Slots follow the order of first writes, so that a batch that returns is consecutive.
        # Tables that fit one segment follow the order of users, so that any neighbours are.
        tables = any(column.in_order for column in self.columns.values())
        self._ordered = tables and len(self._segments) == 1
        self._mapped = 0

    @classmethod
    def create(
        cls, fields: PrivateFields, n_users: int, config: StoreConfig, folder: Path | None
    ) -> PrivateStore:
        """Make a store in memory, or in a temporary folder inside ``folder``, as configured."""
        # The selected round's parameters are kept beside the current ones.
        size, budget = 2 * store_bytes(fields, n_users), config.budget_gb * 2**30
        if config.kind == "memory" or (config.kind == "auto" and size <= budget):
            require_memory(size, "the private parameters", "store.kind=file, or a smaller d")
            return cls(fields, n_users)
        workspace = TemporaryDirectory(prefix=WORKSPACE, dir=folder)
        free = shutil.disk_usage(workspace.name).free
        if size > free:
            raise ConfigError(
                f"the private parameters may take {size / 2**30:.1f} GB and the disk of "
                f"{Path(workspace.name).parent} has {free / 2**30:.1f} GB free; use a smaller d or "
                "another disk"
            )
        in_memory = budget / 2 if config.kind == "auto" else 0.0
        store = cls(fields, n_users, Path(workspace.name), in_memory)
        store.workspace = workspace
        return store

    @classmethod
    def beside(cls, other: PrivateStore) -> PrivateStore:
        """Return an empty store of the same fields, in memory or on file as ``other`` is."""
        folder = None if other.folder is None else other.folder / "selected"
        store = cls(other.fields, other.n_users, folder, other.memory_bytes)
        store.workspace = other.workspace
        return store

    def read(self, users: Array) -> Private:
        """Return the private parameters of these users; each field is read on access."""
        return _Blocks(self, users)

    def write(self, users: Array, private: Private) -> None:
        """Replace the private parameters of these users; of tables, the given rows.

        Parameters that `read` returned for the same users are already stored and are not copied.
        """
        if isinstance(private, _Blocks) and private.of(self, users):
            return
        values = {name: private[name] for name in self.fields}
        for name, value in values.items():
            self.columns[name].expect(users, value)
        new = ~self.visited[users]
        self._place(users)
        for segment, mine in self.by_segment(users):
            self.use(segment, len(mine) * self.bytes_per_user)
            slots, here = self.slot[users[mine]], all_or_span(mine, len(users))
            written = Written(segment, slots, users[mine], mine, new[mine], here, span(slots))
            for name, value in values.items():
                self.columns[name].write(written, value)

    def by_segment(self, users: Array) -> Iterator[tuple[Segment, Array]]:
        """Yield each segment with the positions of its users in ``users``."""
        if len(self._segments) == 1:
            yield self._segments[0], np.arange(len(users))
            return
        for number, segment in enumerate(self._segments):
            mine = np.flatnonzero(self._segment_of[users] == number)
            if len(mine):
                yield segment, mine

    def one_segment(self, users: Array) -> Segment | None:
        """Return the segment of all these users, if all were written and it is the same."""
        if not self.visited[users].all() or len(np.unique(self._segment_of[users])) != 1:
            return None
        return self._segments[int(self._segment_of[users[0]])]

    def _place(self, users: Array) -> None:
        """Assign slots to users that are written for the first time."""
        with self._placing:
            new = users[~self.visited[users]]
            for number, segment in enumerate(self._segments):
                fit = min(len(new), segment.slots - segment.used)
                for column in self.columns.values():
                    fit = column.room(segment, new[:fit])
                taken, new = new[:fit], new[fit:]
                self._segment_of[taken] = number
                self.slot[taken] = taken if self._ordered else segment.used + np.arange(fit)
                segment.used += fit
                for column in self.columns.values():
                    column.assign(segment, taken)
            self.visited[users] = True

    def use(self, segment: Segment, size: int) -> None:
        """Count bytes read or written on file, and release pages from time to time."""
        if segment.folder is not None:
            self._mapped += size
            if self._mapped > MAPPED_BYTES:
                self.release()

    def release(self) -> None:
        """Release the memory pages of file-backed arrays; the contents stay on file."""
        self._mapped = 0
        for segment in self._segments:
            for array in (*segment.values.values(), *segment.ids.values()):
                if isinstance(array, np.memmap):
                    array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]

    def snapshot(self, target: PrivateStore | None = None) -> PrivateStore:
        """Copy all written parameters into another store, a new one by default."""
        target = target or PrivateStore.beside(self)
        for users in self._parts():
            target.write(users, self.read(users))
        target.release()
        return target

    def tensors(self) -> Iterator[dict[str, Array]]:
        """Yield the written parameters as named arrays, part by part, for a checkpoint."""
        for users in self._parts():
            out: dict[str, Array] = {"visited": users}
            for name, value in self.read(users).items():
                out |= self.fields[name].to_arrays(name, value)
            yield out

    def restore(self, tensors: Mapping[str, Array]) -> None:
        """Read back one part that `tensors` yielded."""
        private = {name: spec.from_arrays(name, tensors) for name, spec in self.fields.items()}
        self.write(tensors["visited"], private)

    def _parts(self) -> Iterator[Array]:
        """Yield the written users in parts of about `PART_BYTES`."""
        step = max(1, PART_BYTES // self.bytes_per_user)
        users = np.flatnonzero(self.visited)
        for start in range(0, len(users), step):
            yield users[start : start + step]


class _Blocks(Mapping[str, "Array | ClientRows"]):
    """The private parameters of some users, read field by field on access."""

    def __init__(self, store: PrivateStore, users: Array) -> None:
        self._store = store
        self._users = users

    def of(self, store: PrivateStore, users: Array) -> bool:
        """Return whether this was read from a store for these users."""
        return self._store is store and self._users is users

    def __getitem__(self, name: str) -> Array | ClientRows:
        return self._store.columns[name].read(self._store, self._users)

    def __iter__(self) -> Iterator[str]:
        return iter(self._store.fields)

    def __len__(self) -> int:
        return len(self._store.fields)


def store_bytes(fields: PrivateFields, n_users: int) -> int:
    """Return the size in bytes of a store with all users written."""
    return sum(spec.nbytes(n_users) for spec in fields.values())
