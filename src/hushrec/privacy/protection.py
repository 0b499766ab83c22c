"""Privacy as two-sided layers around the update, independent of the method.

Mechanisms act on the devices in order, each on its own client's upload, and on the server in
reverse order, on the sum. `Protection(())` changes nothing and claims nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import Aggregate, Steps, Total, Update, UploadShape
from hushrec.data.views import TrainView
from hushrec.errors import ConfigError
from hushrec.kernels.clipping import ascending_keys, distinct_rows
from hushrec.streams import GradientNoise, PastNoise, SecretRound, SecretStreams


class Mechanism:
    """One layer of the protection: a value, never changed in place. By default it does nothing."""

    whole: ClassVar[bool] = False
    """Whether uploads travel with every row of every table, so that their size tells nothing."""
    in_shares: ClassVar[bool] = False
    """Whether nodes add the noise, each its share of it, where there are nodes."""

    def protect(self, update: Update, view: TrainView, secret: SecretRound) -> Update:
        """Act on the devices: transform each client's upload, from that client's data alone."""
        return update

    def receive(self, update: Update, clients: NDArray[np.int32]) -> Update:
        """Act on the server as uploads arrive: it may weigh them by what it knows of a client."""
        return update

    def noise(self, secret: SecretRound, part: float = 1.0) -> Steps:
        """Return what is added to the sum before anybody sees it, in its whole steps.

        Or noise of a part of its deviation.
        """
        return Steps()

    def share(self, secret: SecretRound) -> Steps:
        """Return what a node adds to the sum of its own clients, where nodes do so themselves."""
        return Steps()

    def finish(self, total: Total, secret: SecretRound) -> tuple[Total, Self]:
        """Act on the server: transform the sum, and return the mechanism of the next round."""
        return total, self

    def for_shape(self, shape: UploadShape) -> Self:
        """Return the mechanism for uploads of this shape, which follows from public things."""
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

    def on_device(self) -> Self:
        """Return the mechanism as a device has it, without what only the server knows."""
        return self

    def sent_shape(self, shape: UploadShape) -> UploadShape:
        """Return the shape of what `protect` makes of uploads of a shape."""
        return shape

    def bound_of(self, norm: float | None) -> float | None:
        """Return the L2 norm that `protect` keeps to, where its input kept to ``norm``."""
        return norm


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
    reshapes: bool = False
    """Whether the shape of an upload differs from round to round, by what was released before."""
    steps: Protection | None = None
    """What protects the gradient of each step while a client trains, in place of its uploads."""

    @property
    def noising(self) -> Protection:
        """What clips and noises: the steps of training, or the uploads."""
        return self if self.steps is None else self.steps

    def acts(self, number: int) -> bool:
        """Say whether the mechanisms act in a round."""
        return self.silence is None or number not in self.silence.rounds

    def sends_whole(self, number: int) -> bool:
        """Say whether uploads of a round travel with every row of every table."""
        return self.acts(number) and any(mechanism.whole for mechanism in self.mechanisms)

    def on_device(self) -> Protection:
        """Return what a device has of it."""
        return replace(self, mechanisms=tuple(m.on_device() for m in self.mechanisms))

    def sent_shape(self, shape: UploadShape, number: int) -> UploadShape:
        """Return the shape of what is sent in a round."""
        for mechanism in self.mechanisms if self.acts(number) else ():
            shape = mechanism.sent_shape(shape)
        return shape

    def norm_of(self, number: int) -> float | None:
        """Return the L2 norm that uploads of a round keep to, where they keep to one."""
        norm = None
        for mechanism in self.mechanisms if self.acts(number) else ():
            norm = mechanism.bound_of(norm)
        return norm

    def protect(self, update: Update, view: TrainView, secret: SecretRound) -> Update:
        """Apply the device sides in order, to the numbers that will travel."""
        if self.silence is not None and not self.acts(secret.number):
            self.silence.check(update)
            return update
        if self.mechanisms:
            written = {name: rows.differences() for name, rows in update.rows.items()}
            update = finite_or_zero(replace(update, rows=written))
            # Whoever has no data adds nothing, whatever the method makes of it: that is what the
            # guarantee calls emptied.
            update = with_zeros(update, np.diff(view.positives.indptr[view.client_indptr]) == 0)
        for mechanism in self.mechanisms:
            update = mechanism.protect(update, view, secret)
        return update

    def receive(self, update: Update, clients: NDArray[np.int32], number: int) -> Update:
        """Take in the uploads of these clients as they arrive."""
        for mechanism in reversed(self.mechanisms) if self.acts(number) else ():
            update = mechanism.receive(update, clients)
        return update

    def for_shape(self, shape: UploadShape) -> Protection:
        """Return the protection of uploads of this shape."""
        return replace(self, mechanisms=tuple(m.for_shape(shape) for m in self.mechanisms))

    def after(self, layers: Sequence[Mechanism]) -> Protection:
        """Return the protection with these layers before its own."""
        return replace(self, mechanisms=(*layers, *self.mechanisms))

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

    def gradient_noise(self, secret: SecretRound) -> GradientNoise | None:
        """Return what makes a step's gradient safe to build on, where steps are protected."""
        if self.steps is None:
            return None
        protect = self.steps.protect
        return lambda gradient, view: protect(gradient, view, secret)

    def shares(self, secret: SecretRound) -> list[Steps]:
        """Return what a node adds to the sum of its own clients, with streams of its own."""
        acting = self.mechanisms if self.acts(secret.number) else ()
        return [mechanism.share(secret) for mechanism in acting if mechanism.in_shares]

    def finish(
        self, summed: Aggregate, secret: SecretRound, *, shared: bool = False
    ) -> tuple[Total, Protection]:
        """Add the noise and apply the server sides in reverse order, to what is then released.

        ``shared`` says that nodes added what comes in shares. Returns the next round's protection
        too. The sum is used up.
        """
        if self.silence is not None and not self.acts(secret.number):
            return self.silence.finish(summed.total()), self
        for mechanism in self.mechanisms:
            if not (shared and mechanism.in_shares):
                summed.add_steps(mechanism.noise(secret))
        total = summed.total()
        following: list[Mechanism] = []
        for mechanism in reversed(self.mechanisms):
            total, after = mechanism.finish(total, secret)
            following.insert(0, after)
        return total, replace(self, mechanisms=tuple(following))


