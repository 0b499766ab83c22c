"""`hushrec privacy`: questions from the command line."""

import json
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from hushrec.cli import main

FIXED = ["--sampling", "fixed", "--neighbours"]
RUN = ["--population", "4800", "--cohort", "20", "--rounds", "1000", "--delta", "1e-6"]


def ask(*arguments, code=0):
    done = CliRunner().invoke(main, ["privacy", *arguments])
    assert done.exit_code == code, done.output
    return done.output


def test_epsilon():
    said = ask("epsilon", "--noise", "1", *RUN, *FIXED, "replace-one")
    assert "epsilon 0.9926 at delta 1e-06" in said
    assert "twice the bound" in said
    assert "used or replaced, is right with a probability of at most 72.96 %" in said
    assert "odds of 2.7 to 1 (e^0.9926)" in " ".join(said.split())
    answer = json.loads(ask("epsilon", "--noise", "1", *RUN, *FIXED, "replace-one", "--json"))
    assert answer["epsilon"] == pytest.approx(0.9926, abs=1e-4)
    poisson = json.loads(ask("epsilon", "--noise", "1", *RUN, "--json"))
    assert poisson["epsilon"] == pytest.approx(0.85, abs=0.01)
    assert poisson["neighbours"] == "zero-out-one"


def test_noise_and_epsilon_are_inverse():
    setting = ["--population", "943", "--rounds", "100", "--sampling", "none", "--delta", "1e-4"]
    found = json.loads(ask("noise", "--epsilon", "4", *setting, "--json"))
    back = json.loads(ask("epsilon", "--noise", str(found["noise_multiplier"]), *setting, "--json"))
    assert back["epsilon"] == found["epsilon"]
    assert 3.96 <= back["epsilon"] <= 4


def test_tables():
    rows = json.loads(ask("tables", "--json"))
    assert len(rows) == 36
    assert all(abs(row["printed"] - row["paper_tables"]) < 1e-3 for row in rows)
    said = ask("tables")
    assert "table 3, MovieLens" in said
    assert "50.1537" in said


def test_plot(tmp_path):
    setting = ["--population", "943", "--rounds", "50", "--sampling", "none", "--delta", "1e-4"]
    out = tmp_path / "eps.svg"
    found = json.loads(ask("plot", "--noise", "9", *setting, "--out", str(out), "--json"))
    values = [point["epsilon"] for point in found["curve"]]
    assert values == sorted(values)
    assert found["curve"][-1]["rounds"] == 50
    root = ElementTree.parse(out).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.find(".//{*}polyline") is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["epsilon", "--noise", "1", *RUN[:-1], "0.1"], "1 / population"),
        (["epsilon", "--noise", "1", *RUN, "--sampling", "none"], "leave out --cohort"),
        (["epsilon", "--noise", "1", *RUN[:2], *RUN[4:]], "needs --cohort"),
        (
            ["epsilon", "--noise", "1", *RUN, *FIXED, "zero-out-one"],
            "neighbours = replace-one",
        ),
        (["epsilon", "--noise", "1", *RUN, "--neighbours", "replace-one"], "fixed-size sampling"),
        (["epsilon", "--noise", "1", *RUN, "--sampling", "fixed", "--cohort", "2.5"], "whole"),
        (["noise", "--epsilon", "-1", *RUN], "not in the range"),
        (["plot", "--noise", "0", *RUN], "larger --noise"),
        (["plot", "--noise", "1", *RUN, "--rounds", "1"], "two rounds"),
        (["plot", "--noise", "1", *RUN, "--rounds", "2", "--out", "/no/such/x.svg"], "write"),
    ],
)
def test_refusals_say_what_to_change(arguments, message):
    assert message in ask(*arguments, code=2)


@pytest.mark.parametrize("name", ["epsilon", "noise", "compose", "tables", "plot"])
def test_help_has_examples(name):
    assert f"hushrec privacy {name}" in ask(name, "--help")
