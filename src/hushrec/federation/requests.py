"""Messages between a coordinator and a node, validated on arrival.

The coordinator invites a node, and requests training rounds and evaluations. A node answers with an
`Enrolment`, with the exact sum of its clients' protected uploads (`federation.sums`), with an
`EvaluationReply`, or with a `Refusal`. A node that was away at the end of a run is sent the model
(`ModelDelivery`). A node's answers hold sums over its clients and counts, and
neither name a user nor hold a parameter or an interaction of one.

Every request carries the node's `Assignment`, so that a node which was away needs nothing else.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from typing import Annotated, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec.aggregation import Evaluation
from hushrec.data.splitting import Part
from hushrec.errors import MessageError
from hushrec.federation.client import Download
from hushrec.federation.guard import in_words, rounds_in_words
from hushrec.io import codec
from hushrec.io.codec import ArraySpec, Count, Positive, Stored

Numbers = NDArray[np.int64]
MOST_CLIENTS = 2**31 - 1
"""Users and clients are numbered in 32 bits."""
Population = Annotated[int, Field(ge=0, le=MOST_CLIENTS)]
ClientNumbers = Annotated[Numbers, ArraySpec("int64", ("clients",))]
Floats = NDArray[np.float64]
ClientFloats = Annotated[Floats | None, ArraySpec("float64", ("clients",), optional=True)]


def software() -> str:
    """Return what decides the bits of a result on this machine: versions, and the processor."""
    versions = (f"{name} {version(name)}" for name in ("hushrec", "numpy", "numba"))
    return ", ".join((*versions, platform.machine()))


def check_release(one: str, ours: str, other: str, theirs: str) -> None:
    """Refuse two parties of different releases of hushrec; both are `software`, or empty."""
    if ours.partition(",")[0] != theirs.partition(",")[0]:
        runs = (codec.printable(each) or "an earlier hushrec" for each in (ours, theirs))
        first, second = runs
        raise MessageError(
            f"{one} runs {first}, and {other} runs {second}: install the same hushrec on both"
        )


def _no_numbers() -> Numbers:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Assignment(codec.Message, kind="assignment"):
    """The size of a run's population, and the numbers in it of one node's users and clients."""

    run: codec.Name
    population: Population
    """Number of users of all nodes."""
    training: Population
    """Number of clients of all nodes that cohorts are drawn from."""
    users: Annotated[Numbers, ArraySpec("int64", ("users",))] = field(default_factory=_no_numbers)
    """Number in the population of each of the node's users, in the order of its enrolment."""
    clients: ClientNumbers = field(default_factory=_no_numbers)
    """The same of its clients, which are silos or the users themselves."""
    epsilon: ClientFloats = None
    """Privacy budget of each of its clients, where clients have budgets of their own."""
    largest_epsilon: float = 0.0
    """The largest budget of all clients: uploads are weighted in proportion to it."""

    @property
    def digest(self) -> str:
        """Identify the assignment: a node accepts one for each run."""
        return hashlib.blake2b(self.to_bytes(), digest_size=16).hexdigest()

    def validate(self) -> None:
        """Refuse numbers outside of the population, numbers given twice, and wrong budgets."""
        if self.training > self.population:
            raise MessageError("the request trains more clients than there are users")
        for what, numbers in (("users", self.users), ("clients", self.clients)):
            inside = not len(numbers) or 0 <= numbers.min() <= numbers.max() < self.population
            if not inside or len(np.unique(numbers)) != len(numbers):
                raise MessageError(f"the request's {what} are outside of the population, or twice")
        budgets = np.zeros(0) if self.epsilon is None else self.epsilon
        if not ((budgets >= 0) & (budgets <= self.largest_epsilon)).all():
            raise MessageError("the request's budgets do not fit its clients")


@dataclass(frozen=True)
class Invitation(codec.Message, kind="invitation", most_bytes=2 * codec.HEADER_BYTES):
    """The coordinator asks a node whether it takes part in a run."""

    run: codec.Name
    settings: codec.Name
    """Digest of the experiment."""
    catalogue: codec.Name
    """Digest of the public catalogue."""
    software: codec.Name = ""
    """What the coordinator runs (`software`)."""
    terms: str = ""
    """The settings behind the digest, so that a node can say which of its own differ."""


