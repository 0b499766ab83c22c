"""The negative counter: the smoke alarm of honest evaluation.

It learns nothing. Every device counts how often each item was drawn as one of its negatives and
ranks the least drawn first. With honest negatives every untouched item is drawn alike, so it must
score at chance. If the sampler knows the held-out item and avoids it, as published code does, the
held-out item is the one that was never drawn, and the counter finds it.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec.aggregate import Total, Update
from hushrec.clients import TrainView
from hushrec.methods.base import (
    Fitted,
    Method,
    MethodConfig,
    PerClient,
    Private,
    PrivateFields,
    Shared,
    Traits,
)
from hushrec.rng import Round, Streams
from hushrec.training.samples import draw_negatives


class NegativeCounterConfig(MethodConfig):
    """How many negatives are drawn."""

    negatives: Annotated[int, Field(ge=1, le=1000)] = 4
    """Drawn per positive and round."""


class NegativeCounter(Method):
    """Rank the items that were drawn least often as negatives."""

    name = "negative-counter"
    Config = NegativeCounterConfig
    config: NegativeCounterConfig
    traits = Traits(learns=False)

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Share nothing."""
        return {}

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep a count per item on the device."""
        return {"drawn": PerClient(np.zeros(view.n_items, np.float32))}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Draw this round's negatives and count them."""
        before = np.asarray(private["drawn"])
        negatives = draw_negatives(view, self.config.negatives, now)
        client = np.repeat(np.arange(len(view)), negatives.lengths)
        cell = client * view.n_items + negatives.values
        drawn = np.bincount(cell, minlength=before.size).reshape(before.shape)
        return Fitted(Update(len(view)), {"drawn": before + drawn.astype(np.float32)})

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Change nothing."""
        return shared

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Score by how rarely an item was drawn."""
        return -np.asarray(private["drawn"])
