"""Noise: once on the sum (`CentralGaussian`), or on every upload (`LocalNoise`).

Both cover every entry of every table, touched or not, so that neither what is uploaded nor what is
released shows by its support which items anybody touched. Noise is a whole number of the steps of
the exact sums (`discrete`), as is what it is added to: nothing is rounded before it is covered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import Steps, Total, Update, UploadShape
from hushrec.aggregation.exact_sum import STEPS_PER_UNIT
from hushrec.data.views import TrainView
from hushrec.kernels import add_scattered
from hushrec.kernels.clipping import add_steps
from hushrec.privacy.accountant import Neighbours, sensitivity
from hushrec.privacy.clipping import Clip
from hushrec.privacy.discrete import Kind, law
from hushrec.privacy.protection import Mechanism, check_shape
from hushrec.streams import PastNoise, SecretRound, SecretStreams


def steps_of(scale: float) -> int:
    """Return a scale of noise in whole steps, never less of it than asked for."""
    return math.ceil(scale * STEPS_PER_UNIT)


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

    def noise(self, secret: SecretRound, part: float = 1.0) -> Steps:
        """Draw noise for every entry of the sum, with this round's bound."""
        drawn = law("gaussian", steps_of(part * self.noise_std(secret.number)))
        added = {
            name: drawn.draw(secret.words(f"privacy/sum/{name}"), math.prod(shape)).reshape(shape)
            for name, shape in self.shape.whole.items()
        }
        dense = {name: added[name] for name in self.shape.dense}
        return Steps(
            {name: added[name] for name in self.shape.tables},
            {name: added[name] for name in self.shape.spaces},
            {**dense, **self.clip.noise(secret, part).dense},
        )

    def finish(self, total: Total, secret: SecretRound) -> tuple[Total, Self]:
        """Say what noise there is; only now may the bound move."""
        total, clip = self.clip.finish(replace(total, clients=self.clients), secret)
        return replace(total, noise_std=self.noise_std(secret.number)), replace(self, clip=clip)


@dataclass(frozen=True)
class DistributedGaussian(CentralGaussian):
    """Clip on the devices; every node adds its share of the noise to the sum of its own clients.

    The server sees what all nodes' sums add up to and nothing else (`hushrec.secagg`). A share has
    the variance of the whole noise over the number of nodes that are counted on: so many may drop
    out, or tell others their noise, and what is left is still enough. Sums of discrete Gaussians
    are as good as discrete Gaussian (Kairouz, Liu, Steinke 2021).
    """

    in_shares: ClassVar[bool] = True

    nodes: int = 1
    tolerated: int = 0
    """Nodes that may drop out, or tell others their noise."""

    def share(self, secret: SecretRound) -> Steps:
        """Draw a node's share, from its own streams."""
        return super().noise(secret, 1 / math.sqrt(self.nodes - self.tolerated))

    def noise(self, secret: SecretRound, part: float = 1.0) -> Steps:
        """Draw all nodes' shares, where one process plays them all."""
        shares = [self.share(secret.of(f"node {node}")) for node in range(self.nodes)]
        return reduce(Steps.plus, shares)

    def finish(self, total: Total, secret: SecretRound) -> tuple[Total, Self]:
        """Count on the noise of all nodes: where some dropped out there is less, and enough."""
        total, following = super().finish(total, secret)
        whole = math.sqrt(self.nodes / (self.nodes - self.tolerated))
        return replace(total, noise_std=whole * total.noise_std), following


def round_multiplier(multiplier: float, shares: tuple[float, ...], round_number: int) -> float:
    """Return a round's own multiplier: Gaussians compose by adding up multiplier^-2."""
    return multiplier / math.sqrt(shares[round_number - 1]) if shares else multiplier


@dataclass(frozen=True)
class LocalNoise(Mechanism):
    """Add noise to every entry of every client's upload, on the device."""

    kind: Kind
    scale: float
    """Standard deviation of Gaussian noise; b of Laplace noise, whose deviation is sqrt(2) b."""
    shape: UploadShape

    def protect(self, update: Update, view: TrainView, secret: SecretRound) -> Update:
        """Write the upload out whole and add noise to it."""
        check_shape(update, self.shape)
        dense: dict[str, NDArray[Any]] = {}
        for name, shape in self.shape.whole.items():
            out = np.zeros((update.clients, *shape), np.float32)
            if name in update.rows:
                sent = update.rows[name]
                add_scattered(out, sent.indptr, sent.ids, sent.rows)
            else:
                out += update.dense[name]
            size = math.prod(shape)
            flat = out.reshape(update.clients, size)  # of a scalar too, a view and no copy
            for client, steps in self._steps(name, size, view, secret):
                add_steps(flat[client], steps)
            dense[name] = out
        return Update(update.clients, dense=dense, emptied=update.emptied)

    def sent_shape(self, shape: UploadShape) -> UploadShape:
        """Send whole tables as dense arrays."""
        tables = {name: (shape.n_rows, width) for name, width in shape.tables.items()}
        return UploadShape(shape.n_rows, {}, {**tables, **shape.dense})

    def bound_of(self, norm: float | None) -> float | None:
        """Keep to nothing: noise has no bound."""
        return None

    def for_shape(self, shape: UploadShape) -> Self:
        """Cover another shape."""
        return replace(self, shape=shape)

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
        out = np.empty((len(view.clients), *shape), np.float32)
        for client, steps in self._steps(name, math.prod(shape), view, secret):
            out[client] = (steps / STEPS_PER_UNIT).reshape(shape)
        return out

    def scales(self, view: TrainView) -> NDArray[np.float64]:
        """Return the scale of each client's noise."""
        return np.full(len(view.clients), self.scale)

    def _steps(
        self, name: str, size: int, view: TrainView, secret: SecretRound
    ) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield each client's noise, in whole steps."""
        for client, (number, scale) in enumerate(zip(view.clients, self.scales(view), strict=True)):
            words = secret.words(f"privacy/upload/{name}", int(number))
            yield client, law(self.kind, steps_of(scale)).draw(words, size)
