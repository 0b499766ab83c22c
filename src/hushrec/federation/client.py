"""What a client does in a round, and the messages between it and the server.

A client is a device or a silo. It fits the method, protects the upload and keeps its private
parameters. Several clients are trained together as a batch; the result of each client is the same
in a batch of any size, so a simulation of thousands and a single device run the same lines.

`Download` and `Upload` are validated on arrival. The byte counter of a run counts the arrays of
messages, as `nbytes`, and not their headers of some hundred bytes. The server states what an upload
must be (`Expected`): round, names, shapes, dtypes, finite numbers, norm, and its largest size.
Anything else is a `MessageError` that names what is wrong, and changes nothing.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec.aggregation import ClientRows, KeyedRows, LossSum, Update, UploadShape
from hushrec.data.views import TrainView
from hushrec.errors import MessageError
from hushrec.io import codec
from hushrec.io.codec import ArraySpec
from hushrec.methods.base import Method, Shared
from hushrec.privacy.clipping import client_norms
from hushrec.privacy.protection import Protection
from hushrec.private import Private, PrivateStore
from hushrec.streams import Round, SecretRound, SecretStreams, Streams

SLACK = 1 + 1e-6
"""Relative tolerance of norms, which the reader computes again."""
ByteType = Annotated[str, Field(pattern="^u?int8$")]
SMALLEST_DEFLATED = 1024
"""Bytes from which arrays of bytes travel deflated."""


@dataclass(frozen=True)
class Download:
    """What the server sends to clients that take part in a round."""

    round: int
    common: codec.Arrays
    """The same for every client. Arrays of bytes travel deflated."""
    own: codec.Arrays = field(default_factory=dict)
    """Each client's own, with a leading axis of clients."""
    protection: Mapping[str, float] = field(default_factory=dict)
    """The state of the mechanisms that run on the clients."""

    @property
    def received(self) -> codec.Arrays:
        """What a method trains from."""
        return {**self.common, **self.own}

    def to(self, indices: NDArray[np.int64]) -> Download:
        """Return the download of some of the clients, by their indices."""
        if not self.own:
            return self
        return replace(self, own={name: array[indices] for name, array in self.own.items()})

    def nbytes(self, clients: int) -> int:
        """Return the bytes of the messages to so many clients."""
        return clients * wire_bytes(self.common) + sum(array.nbytes for array in self.own.values())

    def to_bytes(self) -> bytes:
        """Encode the message."""
        small = {name: array for name, array in self.common.items() if _is_small(array)}
        large = {name: self.common[name] for name in self.common.keys() - small.keys()}
        shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
            name: (array.dtype.name, array.shape) for name, array in large.items()
        }
        deflated = {name: _deflated(array) for name, array in large.items()}
        return _DownloadMessage(
            self.round, small, shapes, deflated, self.own, self.protection
        ).to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Download:
        """Decode the message."""
        sent = _DownloadMessage.from_bytes(data)
        if sent.shapes.keys() != sent.deflated.keys() or sent.shapes.keys() & sent.common.keys():
            raise MessageError("the download does not say what its deflated arrays are")
        inflated = {
            name: _inflated(name, *sent.shapes[name], sent.deflated[name]) for name in sent.shapes
        }
        return cls(sent.round, {**sent.common, **inflated}, sent.own, sent.protection)


@dataclass(frozen=True)
class _DownloadMessage(codec.Message, kind="download"):
    round: codec.Count
    common: codec.ArrayGroup
    shapes: Mapping[str, tuple[ByteType, tuple[codec.Count, ...]]]
    deflated: codec.ArrayGroup
    own: codec.ArrayGroup
    protection: Mapping[str, float]


def wire_bytes(arrays: codec.Arrays) -> int:
    """Return the bytes of arrays as a download carries them."""
    return sum(a.nbytes if _is_small(a) else len(_deflated(a)) for a in arrays.values())


def _is_small(array: codec.Array) -> bool:
    """Say whether an array travels as it is: deflating pays for many bytes, not for numbers."""
    return array.dtype not in (np.int8, np.uint8) or array.size < SMALLEST_DEFLATED


