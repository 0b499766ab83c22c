"""Recommend on a device from a bundle and a history, without training and without a network.

This file needs numpy and the standard library only and imports nothing else of hushrec, so it can
be copied to a device as it is. `hushrec.serving.bundle` writes what it reads.

::

    recommender = Recommender.load("bundle")
    recommender.touch("1193")
    recommender.recommend(10)

A bundle is a folder with `manifest.json` and `model.safetensors`. Sizes, types, ranges and the
digest are checked before anything is used. The model is one of five kinds: item-to-item weights,
a mixture of experts, counts, item factors with a user vector from the history, or networks of one
user. Their arithmetic is that of `hushrec.methods.forms`. The bundle of one user has that user's
history, to which `touch` adds.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT = "hushrec-bundle-7"
MANIFEST, MODEL = "manifest.json", "model.safetensors"
MOST_BYTES = 2**30
"""A larger file is refused: a device has no use for it."""
SMALLEST, LARGEST = 1e-30, 1e30
"""Of a number above 0: single precision knows hardly more."""
LONGEST = 200
"""Characters of a reason."""
MOST_BRANCHES, MOST_LAYERS, WIDEST = 8, 16, 4096
"""Networks of a sum, layers of a network, outputs of a layer or dimensions of a factor."""
MOST_PRODUCTS = 10**11
"""Multiplications for one list: a device has no use for more."""
ITEM_BLOCK = 1024
"""Items that a network scores at a time."""
DTYPES = {"F16": "<f2", "F32": "<f4", "I8": "i1", "U8": "u1", "U16": "<u2", "I32": "<i4"}
Array = NDArray[Any]
IDS, NUMBERS = ("U16", "I32"), ("F16", "F32")
"""Types that items and weights may have in a file."""
STEEPNESS = np.float32(1.702)
"""Of the sigmoid in the hidden layers of the network."""

Reasons = Callable[[Array], list[tuple[str, int]]]
"""Items -> for each, the largest contribution to its score in words, and the item of the history
that adds most to it, or -1."""
POPULAR = "popular"


class BundleError(ValueError):
    """The bundle is not what it should be."""


@dataclass(frozen=True)
class Suggestion:
    """One item of a recommendation list."""

    item: str
    title: str
    score: float
    because: str = ""
    """The largest contribution to the score, in words: "often after Heat", "popular"."""


class Recommender:
    """A model and one user's history, oldest first."""

    def __init__(
        self, manifest: dict[str, Any], tensors: dict[str, Array], history: Iterable[str] = ()
    ) -> None:
        self.items, self.titles = _catalogue(manifest)
        given = _Given(manifest, dict(tensors), len(self.items))
        model = _MODELS[_one_of(manifest, "model", _MODELS)]
        unknown = manifest.keys() - {*COMMON_KEYS, *model.keys}
        if unknown:
            raise BundleError(f"the manifest has unknown keys {sorted(unknown)}")
        self._repeats = _flag(manifest, "repeats")
        self._popularity: Array | None = None
        if _flag(manifest, "popular"):
            self._popularity = given.take("popularity", ("F32",), len(self.items))
        self.user: str | None = None
        """Whose bundle it is; None for one that serves anybody."""
        self._history: list[int] = []
        if _flag(manifest, "personal"):
            self.user, self._history = _owner(given, self._repeats)
        elif "user" in manifest:
            raise BundleError("the bundle names a user and is not personal")
        self._model = model(given)
        self.fixed = _one_of(manifest, "scores", ("fixed", "from history")) == "fixed"
        """Whether touched items are left out of lists and change no score."""
        if self.fixed is not self._model.fixed:
            raise BundleError("'scores' is not what the model does")
        if given.tensors:
            raise BundleError(f"the model has unknown tensors {sorted(given.tensors)}")
        self._number = {item: number for number, item in enumerate(self.items)}
        for item in history:
            self.touch(item)

    @classmethod
    def load(cls, path: str | Path, history: Iterable[str] = ()) -> Recommender:
        """Read and check a bundle."""
        folder = Path(path)
        manifest = _read_manifest(folder / MANIFEST)
        model = folder / MODEL
        if not model.is_file() or model.stat().st_size != manifest["model_bytes"]:
            raise BundleError(f"{model} is missing or not of the size the manifest says")
        content = model.read_bytes()
        if hashlib.sha256(content).hexdigest() != manifest["model_sha256"]:
            raise BundleError(f"{model} is not the file the manifest describes")
        return cls(manifest, _parse_tensors(content), history)

    @property
    def history(self) -> list[str]:
        """Items that the user touched, oldest first; each once, unless lists may repeat."""
        return [self.items[number] for number in self._history]

    def touch(self, item: str) -> bool:
        """Add an interaction to the history; False if the item is not in the catalogue."""
        number = self._number.get(item)
        if number is None:
            return False
        if number in self._history and not self._repeats:
            self._history.remove(number)
        self._history.append(number)
        return True

    def recommend(
        self,
        k: int = 10,
        only: Iterable[str] | None = None,
        without: Iterable[str] = (),
        seen: bool = False,
    ) -> list[Suggestion]:
        """Return the best k items; ties go to the earlier one in the catalogue.

        Touched items are left out unless ``seen``; ``only`` and ``without`` are ids of items to
        choose from and to leave out. Without a history these are the most popular items.
        """
        past = np.array(self._history[::-1], np.int64)
        if len(past) or self._popularity is None:
            with np.errstate(over="ignore", invalid="ignore"):
                try:
                    scores, reasons = self._model.score(past)
                except np.linalg.LinAlgError:
                    raise BundleError("the model's system has no solution") from None
        else:
            scores, reasons = self._popularity, lambda items: [(POPULAR, -1)] * len(items)
        if not np.isfinite(scores).all():
            raise BundleError("the model has scores that are NaN or infinite")
        allowed = np.full(len(scores), only is None)
        allowed[self._numbers(only or ())] = True
        allowed[self._numbers(without)] = False
        if not (seen or self._repeats):
            allowed[past] = False
        return self._suggested(scores, allowed, k, reasons)

    def similar(self, item: str, k: int = 10) -> list[Suggestion]:
        """Return the k items with the largest weights from an item."""
        (number,) = self._numbers([item])
        weights = self._model.neighbours(number)
        allowed = weights > 0
        allowed[number] = False
        return self._suggested(weights, allowed, k, lambda items: [("", -1)] * len(items))

    def _numbers(self, items: Iterable[str]) -> list[int]:
        """Return the numbers of item ids; refuse unknown ones."""
        ids = list(items)
        for item in ids:
            if item not in self._number:
                raise ValueError(f"item '{item}' is not in the catalogue")
        return [self._number[item] for item in ids]

    def _suggested(
        self, scores: Array, allowed: Array, k: int, reasons: Reasons
    ) -> list[Suggestion]:
        if k < 1:
            raise ValueError(f"k = {k}: a list has at least 1 item")
        left = np.flatnonzero(allowed)
        best = left[_largest(scores[left], min(k, len(left)))]
        best = best[np.argsort(-scores[best], kind="stable")]
        return [
            Suggestion(self.items[n], self.titles[n], float(scores[n]), self._because(*why))
            for n, why in zip(best, reasons(best), strict=True)
        ]

    def _because(self, words: str, item: int) -> str:
        return words.replace("{}", self.titles[item] if item >= 0 else "items of the history")


