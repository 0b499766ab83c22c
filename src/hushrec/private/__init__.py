"""Private parameters: their declarations, and the store that keeps them on the clients' side.

In a simulation a `PrivateStore` holds the parameters of all users and can outgrow memory. A user
gets a slot at its first write: in memory while the budget lasts, then in sparse memory-mapped files
whose pages are released from time to time. The cost grows with the users that took part, not with
the population.
"""

from __future__ import annotations

import mmap
import shutil
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec.aggregation import ClientRows
from hushrec.config import Settings
from hushrec.data.views import Ragged
from hushrec.errors import ConfigError, InputError
from hushrec.io import require_memory
from hushrec.kernels import ragged

Array = NDArray[Any]
Value = Array | ClientRows
Private = Mapping[str, Value]


@dataclass(frozen=True)
class PerClient:
    """A private array of fixed shape; ``initial`` until the client first trains."""

    initial: Array

    def nbytes(self, clients: int) -> int:
        """Return the size of one array per client."""
        return clients * self.initial.nbytes


@dataclass(frozen=True)
class PerClientTable(PerClient):
    """A private table [rows, width] of which `fit` may return only the changed rows (`ClientRows`).

    `fit` reads the whole table, often without a copy, and must not write to it.
    """


@dataclass(frozen=True)
class PerClientRows:
    """At most ``capacity[client]`` private table rows; none until the client first trains."""

    capacity: NDArray[np.int64]
    width: int

    def nbytes(self, clients: int) -> int:
        """Return the size of all rows at full capacity, ids included."""
        return int(self.capacity.sum()) * (4 * self.width + 4)


PrivateFields = Mapping[str, PerClient | PerClientRows]


def rows_in(private: Private, name: str) -> ClientRows:
    """Return a private field that was declared as `PerClientRows`."""
    rows = private[name]
    assert isinstance(rows, ClientRows), f"'{name}' is kept as rows"
    return rows


def rows_at(kept: ClientRows, items: Ragged) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return the kept row of every item of each client, or zeros, and whether there is one.

    Clients keep their rows in ascending order of their items.
    """

    def keys(indptr: Array, ids: Array) -> Array:
        return np.asarray((np.repeat(np.arange(len(indptr) - 1), np.diff(indptr)) << 32) + ids)

    wanted, known = keys(items.indptr, items.values), keys(kept.indptr, kept.ids)
    rows = np.zeros((len(wanted), kept.rows.shape[1]), np.float32)
    if not len(known):
        return rows, np.zeros(len(wanted), np.bool_)
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    found = np.asarray(known[at] == wanted)
    rows[found] = kept.rows[at[found]]
    return rows, found


def to_arrays(private: Private) -> dict[str, Array]:
    """Return private parameters as named arrays, for a file."""
    arrays: dict[str, Array] = {}
    for name, value in private.items():
        if isinstance(value, ClientRows):
            arrays |= {f"{name}.indptr": value.indptr, f"{name}.ids": value.ids, name: value.rows}
        else:
            arrays[name] = value
    return arrays


class _Segment:
    """Slots for a share of all users, in memory or in a folder; slots never move."""

    def __init__(
        self, columns: Iterable[_AnyColumn], slots: int, share: float, folder: Path | None
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

    def zeros(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return zeros in memory or in a sparse file; they take no space before the first write."""
        if self.folder is None or 0 in shape:
            return np.zeros(shape, dtype)
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{name.replace('/', '.')}.private"  # "layer0/weight" is no folder
        return np.memmap(file, dtype, "w+", shape=shape)


class _Written(NamedTuple):
    """The users of one segment in one call of `PrivateStore.write`."""

    segment: _Segment
    slots: Array
    users: Array
    mine: Array
    """Their positions among all users of the call."""
    new: Array
    """Whether each of them is written for the first time."""


