"""How each kind of private field lies on shelves, in memory or on file, is read and written.

Private parameters at rest: what stays on the clients, in memory and, past a budget, on file.

A store never leaves the side of the clients. In a simulation it holds everybody's parameters, so
it can outgrow the machine. Users get their place on first visit, one after the other: in memory
while the budget lasts, then in sparse memory-mapped files whose pages are given back to the system
after every round. What it costs grows with the users that took part, not with the population.
"""

from __future__ import annotations

import mmap
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import singledispatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec import kernels
from hushrec.aggregation import ClientRows
from hushrec.config import Settings
from hushrec.errors import ConfigError, InputError
from hushrec.io.memory import require_memory
from hushrec.private.fields import (
    PerClient,
    PerClientRows,
    PerClientTable,
    Private,
    PrivateField,
    PrivateFields,
)

if TYPE_CHECKING:
    pass

Array = NDArray[Any]
Kept = Array | ClientRows


class Shelf:
    """Room for some share of all blocks, in memory or in a folder; nothing in it ever moves."""

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


class Visit(NamedTuple):
    """Users that are written, of those on one shelf."""

    shelf: Shelf
    slots: Array
    users: Array
    mine: Array
    """Their positions among all users that are written."""
    new: Array
    """Which of them come for the first time."""
    here: slice | Array
    """`mine` and `slots` as numpy moves them fastest."""
    there: slice | Array


class Column:
    """An array of fixed shape for every user: how it lies on shelves, is read and written."""

    in_order: ClassVar[bool] = False
    """Whether users should lie in their own order, so that neighbours are read in one go."""

    def __init__(self, spec: PerClient, name: str) -> None:
        self.spec, self.name = spec, name

    def allocate(self, shelf: Shelf, share: float) -> None:
        """Make room on a shelf for its share of all users."""
        initial = self.spec.initial
        shape = (shelf.slots, *initial.shape)
        shelf.values[self.name] = allocate_zeros(shelf.folder, self.name, shape, initial.dtype)

    def room(self, shelf: Shelf, users: Array) -> int:
        """Return how many of these users, from the first on, still fit."""
        return len(users)

    def place(self, shelf: Shelf, users: Array) -> None:
        """Give new users their room on a shelf."""

    def expect(self, users: Array, value: Kept) -> None:
        """Refuse a value that was not declared, before anything is written."""

    def read(self, store: PrivateStore, users: Array) -> Kept:
        """Return these users' blocks: a copy, or what must not be changed."""
        values = np.empty((len(users), *self.spec.initial.shape), self.spec.initial.dtype)
        for shelf, mine in store.by_shelf(users):
            store.use(shelf, len(mine) * self.spec.initial.nbytes)
            here = all_or_span(mine, len(users))
            values[here] = shelf.values[self.name][span(store.slot[users[mine]])]
        values[~store.visited[users]] = self.spec.initial
        return values

    def write(self, to: Visit, value: Kept) -> None:
        """Write the blocks of the users on a shelf."""
        to.shelf.values[self.name][to.there] = np.asarray(value)[to.here]


class TableColumn(Column):
    """A whole table for every user, read where it lies and written by its changed rows."""

    in_order = True

    def read(self, store: PrivateStore, users: Array) -> Kept:
        """Return the blocks where they lie, if these users lie side by side; else copies."""
        slots, shelf = span(store.slot[users]), store.one_shelf(users)
        if isinstance(slots, slice) and shelf is not None:
            values: Array = shelf.values[self.name][slots]
            store.use(shelf, values.nbytes)
        else:
            values = np.asarray(super().read(store, users))
        values.flags.writeable = False
        return values

    def write(self, to: Visit, value: Kept) -> None:
        """Write whole tables, or the changed rows."""
        if not isinstance(value, ClientRows):
            super().write(to, value)
            return
        target = to.shelf.values[self.name]
        target[to.slots[to.new]] = self.spec.initial
        kernels.put_rows(target, to.slots, to.mine, value.indptr, value.ids, value.rows)


