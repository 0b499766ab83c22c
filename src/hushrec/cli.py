"""The command line. Results go to standard output, everything else to standard error."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from hushrec.backends.inprocess import usable_cores
from hushrec.config import parse_settings, preset_names
from hushrec.data import catalog, load
from hushrec.data.commands import data as data_group
from hushrec.data.files import read_history
from hushrec.errors import ConfigError, HushrecError, StoppedError
from hushrec.evaluate.compare import compare_runs
from hushrec.evaluate.metrics import parse_metric, summarise
from hushrec.evaluate.yardsticks import chance_ranks, popularity_ranks
from hushrec.methods.base import method_class, method_names
from hushrec.privacy.commands import privacy as privacy_group
from hushrec.report.html import write_report
from hushrec.report.run_dir import RunFolder, require_free
from hushrec.report.tables import comparison_tables, facts, result_table, shown_metrics
from hushrec.round import Machine, RoundReport
from hushrec.run import Run, train, train_seeds
from hushrec.split import Part

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON on standard output and nothing else."
)
threads_option = click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Threads to use; the result does not depend on it.",
)


class _Commands(click.Group):
    """Turns every error meant for the user into one line on standard error and exit code 2."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except StoppedError as stopped:
            click.echo(str(stopped), err=True)
            sys.exit(130)
        except HushrecError as error:
            click.echo(f"hushrec: {error}", err=True)
            sys.exit(2)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hushrec")
def main() -> None:
    """Personalised, private, federated recommendation.

    \b
    hushrec train --data demo --method fedmf --out runs/first
    hushrec recommend runs/first --user viewer-0001
    hushrec compare runs/first runs/second
    """


main.add_command(data_group)
main.add_command(privacy_group)


