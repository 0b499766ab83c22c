"""Privacy as a two-sided stack around the update, independent of the method.

Mechanisms act on the devices in order, each on its own client's upload, and on the server in
reverse order, on the sum. `Stack(())` changes nothing and claims nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from hushrec.aggregate import Total, Update
from hushrec.clients import TrainView
from hushrec.rng import Streams


class Mechanism(Protocol):
    """One layer of the stack."""

    def protect(
        self, update: Update, view: TrainView, streams: Streams, round_number: int
    ) -> Update:
        """Act on the devices: transform each client's upload, from that client's data alone."""
        ...

    def finish(self, total: Total, streams: Streams, round_number: int) -> Total:
        """Act on the server: transform the sum."""
        ...


@dataclass(frozen=True)
class Stack:
    """Mechanisms, outermost on the device last."""

    mechanisms: tuple[Mechanism, ...] = ()

    def protect(
        self, update: Update, view: TrainView, streams: Streams, round_number: int
    ) -> Update:
        """Apply the device sides in order, to the numbers that will travel."""
        if self.mechanisms:
            written = {name: stack.differences() for name, stack in update.rows.items()}
            update = replace(update, rows=written)
        for mechanism in self.mechanisms:
            update = mechanism.protect(update, view, streams, round_number)
        return update

    def finish(self, total: Total, streams: Streams, round_number: int) -> Total:
        """Apply the server sides in reverse order."""
        for mechanism in reversed(self.mechanisms):
            total = mechanism.finish(total, streams, round_number)
        return total

    def statement(self, *, pooled: bool, up_bytes: int) -> dict[str, Any]:
        """Say what this stack guarantees, in a sentence that can be checked."""
        if pooled:
            text = "No guarantee: a centralised yardstick, everybody's data is pooled."
        elif up_bytes == 0:
            text = "No formal guarantee was asked for; this method uploads nothing at all."
        else:
            text = (
                "No formal guarantee: interactions stay on the clients, but raw updates reach the "
                "server, and the rows a client uploads name the items it drew and touched."
            )
        return {"guarantee": "none", "epsilon": None, "statement": text}
