"""A node's sum of its clients' uploads: the message, its checks, and its form as a vector.

The sum is exact, in whole steps, so that results do not depend on how users are spread over nodes.
In the clear it travels as few bytes: gaps between keys, and numbers without a common power of two.
The coordinator derives from public data which shape a sum must have and how large it can be, and
refuses any other.

A secure sum adds up vectors of whole numbers (`RoundVector`, `EvaluationVector`), which hold all of
a node's reply, counts, losses and metrics included. Node and coordinator derive the same layout
from public data and the request; it does not depend on the node's data.

Secure sums run in stages: two of a set-up for many sums, and three of each sum. A `StageRequest`
carries the nodes' messages of the stage before; the one for the first piece of the masked vector
also what is to be summed, a `TrainRequest` or an `EvaluationRequest`. A node answers with its own
message (`StageReply`), with a refusal, or with `RoundClosed`, where it has opened a sum of the
round.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec.aggregation import (
    LARGEST_LOSS,
    RANK_BINS,
    STEPS,
    STEPS_PER_UNIT,
    Evaluation,
    ExactSum,
    LossSum,
    Tally,
    UploadShape,
)
from hushrec.errors import ConfigError, MessageError
from hushrec.federation.client import SLACK, Download, Task, take_part
from hushrec.federation.requests import EvaluationRequest, TrainRequest
from hushrec.io import codec
from hushrec.io.codec import Arrays, ArraySpec
from hushrec.kernels import pairs
from hushrec.privacy.protection import Protection
from hushrec.secagg import Stage, VectorLayout
from hushrec.secagg.vectors import PIECE_BYTES, Entries, Word

MOST_SHIFT = 61
Vector = NDArray[np.int64]
Bytes = NDArray[np.uint8]
COUNTS = ("clients", "trained", "lost", "up_bytes", "zeroed_out")
"""Counts of a sum, beside its arrays."""


@dataclass(frozen=True)
class ExpectedSum:
    """What a node's sum must be to be accepted."""

    run: str
    round: int
    clients: int
    """Largest number of clients in the sum."""
    shape: UploadShape
    """Names and shapes of the sum, which follow from public data."""
    norm: float
    """Largest L2 norm of one client's upload."""
    most_steps: int
    """Largest entry, so that no sum of so many nodes can overflow."""

    @property
    def most_bytes(self) -> int:
        """Size above which a message is refused unread."""
        return largest_sum(self.shape)


def largest_sum(shape: UploadShape) -> int:
    """Return the most bytes of a sum in the clear; gaps between n keys take n bytes at most."""
    keys = sum(count for count, _ in shape.sparse.values())
    return min(codec.LARGEST, keys + pairs.MOST_DIGITS * shape.entries + 2 * codec.HEADER_BYTES)


@dataclass(frozen=True, eq=False)
class NodeSum:
    """The exact sum of a node's clients' uploads in a round."""

    run: str
    round: int
    summed: ExactSum
    loss: LossSum
    up_bytes: int
    """Bytes of the summed uploads, as if each had been sent."""
    zeroed_out: int

    def to_bytes(self) -> bytes:
        """Encode the message."""
        counts = {**self.counts(), "loss": self.loss.steps}
        shifts, encoded = _encode(self.summed.to_arrays())
        return NodeSumMessage(self.run, self.round, counts, shifts, encoded).to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes, expected: ExpectedSum) -> NodeSum:
        """Decode it on the coordinator; refuse whatever is not as expected."""
        sent = NodeSumMessage.from_bytes(data, expected.most_bytes)
        if (sent.run, sent.round) != (expected.run, expected.round):
            raise MessageError(
                f"the sum is of round {sent.round} of '{sent.run}', not of round {expected.round} "
                f"of '{expected.run}'"
            )
        if sent.counts.keys() != {*COUNTS, "loss"}:
            raise MessageError("the sum does not hold the counts that it should")
        return cls.of(expected, sent.counts, _decode(sent, expected.shape))

    def counts(self) -> dict[str, int]:
        """Return the counts beside the arrays, by `COUNTS`."""
        clients, loss = self.summed.clients, self.loss
        numbers = clients, loss.clients, loss.lost, self.up_bytes, self.zeroed_out
        return dict(zip(COUNTS, numbers, strict=True))

    @classmethod
    def of(
        cls, expected: ExpectedSum, facts: Mapping[str, int], arrays: Arrays, noised: bool = False
    ) -> NodeSum:
        """Make a sum of counts and arrays; refuse whatever is not as expected.

        A ``noised`` sum, with the nodes' noise in it, has no bound on its norm.
        """
        clients = facts["clients"]
        if not 0 <= clients <= expected.clients:
            raise MessageError(f"the sum is of {clients} clients, and {expected.clients} take part")
        loss = LossSum(facts["loss"], facts["trained"], facts["lost"])
        if not 0 <= loss.lost <= loss.clients <= clients:
            raise MessageError("the sum counts more losses than clients")
        if abs(loss.steps) > clients * STEPS * int(LARGEST_LOSS):
            raise MessageError("the sum of losses is larger than losses can be")
        zeroed_out, up_bytes = facts["zeroed_out"], facts["up_bytes"]
        if not (0 <= zeroed_out <= clients and 0 <= up_bytes < 2**60):
            raise MessageError("the sum's counts are impossible")
        _check_sum(arrays, clients, expected, noised)
        summed = ExactSum.from_arrays(expected.shape, clients, arrays)
        return cls(expected.run, expected.round, summed, loss, up_bytes, zeroed_out)


