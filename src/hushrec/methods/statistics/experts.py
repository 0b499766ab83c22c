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
from hushrec.methods.base import Array, MethodConfig, Shared
from hushrec.methods.baselines import distinct_items, where
from hushrec.methods.statistics.pair_weights import Keys, Sums


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
    neighbours: Count = 1000
    """Weights kept per item and table, the largest in size."""
    dense_items: Annotated[int, Field(ge=2)] = 4000
    """Items up to which systems are solved in full; beyond, these many most popular ones."""


@dataclass(frozen=True)
class Part:
    """Some of an expert's scores, of a kind that `serving.recommender` can compute."""

    kind: str
    options: Mapping[str, Any]
    arrays: Mapping[str, Array]


class Expert(ABC):
    """Base of every expert."""

    name: ClassVar[str]
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
        """Return the model before anything was counted; public facts alone give its shapes."""

    @abstractmethod
    def scores(self, model: Shared) -> tuple[str, ...]:
        """Return the names of its scores."""

    @abstractmethod
    def count(self, view: TrainView) -> KeyedRows:
        """Return what each client adds to the sums, under keys of a space that is public."""

    @abstractmethod
    def learn(self, model: Shared, keys: Keys, sums: Sums) -> Shared:
        """Turn the sums, ascending keys and a row for each, into a model of the same shapes."""

    def extend(self, model: Shared, keys: Keys, sums: Sums) -> Shared:
        """Take further pairs into a model, of some first items, and those items' counts."""
        return model

    @abstractmethod
    def score(self, model: Shared, view: TrainView, out: NDArray[np.float32]) -> None:
        """Fill ``out[client, score, item]``, which is all zeros, from the clients' histories."""

    def influence(
        self, model: Shared, past: NDArray[np.int32], items: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Return how much each item of one history, latest first, adds to the scores of items.

        [items of the history, items]; zeros, as by default, where no single item does.
        """
        return np.zeros((len(past), len(items)), np.float32)

    def neighbours(self, model: Shared, item: int) -> NDArray[np.float32] | None:
        """Return the weight from an item to every item; None if the expert has no such weights."""
        return None

    def parts(self, model: Shared) -> tuple[Part, ...] | None:
        """Return all scores, in order, as parts that a bundle can hold; None if it cannot."""
        return None


@cache
def expert_class(name: str) -> type[Expert]:
    """Find an expert by name; once, as reading entry points takes longer than scoring a client."""
    loaded = find("experts", name)
    if not (isinstance(loaded, type) and issubclass(loaded, Expert)):
        raise ConfigError(f"expert '{name}' ({loaded!r}) is not a hushrec Expert")
    return loaded


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
"""Name of the experts that are learnt without the held-out items."""
PIECE = 2**21
"""About so many pairs are taken in at once."""
ITEMS, HEAD = "items", "head"
"""Where counting takes several rounds: sums of all items, and which of them are the head."""
Models = Sequence[tuple[Expert, Shared]]
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
        self, experts: Iterable[Expert], view: TrainView, held: NDArray[np.int64]
    ) -> dict[str, ClientRows]:
        """Count without the held-out items, and what those add."""
        earlier, rows = shortened(view, held), dict[str, ClientRows]()
        for expert in experts:
            if self.includes(expert):
                whole, part = (self._selected(expert.count(v)) for v in (view, earlier))
                rows[joined(HELD_OUT, expert.name)] = _difference(part) if view.repeats else part
                rows[expert.name] = _difference(whole, part)
        if self.rounds > 1 and self.number == 0:
            items = distinct_items(view.positives)
            ones = np.ones((len(items.values), 1), np.float32)
            rows[ITEMS] = ClientRows(items.indptr, items.values, ones)
        return rows

    def _selected(self, counted: KeyedRows) -> KeyedRows:
        """Return the pairs of this round among those an expert counted."""
        if self.number == 0:
            return counted
        first, second = np.divmod(counted.ids, len(self.head))
        wanted = self.head[first] & self.head[second]
        if self.number > 1:
            # An item's count, (i, i), goes with the pairs that it comes first in.
            mine = first % (self.rounds - 2) == self.number - 2
            wanted = mine & ((first == second) | ~wanted)
        indptr = np.concatenate([[0], np.cumsum(wanted)])[counted.indptr]
        return replace(counted, indptr=indptr, ids=counted.ids[wanted], rows=counted.rows[wanted])

    def learn(
        self, served: Models, held_out: Models, total: Total
    ) -> tuple[dict[str, Shared], dict[str, Shared]]:
        """Return each expert's model from a round's sums: with and without held-out items."""
        learnt: dict[str, Shared] = {}
        without: dict[str, Shared] = {}
        for (expert, whole), (_, part) in zip(served, held_out, strict=True):
            sums, more = total.rows.get(joined(HELD_OUT, expert.name)), total.rows.get(expert.name)
            if sums is not None:
                without[expert.name] = self._learnt(expert, part, sums)
            both = _added(sums, more)
            if both is not None:
                learnt[expert.name] = self._learnt(expert, whole, both)
        return learnt, without

    def _learnt(self, expert: Expert, model: Shared, sums: KeyedSums) -> Shared:
        if self.number < 2:
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
