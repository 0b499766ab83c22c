"""Delivery of requests: each is sent again until its reply is there, or its time is over.

Every node is waited for by itself. A request is sent again when sending failed, when the node has
connected again, as what it was sent before is lost then, and when there was no reply for long. A
node answers a repeated request with the bytes of its first reply, so whichever reply comes counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from hushrec.deployment.coordinator.planning import Policy
from hushrec.federation.requests import Failure, Link, NodeId

POLL_SECONDS = 0.2
NOT_CONNECTED = "not connected"
LONGEST_SECONDS = 3600.0
"""A request without a deadline is of use so long."""
AWAY = ""
"""In place of a connection, of a node that was not connected."""


@dataclass
class _Request:
    """A request to one node, and how it was sent."""

    encode: Callable[[], bytes]
    due: float
    """When it is sent next."""
    backoff: float
    quiet: float
    """Seconds without a reply after which it is sent again."""
    tickets: list[str] = field(default_factory=list)
    """Of replies that may come."""
    connection: str | None = None
    """To which it was sent last; None before."""
    size: int = 0
    sendings: int = 0


@dataclass(frozen=True)
class Arrival:
    """A reply of a node, or why there is none yet."""

    name: str
    answer: bytes | Failure
    sent_bytes: int = 0
    """Of the sending that the reply, or the failure, belongs to."""
    sendings: int = 0
    """How often the request was sent."""


class Delivery:
    """Requests to nodes that have no reply yet, by the nodes' names."""

    def __init__(
        self,
        link: Link,
        policy: Policy,
        until: float = math.inf,
        quiet: float = 0.0,
        identities: Mapping[str, NodeId] | None = None,
    ) -> None:
        """``until`` is the deadline, ``quiet`` the seconds after which a request without a reply
        is sent again, if that is longer than the policy's. ``identities`` are those of the names in
        the transport, as far as known; by default a name is the identity."""
        self.link, self.policy, self.until = link, policy, until
        self.quiet = max(quiet, policy.resend_seconds)
        self.identities = identities
        self.requests: dict[str, _Request] = {}
        self.absent = set[str]()
        """Names of nodes that were not connected at the last poll."""

    def add(self, name: str, encode: Callable[[], bytes]) -> None:
        """Add a request, which is encoded whenever it is sent."""
        self.requests[name] = _Request(
            encode, self.link.now(), self.policy.backoff_seconds, self.quiet
        )

    def poll(self) -> Iterator[Arrival]:
        """Send what is due, and yield what has arrived, failures too; that a node is not connected
        is yielded once. A request with a reply is done."""
        present = self.link.present()
        self.absent.clear()
        for name, request in list(self.requests.items()):
            node = name if self.identities is None else self.identities.get(name)
            if node is None or node not in present:
                self.absent.add(name)
                yield from self._miss(name, request)
            else:
                yield from self._send(name, request, node, present[node])
        waiting = {ticket: name for name, each in self.requests.items() for ticket in each.tickets}
        for ticket, answer in self.link.receive(list(waiting)):
            name = waiting[ticket]
            found = self.requests.get(name)
            if found is None:
                continue  # another sending has brought the reply
            if isinstance(answer, Failure):
                found.tickets.remove(ticket)
                found.due = min(found.due, self._after_failure(found))
                yield Arrival(name, answer, found.size)
                continue
            del self.requests[name]
            yield Arrival(name, answer, found.size, found.sendings)

    @property
    def hopeless(self) -> bool:
        """Whether all requests failed, and none will be sent again before the deadline."""
        return not self.absent and all(
            not each.tickets and each.due >= self.until for each in self.requests.values()
        )

    def _miss(self, name: str, request: _Request) -> Iterator[Arrival]:
        if not request.tickets and request.connection != AWAY:
            request.connection = AWAY
            yield Arrival(name, Failure(NOT_CONNECTED))

    def _send(
        self, name: str, request: _Request, node: NodeId, connection: str
    ) -> Iterator[Arrival]:
        """Send a request if it is due; yield why it did not reach its node before."""
        now, why, connection = self.link.now(), "", f"{node} {connection}"
        if request.connection not in (None, connection):
            request.due, why = now, "it has connected again; asked again"
        if now < request.due:
            return
        if not why and request.tickets:
            why = f"no answer for {request.quiet:.0f} s; asked again"
            request.quiet *= 2
        encoded = request.encode()
        ticket = self.link.send(node, encoded, max(1.0, min(self.until - now, LONGEST_SECONDS)))
        if ticket is None:
            request.due = self._after_failure(request)
            yield from self._miss(name, request)
            return
        if why and request.connection != AWAY:
            yield Arrival(name, Failure(why), request.size)
        request.tickets.append(ticket)
        request.connection, request.due = connection, now + request.quiet
        request.sendings, request.size = request.sendings + 1, len(encoded)

    def _after_failure(self, request: _Request) -> float:
        wait = request.backoff
        request.backoff = max(wait, min(2 * wait, self.policy.resend_seconds))
        return self.link.now() + wait