@dataclass(frozen=True, eq=False)
class NodeSumMessage(codec.Message, kind="sum"):
    """A `NodeSum` as it travels."""

    run: codec.Name
    round: codec.Count
    counts: Mapping[str, codec.Whole]
    """`COUNTS`, and the loss in whole steps."""
    shifts: Mapping[str, tuple[Annotated[int, Field(ge=0, le=MOST_SHIFT)], ...]]
    """For each column of rows, and each dense array, the power of two that divides it."""
    arrays: codec.ArrayGroup
    """Keys and numbers as bytes, by `kernels.pairs.write_keys` and `write_steps`."""


def _encode(arrays: dict[str, Vector]) -> tuple[dict[str, tuple[int, ...]], dict[str, Bytes]]:
    """Encode arrays one by one, so that an array and its bytes are in memory and not both of all.

    What all numbers of a column are a multiple of is divided out: sums of counts are small numbers.
    """
    shifts, encoded = {}, {}
    for name in list(arrays):
        array = arrays.pop(name)
        if name.startswith("ids/"):
            encoded[name] = pairs.write_keys(array)
            continue
        rows = array if name.startswith("rows/") else array.reshape(-1, 1)
        every = np.bitwise_or.reduce(rows, axis=0, initial=0).tolist()
        shifts[name] = tuple((bits & -bits).bit_length() - 1 if bits else 0 for bits in every)
        encoded[name] = pairs.write_steps(rows, np.array(shifts[name], np.int64))
    return shifts, encoded


def _decode(sent: NodeSumMessage, shape: UploadShape) -> dict[str, Vector]:
    """Decode the arrays of a sum; refuse bytes that are not keys and numbers of this shape."""
    declared = {f"dense/{name}": (math.prod(size), 1) for name, size in shape.dense.items()}
    for name, size in shape.sparse.items():
        declared |= {f"ids/{name}": size, f"rows/{name}": size}
    specs = {name: replace(codec.BYTES, optional=True) for name in declared}
    codec.check_arrays("sum", sent.arrays, specs)
    decoded: dict[str, Vector] = {}
    for whole, data in sent.arrays.items():
        part, _, name = whole.partition("/")
        count, width = declared[whole]
        if part != "dense":  # a key ends with a byte below 128
            count = min(count, int(np.count_nonzero(sent.arrays.get(f"ids/{name}", data) < 128)))
        if part == "ids":
            array, space = np.empty(count, np.int64), shape.sparse[name][0]
            if not pairs.read_keys(data, array, space):
                raise MessageError(f"'{name}' has rows twice, in no order, or that do not exist")
        else:
            shifts = sent.shifts.get(whole, ())
            if len(shifts) != width:
                raise MessageError(f"the sum does not say how '{name}' is written")
            array = np.empty((count, width), np.int64)
            if not pairs.read_steps(data, array, np.array(shifts, np.int64)):
                raise MessageError(f"'{name}' is not the {count} x {width} numbers that it should")
        decoded[whole] = array.reshape(shape.dense[name]) if part == "dense" else array
    return decoded


