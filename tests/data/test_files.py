import csv
import gzip
import io
import time as clock

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hushrec.data import columns as entries
from hushrec.data import reading as files
from hushrec.data.reading import read_history, read_interactions
from hushrec.data.tables import Columns
from hushrec.data.text import LONGEST_LINE
from hushrec.errors import DataError, MissingExtraError

ROWS = [("ann", "tea", 2.5, 30), ("bob", "milk", 1.0, 10), ("ann", "milk", 4.0, 20)]
CSV = "user,item,rating,timestamp\nann,tea,2.5,30\nbob,milk,1.0,10\nann,milk,4.0,20\n"


@pytest.fixture
def write(tmp_path):
    def write(content, name="ratings.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def rows(data):
    ids = zip(data.users[data.user], data.items[data.item], strict=True)
    return [
        (str(u), str(i), float(v), int(t))
        for (u, i), v, t in zip(ids, data.value, data.time, strict=True)
    ]


# ------------------------------------------------------------------ the public list of items


def test_the_list_is_the_catalogue_touched_or_not(write):
    ratings, films = write(CSV), write("item\nwine\ntea\n\nmilk\ncoffee\n", "films.txt")
    data = read_interactions(ratings, items=films)
    assert rows(data) == ROWS
    assert list(data.items) == ["coffee", "milk", "tea", "wine"]
    assert data.items_declared
    assert not read_interactions(ratings).items_declared


@pytest.mark.parametrize(
    "films",
    [
        "tea\nmilk, warm\nmilk\n",
        "item,title\ntea,Tea\nmilk,Milk\n",
        '{"item": "tea"}\n{"item": "milk"}\n',
        "asin;genres\nmilk;a\ntea;b\n",
    ],
)
def test_the_list_is_read_from_lines_and_tables(write, films):
    data = read_interactions(write(CSV), items=write(films, "films"))
    assert {"tea", "milk"} <= set(data.items.tolist())
    assert rows(data) == ROWS


def test_titles_are_those_of_the_list_and_nobodys(write):
    ratings = write("user,item,title\nann,tea,Ann's\nbob,milk,Bob's\n")
    films = write("item,title\ntea,Tea\nwine,Wine\nmilk,Milk\n", "films.csv")
    data = read_interactions(ratings, items=films)
    assert [data.title(k) for k in range(3)] == ["Milk", "Tea", "Wine"]
    bare = read_interactions(ratings, items=write("tea\nmilk\n", "films.txt"))
    assert [bare.title(k) for k in range(2)] == ["milk", "tea"]


MOVIES = """movieId,title,genres
10,"American President, The (1995)",Comedy|Drama
2,Jumanji (1995),Adventure
7,Twin Peaks,(no genres listed)
1,Fawlty Towers (1975–1979),Comedy
"""
RATED = "userId,movieId,rating,timestamp\n1,2,4.0,964982703\n1,10,3.5,964981247\n5,1,2,847434962\n"


def test_ratings_and_movies_in_the_form_of_movielens_just_work(write):
    data = read_interactions(write(RATED), items=write(MOVIES, "movies.csv"))
    assert data.items.tolist() == ["1", "2", "7", "10"]
    assert [data.title(k) for k in (0, 3)] == [
        "Fawlty Towers (1975–1979)",
        "American President, The (1995)",
    ]
    year, genres = data.item_features["year"], data.item_features["genres"]
    assert [*year.names, ""] == ["1975", "1995", ""]
    assert year.codes.tolist() == [0, 1, -1, 1]
    assert [genres.names[flags].tolist() for flags in genres.flags] == [
        ["Comedy"],
        ["Adventure"],
        [],
        ["Comedy", "Drama"],
    ]
    assert "movies.csv: title and genres and year of each item taken" in data.notes


def test_a_column_of_years_comes_before_those_in_titles(write):
    films = "item,title,Release_Year\ntea,Tea (1900),2001\nmilk,Milk (1950),soon\n"
    data = read_interactions(write(CSV), items=write(films, "films.csv"))
    assert data.item_features["year"].names.tolist() == ["2001"]
    assert data.item_features["year"].codes.tolist() == [-1, 0]


def test_tags_that_are_different_everywhere_describe_nothing(write, monkeypatch):
    monkeypatch.setattr(files, "MOST_GENRES", 2)
    films = write("item,tags\ntea,a|b\nmilk,c\n", "films.csv")
    data = read_interactions(write(CSV), items=films)
    assert not data.item_features
    assert not any("films.csv" in note for note in data.notes)


@pytest.mark.parametrize(
    ("films", "words"),
    [
        ("milk\nwine\n", r"ratings\.csv, line 2, column 'item': item 'tea' is not in the list of"),
        (
            "wine\nbeer\n",
            r"line 2, .*'tea' is not in the list .*\(nor are 1 others\); add it there",
        ),
        ("tea\nmilk\n\ntea\n", r"films\.csv, line 4, column 0: 'tea' is there already"),
        ("item,title\ntea,T\nmilk,M\nmilk,M\n", r"line 4, column 'item': 'milk' is there already"),
        ("\n", r"films\.csv: the file is empty"),
        ("item,title\ntea,T\n,M\n", r"line 3, column 'item': empty id"),
    ],
)
def test_a_list_that_does_not_fit_is_refused_by_line(write, films, words):
    with pytest.raises(DataError, match=words):
        read_interactions(write(CSV), items=write(films, "films.csv"))


# ------------------------------------------------------------------------------------ harmless


def test_plain_csv(write):
    data = read_interactions(write(CSV))
    assert rows(data) == ROWS
    assert data.name == "ratings"
    assert list(data.users) == ["ann", "bob"]
    assert list(data.items) == ["milk", "tea"]  # by id, not by who came first
    assert data.has_time
    assert data.notes == ()
    assert (data.user.dtype, data.item.dtype, data.value.dtype, data.time.dtype) == (
        np.int32,
        np.int32,
        np.float32,
        np.int64,
    )


@pytest.mark.parametrize("delimiter", ["\t", "::", ";", "|", ",", " "])
@pytest.mark.parametrize("header", [True, False])
def test_delimiters_are_recognised(write, delimiter, header):
    text = CSV.replace(",", delimiter)
    if not header:
        text = text.split("\n", 1)[1]
    data = read_interactions(write(text, "x.dat"))
    assert rows(data) == ROWS
    assert any("no header" in note for note in data.notes) is not header


def test_an_odd_delimiter_is_taken_when_given(write):
    assert rows(read_interactions(write(CSV.replace(",", "^")), Columns(delimiter="^"))) == ROWS
    assert rows(read_interactions(write(CSV.replace(",", "\t")), Columns(delimiter="\\t"))) == ROWS


def test_semicolons_with_commas_inside(write):
    text = "user;item;rating\nann;tea, green;1\nbob;milk, warm;2\n"
    assert list(read_interactions(write(text)).items) == ["milk, warm", "tea, green"]


@pytest.mark.parametrize(
    "header",
    [
        "userId,movieId,rating,timestamp",
        "USER_ID,Item ID,Score,Time",
        "uid,iid,weight,ts",
        "reviewerID,asin,overall,unixReviewTime",
        "user_id:token,item_id:token,rating:float,timestamp:float",
        "userID,artistID,count,date",
        "user,product,value,datetime",
    ],
)
def test_usual_names_are_recognised(write, header):
    assert rows(read_interactions(write(CSV.replace(CSV.split("\n")[0], header)))) == ROWS


def test_columns_by_name_in_any_order(write):
    text = (
        "when,stars,what,who,label\n30,2.5,tea,ann,Tea\n10,1,milk,bob,Milk\n20,4,milk,ann,Milk!\n"
    )
    chosen = {"user": "who", "item": "WHAT", "value": "stars", "time": "when", "title": "label"}
    data = read_interactions(write(text), Columns(**chosen))
    assert rows(data) == ROWS
    assert [data.title(k) for k in range(2)] == ["Milk", "Tea"]


def test_a_file_like_tafengs(write):
    """FedRAP's TaFeng: capital names, leading zeros, amounts; pairs repeat."""
    text = (
        "TRANSACTION_DT,CUSTOMER_ID,AGE_GROUP,PIN_CODE,PRODUCT_SUBCLASS,PRODUCT_ID,AMOUNT,ASSET\n"
        "2000-11-01,01104905,45-49,115,110411,4710199010372,2,24\n"
        "2000-11-02,00418683,45-49,115,120107,4710857472535,1,48\n"
        "2000-12-01,01104905,45-49,115,110411,4710199010372,1,24\n"
    )
    chosen = Columns(user="CUSTOMER_ID", item="PRODUCT_ID", value="AMOUNT", time="TRANSACTION_DT")
    data = read_interactions(write(text), chosen)
    assert (len(data), data.n_users, data.n_items) == (3, 2, 2)
    assert data.users.tolist() == ["00418683", "01104905"]
    mine = data.user == 1
    assert data.value[mine].tolist() == [2.0, 1.0]
    days = (data.time - data.time.min()) // 86_400
    assert sorted(days.tolist()) == [0, 1, 30]
    # Its own dates have slashes, which are read differently in different places: refused, by line.
    with pytest.raises(DataError, match=r"line 2, column 'TRANSACTION_DT'.*ISO date"):
        read_interactions(write(text.replace("2000-11-01", "11/1/2000")), chosen)


def test_columns_by_number(write):
    path = write("30,tea,ann\n10,milk,bob\n20,milk,ann\n")
    data = read_interactions(path, Columns(user="2", item=1, time=0))
    assert rows(data) == [(u, i, 1.0, t) for u, i, _, t in ROWS]
    # Ids that are all text look like a header until the columns are numbered.
    data = read_interactions(write("ann,tea\nbob,milk\n"), Columns(user=0, item=1))
    assert len(data) == 2


def test_no_time_and_no_value_are_noted(write):
    data = read_interactions(write("user,item\nann,tea\nbob,milk\nann,milk\n"))
    assert not data.has_time
    assert list(data.time) == [0, 1, 2]
    assert list(data.value) == [1, 1, 1]
    assert any("no time column" in note for note in data.notes)
    assert any("no value column" in note for note in data.notes)


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (lambda raw: b"\xef\xbb\xbf" + raw, "byte-order mark"),
        (lambda raw: raw.replace(b"\n", b"\r\n"), "CRLF"),
        (gzip.compress, "gzip"),
        (lambda raw: raw.replace(b"bob", b"\n  \nbob"), "2 blank lines skipped"),
        (lambda raw: raw.replace(b"bob", b'\n"bob"'), "1 blank line skipped"),
    ],
)
def test_harmless_oddities_are_handled_and_said(write, change, note):
    data = read_interactions(write(change(CSV.encode())))
    assert rows(data) == ROWS
    assert len(data.notes) == 1
    assert note in data.notes[0]


