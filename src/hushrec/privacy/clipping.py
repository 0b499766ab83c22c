"""Clipping of uploads, which bounds the sensitivity of their sum.

`FlatClip` bounds the norm of a client's whole upload. `RowClip` bounds every row separately, so the
whole upload by the square root of the number of rows. `AdaptiveClip` is flat clipping with a bound
that follows a quantile of the clients' norms (Andrew et al. 2021).

An upload may hold a client weight of at most 1 (`OWN_WEIGHT`) that its update was multiplied by.
The clipping bound is then multiplied by the weight too, so that clipping keeps the ratio of two
clients with the same update. The weight itself uses the fraction `ROOM` of the bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import OWN_WEIGHT, STEPS_PER_UNIT, Steps, Total, Update, UploadShape
from hushrec.data.views import TrainView
from hushrec.kernels.ragged import add_powers, scale_to_grid
from hushrec.privacy.accountant import Values
from hushrec.privacy.discrete import law
from hushrec.privacy.protection import Mechanism
from hushrec.streams import SecretRound

Power = Literal[1, 2]
BIT = "privacy/within-bound"
"""Name of the bit that adaptive clipping adds to an upload."""
BOUND = "clip_bound"
"""Name of the bound in the state."""
ROUNDING = 1 - 2.0**-22
"""Safety factor on the bound against floating-point rounding of norms and values."""
ROOM = 0.2
"""Fraction of a flat bound that the client weight uses; the rest of an L2 bound is then 0.98."""


@dataclass(frozen=True)
class FlatClip(Mechanism):
    """Scale a client's whole upload down to norm ``bound`` if it is larger."""

    bound: float
    power: Power = 2
    """Order of the norm: 1 for Laplace noise, 2 for Gaussian noise."""

    def protect(self, update: Update, view: TrainView, secret: SecretRound) -> Update:
        """Clip each client's upload."""
        return _flat_clipped(update, self.bound, self.power)[0]

    def finish(self, total: Total, secret: SecretRound) -> tuple[Total, FlatClip]:
        """Scale the sum of client weights, if any, back."""
        return _with_weights(total, ROOM * self.bound), self

    def whole_bound(self, shape: UploadShape) -> float:
        """Return the bound of the norm of a whole upload."""
        return self.bound

    def bound_of(self, norm: float | None) -> float | None:
        """Return the bound; an L1 bound also bounds the L2 norm."""
        return self.bound

    def __str__(self) -> str:
        return f"each upload clipped to L{self.power} norm {self.bound:.4g}"


@dataclass(frozen=True)
class RowClip(Mechanism):
    """Scale every row and every dense array of a client down to norm ``bound``."""

    bound: float
    power: Power = 2

    def protect(self, update: Update, view: TrainView, secret: SecretRound) -> Update:
        """Clip each row."""
        rest, weights = _weights_apart(update)
        bounds, rows = self.bound * weights, {}
        for name, given in rest.rows.items():
            norms = client_norms(Update(len(given.rows), dense={name: given.rows}), self.power)
            factors = _factors(norms, np.repeat(bounds, np.diff(given.indptr)))
            rows[name] = replace(given, rows=scale_to_grid(given.rows, factors))
        dense: dict[str, NDArray[Any]] = {}
        for name, array in rest.dense.items():
            alone = Update(update.clients, dense={name: array})
            dense |= _scaled(alone, _factors(client_norms(alone, self.power), bounds)).dense
        return replace(rest, rows=rows, dense=dense | _sent_weights(update, self.bound))

    def finish(self, total: Total, secret: SecretRound) -> tuple[Total, RowClip]:
        """Scale the sum of client weights, if any, back."""
        return _with_weights(total, self.bound), self

    def whole_bound(self, shape: UploadShape) -> float:
        """Return the bound of the norm of a whole upload, all of whose rows may be at the bound."""
        return float(self.bound * shape.parts ** (1 / self.power))

    def __str__(self) -> str:
        return f"each row clipped to L{self.power} norm {self.bound:.4g}"


