"""Where the files of a data set lie, and whether they are the ones we know.

A data set is looked for as ``<root>/<folder>/<file>`` under the folder named by the environment
variable ``HUSHREC_DATA`` and then under the cache.

How each data set we know is read from its files.
"""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from hushrec.data.interactions import (
    Categorical,
    Column,
    Interactions,
    MultiCategorical,
    Numeric,
    StrArray,
)
from hushrec.data.reading import read_interactions, years
from hushrec.data.text import Heard, read_rows, unheard

FileState = Literal["ok", "differs", "missing"]


@dataclass(frozen=True)
class Folder:
    """Files by name, each plain or gzip; remembers what was asked for and absent."""

    path: Path
    absent: list[str] = field(default_factory=list)
    heard: Heard = unheard
    """Told how far reading the interactions is."""

    def get(self, name: str) -> Path | None:
        """Return the path of a file, or None."""
        for candidate in (self.path / name, self.path / f"{name}.gz"):
            if candidate.is_file():
                return candidate
        return None

    def rows(
        self, name: str, delimiter: str, *, encoding: str = "utf-8", header: bool = False
    ) -> dict[str, list[str]]:
        """Return the lines of a side file by their first field, nothing if it is absent."""
        path = self.get(name)
        if path is None:
            self.absent.append(name)
            return {}
        rows = read_rows(path, delimiter, encoding=encoding, header=header)
        return {row[0]: row for row in rows}

    def lines_of(
        self, ids: StrArray, name: str, delimiter: str, encoding: str = "utf-8"
    ) -> list[list[str]]:
        """Return the line of each id, nothing if the file is absent."""
        rows = self.rows(name, delimiter, encoding=encoding)
        return [rows[one] for one in ids] if rows else []

    def state(self, name: str, sha256: str) -> FileState:
        """Return whether a file is there and has this checksum, unpacked."""
        path = self.get(name)
        if path is None:
            return "missing"
        digest = hashlib.sha256()
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            try:
                while chunk := stream.read(1 << 20):
                    digest.update(chunk)
            except (OSError, EOFError):
                return "differs"
        return "ok" if digest.hexdigest() == sha256 else "differs"


