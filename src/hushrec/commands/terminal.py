"""What the terminal is told: the only module that prints.

Strings are text and nothing else. Their control characters are shown and not obeyed
(`hushrec.plain_text`), square brackets and colons mean themselves: what is bold is said by a style.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.progress import Progress, ProgressColumn, TextColumn
from rich.segment import Segment
from rich.text import Text

from hushrec.plain_text import plain, shortened

_NOT_FOR_TERMINALS = re.compile("[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Console(RichConsole):
    """A console for strings of any origin."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **more: Any) -> Text:
        """Lay a string out as it will be shown."""
        return super().render_str(plain(text), **more)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Make sure of what was no string; a console's own commands are no text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain(segment.text))


def words(template: str) -> TextColumn:
    """Return a column of words for `progress`."""
    return TextColumn(template, markup=False)


def progress(*columns: ProgressColumn, transient: bool = False, quiet: bool = False) -> Progress:
    """Return progress bars on standard error."""
    return Progress(*columns, console=Console(stderr=True), transient=transient, disable=quiet)


def say(text: object, *, err: bool = False) -> None:
    """Print a line of text."""
    click.echo(plain(text), err=err)


def complain(error: BaseException) -> None:
    """Print an error as one sentence of bearable length."""
    say(f"hushrec: {shortened(str(error))}", err=True)


def print_json(value: object) -> None:
    """Print a result for programs, and for people who look at it; a dataclass is its fields."""
    text = json.dumps(value, indent=2, default=asdict, ensure_ascii=False)
    # JSON escapes what lies below a space; what else a terminal obeys can only be inside a string.
    click.echo(_NOT_FOR_TERMINALS.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


@contextmanager
def safe_usage() -> Iterator[None]:
    """Make what click says of words on the command line as safe as what we say."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal without our letters shows others
            stream.reconfigure(errors="replace")
    try:
        yield
    except click.UsageError as error:
        raise click.UsageError(shortened(plain(error.format_message())), error.ctx) from None
