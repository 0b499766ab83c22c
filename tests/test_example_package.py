"""Somebody else's method: installed beside hushrec, found, checked and trained like ours."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "hushrec-cooccurrence"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The example in a folder of its own, built without a network."""
    pytest.importorskip("hatchling")
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*pip, *offline, "--target", target, EXAMPLE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (target / "hushrec_cooccurrence.py").is_file()
    return target


def run(code, site, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, *arguments, *(["-c", code] if code else [])]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=EXAMPLE.parent
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


CODE = """
import json, hushrec
from hushrec.methods.base import method_names
run = hushrec.train("demo", "cooccurrence", rounds=1)
print(json.dumps({
    "names": method_names(),
    "got": run.metrics["full"],
    "yardsticks": run.summary["yardsticks"],
    "new": len(run.recommend("new", history=["film-0001", "film-0002"])),
}))
"""


def test_it_is_found_and_beats_chance_and_popularity(installed):
    told = json.loads(run(CODE, installed).splitlines()[-1])
    assert "cooccurrence" in told["names"]
    assert "pfedrec" in told["names"]
    assert told["got"]["hr@10"] > 10 * told["yardsticks"]["chance"]["full"]["hr@10"]
    assert told["got"]["hr@10"] > 1.5 * told["yardsticks"]["popularity"]["full"]["hr@10"]
    assert told["new"] == 10


def test_it_keeps_the_contract(installed):
    tests = str(EXAMPLE / "tests")
    said = run(None, installed, "-m", "pytest", "-v", "-p", "no:cacheprovider", tests)
    assert " passed" in said
    assert "failed" not in said


def test_without_it_the_name_is_unknown(tmp_path):
    code = "from hushrec.methods.base import method_names; print('cooccurrence' in method_names())"
    assert run(code, tmp_path).strip() == "False"