def cache_dir() -> Path:
    """Return the folder for downloads and imports."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "hushrec"
    except RuntimeError:
        # A user without a home: a place where nothing is found and nothing can be made.
        return Path(os.devnull) / "hushrec"


def roots(data_dir: str | Path | None) -> Iterator[Path]:
    """Return the folders to look in, the nearest first."""
    for root in (data_dir, os.environ.get("HUSHREC_DATA")):
        if root:
            yield Path(root)
    yield cache_dir()


def _required(folder: Folder, name: str) -> Path:
    path = folder.get(name)
    assert path is not None  # `DataSet.find` returned this folder because it has the file
    return path


def _read(folder: Folder, name: str) -> Interactions:
    return read_interactions(_required(folder, name), heard=folder.heard)


def _numbers(entries: Iterable[str], low: float, high: float) -> Numeric:
    """Read numbers; the median stands in where there is none, so that no NaN goes on."""
    known = np.array(
        [float(e) if e.replace(".", "", 1).isdecimal() else np.nan for e in entries], np.float32
    )
    filled = np.where(np.isnan(known), np.nanmedian(known), known)
    return Numeric(filled.astype(np.float32), low, high)


# The questions that MovieLens asked its users, and what they could answer.
_GENDERS = ("F", "M")
_ML_100K_OCCUPATIONS = (
    *("administrator", "artist", "doctor", "educator", "engineer", "entertainment", "executive"),
    *("healthcare", "homemaker", "lawyer", "librarian", "marketing", "none", "other"),
    *("programmer", "retired", "salesman", "scientist", "student", "technician", "writer"),
)


def ml_100k(folder: Folder) -> Interactions:
    """Read MovieLens 100K: ages, genders and occupations, years and genres."""
    data = _read(folder, "u.data")
    people = folder.lines_of(data.users, "u.user", "|")
    films = folder.lines_of(data.items, "u.item", "|", encoding="latin-1")
    genres = list(folder.rows("u.genre", "|"))
    if people:
        features: dict[str, Column] = {
            "age": Numeric(np.array([row[1] for row in people], dtype=np.float32), 0.0, 100.0),
            "gender": Categorical.of((row[2] for row in people), _GENDERS),
            "occupation": Categorical.of((row[3] for row in people), _ML_100K_OCCUPATIONS),
        }
        data = replace(data, user_features=features)
    if films:
        described: dict[str, Column] = {"year": years(row[2][-4:] for row in films)}  # 01-Jan-1995
        if genres:
            flags = np.array([row[5 : 5 + 19] for row in films]) == "1"
            described["genres"] = MultiCategorical(flags, np.array([g for g in genres if g]))
        data = replace(data, titles=np.array([row[1] for row in films]), item_features=described)
    return data


_ML_1M_AGES = {
    "1": "under 18", "18": "18-24", "25": "25-34", "35": "35-44",
    "45": "45-49", "50": "50-55", "56": "56+",
}  # fmt: skip
_ML_1M_OCCUPATIONS = (
    *("other", "academic/educator", "artist", "clerical/admin", "college/grad student"),
    *("customer service", "doctor/health care", "executive/managerial", "farmer", "homemaker"),
    *("K-12 student", "lawyer", "programmer", "retired", "sales/marketing", "scientist"),
    *("self-employed", "technician/engineer", "tradesman/craftsman", "unemployed", "writer"),
)


def ml_1m(folder: Folder) -> Interactions:
    """Read MovieLens 1M: age groups, genders and occupations, years and genres."""
    data = _read(folder, "ratings.dat")
    people = folder.lines_of(data.users, "users.dat", "::")
    films = folder.lines_of(data.items, "movies.dat", "::", encoding="latin-1")
    if people:
        features: dict[str, Column] = {
            "gender": Categorical.of((row[1] for row in people), _GENDERS),
            "age group": Categorical.of(
                (_ML_1M_AGES[row[2]] for row in people), _ML_1M_AGES.values()
            ),
            "occupation": Categorical.of(
                (_ML_1M_OCCUPATIONS[int(row[3])] for row in people), _ML_1M_OCCUPATIONS
            ),
        }
        data = replace(data, user_features=features)
    if films:
        titles = [row[1] for row in films]
        described: dict[str, Column] = {
            "year": years(title[-5:-1] for title in titles),  # Toy Story (1995)
            "genres": MultiCategorical.of(row[2].split("|") for row in films),
        }
        data = replace(data, titles=np.array(titles), item_features=described)
    return data


def _lastfm_titles(folder: Folder, data: Interactions) -> Interactions:
    artists = folder.rows("artists.dat", "\t", header=True)
    if not artists:
        return data
    # Some tagged artists are not listed; their id is all there is to print.
    titles = [artists[item][1] if item in artists else str(item) for item in data.items]
    return replace(data, titles=np.array(titles))


def lastfm_listens(folder: Folder, at_least: int = 1) -> Interactions:
    """Read Last.fm: how often a user played an artist, of users with some of them."""
    data = _read(folder, "user_artists.dat").users_with_at_least(at_least)
    return _lastfm_titles(folder, data)


def lastfm_tags(folder: Folder, at_least: int) -> Interactions:
    """Read Last.fm: tags with their month, of users with some of them."""
    name = "user_taggedartists.dat"
    data = _read(folder, name)
    columns = np.array(read_rows(_required(folder, name), "\t", header=True), dtype=np.int64).T
    day, month, year = columns[3:6]
    months = ((year - 1970) * 12 + month - 1).astype("datetime64[M]")
    days = months.astype("datetime64[D]").astype(np.int64) + day - 1
    # One row per tag: the same artist comes once for each tag that the user gave.
    notes = [note for note in data.notes if "time" not in note]
    notes.append("dates have month resolution: ties are many")
    dated = replace(data, time=days * 86_400, has_time=True, notes=tuple(notes))
    return _lastfm_titles(folder, dated.users_with_at_least(at_least))


def ratings_dat(folder: Folder) -> Interactions:
    """Read ratings alone."""
    return _read(folder, "ratings.dat")


def filmtrust(folder: Folder) -> Interactions:
    """Read FilmTrust: ratings of users with at least ten."""
    return _read(folder, "ratings.txt").users_with_at_least(10)


def frappe(folder: Folder) -> Interactions:
    """Read Frappe: apps with the context of their use and what the shop says of them."""
    data = _read(folder, "frappe.csv")
    path = _required(folder, "frappe.csv")
    head, *rows = read_rows(path, "\t")
    # What a published file has for categories is as public as the file.
    columns = {head[k]: [row[k] for row in rows] for k in range(3, len(head))}
    context: dict[str, Column] = {
        column: Categorical.of(entries, sorted(set(entries) - {""}))
        for column, entries in columns.items()
    }
    data = replace(data, context=context)
    apps = folder.rows("meta.csv", "\t", header=True)
    if not apps:
        return data
    head = read_rows(_required(folder, "meta.csv"), "\t")[0]
    name, category, price, downloads, language, rating = (
        head.index(column)
        for column in ("name", "category", "price", "downloads", "language", "rating")
    )
    found = [apps[item] for item in data.items]
    described: dict[str, Column] = {
        "category": Categorical.of(row[category] for row in found),
        "price": Categorical.of(_price_kind(row[price]) for row in found),
        # The shop's own figures: classes of installations all over the world, and its stars.
        "downloads": Categorical.of(row[downloads] for row in found),
        "language": Categorical.of(row[language] for row in found),
        "rating": _numbers((row[rating] for row in found), 0.0, 5.0),
    }
    titles = [
        str(item) if row[name] in ("", "unknown") else row[name]
        for item, row in zip(data.items, found, strict=True)
    ]
    return replace(data, titles=np.array(titles), item_features=described)


def _price_kind(price: str) -> str:
    return {"Free": "free", "unknown": "unknown"}.get(price, "paid")


def demo(_: Folder) -> Interactions:
    """Make the made-up world."""
    from hushrec.data.synthetic import demo

    return demo()
