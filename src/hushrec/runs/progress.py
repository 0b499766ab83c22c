"""Progress of training for people: a bar, lines or a notebook's output, and the time left.

`TrainingDisplay` is the callback of all of them; the command line and `train` share it.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from hushrec.errors import plain
from hushrec.federation.experiment import Experiment
from hushrec.federation.rounds import Callback, RoundRecord

NO_BREAK = "\N{NO-BREAK SPACE}"
PRINT_INTERVAL = 5.0
"""Seconds between two lines where there is no terminal."""
UNKNOWN = "…"
"""Shown while the time left cannot be estimated."""
BAR_WIDTH = 20
LONGEST_ROUND = 3.0
"""A round counts for the time left with so many times the median of its phase at most."""


def human_duration(seconds: float) -> str:
    """Write a duration for people."""
    if seconds < 1:
        return f"{1000 * seconds:.0f}{NO_BREAK}ms"
    if seconds < 90:
        return f"{seconds:.1f}{NO_BREAK}s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f}{NO_BREAK}min"
    return f"{seconds / 3600:.1f}{NO_BREAK}h"


def human_size(size: float) -> str:
    """Write a number of bytes for people, in units of 1,000."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while abs(size) >= 999.5 and len(units) > 1:
        size /= 1000
        units.pop(0)
    digits = 0 if units[0] == "bytes" or size >= 100 else 1
    return f"{size:.{digits}f}{NO_BREAK}{units[0]}"


class TimeLeft:
    """Estimates the time left of a training, phase by phase.

    Rounds of different phases take different times, and the first round of a phase may compile
    kernels. So a phase is estimated from its second round on; a single round that waited for a
    deadline counts as three usual ones at most. Phases to come that were not seen yet have no
    estimate: they are counted.
    """

    def __init__(self, phase_rounds: Sequence[int], rounds: int) -> None:
        """``phase_rounds`` are the planned rounds of the phases; the last one has all others."""
        self.ends = [sum(phase_rounds[: n + 1]) for n in range(len(phase_rounds) - 1)]
        self.ends = [min(end, rounds) for end in self.ends] + [rounds]
        self.seen: dict[int, list[float]] = {}

    @classmethod
    def of(cls, experiment: Experiment) -> TimeLeft:
        """Return the estimator of an experiment that begins or goes on."""
        phases = experiment.make_method().phases
        return cls([phase.rounds for phase in phases], experiment.rounds)

    def add(self, round_number: int, seconds: float) -> None:
        """Count a round."""
        phase = next(n for n, end in enumerate(self.ends) if round_number <= end)
        self.seen.setdefault(phase, []).append(seconds)

    def left(self, round_number: int) -> tuple[float, int]:
        """Return the seconds left after a round, as far as they are known, and in how many phases
        they are not."""
        total, begin, unknown = 0.0, 0, 0
        for phase, end in enumerate(self.ends):
            rounds, begin = end - max(begin, round_number), end
            if rounds > 0:
                times = self.seen.get(phase, [])[1:]
                if times:
                    most = LONGEST_ROUND * statistics.median(times)
                    total += rounds * sum(min(each, most) for each in times) / len(times)
                unknown += not times
        return total, unknown

    def words(self, round_number: int) -> str:
        """Write the time left after a round."""
        known, unknown = self.left(round_number)
        if not unknown:
            return f"{human_duration(known)} left"
        return f"over {human_duration(known)} left" if known else f"{UNKNOWN} left"


Output = Callable[[RoundRecord, str, list[str], str], None]
"""Shows a round: its record, the label of the training, loss and metrics, and the time left."""


class TrainingDisplay(Callback):
    """Shows every round on several outputs: a progress bar, lines on standard error, a log file."""

    def __init__(self, outputs: Sequence[Output], label: str = "training") -> None:
        self.outputs, self.label = outputs, label

    def on_begin(self, experiment: Experiment) -> None:
        """Start the clock."""
        self.time_left, self.evaluation = TimeLeft.of(experiment), experiment.evaluation
        self.ended, self.validation = time.monotonic(), ""

    def on_round_end(self, record: RoundRecord) -> None:
        """Show loss, latest validation, phase, and the time of the round."""
        began, self.ended = self.ended, time.monotonic()
        seconds = self.ended - began
        self.time_left.add(record.round, seconds)
        if record.valid is not None:
            name = self.evaluation.select
            value = record.valid[self.evaluation.candidates][name]
            self.validation = f"valid {name} {value:.4f}"
        loss = "" if record.loss is None else f"loss {record.loss:.4f}"
        skipped = "not applied" if record.not_applied else ""
        took = f"{human_duration(seconds)} a round"
        parts = (skipped, loss, self.validation, record.phase, took)
        left = self.time_left.words(record.round)
        for show in self.outputs:
            show(record, self.label, [part for part in parts if part], left)


def lines(write: Callable[[str], None], every: float = PRINT_INTERVAL) -> Output:
    """Write a line for the first round, for the last, and after so many seconds."""
    written = -math.inf

    def show(record: RoundRecord, label: str, state: list[str], left: str) -> None:
        nonlocal written
        now = time.monotonic()
        if record.round >= record.rounds or now >= written + every:
            written = now
            text = ", ".join([*state, left])
            write(plain(f"{label}: round {record.round} of {record.rounds}: {text}"))

    return show


@contextmanager
def bar(console: Console) -> Iterator[Output]:
    """Show a progress bar; loss and metrics are cut where the line is short, nothing else is."""
    state_column = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(BAR_WIDTH),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}", markup=False),
        TextColumn("{task.fields[state]}", markup=False, table_column=state_column),
    )
    with Progress(*columns, console=console, expand=True) as bars:
        task = bars.add_task("training", total=None, left="", state="")

        def show(record: RoundRecord, label: str, state: list[str], left: str) -> None:
            done: dict[str, Any] = {"completed": record.round, "total": record.rounds}
            text = plain("  ".join(state))
            bars.update(task, description=plain(label), left=left, state=text, **done)

        yield show


def notebook() -> Output:
    """Show a line with a bar below the cell of a notebook, and update it in place."""
    display: Any = import_module("IPython.display").display
    handles: list[Any] = []

    def show(record: RoundRecord, label: str, state: list[str], left: str) -> None:
        filled = BAR_WIDTH * record.round // record.rounds
        drawn = "█" * filled + "░" * (BAR_WIDTH - filled)
        words = [label, drawn, f"{record.round}/{record.rounds}", left, *state]
        shown = {"text/plain": plain("  ".join(words))}
        if handles:
            handles[0].update(shown, raw=True)
        else:
            handles.append(display(shown, raw=True, display_id=True))

    return show


@contextmanager
def python_display(wanted: bool | None) -> Iterator[list[Callback]]:
    """Show the progress of `train` in a terminal or a notebook; elsewhere only where ``wanted``."""
    console = Console(stderr=True, emoji=False, highlight=False)
    if wanted is False or (wanted is None and not (console.is_terminal or console.is_jupyter)):
        yield []
    elif console.is_jupyter:
        yield [TrainingDisplay([notebook()])]
    elif console.is_terminal:
        with bar(console) as output:
            yield [TrainingDisplay([output])]
    else:
        yield [TrainingDisplay([lines(lambda line: print(line, file=sys.stderr))])]
