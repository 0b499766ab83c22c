"""Training samples of a round, and models that score by an inner product.

Negatives are drawn uniformly from the items that a client has not interacted with. Samplers see a
`TrainView` only, so a held-out item is drawn as a negative like any other unseen item. An
inner-product model scores an item by the product of its row and a client vector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import ClientRows, Total
from hushrec.data.views import Ragged, TrainView
from hushrec.errors import ConfigError
from hushrec.io import require_memory
from hushrec.kernels import draws, inner_product, ragged
from hushrec.kernels.contrast import Contrast
from hushrec.kernels.draws import ClientData, DeviceSamples, Pace
from hushrec.kernels.inner_product import Additive, InnerProductModel, Rates
from hushrec.streams import Round, Streams

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
    return Ragged(*draws.draw_outside(key, view.users, *exclusions, view.n_items, count))


# ---------------------------------------------------------------- devices


def draw_device_samples(
    view: TrainView,
    negatives: int,
    epochs: int,
    now: Round,
    *,
    purpose: str = PURPOSE,
    positive_above: float | None = None,
    ratings: bool = False,
    relabel: Callable[[DeviceSamples], NDArray[np.float32]] | None = None,
) -> DeviceSamples:
    """Draw and shuffle the samples of a round as `inner_product.fit_inner_product` does.

    With ``positive_above``, training rows with values up to it are negatives too. With ``ratings``,
    labels are the values of training rows, and 0 for drawn items. ``relabel`` returns other labels
    for one epoch before it is shuffled: each positive, followed by its negatives.
    """
    key = now.key(purpose)
    drawn = draws.list_samples(key, client_data(view), view.n_items, negatives)
    indptr, items, labels, used = drawn
    if ratings:
        labels[labels > 0] = view.values.values
    if positive_above is not None:
        labels[labels > 0] = view.values.values > positive_above
    if relabel is not None:
        labels = relabel(DeviceSamples(indptr, items, labels, 1))
    whole, order = draws.shuffled_epochs(key, view.users, indptr, used, epochs)
    return DeviceSamples(whole, items[order], labels[order], epochs)


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
        return np.diff(self.indptr)


def draw_silo_samples(view: TrainView, negatives: int, epochs: int, now: Round) -> SiloSamples:
    """Draw each user's samples from its own stream, and shuffle them by client.

    Every epoch has its own negatives, because a silo would overfit to fixed ones.
    """
    of_user, items, labels, drawn = draws.list_samples(
        now.key(PURPOSE), client_data(view), view.n_items, negatives * epochs
    )
    clients = view.client_indptr
    first_user = np.repeat(clients[:-1], np.diff(clients))
    users = np.repeat(np.arange(len(view)) - first_user, np.diff(of_user))
    *touched, rows = ragged.number_by_first_use(of_user[clients], items, view.n_items)
    # A user who has interacted with all items has no negatives.
    width = np.where(drawn > 0, 1 + negatives, 1)
    starts = np.concatenate([[0], np.cumsum(width * view.positives.lengths)])
    indptr = starts[clients]
    key = now.key("silo/order")
    none_used = np.zeros(len(indptr) - 1, np.int64)
    order = Ragged(*draws.shuffled_epochs(key, view.clients, indptr, none_used, epochs))
    # A user's drawn samples are each positive followed by the negatives of all epochs; the samples
    # of an epoch are each positive followed by the negatives of that epoch.
    user = np.repeat(np.arange(len(view)), np.diff(starts))[order.values]
    owner = np.repeat(np.arange(len(indptr) - 1), order.lengths)
    epoch = (np.arange(len(owner)) - order.indptr[owner]) // np.diff(indptr)[owner]
    positive, number = np.divmod(order.values - starts[user], width[user])
    offset = np.where(number == 0, 0, epoch * negatives + number)
    drawn_width = np.where(drawn > 0, 1 + negatives * epochs, 1)[user]
    order = Ragged(order.indptr, of_user[user] + positive * drawn_width + offset)
    return SiloSamples(indptr, users, items, labels, order, epochs, Ragged(*touched), rows)


Array = NDArray[Any]


class Descent(NamedTuple):
    """SGD on a client's own parameters and its item rows."""

    own: float
    """Rate of the client's vector, or network."""
    item: float
    """Rate of the item rows."""
    two_steps: bool
    """Whether the step on the rows follows the step on the own parameters and uses the new ones."""
    decay: float = 1.0
    """Factor on both rates after every batch; rates start again in each round."""
    clip: float | None = None
    """Bound of the norm of the joint gradient of a step."""

    def check(self, numbers: np.dtype[Any]) -> None:
        """Refuse rates that overflow this dtype."""
        if max(self.own, self.item) > np.finfo(numbers).max:
            raise ConfigError(
                f"an item rate of {self.item:g} is too large: use a smaller lr or item_rate"
            )


