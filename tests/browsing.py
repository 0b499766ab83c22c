"""A real browser for the tests of pages, and what they ask of every page."""

import shutil
from importlib import resources

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
OUTSIDE = """
const wide = document.documentElement.clientWidth;
return [...document.querySelectorAll('body *')]
  .filter(e => !e.closest('.scroll, pre, title'))
  .filter(e => { const r = e.getBoundingClientRect();
                 return r.width && (r.right > wide + 0.5 || r.left < -0.5); })
  .map(e => e.tagName + ': ' + e.textContent.slice(0, 40));
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

SERIOUS = """
const done = arguments[arguments.length - 1];
axe.run().then(found => done(found.violations
  .filter(v => ['serious', 'critical'].includes(v.impact))
  .map(v => v.id + ': ' + v.nodes.map(n => n.html.slice(0, 80)).join(' | '))));
"""
"""Asks axe-core, which must be on the page, for the faults that keep people out."""


def axe():
    """Return axe-core, to be run in a page."""
    package = pytest.importorskip("axe_core_python", reason="axe-core-python is not installed")
    return (resources.files(package) / "axe.min.js").read_text("utf-8")


def open_browser(profile):
    """Start a browser without a window, or skip and say what is missing."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    chromedriver = shutil.which("chromedriver")
    if browser is None or chromedriver is None:
        pytest.skip("no chromium and chromedriver on the PATH: the pages were not looked at")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in FLAGS:
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))


def look(driver, address, width=1280, scheme="light"):
    """Open a page in a window of this width and colour scheme."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    window = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", window)
    driver.get_log("browser")  # what earlier pages said
    driver.get(address)
    return driver