@main.command("train")
@click.option("--data", "data_name", default="demo", show_default=True, metavar="NAME|FILE")
@click.option("--method", "method_name", default="fedmf", show_default=True, metavar="NAME")
@click.option("--preset", metavar="NAME", help="A set of options that ships, for example 'paper'.")
@click.option(
    "--protocol",
    type=click.Choice(["honest", "published"]),
    help="'published' reproduces the papers' figures and leaks the held-out item.  [honest]",
)
@click.option("--rounds", type=int, metavar="N")
@click.option("--seed", type=int, metavar="S", help="First (or only) seed.  [0]")
@click.option("--seeds", type=click.IntRange(min=1), default=1, metavar="N", help="How many seeds.")
@threads_option
@click.option(
    "--privacy",
    "privacy_mode",
    type=click.Choice(["none", "central", "local-laplace", "local-gaussian"]),
    help="Noise on the sum, or on every upload.  [none]",
)
@click.option("--epsilon", type=float, metavar="E", help="Guarantee to keep; finds the noise.")
@click.option("--delta", type=float, metavar="D", help="Below 1 / clients.  [clients^-1.1]")
@click.option("--scale", type=float, metavar="B", help="Scale of local noise, not --epsilon.")
@click.option("--clip", type=float, metavar="C", help="Bound of an upload's norm.")
@click.option(
    "--budgets",
    type=click.Choice(["activity", "declared"]),
    help="Each client its own epsilon (local-gaussian).",
)
@click.option("--epsilon-min", type=float, metavar="E", help="Of the least active client.")
@click.option("--epsilon-max", type=float, metavar="E", help="Of the most active client.")
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="An option; repeatable.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="The run folder.")
@click.option("--resume", is_flag=True, help="Go on with an interrupted run in --out.")
@click.option("--overwrite", is_flag=True, help="Replace the run in --out.")
@json_option
def train_command(
    data_name: str,
    method_name: str,
    preset: str | None,
    protocol: str | None,
    rounds: int | None,
    seed: int | None,
    seeds: int,
    threads: int | None,
    privacy_mode: str | None,
    epsilon: float | None,
    delta: float | None,
    scale: float | None,
    clip: float | None,
    budgets: str | None,
    epsilon_min: float | None,
    epsilon_max: float | None,
    pairs: tuple[str, ...],
    out: Path | None,
    resume: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Train a method, evaluate it, and leave a run folder with a report.

    \b
    hushrec train --data ml-100k --method pfedrec --out runs/pfedrec
    hushrec train --data ml-100k --method pfedrec --preset paper --protocol published --seeds 3
    hushrec train --data ratings.csv --method fedmf --set d=64 --set lr=0.05
    hushrec train --set cohort.kind=fixed --set cohort.size=200 --set evaluation.every=5
    hushrec train --method fedmf --privacy central --epsilon 4 --delta 1e-5
    hushrec train --method fedmf --privacy local-laplace --scale 0.2
    hushrec train --privacy local-gaussian --clip 1 --budgets activity \\
        --epsilon-min 1 --epsilon-max 8
    hushrec train --resume --out runs/pfedrec

    Sections for --set: split, cohort, evaluation, store, privacy, silos; all else is an option of
    the method. `hushrec methods` lists methods, options and presets.
    """
    if resume:
        if out is None:
            raise ConfigError("--resume needs the run folder: --resume --out DIR")
        _refuse_settings_with_resume()
        folder = RunFolder.open(out)
        data_name = folder.experiment().data
        seeds = 2 if (out / "seeds.json").exists() else 1
    if out is None:
        name = f"{Path(data_name).stem if os.sep in data_name else data_name}-{method_name}"
        suffix = "-published" if protocol == "published" else ""
        out = Path("runs") / (name.replace("/", "-") + suffix)
    if not resume:
        require_free(out, overwrite=overwrite)
    flags = {"mode": privacy_mode, "epsilon": epsilon, "delta": delta, "scale": scale, "clip": clip}
    flags |= {"budgets": budgets, "epsilon_min": epsilon_min, "epsilon_max": epsilon_max}
    privacy = {f"privacy.{name}": value for name, value in flags.items() if value is not None}
    options: dict[str, Any] = {
        "preset": preset,
        "settings": parse_settings(pairs) | privacy,
        "protocol": protocol,
        "rounds": rounds,
        "machine": Machine(threads),
    }
    data = load(data_name)
    _say_notes(data.notes, as_json)
    with _training_display(as_json) as on_round, _polite_stop() as should_stop:
        options |= {"on_round": on_round, "should_stop": should_stop}
        if seeds > 1:
            first = seed or 0
            chosen = range(first, first + seeds)
            summary = train_seeds(
                data, method_name, chosen, out, overwrite=overwrite, resume=resume, **options
            )
            folders = [out / name for name in summary["runs"]]
        else:
            run = train(
                data,
                method_name,
                seed=seed,
                out=out,
                overwrite=overwrite,
                resume=resume,
                **options,
            )
            summary, folders = dict(run.summary), [out]
    reports = [write_report(Run.open(folder, data)) for folder in folders]
    if as_json:
        click.echo(json.dumps(summary, indent=2))
        return
    console = Console()
    console.print(result_table(summary))
    for line in facts(summary):
        console.print(line, style="dim", highlight=False)
    console.print(f"report: {reports[0]}", highlight=False, soft_wrap=True)


@main.command("evaluate")
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--part", type=click.Choice(["valid", "test"]), default="test", show_default=True)
@click.option(
    "--metric", "metrics", multiple=True, metavar="NAME", help="Such as hr@50; repeatable."
)
@threads_option
@json_option
def evaluate_command(
    folder: Path, part: str, metrics: tuple[str, ...], threads: int | None, as_json: bool
) -> None:
    """Score a finished run again from its checkpoint.

    \b
    hushrec evaluate runs/pfedrec
    hushrec evaluate runs/pfedrec --metric hr@50 --metric ndcg@100 --json
    """
    for name in metrics:
        parse_metric(name)
    run = Run.open(folder)
    evaluator = run.evaluator(threads or usable_cores())
    chosen: Part = "valid" if part == "valid" else "test"
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


@main.command("recommend")
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--user", required=True, metavar="ID")
@click.option("-k", "count", type=click.IntRange(min=1), default=10, show_default=True)
@click.option(
    "--history",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Items of a user the run does not know: one id a line, oldest first, or a table.",
)
@json_option
def recommend_command(
    folder: Path, user: str, count: int, history: Path | None, as_json: bool
) -> None:
    """Recommend items that a user has not touched yet.

    \b
    hushrec recommend runs/pfedrec --user 42
    hushrec recommend runs/pfedrec --user anna --history anna.txt -k 5 --json
    """
    run = Run.open(folder)
    items = None if history is None else read_history(history)
    if items is not None:
        unknown = len(set(items) - set(run.split.data.items.tolist()))
        if unknown:
            click.echo(f"{unknown} of {len(set(items))} items are not in the catalogue", err=True)
    found = run.recommend(user, count, items)
    if not found:
        click.echo(f"nothing is left to recommend to '{user}'", err=True)
    if as_json:
        lines = [{"item": r.item, "title": r.title, "score": r.score} for r in found]
        click.echo(json.dumps({"user": user, "recommendations": lines}, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("", justify="right")
    table.add_column("title", overflow="fold")
    table.add_column("item", overflow="fold")
    table.add_column("score", justify="right")
    for place, line in enumerate(found, 1):
        table.add_row(str(place), escape(line.title), escape(line.item), f"{line.score:.3f}")
    Console().print(table)


@main.command("compare")
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
@json_option
def compare_command(
    folders: tuple[Path, ...],
    metrics: tuple[str, ...],
    candidates: str,
    test_name: Any,
    as_json: bool,
) -> None:
    """Compare finished runs user by user, the first as the baseline.

    \b
    hushrec compare runs/popularity runs/fedmf runs/pfedrec
    hushrec compare runs/a runs/b --metric hr@20 --candidates sampled99 --json
    """
    rows = compare_runs(folders, metrics, candidates, test_name)
    if as_json:
        click.echo(json.dumps([row.as_dict() for row in rows], indent=2))
        return
    Console().print(*comparison_tables(rows), sep="\n")


@main.command("report")
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
def report_command(folder: Path) -> None:
    """Write a run's report.html again and print where it is.

    \b
    hushrec report runs/pfedrec
    """
    click.echo(write_report(Run.open(folder)))


@main.command("methods")
@json_option
def methods_command(as_json: bool) -> None:
    """List the installed methods, their options and presets.

    \b
    hushrec methods
    hushrec methods --json
    """
    entries: list[dict[str, Any]] = []
    for name in method_names():
        found = method_class(name)
        options = {
            key: {
                "default": field.get_default(call_default_factory=True),
                "about": field.description,
            }
            for key, field in found.Config.model_fields.items()
        }
        about = (found.__doc__ or "").strip().splitlines()[0]
        entries.append(
            {"name": name, "about": about, "options": options, "presets": preset_names(name)}
        )
    if as_json:
        click.echo(json.dumps(entries, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for name in ("method", "options and defaults", "presets", "what it is"):
        table.add_column(name, overflow="fold")
    for entry in entries:
        options_text = " ".join(f"{key}={o['default']}" for key, o in entry["options"].items())
        table.add_row(entry["name"], options_text, " ".join(entry["presets"]), entry["about"])
    Console().print(table)


EXTRAS = {
    "neural": "torch",
    "flower": "flwr",
    "studio": "fastapi",
    "tune": "optuna",
    "parquet": "pyarrow",
}


@main.command("doctor")
@json_option
def doctor_command(as_json: bool) -> None:
    """Show versions, threads, optional parts, methods, and where data is looked for.

    \b
    hushrec doctor
    """
    packages = ("hushrec", "numpy", "scipy", "numba", "pydantic", "safetensors")
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "threads": usable_cores(),
        "extras": {
            extra: importlib.metadata.version(module) if importlib.util.find_spec(module) else None
            for extra, module in EXTRAS.items()
        },
        "methods": method_names(),
        "data": {
            "HUSHREC_DATA": os.environ.get("HUSHREC_DATA"),
            "cache": str(catalog.cache_dir()),
        },
    }
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("", style="bold", no_wrap=True)
    table.add_column("", overflow="fold")
    table.add_row("python", f"{found['python']} on {found['platform']}")
    table.add_row("versions", "  ".join(f"{k} {v}" for k, v in found["versions"].items()))
    table.add_row("threads", str(found["threads"]))
    for extra, version in found["extras"].items():
        state = version or f"not installed: pip install 'hushrec\\[{extra}]'"
        table.add_row(f"extra {extra}", state)
    table.add_row("methods", "  ".join(found["methods"]))
    table.add_row("HUSHREC_DATA", found["data"]["HUSHREC_DATA"] or "not set")
    table.add_row("cache", found["data"]["cache"])
    Console().print(table)


def _refuse_settings_with_resume() -> None:
    context = click.get_current_context()
    for option in context.command.params:
        given = context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
        if given and option.name not in ("resume", "out", "threads", "as_json"):
            raise ConfigError(
                f"--resume goes on with the run's own settings: leave out {option.opts[0]}"
            )


def _say_notes(notes: tuple[str, ...], quiet: bool) -> None:
    if not quiet:
        for note in notes:
            click.echo(note, err=True)


@contextmanager
def _polite_stop() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C finish the round and its checkpoint; the second one stops at once."""
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        asked = True
        click.echo("\nfinishing the round; press Ctrl-C again to stop at once", err=True)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _training_display(quiet: bool) -> Iterator[Callable[[RoundReport], None]]:
    """Show a progress bar on standard error, with loss, validation, speed and time left."""
    if quiet:
        yield lambda report: None
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

        def show(report: RoundReport) -> None:
            nonlocal latest
            if report.valid is not None:
                name = next(iter(shown_metrics(report.valid["full"])[1:]), "auc")
                latest = f"valid {name} {report.valid['full'][name]:.4f}"
            loss = "" if report.loss is None else f"loss {report.loss:.4f}  "
            state = f"{loss}{latest}  {report.seconds * 1000:.0f} ms/round"
            progress.update(task, completed=report.round, total=report.rounds, state=state)

        yield show
