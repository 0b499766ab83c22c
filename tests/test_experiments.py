"""The experiments that have scripts of their own: results, drawings and tables agree with them."""

import importlib.util
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from experiments.drawings import Trend, standalone_forest, standalone_trends, trends

from hushrec.reporting.plots import Dot

FOLDER = Path(__file__).parents[1] / "experiments/privacy-utility"


@pytest.fixture
def measure(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("measure", FOLDER / "measure.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("settings.toml", "results.json"):
        (tmp_path / name).write_text((FOLDER / name).read_text("utf-8"), "utf-8")
    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results.json")
    return module


def test_the_drawings_show_the_results(measure, tmp_path):
    done = CliRunner().invoke(measure.main, ["draw"])
    assert done.exit_code == 0, done.output
    drawn = sorted(file.name for file in tmp_path.glob("*.svg"))
    assert drawn == sorted(file.name for file in FOLDER.glob("*.svg"))
    for name in drawn:
        assert (tmp_path / name).read_text("utf-8") == (FOLDER / name).read_text("utf-8")


def test_every_point_kept_its_epsilon():
    for point in json.loads((FOLDER / "results.json").read_text("utf-8")):
        if point["epsilon"] != "inf":
            assert 0.99 * point["epsilon"] <= point["guaranteed_epsilon"] <= point["epsilon"]


def test_a_point_is_measured_and_replaces_its_like(measure, tmp_path, monkeypatch, small):
    monkeypatch.setattr(measure, "read_data", lambda name, settings: small)
    before = json.loads((tmp_path / "results.json").read_text("utf-8"))
    arguments = ["run", "--data", "ml-1m", "--method", "fednext", "--epsilon", "8"]
    done = CliRunner().invoke(measure.main, arguments)
    assert done.exit_code == 0, done.output
    after = json.loads((tmp_path / "results.json").read_text("utf-8"))
    assert len(after) == len(before)
    changed = [one for one, other in zip(after, before, strict=True) if one != other]
    assert [(p["method"], p["epsilon"], p["seed"]) for p in changed] == [("fednext", 8.0, 0)]


def test_unknown_data_is_refused(measure):
    refused = CliRunner().invoke(measure.main, ["run", "--data", "nothing", "--method", "fednext"])
    assert refused.exit_code == 2
    assert "ml-1m, viewers" in refused.output


def test_curves_leave_out_what_was_not_measured():
    rows = [Trend("one <b>", (0.1, None, 0.3)), Trend("two", (0.2, 0.2, None))]
    drawing = trends(rows, ["a", "b", "c"], "label")
    assert drawing.count("<circle") == 4
    assert drawing.count('class="curve"') == 2
    assert trends(rows, ["a", "b", "c"], "label", joined=False).count('class="curve"') == 0
    assert "<b>" not in drawing
    assert standalone_trends(drawing, ["one <b>", "two"], "title").count("one &lt;b&gt;") == 3


def test_a_forest_stands_around_zero():
    rows = [Dot("here <b>", -0.02, (-0.03, -0.01), strong=True), Dot("there", -0.00001)]
    drawing = standalone_forest([("method", rows), ("other", rows[1:])], "title")
    assert drawing.count("<circle") == 3
    assert drawing.count('class="interval strong"') == 1
    assert drawing.count('class="zero"') == 1
    assert (drawing.count("−0.0200"), drawing.count("+0.0000")) == (1, 2)
    assert "<b>" not in drawing


def test_people_that_dp_privrec_needs_are_counted():
    pytest.importorskip("torch", reason="needs the 'neural' extra")
    file = FOLDER.parent / "privrec" / "population.py"
    spec = importlib.util.spec_from_file_location("population", file)
    population = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(population)
    asked = population.settings_of("dp-paper")
    assert asked["cohort.size"] == 30 and not any(key.startswith("privacy") for key in asked)
    done = CliRunner().invoke(population.main, ["--viewers", "600", "--rounds", "4"])
    assert done.exit_code == 0, done.output
    row = [cell.strip() for cell in done.output.splitlines()[-1].strip("|").split("|")]
    assert row[:2] == ["600", str(round(30 / 4228 * 0.7 * 600))]
    assert 0 < float(row[2]) < 2  # epsilon of a few rounds
    assert len(row) == 7 and all(0 <= float(value) <= 1 for value in row[4:])
