"""`load`: data by name, from a file or from memory; downloads and imported files."""

from __future__ import annotations

import http.client
import shutil
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from hushrec.data import reading
from hushrec.data.columns import NAME, frame_table
from hushrec.data.features import features_from_arrays, features_to_arrays
from hushrec.data.interactions import Interactions
from hushrec.data.sources import CATALOG, DataFolder, DataSet, cache_dir
from hushrec.data.tables import RECOGNISED, Columns
from hushrec.data.text import OnProgress, no_progress
from hushrec.errors import ConfigError, DataError, RunError, nearest, refuse_unknown
from hushrec.io.codec import read_arrays
from hushrec.io.files import atomic_file, checked_path, scratch_folder

DownloadProgress = Callable[[int, int | None], None]
"""Called with the bytes so far and the bytes in all, if known."""


class LoadOptions(TypedDict, total=False):
    """Options of `load` besides the data."""

    user: str | int | None
    item: str | int | None
    value: str | int | None
    time: str | int | None
    title: str | int | None
    """Columns, each by name or number from 0; others are recognised by their usual names."""
    delimiter: str | None
    """Field delimiter of a file, if it is not recognised."""
    name: str
    """Name of data in memory."""
    data_dir: str | Path | None
    """Searched before ``HUSHREC_DATA`` and the cache."""
    download: bool
    """Whether a data set that is not on this machine is downloaded; else that is an error."""
    progress: OnProgress
    """Called with the fraction that is read."""


def load(source: object, *, items: object = None, **options: Unpack[LoadOptions]) -> Interactions:
    """Load a named data set, an imported one, a file, or what a program holds in memory.

    In memory that is a data frame (pandas, polars, …), an Arrow table, a dict of columns, or a
    scipy sparse matrix with a row per user and a column per item. ``items`` is the public list of
    items, with titles, genres and years if it has them: a file, or a frame beside data in memory.
    """
    refuse_unknown("load", options, ("items", *LoadOptions.__annotations__))
    roles: dict[str, Any] = {k: v for k, v in options.items() if k in vars(RECOGNISED)}
    columns = Columns(**roles)
    if not isinstance(source, str | Path):
        if columns.delimiter is not None:
            raise ConfigError("delimiter= is for data that is a file: leave it out")
        return _load_frame(source, items, columns, options.get("name", NAME))
    name, known = str(source), str(source) in names()
    progress = options.get("progress", no_progress)
    if "name" in options:
        raise ConfigError("name= is for data in memory; 'hushrec data import' gives a file one")
    if items is not None and not isinstance(items, str | Path):
        raise ConfigError("items= of data that is a file is a file too")
    if items is not None and known:
        why = (
            f"is for data that is a file, and '{name}' is a name: the data sets of the catalogue "
            "have their list of items, and 'hushrec data import' takes one"
        )
        raise ConfigError(f"items= {why}", command=f"--items {why}")
    named = {role: given for role, given in vars(columns).items() if given is not None}
    if known and named:
        why = f"the columns of '{name}' are known: leave out"
        words, flags = (", ".join(map(form.format, named)) for form in ("{}=", "--{}"))
        raise ConfigError(f"{why} {words}", command=f"{why} {flags}")
    if name in CATALOG:
        dataset = CATALOG[name]
        if not dataset.files:
            return dataset.loader(DataFolder(Path()))
        folder = dataset.find(options.get("data_dir"))
        if folder is None and not options.get("download", False):
            raise DataError(_how_to_get(dataset))
        return _load_known(dataset, replace(folder or fetch(name), progress=progress))
    if known:
        return _load_imported(name)
    if name and (checked_path(name).exists() or Path(name).suffix):
        # The whole path is the name: a run must find its data again from anywhere.
        path = str(Path(name).resolve())
        data = reading.read_interactions(name, columns, name=path, items=items, progress=progress)
        listed = None if items is None else str(checked_path(items).resolve())
        return replace(data, items_file=listed, columns=named)
    raise ConfigError(f"no data set or file '{name}'{nearest(name, names())}")


def _load_frame(frame: object, items: object, columns: Columns, name: str) -> Interactions:
    public = None
    if isinstance(items, str | Path):
        public = reading.read_items(items)
    elif items is not None:
        public = reading.items_of(frame_table(items, "items"))
    data = reading.interactions_of(frame_table(frame, name), columns, public)
    return replace(data, name=name)