class RowsColumn:
    """Rows of a table, each user's own number of them, one after the other on a shelf."""

    in_order: ClassVar[bool] = False

    def __init__(self, spec: PerClientRows, name: str, n_users: int) -> None:
        self.spec, self.name = spec, name
        self.start = np.zeros(n_users, np.int64)
        self.count = np.zeros(n_users, np.int64)

    def allocate(self, shelf: Shelf, share: float) -> None:
        """Make room on a shelf for its share of all rows."""
        name, entries = self.name, int(self.spec.capacity.sum() * share)
        int32, float32 = np.dtype(np.int32), np.dtype(np.float32)
        shelf.ids[name] = allocate_zeros(shelf.folder, f"{name}.ids", (entries,), int32)
        shelf.values[name] = allocate_zeros(shelf.folder, name, (entries, self.spec.width), float32)
        shelf.used_rows[name] = 0
        shelf.ready_rows[name] = 0 if shelf.folder is None else entries

    def room(self, shelf: Shelf, users: Array) -> int:
        """Return how many of these users, from the first on, still fit."""
        needed = shelf.used_rows[self.name] + np.cumsum(self.spec.capacity[users])
        return int(np.searchsorted(needed, len(shelf.ids[self.name]), side="right"))

    def place(self, shelf: Shelf, users: Array) -> None:
        """Give new users their room on a shelf.

        Memory that was never touched is slow at its first touch, so a growing shelf touches it
        ahead, half as much again each time: most rounds then find the room of new users ready.
        """
        name, ends = self.name, np.cumsum(self.spec.capacity[users])
        self.start[users] = shelf.used_rows[name] + ends - self.spec.capacity[users]
        shelf.used_rows[name] += int(ends[-1]) if len(users) else 0
        used, ready = shelf.used_rows[name], shelf.ready_rows[name]
        if used > ready:
            shelf.ready_rows[name] = min(len(shelf.ids[name]), used + used // 2)
            shelf.values[name][ready : shelf.ready_rows[name]] = 0

    def expect(self, users: Array, value: Kept) -> None:
        """Refuse more rows than were declared."""
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
        for shelf, mine in store.by_shelf(users):
            start, end = self.start[users[mine]], indptr[mine + 1]
            kernels.copy_ragged(shelf.ids[self.name], start, ids, indptr[mine], end)
            kernels.copy_ragged(shelf.values[self.name], start, rows, indptr[mine], end)
        return ClientRows(indptr, ids, rows)

    def write(self, to: Visit, value: Kept) -> None:
        """Write the rows of users on this shelf."""
        assert isinstance(value, ClientRows), f"'{self.name}' is kept as rows"
        start, first = self.start[to.users], value.indptr[to.mine]
        end = start + self.count[to.users]
        kernels.copy_ragged(value.ids, first, to.shelf.ids[self.name], start, end)
        kernels.copy_ragged(value.rows, first, to.shelf.values[self.name], start, end)


@singledispatch
def column_of(spec: PrivateField, name: str, n_users: int) -> Column | RowsColumn:
    """Return how a field is kept."""
    raise InputError(f"'{name}' is declared as {type(spec).__name__}, which no store can keep")


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
    """Return zeros: memory and files alike take space only once they are written to."""
    if folder is None or 0 in shape:
        return np.zeros(shape, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    return np.memmap(folder / f"{name}.private", dtype, "w+", shape=shape)


def span(places: Array) -> slice | Array:
    """Return a slice for places one after the other: numpy moves those in one go."""
    if len(places) and (np.diff(places) == 1).all():
        return slice(int(places[0]), int(places[-1]) + 1)
    return places


def all_or_span(mine: Array, count: int) -> slice | Array:
    """Return a slice for positions, ascending, among so many; they often are all of them."""
    return slice(None) if len(mine) == count else span(mine)


WORKSPACE = ".private-"
"""How the folder of file-backed parameters begins; it goes when the store does."""
PART_BYTES = 96 * 2**20
"""Private parameters that pass through memory at once on their way elsewhere."""
MAPPED_BYTES = 256 * 2**20
"""File-backed parameters that are used before their pages are given back to the system."""


class StoreConfig(Settings):
    """Where private parameters are kept during a simulation."""

    kind: Literal["auto", "memory", "file"] = "auto"
    """`auto` takes memory up to the budget, and files for the rest."""
    budget_gb: Annotated[float, Field(gt=0)] = 1.5
    """Memory for the current round's parameters and the selected round's together."""


class PrivateStore:
    """One block per user and field; a user never written reads its field's initial value."""

    def __init__(
        self,
        fields: PrivateFields,
        n_users: int,
        folder: Path | None = None,
        memory_bytes: float | None = None,
    ) -> None:
        """Keep ``memory_bytes`` in memory (all of it without a folder, else none by default)."""
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
        self._shelves = [Shelf(columns, int(n_users * share), share, None)]
        if share < 1:
            self._shelves.append(Shelf(columns, n_users, 1.0, folder))
        self._shelf = np.full(n_users, -1, np.int8)  # -1: no place yet
        self.slot = np.zeros(n_users, np.int64)
        self._placing = threading.Lock()
        # Users lie stack by stack, so that a stack that comes again finds itself together. Whole
        # tables, if one shelf has room for all, lie user by user: any neighbours are together.
        tables = any(column.in_order for column in self.columns.values())
        self._ordered = tables and len(self._shelves) == 1
        self._mapped = 0

    @classmethod
    def create(
        cls, fields: PrivateFields, n_users: int, config: StoreConfig, place: Path | None
    ) -> PrivateStore:
        """Choose memory or files by the configuration; files live in ``place`` while needed."""
        # The selected round's parameters are kept beside the current ones.
        size, budget = 2 * store_bytes(fields, n_users), config.budget_gb * 2**30
        if config.kind == "memory" or (config.kind == "auto" and size <= budget):
            require_memory(size, "the private parameters", "store.kind=file, or a smaller d")
            return cls(fields, n_users)
        workspace = TemporaryDirectory(prefix=WORKSPACE, dir=place)
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
        """Return an empty store of the same fields, in the same kind of place."""
        folder = None if other.folder is None else other.folder / "selected"
        store = cls(other.fields, other.n_users, folder, other.memory_bytes)
        store.workspace = other.workspace
        return store

    def read(self, users: Array) -> Private:
        """Return the private parameters of these users; each field is read when asked for."""
        return _Blocks(self, users)

    def write(self, users: Array, private: Private) -> None:
        """Replace the private parameters of these users; of whole tables, the rows given.

        What was read here for these users, and comes back as it is, need not be written.
        """
        if isinstance(private, _Blocks) and private.of(self, users):
            return
        values = {name: private[name] for name in self.fields}
        for name, value in values.items():
            self.columns[name].expect(users, value)
        new = ~self.visited[users]
        self._place(users)
        for shelf, mine in self.by_shelf(users):
            self.use(shelf, len(mine) * self.bytes_per_user)
            slots, here = self.slot[users[mine]], all_or_span(mine, len(users))
            visit = Visit(shelf, slots, users[mine], mine, new[mine], here, span(slots))
            for name, value in values.items():
                self.columns[name].write(visit, value)

    def by_shelf(self, users: Array) -> Iterator[tuple[Shelf, Array]]:
        """Yield each shelf with the positions of its users among these."""
        if len(self._shelves) == 1:
            yield self._shelves[0], np.arange(len(users))
            return
        for number, shelf in enumerate(self._shelves):
            mine = np.flatnonzero(self._shelf[users] == number)
            if len(mine):
                yield shelf, mine

    def one_shelf(self, users: Array) -> Shelf | None:
        """Return the shelf that all of these users lie on, if they were all written to it."""
        if not self.visited[users].all() or len(np.unique(self._shelf[users])) != 1:
            return None
        return self._shelves[int(self._shelf[users[0]])]

    def _place(self, users: Array) -> None:
        """Give users their place on their first visit."""
        with self._placing:
            new = users[~self.visited[users]]
            for number, shelf in enumerate(self._shelves):
                fit = min(len(new), shelf.slots - shelf.used)
                for column in self.columns.values():
                    fit = column.room(shelf, new[:fit])
                taken, new = new[:fit], new[fit:]
                self._shelf[taken] = number
                self.slot[taken] = taken if self._ordered else shelf.used + np.arange(fit)
                shelf.used += fit
                for column in self.columns.values():
                    column.place(shelf, taken)
            self.visited[users] = True

    def use(self, shelf: Shelf, size: int) -> None:
        """Count what is read or written in files, and release it from time to time."""
        if shelf.folder is not None:
            self._mapped += size
            if self._mapped > MAPPED_BYTES:
                self.release()

    def release(self) -> None:
        """Give the pages of file-backed arrays back to the system; their contents stay on file."""
        self._mapped = 0
        for shelf in self._shelves:
            for array in (*shelf.values.values(), *shelf.ids.values()):
                if isinstance(array, np.memmap):
                    array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]

    def snapshot(self, target: PrivateStore | None = None) -> PrivateStore:
        """Copy every visited user's block into another store (a new one by default)."""
        target = target or PrivateStore.beside(self)
        for users in self._parts():
            target.write(users, self.read(users))
        target.release()
        return target

    def tensors(self) -> Iterator[dict[str, Array]]:
        """Yield the visited users' blocks as plain arrays, for a checkpoint, a part at a time."""
        for users in self._parts():
            out: dict[str, Array] = {"visited": users}
            for name, value in self.read(users).items():
                out |= self.fields[name].to_arrays(name, value)
            yield out

    def restore(self, tensors: Mapping[str, Array]) -> None:
        """Put back one part of what `tensors` yielded."""
        private = {name: spec.from_arrays(name, tensors) for name, spec in self.fields.items()}
        self.write(tensors["visited"], private)

    def _parts(self) -> Iterator[Array]:
        """Cut the visited users into parts that pass through memory at once."""
        step = max(1, PART_BYTES // self.bytes_per_user)
        users = np.flatnonzero(self.visited)
        for start in range(0, len(users), step):
            yield users[start : start + step]


class _Blocks(Mapping[str, "Array | ClientRows"]):
    """The private parameters of some users, read field by field: few methods train on them all."""

    def __init__(self, store: PrivateStore, users: Array) -> None:
        self._store = store
        self._users = users

    def of(self, store: PrivateStore, users: Array) -> bool:
        """Say whether this is what a store has of these users."""
        return self._store is store and self._users is users

    def __getitem__(self, name: str) -> Array | ClientRows:
        return self._store.columns[name].read(self._store, self._users)

    def __iter__(self) -> Iterator[str]:
        return iter(self._store.fields)

    def __len__(self) -> int:
        return len(self._store.fields)


def store_bytes(fields: PrivateFields, n_users: int) -> int:
    """Return the size of a store if every user were visited."""
    return sum(spec.nbytes(n_users) for spec in fields.values())
