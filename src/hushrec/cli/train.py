"""``hushrec train``: a run and its report; ``hushrec tune``: search for a method's options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import click
from click.core import ParameterSource

from hushrec.api import (
    Execution,
    Run,
    final_experiment,
    find_callbacks,
    train_final,
    train_request,
    train_request_seeds,
)
from hushrec.cli import options
from hushrec.cli.display import (
    Verbosity,
    interrupt_callback,
    load_with_progress,
    print_default_method,
    training_display,
    verbosity_options,
)
from hushrec.cli.options import PATH
from hushrec.cli.terminal import echo_err, exit_if_not_applied, show
from hushrec.data.tables import RECOGNISED, Columns
from hushrec.errors import ConfigError
from hushrec.evaluation.groups import split_notes
from hushrec.federation.backends import Machine
from hushrec.federation.experiment import (
    Experiment,
    ExperimentRequest,
    parse_settings,
    read_config,
    with_named,
)
from hushrec.privacy.config import PrivacyConfig
from hushrec.reporting.html import REPORT, write_report
from hushrec.reporting.tables import summary_lines, trials_table
from hushrec.runs.folder import SEEDS, RunFolder, require_free, resumable
from hushrec.tuning import PRESET, base_experiment, tune

RESUMING = {"resume", "out", "rounds", "threads", "callbacks", "quiet", "verbose", "log", "as_json"}
"""Options that go with --resume."""
FOLLOWING = (RESUMING - {"resume", "rounds"}) | {
    *("final", "overwrite", "data", "items"),
    *vars(RECOGNISED),
}
"""Options that go with --final."""


@dataclass(frozen=True)
class Output:
    """The run folder, and the seeds that are trained in it."""

    out: Path | None
    final: Path | None
    resume: bool
    overwrite: bool
    seeds: int


@click.command("train")
@options.gather(
    "request",
    ExperimentRequest,
    options.data_option,
    options.items_option,
    options.method_option,
    options.preset_option,
    click.option(
        "--protocol",
        type=click.Choice(["honest", "published"]),
        help="'published' reproduces the papers' figures and leaks the held-out item.  [honest]",
    ),
    click.option("--rounds", type=int, metavar="N"),
    click.option("--seed", type=options.SEED, metavar="S", help="First (or only) seed.  [0]"),
)
@options.gather("columns", Columns, *options.column_options, options.title_option)
@click.option(
    "--config",
    type=PATH,
    metavar="FILE",
    help="A run's config.toml, or a file like it: data, method and all settings. Options of the "
    "command line override it.",
)
@options.threads_option
@options.gather(
    "named",
    dict,
    click.option(
        "--privacy",
        type=click.Choice(get_args(PrivacyConfig.model_fields["mode"].annotation)),
        help="Noise on the sum, from nodes (--set privacy.nodes=N), or on every upload.  [none]",
    ),
    click.option("--epsilon", type=float, metavar="E", help="Guarantee to keep; finds the noise."),
    click.option("--delta", type=float, metavar="D", help="Below 1 / clients.  [at most 1e-5]"),
    click.option("--scale", type=float, metavar="B", help="Scale of local noise, not --epsilon."),
    click.option("--clip", type=float, metavar="C", help="Bound of an upload's norm."),
    click.option(
        "--budgets",
        type=click.Choice(["activity", "declared"]),
        help="Each client its own epsilon (local-gaussian).",
    ),
    click.option("--epsilon-min", type=float, metavar="E", help="Of the least active client."),
    click.option("--epsilon-max", type=float, metavar="E", help="Of the most active client."),
)
@options.set_option
@options.gather(
    "output",
    Output,
    click.option("--out", type=PATH, metavar="DIR", help="The run folder."),
    click.option(
        "--final",
        type=PATH,
        metavar="RUN",
        help="Train on all interactions with the options and the number of rounds that this run "
        "chose: a model to ship, to which no figure belongs.",
        shell_complete=options.complete_runs,
    ),
    click.option(
        "--resume",
        is_flag=True,
        help="Go on with the run in --out: one that was interrupted, or, with more --rounds, one "
        "that was still improving.",
    ),
    click.option("--overwrite", is_flag=True, help="Replace the run in --out."),
    click.option(
        "--seeds", type=click.IntRange(1, 1_000), default=1, metavar="N", help="How many seeds."
    ),
)
@click.option(
    "--callback",
    "callbacks",
    multiple=True,
    metavar="NAME",
    help="An installed callback (docs/extend.md); repeatable.",
)
@verbosity_options
@options.json_option
def train_command(
    request: ExperimentRequest,
    columns: Columns,
    config: Path | None,
    threads: int | None,
    named: dict[str, Any],
    pairs: tuple[str, ...],
    output: Output,
    callbacks: tuple[str, ...],
    verbosity: Verbosity,
    as_json: bool,
) -> None:
    """Train a method, evaluate it, and leave a run folder with a report.

    \b
    hushrec train --data ml-100k --method pfedrec --out runs/pfedrec
    hushrec train --data ml-100k --method pfedrec --preset paper --protocol published --seeds 3
    hushrec train --data ratings.csv --method fedmf --set d=64 --set lr=0.05
    hushrec train --data log.csv --user customer --item product --time when
    hushrec train --method fedmf --set cohort.kind=fixed --set cohort.size=200
    hushrec train --method fedmf --privacy central --epsilon 4 --delta 1e-5
    hushrec train --data ratings.csv --items films.csv --privacy central --epsilon 8
    hushrec train --method fedmf --privacy local-laplace --scale 0.2
    hushrec train --method fedmf --privacy local-gaussian --clip 1 --budgets activity \\
        --epsilon-min 1 --epsilon-max 8
    hushrec train --resume --out runs/pfedrec
    hushrec train --resume --out runs/pfedrec --rounds 400
    hushrec train --config runs/pfedrec/config.toml --seed 1 --out runs/again
    hushrec train --final runs/pfedrec --out runs/shipped

    Sections for --set: split, cohort, evaluation, store, privacy, silos; all else is an option of
    the method. `hushrec methods` lists methods, options and presets.
    """
    installed, quiet = find_callbacks(callbacks), as_json or verbosity.quiet
    followed, experiment, several = None, None, False
    if output.resume:
        request, several = _resumed(request, output)
        out = output.out or Path()
    elif output.final is not None:
        _refuse_beside("--final", "trains with the settings of its run", FOLLOWING)
        followed, experiment = final_experiment(output.final)
        request = _data_of(request, experiment)
        out = output.out or output.final.with_name(f"{output.final.name}-final")
        require_free(out, overwrite=output.overwrite)
    else:
        request, several = _with_config_values(request, config), output.seeds > 1
        settings = {**request.settings, **with_named(parse_settings(pairs), named)}
        request = replace(request, settings=settings)
        experiment = request.experiment()  # a typo is reported before data is read
        print_default_method(request, experiment, quiet=quiet)
        out = output.out or _default_out(experiment)
        require_free(out, overwrite=output.overwrite)
    given = {role: at for role, at in vars(columns).items() if at is not None}
    request = replace(request, columns=given or request.columns)
    data = load_with_progress(request, quiet=quiet)
    for note in split_notes(data, experiment.split) if experiment and not quiet else ():
        echo_err(note)
    with training_display(as_json, verbosity) as display, interrupt_callback() as stop:
        called = (display, stop, *installed)
        execution = Execution(Machine(threads), called, output.overwrite, output.resume)
        run = None
        if several:
            first = request.seed or 0
            seeds = range(first, first + output.seeds)
            summary = train_request_seeds(request, data, seeds, out, execution).summary
        elif followed is not None and experiment is not None:
            run = train_final(followed, experiment, data, out, execution)
            summary = run.summary
        elif output.resume and request.rounds is None and _needs_report(out):
            run = Run.open(out, data)
            summary = run.summary
        else:
            run = train_request(request, data, out, execution)
            summary = run.summary
    # Of several seeds only one is in memory at a time.
    runs = [run] if run else (Run.open(out / name, data) for name in summary.runs or [])
    reports = [write_report(each) for each in runs]
    show(as_json, summary, *summary_lines(summary), f"report: {reports[0]}")
    exit_if_not_applied(summary)


def _with_config_values(request: ExperimentRequest, config: Path | None) -> ExperimentRequest:
    """Return the request with the values of a file, where the command line gives none."""
    if config is None:
        return request
    values = read_config(config)
    context = click.get_current_context()
    unset = {
        name: value
        for name, value in values.items()
        if name == "settings"
        or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE
    }
    if context.get_parameter_source("data") is ParameterSource.COMMANDLINE:
        unset.pop("items", None)  # a list of items belongs to its data, and so do columns
        unset.pop("columns", None)
    method = values.get("method")
    if unset.get("method", request.method) != method and values["settings"]:
        raise ConfigError(f"{config} has options of {method}: leave out --method {request.method}")
    return replace(request, **unset)


def _resumed(request: ExperimentRequest, output: Output) -> tuple[ExperimentRequest, bool]:
    """Return the data of the run in --out, and whether it has several seeds."""
    if output.out is None:
        raise ConfigError("--resume needs the run folder: --resume --out DIR")
    _refuse_beside("--resume", "goes on with the run's own settings", RESUMING)
    folder = RunFolder.open(resumable(output.out))
    return _data_of(request, folder.experiment()), (folder.path / SEEDS).exists()


def _refuse_beside(option: str, does: str, allowed: set[str]) -> None:
    """Refuse options of the command line that do not go with another one."""
    context = click.get_current_context()
    for each in context.command.params:
        given = context.get_parameter_source(each.name or "") is ParameterSource.COMMANDLINE
        if given and each.name not in allowed:
            raise ConfigError(f"{option} {does}: leave out {each.opts[0]}")


def _data_of(request: ExperimentRequest, begun: Experiment) -> ExperimentRequest:
    """Return the request with a run's data, unless the command line names other data."""
    context = click.get_current_context()
    if context.get_parameter_source("data") is ParameterSource.COMMANDLINE:
        return request
    return replace(request, data=begun.data, items=begun.items, columns=begun.columns)