# ---------------------------------------------------------------- models


COMMON_KEYS = (
    *("format", "method", "model", "personal", "user", "scores", "popular", "repeats"),
    *("model_bytes", "model_sha256", "items", "titles"),
)
"""Keys of every manifest."""


class _Model:
    """How a list is scored."""

    keys: tuple[str, ...] = ()
    """Keys of the manifest that this kind has."""
    fixed = False
    """Whether the scores are the same for every history."""

    def __init__(self, given: _Given) -> None:
        raise NotImplementedError

    def score(self, past: Array) -> tuple[Array, Reasons]:
        """Return the score of every item from a history, latest item first, and the reasons."""
        raise NotImplementedError

    def neighbours(self, item: int) -> Array:
        """Return how near every item is to an item."""
        raise ValueError("the model has neither weights from item to item nor item vectors")


class _Pairs(_Model):
    """Item-to-item weights of the latest items, and popularity."""

    keys = ("because", "recency", "recent", "popularity", "scale")

    def __init__(self, given: _Given) -> None:
        options = given.manifest
        self._table = _Table(given, "", options)
        self._known = given.take("known", ("U8",), given.n_items) > 0
        self._words = _words(options, "because")
        shares = given.take("shares", ("F32",), given.n_items)
        self._prior = shares * np.float32(_number(options, "popularity"))
        self._by_lag = _by_lag(_whole(options, "recent", 1), _number(options, "recency"))

    def score(self, past: Array) -> tuple[Array, Reasons]:
        scores, mean = self._prior.copy(), self._prior.mean()
        past = past[self._known[past]][: len(self._by_lag)]
        for weight, item in zip(self._by_lag, past, strict=False):
            # An item's neighbours are distinct. Unused entries name the item itself with weight 0.
            row = self._table.weights[item].astype(np.float32) * self._table.scale
            scores[self._table.neighbours[item]] += weight * row

        def reasons(items: Array) -> list[tuple[str, int]]:
            """Compare the weights from the history with popularity above the mean."""
            lifted = scores[items] - self._prior[items] >= self._prior[items] - mean
            weights = self._table.between(past, items) * self._by_lag[: len(past), None]
            found = np.where(lifted, _most(past, weights), -2).tolist()
            return [(POPULAR, -1) if item == -2 else (self._words, item) for item in found]

        return scores, reasons

    def neighbours(self, item: int) -> Array:
        return self._table.row(item)


