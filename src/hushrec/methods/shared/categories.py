"""Public categories of items (years, genres, …) as shares: what some sums are grouped by."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hushrec.data.interactions import Categorical, MultiCategorical
from hushrec.data.views import TrainView

MOST_GROUPS = 128
"""Categories of a feature above which it is left out: its sums would be too many to trust."""


def category_columns(view: TrainView) -> list[Categorical | MultiCategorical]:
    """Return the features that are used: categories, and not too many of them."""
    found, groups = [], 0
    for column in view.item_features.values():
        if isinstance(column, (Categorical, MultiCategorical)):
            more = 1 + len(column.names)
            # No more pairs of categories than pairs of items: a small catalogue knows no more.
            if more <= MOST_GROUPS and groups + more <= view.n_items:
                found.append(column)
                groups += more
    return found


def category_shares(view: TrainView) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return each item's shares of all categories, unknown being one, and each feature's number."""
    parts = [np.zeros((view.n_items, 0), np.float32)]
    for column in category_columns(view):
        flags = np.zeros((view.n_items, 1 + len(column.names)), np.float32)
        if isinstance(column, MultiCategorical):
            flags[:, 1:] = column.flags
            flags[:, 0] = ~column.flags.any(axis=1)
        else:
            flags[np.arange(view.n_items), column.codes + 1] = 1.0
        parts.append(flags / flags.sum(axis=1, keepdims=True))
    sizes = np.array([part.shape[1] for part in parts[1:]], np.int64)
    return np.concatenate(parts, axis=1), sizes
