"""Last.fm of HetRec 2011: play counts of artists, and tags that users gave to artists."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from hushrec.data.interactions import Interactions
from hushrec.data.sources import DataFolder, DataSet

_LISTENS, _TAGS, _ARTISTS = "user_artists.dat", "user_taggedartists.dat", "artists.dat"
_SHA256 = {
    _LISTENS: "001400dc3c7d2667fca6e4ea6dc6acc31a9dd28ad5cd0f74cea988c019934d3b",
    _TAGS: "d31fe938fcfeed6f0059f37a36b156f63674d073fc2553e5cc9dc1595e365bc7",
    _ARTISTS: "c173881362c6b28551368fecb3c0be5a6a30a6cd859e1f5775413dfe46d48648",
}


def _read_listens(folder: DataFolder, at_least: int) -> Interactions:
    return _with_titles(folder, folder.interactions(_LISTENS).users_with_at_least(at_least))


def _read_tags(folder: DataFolder, at_least: int) -> Interactions:
    """Read one row per tag: an artist is repeated for each tag that the user gave it."""
    data = folder.interactions(_TAGS)
    day, month, year = np.array(folder.lines(_TAGS, "\t", header=True), np.int64).T[3:6]
    months = ((year - 1970) * 12 + month - 1).astype("datetime64[M]")
    days = months.astype("datetime64[D]").astype(np.int64) + day - 1
    notes = [note for note in data.notes if "time" not in note]
    notes.append("dates have month resolution: ties are many")
    dated = replace(data, time=days * 86_400, has_time=True, notes=tuple(notes))
    return _with_titles(folder, dated.users_with_at_least(at_least))


def _with_titles(folder: DataFolder, data: Interactions) -> Interactions:
    artists = folder.rows(_ARTISTS, "\t", header=True)
    if not artists:
        return data
    # Some tagged artists are not listed; their id is all there is to print.
    titles = [artists[item][1] if item in artists else str(item) for item in data.items]
    return replace(data, titles=np.array(titles))


def _lastfm(name: str, title: str, at_least: int, counts: tuple[int, int, int]) -> DataSet:
    listens = name.startswith("listens")
    users, items, rows = counts
    return DataSet(
        name=f"lastfm-2k/{name}",
        title=f"Last.fm (HetRec 2011): {title}",
        licence="non-commercial use; cite Last.fm",
        citation="Last.fm, http://www.lastfm.com; Cantador, Brusilovsky, Kuflik: HetRec 2011, "
        "RecSys.",
        users=users,
        items=items,
        rows=rows,
        loader=partial(_read_listens if listens else _read_tags, at_least=at_least),
        files={file: _SHA256[file] for file in (_LISTENS if listens else _TAGS, _ARTISTS)},
        url="https://files.grouplens.org/datasets/hetrec2011/hetrec2011-lastfm-2k.zip",
        shared_folder="lastfm-2k",
    )


LISTENS = _lastfm("listens", "play counts of artists", 1, (1_892, 17_632, 92_834))
LISTENS_10 = _lastfm(
    "listens-10", "play counts of users with at least 10, as FedRAP", 10, (1_874, 17_612, 92_780)
)
TAGS_5 = _lastfm("tags-5", "tags of users with at least 5, as PFedRec", 5, (1_600, 12_454, 185_650))
TAGS_10 = _lastfm(
    "tags-10", "tags of users with at least 10, as FedRKG", 10, (1_269, 12_322, 183_415)
)
