"""`Interactions`: rows of (user, item, value, time), the vocabularies of ids, and features."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from hushrec.data.text import short_name
from hushrec.errors import DataError

IntArray = NDArray[np.int32]
StrArray = NDArray[np.str_]


def id_order(ids: StrArray) -> NDArray[np.int64]:
    """Return the order in which ids are numbered: as numbers if all are whole ones, else as text.

    The order of the rows is not used: it would reveal whose rows came first.
    """
    if np.char.isdecimal(ids).all():
        digits = np.char.lstrip(ids, "0")
        return np.lexsort((ids, digits, np.char.str_len(digits)))
    return np.argsort(ids, kind="stable")


def _categories(found: set[str]) -> StrArray:
    names = np.array(list(found - {""}), np.str_)
    return names[id_order(names)]


class _Column:
    """A column: its first field has an entry for each row, the others describe the entries."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def take(self, rows: NDArray[Any]) -> Self:
        """Return these rows."""
        name = fields(self)[0].name
        return replace(self, **{name: getattr(self, name)[rows]})


@dataclass(frozen=True)
class Categorical(_Column):
    """One category per row: ``names[codes[row]]``; the code -1 is "unknown"."""

    codes: IntArray
    names: StrArray
    declared: bool = False
    """Whether the categories were given, and are public; else they were found in the rows."""

    @classmethod
    def of(cls, entries: Iterable[str], names: Iterable[str] | None = None) -> Self:
        """Code a column of text; given names are declared, others found. Empty text is unknown."""
        entries = list(entries)
        known = _categories(set(entries)) if names is None else np.array(list(names), np.str_)
        code = {"": -1} | {name: number for number, name in enumerate(known.tolist())}
        codes = np.array([code[entry] for entry in entries], np.int32)
        return cls(codes, known, declared=names is not None)

    def tobytes(self) -> bytes:
        """Return what identifies the column."""
        return self.codes.tobytes() + "\0".join(self.names).encode()


@dataclass(frozen=True)
class MultiCategorical(_Column):
    """Any number of categories per row: ``flags[row, k]`` says whether ``names[k]`` applies."""

    flags: NDArray[np.bool_]
    names: StrArray
    declared: bool = False
    """Whether the categories were given, and are public; else they were found in the rows."""

    @classmethod
    def of(cls, entries: Iterable[Iterable[str]], names: Iterable[str] | None = None) -> Self:
        """Code sets of categories; given names are declared, others found."""
        sets = [set(entry) for entry in entries]
        known = _categories(set().union(*sets)) if names is None else np.array(list(names), np.str_)
        flags = np.array([[name in some for name in known.tolist()] for some in sets], np.bool_)
        return cls(flags.reshape(len(sets), len(known)), known, declared=names is not None)

    def tobytes(self) -> bytes:
        """Return what identifies the column."""
        return self.flags.tobytes() + "\0".join(self.names).encode()


@dataclass(frozen=True)
class Numeric(_Column):
    """One number per row; not-a-number is "unknown"."""

    values: NDArray[np.float32]
    low: float | None = None
    high: float | None = None
    """The range the numbers are declared to lie in: public, whatever the data."""

    def tobytes(self) -> bytes:
        """Return what identifies the column."""
        return self.values.tobytes() + f"{self.low}/{self.high}".encode()


