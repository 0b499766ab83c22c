"""Training samples of a round, and their order.

Negatives are drawn uniformly from the items that a client has not interacted with. Samplers see a
`TrainView` only, so a held-out item is drawn as a negative like any other unseen item.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hushrec import kernels
from hushrec.data.views import Ragged, TrainView
from hushrec.kernels.draws import ClientData
from hushrec.streams import Round

PURPOSE = "fit"
"""Purpose of the stream of samples; kernels that draw during training read the same stream."""


def client_data(view: TrainView) -> ClientData:
    """Return the clients of a view as kernel arguments."""
    positives, excluded = view.positives, view.excluded()
    return ClientData(
        view.users, positives.indptr, positives.values, excluded.indptr, excluded.values
    )


def draw_negatives(view: TrainView, per_positive: int, now: Round) -> Ragged:
    """Draw ``per_positive`` negatives for each positive of every client."""
    excluded, count = view.excluded(), np.asarray(view.positives.lengths * per_positive)
    exclusions = excluded.indptr, excluded.values
    key = now.key(PURPOSE)
    return Ragged(*kernels.draw_outside(key, view.users, *exclusions, view.n_items, count))


# ---------------------------------------------------------------- devices


@dataclass(frozen=True)
class DeviceSamples:
    """The samples of a batch of devices in a round, in training order."""

    indptr: NDArray[np.int64]
    items: NDArray[np.int32]
    labels: NDArray[np.float32]
    epochs: int
    """Number of epochs, all of the same length."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of samples of each client in one epoch."""
        lengths: NDArray[np.int64] = np.diff(self.indptr) // self.epochs
        return lengths


@dataclass(frozen=True)
class Unshuffled:
    """One epoch of a batch of devices' samples: each positive, followed by its negatives."""

    indptr: NDArray[np.int64]
    items: NDArray[np.int32]
    labels: NDArray[np.float32]
    used: NDArray[np.int64]
    """Number of draws from each client's stream."""
    key: NDArray[np.uint64]
    users: NDArray[np.int32]

    def in_epochs(self, epochs: int) -> DeviceSamples:
        """Return the samples shuffled for several epochs."""
        indptr, order = kernels.shuffled_epochs(
            self.key, self.users, self.indptr, self.used, epochs
        )
        return DeviceSamples(indptr, self.items[order], self.labels[order], epochs)


def draw_unshuffled(
    view: TrainView, negatives: int, now: Round, purpose: str = PURPOSE
) -> Unshuffled:
    """Draw the samples of a round as `kernels.fit_inner_product` does."""
    key = now.key(purpose)
    drawn = kernels.list_samples(key, client_data(view), view.n_items, negatives)
    return Unshuffled(*drawn, key, view.users)


def draw_device_samples(
    view: TrainView,
    negatives: int,
    epochs: int,
    now: Round,
    *,
    purpose: str = PURPOSE,
    positive_above: float | None = None,
    ratings: bool = False,
) -> DeviceSamples:
    """Draw and shuffle the samples of a round as `kernels.fit_inner_product` does.

    With ``positive_above``, training rows with values up to it are negatives too. With ``ratings``,
    labels are the values of training rows, and 0 for drawn items.
    """
    drawn = draw_unshuffled(view, negatives, now, purpose)
    if ratings:
        drawn.labels[drawn.labels > 0] = view.values.values
    if positive_above is not None:
        drawn.labels[drawn.labels > 0] = view.values.values > positive_above
    return drawn.in_epochs(epochs)


def halves(samples: DeviceSamples, epochs: int) -> tuple[DeviceSamples, DeviceSamples]:
    """Split shuffled samples into a support set, repeated for some epochs, and a query set."""
    starts, lengths = samples.indptr[:-1], samples.lengths
    first = (lengths + 1) // 2

    def part(begin: NDArray[np.int64], size: NDArray[np.int64], times: int) -> DeviceSamples:
        indptr = np.concatenate([[0], np.cumsum(size * times)])
        owner = np.repeat(np.arange(len(size)), size * times)
        within = (np.arange(indptr[-1]) - indptr[owner]) % np.maximum(size, 1)[owner]
        at = begin[owner] + within
        return DeviceSamples(indptr, samples.items[at], samples.labels[at], times)

    return part(starts, first, epochs), part(starts + first, lengths - first, 1)


# ---------------------------------------------------------------- silos


@dataclass(frozen=True)
class SiloSamples:
    """The samples of a batch of silos in a round, and their order in each epoch."""

    indptr: NDArray[np.int64]
    """Offsets of the clients' samples in one epoch."""
    users: NDArray[np.int64]
    """Index of each sample's user among its client's users."""
    items: NDArray[np.int32]
    labels: NDArray[np.float32]
    order: Ragged
    """Indices of each client's samples, epoch after epoch."""
    epochs: int
    touched: Ragged
    """Distinct items of each client, in the order of their first use."""
    rows: NDArray[np.int64]
    """Index of each sample's item among the client's touched items."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of samples of each client in one epoch."""
        lengths: NDArray[np.int64] = np.diff(self.indptr)
        return lengths


def draw_silo_samples(view: TrainView, negatives: int, epochs: int, now: Round) -> SiloSamples:
    """Draw each user's samples from its own stream, and shuffle them by client.

    Every epoch has its own negatives, because a silo would overfit to fixed ones.
    """
    of_user, items, labels, drawn = kernels.list_samples(
        now.key(PURPOSE), client_data(view), view.n_items, negatives * epochs
    )
    clients = view.client_indptr
    first_user = np.repeat(clients[:-1], np.diff(clients))
    users = np.repeat(np.arange(len(view)) - first_user, np.diff(of_user))
    *touched, rows = kernels.number_by_first_use(of_user[clients], items, view.n_items)
    # A user who has interacted with all items has no negatives.
    per_epoch = np.where(drawn > 0, 1 + negatives, 1) * view.positives.lengths
    indptr = np.concatenate([[0], np.cumsum(per_epoch)])[clients]
    key = now.key("silo/order")
    none_used = np.zeros(len(indptr) - 1, np.int64)
    shuffled = kernels.shuffled_epochs(key, view.clients, indptr, none_used, epochs)
    at = kernels.samples_of_epochs(
        *shuffled, indptr, of_user, view.positives.lengths, clients, per_epoch, negatives, epochs
    )
    order = Ragged(shuffled[0], at)
    return SiloSamples(indptr, users, items, labels, order, epochs, Ragged(*touched), rows)
