import gzip
import hashlib
import http.server
import io
import shutil
import threading
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from hushrec.data import catalog, load, names
from hushrec.data.catalog import fetch, import_file
from hushrec.data.interactions import Categorical, MultiCategorical, Numeric
from hushrec.data.sources import CATALOG
from hushrec.data.splitting import SplitConfig, make_split
from hushrec.data.tables import Columns
from hushrec.errors import ConfigError, DataError
from hushrec.streams import Streams

CONTRACT = [
    "ml-100k",
    "ml-1m",
    "lastfm-2k/listens",
    "lastfm-2k/listens-10",
    "lastfm-2k/tags-5",
    "lastfm-2k/tags-10",
    "amazon-video/pfedrec",
    "amazon-video/fedrkg",
    "amazon-beauty",
    "amazon-sports",
    "filmtrust",
    "frappe",
    "demo",
    "receipts",
]
# rows, users, items, distinct pairs; counted on the files independently of this code
COUNTS = {
    "ml-100k": (100_000, 943, 1_682, 100_000),
    "ml-1m": (1_000_209, 6_040, 3_706, 1_000_209),
    "lastfm-2k/listens": (92_834, 1_892, 17_632, 92_834),
    "lastfm-2k/listens-10": (92_780, 1_874, 17_612, 92_780),
    "lastfm-2k/tags-5": (185_650, 1_600, 12_454, 70_508),
    "lastfm-2k/tags-10": (183_415, 1_269, 12_322, 69_279),
    "amazon-video/pfedrec": (63_836, 8_072, 11_830, 63_836),
    "amazon-video/fedrkg": (23_181, 1_372, 7_957, 23_181),
    "amazon-beauty": (198_502, 22_363, 12_101, 198_502),
    "amazon-sports": (296_337, 35_598, 18_357, 296_337),
    "filmtrust": (33_372, 1_002, 2_042, None),
    "frappe": (96_203, 957, 4_082, 18_842),
    "demo": (34_997, 1_000, 1_495, 34_997),
    "receipts": (58_431, 1_000, 800, 45_714),
}


def test_names_are_a_contract(cache):
    assert names() == sorted(CONTRACT)
    assert list(CATALOG) == sorted(CONTRACT)


# --------------------------------------------------------------------------------- real data


@pytest.mark.parametrize("name", CONTRACT)
def test_counts_of_the_real_data(name, data_dir):
    data = load(name, data_dir=data_dir)
    rows, users, items, pairs = COUNTS[name]
    assert (len(data), data.n_users, data.n_items) == (rows, users, items)
    known = CATALOG[name]
    assert (known.rows, known.users, known.items) == (rows, users, items)
    assert len(np.unique(data.user)) == users
    assert len(np.unique(data.item)) == items
    if pairs is not None:
        assert len(data.merged()) == pairs
    assert data.name == name
    timeless = ("lastfm-2k/listens", "lastfm-2k/listens-10", "filmtrust", "frappe")
    sequences = ("amazon-beauty", "amazon-sports")
    assert data.has_time is (name not in (*timeless, *sequences))
    assert data.rows_in_order is (name in sequences)
    for features, length in (
        (data.user_features, users),
        (data.item_features, items),
        (data.context, rows),
    ):
        for column in features.values():
            if isinstance(column, Numeric):
                assert len(column.values) == length
                assert np.isfinite(column.values).all()
            elif isinstance(column, Categorical):
                assert len(column.codes) == length
            else:
                assert column.flags.shape == (length, len(column.names))


@pytest.mark.parametrize("name", [name for name in CONTRACT if name not in ("demo", "receipts")])
def test_checksums_of_the_real_data(name, data_dir):
    dataset = CATALOG[name]
    assert set(dataset.states(dataset.find(data_dir)).values()) == {"ok"}


