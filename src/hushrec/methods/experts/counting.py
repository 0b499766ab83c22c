"""How experts are counted: without each client's last items, and what those add; in some rounds.

All at once takes memory for every pair that occurs. Counted in several rounds, the first round is
for whatever is not a pair, the second for pairs within the *head*, the most popular items, and the
others share out the rest by the pair's first item: the server forgets a round's sums as soon as
each item has kept its strongest pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregate import ClientRows, Total
from hushrec.clients import Ragged, TrainView
from hushrec.kernels import experts as kernels
from hushrec.kernels import pairs as pair_kernels
from hushrec.methods.base import Array, Shared
from hushrec.methods.experts.base import Expert
from hushrec.methods.popularity import distinct_items

HELD = "held/"
"""Prefix of the experts that are counted without the held items."""
PIECE = 2**21
"""About so many pairs are taken in at once."""
ITEMS, HEAD = "items", "head"
"""Where counting takes several rounds: sums of all items, and which of them are the head."""
Sums = tuple[NDArray[np.int64], NDArray[np.float64]]


@dataclass(frozen=True)
class Counting:
    """One of the rounds that count."""

    number: int
    """From 0 on."""
    rounds: int
    head: NDArray[np.bool_]
    """Items; empty where one round counts everything."""

    @property
    def part(self) -> int:
        """Which share of the pairs: -1 is those within the head."""
        return self.number - 2

    def asks(self, expert: Expert) -> bool:
        """Say whether it is this expert's turn."""
        if self.rounds == 1 or expert.counted == "once":
            return self.number == 0
        return self.number == 1 or (self.number > 1 and expert.counted == "head and rest")

    def count(
        self, experts: Iterable[Expert], view: TrainView, held: NDArray[np.int64]
    ) -> dict[str, ClientRows]:
        """Count without the held items, and what those add."""
        earlier, rows = shortened(view, held), {}
        for expert in experts:
            if self.asks(expert):
                whole, part = (self._about(expert, expert.count(v)) for v in (view, earlier))
                more = kernels.what_is_more(
                    whole.indptr, whole.ids, whole.rows, part.indptr, part.ids, part.rows
                )
                rows[HELD + expert.name], rows[expert.name] = part, ClientRows(*more)
        if self.rounds > 1 and self.number == 0:
            items = distinct_items(view.positives)
            ones = np.ones((len(items.values), 1), np.float32)
            rows[ITEMS] = ClientRows(items.indptr, items.values, ones)
        return rows

    def _about(self, expert: Expert, found: ClientRows) -> ClientRows:
        """Return what this round is about of what an expert counted."""
        if self.number == 0:
            return found
        n_items, parts = len(self.head), self.rounds - 2
        about = found.indptr, found.ids, found.rows, n_items, self.head, self.part, parts
        return ClientRows(*pair_kernels.some_pairs(*about))

    def learn(
        self, speaking: Iterable[tuple[Expert, Shared]], shared: Shared, total: Total
    ) -> dict[str, Array]:
        """Return what experts learn from a round's sums, by the names of the shared parameters."""
        found: dict[str, Array] = {}
        for expert, _ in speaking:
            part, more = (total.rows.get(p + expert.name) for p in (HELD, ""))
            for prefix, sums in ((HELD, part), ("", _added(part, more))):
                if sums is not None:
                    start = f"{prefix}{expert.name}/"
                    model: Shared = model_of(shared, start)
                    if self.part < 0:
                        model = expert.learn(model, *sums)
                    else:
                        for piece in _by_first_item(sums, len(self.head)):
                            model = expert.extend(model, *piece)
                    found |= {start + n: a for n, a in model.items()}
        return found

    def most_popular(self, total: Total, count: int) -> dict[str, Array]:
        """Return the head as the first of several rounds finds it; ties go to the lower item."""
        if ITEMS not in total.rows:
            return {}
        ids, sums = total.rows[ITEMS]
        head = np.zeros(len(self.head), np.bool_)
        head[ids[np.argsort(-sums[:, 0], kind="stable")[:count]]] = True
        return {HEAD: head}


def model_of(shared: Mapping[str, Any], start: str) -> dict[str, Any]:
    """Return the model that the shared parameters hold under names that begin like this."""
    return {n.removeprefix(start): a for n, a in shared.items() if n.startswith(start)}


def shortened(view: TrainView, less: NDArray[np.int64]) -> TrainView:
    """Return the clients without their last so many items."""
    past = view.positives
    ends = np.repeat(past.indptr[1:] - less, past.lengths)
    kept = np.arange(len(past.values)) < ends
    indptr = np.concatenate([[0], np.cumsum(kept)])[past.indptr]
    return replace(view, positives=Ragged(indptr, past.values[kept]))


def _added(first: Sums | None, second: Sums | None) -> Sums | None:
    """Return the sum of two sums over ascending keys."""
    if first is None or second is None:
        return first or second
    keys, sums, _ = pair_kernels.merge_sums(*first, *second)
    return keys, sums


def _by_first_item(sums: Sums, n_items: int) -> Iterator[Sums]:
    """Cut sums over pairs into pieces, none of them between pairs of the same first item."""
    keys, rows = sums
    starts = keys[PIECE::PIECE] // n_items * n_items
    cuts = np.unique([0, *np.searchsorted(keys, starts), len(keys)])
    for start, end in pairwise(cuts):
        yield keys[start:end], rows[start:end]
