"""The family that scores an item by an inner product with its row: options, training, scoring."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec import kernels
from hushrec.aggregate import RowStack, Total
from hushrec.clients import TrainView
from hushrec.errors import ConfigError
from hushrec.memory import require_memory
from hushrec.methods.base import MethodConfig
from hushrec.negatives import PURPOSE
from hushrec.rng import Streams

Array = NDArray[Any]
NO_TABLE = np.zeros((0, 0, 0), np.float32)


class InnerProductConfig(MethodConfig):
    """Options of every member of the family."""

    d: Annotated[int, Field(ge=1)] = 32
    """Width of an item row."""
    lr: Annotated[float, Field(gt=0)] = 0.1
    """Rate of the client's own vector."""
    item_rate: Annotated[float, Field(ge=0)] = 80.0
    """Item rows move at lr * (number of items) * item_rate: the loss is a mean over the batch and
    the server divides by the number of clients, so useful rates are large."""
    negatives: Annotated[int, Field(ge=1)] = 4
    """Drawn per positive, afresh every round."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over the client's samples per round."""
    batch: Annotated[int, Field(ge=1)] = 256
    """Samples per step; the loss is a mean over them."""
    init_std: Annotated[float, Field(gt=0)] = 1.0
    """Standard deviation of the item rows before training."""


def initial_table(config: InnerProductConfig, n_items: int, streams: Streams) -> Array:
    """Draw the item table before training."""
    # The table, its successor and two threads' exact sums live at the same time.
    require_memory(
        6 * 4 * n_items * config.d, f"an item table of width d={config.d}", "a smaller d"
    )
    drawn = streams.generator("init/items").standard_normal((n_items, config.d), np.float32)
    return drawn * np.float32(config.init_std)


def train(
    config: InnerProductConfig,
    view: TrainView,
    table: Array,
    vectors: Array,
    biases: Array | None,
    streams: Streams,
    round_number: int,
    *,
    own_tables: Array = NO_TABLE,
    two_steps: bool,
) -> tuple[RowStack, NDArray[np.float64]]:
    """Train a stack of clients; ``vectors``, ``biases`` and ``own_tables`` change in place.

    Returns the touched rows as the clients left them, and each client's mean loss.
    """
    item_rate = config.lr * view.n_items * config.item_rate
    if max(config.lr, item_rate) > np.finfo(table.dtype).max:
        raise ConfigError(
            f"an item rate of {item_rate:g} is too large: use a smaller lr or item_rate"
        )
    excluded = view.excluded()
    indptr, ids, rows, losses = kernels.fit_inner_product(
        streams.key(PURPOSE, round_number),
        view.users,
        view.positives.indptr,
        view.positives.values,
        excluded.indptr,
        excluded.values,
        table,
        own_tables,
        vectors,
        np.zeros(len(view), table.dtype) if biases is None else biases,
        config.negatives,
        config.epochs,
        config.batch,
        table.dtype.type(config.lr),
        table.dtype.type(item_rate),
        biases is not None,
        two_steps,
    )
    return RowStack(indptr, ids, rows), losses


def deltas(trained: RowStack, table: Array) -> RowStack:
    """Return the trained rows as differences from the received table."""
    return replace(trained, base=table)


def apply_mean(table: Array, total: Total, name: str) -> Array:
    """Add the mean delta; a row that a client left alone counts as unchanged there."""
    out = table.copy()
    if name in total.rows:
        ids, summed = total.rows[name]
        kernels.add_mean(out, ids, summed, total.clients)
    return out
