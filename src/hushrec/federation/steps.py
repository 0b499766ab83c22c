"""The messages of a secure sum, as they travel between the server and a node.

The first step carries what is to be summed, a `TrainRequest` or a `LookRequest`; every other one
hands on what the nodes said before. A node answers with its own part (`Said`), with a refusal, or
with `Closed`, where it has opened the round's sum already and will be in no other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hushrec.errors import MessageError
from hushrec.federation.messages import LookRequest, TrainRequest
from hushrec.frame import (
    HEADER_BYTES,
    LARGEST,
    Array,
    Arrays,
    count_in,
    kind_of,
    pack,
    text_in,
    unpack,
)
from hushrec.secure import Stage


@dataclass(frozen=True)
class SumStep:
    """The server asks a node for its part of a stage."""

    run: str
    number: int
    """Of the sum."""
    stage: Stage
    said: bytes = b""
    """What the server hands on; nothing in the first stage."""
    asked: bytes = b""
    """What is to be summed; only in the first stage."""

    def to_bytes(self) -> bytes:
        """Write the message."""
        facts = {"run": self.run, "sum": self.number, "stage": int(self.stage)}
        parts = {"said": self.said, "asked": self.asked}
        return pack("step", facts, {name: _bytes(part) for name, part in parts.items()})

    @classmethod
    def from_bytes(cls, data: bytes) -> SumStep:
        """Read it on the node."""
        facts, arrays = unpack("step", data)
        number, stage = count_in(facts, "sum"), count_in(facts, "stage")
        if stage not in set(Stage) or not 0 < number < 2**63:
            raise MessageError("the message is of no stage of a secure sum")
        said, asked = (_part(arrays, name) for name in ("said", "asked"))
        return cls(text_in(facts, "run"), number, Stage(stage), said, asked)


@dataclass(frozen=True)
class Said:
    """A node's part of a stage."""

    said: bytes

    def to_bytes(self) -> bytes:
        """Write the message."""
        return pack("said", {}, {"said": _bytes(self.said)})

    @classmethod
    def from_bytes(cls, data: bytes, most: int = LARGEST) -> Said:
        """Read it on the server."""
        return cls(_part(unpack("said", data, most + HEADER_BYTES)[1], "said"))


@dataclass(frozen=True)
class Closed:
    """A node is in no other sum of this round."""

    round: int

    def to_bytes(self) -> bytes:
        """Write the message."""
        return pack("closed", {"round": self.round}, {})

    @classmethod
    def from_bytes(cls, data: bytes) -> Closed:
        """Read it on the server."""
        facts, _ = unpack("closed", data, HEADER_BYTES)
        return cls(count_in(facts, "round"))


def request_of(asked: bytes) -> TrainRequest | LookRequest:
    """Read what is to be summed."""
    if not asked:
        raise MessageError("the server does not say what is to be summed")
    if kind_of(asked) == "training":
        return TrainRequest.from_bytes(asked)
    if kind_of(asked) == "look":
        return LookRequest.from_bytes(asked)
    raise MessageError("a round or a look can be summed securely, and nothing else")


def _bytes(data: bytes) -> Array:
    return np.frombuffer(data, np.uint8)


def _part(arrays: Arrays, name: str) -> bytes:
    if name not in arrays or arrays[name].dtype != np.uint8:
        raise MessageError(f"the message lacks '{name}'")
    return arrays[name].tobytes()
