"""The runner of a results grid: resumable, with commands and tests of significance."""

import contextlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hushrec.config import make_experiment, preset_names
from hushrec.methods.base import method_names

FOLDER = Path(__file__).parents[1] / "experiments" / "personal-tables"
spec = importlib.util.spec_from_file_location("grid_runner", FOLDER / "run.py")
runner = importlib.util.module_from_spec(spec)
sys.modules["grid_runner"] = runner
spec.loader.exec_module(runner)

GRID = """
title = "A grid"

[[cell]]
name = "popularity"
data = "demo"
method = "popularity"

[[cell]]
name = "own"
data = "demo"
method = "pfedrec"
rounds = 3
seeds = 2
set = { d = 4, "evaluation.every" = 3 }
against = "popularity"

[[cell]]
name = "later"
data = "demo"
method = "not-yet-there"
"""


@pytest.fixture
def grid(tmp_path):
    file = tmp_path / "grid.toml"
    file.write_text(GRID)
    return ["--grid", str(file), "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]


def test_a_grid_is_run_once_and_gone_on_with(grid, tmp_path, capfd, monkeypatch):
    runner.main(grid)
    results = json.loads((tmp_path / "results.json").read_text())
    assert [r["name"] for r in results] == ["popularity", "own"]
    own = results[1]
    assert own["command"] == (
        "hushrec train --data demo --method pfedrec --protocol honest --rounds 3 --seeds 2 "
        "--set d=4 --set evaluation.every=3"
    )
    summary = json.loads((tmp_path / "runs/demo/honest/own/summary.json").read_text())
    assert own["test"]["full"]["hr@10"] == summary["test"]["full"]["hr@10"]
    assert own["against"]["name"] == "popularity"
    p = own["against"]["ndcg@10"]["p"]
    assert own["against"]["ndcg@10"]["significant"] == (p < 0.05)
    page = (tmp_path / "results.md").read_text()
    assert page.startswith("# A grid")
    assert own["command"] in page
    assert f"{own['test']['full']['ndcg@10']:.4f} ±" in page
    assert "left out: the method not-yet-there is not installed" in capfd.readouterr().err
    # Again: nothing is trained. With one seed's result gone, only that one is.
    calls = []
    monkeypatch.setattr(runner, "run_cell", lambda cell, *rest: calls.append(cell.name))
    runner.main(grid)
    assert calls == []
    (tmp_path / "runs/demo/honest/own/summary.json").unlink()
    runner.main(grid)
    assert calls == ["own"]
    monkeypatch.undo()
    runner.main(grid)
    assert json.loads((tmp_path / "results.json").read_text())[1]["test"] == own["test"]


def test_what_was_run_elsewhere_stays_and_tests_of_other_figures_go(grid, tmp_path, monkeypatch):
    cells = runner.read_grid(tmp_path / "grid.toml")[1]
    own, popular = cells[1], cells[0]
    found = {c.name: {"command": c.command, "test": c.name, "against": None} for c in cells[:2]}
    tested = {**found["own"], "against": {"name": "popularity", "ndcg@10": {"p": 0.5}}}
    before = {popular.command: found["popularity"], own.command: tested}
    runs, done = tmp_path / "runs", set()
    assert runner.all_results(cells, runs, before) == [found["popularity"], tested]
    assert runner.all_results(cells[:1], runs, before) == [found["popularity"]]

    monkeypatch.setattr(runner, "is_done", lambda cell, _: cell.name in done)
    monkeypatch.setattr(runner, "result", lambda cell, _: found[cell.name])
    done.add("own")  # its run alone: with the figures from before the test stands
    assert runner.all_results(cells, runs, before)[1] == tested
    done.add("popularity")
    found["popularity"]["test"] = "other"
    before[popular.command] = {**found["popularity"], "test": "popularity"}
    assert runner.all_results(cells, runs, before)[1]["against"] is None

    (runs / own.folder).mkdir(parents=True)
    (runs / own.folder / runner.MARK).touch()
    done.clear()
    assert runner.all_results(cells, runs, {})[0]["diverged"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("against = ", "#"), None),
        (('against = "popularity"', 'against = "nobody"'), "which is no cell"),
        (('name = "later"', 'name = "own"'), "two cells are called demo/honest/own"),
        (("rounds = 3", "round = 3"), "round"),
    ],
)
def test_a_wrong_grid_is_refused(tmp_path, change, words):
    file = tmp_path / "grid.toml"
    file.write_text(GRID.replace(*change))
    if words is None:
        assert len(runner.read_grid(file)[1]) == 3
        return
    with pytest.raises(SystemExit, match=words):
        runner.read_grid(file)


