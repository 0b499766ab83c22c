"""The data sets we know: their files, checksums and terms, and how each is read.

A data set is looked for as ``<root>/<folder>/<file>`` under the folder named by the environment
variable ``HUSHREC_DATA`` and then under the cache.
"""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hushrec.data.files import read_interactions
from hushrec.data.interactions import (
    Categorical,
    Column,
    Interactions,
    MultiCategorical,
    Numeric,
    StrArray,
)
from hushrec.data.tables import read_rows

FileState = Literal["ok", "differs", "missing"]


@dataclass(frozen=True)
class File:
    """One file of a data set and the SHA-256 of its unpacked content."""

    name: str
    sha256: str


@dataclass(frozen=True)
class DataSet:
    """One named data set. The first of its files has the interactions; the others may be absent."""

    name: str
    title: str
    licence: str
    citation: str
    users: int
    items: int
    rows: int
    loader: Callable[[Folder], Interactions]
    folder: str = ""
    files: tuple[File, ...] = ()
    url: str | None = None

    def find(self, data_dir: str | Path | None = None) -> Folder | None:
        """Return where the data set is, or None."""
        for root in _roots(data_dir):
            # The official archives unpack into a folder of their own.
            for inside in (self.folder, f"{self.folder}/{self.folder}", self._archive_stem):
                folder = Folder(root / inside)
                if folder.get(self.files[0].name):
                    return folder
        return None

    def states(self, folder: Folder | None) -> dict[str, FileState]:
        """Return for each file whether it is there and is the one we know."""
        return {file.name: _state(folder, file) for file in self.files}

    @property
    def _archive_stem(self) -> str:
        return PurePosixPath(self.url or self.folder).name.removesuffix(".zip")


@dataclass(frozen=True)
class Folder:
    """Files by name, each plain or gzip; remembers what was asked for and absent."""

    path: Path
    absent: list[str] = field(default_factory=list)

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


