"""Words that others wrote, made safe to show; lists and messages kept short.

Titles, ids, names of files and columns come from anywhere. A terminal obeys some characters, and
shows others out of their order: whatever prints, logs or draws such words takes them from here.

Everything hushrec raises on purpose.

::

    HushrecError
    ├── InputError            what the user gave cannot be used; the message says what to change
    │   ├── DataError         a data file, named with its line or column
    │   ├── ConfigError       a key, a value or a name that does not exist
    │   └── RunError          a run folder: exists already, damaged, or not a run
    │       └── DiskError     what was to be written could not be: no room, no right, no such place
    ├── DivergedError         training left the numbers (NaN, infinity, overflow of the exact sums)
    ├── MessageError          what another party sent cannot be used, and counts for nothing
    ├── TooFewError           too few nodes are left for a sum that hides each of them
    ├── FederationError       too few nodes, or none that fits; what is done is saved
    ├── StoppedError          the user asked to stop; what is done is saved
    └── MissingExtraError     an optional dependency; the message carries the pip line

The command line prints the message alone, without a traceback, and exits with code 2. Two are no
fault of the input and have codes of their own, for scripts that run many cells: 3 after
`DivergedError`, whose command will end so again, and 130 after `StoppedError`, as shells do. What
is raised and is none of these is a fault of ours, and has code 70 (`commands.guard`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

LONGEST_MESSAGE = 2_000
"""Characters of an error; what is longer was copied from a file and explains nothing."""
LISTED = 8
"""Names that a message lists."""
LONGEST_NAME = 80
"""Characters of a name in such a list."""

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_OBEYED = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) != "\n"},  # their pictures
    ord("\t"): " ",
    0x7F: "\N{SYMBOL FOR DELETE}",
    **dict.fromkeys(range(0x80, 0xA0), _UNKNOWN),
    **dict.fromkeys((0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), _UNKNOWN),
    **dict.fromkeys(range(0xD800, 0xE000), _UNKNOWN),  # what of a file's name is no UTF-8
}


def plain(text: object) -> str:
    """Return a text in which a terminal obeys nothing but line ends; its length stays."""
    return str(text).translate(_OBEYED)


def shortened(text: str, most: int = LONGEST_MESSAGE) -> str:
    """Return a text of at most about this length: its beginning and its end."""
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
    """Cut a name that is too long to be read."""
    return name if len(name) <= most else name[: most - 1] + "…"


MOST_COMPARED = 1_000
MOST_KNOWN = 50
"""Names that are worth comparing with a misspelt one, and worth listing where none is like it."""


class HushrecError(Exception):
    """Root of the tree."""


class InputError(HushrecError):
    """What the user gave cannot be used."""


class DataError(InputError):
    """A data file cannot be used."""


class ConfigError(InputError):
    """A key, value or name that does not exist or does not fit."""


class RunError(InputError):
    """A run folder cannot be used."""


class DiskError(RunError):
    """What was to be written could not be; what was there before is as it was."""


class DivergedError(HushrecError):
    """Training produced numbers that are not numbers."""


class MessageError(HushrecError):
    """A message that is damaged, forged, late or larger than agreed."""


class TooFewError(HushrecError):
    """Too few nodes are left for a sum that hides each of them."""


class FederationError(HushrecError):
    """Too few nodes take part for a run to begin or to go on."""


class StoppedError(HushrecError):
    """The user asked to stop; everything up to the last round is saved."""


class MissingExtraError(HushrecError):
    """An optional dependency is not installed."""

    def __init__(self, what: str, extra: str, *, own: bool = True) -> None:
        name = f"'hushrec[{extra}]'" if own else extra
        super().__init__(f"{what} needs an optional part: pip install {name}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` with the closest known name, or the list of names."""
    options = sorted(known)
    # Comparing takes the product of two lengths, and names of a file can be many and long.
    by_lower = {cut(option.lower()): option for option in options[:MOST_COMPARED]}
    match = difflib.get_close_matches(cut(name.lower()), by_lower, n=1, cutoff=0.5)
    if match:
        return f"; did you mean '{cut(by_lower[match[0]])}'?"
    return f"; known: {listed(options, MOST_KNOWN, quote='')}" if options else ""
