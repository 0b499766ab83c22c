"""Interactions, lists of items, features and histories, read from the columns of a table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hushrec.data import text as guesses
from hushrec.data.columns import LONGEST_TITLE, Ids, Times, Titles, Values, read_columns
from hushrec.data.interactions import (
    Categorical,
    Column,
    Features,
    IntArray,
    Interactions,
    MultiCategorical,
    Numeric,
    StrArray,
)
from hushrec.data.tables import RECOGNISED, Columns, Table, make_table, read_table
from hushrec.data.text import OnProgress, is_number, no_progress
from hushrec.errors import ConfigError, DataError

Owner = Literal["user", "item"]
"""Whose features they are."""
YEAR_AT_END = re.compile(r"\((\d{4})(?:[-–]\d{0,4})?\)$")
MOST_GENRES = 1_000
"""Categories that a column may have in order to be taken without being declared."""


def read_interactions(
    path: str | Path,
    columns: Columns = RECOGNISED,
    *,
    name: str | None = None,
    items: str | Path | None = None,
    share: bool = False,
    progress: OnProgress = no_progress,
) -> Interactions:
    """Read a file of (user, item, value, time) rows.

    Columns that are not given are recognised by their usual names. Without a header the order
    user, item, value, time is taken. Repeated pairs are kept; see `Interactions.merged`.

    ``items`` is a file with the public list of items (`read_items`): all of them can be
    recommended, and rows of other items are refused. With ``share`` the file is one node's part of
    the data, which may have a single user or item.

    Beside an atomic file of RecBole, ``NAME.inter``, the files ``NAME.item`` and ``NAME.user`` are
    found: the list of items, unless another is given, and features.
    """
    public = None if items is None else read_items(items)
    table = read_table(Path(path), columns, progress)
    found = interactions_of(table, columns, public, share=share)
    if table.types is not None and not share:
        owners: tuple[Owner, ...] = ("user",) if items else ("item", "user")
        for owner in owners:
            found = _with_atomic_file(found, table.path, owner)
    return found if name is None else replace(found, name=name)


def _with_atomic_file(data: Interactions, path: Path, owner: Owner) -> Interactions:
    """Return the interactions with what the atomic file of items or users beside them says."""
    stem = path.name.removesuffix(".gz").removesuffix(".inter")
    beside = [path.with_name(f"{stem}.{owner}{packed}") for packed in ("", ".gz")]
    file = next(filter(Path.is_file, beside), None)
    if file is None:
        return data
    table = read_table(file)
    if table.types is None:
        raise DataError(
            f"{file}: no atomic file, whose header has types as in {owner}_id:token; mend it, or "
            "rename it to leave it out"
        )
    columns = table.choose(RECOGNISED, owner)
    line_of = _line_of(table, columns[owner])
    if owner == "user":
        lines = [line_of.get(str(one)) for one in data.users]
        features = _typed_features(table, columns, owner, lines)
        return replace(data, user_features=features, notes=(*data.notes, *_taken(table, features)))
    missing = sum(item not in line_of for item in data.items.tolist())
    if missing:
        table.notes.append(f"{missing:,} items have no line: the list of items is not public")
    else:
        data = replace(data, titles=None).with_public_items(line_of)
    lines = [line_of.get(str(one)) for one in data.items]
    features = _typed_features(table, columns, owner, lines)
    if "title" in columns:
        names = list(table.entries(columns["title"]))
        ids = zip(data.items.tolist(), lines, strict=True)
        titles = [item if line is None else names[line][:LONGEST_TITLE] for item, line in ids]
        data = replace(data, titles=np.array(titles, np.str_))
    notes = _taken(table, [*(["title"] if "title" in columns else []), *features])
    return replace(data, item_features=features, notes=(*data.notes, *notes))


def _typed_features(
    table: Table, columns: Mapping[str, int], owner: Owner, lines: Sequence[int | None]
) -> dict[str, Column]:
    """Return the other columns of an atomic file as features, by their types; note the rest."""
    found: dict[str, Column] = {}
    for column, kind in enumerate(table.types or ()):
        if column in (columns[owner], columns.get("title")):
            continue
        name, entries = (table.names or [])[column], table.entries(column)
        different = len(set(_words(entries) if kind == "token_seq" else entries) - {""})
        why = "" if different else "it is empty"
        if kind == "float_seq":
            why = "vectors are no features"
        elif kind != "float" and different > MOST_GENRES:
            why = f"{different:,} categories"
        if why:
            table.notes.append(f"column '{name}' left out: {why}")
        else:
            found[name] = _read_declared(name, table, owner, lines)
    return found


def _words(entries: Iterable[str]) -> Iterator[str]:
    return (word for entry in entries for word in entry.split())


def _taken(table: Table, used: Iterable[str]) -> list[str]:
    """Return the notes of a file beside the data: what is taken of it, and what is not."""
    taken = " and ".join(used)
    return [
        f"{table.path.name}: {note}"
        for note in (f"{taken} taken" if taken else "", *table.notes)
        if note
    ]


def interactions_of(
    table: Table, columns: Columns, public: ItemList | None, *, share: bool = False
) -> Interactions:
    """Make interactions of a table's rows, with the public list of items where there is one."""
    found = table.choose(columns, "user", "item")
    user, item = Ids(table, found["user"]), Ids(table, found["item"])
    value = Values(table, found["value"]) if "value" in found else None
    time = Times(table, found["time"]) if "time" in found else None
    # A public list has titles of its own, or none.
    title = Titles(item, found["title"]) if "title" in found and public is None else None
    read_columns(table, user, item, value, time, title)
    user_codes, users = user.result()
    item_codes, touched = item.result()
    if public is not None:
        public.require(table, found["item"], item_codes, touched)
    for role, ids in (("user", users), ("item", public.ids if public else touched)):
        if len(ids) == 1 and not share:
            raise DataError(
                f"{table.path}: only one {role} ({str(ids[0])!r}) in {len(user_codes):,} rows; "
                f"if that is the wrong column, choose another with --{role}"
            )
    if value is None:
        table.notes.append("no value column: every row counts 1")
    values = np.ones(table.rows, np.float32) if value is None else value.result()
    if time is not None and columns.time is None:
        _refuse_ratings_as_time(table, found, values, time.numbers())
    if time is None:
        table.notes.append("no time column: rows have no order in time")
    data = Interactions(
        name=table.path.name.removesuffix(".gz").rsplit(".", 1)[0] or table.path.name,
        user=user_codes,
        item=item_codes,
        value=values,
        time=np.arange(table.rows, dtype=np.int64) if time is None else time.result(),
        users=users,
        items=touched,
        titles=None if title is None else title.result(),
        has_time=time is not None,
        notes=tuple(table.notes),
    )
    if public is None:
        return data
    return replace(
        data.with_public_items(public.ids),
        titles=public.titles,
        item_features=public.features,
        notes=(*data.notes, *public.notes),
    )


