"""``hushrec methods``: what can be trained, with which options."""

from __future__ import annotations

from typing import Any

import click

from hushrec.commands.options import json_option
from hushrec.commands.terminal import Console, print_json
from hushrec.config import preset_names
from hushrec.errors import MissingExtraError
from hushrec.methods.base import method_class, method_names
from hushrec.report.tables import plain_table


@click.command("methods")
@json_option
def methods_command(as_json: bool) -> None:
    """List the installed methods, their options and presets.

    \b
    hushrec methods
    hushrec methods --json
    """
    entries = [{"name": n, **_described(n), "presets": preset_names(n)} for n in method_names()]
    if as_json:
        print_json(entries)
        return
    table = plain_table()
    for name in ("method", "options and defaults", "presets", "what it is"):
        table.add_column(name, overflow="fold")
    for entry in entries:
        options = " ".join(f"{key}={said['default']}" for key, said in entry["options"].items())
        about = entry["about"]
        table.add_row(entry["name"], options, " ".join(entry["presets"]), about)
    Console().print(table)


def _described(name: str) -> dict[str, Any]:
    """Return the first line of a method's description, and its options."""
    try:
        found = method_class(name)
    except MissingExtraError as error:
        return {"about": str(error), "options": {}}
    options = {
        key: {
            "default": field.get_default(call_default_factory=True),
            "about": field.description,
        }
        for key, field in found.Config.model_fields.items()
    }
    return {"about": (found.__doc__ or "").strip().splitlines()[0], "options": options}
