"""The family that scores an item by an inner product with its row: options, training, scoring."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec import kernels
from hushrec.aggregate import ClientRows, Total
from hushrec.clients import TrainView
from hushrec.errors import ConfigError
from hushrec.memory import require_memory
from hushrec.methods.base import (
    Between,
    Method,
    MethodConfig,
    PerClientRows,
    Private,
    SearchSpace,
    Shared,
)
from hushrec.negatives import PURPOSE
from hushrec.rng import Round, Streams

Array = NDArray[Any]
NO_TABLE = np.zeros((0, 0, 0), np.float32)


class SampledConfig(MethodConfig):
    """How a client's samples are made and gone through."""

    d: Annotated[int, Field(ge=1)] = 32
    """Width of an item row."""
    negatives: Annotated[int, Field(ge=1, le=1000)] = 4
    """Drawn per positive, afresh every round."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over the client's samples per round."""
    batch: Annotated[int, Field(ge=1)] = 256
    """Samples per step; the loss is a mean over them."""


class InnerProductConfig(SampledConfig):
    """Options of the members that train one table."""

    lr: Annotated[float, Field(gt=0)] = 0.1
    """Rate of the client's own vector."""
    item_rate: Annotated[float, Field(ge=0)] = 80.0
    """Item rows move at lr * (number of items) * item_rate: the loss is a mean over the batch and
    the server divides by the number of clients, so useful rates are large."""
    init_std: Annotated[float, Field(gt=0)] = 1.0
    """Standard deviation of the item rows before training."""


class DualConfig(InnerProductConfig):
    """Options of the members that score with their own rows."""

    own_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """How much of its own step a device scores with, on top of the received table: 1 is the paper's
    own table, 0 the shared one alone."""


SEARCH: SearchSpace = {
    "lr": Between(0.02, 1.0),
    "item_rate": Between(1.0, 100.0),
    "init_std": Between(0.03, 1.0),
}
"""Where `hushrec tune` looks: low item rates keep the devices close to the shared table."""
DUAL_SEARCH: SearchSpace = {**SEARCH, "own_share": Between(0.0, 1.0, log=False)}


class DualSwitch(Method):
    """Base of the members with the switch ``dual``: what the own rows it makes are good for."""

    @property
    def search(self) -> SearchSpace:
        """Look for the rates, and with own rows for how much of them to score with."""
        return DUAL_SEARCH if self.config.dual else SEARCH

    @property
    def own_table(self) -> tuple[str, ...]:
        """Name the own rows of dual personalization."""
        return ("rows",) if self.config.dual else ()

    def with_global_table(self, shared: Shared, private: Private) -> tuple[Shared, Private]:
        """Leave the own rows out, and take the newest mean."""
        if not self.config.dual:
            return super().with_global_table(shared, private)
        return without_own_rows(shared, private)


def initial_table(
    d: int, std: float, n_items: int, streams: Streams, purpose: str = "init/items"
) -> Array:
    """Draw an item table before training."""
    # The table, its successor and two threads' exact sums live at the same time.
    require_memory(6 * 4 * n_items * d, f"an item table of width d={d}", "a smaller d")
    drawn = streams.generator(purpose).standard_normal((n_items, d), np.float32)
    return drawn * np.float32(std)


def first_vector(d: int, std: float, streams: Streams) -> Array:
    """Draw the user vector that all devices start from."""
    return streams.generator("init/vector").standard_normal(d, np.float32) * np.float32(std)


def train(
    config: InnerProductConfig,
    view: TrainView,
    table: Array,
    vectors: Array,
    biases: Array | None,
    now: Round,
    *,
    two_steps: bool,
    **options: Any,
) -> tuple[ClientRows, NDArray[np.float64]]:
    """Train a stack of clients at the rates of `InnerProductConfig`; see `train_at`."""
    rates = config.lr, config.lr * view.n_items * config.item_rate
    return train_at(
        rates,
        config,
        view,
        table,
        vectors,
        biases,
        now,
        two_steps=two_steps,
        **options,
    )


