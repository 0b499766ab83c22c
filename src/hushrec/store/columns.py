"""How each kind of private field lies on shelves, in memory or on file, is read and written."""

from __future__ import annotations

from collections.abc import Iterable
from functools import singledispatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hushrec import kernels
from hushrec.aggregate import ClientRows
from hushrec.errors import InputError
from hushrec.store.fields import PerClient, PerClientRows, PerClientTable, PrivateField

if TYPE_CHECKING:
    from hushrec.store.private_store import PrivateStore

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
