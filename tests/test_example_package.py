"""Somebody else's method: installed beside hushrec, found, checked and trained like ours."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
EXAMPLE, EXTRAS = EXAMPLES / "hushrec-cooccurrence", EXAMPLES / "hushrec-extras"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The examples in a folder of their own, built without a network."""
    pytest.importorskip("hatchling")
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*pip, *offline, "--target", target, EXAMPLE, EXTRAS],
        capture_output=True,
        text=True,
        check=False,
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
    "baselines": run.summary.baselines.as_dict(),
    "new": len(run.recommend("new", history=["film-0001", "film-0002"])),
}))
"""


def test_it_is_found_and_beats_chance_and_popularity(installed):
    told = json.loads(run(CODE, installed).splitlines()[-1])
    assert "cooccurrence" in told["names"]
    assert "pfedrec" in told["names"]
    assert told["got"]["hr@10"] > 10 * told["baselines"]["chance"]["full"]["hr@10"]
    assert told["got"]["hr@10"] > 1.5 * told["baselines"]["popularity"]["full"]["hr@10"]
    assert told["new"] == 10


def test_it_keeps_the_contract(installed):
    tests = str(EXAMPLE / "tests")
    said = run(None, installed, "-m", "pytest", "-v", "-p", "no:cacheprovider", tests)
    assert " passed" in said
    assert "failed" not in said


def test_without_it_the_name_is_unknown(tmp_path):
    code = "from hushrec.methods.base import method_names; print('cooccurrence' in method_names())"
    assert run(code, tmp_path).strip() == "False"


EXTRAS_CODE = """
import json, hushrec
from hushrec.federation.backends import Machine
from hushrec.errors import ConfigError
plain = hushrec.train("demo", "fedmf", rounds=2)
backwards = hushrec.train("demo", "fedmf", rounds=2, machine=Machine(backend="backwards"))
layered = {"privacy.layers": ["largest-rows"]}
half = hushrec.train("demo", "fedmf", rounds=2, settings=layered)
noised = {**layered, "privacy.mode": "central", "privacy.noise_seed": 0, "privacy.epsilon": 8.0}
noisy = hushrec.train("demo", "fedmf", rounds=2, settings=noised)
try:
    hushrec.train("demo", "fedmf", rounds=1, settings={"privacy.layers": ["smallest-rows"]})
except ConfigError as error:
    refused = str(error)
sent = [run.summary.communication.up_bytes for run in (plain, half)]
print(json.dumps({
    "same": bool((plain.model.shared["items"] == backwards.model.shared["items"]).all()),
    "half": sent[1] / sent[0],
    "epsilon": noisy.summary.privacy.epsilon,
    "refused": refused,
}))
"""


def test_a_backend_and_a_mechanism_of_another_package_take_part(installed):
    told = json.loads(run(EXTRAS_CODE, installed).splitlines()[-1])
    assert told["same"], "the order of clients does not matter"
    assert 0.49 < told["half"] < 0.52
    assert 7 < told["epsilon"] <= 8, "layers before clipping leave the guarantee as it is"
    assert told["refused"] == "unknown mechanism 'smallest-rows'; did you mean 'largest-rows'?"


def test_the_extras_keep_their_contracts(installed):
    """Of the backend's, a few methods: the whole contract is ours in tests/backends."""
    chosen = "TwoTower or LargestRows or (Backwards and (fedmf or popularity or two-tower))"
    tests = str(EXTRAS / "tests")
    said = run(None, installed, "-m", "pytest", "-v", "-p", "no:cacheprovider", tests, "-k", chosen)
    assert " passed" in said
    assert "failed" not in said
