"""``hushrec recommend`` and ``export``: what a run has to say to a user, here or on a device.

``hushrec release``: what of a run may be published.

``hushrec report``: the page of a run, written again, or one page of several runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hushrec.api import Run
from hushrec.cli.options import COUNT, PATH, complete_runs, json_option, run_argument
from hushrec.cli.terminal import Console, print_json, say
from hushrec.data.reading import read_history
from hushrec.errors import ConfigError
from hushrec.reporting.html import Shown, write_comparison, write_federated_report, write_report
from hushrec.reporting.tables import plain_table
from hushrec.reporting.wording import human_size
from hushrec.runs.folder import RunFolder
from hushrec.runs.release import release
from hushrec.serving.bundle import BundleForm
from hushrec.serving.model import Recommendation


@click.command("recommend")
@run_argument
@click.option("--user", required=True, metavar="ID")
@click.option("-k", "count", type=COUNT, default=10, show_default=True)
@click.option(
    "--history",
    type=PATH,
    metavar="FILE",
    help="Items of a user the run does not know: one id a line, oldest first, or a table.",
)
@click.option(
    "--feature",
    "features",
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
    features: tuple[str, ...],
    as_json: bool,
) -> None:
    """Recommend items that a user has not touched yet.

    \b
    hushrec recommend runs/pfedrec --user 42
    hushrec recommend runs/pfedrec --user anna --history anna.txt -k 5 --json
    hushrec recommend runs/privrec --user anna --history anna.txt --feature 'region=coast'
    """
    for pair in features:
        if "=" not in pair:
            raise ConfigError(f"--feature {pair}: expected NAME=VALUE")
    run = Run.open(folder)
    items = None if history is None else read_history(history)
    if items is not None:
        unknown = len(set(items) - set(run.split.data.items.tolist()))
        if unknown:
            say(f"{unknown} of {len(set(items))} items are not in the catalogue", err=True)
    found = run.recommend(user, count, items, dict(pair.split("=", 1) for pair in features))
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
    for rank, line in enumerate(found, 1):
        cells = str(rank), line.title, line.item, f"{line.score:.3f}"
        table.add_row(*cells, *([line.because] if explained else []))
    Console().print(table)


@click.command("export")
@run_argument
@click.argument("bundle", metavar="DIR", type=PATH)
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
    python -c "from hushrec.serving.recommender import Recommender as R
    print(R.load('bundle', history=['1193', '661']).recommend(5))"

    The folder `hushrec/serving/recommender` imports nothing else of hushrec: copy it to the device.
    """
    form: BundleForm = {"neighbours": neighbours, "precision": precision, "overwrite": overwrite}
    path = Run.open(folder).export(bundle, **form)
    sizes = {file.name: file.stat().st_size for file in sorted(path.iterdir())}
    if as_json:
        print_json({"bundle": str(path), "bytes": sizes})
        return
    text = ", ".join(f"{name} {human_size(size)}" for name, size in sizes.items())
    say(f"{path}: {text}")


@click.command("release")
@run_argument
@click.argument("target", metavar="DIR", type=PATH)
@json_option
def release_command(folder: Path, target: Path, as_json: bool) -> None:
    """Write what a run's guarantee covers, and nothing else, into a new folder.

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
    sizes = {
        file.relative_to(path).as_posix(): file.stat().st_size
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }
    statement = run.summary.privacy.statement
    if as_json:
        print_json({"release": str(path), "bytes": sizes, "statement": statement})
        return
    say(f"{path}: " + ", ".join(f"{name} {human_size(n)}" for name, n in sizes.items()))
    say(statement)


@click.command("report")
@click.argument(
    "folders", metavar="RUN...", nargs=-1, required=True, type=PATH, shell_complete=complete_runs
)
@click.option("--without-samples", is_flag=True, help="Leave out users' histories and lists.")
@click.option("--map", "with_map", is_flag=True, help="Draw the items as one user sees them.")
@click.option("--user", metavar="ID", help="Show a user's lists: own, global, random, popular.")
@click.option("--out", type=PATH, metavar="FILE.html", help="Where the page of several runs goes.")
def report_command(
    folders: tuple[Path, ...],
    without_samples: bool,
    with_map: bool,
    user: str | None,
    out: Path | None,
) -> None:
    """Write a run's report.html again, or one page of several runs, and print where it is.

    \b
    hushrec report runs/pfedrec
    hushrec report runs/pfedrec --without-samples
    hushrec report runs/pfedrec --map --user viewer-0001
    hushrec report runs/popularity runs/fedmf runs/pfedrec --out compared.html
    """
    if len(folders) == 1:
        if out is not None:
            raise ConfigError("a run's page is in its folder; --out is for a page of several runs")
        folder = RunFolder.open(folders[0])
        if folder.read_summary().nodes is not None:
            if with_map or user is not None:
                raise ConfigError(
                    "--map and --user need users' interactions, which stay on the nodes"
                )
            say(write_federated_report(folder))
            return
        shown = Shown(samples=not without_samples, map=with_map, user=user)
        say(write_report(Run.open(folders[0]), shown))
        return
    if with_map or user is not None:
        raise ConfigError("--map and --user are for the page of one run")
    say(write_comparison(folders, out or Path("compared.html")))
