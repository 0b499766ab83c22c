"""The report in a real browser: does it fit, can it be read, does it stay silent?"""

import pytest

from browsing import CONTRASTS, OUTSIDE, SERIOUS, axe
from browsing import look as look_at
from hushrec.api import Run, train
from hushrec.reporting.html import write_comparison, write_report

pytestmark = pytest.mark.browser

WIDTHS = (360, 768, 1280)
SCHEMES = ("light", "dark")
NAMES = ("honest", "published", "private")

OVERLAPS = """
const clashes = [];
for (const svg of document.querySelectorAll('svg.plot')) {
  const texts = [...svg.querySelectorAll('text')]
    .map(t => [t.textContent, t.getBoundingClientRect()])
    .filter(([, r]) => r.width);
  texts.forEach(([a, r], i) => texts.slice(i + 1).forEach(([b, q]) => {
    if (r.left < q.right && q.left < r.right && r.top + 2 < q.bottom && q.top + 2 < r.bottom)
      clashes.push(a + ' | ' + b);
  }));
}
return clashes;
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Run]:
    """The common case, the one with the mark everywhere, and a private one with users' data."""
    folder = tmp_path_factory.mktemp("runs")
    made = {
        "honest": train("demo", "fedmf", rounds=3, out=folder / "honest"),
        "published": train(
            *("demo", "negative-counter"),
            rounds=3,
            protocol="published",
            settings={"evaluation.every": 1},
            out=folder / "published",
        ),
        "private": train(
            *("demo", "fedmf"),
            rounds=2,
            privacy="central",
            epsilon=8.0,
            out=folder / "private",
        ),
    }
    for name, run in made.items():
        write_report(
            run, samples=name != "honest", user="viewer-0001" if name == "private" else None
        )
    return made


@pytest.fixture
def look(driver, runs):
    """Open a report in a window of this width and colour scheme."""

    def at(name: str, width: int = 1280, scheme: str = "light"):
        return look_at(driver, (runs[name].folder.path / "report.html").as_uri(), width, scheme)

    return at


@pytest.mark.parametrize("name", NAMES)
def test_it_loads_in_silence(look, name):
    page = look(name)
    assert page.get_log("browser") == []
    loaded = page.execute_script("return performance.getEntriesByType('resource').length")
    assert loaded == 0


def test_the_headline_can_be_read(look, runs):
    text = look("honest").find_element("tag name", "main").text
    assert f"{runs['honest'].metrics['full']['hr@10']:.4f}" in text
    assert "HR@10" in text
    assert "popularity" in text


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_it_fits(look, name, width, scheme):
    page = look(name, width, scheme)
    scrolled = page.execute_script("return document.documentElement.scrollWidth")
    assert scrolled <= width
    assert page.execute_script(OUTSIDE) == []
    assert page.execute_script(OVERLAPS) == []
    sizes = page.execute_script(
        "return [...document.querySelectorAll('svg.plot')].map(s => s.getBoundingClientRect())"
        ".map(r => [r.width, r.height])"
    )
    assert sizes
    assert all(width > 50 and height > 50 for width, height in sizes)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", NAMES)
def test_every_word_has_contrast(look, name, scheme):
    assert look(name, 768, scheme).execute_script(CONTRASTS) == []


def test_axe_finds_no_serious_fault(driver, runs, tmp_path):
    """In a report, in the one with the mark, and in the page that compares both."""
    folders = [run.folder.path for run in runs.values()]
    pages = [folder / "report.html" for folder in folders]
    for file in (*pages, write_comparison(folders, tmp_path / "both.html")):
        for width, scheme in ((360, "light"), (1280, "dark")):
            page = look_at(driver, file.as_uri(), width, scheme)
            assert page.execute_script("return document.documentElement.scrollWidth") <= width
            page.execute_script(axe())
            assert page.execute_async_script(SERIOUS) == []


def test_dark_is_dark(look):
    grounds = [
        look("honest", 768, scheme).execute_script(
            "const s = getComputedStyle(document.body);"
            "return [s.color, s.backgroundColor].map(c => Number(c.match(/\\d+/)[0]))"
        )
        for scheme in SCHEMES
    ]
    (light_text, light_ground), (dark_text, dark_ground) = grounds
    assert light_text < 80 < 200 < light_ground
    assert dark_ground < 80 < 200 < dark_text


def test_the_banner_is_seen_without_scrolling(look):
    banner = look("published", 360).find_element("css selector", ".banner")
    assert banner.is_displayed()
    assert banner.rect["y"] < 500
