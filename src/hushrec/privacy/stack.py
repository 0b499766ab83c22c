"""Privacy as a two-sided stack around the update, independent of the method.

Mechanisms act on the devices in order, each on its own client's upload, and on the server in
reverse order, on the sum. `Stack(())` changes nothing and claims nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, Self

import numpy as np

from hushrec.aggregate import Total, Update
from hushrec.clients import TrainView
from hushrec.errors import ConfigError
from hushrec.privacy.kernels import distinct_rows
from hushrec.rng import Streams


class Mechanism(Protocol):
    """One layer of the stack: a value, never changed in place."""

    def protect(
        self, update: Update, view: TrainView, streams: Streams, round_number: int
    ) -> Update:
        """Act on the devices: transform each client's upload, from that client's data alone."""
        ...

    def finish(self, total: Total, streams: Streams, round_number: int) -> tuple[Total, Self]:
        """Act on the server: transform the sum, and return the mechanism of the next round."""
        ...


@dataclass(frozen=True)
class Silence:
    """Rounds in which a method uploads nothing, known before the first: they cost nothing."""

    rounds: frozenset[int]
    clients: float | None = None
    """What a mean divides by, where the real number could tell that somebody was there."""

    def check(self, update: Update) -> None:
        """Hold the method to it."""
        if update.rows or update.dense:
            raise ConfigError(
                "the method uploads in a round in which it said it would not, so no guarantee can "
                "be given: whether it uploads must depend on the number of the round alone"
            )

    def finish(self, total: Total) -> Total:
        """Say nothing about who was there."""
        return total if self.clients is None else replace(total, clients=self.clients)


@dataclass(frozen=True)
class Stack:
    """Mechanisms, outermost on the device last."""

    mechanisms: tuple[Mechanism, ...] = ()
    client_bytes: int = 0
    """Memory that one client's upload takes here, where a mechanism writes it out whole."""
    silence: Silence | None = None
    """The rounds in which nothing is uploaded, if there are any: no mechanism acts in them."""

    def protect(
        self, update: Update, view: TrainView, streams: Streams, round_number: int
    ) -> Update:
        """Apply the device sides in order, to the numbers that will travel."""
        if self.silence is not None and round_number in self.silence.rounds:
            self.silence.check(update)
            return update
        if self.mechanisms:
            written = {name: stack.differences() for name, stack in update.rows.items()}
            update = replace(update, rows=written)
        for mechanism in self.mechanisms:
            update = mechanism.protect(update, view, streams, round_number)
        return update

    def finish(self, total: Total, streams: Streams, round_number: int) -> tuple[Total, Stack]:
        """Apply the server sides in reverse order; return the stack of the next round too."""
        if self.silence is not None and round_number in self.silence.rounds:
            return self.silence.finish(total), self
        following: list[Mechanism] = []
        for mechanism in reversed(self.mechanisms):
            total, after = mechanism.finish(total, streams, round_number)
            following.insert(0, after)
        return total, replace(self, mechanisms=tuple(following))


@dataclass(frozen=True)
class UploadShape:
    """What every client of a method uploads, written out whole; the same for all data."""

    n_rows: int
    tables: Mapping[str, int]
    """Width of each table of ``n_rows`` rows."""
    dense: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, nobody: Update, n_rows: int) -> UploadShape:
        """Read the shape from the update of a stack of no clients."""
        for name, stack in nobody.rows.items():
            if stack.ids.dtype != np.int32:
                raise ConfigError(
                    f"'{name}' has no row for every item but keys of an open space, and noise "
                    "cannot cover every key: use another method, or privacy.mode = none"
                )
        if nobody.rows.keys() & nobody.dense.keys():
            raise ConfigError("a table and a dense array of an upload need different names")
        return cls(
            n_rows,
            {name: stack.rows.shape[1] for name, stack in nobody.rows.items()},
            {name: array.shape[1:] for name, array in nobody.dense.items()},
        )

    @property
    def entries(self) -> int:
        """Count the numbers of one upload."""
        sizes = [int(np.prod(shape)) for shape in self.dense.values()]
        return self.n_rows * sum(self.tables.values()) + sum(sizes)

    @property
    def parts(self) -> int:
        """Count what `RowClip` bounds one by one: rows of tables, and dense arrays."""
        return self.n_rows * len(self.tables) + len(self.dense)

    @property
    def nbytes(self) -> int:
        """Bytes of one upload written out whole, as float32: its size tells nothing."""
        return 4 * self.entries

    def check(self, update: Update) -> None:
        """Refuse an upload of another shape: nothing else is clipped, noised and counted."""
        found = UploadShape.of(update, self.n_rows)
        if found.tables != dict(self.tables) or found.dense != dict(self.dense):
            raise ConfigError(
                "the method's upload changes its shape with the data, so no guarantee can be "
                "given: it must upload the same names and widths as for a stack of no clients"
            )
        for name, stack in update.rows.items():
            if not distinct_rows(stack.indptr, stack.ids, self.n_rows):
                raise ConfigError(
                    f"'{name}': a client uploads a row twice, or one that does not exist, so its "
                    "norm cannot be bounded: sum a client's rows before uploading them"
                )