MOST_STARS, LONGEST_SCALE = 10, 41
"""The largest rating where there are half stars, and the most different values of any scale."""
CALENDAR = 19_000_000
"""Numbers from here on are times: seconds of an epoch, or days written as 19000101."""


def _refuse_ratings_as_time(
    table: Table, found: Mapping[str, int], values: NDArray[Any], times: NDArray[Any]
) -> None:
    """Refuse a column of times that nobody named and that holds what looks like ratings."""
    low, high = times.min(), times.max()
    if not 0 <= low <= high <= 100 or (different := len(np.unique(times))) > LONGEST_SCALE:
        return
    swapped = "value" in found and values.min() >= CALENDAR
    halves = high <= MOST_STARS and (times % 1 != 0).any() and (times * 2 % 1 == 0).all()
    if not (swapped or (halves and 2 * different <= len(times))):
        return
    names: dict[str, str | int] = {
        role: table.names[column] if table.names else column for role, column in found.items()
    }
    rating = table.label(found["time"])
    said = f"{table.path}: {rating} is taken as time and holds {low:g} to {high:g}, as ratings do"
    keep = f"if it is the time, name it: --time {names['time']}"
    if not swapped:
        raise DataError(
            f"{said}; name its role: --value {names['time']}, and the time with --time; {keep}"
        )
    raise DataError(
        f"{said}, and {table.label(found['value'])} holds times, {values.min():.0f} to "
        f"{values.max():.0f}: they look swapped; name them: --time {names['value']} --value "
        f"{names['time']} (in Python time= and value=); {keep}"
    )


@dataclass(frozen=True)
class ItemList:
    """A public list of items, from a file."""

    path: Path
    ids: StrArray
    titles: StrArray | None
    features: Features = field(default_factory=dict)
    """What was recognised in it: genres and years; in an atomic file, whatever has a type."""
    left_out: tuple[str, ...] = ()
    """A note for each column of an atomic file that is no feature."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Name the columns that are used beside the ids, and those that are left out."""
        found = [*(["title"] if self.titles is not None else []), *self.features]
        taken = (f"{' and '.join(found)} of each item taken",) if found else ()
        return tuple(f"{self.path.name}: {note}" for note in (*taken, *self.left_out))

    def described(self, declared: Sequence[str]) -> Features:
        """Return the declared features; where none are, those that were recognised."""
        if not declared:
            return self.features
        return read_features(self.path, "item", self.ids, declared)

    def require(self, table: Table, column: int, codes: IntArray, touched: StrArray) -> None:
        """Refuse rows of items that are not on the list."""
        strange = ~np.isin(touched, self.ids)
        if strange.any():
            row = int(strange[codes].argmax())
            more = f" (nor are {strange.sum() - 1:,} others)" if strange.sum() > 1 else ""
            raise DataError(
                f"{table.at(row, column)}: item '{touched[codes[row]]}' is not in the list of "
                f"items {self.path}{more}; add it there, or leave its rows out"
            )


