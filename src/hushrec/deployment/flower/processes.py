"""Child processes that end together, and their logs.

Flower's programs start further processes, some in sessions of their own, which a signal to the
process group does not reach. Every process started here therefore inherits an environment variable,
`MARK`, that holds its working folder. Stopping ends all processes with that mark. Starting does so
too: a supervisor that was killed may have left some behind.

A log of more than `LOG_BYTES` is moved to a file ``.1``, in place of the one before, so two files
of that size are the most that a program leaves.
"""

from __future__ import annotations

import os
import re
import shutil
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

import psutil

from hushrec.errors import RunError

MARK = "HUSHREC_WORKS_IN"
END_SECONDS = 10.0
"""Seconds between a TERM and a KILL."""
POLL_SECONDS = 0.1
TAIL_LINES = 15
LOG_BYTES = 10_000_000
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Program:
    """A program that was started."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    log_offset: int
    """Where its output begins in the log, which earlier programs of that name share."""

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self.process.poll() is None

    def output(self) -> str:
        """Return its output, as far as the log has it."""
        with self.log.open("rb") as file:
            file.seek(self.log_offset if self.log.stat().st_size >= self.log_offset else 0)
            return _COLOURS.sub("", file.read().decode("utf-8", "replace"))

    def tail(self) -> str:
        """Return the last lines of its output."""
        return "\n".join(self.output().splitlines()[-TAIL_LINES:])

    def rotate_log(self) -> None:
        """Move a log that is too long aside; the program goes on writing to the file."""
        if self.log.stat().st_size > LOG_BYTES:
            shutil.copyfile(self.log, self.log.with_suffix(".log.1"))
            self.log.with_suffix(".log.1").chmod(0o600)
            os.truncate(self.log, 0)

    def require_alive(self) -> None:
        """Raise if it ended, with the end of its log."""
        if not self.alive:
            raise self._error(f"ended with code {self.process.returncode}")

    def wait_until(self, ready: Callable[[], bool], seconds: float) -> None:
        """Wait until it is ready; raise if it ends or takes too long."""
        deadline = time.monotonic() + seconds
        while not ready():
            self.require_alive()
            if time.monotonic() > deadline:
                raise self._error(f"was not ready after {seconds:g} seconds")
            time.sleep(POLL_SECONDS)

    def _error(self, what: str) -> RunError:
        return RunError(f"{self.name} {what}; the end of {self.log}:\n{self.tail()}")


class Processes:
    """Programs that end together, when the context is left, however it is left."""

    def __init__(self, work: Path, environment: Mapping[str, str]) -> None:
        """``work`` is a folder of its own, for the logs; ``environment`` is added to ours."""
        self.work = work.resolve()
        self.environment = {**os.environ, **environment, MARK: str(self.work)}
        self.programs: list[Program] = []

    def __enter__(self) -> Self:
        self.stop()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str]) -> Program:
        """Start a program, in its own session so that Ctrl-C reaches this process only."""
        log = self.work / f"{name}.log"
        with os.fdopen(os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600), "ab") as out:
            offset = out.tell()
            process = subprocess.Popen(  # noqa: S603 - a list of words, the program's path first
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )
        program = Program(name, process, log, offset)
        self.programs.append(program)
        return program

    def stop(self) -> None:
        """Send TERM to all processes, then KILL to those that are left; a signal that comes
        meanwhile is heeded afterwards."""
        in_main = threading.current_thread() is threading.main_thread()  # others handle no signals
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if in_main else ()
        came = list[int]()
        with handling(signals, lambda number, frame: came.append(number)):
            self._signal(signal.SIGTERM)
            if not self._wait(END_SECONDS):
                self._signal(signal.SIGKILL)
                self._wait(END_SECONDS)
            self.programs.clear()
        for number in came[:1]:
            signal.raise_signal(number)

    def remaining(self) -> set[int]:
        """Return the ids of all running processes that were started here, descendants included."""
        marked = {process.pid for process in self._marked()}
        return marked | {each.process.pid for each in self.programs if each.alive}

    def _marked(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            # Other users' processes, and those that end meanwhile, do not show their environment.
            with suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == str(self.work):
                    yield process

    def _signal(self, number: int) -> None:
        """Signal every process once: after a second TERM Flower's programs end impolitely."""
        groups = {each.process.pid for each in self.programs if each.alive}
        marked = {process.pid for process in self._marked()}
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.pid in marked or os.getpgid(process.pid) in groups:
                    process.send_signal(number)

    def _wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.remaining():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True


def free_port() -> int:
    """Return a free port of the loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """End the context quietly on Ctrl-C, on TERM, and when the terminal is closed."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    with suppress(KeyboardInterrupt), handling((signal.SIGTERM, signal.SIGHUP), stop):
        yield


@contextmanager
def handling(
    numbers: Sequence[signal.Signals], handler: Callable[[int, object], None] | signal.Handlers
) -> Iterator[None]:
    """Handle signals so until the context is left."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
