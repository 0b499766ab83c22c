"""Run what is not done yet, the shortest first, within a budget; what was stopped goes on later."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from experiments.measure import Place, measure, request_of
from experiments.plan import Exhibit, Paper, Task, tasks_of
from experiments.results import Record, Results, missing_parts
from hushrec.api import Execution
from hushrec.data import load
from hushrec.data.sources import CATALOG
from hushrec.errors import StoppedError
from hushrec.federation.experiment import preset_names
from hushrec.federation.rounds import Callback, RoundRecord
from hushrec.methods.base import method_names

UNKNOWN_PACE = 3e-6
"""Seconds that a round takes for each interaction, where no run of the method is known."""
ROUNDING = 1e-9
"""Figures that differ by less, relatively, are of the same ranks, added up in another order."""


@dataclass(frozen=True)
class Step:
    """A task to run, what is looked up in its result, and how long it should take."""

    task: Task
    wanted: tuple[Place, ...]
    seconds: float


def wanted_of(papers: Sequence[Paper]) -> Mapping[str, tuple[Place, ...]]:
    """Return by command what all exhibits look up in its result."""
    found: dict[str, dict[Place, None]] = {}
    exhibits = [exhibit for paper in papers for exhibit in paper.exhibits]
    for exhibit, cell, task in tasks_of(exhibits):
        places = found.setdefault(task.command, {})
        places.update(dict.fromkeys((cell.read, metric) for metric in exhibit.metrics))
    return {command: tuple(places) for command, places in found.items()}


def installed(task: Task) -> bool:
    """Say whether method and preset are there."""
    return _installed(task.method, task.preset)


@cache  # packages that bring methods are looked for on the disk
def _installed(method: str, preset: str | None) -> bool:
    return method in method_names() and (preset is None or preset in preset_names(method))


def steps_for(
    papers: Sequence[Paper],
    exhibits: Sequence[Exhibit],
    results: Results,
    *,
    again: bool = False,
    only: Callable[[str, Task], bool] = lambda row, task: True,
) -> list[Step]:
    """Return what these exhibits still need, the shortest first; with ``again`` what they have."""
    wanted, found = wanted_of(papers), {}
    for _, cell, task in tasks_of(exhibits):
        record = results.get(task.command)
        open_ = missing_parts(record, wanted[task.command])
        if open_ != again and installed(task) and only(cell.row.name, task):
            seconds = expected_seconds(task, results)
            found[task.command] = Step(task, wanted[task.command], seconds)
    return sorted(found.values(), key=lambda step: step.seconds)


def expected_seconds(task: Task, results: Results) -> float:
    """Say how long a task should take, by what it or its method took before."""
    record = results.get(task.command)
    if record is not None and record.seconds:
        return record.seconds
    known = [
        other.seconds / (other.rounds * len(other.seeds) * _rows(_data_of(command)))
        for command, other in results.records()
        if f" --method {task.method} " in command and other.seconds
    ]
    pace = statistics.median(known) if known else UNKNOWN_PACE
    return pace * request_of(task).experiment().rounds * task.seeds * _rows(task.data)


def _data_of(command: str) -> str:
    words = command.split()
    return words[words.index("--data") + 1]


@cache
def _rows(data: str) -> int:
    return CATALOG[data].rows if data in CATALOG else len(load(data).user)


@dataclass(frozen=True)
class Told:
    """What came of a step."""

    step: Step
    record: Record
    changed: list[str] | None
    """Of a repeated task, the figures that are not the same; None where it had no result."""
    number: int
    steps: int
    left: float
    """Seconds that the rest should take."""


class TimeBudget(Callback):
    """Interrupts a run when the time of a session is over."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds, self.began = seconds, time.monotonic()

    def is_over(self) -> bool:
        """Say whether the time is over."""
        return self.seconds is not None and time.monotonic() - self.began > self.seconds

    def on_round_end(self, record: RoundRecord) -> None:
        """Interrupt if the time is over."""
        if self.is_over():
            self.interrupt()


@dataclass(frozen=True)
class Session:
    """Where runs and results go, and how long it may take."""

    results: Results
    runs: Path
    budget: float | None = None
    """Seconds; None for as long as it takes."""
    again: bool = False

    @property
    def kept(self) -> Path:
        """Where the runs of this session are."""
        return self.runs / "again" if self.again else self.runs

    def run(
        self,
        steps: Sequence[Step],
        execution: Execution,
        on_step: Callable[[Step, int, int], None] = lambda step, seed, number: None,
    ) -> Iterator[Told]:
        """Run one step after the other until all are done or the time is over."""
        budget = TimeBudget(self.budget)
        others = execution.callbacks
        execution = replace(execution, callbacks=(*others, budget))
        spent = expected = 0.0
        for number, step in enumerate(steps, 1):
            if budget.is_over():
                return
            start = time.monotonic()
            try:
                record, changed = self._run(step, number, execution, on_step)
            except StoppedError:
                if any(callback.requested for callback in others):
                    raise
                return
            spent, expected = spent + time.monotonic() - start, expected + step.seconds
            rest = sum(later.seconds for later in steps[number:])
            yield Told(step, record, changed, number, len(steps), rest * spent / expected)

    def _run(
        self,
        step: Step,
        number: int,
        execution: Execution,
        on_step: Callable[[Step, int, int], None],
    ) -> tuple[Record, list[str] | None]:
        task = step.task
        before = self.results.get(task.command)
        if self.again:
            shutil.rmtree(self.kept / task.folder, ignore_errors=True)
        data = load(task.data)
        record = measure(
            task, data, self.kept, step.wanted, lambda seed: on_step(step, seed, number), execution
        )
        changed = None if before is None else changes(before.values, record.values)
        if before is not None and _same_ranks(before, record):
            record = record.model_copy(update={"against": before.against})
        else:
            self.results.forget_tests(task.command)
        self.results.put(task.data, task.command, record)
        return record, changed


def _same_ranks(before: Record, after: Record) -> bool:
    """Say whether tests that were made with one record hold for the other."""
    return not changes(before.values.get("test"), after.values.get("test"), rounding=ROUNDING)


def changes(before: object, after: object, path: str = "", *, rounding: float = 0) -> list[str]:
    """Return the paths of figures that both have and that differ, by more than ``rounding``."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            changed
            for key in before
            if key in after
            for changed in changes(before[key], after[key], f"{path}/{key}", rounding=rounding)
        ]
    same = json.dumps(before) == json.dumps(after)
    if isinstance(before, float) and isinstance(after, float):
        same = same or math.isclose(before, after, rel_tol=rounding)
    return [] if same else [path.removeprefix("/")]
