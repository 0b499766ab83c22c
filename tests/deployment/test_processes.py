"""Programs are ended with all they started: after an error, a signal, a killed supervisor."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hushrec.deployment.flower.processes import MARK, Processes, free_port
from hushrec.errors import RunError

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
"""Does not end when it is asked to."""
PARENT = f"""
import subprocess, sys, time
own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
detached = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], start_new_session=True)
print(own.pid, detached.pid, flush=True)
time.sleep(600)
"""
"""Starts two programs, one of them in a session of its own and stubborn."""
SUPERVISOR = f"""
import sys, time
from pathlib import Path
from hushrec.deployment.flower import programs as processes
from hushrec.deployment.flower.processes import Processes, stopped_by_signals
processes.END_SECONDS = 1.0
with stopped_by_signals(), Processes(Path(sys.argv[1]), {{}}) as processes:
    processes.start("parent", [sys.executable, "-c", {PARENT!r}])
    print("started", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("hushrec.deployment.flower.processes.END_SECONDS", 1.0)


def runs(process):
    """Whether a process is there and not only waiting to be buried."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(processes):
    """Whether all are gone; one that is told to end may take a moment on its way out."""
    for _ in range(50):
        if not any(map(runs, processes)):
            return True
        time.sleep(0.1)
    return False


def children(log):
    """The ids that the parent printed, once it did."""
    for _ in range(200):
        if log.exists() and (text := log.read_text().split()):
            return [int(word) for word in text]
        time.sleep(0.05)
    raise AssertionError("the parent said nothing")


def start_family(processes, tmp_path):
    parent = processes.start("parent", [sys.executable, "-c", PARENT])
    family = [parent.process.pid, *children(tmp_path / "parent.log")]
    assert all(map(runs, family))
    assert processes.remaining() == set(family)
    return family


def test_all_are_ended_however_the_context_is_left(tmp_path):
    with Processes(tmp_path, {}) as processes:
        family = start_family(processes, tmp_path)
    assert gone(family)
    (tmp_path / "parent.log").unlink()
    with pytest.raises(ZeroDivisionError), Processes(tmp_path, {}) as processes:
        family = start_family(processes, tmp_path)
        raise ZeroDivisionError
    assert gone(family)


def test_a_group_alone_would_leave_something(tmp_path):
    """The control: what `killpg` does not reach is why processes carry a mark."""
    with Processes(tmp_path, {}) as processes:
        parent, own, detached = start_family(processes, tmp_path)
        os.killpg(parent, signal.SIGKILL)
        processes.programs[0].process.wait()
        time.sleep(0.2)
        assert not runs(own)
        assert runs(detached)
    assert not runs(detached)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_supervisor_ends_all(tmp_path, number):
    supervisor = supervise(tmp_path)
    family = children(tmp_path / "parent.log")
    supervisor.send_signal(number)
    assert supervisor.wait(30) == 0
    assert gone(family)


def test_what_a_killed_supervisor_left_is_ended_by_the_next(tmp_path):
    supervisor = supervise(tmp_path)
    family = children(tmp_path / "parent.log")
    supervisor.kill()
    supervisor.wait()
    assert all(map(runs, family)), "nobody ended them"
    with Processes(tmp_path, {}):
        assert gone(family)


def test_others_are_left_alone(tmp_path):
    mark = {**os.environ, MARK: str(tmp_path / "elsewhere")}
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=mark)
    with Processes(tmp_path, {}) as processes:
        start_family(processes, tmp_path)
    assert other.poll() is None
    other.kill()
    other.wait()


def supervise(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path)], stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"started\n"
    return process


def test_an_error_has_the_end_of_the_log(tmp_path):
    words = "print('\\x1b[91mno such certificate\\x1b[0m'); raise SystemExit(7)"
    with Processes(tmp_path, {}) as processes:
        program = processes.start("brief", [sys.executable, "-c", words])
        with pytest.raises(RunError, match=r"brief ended with code 7.*\n.*no such certificate$"):
            program.wait_until(lambda: False, 30)
        slow = processes.start("slow", [sys.executable, "-c", "import time; time.sleep(600)"])
        with pytest.raises(RunError, match=r"slow was not ready after 0\.2 seconds"):
            slow.wait_until(lambda: False, 0.2)
        again = processes.start("brief", [sys.executable, "-c", "print('once more')"])
        again.process.wait()
        assert again.output() == "once more\n", "what was said before is another program's"


def test_programs_get_their_environment_and_a_private_log(tmp_path):
    words = "import os; print(os.environ['COLOUR'])"
    with Processes(tmp_path, {"COLOUR": "teal"}) as processes:
        program = processes.start("print", [sys.executable, "-c", words])
        program.process.wait()
        assert program.tail() == "teal"
        assert program.log.stat().st_mode & 0o077 == 0


def test_free_ports_can_be_had():
    assert 1024 < free_port() < 65536
