"""``hushrec reproduce``: the tables and figures of papers and of our own studies, run and shown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.markdown import Markdown

from experiments.compare import compare_cells
from experiments.measure import epsilons
from experiments.page import exhibit_section, write_pages
from experiments.plan import EPSILONS, Exhibit, Paper, Task, chosen, experiments_folder, read_papers
from experiments.results import Results
from experiments.runner import Session, Step, Told, steps_for
from experiments.states import state_of
from hushrec.api import Execution
from hushrec.cli import options
from hushrec.cli.display import interrupt_callback, training_display
from hushrec.cli.options import PATH
from hushrec.cli.terminal import Console, echo, echo_err, print_json
from hushrec.errors import ConfigError, nearest
from hushrec.federation.backends import Machine
from hushrec.reporting.tables import human_duration, plain_table

UNITS = {"h": 3600, "m": 60, "s": 1}


def _seconds(context: click.Context, option: click.Parameter, value: str | None) -> float | None:
    """Read a time such as 2h, 90m or 1h30m."""
    if value is None:
        return None
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", value)
    if not value or not found:
        raise ConfigError(f"--budget {value}: write a time such as 2h, 90m, 30s or 1h30m")
    parts = zip(found.groups(), UNITS.values(), strict=True)
    return float(sum(int(count or 0) * seconds for count, seconds in parts))


@dataclass(frozen=True)
class Which:
    """Which cells of the named exhibits."""

    data: tuple[str, ...]
    only: tuple[str, ...]
    protocol: str | None

    def has(self, row: str, task: Task) -> bool:
        """Say whether a cell is one of them."""
        return (
            (not self.data or task.data in self.data)
            and (not self.only or row in self.only)
            and self.protocol in (None, task.protocol)
        )

    def check(self, exhibits: Sequence[Exhibit]) -> None:
        """Refuse names that are nobody's."""
        cells = [cell for exhibit in exhibits for cell in exhibit.cells]
        for given, known in (
            (self.data, [c.data for c in cells]),
            (self.only, [c.row.name for c in cells]),
        ):
            for name in given:
                if name not in known:
                    raise ConfigError(f"nothing here is called '{name}'{nearest(name, set(known))}")


@dataclass(frozen=True)
class Place:
    """Where plan, results and runs are."""

    experiments: Path | None
    runs: Path


@click.command("reproduce")
@click.argument("names", metavar="list | page | all | NAME...", nargs=-1, required=True)
@options.gather(
    "which",
    Which,
    click.option(
        "--data", multiple=True, metavar="NAME", help="On this data set only; repeatable."
    ),
    click.option("--only", multiple=True, metavar="ROW", help="This row only; repeatable."),
    click.option("--protocol", type=click.Choice(["published", "honest"])),
)
@click.option(
    "--budget", callback=_seconds, metavar="TIME", help="Stop after 2h, 90m …; go on later."
)
@click.option("--again", is_flag=True, help="Run what has a result again, and say what changed.")
@click.option("--dry-run", is_flag=True, help="Show the commands and run nothing.")
@options.gather(
    "place",
    Place,
    click.option(
        "--experiments",
        type=PATH,
        metavar="DIR",
        help="The folder 'experiments' of a checkout.  [here, or where hushrec runs from]",
    ),
    click.option(
        "--runs",
        type=PATH,
        default=Path("runs/reproduce"),
        show_default=True,
        metavar="DIR",
    ),
)
@options.threads_option
@options.json_option
def reproduce_command(
    names: tuple[str, ...],
    which: Which,
    budget: float | None,
    again: bool,
    dry_run: bool,
    place: Place,
    threads: int | None,
    as_json: bool,
) -> None:
    """Reproduce tables and figures of the papers, and of our own studies.

    \b
    hushrec reproduce list                       # every table and figure, and what is done of it
    hushrec reproduce pfedrec/table-2            # run what is missing in it, and show it
    hushrec reproduce fedrkg --data filmtrust    # of all of a paper, what is on one data set
    hushrec reproduce all --budget 2h            # the shortest first; given again, it goes on
    hushrec reproduce pfedrec/figure-3 --again   # once more from the same seed: the same figures?
    hushrec reproduce personal-tables            # a study of our own: methods over data sets
    hushrec reproduce page                       # write docs/papers.md, pages of studies, pictures

    Papers have up to three columns: as printed, as published, and honestly. `all` is all that
    `list` shows. Results are filed under experiments/results by the command that gave them, and
    are not run again. Data sets are found as for `hushrec train`.
    """
    experiments = experiments_folder(place.experiments)
    papers = read_papers(experiments)
    results = Results(experiments / "results")
    if names in (("list",), ("page",)):
        if names == ("page",):
            for page in write_pages(papers, results, experiments):
                echo(page)
        else:
            _list(papers, results, as_json)
        return
    exhibits = chosen(papers, names)
    which.check(exhibits)
    steps = steps_for(papers, exhibits, results, again=again, only=which.has)
    if dry_run:
        _show_steps(steps, as_json)
        return
    if any(e.kind == "epsilon" for e in exhibits) and (again or not results.get(EPSILONS)):
        results.put("epsilon", EPSILONS, epsilons())
    session = Session(results, place.runs, budget, again)
    told = _run(session, steps, Machine(threads), quiet=as_json)
    compare_cells(exhibits, results, session.kept)
    if as_json:
        print_json(
            [
                {
                    "command": one.step.task.command,
                    "changed": one.changed,
                    **one.record.model_dump(exclude={"values": {"map"}}),
                }
                for one in told
            ]
        )
        return
    console = Console()
    for exhibit in exhibits if len(exhibits) < 4 else []:
        console.print(Markdown("\n".join(exhibit_section(exhibit, results, which.data))))
    left = len(steps) - len(told)
    if left:
        echo_err(f"{left} of {len(steps)} are left; the same command goes on")


