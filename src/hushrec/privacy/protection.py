"""`Mechanism` and `Protection`: clipping and noise around uploads, independent of the method.

A mechanism has a device side, which transforms each client's upload, and a server side, which
transforms the sum. A protection applies the device sides in order and the server sides in reverse
order. `Protection(())` changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import ExactSum, KeyedRows, Steps, Total, Update, UploadShape
from hushrec.data.views import TrainView
from hushrec.errors import ConfigError
from hushrec.kernels.ragged import ascending_keys, distinct_rows
from hushrec.privacy.accountant import Event, Neighbours
from hushrec.streams import GradientNoise, PastNoise, SecretRound, SecretStreams


@dataclass(frozen=True)
class PrivacyTarget:
    """The guarantee that is asked of a mechanism: (epsilon, delta) over so many uploads."""

    epsilon: float
    delta: float
    uploads: int
    """Rounds in which a client may upload."""
    clip: float | None = None
    """`privacy.clip`, for mechanisms that bound a norm or an entry."""


@dataclass(frozen=True)
class Release:
    """What a mechanism releases in one round, stated for the privacy accountant."""

    event: Event
    """`Pure`, or `Gaussian` with the deviation of its noise over the L2 sensitivity."""
    description: str
    """What is done to an upload or a sum, for the statement of the guarantee."""
    neighbours: Neighbours = "replace-one"
    """The relation between data sets for which the event holds."""
    on_sum: bool = False
    """Whether the sum is randomised: then the party that sums is trusted with the uploads."""


class Mechanism:
    """One layer of a protection, immutable; the base class does nothing."""

    whole: ClassVar[bool] = False
    """Whether uploads are sent with all rows of all tables, so that their size reveals nothing."""
    in_shares: ClassVar[bool] = False
    """Whether each node of a deployment adds a share of the noise."""

    def protect(self, update: Update, view: TrainView, secret: SecretRound) -> Update:
        """Device side: transform each client's upload, using that client's data only."""
        return update

    def receive(self, update: Update, clients: NDArray[np.int32]) -> Update:
        """Server side, on arrival: weight uploads by what the server knows about a client."""
        return update

    def noise(self, secret: SecretRound, part: float = 1.0) -> Steps:
        """Return noise for the sum, of ``part`` times its deviation, in steps of the exact sums."""
        return Steps()

    def share(self, secret: SecretRound) -> Steps:
        """Return the noise that one node adds to the sum of its clients, if `in_shares`."""
        return Steps()

    def finish(self, total: Total, secret: SecretRound) -> tuple[Total, Self]:
        """Server side: transform the sum, and return the mechanism of the next round."""
        return total, self

    def for_shape(self, shape: UploadShape) -> Self:
        """Return the mechanism for uploads of this shape, which depends on public data only."""
        return self

    def calibrated(self, target: PrivacyTarget) -> Self:
        """Return the mechanism with the randomness that keeps to a target."""
        return self

    def release(self) -> Release | None:
        """State what one round releases; None where the mechanism guarantees nothing itself."""
        return None

    @property
    def state(self) -> Mapping[str, float]:
        """State that changes between rounds; it is saved and sent to the clients."""
        return {}

    def with_state(self, state: Mapping[str, float]) -> Self:
        """Return the mechanism with this state."""
        return self

    def past_noise(self, streams: SecretStreams) -> PastNoise | None:
        """Return a function for the noise on clients' earlier uploads, under local noise."""
        return None

    def on_device(self) -> Self:
        """Return the mechanism without state that only the server may know."""
        return self

    def sent_shape(self, shape: UploadShape) -> UploadShape:
        """Return the shape of protected uploads."""
        return shape

    def bound_of(self, norm: float | None) -> float | None:
        """Return the L2 bound of protected uploads, if uploads are bounded by ``norm``."""
        return norm


@dataclass(frozen=True)
class ZeroOut(Mechanism):
    """Zeroes out uploads of clients without data, and uploads with NaN or infinite values.

    This defines zero-out-one neighbours: a client without data adds nothing to a sum, whatever a
    method or a layer computes for it.
    """

    def protect(self, update: Update, view: TrainView, secret: SecretRound) -> Update:
        """Zero them out."""
        without_data = np.diff(view.positives.indptr[view.client_indptr]) == 0
        return with_zeros(finite_or_zero(update), without_data)