def test_all_oddities_at_once(write):
    raw = gzip.compress(b"\xef\xbb\xbf" + CSV.replace("\n", "\r\n\r\n").encode())
    data = read_interactions(write(raw, "r.csv.gz"))
    assert rows(data) == ROWS
    assert data.name == "r"
    assert len(data.notes) == 4


def test_odd_ids(write):
    text = 'user,item\n  Ann Lee ,"tea, green"\n"Zoë ""Z""",茶\nAnn Lee," 茶 "\n'
    data = read_interactions(write(text))
    assert list(data.users) == ["Ann Lee", 'Zoë "Z"']
    assert list(data.items) == ["tea, green", "茶"]


def test_quotes_after_a_space(write):
    data = read_interactions(write('user, item, rating\nann, "tea, green", 1\nbob, milk, 2\n'))
    assert list(data.items) == ["milk", "tea, green"]


def test_the_first_of_two_columns_of_one_name_is_taken(write):
    data = read_interactions(write("user,item,item\nann,tea,x\nbob,milk,x\n"))
    assert list(data.items) == ["milk", "tea"]


def test_dates_without_a_zone_are_utc_anywhere(write, monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    clock.tzset()
    try:
        path = write("user,item,date\nann,tea,1970-01-02\nbob,milk,1970-01-01T00:00:00\n")
        assert list(read_interactions(path).time) == [86_400, 0]
    finally:
        monkeypatch.undo()
        clock.tzset()


def test_repeats_are_kept(write):
    data = read_interactions(write(CSV + "ann,tea,5,40\n"))
    assert len(data) == 4
    assert rows(data.merged())[-1] == ("ann", "tea", 5.0, 40)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (("30", "10", "20"), [30, 10, 20]),
        (("3e1", "10.0", "20"), [30, 10, 20]),
        (("0.5", "10", "-20.25"), [500_000, 10_000_000, -20_250_000]),
        (("1970-01-02", "1970-01-01", "1970-01-03"), [86_400, 0, 172_800]),
        (
            ("1970-01-01T10:00:00Z", "1970-01-01 00:00:01", "1970-01-01T10:00:00+10:00"),
            [36_000, 1, 0],
        ),
    ],
)
def test_times(write, times, expected):
    pairs = [("a", "x"), ("b", "y"), ("a", "y")]
    text = "".join(f"{u},{i},{t}\n" for (u, i), t in zip(pairs, times, strict=True))
    assert list(read_interactions(write("user,item,time\n" + text)).time) == expected


