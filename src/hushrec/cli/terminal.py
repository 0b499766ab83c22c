"""Terminal output and error handling of commands: the only module that prints.

Strings are plain text: control characters are escaped (`hushrec.errors.plain`), and rich's markup
and emoji codes are off. `error_guard` turns unexpected exceptions of a command into one line and an
exit code; hushrec's own errors pass through it to `hushrec.cli`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.progress import Progress, ProgressColumn, TextColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from hushrec.errors import DiskError, HushrecError, plain, shortened

if TYPE_CHECKING:
    from hushrec.runs.schema import Summary

_NOT_FOR_TERMINALS = re.compile("[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
MIN_TEXT_WIDTH = 12
"""Text columns are not folded below this width, or their longest word."""
MAX_WIDTH = 10_000
BUG = 70
"""Exit code of a bug in hushrec: EX_SOFTWARE of sysexits.h."""
DIVERGED = 3
"""Exit code of training that diverged: it ended, or the guard left out some of its rounds."""
LOG = "last-error.log"
TRACEBACK = "HUSHREC_TRACEBACK"
"""Environment variable that prints tracebacks to standard error."""
NO_CACHE = (
    "hushrec: no folder can be written for compiled kernels, so each process compiles them again; "
    "set NUMBA_CACHE_DIR to a writable folder"
)
COMPILING = "compiling kernels that this machine needs for the first time: up to a minute"
MAX_MESSAGE = 300
"""Characters of an unexpected error's message that are shown."""


class Console(RichConsole):
    """A console that prints untrusted strings as plain text."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def print(self, *objects: Any, **more: Any) -> None:
        """Print; a table that is too wide for the terminal is printed row by row, not cut."""
        fitting = [self._fitting(one) if isinstance(one, Table) else one for one in objects]
        super().print(*fitting, **more)

    def _fitting(self, table: Table) -> RenderableType:
        for column in table.columns:
            cells = [cell for cell in column.cells if isinstance(cell, str)]
            if column.no_wrap:
                column.min_width = max(map(len, cells), default=1)
            else:
                longest = max((len(word) for cell in cells for word in cell.split()), default=1)
                column.min_width = min(longest, MIN_TEXT_WIDTH)
        needed = Measurement.get(self, self.options.update(max_width=MAX_WIDTH), table).minimum
        if not self.is_terminal:  # a file has no width
            self.width = max(self.width, needed)
        return table if needed <= self.width else _row_by_row(table)

    def render_str(self, text: str, **more: Any) -> Text:
        """Render a string without control characters."""
        return super().render_str(plain(text), **more)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Escape the text of every segment but control segments."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain(segment.text))


def _row_by_row(table: Table) -> Group:
    """Lay a table out as a list: the text of a row, and below it its figures by name."""
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


def text_column(template: str) -> TextColumn:
    """Return a text column for `progress`."""
    return TextColumn(template, markup=False)


def progress(*columns: ProgressColumn, transient: bool = False, quiet: bool = False) -> Progress:
    """Return progress bars on standard error."""
    return Progress(*columns, console=Console(stderr=True), transient=transient, disable=quiet)


def echo(text: object) -> None:
    """Print a line of text on standard output."""
    click.echo(plain(text))


def echo_err(text: object) -> None:
    """Print a line of text on standard error."""
    click.echo(plain(text), err=True)


def exit_with(code: int, message: str) -> NoReturn:
    """Print an error message and end the command with an exit code."""
    echo_err(f"hushrec: {message}")
    sys.exit(code)


def exit_if_not_applied(summary: Summary) -> None:
    """End with the exit code of training that diverged, where a run is complete without some of
    its rounds."""
    if summary.not_applied:
        mark = next(mark for mark in summary.marks if "not applied" in mark)
        exit_with(DIVERGED, f"the run is complete, but {mark}")


def _fields(value: Any) -> dict[str, Any]:
    from hushrec.io.codec import Stored  # pydantic: --help does not wait for it

    return value.as_dict() if isinstance(value, Stored) else asdict(value)


def print_json(value: object) -> None:
    """Print a value as indented JSON; a dataclass becomes an object."""
    text = json.dumps(value, indent=2, default=_fields, ensure_ascii=False)
    # JSON escapes characters below the space; other control characters occur in strings only.
    click.echo(_NOT_FOR_TERMINALS.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def show(as_json: bool, value: object, *shown: RenderableType) -> None:
    """Print a result: its value as JSON, or the tables and lines that people read."""
    if as_json:
        print_json(value)
        return
    for one in shown:
        if isinstance(one, str):
            echo(one)
        else:
            Console().print(one)


@contextmanager
def safe_usage() -> Iterator[None]:
    """Escape control characters in click's own usage errors."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # for terminals of another encoding
            stream.reconfigure(errors="replace")
    try:
        yield
    except click.UsageError as error:
        raise click.UsageError(shortened(plain(error.format_message())), error.ctx) from None


# ------------------------------------------------------------ unexpected errors


EXPECTED = (HushrecError, click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError)
"""Errors that end a command in their own way; click is silent after a broken pipe (`| head`)."""


@contextmanager
def error_guard() -> Iterator[None]:
    """Turn exceptions other than hushrec's and click's into one line and an exit code."""
    try:
        with _sigterm_as_interrupt():
            yield
    except EXPECTED:
        raise
    except KeyboardInterrupt:
        exit_with(130, "stopped")
    except MemoryError as error:
        exit_with(
            2,
            f"this machine does not have enough memory{_parenthesised(error)}: use less data, a "
            "smaller d, a smaller batch or cohort, fewer --threads, or --set store.kind=file",
        )
    except OSError as error:
        file = "" if error.filename is None else f"{error.filename}: "
        exit_with(2, _one_line(file + (error.strerror or str(error))))
    except Exception as error:
        name = f"{type(error).__name__}{_parenthesised(error)}"
        report = f"Please report it with the command and {log_traceback(error)}."
        exit_with(BUG, f"this is a bug in hushrec: {name}. {report}")


def announce_compilation() -> None:
    """Print a line when kernels are compiled, if the command has imported any."""
    compiled: Any = sys.modules.get("hushrec.kernels.jit")
    if compiled is not None and compiled.UNCACHED:
        echo_err(NO_CACHE)
    elif compiled is not None:
        compiled.on_compiling = lambda: echo_err(COMPILING)


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, so that temporary files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def log_traceback(error: Exception) -> str:
    """Print the traceback if `TRACEBACK` is set, else write it to a file; return where it is."""
    # Imported here because only failures need them.
    from hushrec.data.sources import cache_dir
    from hushrec.io.files import write_bytes

    text = "".join(traceback.format_exception(error))
    if os.environ.get(TRACEBACK):
        echo_err(text)
        return "the lines above"
    system = f"hushrec {version('hushrec')}, Python {platform.python_version()}, {sys.platform}"
    file: Path = cache_dir() / LOG
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, f"{system}\n{text}".encode("utf-8", "backslashreplace"))
    except (OSError, DiskError):
        return f"its output with {TRACEBACK}=1"
    return str(file)


def _parenthesised(error: BaseException) -> str:
    return f" ({_one_line(str(error))})" if str(error) else ""


def _one_line(text: str) -> str:
    """Return untrusted text as one short, printable line."""
    line = " ".join(text.split())
    line = line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]}…"
    return "".join(one if one.isprintable() else "?" for one in line)
