"""Whole federations on loopback, every party a process of its own; what goes wrong is survived."""

import json
import os
import subprocess
import sys
import threading
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from evil_node import KINDS
from safetensors.numpy import load_file
from unreliable_node import POINTS
from unreliable_server import POINTS as SERVER_POINTS

from hushrec import train
from hushrec.cli.federate import ExperimentOptions, make_rehearsal
from hushrec.data.synthetic import demo
from hushrec.deployment.coordinator.run import Status, newest_run, status_of
from hushrec.deployment.coordinator.session import EventLog
from hushrec.deployment.flower.gateway import metrics_served
from hushrec.deployment.flower.processes import Processes, free_port
from hushrec.deployment.flower.programs import begin_run, server_running, start_node
from hushrec.deployment.node.database import NodeDatabase
from hushrec.deployment.node.runs import NodeRuns
from hushrec.deployment.provisioning import ServerConfig, ServerFolder
from hushrec.errors import RunError

HERE = Path(__file__).parent
FINAL = "checkpoint/final/selected-shared.safetensors"
HUSHREC = [sys.executable, "-m", "hushrec"]


def running_from(folder: Path) -> list[str]:
    """Command lines of processes that name a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in words:
            found.append(words)
    return found


@contextmanager
def parties(top: Path, others: dict[str, list[str]]):
    """The server here, every node in a process: plain ones, and others by their own words.

    A node that ended is started again, as a service manager does.
    """
    stop = threading.Event()
    (top / "run").mkdir()

    def keep(programs, name, words):
        while not stop.is_set():
            program = (
                programs.start(name, words) if words else start_node(programs, top / "nodes" / name)
            )
            while program.alive and not stop.wait(0.2):
                pass

    with server_running(ServerFolder.open(top / "server")) as server:
        names = sorted(path.name for path in (top / "nodes").iterdir())
        with Processes(top / "run", {}) as programs:
            keepers = [
                threading.Thread(target=keep, args=(programs, name, others.get(name)), daemon=True)
                for name in names
            ]
            try:
                for keeper in keepers:
                    keeper.start()
                yield server
            finally:
                stop.set()
                for keeper in keepers:
                    keeper.join()


def ended(top: Path) -> None:
    """Nothing is left of a federation but its files."""
    for name in (top / "nodes").iterdir():
        with Processes(name / "run", {}):
            pass  # whatever a killed node left would be ended here
    assert running_from(top) == []


def run_once(top: Path):
    """Train, as the operator of the server does."""
    words = [*HUSHREC, "federate", "run", str(top / "server"), "--json"]
    return subprocess.run(words, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_rehearse_for_a_newcomer(tmp_path):
    """One command from README: a federation that trains, recommends, and is gone."""
    viewers, file, scratch = demo(viewers=150), tmp_path / "viewers.csv", tmp_path / "scratch"
    rows = zip(viewers.users[viewers.user], viewers.items[viewers.item], viewers.time, strict=True)
    file.write_text("user,item,time\n" + "".join(f"{u},{i},{t}\n" for u, i, t in rows))
    scratch.mkdir()
    shorter = {"newton_rounds": 2, "network_rounds": 2}
    words = [word for key, value in shorter.items() for word in ("--set", f"{key}={value}")]
    done = subprocess.run(
        [*HUSHREC, "federate", "rehearse", "--data", file, "--json", *words],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    alone = train(str(file), settings=shorter)
    assert said["test"] == alone.summary.test
    assert len(said["nodes"]) == 3 and sum(said["nodes"].values()) == 150
    assert said["recommendations"] == [vars(line) for line in alone.recommend(said["user"], 5)]
    assert running_from(tmp_path) == [] and list(scratch.iterdir()) == []


@pytest.mark.slow
def test_whoever_is_killed_comes_back_and_nothing_is_counted_twice(tmp_path):
    """A node at five points of a round, the server at three: the model is that of one process."""
    top, rounds = tmp_path / "f", 6
    settings = {
        **{"privacy.mode": "local-gaussian", "privacy.epsilon": 8.0, "privacy.clip": 1.0},
        **{"privacy.noise_seed": 0, "evaluation.every": rounds},
    }
    pairs = tuple(f"{key}={value}" for key, value in settings.items())
    make_rehearsal(top, "demo", 3, ExperimentOptions("pfedrec", None, rounds, 0, pairs))
    doomed = [sys.executable, HERE / "unreliable_node.py", top / "nodes" / "node-2", *POINTS]
    run = [sys.executable, HERE / "unreliable_server.py", top / "server", tmp_path / "fate"]
    deaths = 0
    with parties(top, {"node-2": [str(word) for word in doomed]}):
        while True:
            words = [*map(str, run), *(["--resume"] if deaths else [])]
            done = subprocess.run(words, capture_output=True, text=True, timeout=600)
            if done.returncode != -9:
                break
            deaths += 1
    ended(top)
    assert done.returncode == 0, done.stderr
    assert deaths == len(SERVER_POINTS)
    assert (top / "nodes" / "node-2" / "fate").read_text().split() == list(POINTS)
    alone = train("demo", "pfedrec", rounds=rounds, settings=settings, out=tmp_path / "alone")
    assert json.loads(done.stdout)["test"] == alone.summary.test
    trained = load_file(newest_run(top / "server" / "runs").path / FINAL)
    for name, array in load_file(tmp_path / "alone" / FINAL).items():
        np.testing.assert_array_equal(trained[name], array)
    for path in (top / "nodes").iterdir():
        with NodeDatabase.open(path / "data.node") as store:
            runs = NodeRuns(store)
            uploads = runs.uploads(runs.status()["id"])
            status = runs.status()
        assert status["private_parameters"] >= len(uploads) > 300, "private state is there"
        assert set(uploads.values()) == {rounds}, "each upload is charged once"
    shown = subprocess.run(
        [*HUSHREC, "federate", "status", str(top / "server"), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    status = json.loads(shown.stdout)
    assert status["stage"] == "finished" and status["round"] == rounds
    assert status["nodes"]["node-2"]["lost"] >= len(POINTS) - 1
    assert status["nodes"]["node-1"]["refused"] == 0


@pytest.mark.slow
def test_noise_that_nobody_can_remove_on_sums_that_nobody_can_open(tmp_path):
    """Four nodes, each with its share of the noise; one is killed once it has sent its vector."""
    top, pairs = tmp_path / "f", ("privacy.mode=distributed", "privacy.epsilon=8")
    asked = (*pairs, "evaluation.every=1")
    make_rehearsal(top, "demo", 4, ExperimentOptions("popularity", None, 1, 0, asked))
    dying = [sys.executable, str(HERE / "dying_node.py"), str(top / "nodes" / "node-2")]
    with parties(top, {"node-2": dying}):
        done = run_once(top)
    ended(top)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["privacy"]["epsilon"] <= 8
    assert "a share from each of 4 nodes, of which 1 may drop out" in said["privacy"]["statement"]
    status = status_of(newest_run(top / "server" / "runs"))
    assert status.nodes["node-2"].lost >= 1 and not status.lost_rounds
    assert not list((top / "server").rglob("sum-kept"))
    for path in (top / "nodes").iterdir():
        with NodeDatabase.open(path / "data.node") as store:
            assert store.contract.secure is not None
    model = load_file(newest_run(top / "server" / "runs").path / FINAL)
    alone = train(
        "demo", "popularity", settings={"privacy.mode": "central", "privacy.epsilon": 8.0}
    )
    assert model.keys() == alone.model.shared.keys()
    counts = next(iter(model.values()))
    assert np.corrcoef(counts, next(iter(alone.model.shared.values())))[0, 1] > 0.5


@pytest.mark.slow
def test_a_node_that_sends_what_cannot_be_is_refused_and_named(tmp_path):
    top, rounds = tmp_path / "f", len(KINDS)
    pairs = (f"evaluation.every={rounds}",)
    make_rehearsal(top, "demo", 3, ExperimentOptions("pfedrec", None, rounds, 0, pairs))
    config = ServerConfig.read(top / "server")
    patient = config.policy.model_copy(update={"max_invalid_replies": rounds})
    config.model_copy(update={"policy": patient}).write(top / "server")
    evil = [sys.executable, str(HERE / "evil_node.py"), str(top / "nodes" / "node-2")]
    with parties(top, {"node-2": evil}):
        done = run_once(top)
    ended(top)
    assert done.returncode == 0, done.stderr
    folder = newest_run(top / "server" / "runs")
    lines = EventLog(folder.path / "events.jsonl").lines()
    refused = {line.round: line for line in lines if line.event == "refused"}
    assert {line.node for line in refused.values()} == {"node-2"}
    why = [refused[number].why for number in range(1, rounds + 1)]
    expected = (
        "not finite",
        "numbers that it should",
        "not of round 3",
        "has norm 1e",
        *3 * ("no header",),
    )
    for words, said in zip(expected, why, strict=True):
        assert words in said
    status = status_of(folder)
    assert status.nodes["node-2"].excluded and status.nodes["node-2"].refused == rounds
    assert status.round == rounds and not status.nodes["node-1"].refused
    text = (folder.path / "events.jsonl").read_text()
    assert "viewer-" not in text, "nothing of any user is in the log"


def test_a_run_needs_a_server_that_runs(tmp_path):
    make_rehearsal(tmp_path / "f", "demo", 2, ExperimentOptions("fednext", None, 2, 0, ()))
    with pytest.raises(RunError, match="not running: start it with 'hushrec federate server"):
        begin_run(ServerFolder.open(tmp_path / "f" / "server"))


def test_counters_are_served_to_this_machine():
    port = free_port()
    status = Status("first", "training", rounds=5, round=3)
    with metrics_served(port, lambda: status):
        url = f"http://127.0.0.1:{port}"
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            text = answer.read()
            assert b"\nhushrec_federation_round 3.0\n" in text
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        with urllib.request.urlopen(f"{url}/run/secret") as answer:
            assert answer.read() == text, "whatever the path, it serves the counters alone"
        with (
            pytest.raises(RunError, match="choose another metrics_port"),
            metrics_served(port, lambda: None),
        ):
            pass
    with metrics_served(None, lambda: None):
        pass
