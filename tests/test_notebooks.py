"""The notebooks of examples/notebooks: every cell runs, and nothing of a run is committed."""

import json
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from surface import SECTIONS

REPO = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((REPO / "examples" / "notebooks").glob("*.ipynb"))
NAMES = ["compare-methods", "own-data", "privacy"]
PUBLIC = {section.module for section in SECTIONS}


def outputs(book):
    """Return what the cells of a notebook have printed and shown, as text."""
    found = []
    for cell in book.cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error"
            shown = output.get("data", {})
            found.append(output.get("text") or shown.get("text/markdown") or shown["text/plain"])
    return "\n".join(found)


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Execute a notebook once, in a folder of its own, and return its outputs and the folder."""
    done = {}

    def execute(name):
        if name not in done:
            folder = tmp_path_factory.mktemp(name)
            book = nbformat.read(REPO / "examples" / "notebooks" / f"{name}.ipynb", as_version=4)
            programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            given = {"timeout": 300, "kernel_name": "python3"}
            client = NotebookClient(book, resources={"metadata": {"path": str(folder)}}, **given)
            client.execute(env={**os.environ, "PATH": programs})
            done[name] = outputs(book), folder
        return done[name]

    return execute


def test_they_are_these():
    assert [path.stem for path in NOTEBOOKS] == NAMES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs(path):
    """As Jupyter writes it, but for outputs, counts and whatever else differs from run to run."""
    text = path.read_text("utf-8")
    book = json.loads(text)
    nbformat.validate(nbformat.from_dict(book))
    assert text == json.dumps(book, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    assert [cell["id"] for cell in book["cells"]] == [
        f"cell-{number:02d}" for number in range(1, len(book["cells"]) + 1)
    ]
    for cell in book["cells"]:
        assert cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert (cell["execution_count"], cell["outputs"]) == (None, [])
    assert set(book["metadata"]) == {"kernelspec", "language_info"}
    imported = re.findall(r"(?:from|import) (hushrec[\w.]*)", text)
    assert imported and set(imported) <= PUBLIC


def test_methods_are_compared(executed):
    said, folder = executed("compare-methods")
    assert "| fednext | **0." in said
    assert "Holm-corrected over 4 tests" in said
    assert "Letters name the lines that a figure is significantly above" in said
    assert "means over users and seeds ± standard deviation over seeds" in said
    assert r"\multicolumn{2}{c}{receipts}" in said
    assert "</svg>" in (folder / "curves.svg").read_text()
    assert (folder / "compared.csv").read_text().startswith("run,data,method,")
    assert (folder / "compared.html").exists()


def test_own_data_is_trained_on_and_served(executed):
    said, folder = executed("own-data")
    assert "300 users and 120 items" in said
    assert said.count("Recommendation(") == 15
    assert said.count("because='popular'") == 5, "somebody without a history"
    assert said.count("Suggestion(") == 5, "by the bundle"
    assert (folder / "runs" / "purchases" / "report.html").exists()
    assert (folder / "bundle" / "manifest.json").exists()


def test_privacy_is_stated_and_attacked(executed):
    said, folder = executed("privacy")
    assert "No formal guarantee" in said
    assert "(e^8)" in said
    assert "The run gives no guarantee, so there is none to contradict" in said
    assert "Nothing contradicts the claim" in said
    assert (folder / "published" / "manifest.json").exists()
