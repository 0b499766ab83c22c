"""A link to nodes in the same process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from hushrec.deployment.transport import Failure, NodeId
from hushrec.errors import HushrecError


class MemoryLink:
    """Nodes in this process, which answer one after the other."""

    def __init__(self, nodes: Mapping[NodeId, Callable[[bytes], bytes]]) -> None:
        """``nodes`` are functions that answer a message."""
        self.nodes = dict(nodes)

    def present(self) -> list[NodeId]:
        """Return all nodes."""
        return list(self.nodes)

    def ask(
        self, requests: Mapping[NodeId, bytes], seconds: float
    ) -> Iterator[tuple[NodeId, bytes | Failure]]:
        """Ask one node after the other; a node that raises has failed."""
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
