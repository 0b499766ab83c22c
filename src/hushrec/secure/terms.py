"""What all parties of one sum agree on before it, each from its own configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from hushrec.errors import ConfigError
from hushrec.secure.keys import KEY_BYTES
from hushrec.secure.layout import Layout

MOST_NODES = 2**16 - 1


def threshold_of(nodes: int, min_nodes: int, asked: int | None) -> int:
    """Return how many of so many nodes must stay to the end of a sum."""
    return max(2 * nodes // 3 + 1, min_nodes) if asked is None else asked


def colluders_of(nodes: int, threshold: int) -> int:
    """Return how many nodes may side with a dishonest server that is to learn sums only.

    Two groups of `threshold` nodes must have an honest node in common, and two honest nodes must be
    left in every sum.
    """
    return min(2 * threshold - nodes - 1, threshold - 2)


class Stage(IntEnum):
    """What nodes send, in this order; a node's state is named after what it sent last."""

    KEYS = 1
    SHARES = 2
    MASKED = 3
    AGREEMENT = 4
    REVEALED = 5


@dataclass(frozen=True)
class Terms:
    """One sum: who takes part, what is summed, and how many must be left.

    Nodes do not take these from the server. Every signature and every key is bound to their digest,
    so parties with different terms cannot be played off against each other.
    """

    federation: str
    number: int
    """Of the sum, from 1 on; a node begins each number once, in ascending order."""
    identities: Mapping[str, bytes]
    """Public identity (`Identity.public`) of every node that may take part, by its name."""
    layout: Layout
    min_nodes: int = 3
    """Nodes refuse a sum over fewer. A sum over two tells each of them the other's vector."""
    asked_threshold: int | None = None
    """Nodes that must stay to the end; `threshold` says what holds where none is given."""
    about: str = ""
    """What the vectors are made from. Nodes that were asked for different things have no key in
    common, so that a server cannot sum them."""

    def __post_init__(self) -> None:
        count = len(self.identities)
        if not self.federation or self.number < 1:
            raise ConfigError("a secure sum needs a federation's name and a number from 1 on")
        if self.min_nodes < 2:
            raise ConfigError("min_nodes must be 2 or more: a sum over one node hides nothing")
        if not self.min_nodes <= count <= MOST_NODES:
            raise ConfigError(
                f"{count} nodes cannot be summed securely: register {self.min_nodes} or more "
                f"(min_nodes), and {MOST_NODES:,} at most"
            )
        if not max(self.min_nodes, count // 2 + 1) <= self.threshold <= count:
            raise ConfigError(
                f"a threshold of {self.threshold} does not fit {count} nodes: it must be more than "
                f"half of them, at least min_nodes={self.min_nodes}, and no more than there are"
            )
        if any(len(public) != KEY_BYTES for public in self.identities.values()):
            raise ConfigError(f"a node's public identity has {KEY_BYTES} bytes")
        if len(set(self.identities.values())) < count:
            raise ConfigError("two nodes have the same identity: each needs its own")

    @property
    def threshold(self) -> int:
        """Nodes that must stay to the end: more than two thirds, and `min_nodes`, unless told."""
        return threshold_of(len(self.identities), self.min_nodes, self.asked_threshold)

    @property
    def colluders(self) -> int:
        """How many nodes may side with a dishonest server, and it still learns sums only."""
        return colluders_of(len(self.identities), self.threshold)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The nodes in order; in messages a node is its place here."""
        return tuple(sorted(self.identities))

    @cached_property
    def digest(self) -> bytes:
        """What every key and signature of this sum is bound to."""
        said = {
            "protocol": "hushrec-secure-2",
            "federation": self.federation,
            "number": self.number,
            "nodes": [[name, self.identities[name].hex()] for name in self.names],
            "threshold": self.threshold,
            "layout": self.layout.digest.hex(),
            "about": self.about,
        }
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).digest()

    def place(self, name: str) -> int:
        """Return the place of a node."""
        if name not in self.identities:
            raise ConfigError(f"node '{name}' is not registered in '{self.federation}'")
        return self.names.index(name)

    def listed(self, places: Iterable[int]) -> str:
        """Return the names of nodes, for a sentence."""
        return ", ".join(f"'{self.names[place]}'" for place in sorted(places))