BASKET_ROWS, REPEATED_ROWS = 0.5, 0.05
"""Data are baskets from these shares on: of rows that share user and time with another row, and of
rows whose item the user had at another time."""

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
    """Everything there is to recommend, touched or not."""
    titles: StrArray | None = None
    """What to print for an item; None prints its id."""
    user_features: Features = field(default_factory=dict)
    item_features: Features = field(default_factory=dict)
    context: Features = field(default_factory=dict)
    """Features of the row itself (weather, weekday, …), aligned with ``user``."""
    has_time: bool = True
    """False where the file has no time and ``time`` is the file order."""
    rows_in_order: bool = False
    """Whether rows without times are declared to be in the order of time, as sequences are."""
    items_declared: bool = False
    """Whether items, their titles and features were given as a public list; else they were found in
    the rows, and a list that one person's rows can change gives that person away."""
    items_file: str | None = None
    """The file of that list, where one belongs to the data: a run must find it again."""
    columns: Mapping[str, str | int] = field(default_factory=dict)
    """Columns of a file that were named when it was read, by role: a run names them again."""
    notes: tuple[str, ...] = ()
    """One line for each harmless thing that was handled while reading."""

    def __post_init__(self) -> None:
        if len({len(self.user), len(self.item), len(self.value), len(self.time)}) > 1:
            raise DataError(f"{self.name}: user, item, value and time differ in length")

    @property
    def n_users(self) -> int:
        """Number of distinct users."""
        return len(self.users)

    @property
    def n_items(self) -> int:
        """Number of distinct items."""
        return len(self.items)

    @property
    def in_order(self) -> bool:
        """Whether "later" means something: there are times, or the rows are in their order."""
        return self.has_time or self.rows_in_order

    @cached_property
    def has_baskets(self) -> bool:
        """Whether rows are purchases of several items at a time, some of them bought again.

        At least half of the rows share user and time with another item, and at least one row in
        twenty is an item that the user had at another time.
        """
        if not self.has_time:
            return False
        pairs, pair = np.unique(
            self.user.astype(np.int64) * self.n_items + self.item, return_inverse=True
        )
        if len(pairs) == len(pair):
            return False
        times, moment = np.unique(self.time, return_inverse=True)
        rows = np.unique(pair * len(times) + moment)
        basket = pairs[rows // len(times)] // self.n_items * len(times) + rows % len(times)
        _, number, sizes = np.unique(basket, return_inverse=True, return_counts=True)
        together, again = np.mean(sizes[number] > 1), 1 - len(pairs) / len(rows)
        return bool(together >= BASKET_ROWS and again >= REPEATED_ROWS)

    def __len__(self) -> int:
        return len(self.user)

    def title(self, item: int) -> str:
        """Return what to print for an item."""
        return str(self.items[item] if self.titles is None else self.titles[item])

    def __repr__(self) -> str:
        known = {"titles": self.titles is not None, "times": self.has_time}
        features = {"user features": self.user_features, "item features": self.item_features}
        has = [name for name, at in (known | features).items() if at]
        return (
            f"<Interactions {short_name(self.name)}: {len(self):,} rows of {self.n_users:,} users "
            f"and {self.n_items:,} items{'; with ' * bool(has)}{', '.join(has)}>"
        )

    def user_index(self, user: str | int) -> int | None:
        """Return the position of a user id, or None if the data does not know it."""
        found = np.flatnonzero(self.users == str(user))
        return int(found[0]) if len(found) else None

    def facts(self) -> dict[str, Any]:
        """Return a description: counts, density, ties, features, notes."""
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
            "items_declared": self.items_declared,
            "has_time": self.has_time,
            "has_baskets": self.has_baskets,
            "share_of_users_tied_at_latest_time": self._share_tied() if self.has_time else None,
            "share_of_rows_tied_with_another": self._share_together() if self.has_time else None,
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

    def _share_together(self) -> float:
        """Return the share of rows with the user and time of another row."""
        order = np.lexsort((self.time, self.user))
        user, time = self.user[order], self.time[order]
        as_before = (user[1:] == user[:-1]) & (time[1:] == time[:-1])
        return float(np.mean(np.append(False, as_before) | np.append(as_before, False)))

    def merged(self, *, baskets: bool = False) -> Interactions:
        """Keep the latest row of every (user, item) pair, in file order, and note how many went.

        With ``baskets`` an item is kept once for every time at which the user had it.
        """
        pair = self.user.astype(np.int64) * self.n_items + self.item
        order = np.lexsort((np.arange(len(pair)), self.time, pair))
        other = pair[order][1:] != pair[order][:-1]
        if baskets:
            other |= self.time[order][1:] != self.time[order][:-1]
        keep = np.sort(order[np.append(other, True)[: len(order)]])
        dropped = len(pair) - len(keep)
        if not dropped:
            return self
        note = f"{dropped:,} repeated (user, item) rows merged, the latest of each pair kept"
        if baskets:
            note = f"{dropped:,} rows merged that repeat an item within a basket"
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
        """Drop users and items without a row and renumber the others, their order kept.

        What is left is what was found in the rows, so no list of items is declared any more.
        """
        found = self._renumbered(np.unique(self.user), np.unique(self.item))
        return replace(found, items_declared=False, items_file=None)

    def ordered(self) -> Interactions:
        """Number items in the order of their ids (`id_order`)."""
        order = id_order(self.items)
        if (np.diff(order) == 1).all():
            return self
        return self._renumbered(np.arange(self.n_users), order)

    def with_public_items(self, items: Iterable[str]) -> Interactions:
        """Declare the list of items: these and no others, whether anybody touched them or not."""
        listed = sorted({str(item) for item in items})
        strange = ~np.isin(self.items, np.array(listed, np.str_))
        if strange[self.item].any():
            item = self.items[self.item[strange[self.item].argmax()]]
            raise DataError(
                f"{self.name}: item '{item}' was touched and is not on the public list; add it "
                "there, or leave its rows out"
            )
        known = set(self.items.tolist())
        more = np.array([item for item in listed if item not in known], np.str_)
        if len(more) and self.item_features:
            raise DataError(
                f"{self.name}: item '{more[0]}' of the public list has no features; give "
                "item_features for the whole list"
            )
        titles = None if self.titles is None else np.append(self.titles, more)
        whole = replace(self, items=np.append(self.items, more), titles=titles)
        kept = np.flatnonzero(np.append(~strange, np.ones(len(more), np.bool_)))
        order = kept[id_order(whole.items[kept])]
        return replace(whole._renumbered(np.arange(self.n_users), order), items_declared=True)

    def _renumbered(self, users: NDArray[np.int64], items: NDArray[np.int64]) -> Interactions:
        """Keep these users and items, in this order; those with rows must be among them."""

        def number(kept: NDArray[np.int64], of: int) -> IntArray:
            index = np.full(of, -1, np.int32)
            index[kept] = np.arange(len(kept))
            return index

        return replace(
            self,
            user=number(users, self.n_users)[self.user],
            item=number(items, self.n_items)[self.item],
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