class _Column:
    """Storage of an array of fixed shape for every user."""

    def __init__(self, spec: PerClient, name: str) -> None:
        self.initial, self.name = spec.initial, name

    def kept_bytes(self, n_users: int) -> int:
        """Return the bytes of all users together."""
        return n_users * self.initial.nbytes

    def allocate(self, segment: _Segment, share: float) -> None:
        shape = (segment.slots, *self.initial.shape)
        segment.values[self.name] = segment.zeros(self.name, shape, self.initial.dtype)

    def room(self, segment: _Segment, users: Array) -> int:
        """Return how many of these users, from the first on, still fit."""
        return len(users)

    def assign(self, segment: _Segment, users: Array) -> None:
        """Give new users their room on a segment."""

    def expect(self, users: Array, value: Value) -> None:
        """Refuse a value that does not fit its declaration, before anything is written."""

    def read(self, store: PrivateStore, users: Array) -> Value:
        """Return these users' values: a copy, or a read-only view."""
        values = np.empty((len(users), *self.initial.shape), self.initial.dtype)
        for segment, mine in store.by_segment(users):
            store.use(segment, len(mine) * self.initial.nbytes)
            values[_span(mine)] = segment.values[self.name][_span(store.slot[users[mine]])]
        values[~store.visited[users]] = self.initial
        return values

    def write(self, to: _Written, value: Value) -> None:
        to.segment.values[self.name][_span(to.slots)] = np.asarray(value)[_span(to.mine)]


class _TableColumn(_Column):
    """Storage of a table for every user: read in place, written by its changed rows."""

    def read(self, store: PrivateStore, users: Array) -> Value:
        slots, segment = _span(store.slot[users]), store.one_segment(users)
        if isinstance(slots, slice) and segment is not None:
            values: Array = segment.values[self.name][slots]
            store.use(segment, values.nbytes)
        else:
            values = np.asarray(super().read(store, users))
        values.flags.writeable = False
        return values

    def write(self, to: _Written, value: Value) -> None:
        if not isinstance(value, ClientRows):
            super().write(to, value)
            return
        target = to.segment.values[self.name]
        target[to.slots[to.new]] = self.initial
        ragged.put_rows(target, to.slots, to.mine, value.indptr, value.ids, value.rows)


