"""Local only: PFedRec with the federation switched off.

Every device keeps its own item table between rounds and trains it alone. Under the honest protocol
it can know nothing about items its user never touched, so it must score at chance on them; under
the published protocol it scores near 1, which is the proof that those figures are the leak.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregate import Total, Update
from hushrec.clients import TrainView
from hushrec.methods.base import (
    Fitted,
    Method,
    PerClient,
    PerClientTable,
    Private,
    PrivateFields,
    Shared,
)
from hushrec.methods.options import InnerProductConfig
from hushrec.rng import Round, Streams
from hushrec.training.inner_product import (
    Descent,
    first_score_function,
    initial_table,
    score_own_tables,
    train_inner_product,
)


class LocalOnly(Method):
    """A private item table and score function on every device; nothing is uploaded."""

    name = "local-only"
    Config = InnerProductConfig
    config: InnerProductConfig

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Share nothing."""
        return {}

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep a whole table and a score function; all devices start from the same draw."""
        vector, bias = first_score_function(self.config.d, streams)
        table = initial_table(self.config.d, self.config.init_std, view.n_items, streams)
        return {
            "table": PerClientTable(table),
            "vector": PerClient(vector),
            "bias": PerClient(bias),
        }

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train the own table and score function."""
        vectors, biases = np.array(private["vector"]), np.array(private["bias"])
        descent = Descent(*self.config.rates(view.n_items), two_steps=True)
        rows, losses = train_inner_product(
            view, now, np.asarray(private["table"]), vectors, biases, self.config.pace, descent
        )
        kept: Private = {"table": rows, "vector": vectors, "bias": biases}
        return Fitted(Update(len(view)), kept, losses)

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Change nothing."""
        return shared

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Score with the own table."""
        tables, vectors = np.asarray(private["table"]), np.asarray(private["vector"])
        return score_own_tables(tables, vectors, np.asarray(private["bias"]))
