"""The documentation as a site: no warning, no page missing, and nothing from elsewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from browsing import SERIOUS, axe, look

REPO = Path(__file__).resolve().parents[1]
LOADED = re.compile(
    r'<(?:script|img|iframe|source)[^>]+src="?(?:https?:)?//|<link[^>]+href="?(?:https?:)?//'
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="mkdocs-material is not installed")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=REPO,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_every_document_is_a_page_and_nothing_comes_from_elsewhere(site):
    wanted = {path.stem for path in (REPO / "docs").rglob("*.md")}
    wanted |= {"index", "contributing", "security", "changelog"}
    assert wanted <= {path.stem for path in site.rglob("*.html")}
    for page in site.rglob("*.html"):
        assert LOADED.search(page.read_text("utf-8")) is None, page.name
    style = "".join(path.read_text("utf-8") for path in site.rglob("*.css"))
    assert re.findall(r"url\(\"?https?:", style) == []


def test_links_written_for_the_repository_lead_to_pages(site):
    said = (site / "index.html").read_text("utf-8")
    assert 'href="security.html"' in (site / "tour.html").read_text("utf-8")
    assert 'href="contributing.html"' in said
    assert "examples/hushrec-extras" in said
    assert 'href="examples' not in said
    quoted = (site / "extend.html").read_text("utf-8")
    assert "Backwards" in quoted, "a line that is a link to a file becomes the file"
    assert 'src="experiments/' in (site / "papers.html").read_text("utf-8")


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["leak", "quickstart"])
def test_pages_fit_and_have_no_serious_fault(driver, site, name, scheme):
    for width in (400, 1400):
        page = look(driver, (site / f"{name}.html").as_uri(), width, scheme)
        assert page.execute_script("return document.documentElement.scrollWidth") <= width
    ground = "return getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 80"
    assert page.execute_script(ground) == (scheme == "dark")
    page.execute_script(axe())
    assert page.execute_async_script(SERIOUS) == []
