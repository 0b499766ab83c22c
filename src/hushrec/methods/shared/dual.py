"""Dual personalization (Zhang et al., 2023): devices score with their own rows.

A device's own table is the table it received, with the rows it trained in place. The server keeps
one copy of what it sent last, ``received``, beside the newest mean, ``items``.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec import kernels
from hushrec.aggregation import ClientRows
from hushrec.data.views import TrainView
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
    """Options of the members that score with their own rows."""

    own_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """How much of its own step a device scores with, on top of the received table: 1 is the paper's
    own table, 0 the shared one alone."""


class DualSwitchConfig(DualConfig):
    """Options of the members that may do so."""

    dual: bool = False
    """Whether to add PFedRec's dual personalization ("w/ DualPer")."""


class DualSwitch(Method, Tunable, OwnTable, ItemTables):
    """Base of the members with the switch ``dual``: what the own rows it makes are good for."""

    config: DualSwitchConfig

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
            raise no_own_table(self.name)
        return without_own_rows(shared, private)

    def item_tables(self, shared: Shared, private: Private) -> dict[str, NDArray[np.float32]]:
        """Return the own table of dual personalization, and else the shared one."""
        return table_of_one(shared, private) if self.config.dual else {"shared": shared["items"]}

    def download(self, shared: Shared) -> Shared:
        """Send what is newest."""
        return without(shared, "received")

    def serving(self, shared: Shared) -> Shared:
        """Send what was received, with dual personalization, and else what is newest."""
        return without(shared, "items") if self.config.dual else shared


def without(shared: Shared, name: str) -> Shared:
    """Return the shared parameters but for one."""
    return {n: array for n, array in shared.items() if n != name}


def shared_after(dual: bool, items: Array, received: Array) -> dict[str, Array]:
    """Return the shared table, with dual personalization beside the one the devices received."""
    return {"items": items, "received": received} if dual else {"items": items}


def own_rows(config: SampledConfig, view: TrainView) -> PerClientRows:
    """Declare the rows a device trained last."""
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
    """Score with the received table, each device's own rows in place."""
    assert isinstance(own, ClientRows)
    scores: NDArray[np.float32] = kernels.inner_products(received, vectors, biases)
    kernels.rescore_own_rows(scores, own.indptr, own.ids, own.rows, vectors, biases)
    return scores


def without_own_rows(shared: Shared, private: Private) -> tuple[Shared, Private]:
    """Return parameters with the newest mean in place of every own table."""
    own = private["rows"]
    assert isinstance(own, ClientRows)
    nobody = ClientRows(np.zeros_like(own.indptr), own.ids[:0], own.rows[:0])
    return {**shared, "received": shared["items"]}, {**private, "rows": nobody}


def table_of_one(shared: Shared, private: Private) -> dict[str, NDArray[np.float32]]:
    """Return the table of the only client: the received one with its own rows in place."""
    own = private["rows"]
    assert isinstance(own, ClientRows) and len(own.indptr) == 2, "one client"
    table = shared["received"].copy()
    table[own.ids] = own.rows
    return {"own": table}
