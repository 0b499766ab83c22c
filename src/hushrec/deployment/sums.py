"""What a node sends back of a round: the exact sum of its clients' uploads, in whole steps.

The server knows from public things what the sum must look like and how large it can be, and counts
nothing else. Whole steps add up exactly, so it does not matter how users are spread over nodes.

What nodes sum securely, as one vector of whole numbers: of a round, and of a look.

It is all that a node's answer holds where sums are in the clear: counts, losses and metrics too.
Node and server find the same layout, each by itself, from public things and from what everybody is
asked; rows are written out, so that nothing of a vector tells which of them a node touched.

The messages of a secure sum, as they travel between the server and a node.

The first step carries what is to be summed, a `TrainRequest` or a `LookRequest`; every other one
hands on what the nodes said before. A node answers with its own part (`Said`), with a refusal, or
with `Closed`, where it has opened the round's sum already and will be in no other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import ExactSum, UploadShape
from hushrec.aggregation.exact_sum import STEPS_PER_UNIT
from hushrec.aggregation.statistics import LARGEST_LOSS, PLACES, STEPS, Evaluation, LossSum, Tally
from hushrec.errors import ConfigError, MessageError
from hushrec.federation.client import Task, take_part
from hushrec.federation.messages import SLACK, Download
from hushrec.federation.requests import LookRequest, TrainRequest
from hushrec.io.codec import (
    HEADER_BYTES,
    LARGEST,
    Array,
    Arrays,
    count_in,
    kind_of,
    pack,
    text_in,
    unpack,
    whole_in,
)
from hushrec.privacy.protection import Protection
from hushrec.secagg import Layout, Stage

COUNTS = ("clients", "trained", "lost", "up_bytes", "zeroed_out")
"""What a sum counts beside its arrays."""


@dataclass(frozen=True)
class ExpectedSum:
    """What a node's sum must be to count."""

    run: str
    round: int
    clients: int
    """Most clients that it may be of."""
    shape: UploadShape
    """Of the sum: names and shapes that follow from public things."""
    norm: float
    """Largest L2 norm of one client's part."""
    most_steps: int
    """Largest entry, so that no sum of so many nodes can overflow."""

    @property
    def most_bytes(self) -> int:
        """Size above which a message is not looked at."""
        ids = sum(count for count, _ in self.shape.sparse.values())
        return min(LARGEST, 8 * (ids + self.shape.entries) + 2 * HEADER_BYTES)


@dataclass(frozen=True, eq=False)
class NodeSum:
    """The exact sum of what a node's clients upload in a round, and nothing of any of them."""

    run: str
    round: int
    summed: ExactSum
    loss: LossSum
    up_bytes: int
    """Of the uploads that were summed, as if each had travelled."""
    zeroed_out: int

    def to_bytes(self) -> bytes:
        """Write the message."""
        facts = {"run": self.run, "round": self.round, "clients": self.summed.clients}
        facts |= {"loss": self.loss.steps, "trained": self.loss.clients, "lost": self.loss.lost}
        facts |= {"up_bytes": self.up_bytes, "zeroed_out": self.zeroed_out}
        return pack("sum", facts, self.summed.to_arrays())

    @classmethod
    def from_bytes(cls, data: bytes, expected: ExpectedSum) -> NodeSum:
        """Read it on the server; refuse whatever is not as expected."""
        facts, arrays = unpack("sum", data, expected.most_bytes)
        run, number = text_in(facts, "run"), count_in(facts, "round")
        if (run, number) != (expected.run, expected.round):
            raise MessageError(
                f"the sum is of round {number} of '{run}', not of round {expected.round} of "
                f"'{expected.run}'"
            )
        said = {name: count_in(facts, name) for name in COUNTS}
        return cls.of(expected, {**said, "loss": whole_in(facts, "loss")}, arrays)

    @classmethod
    def of(
        cls,
        expected: ExpectedSum,
        facts: Mapping[str, int],
        arrays: Arrays,
        *,
        noised: bool = False,
    ) -> NodeSum:
        """Make it of counts and arrays; refuse whatever is not as expected.

        Of a sum of many nodes, with noise of theirs in it, only the noise says how large it is.
        """
        clients = facts["clients"]
        if not 0 <= clients <= expected.clients:
            raise MessageError(
                f"the sum is of {clients} clients, and {expected.clients} were asked"
            )
        loss = LossSum(facts["loss"], facts["trained"], facts["lost"])
        if not 0 <= loss.lost <= loss.clients <= clients:
            raise MessageError("the sum counts more losses than clients")
        if abs(loss.steps) > clients * STEPS * int(LARGEST_LOSS):
            raise MessageError("the sum of losses is larger than losses can be")
        zeroed_out, up_bytes = facts["zeroed_out"], facts["up_bytes"]
        if not (0 <= zeroed_out <= clients and 0 <= up_bytes < 2**60):
            raise MessageError("the sum counts what cannot be")
        _check_sum(arrays, clients, expected, noised)
        summed = ExactSum.from_arrays(expected.shape, clients, arrays)
        return cls(expected.run, expected.round, summed, loss, up_bytes, zeroed_out)


