"""What a trained run can be asked in Python."""

from dataclasses import replace

import pandas
import polars
import pytest

import hushrec
from hushrec.errors import ConfigError, RunError
from hushrec.io.codec import Rows


def ratings(data):
    """Return a data set as a program would hold it, with whole numbers for ids."""
    return pandas.DataFrame(
        {"who": data.user + 1, "film": data.item + 10, "stars": data.value, "day": data.time}
    )


def test_a_notebook_in_ten_lines(small, tmp_path):
    frame = ratings(small)
    data = hushrec.load(frame, user="who", item="film", value="stars", time="day")
    run = hushrec.train(data)
    metrics = run.evaluate("hr@10", "coverage@10").to_pandas()
    lists = run.recommend([1, 2, 3], k=5).to_pandas()
    run.save(tmp_path / "run")

    assert lists.groupby("user").size().to_dict() == {"1": 5, "2": 5, "3": 5}
    assert set(lists["item"].astype(int)) <= set(frame["film"])
    seen = set(frame.query("who == 1")["film"])
    assert seen.isdisjoint(lists.query("user == '1'")["item"].astype(int))
    assert metrics.query("scorer == 'chance' and metric == 'hr@10'")["value"].gt(0).all()
    again = hushrec.Run.open(tmp_path / "run", data)
    assert again.summary == run.summary


@pytest.fixture(scope="module")
def runs(small):
    settings = {"d": 4}
    return [
        hushrec.train(small, "popularity"),
        hushrec.train(small, "fedmf", rounds=2, settings=settings),
    ]


def test_a_table_has_everybodys_lists_as_they_are_one_by_one(runs, small):
    for run in (*runs, hushrec.train(small, "fednext")):
        table = run.recommend(k=4)
        assert table.columns["user"][::4] == small.users.tolist()
        for user in small.users[::7].tolist():
            alone = run.recommend(user, k=4)
            rows = table.where(user=user)
            assert [row["rank"] for row in rows] == [1, 2, 3, 4]
            assert [(r["item"], r["score"]) for r in rows] == [(r.item, r.score) for r in alone]


def test_whole_numbers_are_ids_wherever_text_is(small):
    data = hushrec.load(ratings(small), user="who", item="film", time="day")
    run = hushrec.train(data, "popularity")
    assert run.recommend(2) == run.recommend("2")
    assert run.recommend(0, history=[10, 11, 12]) == run.recommend("0", history=["10", "11", "12"])
    with pytest.raises(ConfigError, match="user '99999' is unknown"):
        run.recommend([1, 99999])