def _run(session: Session, steps: Sequence[Step], machine: Machine, *, quiet: bool) -> list[Told]:
    """Run, with a bar for the rounds of a run and a line for each that is done."""
    found = []
    with training_display(quiet) as display, interrupt_callback() as stop:

        def begun(step: Step, seed: int, number: int) -> None:
            task = step.task
            display.label = f"{number} of {len(steps)}: {task.method} on {task.data}, seed {seed}"

        execution = Execution(machine, (display, stop))
        for told in session.run(steps, execution, begun):
            found.append(told)
            if not quiet:
                echo_err(_line(told))
    return found


def _line(told: Told) -> str:
    came = told.record.diverged or human_duration(told.record.seconds)
    if told.changed is not None:
        came += ", the same figures" if not told.changed else f", changed: {told.changed[0]} …"
    left = f"; about {human_duration(told.left)} left" if told.number < told.steps else ""
    return f"{told.number} of {told.steps}: {told.step.task.command} ({came}{left})"


def _show_steps(steps: Sequence[Step], as_json: bool) -> None:
    if as_json:
        print_json([{"command": s.task.command, "seconds": s.seconds} for s in steps])
        return
    for step in steps:
        echo(f"{step.task.command}  # about {human_duration(step.seconds)}")


def _list(papers: Sequence[Paper], results: Results, as_json: bool) -> None:
    rows: list[dict[str, Any]] = []
    for paper in papers:
        for exhibit in paper.exhibits:
            state = state_of(exhibit, results)
            seconds = sum(s.seconds for s in steps_for(papers, [exhibit], results))
            named = {"name": exhibit.name, "title": exhibit.title, "state": state.word}
            rows.append({**named, "done": state.done, "cells": state.cells, "seconds": seconds})
        for name, what in paper.nothing_to_run.items():
            named = {"name": f"{paper.key}/{name}", "title": what, "state": "nothing to run"}
            rows.append({**named, "done": 0, "cells": 0, "seconds": 0.0})
    if as_json:
        print_json(rows)
        return
    table = plain_table("", "name", "state", figures=("done", "cells", "to run"))
    table.add_column("title")
    for row in rows:
        time = human_duration(row["seconds"]) if row["seconds"] else ""
        figures = (str(row["done"]), str(row["cells"]), time)
        table.add_row(row["name"], row["state"], *figures, row["title"])
    Console().print(table)
