"""``hushrec report``: the page of a run, written again."""

from __future__ import annotations

from pathlib import Path

import click

from hushrec.commands.options import run_argument
from hushrec.commands.terminal import say
from hushrec.report.html import write_report
from hushrec.run import Run


@click.command("report")
@run_argument
def report_command(folder: Path) -> None:
    """Write a run's report.html again and print where it is.

    \b
    hushrec report runs/pfedrec
    """
    say(write_report(Run.open(folder)))
