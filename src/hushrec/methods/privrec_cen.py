"""PrivRec-CEN: PrivRec's network on pooled data, what federation is measured against.

Not federated and not private: one network, minibatches over everybody's samples in random order,
a round is one pass. As in the paper (section 4.1), an unseen user still adapts a copy. The paper
treats "each user as a task": with ``tasks`` a pass has as many samples of every user, drawn with
replacement, so that users count alike; without, samples do.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec.aggregate import ClientRows, Total, Update
from hushrec.clients import TrainView
from hushrec.methods.base import Fitted, Private, Shared, Traits
from hushrec.methods.head import COUNTS, count_items
from hushrec.methods.privrec import FEATURE_STACK, PrivRec, PrivRecConfig
from hushrec.rng import Round
from hushrec.training.feature_network import train_pooled_network
from hushrec.training.samples import DeviceSamples


class PrivRecCENConfig(PrivRecConfig):
    """Options of PrivRec-CEN: those of PrivRec, and of the pooled passes."""

    pooled_batch: Annotated[int, Field(ge=1)] = 256
    """Samples of a pooled step, of all users together."""
    pooled_lr: Annotated[float, Field(gt=0)] = 0.1
    """Rate of a pooled step."""
    tasks: bool = False
    """Whether every user counts alike in a pass, or every sample."""


class PrivRecCEN(PrivRec):
    """PrivRec's network trained on pooled data."""

    name = "privrec-cen"
    Config = PrivRecCENConfig
    config: PrivRecCENConfig
    traits = Traits(rounds=20, pooled=True, stack_interactions=FEATURE_STACK)

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Pass once over all samples in random order."""
        samples = self.samples(view, 1, now)
        generator = now.generator("fit/order")
        order = generator.permutation(len(samples.items))
        if self.config.tasks:
            order = generator.permutation(_alike(samples, generator))
        theta, loss = train_pooled_network(
            self.network(view),
            self.descent(self.config.pooled_lr, 0.0),
            shared["theta"],
            self.inputs(shared, view),
            samples,
            order,
            self.config.pooled_batch,
        )
        update = Update(1, self._pooled_counts(view), {"theta": theta - shared["theta"]})
        return Fitted(update, {}, np.repeat(loss, len(view)))

    def _pooled_counts(self, view: TrainView) -> dict[str, ClientRows]:
        """Return everybody's items as one upload, where shares are a feature."""
        if not self.config.shares:
            return {}
        mine = count_items(view).rows[COUNTS]
        counts = np.bincount(mine.ids, mine.rows[:, 0], view.n_items).astype(np.float32)
        ids = np.arange(view.n_items, dtype=np.int32)
        return {COUNTS: ClientRows(np.array([0, view.n_items]), ids, counts[:, None])}

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Take the trained network."""
        moved = (shared["theta"] + total.dense["theta"]).astype(np.float32)
        return {"theta": moved, **self.counted(shared, total)}


def _alike(samples: DeviceSamples, generator: np.random.Generator) -> NDArray[np.int64]:
    """Draw places of samples, as many of every user that has any, with replacement."""
    starts, lengths = samples.indptr[:-1], samples.lengths
    who = np.flatnonzero(lengths > 0)
    each = -(-len(samples.items) // max(1, len(who)))
    drawn = generator.integers(0, lengths[who][:, None], (len(who), each))
    return np.asarray(starts[who][:, None] + drawn).ravel()
