"""Noise mechanisms: on the sum (`CentralGaussian`, `DistributedGaussian`) or on every upload.

All entries of all tables get noise, whether clients touched them or not, so that the support of an
upload or a release reveals no items. Noise and data are whole numbers of steps of the exact sums
(`discrete`): nothing is rounded after the noise is added.

`ValidationQueries` are noisy means of a validation metric, charged to the privacy budget, that
select a round. Every user's score on its own validation items, between 0 and 1, enters the sum

    sum over users of (score - 1/2),        users without validation items adding 0,

which gets discrete Gaussian noise. One user changes it by at most 1/2 under zero-out-one and by at
most 1 under replace-one. The rounds of the queries are fixed in advance and all users take part in
each, so sampling amplifies nothing. Selection and early stopping use noisy values only. The queries
take ``privacy.selection_share`` of epsilon; the noise on the rounds' sums is then calibrated so
that queries and rounds together stay within epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import STEPS, STEPS_PER_UNIT, Steps, Tally, Total, Update, UploadShape
from hushrec.data.views import TrainView
from hushrec.kernels.ragged import add_scattered, add_steps
from hushrec.privacy.accountant import (
    Accountant,
    Gaussian,
    Neighbours,
    Values,
    discrete_gaussian,
    noise_for,
    sensitivity,
)
from hushrec.privacy.clipping import Clip
from hushrec.privacy.discrete import Kind, law
from hushrec.privacy.protection import Mechanism, check_shape
from hushrec.streams import PastNoise, SecretRound, SecretStreams

HALF = 0.5
"""Largest distance of a user's score from 1/2."""


def steps_of(scale: float) -> int:
    """Return a noise scale in steps of the exact sums, rounded up."""
    return math.ceil(scale * STEPS_PER_UNIT)


@dataclass(frozen=True)
class CentralGaussian(Mechanism):
    """Clip on the devices; add Gaussian noise to the sum on the server."""

    whole: ClassVar[bool] = True

    clip: Clip
    multiplier: float
    """Standard deviation of the noise over the sensitivity of the sum of updates."""
    neighbours: Neighbours
    shape: UploadShape
    clients: float
    """Expected cohort size, used in place of the real one, which is not public."""
    shares: tuple[float, ...] = ()
    """Share of the budget of each round, if `multiplier` is that of all rounds together; if empty,
    `multiplier` is that of every round."""

    def protect(self, update: Update, view: TrainView, secret: SecretRound) -> Update:
        """Clip; an upload is sent with all rows, of which a simulation keeps the nonzero ones."""
        check_shape(update, self.shape)
        clipped = self.clip.protect(update, view, secret)
        return replace(clipped, whole=self.sent_shape(self.shape))

    def sent_shape(self, shape: UploadShape) -> UploadShape:
        """Return the shape of clipped uploads."""
        return self.clip.sent_shape(shape)

    def bound_of(self, norm: float | None) -> float | None:
        """Return the clipping bound."""
        return self.clip.whole_bound(self.shape)

    def for_shape(self, shape: UploadShape) -> CentralGaussian:
        """Return the mechanism for another shape."""
        return replace(self, shape=shape)

    @property
    def state(self) -> Mapping[str, float]:
        """State of the clipping."""
        return self.clip.state

    def with_state(self, state: Mapping[str, float]) -> CentralGaussian:
        """Return the mechanism with this state of the clipping."""
        return replace(self, clip=self.clip.with_state(state))

    def noise_std(self, round_number: int = 1) -> float:
        """Return the standard deviation of this round's noise."""
        apart = sensitivity(self.clip.whole_bound(self.shape), self.neighbours)
        return round_multiplier(self.multiplier, self.shares, round_number) * apart

    def noise(self, secret: SecretRound, part: float = 1.0) -> Steps:
        """Draw noise for every entry of the sum."""
        drawn = law("gaussian", steps_of(part * self.noise_std(secret.number)))
        added = {
            name: drawn.draw(secret.words(f"privacy/sum/{name}"), math.prod(shape)).reshape(shape)
            for name, shape in self.shape.whole.items()
        }
        groups = self.shape.tables, self.shape.spaces, self.shape.dense
        tables, spaces, dense = ({name: added[name] for name in group} for group in groups)
        return Steps(tables, spaces, {**dense, **self.clip.noise(secret, part).dense})

    def finish(self, total: Total, secret: SecretRound) -> tuple[Total, Self]:
        """Add the noise deviation to the sum, and update the clipping bound for the next round."""
        total, clip = self.clip.finish(replace(total, clients=self.clients), secret)
        return replace(total, noise_std=self.noise_std(secret.number)), replace(self, clip=clip)


