"""PFedRec: dual personalization on federated recommendation (Zhang et al., IJCAI 2023).

Shared: item table Q [m, d]. Private: score function (w_u, b_u), one linear layer (eq. 6), and the
item rows that the device trained last. Bi-level objective: eq. 5. Loss: binary cross-entropy, eq.
7, with negatives from the items without interaction, eq. 8. With ``score_function = "mlp"`` the
score function is an MLP (needs the 'neural' extra).

A round on device u (algorithm 1, ClientUpdate): start from the received Q; on each batch take a
step on (w, b) at rate ``lr`` and then, with the new (w, b), a step on the item rows at rate
lr * m * ``item_rate``; upload the deltas of the touched rows. Server (algorithm 1, line 6): the
unweighted mean over participants. A device scores with its own table (`shared.dual`).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hushrec.config import Width
from hushrec.data.views import TrainView
from hushrec.methods import base
from hushrec.methods.base import Fitted, MethodConfig, Reason, Scores, Shared
from hushrec.methods.shared.dual import DualConfig, SharedTable, score_own_rows, without_rows
from hushrec.methods.shared.options import networks
from hushrec.private import PerClient, Private, PrivateFields, rows_in
from hushrec.streams import Round, Streams
from hushrec.training.samples import Descent, first_score_function, train_inner_product


class PFedRecConfig(DualConfig):
    """Options of PFedRec."""

    score_function: Literal["linear", "mlp"] = "linear"
    """One linear layer, as in the paper, or an MLP, which needs the 'neural' extra."""
    hidden: tuple[Width, ...] = (16,)
    """Widths of the hidden layers of "mlp", between d inputs and one output."""


class PFedRec(SharedTable, base.Explains):
    """A shared item table, fine-tuned on each device, with a private score function."""

    name = "pfedrec"
    Config = PFedRecConfig
    config: PFedRecConfig

    def __init__(self, config: MethodConfig | None = None) -> None:
        super().__init__(config)
        if self.config.score_function == "mlp":
            networks()  # raises MissingExtraError before a run begins

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep the score function and own rows; all devices start from one score function."""
        if self.config.score_function == "mlp":
            network = networks().initial_row_network(self.config.d, self.config.hidden, streams)
            own = {name: PerClient(array) for name, array in network.items()}
            return {**self.own_rows(view), **own}
        vector, bias = first_score_function(self.config.d, streams)
        return {"vector": PerClient(vector), "bias": PerClient(bias), **self.own_rows(view)}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train the score function, then the rows (algorithm 1, ClientUpdate)."""
        config, table = self.config, shared["items"]
        descent = Descent(*config.rates(view.n_items), two_steps=True)
        if config.score_function == "mlp":
            kept, trained, losses = networks().train_row_networks(
                view, now, table, without_rows(private), config.pace, descent
            )
        else:
            kept = {name: np.array(private[name]) for name in ("vector", "bias")}
            trained, losses = train_inner_product(
                view, now, table, kept["vector"], kept["bias"], config.pace, descent
            )
        return self.fitted(table, kept, trained, losses)

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Score with the device's own table."""
        if self.config.score_function == "mlp":
            own = without_rows(private), shared["received"], private["rows"]
            return np.asarray(networks().score_row_networks(*own))
        vectors, biases = np.asarray(private["vector"]), np.asarray(private["bias"])
        return score_own_rows(shared["received"], private, vectors, biases)

    @property
    def unexplained(self) -> str | None:
        """Why no reason is given with an MLP; a linear score function has contributions."""
        return base.NETWORK if self.config.score_function == "mlp" else None

    def contributions(
        self, shared: Shared, private: Private, history: TrainView, items: NDArray[np.int32]
    ) -> list[list[Reason]]:
        """Compare the received row with the change that the device made to it."""
        received, own = shared["received"], rows_in(private, "rows")
        changes = np.zeros((*items.shape, self.config.d), np.float32)
        for client, listed in enumerate(items):
            mine = slice(own.indptr[client], own.indptr[client + 1])
            _, at, row = np.intersect1d(listed, own.ids[mine], return_indices=True)
            changes[client, at] = own.rows[mine][row] - received[listed[at]]
        vectors = np.asarray(private["vector"])
        by_shared = np.einsum("ckd,cd->ck", received[items], vectors)
        return base.larger_table(items, by_shared, np.einsum("ckd,cd->ck", changes, vectors))