def test_json_lines(write):
    text = (
        '{"user": "ann", "item": "tea", "rating": 2.5, "time": 30}\n\n'
        '{"user": "bob", "item": "milk", "rating": 1, "time": 10, "extra": [1]}\n'
        '{"item": "milk", "user": "ann", "rating": 4, "time": 20}\n'
    )
    data = read_interactions(write(text, "log.jsonl"))
    assert rows(data) == ROWS
    assert data.notes == ("1 blank line skipped",)


@pytest.mark.parametrize("packed", [False, True])
def test_parquet(tmp_path, packed):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    user, item, value, time = (list(column) for column in zip(*ROWS, strict=True))
    stamps = arrow.array([t * 1000 for t in time], arrow.timestamp("ms"))
    table = arrow.table({"user": user, "item": item, "rating": value, "timestamp": stamps})
    path = tmp_path / "log.parquet"
    parquet.write_table(table, path)
    if packed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    assert rows(read_interactions(path)) == ROWS


def test_parquet_without_pyarrow(write, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"hushrec\[parquet\]"):
        read_interactions(write(b"PAR1....PAR1", "log.parquet"))


ids = st.text(min_size=1, max_size=8).map(str.strip).filter(lambda s: s and "\0" not in s)
odd = st.one_of(
    ids, st.sampled_from(['"', '""', ",", "a,b", "a b", "é", "::", "x\u2028y", "x\x85y"])
)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    pairs=st.lists(st.tuples(odd, odd), min_size=2, max_size=12),
    delimiter=st.sampled_from([",", "\t", ";", "|"]),
)
@example(pairs=[('"', ","), ("b", "a\nb")], delimiter=",")
def test_round_trip_of_odd_ids(write, pairs, delimiter):
    pairs = [*pairs, ("one", "two"), ("three", "four")]
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=delimiter)
    writer.writerow(["user", "item", "rating"])
    writer.writerows([u, i, k] for k, (u, i) in enumerate(pairs))
    data = read_interactions(write(out.getvalue()))
    # Line ends inside an id are read as plain ones.
    plain = [tuple(s.replace("\r\n", "\n").replace("\r", "\n") for s in pair) for pair in pairs]
    assert [(u, i) for u, i, _, _ in rows(data)] == plain
    assert list(data.value) == list(range(len(pairs)))


