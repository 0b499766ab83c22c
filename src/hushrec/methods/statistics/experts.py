"""What an expert of FedMix is, and how experts are counted and learnt.

`Counting` splits the sums over one round or several. Models are nested: trees of named arrays.
Messages, checkpoints, digests and byte counts hold flat names; the names of a path are joined here,
and nowhere else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat

from hushrec.aggregation import ClientRows, KeyedRows, Total
from hushrec.config import Count, Share, Width, find
from hushrec.data.views import TrainView
from hushrec.errors import ConfigError
from hushrec.kernels import pairs as pair_kernels
from hushrec.methods.base import Array, MethodConfig, Reason, Scores, Shared
from hushrec.methods.baselines import distinct_items, where
from hushrec.methods.forms import Part
from hushrec.methods.statistics.pair_weights import Keys, Sums, reasons_from


def joined(*path: str) -> str:
    """Return the flat name of a path."""
    return "/".join(path)


def flatten(tree: Mapping[str, Any]) -> dict[str, Array]:
    """Return the arrays of a tree by their flat names; its values are arrays or further trees."""
    out: dict[str, Array] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            out |= {joined(name, below): array for below, array in flatten(value).items()}
        else:
            out[name] = value
    return out


def unflatten(flat: Mapping[str, Array]) -> dict[str, Any]:
    """Return the tree that `flatten` wrote."""
    tree: dict[str, Any] = {}
    for name, array in flat.items():
        *path, last = name.split("/")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = array
    return tree


class ExpertsConfig(MethodConfig):
    """Options of our experts; other people's may read them too."""

    window: Count = 30
    """Transitions: largest number of steps between two items that counts."""
    count_bits: Annotated[int, Field(ge=0, le=20)] = 16
    """Transitions: 1/steps is rounded to a multiple of 2^-count_bits; fewer bits, shorter words of
    secure sums."""
    power: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Transitions: sums are taken to this power before the regression."""
    gram: Share = 0.4
    """Transitions: share of the sums that is correlation of past items."""
    ridge: PositiveFloat = 100.0
    """Transitions: ridge of the regression, in counts."""
    latest: Annotated[int, Field(ge=2)] = 140
    """Co-occurrence: how many of its last items a client makes pairs of."""
    cooccurrence_ridge: PositiveFloat = 300.0
    """Co-occurrence: ridge of the regression, in users."""
    factors: Width = 64
    """Co-occurrence: dimensions of an item vector."""
    neighbours: Count = 680
    """Pairs of items that are kept, per item on average; their weights in all tables have a common
    index. Never more than 3.8 million."""
    dense_items: Annotated[int, Field(ge=2)] = 4000
    """Items up to which systems are solved in full; beyond, these many most popular ones."""


Model = Mapping[str, Any]
"""An expert's model: arrays by name, and its tables."""