def _deflated(array: codec.Array) -> NDArray[np.uint8]:
    # Codes do not repeat in strings: Huffman's code alone is faster, and a tenth shorter.
    stream = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    data = stream.compress(np.ascontiguousarray(array).data) + stream.flush()
    return np.frombuffer(data, np.uint8)


def _inflated(name: str, dtype: str, shape: tuple[int, ...], data: codec.Array) -> codec.Array:
    """Return a deflated array; refuse one of another size, without inflating more than it says."""
    size, stream = math.prod(shape), zlib.decompressobj()
    if data.dtype != np.uint8 or data.ndim != 1 or size > codec.LARGEST:
        raise MessageError(f"'{codec.printable(name)}' is no deflated array, or too large")
    try:
        content = stream.decompress(data.tobytes(), size + 1)
    except zlib.error:
        content = b""
    if len(content) != size or not stream.eof:
        raise MessageError(f"'{codec.printable(name)}' is not deflated, or not {size:,} bytes")
    flat = np.frombuffer(bytearray(content), np.uint8)  # writable: kernels have one form
    return flat.view(dtype).reshape(shape)


@dataclass(frozen=True)
class Expected:
    """What the upload of one client must be to count."""

    round: int
    shape: UploadShape
    """Names and shapes that follow from public facts."""
    whole: bool = False
    """Whether every row must be there, as in protected uploads."""
    norm: float | None = None
    """Largest L2 norm of the method's own arrays, where clipping promises one."""

    @property
    def most_bytes(self) -> int:
        """Size above which a message is refused unread."""
        ids = 8 * (sum(count for count, _ in self.shape.sparse.values()) + 2)
        return min(codec.LARGEST, 2 * self.shape.nbytes + ids + codec.HEADER_BYTES)


@dataclass(frozen=True)
class Upload:
    """What a batch of clients sends back: its part of the round's sum, and the training loss."""

    round: int
    update: Update
    loss: LossSum

    def to_bytes(self) -> bytes:
        """Encode one client's message; an upload that travels whole is written with every row."""
        update, loss, whole = self.update, self.loss, self.update.whole
        arrays = {f"dense/{name}": array for name, array in update.dense.items()}
        if whole is not None:
            arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
        for name, rows in update.rows.items():
            sent = rows.differences()
            if whole is None:
                arrays |= {f"ids/{name}": sent.ids, f"rows/{name}": sent.rows}
            else:
                arrays[f"dense/{name}"] = np.zeros((1, *whole.sparse[name]), np.float32)
                arrays[f"dense/{name}"][0, sent.ids] = sent.rows
        counts = update.clients, loss.steps, loss.clients, loss.lost, update.zeroed_out
        return _UploadMessage(self.round, *counts, arrays).to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes, expected: Expected) -> Upload:
        """Decode an upload on the server; refuse whatever is not as expected."""
        sent = _UploadMessage.from_bytes(data, expected.most_bytes)
        if sent.round != expected.round:
            raise MessageError(f"an upload of round {sent.round}, not of round {expected.round}")
        if sent.clients != 1:
            raise MessageError(f"the upload is of {sent.clients} clients, not of 1")
        if not sent.lost <= sent.trained <= 1:
            raise MessageError("the upload counts more losses than clients")
        if sent.zeroed_out > 1:
            raise MessageError("the upload counts more empty uploads than clients")
        update = replace(_read_update(sent.arrays, expected), zeroed_out=sent.zeroed_out)
        if expected.norm is not None:
            own = {n: array for n, array in update.dense.items() if not n.startswith("privacy/")}
            (norm,) = client_norms(replace(update, dense=own), 2)
            if not norm <= expected.norm * SLACK:
                raise MessageError(f"the upload has norm {norm:.6g}, more than {expected.norm:.6g}")
        return cls(sent.round, update, LossSum(sent.loss, sent.trained, sent.lost))


@dataclass(frozen=True)
class _UploadMessage(codec.Message, kind="upload"):
    round: codec.Count
    clients: codec.Count
    loss: codec.Whole
    trained: codec.Count
    lost: codec.Count
    zeroed_out: codec.Count
    arrays: codec.ArrayGroup


