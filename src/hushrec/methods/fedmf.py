"""FedMF: federated matrix factorisation (Chai et al., 2020, as measured by Zhang et al., 2023).

Shared: item table Q [m, d]. Private: user vector p_u [d]. The score is <q_i, p_u>.
A round on a device: batches of positives and freshly drawn negatives, binary cross-entropy, one
joint step on p_u and the touched rows; upload the rows' deltas; the server adds their mean.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec import kernels
from hushrec.aggregate import Total, Update
from hushrec.clients import TrainView
from hushrec.methods.base import Fitted, Method, PerClient, Private, PrivateFields, Shared
from hushrec.methods.inner_product import (
    InnerProductConfig,
    apply_mean,
    deltas,
    initial_table,
    train,
)
from hushrec.rng import Streams


class FedMFConfig(InnerProductConfig):
    """Defaults found on the validation items of ML-100K under the honest protocol."""

    item_rate: Annotated[float, Field(ge=0)] = 60.0
    """Item rows move at lr * (number of items) * item_rate."""
    init_std: Annotated[float, Field(gt=0)] = 0.1
    """Standard deviation of the item rows and of the first user vector."""


class FedMF(Method):
    """Federated matrix factorisation with a shared item table and private user vectors."""

    name = "fedmf"
    Config = FedMFConfig
    default_rounds = 200

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the item table."""
        return {"items": initial_table(self.config, view.n_items, streams)}

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep the user vector on the device; all devices start from the same draw."""
        drawn = streams.generator("init/vector").standard_normal(self.config.d, np.float32)
        return {"vector": PerClient(drawn * np.float32(self.config.init_std))}

    def fit(
        self, shared: Shared, private: Private, view: TrainView, streams: Streams, round_number: int
    ) -> Fitted:
        """Train vectors and rows jointly; upload the rows' deltas."""
        table, vectors = shared["items"], np.array(private["vector"])
        trained, losses = train(
            self.config, view, table, vectors, None, streams, round_number, two_steps=False
        )
        update = Update(len(view), rows={"items": deltas(trained, table)})
        return Fitted(update, {"vector": vectors}, losses)

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Add the mean delta."""
        return {"items": apply_mean(shared["items"], total, "items")}

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Score with the newest table."""
        vectors = np.asarray(private["vector"])
        return kernels.inner_products(shared["items"], vectors, np.zeros(len(vectors), np.float32))
