"""The models of bundles: item-to-item weights, or a mixture of experts.

The arithmetic of the mixture is that of `hushrec.methods.statistics.fedmix` and its experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from .reading import Array, BundleError, Given, experts, floor, number, one_of, whole, wholes

IDS, NUMBERS = ("U16", "I32"), ("F16", "F32")
"""Types that items and weights may have in a file."""
STEEPNESS = np.float32(1.702)
"""Of the sigmoid in the hidden layers of the network."""

Experts = Callable[[Array], list[str]]
"""Items -> for each, the expert with the largest contribution to its score."""


class BundleModel(Protocol):
    """A model that scores items from a history."""

    def score(self, past: Array) -> tuple[Array, Experts]:
        """Score every item from a history, latest item first."""
        ...


class Pairs:
    """Item-to-item weights of the latest items, and popularity."""

    def __init__(self, given: Given) -> None:
        options = given.manifest
        self._table = _Table(given, "", options)
        self._known = given.take("known", ("U8",), given.n_items) > 0
        popularity = np.float32(number(options, "popularity"))
        self._prior = given.take("shares", ("F32",), given.n_items) * popularity
        self._by_lag = _by_lag(whole(options, "recent", 1), number(options, "recency"))

    def score(self, past: Array) -> tuple[Array, Experts]:
        """Add up the weights of the latest known items."""
        scores = self._prior.copy()
        for weight, item in zip(self._by_lag, past[self._known[past]], strict=False):
            # An item's neighbours are distinct. Unused entries name the item itself, which is in
            # the history and not recommended.
            row = self._table.weights[item].astype(np.float32) * self._table.scale
            scores[self._table.neighbours[item]] += weight * row
        return scores, lambda items: [""] * len(items)


class Mixture:
    """Weighted sum of expert scores, and a network of two hidden layers that reranks the best."""

    def __init__(self, given: Given) -> None:
        self._names: list[str] = []
        self._parts: list[_Part] = []
        owners: list[int] = []
        for name, parts in experts(given.manifest):
            for index, options in enumerate(parts):
                part = _KINDS[one_of(options, "kind", _KINDS)](given, f"{name}/{index}/", options)
                self._parts.append(part)
                owners += [len(self._names)] * part.size
            self._names.append(name)
        width = len(owners) + 1
        self._owners = np.array(owners)
        self._weights = given.take("mixture/weights", ("F32",), width - 1)
        self._center = given.take("mixture/center", ("F32",), width)
        self._scale = given.take("mixture/scale", ("F32",), width)
        if not (self._scale > 0).all():
            raise BundleError("a scale is not above 0")
        self._best = whole(given.manifest, "reranked", 0)
        hidden = whole(given.manifest, "hidden", 1)
        shapes = (width, hidden), (hidden,), (hidden, hidden), (hidden,), (hidden,), (1,)
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        flat = given.take("mixture/network", ("F32",), int(ends[-1]))
        cut = np.split(flat, ends[:-1])
        self._layers = [layer.reshape(shape) for layer, shape in zip(cut, shapes, strict=True)]

    def score(self, past: Array) -> tuple[Array, Experts]:
        """Weigh the experts' scores and rerank the best items."""
        parts = np.concatenate([part.score(past) for part in self._parts])
        scores = self._weights @ parts
        self._rerank(scores, parts, past)

        def experts(items: Array) -> list[str]:
            """Return the expert that raises each item most above the mean item."""
            lifts = np.zeros((len(self._names), len(items)))
            above = parts[:, items] - parts.mean(axis=1, keepdims=True)
            np.add.at(lifts, self._owners, self._weights[:, None] * above)
            return [self._names[n] for n in lifts.argmax(axis=0)]

        return scores, experts

    def _rerank(self, scores: Array, parts: Array, past: Array) -> None:
        """Replace the scores of the best new items by the network's; the others stay below them."""
        untouched = scores.copy()
        untouched[past] = -np.inf
        best = largest(untouched, min(self._best, len(scores) - len(past)))
        if len(best) == 0:
            return
        length = np.full((1, len(best)), math.log(max(len(past), 1)), np.float32)
        inputs = (np.concatenate([parts[:, best], length]).T - self._center) / self._scale
        w1, b1, w2, b2, w3, multiple = self._layers
        logits = multiple * scores[best] + _soft(_soft(inputs @ w1 + b1) @ w2 + b2) @ w3
        scores += min(logits.min() - scores[best].min(), np.float32(0))
        scores[best] = logits


# ---------------------------------------------------------------- the parts of a mixture


class _Part(Protocol):
    size: int
    """Number of scores per item."""

    def score(self, past: Array) -> Array:
        """Return the expert's scores from a history, latest item first: [scores, items]."""
        ...


class _Table:
    """Item-to-item weights: the neighbours of each item, and their weights divided by ``scale``."""

    def __init__(self, given: Given, name: str, options: Mapping[str, Any]) -> None:
        self.neighbours = given.take(name + "neighbours", IDS, given.n_items, None)
        self.weights = given.take(name + "weights", NUMBERS, *self.neighbours.shape)
        self.scale = np.float32(number(options, "scale"))
        ids = self.neighbours
        if ids.size and not (ids.min() >= 0 and ids.max() < given.n_items):
            raise BundleError("a neighbour is not in the catalogue")


