"""What a node keeps of one sum between two messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hushrec.errors import MessageError
from hushrec.secure.terms import Stage

_FORMAT = "hushrec-secure-state-1"


@dataclass(frozen=True)
class NodeState:
    """What a node keeps of one sum. Secrets are forgotten at the step that needs them last."""

    number: int
    digest: bytes
    """Of the terms."""
    stage: Stage
    """What the node sent last."""
    seed: bytes = field(default=b"", repr=False)
    """All its secrets are made from this; until its vector is masked."""
    transcript: bytes = b""
    """Digest of what the server said: nodes that agree have seen the same."""
    keys: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    """What every node announced; until the vector is masked."""
    shares: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    """Of every node that shared: a share of its mask key, and one of its seed."""
    survivors: frozenset[int] = frozenset()
    """Nodes whose vectors are in the sum, as agreed."""

    def to_bytes(self) -> bytes:
        """Write the state for the node's own store. It is secret."""
        said = {**asdict(self), "format": _FORMAT, "survivors": sorted(self.survivors)}
        for name in ("keys", "shares"):
            said[name] = {str(place): entry.hex() for place, entry in said[name].items()}
        for name in ("digest", "seed", "transcript"):
            said[name] = said[name].hex()
        return json.dumps(said).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> NodeState:
        """Read it back."""
        try:
            said: dict[str, Any] = json.loads(data)
            if said.pop("format") != _FORMAT:
                raise ValueError
            for name in ("keys", "shares"):
                said[name] = {int(k): bytes.fromhex(entry) for k, entry in said[name].items()}
            for name in ("digest", "seed", "transcript"):
                said[name] = bytes.fromhex(said[name])
            said |= {"stage": Stage(said["stage"]), "survivors": frozenset(said["survivors"])}
            return cls(**said)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise MessageError("the kept state of a secure sum is damaged") from None