def names() -> list[str]:
    """Return the names that `load` knows: the catalogue, then what was imported."""
    return [*CATALOG, *sorted(path.stem for path in (cache_dir() / "imported").glob("*.npz"))]


def _load_known(dataset: DataSet, folder: DataFolder) -> Interactions:
    try:
        data = dataset.loader(folder)
    except (KeyError, IndexError, ValueError) as error:
        raise DataError(
            f"{folder.path}: the files do not fit together ({error!r}); "
            f"'hushrec data info {dataset.name}' tells which differ from the original"
        ) from None
    absent = dict.fromkeys(folder.absent)
    notes = [*data.notes, *(f"{name} not found: what it describes is left out" for name in absent)]
    # What is published is public, its list of items too; of another file we know nothing.
    file = dataset.interactions_file
    published = folder.state(file, dataset.files[file]) == "ok"
    if not published:
        notes.append(f"{file} is not the published file: its list of items is not taken as public")
    return replace(data, name=dataset.name, items_declared=published, notes=tuple(notes))


def fetch(name: str, progress: DownloadProgress | None = None) -> DataFolder:
    """Download a data set into the cache, check it, and return its folder.

    The interactions file must have the checksum we know; side files that differ are kept, and
    `DataSet.states` tells. An incomplete or altered download leaves nothing behind.
    """
    if name not in CATALOG:
        raise ConfigError(f"no data set '{name}'{nearest(name, CATALOG)}")
    dataset = CATALOG[name]
    if dataset.url is None:
        raise DataError(_how_to_get(dataset) if dataset.files else f"{name}: needs no download")
    target = cache_dir() / dataset.folder
    _make_folder(cache_dir())
    with scratch_folder(target.with_name(f".{target.name}.fetch")) as scratch:
        archive, fresh = scratch / "archive.zip", DataFolder(scratch)
        _download(dataset, archive, progress)
        _unpack(dataset, archive, scratch)
        if dataset.states(fresh)[dataset.interactions_file] != "ok":
            raise DataError(
                f"{name}: {dataset.interactions_file} from {dataset.url} has the wrong checksum; "
                "nothing was kept"
            )
        _make_folder(target)
        # The interactions last: a folder that has them has everything.
        for file in reversed(_archive_files(dataset)):
            if fresh.get(file):
                (scratch / file).replace(target / file)
    return DataFolder(target)


def _download(dataset: DataSet, target: Path, progress: DownloadProgress | None) -> None:
    assert dataset.url is not None
    try:
        with urllib.request.urlopen(dataset.url, timeout=30) as reply, target.open("wb") as out:  # noqa: S310
            length = reply.headers.get("Content-Length")
            total = int(length) if length else None
            done = 0
            while chunk := reply.read(1 << 16):
                out.write(chunk)
                done += len(chunk)
                if progress:
                    progress(done, total)
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        reason = f"download failed ({getattr(error, 'reason', None) or error})"
        raise DataError(f"{dataset.name}: {reason}. {_by_hand(dataset)}") from None
    if total is not None and done != total:
        raise DataError(
            f"{dataset.name}: download interrupted after {done:,} of {total:,} bytes; try again"
        )


def _unpack(dataset: DataSet, archive: Path, target: Path) -> None:
    """Unpack the files we know by name, whatever folder of the archive they are in."""
    wanted = _archive_files(dataset)
    try:
        with zipfile.ZipFile(archive) as bundle:
            for member in bundle.infolist():
                path = PurePosixPath(member.filename.replace("\\", "/"))
                if path.is_absolute() or ".." in path.parts:
                    raise DataError(
                        f"{dataset.name}: the archive has an unsafe path '{member.filename}'; "
                        "nothing was unpacked"
                    )
                if path.name in wanted and not member.is_dir():
                    with bundle.open(member) as source, (target / path.name).open("wb") as out:
                        shutil.copyfileobj(source, out)
    except (zipfile.BadZipFile, EOFError, zlib.error, RuntimeError) as error:
        raise DataError(
            f"{dataset.name}: {dataset.url} is not a sound zip archive ({error}); try again"
        ) from None


