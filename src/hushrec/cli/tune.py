"""``hushrec tune``: search for a method's options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from hushrec.cli import options
from hushrec.cli.display import Talk, load_aloud, polite_stop, talk_options, training_display
from hushrec.cli.options import PATH, SOURCE, complete_presets
from hushrec.cli.terminal import Console, print_json
from hushrec.federation.backends.simulation import Machine
from hushrec.federation.experiment import ExperimentRequest, parse_settings
from hushrec.reporting.tables import trials_table
from hushrec.tuning import PRESET, base_experiment, tune


@click.command("tune")
@options.gather(
    "request",
    ExperimentRequest,
    options.data_option,
    options.items_option,
    options.method_option,
    click.option(
        "--preset",
        type=SOURCE,
        metavar="NAME",
        help="What trial 0 and the fixed options come from.",
        shell_complete=complete_presets,
    ),
    click.option("--rounds", type=int, metavar="N", help="Rounds of a trial."),
    click.option("--seed", type=options.SEED, default=0, show_default=True, metavar="S"),
)
@click.option(
    "--trials", type=click.IntRange(1, 100_000), default=20, show_default=True, metavar="N"
)
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="A fixed option.")
@click.option("--out", type=PATH, metavar="DIR", help="The search's folder.")
@options.threads_option
@talk_options
@options.json_option
def tune_command(
    request: ExperimentRequest,
    trials: int,
    pairs: tuple[str, ...],
    out: Path | None,
    threads: int | None,
    talk: Talk,
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
    request = replace(request, settings=parse_settings(pairs))
    base = base_experiment(request)  # a typo is reported before data is read
    out = out or Path("tunes") / options.default_name(request.data, base.method)
    data = load_aloud(request.data, request.items, quiet=as_json or talk.quiet)
    with training_display(as_json, talk) as display, polite_stop() as stop:

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
    best = search.best
    if as_json:
        print_json({**search.about, "best": best.number, "trials": search.trials})
        return
    console = Console()
    console.print(trials_table(search))
    console.print(f"preset: {out / PRESET}.toml", soft_wrap=True)


def _command(request: ExperimentRequest, trials: int, pairs: tuple[str, ...]) -> str:
    """Return the command of a search, for the comment in its preset."""
    names = ("data", "items", "method", "preset", "rounds")
    given = [(name, getattr(request, name)) for name in names]
    words = [f"--{name} {value}" for name, value in given if value is not None]
    words += [f"--set {pair}" for pair in pairs]
    return " ".join(["hushrec tune", *words, f"--trials {trials} --seed {request.seed}"])