@pytest.mark.parametrize("folder", ["personal-tables", "winning"])
def test_the_grids_that_ship(folder):
    """Every cell can be run, or is left out with the reason."""
    grid = FOLDER.parent / folder / "grid.toml"
    cells, installed = runner.read_grid(grid)[1], method_names()
    words = [sys.executable, FOLDER / "run.py", "--list", "--grid", grid]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stderr.splitlines()
    assert len(lines) == len(cells)
    for cell, line in zip(cells, lines, strict=True):
        assert cell.folder in line
        ready = cell.method in installed and (
            cell.preset is None or cell.preset in preset_names(cell.method)
        )
        assert ("left out" in line) == (not ready)
        if ready:  # names and options are those that `hushrec train` takes
            make_experiment(cell.data, cell.method, preset=cell.preset, settings=cell.set)


def test_a_cell_with_several_data_sets_is_one_on_each(tmp_path, monkeypatch):
    file = tmp_path / "grid.toml"
    file.write_text(GRID.replace('data = "demo"', 'data = ["demo", "other/one"]'))
    cells = runner.read_grid(file)[1]
    assert [cell.folder for cell in cells[:4]] == [
        "demo/honest/popularity",
        "other-one/honest/popularity",
        "demo/honest/own",
        "other-one/honest/own",
    ]
    calls = []
    monkeypatch.setattr(runner, "run_cell", lambda cell, *rest: calls.append(cell.folder))
    where = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path), "--data", "other/one"]
    runner.main(["--grid", str(file), *where])
    assert calls == ["other-one/honest/popularity", "other-one/honest/own"]


def test_a_data_set_may_have_words_of_its_own(tmp_path):
    file = tmp_path / "grid.toml"
    words = 'on.two = { rounds = 5, set = { "evaluation.every" = 1 } }'
    grid = GRID.replace('against = "popularity"', words).replace('"demo"', '["one", "two"]')
    file.write_text(grid)
    one, two = runner.read_grid(file)[1][2:4]
    assert (one.rounds, one.seeds, one.set) == (3, 2, {"d": 4, "evaluation.every": 3})
    assert (two.rounds, two.seeds, two.set) == (5, 2, {"d": 4, "evaluation.every": 1})
    file.write_text(grid.replace("on.two", "on.three"))
    with pytest.raises(SystemExit, match=r"own: on\.three is none of its data sets"):
        runner.read_grid(file)


def test_the_overview_says_which_differences_count():
    def row(name, data, ndcg, against=None, split="leave-one-out"):
        test = {"full": {"hr@10": 2 * ndcg, "ndcg@10": ndcg}}
        words = {"name": name, "data": data, "protocol": "honest", "split": split}
        return {**words, "test": test, "against": against}

    def against(difference, significant):
        return {"name": "base", "ndcg@10": {"difference": difference, "significant": significant}}

    rows = [
        row("base", "one", 0.1),
        row("base", "two", 0.1),
        row("own", "one", 0.2, against(0.1, True)),
        row("own", "two", 0.05, against(-0.05, True)),
        row("same", "two", 0.11, against(0.01, False)),
        row("late", "two", 0.3, split="time"),
    ]
    assert "| same | base | diverged | 0.220 / 0.110 = |" in runner.overview(
        rows, {("same", "one")}
    )
    lines = runner.overview(rows)
    assert "| base |  | 0.200 / 0.100 | 0.200 / 0.100 |" in lines
    assert "| own | base | 0.400 / 0.200 ▲ | 0.100 / 0.050 ▼ |" in lines
    assert "| same | base | not run | 0.220 / 0.110 = |" in lines
    assert not any("late" in line for line in lines)
    assert runner.overview(rows[:1]) == []


def test_the_picture_is_of_own_tables_against_their_global_only_variants():
    ndcg = {"difference": -0.1, "interval": [-0.2, -0.05], "significant": True}
    own = {"name": "own", "data": "one", "protocol": "honest"}
    own["against"] = {"name": "own-global", "ndcg@10": ndcg}
    other = {**own, "name": "other", "against": {"name": "popularity", "ndcg@10": ndcg}}
    alone = {**own, "name": "alone", "against": None}
    ((name, dots),) = runner.own_tables([other, alone, own])
    assert name == "own"
    assert (dots[0].name, dots[0].value, dots[0].interval) == ("one", -0.1, (-0.2, -0.05))
    assert dots[0].strong


@pytest.mark.parametrize(("code", "tries"), [(runner.DIVERGED, 1), (runner.REFUSED, 2)])
def test_a_cell_without_result_does_not_stop_the_others(tmp_path, monkeypatch, code, tries):
    file = tmp_path / "grid.toml"
    file.write_text(GRID.replace("rounds = 3", "rounds = 2"))
    done = []

    def run_cell(cell, *rest):
        done.append(cell.name)
        if cell.name == "popularity":
            (tmp_path / "runs" / cell.folder).mkdir(parents=True, exist_ok=True)
            raise subprocess.CalledProcessError(code, "hushrec")

    monkeypatch.setattr(runner, "run_cell", run_cell)
    where = ["--grid", str(file), "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match="no result: demo/honest/popularity"):
        runner.main(where)
    assert done == ["popularity", "own"]
    with contextlib.suppress(SystemExit):
        runner.main(where)
    assert done.count("popularity") == tries, "a disk may have room again; divergence stays"
