"""Read interactions, features and histories from the columns of a file.

Ids, values and times are read in one place, whatever the format of the file (`tables`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hushrec.data.guesses import is_item_header, is_number, looks_like_a_table
from hushrec.data.interactions import (
    Categorical,
    Column,
    IntArray,
    Interactions,
    MultiCategorical,
    Numeric,
    StrArray,
)
from hushrec.data.tables import (
    RECOGNISED,
    Columns,
    Table,
    choose_columns,
    find_asked,
    is_structured,
    read_table,
)
from hushrec.data.text import read_text
from hushrec.errors import ConfigError, DataError

LONGEST_ID = 1_000
"""Characters; numpy stores every id of a vocabulary as wide as the longest."""
LONGEST_TITLE = 300

Owner = Literal["user", "item"]
"""Whose features they are."""


def read_interactions(
    path: str | Path, columns: Columns = RECOGNISED, *, name: str | None = None
) -> Interactions:
    """Read a file of (user, item, value, time) rows.

    Columns that are not asked for are recognised by their usual names. Without a header the order
    user, item, value, time is taken. Repeated pairs are kept; see `Interactions.merged`.
    """
    table = read_table(Path(path), columns)
    found = choose_columns(table, columns, required=("user", "item"))
    user_codes, users = _ids(table, found["user"])
    item_codes, items = _ids(table, found["item"])
    for what, ids in (("user", users), ("item", items)):
        if len(ids) == 1:
            raise DataError(
                f"{table.path}: only one {what} ({str(ids[0])!r}) in {len(user_codes):,} rows; "
                f"if that is the wrong column, choose another with --{what}"
            )
    if "value" in found:
        values = _values(table, found["value"])
    else:
        values = np.ones(len(user_codes), np.float32)
        table.notes.append("no value column: every row counts 1")
    return Interactions(
        name=name or _plain_stem(table.path),
        user=user_codes,
        item=item_codes,
        value=values,
        time=_times(table, found.get("time")),
        users=users,
        items=items,
        titles=_titles(table, found["title"], item_codes) if "title" in found else None,
        has_time="time" in found,
        notes=tuple(table.notes),
    )


def read_features(
    path: str | Path, owner: Owner, ids: StrArray, declared: Sequence[str]
) -> dict[str, Column]:
    """Read the declared columns of a file with a line per user, or per item, in the order of ids.

    A column is declared as ``NAME`` (a category), ``NAME:set`` (several, separated by |) or
    ``NAME:number:LOW:HIGH``. An empty entry, and whoever has no line, is unknown.
    """
    table = read_table(Path(path))
    columns = choose_columns(table, RECOGNISED, required=(owner,))
    line_of: dict[str, int] = {}
    for row, entry in enumerate(table.column(columns[owner])):
        if entry in line_of:
            raise DataError(f"{table.at(row, columns[owner])}: '{entry}' has a line already")
        line_of[entry] = row
    lines = [line_of.get(str(one)) for one in ids]
    if all(line is None for line in lines):
        raise DataError(f"{path}: no {owner} of the interactions has a line in it")
    found: dict[str, Column] = {}
    for words in declared:
        name, *kind = words.split(":")
        column = find_asked(table, f"{owner} feature", name)
        entries = table.column(column)
        ours = ["" if line is None else entries[line] for line in lines]
        found[name] = _feature(table, column, words, kind, entries, ours)
    return found


@dataclass(frozen=True)
class FeatureFiles:
    """Where the features of users and items are, and which columns of these files are some."""

    users: Path | None = None
    items: Path | None = None
    user_features: tuple[str, ...] = ()
    item_features: tuple[str, ...] = ()

    def describe(self, data: Interactions) -> Interactions:
        """Return the interactions with these features."""
        user = self._read("user", self.users, self.user_features, data.users)
        item = self._read("item", self.items, self.item_features, data.items)
        return replace(data, user_features=user, item_features=item)

    def _read(
        self, owner: Owner, file: Path | None, declared: tuple[str, ...], ids: StrArray
    ) -> dict[str, Column]:
        if bool(declared) != (file is not None):
            raise ConfigError(
                f"{owner} features need both a file and the columns in it: --{owner}s FILE "
                f"--{owner}-feature COLUMN"
            )
        return read_features(file, owner, ids, declared) if file else {}


def _feature(
    table: Table, column: int, words: str, kind: list[str], entries: list[str], ours: list[str]
) -> Column:
    if not kind or kind == ["category"]:
        return Categorical.of(ours)
    if kind == ["set"]:
        return MultiCategorical.of(entry.split("|") for entry in ours)
    limits = [float(limit) for limit in kind[1:] if is_number(limit)]
    if kind[0] == "number" and len(limits) == len(kind) - 1 and len(limits) in (0, 2):
        for row, entry in enumerate(entries):
            if entry and not (is_number(entry) and np.isfinite(float(entry))):
                raise DataError(f"{table.at(row, column)}: '{entry}' is not a number")
        values = np.array([float(entry) if entry else np.nan for entry in ours], np.float32)
        if np.isnan(values).all():
            raise DataError(f"{table.path}, {table.label(column)}: no number in it")
        if limits and not limits[0] < limits[1]:
            raise DataError(f"feature '{words}': the range must ascend")
        return Numeric(values, *limits)
    raise DataError(
        f"feature '{words}': write NAME for a category, NAME:set for several separated by |, or "
        "NAME:number:LOW:HIGH"
    )


def read_history(path: str | Path) -> list[str]:
    """Return the item ids of one person's history, oldest first.

    The file has one item id per line, or is a table with an item column as `read_interactions`
    reads it; its time column, if any, gives the order.
    """
    path = Path(path)
    if not is_structured(path):
        text, _ = read_text(path)
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        if lines and is_item_header(lines[0]):
            lines = lines[1:]
        if not lines:
            raise DataError(f"{path}: the file is empty; write one item id per line")
        if not looks_like_a_table(lines):
            return lines
    table = read_table(path)
    columns = choose_columns(table, RECOGNISED, required=("item",))
    codes, items = _ids(table, columns["item"])
    order = np.argsort(_times(table, columns.get("time")), kind="stable")
    return [str(items[code]) for code in codes[order]]


# ------------------------------------------------------------------------ from text to numbers


def _ids(table: Table, column: int) -> tuple[IntArray, StrArray]:
    """Return codes and vocabulary, in the order of first appearance."""
    entries = table.column(column)
    vocabulary: defaultdict[str, int] = defaultdict()
    vocabulary.default_factory = vocabulary.__len__
    codes = np.fromiter(map(vocabulary.__getitem__, entries), np.int32, len(entries))
    if "" in vocabulary:
        raise DataError(f"{table.at(entries.index(''), column)}: empty id")
    longest = max(vocabulary, key=len)
    if len(longest) > LONGEST_ID:
        raise DataError(
            f"{table.at(entries.index(longest), column)}: an id of {len(longest):,} characters; "
            f"at most {LONGEST_ID:,} are accepted"
        )
    return codes, np.array(list(vocabulary), dtype=np.str_)


def _values(table: Table, column: int) -> NDArray[np.float32]:
    entries = table.column(column)
    try:
        values = np.fromiter(map(float, entries), np.float64, len(entries))
    except ValueError:
        row = next(k for k, entry in enumerate(entries) if not is_number(entry))
        raise DataError(f"{table.at(row, column)}: {entries[row]!r} is not a number") from None
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    if not np.isfinite(narrow).all():
        row = int(np.flatnonzero(~np.isfinite(narrow))[0])
        raise DataError(f"{table.at(row, column)}: {entries[row]!r} is not a finite number")
    return narrow


def _times(table: Table, column: int | None) -> NDArray[np.int64]:
    """Return whole seconds, or microseconds where some time has a fraction."""
    if column is None:
        table.notes.append("no time column: the order of the file is taken as time")
        return np.arange(table.rows, dtype=np.int64)
    entries = table.column(column)
    try:
        return np.fromiter(map(int, entries), np.int64, len(entries))
    except (ValueError, OverflowError):
        pass  # not all of them are whole numbers
    parse: Callable[[str], float] = float if is_number(entries[0]) else _iso_seconds
    seconds = np.empty(len(entries), np.float64)
    for row, entry in enumerate(entries):
        try:
            seconds[row] = parse(entry)
        except ValueError:
            seconds[row] = np.nan
        if not abs(seconds[row]) < 2**53:
            kind = "a number" if parse is float else "a number or an ISO date like 2020-01-31"
            raise DataError(f"{table.at(row, column)}: time {entry!r} is not {kind}")
    if (seconds == np.floor(seconds)).all():
        return seconds.astype(np.int64)
    if np.abs(seconds).max() * 1e6 >= 2**63:
        raise DataError(f"{table.path}, {table.label(column)}: times too large to keep fractions")
    table.notes.append("times have fractions of a second: kept in microseconds")
    return np.rint(seconds * 1e6).astype(np.int64)


def _iso_seconds(entry: str) -> float:
    moment = datetime.fromisoformat(entry)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _titles(table: Table, column: int, item_codes: IntArray) -> StrArray:
    """Return the title in the first row of each item."""
    entries = table.column(column)
    _, first_rows = np.unique(item_codes, return_index=True)
    return np.array([entries[row][:LONGEST_TITLE] for row in first_rows], dtype=np.str_)


def _plain_stem(path: Path) -> str:
    return path.name.removesuffix(".gz").rsplit(".", 1)[0] or path.name
