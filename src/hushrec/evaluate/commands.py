"""``hushrec evaluate``, ``analyse`` and ``compare``: finished runs, nothing is trained again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from hushrec.backends.inprocess import usable_cores
from hushrec.cli_options import json_option, run_argument, threads_option
from hushrec.errors import ConfigError
from hushrec.evaluate.adaptation import adaptation_curve
from hushrec.evaluate.analyse import groups_of, guidance_effects, whose_table
from hushrec.evaluate.compare import compare_runs
from hushrec.evaluate.metrics import parse_metric, summarise
from hushrec.evaluate.yardsticks import chance_ranks, popularity_ranks
from hushrec.methods.capabilities import facts_of
from hushrec.report.convergence import write_convergence
from hushrec.report.html import ADAPTATION, write_report
from hushrec.report.tables import (
    adaptation_table,
    comparison_tables,
    cost_table,
    groups_table,
    guidance_table,
    model_lines,
    own_table_table,
    result_table,
)
from hushrec.run import Run
from hushrec.split import Part


@click.command("evaluate")
@run_argument
@click.option("--part", type=click.Choice(["valid", "test"]), default="test", show_default=True)
@click.option(
    "--metric", "metrics", multiple=True, metavar="NAME", help="Such as hr@50; repeatable."
)
@click.option(
    "--adaptation", is_flag=True, help="Unseen users after 0, 1, 2, 5, 10, 20 interactions instead."
)
@threads_option
@json_option
def evaluate_command(
    folder: Path,
    part: str,
    metrics: tuple[str, ...],
    adaptation: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Score a finished run again from its checkpoint.

    \b
    hushrec evaluate runs/pfedrec
    hushrec evaluate runs/pfedrec --metric hr@50 --metric ndcg@100 --json
    hushrec evaluate runs/privrec --adaptation
    """
    for name in metrics:
        parse_metric(name)
    run = Run.open(folder)
    evaluator = run.evaluator(threads or usable_cores())
    chosen: Part = "valid" if part == "valid" else "test"
    if adaptation:
        names = list(metrics) or ["hits@10", "hits@20", "ndcg@10"]
        curve = adaptation_curve(evaluator, run.method, run.shared, chosen, names)
        if run.folder is not None:
            run.folder.write_json(ADAPTATION, curve)
            write_report(run)
        if as_json:
            click.echo(json.dumps(curve, indent=2))
        else:
            Console().print(adaptation_table(curve))
        return
    ranks = evaluator.rank(run.method, run.shared, run.store, chosen)
    popularity = popularity_ranks(evaluator, chosen)
    names = list(metrics) or evaluator.config.metric_names()

    def table(source: Mapping[str, Any]) -> dict[str, dict[str, float]]:
        return {candidates: summarise(value, names) for candidates, value in source.items()}

    result = {
        **{
            key: run.summary[key] for key in ("method", "data", "protocol", "protocol_mark", "seed")
        },
        chosen: table(ranks),
        "yardsticks": {
            "popularity": table(popularity),
            "chance": table(chance_ranks(popularity)),
        },
    }
    if as_json:
        click.echo(json.dumps(result, indent=2))
        return
    Console().print(result_table(result, metrics, chosen))


@click.command("analyse")
@run_argument
@click.option("--part", type=click.Choice(["valid", "test"]), default="test", show_default=True)
@click.option(
    "--only",
    type=click.Choice(["tables", "groups", "guidance"]),
    help="One analysis; refused where the method has nothing to say.  [all it has]",
)
@threads_option
@json_option
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
        "tables": lambda: whose_table(run, part, threads or usable_cores()),
        "groups": lambda: groups_of(run, part),
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
    heading = {k: run.summary[k] for k in ("method", "data", "protocol", "protocol_mark", "seed")}
    if as_json:
        plain = dict(found)
        if "groups" in found:
            plain["groups"] = {name: said.as_dict() for name, said in found["groups"].items()}
        if "guidance" in found:
            plain["guidance"] = [effect.as_dict() for effect in found["guidance"]]
        model = facts_of(run.method, run.shared)
        click.echo(json.dumps({**heading, "part": part, "model": model, **plain}, indent=2))
        return
    console = Console()
    mark = f" [bold red]{heading['protocol_mark']}[/]" if heading["protocol_mark"] else ""
    console.print(f"[bold]{escape(heading['method'])} on {escape(heading['data'])}[/]{mark}")
    if "tables" in found:
        console.print(own_table_table(found["tables"], part))
    if "groups" in found:
        console.print(groups_table(found["groups"], part))
    if found.get("guidance"):
        console.print(guidance_table(found["guidance"]))
    elif "guidance" in found:
        refused.append("guidance: no guidance was committed in this run")
    for line in [*model_lines(facts_of(run.method, run.shared)), *refused]:
        console.print(line, style="dim", highlight=False)


@click.command("compare")
@click.argument("folders", metavar="RUN RUN...", nargs=-1, type=click.Path(path_type=Path))
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
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.svg",
    help="Draw the runs' validation curves in one picture.",
)
@json_option
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
        click.echo(json.dumps([row.as_dict() for row in rows], indent=2))
        return
    Console().print(*comparison_tables(rows), cost_table(rows), sep="\n")
