"""Item-to-item weights under user-level differential privacy: two rounds of noisy sums.

It replaces `fednext` and `fedease` where noise is added to sums. Every pair that is counted gets
noise, so pairs that would be noise only are not counted; and all uploads have the largest norm that
clipping allows:

1. **Counts.** A first round finds the head, the items that are popular enough for their pairs to
   be seen through the noise (`shared.denoising`), with the small share ``counting`` of the budget.
2. **Pairs.** A device drops all other items from its history, counts pairs over what is left, with
   weight ``counted`` for an item by itself, and scales all of it to norm 1. Frequent pairs stand
   out of the noise anyway, so a pair weighs the less the more popular its items are (``tilt``),
   which leaves room for the rarer ones and is undone after the noise.

The server estimates each sum from its noisy value by empirical Bayes (`shared.denoising`): pairs
that are expected to have similar sums share a prior. What is expected of a pair is read off the
same noisy sums, added up so far that little noise is left: the sums of its two items, and how much
more often their public categories (year, genre, …) meet than by chance. Where direction counts, the
noisy sum of the reverse pair tells too. Then the method's own system is solved.

Both uploads cover their whole space: a number for every item, and for every pair of the head, which
is public after the first round. Everything after the noise is a function of noised sums, of public
categories, of the noise's deviation and of options. The guarantee is that of two Gaussian
mechanisms together; the second may depend on what the first released. Items outside the head are
scored by popularity alone.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat

from hushrec.aggregation import KeyedRows, Total, Update
from hushrec.config import Share
from hushrec.data.features import category_shares
from hushrec.data.views import Ragged, TrainView
from hushrec.io import require_memory
from hushrec.kernels import pairs as pair_kernels
from hushrec.methods.base import Fitted, Phase, Shared
from hushrec.methods.shared.denoising import expected_powers, find_head, head_phase, only
from hushrec.methods.statistics.pair_weights import (
    TABLE,
    ItemPairs,
    ItemPairsConfig,
    Sums,
    strongest,
)
from hushrec.private import Private
from hushrec.streams import Round, Streams

RARELY = 2e-5
"""Share of the pairs in the topmost of the groups by what is expected."""
GROUPS = 40
"""Groups by what is expected, ever smaller towards the top."""
LEAST = 1e-3
"""What an item's sum is taken to be at least, in those of a mean item."""
DOUBT = 2.0
"""How much of its own deviation is added to a sum over categories before it is believed."""
REVERSE = np.array([-1, 0, 1, 2, 3, 4, 6, 10, 20])
"""Where groups by the reverse pair are cut, in deviations of the noise."""


class PrivatePairsConfig(ItemPairsConfig):
    """Options of the family under noise."""

    ridge: PositiveFloat = 30.0
    """Added to the diagonal of the system; uploads have norm 1 here, so units differ."""
    power: Annotated[float, Field(gt=0, le=1)] = 0.35
    """Sums are taken to this power: its posterior mean is what the noisy sums are turned into."""
    counting: Annotated[float, Field(gt=0, lt=1)] = 1 / 32
    """Share of the budget that the first round spends, to find the head."""
    counted: PositiveFloat = 0.15
    """Weight of an item by itself against a pair, before uploads are scaled to norm 1."""
    recency: NonNegativeFloat = 1.0
    """On the device: the g-th last item weighs g^-recency; 0 ignores the order."""
    popularity: NonNegativeFloat = 0.1
    """On the device: how much an item's share of all interactions adds to its score."""
    price: PositiveFloat = 2.0
    """What an item in the head costs; a lower price makes the head larger (`shared.denoising`)."""
    tilt: Share = 0.0
    """In an upload, a pair weighs count^-tilt of each of its items as much; 0 treats all alike."""
    categories: NonNegativeFloat = 1.3
    """How much the items' categories say of what is expected of a pair; 0 leaves them out."""


