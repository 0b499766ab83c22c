"""Options that commands have in common, and a way to pass those that belong together as one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any

import click

from hushrec.commands.complete import data_like, methods_like, presets_like, runs_like
from hushrec.commands.places import PLACE, SOURCE
from hushrec.registry import DEFAULT_METHOD

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

COUNT = click.IntRange(1, 10**9)
SEED = click.IntRange(0, 2**63 - 1)


class Number(click.FloatRange):
    """A real number between two others, and a number."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Refuse what is not a number: it lies in every range."""
        found: float = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value} is not a number.", param, ctx)
        return found


run_argument = click.argument("folder", metavar="RUN", type=PLACE, shell_complete=runs_like)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON on standard output and nothing else."
)
threads_option = click.option(
    "--threads",
    type=click.IntRange(1, 4096),
    help="Threads to use; the result does not depend on it.",
)
data_option = click.option(
    "--data",
    type=SOURCE,
    default="demo",
    show_default=True,
    metavar="NAME|FILE",
    shell_complete=data_like,
)
items_option = click.option(
    "--items",
    type=SOURCE,
    metavar="FILE",
    help="Public list of items of a data file: an id per line, or a table.",
)
method_option = click.option(
    "--method",
    default=DEFAULT_METHOD,
    show_default=True,
    metavar="NAME",
    shell_complete=methods_like,
)
preset_option = click.option(
    "--preset",
    type=SOURCE,
    metavar="NAME",
    help="A set of options that ships, for example 'paper'.",
    shell_complete=presets_like,
)
part_option = click.option(
    "--part", type=click.Choice(["valid", "test"]), default="test", show_default=True
)


def gather(name: str, kind: type[Any], *options: Decorator) -> Decorator:
    """Add these options to a command, which gets their values as one ``kind`` called ``name``.

    ``kind`` is a dataclass; its fields have the names of the options.
    """
    names = [field.name for field in fields(kind)]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)  # hands on the options that the command has already
        def gathered(**given: Any) -> Any:
            value = kind(**{each: given.pop(each) for each in names})
            return command(**given, **{name: value})

        decorated: Callable[..., Any] = gathered
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


def default_name(data: str, method: str) -> str:
    """Name a folder after what is trained in it; of a file its name alone."""
    name = Path(data).stem if Path(data).is_file() else data
    return f"{name}-{method}".replace("/", "-")
