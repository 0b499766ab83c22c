"""Each package points one way: the import graph of the sources, drawn and checked.

A package is ``hushrec.<name>``, a folder or a single module. Every import counts, those inside
functions and under TYPE_CHECKING too: whoever has to know a type knows its package.
"""

import ast
from itertools import pairwise
from pathlib import Path

import pytest

import hushrec

ROOT = Path(hushrec.__file__).parent
FILES = {"pathlib", "os", "io", "shutil", "tempfile", "hushrec.io.files"}
"""What reads and writes files."""


def sources(root: Path) -> dict[str, ast.Module]:
    """Return the modules below a package's folder by name."""
    found = {}
    for file in sorted(root.rglob("*.py")):
        name = ".".join(file.relative_to(root.parent).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = ast.parse(file.read_text("utf-8"))
    return found


def imports(tree: ast.Module) -> set[str]:
    """Return every name that a module imports, in full."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_imports_are_absolute():
    relative = {
        name
        for name, tree in sources(ROOT).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    }
    assert relative == set()


def test_the_file_that_is_copied_to_devices_imports_nothing_of_hushrec():
    tree = sources(ROOT)["hushrec.serving.recommender"]
    assert not any(target.startswith("hushrec") for target in imports(tree))


def package_of(name: str) -> str:
    """``hushrec.data.reading`` is part of data; the names that all of hushrec has are "hushrec"."""
    return name.split(".")[1] if "." in name else name


def graph(modules: dict[str, ast.Module]) -> dict[tuple[str, str], list[str]]:
    """Return the imports between packages, each with the lines of code it stands for."""
    edges: dict[tuple[str, str], list[str]] = {}
    (top,) = {name.partition(".")[0] for name in modules}
    for name, tree in modules.items():
        for target in sorted(imports(tree)):
            if target.partition(".")[0] != top:
                continue
            while target not in modules:  # a class or a function: its module
                target = target.rpartition(".")[0]
            edge = package_of(name), package_of(target)
            if edge[0] != edge[1]:
                edges.setdefault(edge, []).append(f"{name} imports {target}")
    return edges


def cycle(edges: set[tuple[str, str]]) -> list[str]:
    """Return the packages of one circle, the first of them again at its end; or nothing."""
    targets: dict[str, list[str]] = {}
    for here, there in sorted(edges):
        targets.setdefault(here, []).append(there)
    done: set[str] = set()

    def walk(path: list[str]) -> list[str]:
        for there in targets.get(path[-1], []):
            if there in path:
                return [*path[path.index(there) :], there]
            if there not in done and (found := walk([*path, there])):
                return found
        done.add(path[-1])
        return []

    return next((found for start in sorted(targets) if (found := walk([start]))), [])


@pytest.fixture(scope="module")
def modules():
    return sources(ROOT)


def test_packages_point_one_way(modules):
    edges = graph(modules)
    circle = cycle(set(edges))
    lines = [line for pair in pairwise(circle) for line in edges[pair]]
    assert not circle, "\n".join([" -> ".join(circle), *lines])


def test_only_the_commands_know_click_and_only_pages_the_report(modules):
    for name, tree in modules.items():
        found = {target for target in imports(tree) if target.split(".")[0] == "click"}
        assert package_of(name) == "cli" or not found, f"{name} imports {found}"
    readers = {here for here, there in graph(modules) if there in ("reporting", "cli")}
    assert readers == {"cli", "studio", "__main__"}


def test_loop_and_methods_touch_no_files(modules):
    """What is trained depends on its arguments alone, and can be read without the rest."""
    checked = [n for n in modules if package_of(n) == "methods" or n.endswith("federation.rounds")]
    assert len(checked) > 10
    for name in checked:
        for target in imports(modules[name]):
            parents = {target, target.rpartition(".")[0], target.partition(".")[0]}
            assert not parents & FILES, f"{name} imports {target}"
        for node in ast.walk(modules[name]):
            opened = isinstance(node, ast.Name) and node.id == "open"
            assert not opened, f"{name}, line {getattr(node, 'lineno', '?')}: opens a file"


def test_a_circle_is_found_and_shown():
    assert cycle({("a", "b"), ("b", "c"), ("d", "a")}) == []
    assert cycle({("a", "b"), ("b", "c"), ("c", "b")}) == ["b", "c", "b"]
    here = "if TYPE_CHECKING:\n    from house.b import Thing\ndef f():\n    import house.b.deep"
    names = {"house": "", "house.a": here, "house.b": "from house.a import f", "house.b.deep": ""}
    edges = graph({name: ast.parse(text) for name, text in names.items()})
    assert edges[("a", "b")] == ["house.a imports house.b", "house.a imports house.b.deep"]
    assert cycle(set(edges)) == ["a", "b", "a"]
