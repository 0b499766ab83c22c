"""Clipping: the bound that turns noise into a guarantee.

`FlatClip` bounds one norm over everything that a client uploads. `RowClip` bounds every row by
itself, so the whole by the square root of their number. `AdaptiveClip` is flat with a bound that
follows a quantile of the clients' norms (Andrew et al. 2021).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregate import Steps, Total, Update, UploadShape
from hushrec.aggregate.exact import STEPS_PER_UNIT
from hushrec.clients import TrainView
from hushrec.privacy.discrete import law
from hushrec.privacy.kernels import add_powers, scale_to_grid
from hushrec.privacy.protection import Mechanism
from hushrec.rng import SecretRound

Power = Literal[1, 2]
BIT = "privacy/within-bound"
"""Name of the bit that adaptive clipping adds to an upload."""
BOUND = "clip_bound"
"""Name of the bound in the state."""
ROUNDING = 1 - 2.0**-22
"""Norms are added up, and values rounded, in floating point: so much less than the bound is kept to
before, and nothing is above it after."""


@dataclass(frozen=True)
class FlatClip(Mechanism):
    """Scale a client's whole upload down to ``bound`` where its norm is larger."""

    bound: float
    power: Power = 2
    """The norm: 1 for Laplace noise, 2 for Gaussian."""

    def protect(self, update: Update, view: TrainView, secret: SecretRound) -> Update:
        """Clip each client's upload."""
        return _scaled(update, _factors(client_norms(update, self.power), self.bound))

    def whole_bound(self, shape: UploadShape) -> float:
        """Return what the norm of a whole upload cannot exceed."""
        return self.bound

    def bound_of(self, norm: float | None) -> float | None:
        """Keep to the bound; an L1 bound is one of the L2 norm too."""
        return self.bound

    def __str__(self) -> str:
        return f"each upload clipped to L{self.power} norm {self.bound:.4g}"


@dataclass(frozen=True)
class RowClip(Mechanism):
    """Scale every row, and every dense array, of a client down to ``bound``."""

    bound: float
    power: Power = 2

    def protect(self, update: Update, view: TrainView, secret: SecretRound) -> Update:
        """Clip each row."""
        rows = {}
        for name, given in update.rows.items():
            each_row = np.arange(len(given.rows) + 1)
            norms = _norms(len(given.rows), [(each_row, given.rows)], self.power)
            factors = _factors(norms, self.bound)
            rows[name] = replace(given, rows=scale_to_grid(given.rows, factors))
        dense = {}
        for name, array in update.dense.items():
            alone = Update(update.clients, dense={name: array})
            factors = _factors(client_norms(alone, self.power), self.bound)
            dense[name] = _scaled(alone, factors).dense[name]
        return replace(update, rows=rows, dense=dense)

    def whole_bound(self, shape: UploadShape) -> float:
        """Return what the norm of a whole upload cannot exceed: all rows may be at the bound."""
        return float(self.bound * shape.parts ** (1 / self.power))

    def __str__(self) -> str:
        return f"each row clipped to L{self.power} norm {self.bound:.4g}"