def read_items(path: str | Path) -> ItemList:
    """Read a public list of items: an id per line, or a table with an item column.

    Titles, genres and years are recognised by the usual names of their columns; a year also at the
    end of a title.
    """
    return items_of(*_item_table(Path(path)))


def items_of(table: Table, columns: Mapping[str, int] | None = None) -> ItemList:
    """Make a list of items of a table's rows; ``columns`` says where ids and titles are."""
    columns = columns or table.choose(RECOGNISED, "item")
    items = Ids(table, columns["item"])
    titles = Titles(items, columns["title"]) if "title" in columns else None
    read_columns(table, items, titles)
    codes, ids = items.result()
    if len(ids) < len(codes):
        row = int(np.delete(np.arange(len(codes)), np.unique(codes, return_index=True)[1])[0])
        raise DataError(f"{table.at(row, columns['item'])}: '{ids[codes[row]]}' is there already")
    named = None if titles is None else titles.result()
    order = np.argsort(codes)
    if table.types is None:
        return ItemList(table.path, ids, named, _recognised(table, order, named))
    features = _typed_features(table, columns, "item", order.tolist())
    return ItemList(table.path, ids, named, features, tuple(table.notes))


def _recognised(table: Table, order: NDArray[Any], titles: StrArray | None) -> dict[str, Column]:
    """Return the usual features of items that a table has, its rows in this order."""
    entries = {
        name: np.array(list(table.entries(column)), object)[order]
        for name, column in guesses.features_by_name(table.names or []).items()
    }
    found: dict[str, Column] = {}
    if "genres" in entries:
        sets = [set(entry.split("|")) - {"", guesses.NO_GENRES} for entry in entries["genres"]]
        # One that is empty describes nothing, one that is different everywhere is an id.
        if 0 < len(set().union(*sets)) <= MOST_GENRES:
            found["genres"] = MultiCategorical.of(sets)
    # The year may also end a title, as in "Toy Story (1995)".
    ends = [YEAR_AT_END.search(title) for title in ([] if titles is None else titles)]
    coded = years(entries.get("year", [end[1] if end else "" for end in ends]))
    return {**found, "year": coded} if len(coded.names) else found


def years(entries: Iterable[str]) -> Categorical:
    """Code years; what is no year is unknown."""
    return Categorical.of(entry if entry.isdecimal() else "" for entry in entries)


def read_features(
    path: str | Path, owner: Owner, ids: StrArray, declared: Sequence[str]
) -> dict[str, Column]:
    """Read the declared columns of a file with a line per user, or per item, in the order of ids.

    A column is declared as ``NAME`` or ``NAME:category:A|B`` (a category, of these), ``NAME:set``
    or ``NAME:set:A|B`` (several, separated by |) or ``NAME:number:LOW:HIGH``. An empty entry, and
    a user or item without a line, is unknown.
    """
    if not declared:
        return {}
    table = read_table(Path(path))
    line_of = _line_of(table, table.choose(RECOGNISED, owner)[owner])
    lines = [line_of.get(str(one)) for one in ids]
    if all(line is None for line in lines):
        raise DataError(f"{path}: no {owner} of the interactions has a line in it")
    return {_declared(words)[0]: _read_declared(words, table, owner, lines) for words in declared}


def _line_of(table: Table, column: int) -> dict[str, int]:
    """Return the row of each id in a column; refuse an id that is there twice."""
    ids = Ids(table, column)
    read_columns(table, ids)
    codes, found = ids.result()
    line_of: dict[str, int] = {}
    for row, entry in enumerate(found[codes].tolist()):
        if entry in line_of:
            raise DataError(f"{table.at(row, column)}: '{entry}' has a line already")
        line_of[entry] = row
    return line_of