def cache_dir() -> Path:
    """Return the folder for downloads and imports."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hushrec"


def _roots(data_dir: str | Path | None) -> Iterator[Path]:
    for root in (data_dir, os.environ.get("HUSHREC_DATA")):
        if root:
            yield Path(root)
    yield cache_dir()


def _state(folder: Folder | None, file: File) -> FileState:
    path = folder.get(file.name) if folder else None
    if path is None:
        return "missing"
    digest = hashlib.sha256()
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
        try:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
        except (OSError, EOFError):
            return "differs"
    return "ok" if digest.hexdigest() == file.sha256 else "differs"


# ------------------------------------------------------------------------------------- loaders


def _required(folder: Folder, name: str) -> Path:
    path = folder.get(name)
    assert path is not None  # `DataSet.find` returned this folder because it has the file
    return path


def _ordered(data: Interactions) -> Interactions:
    """Number users and items by their ids where all of these are whole numbers."""
    user_order, item_order = _numeric_order(data.users), _numeric_order(data.items)
    return replace(
        data,
        user=np.argsort(user_order).astype(np.int32)[data.user],
        item=np.argsort(item_order).astype(np.int32)[data.item],
        users=data.users[user_order],
        items=data.items[item_order],
    )


def _numeric_order(ids: StrArray) -> NDArray[np.int64]:
    if np.char.isdecimal(ids).all():
        return np.argsort(ids.astype(np.int64), kind="stable")
    return np.arange(len(ids))


def _read(folder: Folder, name: str, **columns: Any) -> Interactions:
    return _ordered(read_interactions(_required(folder, name), **columns))


def _categorical(entries: Iterable[str], names: Iterable[str] | None = None) -> Categorical:
    """Code a column of text; categories are sorted unless their order is given."""
    entries = list(entries)
    known = list(names) if names is not None else sorted(set(entries))
    code = {name: k for k, name in enumerate(known)}
    return Categorical(
        np.array([code[entry] for entry in entries], dtype=np.int32), np.array(known)
    )


def _multi(entries: Iterable[Iterable[str]]) -> MultiCategorical:
    entries = [set(entry) for entry in entries]
    known = sorted(set().union(*entries))
    flags = np.array([[name in entry for name in known] for entry in entries], dtype=np.bool_)
    return MultiCategorical(flags, np.array(known))


def _numbers(entries: Iterable[str], low: float, high: float) -> Numeric:
    """Read numbers; the median stands in where there is none, so that no NaN goes on."""
    known = np.array(
        [float(e) if e.replace(".", "", 1).isdecimal() else np.nan for e in entries], np.float32
    )
    filled = np.where(np.isnan(known), np.nanmedian(known), known)
    return Numeric(filled.astype(np.float32), low, high)


def _years(entries: Iterable[str]) -> Categorical:
    """Code years; a film without one has none."""
    known = [entry if entry.isdecimal() else None for entry in entries]
    names = sorted({year for year in known if year is not None})
    codes = [-1 if year is None else names.index(year) for year in known]
    return Categorical(np.array(codes, np.int32), np.array(names))


def _ml_100k(folder: Folder) -> Interactions:
    data = _read(folder, "u.data")
    people = folder.rows("u.user", "|")
    films = folder.rows("u.item", "|", encoding="latin-1")
    genres = list(folder.rows("u.genre", "|"))
    if people:
        rows = [people[user] for user in data.users]
        features: dict[str, Column] = {
            "age": Numeric(np.array([row[1] for row in rows], dtype=np.float32), 0.0, 100.0),
            "gender": _categorical(row[2] for row in rows),
            "occupation": _categorical(row[3] for row in rows),
        }
        data = replace(data, user_features=features)
    if films:
        rows = [films[item] for item in data.items]
        described: dict[str, Column] = {
            "year": _years(row[2][-4:] for row in rows)  # 01-Jan-1995
        }
        if genres:
            flags = np.array([row[5 : 5 + 19] for row in rows]) == "1"
            described["genres"] = MultiCategorical(flags, np.array([g for g in genres if g]))
        data = replace(data, titles=np.array([row[1] for row in rows]), item_features=described)
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


def _ml_1m(folder: Folder) -> Interactions:
    data = _read(folder, "ratings.dat")
    people = folder.rows("users.dat", "::")
    films = folder.rows("movies.dat", "::", encoding="latin-1")
    if people:
        rows = [people[user] for user in data.users]
        features: dict[str, Column] = {
            "gender": _categorical(row[1] for row in rows),
            "age group": _categorical((_ML_1M_AGES[row[2]] for row in rows), _ML_1M_AGES.values()),
            "occupation": _categorical(
                (_ML_1M_OCCUPATIONS[int(row[3])] for row in rows), _ML_1M_OCCUPATIONS
            ),
        }
        data = replace(data, user_features=features)
    if films:
        rows = [films[item] for item in data.items]
        titles = [row[1] for row in rows]
        described: dict[str, Column] = {
            "year": _years(title[-5:-1] for title in titles),  # Toy Story (1995)
            "genres": _multi(row[2].split("|") for row in rows),
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


def _lastfm_listens(folder: Folder) -> Interactions:
    return _lastfm_titles(folder, _read(folder, "user_artists.dat"))


def _lastfm_tags(folder: Folder, at_least: int) -> Interactions:
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


def _ratings_dat(folder: Folder) -> Interactions:
    return _read(folder, "ratings.dat")


def _filmtrust(folder: Folder) -> Interactions:
    return _read(folder, "ratings.txt").users_with_at_least(10)


def _frappe(folder: Folder) -> Interactions:
    data = _read(folder, "frappe.csv")
    path = _required(folder, "frappe.csv")
    head, *rows = read_rows(path, "\t")
    context: dict[str, Column] = {
        head[k]: _categorical(row[k] for row in rows) for k in range(3, len(head))
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
        "category": _categorical(row[category] for row in found),
        "price": _categorical(_price_kind(row[price]) for row in found),
        # The shop's own figures: classes of installations all over the world, and its stars.
        "downloads": _categorical(row[downloads] for row in found),
        "language": _categorical(row[language] for row in found),
        "rating": _numbers((row[rating] for row in found), 0.0, 5.0),
    }
    titles = [
        str(item) if row[name] in ("", "unknown") else row[name]
        for item, row in zip(data.items, found, strict=True)
    ]
    return replace(data, titles=np.array(titles), item_features=described)


def _price_kind(price: str) -> str:
    return {"Free": "free", "unknown": "unknown"}.get(price, "paid")


def _demo(_: Folder) -> Interactions:
    from hushrec.data.synthetic import demo  # compiles kernels; the others do without

    return demo()


# ----------------------------------------------------------------------------------- catalogue

_GROUPLENS = "research use, acknowledge; no redistribution, no commercial use without permission"
_NO_TERMS = "no licence text came with it; terms not established"
_MOVIELENS = (
    "F. Maxwell Harper and Joseph A. Konstan. 2015. The MovieLens Datasets: History and Context. "
    "ACM TiiS 5, 4, Article 19."
)
_LASTFM_LICENCE = "non-commercial use; cite Last.fm"
_LASTFM = "Last.fm, http://www.lastfm.com; Cantador, Brusilovsky, Kuflik: HetRec 2011, RecSys."
_LASTFM_URL = "https://files.grouplens.org/datasets/hetrec2011/hetrec2011-lastfm-2k.zip"
_AMAZON = "J. McAuley et al. 2015. Image-based Recommendations on Styles and Substitutes. SIGIR."
_ARTISTS = File("artists.dat", "c173881362c6b28551368fecb3c0be5a6a30a6cd859e1f5775413dfe46d48648")
_TAG_FILES = (
    File(
        "user_taggedartists.dat",
        "d31fe938fcfeed6f0059f37a36b156f63674d073fc2553e5cc9dc1595e365bc7",
    ),
    _ARTISTS,
)
CATALOG: Mapping[str, DataSet] = {
    dataset.name: dataset
    for dataset in (
        DataSet(
            name="ml-100k",
            title="MovieLens 100K: film ratings, 1997-1998",
            licence=_GROUPLENS,
            citation=_MOVIELENS,
            users=943,
            items=1_682,
            rows=100_000,
            loader=_ml_100k,
            folder="ml-100k",
            files=(
                File("u.data", "06416e597f82b7342361e41163890c81036900f418ad91315590814211dca490"),
                File("u.item", "553841ebc7de3a0fd0d6b62a204ea30c1e651aacfb2814c7a6584ac52f2c5701"),
                File("u.user", "f120e114da2e8cf314fd28f99417c94ae9ddf1cb6db8ce0e4b5995d40e90e62c"),
                File("u.genre", "9757e0d3e6b298159a80dd48eaf938114690e911e39af97a76949ef1663610bb"),
            ),
            url="https://files.grouplens.org/datasets/movielens/ml-100k.zip",
        ),
        DataSet(
            name="ml-1m",
            title="MovieLens 1M: film ratings, 2000-2003",
            licence=_GROUPLENS,
            citation=_MOVIELENS,
            users=6_040,
            items=3_706,
            rows=1_000_209,
            loader=_ml_1m,
            folder="ml-1m",
            files=(
                File(
                    "ratings.dat",
                    "506d64ca44484487c11dc2d9a28de5c54948213e6b96285e298afe28d6ea4e0f",
                ),
                File(
                    "movies.dat",
                    "0140fc2356357c1a851d0f52e893a1e4d3696df632c4141cea8d5bc3d621f0b9",
                ),
                File(
                    "users.dat",
                    "1dc3a95300cb19f7c10e027daf29b8cdf1d908dab65b5edfb45950aa389a10a3",
                ),
            ),
            url="https://files.grouplens.org/datasets/movielens/ml-1m.zip",
        ),
        DataSet(
            name="lastfm-2k/listens",
            title="Last.fm (HetRec 2011): play counts of artists",
            licence=_LASTFM_LICENCE,
            citation=_LASTFM,
            users=1_892,
            items=17_632,
            rows=92_834,
            loader=_lastfm_listens,
            folder="lastfm-2k",
            files=(
                File(
                    "user_artists.dat",
                    "001400dc3c7d2667fca6e4ea6dc6acc31a9dd28ad5cd0f74cea988c019934d3b",
                ),
                _ARTISTS,
            ),
            url=_LASTFM_URL,
        ),
        DataSet(
            name="lastfm-2k/tags-5",
            title="Last.fm (HetRec 2011): tags of users with at least 5, as PFedRec",
            licence=_LASTFM_LICENCE,
            citation=_LASTFM,
            users=1_600,
            items=12_454,
            rows=185_650,
            loader=partial(_lastfm_tags, at_least=5),
            folder="lastfm-2k",
            files=_TAG_FILES,
            url=_LASTFM_URL,
        ),
        DataSet(
            name="lastfm-2k/tags-10",
            title="Last.fm (HetRec 2011): tags of users with at least 10, as FedRKG",
            licence=_LASTFM_LICENCE,
            citation=_LASTFM,
            users=1_269,
            items=12_322,
            rows=183_415,
            loader=partial(_lastfm_tags, at_least=10),
            folder="lastfm-2k",
            files=_TAG_FILES,
            url=_LASTFM_URL,
        ),
        DataSet(
            name="amazon-video/pfedrec",
            title="Amazon Instant Video: ratings of users with at least 5, as PFedRec",
            licence=_NO_TERMS,
            citation=_AMAZON,
            users=8_072,
            items=11_830,
            rows=63_836,
            loader=_ratings_dat,
            folder="amazon-video/pfedrec",
            files=(
                File(
                    "ratings.dat",
                    "a1292e4a4dba6c37be6ae5dc83d4404af96bf3eace4c8954e2f4e8360a3cdd76",
                ),
            ),
        ),
        DataSet(
            name="amazon-video/fedrkg",
            title="Amazon Instant Video: ratings of users with at least 10, as FedRKG",
            licence=_NO_TERMS,
            citation=_AMAZON,
            users=1_372,
            items=7_957,
            rows=23_181,
            loader=_ratings_dat,
            folder="amazon-video/fedrkg",
            files=(
                File(
                    "ratings.dat",
                    "82eb5856b173e8f52a93521b33a402429f81aa92645fdbb7bae6b78316738ba0",
                ),
            ),
        ),
        DataSet(
            name="filmtrust",
            title="FilmTrust: film ratings of users with at least 10, as FedRKG's table",
            licence=_NO_TERMS,
            citation="G. Guo, J. Zhang, N. Yorke-Smith. 2013. A Novel Bayesian Similarity Measure "
            "for Recommender Systems. IJCAI.",
            users=1_002,
            items=2_042,
            rows=33_372,
            loader=_filmtrust,
            folder="filmtrust",
            files=(
                File(
                    "ratings.txt",
                    "dac8ad6cefc94ec9be782c0de4659d7ca2fa9189991df72353042f5dfeadf1b1",
                ),
            ),
        ),
        DataSet(
            name="frappe",
            title="Frappe: app usage in context",
            licence="research use, acknowledge; no redistribution, no de-anonymising, no "
            "commercial use without permission",
            citation="L. Baltrunas, K. Church, A. Karatzoglou, N. Oliver. 2015. Frappe: "
            "Understanding the Usage and Perception of Mobile App Recommendations In-The-Wild. "
            "arXiv:1505.03014.",
            users=957,
            items=4_082,
            rows=96_203,
            loader=_frappe,
            folder="frappe",
            files=(
                File(
                    "frappe.csv",
                    "409edc12f4e2153c5dd58ae171938735911d9b0f70961d5f1086b241656b2cb5",
                ),
                File(
                    "meta.csv",
                    "de87f6b2e7cd0428f9179167e2e7826b5dd3bf490d5af680261b685763ac214f",
                ),
            ),
        ),
        DataSet(
            name="demo",
            title="A made-up world of films with known structure",
            licence="none needed: made up by hushrec",
            citation="hushrec",
            users=1_000,
            items=1_495,
            rows=34_997,
            loader=_demo,
        ),
    )
}
