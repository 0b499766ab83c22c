"""`Desk`: where the server meets its nodes. It invites them, asks them, and remembers how they did.

Names are what a federation calls its nodes; the transport has identities of its own. Where it is
known which identity has which name, nobody takes another's. Elsewhere it is said once, at the first
answer to an invitation, and held to.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from hushrec.deployment.coordinator.events import Events
from hushrec.deployment.coordinator.policy import Rules
from hushrec.deployment.transport import Failure, Link, NodeId
from hushrec.errors import FederationError, MessageError
from hushrec.federation.contract import Agreement
from hushrec.federation.requests import Enrolment, Invitation, Refusal
from hushrec.io.codec import kind_of, printable

Answer = TypeVar("Answer")


class Desk:
    """The server's side of every conversation."""

    def __init__(
        self,
        agreement: Agreement,
        run: str,
        link: Link,
        rules: Rules,
        events: Events,
        registered: Mapping[str, NodeId] | None = None,
    ) -> None:
        """``registered`` says which identity of the transport each name belongs to."""
        self.agreement = agreement
        self.run = run
        self.link = link
        self.rules = rules
        self.events = events
        self.registered = registered
        self.known: dict[str, NodeId] = {}
        """Who a name belongs to."""
        self.strangers: set[NodeId] = set()
        """Who was invited and has no part in this run."""
        self.offences: Counter[str] = Counter()

    # ------------------------------------------------------------ who is there

    def gather(self) -> list[Enrolment]:
        """Invite everybody who is there until enough take part; refuse to begin with fewer."""
        enrolled: dict[str, Enrolment] = {}
        until = time.monotonic() + self.rules.enrol_seconds
        while True:
            for one in self._invite(self._unknown(), until - time.monotonic()):
                enrolled[one.name] = one
            if len(enrolled) >= self.rules.nodes:
                return list(enrolled.values())
            if time.monotonic() >= until:
                raise FederationError(
                    f"{len(enrolled)} of the {self.rules.nodes} nodes that the run needs enrolled "
                    f"within {self.rules.enrol_seconds:g} s: start the others, and run again"
                )
            self.link.wait(min(self.rules.backoff_seconds, max(0.0, until - time.monotonic())))

    def meet(self, names: Sequence[str]) -> None:
        """Find the nodes of a run that goes on; who is not there now may come later."""
        until = time.monotonic() + self.rules.enrol_seconds
        while time.monotonic() < until:
            self._invite(self._unknown(), until - time.monotonic(), names)
            if all(name in self.known for name in names):
                return
            self.link.wait(min(self.rules.backoff_seconds, max(0.0, until - time.monotonic())))
        self._require(len(self.known), len(names), "are there")

    def _unknown(self) -> list[NodeId]:
        met = {*self.known.values(), *self.strangers}
        return [node for node in self.link.present() if node not in met]

    def _invite(
        self, nodes: Sequence[NodeId], seconds: float, expected: Sequence[str] | None = None
    ) -> list[Enrolment]:
        if not nodes:
            return []
        agreement, found = self.agreement, []
        invitation = Invitation(
            self.run, agreement.settings_digest, agreement.catalogue.digest
        ).to_bytes()
        present = set(self.link.present())
        budgets = agreement.experiment.privacy.budgets
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
            found.append(enrolment)
        return found

    def _bind(
        self, name: str, node: NodeId, present: set[NodeId], expected: Sequence[str] | None
    ) -> None:
        if expected is not None and name not in expected:
            raise MessageError(
                f"node '{printable(name)}' has no part in this run; it can join the next one"
            )
        if self.registered is not None and self.registered.get(name) != node:
            raise MessageError(f"the name '{printable(name)}' belongs to another node, or nobody")
        before = self.known.get(name)
        if before is not None and not (self.rules.rebind and before not in present):
            raise MessageError(f"the name '{name}' belongs to another node")
        self.known[name] = node

    # ------------------------------------------------------------ asking

    def ask(
        self,
        what: str,
        number: int,
        names: Mapping[str, object],
        request: Callable[[str], bytes],
        read: Callable[[str, bytes], Answer],
    ) -> Iterator[tuple[str, Answer]]:
        """Ask nodes by name and yield the answers that can be used, as they come.

        Lost answers are asked for again until the deadline; a node answers the same request with
        the same bytes. Fewer than `Rules.min_nodes` answers are an error, at the end.
        """
        until, wait = time.monotonic() + self.rules.round_seconds, self.rules.backoff_seconds
        waiting, answered = [name for name in names if not self._excluded(name)], 0
        for attempt in range(self.rules.retries + 1):
            if attempt:
                self.link.wait(wait)
                wait *= 2
            self._look_for(waiting, list(names), until)
            lost = []
            for name, sent, answer in self._once(waiting, request, until):
                if isinstance(answer, Failure):
                    lost.append(name)
                    self._tell("no answer", name, what, number, why=answer.why)
                    continue
                try:
                    refusal = _refusal(answer)
                    if refusal is not None:
                        self._tell("declined", name, what, number, why=refusal.why)
                        continue
                    found = read(name, answer)
                except MessageError as error:
                    self._offence(name, what, number, str(error))
                    continue
                answered += 1
                self._tell("answered", name, what, number, down_bytes=sent, up_bytes=len(answer))
                yield name, found
            waiting = lost
            if not waiting or time.monotonic() + wait >= until:
                break
        for name in waiting:
            self._tell("sat out", name, what, number)
        self._require(answered, len(names), f"answered ({what}, round {number})")

    def _once(
        self, names: Sequence[str], request: Callable[[str], bytes], until: float
    ) -> Iterator[tuple[str, int, bytes | Failure]]:
        """Ask nodes once; yield with each answer how many bytes were sent for it."""
        asked = {self.known[name]: name for name in names if name in self.known}
        requests = {node: request(name) for node, name in asked.items()}
        for node, answer in self.link.ask(requests, max(0.0, until - time.monotonic())):
            yield asked[node], len(requests[node]), answer
        for name in names:
            if name not in self.known:
                yield name, 0, Failure("not connected")

    def _look_for(self, waiting: Sequence[str], names: Sequence[str], until: float) -> None:
        """Invite newcomers where somebody is missing: a node may be back under another identity."""
        present = set(self.link.present())
        if any(self.known.get(name) not in present for name in waiting):
            self._invite(self._unknown(), until - time.monotonic(), names)

    def _excluded(self, name: str) -> bool:
        return self.offences[name] >= self.rules.offences

    def _offence(self, name: str, what: str, number: int, why: str) -> None:
        self.offences[name] += 1
        self._tell("refused", name, what, number, why=why, offences=self.offences[name])
        if self._excluded(name):
            self._tell("excluded", name, what, number, offences=self.offences[name])

    def _tell(self, event: str, name: str, what: str, number: int, **facts: object) -> None:
        self.events.tell(event, node=name, round=number, to=what, **facts)

    def _require(self, count: int, asked: int, what: str) -> None:
        needed = min(self.rules.min_nodes, asked)
        if count < needed:
            raise FederationError(
                f"{count} nodes {what}, and {needed} are needed: what is done is saved; see the "
                "log for the others, and go on with --resume"
            )


def _refusal(answer: bytes) -> Refusal | None:
    """Return the refusal that an answer is, if it is one."""
    return Refusal.from_bytes(answer) if kind_of(answer) == Refusal.kind else None