def test_plain_and_quoted_splitting_agree(write):
    text = "".join(f"{k % 7},{k % 11},{k % 5},{k}\n" for k in range(1_000))
    plain = read_interactions(write("user,item,rating,time\n" + text))
    quoted = read_interactions(write('"user",item,rating,time\n' + text))
    assert rows(plain) == rows(quoted)


# -------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["empty"]),
        ("\n \n", ["empty"]),
        ("user,item,rating\n", ["only a header"]),
        ("user\nann\nbob\n", ["only one column", "--delimiter"]),
        ("user^item^rating\nann^tea^1\n", ["only one column", "'^'", "--delimiter"]),
        ("who,item\nann,tea\n", ["no user column", "'who', 'item'", "--user"]),
        ("user,what\nann,tea\n", ["no item column", "'user', 'what'", "--item"]),
        ("ann,tea\nbob,milk\n", ["no user column", "--user 0 --item 1"]),
        ("user,item,rating\nann,tea,1\nbob,milk\n", ["line 3", "2 fields", "has 3"]),
        ("user,item,rating\nann,tea,1\nbob,milk,1,9\n", ["line 3", "4 fields", "has 3"]),
        ("user,item,rating\n\nann,tea,1\n\nbob,milk,1,9\n", ["line 5", "4 fields"]),
        ('user,item,rating\n"ann",tea,1\nbob,milk\n', ["line 3", "2 fields", "has 3"]),
        ('user,item,rating\n"a\nnn",tea,1\nbob,milk\n', ["line 4", "2 fields"]),
        ('user,item\nann,tea\nbob,"milk\nx,y\n', ["line 3", "quoted field"]),
        (CSV + "cy,tea,1,soon\n", ["line 5", "column 'timestamp'", "'soon'", "not a number"]),
        (CSV + "cy,tea,1,nan\n", ["line 5", "column 'timestamp'", "'nan'"]),
        (CSV + "cy,tea,1,\n", ["line 5", "column 'timestamp'", "''"]),
        ("user,item,date\na,x,2020-01-01\nb,y,1/2/2020\n", ["line 3", "column 'date'", "ISO"]),
        (CSV + "cy,tea,good,5\n", ["line 5", "column 'rating'", "'good'", "not a number"]),
        (CSV + "cy,tea,,5\n", ["line 5", "column 'rating'", "not a number"]),
        (CSV + "cy,tea,NaN,5\n", ["line 5", "column 'rating'", "finite"]),
        (CSV + "cy,tea,-inf,5\n", ["line 5", "column 'rating'", "finite"]),
        (CSV + "cy,tea,1e99,5\n", ["line 5", "column 'rating'", "finite"]),
        (CSV + " ,tea,1,5\n", ["line 5", "column 'user'", "empty id"]),
        (CSV + 'cy,"",1,5\n', ["line 5", "column 'item'", "empty id"]),
        ("1,2,3,4\n1,,3,4\n", ["line 2", "column 1", "empty id"]),
        ("user,item\nann,tea\nann,milk\n", ["only one user", "'ann'", "--user"]),
        ("user,item\nann,tea\nbob,tea\n", ["only one item", "'tea'", "--item"]),
        (CSV + "x" * 1_001 + ",tea,1,5\n", ["line 5", "1,001 characters"]),
        (CSV + "cy,te\0a,1,5\n", ["zero byte"]),
        ('{"user": 1, "item": 2}\n{"user": 1, item: 2}\n', ["line 2", "invalid JSON"]),
        ('{"user": 1, "item": 2}\n{"user": 1}\n', ["line 2", "column 'item'", "missing"]),
        ('{"user": 1, "item": 2}\n{"user": null, "item": 3}\n', ["line 2", "'user'", "empty"]),
        ('[{"user": 1, "item": 2}]\n', ["line 1", "one JSON object per line"]),
    ],
)
def test_what_cannot_be_used_is_refused(write, text, parts):
    path = write(text)
    with pytest.raises(DataError) as caught:
        read_interactions(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    for part in parts:
        assert part in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("columns", "parts"),
    [
        (
            {"user": "usr"},
            ["'usr'", "'user', 'item', 'rating', 'timestamp'", "did you mean 'user'"],
        ),
        ({"item": 4}, ["no column 4", "0 to 3"]),
        ({"delimiter": ";"}, ["only one column", "','", "--delimiter"]),
        ({"value": "item", "item": "rating"}, ["line 2", "column 'item'", "'tea'"]),
    ],
)
def test_wrong_choices_are_refused(write, columns, parts):
    with pytest.raises(DataError) as caught:
        read_interactions(write(CSV), Columns(**columns))
    for part in parts:
        assert part in str(caught.value)