class _Mixture(_Model):
    """Weighted sum of expert scores, and networks of two hidden layers that rerank the best."""

    keys = ("experts", "reranked", "hidden")

    def __init__(self, given: _Given) -> None:
        self._words: list[str] = []
        self._first: list[_Part] = []
        self._parts: list[_Part] = []
        owners: list[int] = []
        experts = given.manifest.get("experts")
        if not isinstance(experts, dict) or not experts:
            raise BundleError("'experts' are not named parts")
        for name, parts in experts.items():
            if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
                raise BundleError("an expert is not a list of parts")
            for index, options in enumerate(parts):
                part = _KINDS[_one_of(options, "kind", _KINDS)](given, f"{name}/{index}/", options)
                self._parts.append(part)
                if index == 0:
                    self._words.append(_words(options, "because"))
                    self._first.append(part)
                owners += [len(self._first) - 1] * part.size
        width = len(owners) + 1
        self._owners = np.array(owners)
        self._weights = given.take("mixture/weights", ("F32",), width - 1)
        self._center = given.take("mixture/center", ("F32",), width)
        self._scale = given.take("mixture/scale", ("F32",), width)
        if not (self._scale > 0).all():
            raise BundleError("a scale is not above 0")
        self._repeats = _flag(given.manifest, "repeats")
        self._best = _whole(given.manifest, "reranked", 0)
        hidden = _whole(given.manifest, "hidden", 1)
        shapes = (width, hidden), (hidden,), (hidden, hidden), (hidden,), (hidden,), (1,)
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        networks = given.take("mixture/networks", ("F32",), None, int(ends[-1]))
        if not 1 <= len(networks) <= MOST_BRANCHES:
            raise BundleError("too few or too many networks")
        cuts = zip(np.split(networks, ends[:-1], axis=1), shapes, strict=True)
        self._networks = list(zip(*(cut.reshape(-1, *s) for cut, s in cuts), strict=True))

    def score(self, past: Array) -> tuple[Array, Reasons]:
        parts = np.concatenate([part.score(past) for part in self._parts])
        scores = self._weights @ parts
        self._rerank(scores, parts, past)

        def reasons(items: Array) -> list[tuple[str, int]]:
            """Return the expert that raises each item most above the mean item."""
            lifts = np.zeros((len(self._words), len(items)))
            above = parts[:, items] - parts.mean(axis=1, keepdims=True)
            np.add.at(lifts, self._owners, self._weights[:, None] * above)
            best, out = lifts.argmax(axis=0), np.full(len(items), -1)
            for n in np.unique(best):
                out[best == n] = _most(past, self._first[n].influence(past, items[best == n]))
            return [(self._words[n], item) for n, item in zip(best, out.tolist(), strict=True)]

        return scores, reasons

    def neighbours(self, item: int) -> Array:
        rows = [part.table.row(item) for part in self._first if isinstance(part, _Lags)]
        if not rows:
            raise ValueError("the model has no weights from item to item")
        return np.asarray(sum(row / max(row.max(), np.float32(1e-12)) for row in rows))

    def _rerank(self, scores: Array, parts: Array, past: Array) -> None:
        """Replace the best scores, of items that lists may hold, by the mean of the networks'.

        The others stay below them.
        """
        left = np.ones(len(scores), np.bool_)
        left[past] = self._repeats
        best = np.flatnonzero(left)
        best = best[_largest(scores[best], min(self._best, len(best)))]
        if len(best) == 0:
            return
        length = np.full((1, len(best)), math.log(max(len(past), 1)), np.float32)
        inputs = (np.concatenate([parts[:, best], length]).T - self._center) / self._scale
        logits, share = np.zeros(len(best), np.float32), np.float32(1 / len(self._networks))
        for w1, b1, w2, b2, w3, by in self._networks:
            logits += share * (by * scores[best] + _soft(_soft(inputs @ w1 + b1) @ w2 + b2) @ w3)
        scores += min(logits.min() - scores[best].min(), np.float32(0))
        scores[best] = logits