def _check_sum(arrays: Arrays, clients: int, expected: ExpectedSum, noised: bool) -> None:
    shape, sparse = expected.shape, expected.shape.sparse
    names = {f"{part}/{name}" for name in sparse for part in ("ids", "rows")}
    names |= {f"dense/{name}" for name in shape.dense}
    some = bool(clients or noised)  # of no clients, a sum has no arrays
    for name in sorted((names if some else set()) ^ arrays.keys()):
        what = "lacks" if name in names else "holds an array that nobody asked for:"
        raise MessageError(f"the sum {what} '{name}'")
    for name, array in arrays.items():
        if array.dtype != np.int64:
            raise MessageError(f"'{name}' is {array.dtype}, not whole steps")
    for name, own in shape.dense.items():
        if some and arrays[f"dense/{name}"].shape != own:
            raise MessageError(f"'{name}' has shape {arrays[f'dense/{name}'].shape}, not {own}")
    for name, (count, width) in sparse.items() if some else ():
        ids, rows = arrays[f"ids/{name}"], arrays[f"rows/{name}"]
        if ids.ndim != 1 or rows.shape != (len(ids), width):
            raise MessageError(f"'{name}' has ids {ids.shape} for rows {rows.shape}")
        if len(ids) and (ids[0] < 0 or ids[-1] >= count or (np.diff(ids) <= 0).any()):
            raise MessageError(f"'{name}' has rows twice, in no order, or that do not exist")
    _check_size(arrays, clients, expected, noised)


def _check_size(arrays: Arrays, clients: int, expected: ExpectedSum, noised: bool) -> None:
    """Refuse a sum that clients who keep to their bound cannot have."""
    square = 0.0
    for name, array in arrays.items():
        part, _, name = name.partition("/")
        if part == "ids":
            continue
        largest = max(abs(int(array.max(initial=0))), abs(int(array.min(initial=0))))
        if largest > expected.most_steps:
            raise MessageError(f"'{name}' is too large to sum")
        if noised:
            continue
        if name.startswith("privacy/"):  # what a mechanism adds is at most 1 of each client
            if largest > clients * STEPS_PER_UNIT * SLACK:
                raise MessageError(f"'{name}' is larger than {clients} clients can make it")
            continue
        flat = array.reshape(-1).astype(np.float64)
        square += float(flat @ flat)
    norm, most = np.sqrt(square) / STEPS_PER_UNIT, clients * expected.norm * SLACK
    if not norm <= most:
        raise MessageError(
            f"the sum has norm {norm:.6g}, more than the {most:.6g} that {clients} clients can have"
        )


MOST_WORDS = 2**26
"""The longest vector: half a gigabyte, which every node sends and the server adds up."""
Vector = NDArray[np.int64]


