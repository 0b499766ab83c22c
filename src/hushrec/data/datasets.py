"""The data sets we know: their files, checksums and terms (`loaders` reads them)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath

from hushrec.data import loaders
from hushrec.data.interactions import Interactions
from hushrec.data.loaders import FileState, Folder, roots


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
    files: Mapping[str, str] = field(default_factory=dict)
    """Names and SHA-256 of the unpacked content."""
    url: str | None = None
    shared_folder: str | None = None
    """Where it lies with others of the same archive; else in a folder of its name."""

    def find(self, data_dir: str | Path | None = None) -> Folder | None:
        """Return where the data set is, or None."""
        for root in roots(data_dir):
            # The official archives unpack into a folder of their own.
            for inside in (self.folder, f"{self.folder}/{self.folder}", self._archive_stem):
                folder = Folder(root / inside)
                if folder.get(self.interactions_file):
                    return folder
        return None

    def states(self, folder: Folder | None) -> dict[str, FileState]:
        """Return for each file whether it is there and is the one we know."""
        return {
            name: folder.state(name, sha256) if folder else "missing"
            for name, sha256 in self.files.items()
        }

    @property
    def folder(self) -> str:
        """The folder of its files, below a root."""
        return self.shared_folder or self.name

    @property
    def interactions_file(self) -> str:
        """The name of the first file."""
        return next(iter(self.files))

    @property
    def _archive_stem(self) -> str:
        return PurePosixPath(self.url or self.folder).name.removesuffix(".zip")


_NO_TERMS = "no licence text came with it; terms not established"
_movielens = partial(
    DataSet,
    licence="research use, acknowledge; no redistribution, no commercial use without permission",
    citation="F. Maxwell Harper and Joseph A. Konstan. 2015. The MovieLens Datasets: History and "
    "Context. ACM TiiS 5, 4, Article 19.",
)
_lastfm = partial(
    DataSet,
    licence="non-commercial use; cite Last.fm",
    citation="Last.fm, http://www.lastfm.com; Cantador, Brusilovsky, Kuflik: HetRec 2011, RecSys.",
    url="https://files.grouplens.org/datasets/hetrec2011/hetrec2011-lastfm-2k.zip",
    shared_folder="lastfm-2k",
)
_amazon_video = partial(
    DataSet,
    licence=_NO_TERMS,
    citation="J. McAuley et al. 2015. Image-based Recommendations on Styles and Substitutes. "
    "SIGIR.",
    loader=loaders.ratings_dat,
)
_ARTISTS = {"artists.dat": "c173881362c6b28551368fecb3c0be5a6a30a6cd859e1f5775413dfe46d48648"}
_LISTEN_FILES = {
    "user_artists.dat": "001400dc3c7d2667fca6e4ea6dc6acc31a9dd28ad5cd0f74cea988c019934d3b",
    **_ARTISTS,
}
_TAG_FILES = {
    "user_taggedartists.dat": "d31fe938fcfeed6f0059f37a36b156f63674d073fc2553e5cc9dc1595e365bc7",
    **_ARTISTS,
}
CATALOG: Mapping[str, DataSet] = {
    dataset.name: dataset
    for dataset in (
        _movielens(
            name="ml-100k",
            title="MovieLens 100K: film ratings, 1997-1998",
            users=943,
            items=1_682,
            rows=100_000,
            loader=loaders.ml_100k,
            files={
                "u.data": "06416e597f82b7342361e41163890c81036900f418ad91315590814211dca490",
                "u.item": "553841ebc7de3a0fd0d6b62a204ea30c1e651aacfb2814c7a6584ac52f2c5701",
                "u.user": "f120e114da2e8cf314fd28f99417c94ae9ddf1cb6db8ce0e4b5995d40e90e62c",
                "u.genre": "9757e0d3e6b298159a80dd48eaf938114690e911e39af97a76949ef1663610bb",
            },
            url="https://files.grouplens.org/datasets/movielens/ml-100k.zip",
        ),
        _movielens(
            name="ml-1m",
            title="MovieLens 1M: film ratings, 2000-2003",
            users=6_040,
            items=3_706,
            rows=1_000_209,
            loader=loaders.ml_1m,
            files={
                "ratings.dat": "506d64ca44484487c11dc2d9a28de5c54948213e6b96285e298afe28d6ea4e0f",
                "movies.dat": "0140fc2356357c1a851d0f52e893a1e4d3696df632c4141cea8d5bc3d621f0b9",
                "users.dat": "1dc3a95300cb19f7c10e027daf29b8cdf1d908dab65b5edfb45950aa389a10a3",
            },
            url="https://files.grouplens.org/datasets/movielens/ml-1m.zip",
        ),
        _lastfm(
            name="lastfm-2k/listens",
            title="Last.fm (HetRec 2011): play counts of artists",
            users=1_892,
            items=17_632,
            rows=92_834,
            loader=loaders.lastfm_listens,
            files=_LISTEN_FILES,
        ),
        _lastfm(
            name="lastfm-2k/listens-10",
            title="Last.fm (HetRec 2011): play counts of users with at least 10, as FedRAP",
            users=1_874,
            items=17_612,
            rows=92_780,
            loader=partial(loaders.lastfm_listens, at_least=10),
            files=_LISTEN_FILES,
        ),
        _lastfm(
            name="lastfm-2k/tags-5",
            title="Last.fm (HetRec 2011): tags of users with at least 5, as PFedRec",
            users=1_600,
            items=12_454,
            rows=185_650,
            loader=partial(loaders.lastfm_tags, at_least=5),
            files=_TAG_FILES,
        ),
        _lastfm(
            name="lastfm-2k/tags-10",
            title="Last.fm (HetRec 2011): tags of users with at least 10, as FedRKG",
            users=1_269,
            items=12_322,
            rows=183_415,
            loader=partial(loaders.lastfm_tags, at_least=10),
            files=_TAG_FILES,
        ),
        _amazon_video(
            name="amazon-video/pfedrec",
            title="Amazon Instant Video: ratings of users with at least 5, as PFedRec",
            users=8_072,
            items=11_830,
            rows=63_836,
            files={
                "ratings.dat": "a1292e4a4dba6c37be6ae5dc83d4404af96bf3eace4c8954e2f4e8360a3cdd76",
            },
        ),
        _amazon_video(
            name="amazon-video/fedrkg",
            title="Amazon Instant Video: ratings of users with at least 10, as FedRKG",
            users=1_372,
            items=7_957,
            rows=23_181,
            files={
                "ratings.dat": "82eb5856b173e8f52a93521b33a402429f81aa92645fdbb7bae6b78316738ba0",
            },
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
            loader=loaders.filmtrust,
            files={
                "ratings.txt": "dac8ad6cefc94ec9be782c0de4659d7ca2fa9189991df72353042f5dfeadf1b1",
            },
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
            loader=loaders.frappe,
            files={
                "frappe.csv": "409edc12f4e2153c5dd58ae171938735911d9b0f70961d5f1086b241656b2cb5",
                "meta.csv": "de87f6b2e7cd0428f9179167e2e7826b5dd3bf490d5af680261b685763ac214f",
            },
        ),
        DataSet(
            name="demo",
            title="A made-up world of films with known structure",
            licence="none needed: made up by hushrec",
            citation="hushrec",
            users=1_000,
            items=1_495,
            rows=34_997,
            loader=loaders.demo,
        ),
    )
}
