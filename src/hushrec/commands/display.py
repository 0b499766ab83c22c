"""What a training command says on standard error while it works, and how it is stopped."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hushrec.data import Interactions, load
from hushrec.report.tables import shown_metrics
from hushrec.round import RoundReport


def load_aloud(name: str, items: str | None, *, quiet: bool) -> Interactions:
    """Load data and say what was handled while reading it."""
    data = load(name, items=items)
    if not quiet:
        for note in data.notes:
            click.echo(note, err=True)
    return data


@contextmanager
def polite_stop() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C or TERM finish the round and its checkpoint; the next stops at once."""
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        asked = True
        click.echo("\nfinishing the round; press Ctrl-C again to stop at once", err=True)
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
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[state]}"),
        console=Console(stderr=True),
    )
    with progress:
        task = progress.add_task("training", total=None, state="")
        latest = ""

        def show(report: RoundReport, what: str = "training") -> None:
            nonlocal latest
            if report.valid is not None:
                name = next(iter(shown_metrics(report.valid["full"])[1:]), "auc")
                latest = f"valid {name} {report.valid['full'][name]:.4f}"
            loss = "" if report.loss is None else f"loss {report.loss:.4f}  "
            state = f"{loss}{latest}  {report.seconds * 1000:.0f} ms/round"
            where: dict[str, Any] = {"completed": report.round, "total": report.rounds}
            progress.update(task, description=what, state=state, **where)

        yield show
