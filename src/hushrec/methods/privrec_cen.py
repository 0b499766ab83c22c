"""PrivRec-CEN: PrivRec's network on pooled data, what federation is measured against.

Not federated and not private: one network, minibatches over everybody's samples in random order,
a round is one pass. As in the paper (section 4.1), an unseen user still adapts a copy.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from hushrec.aggregate import Total, Update
from hushrec.clients import TrainView
from hushrec.kernels.networks import Descent, train_clients
from hushrec.methods.base import Fitted, Private, Shared
from hushrec.methods.feature_network import draw_samples, network_of
from hushrec.methods.privrec import PrivRec, PrivRecConfig, features
from hushrec.rng import Round


class PrivRecCENConfig(PrivRecConfig):
    """Options of PrivRec-CEN: those of PrivRec, and of the pooled passes."""

    pooled_batch: Annotated[int, Field(ge=1)] = 256
    """Samples of a pooled step, of all users together."""
    pooled_lr: Annotated[float, Field(gt=0)] = 0.1
    """Rate of a pooled step."""


class PrivRecCEN(PrivRec):
    """PrivRec's network trained on pooled data."""

    name = "privrec-cen"
    Config = PrivRecCENConfig
    default_rounds = 20
    pooled = True

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Pass once over all samples in random order."""
        config, network = self.config, network_of(self.config, view, self.name)
        samples = draw_samples(config, view, 1, now)
        owner = np.repeat(np.arange(len(view)), samples.lengths)
        order = now.generator("fit/order").permutation(len(owner))
        theta = shared["theta"][None].copy()
        users, items = features(view)
        loss = train_clients(
            theta,
            shared["theta"],
            users,
            items,
            np.array([0, len(order)]),
            owner[order],
            samples.items[order].astype(np.int64),
            samples.labels[order],
            1,
            config.pooled_batch,
            network.layout,
            Descent(config.pooled_lr, 0.0, True, 0.0),
            np.zeros(2, np.int64),
        )
        moved = theta - shared["theta"]
        return Fitted(Update(1, dense={"theta": moved}), {}, np.repeat(loss, len(view)))

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Take the trained network."""
        moved = (shared["theta"] + total.dense["theta"]).astype(np.float32)
        return {"theta": moved}