@dataclass(frozen=True)
class DistributedGaussian(CentralGaussian):
    """Clip on the devices; every node adds a share of the noise to the sum of its own clients.

    The server sees only the total of all nodes (`hushrec.secagg`). A share has the variance of the
    whole noise divided by ``nodes - tolerated``, so that the noise suffices if ``tolerated`` nodes
    drop out or reveal theirs. A sum of discrete Gaussians is nearly discrete Gaussian (Kairouz,
    Liu, Steinke 2021).
    """

    in_shares: ClassVar[bool] = True

    nodes: int = 1
    tolerated: int = 0
    """Nodes that may drop out, or reveal their noise."""

    def share(self, secret: SecretRound) -> Steps:
        """Draw a node's share from its own streams."""
        return super().noise(secret, 1 / math.sqrt(self.nodes - self.tolerated))

    def noise(self, secret: SecretRound, part: float = 1.0) -> Steps:
        """Draw the shares of all nodes, in a simulation."""
        shares = [self.share(secret.of(f"node {node}")) for node in range(self.nodes)]
        return reduce(Steps.plus, shares)

    def finish(self, total: Total, secret: SecretRound) -> tuple[Total, Self]:
        """Add the noise deviation of all nodes to the sum."""
        total, next_round = super().finish(total, secret)
        whole = math.sqrt(self.nodes / (self.nodes - self.tolerated))
        return replace(total, noise_std=whole * total.noise_std), next_round


def round_multiplier(multiplier: float, shares: tuple[float, ...], round_number: int) -> float:
    """Return the multiplier of one round; Gaussians compose by adding up multiplier^-2."""
    return multiplier / math.sqrt(shares[round_number - 1]) if shares else multiplier


class LocalMechanism(Mechanism):
    """Randomises every client's upload, made dense, on the device."""

    shape: UploadShape

    def randomise(
        self, arrays: Mapping[str, NDArray[np.float32]], view: TrainView, secret: SecretRound
    ) -> None:
        """Change ``arrays[name][client, entry]`` in place, each client from its own streams."""
        raise NotImplementedError

    def protect(self, update: Update, view: TrainView, secret: SecretRound) -> Update:
        """Make the upload dense, zeros included, and randomise it."""
        check_shape(update, self.shape)
        dense, flat = {}, {}
        for name, shape in self.shape.whole.items():
            out = np.zeros((update.clients, *shape), np.float32)
            if name in update.rows:
                sent = update.rows[name]
                add_scattered(out, sent.indptr, sent.ids, sent.rows)
            else:
                out += update.dense[name]
            dense[name], flat[name] = out, out.reshape(update.clients, math.prod(shape))
        self.randomise(flat, view, secret)
        return Update(update.clients, dense=dense, zeroed_out=update.zeroed_out)

    def sent_shape(self, shape: UploadShape) -> UploadShape:
        """Return the shape with tables as dense arrays."""
        tables = {name: (shape.n_rows, width) for name, width in shape.tables.items()}
        return UploadShape(shape.n_rows, {}, {**tables, **shape.dense})

    def bound_of(self, norm: float | None) -> float | None:
        """Return None: noise has no bound."""
        return None

    def finish(self, total: Total, secret: SecretRound) -> tuple[Total, Self]:
        """Return dense tables as rows, as the method expects them."""
        every_row, dense = np.arange(self.shape.n_rows), dict(total.dense)
        tables = [name for name in total.dense if name in self.shape.tables]
        rows = {name: (every_row, dense.pop(name)) for name in tables}
        return Total(total.clients, rows, dense), self


