"""PrivRec-CEN: PrivRec's network on pooled data, what federation is measured against.

Not federated and not private: one network, minibatches over everybody's samples in random order,
a round is one pass. As in the paper (section 4.1), an unseen user still adapts a copy.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec import neural
from hushrec.aggregate import Total, Update
from hushrec.clients import TrainView
from hushrec.methods.base import Fitted, Private, Shared
from hushrec.methods.feature_network import Descent, network_of
from hushrec.methods.privrec import PrivRec, PrivRecConfig, features
from hushrec.neural import torch
from hushrec.rng import Streams


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

    def fit(
        self, shared: Shared, private: Private, view: TrainView, streams: Streams, round_number: int
    ) -> Fitted:
        """Pass once over all samples in random order."""
        config, network = self.config, network_of(self.config, view, self.name)
        samples = neural.draw_samples(
            view, config.negatives, 1, streams, round_number, positive_above=config.positive_above
        )
        owner = np.repeat(np.arange(len(view)), samples.lengths)
        order = streams.generator("fit/order", round_number).permutation(len(owner))
        users, items = map(torch.from_numpy, features(view))
        theta, descent = shared["theta"][None].copy(), Descent(network, config.pooled_lr)
        state, total = torch.from_numpy(theta), 0.0
        for start in range(0, len(order), config.pooled_batch):
            at = order[start : start + config.pooled_batch]
            batch = neural.Batch(
                clients=torch.zeros(1, dtype=torch.int64),
                items=torch.from_numpy(samples.items[at].astype(np.int64))[None],
                labels=torch.from_numpy(samples.labels[at])[None],
                weights=torch.full((1, len(at)), 1 / len(at)),
            )
            mine, theirs = users[torch.from_numpy(owner[at])][None], items[batch.items]
            loss, _ = descent.step(state, state, mine, theirs, batch)
            total += float(loss) * len(at)
        moved = theta - shared["theta"]
        losses: NDArray[np.float64] = np.full(len(view), total / max(1, len(order)))
        return Fitted(Update(1, dense={"theta": moved}), {}, losses)

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Take the trained network."""
        moved = (shared["theta"] + total.dense["theta"]).astype(np.float32)
        return {"theta": moved}
