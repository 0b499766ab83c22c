"""FedMF: federated matrix factorisation (Chai et al., 2020, as measured by Zhang et al., 2023).

Shared: item table Q [m, d]. Private: user vector p_u [d]. The score is <q_i, p_u>.
A round on a device: SGD on the binary cross-entropy of positives and sampled negatives, one joint
step per batch on p_u and the touched rows; the device uploads the deltas of these rows, and the
server adds their mean.

``dual`` adds the dual personalization of PFedRec (`shared.dual`).
"""

from __future__ import annotations

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat

from hushrec.data.views import TrainView
from hushrec.methods.base import PRODUCT, Fitted, Scores, Shared, Traits
from hushrec.methods.shared.dual import DualSwitchConfig, SharedTable, score_own_rows
from hushrec.private import PerClient, Private, PrivateFields
from hushrec.streams import Round, Streams
from hushrec.training.samples import Descent, first_vector, score_inner_product, train_inner_product


class FedMFConfig(DualSwitchConfig):
    """Options of FedMF; defaults tuned on the validation items of ML-100K, honest protocol."""

    item_rate: NonNegativeFloat = 60.0
    """Learning rate of item rows: lr * (number of items) * item_rate."""
    init_std: PositiveFloat = 0.1
    """Standard deviation of the initial item rows and user vector."""


class FedMF(SharedTable):
    """Federated matrix factorisation with a shared item table and private user vectors."""

    name = "fedmf"
    Config = FedMFConfig
    config: FedMFConfig
    traits = Traits(rounds=200, unexplained=PRODUCT)

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep the user vector, and own rows with ``dual``; all devices start from one draw."""
        vector = PerClient(first_vector(self.config.d, self.config.init_std, streams))
        return {"vector": vector, **self.own_rows(view)}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train vectors and rows; upload the deltas of the rows."""
        config, table, vectors = self.config, shared["items"], np.array(private["vector"])
        descent = Descent(*config.rates(view.n_items), two_steps=config.dual)
        trained, losses = train_inner_product(view, now, table, vectors, None, config.pace, descent)
        return self.fitted(table, {"vector": vectors}, trained, losses)

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Score with the new table, or, with ``dual``, with own rows on the received table."""
        vectors = np.asarray(private["vector"])
        if self.config.dual:
            none = np.zeros(len(vectors), np.float32)
            return score_own_rows(shared["received"], private, vectors, none)
        return score_inner_product(shared["items"], vectors)
