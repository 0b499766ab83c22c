"""The rules that keep the package easy to find one's way in: sizes, names, layers, roles."""

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from hushrec.cli.methods import package_table
from test_imports import ROOT, graph, imports, sources

MOST_MODULES = 199
MOST_LINES = 500
"""Of one module: more than one sitting."""
LONGER = {"serving/recommender.py": 910}
"""A device copies this one file."""
TOP_LEVEL = {"__init__", "__main__", "api", "config", "errors", "streams"}
LAYERS = (
    {"errors", "streams"},
    {"config", "io", "kernels"},
    {"aggregation", "data", "secagg"},
    {"private", "training"},
    {"methods"},
    {"privacy", "serving"},
    {"evaluation"},
    {"federation"},
    {"extend", "runs"},
    {"api", "deployment", "tuning"},
    {"analysis", "audit", "hushrec", "testing"},
    {"reporting"},
    {"studio"},
    {"cli"},
    {"__main__"},
)
"""Packages from the lowest layer to the highest; a package imports from layers below its own."""
ARCHITECTURE = Path(__file__).parents[1] / "docs" / "architecture.md"


@pytest.fixture(scope="module")
def modules():
    return sources(ROOT)


def test_modules_are_few_and_short(modules):
    assert len(modules) <= MOST_MODULES
    assert {path.stem for path in ROOT.glob("*.py")} <= TOP_LEVEL
    long = {
        name: lines
        for path in ROOT.rglob("*.py")
        if (lines := path.read_text("utf-8").count("\n"))
        > LONGER.get(name := path.relative_to(ROOT).as_posix(), MOST_LINES)
    }
    assert long == {}


def test_no_two_public_classes_share_a_name(modules):
    homes = defaultdict(set)
    for name, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(name)
    assert {name: sorted(found) for name, found in homes.items() if len(found) > 1} == {}


def test_packages_import_from_lower_layers_only(modules):
    level = {package: n for n, layer in enumerate(LAYERS) for package in layer}
    upward = [
        line
        for (here, there), lines in graph(modules).items()
        if level[here] <= level[there]
        for line in lines
    ]
    assert upward == []


def test_the_page_shows_the_layers():
    shown = "\n".join(f"{n}. {', '.join(sorted(layer))}" for n, layer in enumerate(LAYERS[:-1], 1))
    assert shown in ARCHITECTURE.read_text("utf-8").replace("`", "")


def test_roles_of_a_deployment_do_not_mix(modules):
    """What both the coordinator and a node need is in federation, secagg or deployment itself."""
    for name, tree in modules.items():
        targets = imports(tree)
        if name.startswith("hushrec.deployment.node"):
            assert not [t for t in targets if t.startswith("hushrec.deployment.coordinator")], name
        if name.startswith("hushrec.deployment.coordinator"):
            assert not [t for t in targets if t.startswith("hushrec.deployment.node")], name
        if not name.startswith("hushrec.deployment.flower"):
            assert not [t for t in targets if t.partition(".")[0] == "flwr"], name


def test_the_table_of_packages_is_current():
    assert package_table() in ARCHITECTURE.read_text("utf-8"), (
        "docs/architecture.md: put what hushrec.cli.methods.package_table() returns in place"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("use", "most"), [("train", 63), ("round", 51)])
def test_one_use_passes_few_modules(use, most):
    """A default `hushrec train`, and a round over nodes that sum securely, with both its sides."""
    words = [sys.executable, Path(__file__).parent / "traced.py", use]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    passed = [line for line in done.stdout.splitlines() if line.endswith(".py")]
    ours = [name for name in passed if not name.startswith("testing/")]
    assert 20 < len(ours) <= most, ours
