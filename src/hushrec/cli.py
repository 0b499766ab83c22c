"""The command line. Results go to standard output, everything else to standard error."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
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

from hushrec.audit.commands import audit_command
from hushrec.backends.inprocess import Machine, usable_cores
from hushrec.cli_options import json_option, run_argument, threads_option
from hushrec.config import parse_settings, preset_names
from hushrec.data import load
from hushrec.data.commands import data as data_group
from hushrec.data.datasets import cache_dir
from hushrec.errors import (
    ConfigError,
    DivergedError,
    HushrecError,
    MissingExtraError,
    StoppedError,
)
from hushrec.evaluate.commands import analyse_command, compare_command, evaluate_command
from hushrec.methods.base import method_class, method_names
from hushrec.privacy.commands import privacy as privacy_group
from hushrec.report.html import write_report
from hushrec.report.tables import (
    facts,
    result_table,
    shown_metrics,
    trials_table,
)
from hushrec.round import RoundReport
from hushrec.run import Run, train, train_seeds
from hushrec.run_folder import RunFolder, require_free
from hushrec.serve.commands import export_command, recommend_command
from hushrec.tune import PRESET, tune


class _Commands(click.Group):
    """Turns every error meant for the user into one line on standard error and its exit code."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except StoppedError as stopped:
            click.echo(str(stopped), err=True)
            sys.exit(130)
        except HushrecError as error:
            click.echo(f"hushrec: {error}", err=True)
            sys.exit(3 if isinstance(error, DivergedError) else 2)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hushrec")
def main() -> None:
    """Personalised, private, federated recommendation.

    \b
    hushrec train --data demo --out runs/first
    hushrec recommend runs/first --user viewer-0001
    hushrec compare runs/first runs/second
    hushrec audit runs/first
    """


main.add_command(data_group)
main.add_command(privacy_group)
main.add_command(audit_command)
main.add_command(evaluate_command)
main.add_command(analyse_command)
main.add_command(compare_command)
main.add_command(recommend_command)
main.add_command(export_command)


@main.command("train")
@click.option("--data", "data_name", default="demo", show_default=True, metavar="NAME|FILE")
@click.option("--method", "method_name", default="fednext", show_default=True, metavar="NAME")
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
    hushrec train --method fedmf --set cohort.kind=fixed --set cohort.size=200
    hushrec train --method fedmf --privacy central --epsilon 4 --delta 1e-5
    hushrec train --method fedmf --privacy local-laplace --scale 0.2
    hushrec train --method fedmf --privacy local-gaussian --clip 1 --budgets activity \\
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


@main.command("report")
@run_argument
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
        try:
            found = method_class(name)
        except MissingExtraError as error:
            presets = preset_names(name)
            entries.append({"name": name, "about": str(error), "options": {}, "presets": presets})
            continue
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
        about = escape(entry["about"])
        table.add_row(entry["name"], escape(options_text), " ".join(entry["presets"]), about)
    Console().print(table)


@main.command("tune")
@click.option("--data", "data_name", default="demo", show_default=True, metavar="NAME|FILE")
@click.option("--method", "method_name", default="fednext", show_default=True, metavar="NAME")
@click.option("--preset", metavar="NAME", help="What trial 0 and the fixed options come from.")
@click.option("--trials", type=click.IntRange(min=1), default=20, show_default=True, metavar="N")
@click.option("--rounds", type=int, metavar="N", help="Rounds of a trial.")
@click.option("--seed", type=int, default=0, show_default=True, metavar="S")
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="A fixed option.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="The search's folder.")
@threads_option
@json_option
def tune_command(
    data_name: str,
    method_name: str,
    preset: str | None,
    trials: int,
    rounds: int | None,
    seed: int,
    pairs: tuple[str, ...],
    out: Path | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Search for a method's options on the validation items, and write them as a preset.

    \b
    hushrec tune --data ml-100k --method pfedrec --trials 20
    hushrec tune --data ml-100k --method fedmf --set dual=true --rounds 100 --trials 30
    hushrec train --data ml-100k --method pfedrec --preset tunes/ml-100k-pfedrec/tuned-honest.toml

    The protocol is honest and test items are never scored. The same command goes on with a search
    that was interrupted, or with more --trials; the result is the same as without the stop.
    """
    name = Path(data_name).stem if os.sep in data_name and Path(data_name).exists() else data_name
    out = out or Path("tunes") / f"{name}-{method_name}".replace("/", "-")
    given = {"--data": data_name, "--method": method_name, "--preset": preset, "--rounds": rounds}
    words = [f"{flag} {value}" for flag, value in given.items() if value is not None]
    words += [f"--set {pair}" for pair in pairs] + [f"--trials {trials} --seed {seed}"]
    data = load(data_name)
    _say_notes(data.notes, as_json)
    with _training_display(as_json) as show, _polite_stop() as should_stop:
        search = tune(
            data,
            method_name,
            out,
            trials=trials,
            preset=preset,
            rounds=rounds,
            seed=seed,
            settings=parse_settings(pairs),
            machine=Machine(threads),
            command=" ".join(["hushrec tune", *words]),
            on_round=lambda number, report: show(report, f"trial {number + 1} of {trials}"),
            should_stop=should_stop,
        )
    best = search.best
    if as_json:
        found = {**search.about, "best": best.number, "trials": [asdict(t) for t in search.trials]}
        click.echo(json.dumps(found, indent=2))
        return
    console = Console()
    console.print(trials_table(search))
    console.print(f"preset: {out / PRESET}.toml", highlight=False, soft_wrap=True)


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
            "cache": str(cache_dir()),
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
def _training_display(quiet: bool) -> Iterator[Callable[..., None]]:
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
