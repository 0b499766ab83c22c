"""What travels between the server and a node: values with a bytes form, validated on arrival.

The server invites, asks to train and asks to look; a node enrols, sends the exact sum of its
clients' protected uploads (`sums`), says what a look came to, or refuses with a sentence. A node's
answers name no user and hold no parameter or interaction of one: sums over its clients, and counts.

Every request carries the `Terms`, so that a node which was away needs nothing but the request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation.statistics import Evaluation
from hushrec.data.splitting import Part
from hushrec.errors import MessageError
from hushrec.federation.messages import Download
from hushrec.io.codec import (
    HEADER_BYTES,
    Array,
    Arrays,
    check_finite,
    count_in,
    pack,
    text_in,
    unpack,
)

Numbers = NDArray[np.int64]
NOBODY: Numbers = np.zeros(0, np.int64)
MOST_CLIENTS = 2**31 - 1
"""Users and clients are numbered in 32 bits."""


@dataclass(frozen=True, eq=False)
class Terms:
    """What the server says of a run's population, and of a node's place in it."""

    run: str
    population: int
    """Users in all."""
    training: int
    """Clients that cohorts are drawn from, in all."""
    users: Numbers = field(default_factory=lambda: NOBODY)
    """Number in the population of each of the node's users, in the order it told them."""
    clients: Numbers = field(default_factory=lambda: NOBODY)
    """The same of its clients, which are silos or the users themselves."""
    epsilon: NDArray[np.float64] | None = None
    """Budget of each of its clients, where they have budgets of their own."""
    largest_epsilon: float = 0.0
    """The largest budget of anybody: uploads weigh in proportion to its."""

    @property
    def digest(self) -> str:
        """Identify them: a node holds the server to what it said first."""
        facts, arrays = self.said()
        return hashlib.blake2b(pack("terms", facts, arrays), digest_size=16).hexdigest()

    def said(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """Return them as parts of a message."""
        facts = {
            "run": self.run,
            "population": self.population,
            "training": self.training,
            "largest_epsilon": self.largest_epsilon,
        }
        arrays: dict[str, Array] = {"terms/users": self.users, "terms/clients": self.clients}
        if self.epsilon is not None:
            arrays["terms/epsilon"] = self.epsilon
        return facts, arrays

    @classmethod
    def told(cls, facts: Mapping[str, Any], arrays: Arrays) -> Terms:
        """Read them from a message, and refuse what cannot be."""
        population, training = count_in(facts, "population"), count_in(facts, "training")
        users, clients = arrays.get("terms/users"), arrays.get("terms/clients")
        epsilon, largest = arrays.get("terms/epsilon"), facts.get("largest_epsilon")
        if users is None or clients is None or not isinstance(largest, float):
            raise MessageError("the request does not say who is who")
        if not training <= population <= MOST_CLIENTS:
            raise MessageError("the request is of a population that cannot be")
        _check_numbers(users, population, "users")
        _check_numbers(clients, population, "clients")
        if epsilon is not None:
            fits = epsilon.shape == clients.shape and epsilon.dtype == np.float64
            if not fits or not ((epsilon >= 0) & (epsilon <= largest)).all():
                raise MessageError("the request's budgets do not fit its clients")
        run = text_in(facts, "run")
        return cls(run, population, training, users, clients, epsilon, largest)


@dataclass(frozen=True)
class Invitation:
    """The server asks a node whether it takes part in a run."""

    run: str
    settings: str
    """Digest of the experiment."""
    catalogue: str
    """Digest of the public catalogue."""

    def to_bytes(self) -> bytes:
        """Write the message."""
        return pack("invitation", vars(self), {})

    @classmethod
    def from_bytes(cls, data: bytes) -> Invitation:
        """Read it on the node."""
        facts, _ = unpack("invitation", data, 2 * HEADER_BYTES)
        return cls(*(text_in(facts, name) for name in ("run", "settings", "catalogue")))


@dataclass(frozen=True, eq=False)
class Enrolment:
    """A node takes part: how many it holds, and what the plan has to know of them."""

    run: str
    name: str
    users: int
    idle: int
    """Users without anything to train on."""
    trains: NDArray[np.bool_]
    """Of each client, whether it has something to train on."""
    activity: Numbers | None = None
    """Interactions of each client, where budgets go by their order."""
    epsilon: NDArray[np.float64] | None = None
    """Budgets that clients declare, where they do."""

    def to_bytes(self) -> bytes:
        """Write the message."""
        facts = {"run": self.run, "name": self.name, "users": self.users, "idle": self.idle}
        arrays: dict[str, Array] = {"trains": self.trains}
        for name in ("activity", "epsilon"):
            if getattr(self, name) is not None:
                arrays[name] = getattr(self, name)
        return pack("enrolment", facts, arrays)

    @classmethod
    def from_bytes(cls, data: bytes, run: str, budgets: str | None) -> Enrolment:
        """Read it on the server; ``budgets`` is the rule that the agreement has for them."""
        facts, arrays = unpack("enrolment", data, 2**26)
        said = text_in(facts, "run")
        if said != run:
            raise MessageError(f"the enrolment is for the run '{said}', not '{run}'")
        users, idle = count_in(facts, "users"), count_in(facts, "idle")
        extra = {"activity": "activity", "declared": "epsilon"}.get(budgets or "")
        if arrays.keys() != {"trains", *([extra] if extra else [])}:
            raise MessageError("the enrolment holds other arrays than were asked for")
        trains = arrays["trains"]
        if trains.dtype != np.bool_ or trains.ndim != 1 or not 0 < len(trains) <= users:
            raise MessageError("the enrolment does not say which clients train")
        if idle > users or users > MOST_CLIENTS:
            raise MessageError("the enrolment counts more users than can be")
        activity, epsilon = arrays.get("activity"), arrays.get("epsilon")
        if activity is not None and not _fits(activity, trains, np.int64):
            raise MessageError("the enrolment's activity does not fit its clients")
        if epsilon is not None and not (
            _fits(epsilon, trains, np.float64) and np.isfinite(epsilon).all()
        ):
            raise MessageError("the enrolment's budgets do not fit its clients")
        return cls(run, text_in(facts, "name"), users, idle, trains, activity, epsilon)


@dataclass(frozen=True, eq=False)
class TrainRequest:
    """The server asks a node to let some of its clients take part in a round."""

    terms: Terms
    selected: int
    """The round whose private parameters are to be kept beside the newest."""
    clients: Numbers
    """Numbers of the clients, ascending."""
    download: Download

    def to_bytes(self) -> bytes:
        """Write the message."""
        facts, arrays = self.terms.said()
        arrays |= {"clients": self.clients, "download": _bytes(self.download.to_bytes())}
        return pack("training", {**facts, "selected": self.selected}, arrays)

    @classmethod
    def from_bytes(cls, data: bytes) -> TrainRequest:
        """Read it on the node."""
        facts, arrays = unpack("training", data)
        terms, clients = Terms.told(facts, arrays), _array(arrays, "clients")
        _check_numbers(clients, terms.population, "clients")
        if (np.diff(clients) <= 0).any():
            raise MessageError("the request does not name its clients in their order")
        if not np.isin(clients, terms.clients).all():
            raise MessageError("the request names clients that are not this node's")
        download = Download.from_bytes(_array(arrays, "download").tobytes())
        for name, array in download.own.items():
            if array.ndim == 0 or len(array) != len(clients):
                raise MessageError(f"'{name}' is not for the clients of the request")
        return cls(terms, count_in(facts, "selected"), clients, download)


@dataclass(frozen=True, eq=False)
class LookRequest:
    """The server asks a node what a model does for its users' held-out items."""

    terms: Terms
    round: int
    part: Part
    selected: int
    with_selected: bool
    """Whether private parameters of the selected round are meant, not the newest."""
    serving: Download

    def to_bytes(self) -> bytes:
        """Write the message."""
        facts, arrays = self.terms.said()
        facts |= {"round": self.round, "part": self.part, "selected": self.selected}
        facts["with_selected"] = self.with_selected
        return pack("look", facts, arrays | {"serving": _bytes(self.serving.to_bytes())})

    @classmethod
    def from_bytes(cls, data: bytes) -> LookRequest:
        """Read it on the node."""
        facts, arrays = unpack("look", data)
        part, with_selected = _part(facts), facts.get("with_selected") is True
        serving = Download.from_bytes(_array(arrays, "serving").tobytes())
        number, selected = count_in(facts, "round"), count_in(facts, "selected")
        return cls(Terms.told(facts, arrays), number, part, selected, with_selected, serving)


@dataclass(frozen=True)
class Looked:
    """What a node says of a look."""

    run: str
    round: int
    part: Part
    evaluation: Evaluation

    def to_bytes(self) -> bytes:
        """Write the message."""
        facts = {"run": self.run, "round": self.round, "part": self.part}
        return pack("looked", facts, {"evaluation": _bytes(self.evaluation.to_bytes())})

    @classmethod
    def from_bytes(cls, data: bytes, asked: LookRequest, names: Mapping[str, list[str]]) -> Looked:
        """Read it on the server; ``names`` are the metrics of each candidate set."""
        facts, arrays = unpack("looked", data, 8 * HEADER_BYTES)
        said = text_in(facts, "run"), count_in(facts, "round"), _part(facts)
        if said != (asked.terms.run, asked.round, asked.part):
            raise MessageError("the node looked at something else than it was asked to")
        evaluation = Evaluation.from_bytes(_array(arrays, "evaluation").tobytes(), names)
        if evaluation.users > len(asked.terms.users):
            raise MessageError("the node looked at more users than it holds")
        return cls(*said, evaluation)


@dataclass(frozen=True)
class Refusal:
    """A node does not do what it was asked to."""

    why: str
    """In a sentence that tells nothing of its users."""

    def to_bytes(self) -> bytes:
        """Write the message."""
        return pack("refusal", {"why": self.why[:400]}, {})

    @classmethod
    def from_bytes(cls, data: bytes) -> Refusal:
        """Read it on the server, where it ends in the log: what cannot be printed does not."""
        facts, _ = unpack("refusal", data, HEADER_BYTES)
        why = text_in(facts, "why", 400)
        return cls(printable(why))


def printable(text: str) -> str:
    """Return a text of somebody else's without what a terminal would obey."""
    return "".join(letter for letter in text if letter.isprintable())


def _check_numbers(numbers: Array, population: int, what: str) -> None:
    if numbers.ndim != 1 or numbers.dtype != np.int64:
        raise MessageError(f"the request does not number its {what}")
    inside = not len(numbers) or (numbers.min() >= 0 and numbers.max() < population)
    if not inside or len(np.unique(numbers)) != len(numbers):
        raise MessageError(f"the request numbers {what} that cannot be, or one twice")


def _fits(array: Array, like: Array, dtype: Any) -> bool:
    return array.shape == like.shape and array.dtype == dtype and bool((array >= 0).all())


def _array(arrays: Arrays, name: str) -> Array:
    if name not in arrays:
        raise MessageError(f"the message lacks '{name}'")
    check_finite(arrays[name], name)
    return arrays[name]


def _bytes(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


def _part(facts: Mapping[str, Any]) -> Part:
    said = facts.get("part")
    part: Literal["valid", "test"]
    for part in get_args(Part):
        if said == part:
            return part
    raise MessageError("the message does not say which held-out items are meant")