class _Counts(_Model):
    """A score for every item, and ``own`` more for each time that the user had it."""

    keys = ("own",)

    def __init__(self, given: _Given) -> None:
        self._scores = given.take("scores", ("F32",), given.n_items)
        self._own = np.float32(_number(given.manifest, "own"))
        self.fixed = bool(self._own == 0)

    def score(self, past: Array) -> tuple[Array, Reasons]:
        scores = self._scores.copy()
        np.add.at(scores, past, self._own)
        return scores, _no_reasons


class _FoldIn(_Model):
    """Inner products of item vectors with a vector from the history, solved or summed."""

    keys = ("scale", "vector", "ridge", "unseen", "frequency", "factor", "recency", "recent")

    def __init__(self, given: _Given) -> None:
        options = given.manifest
        items = given.take("items", NUMBERS, given.n_items, None)
        if items.shape[1] > WIDEST or items.size * items.shape[1] > MOST_PRODUCTS:
            raise BundleError("the item vectors are too wide for a device")
        self._items = items.astype(float) * _number(options, "scale", SMALLEST)
        self._solved = _one_of(options, "vector", ("solved", "sum")) == "solved"
        if self._solved:
            self._ridge, self._factor = (_number(options, n, SMALLEST) for n in ("ridge", "factor"))
            self._unseen, self._frequency = (_number(options, n) for n in ("unseen", "frequency"))
            self._everything = self._unseen * (self._items.T @ self._items)
        else:
            self._known = given.take("known", ("U8",), given.n_items) > 0
            lags = np.arange(1.0, _whole(options, "recent", 1) + 1)
            self._by_lag = lags ** -_number(options, "recency")

    def score(self, past: Array) -> tuple[Array, Reasons]:
        vector = self._solve(past) if self._solved else self._sum(past)
        return self._items.astype(np.float32) @ vector.astype(np.float32), _no_reasons

    def _solve(self, past: Array) -> Array:
        mine = self._items[np.unique(past)]
        weight = len(mine) + self._unseen * len(self._items)
        ridge = self._ridge * np.float64(weight) ** self._frequency
        matrix = self._everything + mine.T @ mine + ridge * np.eye(mine.shape[1])
        return np.asarray(np.linalg.solve(matrix, mine.sum(axis=0)) * self._factor)

    def _sum(self, past: Array) -> Array:
        past = past[self._known[past]][: len(self._by_lag)]
        return np.asarray(self._by_lag[: len(past)] @ self._items[past])

    def neighbours(self, item: int) -> Array:
        return _cosines(self._items, item)


class _Networks(_Model):
    """The sum of networks over item rows, for one user: the history changes no score."""

    keys, fixed = ("branches",), True

    def __init__(self, given: _Given) -> None:
        branches = given.manifest.get("branches")
        if not isinstance(branches, list) or not 1 <= len(branches) <= MOST_BRANCHES:
            raise BundleError(f"'branches' are not 1 to {MOST_BRANCHES} networks")
        self._branches = [_Branch(given, f"{n}/", options) for n, options in enumerate(branches)]
        self._scores: Array | None = None

    def score(self, past: Array) -> tuple[Array, Reasons]:
        if self._scores is None:
            self._scores = np.asarray(sum(branch.score() for branch in self._branches))
        return self._scores, _no_reasons

    def neighbours(self, item: int) -> Array:
        return _cosines(np.concatenate([branch.rows for branch in self._branches], 1), item)


class _Branch:
    """Dense layers over item rows, with ReLU between them; the last has one output."""

    def __init__(self, given: _Given, name: str, options: Any) -> None:
        if not isinstance(options, dict) or options.keys() != {"scale", "layers"}:
            raise BundleError("a network has other keys than 'scale' and 'layers'")
        rows = given.take(name + "rows", NUMBERS, given.n_items, None)
        self.rows = rows.astype(np.float32) * np.float32(_number(options, "scale", SMALLEST))
        depth, width = _whole(options, "layers", 1), rows.shape[1]
        if depth > MOST_LAYERS:
            raise BundleError(f"a network has more than {MOST_LAYERS} layers")
        self._layers: list[tuple[Array, Array]] = []
        for number in range(depth):
            weight = given.take(f"{name}{number}/weight", ("F32",), width, None)
            width = weight.shape[1]
            self._layers.append((weight, given.take(f"{name}{number}/bias", ("F32",), width)))
            if width > WIDEST:
                raise BundleError(f"a layer has more than {WIDEST} outputs")
        if width != 1:
            raise BundleError("the last layer of a network has one output")
        if given.n_items * sum(weight.size for weight, _ in self._layers) > MOST_PRODUCTS:
            raise BundleError("a network is too large for a device")

    def score(self) -> Array:
        scores = np.empty(len(self.rows), np.float32)
        for start in range(0, len(scores), ITEM_BLOCK):
            out = self.rows[start : start + ITEM_BLOCK]
            for number, (weight, bias) in enumerate(self._layers):
                out = (out if number == 0 else np.maximum(out, 0)) @ weight + bias
            scores[start : start + ITEM_BLOCK] = out[:, 0]
        return scores