@dataclass(frozen=True)
class RoundForm:
    """A `NodeSum` as a vector."""

    shape: UploadShape

    @cached_property
    def layout(self) -> Layout:
        """Names and shapes of what is in it."""
        return _layout({**_arrays(self.shape), "counts": (len(COUNTS),)}, ("loss",))

    def pack(self, found: NodeSum, nodes: int) -> Vector:
        """Return the vector of a node, which so many like it can be added to."""
        loss, sparse = found.loss, found.summed.to_arrays()
        counts = found.summed.clients, loss.clients, loss.lost, found.up_bytes, found.zeroed_out
        arrays = {"counts": np.array(counts, np.int64)}
        for name, shape in _arrays(self.shape).items():
            arrays[name] = np.zeros(shape, np.int64)
            part, _, own = name.partition("/")
            if part == "dense":
                arrays[name] += sparse.pop(name, 0)
            elif name in sparse:
                arrays[name][sparse.pop(f"ids/{own}")] = sparse.pop(name)
        if sparse:
            raise ConfigError(f"the upload holds what its shape does not: {', '.join(sparse)}")
        return self.layout.pack(arrays, {"loss": loss.steps}, nodes)

    def unpack(self, vector: Vector) -> tuple[dict[str, int], dict[str, Vector]]:
        """Return the facts and the arrays of a sum of nodes, as a `NodeSum` has them."""
        whole, wide = self.layout.unpack(vector)
        counts = dict(zip(COUNTS, whole.pop("counts").tolist(), strict=True))
        arrays: dict[str, Vector] = {}
        for name, array in whole.items():
            part, _, own = name.partition("/")
            if part == "dense":
                arrays[name] = array
                continue
            ids = np.flatnonzero(array.any(1))
            arrays |= {f"ids/{own}": ids, name: array[ids]}
        nothing = not counts["clients"] and not any(array.any() for array in arrays.values())
        return {**counts, "loss": wide["loss"]}, {} if nothing else arrays


@dataclass(frozen=True)
class LookForm:
    """An `Evaluation` as a vector."""

    metrics: Mapping[str, list[str]]
    """Of each candidate set."""

    @cached_property
    def layout(self) -> Layout:
        """Names and shapes of what is in it."""
        arrays: dict[str, tuple[int, ...]] = {}
        for name in self.metrics:
            arrays |= {f"users/{name}": (1,), f"places/{name}": (PLACES,)}
        wide = [f"{name}/{each}" for name, metrics in self.metrics.items() for each in metrics]
        return _layout(arrays, tuple(wide))

    def pack(self, found: Evaluation, nodes: int) -> Vector:
        """Return the vector of a node, which so many like it can be added to."""
        arrays: dict[str, Vector] = {}
        wide: dict[str, int] = {}
        for name, metrics in self.metrics.items():
            tally = found.tallies[name]
            arrays |= {f"users/{name}": np.array([tally.users]), f"places/{name}": tally.places}
            wide |= {f"{name}/{each}": tally.sums.get(each, 0) for each in metrics}
        return self.layout.pack(arrays, wide, nodes)

    def unpack(self, vector: Vector) -> Evaluation:
        """Return what nodes looked at together."""
        arrays, wide = self.layout.unpack(vector)
        tallies = {}
        for name, metrics in self.metrics.items():
            users = int(arrays[f"users/{name}"][0])
            sums = {each: wide[f"{name}/{each}"] for each in metrics if users}
            tallies[name] = Tally(users, sums, arrays[f"places/{name}"].copy())
        return Evaluation(tallies)


def round_shape(task: Task, protection: Protection, download: Download) -> UploadShape:
    """Return what a sum of a round looks like: it is asked of no clients, so nobody decides it."""
    nobody = replace(task.nobody, noise=np.zeros(0))
    empty = download.to(np.zeros(0, np.int64))
    upload, _ = take_part(task, protection, empty, nobody, task.nobodys)
    update = protection.receive(upload.update, nobody.clients, download.round)
    return UploadShape.of(update, nobody.n_items)


