"""Faults of real processes: a run survives them all, and has the bits of one process.

The long ones, and random ones, are played by ``experiments/deployment/measure.py faults``.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from experiments.deployment.faults import HUSHREC, Federation, Party

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
ROUNDS = 6


def status_of(federation):
    words = [*HUSHREC, "status", str(federation.top / "server"), "--json"]
    return json.loads(subprocess.run(words, capture_output=True, check=True).stdout)


def until(holds, seconds):
    """Wait; return the seconds that it took."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds, f"not in {seconds} s"
        time.sleep(0.2)
    return time.monotonic() - began


@pytest.mark.parametrize(("secure", "nodes"), [(False, 3), (True, 4)])
def test_whatever_is_killed_the_run_has_the_bits_of_one_process(tmp_path, secure, nodes):
    """Each at another round: a node whose first reply is cut, kills of a node, a SuperNode, the
    SuperLink, the run and the server, and a SuperNode that stands still."""
    with Federation(tmp_path / "f", nodes, ROUNDS, secure) as federation:
        mute = federation.parties["node-3"]
        mute.stop()
        words = [sys.executable, HERE / "mute_node.py", tmp_path / "f" / "nodes" / "node-3"]
        federation.parties["node-3"] = Party(words, tmp_path / "f" / "node-3.log")
        faults = [
            (1, lambda: federation.kill("node-1")),
            (1, lambda: federation.kill_program("node-2")),
            (2, lambda: federation.freeze("node-1", 60.0, whole=False)),
            (3, lambda: federation.kill_program("server")),
            (4, lambda: "run"),
            (5, lambda: federation.kill("server")),
        ]
        outcome = federation.run(faults)
        assert outcome.resumes <= 2, outcome.said
        assert federation.same_bits(), outcome.missed
        assert outcome.missed == set()
        if not secure:
            assert federation.uploads() == {ROUNDS}, "each upload is charged once"
        log = (tmp_path / "f" / "node-3.log").read_text()
        assert "the SuperNode did not take a reply: connecting again" in log
        log = (tmp_path / "f" / "node-1.log").read_text()
        assert "the SuperNode does not answer: connecting again" in log
        assert status_of(federation)["stage"] == "finished"


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    top = tmp_path_factory.mktemp("faults") / "f"
    with Federation(top, nodes=2, rounds=400, policy={"round_seconds": 45.0}) as federation:
        yield federation


def begin_training(federation, *more):
    words = [*HUSHREC, "run", str(federation.top / "server"), "--json", *more]
    before = federation.round() if more else 0
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(lambda: federation.round() > before or process.poll() is not None, 180)
    assert process.poll() is None, process.communicate()
    return process


def test_a_run_ends_when_its_server_is_gone_and_a_term_ends_it_at_once(federation):
    run = begin_training(federation)
    federation.freeze("server", 30.0, whole=False)
    time.sleep(1)
    run.terminate()
    took = until(lambda: run.poll() is not None, 25)
    assert run.returncode == 130 and "federate run" in run.communicate()[1], took
    assert status_of(federation)["stage"] == "interrupted"
    time.sleep(30)
    run = begin_training(federation, "--resume")
    federation.server.stop()
    until(lambda: run.poll() is not None, 60)
    said = run.communicate()[1]
    assert run.returncode == 2 and "start 'hushrec federate server' again" in said, said
    assert "--resume" in said
    status = status_of(federation)
    assert status["stage"] == "interrupted" and status["round"] >= 1
    words = [*HUSHREC, "server", federation.top / "server"]
    federation.server = Party(words, federation.top / "server.log")
    until(lambda: "listening" in (federation.top / "server.log").read_text(), 90)
    time.sleep(5)
    run = begin_training(federation, "--resume")
    run.terminate()
    assert run.wait(20) == 130


@pytest.mark.parametrize("politely", [True, False])
def test_a_node_that_was_stopped_or_killed_is_back_at_once(federation, politely):
    party, file = federation.parties["node-1"], federation.top / "node-1.log"
    until(lambda: federation.program("node-1") is not None, 120)
    time.sleep(8)  # it is connected
    size, starts = file.stat().st_size, party.starts
    (party.process.terminate if politely else party.process.kill)()
    until(lambda: party.starts > starts, 40)

    def back():
        found = federation.program("node-1")
        return found is not None and time.time() - found.create_time() < 60

    took = until(back, 30)
    said = file.read_bytes()[size:].decode()
    assert "did not accept" not in said and "still counts" not in said, (took, said)


def test_a_killed_supernode_is_started_again(federation):
    until(lambda: federation.program("node-2") is not None, 60)
    before = federation.program("node-2").pid
    psutil.Process(before).kill()

    def another():
        found = federation.program("node-2")
        return found is not None and found.pid != before

    until(another, 40)
    assert federation.parties["node-2"].starts == 1, "its supervisor lives on"
