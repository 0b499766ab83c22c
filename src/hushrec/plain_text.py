"""Words that others wrote, made safe to show; lists and messages kept short.

Titles, ids, names of files and columns come from anywhere. A terminal obeys some characters, and
shows others out of their order: whatever prints, logs or draws such words takes them from here.
"""

from __future__ import annotations

from collections.abc import Sequence

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
