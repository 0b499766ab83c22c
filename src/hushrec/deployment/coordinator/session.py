"""Coordinator session: enrolment of nodes, requests with retries, exclusion of faulty nodes.

Events are lines of a log, `EventLine`, with nothing of any user.

A federation names its nodes; the transport has identities of its own. Where the identity of each
name is registered, no other identity can use the name. Elsewhere a name is bound to the identity
that first enrols under it.

The roster says which node holds which numbers of the population. A number is the public address of
a user's random streams and of its index in cohorts. The coordinator gives each node a range of
numbers at its enrolment. In a rehearsal, which partitions the users of one file over nodes, users
keep the numbers that they have in the file, so that results do not depend on the partition.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, PlainSerializer, PlainValidator, model_validator

from hushrec.data.splitting import may_train
from hushrec.deployment.coordinator.planning import Policy, allowed_seconds
from hushrec.errors import ConfigError, FederationError, MessageError, RunError, nearest
from hushrec.federation import requests as messages
from hushrec.federation.contract import Contract
from hushrec.federation.experiment import Experiment
from hushrec.federation.requests import Assignment, Enrolment, Failure, Link, NodeId
from hushrec.io.codec import Count, Message, Positive, Stored, kind_of, parse, printable, read_text
from hushrec.io.files import append_line
from hushrec.privacy.budgets import by_activity, levels_of
from hushrec.streams import Streams


def _spans(numbers: NDArray[np.int64]) -> list[list[int]]:
    """Write numbers as spans of consecutive ones, in their order."""
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    return [[int(span[0]), len(span)] for span in np.split(numbers, cuts) if len(span)]


def _numbers(given: Any) -> NDArray[np.int64]:
    """Read spans, or numbers one by one."""
    array = np.asarray(given)
    if array.size and (array.dtype != np.int64 or array.shape[1:] not in ((), (2,))):
        raise ValueError("not a list of spans")
    if array.ndim < 2 or not array.size:
        return array.astype(np.int64).ravel()
    return np.concatenate([np.arange(start, start + length) for start, length in array])


Numbers = Annotated[NDArray[np.int64], PlainValidator(_numbers), PlainSerializer(_spans)]
Budgets = Annotated[
    NDArray[np.float64] | None,
    PlainValidator(lambda given: None if given is None else np.asarray(given, np.float64)),
    PlainSerializer(lambda budgets: None if budgets is None else budgets.tolist()),
]


@dataclass(frozen=True, eq=False)
class Holding:
    """Indices of one node's users and clients among those of all nodes, in the order of its
    enrolment."""

    users: Numbers
    clients: Numbers


Partition = dict[str, Holding]
"""What each node holds, by its name."""


class Roster(Stored):
    """All users and clients of a run: roster.json."""

    run: str
    nodes: Partition
    trains: Numbers
    """Clients that train."""
    members: Numbers
    """Clients of the population that a guarantee is for."""
    clients: Count
    """Number of all clients, those included that do not train."""
    newcomers: bool
    """Whether users are evaluated that training leaves out."""
    epsilon: Budgets
    """Budget of every client, where they have budgets."""

    @classmethod
    def of(
        cls,
        run: str,
        experiment: Experiment,
        enrolled: Sequence[Enrolment],
        partition: Partition | None = None,
    ) -> Roster:
        """Number the users of all nodes, or take the numbers of a rehearsal's ``partition``.

        A node that has forgotten a user since does not say which: then everybody is numbered anew.
        """
        silos, usual = experiment.silos.kind != "none", partition or {}
        if any(node.users < len(usual[node.name].users) for node in enrolled if node.name in usual):
            partition = None
        if partition is None:
            holdings = _numbered(enrolled, silos)
        else:
            holdings = _as_partitioned(enrolled, partition)
        population = _count(holding.users for holding in holdings.values())
        count = _count(holding.clients for holding in holdings.values())
        member, past = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        for node in enrolled:
            clients = holdings[node.name].clients
            member[clients], past[clients] = True, node.trains
        seen = may_train(experiment.split, Streams(experiment.seed), population)
        if not silos:
            member &= seen
        newcomers = bool(any(node.idle for node in enrolled) or not seen.all())
        return cls(
            run=run,
            nodes=holdings,
            trains=np.flatnonzero(member & past),
            members=np.flatnonzero(member),
            clients=count,
            newcomers=newcomers,
            epsilon=_epsilon(experiment, enrolled, holdings, member),
        )

    @property
    def population(self) -> int:
        """Number of users, the largest number and one."""
        return _count(holding.users for holding in self.nodes.values())

    def pool(self, *, promised: bool) -> NDArray[np.int64]:
        """Return the clients that cohorts are drawn from; under a privacy guarantee, independent of
        any client's data."""
        return self.members if promised else self.trains

    @cached_property
    def digest(self) -> str:
        """Identify the population: a checkpoint is of no use with another one."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()

    def assignments(self, *, promised: bool) -> dict[str, Assignment]:
        """Return the indices of each node's users and clients, and the clients' budgets."""
        epsilon, largest, assigned = self.epsilon, 0.0, {}
        if epsilon is not None:
            # Rounded down to what noise is worked out for, so that a node finds the same noise.
            levels, level = levels_of(epsilon)
            epsilon = np.where(epsilon > 0, levels[level], 0.0)
            largest = float(epsilon.max())
        whole = self.run, self.population, len(self.pool(promised=promised))
        for name, held in self.nodes.items():
            own = None if epsilon is None else epsilon[held.clients]
            assigned[name] = Assignment(*whole, held.users, held.clients, own, largest)
        return assigned

    @model_validator(mode="after")
    def _check_numbers(self) -> Roster:
        if max(_count([self.trains]), _count([self.members])) > self.clients:
            raise ValueError("'clients' is fewer than there are numbers of clients")
        return self


def _numbered(enrolled: Sequence[Enrolment], silos: bool) -> dict[str, Holding]:
    """Give nodes one range after the other, in the order of their names."""
    holdings, user, client = {}, 0, 0
    for node in sorted(enrolled, key=lambda node: node.name):
        users = np.arange(user, user + node.users)
        clients = np.arange(client, client + len(node.trains)) if silos else users
        holdings[node.name] = Holding(users, clients)
        user, client = user + len(users), client + len(clients)
    return holdings


def _as_partitioned(enrolled: Sequence[Enrolment], partition: Partition) -> dict[str, Holding]:
    for node in enrolled:
        holding = partition.get(node.name)
        if holding is None:
            raise RunError(f"node '{node.name}' is not in the partition: make the folders again")
        if (node.users, len(node.trains)) != (len(holding.users), len(holding.clients)):
            raise RunError(
                f"node '{node.name}' holds {node.users} users, and the partition gives it "
                f"{len(holding.users)}: make the folders again"
            )
    return {node.name: partition[node.name] for node in enrolled}


def _epsilon(
    experiment: Experiment,
    enrolled: Sequence[Enrolment],
    held: Partition,
    member: NDArray[np.bool_],
) -> NDArray[np.float64] | None:
    """Return the privacy budget of every client."""
    config = experiment.privacy
    if config.budgets is None:
        return None
    declared = np.zeros(len(member))
    for node in enrolled:
        own = node.activity if config.budgets == "activity" else node.epsilon
        assert own is not None, "read with the contract's rule"
        declared[held[node.name].clients] = own
    if config.budgets == "activity":
        assert config.epsilon_min is not None and config.epsilon_max is not None, "checked"
        counts, clients = declared.astype(np.int64), np.flatnonzero(member)
        return by_activity(counts, clients, config.epsilon_min, config.epsilon_max)
    return np.where(member, declared, 0.0)


def _count(numbers: Iterable[NDArray[np.int64]]) -> int:
    return 1 + max((int(each.max(initial=-1)) for each in numbers), default=-1)


Reply = TypeVar("Reply")
RunEvent = Literal["begun", "going on", "round", "lost", "finished"]
NodeEvent = Literal[
    "enrolled", "answered", "no answer", "sat out", "declined", "refused", "excluded"
]


class EventLine(Stored):
    """One event: a line of events.jsonl."""

    model_config = ConfigDict(extra="forbid")

    time: str = ""
    """Of writing, in UTC."""
    event: RunEvent | NodeEvent
    run: str | None = None
    node: str | None = None
    """Name of the node; None for events of the run, and of nodes that did not enrol."""
    identity: NodeId | None = None
    """The node's identity in the transport, in events of its enrolment."""
    round: Count = 0
    to: str = ""
    """The request: "invitation", "train", "evaluate valid"."""
    why: str = ""
    """Reason of a failure or a refusal."""
    users: Count = 0
    invalid_replies: Count = 0
    selected_round: Count = 0
    seconds: Positive = 0.0
    """Of a node, from the request to its reply; of a round, since the run began."""
    epsilon: float | None = None
    """Privacy loss up to this round; None without a guarantee."""
    up_bytes: Count = 0
    """Bytes of a node's reply; of a round, of all messages from nodes so far."""
    down_bytes: Count = 0


