"""``hushrec evaluate``, ``analyse`` and ``compare``: finished runs, nothing is trained again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hushrec.analysis.run import (
    adaptation_curve,
    guidance_effects,
    metrics_by_group,
    metrics_by_table,
)
from hushrec.api import Run
from hushrec.cli import options
from hushrec.cli.options import PATH, complete_runs
from hushrec.cli.terminal import Console, print_json
from hushrec.data.splitting import Part
from hushrec.errors import ConfigError
from hushrec.evaluation.evaluator import Evaluator
from hushrec.evaluation.metrics import parse_metric, user_metric
from hushrec.io.memory import usable_cores
from hushrec.methods.base import facts_of
from hushrec.reporting import tables
from hushrec.reporting.html import write_report
from hushrec.reporting.sections import ADAPTATION
from hushrec.reporting.standalone import write_convergence
from hushrec.runs.comparison import compare_runs
from hushrec.runs.schema import AdaptationCurve, Baselines


@click.command("evaluate")
@options.run_argument
@options.part_option
@click.option(
    "--metric", "metrics", multiple=True, metavar="NAME", help="Such as hr@50; repeatable."
)
@click.option(
    "--adaptation", is_flag=True, help="Unseen users after 0, 1, 2, 5, 10, 20 interactions instead."
)
@options.threads_option
@options.json_option
def evaluate_command(
    folder: Path,
    part: Part,
    metrics: tuple[str, ...],
    adaptation: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Score a finished run again from its checkpoint.

    \b
    hushrec evaluate runs/pfedrec
    hushrec evaluate runs/pfedrec --metric hr@50 --metric ndcg@100 --json
    hushrec evaluate runs/pfedrec --metric coverage@20 --metric popularity_bias@20
    hushrec evaluate runs/privrec --adaptation
    """
    for name in metrics:
        (user_metric if adaptation else parse_metric)(name)
    run = Run.open(folder)
    threads = threads or usable_cores()
    if adaptation:
        _adapt(run, run.evaluator(threads), part, metrics, as_json)
        return
    own, baselines = run.measure(metrics, part, threads)
    if as_json:
        print_json({**_heading(run), part: own, "baselines": baselines})
        return
    measured = {part: own, "baselines": Baselines(**baselines)}
    Console().print(tables.result_table(run.summary.model_copy(update=measured), metrics, part))


def _adapt(
    run: Run, evaluator: Evaluator, part: Part, metrics: tuple[str, ...], as_json: bool
) -> None:
    """Measure unseen users after so many interactions, keep the curve, and show it."""
    names = list(metrics) or ["hits@10", "hits@20", "ndcg@10"]
    curve = AdaptationCurve(**adaptation_curve(evaluator, run.model, part, names))
    if run.folder is not None:
        run.folder.write(ADAPTATION, curve)
        write_report(run)
    if as_json:
        print_json(curve)
    else:
        Console().print(tables.adaptation_table(curve))


def _heading(run: Run) -> dict[str, Any]:
    """Return what every result of a run begins with."""
    names = ("method", "data", "protocol", "protocol_mark", "seed")
    return {name: getattr(run.summary, name) for name in names}


@click.command("analyse")
@options.run_argument
@options.part_option
@click.option(
    "--only",
    type=click.Choice(["tables", "groups", "guidance"]),
    help="One analysis; refused where the method has nothing to say.  [all it has]",
)
@options.threads_option
@options.json_option
def analyse_command(
    folder: Path, part: Part, only: str | None, threads: int | None, as_json: bool
) -> None:
    """Look behind the means of a finished run; nothing is trained again.

    \b
    tables    scores with the own, the server's and a random other user's item table
    groups    cold / warm and distinct / followers, the worst tenth, the spread over users
    guidance  what each guidance round did to each group, and where the gates stand (fedrkg)

    \b
    hushrec analyse runs/pfedrec
    hushrec analyse runs/fedrkg --only guidance --json
    """
    run = Run.open(folder)
    makers: dict[str, Callable[[], Any]] = {
        "tables": lambda: metrics_by_table(run, part, threads or usable_cores()),
        "groups": lambda: metrics_by_group(run, part),
        "guidance": lambda: guidance_effects(run),
    }
    found: dict[str, Any] = {}
    refused: list[str] = []
    for name, make in makers.items():
        if only in (None, name):
            try:
                found[name] = make()
            except ConfigError as error:
                if only:
                    raise
                refused.append(f"{name}: {error}")
    heading = _heading(run)
    if as_json:
        model = facts_of(run.model.method, run.model.shared)
        print_json({**heading, "part": part, "model": model, **found})
        return
    console = Console()
    console.print(f"{heading['method']} on {heading['data']}", style="bold")
    if heading["protocol_mark"]:
        console.print(heading["protocol_mark"], style="bold red")
    if "tables" in found:
        console.print(tables.own_table_table(found["tables"], part))
    if "groups" in found:
        console.print(tables.groups_table(found["groups"], part))
    if found.get("guidance"):
        console.print(tables.guidance_table(found["guidance"]))
    elif "guidance" in found:
        refused.append("guidance: no guidance was committed in this run")
    for line in [*tables.model_lines(facts_of(run.model.method, run.model.shared)), *refused]:
        console.print(line, style="dim")


@click.command("compare")
@click.argument("folders", metavar="RUN RUN...", nargs=-1, type=PATH, shell_complete=complete_runs)
@click.option("--metric", "metrics", multiple=True, metavar="NAME", default=("hr@10", "ndcg@10"))
@click.option("--candidates", default="full", show_default=True, help="full, or sampled99.")
@click.option(
    "--test",
    "test_name",
    type=click.Choice(["randomisation", "wilcoxon"]),
    default="randomisation",
    show_default=True,
)
@click.option(
    "--plot",
    type=PATH,
    metavar="FILE.svg",
    help="Draw the runs' validation curves in one picture.",
)
@options.json_option
def compare_command(
    folders: tuple[Path, ...],
    metrics: tuple[str, ...],
    candidates: str,
    test_name: Any,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Compare finished runs user by user, the first as the baseline.

    \b
    hushrec compare runs/popularity runs/fedmf runs/pfedrec
    hushrec compare runs/a runs/b --metric hr@20 --candidates sampled99 --json
    hushrec compare runs/fedmf runs/pfedrec --plot convergence.svg
    """
    rows = compare_runs(folders, metrics, candidates, test_name)
    if plot is not None:
        write_convergence(folders, plot, metrics, candidates)
    if as_json:
        print_json(rows)
        return
    Console().print(*tables.comparison_tables(rows), tables.cost_table(rows), sep="\n")
