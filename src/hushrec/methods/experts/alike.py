"""What year follows what year, what genre what genre: any public category of items."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregate import ClientRows
from hushrec.clients import TrainView
from hushrec.data.interactions import Categorical, MultiCategorical
from hushrec.kernels import experts as kernels
from hushrec.methods.base import Shared
from hushrec.methods.experts.base import Expert, Part
from hushrec.methods.fednext import gaps

WINDOW = 5
"""Steps within which a category follows another, at 1/steps."""
MOST_GROUPS = 128
"""Categories of a feature above which it is left out: its sums would be too many to trust."""
LATEST = (1, 5, 0)
"""Scores are means over the last item, the last five and all."""
SMOOTHING = 0.5
"""Added to every sum."""


class Alike(Expert):
    """How much more often an item's categories follow those of the past than by chance."""

    name = "alike"

    def hears(self, view: TrainView) -> bool:
        """Stay out where items have no categories."""
        return bool(_columns(view))

    def init(self, view: TrainView) -> Shared:
        """Take each item's shares of all categories."""
        members, sizes = _members(view)
        said = np.zeros(members.T.shape, np.float32)
        return {"members": members, "sizes": sizes, "said": said}

    def scores(self, model: Shared) -> tuple[str, ...]:
        """One for each feature and stretch of the past."""
        spans = "last", "last five", "all"
        return tuple(f"feature {n}, {span}" for n in range(len(model["sizes"])) for span in spans)

    def count(self, view: TrainView) -> ClientRows:
        """Count which category followed which."""
        past = view.positives
        return ClientRows(
            *kernels.following_groups(past.indptr, past.values, *_members(view), gaps(WINDOW))
        )

    def learn(self, model: Shared, keys: NDArray[np.int64], sums: NDArray[np.float64]) -> Shared:
        """Take the logarithm of what was counted over what chance would give."""
        groups, start = model["members"].shape[1], 0
        counted, said = np.zeros(groups**2), np.zeros_like(model["said"])
        counted[keys] = np.maximum(sums[:, 0], 0.0)
        for size in model["sizes"]:
            mine = slice(start, start + size)
            found = counted.reshape(groups, groups)[mine, mine] + SMOOTHING
            chance = found.sum(1, keepdims=True) * found.sum(0, keepdims=True) / found.sum()
            said[mine] = np.log(found / chance) @ model["members"][:, mine].T
            start += size
        return {**model, "said": said}

    def score(self, model: Shared, view: TrainView, out: NDArray[np.float32]) -> None:
        """Average what the past says of each category, and what an item's categories say of it."""
        kernels.score_groups(
            view.positives.indptr,
            view.positives.values,
            model["members"],
            model["sizes"],
            model["said"],
            np.array(LATEST),
            out,
        )

    def parts(self, model: Shared) -> tuple[Part, ...]:
        """Say the same for bundles."""
        options = {"sizes": model["sizes"].tolist(), "latest": list(LATEST)}
        return (Part("groups", options, {n: model[n] for n in ("members", "said")}),)


def _columns(view: TrainView) -> list[Categorical | MultiCategorical]:
    """Return the features that are used: categories, and not too many of them."""
    found, groups = [], 0
    for column in view.item_features.values():
        if isinstance(column, (Categorical, MultiCategorical)):
            more = 1 + len(column.names)
            # Keys are pairs of groups, and have to fit where keys are pairs of items.
            if more <= MOST_GROUPS and groups + more <= view.n_items:
                found.append(column)
                groups += more
    return found


def _members(view: TrainView) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return each item's shares of all categories, unknown being one, and each feature's number."""
    parts = []
    for column in _columns(view):
        flags = np.zeros((view.n_items, 1 + len(column.names)), np.float32)
        if isinstance(column, MultiCategorical):
            flags[:, 1:] = column.flags
            flags[:, 0] = ~column.flags.any(axis=1)
        else:
            flags[np.arange(view.n_items), column.codes + 1] = 1.0
        parts.append(flags / flags.sum(axis=1, keepdims=True))
    return np.concatenate(parts, axis=1), np.array([part.shape[1] for part in parts])