def check_shape(update: Update, shape: UploadShape) -> None:
    """Refuse an upload of another shape: nothing else is clipped, noised and counted."""
    if UploadShape.of(update, shape.n_rows).require_closed() != shape:
        raise ConfigError(
            "the method's upload changes its shape with the data, so no guarantee can be given: it "
            "must upload the same names and widths as for a stack of no clients"
        )
    for name, rows in update.rows.items():
        once = (
            distinct_rows(rows.indptr, rows.ids, shape.n_rows)
            if rows.space is None
            else ascending_keys(rows.indptr, rows.ids, rows.space)
        )
        if not once:
            raise ConfigError(
                f"'{name}': a client uploads a row twice, or one that does not exist, so its norm "
                "cannot be bounded: sum a client's rows before uploading them, in the order of "
                "their keys"
            )


def finite_or_zero(update: Update) -> Update:
    """Empty the uploads that hold a number which is none: nobody's data may stop a run.

    Their rows and arrays stay, as zeros, so nothing else of them changes.
    """
    broken = np.zeros(update.clients, np.bool_)
    for rows in update.rows.values():
        bad = ~np.isfinite(rows.rows).all(1)
        owner = np.repeat(np.arange(update.clients), np.diff(rows.indptr))
        broken[owner[bad]] = True
    for array in update.dense.values():
        broken |= ~np.isfinite(array).all(tuple(range(1, array.ndim)))
    if not broken.any():
        return update
    return replace(with_zeros(update, broken), emptied=int(broken.sum()))


def with_zeros(update: Update, who: NDArray[np.bool_]) -> Update:
    """Return the update with these clients' uploads zero, in the same rows and arrays."""
    if not who.any():
        return update
    rows = {
        name: replace(
            rows, rows=np.where(np.repeat(who, np.diff(rows.indptr))[:, None], 0, rows.rows)
        )
        for name, rows in update.rows.items()
    }
    dense = {
        name: np.where(who.reshape(-1, *[1] * (array.ndim - 1)), 0, array).astype(array.dtype)
        for name, array in update.dense.items()
    }
    return replace(update, rows=rows, dense=dense)