@dataclass(frozen=True)
class Protection:
    """The mechanisms of a run, in the order in which devices apply them."""

    mechanisms: tuple[Mechanism, ...] = ()
    client_bytes: int = 0
    """Memory of one client's dense upload, if a mechanism makes it dense."""
    silent: frozenset[int] = frozenset()
    """Rounds without uploads, known before the first round; they cost nothing, and no mechanism
    acts in them."""
    clients: float | None = None
    """Expected cohort size, for means of silent rounds: the real one is not public."""
    reshapes: bool = False
    """Whether the shape of uploads depends on the round and on earlier releases."""
    steps: Protection | None = None
    """Protection of the gradient of each training step, in place of the uploads."""

    @property
    def noising(self) -> Protection:
        """The protection that clips and noises: of the gradients, or of the uploads."""
        return self if self.steps is None else self.steps

    def acting(self, number: int) -> tuple[Mechanism, ...]:
        """Return the mechanisms that act in a round."""
        return () if number in self.silent else self.mechanisms

    def sends_whole(self, number: int) -> bool:
        """Return whether uploads of a round are sent with all rows of all tables."""
        return any(mechanism.whole for mechanism in self.acting(number))

    def on_device(self) -> Protection:
        """Return the protection without state that only the server may know."""
        return replace(self, mechanisms=tuple(m.on_device() for m in self.mechanisms))

    def sent_shape(self, shape: UploadShape, number: int) -> UploadShape:
        """Return the shape of the protected uploads of a round."""
        for mechanism in self.acting(number):
            shape = mechanism.sent_shape(shape)
        return shape

    def norm_of(self, number: int) -> float | None:
        """Return the L2 bound of the uploads of a round; None if there is none."""
        norm = None
        for mechanism in self.acting(number):
            norm = mechanism.bound_of(norm)
        return norm

    def protect(self, update: Update, view: TrainView, secret: SecretRound) -> Update:
        """Apply the device sides in order."""
        if secret.number in self.silent:
            if update.rows or update.dense:
                raise ConfigError(
                    "the method uploads in a round that it declared to be without uploads, so no "
                    "guarantee can be given: uploads must depend on the number of the round alone"
                )
            return update
        if self.mechanisms:
            for name, rows in update.rows.items():
                if isinstance(rows, KeyedRows) and rows.grid is not None:
                    raise ConfigError(
                        f"'{name}' declares a grid, which noise and clipping do not keep: declare "
                        "none where the sums are protected"
                    )
            written = {name: rows.differences() for name, rows in update.rows.items()}
            update = ZeroOut().protect(replace(update, rows=written), view, secret)
        for mechanism in self.mechanisms:
            update = mechanism.protect(update, view, secret)
        return update

    def receive(self, update: Update, clients: NDArray[np.int32], number: int) -> Update:
        """Apply the server side for arriving uploads, in reverse order."""
        for mechanism in reversed(self.acting(number)):
            update = mechanism.receive(update, clients)
        return update

    def for_shape(self, shape: UploadShape) -> Protection:
        """Return the protection of uploads of this shape."""
        return replace(self, mechanisms=tuple(m.for_shape(shape) for m in self.mechanisms))

    def after(self, layers: Sequence[Mechanism]) -> Protection:
        """Return the protection with these mechanisms before its own.

        What they make of an upload of zeros counts as nothing again before it is clipped.
        """
        if not layers:
            return self
        return replace(self, mechanisms=(*layers, ZeroOut(), *self.mechanisms))

    @property
    def state(self) -> Mapping[str, float]:
        """State of all mechanisms."""
        return {name: v for mechanism in self.mechanisms for name, v in mechanism.state.items()}

    def with_state(self, state: Mapping[str, float]) -> Protection:
        """Return the protection with this state."""
        return replace(self, mechanisms=tuple(m.with_state(state) for m in self.mechanisms))

    def past_noise(self, streams: SecretStreams) -> PastNoise | None:
        """Return a function for the noise on clients' earlier uploads, under local noise."""
        remembered = (mechanism.past_noise(streams) for mechanism in self.mechanisms)
        return next((noise for noise in remembered if noise is not None), None)

    def gradient_noise(self, secret: SecretRound) -> GradientNoise | None:
        """Return a function that clips and noises a step's gradient; None without such noise."""
        if self.steps is None:
            return None
        protect = self.steps.protect
        return lambda gradient, view: protect(gradient, view, secret)

    def shares(self, secret: SecretRound) -> list[Steps]:
        """Return the noise that one node adds to the sum of its clients."""
        return [m.share(secret) for m in self.acting(secret.number) if m.in_shares]

    def finish(
        self, summed: ExactSum, secret: SecretRound, *, shared: bool = False
    ) -> tuple[Total, Protection]:
        """Add the noise and apply the server sides in reverse order; the result is released.

        Also return the next round's protection. ``shared``: nodes have added their shares already.
        ``summed`` is consumed.
        """
        if secret.number in self.silent:
            total = summed.total()
            return (total if self.clients is None else replace(total, clients=self.clients)), self
        for mechanism in self.mechanisms:
            if not (shared and mechanism.in_shares):
                summed.add_steps(mechanism.noise(secret))
        total = summed.total()
        next_round: list[Mechanism] = []
        for mechanism in reversed(self.mechanisms):
            total, after = mechanism.finish(total, secret)
            next_round.insert(0, after)
        return total, replace(self, mechanisms=tuple(next_round))


def check_shape(update: Update, shape: UploadShape) -> None:
    """Refuse an upload of another shape: only the declared shape is clipped and noised."""
    if UploadShape.of(update, shape.n_rows) != shape:
        raise ConfigError(
            "the method's upload changes its shape with the data, so no guarantee can be given: it "
            "must upload the same names and widths as for a batch of no clients"
        )
    for name, rows in update.rows.items():
        once = (
            ascending_keys(rows.indptr, rows.ids, rows.space)
            if isinstance(rows, KeyedRows)
            else distinct_rows(rows.indptr, rows.ids, shape.n_rows)
        )
        if not once:
            raise ConfigError(
                f"'{name}': a client uploads a row twice, or one that does not exist, so its norm "
                "cannot be bounded: sum a client's rows before uploading them, in the order of "
                "their keys"
            )


def finite_or_zero(update: Update) -> Update:
    """Zero out uploads with NaN or infinite values; one client's data must not stop a run."""
    broken = np.zeros(update.clients, np.bool_)
    for rows in update.rows.values():
        bad = ~np.isfinite(rows.rows).all(1)
        owner = np.repeat(np.arange(update.clients), np.diff(rows.indptr))
        broken[owner[bad]] = True
    for array in update.dense.values():
        broken |= ~np.isfinite(array).all(tuple(range(1, array.ndim)))
    if not broken.any():
        return update
    return replace(with_zeros(update, broken), zeroed_out=update.zeroed_out + int(broken.sum()))


def with_zeros(update: Update, who: NDArray[np.bool_]) -> Update:
    """Return the update with the uploads of these clients zeroed out, in the same rows."""
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
