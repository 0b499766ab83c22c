"""FedMF: federated matrix factorisation (Chai et al., 2020, as measured by Zhang et al., 2023).

Shared: item table Q [m, d]. Private: user vector p_u [d]. The score is <q_i, p_u>.
A round on a device: SGD on the binary cross-entropy of positives and sampled negatives, one joint
step per batch on p_u and the touched rows; the device uploads the deltas of these rows, and the
server adds their mean.

``dual`` adds the dual personalization of PFedRec (Zhang et al., 2023, section 6.4, table 3): the
step on the rows follows the step on the vector and uses the new vector, and a device scores with
its own rows on the table that it received, not with the new mean.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec.aggregation import ClientRows, Total, Update
from hushrec.data.views import TrainView
from hushrec.methods.base import Fitted, PerClient, Private, PrivateFields, Shared, Traits
from hushrec.methods.shared.dual import (
    DualSwitch,
    DualSwitchConfig,
    kept_rows,
    own_rows,
    score_own_rows,
    shared_after,
)
from hushrec.streams import Round, Streams
from hushrec.training.samples import (
    Descent,
    apply_mean,
    deltas,
    first_vector,
    initial_table,
    score_inner_product,
    train_inner_product,
)

Array = NDArray[Any]


class FedMFConfig(DualSwitchConfig):
    """Options of FedMF; defaults tuned on the validation items of ML-100K, honest protocol."""

    item_rate: Annotated[float, Field(ge=0)] = 60.0
    """Learning rate of item rows: lr * (number of items) * item_rate."""
    init_std: Annotated[float, Field(gt=0)] = 0.1
    """Standard deviation of the initial item rows and user vector."""


class FedMF(DualSwitch):
    """Federated matrix factorisation with a shared item table and private user vectors."""

    name = "fedmf"
    Config = FedMFConfig
    config: FedMFConfig
    traits = Traits(rounds=200)

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the item table."""
        table = initial_table(self.config.d, self.config.init_std, view.n_items, streams)
        return shared_after(self.config.dual, table, table)

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep the user vector, and own rows with ``dual``; all devices start from one draw."""
        vector = PerClient(first_vector(self.config.d, self.config.init_std, streams))
        rows = {"rows": own_rows(self.config, view)} if self.config.dual else {}
        return {"vector": vector, **rows}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train vectors and rows; upload the deltas of the rows."""
        config, table, vectors = self.config, shared["items"], np.array(private["vector"])
        descent = Descent(*config.rates(view.n_items), two_steps=config.dual)
        trained, losses = train_inner_product(view, now, table, vectors, None, config.pace, descent)
        return self._fitted(table, vectors, trained, losses)

    def _fitted(
        self, table: Array, vectors: Array, trained: ClientRows, losses: NDArray[np.float64]
    ) -> Fitted:
        """Return the deltas of the trained rows as upload, and the private parameters."""
        config, update = self.config, Update(len(vectors), {"items": deltas(trained, table)})
        rows = {"rows": kept_rows(trained, table, config.own_share)} if config.dual else {}
        return Fitted(update, {"vector": vectors, **rows}, losses)

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Add the mean delta."""
        new = apply_mean(shared["items"], total, "items")
        return shared_after(self.config.dual, new, shared["items"])

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Score with the new table, or, with ``dual``, with own rows on the received table."""
        vectors = np.asarray(private["vector"])
        if self.config.dual:
            none = np.zeros(len(vectors), np.float32)
            return score_own_rows(shared["received"], private["rows"], vectors, none)
        return score_inner_product(shared["items"], vectors)
