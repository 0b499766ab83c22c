"""What the terminal is told: the only module that prints.

Strings are text and nothing else. Their control characters are shown and not obeyed
(`hushrec.errors`), square brackets and colons mean themselves: what is bold is said by a style.
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
from rich.console import ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.progress import Progress, ProgressColumn, TextColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from hushrec.errors import plain, shortened

_NOT_FOR_TERMINALS = re.compile("[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
LEAST_WORDS = 12
"""Columns of words are not folded to less than this, or to their longest word."""
WIDEST = 10_000


class Console(RichConsole):
    """A console for strings of any origin."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def print(self, *objects: Any, **more: Any) -> None:
        """Print; a table that is too wide row by row, for half a figure is none."""
        fitting = [self._fitting(one) if isinstance(one, Table) else one for one in objects]
        super().print(*fitting, **more)

    def _fitting(self, table: Table) -> RenderableType:
        for column in table.columns:
            cells = [cell for cell in column.cells if isinstance(cell, str)]
            if column.no_wrap:
                column.min_width = max(map(len, cells), default=1)
            else:
                longest = max((len(word) for cell in cells for word in cell.split()), default=1)
                column.min_width = min(longest, LEAST_WORDS)
        needed = Measurement.get(self, self.options.update(max_width=WIDEST), table).minimum
        if needed <= self.width:
            return table
        if not self.is_terminal:  # a file is as wide as need be
            self.width = needed
            return table
        return _row_by_row(table)

    def render_str(self, text: str, **more: Any) -> Text:
        """Lay a string out as it will be shown."""
        return super().render_str(plain(text), **more)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Make sure of what was no string; a console's own commands are no text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain(segment.text))


def _row_by_row(table: Table) -> Group:
    """Lay a table out as a list: the words of a row, and below them its figures by name."""
    parts: list[RenderableType] = [] if table.title is None else [Text(plain(table.title))]
    heads = [str(column.header) for column in table.columns]
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        named = list(zip(heads, map(str, cells), table.columns, strict=True))
        name = "  ".join(cell for _, cell, column in named if column.justify != "right" and cell)
        parts.append(Text(plain(name), style="bold"))
        parts += [
            Text(plain(f"  {head} {cell}"))
            for head, cell, column in named
            if column.justify == "right" and cell
        ]
    return Group(*parts, *([] if table.caption is None else [Text(plain(table.caption))]))


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