@dataclass(frozen=True)
class FeatureFiles:
    """Files with features of users and items, and the columns to take from them."""

    users: Path | None = None
    items: Path | None = None
    user_features: tuple[str, ...] = ()
    item_features: tuple[str, ...] = ()

    def describe(self, data: Interactions) -> Interactions:
        """Return the interactions with these features."""
        if bool(self.user_features) != (self.users is not None):
            raise ConfigError(
                "user features need both a file and the columns in it: --users FILE "
                "--user-feature COLUMN"
            )
        if self.item_features and self.items is None:
            raise ConfigError("item features need the file that they are in: --items FILE")
        if self.users is not None:
            user = read_features(self.users, "user", data.users, self.user_features)
            data = replace(data, user_features=user)
        if self.items is not None and self.item_features:
            item = read_features(self.items, "item", data.items, self.item_features)
            data = replace(data, item_features=item)
        return data


NO_FEATURES = FeatureFiles()


def _read_declared(words: str, table: Table, owner: Owner, lines: Sequence[int | None]) -> Column:
    """Read the column that ``words`` declare, of these lines; refuse any entry that cannot be."""
    name, kind, parts = _declared(words)
    column = table.find(f"{owner} feature", name)
    typed = "" if table.types is None else table.types[column]
    if typed == "float_seq":
        raise DataError(
            f"{table.path}, {table.label(column)}: a float_seq, which is a vector of numbers and "
            "no feature; leave it out"
        )
    kind = kind or {"token_seq": "set", "float": "number"}.get(typed, "category")
    mark = None if typed == "token_seq" else "|"  # sequences are separated by spaces
    entries = list(table.entries(column))
    for row, entry in enumerate(entries):
        wrong = ""
        if kind == "number":
            if entry and not (is_number(entry) and np.isfinite(float(entry))):
                wrong = "a number"
        elif parts and not set(entry.split(mark) if kind == "set" else [entry]) <= {"", *parts}:
            wrong = f"among the categories of '{words}'; declare it there, or leave the entry empty"
        if wrong:
            raise DataError(f"{table.at(row, column)}: '{entry}' is not {wrong}")
    ours = ["" if line is None else entries[line] for line in lines]
    if kind == "category":
        return Categorical.of(ours, parts or None)
    if kind == "set":
        return MultiCategorical.of((entry.split(mark) for entry in ours), parts or None)
    values = np.array([float(entry) if entry else np.nan for entry in ours], np.float32)
    if np.isnan(values).all():
        raise DataError(f"{table.path}, {table.label(column)}: no number in it")
    return Numeric(values, *map(float, parts))


def _declared(words: str) -> tuple[str, str, list[str]]:
    """Return a declared feature's name, its kind if given, and its categories or its range."""
    name, _, rest = words.partition(":")
    kind, _, more = rest.partition(":")
    parts = more.split(":" if kind == "number" else "|") if more else []
    if kind in ("", "category", "set"):
        if "" in parts or len(set(parts)) < len(parts):
            raise DataError(f"feature '{words}': name each category once, as in A|B|C")
    elif kind != "number" or len(parts) not in (0, 2) or not all(map(is_number, parts)):
        raise DataError(
            f"feature '{words}': write NAME or NAME:category:A|B for a category, NAME:set or "
            "NAME:set:A|B for several separated by |, or NAME:number:LOW:HIGH"
        )
    elif parts and not float(parts[0]) < float(parts[1]):
        raise DataError(f"feature '{words}': the range must ascend")
    return name, kind, parts


def read_history(path: str | Path) -> list[str]:
    """Return the item ids of one person's history, oldest first.

    The file has one item id per line, or is a table with an item column as `read_interactions`
    reads it; its time column, if any, gives the order.
    """
    table, columns = _item_table(Path(path))
    ids = Ids(table, columns["item"])
    times = Times(table, columns["time"]) if "time" in columns else None
    read_columns(table, ids, times)
    codes, items = ids.result()
    if times is not None:
        codes = codes[np.argsort(times.result(), kind="stable")]
    return [str(items[code]) for code in codes]


def _item_table(path: Path) -> tuple[Table, dict[str, int]]:
    """Read a table with an item column, or one item id per line, and say what is where."""
    content = guesses.read_content(path)
    text = "" if content.is_parquet else content.as_text()
    if not content.is_parquet and not text.lstrip().startswith("{"):
        lines = {n: line.strip() for n, line in enumerate(text.split("\n"), 1) if line.strip()}
        numbers, ids = list(lines), list(lines.values())
        if ids and guesses.role_of(ids[0]) == "item":
            numbers, ids = numbers[1:], ids[1:]
        if not ids:
            raise DataError(f"{path}: the file is empty; write one item id per line")
        if not guesses.looks_like_a_table(ids):
            lines_of = [f"line {number}" for number in numbers]
            table = Table(path, None, 1, len(ids), lambda _: iter([[ids]]), lines_of.__getitem__)
            return table, {"item": 0}
    table = make_table(content)
    return table, table.choose(RECOGNISED, "item")
