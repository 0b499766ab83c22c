"""What a program holds in memory is read as a file with the same rows is."""

from datetime import date, datetime
from types import SimpleNamespace

import numpy as np
import pandas
import polars
import pyarrow
import pytest
from scipy import sparse

import hushrec
from hushrec.errors import ConfigError, DataError

WHO, WHAT = [7, 7, 12, 3], ["tea", "milk", "tea", "wine"]
STARS, WHEN = [2.5, 4.0, 1.0, 3.0], [30, 20, 10, 40]
COLUMNS = {"visitor": WHO, "drink": WHAT, "stars": STARS, "at": WHEN}
NAMES = {"user": "visitor", "item": "drink", "time": "at"}


class StreamOnly:
    """Offers Arrow's stream and nothing else, as some databases do."""

    def __init__(self, columns):
        self.table = pyarrow.table(columns)

    def __arrow_c_stream__(self, requested_schema=None):
        return self.table.__arrow_c_stream__(requested_schema)


FRAMES = {
    "pandas": pandas.DataFrame,
    "polars": polars.DataFrame,
    "arrow": pyarrow.table,
    "stream": StreamOnly,
    "columns": dict,
}


def same(one, other):
    for part in ("user", "item", "value", "time", "users", "items"):
        assert getattr(one, part).tolist() == getattr(other, part).tolist(), part


@pytest.fixture
def from_file(tmp_path):
    path = tmp_path / "drinks.csv"
    lines = zip(*COLUMNS.values(), strict=True)
    path.write_text(
        "visitor,drink,stars,at\n" + "".join(f"{','.join(map(str, x))}\n" for x in lines)
    )
    return hushrec.load(path, **NAMES)


@pytest.mark.parametrize("kind", FRAMES)
def test_a_frame_is_read_as_the_file_with_its_rows(kind, from_file):
    data = hushrec.load(FRAMES[kind](COLUMNS), **NAMES)
    same(data, from_file)
    assert data.users.tolist() == ["3", "7", "12"]
    assert data.name == "frame"
    assert hushrec.load(FRAMES[kind](COLUMNS), name="drinks", **NAMES).name == "drinks"


def test_usual_names_are_recognised_in_a_frame_too():
    data = hushrec.load(pandas.DataFrame({"userId": WHO, "movieId": WHAT, "timestamp": WHEN}))
    assert data.has_time and data.value.tolist() == [1, 1, 1, 1]


MOMENTS = [datetime(2024, 1, day, 12) for day in (3, 2, 1, 4)]


@pytest.mark.parametrize(
    "times",
    [
        pandas.Series(MOMENTS),
        pandas.Series(MOMENTS).dt.tz_localize("Europe/Berlin"),
        polars.Series(MOMENTS),
        polars.Series([moment.date() for moment in MOMENTS]),
        [date(2024, 1, day) for day in (3, 2, 1, 4)],
        pandas.Series([3.0, 2.5, 1.0, 4.0]),
    ],
)
def test_times_keep_their_order(times):
    data = hushrec.load({"user": WHO, "item": WHAT, "time": times})
    assert data.time.argsort().tolist() == [2, 1, 0, 3]


def test_a_sparse_matrix_has_a_row_per_user_and_a_column_per_item():
    matrix = sparse.csr_matrix(([5.0, 2.0, 3.0], ([0, 0, 4], [2, 9, 2])), shape=(6, 12))
    data = hushrec.load(matrix)
    assert data.users.tolist() == ["0", "4"] and data.items.tolist() == ["2", "9"]
    assert sorted(data.value.tolist()) == [2, 3, 5]
    same(hushrec.load(sparse.coo_array(matrix)), data)


@pytest.mark.parametrize("frame", [pandas.DataFrame, polars.DataFrame])
def test_items_may_come_from_a_frame_with_titles_and_genres(frame):
    films = {"item": ["tea", "milk", "wine", "beer"], "title": ["T", "M (1990)", "W", "B"]}
    films["genres"] = ["hot", "cold|white", "", "cold"]
    data = hushrec.load(frame(COLUMNS), items=frame(films), **NAMES)
    assert data.items.tolist() == ["beer", "milk", "tea", "wine"]
    assert data.title(1) == "M (1990)" and data.items_declared
    assert set(data.item_features) == {"genres", "year"}


NULL = pandas.DataFrame({"user": pandas.array([1, None], "Int64"), "item": [1, 2]})
BAD = {
    "nobody": (NULL, "row 1, column 'user': empty id"),
    "gap": ({"user": [1.0, float("nan")], "item": [1, 2]}, "row 1, column 'user': empty id"),
    "nothing": ({"user": [], "item": []}, "frame: no rows"),
    "uneven": ({"user": [1], "item": [1, 2]}, "differ in length"),
    "lists": (pandas.DataFrame({"user": [1, 2], "item": [[1], [2]]}), "a list where one entry"),
    "square": ({"user": np.ones((2, 2)), "item": [1, 2]}, "one entry is expected"),
    "no column": ({"visitor": [1], "item": [1]}, "no user column among 'visitor', 'item'"),
    "lazy": (polars.LazyFrame({"user": [1], "item": [2]}), r"give what its collect\(\) returns"),
    "number": (7, "a int is no data"),
    "namespace": (SimpleNamespace(rows=3), "a SimpleNamespace is no data"),
    "value": ({"user": [1, 2], "item": [1, 2], "rating": ["x", "y"]}, "row 0, column 'rating'"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_data_is_refused_by_row_and_column(what):
    frame, words = BAD[what]
    with pytest.raises(DataError, match=words):
        hushrec.load(frame)


def test_columns_of_named_data_are_known():
    with pytest.raises(ConfigError, match="columns of 'demo' are known: leave out user="):
        hushrec.load("demo", user="viewer")
    with pytest.raises(ConfigError, match="name= is for data in memory"):
        hushrec.load("demo", name="mine")


def test_what_data_says_of_itself(from_file):
    assert repr(hushrec.load({"user": WHO, "item": WHAT})) == (
        "<Interactions frame: 4 rows of 3 users and 3 items>"
    )
    assert "; with titles, times, user features, item features>" in repr(hushrec.load("demo"))