def _needs_report(out: Path) -> bool:
    """Return whether a run finished, and was interrupted before its report was written."""
    finished = resumable(out) == out and (out / "summary.json").exists()
    return finished and not (out / REPORT).exists()


def _default_out(experiment: Experiment) -> Path:
    mark = "-published" if experiment.protocol == "published" else ""
    return Path("runs") / (options.default_name(experiment.data, experiment.method) + mark)


@click.command("tune")
@options.gather(
    "request",
    ExperimentRequest,
    options.data_option,
    options.items_option,
    options.method_option,
    options.preset_option,
    click.option("--rounds", type=int, metavar="N", help="Rounds of a trial."),
    click.option("--seed", type=options.SEED, default=0, metavar="S"),
)
@options.gather("columns", Columns, *options.column_options, options.title_option)
@click.option("--trials", type=click.IntRange(1, 100_000), default=20, metavar="N")
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="A fixed option.")
@click.option("--out", type=PATH, metavar="DIR", help="The search's folder.")
@options.threads_option
@verbosity_options
@options.json_option
def tune_command(
    request: ExperimentRequest,
    columns: Columns,
    trials: int,
    pairs: tuple[str, ...],
    out: Path | None,
    threads: int | None,
    verbosity: Verbosity,
    as_json: bool,
) -> None:
    """Search for a method's options on validation items; write them as a preset.

    \b
    hushrec tune --data ml-100k --method pfedrec --trials 20
    hushrec tune --data ml-100k --method fedmf --set dual=true --rounds 100 --trials 30
    hushrec train --data ml-100k --method pfedrec --preset tunes/ml-100k-pfedrec/tuned-honest.toml

    Trial 0 and the fixed options come from --preset. The protocol is honest and test items are
    never scored. The same command goes on with a search that was interrupted, or with more
    --trials; the result is the same as without the stop.
    """
    given = {role: at for role, at in vars(columns).items() if at is not None}
    request = replace(request, settings=parse_settings(pairs), columns=given or None)
    base = base_experiment(request)  # a typo is reported before data is read
    out = out or Path("tunes") / options.default_name(request.data, base.method)
    data = load_with_progress(request, quiet=as_json or verbosity.quiet)
    with training_display(as_json, verbosity) as display, interrupt_callback() as stop:

        def on_trial(number: int) -> None:
            display.label = f"trial {number + 1} of {trials}"

        search = tune(
            data,
            request,
            out,
            trials=trials,
            machine=Machine(threads),
            command=_command(request, trials, pairs),
            on_trial=on_trial,
            callbacks=(display, stop),
        )
    found = {**search.about, "best": search.best.number, "trials": search.trials}
    show(as_json, found, trials_table(search), f"preset: {out / PRESET}.toml")


def _command(request: ExperimentRequest, trials: int, pairs: tuple[str, ...]) -> str:
    """Return the command of a search, for the comment in its preset."""
    names = ("data", "items", "method", "preset", "rounds")
    given = [(name, getattr(request, name)) for name in names]
    given += list((request.columns or {}).items())
    words = [f"--{name} {value}" for name, value in given if value is not None]
    words += [f"--set {pair}" for pair in pairs]
    return " ".join(["hushrec tune", *words, f"--trials {trials} --seed {request.seed}"])