def test_names_without_a_header_are_refused(write):
    with pytest.raises(DataError, match=r"no header line.*'who'.*by number, 0 to 3"):
        read_interactions(write(CSV.split("\n", 1)[1]), Columns(user="who"))


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(DataError, match=r"none\.csv: no such file"):
        read_interactions(tmp_path / "none.csv")
    with pytest.raises(DataError, match="is a folder"):
        read_interactions(tmp_path)


def test_not_utf8(write):
    with pytest.raises(DataError, match=r"line 5: not UTF-8 text at byte 76; .*latin-?1"):
        read_interactions(write(CSV.encode() + "Zoë,tea,1,5\n".encode("latin-1")))


def test_damaged_gzip(write):
    whole = gzip.compress(CSV.encode() * 50)
    flipped = whole[:40] + bytes([whole[40] ^ 255]) + whole[41:]
    for damaged in (whole[:-12], whole[:30], flipped, b"\x1f\x8bnothing"):
        with pytest.raises(DataError, match="damaged gzip"):
            read_interactions(write(damaged, "r.csv.gz"))


def test_damaged_parquet(write):
    pytest.importorskip("pyarrow")
    with pytest.raises(DataError, match="damaged Parquet"):
        read_interactions(write(b"PAR1 nothing more", "r.parquet"))


