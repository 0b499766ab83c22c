"""Parameter types, options and shell completions that commands share.

Completion is switched on by the script that ``_HUSHREC_COMPLETE=bash_source hushrec`` prints (or
zsh_source, fish_source).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem
from click.types import FuncParamType

from hushrec.config import DEFAULT_METHOD, DEFAULT_UNDER_NOISE, names
from hushrec.io.files import checked_path


def _name_or_path(name: str) -> str:
    """Check a name that may be a path."""
    checked_path(name)
    return name


PATH = FuncParamType(checked_path)
"""A file or folder, as a checked `Path`."""
PATH.name = "path"
SOURCE = FuncParamType(_name_or_path)
"""A name of something that ships, or the path of a file, as text."""
SOURCE.name = "source"


MAX_DEPTH = 3
"""Levels of folders that are searched for runs."""


def complete_methods(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    """Complete a method."""
    return _items(names("methods"), word)


def complete_data(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    """Complete a data set or a file."""
    from hushrec.data.catalog import names as data_names

    return [*_items(data_names(), word), CompletionItem(word, type="file")]


def complete_presets(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    """Complete a preset of the chosen method, or a file."""
    from hushrec.federation.experiment import preset_names

    found = preset_names(ctx.params.get("method") or DEFAULT_METHOD)
    return [*_items(found, word), CompletionItem(word, type="file")]


def complete_runs(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    """Complete the folder of a run, or any folder if there are no runs."""
    found: list[str] = []
    level = [Path()]
    for _ in range(MAX_DEPTH):
        below = (each for folder in level for each in sorted(folder.iterdir()))
        level = [each for each in below if each.is_dir() and not each.name.startswith(".")]
        found += [str(each) for each in level if (each / "config.toml").is_file()]
    return _items(found, word) or [CompletionItem(word, type="dir")]


def _items(known: Iterable[str], word: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in known if name.startswith(word)]


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

COUNT = click.IntRange(1, 10**9)
SEED = click.IntRange(0, 2**63 - 1)


class Number(click.FloatRange):
    """A real number in a range, other than NaN."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Refuse NaN, which compares false with both ends of a range."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


run_argument = click.argument("folder", metavar="RUN", type=PATH, shell_complete=complete_runs)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON on standard output and nothing else."
)
threads_option = click.option(
    "--threads",
    type=click.IntRange(1, 4096),
    help="Threads to use; the result does not depend on it.",
)
data_option = click.option(
    "--data", type=SOURCE, default="demo", metavar="NAME|FILE", shell_complete=complete_data
)
items_option = click.option(
    "--items",
    type=SOURCE,
    metavar="FILE",
    help="Public list of items of a data file: an id per line, or a table.",
)
method_option = click.option(
    "--method",
    default=None,
    metavar="NAME",
    help=f"What to train.  [{DEFAULT_METHOD}; {DEFAULT_UNDER_NOISE} where noise is added to sums]",
    shell_complete=complete_methods,
)
preset_option = click.option(
    "--preset",
    type=SOURCE,
    metavar="NAME",
    help="A set of options that ships, for example 'paper'.",
    shell_complete=complete_presets,
)
set_option = click.option(
    "--set", "pairs", multiple=True, metavar="KEY=VALUE", help="An option; repeatable."
)
column_options = (
    click.option("--user", help="Column of the users, by name or number from 0."),
    click.option("--item", help="Column of the items."),
    click.option("--value", help="Column of ratings, weights or counts."),
    click.option("--time", help="Column of times: numbers or ISO dates."),
    click.option("--delimiter", help="Field delimiter, if it is not recognised."),
)
title_option = click.option("--title", help="Column of items' titles.")
part_option = click.option("--part", type=click.Choice(["valid", "test"]), default="test")


def gather(name: str, kind: Callable[..., Any], *options: Decorator) -> Decorator:
    """Add options to a command, which receives their values as one argument ``name``.

    ``kind`` makes it of them: a dataclass whose fields have the names of the options, or `dict`.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)  # keeps the options that the command already has
        def gathered(**given: Any) -> Any:
            value = kind(**{each: given.pop(each) for each in own})
            return command(**given, **{name: value})

        decorated: Any = gathered
        known = len(getattr(command, "__click_params__", ()))
        for option in reversed(options):
            decorated = option(decorated)
        own = [option.name for option in decorated.__click_params__[known:]]
        return gathered

    return decorate


def default_name(data: str, method: str) -> str:
    """Return the default name of a run's folder: data set or file name, and method."""
    name = Path(data).stem if Path(data).is_file() else data
    return f"{name}-{method}".replace("/", "-")
