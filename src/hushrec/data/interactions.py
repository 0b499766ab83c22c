"""`Interactions`: who touched what, how much and when, with the names behind the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from hushrec.errors import DataError

IntArray = NDArray[np.int32]
StrArray = NDArray[np.str_]


@dataclass(frozen=True)
class Categorical:
    """One category per row: ``names[codes[row]]``; the code -1 is "unknown"."""

    codes: IntArray
    names: StrArray

    @classmethod
    def of(cls, entries: Iterable[str], names: Iterable[str] | None = None) -> Categorical:
        """Code a column of text; categories are sorted unless given, an empty text is unknown."""
        entries = list(entries)
        known = sorted(set(entries) - {""}) if names is None else list(names)
        code = {"": -1} | {name: number for number, name in enumerate(known)}
        codes = np.array([code[entry] for entry in entries], np.int32)
        return cls(codes, np.array(known, np.str_))

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, rows: NDArray[Any]) -> Self:
        """Return these rows."""
        return replace(self, codes=self.codes[rows])

    def tobytes(self) -> bytes:
        """Return what identifies the column."""
        return self.codes.tobytes() + "\0".join(self.names).encode()


@dataclass(frozen=True)
class MultiCategorical:
    """Any number of categories per row: ``flags[row, k]`` says whether ``names[k]`` applies."""

    flags: NDArray[np.bool_]
    names: StrArray

    @classmethod
    def of(cls, entries: Iterable[Iterable[str]]) -> MultiCategorical:
        """Code sets of categories, which are sorted."""
        sets = [set(entry) - {""} for entry in entries]
        known = sorted(set().union(*sets))
        flags = np.array([[name in some for name in known] for some in sets], np.bool_)
        return cls(flags.reshape(len(sets), len(known)), np.array(known, np.str_))

    def __len__(self) -> int:
        return len(self.flags)

    def take(self, rows: NDArray[Any]) -> Self:
        """Return these rows."""
        return replace(self, flags=self.flags[rows])

    def tobytes(self) -> bytes:
        """Return what identifies the column."""
        return self.flags.tobytes() + "\0".join(self.names).encode()


@dataclass(frozen=True)
class Numeric:
    """One number per row; not-a-number is "unknown"."""

    values: NDArray[np.float32]
    low: float | None = None
    high: float | None = None
    """The range the numbers are declared to lie in: public, whatever the data."""

    def __len__(self) -> int:
        return len(self.values)

    def take(self, rows: NDArray[Any]) -> Self:
        """Return these rows."""
        return replace(self, values=self.values[rows])

    def tobytes(self) -> bytes:
        """Return what identifies the column."""
        return self.values.tobytes() + f"{self.low}/{self.high}".encode()


Column = Categorical | MultiCategorical | Numeric
Features = Mapping[str, Column]


@dataclass(frozen=True)
class Interactions:
    """Rows of (user, item, value, time) in the order of their file, plus vocabularies.

    ``user`` and ``item`` are positions in ``users`` and ``items``, the original ids as text.
    Rows may repeat a (user, item) pair, as some files do; `merged` keeps the latest of each.
    """

    name: str
    user: IntArray
    item: IntArray
    value: NDArray[np.float32]
    time: NDArray[np.int64]
    """Any unit, as long as later is larger; file order breaks ties."""
    users: StrArray
    items: StrArray
    titles: StrArray | None = None
    """What to print for an item; None prints its id."""
    user_features: Features = field(default_factory=dict)
    item_features: Features = field(default_factory=dict)
    context: Features = field(default_factory=dict)
    """Features of the row itself (weather, weekday, …), aligned with ``user``."""
    has_time: bool = True
    """False where the file has no time and ``time`` is the file order."""
    notes: tuple[str, ...] = ()
    """One line for each harmless thing that was handled while reading."""

    def __post_init__(self) -> None:
        rows = len(self.user)
        if not (len(self.item) == len(self.value) == len(self.time) == rows):
            raise DataError(f"{self.name}: user, item, value and time differ in length")
        if rows == 0:
            raise DataError(f"{self.name}: no interactions")

    @property
    def n_users(self) -> int:
        """Number of distinct users."""
        return len(self.users)

    @property
    def n_items(self) -> int:
        """Number of distinct items."""
        return len(self.items)

    def __len__(self) -> int:
        return len(self.user)

    def title(self, item: int) -> str:
        """Return what to print for an item."""
        return str(self.items[item] if self.titles is None else self.titles[item])

    def user_index(self, user: str) -> int | None:
        """Return the position of a user id, or None if the data does not know it."""
        found = np.flatnonzero(self.users == user)
        return int(found[0]) if len(found) else None

    def facts(self) -> dict[str, Any]:
        """Return what there is to say of the data: counts, density, ties, features, notes."""
        pairs = len(np.unique(self.user.astype(np.int64) * self.n_items + self.item))
        per_user = np.bincount(self.user, minlength=self.n_users)
        features = {"user": self.user_features, "item": self.item_features, "context": self.context}
        return {
            "name": self.name,
            "users": self.n_users,
            "items": self.n_items,
            "rows": len(self),
            "pairs": pairs,
            "repeats": len(self) - pairs,
            "density": pairs / (self.n_users * self.n_items),
            "rows_per_user": {
                "min": int(per_user.min()),
                "median": float(np.median(per_user)),
                "max": int(per_user.max()),
            },
            "has_time": self.has_time,
            "share_of_users_tied_at_latest_time": self._share_tied() if self.has_time else None,
            "features": {
                owner: {name: _describe(column) for name, column in columns.items()}
                for owner, columns in features.items()
                if columns
            },
            "notes": list(self.notes),
        }

    def _share_tied(self) -> float:
        latest = np.full(self.n_users, np.iinfo(np.int64).min)
        np.maximum.at(latest, self.user, self.time)
        at_latest = np.bincount(self.user[self.time == latest[self.user]], minlength=self.n_users)
        return float(np.mean(at_latest > 1))

    def merged(self) -> Interactions:
        """Keep the latest row of every (user, item) pair, in file order, and note how many went."""
        pair = self.user.astype(np.int64) * self.n_items + self.item
        order = np.lexsort((np.arange(len(pair)), self.time, pair))
        last_of_pair = np.append(pair[order][1:] != pair[order][:-1], True)
        keep = np.sort(order[last_of_pair])
        dropped = len(pair) - len(keep)
        if not dropped:
            return self
        note = f"{dropped:,} repeated (user, item) rows merged, the latest of each pair kept"
        return replace(self.select(keep), notes=(*self.notes, note))

    def select(self, rows: NDArray[Any]) -> Interactions:
        """Keep these rows (positions or a mask); users and items keep their numbers."""
        return replace(
            self,
            user=self.user[rows],
            item=self.item[rows],
            value=self.value[rows],
            time=self.time[rows],
            context={name: column.take(rows) for name, column in self.context.items()},
        )

    def users_with_at_least(self, rows: int) -> Interactions:
        """Keep users with this many rows or more; users and items are renumbered."""
        counts = np.bincount(self.user, minlength=self.n_users)
        return self.select(counts[self.user] >= rows).compacted()

    def compacted(self) -> Interactions:
        """Drop users and items without a row and renumber the others, their order kept."""
        users = np.unique(self.user)
        items = np.unique(self.item)
        return replace(
            self,
            user=np.searchsorted(users, self.user).astype(np.int32),
            item=np.searchsorted(items, self.item).astype(np.int32),
            users=self.users[users],
            items=self.items[items],
            titles=None if self.titles is None else self.titles[items],
            user_features={n: c.take(users) for n, c in self.user_features.items()},
            item_features={n: c.take(items) for n, c in self.item_features.items()},
        )


def _describe(column: Column) -> str:
    if isinstance(column, Categorical):
        return f"{len(column.names)} categories"
    if isinstance(column, MultiCategorical):
        return f"any of {len(column.names)} categories"
    return f"{np.nanmin(column.values):g} to {np.nanmax(column.values):g}"