@pytest.mark.parametrize("before", [0, 10, 100_000])
def test_an_enormous_line_is_refused_before_the_rest_is_read(write, monkeypatch, before):
    raw = b"a,b,1\n" * before + b"x" * (LONGEST_LINE + 1) + b"\n" + b"y" * (20 << 20)
    path = write(raw)
    taken = []

    class Counting(io.BufferedReader):
        def read(self, size=-1):
            chunk = super().read(size)
            taken.append(len(chunk))
            return chunk

    monkeypatch.setattr("hushrec.data.text.open_file", lambda path: Counting(io.FileIO(path)))
    with pytest.raises(DataError, match=rf"line {before + 1}: longer than 1,048,576 bytes"):
        read_interactions(path)
    assert sum(taken) < 4 << 20


def test_a_line_of_just_the_limit_is_read(write):
    title = "t" * (LONGEST_LINE - len("cy,tea,1,5,"))
    text = "user,item,rating,time,title\nann,milk,1,2,Milk\ncy,tea,1,5," + title + "\n"
    data = read_interactions(write(text))
    assert data.title(1) == "t" * entries.LONGEST_TITLE


# ------------------------------------------------------------------------------------- history


@pytest.mark.parametrize(
    ("text", "history"),
    [
        ("tea\nmilk\n\ntea\n", ["tea", "milk", "tea"]),
        ("item\ntea\nmilk\n", ["tea", "milk"]),
        ("50\n172\n", ["50", "172"]),
        ("Movie: The Sequel\ntea\n", ["Movie: The Sequel", "tea"]),
        ("Matrix, The (1999)\nToy Story (1995)\n", ["Matrix, The (1999)", "Toy Story (1995)"]),
        ("item,time\ntea,9\nmilk,3\n", ["milk", "tea"]),
        ("item;note\ntea;x\nmilk;y\n", ["tea", "milk"]),
        ("user,item,rating,time\nann,tea,1,9\nann,milk,1,3\n", ["milk", "tea"]),
        ("1,10,5,9\n1,20,5,3\n", ["20", "10"]),
        (
            '{"item": "tea", "time": "2020-01-02"}\n{"item": "milk", "time": "2020-01-01"}\n',
            ["milk", "tea"],
        ),
        ("tea\n", ["tea"]),
    ],
)
def test_history(write, text, history):
    assert read_history(write(text)) == history


