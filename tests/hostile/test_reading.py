"""Files are read block by block as they would be at once, and once, from pipes too."""

import json
import os
import threading

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.hostile.plain_reading import RefusedError, read_plainly

from hushrec.cli import main
from hushrec.data import columns as entries
from hushrec.data import tables, text
from hushrec.data.reading import read_history, read_interactions
from hushrec.errors import DataError

FIELD = st.one_of(
    st.sampled_from(["a", "b", "c", "7", "12", " x ", "", "nan", "1e99", "2020-01-01", "0.5"]),
    st.sampled_from(['"q"', '"q,r"', '"', "é", "2020-13-01", "9007199254740993", "-3", "1e400"]),
    st.text("ab1,;\t \"'.\n", max_size=4),
)
HEADER = st.sampled_from(
    ["user,item", "user,item,rating", "user,item,rating,time", "user,item,time,title", "a,b,c"]
)
NUMBER = st.sampled_from(
    ["1", "2.5", "x", "inf", "", "30", "1970-01-01", "0.25", "99999999999999999999"]
)


@st.composite
def delimited(draw):
    """A file that is nearly sound."""
    header = draw(HEADER)
    lines = [header] if draw(st.booleans()) else []
    width = header.count(",") + 1
    for _ in range(draw(st.integers(0, 12))):
        row = [draw(st.sampled_from("abc")), draw(st.sampled_from("xyz"))]
        row += [draw(NUMBER) for _ in range(width - 2)]
        if draw(st.integers(0, 9)) == 0:
            row[draw(st.integers(0, width - 1))] = draw(FIELD)
        lines.append(",".join(row))
        if draw(st.integers(0, 9)) == 0:
            lines.append(draw(st.sampled_from(["", "  ", "\r"])))
    return "\n".join(lines) + draw(st.sampled_from(["", "\n", "\n\n"]))


@st.composite
def json_lines(draw):
    value = st.one_of(st.integers(-9, 99), st.floats(), st.none(), st.text(max_size=3))
    odd = st.one_of(value, st.lists(st.integers(), max_size=2), st.just({}))
    lines = []
    for _ in range(draw(st.integers(1, 8))):
        record = {"user": draw(st.sampled_from("abc")), "item": draw(st.sampled_from("xyz"))}
        record |= {"rating": draw(NUMBER), "time": draw(st.integers(0, 99))}
        if draw(st.integers(0, 5)) == 0:
            record[draw(st.sampled_from(["user", "item", "rating", "time"]))] = draw(odd)
        if draw(st.integers(0, 9)) == 0:
            record.pop("item")
        lines.append(json.dumps(record) if draw(st.integers(0, 19)) else "{oops")
    return "\n".join(lines)


def outcome(content, path, block):
    """Return what reading in blocks of this size comes to."""
    path.write_bytes(content.encode())
    tables.BLOCK, before = block, tables.BLOCK
    try:
        data = read_interactions(path)
    except DataError as error:
        return str(error).removeprefix(str(path))
    finally:
        tables.BLOCK = before
    return (
        data.users[data.user].tolist(),
        data.items[data.item].tolist(),
        data.value.tolist(),
        data.time.tolist(),
        None if data.titles is None else data.titles.tolist(),
        list(data.notes),
    )


def plain_outcome(content):
    try:
        return read_plainly(content)
    except RefusedError as refused:
        return str(refused)


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(content=st.one_of(delimited(), json_lines()), block=st.sampled_from([1, 5, 17, 1 << 20]))
def test_blocks_give_what_the_whole_file_gives(tmp_path, content, block):
    expected = plain_outcome(content)
    assert outcome(content, tmp_path / "f.csv", block) == (
        expected if isinstance(expected, str) else tuple(expected)
    )


def test_reading_says_how_far_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "BLOCK", 50)
    path = tmp_path / "f.csv"
    path.write_text("user,item\n" + "".join(f"{k},{k % 3}\n" for k in range(200)))
    shares = []
    read_interactions(path, progress=shares.append)
    assert len(shares) > 20
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)


CSV = "user,item,rating\nann,tea,1\nbob,milk,2\n"


def written_into(path, content):
    def write():
        path.write_bytes(content)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("read", [read_interactions, read_history])
