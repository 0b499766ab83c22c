"""What a training command says on standard error while it works, and how it is stopped."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskProgressColumn,
    TimeRemainingColumn,
)

from hushrec.commands.terminal import progress, say, words
from hushrec.data import Interactions, load
from hushrec.data.text import Heard, is_stream
from hushrec.errors import ConfigError
from hushrec.report.tables import shown_metrics
from hushrec.round import RoundReport

SHOWN_AFTER = 0.5
"""Seconds of reading after which a bar says how far it is."""


def load_aloud(name: str, items: str | None, *, quiet: bool) -> Interactions:
    """Load what a run is trained on, and say what was handled while reading it."""
    for source in (name, items):
        if source is not None and is_stream(Path(source)):
            raise ConfigError(
                f"{source} can be read only once, and a run must find its data again: keep it "
                f"first with 'hushrec data import {source} --name NAME'"
            )
    with reading_display(quiet) as heard:
        data = load(name, items=items, heard=heard)
    if not quiet:
        for note in data.notes:
            say(note, err=True)
    return data


@contextmanager
def reading_display(quiet: bool) -> Iterator[Heard]:
    """Show how far reading is, and how long it will take, if it takes long at all."""
    columns = (words("reading"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    began = time.monotonic()
    with ExitStack() as stack:
        bars = progress(*columns, transient=True, quiet=quiet)
        task = bars.add_task("reading", total=1.0)

        def heard(share: float) -> None:
            if time.monotonic() > began + SHOWN_AFTER and not bars.live.is_started:
                stack.enter_context(bars)
            bars.update(task, completed=share)

        yield heard


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
def training_display(quiet: bool) -> Iterator[Callable[..., None]]:
    """Show a progress bar on standard error, with loss, validation, speed and time left."""
    if quiet:
        yield lambda report, what="": None
        return
    columns = (words("{task.description}"), BarColumn(), MofNCompleteColumn())
    with progress(*columns, TimeRemainingColumn(), words("{task.fields[state]}")) as bars:
        task = bars.add_task("training", total=None, state="")
        latest = ""

        def show(report: RoundReport, what: str = "training") -> None:
            nonlocal latest
            if report.valid is not None:
                name = next(iter(shown_metrics(report.valid["full"])[1:]), "auc")
                latest = f"valid {name} {report.valid['full'][name]:.4f}"
            loss = "" if report.loss is None else f"loss {report.loss:.4f}  "
            state = f"{loss}{latest}  {report.seconds * 1000:.0f} ms/round"
            where: dict[str, Any] = {"completed": report.round, "total": report.rounds}
            bars.update(task, description=what, state=state, **where)

        yield show