@dataclass(frozen=True)
class AdaptiveClip(Mechanism):
    """Flat clipping whose bound moves towards a quantile of the clients' norms.

    A device adds one bit to its upload, as plus or minus a half: whether its norm was within the
    bound *before* clipping; an upload of zeros adds none. Noise and clipping of a round use the
    bound of that round; then it moves: ``bound *= exp(-rate * (share - quantile))``, which keeps it
    positive; or, as in DP-PrivRec (Wang et al. 2021, equation 9), ``bound -= rate * (share -
    quantile)``, where no step takes away more than half.
    """

    bound: float
    quantile: float
    rate: float
    bit_noise: float
    """Standard deviation of the noise on the sum of the bits."""
    power: Literal[2] = 2
    arithmetic: bool = False
    """Whether the bound moves by differences, not by factors."""
    least: float = 0.0
    """Where the bound stops falling: below, the grid of the sums would be too coarse for it."""

    def protect(self, update: Update, view: TrainView, secret: SecretRound) -> Update:
        """Clip each client's upload, and add its bit."""
        norms = client_norms(update, self.power)
        # Who has nothing to say counts neither way, so that an emptied upload is all zeros.
        bits = np.where(norms > 0, np.where(norms <= self.bound, 0.5, -0.5), 0).astype(np.float32)
        clipped = _scaled(update, _factors(norms, self.bound))
        return replace(clipped, dense={**clipped.dense, BIT: bits})

    def noise(self, secret: SecretRound, part: float = 1.0) -> Steps:
        """Noise the sum of the bits."""
        drawn = law("gaussian", math.ceil(part * self.bit_noise * STEPS_PER_UNIT))
        return Steps(dense={BIT: drawn.draw(secret.words("privacy/bits"), 1).reshape(())})

    def finish(self, total: Total, secret: SecretRound) -> tuple[Total, AdaptiveClip]:
        """Take the bits out of the sum and move the bound."""
        dense = dict(total.dense)
        share = 0.5 + float(dense.pop(BIT)) / total.clients
        step = self.rate * (share - self.quantile)
        if self.arithmetic:
            moved = max(self.bound - step, self.bound / 2)
        else:
            moved = self.bound * math.exp(-step)
        return replace(total, dense=dense), replace(self, bound=max(moved, self.least))

    @property
    def state(self) -> Mapping[str, float]:
        """The bound that it has come to."""
        return {BOUND: self.bound}

    def with_state(self, state: Mapping[str, float]) -> AdaptiveClip:
        """Go on from a bound."""
        return replace(self, bound=state.get(BOUND, self.bound))

    def whole_bound(self, shape: UploadShape) -> float:
        """Return what the norm of a whole upload cannot exceed in this round."""
        return self.bound

    def bound_of(self, norm: float | None) -> float | None:
        """Keep to this round's bound."""
        return self.bound

    def sent_shape(self, shape: UploadShape) -> UploadShape:
        """Add the bit."""
        return replace(shape, dense={**shape.dense, BIT: ()})

    def __str__(self) -> str:
        return (
            f"each upload clipped to an L2 norm that follows the {self.quantile:g}-quantile of the "
            f"norms (noise {self.bit_noise:.4g} on the count, its share of the budget included)"
        )


Clip = FlatClip | RowClip | AdaptiveClip


def client_norms(update: Update, power: Power) -> NDArray[np.float64]:
    """Return the norm of each client's whole upload, over all tables and dense arrays."""
    parts: list[tuple[NDArray[Any], NDArray[Any]]] = [
        (rows.indptr, rows.rows) for rows in update.rows.values()
    ]
    one_each = np.arange(update.clients + 1)
    parts += [(one_each, _flat(array)) for array in update.dense.values()]
    return _norms(update.clients, parts, power)


def _norms(
    count: int, parts: list[tuple[NDArray[Any], NDArray[Any]]], power: Power
) -> NDArray[np.float64]:
    sums = np.zeros(count)
    for indptr, rows in parts:
        add_powers(sums, indptr, rows, power)
    return np.sqrt(sums) if power == 2 else sums


def _factors(norms: NDArray[np.float64], bound: float) -> NDArray[np.float64]:
    kept = bound * ROUNDING
    return kept / np.maximum(norms, kept)


def _scaled(update: Update, factors: NDArray[np.float64]) -> Update:
    rows = {
        name: replace(
            given, rows=scale_to_grid(given.rows, np.repeat(factors, np.diff(given.indptr)))
        )
        for name, given in update.rows.items()
    }
    dense = {
        name: scale_to_grid(_flat(array), factors).reshape(array.shape)
        for name, array in update.dense.items()
    }
    return replace(update, rows=rows, dense=dense)


def _flat(array: NDArray[Any]) -> NDArray[Any]:
    """Return a row for each client, of whom there may be none."""
    return array.reshape(len(array), int(np.prod(array.shape[1:])))
