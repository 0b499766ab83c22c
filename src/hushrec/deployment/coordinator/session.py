"""Coordinator session: enrolment of nodes, requests and deadlines, exclusion of faulty nodes.

Events are lines of a log, `EventLine`, with nothing of any user.

A federation names its nodes; the transport has identities of its own. Where the identity of each
name is registered, no other identity can use the name. Elsewhere a name is bound to the identity
that first enrols under it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import ConfigDict

from hushrec.deployment.coordinator.delivery import NOT_CONNECTED, POLL_SECONDS, Delivery
from hushrec.deployment.coordinator.planning import Policy, allowed_seconds
from hushrec.errors import ConfigError, FederationError, MessageError, listed, nearest
from hushrec.federation import requests as messages
from hushrec.federation.contract import Contract
from hushrec.federation.requests import Enrolment, Failure, Link, NodeId
from hushrec.io import require_memory
from hushrec.io.codec import Count, Message, Positive, Stored, kind_of, parse, printable, read_text
from hushrec.io.files import append_line

Reply = TypeVar("Reply")
NAMED_SECONDS = 10.0
"""Missing nodes are named when they were waited for so long at the start of a run."""
ROSTER_BYTES = 100
"""Memory of the coordinator for every user of a node: numbers, flags and budgets."""
RunEvent = Literal[
    "numbered anew",
    "forecast",
    "begun",
    "going on",
    "asked",
    "counted",
    "not applied",
    "lost",
    "round",
    "finished",
]
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
    rounds: Count = 0
    """Of a phase, in its forecast."""
    to: str = ""
    """The request: "invitation", "train", "evaluate valid"; of a forecast, its phase."""
    why: str = ""
    """Reason of a failure or a refusal."""
    users: Count = 0
    """Of a node; of a sum, held by the nodes that are not missing in it."""
    nodes: tuple[str, ...] = ()
    """Nodes that are asked."""
    missing: tuple[str, ...] = ()
    """Nodes that should have been in a sum, and are not."""
    software: str = ""
    """What an enrolled node runs, where the coordinator runs something else."""
    invalid_replies: Count = 0
    selected_round: Count = 0
    seconds: Positive = 0.0
    """Of a node, from the request to its reply; of a question, until its deadline; of a round,
    since the run began."""
    epsilon: float | None = None
    """Privacy loss up to this round; None without a guarantee."""
    up_bytes: Count = 0
    """Bytes of a node's reply; of a round, of all uploads of clients so far, by design."""
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
    declined: set[str] = field(default_factory=set, init=False)
    """Names of nodes that declined, or whose enrolment was refused: no run waits for them."""
    invalid_replies: Counter[str] = field(default_factory=Counter, init=False)
    slowest: dict[tuple[str, str], float] = field(default_factory=dict, init=False)
    """The longest that a node took for a request of a phase, by phase and request."""
    away: set[str] = field(default_factory=set, init=False)
    """Nodes that were not connected at the end of their last request."""

    def __post_init__(self) -> None:
        self.invited = Delivery(self.link, self.policy)
        self.method = self.contract.experiment.make_method()
        phases = [phase.name for phase in self.method.phases]
        for name in sorted(self.policy.phase_seconds.keys() - set(phases)):
            has_none = f"{self.method.name} has no phase '{name}'{nearest(name, phases)}"
            raise ConfigError(f"policy.phase_seconds: {has_none}")

    # ------------------------------------------------------------ enrolment

    def gather(self) -> list[Enrolment]:
        """Invite connected nodes until enough enrolled; refuse to begin with fewer.

        A run does not wait for nodes that declined or were refused, but needs `Policy.min_nodes`.
        """
        enrolled: dict[str, Enrolment] = {}
        for found in self._invitations():
            enrolled |= {enrolment.name: enrolment for enrolment in found}
            out = len(self.declined - enrolled.keys())
            least = min(self.policy.nodes, self.policy.min_nodes)
            if len(enrolled) >= max(least, self.policy.nodes - out):
                return list(enrolled.values())
        declined = f"; {listed(sorted(self.declined))} declined or were refused: see the log"
        raise FederationError(
            f"{len(enrolled)} of the {self.policy.nodes} nodes that the run needs enrolled "
            f"within {self.policy.enrol_seconds:g} s: start the others, and run again"
            + (declined if self.declined else "")
        )

    def meet(self, names: Sequence[str]) -> None:
        """Find the nodes of a run that continues; missing nodes may connect later."""
        for _ in self._invitations(names):
            if all(name in self.known for name in names):
                return
        self._require(len(self.known), len(names), "are connected")

    def _invitations(self, expected: Sequence[str] | None = None) -> Iterator[list[Enrolment]]:
        """Yield the enrolments of newly connected nodes, until the deadline of enrolment."""
        began, named = self.link.now(), False
        until = began + self.policy.enrol_seconds
        while True:
            yield self._invite(expected)
            now = self.link.now()
            if not named and now - began > NAMED_SECONDS:
                named = True
                for name in sorted({*(expected or self.registered or ())} - self.known.keys()):
                    why = f"{NOT_CONNECTED}; waiting for it"
                    self.events.tell(
                        EventLine(event="no answer", node=name, to="invitation", why=why)
                    )
            if now >= until:
                return
            self.link.wait(min(POLL_SECONDS, until - now))

    def _invite(self, expected: Sequence[str] | None) -> list[Enrolment]:
        """Invite connected nodes of unknown names, and read what those say that were invited;
        ``expected`` are the names of a run's nodes. No node is waited for."""
        present, contract = self.link.present(), self.contract
        seen = {*self.known.values(), *self.strangers}
        enrolments, software = [], messages.software()
        invitation = messages.Invitation(
            self.run,
            contract.settings_digest,
            contract.catalogue.digest,
            software,
            contract.terms,
        )
        for node in self.invited.requests.keys() - present.keys():
            del self.invited.requests[node]
        for node in present:
            if node not in seen and node not in self.invited.requests:
                self.invited.add(node, invitation.to_bytes)
        for arrival in self.invited.poll():
            node, answer = arrival.name, arrival.answer
            line = partial(EventLine, identity=node, to="invitation")
            if isinstance(answer, Failure):
                self.events.tell(line(event="no answer", why=answer.why))
                continue
            try:
                enrolment = self._enrolment(node, answer, expected)
                self._bind(enrolment.name, node, present)
            except MessageError as error:
                self.strangers.add(node)
                name = self._name_of(node, answer)
                self.events.tell(line(event="refused", node=name, why=str(error)))
                continue
            told = line(event="enrolled", node=enrolment.name, users=enrolment.users)
            if enrolment.software != software:
                told = told.model_copy(update={"software": printable(enrolment.software)})
            self.events.tell(told)
            enrolments.append(enrolment)
        return enrolments

    def _enrolment(self, node: NodeId, answer: bytes, expected: Sequence[str] | None) -> Enrolment:
        """Read an enrolment; refuse one that does not fit the run or this machine."""
        refusal, software = _refusal(answer), messages.software()
        if refusal is not None:
            ours = "" if software in refusal else f" (this coordinator runs {software})"
            raise MessageError(f"the node declined: {refusal}{ours}")
        try:
            found = Enrolment.expected(answer, self.run, self.contract.experiment.privacy.budgets)
        except MessageError as error:
            raise MessageError(f"{error} (this coordinator runs {software})") from None
        name = printable(found.name)
        if expected is not None and found.name not in expected:
            raise MessageError(f"node '{name}' has no part in this run; it can join the next one")
        messages.check_release(f"node '{name}'", found.software, "this coordinator", software)
        most = self.policy.max_users_per_node
        if found.users > most:
            raise MessageError(
                f"node '{name}' claims {found.users:,} users, more than "
                f"policy.max_users_per_node = {most:,}"
            )
        try:
            require_memory(ROSTER_BYTES * found.users, f"the users of node '{name}'", "fewer users")
        except ConfigError as error:
            raise MessageError(str(error)) from None
        return found

    def _name_of(self, node: NodeId, answer: bytes) -> str | None:
        """Return the name of a node that takes no part, where it is known for certain that no
        other node has it; the run does not wait for it."""
        registered = {identity: name for name, identity in (self.registered or {}).items()}
        name = registered.get(node)
        if name is None and self.registered is None:
            name = messages.claimed_name(answer)
        if not name or name in self.known:
            return None
        self.declined.add(name)
        return name

    def _bind(self, name: str, node: NodeId, present: Container[NodeId]) -> None:
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

        Every node is waited for by itself, to the deadline; a request without a reply is sent
        again until then (`delivery`). A node that was away to the end of its last request, and is
        away still, is waited for no longer than the others. ``reply_bytes`` is the largest size of
        a reply, which the deadline allows for. Fewer than `Policy.min_nodes` replies are an error,
        at the end.
        """
        phase, began = self.method.phase_of(number).name, self.link.now()
        size = reply_bytes + max((each.array_bytes for each in requests.values()), default=0)
        slowest = self.slowest.get((phase, what))
        allowed = allowed_seconds(self.policy, phase, size, slowest)
        quiet = 2 * size / self.policy.bytes_per_second + 2 * (slowest or 0.0)
        until = began + allowed
        delivery = Delivery(self.link, self.policy, until, quiet, self.known)
        most, needed = self.policy.max_invalid_replies, min(self.policy.min_nodes, len(requests))
        for name, request in requests.items():
            if self.invalid_replies[name] < most:
                delivery.add(name, request.to_bytes)
        answered, waiting = 0, delivery.requests.keys()
        asked = EventLine(event="asked", round=number, to=what, nodes=tuple(waiting))
        self.events.tell(asked.model_copy(update={"seconds": round(allowed, 3)}))
        while waiting:
            # The reader of a reply may take long: what arrived meanwhile is in time.
            late, arrived = self.link.now() >= until, False
            if self.policy.rebind or not waiting <= self.known.keys():
                self._invite(list(requests))
            for arrival in delivery.poll():
                name, answer = arrival.name, arrival.answer
                line = partial(EventLine, node=name, round=number, to=what)
                line = partial(line, down_bytes=arrival.sent_bytes)
                if isinstance(answer, Failure):
                    self.events.tell(line(event="no answer", why=answer.why))
                    continue
                line, arrived = partial(line, up_bytes=len(answer)), True
                self.away.discard(name)
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
                took = self.link.now() - began
                if arrival.sendings == 1:  # an absence does not make a node slow
                    self.slowest[phase, what] = max(took, self.slowest.get((phase, what), 0.0))
                self.events.tell(line(event="answered", seconds=round(took, 3)))
                yield name, reply
            enough = answered >= needed and waiting <= delivery.absent & self.away
            if late or enough or delivery.hopeless:
                break
            if not arrived:
                self.link.wait(POLL_SECONDS)
        for name in waiting:
            why = f"no answer in {allowed:.0f} s; policy.phase_seconds.'{phase}' gives it more"
            if name in delivery.absent:
                self.away.add(name)
                why = f"{NOT_CONNECTED} for {self.link.now() - began:.0f} s"
            self.events.tell(EventLine(event="sat out", node=name, round=number, to=what, why=why))
        self._require(answered, len(requests), f"answered ({what}, round {number})")

    def _require(self, count: int, asked: int, what: str) -> None:
        needed = min(self.policy.min_nodes, asked)
        if count < needed:
            raise FederationError(
                f"{count} nodes {what}, and {needed} are needed: what is done is saved; see the "
                "log for the others, and go on with --resume"
            )


def _refusal(answer: bytes) -> str | None:
    """Return the reason of a refusal, if the reply is one."""
    is_refusal = kind_of(answer) == messages.Refusal.kind
    return messages.Refusal.from_bytes(answer).why if is_refusal else None
