"""`Link`: how bytes reach nodes and come back. The server knows nothing else of its transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from hushrec.errors import HushrecError

NodeId = str
"""What the transport calls a node: with authentication, whoever has its key."""


@dataclass(frozen=True)
class Failure:
    """No answer came: the node is away, died, or took too long."""

    why: str


class Link(Protocol):
    """A way to nodes."""

    def present(self) -> list[NodeId]:
        """Return who is there now."""
        ...

    def ask(
        self, requests: Mapping[NodeId, bytes], seconds: float
    ) -> Iterator[tuple[NodeId, bytes | Failure]]:
        """Send each node its request and yield the answers as they come, one for each node.

        Whoever has not answered after so many seconds has failed.
        """
        ...

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        ...


class MemoryLink:
    """Nodes in this process, one after the other: for tests and for trying things out."""

    def __init__(self, nodes: Mapping[NodeId, Callable[[bytes], bytes]]) -> None:
        """``nodes`` are functions that answer a message."""
        self.nodes = dict(nodes)

    def present(self) -> list[NodeId]:
        """Return all of them."""
        return list(self.nodes)

    def ask(
        self, requests: Mapping[NodeId, bytes], seconds: float
    ) -> Iterator[tuple[NodeId, bytes | Failure]]:
        """Ask one after the other; a node that raises has failed."""
        for node, request in requests.items():
            answer = self.nodes.get(node)
            if answer is None:
                yield node, Failure("not connected")
                continue
            try:
                yield node, answer(request)
            except (HushrecError, OSError, RuntimeError) as error:
                yield node, Failure(type(error).__name__)

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)
