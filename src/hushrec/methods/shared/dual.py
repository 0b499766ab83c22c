"""Dual personalization of PFedRec (Zhang et al., 2023): devices score with their own rows.

A device's own table is the table that it received, with the rows that it trained in their place.
The server keeps the table that it sent last, ``received``, and the new mean, ``items``.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec.aggregation import ClientRows
from hushrec.data.views import TrainView
from hushrec.kernels import inner_product
from hushrec.methods.base import (
    Between,
    ItemTables,
    Method,
    OwnTable,
    PerClientRows,
    Private,
    SearchSpace,
    Shared,
    Tunable,
    no_own_table,
)
from hushrec.methods.shared.options import SEARCH, InnerProductConfig, SampledConfig

Array = NDArray[Any]

DUAL_SEARCH: SearchSpace = {**SEARCH, "own_share": Between(0.0, 1.0, log=False)}


class DualConfig(InnerProductConfig):
    """Options of methods that score with own rows."""

    own_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of its own step that a device adds to the received table for scoring: 1 is the paper's
    own table, 0 the shared table."""


class DualSwitchConfig(DualConfig):
    """Options of methods with optional dual personalization."""

    dual: bool = False
    """Whether to add PFedRec's dual personalization ("w/ DualPer")."""


class DualSwitch(Method, Tunable, OwnTable, ItemTables):
    """Base of methods with the option ``dual``."""

    config: DualSwitchConfig

    @property
    def search(self) -> SearchSpace:
        """Search space of the rates and, with ``dual``, of ``own_share``."""
        return DUAL_SEARCH if self.config.dual else SEARCH

    @property
    def own_table(self) -> tuple[str, ...]:
        """Names of the private row fields, with ``dual``."""
        return ("rows",) if self.config.dual else ()

    def with_global_table(self, shared: Shared, private: Private) -> tuple[Shared, Private]:
        """Replace own tables by the new mean."""
        if not self.config.dual:
            raise no_own_table(self.name)
        return without_own_rows(shared, private)

    def item_tables(self, shared: Shared, private: Private) -> dict[str, NDArray[np.float32]]:
        """Return the own table with ``dual``, otherwise the shared one."""
        return table_of_one(shared, private) if self.config.dual else {"shared": shared["items"]}

    def download(self, shared: Shared) -> Shared:
        """Send the new parameters."""
        return without(shared, "received")

    def serving(self, shared: Shared) -> Shared:
        """Return the table that was sent last with ``dual``, otherwise the new one."""
        return without(shared, "items") if self.config.dual else shared


def without(shared: Shared, name: str) -> Shared:
    """Return the shared parameters without one."""
    return {n: array for n, array in shared.items() if n != name}


def shared_after(dual: bool, items: Array, received: Array) -> dict[str, Array]:
    """Return the new table and, with dual personalization, the table that devices received."""
    return {"items": items, "received": received} if dual else {"items": items}


def own_rows(config: SampledConfig, view: TrainView) -> PerClientRows:
    """Declare the rows that a device trained last."""
    n_samples = view.positives.lengths * (1 + config.negatives)
    return PerClientRows(np.minimum(n_samples, view.n_items), config.d)


def kept_rows(trained: ClientRows, received: Array, share: float) -> ClientRows:
    """Return the rows that a device keeps: received rows plus a share of its steps."""
    if share == 1:
        return trained
    before = received[trained.ids]
    rows = before + np.float32(share) * (trained.rows - before)
    return ClientRows(trained.indptr, trained.ids, rows)


def score_own_rows(
    received: Array, own: Array | ClientRows, vectors: Array, biases: Array
) -> NDArray[np.float32]:
    """Score with the received table and each device's own rows."""
    assert isinstance(own, ClientRows)
    scores: NDArray[np.float32] = inner_product.inner_products(received, vectors, biases)
    inner_product.rescore_own_rows(scores, own.indptr, own.ids, own.rows, vectors, biases)
    return scores


def without_own_rows(shared: Shared, private: Private) -> tuple[Shared, Private]:
    """Return parameters with the new mean in place of every own table."""
    own = private["rows"]
    assert isinstance(own, ClientRows)
    empty = ClientRows(np.zeros_like(own.indptr), own.ids[:0], own.rows[:0])
    return {**shared, "received": shared["items"]}, {**private, "rows": empty}


def table_of_one(shared: Shared, private: Private) -> dict[str, NDArray[np.float32]]:
    """Return the own table of a single client: the received table with its own rows."""
    own = private["rows"]
    assert isinstance(own, ClientRows) and len(own.indptr) == 2, "one client"
    table = shared["received"].copy()
    table[own.ids] = own.rows
    return {"own": table}
