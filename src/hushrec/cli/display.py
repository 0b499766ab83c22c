"""What a training command says on standard error while it works, and how it is stopped."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import click
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskProgressColumn,
    TimeRemainingColumn,
)

from hushrec.cli.options import PATH, gather
from hushrec.cli.terminal import Console, progress, say, text_column
from hushrec.data import Interactions, load
from hushrec.data.text import Progress, is_stream
from hushrec.errors import ConfigError, plain
from hushrec.federation.rounds import RoundReport
from hushrec.io.files import append_line
from hushrec.reporting.tables import shown_metrics
from hushrec.reporting.wording import human_duration

SHOWN_AFTER = 0.5
"""Seconds of reading after which a bar says how far it is."""
SAID_EVERY, LOGGED_EVERY = 5.0, 1.0
"""Seconds between two lines where there is no terminal, and in a log."""


@dataclass(frozen=True)
class Talk:
    """How much is said while a command works."""

    quiet: bool = False
    verbose: bool = False
    log: Path | None = None


PLAIN = Talk()
talk_options = gather(
    "talk",
    Talk,
    click.option("-q", "--quiet", is_flag=True, help="Say nothing but the result and errors."),
    click.option("-v", "--verbose", is_flag=True, help="Say a line for every round."),
    click.option("--log", type=PATH, metavar="FILE", help="Add lines about progress to a file."),
)


def load_aloud(name: str, items: str | None, *, quiet: bool) -> Interactions:
    """Load what a run is trained on, and say what was handled while reading it."""
    for source in (name, items):
        if source is not None and is_stream(Path(source)):
            raise ConfigError(
                f"{source} can be read only once, and a run must find its data again: keep it "
                f"first with 'hushrec data import {source} --name NAME'"
            )
    with reading_display(quiet) as progress:
        data = load(name, items=items, progress=progress)
    if not quiet:
        for note in data.notes:
            say(note, err=True)
    return data


@contextmanager
def reading_display(quiet: bool) -> Iterator[Progress]:
    """Show how far reading is, and how long it will take, if it takes long at all."""
    columns = (text_column("reading"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    began = time.monotonic()
    with ExitStack() as stack:
        bars = progress(*columns, transient=True, quiet=quiet)
        task = bars.add_task("reading", total=1.0)

        def report(share: float) -> None:
            if time.monotonic() > began + SHOWN_AFTER and not bars.live.is_started:
                stack.enter_context(bars)
            bars.update(task, completed=share)

        yield report


@contextmanager
def polite_stop() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C or TERM finish the round and its checkpoint; the next stops at once."""
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        asked = True
        say("\nfinishing the round; press Ctrl-C again to stop at once", err=True)
        hear_as_before()

    def hear_as_before() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        hear_as_before()


@contextmanager
def training_display(quiet: bool, talk: Talk = PLAIN) -> Iterator[Callable[..., None]]:
    """Show on standard error how far training is: a bar, or lines where there is no terminal."""
    speakers: list[_Speaker] = []
    with ExitStack() as stack:
        if talk.log is not None:
            speakers.append(_Lines(partial(append_line, talk.log), LOGGED_EVERY))
        if not (quiet or talk.quiet):
            if talk.verbose:
                speakers.append(_Lines(_say_aside, 0.0))
            elif Console(stderr=True).is_terminal:
                speakers.append(stack.enter_context(_bar()))
            else:
                speakers.append(_Lines(_say_aside, SAID_EVERY))
        began, rounds = time.monotonic(), 0

        def show(report: RoundReport, what: str = "training") -> None:
            nonlocal rounds
            rounds += 1
            each = (time.monotonic() - began) / rounds
            for speak in speakers:
                speak(report, what, each)

        yield show


class _Speaker(Protocol):
    """Tells of a round, in what work it was, and how long a round takes."""

    def __call__(self, report: RoundReport, what: str, each: float) -> None: ...


class _Lines:
    """A line from time to time: of the first round, of the last, and every few seconds."""

    def __init__(self, write: Callable[[str], None], every: float) -> None:
        self.write, self.every = write, every
        self.said = -math.inf
        self.latest = ""

    def __call__(self, report: RoundReport, what: str, each: float) -> None:
        self.latest = _validation(report) or self.latest
        now = time.monotonic()
        if report.round < report.rounds and now < self.said + self.every:
            return
        self.said = now
        left = human_duration(each * (report.rounds - report.round))
        state = [_loss(report), self.latest, report.phase, f"{human_duration(each)} a round"]
        said = ", ".join(part for part in (*state, f"{left} left") if part)
        self.write(plain(f"{what}: round {report.round} of {report.rounds}: {said}"))


@contextmanager
def _bar() -> Iterator[_Speaker]:
    columns = (text_column("{task.description}"), BarColumn(), MofNCompleteColumn())
    with progress(*columns, TimeRemainingColumn(), text_column("{task.fields[state]}")) as bars:
        task = bars.add_task("training", total=None, state="")
        latest = ""

        def speak(report: RoundReport, what: str, each: float) -> None:
            nonlocal latest
            latest = _validation(report) or latest
            parts = (_loss(report), latest, report.phase, f"{human_duration(each)} a round")
            where: dict[str, Any] = {"completed": report.round, "total": report.rounds}
            state = "  ".join(part for part in parts if part)
            bars.update(task, description=what, state=state, **where)

        yield speak


def _validation(report: RoundReport) -> str:
    if report.valid is None:
        return ""
    name = next(iter(shown_metrics(report.valid["full"])[1:]), "auc")
    return f"valid {name} {report.valid['full'][name]:.4f}"


def _loss(report: RoundReport) -> str:
    return "" if report.loss is None else f"loss {report.loss:.4f}"


def _say_aside(line: str) -> None:
    say(line, err=True)