class Expert(ABC):
    """Base of every expert."""

    name: ClassVar[str]
    tables: ClassVar[tuple[str, ...]] = ()
    """Names of its tables of item-to-item weights. `learn` and `extend` receive and return these in
    long form (`pair_weights.empty_table`), the others receive them as `PairTable`."""
    counted: ClassVar[Literal["once", "head", "head and rest"]] = "once"
    """How it is counted in several rounds: all in the first one; or keys are pairs of items,
    i·m + j, with counts under (i, i), of which `learn` gets those within the head of the catalogue,
    and `extend` the others."""
    start: ClassVar[dict[str, float]] = {}
    """Weights of its scores before weights are fitted; they choose the candidates."""
    because: ClassVar[str] = ""
    """Why it scores an item high, as "often after {}"; {} is an item of the history.  [its name]"""

    def __init__(self, config: ExpertsConfig) -> None:
        self.config = config

    def is_applicable(self, view: TrainView) -> bool:
        """Say whether the catalogue has the features that the expert needs.

        Only public facts may decide: the catalogue and the features of its items.
        """
        return True

    @abstractmethod
    def init(self, view: TrainView) -> Shared:
        """Return the model before anything was counted, but for its tables; public facts alone give
        its shapes."""

    def public(self, view: TrainView) -> Shared:
        """Return arrays that the catalogue gives and a device need not be sent; `score`,
        `influence` and `parts` find them in the model."""
        return {}

    @abstractmethod
    def scores(self, model: Model) -> tuple[str, ...]:
        """Return the names of its scores."""

    @abstractmethod
    def count(self, view: TrainView) -> KeyedRows:
        """Return what each client adds to the sums, under keys of a space that is public."""

    @abstractmethod
    def learn(self, model: Model, keys: Keys, sums: Sums) -> Model:
        """Turn the sums, ascending keys and a row for each, into a model of the same shapes."""

    def extend(self, model: Model, keys: Keys, sums: Sums) -> Model:
        """Take further pairs into a model, of some first items, and those items' counts."""
        return model

    @abstractmethod
    def score(self, model: Model, view: TrainView, out: NDArray[np.float32]) -> None:
        """Fill ``out[client, score, item]``, which is all zeros, from the clients' histories."""

    def influence(
        self, model: Model, past: NDArray[np.int32], items: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Return how much each item of one history, latest first, adds to the scores of items.

        [items of the history, items]; zeros, as by default, where no single item does.
        """
        return np.zeros((len(past), len(items)), np.float32)

    def neighbours(self, model: Model, item: int) -> NDArray[np.float32] | None:
        """Return the weight from an item to every item; None if the expert has no such weights."""
        return None

    def parts(self, model: Model) -> tuple[Part, ...] | None:
        """Return all scores, in order, as parts that a bundle can hold; None if it cannot."""
        return None


@cache
def expert_class(name: str) -> type[Expert]:
    """Find an expert by name; once, as reading entry points takes longer than scoring a client."""
    loaded = find("experts", name)
    if not (isinstance(loaded, type) and issubclass(loaded, Expert)):
        raise ConfigError(f"expert '{name}' ({loaded!r}) is not a hushrec Expert")
    return loaded


Models = Sequence[tuple[Expert, Model]]


def score_all(models: Models, view: TrainView, buffer: Scores) -> Scores:
    """Return the scores of experts, written to a buffer: [clients, scores, items]."""
    out, end = buffer[: len(view)], 0
    out[:] = 0
    for expert, model in models:
        start, end = end, end + len(expert.scores(model))
        expert.score(model, view, out[:, start:end])
    return out


def largest_lifts(
    models: Models, weights: Array, history: TrainView, items: NDArray[np.int32]
) -> list[list[Reason]]:
    """Find the expert whose weighted scores lift each item most above the mean item."""
    owners = np.repeat(np.arange(len(models)), [len(e.scores(model)) for e, model in models])
    buffer = np.zeros((1, len(weights), history.n_items), np.float32)
    out: list[list[Reason]] = []
    for client, listed in enumerate(items):
        scores = score_all(models, history.take(np.array([client])), buffer)[0]
        lifted = weights[:, None] * (scores[:, listed] - scores.mean(axis=1, keepdims=True))
        lifts = np.zeros((len(models), len(listed)))
        np.add.at(lifts, owners, lifted)
        chosen, past = lifts.argmax(axis=0), history.positives[client][::-1]
        reasons = [Reason()] * len(listed)
        for n in np.unique(chosen[listed >= 0]).tolist():
            (expert, model), mine = models[n], np.flatnonzero((chosen == n) & (listed >= 0))
            influence = expert.influence(model, past, listed[mine])
            found = reasons_from(expert.because or expert.name, past, influence, expert.name)
            for at, reason in zip(mine.tolist(), found, strict=True):
                reasons[at] = reason
        out.append(reasons)
    return out


def rest(keys: Keys, sums: Sums, n_items: int) -> tuple[Keys, Sums, Sums]:
    """Return pairs of two items, their sums, and the counts of their first items."""
    alone = keys // n_items == keys % n_items
    counts = np.zeros(n_items)
    counts[keys[alone] // n_items] = np.maximum(sums[alone], 0.0)
    pairs = keys[~alone]
    return pairs, sums[~alone], counts[pairs // n_items]


def extended_table(table: Shared, keys: Keys, values: Array) -> Shared:
    """Keep each item's strongest weights of those it has and of further pairs."""
    kept = {name: table[name].copy() for name in ("neighbours", "weights")}
    pair_kernels.add_to_strongest(keys, values, len(kept["weights"]), **kept)
    return kept


HELD_OUT = "held_out"
"""Name of the experts that are learnt without the held-out items, where these are counted apart."""
PIECE = 2**21
"""About so many pairs are taken in at once."""
ITEMS, HEAD = "items", "head"
"""Where counting takes several rounds: sums of all items, and which of them are the head."""
KeyedSums = tuple[Keys, Sums]


@dataclass(frozen=True)
class Counting:
    """One of the rounds that count: items, then pairs within the head, then the other pairs."""

    number: int
    """From 0 on."""
    rounds: int
    head: NDArray[np.bool_]
    """Items; empty where one round counts everything."""

    def includes(self, expert: Expert) -> bool:
        """Say whether the expert is counted in this round."""
        if self.rounds == 1 or expert.counted == "once":
            return self.number == 0
        return self.number == 1 or (self.number > 1 and expert.counted == "head and rest")

    def count(
        self, experts: Iterable[Expert], view: TrainView, held: NDArray[np.int64] | None
    ) -> dict[str, ClientRows]:
        """Count without the held-out items, and what those add; or everything in one sum."""
        rows: dict[str, ClientRows] = {}
        for expert in experts:
            if self.includes(expert):
                whole, part = self._selected(expert.count(view)), None
                if held is not None:
                    part = self._selected(expert.count(shortened(view, held)))
                    apart = _difference(part) if view.repeats else part
                    rows[joined(HELD_OUT, expert.name)] = apart
                rows[expert.name] = _difference(whole, part)
        if self.rounds > 1 and self.number == 0:
            items = distinct_items(view.positives)
            ones = np.ones((len(items.values), 1), np.float32)
            rows[ITEMS] = ClientRows(items.indptr, items.values, ones)
        return rows

    def _selected(self, counted: KeyedRows) -> KeyedRows:
        """Return the pairs of this round among those an expert counted.

        Items of the head are numbered within it, so that a dense sum covers their pairs alone.
        """
        if self.number == 0:
            return counted
        first, second = np.divmod(counted.ids, len(self.head))
        wanted = self.head[first] & self.head[second]
        ids, space = counted.ids, counted.space
        if self.number == 1:
            size, within = int(self.head.sum()), np.cumsum(self.head) - 1
            ids, space = within[first] * size + within[second], size**2
        else:
            # An item's count, (i, i), goes with the pairs that it comes first in.
            mine = first % (self.rounds - 2) == self.number - 2
            wanted = mine & ((first == second) | ~wanted)
        indptr = np.concatenate([[0], np.cumsum(wanted)])[counted.indptr]
        rows = counted.rows[wanted]
        return replace(counted, indptr=indptr, ids=ids[wanted], rows=rows, space=space)

    def learn(
        self, served: Models, held_out: Models, total: Total
    ) -> tuple[dict[str, Model], dict[str, Model]]:
        """Return each expert's model from a round's sums: with and without held-out items.

        The latter are none where everything was counted in one sum.
        """
        learnt: dict[str, Model] = {}
        without: dict[str, Model] = {}
        for (expert, whole), (_, part) in zip(served, held_out, strict=True):
            sums, more = total.rows.get(joined(HELD_OUT, expert.name)), total.rows.get(expert.name)
            if sums is not None:
                without[expert.name] = self._learnt(expert, part, sums)
            both = _added(sums, more)
            if both is not None:
                learnt[expert.name] = self._learnt(expert, whole, both)
        return learnt, without

    def _learnt(self, expert: Expert, model: Model, sums: KeyedSums) -> Model:
        if self.number == 1:
            items, (keys, values) = np.flatnonzero(self.head), sums
            first, second = np.divmod(keys, len(items))
            return expert.learn(model, items[first] * len(self.head) + items[second], values)
        if self.number == 0:
            return expert.learn(model, *sums)
        for piece in _by_first_item(sums, len(self.head)):
            model = expert.extend(model, *piece)
        return model

    def most_popular(self, total: Total, count: int) -> dict[str, Array]:
        """Return the head as the first of several rounds finds it; ties go to the lower item."""
        if ITEMS not in total.rows:
            return {}
        ids, sums = total.rows[ITEMS]
        head = np.zeros(len(self.head), np.bool_)
        head[ids[np.argsort(-sums[:, 0], kind="stable")[:count]]] = True
        return {HEAD: head}


def shortened(view: TrainView, less: NDArray[np.int64]) -> TrainView:
    """Return the clients without their last so many items."""
    past = view.positives
    kept = np.arange(len(past.values)) < np.repeat(past.indptr[1:] - less, past.lengths)
    return replace(view, positives=where(past, kept), times=where(view.times, kept))


def _difference(whole: KeyedRows, part: KeyedRows | None = None) -> KeyedRows:
    """Return what one count has more than another, each key once: repeated items repeat pairs."""
    if part is None:
        nothing = np.zeros_like(whole.indptr)
        part = replace(whole, indptr=nothing, ids=whole.ids[:0], rows=whole.rows[:0])
    more = pair_kernels.subtract_by_key(
        whole.indptr, whole.ids, whole.rows, part.indptr, part.ids, part.rows
    )
    # A declared bound holds for differences of counts that have one sign; sums refuse any other.
    return KeyedRows(*more, space=whole.space, grid=whole.grid)


def _added(first: KeyedSums | None, second: KeyedSums | None) -> KeyedSums | None:
    if first is None or second is None:
        return first or second
    keys, sums, _ = pair_kernels.merge_sums(*first, *second)
    return keys, sums


def _by_first_item(sums: KeyedSums, n_items: int) -> Iterator[KeyedSums]:
    """Cut sums over pairs into pieces, none of them between pairs of the same first item."""
    keys, rows = sums
    starts = keys[PIECE::PIECE] // n_items * n_items
    cuts = np.unique([0, *np.searchsorted(keys, starts), len(keys)])
    for start, end in pairwise(cuts):
        yield keys[start:end], rows[start:end]
