"""Privacy as two-sided layers around the update, independent of the method.

Mechanisms act on the devices in order, each on its own client's upload, and on the server in
reverse order, on the sum. `Protection(())` changes nothing and claims nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregate import Total, Update
from hushrec.clients import TrainView
from hushrec.errors import ConfigError
from hushrec.privacy.kernels import ascending_keys, distinct_rows
from hushrec.rng import PastNoise, SecretRound, SecretStreams


class Mechanism:
    """One layer of the protection: a value, never changed in place. By default it does nothing."""

    def protect(self, update: Update, view: TrainView, secret: SecretRound) -> Update:
        """Act on the devices: transform each client's upload, from that client's data alone."""
        return update

    def receive(self, update: Update, clients: NDArray[np.int32]) -> Update:
        """Act on the server as uploads arrive: it may weigh them by what it knows of a client."""
        return update

    def finish(self, total: Total, secret: SecretRound) -> tuple[Total, Self]:
        """Act on the server: transform the sum, and return the mechanism of the next round."""
        return total, self

    def for_layout(self, layout: UploadShape) -> Self:
        """Return the mechanism for uploads of this layout, which follows from public things."""
        return self

    @property
    def state(self) -> Mapping[str, float]:
        """What changes from round to round; it is saved, and sent to the clients."""
        return {}

    def with_state(self, state: Mapping[str, float]) -> Self:
        """Return the mechanism as it was in this state."""
        return self

    def past_noise(self, streams: SecretStreams) -> PastNoise | None:
        """Return what clients remember of the noise they added, if they do."""
        return None


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
class Protection:
    """Mechanisms, outermost on the device last."""

    mechanisms: tuple[Mechanism, ...] = ()
    client_bytes: int = 0
    """Memory that one client's upload takes here, where a mechanism writes it out whole."""
    silence: Silence | None = None
    """The rounds in which nothing is uploaded, if there are any: no mechanism acts in them."""

    def protect(self, update: Update, view: TrainView, secret: SecretRound) -> Update:
        """Apply the device sides in order, to the numbers that will travel."""
        if self.silence is not None and secret.number in self.silence.rounds:
            self.silence.check(update)
            return update
        if self.mechanisms:
            written = {name: stack.differences() for name, stack in update.rows.items()}
            update = replace(update, rows=written)
        for mechanism in self.mechanisms:
            update = mechanism.protect(update, view, secret)
        return update

    def receive(self, update: Update, clients: NDArray[np.int32], number: int) -> Update:
        """Take in the uploads of these clients as they arrive."""
        if self.silence is None or number not in self.silence.rounds:
            for mechanism in reversed(self.mechanisms):
                update = mechanism.receive(update, clients)
        return update

    def for_layout(self, layout: UploadShape) -> Protection:
        """Return the protection of uploads of this layout."""
        laid_out = tuple(mechanism.for_layout(layout) for mechanism in self.mechanisms)
        return replace(self, mechanisms=laid_out)

    @property
    def state(self) -> Mapping[str, float]:
        """What changes from round to round."""
        return {name: v for mechanism in self.mechanisms for name, v in mechanism.state.items()}

    def with_state(self, state: Mapping[str, float]) -> Protection:
        """Return the protection as it was in this state."""
        return replace(self, mechanisms=tuple(m.with_state(state) for m in self.mechanisms))

    def past_noise(self, streams: SecretStreams) -> PastNoise | None:
        """Return what clients remember of the noise they added, if they do."""
        remembered = (mechanism.past_noise(streams) for mechanism in self.mechanisms)
        return next((noise for noise in remembered if noise is not None), None)

    def finish(self, total: Total, secret: SecretRound) -> tuple[Total, Protection]:
        """Apply the server sides in reverse order; return the stack of the next round too."""
        if self.silence is not None and secret.number in self.silence.rounds:
            return self.silence.finish(total), self
        following: list[Mechanism] = []
        for mechanism in reversed(self.mechanisms):
            total, after = mechanism.finish(total, secret)
            following.insert(0, after)
        return total, replace(self, mechanisms=tuple(following))


@dataclass(frozen=True)
class UploadShape:
    """What every client of a method uploads, written out whole; the same for all data."""

    n_rows: int
    tables: Mapping[str, int]
    """Width of each table of ``n_rows`` rows."""
    dense: Mapping[str, tuple[int, ...]]
    spaces: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Number of keys, and width, of each closed space of keys."""

    @classmethod
    def of(cls, nobody: Update, n_rows: int) -> UploadShape:
        """Read the shape from the update of a stack of no clients."""
        for name, stack in nobody.rows.items():
            if stack.keyed and stack.space is None:
                raise ConfigError(
                    f"'{name}' has no row for every item but keys of an open space, and noise "
                    "cannot cover every key: use another method, or privacy.mode = none"
                )
        if nobody.rows.keys() & nobody.dense.keys():
            raise ConfigError("a table and a dense array of an upload need different names")
        return cls(
            n_rows,
            {name: s.rows.shape[1] for name, s in nobody.rows.items() if not s.keyed},
            {name: array.shape[1:] for name, array in nobody.dense.items()},
            {
                name: (stack.space, stack.rows.shape[1])
                for name, stack in nobody.rows.items()
                if stack.space is not None
            },
        )

    @property
    def entries(self) -> int:
        """Count the numbers of one upload."""
        sizes = [int(np.prod(shape)) for shape in self.dense.values()]
        sizes += [keys * width for keys, width in self.spaces.values()]
        return self.n_rows * sum(self.tables.values()) + sum(sizes)

    @property
    def parts(self) -> int:
        """Count what `RowClip` bounds one by one: rows of tables and spaces, and dense arrays."""
        keys = sum(keys for keys, _ in self.spaces.values())
        return self.n_rows * len(self.tables) + len(self.dense) + keys

    @property
    def nbytes(self) -> int:
        """Bytes of one upload written out whole, as float32: its size tells nothing."""
        return 4 * self.entries

    def check(self, update: Update) -> None:
        """Refuse an upload of another shape: nothing else is clipped, noised and counted."""
        found = UploadShape.of(update, self.n_rows)
        if found != self:
            raise ConfigError(
                "the method's upload changes its shape with the data, so no guarantee can be "
                "given: it must upload the same names and widths as for a stack of no clients"
            )
        for name, stack in update.rows.items():
            once = (
                distinct_rows(stack.indptr, stack.ids, self.n_rows)
                if stack.space is None
                else ascending_keys(stack.indptr, stack.ids, stack.space)
            )
            if not once:
                raise ConfigError(
                    f"'{name}': a client uploads a row twice, or one that does not exist, so its "
                    "norm cannot be bounded: sum a client's rows before uploading them, in the "
                    "order of their keys"
                )
