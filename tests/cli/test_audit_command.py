"""`hushrec audit` as a user meets it: tables, JSON, report, and exit code 1 for a false claim."""

import json

import pytest
from click.testing import CliRunner

from hushrec.api import Run, train
from hushrec.audit import audit
from hushrec.cli import main
from hushrec.errors import RunError
from hushrec.privacy.noise import CentralGaussian

QUICK = ["--users", "40", "--trials", "4000"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    modes = {
        "open": [],
        "central": ["--privacy", "central", "--epsilon", "1", "--clip", "1"],
        "unseen": ["--set", "split.kind=unseen-users"],
    }
    for name, mode in modes.items():
        arguments = ["train", "--method", "fedmf", "--rounds", "3", "--set", "d=4", *mode]
        done = CliRunner().invoke(main, [*arguments, "--out", str(folder / name)])
        assert done.exit_code == 0, done.output
    return folder


def hushrec(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_a_run_without_guarantee_is_attacked_all_the_same(runs):
    done = hushrec("audit", runs / "open", *QUICK)
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    assert "no guarantee" in said
    assert "raw upload 100.0%" in said
    assert "train, round 1 100.0%" in said, "every kind of round has its line"
    assert "from the selected model 100.0%" in said
    assert "rounds 1 to 3 together 100.0%" in said
    assert max(len(line) for line in done.stdout.splitlines()[:-1]) <= 80
    found = json.loads((runs / "open" / "audit.json").read_text())
    assert (found["verdict"], found["canaries"]) == ("no claim", [])
    report = (runs / "open" / "report.html").read_text()
    assert '<h2 id="audit-title">Audit</h2>' in report
    assert "Canaries" not in report


def test_an_honest_claim_stands(runs):
    done = hushrec("audit", runs / "central", *QUICK, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found == json.loads((runs / "central" / "audit.json").read_text())
    assert found["verdict"] == "kept"
    (canary,) = found["canaries"]
    assert (canary["who"], canary["where"]) == ("any user", "items")
    assert found["soundness"]["arrays"] == ["items"]
    assert found["soundness"]["problems"] == found["reasons"] == []
    assert 0 < canary["lower_bound"] < canary["claimed_epsilon"] <= 1
    assert canary["rounds"] == 3
    assert found["items"]["evidence"].keys() == {
        "raw upload",
        "protected upload",
        "sum after the round",
    }
    report = (runs / "central" / "report.html").read_text()
    assert "Claimed ε" in report
    assert "contradicted</span>" not in report


def test_the_same_audit_gives_the_same_result(runs):
    first = json.loads(hushrec("audit", runs / "central", *QUICK, "--json").stdout)
    assert json.loads(hushrec("audit", runs / "central", *QUICK, "--json").stdout) == first
    other = json.loads(hushrec("audit", runs / "central", *QUICK, "--seed", 1, "--json").stdout)
    assert other["canaries"] != first["canaries"]


def test_a_false_claim_fails(runs, monkeypatch):
    honest = CentralGaussian.noise_std
    monkeypatch.setattr(
        CentralGaussian, "noise_std", lambda self, number=1: 0.3 * honest(self, number)
    )
    done = hushrec("audit", runs / "central", *QUICK)
    assert done.exit_code == 1, done.output
    assert "The claim is false" in " ".join(done.stdout.split())
    assert "is contradicted: canaries: any user" in done.stderr
    assert "of 'items' is 0.3" in " ".join(done.stdout.split()), "noise by itself says so too"
    assert "contradicted</span>" in (runs / "central" / "report.html").read_text()


def test_unseen_users_are_the_others(runs):
    found = json.loads(hushrec("audit", runs / "unseen", *QUICK, "--json").stdout)
    assert found["membership"]["members"] == found["membership"]["others"] == 40
    assert "took part in training" in found["membership"]["threat"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no such run folder"),
        (["{open}", "--trials", "10"], "--trials"),
        (["{open}", "--users", "1"], "--users"),
    ],
)
def test_bad_input_is_told(arguments, message, runs):
    done = hushrec("audit", *(a.replace("{open}", str(runs / "open")) for a in arguments))
    assert done.exit_code == 2
    assert message in done.output
    assert "Traceback" not in done.output


def test_help_has_examples():
    assert "hushrec audit runs/first" in hushrec("audit", "--help").stdout


def test_a_run_without_a_folder(tiny):
    with pytest.raises(RunError, match="out=FOLDER"):
        audit(train(tiny, "popularity"))


def test_an_audit_leaves_the_run_as_it_is(tiny, tmp_path):
    settings = {"d": 3, "privacy.mode": "central", "privacy.noise_seed": 0, "privacy.epsilon": 2.0}
    train(tiny, "pfedrec", rounds=2, settings=settings, out=tmp_path / "run")
    files = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    audit(Run.open(tmp_path / "run", tiny), users=20, trials=1000)
    assert all(path.read_bytes() == content for path, content in files.items())
