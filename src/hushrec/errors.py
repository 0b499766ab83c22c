"""Exceptions of hushrec, and helpers for error messages.

::

    HushrecError
    ├── InputError            invalid input; the message says what to change
    │   ├── DataError         a data file; the message names line or column
    │   ├── ConfigError       an unknown key, value or name, or one that does not fit
    │   └── RunError          a run folder that exists already, is damaged, or is not a run
    │       ├── DiskError     a failed write: disk full, no permission, no such folder
    │       └── StartingError the server of a federation is not ready yet
    ├── DivergedError         training diverged (NaN, infinity, overflow of the exact sums)
    ├── MessageError          an invalid message of another party; it is ignored
    ├── TooFewError           too few nodes for a secure sum
    ├── FederationError       too few suitable nodes; completed rounds are saved
    │   └── ServerLostError   the server does not answer, or was started anew
    ├── StoppedError          interrupted by the user; completed rounds are saved
    └── MissingExtraError     a missing optional dependency; the message has the pip command

The command line prints the message without a traceback and exits with code 2; with 3 after
`DivergedError`, and after a run that is complete without some of its rounds; with 130 after
`StoppedError`, and with 70 after any other exception, which is a bug (`cli.terminal`).

Titles, ids, file names and column names are untrusted text: some characters control a terminal or
change the order of display. Whatever prints, logs or draws such text passes it through `plain`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

LONGEST_MESSAGE = 2_000
"""Largest number of characters of an error message."""
LISTED = 8
"""Largest number of names that a message lists."""
LONGEST_NAME = 80
"""Largest number of characters of a name in such a list."""

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_CONTROLS = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) != "\n"},  # control pictures
    ord("\t"): " ",
    0x7F: "\N{SYMBOL FOR DELETE}",
    **dict.fromkeys(range(0x80, 0xA0), _UNKNOWN),
    **dict.fromkeys((0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), _UNKNOWN),
    **dict.fromkeys(range(0xD800, 0xE000), _UNKNOWN),  # bytes of a file name that are not UTF-8
}


def plain(text: object) -> str:
    """Return the text with control and bidirectional characters replaced, line ends excepted."""
    return str(text).translate(_CONTROLS)


def shortened(text: str, most: int = LONGEST_MESSAGE) -> str:
    """Return the beginning and the end of a text that is longer than ``most``."""
    if len(text) <= most:
        return text
    end = most // 4
    left_out = len(text) - most
    return f"{text[: most - end]} … ({left_out:,} characters left out) … {text[-end:]}"


def listed(names: Sequence[str], most: int = LISTED, quote: str = "'") -> str:
    """Return ``'a', 'b' and 7 more``."""
    shown = ", ".join(f"{quote}{cut(name)}{quote}" for name in names[:most])
    more = len(names) - most
    return f"{shown} and {more:,} more" if more > 0 else shown


def cut(name: str, most: int = LONGEST_NAME) -> str:
    """Return a name of at most ``most`` characters."""
    return name if len(name) <= most else name[: most - 1] + "…"


MOST_COMPARED = 1_000
MOST_KNOWN = 50
"""Known names that `nearest` compares with a misspelt one, and that it lists without a match."""


class HushrecError(Exception):
    """Base class of all exceptions of hushrec.

    The message speaks Python; ``command`` is the same sentence in the words of the command line,
    where they differ.
    """

    def __init__(self, message: str = "", *, command: str | None = None) -> None:
        super().__init__(message)
        self.command = command


class InputError(HushrecError):
    """Invalid input."""


class DataError(InputError):
    """A data file is invalid."""


class ConfigError(InputError):
    """A key, value or name is unknown or does not fit."""


class RunError(InputError):
    """A run folder exists already, is damaged, or is not a run."""


class DiskError(RunError):
    """A write failed; existing files are unchanged."""


class DivergedError(HushrecError):
    """Training produced NaN or infinite values."""


class MessageError(HushrecError):
    """A message is damaged, forged, late or too large."""


class TooFewError(HushrecError):
    """Too few nodes are left for a secure sum."""


class FederationError(HushrecError):
    """Too few nodes take part for a run to start or to continue."""


class StartingError(RunError):
    """The server is not ready yet."""


class ServerLostError(FederationError):
    """The server of a run does not answer, or was started anew."""


class StoppedError(HushrecError):
    """The user interrupted the run; completed rounds are saved."""


CPU_BUILDS = {"neural": "torch==2.13.0"}
"""Requirement that `pip` fulfils with a CPU build, by extra; without it `pip` chooses a release
that brings several GB of CUDA packages."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra."""
    pinned = CPU_BUILDS.get(extra)
    if pinned is None:
        return f"pip install 'hushrec[{extra}]'"
    return (
        f"pip install {pinned} 'hushrec[{extra}]' ({pinned} is a CPU build; without the version "
        "pip brings several GB of CUDA packages)"
    )


class MissingExtraError(HushrecError):
    """An optional dependency is not installed."""

    def __init__(self, what: str, extra: str, *, own: bool = True) -> None:
        how = install_command(extra) if own else f"pip install {extra}"
        super().__init__(f"{what} needs an optional part: {how}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` with the closest known name, or the list of names."""
    options = sorted(known)
    # Comparing two names costs the product of their lengths, and files can have many long names.
    by_lower = {cut(option.lower()): option for option in options[:MOST_COMPARED]}
    match = difflib.get_close_matches(cut(name.lower()), by_lower, n=1, cutoff=0.5)
    if match:
        return f"; did you mean '{cut(by_lower[match[0]])}'?"
    return f"; known: {listed(options, MOST_KNOWN, quote='')}" if options else ""


def refuse_unknown(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for a keyword argument that a function with ``**options`` does not have."""
    names = list(known)
    for name in given:
        if name not in names:
            hint = nearest(name, names)
            raise TypeError(f"{function}() got an unexpected keyword argument '{cut(name)}'{hint}")
