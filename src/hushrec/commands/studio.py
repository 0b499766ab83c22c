"""``hushrec studio``: runs, users, privacy and the leak in a browser."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click

from hushrec.commands.guard import keep
from hushrec.commands.places import PLACE
from hushrec.commands.terminal import say
from hushrec.errors import RunError


@click.command("studio")
@click.argument("folder", metavar="[FOLDER]", type=PLACE, default="runs")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen at; other than this machine's own, the page asks for a token.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8610,
    show_default=True,
    help="Port to listen at; 0 takes a free one.",
)
@click.option("--open", "open_it", is_flag=True, help="Show it in a browser at once.")
def studio_command(folder: Path, host: str, port: int, open_it: bool) -> None:
    """Look at a folder of runs in a browser: progress, comparisons, users, privacy, the leak.

    \b
    hushrec studio
    hushrec studio runs --port 0 --open
    hushrec studio runs --host 0.0.0.0     # prints an address with a token; plain HTTP

    It reads and changes nothing. Ctrl-C ends it.
    """
    from hushrec.studio.server import serving

    if not folder.is_dir():
        raise RunError(f"{folder}: no such folder; train something first: hushrec train")
    with serving(folder, host, port, keep) as (server, place):
        say(f"{folder} is shown at {place.address}")
        if place.token:
            say("others can listen on the way: prefer a tunnel, ssh -L", err=True)
        if open_it:
            webbrowser.open(place.address)
        server.serve_forever()
