"""Noise: once on the sum (`CentralGaussian`), or on every upload (`LocalNoise`).

Both cover every entry of every table, touched or not, so that neither what is uploaded nor what is
released shows by its support which items anybody touched. Noise comes from the run's seeded
streams: this is a simulation. A deployment has to draw it from a cryptographic source.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregate import Total, Update
from hushrec.clients import TrainView
from hushrec.privacy.accountant import Neighbours, sensitivity
from hushrec.privacy.clip import Clip
from hushrec.privacy.kernels import add_scattered, gaussian_noise, laplace_noise
from hushrec.privacy.stack import UploadShape
from hushrec.rng import Streams


@dataclass(frozen=True)
class CentralGaussian:
    """Clip on the devices; add Gaussian noise to the sum, once, on the server."""

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

    def protect(
        self, update: Update, view: TrainView, streams: Streams, round_number: int
    ) -> Update:
        """Clip; the upload travels whole, with every row of every table.

        Here only its rows that are not zero are written out: a sum of whole numbers is the same.
        """
        self.shape.check(update)
        clipped = self.clip.protect(update, view, streams, round_number)
        bits = 4 * (len(clipped.dense) - len(update.dense))
        return replace(clipped, sent_bytes=update.clients * (self.shape.nbytes + bits))

    def noise_std(self, round_number: int = 1) -> float:
        """Return the standard deviation of this round's noise."""
        apart = sensitivity(self.clip.whole_bound(self.shape), self.neighbours)
        return round_multiplier(self.multiplier, self.shares, round_number) * apart

    def finish(
        self, total: Total, streams: Streams, round_number: int
    ) -> tuple[Total, CentralGaussian]:
        """Add noise to every entry with this round's bound; only then let the bound move."""
        total, clip = self.clip.finish(replace(total, clients=self.clients), streams, round_number)
        std = self.noise_std(round_number)
        tables = {name: (self.shape.n_rows, width) for name, width in self.shape.tables.items()}
        rows = {}
        for name, (count, width) in {**tables, **self.shape.spaces}.items():
            generator = streams.generator(f"privacy/sum/{name}", round_number)
            noisy = std * generator.standard_normal((count, width))
            if name in total.rows:
                ids, summed = total.rows[name]
                noisy[ids] += summed
            rows[name] = np.arange(count), noisy
        dense: dict[str, NDArray[np.float64]] = {}
        for name, shape in self.shape.dense.items():
            generator = streams.generator(f"privacy/sum/{name}", round_number)
            dense[name] = total.dense.get(name, 0.0) + std * generator.standard_normal(shape)
        return Total(self.clients, rows, dense, std), replace(self, clip=clip)


def round_multiplier(multiplier: float, shares: tuple[float, ...], round_number: int) -> float:
    """Return a round's own multiplier: Gaussians compose by adding up multiplier^-2."""
    return multiplier / math.sqrt(shares[round_number - 1]) if shares else multiplier


@dataclass(frozen=True)
class LocalNoise:
    """Add noise to every entry of every client's upload, on the device."""

    kind: Literal["laplace", "gaussian"]
    scale: float
    """Standard deviation of Gaussian noise; b of Laplace noise, whose deviation is sqrt(2) b."""
    shape: UploadShape

    def protect(
        self, update: Update, view: TrainView, streams: Streams, round_number: int
    ) -> Update:
        """Write the upload out whole and add noise to it."""
        self.shape.check(update)
        dense: dict[str, NDArray[Any]] = {}
        for name, width in self.shape.tables.items():
            table = self._noise(name, (self.shape.n_rows, width), view, streams, round_number)
            stack = update.rows[name]
            add_scattered(table, stack.indptr, stack.ids, stack.rows)
            dense[name] = table
        for name, shape in self.shape.dense.items():
            noise = self._noise(name, shape, view, streams, round_number)
            dense[name] = update.dense[name] + noise
        return Update(update.clients, dense=dense)

    def finish(self, total: Total, streams: Streams, round_number: int) -> tuple[Total, LocalNoise]:
        """Hand the whole tables to the method as rows, which it expects."""
        every_row = np.arange(self.shape.n_rows)
        rows = {
            name: (every_row, summed)
            for name, summed in total.dense.items()
            if name in self.shape.tables
        }
        dense = {name: summed for name, summed in total.dense.items() if name not in rows}
        return Total(total.clients, rows, dense), self

    def _noise(
        self,
        name: str,
        shape: tuple[int, ...],
        view: TrainView,
        streams: Streams,
        round_number: int,
    ) -> NDArray[np.float32]:
        draw = laplace_noise if self.kind == "laplace" else gaussian_noise
        key = streams.key(upload_purpose(name), round_number)
        drawn: NDArray[np.float32] = draw(key, view.clients, int(np.prod(shape)), self.scale)
        return drawn.reshape(-1, *shape)


def upload_purpose(name: str) -> str:
    """Name the stream of the noise on an array of a client's upload."""
    return f"privacy/upload/{name}"


def own_noise(
    name: str,
    shape: tuple[int, ...],
    clients: NDArray[np.int32],
    deviations: NDArray[np.float64],
    streams: Streams,
    round_number: int,
) -> NDArray[np.float32]:
    """Return the Gaussian noise that these clients added to an array of their upload in a round.

    A device remembers it; a simulation draws it again.
    """
    key = streams.key(upload_purpose(name), round_number)
    drawn = gaussian_noise(key, clients, int(np.prod(shape)), 1.0).reshape(-1, *shape)
    return np.asarray(drawn * deviations.astype(np.float32).reshape(-1, *[1] * len(shape)))
