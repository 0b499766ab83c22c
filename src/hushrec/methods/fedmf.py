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

from hushrec.aggregation import Total, Update
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
from hushrec.training.inner_product import (
    Descent,
    apply_mean,
    deltas,
    first_vector,
    initial_table,
    score_inner_product,
    train_inner_product,
)


class FedMFConfig(DualSwitchConfig):
    """Defaults found on the validation items of ML-100K under the honest protocol."""

    item_rate: Annotated[float, Field(ge=0)] = 60.0
    """Item rows move at lr * (number of items) * item_rate."""
    init_std: Annotated[float, Field(gt=0)] = 0.1
    """Standard deviation of the item rows and of the first user vector."""


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
        """Keep the user vector on the device; all devices start from the same draw."""
        vector = PerClient(first_vector(self.config.d, self.config.init_std, streams))
        rows = {"rows": own_rows(self.config, view)} if self.config.dual else {}
        return {"vector": vector, **rows}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train vectors and rows; upload the rows' deltas."""
        config, table, vectors = self.config, shared["items"], np.array(private["vector"])
        descent = Descent(*config.rates(view.n_items), two_steps=config.dual)
        trained, losses = train_inner_product(view, now, table, vectors, None, config.pace, descent)
        update = Update(len(view), rows={"items": deltas(trained, table)})
        rows = {"rows": kept_rows(trained, table, config.own_share)} if config.dual else {}
        return Fitted(update, {"vector": vectors, **rows}, losses)

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Add the mean delta."""
        new = apply_mean(shared["items"], total, "items")
        return shared_after(self.config.dual, new, shared["items"])

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Score with the newest table, or with the own rows on the received one."""
        vectors = np.asarray(private["vector"])
        if self.config.dual:
            none = np.zeros(len(vectors), np.float32)
            return score_own_rows(shared["received"], private["rows"], vectors, none)
        return score_inner_product(shared["items"], vectors)
