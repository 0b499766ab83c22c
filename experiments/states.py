"""What is done of an exhibit, and what its cells say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from experiments.plan import EPSILONS, Cell, Exhibit, Task
from experiments.results import Difference, Results
from experiments.runner import installed
from hushrec.data.sources import CATALOG

Word = Literal["done", "diverged", "not run", "not built", "unobtainable"]


@dataclass(frozen=True)
class Figure:
    """One number of an exhibit, or why there is none."""

    state: Word
    value: float | None = None
    """In the paper's unit."""
    sd: float | None = None
    """Over seeds."""


def figures(exhibit: Exhibit, cell: Cell, protocol: str, results: Results) -> list[Figure]:
    """Return what a cell says under a protocol, a figure for each metric."""
    task = cell.tasks.get(protocol)
    if task is None or not installed(task):
        word: Word = "unobtainable" if cell.unobtainable else "not built"
        return [Figure(word)] * len(exhibit.metrics)
    record = results.get(task.command)
    found = []
    for metric in exhibit.metrics:
        value = record.find(cell.read, metric) if record else None
        if record is not None and record.diverged:
            found.append(Figure("diverged"))
        elif record is None or value is None:
            found.append(Figure("not run"))
        else:
            if isinstance(value, list):  # a curve: its last point
                value = value[-1][1]
            sd = record.spread(cell.read, metric)
            found.append(
                Figure("done", exhibit.scale * value, None if sd is None else exhibit.scale * sd)
            )
    return found


def differences(
    exhibit: Exhibit, cell: Cell, results: Results
) -> Iterator[tuple[str, Task, list[Difference]]]:
    """Return how a cell differs from those it was tested against, in each metric of the test."""
    for rival, task, other in exhibit.pairs(cell):
        record = results.get(task.command)
        found = record.tests(other.command, cell.read, exhibit.compared) if record else []
        if found:
            yield rival, task, found


def counted(cell: Cell, metrics: Sequence[str]) -> list[Figure]:
    """Return the sizes of a data set that we know."""
    if cell.data not in CATALOG:
        word: Word = "unobtainable" if cell.unobtainable else "not built"
        return [Figure(word)] * len(metrics)
    known = CATALOG[cell.data]
    sparsity = 100 * (1 - known.rows / known.users / known.items)
    sizes = {"users": known.users, "items": known.items, "interactions": known.rows}
    return [Figure("done", {**sizes, "sparsity": sparsity}[metric]) for metric in metrics]


@dataclass(frozen=True)
class State:
    """How much of an exhibit is done, in cells: a row on a data set under a protocol."""

    counts: dict[Word, int]

    @property
    def done(self) -> int:
        """Cells that have a result; those that diverge have theirs."""
        return self.counts.get("done", 0) + self.counts.get("diverged", 0)

    @property
    def cells(self) -> int:
        """All that can be had."""
        return sum(self.counts.values()) - self.counts.get("unobtainable", 0)

    @property
    def word(self) -> str:
        """Say it in a word or two."""
        if not self.cells:
            return "unobtainable"
        return "done" if self.done == self.cells else "partly" if self.done else "not run"


def state_of(exhibit: Exhibit, results: Results) -> State:
    """Count the cells of an exhibit by what is to be said of them."""
    if exhibit.kind == "epsilon":
        return State({"done" if results.get(EPSILONS) else "not run": 1})
    words: list[Word] = []
    for cell in exhibit.cells:
        if exhibit.kind == "counts":
            words.append(counted(cell, exhibit.metrics)[0].state)
            continue
        for protocol in exhibit.protocols:
            found = [figure.state for figure in figures(exhibit, cell, protocol, results)]
            words.append(next((word for word in found if word == "not run"), found[0]))
    return State({word: words.count(word) for word in dict.fromkeys(words)})
