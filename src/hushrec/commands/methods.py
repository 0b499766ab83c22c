"""``hushrec methods``: what can be trained, with which options."""

from __future__ import annotations

from dataclasses import asdict

import click

from hushrec.commands.complete import methods_like
from hushrec.commands.options import json_option
from hushrec.commands.terminal import Console, print_json, say
from hushrec.errors import ConfigError, nearest
from hushrec.methods.base import method_names
from hushrec.reference import Described, Key, described, reference, shown
from hushrec.report.tables import plain_table


@click.command("methods")
@click.argument("name", metavar="[NAME]", required=False, shell_complete=methods_like)
@click.option("--markdown", is_flag=True, help="Every key of every section and method, as a page.")
@json_option
def methods_command(name: str | None, markdown: bool, as_json: bool) -> None:
    """List the installed methods, or describe one and its options.

    \b
    hushrec methods
    hushrec methods fedmix
    hushrec methods --json
    hushrec methods --markdown
    """
    if markdown:
        say(reference().rstrip("\n"))
        return
    known = method_names()
    if name is not None and name not in known:
        raise ConfigError(f"unknown method '{name}'{nearest(name, known)}")
    entries = [described(one) for one in known if name in (None, one)]
    if as_json:
        found = [
            {**asdict(one), "options": {key.name: asdict(key) for key in one.options}}
            for one in entries
        ]
        print_json(found if name is None else found[0])
    elif name is None:
        _list(entries)
    else:
        _describe(entries[0])


def _list(entries: list[Described]) -> None:
    table = plain_table()
    table.add_column("method", no_wrap=True)
    for column in ("what it is", "presets"):
        table.add_column(column, overflow="fold")
    for entry in entries:
        table.add_row(entry.name, entry.about, " ".join(entry.presets))
    console = Console()
    console.print(table)
    console.print("hushrec methods NAME describes one and its options", style="dim")


def _describe(entry: Described) -> None:
    console = Console()
    console.print(entry.name, style="bold", end="  ")
    console.print(entry.about)
    if entry.presets:
        console.print(f"presets: {', '.join(entry.presets)} (--preset NAME)")
    if entry.tuned:
        console.print(f"searched by hushrec tune: {', '.join(entry.tuned)}")
    for keys, title in ((entry.options, None), (entry.noised, "where noise is added to sums")):
        if keys:
            console.print()
            console.print(_options(keys, title))


def _options(keys: list[Key], title: str | None) -> object:
    table = plain_table(title)
    table.add_column("--set", no_wrap=True)
    for column in ("may be", "what it is"):
        table.add_column(column, overflow="fold")
    for key in keys:
        table.add_row(f"{key.name}={shown(key.default)}", key.kind.replace("`", ""), key.about)
    return table
