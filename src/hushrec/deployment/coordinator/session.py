"""Coordinator session: enrolment of nodes, requests with retries, exclusion of faulty nodes.

A federation names its nodes; the transport has identities of its own. Where the identity of each
name is registered, no other identity can use the name. Elsewhere a name is bound to the identity
that first enrols under it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, TypeVar

from pydantic import Field

from hushrec.config import Settings
from hushrec.deployment.coordinator.status import EventLog
from hushrec.deployment.transport import Failure, Link, NodeId
from hushrec.errors import FederationError, MessageError
from hushrec.federation.contract import Contract
from hushrec.federation.requests import Enrolment, Invitation, Refusal
from hushrec.io.codec import Message, kind_of, printable

Reply = TypeVar("Reply")
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Policy(Settings):
    """Deadlines, retries and exclusion of nodes."""

    nodes: Annotated[int, Field(ge=1)] = 2
    """A run begins when so many nodes have enrolled."""
    min_nodes: Annotated[int, Field(ge=1)] = 2
    """A round or an evaluation needs replies of so many nodes; with fewer the run stops, and
    continues with --resume."""
    enrol_seconds: Seconds = 300.0
    """How long to wait for nodes to enrol."""
    round_seconds: Seconds = 300.0
    """Deadline of a round and of an evaluation, or of each stage of a secure sum; a node without a
    reply by then is left out."""
    retries: Annotated[int, Field(ge=0)] = 3
    """Requests to a node that does not reply, after the first, within the deadline."""
    backoff_seconds: Seconds = 2.0
    """Wait before the first retry; it doubles with each retry."""
    max_invalid_replies: Annotated[int, Field(ge=1)] = 3
    """A node is excluded after so many invalid replies."""
    largest_norm: Seconds = 1e6
    """Largest L2 norm of one client's upload, where no clipping bounds it."""
    rebind: bool = False
    """Whether a name may return under another transport identity, as nodes without keys do. Leave
    it off with authentication: a name then belongs to the key that enrolled it."""


