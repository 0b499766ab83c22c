"""Negatives: items a client has not touched, drawn uniformly.

The sampler takes a `TrainView` and nothing else. Held-out rows are not a legal argument, so under
the honest protocol a held-out item is drawn like any other item the device has not seen.
"""

from __future__ import annotations

import numpy as np

from hushrec import kernels
from hushrec.clients import Ragged, TrainView
from hushrec.rng import Round

PURPOSE = "fit"
"""Kernels that draw negatives as they train read the same stream in the same order."""


def draw_negatives(view: TrainView, per_positive: int, now: Round) -> Ragged:
    """Draw the negatives of one round for every client: ``per_positive`` for each positive."""
    excluded = view.excluded()
    return Ragged(
        *kernels.draw_outside(
            now.key(PURPOSE),
            view.users,
            excluded.indptr,
            excluded.values,
            view.n_items,
            np.asarray(view.positives.lengths * per_positive),
        )
    )