_MODELS: dict[str, type[_Model]] = {
    "pairs": _Pairs,
    "mixture": _Mixture,
    "counts": _Counts,
    "factors": _FoldIn,
    "network": _Networks,
}


class _Table:
    """Item-to-item weights: the neighbours of each item, and their weights divided by ``scale``."""

    def __init__(self, given: _Given, name: str, options: Mapping[str, Any]) -> None:
        self.neighbours = given.take(name + "neighbours", IDS, given.n_items, None)
        self.weights = given.take(name + "weights", NUMBERS, *self.neighbours.shape)
        self.scale = np.float32(_number(options, "scale"))
        ids = self.neighbours
        if ids.size and not (ids.min() >= 0 and ids.max() < given.n_items):
            raise BundleError("a neighbour is not in the catalogue")

    def between(self, past: Array, items: Array) -> Array:
        """Return the weights from each item of a history to some items: [history, items]."""
        index = np.full(len(self.neighbours), -1)
        index[items] = np.arange(len(items))
        at, out = index[self.neighbours[past]], np.zeros((len(past), len(items)), np.float32)
        rows, columns = np.nonzero(at >= 0)
        np.add.at(out, (rows, at[rows, columns]), self.weights[past[rows], columns] * self.scale)
        return out

    def row(self, item: int) -> Array:
        """Return the weights from an item to every item."""
        weights = self.weights[item].astype(np.float32) * self.scale
        return np.bincount(self.neighbours[item], weights, len(self.neighbours)).astype("f4")


class _PairIndex:
    """Pairs of items that the tables of an ensemble have weights of, item by item."""

    def __init__(self, given: _Given) -> None:
        self._starts = given.take("pairs/starts", ("I32",), given.n_items + 1).astype(np.int64)
        gaps = given.take("pairs/gaps", ("U8",), None)
        lengths, self.size = np.diff(self._starts), len(gaps)
        if self._starts[0] != 0 or (lengths < 0).any() or self._starts[-1] > self.size:
            raise BundleError("the items' pairs do not follow each other")
        ways = np.cumsum(gaps[: self._starts[-1]].astype(np.int64) + 1)
        before = np.concatenate([[0], ways])[self._starts[:-1]]
        self.columns = ways - np.repeat(before, lengths) - 1
        if len(self.columns) and self.columns.max() >= given.n_items:
            raise BundleError("a pair has an item that is not in the catalogue")

    def entries(self, items: Array) -> tuple[Array, Array]:
        """Return the pairs of items, and which of the items each pair is of."""
        starts, ends = self._starts[items], self._starts[items + 1]
        rows = np.repeat(np.arange(len(items)), ends - starts)
        before = np.cumsum(ends - starts) - (ends - starts)
        return np.arange(len(rows)) + (starts - before)[rows], rows


class _PackedTable:
    """Weights of pairs: a code times its size, times the scale of the pair's first item."""

    def __init__(self, given: _Given, name: str) -> None:
        self._index = given.pairs
        codes = given.take(name + "codes", ("I8",), self._index.size).astype(np.float32)
        self._squares = codes * np.abs(codes)
        self._scales = given.take(name + "scales", ("F32",), given.n_items)

    def add_up(self, items: Array, by_item: Array) -> Array:
        """Return the sum of the weights from items to every item, each times its item's factor."""
        entries, rows = self._index.entries(items)
        weights = self._squares[entries] * (self._scales[items] * by_item)[rows]
        return np.bincount(self._index.columns[entries], weights, len(self._scales))

    def between(self, past: Array, items: Array) -> Array:
        """Return the weights from each item of a history to some items: [history, items]."""
        index = np.full(len(self._scales), -1)
        index[items] = np.arange(len(items))
        entries, rows = self._index.entries(past)
        at, weights = index[self._index.columns[entries]], self._squares[entries]
        out, met = np.zeros((len(past), len(items)), np.float32), at >= 0
        np.add.at(out, (rows[met], at[met]), weights[met] * self._scales[past[rows[met]]])
        return out

    def row(self, item: int) -> Array:
        """Return the weights from an item to every item."""
        return self.add_up(np.array([item]), np.ones(1, np.float32)).astype(np.float32)


class _Part:
    """Some scores of an expert: ``size`` of them for every item."""

    size: int

    def score(self, past: Array) -> Array:
        """Return the scores from a history, latest item first: [scores, items]."""
        raise NotImplementedError

    def influence(self, past: Array, items: Array) -> Array:
        """Return what each item of a history adds to the scores of items: [history, items]."""
        return np.zeros((len(past), len(items)), np.float32)