def initial_table(
    d: int, std: float, n_items: int, streams: Streams, purpose: str = "init/items"
) -> Array:
    """Draw the initial item table."""
    # The table, its successor and two threads' exact sums are in memory together.
    require_memory(6 * 4 * n_items * d, f"an item table of width d={d}", "a smaller d")
    drawn = streams.generator(purpose).standard_normal((n_items, d), np.float32)
    return drawn * np.float32(std)


def first_vector(d: int, std: float, streams: Streams) -> Array:
    """Draw the initial user vector of all devices."""
    return streams.generator("init/vector").standard_normal(d, np.float32) * np.float32(std)


def first_score_function(d: int, streams: Streams) -> tuple[Array, Array]:
    """Draw the initial vector and bias of all devices' linear layer."""
    bound = 1 / np.sqrt(d)
    drawn = streams.generator("init/score-function").uniform(-bound, bound, d + 1)
    return drawn[:d].astype(np.float32), np.asarray(drawn[d], np.float32)


def train_inner_product(
    view: TrainView,
    now: Round,
    table: Array,
    vectors: Array,
    biases: Array | None,
    pace: Pace,
    descent: Descent,
    term: Additive | Contrast | None = None,
) -> tuple[ClientRows, NDArray[np.float64]]:
    """Train a batch of clients (`inner_product.fit_inner_product`).

    Clients start from ``table`` [items, d], or from their own tables [clients, items, d]. ``term``
    is what the method's loss has beside the cross-entropy.
    ``vectors`` and ``biases`` change in place. Returns the touched rows after training, and each
    client's mean loss.
    """
    descent.check(table.dtype)
    number = table.dtype.type
    own_tables = table if table.ndim == 3 else None
    received = table if own_tables is None else np.zeros(table.shape[1:], table.dtype)
    still = np.zeros(len(view), table.dtype) if biases is None else biases
    indptr, ids, rows, losses = inner_product.fit_inner_product(
        now.key(PURPOSE),
        client_data(view),
        InnerProductModel(received, vectors, still, biases is not None),
        pace,
        Rates(number(descent.own), number(descent.item), number(descent.decay)),
        descent.two_steps,
        own_tables,
        term if isinstance(term, Additive) else None,
        None if descent.clip is None else number(descent.clip),
        term if isinstance(term, Contrast) else None,
    )
    return ClientRows(indptr, ids, rows), losses


def deltas(trained: ClientRows, table: Array) -> ClientRows:
    """Return the trained rows as differences from the received table."""
    return replace(trained, base=table)


def apply_mean(table: Array, total: Total, name: str) -> Array:
    """Add the mean delta over all clients; an untouched row counts as a delta of 0."""
    out = table.copy()
    if name in total.rows:
        ids, summed = total.rows[name]
        out[ids] += (summed / total.clients).astype(out.dtype)
    return out


def score_inner_product(table: Array, vectors: Array, biases: Array | None = None) -> Array:
    """Score every item by its row in one table [items, d], or in each client's [clients, …]."""
    table, vectors = table.astype(np.float32, copy=False), vectors.astype(np.float32, copy=False)
    biases = np.zeros(len(vectors), np.float32) if biases is None else biases
    if table.ndim == 2:
        return np.asarray(inner_product.inner_products(table, vectors, biases))
    scores = np.empty(table.shape[:2], np.float32)
    for c in range(len(table)):
        own = slice(c, c + 1)
        scores[own] = inner_product.inner_products(table[c], vectors[own], biases[own])
    return scores


def with_rows(tables: Array, rows: ClientRows) -> Array:
    """Return a copy of the tables with the trained rows written into it."""
    out, clients = tables.copy(), np.arange(len(tables))
    ragged.put_rows(out, clients, clients, rows.indptr, rows.ids, rows.rows)
    return out
