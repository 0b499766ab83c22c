"""What travels between server and clients: values with a bytes form, validated on arrival.

`Download` goes to the clients, `Upload` comes back, each in a `hushrec.io.codec`. The
byte counter of a run counts the arrays, as `nbytes`, and not the header of some hundred bytes.

Whoever reads a message says what it must be (`Expected`): kind, round, names, shapes, dtypes,
finite numbers, norm, and how large it may be before it is even looked at. Anything else is a
`MessageError`, which names what is wrong and leaves the reader as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import ClientRows, KeyedRows, Update, UploadShape
from hushrec.aggregation.statistics import LossSum
from hushrec.errors import MessageError
from hushrec.io.codec import (
    HEADER_BYTES,
    LARGEST,
    Array,
    Arrays,
    check_finite,
    count_in,
    pack,
    unpack,
    whole_in,
)

SLACK = 1 + 1e-6
"""A norm is worked out again on arrival, and may round up."""


@dataclass(frozen=True)
class Download:
    """What is sent to clients that take part in a round."""

    round: int
    common: Arrays
    """The same for everybody."""
    own: Arrays = field(default_factory=dict)
    """Each client's own, with a leading axis of clients."""
    protection: Mapping[str, float] = field(default_factory=dict)
    """The state of the mechanisms that act on the clients."""

    @property
    def received(self) -> Arrays:
        """What a method trains from."""
        return {**self.common, **self.own}

    def to(self, places: NDArray[np.int64]) -> Download:
        """Return what is sent to these of the clients."""
        if not self.own:
            return self
        return replace(self, own={name: array[places] for name, array in self.own.items()})

    def nbytes(self, clients: int) -> int:
        """Bytes of the messages to so many clients."""
        common = sum(array.nbytes for array in self.common.values())
        return clients * common + sum(array.nbytes for array in self.own.values())

    def to_bytes(self) -> bytes:
        """Write the message to one client."""
        arrays = {f"common/{name}": array for name, array in self.common.items()}
        arrays |= {f"own/{name}": array for name, array in self.own.items()}
        facts = {"round": self.round, "protection": dict(self.protection)}
        return pack("download", facts, arrays)

    @classmethod
    def from_bytes(cls, data: bytes, most: int = LARGEST) -> Download:
        """Read it on the client."""
        facts, arrays = unpack("download", data, most)
        parts: dict[str, dict[str, Array]] = {"common": {}, "own": {}}
        for name, array in arrays.items():
            part, _, rest = name.partition("/")
            if part not in parts or not rest:
                raise MessageError(f"the download holds an array '{name}' that is not known")
            check_finite(array, name)
            parts[part][rest] = array
        state = facts.get("protection")
        if not isinstance(state, dict) or not all(isinstance(v, float) for v in state.values()):
            raise MessageError("the download holds no state of the protection")
        return cls(count_in(facts, "round"), **parts, protection=state)


@dataclass(frozen=True)
class Expected:
    """What an upload must be to count."""

    round: int
    shape: UploadShape
    """Names and shapes that follow from public things."""
    whole: bool = False
    """Whether every row must be there, as in protected uploads."""
    clients: int = 1
    norm: float | None = None
    """Largest L2 norm of the method's own arrays, where clipping promises one."""

    @property
    def most_bytes(self) -> int:
        """Size above which a message is not looked at."""
        ids = 8 * (sum(count for count, _ in self.shape.sparse.values()) + self.clients + 1)
        return min(LARGEST, self.clients * (2 * self.shape.nbytes + ids) + HEADER_BYTES)


@dataclass(frozen=True)
class Upload:
    """What a client sends back: its part of the round's sum, and how training went."""

    round: int
    update: Update
    loss: LossSum

    def to_bytes(self) -> bytes:
        """Write the message; what travels whole is written out whole."""
        update = self.update if self.update.whole is None else _written_out(self.update)
        arrays = {f"dense/{name}": array for name, array in update.dense.items()}
        for name, rows in update.rows.items():
            sent = rows.differences()
            arrays |= {f"ids/{name}": sent.ids, f"rows/{name}": sent.rows}
            if update.clients != 1:
                arrays[f"indptr/{name}"] = sent.indptr
        facts = {"round": self.round, "clients": update.clients, "loss": self.loss.steps}
        facts |= {"trained": self.loss.clients, "lost": self.loss.lost}
        facts["zeroed_out"] = update.zeroed_out
        return pack("upload", facts, arrays)

    @classmethod
    def from_bytes(cls, data: bytes, expected: Expected) -> Upload:
        """Read it on the server; refuse whatever is not as expected."""
        facts, arrays = unpack("upload", data, expected.most_bytes)
        number, clients = count_in(facts, "round"), count_in(facts, "clients")
        if number != expected.round:
            raise MessageError(f"the upload is of round {number}, not of round {expected.round}")
        if clients != expected.clients:
            raise MessageError(f"the upload is of {clients} clients, not of {expected.clients}")
        loss = LossSum(whole_in(facts, "loss"), count_in(facts, "trained"), count_in(facts, "lost"))
        if loss.clients > clients or loss.lost > loss.clients:
            raise MessageError("the upload counts more losses than clients")
        update = replace(_read_update(arrays, expected), zeroed_out=count_in(facts, "zeroed_out"))
        if update.zeroed_out > clients:
            raise MessageError("the upload counts more empty uploads than clients")
        if expected.norm is not None:
            for norm in _norms(update):
                if not norm <= expected.norm * SLACK:
                    raise MessageError(
                        f"the upload has norm {norm:.6g}, more than the {expected.norm:.6g} agreed"
                    )
        return cls(number, update, loss)


