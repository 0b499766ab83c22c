"""What is left when a command fails in a way that nobody thought of: a sentence all the same.

Errors that are meant for the user pass; `hushrec.cli` says them. A TERM ends a command as
Ctrl-C does, so that what was begun is cleared away. Everything else ends here.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from hushrec.cli.terminal import say
from hushrec.errors import DiskError, HushrecError

BUG = 70
"""Exit code of a fault of hushrec's own: EX_SOFTWARE of sysexits.h."""
LOG = "last-error.log"
TRACEBACK = "HUSHREC_TRACEBACK"
"""Variable that has tracebacks shown on standard error."""
NO_CACHE = (
    "hushrec: no folder can be written for compiled kernels, so they are compiled again each time; "
    "set NUMBA_CACHE_DIR to a folder of yours"
)
COMPILING = "compiling kernels for this machine, once: this takes up to a minute"
LONGEST = 300
"""Characters of an error's own words that are shown."""


@contextmanager
def guarded() -> Iterator[None]:
    """Turn whatever a command raises beyond hushrec's errors into a sentence and an exit code."""
    try:
        with _ended_as_by_ctrl_c():
            yield
    # A reader that went away, as in `| head`, is no error: click ends the program silently.
    except (HushrecError, click.ClickException, click.Abort, click.exceptions.Exit):
        raise
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        say("hushrec: stopped", err=True)
        sys.exit(130)
    except MemoryError as error:
        say(
            f"hushrec: this machine has not enough memory for it{_in_brackets(error)}: use less "
            "data, a smaller d, a smaller batch or cohort, fewer --threads, or --set "
            "store.kind=file",
            err=True,
        )
        sys.exit(2)
    except OSError as error:
        place = "" if error.filename is None else f"{error.filename}: "
        say(f"hushrec: {_one_line(place + (error.strerror or str(error)))}", err=True)
        sys.exit(2)
    except Exception as error:
        say(
            f"hushrec: this is a fault of hushrec, and not yours: {type(error).__name__}"
            f"{_in_brackets(error)}. Please report it with the command and {keep(error)}.",
            err=True,
        )
        sys.exit(BUG)


def listening() -> None:
    """Say what kernels have to say, once a command has imported some: that they are compiled."""
    compiled: Any = sys.modules.get("hushrec.kernels.jit")
    if compiled is None:
        return
    if compiled.UNCACHED:
        say(NO_CACHE, err=True)
    else:
        compiled.on_compiling = lambda: say(COMPILING, err=True)


@contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """Let a TERM raise what Ctrl-C raises."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def keep(error: Exception) -> str:
    """Show the traceback if that is wanted, else leave it in a file; say where it is."""
    # Needed by a failure alone, and long to import.
    from hushrec.data.sources import cache_dir
    from hushrec.io.files import write_bytes

    text = "".join(traceback.format_exception(error))
    if os.environ.get(TRACEBACK):
        say(text, err=True)
        return "the lines above"
    system = f"hushrec {version('hushrec')}, Python {platform.python_version()}, {sys.platform}"
    file: Path = cache_dir() / LOG
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, f"{system}\n{text}".encode("utf-8", "backslashreplace"))
    except (OSError, DiskError):
        return f"what it shows with {TRACEBACK}=1"
    return str(file)


def _in_brackets(error: BaseException) -> str:
    return f" ({_one_line(str(error))})" if str(error) else ""


def _one_line(text: str) -> str:
    """Return words that came from anywhere as one short line that a terminal only shows."""
    line = " ".join(text.split())
    line = line if len(line) <= LONGEST else f"{line[:LONGEST]}…"
    return "".join(one if one.isprintable() else "?" for one in line)
