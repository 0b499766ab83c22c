"""Private parameters at rest: what stays on the clients, in memory or in a memory-mapped file.

A store never leaves the side of the clients. In a simulation it holds everybody's parameters, so
it can outgrow the machine; past a memory budget it lives in sparse files, of which only the
visited users' blocks take space, and pages are given back to the system after every round.
"""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from hushrec import kernels
from hushrec.aggregate import RowStack
from hushrec.errors import ConfigError, InputError
from hushrec.memory import require_memory
from hushrec.methods.base import PerClient, PerClientRows, Private, PrivateFields

Array = NDArray[Any]

WORKSPACE = ".private-"
"""How the folder of file-backed parameters begins; it goes when the store does."""
PART_BYTES = 256 * 2**20
"""Private parameters that pass through memory at once on their way to a checkpoint."""


class StoreConfig(BaseModel):
    """Where private parameters are kept during a simulation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["auto", "memory", "file"] = "auto"
    """`auto` takes memory while the store fits the budget."""
    budget_gb: Annotated[float, Field(gt=0)] = 4.0


class PrivateStore:
    """One block per user and field; a user never written reads its field's initial value."""

    def __init__(self, fields: PrivateFields, n_users: int, folder: Path | None = None) -> None:
        self.fields = fields
        self.n_users = n_users
        self.folder = folder
        self.workspace: TemporaryDirectory[str] | None = None
        self.visited = np.zeros(n_users, bool)
        self.bytes_per_user = max(1, store_bytes(fields, n_users) // n_users)
        self._arrays: dict[str, Array] = {}
        self._start: dict[str, NDArray[np.int64]] = {}
        for name, spec in fields.items():
            if isinstance(spec, PerClient):
                shape = (n_users, *spec.initial.shape)
                self._arrays[name] = self._allocate(name, shape, spec.initial.dtype)
            else:
                entries = int(spec.capacity.sum())
                self._start[name] = np.concatenate([[0], np.cumsum(spec.capacity)])[:-1]
                self._arrays[f"{name}.count"] = np.zeros(n_users, np.int64)
                self._arrays[f"{name}.ids"] = self._allocate(f"{name}.ids", (entries,), np.int32)
                self._arrays[name] = self._allocate(name, (entries, spec.width), np.float32)

    @classmethod
    def create(
        cls, fields: PrivateFields, n_users: int, config: StoreConfig, place: Path | None
    ) -> PrivateStore:
        """Choose memory or files by the configuration; files live in ``place`` while needed."""
        # The selected round's parameters are kept beside the current ones.
        size = 2 * store_bytes(fields, n_users)
        if config.kind == "memory" or (config.kind == "auto" and size <= config.budget_gb * 2**30):
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
        store = cls(fields, n_users, Path(workspace.name))
        store.workspace = workspace
        return store

    @classmethod
    def beside(cls, other: PrivateStore) -> PrivateStore:
        """Return an empty store of the same fields, in the same kind of place."""
        folder = None if other.folder is None else other.folder / "selected"
        store = cls(other.fields, other.n_users, folder)
        store.workspace = other.workspace
        return store

    def read(self, users: Array) -> Private:
        """Return the private parameters of these users; each field is copied when asked for."""
        return _Blocks(self, users)

    def read_field(self, name: str, users: Array) -> Array | RowStack:
        """Return one field of these users, as a copy."""
        spec = self.fields[name]
        if isinstance(spec, PerClient):
            values: Array = self._arrays[name][users]
            values[~self.visited[users]] = spec.initial
            return values
        count = self._arrays[f"{name}.count"][users]
        indptr = np.concatenate([[0], np.cumsum(count)])
        ids = np.empty(indptr[-1], np.int32)
        rows = np.empty((indptr[-1], spec.width), np.float32)
        start = self._start[name][users]
        kernels.gather_rows(self._arrays[f"{name}.ids"], start, indptr, ids)
        kernels.gather_rows(self._arrays[name], start, indptr, rows)
        return RowStack(indptr, ids, rows)

    def write(self, users: Array, private: Private) -> None:
        """Replace the private parameters of these users."""
        for name, spec in self.fields.items():
            value = private[name]
            if isinstance(spec, PerClient):
                self._arrays[name][users] = value
            else:
                assert isinstance(value, RowStack)
                count = np.diff(value.indptr)
                if (count > spec.capacity[users]).any():
                    raise InputError(f"a method keeps more rows of '{name}' than it declared")
                self._arrays[f"{name}.count"][users] = count
                start = self._start[name][users]
                kernels.copy_rows(self._arrays[f"{name}.ids"], start, value.ids, value.indptr)
                kernels.copy_rows(self._arrays[name], start, value.rows, value.indptr)
        self.visited[users] = True

    def release(self) -> None:
        """Give the pages of file-backed arrays back to the system; their contents stay on file."""
        for array in self._arrays.values():
            if isinstance(array, np.memmap) and array.size:
                array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]

    def snapshot(self, target: PrivateStore | None = None) -> PrivateStore:
        """Copy every visited user's block into another store (a new one by default)."""
        target = target or PrivateStore.beside(self)
        for users in np.array_split(np.flatnonzero(self.visited), 1 + self.n_users // 4096):
            if len(users):
                target.write(users, self.read(users))
        target.release()
        return target

    def tensors(self) -> Iterator[dict[str, Array]]:
        """Yield the visited users' blocks as plain arrays, for a checkpoint, a part at a time."""
        step = max(1, PART_BYTES // self.bytes_per_user)
        users = np.flatnonzero(self.visited)
        for start in range(0, len(users), step):
            yield self._part(users[start : start + step])

    def _part(self, users: Array) -> dict[str, Array]:
        out: dict[str, Array] = {"visited": users}
        for name, value in self.read(users).items():
            if isinstance(value, RowStack):
                out |= {f"{name}.indptr": value.indptr, f"{name}.ids": value.ids, name: value.rows}
            else:
                out[name] = value
        return out

    def restore(self, tensors: Mapping[str, Array]) -> None:
        """Put back one part of what `tensors` yielded."""
        private: dict[str, Array | RowStack] = {}
        for name, spec in self.fields.items():
            if isinstance(spec, PerClientRows):
                ids, indptr = tensors[f"{name}.ids"], tensors[f"{name}.indptr"]
                private[name] = RowStack(indptr, ids, tensors[name])
            else:
                private[name] = tensors[name]
        self.write(tensors["visited"], private)

    def _allocate(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        if self.folder is None or 0 in shape:
            return np.zeros(shape, dtype)
        self.folder.mkdir(parents=True, exist_ok=True)
        return np.memmap(self.folder / f"{name}.private", dtype, "w+", shape=shape)


class _Blocks(Mapping[str, "Array | RowStack"]):
    """The private parameters of some users, read field by field: few methods train on them all."""

    def __init__(self, store: PrivateStore, users: Array) -> None:
        self._store = store
        self._users = users

    def __getitem__(self, name: str) -> Array | RowStack:
        return self._store.read_field(name, self._users)

    def __iter__(self) -> Iterator[str]:
        return iter(self._store.fields)

    def __len__(self) -> int:
        return len(self._store.fields)


def store_bytes(fields: PrivateFields, n_users: int) -> int:
    """Return the size of a store if every user were visited."""
    total = 0
    for spec in fields.values():
        if isinstance(spec, PerClient):
            total += n_users * spec.initial.nbytes
        else:
            total += int(spec.capacity.sum()) * (4 * spec.width + 4)
    return total
