"""`hushrec analyse` and `hushrec compare --plot`, from the outside."""

import json
import xml.etree.ElementTree as ET

import pytest
from click.testing import CliRunner

from hushrec.cli import main


def hushrec(*words):
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, method, *more in (
        ("fedmf", "fedmf"),
        ("fedrap", "fedrap", "--set", "epochs=1"),
        ("fedrkg", "fedrkg", "--set", "interval=2", "--protocol", "published"),
    ):
        words = ["--method", method, "--rounds", 3, "--set", "d=4", *more, "--threads", 1]
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
