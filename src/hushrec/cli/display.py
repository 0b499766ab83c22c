"""Progress of reading, training and federations, and interruption by signals."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, TaskProgressColumn, TimeRemainingColumn
from rich.table import Table

from hushrec.cli.options import PATH, gather
from hushrec.cli.terminal import Console, echo_err, progress, text_column
from hushrec.config import DEFAULT_METHOD
from hushrec.data import Interactions, load
from hushrec.data.text import OnProgress
from hushrec.deployment.coordinator.planning import Forecast, LinkRates
from hushrec.deployment.coordinator.run import Question, Status, following_question
from hushrec.deployment.coordinator.session import EventLine
from hushrec.errors import ConfigError, listed
from hushrec.federation.experiment import Experiment, ExperimentRequest
from hushrec.federation.requests import absences
from hushrec.federation.rounds import Callback, RoundRecord
from hushrec.io.files import append_line
from hushrec.reporting.tables import human_duration, human_size
from hushrec.runs.progress import PRINT_INTERVAL, Output, TrainingDisplay, bar, lines

DISPLAY_DELAY = 0.5
"""Seconds of reading after which a progress bar appears."""
LOG_INTERVAL = 1.0
"""Seconds between two lines of a log."""
FORECAST_SUMS = ("seconds", "up_bytes", "down_bytes")
"""Fields of a phase's forecast that add up to that of a run."""


@dataclass(frozen=True)
class Verbosity:
    """How much a command prints and logs while it works."""

    quiet: bool = False
    verbose: bool = False
    log: Path | None = None


DEFAULT_VERBOSITY = Verbosity()
verbosity_options = gather(
    "verbosity",
    Verbosity,
    click.option("-q", "--quiet", is_flag=True, help="Print only the result and errors."),
    click.option("-v", "--verbose", is_flag=True, help="Print a line for every round."),
    click.option("--log", type=PATH, metavar="FILE", help="Add lines about progress to a file."),
)


def load_with_progress(request: ExperimentRequest | Experiment, *, quiet: bool) -> Interactions:
    """Load the data of a run; show the progress of reading, and print the notes of the reader."""
    named: Any = request.columns or {}
    for source in (request.data, request.items):
        if source is not None and _is_stream(Path(source)):
            raise ConfigError(
                f"{source} can be read only once, and a run must find its data again: keep it "
                f"first with 'hushrec data import {source} --name NAME'"
            )
    with reading_progress(quiet) as progress:
        data = load(request.data, items=request.items, progress=progress, **named)
    if not quiet:
        for note in data.notes:
            echo_err(note)
    return data


def _is_stream(path: Path) -> bool:
    """Return whether a path can be read only once."""
    try:
        return path.exists() and not path.is_file() and not path.is_dir()
    except (OSError, ValueError):
        return False


def print_default_method(
    request: ExperimentRequest, experiment: Experiment, *, quiet: bool = False
) -> None:
    """Print that another method than the usual default is trained, as noise is added to sums."""
    if request.method is None and experiment.method != DEFAULT_METHOD and not quiet:
        echo_err(
            f"training {experiment.method}: {DEFAULT_METHOD}, the default, needs exact sums, and "
            f"privacy.mode = {experiment.privacy.mode} adds noise to them"
        )


@contextmanager
def reading_progress(quiet: bool, what: str = "reading") -> Iterator[OnProgress]:
    """Show a progress bar if reading, or ``what``, takes longer than `DISPLAY_DELAY`."""
    columns = (text_column(what), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    began = time.monotonic()
    with ExitStack() as stack:
        bars = progress(*columns, transient=True, quiet=quiet)
        task = bars.add_task(what, total=1.0)

        def report(share: float) -> None:
            if time.monotonic() > began + DISPLAY_DELAY and not bars.live.is_started:
                stack.enter_context(bars)
            bars.update(task, completed=share)

        yield report


class SignalInterrupt(Callback):
    """Interrupts training after the round in which Ctrl-C or TERM came."""

    signalled = False

    def on_round_end(self, record: RoundRecord) -> None:
        """Interrupt if a signal came."""
        if self.signalled:
            self.interrupt()


@contextmanager
def interrupt_callback() -> Iterator[SignalInterrupt]:
    """Let the first Ctrl-C or TERM finish the round and its checkpoint; the next stops at once."""
    callback = SignalInterrupt()

    def on_signal(number: int, frame: object) -> None:
        callback.signalled = True
        echo_err("\nfinishing the round; press Ctrl-C again to stop at once")
        restore_handlers()

    def restore_handlers() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, on_signal) for number in signals}
    try:
        yield callback
    finally:
        restore_handlers()


@contextmanager
def training_display(
    quiet: bool, verbosity: Verbosity = DEFAULT_VERBOSITY
) -> Iterator[TrainingDisplay]:
    """Show the progress of training on standard error: a bar, or lines without a terminal."""
    outputs: list[Output] = []
    with ExitStack() as stack:
        if verbosity.log is not None:
            outputs.append(lines(partial(append_line, verbosity.log), LOG_INTERVAL))
        if not (quiet or verbosity.quiet):
            if Console(stderr=True).is_terminal and not verbosity.verbose:
                outputs.append(stack.enter_context(bar(Console(stderr=True))))
            else:
                every = 0.0 if verbosity.verbose else PRINT_INTERVAL
                outputs.append(lines(echo_err, every))
        yield TrainingDisplay(outputs)


# ------------------------------------------------------------ federations


