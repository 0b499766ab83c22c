"""FedMF: federated matrix factorisation (Chai et al., 2020, as measured by Zhang et al., 2023).

Shared: item table Q [m, d]. Private: user vector p_u [d]. The score is <q_i, p_u>.
A round on a device: batches of positives and freshly drawn negatives, binary cross-entropy, one
joint step on p_u and the touched rows; upload the rows' deltas; the server adds their mean.

``dual`` adds the dual personalization of PFedRec (Zhang et al., 2023, section 6.4, table 3): the
rows' step comes after the vector's and sees the new one, and a device scores with its own rows on
top of the table it received, not with the new mean.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec import kernels
from hushrec.aggregate import Total, Update
from hushrec.clients import TrainView
from hushrec.methods.base import (
    Fitted,
    PerClient,
    Private,
    PrivateFields,
    Shared,
)
from hushrec.methods.inner_product import (
    DualConfig,
    DualSwitch,
    apply_mean,
    deltas,
    first_vector,
    initial_table,
    kept_rows,
    own_rows,
    score_own_rows,
    shared_after,
    train,
)
from hushrec.rng import Round, Streams


class FedMFConfig(DualConfig):
    """Defaults found on the validation items of ML-100K under the honest protocol."""

    item_rate: Annotated[float, Field(ge=0)] = 60.0
    """Item rows move at lr * (number of items) * item_rate."""
    init_std: Annotated[float, Field(gt=0)] = 0.1
    """Standard deviation of the item rows and of the first user vector."""
    dual: bool = False
    """Whether to add PFedRec's dual personalization ("w/ DualPer")."""


class FedMF(DualSwitch):
    """Federated matrix factorisation with a shared item table and private user vectors."""

    name = "fedmf"
    Config = FedMFConfig
    default_rounds = 200

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the item table."""
        table = initial_table(self.config.d, self.config.init_std, view.n_items, streams)
        return shared_after(self.config.dual, table, table)

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep the user vector on the device; all devices start from the same draw."""
        vector = PerClient(first_vector(self.config.d, self.config.init_std, streams))
        rows = {"rows": own_rows(self.config, view)} if self.config.dual else {}
        return {"vector": vector, **rows}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train vectors and rows; upload the rows' deltas."""
        table, vectors, dual = shared["items"], np.array(private["vector"]), self.config.dual
        trained, losses = train(self.config, view, table, vectors, None, now, two_steps=dual)
        update = Update(len(view), rows={"items": deltas(trained, table)})
        rows = {"rows": kept_rows(trained, table, self.config.own_share)} if dual else {}
        return Fitted(update, {"vector": vectors, **rows}, losses)

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Add the mean delta."""
        new = apply_mean(shared["items"], total, "items")
        return shared_after(self.config.dual, new, shared["items"])

    def download(self, shared: Shared) -> Shared:
        """Send the item table only."""
        return {"items": shared["items"]}

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Score with the newest table, or with the own rows on the received one."""
        vectors = np.asarray(private["vector"])
        biases = np.zeros(len(vectors), np.float32)
        if self.config.dual:
            return score_own_rows(shared["received"], private["rows"], vectors, biases)
        return kernels.inner_products(shared["items"], vectors, biases)