class _RowsColumn:
    """Storage of a variable number of table rows for every user."""

    def __init__(self, spec: PerClientRows, name: str, n_users: int) -> None:
        self.capacity, self.width, self.name = spec.capacity, spec.width, name
        self.start = np.zeros(n_users, np.int64)
        self.count = np.zeros(n_users, np.int64)

    def kept_bytes(self, n_users: int) -> int:
        return int(self.count.sum()) * (4 * self.width + 4)

    def allocate(self, segment: _Segment, share: float) -> None:
        name, entries = self.name, int(self.capacity.sum() * share)
        segment.ids[name] = segment.zeros(f"{name}.ids", (entries,), np.int32)
        segment.values[name] = segment.zeros(name, (entries, self.width), np.float32)
        segment.used_rows[name] = 0
        segment.ready_rows[name] = 0 if segment.folder is None else entries

    def room(self, segment: _Segment, users: Array) -> int:
        needed = segment.used_rows[self.name] + np.cumsum(self.capacity[users])
        return int(np.searchsorted(needed, len(segment.ids[self.name]), side="right"))

    def assign(self, segment: _Segment, users: Array) -> None:
        """Assign rows of a segment to new users.

        The first access to memory is slow, so a growing segment touches half as much again ahead of
        its use; most rounds then find the memory of new users ready.
        """
        name, ends = self.name, np.cumsum(self.capacity[users])
        self.start[users] = segment.used_rows[name] + ends - self.capacity[users]
        segment.used_rows[name] += int(ends[-1]) if len(users) else 0
        used, ready = segment.used_rows[name], segment.ready_rows[name]
        if used > ready:
            segment.ready_rows[name] = min(len(segment.ids[name]), used + used // 2)
            segment.values[name][ready : segment.ready_rows[name]] = 0

    def expect(self, users: Array, value: Value) -> None:
        assert isinstance(value, ClientRows), f"'{self.name}' is kept as rows"
        count = np.diff(value.indptr)
        if (count > self.capacity[users]).any():
            raise InputError(f"a method keeps more rows of '{self.name}' than it declared")
        self.count[users] = count

    def read(self, store: PrivateStore, users: Array) -> Value:
        indptr = np.concatenate([[0], np.cumsum(self.count[users])])
        ids = np.empty(indptr[-1], np.int32)
        rows = np.empty((indptr[-1], self.width), np.float32)
        for segment, mine in store.by_segment(users):
            start, end = self.start[users[mine]], indptr[mine + 1]
            ragged.copy_ragged(segment.ids[self.name], start, ids, indptr[mine], end)
            ragged.copy_ragged(segment.values[self.name], start, rows, indptr[mine], end)
        return ClientRows(indptr, ids, rows)

    def write(self, to: _Written, value: Value) -> None:
        assert isinstance(value, ClientRows)
        start, first = self.start[to.users], value.indptr[to.mine]
        end = start + self.count[to.users]
        ragged.copy_ragged(value.ids, first, to.segment.ids[self.name], start, end)
        ragged.copy_ragged(value.rows, first, to.segment.values[self.name], start, end)


_AnyColumn = _Column | _RowsColumn


def _column(spec: PerClient | PerClientRows, name: str, n_users: int) -> _AnyColumn:
    if isinstance(spec, PerClientRows):
        return _RowsColumn(spec, name, n_users)
    if isinstance(spec, PerClient):
        return (_TableColumn if isinstance(spec, PerClientTable) else _Column)(spec, name)
    raise InputError(f"'{name}' is declared as {type(spec).__name__}, which no store supports")


def _span(indices: Array) -> slice | Array:
    """Return a slice for consecutive indices, which numpy copies faster."""
    if len(indices) and (np.diff(indices) == 1).all():
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return indices


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
        self.columns = {name: _column(spec, name, n_users) for name, spec in fields.items()}
        columns, size = self.columns.values(), store_bytes(fields, n_users)
        self.bytes_per_user = max(1, size // max(1, n_users))
        share = min(1.0, (memory_bytes or 0) / size) if folder is not None and size else 1.0
        self._segments = [_Segment(columns, int(n_users * share), share, None)]
        if share < 1:
            self._segments.append(_Segment(columns, n_users, 1.0, folder))
        self._segment_of = np.full(n_users, -1, np.int8)  # -1: none yet
        self.slot = np.zeros(n_users, np.int64)
        self._placing = threading.Lock()
        # Slots follow the order of first writes, so that a batch that returns is consecutive.
        # Tables that fit one segment follow the order of users, so that any neighbours are.
        tables = any(isinstance(column, _TableColumn) for column in columns)
        self._ordered = tables and len(self._segments) == 1
        self._mapped = 0

    def mean_bytes(self, without: Collection[str] = ()) -> float:
        """Return the mean number of bytes that one user keeps, without some of the fields."""
        columns = [column for name, column in self.columns.items() if name not in without]
        return sum(column.kept_bytes(self.n_users) for column in columns) / max(1, self.n_users)

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
        if isinstance(private, _Blocks) and private.store is self and private.users is users:
            return
        values = {name: private[name] for name in self.fields}
        for name, value in values.items():
            self.columns[name].expect(users, value)
        new = ~self.visited[users]
        self._place(users)
        for segment, mine in self.by_segment(users):
            self.use(segment, len(mine) * self.bytes_per_user)
            written = _Written(segment, self.slot[users[mine]], users[mine], mine, new[mine])
            for name, value in values.items():
                self.columns[name].write(written, value)

    def by_segment(self, users: Array) -> Iterator[tuple[_Segment, Array]]:
        """Yield each segment with the positions of its users in ``users``."""
        if len(self._segments) == 1:
            yield self._segments[0], np.arange(len(users))
            return
        for number, segment in enumerate(self._segments):
            mine = np.flatnonzero(self._segment_of[users] == number)
            if len(mine):
                yield segment, mine

    def one_segment(self, users: Array) -> _Segment | None:
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

    def use(self, segment: _Segment, size: int) -> None:
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
            yield {"visited": users, **to_arrays(self.read(users))}

    def restore(self, tensors: Mapping[str, Array]) -> None:
        """Read back one part that `tensors` yielded."""
        private: dict[str, Value] = {name: tensors[name] for name in self.fields}
        for name, spec in self.fields.items():
            if isinstance(spec, PerClientRows):
                indptr, ids = tensors[f"{name}.indptr"], tensors[f"{name}.ids"]
                private[name] = ClientRows(indptr, ids, tensors[name])
        self.write(tensors["visited"], private)

    def _parts(self) -> Iterator[Array]:
        """Yield the written users in parts of about `PART_BYTES`."""
        step, users = max(1, PART_BYTES // self.bytes_per_user), np.flatnonzero(self.visited)
        for start in range(0, len(users), step):
            yield users[start : start + step]


@dataclass(frozen=True, eq=False)
class _Blocks(Mapping[str, Value]):
    """The private parameters of some users, read field by field on access."""

    store: PrivateStore
    users: Array

    def __getitem__(self, name: str) -> Value:
        return self.store.columns[name].read(self.store, self.users)

    def __iter__(self) -> Iterator[str]:
        return iter(self.store.fields)

    def __len__(self) -> int:
        return len(self.store.fields)


def store_bytes(fields: PrivateFields, n_users: int) -> int:
    """Return the size in bytes of a store with all users written."""
    return sum(spec.nbytes(n_users) for spec in fields.values())
