"""`recommend`, `similar` and `export`: whom they serve, from what, and what they refuse."""

import csv
import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

import hushrec
from hushrec.cli import main
from hushrec.runs.release import release
from hushrec.testing import taste_world

CENTRAL = {"privacy.mode": "central", "privacy.epsilon": 8.0}


def say(*words):
    return CliRunner().invoke(main, [str(word) for word in words])


def listed(*words):
    done = say("recommend", *words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["recommendations"]


def refused(*words):
    done = say(*words)
    assert done.exit_code == 2, done.output
    return " ".join(done.stderr.split())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run of the demo, its bundle, a release with a bundle and one without, and lists of ids."""
    folder = tmp_path_factory.mktemp("served")
    run = hushrec.train("demo", "fednext", out=folder / "run")
    run.export(folder / "bundle", precision="single")
    world = replace(taste_world(), items_declared=True)
    for method, options in (("fednext", {"price": 5.0}), ("fedmf", {"d": 4})):
        private = hushrec.train(world, method, settings=CENTRAL | options)
        release(private, folder / f"released-{method}")
    (folder / "history.txt").write_text("film-0012\nfilm-0340\n")
    (folder / "nothing.txt").write_text("\n")
    (folder / "strange.txt").write_text("x\ny\n")
    (folder / "three.txt").write_text("film-0001\nfilm-0002\nfilm-0012\n")
    return folder


def test_somebody_new_gets_the_popular_items(place):
    new = listed(place / "run", "--new")
    assert {line["because"] for line in new} == {"popular"}
    assert listed(place / "run", "--history", place / "nothing.txt") == new
    assert listed(place / "run", "--history", place / "strange.txt") == new
    done = say("recommend", place / "run", "--history", place / "strange.txt")
    assert "2 of 2 items are not in the catalogue; the popular items are listed" in done.stderr
    assert listed(place / "bundle", "--new") == new


def test_the_table_says_why(place):
    done = say("recommend", place / "run", "--user", "viewer-0001", "-k", "3")
    assert done.stdout.split()[:4] == ["title", "item", "score", "because"]
    assert "often after The" in done.stdout


def test_filters_are_files_and_conditions(place):
    ids = {f"film-{n:04d}" for n in (1, 2, 12)}
    history = ("--history", place / "history.txt", "-k", "1000")
    only = listed(place / "run", *history, "--only", place / "three.txt")
    assert {line["item"] for line in only} == ids - {"film-0012"}
    seen = listed(place / "run", *history, "--only", place / "three.txt", "--seen")
    assert {line["item"] for line in seen} == ids
    assert listed(place / "bundle", *history, "--only", place / "three.txt", "--seen") == seen
    rest = listed(place / "run", *history, "--without", place / "three.txt")
    assert not ids & {line["item"] for line in rest} and len(rest) == 1000
    data = hushrec.load("demo")
    genres = data.item_features["genres"]
    comedies = set(data.items[genres.flags[:, genres.names.tolist().index("Comedy")]].tolist())
    found = listed(place / "run", *history, "--where", "genres=Comedy")
    assert {line["item"] for line in found} == comedies - {"film-0012", "film-0340"}
    assert "did you mean 'genres'" in refused(
        "recommend", place / "run", "--user", "viewer-0001", "--where", "genre=Comedy"
    )


def test_everybody_goes_into_a_file(place, tmp_path):
    done = say("recommend", place / "run", "--all-users", "--out", tmp_path / "l.csv", "-k", "2")
    assert done.exit_code == 0 and done.stdout.strip() == str(tmp_path / "l.csv")
    with (tmp_path / "l.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * hushrec.load("demo").n_users
    one = listed(place / "run", "--user", "viewer-0007", "-k", "2")
    assert [row["item"] for row in rows if row["user"] == "viewer-0007"] == [x["item"] for x in one]
    words = ("--part", "test", "--out", tmp_path / "l.trec", "--qrels", tmp_path / "q", "--json")
    written = json.loads(say("recommend", place / "run", "--all-users", *words).stdout)
    assert written == {"lists": str(tmp_path / "l.trec"), "qrels": str(tmp_path / "q")}
    assert (tmp_path / "q").read_text().startswith("viewer-0001 0 film-")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "say whom to recommend to, once: --user ID, --history FILE, --new or --all-users"),
        (["--user", "viewer-0001", "--new"], "say whom to recommend to, once"),
        (["--new", "--all-users"], "say whom to recommend to, once"),
        (["--user", "anna"], "with --history FILE; --new lists the popular items"),
        (["--user", "viewer-0001", "--out", "l.csv"], "--out goes with --all-users"),
        (["--new", "--part", "test"], "--part goes with --all-users"),
        (["--all-users"], "--all-users needs --out FILE"),
        (["--all-users", "--out", "l.csv", "--qrels", "q"], "add --part test"),
        (["--all-users", "--out", "l.txt"], "ends in one of .csv, .jsonl, .parquet, .trec"),
        (["--all-users", "--out", "l.csv", "--feature", "a=b"], "leave out --all-users"),
        (["--new", "--feature", "a"], "--feature a: expected NAME=VALUE"),
    ],
)
def test_what_does_not_go_together_is_refused(place, tmp_path, monkeypatch, words, reason):
    monkeypatch.chdir(tmp_path)
    assert reason in refused("recommend", place / "run", *words)
    assert list(tmp_path.iterdir()) == []


def test_similar_items_of_a_run_and_of_a_bundle(place):
    done = say("similar", place / "run", "film-0012", "-k", "3", "--json")
    found = json.loads(done.stdout)
    assert found["item"] == "film-0012" and len(found["similar"]) == 3
    assert (
        json.loads(say("similar", place / "bundle", "film-0012", "-k", "3", "--json").stdout)
        == found
    )
    assert "did you mean 'film-" in refused("similar", place / "run", "film-12")
    assert "not in the catalogue" in refused("similar", place / "bundle", "film-12")


def test_the_bundle_of_one_user_serves_that_user(place, tmp_path):
    run = hushrec.train(taste_world(), "pfedrec", rounds=2, settings={"d": 4}, out=tmp_path / "r")
    assert (
        "pfedrec scores with parameters of single users: export the bundle of one user with "
        "--user ID" in refused("export", tmp_path / "r", tmp_path / "b")
    )
    unknown = refused("export", tmp_path / "r", tmp_path / "b", "--user", "user-99")
    assert "user 'user-99' is unknown to this model" in unknown
    assert not (tmp_path / "b").exists()
    done = say(
        "export", tmp_path / "r", tmp_path / "b", "--user", "user-01", "--precision", "single"
    )
    count = len(run.model.data.history(run.model.indices(["user-01"])).positives.values)
    assert f"holds own parameters and {count} items of user 'user-01'" in done.stdout
    assert "items touched from now on are only left out" in done.stdout
    mine, theirs = listed(tmp_path / "b", "--user", "user-01"), run.recommend("user-01")
    assert [line["item"] for line in mine] == [line.item for line in theirs]
    (tmp_path / "since.txt").write_text(mine[0]["item"])
    assert listed(tmp_path / "b", "--history", tmp_path / "since.txt")[:9] == mine[1:]
    for whom in (["--new"], ["--user", "user-02"]):
        said = refused("recommend", tmp_path / "b", *whom)
        assert "is the bundle of one user, who is somebody else" in said and "user-01" not in said
    again = say("export", place / "run", tmp_path / "c", "--user", "viewer-0001", "--json")
    facts = json.loads(again.stdout)
    assert (facts["personal"], facts["fixed"]) == (True, False)


def test_a_release_serves_histories_or_says_what_to_do(place, tmp_path):
    (tmp_path / "h.txt").write_text("item-03\nitem-08\n")
    folder = place / "released-fednext"
    lines = listed(folder, "--history", tmp_path / "h.txt", "-k", "5")
    assert len(lines) == 5
    assert {line["because"] for line in listed(folder, "--new")} == {"popular"}
    assert "knows no users: give a history" in refused("recommend", folder, "--user", "user-01")
    assert "has no item features" in refused("recommend", folder, "--new", "--where", "a=b")
    without = refused("recommend", place / "released-fedmf", "--new")
    assert "is a release without a bundle for devices: recommend from the run" in without
    for command in ("evaluate", "export"):
        more = [tmp_path / "b"] if command == "export" else []
        assert "is a release: it has neither results nor users" in refused(command, folder, *more)
