"""Co-occurrence: recommend what others touched soon after the items you touched last.

Shared: counts C [m, m]; C[i, j] says how often j followed i within ``window`` steps, nearer steps
weighing more. C is a sum over devices, so one round learns it. Nothing is private but the history,
from which the device scores.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec.extend import (
    ClientRows,
    Fitted,
    Method,
    MethodConfig,
    Private,
    Round,
    Shared,
    Streams,
    Total,
    TrainView,
    Traits,
    Update,
)


class CooccurrenceConfig(MethodConfig):
    """Options of the co-occurrence recommender."""

    window: Annotated[int, Field(ge=1)] = 5
    """How many steps later an item still counts as following."""
    recent: Annotated[int, Field(ge=1)] = 20
    """How many of the last items of a history are scored from, the last one weighing most."""
    shrink: Annotated[float, Field(ge=0)] = 5.0
    """Counts are divided by this much more than their sum: rare items have less to say."""


class Cooccurrence(Method):
    """Item-to-item counts from one round of sums."""

    name = "cooccurrence"
    Config = CooccurrenceConfig
    config: CooccurrenceConfig
    traits = Traits(rounds=1)

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Start from zero counts."""
        return {"counts": np.zeros((view.n_items, view.n_items), np.float32)}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Upload, for each item of a client, the items that followed it."""
        past = view.positives
        rows = np.zeros((len(past.values), view.n_items), np.float32)
        for client in range(len(view)):
            start, end = past.indptr[client], past.indptr[client + 1]
            for step in range(1, min(self.config.window, end - start - 1) + 1):
                rows[np.arange(start, end - step), past.values[start + step : end]] += 1 / step
        uploads = ClientRows(past.indptr, past.values, rows)
        return Fitted(Update(len(view), rows={"counts": uploads}), {})

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Replace the counts by this round's."""
        counts = np.zeros_like(shared["counts"])
        ids, summed = total.rows["counts"]
        counts[ids] = summed
        return {"counts": counts}

    def download(self, shared: Shared) -> Shared:
        """Send nothing to be trained on: devices only count."""
        return {}

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Add up what followed the client's last items elsewhere."""
        scores = np.zeros((len(history), history.n_items), np.float32)
        for client in range(len(history)):
            last = history.positives[client][::-1][: self.config.recent]
            followers = shared["counts"][last]
            weight = 1 / (followers.sum(axis=1) + self.config.shrink + 1e-9)
            weight /= np.arange(1, len(last) + 1)
            scores[client] = (followers * weight[:, None]).sum(axis=0)
        return scores