def test_empty_history_and_missing_history(write, tmp_path):
    for text in ("\n", "item\n"):
        with pytest.raises(DataError, match="empty"):
            read_history(write(text))
    with pytest.raises(DataError, match="no such file"):
        read_history(tmp_path / "none")


# ------------------------------------------------------------------ ratings in the place of times


def swapped(header="user,item,rating,timestamp", stars=(0.5, 1, 3.5, 5)):
    rows = [f"u{n % 3},i{n},{964_982_703 + n},{stars[n % len(stars)]}" for n in range(12)]
    return "\n".join([*([header] if header else []), *rows]) + "\n"


def test_ratings_and_times_that_are_swapped_are_refused(write):
    with pytest.raises(DataError) as refused:
        read_interactions(write(swapped()))
    words = str(refused.value)
    assert "column 'timestamp' is taken as time and holds 0.5 to 5, as ratings do" in words
    assert "they look swapped; name them: --time rating --value timestamp" in words
    named = Columns(time="rating", value="timestamp")
    data = read_interactions(write(swapped()), named)
    assert (data.value.max(), data.time.min()) == (5, 964_982_703)
    # Days written as a number are times too, and columns may have no names.
    days = swapped(None, (1, 2, 5)).replace("964982", "19980")
    with pytest.raises(DataError, match="--time 2 --value 3"):
        read_interactions(write(days))


def test_half_stars_are_no_times(write):
    rows = "".join(f"u{n % 3},i{n},{n % 10 / 2}\n" for n in range(20))
    with pytest.raises(DataError, match="as ratings do; name its role: --value time"):
        read_interactions(write(f"user,item,time\n{rows}"))
    data = read_interactions(write(f"user,item,time\n{rows}"), Columns(value="time"))
    assert (data.has_time, data.value.max()) == (False, 4.5)


def test_who_names_the_time_is_believed(write):
    data = read_interactions(write(swapped()), Columns(time="timestamp"))
    assert data.time.max() == 5_000_000  # with fractions, in microseconds


def test_small_times_are_times(write):
    """Steps of a sequence, weeks, hours and their quarters: none of them a scale of ratings."""
    for times in (range(12), [n % 4 for n in range(12)], [n / 4 for n in range(12)]):
        rows = "".join(f"u{n % 3},i{n},{1 + n % 5},{time}\n" for n, time in enumerate(times))
        assert read_interactions(write(f"user,item,rating,time\n{rows}")).has_time


# ------------------------------------------------------------------ RecBole's atomic files

INTER = (
    "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    "ann\tt1\t4.0\t30.0\nbob\tt2\t1\t10\nann\tt2\t5\t20\n"
)
ITEM = (
    "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\tprice:float\t"
    "vector:float_seq\n"
    "t2\tToy Story\t1995\tAnimation Comedy\t2.5\t0.1 0.2\n"
    "t1\tHeat\t\tAction\t\t0.3 0.4\n"
    "t3\tNobody saw it, ever\t1999\t\t7\t0.5 0.6\n"
)
USER = "user_id:token\tage:token\tincome:float\nbob\t23\t1\ncarl\t40\t2\n"


@pytest.fixture
def atomic(write):
    write(ITEM, "ml.item")
    write(USER, "ml.user")
    return write(INTER, "ml.inter")


def test_atomic_files_are_read_as_they_are(atomic):
    data = read_interactions(atomic)
    assert rows(data) == [("ann", "t1", 4, 30), ("bob", "t2", 1, 10), ("ann", "t2", 5, 20)]
    assert data.items_declared and data.items.tolist() == ["t1", "t2", "t3"]
    assert data.titles.tolist() == ["Heat", "Toy Story", "Nobody saw it, ever"]
    year, kinds = data.item_features["release_year"], data.item_features["class"]
    assert year.codes.tolist() == [-1, 0, 1] and year.names.tolist() == ["1995", "1999"]
    assert kinds.names.tolist() == ["Action", "Animation", "Comedy"]
    assert kinds.flags.tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 0]]
    price = data.item_features["price"].values
    assert np.isnan(price[0]) and price[1:].tolist() == [2.5, 7]
    age = data.user_features["age"]
    assert age.codes.tolist() == [-1, 0] and age.names.tolist() == ["23"]
    assert data.user_features["income"].values[1] == 1
    assert "ml.item: column 'vector' left out: vectors are no features" in data.notes
    assert "ml.item: title and release_year and class and price taken" in data.notes


