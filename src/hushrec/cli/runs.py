"""Commands over finished runs; nothing is trained again.

``evaluate``, ``analyse``, ``compare`` and ``report`` show results, and ``release`` writes what of a
run may be published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from hushrec.analysis import run as analysis
from hushrec.api import Run
from hushrec.cli import options
from hushrec.cli.options import PATH, complete_runs, json_option, run_argument
from hushrec.cli.serving import file_sizes, size_line
from hushrec.cli.terminal import Console, echo, print_json, show
from hushrec.data.splitting import Part
from hushrec.errors import ConfigError
from hushrec.evaluation.evaluator import Evaluator
from hushrec.evaluation.metrics import parse_metric, user_metric
from hushrec.io import usable_cores
from hushrec.io.files import write_text
from hushrec.methods.base import facts_of
from hushrec.reporting import tables
from hushrec.reporting.html import write_comparison, write_federated_report, write_report
from hushrec.reporting.sections import ADAPTATION, write_convergence
from hushrec.runs.comparison import METRICS, compare
from hushrec.runs.folder import RunFolder
from hushrec.runs.release import release
from hushrec.runs.schema import AdaptationCurve, Baselines

STDOUT = "-"


def _table_option(name: str, words: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return an option that writes a table into a file, or prints it where no file is named."""
    return click.option(f"--{name}", is_flag=False, flag_value=STDOUT, metavar="[FILE]", help=words)


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
    measured = {part: own, "baselines": Baselines(**baselines)}
    table = tables.result_table(run.summary.model_copy(update=measured), metrics, part)
    show(as_json, {**_heading(run), part: own, "baselines": baselines}, table)


def _adapt(
    run: Run, evaluator: Evaluator, part: Part, metrics: tuple[str, ...], as_json: bool
) -> None:
    """Measure unseen users after so many interactions, keep the curve, and show it."""
    names = list(metrics) or ["hits@10", "hits@20", "ndcg@10"]
    curve = AdaptationCurve(**analysis.adaptation_curve(evaluator, run.model, part, names))
    if run.folder is not None:
        run.folder.write(ADAPTATION, curve)
        write_report(run)
    show(as_json, curve, tables.adaptation_table(curve))


def _heading(run: Run) -> dict[str, Any]:
    """Return what every result of a run begins with."""
    names = ("method", "data", "protocol", "protocol_mark", "marks", "seed")
    return {name: getattr(run.summary, name) for name in names}


