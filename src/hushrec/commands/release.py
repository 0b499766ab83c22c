"""``hushrec release``: what of a run may be published."""

from __future__ import annotations

from pathlib import Path

import click

from hushrec.commands.options import json_option, run_argument
from hushrec.commands.places import PLACE
from hushrec.commands.terminal import print_json, say
from hushrec.release import release
from hushrec.report.units import human_size
from hushrec.run import Run


@click.command("release")
@run_argument
@click.argument("place", metavar="DIR", type=PLACE)
@json_option
def release_command(folder: Path, place: Path, as_json: bool) -> None:
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
    path = release(run, place)
    sizes = {
        file.relative_to(path).as_posix(): file.stat().st_size
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }
    statement = run.summary["privacy"]["statement"]
    if as_json:
        print_json({"release": str(path), "bytes": sizes, "statement": statement})
        return
    say(f"{path}: " + ", ".join(f"{name} {human_size(n)}" for name, n in sizes.items()))
    say(statement)