def _read_update(arrays: codec.Arrays, expected: Expected) -> Update:
    shape, whole = expected.shape, expected.whole
    dense = shape.whole if whole else shape.dense
    specs = {f"dense/{n}": ArraySpec("float32|float64", (1, *own)) for n, own in dense.items()}
    for name, (_, width) in {} if whole else shape.sparse.items():
        dtype = "int64" if name in shape.spaces else "int32"
        specs[f"ids/{name}"] = ArraySpec(dtype, (f"ids of {name}",))
        specs[f"rows/{name}"] = ArraySpec("float32", (f"ids of {name}", width))
    codec.check_arrays("upload", arrays, specs)
    tables: dict[str, ClientRows] = {}
    for name, (count, _) in shape.sparse.items():
        keyed = name in shape.spaces
        if whole:
            ids: NDArray[Any] = np.arange(count, dtype=np.int64 if keyed else np.int32)
            rows = arrays[f"dense/{name}"][0]
        else:
            ids, rows = arrays[f"ids/{name}"], arrays[f"rows/{name}"]
        if len(ids) and (ids.min() < 0 or ids.max() >= count):
            raise MessageError(f"'{name}' has rows that do not exist")
        if len(np.unique(ids)) != len(ids):
            raise MessageError(f"'{name}' has a row twice")
        indptr = np.array([0, len(ids)])
        if not keyed:
            tables[name] = ClientRows(indptr, ids, rows)
            continue
        own = KeyedRows(indptr, ids, rows, space=count, grid=shape.grids.get(name))
        if not own.keeps_grid:
            raise MessageError(f"'{name}' is not on its declared grid, or too large")
        tables[name] = own
    return Update(1, tables, {name: arrays[f"dense/{name}"] for name in shape.dense})


NO_CLIENTS: NDArray[np.int64] = np.zeros(0, np.int64)
NO_STATE: Mapping[str, float] = {}


@dataclass(frozen=True)
class Task:
    """What clients and server know before the first round, each from the experiment alone."""

    method: Method
    protection: Protection
    streams: Streams
    secret: SecretStreams
    """Of the device itself; a simulation has one for all clients, addressed by client number."""
    public: TrainView
    """The public view: the catalogue and its features, and no clients."""

    @cached_property
    def initial(self) -> Shared:
        """The shared parameters before the first round, from the public view."""
        return self.method.init(self.public, self.streams)

    @cached_property
    def empty_private(self) -> Private:
        """The private parameters of a batch without clients."""
        fields = self.method.private_fields(self.public, self.initial, self.streams)
        return PrivateStore(fields, 0).read(NO_CLIENTS)

    def download(
        self,
        number: int,
        shared: Shared,
        clients: NDArray[np.int64] = NO_CLIENTS,
        state: Mapping[str, float] = NO_STATE,
    ) -> Download:
        """Return what these clients receive in a round; ``state`` is that of the protection."""
        common = self.method.phase_of(number).download(shared)
        return Download(number, common, self.method.download_own(shared, clients), state)

    def upload_shape(self, download: Download) -> UploadShape:
        """Return the shape of every upload of this round; it follows from the download alone."""
        now = Round(download.round, self.streams)
        fit = self.method.phase_of(download.round).fit
        fitted = fit(download.received, self.empty_private, self.public, now)
        return UploadShape.of(fitted.update, self.public.n_items)

    def protection_of(self, download: Download) -> Protection:
        """Return the protection of this round's uploads."""
        protection = self.protection.with_state(download.protection)
        if protection.reshapes:
            protection = protection.for_shape(self.upload_shape(download))
        return protection


def take_part(
    task: Task, protection: Protection, download: Download, view: TrainView, private: Private
) -> tuple[Upload, Private]:
    """Train a batch of clients; return their upload and their new private parameters."""
    number = download.round
    secret = SecretRound(number, task.secret)
    past, on_gradients = protection.past_noise(task.secret), protection.gradient_noise(secret)
    now = Round(number, task.streams, past, on_gradients)
    fitted = task.method.phase_of(number).fit(download.received, private, view, now)
    update = protection.protect(fitted.update, view, secret)
    return Upload(number, update, LossSum.of(fitted.losses)), fitted.private
