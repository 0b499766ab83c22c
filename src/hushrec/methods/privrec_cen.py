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
from hushrec.kernels.feature_networks import ProximalDescent
from hushrec.methods.base import Fitted, Private, Shared, Traits
from hushrec.methods.privrec import FEATURE_STACK, PrivRec, PrivRecConfig, features
from hushrec.rng import Round
from hushrec.training.feature_network import train_pooled_network


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
    config: PrivRecCENConfig
    traits = Traits(rounds=20, pooled=True, stack_interactions=FEATURE_STACK)

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Pass once over all samples in random order."""
        samples = self.samples(view, 1, now)
        theta, loss = train_pooled_network(
            self.network(view),
            ProximalDescent(self.config.pooled_lr, 0.0, True, 0.0),
            shared["theta"],
            features(view),
            samples,
            now.generator("fit/order").permutation(len(samples.items)),
            self.config.pooled_batch,
        )
        moved = theta - shared["theta"]
        return Fitted(Update(1, dense={"theta": moved}), {}, np.repeat(loss, len(view)))

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Take the trained network."""
        moved = (shared["theta"] + total.dense["theta"]).astype(np.float32)
        return {"theta": moved}
