"""The studio in a real browser: it fits, speaks, and moves while something goes on."""

import shutil
import time

import pytest

from browsing import CONTRASTS, OUTSIDE, SERIOUS, axe, look
from hushrec.runs.folder import RunFolder
from shown_runs import answering

pytestmark = pytest.mark.browser

PAGES = {
    "runs": "/",
    "run": "/run?run=fedmf",
    "user": "/user?run=fedmf&user=viewer-0042",
    "compare": "/compare?first=grid/popularity&second=fedmf",
    "privacy": "/privacy",
    "leak": "/leak",
    "refused": "/nothing",
}


def wait_for(say, what, seconds=60):
    """Ask until the answer is no longer empty."""
    deadline = time.monotonic() + seconds
    while not (found := say()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_and_axe_finds_no_serious_fault(driver, studio, name):
    for scheme in ("light", "dark"):
        for width in (400, 1400):
            page = look(driver, studio + PAGES[name], width, scheme)
            assert page.execute_script("return document.documentElement.scrollWidth") <= width
            assert page.execute_script(OUTSIDE) == []
        assert page.execute_script(CONTRASTS) == []
        page.execute_script(axe())
        assert page.execute_async_script(SERIOUS) == []
    seen = [line["message"] for line in page.get_log("browser")]
    assert [line for line in seen if "404" not in line] == []
    loaded = "return performance.getEntriesByType('resource').map(e => new URL(e.name).origin)"
    assert set(page.execute_script(loaded)) == {studio}


def test_sliders_answer_at_once(driver, studio):
    page = look(driver, studio + "/privacy")
    big = "return document.querySelector('#answer .big').textContent"
    before = page.execute_script(big)
    slider = page.find_element("id", "noise")
    slider.send_keys("\ue014")  # right
    wait_for(lambda: page.execute_script(big) != before, "epsilon did not move")
    assert float(page.execute_script(big)) < float(before)
    assert page.find_element("css selector", "output[for=noise]").text == "1.2"
    assert slider.get_attribute("aria-valuetext") == "1.2"
    assert "noise=6" in page.current_url


def test_a_running_one_moves_and_ends(driver, runs_folder, tmp_path):
    """The page of a run follows its files, and shows the result when it is there."""
    run = RunFolder(tmp_path / "runs" / "going")
    shutil.copytree(runs_folder / "fedmf", run.path)
    summary = (run.path / "summary.json").read_text()
    lines = (run.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.path / "summary.json").unlink()
    (run.path / "metrics.jsonl").write_text(lines[0])
    with answering(tmp_path / "runs") as place:

        def words():
            return page.execute_script("return document.querySelector('main').innerText")

        with run.locked():
            page = look(driver, f"{place.url}run?run=going")
            assert "round 1 of 3" in words()
            (run.path / "metrics.jsonl").write_text("".join(lines[:2]))
            wait_for(lambda: "round 2 of 3" in words(), "the page did not follow")
            run.write_text("metrics.jsonl", "".join(lines))
            run.write_text("summary.json", summary)
        wait_for(lambda: "finished" in words(), "the page did not end")
        assert "HR@10" in words()


def test_the_leak_at_the_press_of_a_button(driver, studio):
    page = look(driver, studio + "/leak")
    page.find_element("css selector", "main button").click()
    button = "return document.querySelector('main button').disabled"
    wait_for(lambda: page.execute_script(button) is True, "it did not begin")
    big = "const b = document.querySelector('.leaking'); return b && b.textContent"
    wait_for(lambda: page.execute_script(big) == "1.000", "the counter did not find the items")
    wait_for(lambda: page.execute_script(button) is False, "it did not end")
    assert "Chance is 0.100" in page.find_element("css selector", "main").text
