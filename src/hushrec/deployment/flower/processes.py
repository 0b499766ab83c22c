"""Programs that are started, watched, and surely ended.

Programs start programs of their own, some in sessions of their own, so a process group is not all
of them. Everything that is started here carries a mark in its environment, which children inherit:
the folder it works in. Whatever still carries it at the end is ended, by its id and no other way;
so is, at the beginning, what a supervisor left behind that was killed itself.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hushrec.errors import RunError

MARK = "HUSHREC_WORKS_IN"
END_SECONDS = 10.0
"""How long a program may take to end when it is asked to, before it is made to."""
POLL_SECONDS = 0.1
TAIL_LINES = 15
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Program:
    """A program that was started."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    begun: int
    """Where in the log its words begin: those before are of programs before it."""

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self.process.poll() is None

    def said(self) -> str:
        """Return everything it said."""
        with self.log.open("rb") as file:
            file.seek(self.begun)
            return _COLOURS.sub("", file.read().decode("utf-8", "replace"))

    def tail(self) -> str:
        """Return the end of what it said."""
        return "\n".join(self.said().splitlines()[-TAIL_LINES:])

    def require_alive(self) -> None:
        """Raise if it ended, with the end of its log."""
        if not self.alive:
            raise RunError(
                f"{self.name} ended with code {self.process.returncode}; the end of {self.log}:\n"
                f"{self.tail()}"
            )

    def wait_until(self, ready: Callable[[], bool], seconds: float) -> None:
        """Wait until it is ready; raise if it ends or takes too long."""
        deadline = time.monotonic() + seconds
        while not ready():
            self.require_alive()
            if time.monotonic() > deadline:
                raise RunError(
                    f"{self.name} was not ready after {seconds:g} seconds; the end of {self.log}:\n"
                    f"{self.tail()}"
                )
            time.sleep(POLL_SECONDS)


class Processes:
    """Programs that end together, when the context is left, however it is left."""

    def __init__(self, work: Path, environment: Mapping[str, str]) -> None:
        """``work`` is theirs alone; ``environment`` is what they get beside this process's own."""
        self.work = work.resolve()
        self.environment = {**os.environ, **environment, MARK: str(self.work)}
        self.programs: list[Program] = []

    def __enter__(self) -> Self:
        self.stop()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str]) -> Program:
        """Start a program, in a session of its own so that Ctrl-C reaches it through us alone."""
        log = self.work / f"{name}.log"
        with os.fdopen(os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600), "ab") as out:
            begun = out.tell()
            process = subprocess.Popen(  # noqa: S603 - a list of words, the program's path first
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )
        program = Program(name, process, log, begun)
        self.programs.append(program)
        return program

    def stop(self) -> None:
        """Ask all programs to end, then make them; a second Ctrl-C does not interrupt this."""
        with _deaf():
            self._signal(signal.SIGTERM)
            if not self._wait(END_SECONDS):
                self._signal(signal.SIGKILL)
                self._wait(END_SECONDS)
            self.programs.clear()

    def left(self) -> set[int]:
        """Return the ids of all processes that were started here, by us or by our programs."""
        return _marked(self.work) | {p.process.pid for p in self.programs if p.alive}

    def _signal(self, number: int) -> None:
        for program in self.programs:
            if program.alive:
                with suppress(ProcessLookupError):
                    os.killpg(program.process.pid, number)
        for process in _marked(self.work):
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def _wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.left():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True


def free_port() -> int:
    """Return a port of this machine's own address that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Let a TERM, or the end of the terminal, end what is inside as Ctrl-C does, quietly."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _deaf() -> Iterator[None]:
    """Hear no signal meanwhile that would end us."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _marked(work: Path) -> set[int]:
    """Find processes that carry a mark, where the system shows it (Linux)."""
    words = os.fsencode(f"{MARK}={work}")
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if words in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
    return found