class _Lags(_Part):
    """Sums of weights from the latest items, by lag, and their logarithms."""

    def __init__(self, given: _Given, name: str, options: Mapping[str, Any]) -> None:
        self.table, self._n_items = _PackedTable(given, name), given.n_items
        self._ends: list[int | None] = [*_wholes(options, "ends", 0)]
        if self._ends[-1] == 0:
            self._ends[-1] = None
        if any(not (a and (b is None or b > a)) for a, b in pairwise(self._ends)):
            raise BundleError(f"'ends' = {options['ends']} do not ascend")
        self._recency = _number(options, "recency")
        self._floor = _number(options, "floor", SMALLEST)
        self._of_sum = _one_of(options, "logs", ("sum", "each")) == "sum"
        self.size = len(self._ends) + self._of_sum

    def score(self, past: Array) -> Array:
        by_lag = _by_lag(len(past), self._recency)
        out = np.zeros((self.size, self._n_items), np.float32)
        start: int | None = 0
        for row, end in zip(out, self._ends, strict=False):
            row[:] = self.table.add_up(past[start:end], by_lag[start:end])
            start = end
        if self._of_sum:
            out[-1] = _log(out[:-1].sum(axis=0), self._floor)
            return out
        return _log(out, self._floor)

    def influence(self, past: Array, items: Array) -> Array:
        out = self.table.between(past, items) * _by_lag(len(past), self._recency)[:, None]
        out[len(past) if self._ends[-1] is None else self._ends[-1] :] = 0
        return out


class _Factors(_Part):
    """Inner products with the user's vector, their logarithm, and products with recent items."""

    size = 3

    def __init__(self, given: _Given, name: str, options: Mapping[str, Any]) -> None:
        codes = given.take(name + "vectors", ("I8",), given.n_items, None)
        self._vectors = codes * given.take(name + "units", ("F32",), codes.shape[1])
        self._unseen, self._recent = _number(options, "unseen"), _whole(options, "recent", 0)
        self._ridge, self._floor = (_number(options, n, SMALLEST) for n in ("ridge", "floor"))
        vectors = self._vectors.astype(float)
        self._everything = self._unseen * (vectors.T @ vectors)

    def score(self, past: Array) -> Array:
        mine = self._vectors[list(dict.fromkeys(past.tolist()))].astype(float)
        ridge = self._ridge * (len(mine) + self._unseen * len(self._vectors))
        matrix = self._everything + mine.T @ mine + ridge * np.eye(mine.shape[1])
        own = np.linalg.solve(matrix, mine.sum(axis=0))
        recent = _by_lag(min(self._recent, len(past)), 1.0) @ self._vectors[past[: self._recent]]
        by_own, by_recent = np.stack([own, recent]).astype(np.float32) @ self._vectors.T
        return np.stack([by_own, _log(by_own, self._floor), by_recent])


class _Shares(_Part):
    """An item's share of all interactions, and its logarithm."""

    size = 2

    def __init__(self, given: _Given, name: str, options: Mapping[str, Any]) -> None:
        shares = given.take(name + "shares", ("F32",), given.n_items)
        most = max(shares.max(), np.float32(1))
        logs = _log(shares, _number(options, "floor", SMALLEST))
        self._scores = np.stack([shares / most, logs])

    def score(self, past: Array) -> Array:
        return self._scores


class _Groups(_Part):
    """Mean affinity of the latest items' categories to every item, by field and span."""

    def __init__(self, given: _Given, name: str, options: Mapping[str, Any]) -> None:
        self._fields, self._latest = _wholes(options, "sizes", 1), _wholes(options, "latest", 0)
        self._members = given.take(name + "members", NUMBERS, given.n_items, sum(self._fields))
        size = sum(self._fields)
        relations = given.take(name + "relations", NUMBERS, size, size).astype(np.float32)
        members = self._members.astype(np.float32)
        self._affinity, start = np.zeros((size, given.n_items), np.float32), 0
        for size in self._fields:
            mine = slice(start, start + size)
            self._affinity[mine] = relations[mine, mine] @ members[:, mine].T
            start += size
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
            out[rows] = means[:, mine][:, met] @ self._affinity[mine][met]
            start += size
        return out

    def influence(self, past: Array, items: Array) -> Array:
        affinity = np.ascontiguousarray(self._affinity[:, items].T, np.float32)
        members = self._members[past].astype(np.float32)
        return np.asarray((members[:, None] * affinity).sum(axis=2))


