"""Item-to-item weights under user-level differential privacy: two rounds of noisy sums.

What takes the place of `fednext` and `fedease` where noise is added to sums. The noise has to cover
every pair that is asked for, so pairs that would hold nothing else are not; and everybody's upload
has the same norm, so that nobody's room is wasted:

1. **Counts.** A first round finds the head, the items that are popular enough for their pairs to
   be seen through the noise (`methods.head`), with the small share ``counting`` of the budget.
2. **Pairs.** A device drops all other items from its history, counts pairs over what is left, with
   weight ``counted`` for an item by itself, and scales all of it to norm 1. The server estimates
   each sum from its noisy value (`methods.denoise`), pairs being grouped by how often they would
   meet by chance and, where direction counts, by the noisy sum of the reverse pair; then it solves
   the method's own system.

Both uploads cover their whole space: a number for every item, and for every pair of the head, which
is public after the first round. Everything after the noise is a function of noised sums, of the
noise's deviation and of options. The guarantee is that of two Gaussian mechanisms together; the
second may depend on what the first released. Items outside the head are scored by popularity alone.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec.aggregate import ClientRows, Total, Update
from hushrec.clients import Ragged, TrainView
from hushrec.kernels import pairs as pair_kernels
from hushrec.memory import require_memory
from hushrec.methods.base import Fitted, Private, Shared
from hushrec.methods.capabilities import SharesBudget
from hushrec.methods.denoise import expected_powers
from hushrec.methods.head import COUNTS, count_items, find_head, only
from hushrec.methods.item_pairs import TABLE, Block, ItemPairs, ItemPairsConfig, Vector
from hushrec.rng import Round, Streams

RARELY = 2e-5
"""Share of the pairs in the topmost of the groups by chance meetings."""
GROUPS = 40
"""Groups by chance meetings, ever smaller towards the top."""
REVERSE = np.array([-1, 0, 1, 2, 3, 4, 6, 10, 20])
"""Where groups by the reverse pair are cut, in deviations of the noise."""


class PrivatePairsConfig(ItemPairsConfig):
    """Options of the family under noise."""

    ridge: Annotated[float, Field(gt=0)] = 30.0
    """Added to the diagonal of the system; uploads have norm 1 here, so units differ."""
    power: Annotated[float, Field(gt=0, le=1)] = 0.35
    """Sums are taken to this power: its posterior mean is what the noisy sums are turned into."""
    counting: Annotated[float, Field(gt=0, lt=1)] = 1 / 32
    """Share of the budget that the first round spends, to find the head."""
    counted: Annotated[float, Field(gt=0)] = 0.15
    """Weight of an item by itself against a pair, before uploads are scaled to norm 1."""
    recency: Annotated[float, Field(ge=0)] = 1.0
    """On the device: the g-th last item weighs g^-recency; 0 ignores the order."""
    popularity: Annotated[float, Field(ge=0)] = 0.1
    """On the device: how much an item's share of all interactions adds to its score."""
    visible: Annotated[float, Field(gt=0)] = 0.014
    """Least sum by chance of two items of the head, in deviations of the noise on a pair."""


class PrivatePairs(ItemPairs, SharesBudget):
    """Base of the family under noise; a member says what is counted and what is solved."""

    Config = PrivatePairsConfig
    config: PrivatePairsConfig
    upload_norm = 1.0
    ordered: ClassVar[bool] = True
    """False where only pairs i <= j are counted."""

    @property
    def planned_rounds(self) -> int:
        """One round for counts, one for pairs."""
        return 2

    def budget_shares(self) -> tuple[float, ...]:
        """Spend little on counts, the rest on pairs."""
        return self.config.counting, 1 - self.config.counting

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Start from no weights, and no head."""
        head = min(self.config.dense_items, view.n_items)
        require_memory(
            16 * 8 * head**2, f"pairs of dense_items={head} items", "a smaller dense_items"
        )
        return {**super().init(view, streams), "head": np.zeros(view.n_items, np.bool_)}

    def download(self, shared: Shared) -> Shared:
        """Send the head."""
        return {"head": shared["head"]}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Upload items in the first round, pairs of the head in the second; all of norm 1."""
        if now.number == 1:
            return Fitted(count_items(view), {})
        size = int(shared["head"].sum())
        place = np.cumsum(shared["head"]) - 1
        past = only(view.positives, shared["head"])
        pairs = self.pairs(Ragged(past.indptr, place[past.values]), size)
        uploads = ClientRows(*pair_kernels.scaled_to_norm_one(*pairs), space=size**2)
        return Fitted(Update(len(view), rows={TABLE: uploads}), {})

    @abstractmethod
    def pairs(self, past: Ragged, size: int) -> tuple[NDArray[Any], ...]:
        """Return, ragged by client, keys and weights of pairs among items 0 to size - 1."""

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Find the head from the counts; or turn the sums over its pairs into weights."""
        if COUNTS in total.rows:
            spent, left = self.budget_shares()
            noise_std, most = total.noise_std * np.sqrt(spent / left), self.config.dense_items
            n_items, visible = len(shared["head"]), self.config.visible
            return {**shared, **find_head(total, n_items, noise_std, visible, most)}
        if TABLE not in total.rows:
            return shared
        head = np.flatnonzero(shared["head"])
        noisy = np.zeros((len(head), len(head)))
        keys, summed = total.rows[TABLE]
        noisy.ravel()[keys] = summed[:, 0]
        weights = self.solve(self.cleaned(noisy, total.noise_std))
        np.fill_diagonal(weights, 0.0)
        place = np.where(shared["head"], np.cumsum(shared["head"]) - 1, -1)
        kept = {name: np.zeros_like(shared[name]) for name in ("neighbours", "weights")}
        kept["neighbours"][:] = np.arange(len(place))[:, None]
        nothing = np.zeros(0, np.int64), np.zeros(0)
        pair_kernels.keep_strongest(
            weights, head, place, *nothing, len(place), kept["neighbours"], kept["weights"]
        )
        return {**shared, **kept}

    def cleaned(self, noisy: Block, noise_std: float) -> Block:
        """Return the sums to ``power``, as far as their noisy values tell them."""
        config, size = self.config, len(noisy)
        counts = np.maximum(np.diag(noisy), 0.0) / config.counted
        used = ~np.eye(size, dtype=np.bool_) if self.ordered else np.triu(np.ones_like(noisy), 1)
        first, second = np.nonzero(used)
        groups = chance_groups(counts, first, second)
        if self.ordered and noise_std:
            reverse = np.searchsorted(REVERSE, noisy[second, first] / noise_std)
            groups = groups * (len(REVERSE) + 1) + reverse
        out = np.diag(counts**config.power)
        out[first, second] = expected_powers(noisy[first, second], noise_std, groups, config.power)
        return out

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Score from the last items of the head: no other item has weights."""
        known = replace(history, positives=only(history.positives, shared["head"]))
        return super().score(shared, private, known)


def chance_groups(
    counts: Vector, first: NDArray[np.int64], second: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Group pairs of items by how often they would meet if users chose by popularity alone."""
    level = np.log(counts + 0.5)
    meetings = level[first] + level[second]
    sample = meetings[:: max(1, len(meetings) // 2**18)]
    cuts = np.quantile(sample, 1 - np.geomspace(1, RARELY, GROUPS)[1:])
    return np.asarray(np.searchsorted(cuts, meetings))
