"""The report in a real browser: does it fit, can it be read, does it stay silent?"""

import shutil

import pytest

from hushrec.report.html import write_report
from hushrec.run import Run, train

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

pytestmark = pytest.mark.browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
WIDTHS = (360, 768, 1280)
SCHEMES = ("light", "dark")

OUTSIDE = """
const wide = document.documentElement.clientWidth;
return [...document.querySelectorAll('body *')]
  .filter(e => !e.closest('.scroll, pre, title'))
  .filter(e => { const r = e.getBoundingClientRect();
                 return r.width && (r.right > wide + 0.5 || r.left < -0.5); })
  .map(e => e.tagName + ': ' + e.textContent.slice(0, 40));
"""
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
CONTRASTS = """
function parse(c) { return c.match(/[\\d.]+/g).map(Number); }
function light([r, g, b]) {
  const f = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b);
}
function ground(e) {
  for (; e; e = e.parentElement) {
    const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] > 0) return c;
  }
}
const low = [];
for (const e of document.querySelectorAll('body *')) {
  const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
  if (!own || e.tagName === 'title') continue;
  const style = getComputedStyle(e);
  const colour = parse(e.closest('svg') ? style.fill : style.color);
  const [a, b] = [light(colour), light(ground(e))].sort((x, y) => x - y);
  if ((b + 0.05) / (a + 0.05) < 4.5) low.push(e.tagName + ': ' + e.textContent.slice(0, 40));
}
return low;
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    chromedriver = shutil.which("chromedriver")
    if browser is None or chromedriver is None:
        pytest.skip("no chromium and chromedriver on the PATH: the report was not looked at")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in FLAGS:
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Run]:
    """The common case, and the one with the widest words: a long name and the mark everywhere."""
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
    }
    for run in made.values():
        write_report(run)
    return made


@pytest.fixture
def look(driver, runs):
    """Open a report in a window of this width and colour scheme."""

    def at(name: str, width: int = 1280, scheme: str = "light"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        window = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", window)
        driver.get((runs[name].folder.path / "report.html").as_uri())
        return driver

    return at


@pytest.mark.parametrize("name", ["honest", "published"])
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
@pytest.mark.parametrize("name", ["honest", "published"])
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
@pytest.mark.parametrize("name", ["honest", "published"])
def test_every_word_has_contrast(look, name, scheme):
    assert look(name, 768, scheme).execute_script(CONTRASTS) == []


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
