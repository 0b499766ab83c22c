"""`hushrec node`, as a user meets it."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from hushrec.cli import main
from hushrec.federation.contract import Catalogue, Contract
from hushrec.federation.experiment import ExperimentRequest
from hushrec.testing import taste_world


@pytest.fixture
def node(tmp_path):
    experiment = ExperimentRequest("tastes", "pfedrec").experiment()
    agreed = Contract(experiment, Catalogue.of(taste_world()))
    agreed.write(tmp_path / "contract.hushrec")
    path = tmp_path / "shop.node"
    made = run("init", path, "--contract", tmp_path / "contract.hushrec", "--name", "shop")
    assert made.exit_code == 0
    assert "pfedrec" in made.output
    return path


def run(*words):
    return CliRunner().invoke(main, ["node", *map(str, words)])


def said(*words):
    done = run(*words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def test_a_node_from_beginning_to_end(node, tmp_path):
    (tmp_path / "rows.csv").write_text(
        "user,item,value,time\nana,item-01,5,10\nana,item-02,4,11\nben,item-01,3,12\nben,other,3,13\n"
    )
    taken = said("import", node, tmp_path / "rows.csv")
    assert taken == {"rows": 4, "users": 2, "unknown_items": 1}
    assert said("add", node, "cleo", "item-09", "--time", "14")["users"] == 1
    status = said("status", node)
    assert status["interactions"] == 5
    assert status["interactions_with_unknown_items"] == 1
    assert status["users"] == 3
    assert status["run"] is None
    assert said("forget", node, "ana")["interactions"] == 2
    assert said("status", node)["users"] == 2
    shown = run("status", node)
    assert shown.exit_code == 0
    assert "shop" in shown.output
    assert "ben" not in shown.output, "no user is named"


def test_one_person_is_enough(node, tmp_path):
    (tmp_path / "mine.csv").write_text("user,item\nme,item-01\nme,item-02\n")
    assert said("import", node, tmp_path / "mine.csv")["users"] == 1


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("import", "{node}", "{tmp}/nothing.csv"), "nothing.csv"),
        (("import", "{node}", "{tmp}/bad.csv"), "bad.csv, line 3"),
        (("add", "{node}", "ana", "item-01", "--value", "nan"), "finite"),
        (("forget", "{node}", "nobody"), "no user 'nobody'"),
        (("status", "{tmp}/none.node"), "hushrec node init"),
        (("init", "{node}", "--contract", "{tmp}/contract.hushrec", "--name", "b"), "exists"),
        (("init", "{tmp}/x.node", "--contract", "{tmp}/bad.csv", "--name", "b"), "no contract"),
        (("init", "{tmp}/x.node", "--contract", "{tmp}/contract.hushrec", "--name", ""), "name"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(node, tmp_path, words, match):
    (tmp_path / "bad.csv").write_text("user,item,value\na,item-01,2\nb,item-02,much\n")
    before = {**said("status", node), "file_bytes": 0}
    done = run(*(word.format(node=node, tmp=tmp_path) for word in words))
    assert done.exit_code == 2
    assert match in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert {**said("status", node), "file_bytes": 0} == before
    assert not (tmp_path / "x.node").exists()


def test_help_shows_examples():
    for command in ("init", "import", "add", "forget", "status"):
        text = run(command, "--help").output
        assert f"hushrec node {command} shop.node" in text


def test_from_a_shell(node):
    done = subprocess.run(
        [sys.executable, "-m", "hushrec", "node", "status", str(node), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["name"] == "shop"
