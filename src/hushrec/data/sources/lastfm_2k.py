"""Last.fm of HetRec 2011: play counts of artists, and tags that users gave to artists."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from hushrec.data.interactions import Interactions
from hushrec.data.sources import DataFolder, DataSet

_ARTISTS = {"artists.dat": "c173881362c6b28551368fecb3c0be5a6a30a6cd859e1f5775413dfe46d48648"}
_LISTEN_FILES = {
    "user_artists.dat": "001400dc3c7d2667fca6e4ea6dc6acc31a9dd28ad5cd0f74cea988c019934d3b",
    **_ARTISTS,
}
_TAG_FILES = {
    "user_taggedartists.dat": "d31fe938fcfeed6f0059f37a36b156f63674d073fc2553e5cc9dc1595e365bc7",
    **_ARTISTS,
}


def _read_listens(folder: DataFolder, at_least: int = 1) -> Interactions:
    data = folder.interactions("user_artists.dat").users_with_at_least(at_least)
    return _with_titles(folder, data)


def _read_tags(folder: DataFolder, at_least: int) -> Interactions:
    """Read one row per tag: an artist is repeated for each tag that the user gave it."""
    data = folder.interactions("user_taggedartists.dat")
    lines = folder.lines("user_taggedartists.dat", "\t", header=True)
    day, month, year = np.array(lines, dtype=np.int64).T[3:6]
    months = ((year - 1970) * 12 + month - 1).astype("datetime64[M]")
    days = months.astype("datetime64[D]").astype(np.int64) + day - 1
    notes = [note for note in data.notes if "time" not in note]
    notes.append("dates have month resolution: ties are many")
    dated = replace(data, time=days * 86_400, has_time=True, notes=tuple(notes))
    return _with_titles(folder, dated.users_with_at_least(at_least))


def _with_titles(folder: DataFolder, data: Interactions) -> Interactions:
    artists = folder.rows("artists.dat", "\t", header=True)
    if not artists:
        return data
    # Some tagged artists are not listed; their id is all there is to print.
    titles = [artists[item][1] if item in artists else str(item) for item in data.items]
    return replace(data, titles=np.array(titles))


_lastfm = partial(
    DataSet,
    licence="non-commercial use; cite Last.fm",
    citation="Last.fm, http://www.lastfm.com; Cantador, Brusilovsky, Kuflik: HetRec 2011, RecSys.",
    url="https://files.grouplens.org/datasets/hetrec2011/hetrec2011-lastfm-2k.zip",
    shared_folder="lastfm-2k",
)
LISTENS = _lastfm(
    name="lastfm-2k/listens",
    title="Last.fm (HetRec 2011): play counts of artists",
    users=1_892,
    items=17_632,
    rows=92_834,
    loader=_read_listens,
    files=_LISTEN_FILES,
)
LISTENS_10 = _lastfm(
    name="lastfm-2k/listens-10",
    title="Last.fm (HetRec 2011): play counts of users with at least 10, as FedRAP",
    users=1_874,
    items=17_612,
    rows=92_780,
    loader=partial(_read_listens, at_least=10),
    files=_LISTEN_FILES,
)
TAGS_5 = _lastfm(
    name="lastfm-2k/tags-5",
    title="Last.fm (HetRec 2011): tags of users with at least 5, as PFedRec",
    users=1_600,
    items=12_454,
    rows=185_650,
    loader=partial(_read_tags, at_least=5),
    files=_TAG_FILES,
)
TAGS_10 = _lastfm(
    name="lastfm-2k/tags-10",
    title="Last.fm (HetRec 2011): tags of users with at least 10, as FedRKG",
    users=1_269,
    items=12_322,
    rows=183_415,
    loader=partial(_read_tags, at_least=10),
    files=_TAG_FILES,
)
