"""Models that score an item by the inner product of its row and a client vector."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hushrec import kernels
from hushrec.aggregation import ClientRows, Total
from hushrec.data.views import TrainView
from hushrec.errors import ConfigError
from hushrec.io.memory import require_memory
from hushrec.kernels.draws import Pace
from hushrec.kernels.inner_product import Additive, InnerProductModel, Rates
from hushrec.streams import Round, Streams
from hushrec.training.samples import PURPOSE, client_data

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
    additive: Additive | None = None,
) -> tuple[ClientRows, NDArray[np.float64]]:
    """Train a batch of clients (`kernels.fit_inner_product`).

    Clients start from ``table`` [items, d], or from their own tables [clients, items, d].
    ``vectors`` and ``biases`` change in place. Returns the touched rows after training, and each
    client's mean loss.
    """
    descent.check(table.dtype)
    number = table.dtype.type
    own_tables = table if table.ndim == 3 else None
    received = table if own_tables is None else np.zeros(table.shape[1:], table.dtype)
    still = np.zeros(len(view), table.dtype) if biases is None else biases
    indptr, ids, rows, losses = kernels.fit_inner_product(
        now.key(PURPOSE),
        client_data(view),
        InnerProductModel(received, vectors, still, biases is not None),
        pace,
        Rates(number(descent.own), number(descent.item), number(descent.decay)),
        descent.two_steps,
        own_tables,
        additive,
        None if descent.clip is None else number(descent.clip),
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
        kernels.add_mean(out, ids, summed, total.clients)
    return out


def score_inner_product(table: Array, vectors: Array) -> NDArray[np.float32]:
    """Score every item by its row, without a bias."""
    scores: NDArray[np.float32] = kernels.inner_products(
        table.astype(np.float32, copy=False),
        vectors.astype(np.float32, copy=False),
        np.zeros(len(vectors), np.float32),
    )
    return scores


def score_own_tables(tables: Array, vectors: Array, biases: Array) -> NDArray[np.float32]:
    """Score every item with each client's own table."""
    scores = np.empty(tables.shape[:2], np.float32)
    for c in range(len(tables)):
        own = slice(c, c + 1)
        scores[own] = kernels.inner_products(tables[c], vectors[own], biases[own])
    return scores


def with_rows(tables: Array, rows: ClientRows) -> Array:
    """Return a copy of the tables with the trained rows written into it."""
    out, clients = tables.copy(), np.arange(len(tables))
    kernels.put_rows(out, clients, clients, rows.indptr, rows.ids, rows.rows)
    return out