def train_at(
    rates: tuple[float, float],
    config: SampledConfig,
    view: TrainView,
    table: Array,
    vectors: Array,
    biases: Array | None,
    now: Round,
    *,
    two_steps: bool,
    own_tables: Array | None = None,
    additive: tuple[Any, ...] | None = None,
    rate_decay: float | None = None,
    clip: float | None = None,
) -> tuple[ClientRows, NDArray[np.float64]]:
    """Train a stack of clients at the given (vector, item) rates.

    They start from ``table``, or each from its own one. ``vectors`` and ``biases`` change in place.
    Returns the touched rows as the clients left them, and each client's mean loss. The other
    options are those of `kernels.fit_inner_product`.
    """
    if max(rates) > np.finfo(table.dtype).max:
        raise ConfigError(
            f"an item rate of {rates[1]:g} is too large: use a smaller lr or item_rate"
        )
    number = table.dtype.type
    excluded = view.excluded()
    indptr, ids, rows, losses = kernels.fit_inner_product(
        now.key(PURPOSE),
        view.users,
        view.positives.indptr,
        view.positives.values,
        excluded.indptr,
        excluded.values,
        table,
        NO_TABLE,
        vectors,
        np.zeros(len(view), table.dtype) if biases is None else biases,
        config.negatives,
        config.epochs,
        config.batch,
        number(rates[0]),
        number(rates[1]),
        biases is not None,
        two_steps,
        own_tables,
        additive,
        None if rate_decay is None else number(rate_decay),
        None if clip is None else number(clip),
    )
    return ClientRows(indptr, ids, rows), losses


def deltas(trained: ClientRows, table: Array) -> ClientRows:
    """Return the trained rows as differences from the received table."""
    return replace(trained, base=table)


def apply_mean(table: Array, total: Total, name: str) -> Array:
    """Add the mean delta; a row that a client left alone counts as unchanged there."""
    out = table.copy()
    if name in total.rows:
        ids, summed = total.rows[name]
        kernels.add_mean(out, ids, summed, total.clients)
    return out


def shared_after(dual: bool, items: Array, received: Array) -> dict[str, Array]:
    """Return the shared table, with dual personalization beside the one the devices received."""
    return {"items": items, "received": received} if dual else {"items": items}


def own_rows(config: SampledConfig, view: TrainView) -> PerClientRows:
    """Declare the rows a device trained last: the own table of dual personalization."""
    n_samples = view.positives.lengths * (1 + config.negatives)
    return PerClientRows(np.minimum(n_samples, view.n_items), config.d)


def kept_rows(trained: ClientRows, received: Array, share: float) -> ClientRows:
    """Return the rows a device keeps to score with: a share of the way from the received ones."""
    if share == 1:
        return trained
    steps = kernels.row_differences(trained.rows, trained.ids, received)
    rows = received[trained.ids] + np.float32(share) * steps
    return ClientRows(trained.indptr, trained.ids, rows)


def score_own_rows(
    received: Array, own: Array | ClientRows, vectors: Array, biases: Array
) -> NDArray[np.float32]:
    """Score with the received table, each device's own rows in place (dual personalization)."""
    assert isinstance(own, ClientRows)
    scores = kernels.inner_products(received, vectors, biases)
    kernels.rescore_own_rows(scores, own.indptr, own.ids, own.rows, vectors, biases)
    return scores


def without_own_rows(shared: Shared, private: Private) -> tuple[Shared, Private]:
    """Return parameters with the newest mean in place of every own table (dual personalization)."""
    nobody = ClientRows(
        np.zeros(len(np.asarray(private["vector"])) + 1, np.int64),
        np.zeros(0, np.int32),
        np.zeros((0, shared["items"].shape[1]), np.float32),
    )
    return {**shared, "received": shared["items"]}, {**private, "rows": nobody}


def score_own_tables(tables: Array, vectors: Array, biases: Array) -> NDArray[np.float32]:
    """Score every item with each client's own table."""
    scores = np.empty(tables.shape[:2], np.float32)
    for c in range(len(tables)):
        own = slice(c, c + 1)
        scores[own] = kernels.inner_products(tables[c], vectors[own], biases[own])
    return scores


def with_rows(tables: Array, rows: ClientRows) -> Array:
    """Return whole tables with the trained rows in place."""
    out, everybody = tables.copy(), np.arange(len(tables))
    kernels.put_rows(out, everybody, everybody, rows.indptr, rows.ids, rows.rows)
    return out