@dataclass(frozen=True)
class EventLog:
    """A file of events that grows line by line."""

    path: Path
    echo: Callable[[EventLine], None] = lambda line: None
    """Called with every event as well."""

    def tell(self, line: EventLine) -> None:
        """Write an event, with the time."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = line.model_copy(update={"time": now})
        append_line(self.path, line.to_json())
        self.echo(line)

    def lines(self) -> Iterator[EventLine]:
        """Read all events; a line that a crash cut short is left out."""
        texts = read_text(self.path).split("\n") if self.path.exists() else []
        for number, text in enumerate(texts, 1):
            if text.endswith("}"):
                yield parse(EventLine, text, f"{self.path}, line {number},")


@dataclass(eq=False)
class Session:
    """The coordinator's exchanges with the nodes of one run."""

    contract: Contract
    run: str
    link: Link
    policy: Policy
    events: EventLog
    registered: Mapping[str, NodeId] | None = None
    """The transport identity of each name, where it is known beforehand."""
    known: dict[str, NodeId] = field(default_factory=dict, init=False)
    """The transport identity that each name is bound to."""
    strangers: set[NodeId] = field(default_factory=set, init=False)
    """Identities that were invited and refused."""
    invalid_replies: Counter[str] = field(default_factory=Counter, init=False)
    slowest: dict[tuple[str, str], float] = field(default_factory=dict, init=False)
    """The longest that a node took for a request of a phase, by phase and request."""

    def __post_init__(self) -> None:
        self.method = self.contract.experiment.make_method()
        phases = [phase.name for phase in self.method.phases]
        for name in sorted(self.policy.phase_seconds.keys() - set(phases)):
            has_none = f"{self.method.name} has no phase '{name}'{nearest(name, phases)}"
            raise ConfigError(f"policy.phase_seconds: {has_none}")

    # ------------------------------------------------------------ enrolment

    def gather(self) -> list[Enrolment]:
        """Invite connected nodes until enough enrolled; refuse to begin with fewer."""
        enrolled: dict[str, Enrolment] = {}
        for found in self._invitations():
            enrolled |= {enrolment.name: enrolment for enrolment in found}
            if len(enrolled) >= self.policy.nodes:
                return list(enrolled.values())
        raise FederationError(
            f"{len(enrolled)} of the {self.policy.nodes} nodes that the run needs enrolled "
            f"within {self.policy.enrol_seconds:g} s: start the others, and run again"
        )

    def meet(self, names: Sequence[str]) -> None:
        """Find the nodes of a run that continues; missing nodes may connect later."""
        for _ in self._invitations(names):
            if all(name in self.known for name in names):
                return
        self._require(len(self.known), len(names), "are connected")

    def _invitations(self, expected: Sequence[str] | None = None) -> Iterator[list[Enrolment]]:
        """Yield the enrolments of newly connected nodes, until the deadline of enrolment."""
        until = time.monotonic() + self.policy.enrol_seconds
        while True:
            yield self._invite(until, expected)
            left = until - time.monotonic()
            if left <= 0:
                return
            self.link.wait(min(self.policy.backoff_seconds, left))

    def _invite(self, until: float, expected: Sequence[str] | None) -> list[Enrolment]:
        """Invite connected nodes of unknown names; ``expected`` are the names of a run's nodes."""
        present, contract = self.link.present(), self.contract
        seen = {*self.known.values(), *self.strangers}
        nodes = [node for node in present if node not in seen]
        if not nodes:
            return []
        budgets, enrolments = contract.experiment.privacy.budgets, []
        invitation = messages.Invitation(
            self.run, contract.settings_digest, contract.catalogue.digest
        ).to_bytes()
        seconds = max(1.0, until - time.monotonic())
        for node, answer in self.link.ask(dict.fromkeys(nodes, invitation), seconds):
            line = partial(EventLine, identity=node, to="invitation")
            if isinstance(answer, Failure):
                self.events.tell(line(event="no answer", why=answer.why))
                continue
            try:
                refusal = _refusal(answer)
                if refusal is not None:
                    raise MessageError(f"the node declined: {refusal}")
                enrolment = Enrolment.expected(answer, self.run, budgets)
                if expected is not None and enrolment.name not in expected:
                    raise MessageError(
                        f"node '{printable(enrolment.name)}' has no part in this run; it can join "
                        "the next one"
                    )
                self._bind(enrolment.name, node, present)
            except MessageError as error:
                self.strangers.add(node)
                self.events.tell(line(event="refused", why=str(error)))
                continue
            self.events.tell(line(event="enrolled", node=enrolment.name, users=enrolment.users))
            enrolments.append(enrolment)
        return enrolments

    def _bind(self, name: str, node: NodeId, present: Sequence[NodeId]) -> None:
        if self.registered is not None and self.registered.get(name) != node:
            raise MessageError(f"the name '{printable(name)}' belongs to another node, or to none")
        before = self.known.get(name)
        if before is not None and not (self.policy.rebind and before not in present):
            raise MessageError(f"the name '{name}' belongs to another node")
        self.known[name] = node

    # ------------------------------------------------------------ requests

    def exchange(
        self,
        what: str,
        number: int,
        requests: Mapping[str, Message],
        read: Callable[[str, bytes], Reply],
        reply_bytes: int = 0,
    ) -> Iterator[tuple[str, Reply]]:
        """Send requests to nodes by name and yield the valid replies as they arrive.

        A request without a reply is sent again until the deadline; a node answers the same request
        with the same bytes. ``reply_bytes`` is the largest size of a reply, which the deadline
        allows for. Fewer than `Policy.min_nodes` replies are an error, at the end.
        """
        phase, began = self.method.phase_of(number).name, time.monotonic()
        size = reply_bytes + max((each.array_bytes for each in requests.values()), default=0)
        slowest = self.slowest.get((phase, what))
        allowed = allowed_seconds(self.policy, phase, size, slowest)
        until, wait = began + allowed, self.policy.backoff_seconds
        most, answered = self.policy.max_invalid_replies, 0
        waiting = [name for name in requests if self.invalid_replies[name] < most]
        for attempt in range(self.policy.retries + 1):
            if attempt:
                self.link.wait(wait)
                wait *= 2
            present, lost = self.link.present(), []
            if any(self.known.get(name) not in present for name in waiting):
                self._invite(until, list(requests))  # a node may be back under another identity
            for name, sent, answer in self._once({name: requests[name] for name in waiting}, until):
                line = partial(EventLine, node=name, round=number, to=what)
                if isinstance(answer, Failure):
                    lost.append(name)
                    self.events.tell(line(event="no answer", why=answer.why))
                    continue
                try:
                    refusal = _refusal(answer)
                    if refusal is not None:
                        self.events.tell(line(event="declined", why=refusal))
                        continue
                    reply = read(name, answer)
                except MessageError as error:
                    self.invalid_replies[name] += 1
                    line = partial(line, invalid_replies=self.invalid_replies[name])
                    self.events.tell(line(event="refused", why=str(error)))
                    if self.invalid_replies[name] >= most:
                        self.events.tell(line(event="excluded"))
                    continue
                answered += 1
                took = time.monotonic() - began
                self.slowest[phase, what] = max(took, self.slowest.get((phase, what), 0.0))
                line = partial(line, seconds=round(took, 3))
                self.events.tell(line(event="answered", up_bytes=len(answer), down_bytes=sent))
                yield name, reply
            waiting = lost
            if not waiting or time.monotonic() + wait >= until:
                break
        why = f"no answer in {allowed:.0f} s; policy.phase_seconds.'{phase}' gives it more"
        for name in waiting:
            self.events.tell(EventLine(event="sat out", node=name, round=number, to=what, why=why))
        self._require(answered, len(requests), f"answered ({what}, round {number})")

    def _once(
        self, requests: Mapping[str, Message], until: float
    ) -> Iterator[tuple[str, int, bytes | Failure]]:
        """Send each request once; yield with each reply how many bytes were sent for it."""
        names = {self.known[name]: name for name in requests if name in self.known}
        encoded = _Encoded({node: requests[name] for node, name in names.items()})
        for node, answer in self.link.ask(encoded, max(0.0, until - time.monotonic())):
            yield names[node], encoded.sizes.get(node, 0), answer
        for name in requests:
            if name not in self.known:
                yield name, 0, Failure("not connected")

    def _require(self, count: int, asked: int, what: str) -> None:
        needed = min(self.policy.min_nodes, asked)
        if count < needed:
            raise FederationError(
                f"{count} nodes {what}, and {needed} are needed: what is done is saved; see the "
                "log for the others, and go on with --resume"
            )


class _Encoded(Mapping[NodeId, bytes]):
    """Requests as bytes, each encoded when it is sent: one is in memory, not one for each node."""

    def __init__(self, requests: Mapping[NodeId, Message]) -> None:
        self.requests = requests
        self.sizes: dict[NodeId, int] = {}

    def __getitem__(self, node: NodeId) -> bytes:
        encoded = self.requests[node].to_bytes()
        self.sizes[node] = len(encoded)
        return encoded

    def __iter__(self) -> Iterator[NodeId]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)


def _refusal(answer: bytes) -> str | None:
    """Return the reason of a refusal, if the reply is one."""
    is_refusal = kind_of(answer) == messages.Refusal.kind
    return messages.Refusal.from_bytes(answer).why if is_refusal else None
