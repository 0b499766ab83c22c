"""What a file does not say: its delimiter, whether it has a header, which column is what."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice

# Normalised names (lower case, only letters and digits), the most telling first.
_NAMES = {
    "user": (
        *("userid", "user", "uid", "username", "reviewerid", "customerid", "memberid"),
        *("accountid", "customer", "visitorid", "sessionid"),
    ),
    "item": (
        *("itemid", "item", "iid", "movieid", "movie", "artistid", "artist", "asin"),
        *("parentasin", "productid", "product", "trackid", "track", "songid", "song"),
        *("bookid", "book", "isbn", "newsid", "articleid", "appid", "app", "gameid", "sku"),
    ),
    "value": (
        *("rating", "value", "weight", "score", "count", "cnt", "stars", "overall"),
        *("playcount", "plays", "listens", "clicks", "strength"),
    ),
    "time": (
        *("timestamp", "time", "datetime", "date", "ts", "unixreviewtime", "unixtime"),
        *("createdat", "ratedat", "epoch"),
    ),
    "title": ("title", "itemtitle", "itemname", "movietitle", "artistname", "producttitle"),
}
_FEATURES = {
    "genres": ("genres", "genre", "categories", "category", "tags"),
    "year": ("year", "releaseyear"),
}
"""Columns of a list of items that describe them: several categories each, and a year."""
NO_GENRES = "(no genres listed)"
"""What MovieLens writes where there are none."""
POSITIONS = ("user", "item", "value", "time")
_DELIMITERS = ("\t", "::", ";", "|", ",")
IMPORT = "hushrec data import …"
"""The command that takes what could not be guessed."""


def is_number(entry: str) -> bool:
    """Say whether a text is a number."""
    try:
        float(entry)
    except ValueError:
        return False
    return True


def is_header(first: list[str]) -> bool:
    """Headers do not contain numbers or dates."""
    return not any(is_number(entry) or re.match(r"\d{4}-\d\d-\d\d", entry) for entry in first)


def columns_by_name(names: Mapping[int, str]) -> dict[str, int]:
    """Return the column of every role that is among these names; of equal names the first."""
    numbers = {_normal(name): number for number, name in reversed(list(names.items()))}
    found = {
        role: next((numbers[name] for name in usual if name in numbers), None)
        for role, usual in _NAMES.items()
    }
    return {role: number for role, number in found.items() if number is not None}


def features_by_name(names: Iterable[str]) -> dict[str, int]:
    """Return the column of every usual feature of items that is among these names."""
    numbers = {_normal(name): number for number, name in enumerate(names)}
    found = {
        feature: next((numbers[name] for name in usual if name in numbers), None)
        for feature, usual in _FEATURES.items()
    }
    return {feature: number for feature, number in found.items() if number is not None}


def year_in(title: str) -> str:
    """Return the year that ends a title, as in "Toy Story (1995)"; nothing if there is none."""
    found = re.search(r"\((\d{4})(?:[-–]\d{0,4})?\)$", title)
    return found[1] if found else ""


def role_of(name: str) -> str | None:
    """Return what a column of this name holds, if that is known."""
    return next((role for role, names in _NAMES.items() if _normal(name) in names), None)


def delimiter_of(text: str) -> str | None:
    """Return what splits the first lines most evenly, known column names weighing most."""
    head = head_of(text)
    counts = {d: [line.count(d) for line in head] for d in _DELIMITERS}
    present = [d for d in _DELIMITERS if counts[d][0]]
    if not present:
        return " " if " " in head[0].strip() else None

    def fit(delimiter: str) -> tuple[bool, int]:
        known = any(role_of(name) for name in head[0].split(delimiter))
        return known, sum(count == counts[delimiter][0] for count in counts[delimiter])

    return max(present, key=fit)


def delimiter_hint(text: str, asked: str | None) -> str:
    """Return the end of a sentence about a file that has one column only."""
    guess = delimiter_of(text)
    if guess is not None and guess != asked:
        return f" with delimiter {asked!r}; {guess!r} looks right: {IMPORT} --delimiter {guess!r}"
    marks = Counter(re.findall(r"[^\w\s.\-\"']", head_of(text)[0]))
    if marks:
        mark = marks.most_common(1)[0][0]
        return f"; {mark!r} looks like the delimiter: {IMPORT} --delimiter {mark!r}"
    return f"; say what separates the fields: {IMPORT} --delimiter MARK"


def is_item_header(line: str) -> bool:
    """Say whether a line is the usual name of an item column, alone."""
    # "Movie: The Sequel" is a title, not a typed column name.
    return _normal(line.replace(":", "")) in _NAMES["item"]


def looks_like_a_table(lines: list[str]) -> bool:
    """Tell a table from one id per line, where an id may well contain a comma."""
    delimiter = delimiter_of("\n".join(lines[:10]))
    if delimiter is None or delimiter == " ":
        return False
    first = [entry.strip().strip('"') for entry in lines[0].split(delimiter)]
    if any(role_of(name) == "item" for name in first):
        return True
    return len(first) >= 3 and is_number(first[2])


def _normal(name: str) -> str:
    """Lower-case letters and digits only; RecBole's ``user_id:token`` is ``userid``."""
    return re.sub(r"[\W_]", "", name.split(":")[0].lower())


def head_of(text: str, lines: int = 10) -> list[str]:
    """Return the first lines that are not blank, without what is quoted."""
    found = islice(re.finditer(r"^.*\S.*$", text, re.MULTILINE), lines)
    return [re.sub(r'"[^"]*"', "", line.group()) for line in found]
