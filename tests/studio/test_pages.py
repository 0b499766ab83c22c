"""The studio as a program that asks it sees it: pages, refusals, tokens."""

import http.client
import json
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from urllib.parse import quote, urlsplit

import pytest
from click.testing import CliRunner

from hushrec.cli import main
from hushrec.runs.folder import RunFolder
from hushrec.studio import demos
from hushrec.studio.pages import find_runs
from shown_runs import HOSTILE, answering


def ask(studio, address, method="GET", **headers):
    """Return status, headers and text; nothing is followed."""
    where = urlsplit(studio)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=30)
    connection.request(method, address, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, text


def test_every_run_is_listed_with_its_state(studio, runs_folder):
    states = {name: run.state for name, run in find_runs(runs_folder).items()}
    assert states == {
        "fedmf": "finished",
        "grid/popularity": "finished",
        "stopped": "stopped",
        HOSTILE: "finished",
        "damaged": "unreadable",
    }
    status, _, text = ask(studio, "/")
    assert status == 200
    metrics = RunFolder(runs_folder / "fedmf").read_summary().test["full"]
    assert f"{metrics['ndcg@10']:.4f}" in text
    assert text.count("<li class=") == 5
    assert "summary.json is damaged" in text


def test_several_seeds_lead_to_each(tmp_path, runs_folder):
    """Also where the folder that is looked at is such a run itself."""
    top = tmp_path / "seeds"
    RunFolder.create(top, RunFolder(runs_folder / "fedmf").experiment(), [0, 1])
    for seed in (0, 1):
        shutil.copytree(runs_folder / "fedmf", top / f"seed-{seed}")
    for looked_at in (tmp_path, top):
        runs = find_runs(looked_at)
        assert set(runs["seeds"].seeds) == {name for name in runs if name != "seeds"}
        assert len(runs) == 3
        assert runs["seeds"].state == "stopped"
    with RunFolder(top / "seed-1").locked():
        assert next(iter(find_runs(tmp_path).values())).state == "training"


def test_somebody_who_hangs_up_is_no_fault(studio, capfd):
    where = urlsplit(studio)
    for _ in range(3):
        with socket.create_connection((where.hostname, where.port)) as connection:
            connection.sendall(b"GET /privacy?noise=3&share=5 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            linger = struct.pack("ii", 1, 0)  # a reset in place of a farewell
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    assert ask(studio, "/")[0] == 200  # so the others have been heard
    deadline = time.monotonic() + 30
    while any("process_request" in thread.name for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert capfd.readouterr().err == ""


def test_words_of_others_are_shown_and_not_obeyed(studio):
    for address in ("/", f"/run?run={quote(HOSTILE)}", "/run?run=%3Cb%3E"):
        text = ask(studio, address)[2]
        assert "<script>alert" not in text
        assert "<b>" not in text
    user = ask(studio, f"/user?run=fedmf&user={quote(HOSTILE)}")[2]
    assert "is unknown to this run" in user
    assert "<script>alert" not in user


@pytest.mark.parametrize(
    ("address", "status", "words"),
    [
        ("/run?run=../secret", 404, "no run"),
        ("/run?run=/etc", 404, "no run"),
        ("/report?run=..", 404, "no run"),
        ("/run", 400, "lacks"),
        ("/run?run=damaged", 404, "is damaged"),
        ("/nothing", 404, "no such page"),
        ("/frame.html.j2", 404, "no such page"),
        ("/privacy?noise=99", 400, "from 0 to"),
        ("/privacy?noise=-1", 400, "from 0 to"),
        ("/?" + "a=1&" * 50, 400, "not valid"),
        ("/?a=%ff", 400, "not valid"),
        ("/?a=" + "x" * 5_000, 414, "too long"),
    ],
)
def test_what_cannot_be_is_a_sentence(studio, address, status, words):
    found, headers, text = ask(studio, address)
    assert found == status
    assert words in text
    assert "Traceback" not in text
    assert "script-src 'self'" in headers["Content-Security-Policy"]


def test_every_answer_says_what_a_browser_may_do(studio):
    for address in ("/", "/privacy", "/studio.css", "/studio.js", "/nothing"):
        headers = ask(studio, address)[1]
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 's")
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "same-origin"
        assert headers["Cache-Control"] == "no-store"
    status, headers, text = ask(studio, "/report?run=fedmf")
    assert status == 200
    assert "run report" in text
    assert "sandbox" in headers["Content-Security-Policy"]
    assert "script" not in headers["Content-Security-Policy"]
    assert ask(studio, "/", "HEAD")[2] == ""
    assert ask(studio, "/", "PUT")[0] == 501


def test_pages_from_elsewhere_get_nothing_and_order_nothing(studio):
    """Somebody's domain that leads to this machine, and somebody's form."""
    assert ask(studio, "/", Host="evil.example")[0] == 403
    assert ask(studio, "/leak", "POST", Host="evil.example")[0] == 403
    host = urlsplit(studio).netloc
    assert ask(studio, "/leak", "POST", Origin="https://evil.example")[0] == 403
    assert ask(studio, "/leak", "POST", **{"Sec-Fetch-Site": "cross-site"})[0] == 403
    assert ask(studio, "/run", "POST", Origin=f"http://{host}")[0] == 404
    assert ask(studio, "/leak", "POST", **{"Content-Length": "999999"})[0] == 413
    assert "data-going-on" not in ask(studio, "/leak")[2]


def test_elsewhere_a_token_is_asked_for(runs_folder):
    with answering(runs_folder, "0.0.0.0") as place:
        assert len(place.token) >= 32
        studio = f"http://127.0.0.1:{place.port}"
        for address in ("/", "/?token=", "/?token=wrong", "/studio.js", "/report?run=fedmf"):
            assert ask(studio, address)[0] == 403
        assert ask(studio, "/", Cookie="hushrec_studio=wrong")[0] == 403
        status, headers, _ = ask(studio, f"/run?run=fedmf&token={place.token}")
        assert (status, headers["Location"]) == (303, "/run?run=fedmf")
        cookie, *flags = headers["Set-Cookie"].split("; ")
        assert {"HttpOnly", "SameSite=Strict"} <= set(flags)
        assert ask(studio, "/run?run=fedmf", Cookie=cookie)[0] == 200
        away = ask(studio, f"//evil.example/?token={place.token}")[1]
        assert not away["Location"].startswith("//")


def test_a_run_that_is_trained_is_followed(studio, runs_folder, tmp_path):
    going = RunFolder(runs_folder / "stopped")
    with going.locked():
        assert "training" in ask(studio, "/run?run=stopped")[2]
        before = ask(studio, "/run?run=stopped&part=1")[2]
        assert "data-going-on" in before
        assert "round 3 of 3" in before
        assert "<html" not in before
    assert "hushrec train --resume" in ask(studio, "/run?run=stopped")[2]


def test_two_runs_are_compared_as_the_command_does(studio, runs_folder):
    runs = [runs_folder / "grid" / "popularity", runs_folder / "fedmf"]
    words = ["compare", *map(str, runs), "--json"]
    rows = json.loads(CliRunner().invoke(main, words).stdout)
    text = ask(studio, "/compare?first=grid/popularity&second=fedmf")[2]
    for row in rows:
        assert f"{row['mean']:.4f}" in text
    difference = f"{rows[1]['difference']:+.4f}".replace("-", "−")
    assert difference in text
    same = ask(studio, "/compare?first=fedmf")[2]
    assert "<select" in same


def test_sliders_say_what_the_command_says(studio):
    words = ["--noise", "1", "--population", "10000", "--cohort", "100", "--rounds", "100"]
    said = CliRunner().invoke(main, ["privacy", "epsilon", *words, "--delta", "1e-5", "--json"])
    found = demos.slider_guarantee(**demos.slider_positions({}))
    assert found.epsilon == json.loads(said.stdout)["epsilon"]
    assert f"{found.epsilon:.3g}" in ask(studio, "/privacy")[2]
    # More noise, fewer rounds and fewer at a time never cost more.
    for name, worse in (("noise", -1), ("share", 1), ("rounds", 1)):
        moved = demos.slider_positions({})
        moved[name] += worse
        assert demos.slider_guarantee(**moved).epsilon > found.epsilon
    assert found.unsampled > found.epsilon


def test_the_leak_is_played(studio):
    host = urlsplit(studio).netloc
    status, headers, _ = ask(studio, "/leak", "POST", Origin=f"http://{host}")
    assert (status, headers["Location"]) == (303, "/leak")
    deadline = time.monotonic() + 120
    while "data-going-on" in (text := ask(studio, "/leak?part=1")[2]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    published, honest = text.split('id="published"')[1], text.split('id="honest"')[1]
    assert published.split('leaking">')[1].startswith("1.000")
    chance = float(honest.split('class="big">')[1][:5])
    assert chance == pytest.approx(0.1, abs=4 * (0.1 * 0.9 / 1000) ** 0.5)
    assert demos.NEGATIVES * demos.ROUNDS == 2 * 4 * 100, (
        "what the docstring says of published code"
    )


def test_the_command_serves_until_it_is_stopped(runs_folder):
    words = [sys.executable, "-m", "hushrec", "studio", str(runs_folder), "--port", "0"]
    running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    address = running.stdout.readline().split()[-1]
    with urllib.request.urlopen(address, timeout=30) as answer:
        assert b"fedmf" in answer.read()
    running.send_signal(signal.SIGTERM)
    _, said = running.communicate(timeout=30)
    assert running.returncode == 130
    assert said.strip() == "hushrec: stopped"


def test_the_command_needs_a_folder_and_a_port(tmp_path, runs_folder):
    result = CliRunner().invoke(main, ["studio", str(tmp_path / "nothing")])
    assert result.exit_code == 2
    assert "no such folder" in result.stderr
    with answering(runs_folder) as place:
        result = CliRunner().invoke(main, ["studio", str(runs_folder), "--port", str(place.port)])
    assert result.exit_code == 2
    assert "cannot listen at 127.0.0.1" in result.stderr