class Session:
    """The coordinator's exchanges with the nodes of one run."""

    def __init__(
        self,
        contract: Contract,
        run: str,
        link: Link,
        policy: Policy,
        events: EventLog,
        registered: Mapping[str, NodeId] | None = None,
    ) -> None:
        """``registered`` is the transport identity of each name, where it is known beforehand."""
        self.contract = contract
        self.run = run
        self.link = link
        self.policy = policy
        self.events = events
        self.registered = registered
        self.known: dict[str, NodeId] = {}
        """The transport identity that each name is bound to."""
        self.strangers: set[NodeId] = set()
        """Identities that were invited and refused."""
        self.invalid_replies: Counter[str] = Counter()

    # ------------------------------------------------------------ enrolment

    def gather(self) -> list[Enrolment]:
        """Invite connected nodes until enough enrolled; refuse to begin with fewer."""
        enrolled: dict[str, Enrolment] = {}
        until = time.monotonic() + self.policy.enrol_seconds
        while True:
            for enrolment in self._invite(self._unknown(), until - time.monotonic()):
                enrolled[enrolment.name] = enrolment
            if len(enrolled) >= self.policy.nodes:
                return list(enrolled.values())
            if time.monotonic() >= until:
                raise FederationError(
                    f"{len(enrolled)} of the {self.policy.nodes} nodes that the run needs enrolled "
                    f"within {self.policy.enrol_seconds:g} s: start the others, and run again"
                )
            self.link.wait(min(self.policy.backoff_seconds, max(0.0, until - time.monotonic())))

    def meet(self, names: Sequence[str]) -> None:
        """Find the nodes of a run that continues; missing nodes may connect later."""
        until = time.monotonic() + self.policy.enrol_seconds
        while time.monotonic() < until:
            self._invite(self._unknown(), until - time.monotonic(), names)
            if all(name in self.known for name in names):
                return
            self.link.wait(min(self.policy.backoff_seconds, max(0.0, until - time.monotonic())))
        self._require(len(self.known), len(names), "are connected")

    def _unknown(self) -> list[NodeId]:
        seen = {*self.known.values(), *self.strangers}
        return [node for node in self.link.present() if node not in seen]

    def _invite(
        self, nodes: Sequence[NodeId], seconds: float, expected: Sequence[str] | None = None
    ) -> list[Enrolment]:
        if not nodes:
            return []
        contract, enrolments = self.contract, []
        invitation = Invitation(
            self.run, contract.settings_digest, contract.catalogue.digest
        ).to_bytes()
        present = set(self.link.present())
        budgets = contract.experiment.privacy.budgets
        for node, answer in self.link.ask(dict.fromkeys(nodes, invitation), max(seconds, 1.0)):
            if isinstance(answer, Failure):
                self.events.tell("no answer", identity=node, to="invitation", why=answer.why)
                continue
            try:
                refusal = _refusal(answer)
                if refusal is not None:
                    raise MessageError(f"the node declined: {refusal.why}")
                enrolment = Enrolment.expected(answer, self.run, budgets)
                self._bind(enrolment.name, node, present, expected)
            except MessageError as error:
                self.strangers.add(node)
                self.events.tell("refused", identity=node, to="invitation", why=str(error))
                continue
            self.events.tell("enrolled", node=enrolment.name, users=enrolment.users, identity=node)
            enrolments.append(enrolment)
        return enrolments

    def _bind(
        self, name: str, node: NodeId, present: set[NodeId], expected: Sequence[str] | None
    ) -> None:
        if expected is not None and name not in expected:
            raise MessageError(
                f"node '{printable(name)}' has no part in this run; it can join the next one"
            )
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
    ) -> Iterator[tuple[str, Reply]]:
        """Send requests to nodes by name and yield the valid replies as they arrive.

        A request without a reply is sent again until the deadline; a node answers the same request
        with the same bytes. Fewer than `Policy.min_nodes` replies are an error, at the end.
        """
        until, wait = time.monotonic() + self.policy.round_seconds, self.policy.backoff_seconds
        waiting, answered = [name for name in requests if not self._excluded(name)], 0
        for attempt in range(self.policy.retries + 1):
            if attempt:
                self.link.wait(wait)
                wait *= 2
            self._find_missing(waiting, list(requests), until)
            lost = []
            for name, sent, answer in self._once({name: requests[name] for name in waiting}, until):
                if isinstance(answer, Failure):
                    lost.append(name)
                    self._tell("no answer", name, what, number, why=answer.why)
                    continue
                try:
                    refusal = _refusal(answer)
                    if refusal is not None:
                        self._tell("declined", name, what, number, why=refusal.why)
                        continue
                    reply = read(name, answer)
                except MessageError as error:
                    self._count_invalid(name, what, number, str(error))
                    continue
                answered += 1
                self._tell("answered", name, what, number, down_bytes=sent, up_bytes=len(answer))
                yield name, reply
            waiting = lost
            if not waiting or time.monotonic() + wait >= until:
                break
        for name in waiting:
            self._tell("sat out", name, what, number)
        self._require(answered, len(requests), f"answered ({what}, round {number})")

    def _once(
        self, requests: Mapping[str, Message], until: float
    ) -> Iterator[tuple[str, int, bytes | Failure]]:
        """Send each request once; yield with each reply how many bytes were sent for it."""
        names = {self.known[name]: name for name in requests if name in self.known}
        encoded = {node: requests[name].to_bytes() for node, name in names.items()}
        for node, answer in self.link.ask(encoded, max(0.0, until - time.monotonic())):
            yield names[node], len(encoded[node]), answer
        for name in requests:
            if name not in self.known:
                yield name, 0, Failure("not connected")

    def _find_missing(self, waiting: Sequence[str], names: Sequence[str], until: float) -> None:
        """Invite unknown identities where a node is missing: it may be back under another one."""
        present = set(self.link.present())
        if any(self.known.get(name) not in present for name in waiting):
            self._invite(self._unknown(), until - time.monotonic(), names)

    def _excluded(self, name: str) -> bool:
        return self.invalid_replies[name] >= self.policy.max_invalid_replies

    def _count_invalid(self, name: str, what: str, number: int, why: str) -> None:
        self.invalid_replies[name] += 1
        count = self.invalid_replies[name]
        self._tell("refused", name, what, number, why=why, invalid_replies=count)
        if self._excluded(name):
            self._tell("excluded", name, what, number, invalid_replies=count)

    def _tell(self, event: str, name: str, what: str, number: int, **facts: object) -> None:
        self.events.tell(event, node=name, round=number, to=what, **facts)

    def _require(self, count: int, asked: int, what: str) -> None:
        needed = min(self.policy.min_nodes, asked)
        if count < needed:
            raise FederationError(
                f"{count} nodes {what}, and {needed} are needed: what is done is saved; see the "
                "log for the others, and go on with --resume"
            )


def _refusal(answer: bytes) -> Refusal | None:
    """Return the refusal, if the reply is one."""
    return Refusal.from_bytes(answer) if kind_of(answer) == Refusal.kind else None
