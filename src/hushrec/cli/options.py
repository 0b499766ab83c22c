"""The types of options and arguments that are paths: checked before anything is done with them.

What a shell may put where a word is unfinished: methods, data sets, presets, runs.

Switched on by what click prints: ``_HUSHREC_COMPLETE=bash_source hushrec`` (or zsh_source,
fish_source), to be read by the shell.

Options that commands have in common, and a way to pass those that belong together as one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem
from click.types import FuncParamType

from hushrec.config import DEFAULT_METHOD, names
from hushrec.io.files import checked_path


def _left_as_given(name: str) -> str:
    """Check what may be a path, or the name of something."""
    checked_path(name)
    return name


PLACE = FuncParamType(checked_path)
"""A file or a folder, as a `Path` that can be worked with."""
PLACE.name = "path"
SOURCE = FuncParamType(_left_as_given)
"""The name of something that ships, or a file, as text."""
SOURCE.name = "source"


DEEPEST = 3
"""Folders below the one we are in that runs are looked for in."""


def methods_like(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    """Name methods that begin so."""
    return _items(names("methods"), word)


def data_like(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    """Name data sets that begin so, and leave files to the shell."""
    from hushrec.data.catalog import names as data_names

    return [*_items(data_names(), word), CompletionItem(word, type="file")]


def presets_like(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    """Name presets of the method that was said, and leave files to the shell."""
    from hushrec.federation.experiment import preset_names

    found = preset_names(ctx.params.get("method") or "")
    return [*_items(found, word), CompletionItem(word, type="file")]


def runs_like(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    """Name folders of runs that begin so; where there are none, leave folders to the shell."""
    found: list[str] = []
    level = [Path()]
    for _ in range(DEEPEST):
        level = [
            each
            for folder in level
            for each in sorted(folder.iterdir())
            if each.is_dir() and not each.name.startswith(".")
        ]
        found += [str(each) for each in level if (each / "config.toml").is_file()]
    return _items(found, word) or [CompletionItem(word, type="dir")]


def _items(known: Iterable[str], word: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in known if name.startswith(word)]


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

    ``kind`` is a dataclass, whose fields have the names of the options; fields without an option
    keep their defaults.
    """
    names = [field.name for field in fields(kind)]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)  # hands on the options that the command has already
        def gathered(**given: Any) -> Any:
            value = kind(**{each: given.pop(each) for each in names if each in given})
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
