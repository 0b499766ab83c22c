"""PFedRec: dual personalization on federated recommendation (Zhang et al., IJCAI 2023).

Shared: item table Q [m, d]. Private: score function (w_u, b_u), one linear layer (eq. 6), and the
item rows that the device trained last. Bi-level objective: eq. 5. Loss: binary cross-entropy, eq.
7, with negatives from the items without interaction, eq. 8. With ``score_function = "mlp"`` the
score function is an MLP (needs the 'neural' extra).

A round on device u (algorithm 1, ClientUpdate): start from the received Q; on each batch take a
step on (w, b) at rate ``lr`` and then, with the new (w, b), a step on the item rows at rate
lr * m * ``item_rate``; upload the deltas of the touched rows. Server (algorithm 1, line 6): the
unweighted mean over participants.

A device scores with its own table: the table that it received, with its own rows in place of the
received ones. Deviation from the paper: the simulation stores one copy of the last broadcast
(``received``) and each device's own rows in place of one table per device, so a device that did not
take part in a round scores on the broadcast of that round.
"""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import Total, Update
from hushrec.config import Width
from hushrec.data.views import TrainView
from hushrec.methods.base import (
    Fitted,
    ItemTables,
    Method,
    MethodConfig,
    OwnTable,
    PerClient,
    Private,
    PrivateFields,
    Shared,
    Tunable,
)
from hushrec.methods.shared.dual import (
    DUAL_SEARCH,
    DualConfig,
    kept_rows,
    own_rows,
    score_own_rows,
    table_of_one,
    without_own_rows,
)
from hushrec.streams import Round, Streams
from hushrec.training.samples import (
    Descent,
    apply_mean,
    deltas,
    first_score_function,
    initial_table,
    train_inner_product,
)


class PFedRecConfig(DualConfig):
    """Options of PFedRec."""

    score_function: Literal["linear", "mlp"] = "linear"
    """One linear layer, as in the paper, or an MLP, which needs the 'neural' extra."""
    hidden: tuple[Width, ...] = (16,)
    """Widths of the hidden layers of "mlp", between d inputs and one output."""


class PFedRec(Method, Tunable, OwnTable, ItemTables):
    """A shared item table, fine-tuned on each device, with a private score function."""

    name = "pfedrec"
    Config = PFedRecConfig
    config: PFedRecConfig
    search = DUAL_SEARCH
    own_table = ("rows",)

    def __init__(self, config: MethodConfig | None = None) -> None:
        super().__init__(config)
        if self.config.score_function == "mlp":
            _networks()  # raises MissingExtraError before a run begins

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw Q from N(0, init_std)."""
        table = initial_table(self.config.d, self.config.init_std, view.n_items, streams)
        return {"items": table, "received": table}

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep the score function and own rows; all devices start from one score function."""
        rows = own_rows(self.config, view)
        if self.config.score_function == "mlp":
            network = _networks().initial_row_network(self.config.d, self.config.hidden, streams)
            return {"rows": rows, **{name: PerClient(array) for name, array in network.items()}}
        vector, bias = first_score_function(self.config.d, streams)
        return {"vector": PerClient(vector), "bias": PerClient(bias), "rows": rows}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train the score function, then the rows (algorithm 1, ClientUpdate)."""
        config, table = self.config, shared["items"]
        descent = Descent(*config.rates(view.n_items), two_steps=True)
        if config.score_function == "mlp":
            kept, trained, losses = _networks().train_row_networks(
                view, now, table, _network(private), config.pace, descent
            )
        else:
            kept = {name: np.array(private[name]) for name in ("vector", "bias")}
            trained, losses = train_inner_product(
                view, now, table, kept["vector"], kept["bias"], config.pace, descent
            )
        update = Update(len(view), rows={"items": deltas(trained, table)})
        rows = kept_rows(trained, table, config.own_share)
        return Fitted(update, {**kept, "rows": rows}, losses)

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Add the mean delta (algorithm 1, line 6), and keep the table that was sent."""
        new = apply_mean(shared["items"], total, "items")
        return {"items": new, "received": shared["items"]}

    def download(self, shared: Shared) -> Shared:
        """Send the item table only."""
        return {"items": shared["items"]}

    def serving(self, shared: Shared) -> Shared:
        """Return the table that was sent last, which own rows are combined with."""
        return {"received": shared["received"]}

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Score with the device's own table."""
        if self.config.score_function == "mlp":
            scores: NDArray[np.float32] = _networks().score_row_networks(
                _network(private), shared["received"], private["rows"]
            )
            return scores
        vectors, biases = np.asarray(private["vector"]), np.asarray(private["bias"])
        return score_own_rows(shared["received"], private["rows"], vectors, biases)

    def with_global_table(self, shared: Shared, private: Private) -> tuple[Shared, Private]:
        """Replace own tables by the new mean (figure 3)."""
        return without_own_rows(shared, private)

    def item_tables(self, shared: Shared, private: Private) -> dict[str, NDArray[np.float32]]:
        """Return the own table (figure 2)."""
        return table_of_one(shared, private)


def _networks() -> ModuleType:
    """Import the training of networks, which needs torch; a linear score function does not."""
    from hushrec.training import networks

    return networks


def _network(private: Private) -> dict[str, NDArray[np.float32]]:
    return {name: np.asarray(array) for name, array in private.items() if name != "rows"}
