"""What a server does with the uploads of a round: the protocol that `ExactSum` keeps.

An aggregate is filled as uploads arrive and never holds one table per client. Aggregates of
different threads or nodes are merged. What it comes to is a `Total`, a sum: a robust one clips or
drops uploads in `add`, before they count.
"""

from __future__ import annotations

from typing import Protocol, Self

from hushrec.aggregate.update import Steps, Total, Update


class Aggregate(Protocol):
    """A running aggregate of uploads."""

    clients: int
    """Uploads that counted."""

    def add(self, update: Update) -> None:
        """Take in the uploads of a stack of clients."""
        ...

    def add_steps(self, steps: Steps) -> None:
        """Add whole steps to every entry of some arrays."""
        ...

    def merge(self, other: Self) -> None:
        """Take in another aggregate of the same kind, which is used up."""
        ...

    def total(self) -> Total:
        """Return what the uploads come to, as numbers."""
        ...