@click.command("analyse")
@options.run_argument
@options.part_option
@click.option(
    "--only",
    type=click.Choice(["tables", "groups", "guidance"]),
    help="One analysis; refused where the method does not support it.  [all that it supports]",
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
    run.summary.require_figures(str(folder), "analyse")
    makers: dict[str, Callable[[], Any]] = {
        "tables": lambda: analysis.metrics_by_table(run, part, threads or usable_cores()),
        "groups": lambda: analysis.metrics_by_group(run, part),
        "guidance": lambda: analysis.guidance_effects(run),
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
    summary, model = run.summary, facts_of(run.model.method, run.model.shared)
    if as_json:
        print_json({**_heading(run), "part": part, "model": model, **found})
        return
    console = Console()
    console.print(f"{summary.method} on {summary.data_name}", style="bold")
    for mark in summary.all_marks:
        console.print(mark, style="bold red")
    if "tables" in found:
        console.print(tables.own_table_table(found["tables"], part))
    if "groups" in found:
        console.print(tables.groups_table(found["groups"], part))
    if found.get("guidance"):
        console.print(tables.guidance_table(found["guidance"]))
    elif "guidance" in found:
        refused.append("guidance: no guidance was committed in this run")
    for line in [*tables.model_lines(model), *refused]:
        console.print(line, style="dim")


@click.command("compare")
@click.argument("folders", metavar="RUN RUN...", nargs=-1, type=PATH, shell_complete=complete_runs)
@click.option("--metric", "metrics", multiple=True, metavar="NAME", default=METRICS)
@click.option("--candidates", default="full", help="full, or sampled99.")
@click.option(
    "--test", "test_name", type=click.Choice(["randomisation", "wilcoxon"]), default="randomisation"
)
@click.option(
    "--against",
    metavar="RUN|METHOD",
    shell_complete=complete_runs,
    help="The baseline: a run, or a method, whose run it is on each data set.  [the first run]",
)
@click.option("--all-pairs", is_flag=True, help="Test any two runs of a data set.")
@_table_option("latex", "Write the table of a paper; its document loads booktabs.")
@_table_option("markdown", "Write the same table in Markdown.")
@_table_option("csv", "Write every figure, test and cost: a line for each run and metric.")
@click.option("--no-costs", is_flag=True, help="Leave bytes out of --latex and --markdown.")
@click.option(
    "--plot", type=PATH, metavar="FILE.svg", help="Draw the runs' validation curves in one picture."
)
@options.json_option
def compare_command(
    folders: tuple[Path, ...],
    metrics: tuple[str, ...],
    candidates: str,
    test_name: Any,
    against: str | None,
    all_pairs: bool,
    latex: str | None,
    markdown: str | None,
    csv: str | None,
    no_costs: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Compare finished runs user by user, the first as the baseline.

    Runs of several data sets are grouped by data set.

    \b
    hushrec compare runs/popularity runs/fedmf runs/pfedrec
    hushrec compare runs/a runs/b --metric hr@20 --candidates sampled99 --json
    hushrec compare runs/fedmf runs/pfedrec --against runs/popularity --latex table.tex
    hushrec compare runs/ml-100k-* runs/ml-1m-* --against popularity --markdown
    hushrec compare runs/a runs/b runs/c --all-pairs --csv pairs.csv
    hushrec compare runs/fedmf runs/pfedrec --plot convergence.svg
    """
    places = {"--latex": latex, "--markdown": markdown, "--csv": csv}
    _check_places(places, as_json)
    compared = compare(
        folders,
        metrics,
        candidates=candidates,
        test=test_name,
        against=against,
        all_pairs=all_pairs,
    )
    writers: dict[str, Callable[[], str]] = {
        "--latex": lambda: compared.to_latex(costs=not no_costs),
        "--markdown": lambda: compared.to_markdown(costs=not no_costs),
        "--csv": compared.to_csv,
    }
    if plot is not None:
        write_convergence(folders, plot, metrics, candidates)
    for option, place in places.items():
        if place not in (None, STDOUT):
            write_text(Path(place), writers[option]())
    if STDOUT in places.values():
        option = next(option for option, place in places.items() if place == STDOUT)
        echo(writers[option]().rstrip())
        return
    show(as_json, compared.rows, *tables.comparison_tables(compared), tables.cost_table(compared))


def _check_places(places: Mapping[str, str | None], as_json: bool) -> None:
    """Refuse two outputs on standard output, and a run where a file is to be written."""
    printed = [option for option, place in places.items() if place == STDOUT]
    printed += ["--json"] * as_json
    if len(printed) > 1:
        raise ConfigError(f"{' and '.join(printed)} cannot both be printed: name a FILE for one")
    for option, place in places.items():
        if place is not None and Path(place).is_dir():
            raise ConfigError(
                f"{option} {place}: that is a folder; name the FILE to write, or write {option} at "
                "the end to print the table"
            )


@click.command("release")
@run_argument
@click.argument("target", metavar="DIR", type=PATH)
@json_option
def release_command(folder: Path, target: Path, as_json: bool) -> None:
    """Write what a run's guarantee covers, and nothing else, into a folder.

    The shipped model, the statement, the account, the configuration, the list of items and, where
    the method has one, the bundle for devices; a manifest with the SHA-256 of every file. A run
    without a guarantee, or whose noise can be repeated, is refused.

    \b
    hushrec train --data ml-1m --privacy central --epsilon 8 --out runs/private
    hushrec release runs/private published
    hushrec release runs/private published --json
    """
    run = Run.open(folder)
    path = release(run, target)
    sizes, statement = file_sizes(path), run.summary.privacy.statement
    result = {"release": str(path), "bytes": sizes, "statement": statement}
    show(as_json, result, size_line(path, sizes), statement)


@click.command("report")
@click.argument(
    "folders", metavar="RUN...", nargs=-1, required=True, type=PATH, shell_complete=complete_runs
)
@click.option("--samples", is_flag=True, help="Show some users' histories and lists.")
@click.option("--map", "with_map", is_flag=True, help="Draw the items as one user sees them.")
@click.option("--user", metavar="ID", help="Show a user's lists: own, global, random, popular.")
@click.option("--out", type=PATH, metavar="FILE.html", help="Where the page of several runs goes.")
def report_command(
    folders: tuple[Path, ...],
    samples: bool,
    with_map: bool,
    user: str | None,
    out: Path | None,
) -> None:
    """Write the report of a run, or one page of several, and print its path.

    A page shows nothing of a single user unless --samples, --map or --user asks for it; of a
    private run it then says that its guarantee does not cover them.

    \b
    hushrec report runs/pfedrec
    hushrec report runs/pfedrec --samples
    hushrec report runs/pfedrec --map --user viewer-0001
    hushrec report runs/popularity runs/fedmf runs/pfedrec --out compared.html
    """
    of_users = samples or with_map or user is not None
    if len(folders) > 1:
        if of_users:
            raise ConfigError("--samples, --map and --user are for the page of one run")
        echo(write_comparison(folders, out or Path("compared.html")))
        return
    if out is not None:
        raise ConfigError("a run's page is in its folder; --out is for a page of several runs")
    folder = RunFolder.open(folders[0])
    if folder.read_summary().nodes is None:
        run = Run.open(folders[0])
        echo(write_report(run, samples=samples, item_map=with_map, user=user))
    elif of_users:
        raise ConfigError(
            "--samples, --map and --user need users' interactions, which stay on the nodes"
        )
    else:
        echo(write_federated_report(folder))
