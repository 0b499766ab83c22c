"""Methods with one shared item table, and the dual personalization of PFedRec (Zhang et al., 2023).

With dual personalization (section 6.4, table 3) each batch takes a step on the client's own
parameters and then, with the new ones, a step on the item rows. A device scores with its own table:
the table that it received, with the rows that it trained in place of the received ones.

Deviation from the paper: the server keeps one copy of the table that it sent last, ``received``,
beside the new mean, ``items``, and a device its own rows, not a whole table. So a device that did
not take part in a round scores on the table that was sent in that round.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import ClientRows, Total, Update
from hushrec.config import Share
from hushrec.data.views import TrainView
from hushrec.kernels import inner_product
from hushrec.methods import base, forms
from hushrec.methods.base import Array, Fitted, Scores, SearchSpace, Shared
from hushrec.methods.shared.options import SEARCH, InnerProductConfig
from hushrec.private import PerClientRows, Private, rows_in
from hushrec.streams import Streams
from hushrec.training import samples as training


class DualConfig(InnerProductConfig):
    """Options of methods that score with own rows."""

    own_share: Share = 1.0
    """Share of its own step that a device adds to the received table for scoring: 1 is the paper's
    own table, 0 the shared table."""


class DualSwitchConfig(DualConfig):
    """Options of methods with optional dual personalization."""

    dual: bool = False
    """Whether to add PFedRec's dual personalization ("w/ DualPer")."""


class SharedTable(base.Method, base.ExportsUser, base.ItemTables, base.OwnTable, base.Tunable):
    """Base of methods with one shared item table, to which the server adds the mean delta."""

    config: DualConfig

    @property
    def dual(self) -> bool:
        """Whether devices score with their own rows."""
        return not isinstance(self.config, DualSwitchConfig) or self.config.dual

    @property
    def search(self) -> SearchSpace:
        """Search space of the rates and, with dual personalization, of ``own_share``."""
        return {**SEARCH, "own_share": base.Between(0.0, 1.0, log=False)} if self.dual else SEARCH

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the item table from N(0, init_std)."""
        config = self.config
        table = training.initial_table(config.d, config.init_std, view.n_items, streams)
        return {"items": table, "received": table} if self.dual else {"items": table}

    def own_rows(self, view: TrainView) -> dict[str, PerClientRows]:
        """Declare the rows that a device trained last, with dual personalization."""
        n_samples = view.positives.lengths * (1 + self.config.negatives)
        rows = PerClientRows(np.minimum(n_samples, view.n_items), self.config.d)
        return {"rows": rows} if self.dual else {}

    def fitted(
        self,
        table: Array,
        own: Private,
        trained: ClientRows,
        losses: NDArray[np.float64],
        dense: Shared | None = None,
    ) -> Fitted:
        """Upload the deltas of the trained rows, and keep own parameters.

        With dual personalization keep own rows too: received rows plus a share of the own steps.
        """
        deltas = {"items": training.deltas(trained, table)}
        update, share = Update(len(trained.indptr) - 1, deltas, dense or {}), self.config.own_share
        if not self.dual:
            return Fitted(update, own, losses)
        if share < 1:
            before = table[trained.ids]
            rows = before + np.float32(share) * (trained.rows - before)
            trained = ClientRows(trained.indptr, trained.ids, rows)
        return Fitted(update, {**own, "rows": trained}, losses)

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Add the mean delta and, with dual personalization, keep the table that was sent."""
        new = training.apply_mean(shared["items"], total, "items")
        return {"items": new, "received": shared["items"]} if self.dual else {"items": new}

    def download(self, shared: Shared) -> Shared:
        """Send the new parameters."""
        return {name: array for name, array in shared.items() if name != "received"}

    def serving(self, shared: Shared) -> Shared:
        """Return the table that was sent last in place of the new one, if own rows belong to it."""
        return {n: a for n, a in shared.items() if n != "items"} if self.dual else shared

    @property
    def own_table(self) -> tuple[str, ...]:
        """Names of the private row fields."""
        return ("rows",) if self.dual else ()

    def with_global_table(self, shared: Shared, private: Private) -> tuple[Shared, Private]:
        """Replace own tables by the new mean."""
        if not self.dual:
            raise base.no_own_table(self.name)
        own = rows_in(private, "rows")
        empty = ClientRows(np.zeros_like(own.indptr), own.ids[:0], own.rows[:0])
        return {**shared, "received": shared["items"]}, {**private, "rows": empty}

    def item_tables(self, shared: Shared, private: Private) -> dict[str, Array]:
        """Return the own table of a single client, if it has one, otherwise the shared one."""
        if not self.dual:
            return {"shared": shared["items"]}
        own = rows_in(private, "rows")
        assert len(own.indptr) == 2, "one client"
        table = shared["received"].copy()
        table[own.ids] = own.rows
        return {"own": table}

    def user_form(self, shared: Shared, private: Private, history: TrainView) -> forms.ItemNetworks:
        """Return the table of `item_tables` with the own vector, bias and network.

        Layers that are shared are part of the network too.
        """
        (table,) = self.item_tables(shared, private).values()
        layers = {name: array for name, array in shared.items() if name.startswith("layer")}
        return forms.ItemNetworks([forms.RowNetwork.of(table, {**layers, **base.of_one(private)})])


def score_own_rows(received: Array, private: Private, vectors: Array, biases: Array) -> Scores:
    """Score with the received table and each device's own rows."""
    own = rows_in(private, "rows")
    scores: Scores = inner_product.inner_products(received, vectors, biases)
    inner_product.rescore_own_rows(scores, own.indptr, own.ids, own.rows, vectors, biases)
    return scores


def without_rows(private: Private) -> dict[str, Array]:
    """Return the private vector, bias and network."""
    return {name: np.asarray(array) for name, array in private.items() if name != "rows"}