@dataclass(frozen=True, eq=False)
class Enrolment(codec.Message, kind="enrolment", most_bytes=2**26):
    """A node takes part: how many users it holds, and what the privacy plan needs of them."""

    run: codec.Name
    name: codec.Name
    users: Population
    idle: Population
    """Users without training interactions."""
    trains: Annotated[NDArray[np.bool_], ArraySpec("bool", ("clients",))]
    """Of each client, whether it has training interactions."""
    activity: Annotated[Numbers | None, ArraySpec("int64", ("clients",), optional=True)] = None
    """Interactions of each client, where budgets follow from their order."""
    epsilon: ClientFloats = None
    """Budgets that clients declare, where they do."""
    software: codec.Name = ""
    """What the node runs (`software`)."""

    def validate(self) -> None:
        """Refuse counts that contradict each other."""
        if not (0 < len(self.trains) <= self.users and self.idle <= self.users):
            raise MessageError("the enrolment counts more clients or idle users than users")
        for name, array in (("activity", self.activity), ("budgets", self.epsilon)):
            if array is not None and (array < 0).any():
                raise MessageError(f"the enrolment's {name} are negative")

    @classmethod
    def expected(cls, data: bytes, run: str, budgets: str | None) -> Enrolment:
        """Decode it on the coordinator; ``budgets`` is the contract's rule for them."""
        found = cls.from_bytes(data)
        if found.run != run:
            raise MessageError(f"the enrolment is for the run '{found.run}', not '{run}'")
        given = (found.activity is not None, found.epsilon is not None)
        if given != (budgets == "activity", budgets == "declared"):
            raise MessageError("the enrolment holds other arrays than were asked for")
        return found


@dataclass(frozen=True, eq=False)
class TrainRequest(codec.Message, kind="train"):
    """The coordinator asks a node to let some of its clients take part in a round."""

    assignment: Assignment
    selected: codec.Count
    """The round whose private parameters are kept beside the newest."""
    clients: ClientNumbers
    """Ascending."""
    shared: bytes
    """The download without the clients' own arrays, encoded: the same bytes for every node."""
    own: codec.ArrayGroup = field(default_factory=dict)
    """The clients' own arrays of the download."""

    @cached_property
    def _common(self) -> Download:
        return Download.from_bytes(self.shared)

    @property
    def download(self) -> Download:
        """What the clients receive."""
        return replace(self._common, own=self.own)

    def validate(self) -> None:
        """Refuse clients of other nodes, and arrays that are not for the clients."""
        if (np.diff(self.clients) <= 0).any():
            raise MessageError("the request does not name its clients in their order")
        if not np.isin(self.clients, self.assignment.clients).all():
            raise MessageError("the request names clients that are not this node's")
        if self._common.own:
            raise MessageError("the request's common download holds arrays of single clients")
        for name, array in self.own.items():
            if array.ndim == 0 or len(array) != len(self.clients):
                raise MessageError(f"'{codec.printable(name)}' is not for the request's clients")


@dataclass(frozen=True, eq=False)
class EvaluationRequest(codec.Message, kind="evaluate"):
    """The coordinator asks a node to rank its users' held-out items."""

    assignment: Assignment
    round: codec.Count
    part: Part
    selected: codec.Count
    with_selected: bool
    """Whether to use the private parameters of the selected round in place of the newest."""
    shared: bytes
    """The download with the parameters that score, encoded: the same bytes for every node."""

    @cached_property
    def serving(self) -> codec.Arrays:
        """The parameters that score."""
        return Download.from_bytes(self.shared).common

    def validate(self) -> None:
        """Refuse parameters that cannot be decoded."""
        _ = self.serving


@dataclass(frozen=True)
class EvaluationReply(codec.Message, kind="evaluation-reply", most_bytes=8 * codec.HEADER_BYTES):
    """A node's sums of metrics over its users."""

    run: codec.Name
    round: codec.Count
    part: Part
    encoded: bytes
    """The `Evaluation`, encoded."""

    @classmethod
    def expected(
        cls, data: bytes, request: EvaluationRequest, metrics: Mapping[str, list[str]]
    ) -> Evaluation:
        """Decode it on the coordinator; ``metrics`` are those of each candidate set."""
        reply = cls.from_bytes(data)
        expected = request.assignment.run, request.round, request.part
        if (reply.run, reply.round, reply.part) != expected:
            raise MessageError("the node evaluated something else than was requested")
        evaluation = Evaluation.from_bytes(reply.encoded, metrics)
        if evaluation.users > len(request.assignment.users):
            raise MessageError("the node evaluated more users than it holds")
        return evaluation


@dataclass(frozen=True, eq=False)
class ModelDelivery(codec.Message, kind="model"):
    """The coordinator gives a node the model of a run that ended while the node was away."""

    assignment: Assignment
    round: codec.Count
    selected: codec.Count
    shared: bytes
    """The download with the parameters that score, encoded: the same bytes for every node."""

    @property
    def as_evaluation(self) -> EvaluationRequest:
        """The request with which the other nodes received the model."""
        return EvaluationRequest(
            self.assignment, self.round, "test", self.selected, True, self.shared
        )

    def validate(self) -> None:
        """Refuse parameters that cannot be decoded."""
        self.as_evaluation.validate()


