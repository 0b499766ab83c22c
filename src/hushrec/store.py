"""Private parameters at rest: what stays on the clients, in memory and, past a budget, on file.

A store never leaves the side of the clients. In a simulation it holds everybody's parameters, so
it can outgrow the machine. Users get their place on first visit, one after the other: in memory
while the budget lasts, then in sparse memory-mapped files whose pages are given back to the system
after every round. What it costs grows with the users that took part, not with the population.
"""

from __future__ import annotations

import mmap
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from hushrec import kernels
from hushrec.aggregate import ClientRows
from hushrec.errors import ConfigError, InputError
from hushrec.memory import require_memory
from hushrec.methods.base import (
    PerClient,
    PerClientRows,
    PerClientTable,
    Private,
    PrivateFields,
)

Array = NDArray[Any]

WORKSPACE = ".private-"
"""How the folder of file-backed parameters begins; it goes when the store does."""
PART_BYTES = 96 * 2**20
"""Private parameters that pass through memory at once on their way elsewhere."""
MAPPED_BYTES = 256 * 2**20
"""File-backed parameters that are used before their pages are given back to the system."""


class StoreConfig(BaseModel):
    """Where private parameters are kept during a simulation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
        size = store_bytes(fields, n_users)
        self.bytes_per_user = max(1, size // max(1, n_users))
        share = 1.0
        if folder is not None and size:
            share = min(1.0, (memory_bytes or 0) / size)
        self._shelves = [_Shelf(fields, n_users, share, None)]
        if share < 1:
            self._shelves.append(_Shelf(fields, n_users, 1.0, folder))
        self._shelf = np.full(n_users, -1, np.int8)  # -1: no place yet
        self._slot = np.zeros(n_users, np.int64)
        rows = [name for name, spec in fields.items() if isinstance(spec, PerClientRows)]
        self._start = {name: np.zeros(n_users, np.int64) for name in rows}
        self._count = {name: np.zeros(n_users, np.int64) for name in rows}
        self._placing = threading.Lock()
        # Users lie stack by stack, so that a stack that comes again finds itself together. Whole
        # tables, if one shelf has room for all, lie user by user: any neighbours are together.
        tables = any(isinstance(spec, PerClientTable) for spec in fields.values())
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

    def read_field(self, name: str, users: Array) -> Array | ClientRows:
        """Return one field of these users: a copy, or, of whole tables, what must not change."""
        spec = self.fields[name]
        if isinstance(spec, PerClientTable):
            values = self._neighbours(name, users)
            values.flags.writeable = False
            return values
        if isinstance(spec, PerClient):
            return self._copied(spec, name, users)
        indptr = np.concatenate([[0], np.cumsum(self._count[name][users])])
        ids = np.empty(indptr[-1], np.int32)
        rows = np.empty((indptr[-1], spec.width), np.float32)
        for shelf, mine in self._by_shelf(users):
            start, end = self._start[name][users[mine]], indptr[mine + 1]
            kernels.copy_ragged(shelf.ids[name], start, ids, indptr[mine], end)
            kernels.copy_ragged(shelf.values[name], start, rows, indptr[mine], end)
        return ClientRows(indptr, ids, rows)

    def _copied(self, spec: PerClient, name: str, users: Array) -> Array:
        values = np.empty((len(users), *spec.initial.shape), spec.initial.dtype)
        for shelf, mine in self._by_shelf(users):
            self._use(shelf, len(mine) * spec.initial.nbytes)
            values[span(mine)] = shelf.values[name][span(self._slot[users[mine]])]
        values[~self.visited[users]] = spec.initial
        return values

    def _neighbours(self, name: str, users: Array) -> Array:
        """Return the blocks where they lie, if these users lie side by side; else copies."""
        slots = span(self._slot[users])
        one_shelf = len(np.unique(self._shelf[users])) == 1
        if isinstance(slots, slice) and one_shelf and self.visited[users].all():
            shelf = self._shelves[self._shelf[users[0]]]
            values: Array = shelf.values[name][slots]
            self._use(shelf, values.nbytes)
            return values
        spec = self.fields[name]
        assert isinstance(spec, PerClient)
        return self._copied(spec, name, users)

    def write(self, users: Array, private: Private) -> None:
        """Replace the private parameters of these users; of whole tables, the rows given."""
        values = {name: private[name] for name in self.fields}
        for name, value in values.items():
            spec = self.fields[name]
            if isinstance(spec, PerClientRows) and isinstance(value, ClientRows):
                count = np.diff(value.indptr)
                if (count > spec.capacity[users]).any():
                    raise InputError(f"a method keeps more rows of '{name}' than it declared")
                self._count[name][users] = count
        new = ~self.visited[users]
        self._place(users)
        for shelf, mine in self._by_shelf(users):
            self._use(shelf, len(mine) * self.bytes_per_user)
            for name, value in values.items():
                spec = self.fields[name]
                if isinstance(value, ClientRows) and isinstance(spec, PerClientTable):
                    slots, target = self._slot[users[mine]], shelf.values[name]
                    target[slots[new[mine]]] = spec.initial
                    kernels.put_rows(target, slots, mine, value.indptr, value.ids, value.rows)
                elif isinstance(value, ClientRows):
                    start = self._start[name][users[mine]]
                    first, end = value.indptr[mine], start + self._count[name][users[mine]]
                    kernels.copy_ragged(value.ids, first, shelf.ids[name], start, end)
                    kernels.copy_ragged(value.rows, first, shelf.values[name], start, end)
                else:
                    shelf.values[name][span(self._slot[users[mine]])] = value[span(mine)]

    def _by_shelf(self, users: Array) -> Iterator[tuple[_Shelf, Array]]:
        """Yield each shelf with the positions of its users among these."""
        if len(self._shelves) == 1:
            yield self._shelves[0], np.arange(len(users))
            return
        for number, shelf in enumerate(self._shelves):
            mine = np.flatnonzero(self._shelf[users] == number)
            if len(mine):
                yield shelf, mine

    def _place(self, users: Array) -> None:
        """Give users their place on their first visit."""
        with self._placing:
            new = users[~self.visited[users]]
            for number, shelf in enumerate(self._shelves):
                taken = new[: shelf.room(self.fields, new)]
                self._shelf[taken] = number
                self._slot[taken] = taken if self._ordered else shelf.used + np.arange(len(taken))
                shelf.used += len(taken)
                for name, start in self._start.items():
                    spec = self.fields[name]
                    assert isinstance(spec, PerClientRows)
                    ends = np.cumsum(spec.capacity[taken])
                    start[taken] = shelf.used_rows[name] + ends - spec.capacity[taken]
                    shelf.use_rows(name, int(ends[-1]) if len(taken) else 0)
                new = new[len(taken) :]
            self.visited[users] = True

    def _use(self, shelf: _Shelf, size: int) -> None:
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
            yield self._part(users)

    def _parts(self) -> Iterator[Array]:
        """Cut the visited users into parts that pass through memory at once."""
        step = max(1, PART_BYTES // self.bytes_per_user)
        users = np.flatnonzero(self.visited)
        for start in range(0, len(users), step):
            yield users[start : start + step]

    def _part(self, users: Array) -> dict[str, Array]:
        out: dict[str, Array] = {"visited": users}
        for name, value in self.read(users).items():
            if isinstance(value, ClientRows):
                out |= {f"{name}.indptr": value.indptr, f"{name}.ids": value.ids, name: value.rows}
            else:
                out[name] = value
        return out

    def restore(self, tensors: Mapping[str, Array]) -> None:
        """Put back one part of what `tensors` yielded."""
        private: dict[str, Array | ClientRows] = {}
        for name, spec in self.fields.items():
            if isinstance(spec, PerClientRows):
                ids, indptr = tensors[f"{name}.ids"], tensors[f"{name}.indptr"]
                private[name] = ClientRows(indptr, ids, tensors[name])
            else:
                private[name] = tensors[name]
        self.write(tensors["visited"], private)


class _Shelf:
    """Room for some share of all blocks, in memory or in a folder; nothing in it ever moves."""

    def __init__(
        self, fields: PrivateFields, n_users: int, share: float, folder: Path | None
    ) -> None:
        self.folder = folder
        self.slots = int(n_users * share)
        self.used = 0
        self.used_rows: dict[str, int] = {}
        self.ready_rows: dict[str, int] = {}
        self.values: dict[str, Array] = {}
        self.ids: dict[str, Array] = {}
        for name, spec in fields.items():
            if isinstance(spec, PerClient):
                shape: tuple[int, ...] = (self.slots, *spec.initial.shape)
                dtype = spec.initial.dtype
            else:
                entries = int(spec.capacity.sum() * share)
                shape, dtype = (entries, spec.width), np.dtype(np.float32)
                self.ids[name] = _allocate(folder, f"{name}.ids", (entries,), np.dtype(np.int32))
                self.used_rows[name] = 0
                self.ready_rows[name] = 0 if folder is None else entries
            self.values[name] = _allocate(folder, name, shape, dtype)

    def room(self, fields: PrivateFields, users: Array) -> int:
        """Return how many of these users, from the first on, still fit."""
        fit = min(len(users), self.slots - self.used)
        for name, used in self.used_rows.items():
            spec = fields[name]
            assert isinstance(spec, PerClientRows)
            needed = used + np.cumsum(spec.capacity[users[:fit]])
            fit = int(np.searchsorted(needed, len(self.ids[name]), side="right"))
        return fit

    def use_rows(self, name: str, entries: int) -> None:
        """Count entries as used.

        Memory that was never touched is slow at its first touch, so a growing shelf touches it
        ahead, half as much again each time: most rounds then find the room of new users ready.
        """
        self.used_rows[name] += entries
        used, ready = self.used_rows[name], self.ready_rows[name]
        if used > ready:
            self.ready_rows[name] = min(len(self.ids[name]), used + used // 2)
            self.values[name][ready : self.ready_rows[name]] = 0


def _allocate(folder: Path | None, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return zeros: memory and files alike take space only once they are written to."""
    if folder is None or 0 in shape:
        return np.zeros(shape, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    return np.memmap(folder / f"{name}.private", dtype, "w+", shape=shape)


class _Blocks(Mapping[str, "Array | ClientRows"]):
    """The private parameters of some users, read field by field: few methods train on them all."""

    def __init__(self, store: PrivateStore, users: Array) -> None:
        self._store = store
        self._users = users

    def __getitem__(self, name: str) -> Array | ClientRows:
        return self._store.read_field(name, self._users)

    def __iter__(self) -> Iterator[str]:
        return iter(self._store.fields)

    def __len__(self) -> int:
        return len(self._store.fields)


def span(places: Array) -> slice | Array:
    """Return a slice for places one after the other: numpy moves those in one go."""
    if len(places) and (np.diff(places) == 1).all():
        return slice(int(places[0]), int(places[-1]) + 1)
    return places


def store_bytes(fields: PrivateFields, n_users: int) -> int:
    """Return the size of a store if every user were visited."""
    total = 0
    for spec in fields.values():
        if isinstance(spec, PerClient):
            total += n_users * spec.initial.nbytes
        else:
            total += int(spec.capacity.sum()) * (4 * spec.width + 4)
    return total