def test_atomic_files_may_be_packed_alone_or_incomplete(write):
    alone = read_interactions(write(INTER, "ml.inter"))
    assert not alone.items_declared and alone.titles is None and not alone.item_features
    write(gzip.compress(ITEM.replace("t1\tHeat\t\tAction\t\t0.3 0.4\n", "").encode()), "ml.item.gz")
    data = read_interactions(write(gzip.compress(INTER.encode()), "ml.inter.gz"))
    assert not data.items_declared and data.items.tolist() == ["t1", "t2"]
    assert data.titles.tolist() == ["t1", "Toy Story"]
    assert data.item_features["class"].flags.tolist() == [[0, 0], [1, 1]]
    assert "ml.item.gz: 1 items have no line: the list of items is not public" in data.notes


def test_a_list_that_is_given_goes_before_the_one_beside(atomic, write):
    data = read_interactions(atomic, items=write("t1\nt2\nt9\n", "mine.txt"))
    assert data.items.tolist() == ["t1", "t2", "t9"] and not data.item_features
    assert "age" in data.user_features
    typed = read_interactions(atomic, items=atomic.with_suffix(".item"))
    assert typed.items.tolist() == ["t1", "t2", "t3"]
    assert list(typed.item_features) == ["release_year", "class", "price"]
    assert any("vector" in note for note in typed.notes)


def test_columns_of_atomic_files_are_declared_by_their_types(atomic):
    ids, file = np.array(["t1", "t2"]), atomic.with_suffix(".item")
    found = files.read_features(file, "item", ids, ["class", "price", "release_year"])
    assert [type(column).__name__ for column in found.values()] == [
        "MultiCategorical",
        "Numeric",
        "Categorical",
    ]
    with pytest.raises(DataError, match="column 'vector': a float_seq, which is a vector"):
        files.read_features(file, "item", ids, ["vector"])


def test_atomic_files_that_cannot_be_are_refused(atomic, write):
    write("item_id,title\nt1,a\nt2,b\n", "ml.item")
    with pytest.raises(DataError, match=r"ml\.item: no atomic file, whose header has types"):
        read_interactions(atomic)
    write(ITEM.replace("t3\t", "t1\t"), "ml.item")
    with pytest.raises(DataError, match="line 4, column 'item_id': 't1' has a line already"):
        read_interactions(atomic)
    write(ITEM.replace("\t2.5\t", "\tcheap\t"), "ml.item")
    with pytest.raises(DataError, match="line 2, column 'price': 'cheap' is not a number"):
        read_interactions(atomic)


def test_columns_that_describe_nothing_or_are_ids_are_left_out(write):
    lines = [f"i{n}\tword{n} other{n}\t\t{n % 2}" for n in range(1_100)]
    header = "item_id:token\ttext:token_seq\tempty:float\tkind:token"
    write("\n".join([header, *lines]), "a.item")
    data = read_interactions(write("user_id:token\titem_id:token\nu\ti1\nv\ti2\n", "a.inter"))
    assert list(data.item_features) == ["kind"]
    assert "a.item: column 'text' left out: 2,200 categories" in data.notes
    assert "a.item: column 'empty' left out: it is empty" in data.notes


def test_labels_of_atomic_files_are_values(write):
    inter = "user_id:token\titem_id:token\tlabel:float\nu\ti1\t0\nv\ti2\t1\n"
    assert read_interactions(write(inter, "a.inter")).value.tolist() == [0, 1]
    plain = inter.replace(":token", "").replace(":float", "")
    assert read_interactions(write(plain)).value.tolist() == [1, 1]