class _Own(_Part):
    """How often, how recently and how regularly the user had an item before."""

    size = 10

    def __init__(self, given: _Given, name: str, options: Mapping[str, Any]) -> None:
        self._counts, self._agos = _wholes(options, "counts", 1), _wholes(options, "agos", 1)
        n_states = (len(self._counts) + 1) * (len(self._agos) + 1)
        self._rates = given.take(name + "rates", ("F32",), given.n_items)
        self._states = given.take(name + "states", ("F32",), n_states)
        latest = given.take(name + "latest", ("F32",), given.n_items)
        self._latest = _log(latest, _number(options, "floor", SMALLEST))

    def score(self, past: Array) -> Array:
        out = np.zeros((self.size, len(self._rates)), np.float32)
        out[9] = self._latest
        if not len(past):
            return out
        ago = _baskets_ago(past)
        mine, at = np.unique(past, return_inverse=True)
        n, recent = np.bincount(at), np.bincount(at, 1 / ago)
        g, h = np.full(len(mine), len(past)), np.zeros(len(mine), np.int64)
        np.minimum.at(g, at, ago)
        np.maximum.at(h, at, ago)
        state = np.searchsorted(self._counts, n) * (len(self._agos) + 1)
        state += np.searchsorted(self._agos, g)
        regular = np.log(np.where(n > 1, g * (n - 1) / np.maximum(h - g, 1), 1))
        again = math.log((len(past) - len(mine) + 1) / (len(past) + 4))
        out[:4, mine] = np.ones(len(mine)), np.log1p(n), np.log1p(recent), np.log(g)
        out[4:6, mine] = np.log(n / h), regular
        out[6:8, mine] = self._rates[mine], self._states[state]
        out[8, mine] = again
        return out


_KINDS: dict[str, Callable[[_Given, str, Mapping[str, Any]], _Part]] = {
    "lags": _Lags,
    "factors": _Factors,
    "shares": _Shares,
    "groups": _Groups,
    "own": _Own,
}


# ---------------------------------------------------------------- arithmetic


def _baskets_ago(past: Array) -> Array:
    """Return how many baskets ago each item of a history is, latest first, the last one being 1.

    A new basket begins with an item that the one before has already.
    """
    number, basket, out = 0, set[int](), []
    for item in past[::-1].tolist():
        if item in basket:
            number, basket = number + 1, set()
        basket.add(item)
        out.append(number)
    return number + 1 - np.array(out[::-1], np.int64)


def _by_lag(length: int, recency: float) -> Array:
    return (np.arange(1, length + 1) ** -float(recency)).astype(np.float32)


def _log(values: Array, floor: float) -> Array:
    return np.asarray(np.log(np.maximum(values, np.float32(0)) + np.float32(floor)))


def _most(past: Array, influence: Array) -> Array:
    """Return the item of the history with the largest influence on each item; -1 if none has."""
    if not len(past):
        return np.full(influence.shape[1], -1)
    return np.where(influence.max(axis=0) > 0, past[influence.argmax(axis=0)], -1)


def _no_reasons(items: Array) -> list[tuple[str, int]]:
    return [("", -1)] * len(items)


def _cosines(rows: Array, item: int) -> Array:
    """Return the cosine of every row with the row of an item."""
    if rows.shape[1] < 2:
        raise ValueError("the model has neither weights from item to item nor item vectors")
    units = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return np.asarray(units @ units[item], np.float32)


def _soft(values: Array) -> Array:
    """Multiply every value by its sigmoid."""
    return np.asarray(values / (1 + np.exp(np.clip(-STEEPNESS * values, -80, 80))))


def _largest(scores: Array, count: int) -> Array:
    """Return where the largest scores are, ascending; ties to the earlier."""
    if count == 0:
        return np.zeros(0, np.int64)
    bound = np.partition(scores, len(scores) - count)[len(scores) - count]
    ties = np.flatnonzero(scores == bound)
    above = np.flatnonzero(scores > bound)
    return np.sort(np.concatenate([above, ties[: count - len(above)]]))


# ---------------------------------------------------------------- reading and checking


@dataclass(frozen=True)
class _Given:
    """A manifest and the tensors that nothing has taken yet."""

    manifest: dict[str, Any]
    tensors: dict[str, Array]
    n_items: int

    @cached_property
    def pairs(self) -> _PairIndex:
        """The pairs that all tables of an ensemble have in common."""
        return _PairIndex(self)

    def take(self, name: str, kinds: Sequence[str], *shape: int | None) -> Array:
        """Return a tensor of one of these types and this shape; None is any length."""
        if name not in self.tensors:
            raise BundleError(f"the model has no '{name}'")
        found = self.tensors.pop(name)
        if found.dtype not in [DTYPES[kind] for kind in kinds]:
            raise BundleError(f"'{name}' has the type {found.dtype}")
        fits = [wanted in (None, size) for wanted, size in zip(shape, found.shape, strict=False)]
        if len(shape) != found.ndim or not all(fits):
            raise BundleError(f"'{name}' has the shape {found.shape}, not {shape}")
        if not np.isfinite(found).all():
            raise BundleError(f"'{name}' has a number that is not finite")
        return found


