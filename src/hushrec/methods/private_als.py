"""FedALS under user-level differential privacy: alternating least squares that bears noise.

What takes the place of `fedals` where noise is added to sums. iALS needs a d × d matrix for every
item, and noise on all of them leaves nothing. With equal weights for touched and untouched pairs
these matrices are one and the same, and an alternating step is

    p_u = sum over the items i of u of q_i,      q_i = sum over the users u of i of p_u,

up to a change of basis that `orthonormal` undoes: the power iteration for the leading factors of
the interaction matrix, which bears noise well (Hardt and Price 2014, "The Noisy Power Method";
private ALS with per-item matrices is Chien et al. 2021). So d numbers for every item are all that
travels:

1. A first round finds the head (`methods.head`) with the small share ``counting`` of the budget.
2. In every later round a device scales p_u to norm 1 and uploads p_u / sqrt(n) for each of its n
   items of the head, which has norm 1. Rounds share the rest of the budget equally.

On the device the g-th last item weighs g^-recency in p_u when it scores, which costs nothing.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec.aggregate import ClientRows, Total, Update
from hushrec.clients import TrainView
from hushrec.compiled import njit
from hushrec.methods.base import Fitted, Method, MethodConfig, Private, Shared, Traits
from hushrec.methods.capabilities import SharesBudget
from hushrec.methods.head import COUNTS, count_items, find_head, only
from hushrec.methods.popularity import distinct_items
from hushrec.rng import Round, Streams
from hushrec.settings import Width
from hushrec.training.inner_product import score_inner_product

Array = NDArray[Any]


class PrivateFedALSConfig(MethodConfig):
    """Options of FedALS under noise."""

    d: Width = 16
    """Width of a user and of an item vector."""
    passes: Annotated[int, Field(ge=1)] = 3
    """Alternating steps; there is one round more, the first."""
    recency: Annotated[float, Field(ge=0)] = 0.9
    """On the device: the g-th last item weighs g^-recency; 0 ignores the order."""
    recent: Annotated[int, Field(ge=1)] = 100
    """On the device: how many of the last items are scored from."""
    counting: Annotated[float, Field(gt=0, lt=1)] = 1 / 16
    """Share of the budget that the first round spends, to find the head."""
    price: Annotated[float, Field(gt=0)] = 2.0
    """What an item in the head costs; the head is the larger the less (`methods.head`)."""


class PrivateFedALS(Method, SharesBudget):
    """The power iteration over devices, on the items that are seen through the noise."""

    name = "fedals"
    Config = PrivateFedALSConfig
    config: PrivateFedALSConfig
    traits = Traits(rounds=4)
    upload_norm = 1.0

    def budget_shares(self) -> tuple[float, ...]:
        """Spend little on counts, the rest on the steps alike."""
        counting, passes = self.config.counting, self.config.passes
        return counting, *[(1 - counting) / passes] * passes

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the item vectors; there is no head yet."""
        drawn = streams.generator("init/items").standard_normal((view.n_items, self.config.d))
        return {
            "items": drawn,
            "head": np.zeros(view.n_items, np.bool_),
            "shares": np.zeros(view.n_items, np.float32),
        }

    def download(self, shared: Shared) -> Shared:
        """Send the head and its vectors."""
        return {"items": shared["items"], "head": shared["head"]}

    def serving(self, shared: Shared) -> Shared:
        """Send the head and its vectors."""
        return self.download(shared)

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Upload items in the first round; later, the client's vector for each of its items."""
        if now.number == 1:
            return Fitted(count_items(view), {})
        items = distinct_items(only(view.positives, shared["head"]))
        ones = np.ones(max(1, int(items.lengths.max(initial=1))))
        vectors = summed_vectors(shared["items"], items.indptr, items.values, ones)
        lengths = np.sqrt((vectors**2).sum(axis=1)) * np.sqrt(items.lengths)
        each = vectors / np.maximum(lengths, 1e-30)[:, None]
        rows = np.repeat(each, items.lengths, axis=0).astype(np.float32)
        uploads = ClientRows(items.indptr, items.values, rows)
        return Fitted(Update(len(view), rows={"items": uploads}), {})

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Find the head, or take a step; vectors outside the head are 0."""
        config = self.config
        if COUNTS in total.rows:
            spent, left, *_ = self.budget_shares()
            noise_std, n_items = total.noise_std * np.sqrt(spent / left), len(shared["items"])
            found = find_head(total, n_items, noise_std, config.price, n_items)
            return {**found, "items": orthonormal(shared["items"], found["head"])}
        if "items" not in total.rows:
            return shared
        new = np.zeros_like(shared["items"])
        ids, summed = total.rows["items"]
        new[ids] = summed
        return {**shared, "items": orthonormal(new, shared["head"])}

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Score by the factors of the last items of the head."""
        past = only(history.positives, shared["head"])
        weights = np.arange(1.0, self.config.recent + 1) ** -self.config.recency
        vectors = summed_vectors(shared["items"], past.indptr, past.values, weights)
        return score_inner_product(shared["items"], vectors)


def orthonormal(items: Array, head: NDArray[np.bool_]) -> Array:
    """Return an orthonormal basis of the head's columns, 0 outside the head."""
    out = np.zeros_like(items)
    basis = np.linalg.qr(items[head])[0]
    out[np.flatnonzero(head), : basis.shape[1]] = basis
    return out


@njit(cache=True, nogil=True)
def summed_vectors(items: Array, indptr: Array, touched: Array, by_place: Array) -> Array:
    """Add up each client's item vectors, the g-th last times ``by_place[g - 1]``, none beyond."""
    out = np.zeros((len(indptr) - 1, items.shape[1]))
    for c in range(len(indptr) - 1):
        last = indptr[c + 1]
        for p in range(last - 1, max(indptr[c], last - len(by_place)) - 1, -1):
            for k in range(items.shape[1]):
                out[c, k] += by_place[last - 1 - p] * items[touched[p], k]
    return out