def test_a_saved_run_is_the_run_that_was_trained_with_a_folder(small, tmp_path):
    given = {"method": "fedmf", "rounds": 3, "settings": {"d": 4}}
    run = hushrec.train(small, **given)
    hushrec.train(small, **given, out=tmp_path / "out")
    assert run.save(tmp_path / "saved") == tmp_path / "saved"
    names = {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*")}
    saved = {path.relative_to(tmp_path / "saved") for path in (tmp_path / "saved").rglob("*")}
    assert {n for n in names if not n.name.startswith(".")} == {
        n for n in saved if not n.name.startswith(".")
    }
    for name in ("config.toml", "checkpoint/final/selected-shared.safetensors"):
        both = [(tmp_path / place / name).read_bytes() for place in ("out", "saved")]
        assert both[0] == both[1], name
    assert len((tmp_path / "saved/metrics.jsonl").read_text().splitlines()) == 3
    with pytest.raises(RunError, match=r"saved already in .*saved: copy that folder"):
        run.save(tmp_path / "twice")
    with pytest.raises(RunError, match="exists already"):
        hushrec.train(small, **given).save(tmp_path / "saved")


def test_runs_are_compared_in_memory_as_from_their_folders(runs, small, tmp_path):
    first, second = runs
    rows = first.compare(second, metrics=["hr@10"])
    assert [row.run for row in rows] == ["1: popularity", "2: fedmf"]
    again = hushrec.train(small, "popularity", out=tmp_path / "a")
    hushrec.train(small, "fedmf", rounds=2, settings={"d": 4}, out=tmp_path / "b")
    stored = hushrec.compare([tmp_path / "a", tmp_path / "b"], ["hr@10"])
    for row, one in zip(rows, stored, strict=True):
        assert replace(row, run="", against="") == replace(one, run="", against="")
    assert again.compare(str(tmp_path / "b")).to_rows().columns["run"][:2] == [
        str(tmp_path / "a"),
        str(tmp_path / "b"),
    ]


def test_metrics_are_rows(runs):
    run = runs[1]
    rows = run.evaluate()
    found = rows.where(scorer="fedmf", candidates="full", metric="hr@10")
    assert found[0]["value"] == pytest.approx(run.metrics["full"]["hr@10"])
    lists = run.evaluate("coverage@10", "popularity_bias@10").where(scorer="fedmf")
    values = {row["metric"]: row["value"] for row in lists}
    assert values["coverage@10"] == run.summary.lists["coverage@10"]
    assert values["popularity_bias@10"] == run.summary.lists["popularity_bias@10"]
    with pytest.raises(ConfigError, match="did you mean 'coverage'"):
        run.evaluate("covrage@10")


def test_a_baseline_is_not_compared_with_itself(runs):
    rows = runs[0].evaluate("hr@10").where(candidates="full")
    assert sorted(rows.columns["scorer"]) == ["chance", "popularity"]


def test_what_a_run_says_of_itself(runs):
    assert "<Run fedmf on " in repr(runs[1]) and "at round" in repr(runs[1])
    assert repr(runs[1]).endswith("in memory>")


def test_a_run_of_data_in_memory_asks_for_its_data(small, tmp_path):
    data = hushrec.load(ratings(small), user="who", item="film", time="day")
    hushrec.train(data, "popularity", out=tmp_path / "run")
    run = hushrec.Run.open(tmp_path / "run")
    assert run.recommend(1)
    with pytest.raises(ConfigError, match=r"no data set or file 'frame'.*Run\.open\(path, data\)"):
        run.evaluate()


def test_exporting(small, tmp_path):
    run = hushrec.train(small, "fednext")
    assert sorted(p.name for p in run.export(tmp_path / "bundle").iterdir())


# ------------------------------------------------------------------------------------- rows


ROWS = Rows({"user": ["a", "b", "c"], "score": [0.5, 0.25, 1.0]})


def test_rows_go_into_any_frame():
    assert ROWS.to_pandas().equals(pandas.DataFrame(ROWS.columns))
    assert ROWS.to_polars().equals(polars.DataFrame(ROWS.columns))
    assert polars.DataFrame(ROWS).equals(ROWS.to_polars())  # by Arrow's stream
    assert pandas.DataFrame(list(ROWS)).equals(ROWS.to_pandas())
    assert ROWS.to_arrow().to_pydict() == ROWS.columns


def test_rows_are_a_sequence():
    assert len(ROWS) == 3 and ROWS[0] == {"user": "a", "score": 0.5}
    assert [row["user"] for row in ROWS[1:]] == ["b", "c"]
    assert ROWS.where(user="b").columns == {"user": ["b"], "score": [0.25]}
    assert len(Rows({})) == 0


def test_long_tables_are_shown_short():
    assert repr(ROWS).splitlines() == [
        "user  score",
        "a     0.5000",
        "b     0.2500",
        "c     1.0000",
    ]
    long = Rows({"n": range(1_000)})
    assert repr(long).splitlines()[5:8] == ["4", "… 990 more rows …", "995"]
    assert "<td>&lt;b&gt;</td>" in Rows({"n": ["<b>"]})._repr_html_()
    assert "1,000 rows" in long._repr_html_()
