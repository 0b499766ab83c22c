"""`TrainView`: all that training may see. `Cohort`: which clients take part in a round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from hushrec.config import Clients, Settings
from hushrec.data.interactions import Features
from hushrec.errors import ConfigError
from hushrec.kernels import ragged
from hushrec.streams import SecretStreams, Streams, Words

Protocol = Literal["honest", "published"]


@dataclass(frozen=True)
class Ragged:
    """A list of lists: row r owns ``values[indptr[r]:indptr[r + 1]]``."""

    indptr: NDArray[np.int64]
    values: NDArray[Any]

    @classmethod
    def empty(cls, rows: int, dtype: Any = np.int32) -> Ragged:
        """Return rows that own nothing."""
        return cls(np.zeros(rows + 1, np.int64), np.zeros(0, dtype))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of values of each row."""
        return np.diff(self.indptr)

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def __getitem__(self, row: int) -> NDArray[Any]:
        return self.values[self.indptr[row] : self.indptr[row + 1]]

    def take(self, rows: NDArray[Any]) -> Ragged:
        """Return these rows in this order."""
        return Ragged(*ragged.take_ragged(self.indptr, self.values, rows))

    def union(self, other: Ragged) -> Ragged:
        """Return, for every row, the ascending distinct values of both."""
        both = self.indptr, self.values, other.indptr, other.values
        return Ragged(*ragged.sorted_union(*both))


@dataclass(frozen=True)
class TrainView:
    """A batch of clients as training sees them; a device is a batch of one client.

    Without silos every user is a client. With silos the batch still lists users, those of a
    client together, and `holders` says whose they are.

    Held-out interactions are not reachable from here. Under the ``published`` protocol the
    evaluation side adds `never_negative`, the list the published code uses to keep held-out items
    out of the negatives; that is the leak, and it is nowhere else.
    """

    users: NDArray[np.int32]
    """Number of each user in the population; the address of its random streams."""
    n_items: int
    positives: Ragged
    """Training items of each client, oldest first."""
    times: Ragged
    values: Ragged
    never_negative: Ragged | None = None
    user_features: Features = field(default_factory=dict)
    """A row for each user of the batch."""
    item_features: Features = field(default_factory=dict)
    holders: NDArray[np.int32] | None = None
    """Client that holds each user, users of one client together; None if each is a client."""
    repeats: bool = False
    """Whether lists may hold items of the history (``split.kind = next-basket``); then rows of one
    time are a basket."""
    merged: bool = True
    """Whether a client has each item once at most, by ``split.repeats``; public, as `repeats`."""
    noise: NDArray[np.float64] | None = None
    """Deviation of the noise that each client adds to its upload, if it does: it knows its own."""
    _excluded: Ragged | None = None
    """What `excluded` returns, where it was worked out before."""

    @property
    def protocol(self) -> Protocol:
        """How negatives are drawn."""
        return "honest" if self.never_negative is None else "published"

    def __len__(self) -> int:
        return len(self.users)

    @property
    def clients(self) -> NDArray[np.int32]:
        """Number of each client in the population, in the order of the batch."""
        return self.users if self.holders is None else self.holders[self.client_indptr[:-1]]

    @property
    def client_indptr(self) -> NDArray[np.int64]:
        """Where each client's users begin in the batch, and where the last one's end."""
        if self.holders is None:
            return np.arange(len(self) + 1)
        changes = np.flatnonzero(np.diff(self.holders)) + 1
        ends = [len(self)] if len(self) else []
        return np.concatenate([[0], changes, ends]).astype(np.int64)

    def take_clients(self, clients: NDArray[Any]) -> TrainView:
        """Return the batch of these clients (positions among the clients of this batch)."""
        if self.holders is None:
            return self.take(clients)
        whole = Ragged(self.client_indptr, np.arange(len(self)))
        taken = self.take(whole.take(clients).values)
        return replace(taken, noise=None if self.noise is None else self.noise[clients])

    def take(self, clients: NDArray[Any]) -> TrainView:
        """Return the batch of these users (positions in this batch)."""
        never, excluded = self.never_negative, self._excluded
        return replace(
            self,
            users=self.users[clients],
            noise=self.noise[clients] if self.noise is not None and self.holders is None else None,
            holders=None if self.holders is None else self.holders[clients],
            positives=self.positives.take(clients),
            times=self.times.take(clients),
            user_features={name: c.take(clients) for name, c in self.user_features.items()},
            values=self.values.take(clients),
            never_negative=None if never is None else never.take(clients),
            _excluded=None if excluded is None else excluded.take(clients),
        )

    @property
    def seen(self) -> Ragged:
        """Items of each history that lists do not hold; none where items are bought again."""
        return Ragged.empty(len(self)) if self.repeats else self.positives

    def excluded(self) -> Ragged:
        """Return, ascending, the items that are no negatives of each client."""
        if self._excluded is not None:
            return self._excluded
        return self.positives.union(self.never_negative or Ragged.empty(len(self)))

    def prepared(self) -> TrainView:
        """Return the same view with its exclusions worked out, for many rounds to come."""
        return replace(self, _excluded=self.excluded())


