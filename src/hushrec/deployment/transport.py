"""The transport between a coordinator and its nodes: requests and replies as bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

NodeId = str
"""Identity of a node in the transport; with authentication, that of its key."""


@dataclass(frozen=True)
class Failure:
    """No reply arrived: the node is away, failed, or took too long."""

    why: str


class Link(Protocol):
    """A connection to nodes."""

    def present(self) -> list[NodeId]:
        """Return the nodes that are connected now."""
        ...

    def ask(
        self, requests: Mapping[NodeId, bytes], seconds: float
    ) -> Iterator[tuple[NodeId, bytes | Failure]]:
        """Send each node its request and yield one reply or `Failure` for each, as they arrive.

        A node without a reply after so many seconds has failed.
        """
        ...

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        ...
