"""Wheel and sdist: built, complete, run from elsewhere. `make dist` does it in an empty venv."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import hushrec

REPO = Path(__file__).resolve().parents[1]


def run(*words, **more):
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, check=False, **more
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Wheel and sdist, built without a network."""
    pytest.importorskip("build", reason="the package build is not installed")
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--no-isolation", "--outdir", folder, REPO)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def test_one_version_is_said_everywhere(built):
    wheel, sdist = built
    version = hushrec.__version__
    assert wheel.name == f"hushrec-{version}-py3-none-any.whl"
    assert sdist.name == f"hushrec-{version}.tar.gz"
    assert f"\nversion: {version}\n" in (REPO / "CITATION.cff").read_text()
    first = re.search(r"^## (\S+)", (REPO / "CHANGELOG.md").read_text(), re.M)
    assert first and first[1] == version


def test_the_files_pass_twine(built):
    pytest.importorskip("twine", reason="twine is not installed")
    assert run("-m", "twine", "check", "--strict", *built).count("PASSED") == 2


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built):
    """Templates, presets, the mark that it is typed: whatever is in git below src."""
    wheel, sdist = built
    listed = subprocess.run(
        ["git", "ls-files", "src/hushrec"], cwd=REPO, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("no git here: what belongs to the package cannot be told")
    wanted = {name.removeprefix("src/") for name in listed.stdout.splitlines()}
    with zipfile.ZipFile(wheel) as packed:
        found = {name for name in packed.namelist() if not name.startswith("hushrec-")}
        assert found >= wanted
        assert {name for name in found - wanted if name.endswith(".pyc")} == set()
    assert "hushrec/py.typed" in found
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {"CITATION.cff", "CHANGELOG.md", "LICENSE", "pyproject.toml", "docs/privacy.md"} <= names
    assert {f"src/{name}" for name in wanted} <= names


def test_pythons_that_are_named_are_those_that_are_allowed():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    named = {c.rpartition(" ")[2] for c in project["classifiers"] if "Python :: 3." in c}
    assert named == {"3.11", "3.12", "3.13"}
    assert project["requires-python"] == ">=3.11"


@pytest.mark.slow
def test_what_is_installed_runs_from_elsewhere(built, tmp_path):
    """The wheel's own files, not the repository's, find methods, presets, templates and data."""
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    offline = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    run("-m", "pip", "install", *offline, "--target", site, built[0])
    code = (
        "import hushrec, hushrec.cli; from hushrec.federation.experiment import read_preset; "
        "from hushrec.reporting.html import write_report; from hushrec.studio.pages import Studio; "
        "from pathlib import Path; "
        "print(hushrec.__file__, read_preset('fedmf', 'paper')['rounds'], "
        "write_report(hushrec.train('demo', 'popularity', out='run')), "
        "len(Studio(Path('.')).page('runs', {})))"
    )
    said = run("-c", code, cwd=elsewhere, env={**os.environ, "PYTHONPATH": str(site)}).split()
    assert Path(said[0]).is_relative_to(site)
    assert (elsewhere / said[2]).stat().st_size > 10_000
    assert int(said[3]) > 1_000