class PrivatePairs(ItemPairs):
    """Base of the family under noise; a member says what is counted and what is solved."""

    Config = PrivatePairsConfig
    config: PrivatePairsConfig
    upload_norm = 1.0
    ordered: ClassVar[bool] = True
    """False where only pairs i <= j are counted."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """One round for counts, with little of the budget, and one for pairs."""
        counting, download = self.config.counting, self.download
        uploads = "weighted pairs of its items in the head, scaled to norm 1"
        fit, learn, left = self._fit_pairs, self._learn_weights, 1 - counting
        pairs = Phase("count pairs", 1, uploads, fit, learn, download, budget=left)
        return head_phase(counting, self._find_head, download), pairs

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Start from no weights, and no head."""
        head = min(self.config.dense_items, view.n_items)
        require_memory(
            16 * 8 * head**2, f"pairs of dense_items={head} items", "a smaller dense_items"
        )
        members, sizes = category_shares(view)
        return {
            **super().init(view, streams),
            "head": np.zeros(view.n_items, np.bool_),
            "tilts": np.zeros(view.n_items, np.float32),
            "members": members,
            "sizes": sizes,
        }

    def download(self, shared: Shared) -> Shared:
        """Send the head, and what its pairs weigh."""
        return {"head": shared["head"], "tilts": shared["tilts"]}

    def serving(self, shared: Shared) -> Shared:
        """Leave out what only counting and the server need."""
        return {n: a for n, a in shared.items() if n not in ("tilts", "members", "sizes")}

    def _fit_pairs(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        size, index = int(shared["head"].sum()), np.cumsum(shared["head"], dtype=np.int32) - 1
        past = only(view.positives, shared["head"])
        indptr, keys, weights = self.pairs(Ragged(past.indptr, index[past.values]), size)
        tilts, one = shared["tilts"][shared["head"]], max(size, 1)
        weights = weights * (tilts[keys // one] * tilts[keys % one])[:, None]
        scaled = pair_kernels.scaled_to_norm_one(indptr, keys, weights)
        uploads = KeyedRows(*scaled, space=size**2)
        return Fitted(Update(len(view), rows={TABLE: uploads}), {})

    @abstractmethod
    def pairs(self, past: Ragged, size: int) -> tuple[NDArray[Any], ...]:
        """Return, ragged by client, keys and weights of pairs among items 0 to size - 1."""

    def _find_head(self, shared: Shared, total: Total, number: int) -> Shared:
        """Find the head from the counts, by the noise of the second phase."""
        (spent, left), config = self.budget_shares, self.config
        noise_std, n_items = total.noise_std * np.sqrt(spent / left), len(shared["head"])
        found = find_head(total, n_items, noise_std, config.price, config.dense_items)
        return {**shared, **found, "tilts": self.tilts(found["head"], found["shares"])}

    def _learn_weights(self, shared: Shared, total: Total, number: int) -> Shared:
        """Turn the sums over pairs of the head into weights."""
        head = np.flatnonzero(shared["head"])
        noisy = total.table(TABLE, len(head) ** 2, 1).reshape(len(head), len(head))
        weights = self.solve(self.cleaned(noisy, total.noise_std, shared))
        no_pairs = np.zeros(0, np.int64), np.zeros(0)
        return {**shared, **strongest(shared, *no_pairs, head, weights)}

    def tilts(self, head: NDArray[np.bool_], shares: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return each head item's factor on the weights of its pairs; the geometric mean is 1."""
        levels = np.log(np.maximum(shares[head], LEAST / len(shares)))
        out = np.zeros(len(head), np.float32)
        out[head] = np.exp(self.config.tilt * (levels.mean() - levels))
        return out

    def cleaned(self, noisy: Sums, noise_std: float, shared: Shared) -> Sums:
        """Return the sums to ``power``, as far as their noisy values tell them, without tilt."""
        config, size = self.config, len(noisy)
        tilts = shared["tilts"][shared["head"]].astype(np.float64)
        counts = np.maximum(np.diag(noisy), 0.0) / config.counted / tilts**2
        used = ~np.eye(size, dtype=np.bool_) if self.ordered else np.triu(np.ones_like(noisy), 1)
        first, second = np.nonzero(used)
        groups = like_groups(self.expected(noisy, noise_std, shared)[first, second])
        if self.ordered and noise_std:
            reverse = np.searchsorted(REVERSE, noisy[second, first] / noise_std)
            groups = groups * (len(REVERSE) + 1) + reverse
        out = np.diag(counts**config.power)
        means = expected_powers(noisy[first, second], noise_std, groups, config.power)
        out[first, second] = means / (tilts[first] * tilts[second]) ** config.power
        return out

    def expected(self, noisy: Sums, noise_std: float, shared: Shared) -> Sums:
        """Return what sum each pair should have by its items and their categories: logarithms."""
        pairs = noisy - np.diag(np.diag(noisy))
        if not self.ordered:
            pairs += pairs.T
        rows, columns = (np.maximum(pairs.sum(axis=axis), 0.0) for axis in (1, 0))
        least = LEAST * max(rows.mean(), columns.mean(), 1e-12)
        rows, columns = np.maximum(rows, least), np.maximum(columns, least)
        chance = np.outer(rows, columns) / rows.sum()
        level: Sums = np.log(chance)
        members = shared["members"][shared["head"]].astype(np.float64)
        for mine in np.split(members, np.cumsum(shared["sizes"])[:-1], axis=1):
            lengths = np.sqrt((mine**2).sum(axis=0))
            doubt = DOUBT * noise_std * np.outer(lengths, lengths) + 1e-12
            met = np.maximum(mine.T @ pairs @ mine, 0.0) + doubt
            said = np.log(met / (mine.T @ chance @ mine + doubt))
            level += self.config.categories * (mine @ said @ mine.T)
        return level

    def weighted(self, shared: Shared, past: Ragged) -> Ragged:
        """Return the items of the head."""
        return only(past, shared["head"])


def like_groups(levels: Sums) -> NDArray[np.int64]:
    """Group pairs by what is expected of them; groups get ever smaller towards the top."""
    sample = levels[:: max(1, len(levels) // 2**18)]
    cuts = np.quantile(sample, 1 - np.geomspace(1, RARELY, GROUPS)[1:])
    return np.asarray(np.searchsorted(cuts, levels))
