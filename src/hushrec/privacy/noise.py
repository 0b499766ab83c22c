"""Noise: once on the sum (`CentralGaussian`), or on every upload (`LocalNoise`).

Both cover every entry of every table, touched or not, so that neither what is uploaded nor what is
released shows by its support which items anybody touched. Noise comes from the run's seeded
streams: this is a simulation. A deployment has to draw it from a cryptographic source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregate import Total, Update, UploadShape
from hushrec.clients import TrainView
from hushrec.kernels import add_scattered
from hushrec.privacy.accountant import Neighbours, sensitivity
from hushrec.privacy.clip import Clip
from hushrec.privacy.kernels import gaussian_noise, laplace_noise
from hushrec.privacy.protection import Mechanism, check_shape
from hushrec.rng import PastNoise, SecretRound, SecretStreams


@dataclass(frozen=True)
class CentralGaussian(Mechanism):
    """Clip on the devices; add Gaussian noise to the sum, once, on the server."""

    whole: ClassVar[bool] = True

    clip: Clip
    multiplier: float
    """Standard deviation of the noise over the sensitivity of the sum of updates."""
    neighbours: Neighbours
    shape: UploadShape
    clients: float
    """Expected size of a cohort. It takes the place of the real one, which would tell whether
    somebody was there."""
    shares: tuple[float, ...] = ()
    """Share of the budget that each round spends, of a multiplier for all rounds together; with
    none, the multiplier is that of every round."""

    def protect(self, update: Update, view: TrainView, secret: SecretRound) -> Update:
        """Clip; the upload travels whole, with every row of every table.

        Here only its rows that are not zero are written out: a sum of whole numbers is the same.
        """
        check_shape(update, self.shape)
        clipped = self.clip.protect(update, view, secret)
        return replace(clipped, whole=self.sent_shape(self.shape))

    def sent_shape(self, shape: UploadShape) -> UploadShape:
        """Send what clipping leaves."""
        return self.clip.sent_shape(shape)

    def bound_of(self, norm: float | None) -> float | None:
        """Keep to the bound of the clipping."""
        return self.clip.whole_bound(self.shape)

    def for_shape(self, shape: UploadShape) -> CentralGaussian:
        """Cover another shape."""
        return replace(self, shape=shape)

    @property
    def state(self) -> Mapping[str, float]:
        """That of the clipping."""
        return self.clip.state

    def with_state(self, state: Mapping[str, float]) -> CentralGaussian:
        """Clip as in this state."""
        return replace(self, clip=self.clip.with_state(state))

    def noise_std(self, round_number: int = 1) -> float:
        """Return the standard deviation of this round's noise."""
        apart = sensitivity(self.clip.whole_bound(self.shape), self.neighbours)
        return round_multiplier(self.multiplier, self.shares, round_number) * apart

    def finish(self, total: Total, secret: SecretRound) -> tuple[Total, CentralGaussian]:
        """Add noise to every entry with this round's bound; only then let the bound move."""
        total, clip = self.clip.finish(replace(total, clients=self.clients), secret)
        std = self.noise_std(secret.number)
        tables = {name: (self.shape.n_rows, width) for name, width in self.shape.tables.items()}
        rows = {}
        for name, (count, width) in {**tables, **self.shape.spaces}.items():
            assert count is not None, "an open space was refused"
            generator = secret.generator(f"privacy/sum/{name}")
            noisy = std * generator.standard_normal((count, width))
            if name in total.rows:
                ids, summed = total.rows[name]
                noisy[ids] += summed
            rows[name] = np.arange(count), noisy
        dense: dict[str, NDArray[np.float64]] = {}
        for name, shape in self.shape.dense.items():
            generator = secret.generator(f"privacy/sum/{name}")
            dense[name] = total.dense.get(name, 0.0) + std * generator.standard_normal(shape)
        return Total(self.clients, rows, dense, std), replace(self, clip=clip)


def round_multiplier(multiplier: float, shares: tuple[float, ...], round_number: int) -> float:
    """Return a round's own multiplier: Gaussians compose by adding up multiplier^-2."""
    return multiplier / math.sqrt(shares[round_number - 1]) if shares else multiplier


@dataclass(frozen=True)
class LocalNoise(Mechanism):
    """Add noise to every entry of every client's upload, on the device."""

    kind: Literal["laplace", "gaussian"]
    scale: float
    """Standard deviation of Gaussian noise; b of Laplace noise, whose deviation is sqrt(2) b."""
    shape: UploadShape

    def protect(self, update: Update, view: TrainView, secret: SecretRound) -> Update:
        """Write the upload out whole and add noise to it."""
        check_shape(update, self.shape)
        dense: dict[str, NDArray[Any]] = {}
        for name, width in self.shape.tables.items():
            table = self.drawn(name, (self.shape.n_rows, width), view, secret)
            sent = update.rows[name]
            add_scattered(table, sent.indptr, sent.ids, sent.rows)
            dense[name] = table
        for name, shape in self.shape.dense.items():
            noise = self.drawn(name, shape, view, secret)
            dense[name] = update.dense[name] + noise
        return Update(update.clients, dense=dense, emptied=update.emptied)

    def sent_shape(self, shape: UploadShape) -> UploadShape:
        """Send whole tables as dense arrays."""
        tables = {name: (shape.n_rows, width) for name, width in shape.tables.items()}
        return UploadShape(shape.n_rows, {}, {**tables, **shape.dense})

    def bound_of(self, norm: float | None) -> float | None:
        """Keep to nothing: noise has no bound."""
        return None

    def finish(self, total: Total, secret: SecretRound) -> tuple[Total, LocalNoise]:
        """Hand the whole tables to the method as rows, which it expects."""
        every_row = np.arange(self.shape.n_rows)
        rows = {
            name: (every_row, summed)
            for name, summed in total.dense.items()
            if name in self.shape.tables
        }
        dense = {name: summed for name, summed in total.dense.items() if name not in rows}
        return Total(total.clients, rows, dense), self

    def past_noise(self, streams: SecretStreams) -> PastNoise | None:
        """Draw the noise of a past round again: a device that keeps its key need not keep more."""
        return lambda name, shape, view, number: self.drawn(
            name, shape, view, SecretRound(number, streams)
        )

    def drawn(
        self,
        name: str,
        shape: tuple[int, ...],
        view: TrainView,
        secret: SecretRound,
    ) -> NDArray[np.float32]:
        """Return the noise that these clients add to an array of their upload in a round."""
        draw = laplace_noise if self.kind == "laplace" else gaussian_noise
        key = secret.key(f"privacy/upload/{name}")
        drawn: NDArray[np.float32] = draw(key, view.clients, int(np.prod(shape)), self.scale)
        return drawn.reshape(-1, *shape)