def test_sequences_are_in_the_order_of_time(data_dir):
    data = load("amazon-beauty", data_dir=data_dir)
    second = data.user == data.user_index("2")
    assert data.items[data.item[second]].tolist() == ["6", "7", "8", "9", "10", "4", "11"]
    assert (np.diff(data.time[second]) > 0).all()
    split = make_split(data, SplitConfig(), Streams(0))
    assert data.items[split.test[data.user_index("2")]].tolist() == ["11"]
    with pytest.raises(ConfigError, match="no timestamps"):
        make_split(data, SplitConfig(kind="time"), Streams(0))


def test_ml_100k_details(data_dir):
    data = load("ml-100k", data_dir=data_dir)
    assert data.users[:3].tolist() == ["1", "2", "3"]  # by number, not by first appearance
    assert (data.users[data.user[0]], data.items[data.item[0]]) == ("196", "242")
    assert (data.value[0], data.time[0]) == (3, 881250949)
    assert data.title(0) == "Toy Story (1995)"
    genres = data.item_features["genres"]
    assert isinstance(genres, MultiCategorical)
    assert len(genres.names) == 19
    assert set(genres.names[genres.flags[0]]) == {"Animation", "Children's", "Comedy"}
    year = data.item_features["year"]
    assert year.names[year.codes[0]] == "1995"
    assert [str(data.titles[k]) for k in np.flatnonzero(year.codes < 0)] == ["unknown"]
    assert data.user_features["age"].values[0] == 24
    occupation = data.user_features["occupation"]
    assert occupation.names[occupation.codes[0]] == "technician"
    assert len(occupation.names) == 21
    assert any("é" in title for title in data.titles)  # latin-1


def test_ml_1m_details(data_dir):
    data = load("ml-1m", data_dir=data_dir)
    assert (data.users[data.user[0]], data.items[data.item[0]]) == ("1", "1193")
    assert data.title(int(data.item[0])) == "One Flew Over the Cuckoo's Nest (1975)"
    first = {name: column.names[column.codes[0]] for name, column in data.user_features.items()}
    assert first == {"gender": "F", "age group": "under 18", "occupation": "K-12 student"}
    assert len(data.item_features["genres"].names) == 18
    assert len(data.user_features["occupation"].names) == 21
    assert len(data.user_features["age group"].names) == 7
    assert data.item_features["year"].names[[0, -1]].tolist() == ["1919", "2000"]
    assert len(data.item_features["year"].names) == 81


def test_lastfm_details(data_dir):
    listens = load("lastfm-2k/listens", data_dir=data_dir)
    assert listens.title(0) == "MALICE MIZER"
    assert (listens.value[0], str(listens.users[0])) == (13_883, "2")
    tags = load("lastfm-2k/tags-5", data_dir=data_dir)
    assert tags.time[0] == 1_238_544_000  # 1 April 2009
    assert any("month resolution" in note for note in tags.notes)


def test_frappe_details(data_dir):
    data = load("frappe", data_dir=data_dir)
    sizes = {name: len(column.names) for name, column in data.context.items()}
    assert sizes == {
        "daytime": 7, "weekday": 7, "isweekend": 2, "homework": 3,
        "cost": 2, "weather": 9, "country": 80, "city": 233,
    }  # fmt: skip
    day = data.context["weekday"]
    assert day.names[day.codes[:3]].tolist() == ["sunday", "saturday", "monday"]
    assert data.title(0) == "Any.DO To-do & Tasks List"
    assert len(data.item_features["category"].names) == 32


def test_share_of_users_with_ties(data_dir):
    key = "share_of_users_tied_at_latest_time"
    for name, share in (
        ("ml-100k", 0.440),
        ("amazon-video/pfedrec", 0.275),
        ("amazon-video/fedrkg", 0.257),
    ):
        assert load(name, data_dir=data_dir).facts()[key] == pytest.approx(share, abs=6e-4)


# ---------------------------------------------------------------------------- finding the files