def _check_sum(arrays: Arrays, clients: int, expected: ExpectedSum, noised: bool) -> None:
    """Refuse a sum of another shape, or larger than the bound on each client's upload allows."""
    shape, sparse = expected.shape, expected.shape.sparse
    specs = {f"dense/{name}": ArraySpec("int64", own) for name, own in shape.dense.items()}
    for name, (_, width) in sparse.items():
        specs[f"ids/{name}"] = ArraySpec("int64", (f"ids of {name}",))
        specs[f"rows/{name}"] = ArraySpec("int64", (f"ids of {name}", width))
    some = bool(clients or noised)  # a sum of no clients has no arrays
    codec.check_arrays("sum", arrays, specs if some else {})
    for name, (count, _) in sparse.items() if some else ():
        ids = arrays[f"ids/{name}"]
        if len(ids) and (ids[0] < 0 or ids[-1] >= count or (np.diff(ids) <= 0).any()):
            raise MessageError(f"'{name}' has rows twice, in no order, or that do not exist")
    square = 0.0
    for name, array in arrays.items():
        part, _, name = name.partition("/")
        if part == "ids":
            continue
        largest = max(int(array.max(initial=0)), -int(array.min(initial=0)))
        if largest > expected.most_steps:
            raise MessageError(f"'{name}' is too large to sum")
        if noised:
            continue
        if name.startswith("privacy/"):  # a mechanism's own entry is at most 1 per client
            if largest > clients * STEPS_PER_UNIT * SLACK:
                raise MessageError(f"'{name}' is larger than {clients} clients can make it")
            continue
        grid = shape.grids.get(name)
        if grid is not None and (largest > clients * grid.most or (array % grid.unit).any()):
            raise MessageError(f"'{name}' is not what {clients} clients can make of its grid")
        flat = array.reshape(-1).astype(np.float64)
        square += float(flat @ flat)
    norm, most = np.sqrt(square) / STEPS_PER_UNIT, clients * expected.norm * SLACK
    if not norm <= most:
        raise MessageError(f"the sum has norm {norm:.6g}, and {clients} clients at most {most:.6g}")


@dataclass(frozen=True)
class RoundVector:
    """A `NodeSum` as a vector, with all rows of tables and key spaces written out.

    Key spaces that declare a grid have words as wide as the sum over all clients needs.
    """

    shape: UploadShape
    clients: int
    """That take part on all nodes, which bounds the sum."""
    most_bytes: int
    """Of the longest vector that the contract allows."""

    @cached_property
    def layout(self) -> VectorLayout:
        """Names and shapes of the vector's parts, in the order of their names on every side."""
        rows = {f"rows/{name}": size for name, size in sorted(self.shape.sparse.items())}
        dense = {f"dense/{name}": size for name, size in sorted(self.shape.dense.items())}
        words = {}
        for name, grid in self.shape.grids.items():
            largest = grid.most // grid.unit
            words[f"rows/{name}"] = Word.bounded(name, grid.unit, largest, self.clients)
        arrays = {**rows, **dense, "counts": (len(COUNTS),)}
        layout = VectorLayout(arrays, ("loss",), words, PIECE_BYTES)
        if layout.nbytes > self.most_bytes:
            raise ConfigError(
                f"a secure sum of {layout.nbytes:,} bytes is more than the {self.most_bytes:,} "
                "that the contract lets a node send (secure.most_bytes): use a method with smaller "
                "uploads, a shorter list of items, or sums in the clear"
            )
        return layout

    def pack(self, found: NodeSum, nodes: int) -> Iterator[bytes]:
        """Return the pieces of a node's vector; a sum of so many nodes cannot overflow."""
        if found.summed.clients > self.clients:
            raise ConfigError(f"{self.clients} clients take part, and this node has more")
        arrays, entries = found.summed.to_arrays(), dict[str, Entries]()
        for name, shape in self.layout.arrays.items():
            part, _, own = name.partition("/")
            if part == "rows":
                none = np.zeros(0, np.int64), np.zeros((0, *shape[1:]), np.int64)
                given = arrays.pop(f"ids/{own}", none[0]), arrays.pop(name, none[1])
                entries[name] = given
            elif part == "dense":
                entries[name] = arrays.pop(name, np.zeros(shape, np.int64))
        if arrays:
            raise ConfigError(f"the upload holds what its shape does not: {', '.join(arrays)}")
        entries["counts"] = np.array(list(found.counts().values()))
        wide = {"loss": found.loss.steps}
        return self.layout.pack(entries, wide, nodes, found.summed.clients)

    def unpack(self, pieces: Iterable[bytes]) -> tuple[dict[str, int], dict[str, Vector]]:
        """Return the counts and the arrays of a `NodeSum` from a sum of vectors."""
        sparse = {f"rows/{name}" for name in self.shape.sparse}
        whole, wide = self.layout.unpack(pieces, sparse)
        arrays: dict[str, Vector] = {}
        counts: dict[str, int] = {}
        for name, found in whole.items():
            if isinstance(found, tuple):
                own = name.removeprefix("rows/")
                arrays |= {f"ids/{own}": found[0], name: found[1]}
            elif name == "counts":
                counts = dict(zip(COUNTS, found.tolist(), strict=True))
            else:
                arrays[name] = found
        nothing = not counts["clients"] and not any(array.any() for array in arrays.values())
        return {**counts, "loss": wide["loss"]}, {} if nothing else arrays