def _catalogue(manifest: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    for name in ("items", "titles"):
        texts = manifest.get(name)
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise BundleError(f"'{name}' is not a list of texts")
    items, titles = manifest["items"], manifest["titles"]
    if not items or len(set(items)) != len(items) or len(titles) != len(items):
        raise BundleError("the items are not a catalogue: each once, each with its title")
    return items, titles


def _owner(given: _Given, repeats: bool) -> tuple[str, list[int]]:
    """Return the user of a personal bundle and the user's history, oldest item first."""
    user, past = given.manifest.get("user"), given.take("history", ("I32",), None)
    if not isinstance(user, str):
        raise BundleError("'user' is not an id")
    history = [int(item) for item in past]
    if history and not 0 <= min(history) <= max(history) < given.n_items:
        raise BundleError("an item of the history is not in the catalogue")
    if not repeats and len(set(history)) != len(history):
        raise BundleError("the history has an item twice")
    return user, history


def _one_of(options: Mapping[str, Any], name: str, allowed: Iterable[str]) -> str:
    value = options.get(name)
    if not isinstance(value, str) or value not in allowed:
        raise BundleError(f"'{name}' is none of {', '.join(allowed)}")
    return value


def _number(options: Mapping[str, Any], name: str, least: float = 0.0) -> float:
    value: Any = options.get(name)
    if type(value) not in (int, float) or not least <= value <= LARGEST:  # true for NaN as well
        raise BundleError(f"'{name}' is not a number from {least:g} to {LARGEST:g}")
    return float(value)


def _flag(options: Mapping[str, Any], name: str) -> bool:
    value = options.get(name)
    if type(value) is not bool:
        raise BundleError(f"'{name}' is neither true nor false")
    return value


def _words(options: Mapping[str, Any], name: str) -> str:
    value = options.get(name)
    if not isinstance(value, str) or len(value) > LONGEST:
        raise BundleError(f"'{name}' is not a short text")
    return value


def _whole(options: Mapping[str, Any], name: str, least: int) -> int:
    value = options.get(name)
    if type(value) is not int or not least <= value <= 10**6:
        raise BundleError(f"'{name}' is not a number of items")
    return value


def _wholes(options: Mapping[str, Any], name: str, least: int) -> list[int]:
    values = options.get(name)
    if not isinstance(values, list) or not values:
        raise BundleError(f"'{name}' is not a list of numbers")
    return [_whole({name: value}, name, least) for value in values]


def _read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest, and check what the model file is checked by."""
    if not path.is_file() or path.stat().st_size > MOST_BYTES:
        raise BundleError(f"{path} is missing or too large")
    try:
        manifest = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is not JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise BundleError(f"{path} is not a bundle of the format {FORMAT}")
    size = manifest.get("model_bytes")
    if type(size) is not int or not 8 <= size <= MOST_BYTES:
        raise BundleError(f"{path}: 'model_bytes' is not a size")
    if not isinstance(manifest.get("model_sha256"), str):
        raise BundleError(f"{path}: 'model_sha256' is not a digest")
    return manifest


def _parse_tensors(content: bytes) -> dict[str, NDArray[Any]]:
    """Read a safetensors file: the length of a JSON header, the header, the numbers."""
    start = 8 + int.from_bytes(content[:8], "little")
    if start > len(content):
        raise BundleError("the model's header is longer than its file")
    try:
        header = json.loads(content[8:start])
        header.pop("__metadata__", None)
        out, end = {}, start
        for name, spec in sorted(header.items(), key=lambda entry: entry[1]["data_offsets"]):
            dtype, shape = np.dtype(DTYPES[spec["dtype"]]), tuple(spec["shape"])
            first, last = (start + offset for offset in spec["data_offsets"])
            if first != end or last - first != dtype.itemsize * math.prod(shape):
                raise BundleError(f"'{name}' does not have the size its header says")
            if any(type(n) is not int or n < 0 for n in shape) or last > len(content):
                raise BundleError(f"'{name}' has an impossible shape")
            out[name] = np.frombuffer(content[first:last], dtype).reshape(shape)
            end = last
    except BundleError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise BundleError(f"the model's header is malformed: {error!r}") from None
    if end != len(content):
        raise BundleError("the model has bytes that belong to nothing")
    return out