def test_a_pipe_is_read_once(tmp_path, read):
    path, file = tmp_path / "pipe", tmp_path / "file.csv"
    os.mkfifo(path)
    file.write_text(CSV)
    thread = written_into(path, CSV.encode())
    got, expected = read(path), read(file)
    thread.join(5)
    if read is read_history:
        assert got == expected == ["tea", "milk"]
    else:
        assert got.items.tolist() == expected.items.tolist()


def test_a_pipe_without_a_writer_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "PATIENCE", 0.1)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(DataError, match="pipe without a writer"):
        read_interactions(path)


def test_devices_are_refused_and_endless_content_ends(tmp_path, monkeypatch):
    for device in ("/dev/zero", "/dev/urandom", "/dev/null"):
        with pytest.raises(DataError, match="is a device"):
            read_interactions(device)
    monkeypatch.setattr(text, "MOST_BYTES", 100)
    path = tmp_path / "long.csv"
    path.write_text(CSV * 20)
    with pytest.raises(DataError, match="more than 100 bytes; split the file"):
        read_interactions(path)


def test_standard_input_and_process_substitution(tmp_path, tmp_path_factory, monkeypatch):
    """Commands that read data once take a pipe; a run must find its data again, and says so."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))

    def run(*words):
        reading, writing = os.pipe()  # what a shell makes of `<(cat file)`
        os.write(writing, CSV.encode())
        os.close(writing)
        try:
            source = f"/dev/fd/{reading}"
            return CliRunner().invoke(main, [source if word is ... else word for word in words])
        finally:
            os.close(reading)

    info = run("data", "info", ..., "--json")
    assert info.exit_code == 0, info.output
    assert json.loads(info.stdout)["rows"] == 2
    kept = run("data", "import", ..., "--name", "piped", "--json")
    assert kept.exit_code == 0, kept.output
    for words in (("train", "--data", ...), ("train", "--items", ...), ("tune", "--data", ...)):
        refused = run(*words, "--out", str(tmp_path / "run"))
        assert refused.exit_code == 2
        assert "hushrec data import /dev/fd/" in refused.output
    assert not any(tmp_path.iterdir())


def test_ids_that_would_fill_the_memory_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(entries, "MOST_ID_BYTES", 1_000)
    path = tmp_path / "f.csv"
    path.write_text("user,item\n" + "".join(f"{k},{k}\n" for k in range(50)) + "x" * 40 + ",1\n")
    with pytest.raises(DataError, match="line 52, column 'user': an id of 40 characters among 51"):
        read_interactions(path)


# ------------------------------------------------------------------------------------- Parquet

arrow = pytest.importorskip("pyarrow", reason="needs the extra 'parquet'")


def parquet_file(path, **columns):
    import pyarrow.parquet as parquet

    parquet.write_table(arrow.table(columns), path)
    return path


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ([["a"], ["b"]], r"column 'user': holds list<\w+: string>"),
        ([{"a": 1}, {"a": 2}], r"column 'user': holds struct<a: int64>"),
        ([b"\xff", b"\xfe"], "column 'user': binary that cannot be read"),
    ],
)
def test_ids_that_are_no_single_entries_are_refused(tmp_path, column, words):
    path = parquet_file(tmp_path / "f.parquet", user=column, item=["x", "y"])
    with pytest.raises(DataError, match=words):
        read_interactions(path)


def test_ids_of_bytes_are_text(tmp_path):
    path = parquet_file(tmp_path / "f.parquet", user=[b"ann", b"bob"], item=["x", "y"])
    assert read_interactions(path).users.tolist() == ["ann", "bob"]


@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Tokyo"])
def test_odd_nanoseconds_are_read(tmp_path, zone):
    stamps = arrow.array([1_500_000_001, 123], arrow.timestamp("ns", zone))
    path = parquet_file(tmp_path / "f.parquet", user=["a", "b"], item=["x", "y"], time=stamps)
    assert read_interactions(path).time.tolist() == [1_500_000, 0]


def test_dates_beyond_the_calendar_are_refused(tmp_path):
    stamps = arrow.array([2**62, 1], arrow.timestamp("us"))
    path = parquet_file(tmp_path / "f.parquet", user=["a", "b"], item=["x", "y"], time=stamps)
    with pytest.raises(DataError, match=r"column 'time': timestamp.* cannot be read"):
        read_interactions(path)


def test_json_ids_that_are_no_single_entries_are_refused(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_text('{"user": "a", "item": 1}\n{"user": ["b"], "item": 2}\n')
    with pytest.raises(DataError, match="line 2, column 'user': a list where one entry"):
        read_interactions(path)