def about(request: TrainRequest | LookRequest) -> str:
    """Say what everybody is told and asked in a sum: nodes that are not told the same have no sum.

    How many there are is part of it, as noise follows from that.
    """
    if isinstance(request, TrainRequest):
        said, what = replace(request.download, own={}), f"round {request.download.round}"
    else:
        said, what = request.serving, f"look at {request.part} after round {request.round}"
        what += " with selected parameters" if request.with_selected else ""
    digest = hashlib.blake2b(said.to_bytes(), digest_size=32).hexdigest()
    terms = request.terms
    people = f"{terms.training} of {terms.population}, {terms.largest_epsilon}"
    return f"{terms.run} ({people}): {what}: {digest}"


def _arrays(shape: UploadShape) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a sum in dense form: one entry for every declared key."""
    rows = {f"rows/{name}": size for name, size in shape.sparse.items()}
    return {**rows, **{f"dense/{name}": size for name, size in shape.dense.items()}}


def _layout(arrays: Mapping[str, tuple[int, ...]], wide: tuple[str, ...]) -> Layout:
    layout = Layout(arrays, wide)
    if layout.length > MOST_WORDS:
        raise ConfigError(
            f"a secure sum of {layout.length:,} numbers is more than the {MOST_WORDS:,} that a "
            "node sends: use a method with smaller uploads, a shorter list of items, or sums in "
            "the clear"
        )
    return layout


@dataclass(frozen=True)
class SumStep:
    """The server asks a node for its part of a stage."""

    run: str
    number: int
    """Of the sum."""
    stage: Stage
    said: bytes = b""
    """What the server hands on; nothing in the first stage."""
    asked: bytes = b""
    """What is to be summed; only in the first stage."""

    def to_bytes(self) -> bytes:
        """Write the message."""
        facts = {"run": self.run, "sum": self.number, "stage": int(self.stage)}
        parts = {"said": self.said, "asked": self.asked}
        return pack("step", facts, {name: _bytes(part) for name, part in parts.items()})

    @classmethod
    def from_bytes(cls, data: bytes) -> SumStep:
        """Read it on the node."""
        facts, arrays = unpack("step", data)
        number, stage = count_in(facts, "sum"), count_in(facts, "stage")
        if stage not in set(Stage) or not 0 < number < 2**63:
            raise MessageError("the message is of no stage of a secure sum")
        said, asked = (_part(arrays, name) for name in ("said", "asked"))
        return cls(text_in(facts, "run"), number, Stage(stage), said, asked)


@dataclass(frozen=True)
class Said:
    """A node's part of a stage."""

    said: bytes

    def to_bytes(self) -> bytes:
        """Write the message."""
        return pack("said", {}, {"said": _bytes(self.said)})

    @classmethod
    def from_bytes(cls, data: bytes, most: int = LARGEST) -> Said:
        """Read it on the server."""
        return cls(_part(unpack("said", data, most + HEADER_BYTES)[1], "said"))


@dataclass(frozen=True)
class Closed:
    """A node is in no other sum of this round."""

    round: int

    def to_bytes(self) -> bytes:
        """Write the message."""
        return pack("closed", {"round": self.round}, {})

    @classmethod
    def from_bytes(cls, data: bytes) -> Closed:
        """Read it on the server."""
        facts, _ = unpack("closed", data, HEADER_BYTES)
        return cls(count_in(facts, "round"))


def request_of(asked: bytes) -> TrainRequest | LookRequest:
    """Read what is to be summed."""
    if not asked:
        raise MessageError("the server does not say what is to be summed")
    if kind_of(asked) == "training":
        return TrainRequest.from_bytes(asked)
    if kind_of(asked) == "look":
        return LookRequest.from_bytes(asked)
    raise MessageError("a round or a look can be summed securely, and nothing else")


def _bytes(data: bytes) -> Array:
    return np.frombuffer(data, np.uint8)


def _part(arrays: Arrays, name: str) -> bytes:
    if name not in arrays or arrays[name].dtype != np.uint8:
        raise MessageError(f"the message lacks '{name}'")
    return arrays[name].tobytes()
