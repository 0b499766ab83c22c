"""The package that docs/extend.md shows, made from the page's own text, installed and used."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from documented import REPO, titled

PAGE = titled(REPO / "docs" / "extend.md")
PARTS = sorted(title for title in PAGE if title.startswith("try_"))


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """Every file of the page, and what an installer makes of its pyproject.toml."""
    root = tmp_path_factory.mktemp("package")
    for title, text in PAGE.items():
        path = root / title
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    declared = tomllib.loads(PAGE["pyproject.toml"])["project"]
    info = root / "src" / f"shop_parts-{declared['version']}.dist-info"
    info.mkdir()
    name = f"Name: {declared['name']}\nVersion: {declared['version']}\n"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\n{name}")
    groups = [
        "\n".join([f"[{group}]", *(f"{point} = {value}" for point, value in points.items())])
        for group, points in declared["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))
    return root


def played(package: Path, *arguments: str) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": str(package / "src"),
        "HUSHREC_DATA": str(package / "data"),
    }
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=package,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_group_is_shown():
    declared = tomllib.loads(PAGE["pyproject.toml"])["project"]["entry-points"]
    assert sorted(declared) == [
        "hushrec.callbacks",
        "hushrec.datasets",
        "hushrec.experts",
        "hushrec.mechanisms",
        "hushrec.methods",
        "hushrec.metrics",
    ]
    assert all(len(points) == 1 for points in declared.values()), "one entry point each"
    assert len(PARTS) == len(declared), "each is tried"


@pytest.mark.parametrize("script", PARTS)
def test_the_parts_of_the_page_are_used(package, script):
    played(package, script)


def test_the_parts_of_the_page_keep_their_contracts(package):
    said = played(package, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert " passed" in said


def test_a_data_set_of_another_package_is_listed(package):
    said = played(package, "-m", "hushrec", "data", "list")
    assert "corner-shop" in said
    assert "CC0" in said


def test_a_callback_of_another_package_is_named_on_the_command_line(package):
    train = ("-m", "hushrec", "train", "--data", "demo", "--method", "fedmf", "--rounds", "50")
    said = played(package, *train, "--out", "stopped", "--callback", "target-loss", "--json")
    assert json.loads(said)["rounds"] < 50


def test_a_mechanism_without_a_guarantee_gets_no_epsilon(package):
    code = """
import hushrec
from hushrec.errors import ConfigError
from shop_parts.one_entry import OneEntry
mode = {"privacy.mode": "mechanism", "privacy.mechanism": "one-entry", "privacy.epsilon": 1.0}
changed = {
    "release": lambda self: None,
    "calibrated": lambda self, target: OneEntry(self.shape, epsilon=2.0),
}
for part, stated in changed.items():
    kept = getattr(OneEntry, part)
    setattr(OneEntry, part, stated)
    try:
        hushrec.train("demo", "popularity", settings=mode)
    except ConfigError as error:
        print(error)
    setattr(OneEntry, part, kept)
"""
    nothing, too_much = played(package, "-c", code).splitlines()
    assert nothing.startswith(
        "mechanism 'one-entry' states no guarantee, so no epsilon can be given"
    )
    assert too_much.startswith("mechanism 'one-entry' spends epsilon 2 in 1 uploads, more than")
