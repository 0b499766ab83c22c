"""Methods whose server relates clients by their single uploads, and answers each of them.

Everywhere else the server works with sums over clients. Here it keeps the uploaded tables of a
round's cohort (`federation.spool`), replaces each by an answer that depends on all of them
(`Relates.relate`), sums the answers in place of the uploads, and sends each client its own, which
the client keeps among its private parameters. So the server sees every upload by itself: no noise
on sums, no secure sum and no node that sums for its clients can do this, and all three are refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from hushrec.methods.base import Array

SEEN_SINGLY = "the server sees every upload by itself"


class Relates(ABC):
    """The server sees every upload of a round by itself, and answers each client."""

    uploaded: ClassVar[str]
    """The dense array [items, width] that clients upload."""
    answered: ClassVar[str]
    """The private field of the same shape that a client keeps its answer in."""

    @abstractmethod
    def relate(self, tables: Iterable[Array]) -> None:
        """Replace every client's table by its answer, in place.

        ``tables`` are blocks of items, [clients, items of the block, width], the same ones on every
        pass; clients are in the order of their numbers.
        """
