"""``hushrec recommend`` and ``export``: what a run has to say to a user, here or on a device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hushrec.commands.options import COUNT, json_option, run_argument
from hushrec.commands.places import PLACE
from hushrec.commands.terminal import Console, print_json, say
from hushrec.data.files import read_history
from hushrec.errors import ConfigError
from hushrec.report.tables import plain_table
from hushrec.report.units import human_size
from hushrec.run import Recommendation, Run
from hushrec.serve.bundle import BundleForm, export


@click.command("recommend")
@run_argument
@click.option("--user", required=True, metavar="ID")
@click.option("-k", "count", type=COUNT, default=10, show_default=True)
@click.option(
    "--history",
    type=PLACE,
    metavar="FILE",
    help="Items of a user the run does not know: one id a line, oldest first, or a table.",
)
@click.option(
    "--feature",
    "said",
    multiple=True,
    metavar="NAME=VALUE",
    help="What such a user is; repeatable.",
)
@json_option
def recommend_command(
    folder: Path,
    user: str,
    count: int,
    history: Path | None,
    said: tuple[str, ...],
    as_json: bool,
) -> None:
    """Recommend items that a user has not touched yet.

    \b
    hushrec recommend runs/pfedrec --user 42
    hushrec recommend runs/pfedrec --user anna --history anna.txt -k 5 --json
    hushrec recommend runs/privrec --user anna --history anna.txt --feature 'region=coast'
    """
    for pair in said:
        if "=" not in pair:
            raise ConfigError(f"--feature {pair}: expected NAME=VALUE")
    run = Run.open(folder)
    items = None if history is None else read_history(history)
    if items is not None:
        unknown = len(set(items) - set(run.split.data.items.tolist()))
        if unknown:
            say(f"{unknown} of {len(set(items))} items are not in the catalogue", err=True)
    found = run.recommend(user, count, items, dict(pair.split("=", 1) for pair in said))
    show_recommendations(user, found, as_json)


def show_recommendations(user: str, found: Sequence[Recommendation], as_json: bool) -> None:
    """Print a list."""
    if not found:
        say(f"nothing is left to recommend to '{user}'", err=True)
    if as_json:
        print_json({"user": user, "recommendations": found})
        return
    table = plain_table()
    table.add_column("", justify="right")
    table.add_column("title", overflow="fold")
    table.add_column("item", overflow="fold")
    table.add_column("score", justify="right")
    explained = any(line.because for line in found)
    if explained:
        table.add_column("because of")
    for place, line in enumerate(found, 1):
        cells = str(place), line.title, line.item, f"{line.score:.3f}"
        table.add_row(*cells, *([line.because] if explained else []))
    Console().print(table)


@click.command("export")
@run_argument
@click.argument("bundle", metavar="DIR", type=PLACE)
@click.option(
    "--neighbours",
    type=COUNT,
    help="Weights kept per item and table, the largest ones.  [all in single precision; in half "
    "600, or 300 in each of fedmix' tables]",
)
@click.option(
    "--precision", type=click.Choice(["half", "single"]), default="half", show_default=True
)
@click.option("--overwrite", is_flag=True, help="Replace the bundle in DIR.")
@json_option
def export_command(
    folder: Path,
    bundle: Path,
    neighbours: int | None,
    precision: Any,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write a run's model for devices: a folder that numpy alone can serve.

    \b
    hushrec export runs/fednext bundle
    python -c "from hushrec.serve.recommender import Recommender as R
    print(R.load('bundle', history=['1193', '661']).recommend(5))"

    The folder `hushrec/serve/recommender` stands alone: copy it to the device.
    """
    form: BundleForm = {"neighbours": neighbours, "precision": precision, "overwrite": overwrite}
    path = export(Run.open(folder), bundle, **form)
    sizes = {file.name: file.stat().st_size for file in sorted(path.iterdir())}
    if as_json:
        print_json({"bundle": str(path), "bytes": sizes})
        return
    text = ", ".join(f"{name} {human_size(size)}" for name, size in sizes.items())
    say(f"{path}: {text}")