class EventPrinter:
    """Prints a federation's events: forecast, enrolments, failures, and who is waited for."""

    def __init__(self, every: float = PRINT_INTERVAL) -> None:
        """``every`` seconds at most lie between two lines about nodes that are waited for."""
        self.every, self.printed = every, -math.inf
        self.question: Question | None = None
        self.phases: list[EventLine] = []

    def __call__(self, line: EventLine) -> None:
        """Print an event, if people want to know of it."""
        if line.event == "forecast":
            self.phases.append(line)
        elif line.event == "asked" and self.phases:
            for text in _forecast_words(self.phases):
                echo_err(text)
            self.phases = []
        else:
            _print_event(line)
        before, self.question = self.question, following_question(self.question, line)
        now = time.monotonic()
        if self.question not in (None, before) and now >= self.printed + self.every:
            assert self.question is not None, "just checked"
            echo_err(self.question.words(datetime.now(UTC)))
            self.printed = now


def _forecast_words(phases: Sequence[EventLine]) -> list[str]:
    """Write the forecast of a run: each phase, and all of them."""
    rows = [
        (f"{phase.to}, {phase.rounds:,} {'time' if phase.rounds == 1 else 'times'}", phase)
        for phase in phases
    ]
    sums = {name: sum(getattr(phase, name) for phase in phases) for name in FORECAST_SUMS}
    rows.append(("the whole run", phases[0].model_copy(update=sums)))
    return [
        f"forecast, {name}: at most {human_size(sent.up_bytes)} up and "
        f"{human_size(sent.down_bytes)} down, {human_duration(sent.seconds)} for messages"
        for name, sent in rows
    ]


def _print_event(line: EventLine) -> None:
    what, node = line.event, line.node or "a node"
    if what == "enrolled":
        runs = f"; it runs {line.software}" if line.software else ""
        echo_err(f"{node} takes part with {line.users:,} users{runs}")
    elif what == "numbered anew":
        echo_err(line.why)
    elif what == "not applied":
        echo_err(f"round {line.round} is not applied: {line.why}")
    elif what == "counted" and line.missing:
        names = listed(line.missing, quote="")
        echo_err(f"round {line.round}, {line.to}: without {names}, {line.users:,} users are in it")
    elif what in ("no answer", "refused", "declined"):
        echo_err(f"{node}, {line.to}: {what}: {line.why}")
    elif what in ("sat out", "excluded"):
        why = f": {line.why}" if line.why else ""
        echo_err(f"{node}, {line.to}, round {line.round}: {what}{why}")
    elif what == "lost":
        echo_err(f"round {line.round} is lost: {line.why}")


def _aligned(title: str, caption: str, left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for name in (*left, *right):
        table.add_column(name, justify="left" if name in left else "right")
    return table


def status_table(status: Status) -> Table:
    """Show the progress of a federated run and the state of its nodes."""
    spent = "" if status.epsilon is None else f", epsilon {status.epsilon:.3g} so far"
    title = f"{status.run}: {status.stage}, round {status.round} of {status.rounds}{spent}"
    caption = (
        f"messages: {human_size(status.up_bytes)} up, {human_size(status.down_bytes)} down; "
        f"{status.strangers} nodes rejected, {status.lost_rounds} rounds lost, "
        f"{len(status.not_applied)} not applied"
    )
    if status.question is not None:
        caption += f"\n{status.question.words(datetime.now(UTC))}"
    if missing := absences(status.attendance.values()):
        caption += f"\n{missing}"
    for number, why in status.not_applied.items():
        caption += f"\nround {number} is not applied: {why}"
    counted = ("users", "answered", "lost", "sat out", "refused", "last seen")
    table = _aligned(title, caption, ("node",), counted)
    for name, node in sorted(status.nodes.items()):
        counts = (node.users, node.answered, node.lost, node.sat_out, node.refused)
        seen = "excluded" if node.excluded else (node.last_seen or "")[:19].replace("T", " ")
        table.add_row(name, *(f"{count:,}" for count in counts), seen)
    return table


def status_tables(status: Status) -> list[Table]:
    """Show the progress of a federated run, and the messages of each node by phase."""
    table = _aligned(
        "messages by node and phase, evaluations included",
        "",
        ("node", "phase"),
        ("exchanges", "up", "down", "slowest"),
    )
    for name, node in sorted(status.nodes.items()):
        for phase, sent in node.traffic.items():
            sizes = human_size(sent.up_bytes), human_size(sent.down_bytes)
            table.add_row(name, phase, f"{sent.exchanges:,}", *sizes, f"{sent.slowest_s:.1f} s")
    return [status_table(status), *([table] if table.row_count else [])]


def forecast_lines(found: Forecast, rates: LinkRates) -> list[Table | str]:
    """Show the forecast of a federated run, and what it assumes."""
    kind = "secure sums" if found.secure else "sums in the clear, bytes up at most"
    table = _aligned(
        f"{found.nodes} nodes, {found.users:,} users, {kind}",
        "bytes of one node in one round",
        ("phase",),
        ("rounds", "exchanges", "down", "up", "messages take"),
    )
    for each in found.phases:
        sizes = human_size(each.down_bytes), human_size(each.up_bytes)
        counts = f"{each.rounds:,}", f"{each.exchanges:,}"
        table.add_row(each.phase, *counts, *sizes, human_duration(each.seconds))
    up, down = human_size(found.up_bytes), human_size(found.down_bytes)
    node, coordinator = found.node_memory_bytes, found.coordinator_memory_bytes
    return [
        table,
        f"all nodes and rounds: {up} up, {down} down, {human_duration(found.seconds)} for messages",
        f"memory for messages, at most: {human_size(node)} on a node, {human_size(coordinator)} on "
        "the coordinator",
        f"assumed: {rates.exchange_seconds:g} s an exchange, {rates.megabytes_per_second:g} MB/s "
        "shared by all nodes; computing comes on top",
    ]