def _archive_files(dataset: DataSet) -> list[str]:
    """Return the files of all data sets of the same archive, this data set's first."""
    # Only names below the folder can share it: data sets of other packages stay unimported.
    kin = [CATALOG[name] for name in CATALOG if name.startswith(f"{dataset.folder}/")]
    return list(dict.fromkeys(file for one in (dataset, *kin) for file in one.files))


def _how_to_get(dataset: DataSet) -> str:
    how = "no official download is known"
    if dataset.url:
        how = f"not on this machine. Get it with 'hushrec data fetch {dataset.name}'"
    return f"{dataset.name}: {how}. {_by_hand(dataset)}"


def _by_hand(dataset: DataSet) -> str:
    files, source = ", ".join(dataset.files), f"from {dataset.url} " if dataset.url else ""
    return (
        f"By hand: put {files} {source}into {cache_dir() / dataset.folder}, or set HUSHREC_DATA to "
        f"a folder that contains {dataset.folder}/{dataset.interactions_file}"
    )


_ROWS = {"user": "i", "item": "i", "value": "f", "time": "i", "users": "U", "items": "U"}
"""Arrays of interactions that an import has under their own names, and their kinds of type."""
_FLAGS = ("has_time", "items_declared")


def import_file(
    path: str | Path,
    name: str,
    columns: Columns = RECOGNISED,
    features: reading.FeatureFiles = reading.NO_FEATURES,
    *,
    overwrite: bool = False,
    progress: OnProgress = no_progress,
) -> Interactions:
    """Read a file once and keep it in the cache, so that `load` finds it under ``name``."""
    if name in CATALOG:
        raise ConfigError(f"'{name}' is the name of a data set of the catalogue; choose another")
    if not name or name.startswith(".") or any(mark in name for mark in "/\\:\0"):
        raise ConfigError(f"'{name}' cannot be a name: no slashes, colons or leading dots")
    checked_path(name)  # it will be the name of a file
    if _imported_path(name).exists() and not overwrite:
        raise ConfigError(f"'{name}' is imported already: use another name, or --overwrite")
    items = features.items
    data = reading.read_interactions(path, columns, name=name, items=items, progress=progress)
    data = features.describe(data)
    arrays = {part: np.asarray(getattr(data, part)) for part in (*_ROWS, *_FLAGS)}
    if data.titles is not None:
        arrays["titles"] = data.titles
    arrays["notes"] = np.array(data.notes, dtype=np.str_)
    arrays |= features_to_arrays({"user": data.user_features, "item": data.item_features})
    path = _imported_path(name)
    _make_folder(path.parent, 0o700)
    with atomic_file(path, secret=True) as partial, partial.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    return data


def _load_imported(name: str) -> Interactions:
    path = _imported_path(name)
    try:
        arrays = read_arrays(path)
        _require_sound(arrays)
        parts: dict[str, Any] = {part: arrays[part] for part in _ROWS}
        parts |= {flag: bool(arrays[flag]) for flag in _FLAGS}
        features = features_from_arrays(("user", "item"), arrays)
        return Interactions(
            name=name,
            **parts,
            user_features=features["user"],
            item_features=features["item"],
            titles=arrays.get("titles"),
            notes=tuple(str(note) for note in arrays["notes"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, RunError) as error:
        raise DataError(f"{path}: damaged import ({error}); import the file again") from None


def _require_sound(arrays: Mapping[str, NDArray[Any]]) -> None:
    """Refuse arrays of other types, and indices of users or items that do not exist."""
    for name, kind in (_ROWS | {"titles": "U"}).items():
        if name in arrays and (arrays[name].ndim != 1 or arrays[name].dtype.kind != kind):
            raise ValueError(f"'{name}' has the type {arrays[name].dtype}")
    for name, of in (("user", "users"), ("item", "items")):
        numbers = arrays[name]
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(arrays[of]):
            raise ValueError(f"'{name}' has numbers that are in no '{of}'")
    if not np.isfinite(arrays["value"]).all():
        raise ValueError("'value' has NaN or infinite numbers")
    if "titles" in arrays and len(arrays["titles"]) != len(arrays["items"]):
        raise ValueError("'titles' and 'items' differ in length")


def _imported_path(name: str) -> Path:
    return cache_dir() / "imported" / f"{name}.npz"


def _make_folder(path: Path, mode: int = 0o777) -> None:
    try:
        path.mkdir(mode, parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be made ({error.strerror}); set XDG_CACHE_HOME to a folder of yours"
        ) from None
