"""`hushrec analyse` and `hushrec compare --plot`, from the outside."""

import json
import xml.etree.ElementTree as ET

import pytest
from click.testing import CliRunner

from hushrec.cli import main
from hushrec.reporting.tables import human_size


def hushrec(*words):
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, method, *more in (
        ("fedmf", "fedmf"),
        ("fedrap", "fedrap", "--set", "epochs=1"),
        ("fedrkg", "fedrkg", "--set", "interval=2", "--protocol", "published"),
        ("fednext", "fednext"),
    ):
        small = [] if method == "fednext" else ["--set", "d=4"]
        words = ["--method", method, "--rounds", 3, *small, *more, "--threads", 1]
        result = hushrec("train", *words, "--out", folder / name, "--json")
        assert result.exit_code == 0, result.output
    return folder


def test_everything_a_run_has(runs):
    found = json.loads(hushrec("analyse", runs / "fedrkg", "--json").stdout)
    assert found["protocol_mark"] == "published protocol (leaks the held-out item)"
    assert set(found["tables"]) == {"own", "global", "random"}
    assert set(found["groups"]["hr@10"]["groups"]) == {"cold", "warm", "distinct", "followers"}
    assert [effect["round"] for effect in found["guidance"]] == [3]
    shown = hushrec("analyse", runs / "fedrkg")
    for words in ("leaks", "another user's", "followers", "worst 10 %", "away"):
        assert words in shown.stdout
    assert "…" not in shown.stdout  # a file is as wide as its figures


def test_what_a_method_lacks_is_said_and_refused_when_asked_for(runs):
    shown = hushrec("analyse", runs / "fedmf")
    assert shown.exit_code == 0
    assert "tables: fedmf keeps no item table on the clients" in shown.stdout
    assert "guidance: fedmf has no guidance rounds" in shown.stdout
    for only in ("tables", "guidance"):
        refused = hushrec("analyse", runs / "fedmf", "--only", only)
        assert refused.exit_code == 2
        assert refused.stderr.startswith("hushrec: fedmf ")
        assert refused.stdout == ""
    alone = json.loads(hushrec("analyse", runs / "fedmf", "--only", "groups", "--json").stdout)
    assert "tables" not in alone
    assert hushrec("analyse", runs / "nothing").exit_code == 2


def test_the_sparsity_of_c_is_in_summary_and_analysis(runs):
    summary = json.loads((runs / "fedrap" / "summary.json").read_text())
    names = {
        "exact zeros in C",
        "entries of C below 0.0001",
        "rows of C that are all zero",
    }
    assert set(summary["model"]) == names
    assert (
        json.loads(hushrec("analyse", runs / "fedrap", "--json").stdout)["model"]
        == (summary["model"])
    )
    assert "exact zeros in C" in hushrec("analyse", runs / "fedrap").stdout


def test_several_curves_in_one_picture(runs, tmp_path):
    file = tmp_path / "curves.svg"
    three = [runs / name for name in ("fedmf", "fedrap", "fedrkg")]
    result = hushrec("compare", *three, "--plot", file)
    assert result.exit_code == 0, result.stderr
    tree = ET.parse(file)
    lines = tree.iter("{http://www.w3.org/2000/svg}polyline")
    assert len([line for line in lines if "curve" in line.attrib["class"]]) == 6  # two metrics
    words = "".join(tree.getroot().itertext())
    assert "Validation HR@10" in words
    assert "fedrkg (leaks)" in words
    wrong = hushrec("compare", *three, "--plot", tmp_path / "no" / "where.svg")
    assert wrong.exit_code == 2
    assert "cannot write" in wrong.stderr
    unknown = hushrec("compare", *three, "--metric", "hr@7", "--plot", file)
    assert unknown.exit_code == 2
    assert "did not record hr@7" in unknown.stderr


def test_a_run_that_tries_settings_is_a_level_line(runs, tmp_path):
    """Its rounds are no learning curve, and without it the best run would be missing."""
    both, file = [runs / name for name in ("fedmf", "fednext")], tmp_path / "curves.svg"
    lines = (runs / "fednext" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [line["phase"] for line in found] == ["count", "select scalars", "select scalars"]
    assert hushrec("compare", *both, "--plot", file).exit_code == 0
    polylines = list(ET.parse(file).iter("{http://www.w3.org/2000/svg}polyline"))
    drawn = [[tuple(p.split(",")) for p in line.attrib["points"].split()] for line in polylines]
    assert [len(points) for points in drawn] == [3, 2, 3, 2]
    (left, height), (right, same) = drawn[1]
    assert (left, right) == ("0.00", "100.00") and height == same
    dots = ET.parse(file).iter("{http://www.w3.org/2000/svg}circle")
    assert [dot.attrib["class"] for dot in dots] == ["curve c1"] * 2
    assert hushrec("report", *both, "--out", tmp_path / "page.html").exit_code == 0
    section = (tmp_path / "page.html").read_text().partition('id="convergence"')[2]
    selected = json.loads((runs / "fednext" / "summary.json").read_text())["selected_round"]
    value = found[selected - 1]["valid"]["full"]["hr@10"]
    assert f"fednext {value:.4f} at round {selected}" in section
    costs = section.partition('id="costs"')[2]
    sent = json.loads((runs / "fednext" / "summary.json").read_text())["communication"]
    assert "To serve" in costs and human_size(sent["serving_bytes"]) in costs


def test_a_page_is_of_one_data_set(runs, tmp_path):
    file = tmp_path / "ratings.csv"
    rows = [f"u{n % 12},i{(5 * n) % 11},{n}" for n in range(130)]
    file.write_text("\n".join(["user,item,time", *rows]))
    for method in ("popularity", "fednext"):
        words = ("train", "--data", file, "--method", method, "--out", tmp_path / method)
        assert hushrec(*words, "--quiet").exit_code == 0
    both = [tmp_path / "popularity", tmp_path / "fednext"]
    refused = hushrec("report", runs / "fedmf", *both, "--out", tmp_path / "page.html")
    assert refused.exit_code == 2
    assert "these are of demo, ratings: write a page for each" in " ".join(refused.stderr.split())
