import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from hushrec.cli.data import data_commands
from hushrec.data import catalog
from hushrec.data.sources import DataFolder
from hushrec.errors import ConfigError, DataError


@pytest.fixture
def run(cache):
    def run(*arguments):
        return CliRunner().invoke(data_commands, arguments, catch_exceptions=False)

    return run


@pytest.fixture
def ratings(tmp_path):
    path = tmp_path / "ratings.csv"
    path.write_text("user,item,rating,time\na,x,1,5\na,y,1,5\nb,x,2,1\nb,x,3,2\n")
    return path


def test_list(run):
    text = run("list").stdout
    for word in ("ml-100k", "100,000", "not here", "built in", "non-commercial"):
        assert word in text


def test_list_json(run, ratings):
    run("import", str(ratings), "--name", "mine")
    result = run("list", "--json")
    entries = {entry["name"]: entry for entry in json.loads(result.stdout)}
    assert list(entries) == catalog.names()
    assert entries["ml-1m"]["rows"] == 1_000_209
    assert entries["ml-1m"]["present"] is False
    assert entries["demo"]["present"] is True
    assert entries["mine"]["rows"] == 4
    assert entries["mine"]["where"].endswith("imported/mine.npz")
    assert "no redistribution" in entries["ml-1m"]["licence"]


def test_info_of_a_file(run, ratings):
    facts = json.loads(run("info", str(ratings), "--json").stdout)
    assert (facts["rows"], facts["pairs"], facts["repeats"]) == (4, 3, 1)
    assert facts["density"] == 0.75
    assert facts["rows_per_user"] == {"min": 2, "median": 2.0, "max": 2}
    assert facts["share_of_users_tied_at_latest_time"] == 0.5
    assert facts["share_of_rows_tied_with_another"] == 0.5
    assert "rows of one time together" in facts["split"]
    assert any(note.startswith("all 4 rows count as liked") for note in facts["notes"])
    text = run("info", str(ratings)).stdout
    assert "repeats" in text
    assert "0.75" in text


def test_info_says_which_split_follows(run, tmp_path):
    plain, receipts = tmp_path / "plain.csv", tmp_path / "receipts.csv"
    plain.write_text("who,what\na,x\na,y\nb,x\nb,y\n")
    facts = json.loads(run("info", str(plain), "--user", "who", "--item", "what", "--json").stdout)
    assert "an order drawn from the seed" in facts["split"]
    bought = [f"{u},{i},{day}" for u in "ab" for day in (1, 2) for i in ("tea", "milk", day)]
    receipts.write_text("\n".join(["user,item,date", *bought]))
    facts = json.loads(run("info", str(receipts), "--json").stdout)
    assert facts["has_baskets"] and facts["share_of_rows_tied_with_another"] == 1
    assert "rows of one time together" in facts["split"]
    assert any("split.kind = next-basket" in note for note in facts["notes"])


def test_info_of_a_named_data_set(run, data_dir, monkeypatch):
    monkeypatch.setenv("HUSHREC_DATA", str(data_dir))
    facts = json.loads(run("info", "ml-100k", "--json").stdout)
    assert facts["files"] == dict.fromkeys(("u.data", "u.item", "u.user", "u.genre"), "ok")
    assert facts["features"]["item"]["genres"] == "any of 19 categories"
    assert "no redistribution" in facts["licence"]
    assert "Harper" in facts["citation"]
    text = run("info", "ml-100k").stdout
    assert "u.data: ok" in text


def test_info_of_demo(run):
    facts = json.loads(run("info", "demo", "--json").stdout)
    assert facts["where"] == "built in"
    assert set(facts["features"]["user"]) == {"age group", "region", "device"}


def test_import_then_info(run, tmp_path):
    path = tmp_path / "odd.txt"
    path.write_text("9^ann^tea\n3^bob^milk\n")
    columns = ("--user", "1", "--item", "2", "--time", "0", "--delimiter", "^")
    result = run("import", str(path), "--name", "odd", *columns, "--json")
    assert json.loads(result.stdout)["users"] == 2
    assert json.loads(run("info", "odd", "--json").stdout)["has_time"] is True


def test_fetch_shows_terms_and_keeps_stdout_clean(run, tmp_path, monkeypatch):
    def pretend(name, progress):
        progress(5, 10)
        progress(10, 10)
        return DataFolder(tmp_path)

    monkeypatch.setattr("hushrec.cli.data.fetch", pretend)
    result = run("fetch", "ml-100k", "--json")
    assert json.loads(result.stdout)["files"]["u.data"] == "missing"
    assert "no redistribution" in " ".join(result.stderr.split())
    assert "missing" in run("fetch", "ml-100k").stdout


