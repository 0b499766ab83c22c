"""A federation of real processes on loopback, and the faults that are played on it.

Every party is started by its command and, when it ended, started again after a second, as a service
manager does. A run that was interrupted is continued with ``--resume``.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
from safetensors.numpy import load_file

from hushrec import train
from hushrec.cli.federate import ExperimentOptions, make_rehearsal
from hushrec.deployment.coordinator.run import EVENTS, newest_run
from hushrec.deployment.coordinator.session import EventLine, EventLog
from hushrec.deployment.flower.processes import MARK, Processes
from hushrec.deployment.node.database import NodeDatabase
from hushrec.deployment.node.runs import NodeRuns
from hushrec.deployment.provisioning import NodeConfig, ServerConfig
from hushrec.federation.experiment import parse_settings

FINAL = "checkpoint/final/selected-shared.safetensors"
SETTINGS = {
    **{"privacy.mode": "local-gaussian", "privacy.epsilon": 8.0, "privacy.clip": 1.0},
    "privacy.noise_seed": 0,
}
HUSHREC = (sys.executable, "-m", "hushrec", "federate")
POLICY = {"round_seconds": 90.0, "first_round_factor": 1.0, "enrol_seconds": 120.0}
PAUSE = 0.2


class Party:
    """A server or node that is started again whenever it ended."""

    def __init__(self, words: Iterable[object], log: Path) -> None:
        self.words, self.log = [str(word) for word in words], log
        self.stopping, self.starts = threading.Event(), 0
        self.process: subprocess.Popen[bytes] | None = None
        log.touch()
        self.keeper = threading.Thread(target=self._keep, daemon=True)
        self.keeper.start()

    def _keep(self) -> None:
        while not self.stopping.is_set():
            with self.log.open("ab") as out:
                self.process = subprocess.Popen(
                    self.words, stdout=out, stderr=out, start_new_session=True
                )
                self.starts += 1
            while self.process.poll() is None and not self.stopping.wait(PAUSE):
                pass
            self.stopping.wait(1.0)

    def stop(self) -> None:
        """End it politely."""
        self.stopping.set()
        self.keeper.join()
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


class Relay:
    """A link that can be cut: nothing passes, and nobody is told."""

    def __init__(self, port: int) -> None:
        """``port`` is the server's."""
        self.target, self.whole = port, threading.Event()
        self.whole.set()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, seconds: float) -> None:
        """Cut the link for a while."""
        self.whole.clear()
        timer = threading.Timer(seconds, self.whole.set)
        timer.daemon = True
        timer.start()

    def _accept(self) -> None:
        while True:
            inner, _ = self.listener.accept()
            with suppress(OSError):
                outer = socket.create_connection(("127.0.0.1", self.target), timeout=600)
                inner.settimeout(600)
                for pair in ((inner, outer), (outer, inner)):
                    threading.Thread(target=self._copy, args=pair, daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while True:
                data = source.recv(2**16)
                self.whole.wait()
                if not data:
                    break
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@dataclass
class Outcome:
    """How a run ended."""

    seconds: float
    resumes: int
    summary: dict[str, Any]
    events: list[EventLine]
    said: str

    @property
    def missed(self) -> set[str]:
        """Nodes that sat out something."""
        return {line.node for line in self.events if line.event == "sat out" and line.node}


@dataclass
class Federation:
    """A server and its nodes, each a process."""

    top: Path
    nodes: int = 3
    rounds: int = 6
    secure: bool = False
    policy: dict[str, float] = field(default_factory=dict)

    def __enter__(self) -> Self:
        settings = {} if self.secure else SETTINGS
        settings = {**settings, "evaluation.every": self.rounds}
        pairs = tuple(f"{key}={value}" for key, value in settings.items())
        options = ExperimentOptions("pfedrec", None, self.rounds, 0, pairs, self.secure)
        self.settings = parse_settings(pairs)
        make_rehearsal(self.top, "demo", self.nodes, options)
        config = ServerConfig.read(self.top / "server")
        patient = config.policy.model_copy(update={**POLICY, **self.policy})
        config.model_copy(update={"policy": patient}).write(self.top / "server")
        self.server = Party([*HUSHREC, "server", self.top / "server"], self.top / "server.log")
        names = sorted(path.name for path in (self.top / "nodes").iterdir())
        self.relays = {name: Relay(config.port) for name in names}
        for name, relay in self.relays.items():
            folder = self.top / "nodes" / name
            node = NodeConfig.read(folder)
            node.model_copy(update={"server": f"localhost:{relay.port}"}).write(folder)
        self.parties = {name: self.start(name) for name in names}
        while "listening" not in self.server.log.read_text():
            time.sleep(PAUSE)
        return self

    def start(self, name: str) -> Party:
        """Start a node."""
        return Party([*HUSHREC, "node", self.top / "nodes" / name], self.top / f"{name}.log")

    def __exit__(self, *error: object) -> None:
        with ExitStack() as stack:
            for party in (self.server, *self.parties.values()):
                stack.callback(party.stop)
        for folder in (self.top / "server", *(self.top / "nodes").iterdir()):
            with Processes(folder / "run", {}):
                pass

    # ------------------------------------------------------------ processes

    def program(self, name: str) -> psutil.Process | None:
        """Return the SuperNode of a node, or the SuperLink of "server"."""
        folder = self.top / "server" if name == "server" else self.top / "nodes" / name
        wanted = "flower-superlink" if name == "server" else "flower-supernode"
        mark = str((folder / "run").resolve())
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                words = " ".join(process.cmdline())
                if process.environ().get(MARK) == mark and wanted in words:
                    return process
        return None

    def kill_program(self, name: str) -> None:
        """Kill a SuperNode or the SuperLink, as ``kill -9`` does."""
        found = self.program(name)
        if found is not None:
            found.kill()

    def kill(self, name: str) -> None:
        """Kill the process of a node, or the supervisor of the server."""
        party = self.server if name == "server" else self.parties[name]
        if party.process is not None:
            party.process.kill()

    def freeze(self, name: str, seconds: float, *, whole: bool = True) -> None:
        """Stop a node for a while: its process and SuperNode, or the SuperNode alone."""
        found = [self.program(name)]
        party = self.server if name == "server" else self.parties[name]
        if whole and party.process is not None:
            found.append(psutil.Process(party.process.pid))
        frozen = [process for process in found if process is not None]
        for process in frozen:
            with suppress(psutil.Error):
                process.suspend()

        def thaw() -> None:
            for process in frozen:
                with suppress(psutil.Error):
                    process.resume()

        timer = threading.Timer(seconds, thaw)
        timer.daemon = True
        timer.start()

    # ------------------------------------------------------------ runs

    def run(
        self, faults: Iterable[tuple[int, Callable[[], object]]] = (), seconds: float = 900.0
    ) -> Outcome:
        """Train; play each fault when so many rounds are done. A fault that returns "run" has the
        command killed."""
        waiting, began, resumes, said = list(faults), time.monotonic(), 0, ""
        while True:
            words = [*HUSHREC, "run", self.top / "server", "--json"]
            if resumes:
                words.append("--resume")
            process = subprocess.Popen(
                [str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            while process.poll() is None:
                if waiting and waiting[0][0] <= self.round():
                    _, fault = waiting.pop(0)
                    if fault() == "run":
                        process.kill()
                if time.monotonic() - began > seconds:
                    process.kill()
                    raise AssertionError(f"not done in {seconds} s: {self.last_events()}")
                time.sleep(PAUSE)
            out, errors = process.communicate()
            said += errors.decode()
            if process.returncode == 0:
                break
            resumes += 1
            if resumes > 20:
                raise AssertionError(said)
            time.sleep(1.0)
        log = newest_run(self.top / "server" / "runs")
        assert log is not None
        events = list(EventLog(log.path / EVENTS).lines())
        took = time.monotonic() - began
        return Outcome(took, resumes, json.loads(out), events, said)

    def round(self) -> int:
        """Return how many rounds of the newest run are done; 0 if it is over."""
        newest = newest_run(self.top / "server" / "runs")
        if newest is None:
            return 0
        done = 0
        with suppress(Exception):
            for line in EventLog(newest.path / EVENTS).lines():
                done = line.round if line.event == "round" else done
        return done

    def last_events(self) -> str:
        """Return the end of the newest run's log."""
        newest = newest_run(self.top / "server" / "runs")
        return "" if newest is None else (newest.path / EVENTS).read_text()[-2000:]

    # ------------------------------------------------------------ results

    def same_bits(self) -> bool:
        """Return whether the newest run has the bits of one process."""
        alone = self.top / "alone"
        if not alone.exists():
            train("demo", "pfedrec", rounds=self.rounds, settings=self.settings, out=alone)
        newest = newest_run(self.top / "server" / "runs")
        assert newest is not None
        trained, expected = load_file(newest.path / FINAL), load_file(alone / FINAL)
        same = (np.array_equal(trained[name], array) for name, array in expected.items())
        return trained.keys() == expected.keys() and all(same)

    def uploads(self) -> set[int]:
        """Return how often clients were charged for an upload in the newest run."""
        found: set[int] = set()
        for path in (self.top / "nodes").iterdir():
            with NodeDatabase.open(path / "data.node") as store:
                runs = NodeRuns(store)
                found |= set(runs.uploads(runs.status()["id"]).values())
        return found