@dataclass(frozen=True)
class LocalNoise(LocalMechanism):
    """Add noise to every entry of a client's upload, on the device."""

    kind: Kind
    scale: float
    """Standard deviation of Gaussian noise, or b of Laplace noise."""
    shape: UploadShape

    def randomise(
        self, arrays: Mapping[str, NDArray[np.float32]], view: TrainView, secret: SecretRound
    ) -> None:
        """Add noise to every entry."""
        for name, flat in arrays.items():
            for client, steps in self._steps(name, flat.shape[1], view, secret):
                add_steps(flat[client], steps)

    def for_shape(self, shape: UploadShape) -> Self:
        """Return the mechanism for another shape."""
        return replace(self, shape=shape)

    def past_noise(self, streams: SecretStreams) -> PastNoise | None:
        """Return a function that draws the noise of an earlier round again from its key."""

        def drawn(
            name: str, shape: tuple[int, ...], view: TrainView, number: int
        ) -> NDArray[np.float32]:
            out = np.empty((len(view.clients), *shape), np.float32)
            secret = SecretRound(number, streams)
            for client, steps in self._steps(name, math.prod(shape), view, secret):
                out[client] = (steps / STEPS_PER_UNIT).reshape(shape)
            return out

        return drawn

    def scales(self, view: TrainView) -> Values:
        """Return the noise scale of each client."""
        return np.full(len(view.clients), self.scale)

    def _steps(
        self, name: str, size: int, view: TrainView, secret: SecretRound
    ) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield each client's noise in steps of the exact sums."""
        for client, (number, scale) in enumerate(zip(view.clients, self.scales(view), strict=True)):
            words = secret.words(f"privacy/upload/{name}", int(number))
            yield client, law(self.kind, steps_of(scale)).draw(words, size)


@dataclass(frozen=True)
class ValidationQueries:
    """The validation queries of a run."""

    rounds: frozenset[int]
    """Rounds after which there is a query, fixed in advance."""
    event: Gaussian
    """Privacy cost of one query."""
    clients: float
    """The population, which divides the sum: how many have validation items is private."""

    @classmethod
    def within(
        cls,
        epsilon: float,
        delta: float,
        rounds: frozenset[int],
        neighbours: Neighbours,
        clients: float,
    ) -> ValidationQueries:
        """Return queries that by themselves stay within epsilon."""
        event_at = discrete_gaussian(sensitivity(HALF, neighbours), neighbours, 1)
        return cls(rounds, event_at(noise_for(epsilon, delta, len(rounds), event_at)), clients)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the sum of scores."""
        return self.event.multiplier * sensitivity(HALF, self.event.neighbours)

    def history(self) -> list[dict[str, Any]]:
        """Return the accountant's history of all queries."""
        return Accountant().record(self.event, len(self.rounds)).history()

    def value(self, tally: Tally, metric: str, secret: SecretRound) -> float:
        """Return the noisy mean of a metric; users without validation items count as 1/2."""
        drawn = law("gaussian", steps_of(self.noise_std)).draw(secret.words("privacy/look"), 1)
        noised = centred_sum(tally, metric) + int(drawn[0])
        return HALF + noised / STEPS_PER_UNIT / self.clients

    def __str__(self) -> str:
        return (
            f"{len(self.rounds)} validation queries, each a sum over all users of a number between "
            f"0 and 1 with discrete Gaussian noise of deviation {self.noise_std:.4g}, select the "
            "round"
        )


def centred_sum(tally: Tally, metric: str) -> int:
    """Return the sum over users of (score - 1/2) in steps of the noise, rounded down."""
    # Rounding keeps the sensitivity, which is a whole number of steps.
    doubled = 2 * tally.sums.get(metric, 0) - STEPS * tally.users
    return doubled * int(STEPS_PER_UNIT) // (2 * STEPS)