def test_errors_are_ours(run):
    with pytest.raises(ConfigError):
        run("info", "nothing")
    with pytest.raises(DataError):
        run("info", "ml-1m")
    with pytest.raises(DataError, match="no official download"):
        run("fetch", "frappe")
    with pytest.raises(DataError, match="no such file"):
        run("import", "none.csv", "--name", "x")


@pytest.mark.parametrize("command", ["list", "info", "fetch", "import"])
def test_help_has_examples(run, command):
    assert f"hushrec data {command}" in run(command, "--help").stdout
    assert "--json" in run(command, "--help").stdout


@pytest.fixture
def described(tmp_path):
    people = tmp_path / "people.csv"
    people.write_text("user,gender,age\nb,f,30\na,m,\nz,f,9\n")
    films = tmp_path / "films.csv"
    films.write_text("item,genres,year\ny,drama|war,1950\nx,,2000\n")
    return ["--users", str(people), "--items", str(films)]


def test_import_with_features(run, ratings, described):
    columns = ["--user-feature", "gender", "--user-feature", "age:number:0:100"]
    columns += ["--item-feature", "genres:set", "--item-feature", "year:number"]
    result = run("import", str(ratings), "--name", "mine", *described, *columns, "--json")
    features = json.loads(result.stdout)["features"]
    assert features["user"] == {"gender": "2 categories", "age": "30 to 30"}
    loaded = catalog.load("mine")  # users a, b; items x, y
    gender = loaded.user_features["gender"]
    assert gender.names[gender.codes].tolist() == ["m", "f"]
    age, genres = loaded.user_features["age"], loaded.item_features["genres"]
    assert np.isnan(age.values[0])
    assert (age.values[1], age.low, age.high) == (30, 0, 100)
    assert genres.flags.tolist() == [[False, False], [True, True]]
    assert loaded.item_features["year"].values.tolist() == [2000, 1950]


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ("height", "no column 'height'"),
        ("gender:number", "line 2, column 'gender': 'f' is not a number"),
        ("age:number:9:1", "must ascend"),
        ("age:integer", "NAME:number:LOW:HIGH"),
        ("gender:category:f|x", "line 3, column 'gender': 'm' is not among the categories"),
        ("gender:set:f|x", "line 3, column 'gender': 'm' is not among the categories"),
        ("gender:category:f|m|f", "name each category once"),
    ],
)
def test_a_feature_that_is_not_there_or_not_so(run, ratings, described, column, words):
    with pytest.raises(DataError, match=words):
        run("import", str(ratings), "--name", "mine", *described[:2], "--user-feature", column)


def test_features_are_declared_with_their_file(run, ratings, described):
    for arguments, words in (
        (described[:2], "both a file and the columns"),
        (["--item-feature", "genres"], "need the file that they are in: --items FILE"),
    ):
        with pytest.raises(ConfigError, match=words):
            run("import", str(ratings), "--name", "mine", *arguments)


def test_categories_are_declared_and_kept(run, ratings, described):
    columns = ["--user-feature", "gender:category:x|m|f", "--item-feature", "genres:set:war|drama"]
    run("import", str(ratings), "--name", "mine", *described, *columns)
    loaded = catalog.load("mine")
    gender, genres = loaded.user_features["gender"], loaded.item_features["genres"]
    assert gender.declared
    assert gender.names.tolist() == ["x", "m", "f"]  # as they were given
    assert gender.codes.tolist() == [1, 2]
    assert genres.names.tolist() == ["war", "drama"]
    assert genres.declared
    run("import", str(ratings), "--name", "found", *described, "--user-feature", "gender")
    assert not catalog.load("found").user_features["gender"].declared


def test_the_list_of_items_is_kept_with_an_import(run, ratings, described):
    run("import", str(ratings), "--name", "found")
    assert not catalog.load("found").items_declared
    (described_by := Path(described[3])).write_text("z\ny\nx\n")
    run("import", str(ratings), "--name", "mine", "--items", str(described_by))
    loaded = catalog.load("mine")
    assert loaded.items_declared
    assert loaded.items.tolist() == ["x", "y", "z"]
    for name in ("mine", "demo"):
        with pytest.raises(ConfigError, match="items= is for data that is a file"):
            run("info", name, "--items", str(described_by))
    said = json.loads(run("info", str(ratings), "--items", str(described_by), "--json").stdout)
    assert (said["items"], said["items_declared"]) == (3, True)