class CohortConfig(Settings):
    """Who takes part in a round."""

    kind: Literal["all", "fixed", "poisson"] = "all"
    """Everybody; exactly `size` clients without replacement; or each client with `probability`."""
    size: Annotated[Clients, Field(ge=1)] | None = None
    """Clients of a round, for `fixed`."""
    probability: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of each client, for `poisson`."""

    @model_validator(mode="after")
    def _nothing_ignored(self) -> CohortConfig:
        for name, kind in (("size", "fixed"), ("probability", "poisson")):
            if getattr(self, name) is not None and self.kind != kind:
                problem = f"cohort.{name} does nothing with cohort.kind = {self.kind}"
                raise ValueError(f"{problem}: use cohort.kind = {kind}")
        return self

    def draw(
        self, population: int, streams: Streams | SecretStreams, round_number: int
    ) -> NDArray[np.int64]:
        """Return the clients of a round, ascending."""
        if self.kind == "all":
            return np.arange(population)
        if self.kind == "fixed":
            if self.size is None:
                raise ConfigError("cohort.kind = 'fixed' needs cohort.size")
            if self.size > population:
                raise ConfigError(f"cohort.size = {self.size} exceeds the {population} clients")
        elif self.probability is None:
            raise ConfigError("cohort.kind = 'poisson' needs cohort.probability")
        if isinstance(streams, SecretStreams):
            return self._draw_secretly(population, streams.words("cohort", round_number))
        generator = streams.generator("cohort", round_number)
        # A binomial count and a uniform subset of that size are independent coin flips.
        size = self.size or int(generator.binomial(population, self.probability or 0.0))
        return np.sort(generator.choice(population, size, replace=False, shuffle=False))

    def _draw_secretly(self, population: int, words: Words) -> NDArray[np.int64]:
        """Flip a coin of 64 bits for each client, or take those with the smallest of them."""
        coins = words.take(population)
        if self.size is not None:
            return np.sort(np.argsort(coins, kind="stable")[: self.size])
        assert self.probability is not None, "checked"
        # Rounded down: no client takes part more often than is accounted for.
        limit = int(Fraction(self.probability) * 2**64)
        return np.flatnonzero(coins < np.uint64(limit)) if limit < 2**64 else np.arange(population)


def chunks(cohort: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    """Cut a cohort into batches of at most this many clients."""
    for start in range(0, len(cohort), size):
        yield cohort[start : start + size]


def balanced_chunks(
    cohort: NDArray[np.int64], work: NDArray[np.int64], limit: int, most: int
) -> Iterator[NDArray[np.int64]]:
    """Cut a cohort into batches of about ``limit`` work and at most ``most`` clients."""
    batch_of = np.cumsum(work) // limit
    for batch in np.split(cohort, np.flatnonzero(np.diff(batch_of)) + 1):
        yield from chunks(batch, most)