@pytest.fixture
def tiny(monkeypatch):
    """A data set of one file, in place of ml-1m."""
    text = "".join(f"{u}::{i}::{(u * i) % 5 + 1}::{u + i}\n" for u in (10, 9, 1) for i in (4, 30))
    raw = text.encode()
    contents = {"ratings.dat": raw, "movies.dat": b"other"}
    files = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    dataset = replace(CATALOG["ml-1m"], files=files)
    monkeypatch.setattr(catalog, "CATALOG", {**CATALOG, "ml-1m": dataset})
    return dataset, raw


@pytest.mark.parametrize("place", ["ml-1m", "ml-1m/ml-1m"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("root", ["cache", "variable", "argument"])
def test_where_files_are_found(cache, tiny, tmp_path, monkeypatch, place, packed, root):
    dataset, raw = tiny
    base = cache if root == "cache" else tmp_path / "elsewhere"
    if root == "variable":
        monkeypatch.setenv("HUSHREC_DATA", str(base))
    folder = base / place
    folder.mkdir(parents=True)
    if packed:
        (folder / "ratings.dat.gz").write_bytes(gzip.compress(raw))
    else:
        (folder / "ratings.dat").write_bytes(raw)
    data_dir = base if root == "argument" else None
    data = load("ml-1m", data_dir=data_dir)
    assert data.users.tolist() == ["1", "9", "10"]
    assert data.items.tolist() == ["4", "30"]
    assert data.users[data.user].tolist() == ["10", "10", "9", "9", "1", "1"]
    assert any("movies.dat not found" in note for note in data.notes)
    states = dataset.states(dataset.find(data_dir))
    assert states == {"ratings.dat": "ok", "movies.dat": "missing"}


def test_an_altered_file_is_told(cache, tiny):
    dataset, raw = tiny
    (cache / "ml-1m").mkdir(parents=True)
    (cache / "ml-1m" / "ratings.dat").write_bytes(raw + b"1::5::1::1\n")
    assert dataset.states(dataset.find())["ratings.dat"] == "differs"


def test_files_that_do_not_fit_together(cache, tiny):
    _, raw = tiny
    (cache / "ml-1m").mkdir(parents=True)
    (cache / "ml-1m" / "ratings.dat").write_bytes(raw)
    (cache / "ml-1m" / "users.dat").write_bytes(b"77::M::1::1::0\n")
    with pytest.raises(DataError, match=r"do not fit together.*data info ml-1m"):
        load("ml-1m")


def test_missing_data_sets_say_what_to_do(cache):
    with pytest.raises(DataError) as caught:
        load("ml-100k")
    for part in ("data fetch ml-100k", "u.data", str(cache / "ml-100k"), "HUSHREC_DATA"):
        assert part in str(caught.value)
    for name in ("frappe", "filmtrust", "amazon-video/fedrkg"):
        for attempt in (lambda name=name: load(name, download=True), lambda name=name: fetch(name)):
            with pytest.raises(DataError, match="no official download is known") as caught:
                attempt()
            assert str(cache / CATALOG[name].folder) in str(caught.value)


def test_unknown_names(cache, tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'ml-1m'"):
        load("ml1m")
    with pytest.raises(ConfigError, match="did you mean 'lastfm-2k/tags-5'"):
        load("lastfm-2k/tags5")
    with pytest.raises(ConfigError, match="did you mean 'ml-100k'"):
        fetch("ml100k")
    with pytest.raises(DataError, match="no such file"):
        load(tmp_path / "none.csv")
    with pytest.raises(DataError, match="is a folder"):
        load(tmp_path)


def test_a_path_is_loaded(cache, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("user,item\na,x\nb,y\n")
    assert load(path).users.tolist() == ["a", "b"]
    assert load(str(path)).name == str(path)  # so that a run finds it again


# ------------------------------------------------------------------------------------ download


def archive(**members):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as bundle:
        for name, raw in members.items():
            bundle.writestr(name.replace("__", "/"), raw)
    return out.getvalue()


@pytest.fixture
def serve(tiny, monkeypatch):
    """Serve one reply on this machine, as the home of the tiny data set."""
    servers = []

    def serve(body, claimed=None, status=200):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status)
                self.send_header("Content-Length", str(claimed or len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        dataset = replace(tiny[0], url=f"http://127.0.0.1:{server.server_port}/ml-1m.zip")
        monkeypatch.setattr(catalog, "CATALOG", {**CATALOG, "ml-1m": dataset})

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def left_behind(cache):
    return [path for path in cache.rglob("*") if path.is_file() or path.name.startswith(".")]


def test_fetch(cache, tiny, serve):
    _, raw = tiny
    members = {"ml-1m/ratings.dat": raw, "ml-1m/movies.dat": b"other", "ml-1m/README": b"-"}
    serve(archive(**members))
    seen = []
    folder = fetch("ml-1m", lambda done, total: seen.append((done, total)))
    assert folder.path == cache / "ml-1m"
    assert seen[-1][0] == seen[-1][1] == len(archive(**members))
    assert {path.name for path in left_behind(cache)} == {"ratings.dat", "movies.dat"}
    assert set(catalog.CATALOG["ml-1m"].states(folder).values()) == {"ok"}
    assert (folder.path / "ratings.dat").read_bytes() == raw


def test_load_downloads_only_when_asked(cache, tiny, serve):
    serve(archive(**{"ml-1m/ratings.dat": tiny[1]}))
    with pytest.raises(DataError, match="not on this machine"):
        load("ml-1m")
    assert not cache.exists()
    assert len(load("ml-1m", download=True)) == 6
    assert len(load("ml-1m")) == 6


def test_one_archive_brings_all_data_sets_of_its_folder(cache, data_dir, monkeypatch, serve):
    files = ("user_artists.dat", "artists.dat", "user_taggedartists.dat")
    serve(archive(**{name: (data_dir / "lastfm-2k" / name).read_bytes() for name in files}))
    url = catalog.CATALOG["ml-1m"].url
    monkeypatch.setattr(
        catalog, "CATALOG", {name: replace(one, url=url) for name, one in CATALOG.items()}
    )
    fetch("lastfm-2k/tags-5")
    assert load("lastfm-2k/listens").n_users == 1_892


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"ml-1m/ratings.dat": b"1::2::3::4\n"}, "wrong checksum; nothing was kept"),
        ({"ml-1m/other.dat": b"1"}, "wrong checksum"),
        ({"../ratings.dat": b"1"}, "unsafe path '../ratings.dat'"),
        ({"ml-1m/../../x": b"1"}, "unsafe path"),
        ({"/ratings.dat": b"1"}, "unsafe path"),
        ({"..\\ratings.dat": b"1"}, "unsafe path"),
    ],
)
def test_bad_archives_leave_nothing(cache, serve, members, message):
    serve(archive(**members))
    with pytest.raises(DataError) as caught:
        fetch("ml-1m")
    assert message in str(caught.value)
    assert left_behind(cache) == []


def test_interrupted_download(cache, tiny, serve):
    body = archive(**{"ml-1m/ratings.dat": tiny[1]})
    serve(body[:100], claimed=len(body))
    with pytest.raises(DataError, match=rf"interrupted after 100 of {len(body)} bytes; try again"):
        fetch("ml-1m")
    assert left_behind(cache) == []


def test_what_a_killed_download_left_goes(cache, tiny, serve):
    left = cache / ".ml-1m.fetch"
    left.mkdir(parents=True)
    (left / "archive.zip").write_bytes(b"half")
    serve(archive(**{"ml-1m/ratings.dat": tiny[1]}))
    fetch("ml-1m")
    assert {path.name for path in left_behind(cache)} == {"ratings.dat"}


def test_not_a_zip(cache, serve):
    serve(b"<html>sign in to continue</html>")
    with pytest.raises(DataError, match="not a sound zip"):
        fetch("ml-1m")
    assert left_behind(cache) == []


def test_refused_and_unreachable(cache, serve, tiny, monkeypatch):
    serve(b"gone", status=404)
    with pytest.raises(DataError, match=r"download failed \(.*Not Found"):
        fetch("ml-1m")
    dataset = replace(tiny[0], url="http://127.0.0.1:9/ml-1m.zip")
    monkeypatch.setattr(catalog, "CATALOG", {**CATALOG, "ml-1m": dataset})
    with pytest.raises(DataError) as caught:
        fetch("ml-1m")
    for part in ("download failed", "put ratings.dat", str(cache / "ml-1m"), "HUSHREC_DATA"):
        assert part in str(caught.value)
    assert left_behind(cache) == []


def test_a_cache_that_cannot_be_made(tiny, serve, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    serve(archive(**{"ratings.dat": tiny[1]}))
    with pytest.raises(DataError, match=r"cannot be made .*XDG_CACHE_HOME"):
        fetch("ml-1m")


def test_a_failed_fetch_keeps_what_was_there(cache, tiny, serve):
    (cache / "ml-1m").mkdir(parents=True)
    (cache / "ml-1m" / "ratings.dat").write_bytes(tiny[1])
    serve(archive(**{"ratings.dat": b"1::2::3::4\n"}))
    with pytest.raises(DataError):
        fetch("ml-1m")
    assert (cache / "ml-1m" / "ratings.dat").read_bytes() == tiny[1]


# ------------------------------------------------------------------------------------- imports


def test_import_round_trip(cache, tmp_path):
    path = tmp_path / "x.csv.gz"
    path.write_bytes(gzip.compress("who;what;title\nZoë;茶;Tea\nbob;x, y;Milk\n".encode()))
    stored = import_file(path, "mine", Columns(user="who", item="what"))
    path.unlink()
    assert names()[-1] == "mine"
    data = load("mine")
    for part in ("user", "item", "value", "time", "users", "items", "titles"):
        assert np.array_equal(getattr(data, part), getattr(stored, part))
        assert getattr(data, part).dtype == getattr(stored, part).dtype
    assert (data.name, data.has_time, data.notes) == ("mine", False, stored.notes)
    assert "gzip unpacked" in data.notes
    assert [p.name for p in (cache / "imported").iterdir()] == ["mine.npz"]


@pytest.mark.parametrize("name", ["ml-1m", "demo", "a/b", "..", "", "a\\b", ".hidden", "c:x"])
def test_import_refuses_bad_names(cache, tmp_path, name):
    path = tmp_path / "x.csv"
    path.write_text("user,item\na,x\nb,y\n")
    with pytest.raises(ConfigError, match=r"choose another|cannot be a name"):
        import_file(path, name)
    assert not cache.exists()


def test_import_replaces_only_when_told(cache, tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("user,item\na,x\nb,y\n")
    import_file(path, "mine")
    path.write_text("user,item\na,x\nb,y\nc,z\n")
    with pytest.raises(ConfigError, match="overwrite"):
        import_file(path, "mine")
    assert len(load("mine")) == 2
    import_file(path, "mine", overwrite=True)
    assert len(load("mine")) == 3


def test_damaged_import(cache, tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("user,item\na,x\nb,y\n")
    import_file(path, "mine")
    stored = cache / "imported" / "mine.npz"
    shutil.copy(stored, tmp_path / "whole")
    stored.write_bytes(stored.read_bytes()[:200])
    with pytest.raises(DataError, match=r"mine\.npz: damaged import"):
        load("mine")


def test_import_never_unpickles(cache):
    (cache / "imported").mkdir(parents=True)
    np.savez(cache / "imported" / "evil.npz", user=np.array([{}], dtype=object))
    with pytest.raises(DataError, match=r"damaged import .*allow_pickle=False"):
        load("evil")