@dataclass(frozen=True)
class AdaptiveClip(Mechanism):
    """Flat clipping with a bound that follows a quantile of the clients' norms.

    A device adds one bit to its upload, +1/2 or -1/2: whether its norm was within the bound
    *before* clipping; 0 for an upload of zeros. Clipping and noise of a round use the bound of that
    round. Then ``bound *= exp(-rate * (share - quantile))``, where ``share`` is the noisy share of
    norms within the bound; or, as in DP-PrivRec (Wang et al. 2021, equation 9), ``bound -= rate *
    (share - quantile)``, but not below half the bound.
    """

    bound: float
    quantile: float
    rate: float
    bit_noise: float
    """Standard deviation of the noise on the sum of the bits."""
    power: Literal[2] = 2
    arithmetic: bool = False
    """Whether the bound is updated by differences (DP-PrivRec), not by factors."""
    least: float = 0.0
    """Smallest bound; below it the grid of the exact sums is too coarse for the noise."""

    def protect(self, update: Update, view: TrainView, secret: SecretRound) -> Update:
        """Clip each client's upload and add its bit."""
        clipped, norms, bounds = _flat_clipped(update, self.bound, self.power)
        # A zero upload has bit 0, so that an upload that is zeroed out is all zeros.
        bits = np.where(norms > 0, np.where(norms <= bounds, 0.5, -0.5), 0).astype(np.float32)
        return replace(clipped, dense={**clipped.dense, BIT: bits})

    def noise(self, secret: SecretRound, part: float = 1.0) -> Steps:
        """Draw the noise on the sum of the bits."""
        drawn = law("gaussian", math.ceil(part * self.bit_noise * STEPS_PER_UNIT))
        return Steps(dense={BIT: drawn.draw(secret.words("privacy/bits"), 1).reshape(())})

    def finish(self, total: Total, secret: SecretRound) -> tuple[Total, AdaptiveClip]:
        """Remove the bits from the sum and update the bound."""
        dense = dict(_with_weights(total, ROOM * self.bound).dense)
        share = 0.5 + float(dense.pop(BIT)) / total.clients
        step, bound = self.rate * (share - self.quantile), self.bound
        moved = max(bound - step, bound / 2) if self.arithmetic else bound * math.exp(-step)
        return replace(total, dense=dense), replace(self, bound=max(moved, self.least))

    @property
    def state(self) -> Mapping[str, float]:
        """The current bound."""
        return {BOUND: self.bound}

    def with_state(self, state: Mapping[str, float]) -> AdaptiveClip:
        """Return the mechanism with this bound."""
        return replace(self, bound=state.get(BOUND, self.bound))

    def whole_bound(self, shape: UploadShape) -> float:
        """Return this round's bound of the norm of a whole upload."""
        return self.bound

    def bound_of(self, norm: float | None) -> float | None:
        """Return this round's bound."""
        return self.bound

    def sent_shape(self, shape: UploadShape) -> UploadShape:
        """Return the shape with the bit added."""
        return replace(shape, dense={**shape.dense, BIT: ()})

    def __str__(self) -> str:
        return (
            f"each upload clipped to an L2 norm that follows the {self.quantile:g}-quantile of the "
            f"norms (noise {self.bit_noise:.4g} on the count, its share of the budget included)"
        )


Clip = FlatClip | RowClip | AdaptiveClip


def client_norms(update: Update, power: Power) -> Values:
    """Return the norm of each client's whole upload, over all tables and dense arrays."""
    sums, one_each = np.zeros(update.clients), np.arange(update.clients + 1)
    for rows in update.rows.values():
        add_powers(sums, rows.indptr, rows.rows, power)
    for array in update.dense.values():
        add_powers(sums, one_each, _flat(array), power)
    return np.sqrt(sums) if power == 2 else sums


def _flat_clipped(update: Update, bound: float, power: Power) -> tuple[Update, Values, Values]:
    """Return the clipped uploads, their norms before clipping, and each client's bound."""
    rest, weights = _weights_apart(update)
    room = ROOM * bound if OWN_WEIGHT in update.dense else 0.0
    left = bound - room if power == 1 else math.sqrt(bound**2 - room**2)
    norms, bounds = client_norms(rest, power), left * weights
    clipped = _scaled(rest, _factors(norms, bounds))
    sent = {**clipped.dense, **_sent_weights(update, room)}
    return replace(clipped, dense=sent), norms, bounds


def _weights_apart(update: Update) -> tuple[Update, Values]:
    """Return the upload without client weights, and the weights, or ones."""
    if OWN_WEIGHT not in update.dense:
        return update, np.ones(update.clients)
    dense = dict(update.dense)
    return replace(update, dense=dense), np.clip(dense.pop(OWN_WEIGHT).astype("f8") + 0.5, 0, 1)


def _sent_weights(update: Update, room: float) -> dict[str, NDArray[Any]]:
    """Return the client weights as they are sent, scaled to [-``room``, ``room``]."""
    if OWN_WEIGHT not in update.dense:
        return {}
    own = np.clip(update.dense[OWN_WEIGHT], -0.5, 0.5).astype(np.float32)
    scaled = scale_to_grid(own[:, None], np.full(update.clients, 2 * room * ROUNDING))
    return {OWN_WEIGHT: scaled[:, 0]}


def _with_weights(total: Total, room: float) -> Total:
    """Return the sum with client weights, if any, on their original scale."""
    if OWN_WEIGHT not in total.dense:
        return total
    own = total.dense[OWN_WEIGHT] / (2 * room * ROUNDING)
    return replace(total, dense={**total.dense, OWN_WEIGHT: own})


def _factors(norms: Values, bounds: float | Values) -> Values:
    kept = np.broadcast_to(np.asarray(bounds) * ROUNDING, norms.shape)
    return np.divide(kept, np.maximum(norms, kept), where=kept > 0, out=np.zeros(norms.shape))


def _scaled(update: Update, factors: Values) -> Update:
    rows = {}
    for name, given in update.rows.items():
        each = np.repeat(factors, np.diff(given.indptr))
        rows[name] = replace(given, rows=scale_to_grid(given.rows, each))
    dense = {
        name: scale_to_grid(_flat(array), factors).reshape(array.shape)
        for name, array in update.dense.items()
    }
    return replace(update, rows=rows, dense=dense)


def _flat(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array with one row per client, also for no clients."""
    return array.reshape(len(array), int(np.prod(array.shape[1:])))
