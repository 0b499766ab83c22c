"""``hushrec tune``: search for a method's options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from hushrec.cli import options
from hushrec.cli.display import Talk, load_aloud, polite_stop, talk_options, training_display
from hushrec.cli.options import PLACE, SOURCE, presets_like
from hushrec.cli.terminal import Console, print_json
from hushrec.federation.backends.simulation import Machine
from hushrec.federation.experiment import parse_settings
from hushrec.reporting.tables import trials_table
from hushrec.tuning import PRESET, Start, tune


@dataclass(frozen=True)
class Asked:
    """What to search for."""

    data: str
    items: str | None
    method: str
    preset: str | None
    trials: int
    rounds: int | None
    seed: int
    pairs: tuple[str, ...]

    def start(self) -> Start:
        """Return where the search begins."""
        settings = parse_settings(self.pairs)
        return Start(self.method, self.preset, self.rounds, self.seed, settings)

    def words(self) -> str:
        """Return the command that asks for it, for the preset to say where it is from."""
        given = {"--data": self.data, "--items": self.items, "--method": self.method}
        more = {"--preset": self.preset, "--rounds": self.rounds}
        words = [f"{flag} {at}" for flag, at in (given | more).items() if at is not None]
        words += [f"--set {pair}" for pair in self.pairs]
        return " ".join(["hushrec tune", *words, f"--trials {self.trials} --seed {self.seed}"])


@click.command("tune")
@options.gather(
    "asked",
    Asked,
    options.data_option,
    options.items_option,
    options.method_option,
    click.option(
        "--preset",
        type=SOURCE,
        metavar="NAME",
        help="What trial 0 and the fixed options come from.",
        shell_complete=presets_like,
    ),
    click.option(
        "--trials", type=click.IntRange(1, 100_000), default=20, show_default=True, metavar="N"
    ),
    click.option("--rounds", type=int, metavar="N", help="Rounds of a trial."),
    click.option("--seed", type=options.SEED, default=0, show_default=True, metavar="S"),
    click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="A fixed option."),
)
@click.option("--out", type=PLACE, metavar="DIR", help="The search's folder.")
@options.threads_option
@talk_options
@options.json_option
def tune_command(
    asked: Asked, out: Path | None, threads: int | None, talk: Talk, as_json: bool
) -> None:
    """Search for a method's options on the validation items, and write them as a preset.

    \b
    hushrec tune --data ml-100k --method pfedrec --trials 20
    hushrec tune --data ml-100k --method fedmf --set dual=true --rounds 100 --trials 30
    hushrec train --data ml-100k --method pfedrec --preset tunes/ml-100k-pfedrec/tuned-honest.toml

    The protocol is honest and test items are never scored. The same command goes on with a search
    that was interrupted, or with more --trials; the result is the same as without the stop.
    """
    out = out or Path("tunes") / options.default_name(asked.data, asked.method)
    asked.start().experiment(asked.data, asked.items)  # a typo is said before data is read
    data = load_aloud(asked.data, asked.items, quiet=as_json or talk.quiet)
    with training_display(as_json, talk) as show, polite_stop() as should_stop:
        search = tune(
            data,
            asked.start(),
            out,
            trials=asked.trials,
            machine=Machine(threads),
            command=asked.words(),
            on_round=lambda number, report: show(report, f"trial {number + 1} of {asked.trials}"),
            should_stop=should_stop,
        )
    best = search.best
    if as_json:
        print_json({**search.about, "best": best.number, "trials": search.trials})
        return
    console = Console()
    console.print(trials_table(search))
    console.print(f"preset: {out / PRESET}.toml", soft_wrap=True)