# ------------------------------------------------------------ updates as arrays


def _written_out(update: Update) -> Update:
    """Write every row of every table and space of an upload out."""
    shape = update.whole
    assert shape is not None
    dense: dict[str, Array] = {}
    for name, rows in update.rows.items():
        table = np.zeros((update.clients, *shape.sparse[name]), np.float32)
        owner = np.repeat(np.arange(update.clients), np.diff(rows.indptr))
        table[owner, rows.ids] = rows.differences().rows
        dense[name] = table
    dense |= {name: array.astype(np.float32) for name, array in update.dense.items()}
    return Update(update.clients, dense=dense, zeroed_out=update.zeroed_out)


def _read_update(arrays: Arrays, expected: Expected) -> Update:
    shape, clients = expected.shape, expected.clients
    dense = {name: (clients, *own) for name, own in shape.dense.items()}
    sparse = shape.sparse
    tables_sent = {name: (clients, *size) for name, size in sparse.items()}
    if expected.whole:
        dense, sparse = {**dense, **tables_sent}, {}
    parts = ("ids", "rows") if clients == 1 else ("ids", "rows", "indptr")
    names = {f"dense/{name}" for name in dense}
    names |= {f"{part}/{name}" for name in sparse for part in parts}
    for name in sorted(names ^ arrays.keys()):
        what = "lacks" if name in names else "holds an array that nobody asked for:"
        raise MessageError(f"the upload {what} '{name}'")
    for name, array in arrays.items():
        check_finite(array, name)
    for name, own in dense.items():
        array = arrays[f"dense/{name}"]
        if array.shape != own or array.dtype not in (np.float32, np.float64):
            raise MessageError(f"'{name}' is {array.dtype}{array.shape}, not numbers of {own}")
    rows = {
        name: _read_rows(arrays, name, count, width, expected)
        for name, (count, width) in sparse.items()
    }
    if expected.whole:
        keyed = shape.spaces.keys()
        rows = {n: _whole_rows(arrays[f"dense/{n}"], n in keyed) for n in tables_sent}
    return Update(clients, rows, {name: arrays[f"dense/{name}"] for name in shape.dense})


def _whole_rows(table: Array, keyed: bool) -> ClientRows:
    clients, count, width = table.shape
    ids: NDArray[Any] = np.tile(np.arange(count), clients).astype(np.int64 if keyed else np.int32)
    indptr = np.arange(clients + 1) * count
    rows = table.reshape(-1, width)
    return KeyedRows(indptr, ids, rows, space=count) if keyed else ClientRows(indptr, ids, rows)


def _read_rows(arrays: Arrays, name: str, count: int, width: int, expected: Expected) -> ClientRows:
    ids, rows = arrays[f"ids/{name}"], arrays[f"rows/{name}"]
    keyed = name in expected.shape.spaces
    kind = np.int64 if keyed else np.int32
    if ids.ndim != 1 or ids.dtype != kind or rows.shape != (len(ids), width):
        raise MessageError(f"'{name}' has ids {ids.dtype}{ids.shape} for rows {rows.shape}")
    if rows.dtype != np.float32:
        raise MessageError(f"'{name}' is {rows.dtype}, not float32")
    if len(ids) and (ids.min() < 0 or ids.max() >= count):
        raise MessageError(f"'{name}' has rows that do not exist")
    indptr = arrays.get(f"indptr/{name}", np.array([0, len(ids)]))
    fits = indptr.shape == (expected.clients + 1,) and indptr.dtype == np.int64
    if not fits or indptr[0] != 0 or indptr[-1] != len(ids) or (np.diff(indptr) < 0).any():
        raise MessageError(f"'{name}' does not say whose rows are whose")
    for client in range(expected.clients):
        mine = ids[indptr[client] : indptr[client + 1]]
        if len(np.unique(mine)) != len(mine):
            raise MessageError(f"'{name}' has a row twice")
    return KeyedRows(indptr, ids, rows, space=count) if keyed else ClientRows(indptr, ids, rows)


def _norms(update: Update) -> NDArray[np.float64]:
    """Return the L2 norm of each client's upload, without what a mechanism added."""
    squares = np.zeros(update.clients)
    for name, array in update.dense.items():
        if not name.startswith("privacy/"):
            flat = array.reshape(update.clients, -1).astype(np.float64)
            squares += np.einsum("ce,ce->c", flat, flat)
    for rows in update.rows.values():
        each = np.einsum("rw,rw->r", rows.rows, rows.rows, dtype=np.float64)
        owner = np.repeat(np.arange(update.clients), np.diff(rows.indptr))
        squares += np.bincount(owner, each, minlength=update.clients)
    return np.sqrt(squares)