class _Lags:
    """Sums of weights from the latest items, by lag, and their logarithms."""

    def __init__(self, given: Given, name: str, options: Mapping[str, Any]) -> None:
        self._table = _Table(given, name, options)
        self._ends: list[int | None] = [*wholes(options, "ends", 0)]
        if self._ends[-1] == 0:
            self._ends[-1] = None
        if any(not (a and (b is None or b > a)) for a, b in pairwise(self._ends)):
            raise BundleError(f"'ends' = {options['ends']} do not ascend")
        self._recency, self._floor = number(options, "recency"), floor(options)
        self._of_sum = one_of(options, "logs", ("sum", "each")) == "sum"
        self.size = len(self._ends) + self._of_sum

    def score(self, past: Array) -> Array:
        table, by_lag = self._table, _by_lag(len(past), self._recency) * self._table.scale
        out = np.zeros((self.size, len(table.neighbours)), np.float32)
        start: int | None = 0
        for row, end in zip(out, self._ends, strict=False):
            items = past[start:end]
            weights = table.weights[items] * by_lag[start:end, None]
            row[:] = np.bincount(table.neighbours[items].ravel(), weights.ravel(), len(row))
            start = end
        if self._of_sum:
            out[-1] = _log(out[:-1].sum(axis=0), self._floor)
            return out
        return _log(out, self._floor)


class _Factors:
    """Inner products with the user's vector, their logarithm, and products with recent items."""

    size = 3

    def __init__(self, given: Given, name: str, options: Mapping[str, Any]) -> None:
        self._vectors = given.take(name + "vectors", NUMBERS, given.n_items, None).astype("f4")
        self._unseen, self._ridge = number(options, "unseen"), floor(options, "ridge")
        self._floor, self._recent = floor(options), whole(options, "recent", 0)
        vectors = self._vectors.astype(float)
        self._everything = self._unseen * (vectors.T @ vectors)

    def score(self, past: Array) -> Array:
        mine = self._vectors[past].astype(float)
        ridge = self._ridge * (len(past) + self._unseen * len(self._vectors))
        matrix = self._everything + mine.T @ mine + ridge * np.eye(mine.shape[1])
        own = np.linalg.solve(matrix, mine.sum(axis=0))
        recent = _by_lag(min(self._recent, len(past)), 1.0) @ self._vectors[past[: self._recent]]
        by_own, by_recent = np.stack([own, recent]).astype(np.float32) @ self._vectors.T
        return np.stack([by_own, _log(by_own, self._floor), by_recent])


class _Shares:
    """An item's share of all interactions, and its logarithm."""

    size = 2

    def __init__(self, given: Given, name: str, options: Mapping[str, Any]) -> None:
        shares = given.take(name + "shares", ("F32",), given.n_items)
        most = max(shares.max(), np.float32(1))
        self._scores = np.stack([shares / most, _log(shares, floor(options))])

    def score(self, past: Array) -> Array:
        return self._scores


class _Groups:
    """Mean affinity of the latest items' categories to every item, by field and span."""

    def __init__(self, given: Given, name: str, options: Mapping[str, Any]) -> None:
        self._fields, self._latest = wholes(options, "sizes", 1), wholes(options, "latest", 0)
        self._members = given.take(name + "members", NUMBERS, given.n_items, sum(self._fields))
        self._affinity = given.take(name + "said", NUMBERS, *self._members.shape[::-1])
        self.size = len(self._fields) * len(self._latest)

    def score(self, past: Array) -> Array:
        out, start = np.zeros((self.size, len(self._members)), np.float32), 0
        spans = [past[: latest or len(past)] for latest in self._latest]
        sums = [self._members[span].sum(axis=0, dtype=np.float32) for span in spans]
        means = np.stack([s / max(len(span), 1) for s, span in zip(sums, spans, strict=True)])
        for field, size in enumerate(self._fields):
            mine = slice(start, start + size)
            met = means[:, mine].any(axis=0)
            rows = slice(field * len(spans), (field + 1) * len(spans))
            out[rows] = means[:, mine][:, met] @ self._affinity[mine][met].astype(np.float32)
            start += size
        return out


_KINDS: dict[str, Callable[[Given, str, Mapping[str, Any]], _Part]] = {
    "lags": _Lags,
    "factors": _Factors,
    "shares": _Shares,
    "groups": _Groups,
}


# ---------------------------------------------------------------- arithmetic


def _by_lag(length: int, recency: float) -> Array:
    return (np.arange(1, length + 1) ** -float(recency)).astype(np.float32)


def _log(values: Array, floor: float) -> Array:
    out: Array = np.log(np.maximum(values, np.float32(0)) + np.float32(floor))
    return out


def _soft(values: Array) -> Array:
    """Multiply every value by its sigmoid."""
    out: Array = values / (1 + np.exp(np.clip(-STEEPNESS * values, -80, 80)))
    return out


def largest(scores: Array, count: int) -> Array:
    """Return where the largest scores are, ascending; ties to the earlier."""
    if count == 0:
        return np.zeros(0, np.int64)
    bound = np.partition(scores, len(scores) - count)[len(scores) - count]
    ties = np.flatnonzero(scores == bound)
    above = np.flatnonzero(scores > bound)
    return np.sort(np.concatenate([above, ties[: count - len(above)]]))
