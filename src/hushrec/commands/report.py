"""``hushrec report``: the page of a run, written again, or one page of several runs."""

from __future__ import annotations

from pathlib import Path

import click

from hushrec.commands.complete import runs_like
from hushrec.commands.places import PLACE
from hushrec.commands.terminal import say
from hushrec.errors import ConfigError
from hushrec.report.html import Shown, write_report
from hushrec.report.side_by_side import write_comparison
from hushrec.run import Run


@click.command("report")
@click.argument(
    "folders", metavar="RUN...", nargs=-1, required=True, type=PLACE, shell_complete=runs_like
)
@click.option("--without-samples", is_flag=True, help="Leave out users' histories and lists.")
@click.option("--map", "with_map", is_flag=True, help="Draw the items as one user sees them.")
@click.option("--user", metavar="ID", help="Show a user's lists: own, global, random, popular.")
@click.option("--out", type=PLACE, metavar="FILE.html", help="Where the page of several runs goes.")
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
        shown = Shown(samples=not without_samples, map=with_map, user=user)
        say(write_report(Run.open(folders[0]), shown))
        return
    if with_map or user is not None:
        raise ConfigError("--map and --user are for the page of one run")
    say(write_comparison(folders, out or Path("compared.html")))