@dataclass(frozen=True)
class EvaluationVector:
    """An `Evaluation` as a vector."""

    metrics: Mapping[str, list[str]]
    """Metrics of each candidate set."""

    @cached_property
    def layout(self) -> VectorLayout:
        """Names and shapes of the vector's parts."""
        arrays: dict[str, tuple[int, ...]] = {}
        for name in self.metrics:
            arrays |= {f"users/{name}": (1,), f"ranks/{name}": (RANK_BINS,)}
        wide = [f"{name}/{each}" for name, metrics in self.metrics.items() for each in metrics]
        return VectorLayout(arrays, tuple(wide))

    def pack(self, found: Evaluation, nodes: int) -> Iterator[bytes]:
        """Return the pieces of a node's vector; a sum of so many nodes cannot overflow."""
        arrays: dict[str, Vector] = {}
        wide: dict[str, int] = {}
        for name, metrics in self.metrics.items():
            tally = found.tallies[name]
            arrays |= {f"users/{name}": np.array([tally.users]), f"ranks/{name}": tally.rank_counts}
            wide |= {f"{name}/{each}": tally.sums.get(each, 0) for each in metrics}
        return self.layout.pack(arrays, wide, nodes)

    def unpack(self, pieces: Iterable[bytes]) -> Evaluation:
        """Return the nodes' evaluations together."""
        arrays, wide = self.layout.unpack(pieces)
        tallies = {}
        for name, metrics in self.metrics.items():
            users, ranks = arrays[f"users/{name}"], arrays[f"ranks/{name}"]
            assert not isinstance(users, tuple) and not isinstance(ranks, tuple), "dense"
            sums = {each: wide[f"{name}/{each}"] for each in metrics if users[0]}
            tallies[name] = Tally(int(users[0]), sums, ranks)
        return Evaluation(tallies)


def round_shape(task: Task, protection: Protection, download: Download) -> UploadShape:
    """Return the shape of a round's sum, from a training of no clients: no data decides it."""
    public = replace(task.public, noise=np.zeros(0))
    empty = download.to(np.zeros(0, np.int64))
    upload, _ = take_part(task, protection, empty, public, task.empty_private)
    update = protection.receive(upload.update, public.clients, download.round)
    return UploadShape.of(update, public.n_items)


def about(request: TrainRequest | EvaluationRequest) -> str:
    """Identify a request: nodes sum replies to the same one, with the same number of clients."""
    if isinstance(request, TrainRequest):
        what = f"round {request.download.round}"
    else:
        what = f"evaluation of {request.part} after round {request.round}"
        what += " with selected parameters" if request.with_selected else ""
    digest = hashlib.blake2b(request.shared, digest_size=32).hexdigest()
    whole = request.assignment
    clients = f"{whole.training} of {whole.population}, {whole.largest_epsilon}"
    return f"{whole.run} ({clients}): {what}: {digest}"


@dataclass(frozen=True)
class StageRequest(codec.Message, kind="stage"):
    """The coordinator asks a node for its message of a stage."""

    run: codec.Name
    number: Annotated[int, Field(gt=0, lt=2**63)]
    """Of the sum; in a set-up, of its first one."""
    stage: Stage
    message: bytes = b""
    """What the nodes sent in the stage before: empty in the first one, and from the second piece
    of a masked vector on. Every sum begins with the message that ended its set-up."""
    request: bytes = b""
    """What is to be summed; only with the first piece of the masked vector."""
    piece: codec.Count = 0
    """Of the masked vector."""


@dataclass(frozen=True)
class StageReply(codec.Message, kind="stage-reply"):
    """A node's message of a stage."""

    message: bytes


@dataclass(frozen=True)
class RoundClosed(codec.Message, kind="round-closed", most_bytes=codec.HEADER_BYTES):
    """A node has opened a sum of this round, and takes part in no other."""

    round: codec.Count


def request_of(message: bytes) -> TrainRequest | EvaluationRequest:
    """Decode what is to be summed."""
    if not message:
        raise MessageError("the server does not say what is to be summed")
    for request in (TrainRequest, EvaluationRequest):
        if codec.kind_of(message) == request.kind:
            return request.from_bytes(message)
    raise MessageError("a round or an evaluation can be summed securely, and nothing else")
