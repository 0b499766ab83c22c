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

from hushrec.aggregate import Total, Update, UploadShape
from hushrec.clients import TrainView
from hushrec.privacy.kernels import add_powers
from hushrec.privacy.protection import Mechanism
from hushrec.rng import SecretRound

Power = Literal[1, 2]
BIT = "privacy/within-bound"
"""Name of the bit that adaptive clipping adds to an upload."""
BOUND = "clip_bound"
"""Name of the bound in the state."""
ROUNDING = 1 - 2.0**-22
"""Clipped values are rounded to float32; this much less keeps their norm within the bound."""


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
            clipped = (given.rows * factors[:, None]).astype(np.float32)
            rows[name] = replace(given, rows=clipped)
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
    bound *before* clipping. Noise and clipping of a round use the bound of that round; then it
    moves: ``bound *= exp(-rate * (share - quantile))``, which keeps it positive; or, as in
    DP-PrivRec (Wang et al. 2021, equation 9), ``bound -= rate * (share - quantile)``, where no step
    takes away more than half.
    """

    bound: float
    quantile: float
    rate: float
    bit_noise: float
    """Standard deviation of the noise on the sum of the bits."""
    power: Literal[2] = 2
    arithmetic: bool = False
    """Whether the bound moves by differences, not by factors."""

    def protect(self, update: Update, view: TrainView, secret: SecretRound) -> Update:
        """Clip each client's upload, and add its bit."""
        norms = client_norms(update, self.power)
        bits = (norms <= self.bound) - np.float32(0.5)
        clipped = _scaled(update, _factors(norms, self.bound))
        return replace(clipped, dense={**clipped.dense, BIT: bits})

    def finish(self, total: Total, secret: SecretRound) -> tuple[Total, AdaptiveClip]:
        """Take the bits out of the sum, noise them, and move the bound."""
        dense = dict(total.dense)
        generator = secret.generator("privacy/bits")
        bits = dense.pop(BIT, 0.0) + self.bit_noise * generator.standard_normal()
        share = 0.5 + float(bits) / total.clients
        step = self.rate * (share - self.quantile)
        if self.arithmetic:
            moved = max(self.bound - step, self.bound / 2)
        else:
            moved = self.bound * math.exp(-step)
        return replace(total, dense=dense), replace(self, bound=moved)

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
    parts += [
        (one_each, array.reshape(update.clients, int(np.prod(array.shape[1:]))))
        for array in update.dense.values()
    ]
    return _norms(update.clients, parts, power)


def _norms(
    count: int, parts: list[tuple[NDArray[Any], NDArray[Any]]], power: Power
) -> NDArray[np.float64]:
    sums = np.zeros(count)
    for indptr, rows in parts:
        add_powers(sums, indptr, rows, power)
    return np.sqrt(sums) if power == 2 else sums


def _factors(norms: NDArray[np.float64], bound: float) -> NDArray[np.float64]:
    factors = np.ones(len(norms))
    over = ~(norms <= bound)  # a norm that is not a number stays one, and the sum refuses it
    factors[over] = np.where(np.isfinite(norms[over]), bound / norms[over] * ROUNDING, np.nan)
    return factors


def _scaled(update: Update, factors: NDArray[np.float64]) -> Update:
    rows = {}
    for name, given in update.rows.items():
        factor = np.repeat(factors, np.diff(given.indptr))
        clipped = (given.rows * factor[:, None]).astype(np.float32)
        rows[name] = replace(given, rows=clipped)
    dense = {
        name: (array * factors.reshape(-1, *[1] * (array.ndim - 1))).astype(
            np.result_type(array.dtype, np.float32)
        )
        for name, array in update.dense.items()
    }
    return replace(update, rows=rows, dense=dense)