@dataclass(frozen=True)
class ModelReceipt(codec.Message, kind="model-receipt", most_bytes=codec.HEADER_BYTES):
    """A node has the model of a run."""

    run: codec.Name
    round: codec.Count

    @classmethod
    def expected(cls, data: bytes, delivery: ModelDelivery) -> ModelReceipt:
        """Decode it on the coordinator."""
        found = cls.from_bytes(data)
        if (found.run, found.round) != (delivery.assignment.run, delivery.round):
            raise MessageError("the node has another model than was sent")
        return found


@dataclass(frozen=True)
class Refusal(codec.Message, kind="refusal", most_bytes=codec.HEADER_BYTES):
    """A node does not do what was requested."""

    why: Annotated[str, Field(max_length=400)]
    """In a sentence that tells nothing of its users."""
    name: codec.Name = ""
    """The node's name, where it declines an invitation."""

    def __post_init__(self) -> None:
        # The sentence ends in the coordinator's log, where a terminal would obey control codes.
        object.__setattr__(self, "why", codec.printable(self.why)[:400])


def claimed_name(answer: bytes) -> str | None:
    """Return the name that a node gives itself in its answer to an invitation, if any."""
    for kind in (Refusal, Enrolment):
        with suppress(MessageError):
            return codec.printable(kind.from_bytes(answer).name)
    return None


NodeId = str
"""Identity of a node in the transport; with authentication, that of its key."""


@dataclass(frozen=True)
class Failure:
    """No reply arrived: the node is away, failed, or took too long."""

    why: str


class Link(Protocol):
    """A connection to nodes; no call waits for a node."""

    def present(self) -> Mapping[NodeId, str]:
        """Return the nodes that are connected now, each with an identifier of its connection. A
        node that connects again has another one, and has lost what it was sent before."""

    def send(self, node: NodeId, request: bytes, seconds: float) -> str | None:
        """Send a request whose reply is of use for so many seconds; return the ticket of the
        reply, or None if the node is not connected."""

    def receive(self, tickets: Sequence[str]) -> Iterator[tuple[str, bytes | Failure]]:
        """Yield the replies that are there now, by ticket; each reply is yielded once."""

    def wait(self, seconds: float) -> None:
        """Wait so many seconds."""

    def now(self) -> float:
        """Return the seconds of a clock that `wait` advances."""


# ------------------------------------------------------------ what a run's log says of them


class PhaseTraffic(Stored):
    """Messages between the coordinator and one node in the rounds of a phase, evaluations too."""

    exchanges: Count = 0
    up_bytes: Count = 0
    """From the node."""
    down_bytes: Count = 0
    slowest_s: Positive = 0.0
    """The longest that the node took for one request."""

    def plus(self, up_bytes: int, down_bytes: int, seconds: float) -> PhaseTraffic:
        """Return the traffic with another exchange."""
        return PhaseTraffic(
            exchanges=self.exchanges + 1,
            up_bytes=self.up_bytes + up_bytes,
            down_bytes=self.down_bytes + down_bytes,
            slowest_s=max(self.slowest_s, seconds),
        )


class WireBytes(Stored):
    """Bytes of all messages between the coordinator and its nodes, as they were sent: repeated
    requests and evaluations too, but not those of the enrolment."""

    up_bytes: Count
    """From the nodes."""
    down_bytes: Count


FINAL_EVALUATIONS = ("final valid", "final test")


class Attendance(Stored):
    """Who is in the sum of a round or of an evaluation, of a federation."""

    round: Count
    to: str
    """ "train", "evaluate valid" after a round, "final valid" or "final test"."""
    users: Count
    """Held by the nodes that are in it; whether they have held-out items is not known."""
    missing: list[str] = Field(default_factory=list)
    """Nodes that should have been in it."""


def absences(attendance: Iterable[Attendance]) -> str:
    """Write which nodes were missing where; empty if all nodes were in everything."""
    where: dict[str, dict[str, list[int]]] = {}
    for one in attendance:
        for name in one.missing:
            where.setdefault(name, {}).setdefault(one.to, []).append(one.round)
    sentences = []
    for name, found in where.items():
        places = []
        if rounds := found.get("train"):
            places.append(f"in {rounds_in_words(rounds)}")
        if rounds := found.get("evaluate valid"):
            several = "s" if len(rounds) > 1 else ""
            places.append(f"in the evaluation{several} of {rounds_in_words(rounds)}")
        if any(to in found for to in FINAL_EVALUATIONS):
            places.append("in the final evaluation")
        sentences.append(f"{name} was missing {in_words(places)}")
    return "; ".join(sentences)
