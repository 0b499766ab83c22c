"""``hushrec train``: a run folder and its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from hushrec.api import Run, TrainOptions, train, train_seeds
from hushrec.cli import options
from hushrec.cli.display import Talk, load_aloud, polite_stop, talk_options, training_display
from hushrec.cli.options import PLACE
from hushrec.cli.terminal import Console, print_json
from hushrec.data.views import Protocol
from hushrec.errors import ConfigError
from hushrec.federation.backends.simulation import Machine
from hushrec.federation.experiment import Experiment, make_experiment, parse_settings, read_config
from hushrec.reporting.html import REPORT, write_report
from hushrec.reporting.tables import facts, result_table
from hushrec.runs.folder import SEEDS, RunFolder, left_off, require_free

AGAIN = ("resume", "out", "rounds", "threads", "quiet", "verbose", "log", "as_json")
"""What may be said of a run that goes on."""


@dataclass(frozen=True)
class Asked:
    """What to train."""

    data: str
    items: str | None
    method: str
    preset: str | None
    config: Path | None
    protocol: Protocol | None
    rounds: int | None
    seed: int | None
    seeds: int

    def experiment(self, settings: Mapping[str, Any]) -> Experiment:
        """Return what will be trained; refuse what cannot be."""
        made = make_experiment(
            self.data,
            self.method,
            items=self.items,
            preset=self.preset,
            settings=settings,
            protocol=self.protocol,
            rounds=self.rounds,
            seed=self.seed,
        )
        made.make_method()
        return made

    def completed(self) -> tuple[Asked, dict[str, Any]]:
        """Return this with what a file says where the command line is silent, and its settings."""
        if self.config is None:
            return self, {}
        wanted = read_config(self.config)
        context = click.get_current_context()
        silent = {
            name: at
            for name, at in wanted.model_dump(exclude={"settings"}, exclude_none=True).items()
            if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE
        }
        if context.get_parameter_source("data") is ParameterSource.COMMANDLINE:
            silent.pop("items", None)  # a list of items belongs to its data
        if silent.get("method", self.method) != wanted.method and wanted.settings:
            raise ConfigError(
                f"{self.config} has options of {wanted.method}: leave out --method {self.method}"
            )
        return replace(self, **silent), wanted.settings

    @property
    def chosen_seeds(self) -> range:
        """The seeds, of which the first may be named."""
        first = self.seed or 0
        return range(first, first + self.seeds)


@dataclass(frozen=True)
class Protected:
    """What the options say of privacy; the section of that name in the settings."""

    mode: str | None
    epsilon: float | None
    delta: float | None
    scale: float | None
    clip: float | None
    budgets: str | None
    epsilon_min: float | None
    epsilon_max: float | None

    def settings(self) -> dict[str, Any]:
        """Return what was given, as ``--set`` would have it."""
        return {f"privacy.{name}": at for name, at in asdict(self).items() if at is not None}


@dataclass(frozen=True)
class Place:
    """Where the run goes."""

    out: Path | None
    resume: bool
    overwrite: bool


@click.command("train")
@options.gather(
    "asked",
    Asked,
    options.data_option,
    options.items_option,
    options.method_option,
    options.preset_option,
    click.option(
        "--config",
        type=PLACE,
        metavar="FILE",
        help="A run's config.toml, or a file like it: data, method and all settings. What else is "
        "said here goes before it.",
    ),
    click.option(
        "--protocol",
        type=click.Choice(["honest", "published"]),
        help="'published' reproduces the papers' figures and leaks the held-out item.  [honest]",
    ),
    click.option("--rounds", type=int, metavar="N"),
    click.option("--seed", type=options.SEED, metavar="S", help="First (or only) seed.  [0]"),
    click.option(
        "--seeds", type=click.IntRange(1, 1_000), default=1, metavar="N", help="How many seeds."
    ),
)
@options.threads_option
@options.gather(
    "protected",
    Protected,
    click.option(
        "--privacy",
        "mode",
        type=click.Choice(
            [
                "none",
                "central",
                "distributed",
                "local-laplace",
                "local-gaussian",
                "local-gradients",
                "mechanism",
            ]
        ),
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
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="An option; repeatable.")
@options.gather(
    "place",
    Place,
    click.option("--out", type=PLACE, metavar="DIR", help="The run folder."),
    click.option(
        "--resume",
        is_flag=True,
        help="Go on with the run in --out: one that was interrupted, or, with more --rounds, one "
        "that was still improving.",
    ),
    click.option("--overwrite", is_flag=True, help="Replace the run in --out."),
)
@talk_options
@options.json_option
def train_command(
    asked: Asked,
    threads: int | None,
    protected: Protected,
    pairs: tuple[str, ...],
    place: Place,
    talk: Talk,
    as_json: bool,
) -> None:
    """Train a method, evaluate it, and leave a run folder with a report.

    \b
    hushrec train --data ml-100k --method pfedrec --out runs/pfedrec
    hushrec train --data ml-100k --method pfedrec --preset paper --protocol published --seeds 3
    hushrec train --data ratings.csv --method fedmf --set d=64 --set lr=0.05
    hushrec train --method fedmf --set cohort.kind=fixed --set cohort.size=200
    hushrec train --method fedmf --privacy central --epsilon 4 --delta 1e-5
    hushrec train --data ratings.csv --items films.csv --privacy central --epsilon 8
    hushrec train --method fedmf --privacy local-laplace --scale 0.2
    hushrec train --method fedmf --privacy local-gaussian --clip 1 --budgets activity \\
        --epsilon-min 1 --epsilon-max 8
    hushrec train --resume --out runs/pfedrec
    hushrec train --resume --out runs/pfedrec --rounds 400
    hushrec train --config runs/pfedrec/config.toml --seed 1 --out runs/again

    Sections for --set: split, cohort, evaluation, store, privacy, silos; all else is an option of
    the method. `hushrec methods` lists methods, options and presets.
    """
    settings: dict[str, Any] = {}
    if place.resume:
        asked = _asked_before(asked, place)
    else:
        asked, settings = asked.completed()
    out = place.out or _default_out(asked)
    settings |= parse_settings(pairs) | protected.settings()
    if not place.resume:
        require_free(out, overwrite=place.overwrite)
        asked.experiment(settings)  # a typo is said before data is read
    data = load_aloud(asked.data, asked.items, quiet=as_json or talk.quiet)
    with training_display(as_json, talk) as on_round, polite_stop() as should_stop:
        said: TrainOptions = {
            "preset": asked.preset,
            "protocol": asked.protocol,
            "rounds": asked.rounds,
            "seed": asked.seed,
            "settings": settings,
            "overwrite": place.overwrite,
            "resume": place.resume,
            "machine": Machine(threads),
            "on_round": on_round,
            "should_stop": should_stop,
        }
        if asked.seeds > 1:
            run, summary = None, train_seeds(data, asked.method, asked.chosen_seeds, out, **said)
        elif place.resume and asked.rounds is None and _lacks_its_report(out):
            run = Run.open(out, data)
            summary = dict(run.summary)
        else:
            run = train(data, asked.method, out=out, **said)
            summary = dict(run.summary)
    # Of several seeds only one is in memory at a time.
    runs = [run] if run else (Run.open(out / name, data) for name in summary["runs"])
    reports = [write_report(each) for each in runs]
    if as_json:
        print_json(summary)
        return
    console = Console()
    console.print(result_table(summary))
    for line in facts(summary):
        console.print(line, style="dim")
    console.print(f"report: {reports[0]}", soft_wrap=True)


def _asked_before(asked: Asked, place: Place) -> Asked:
    """Return what the run in --out was begun with; nothing of it may be given again."""
    if place.out is None:
        raise ConfigError("--resume needs the run folder: --resume --out DIR")
    context = click.get_current_context()
    for option in context.command.params:
        given = context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
        if given and option.name not in AGAIN:
            raise ConfigError(
                f"--resume goes on with the run's own settings: leave out {option.opts[0]}"
            )
    folder = RunFolder.open(left_off(place.out))
    # The folder knows which seeds; what matters here is whether there are several.
    seeds, begun = 2 if (folder.path / SEEDS).exists() else 1, folder.experiment()
    return replace(asked, data=begun.data, items=begun.items, seeds=seeds)


def _lacks_its_report(out: Path) -> bool:
    """Say whether a run came to its end, and was stopped before it had its page."""
    finished = left_off(out) == out and (out / "summary.json").exists()
    return finished and not (out / REPORT).exists()


def _default_out(asked: Asked) -> Path:
    mark = "-published" if asked.protocol == "published" else ""
    return Path("runs") / (options.default_name(asked.data, asked.method) + mark)
