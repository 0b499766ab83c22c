"""Paths that people give: where they lead and whether they can be used, found out once.

Everything that takes a path from somebody passes it through `checked` before it does anything else,
so that what cannot be opened, made or written down is a sentence and not a surprise later on.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from hushrec.errors import ConfigError

LONGEST = 200
"""Bytes of a name: file systems take 255, and what is written beside it needs a longer one."""
SHOWN = 80
"""Characters of a path that an error repeats."""


def checked(path: str | Path) -> Path:
    """Return a path that can be worked with, or raise an error that says what is wrong with it.

    What is at its end is returned where it really is: a link stays as it is, and what is written
    goes where it leads; a path like ``.`` gets its name. Whether anything is there is not asked.
    """
    text = os.fspath(path)
    if not text:
        raise ConfigError("an empty path leads nowhere: give the name of a file or a folder")
    if "\0" in text:
        raise ConfigError(f"{shown(text)}: a path cannot hold a zero byte")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{shown(text)}: the name is not UTF-8, so it could not be written down: rename it"
        ) from None
    given = Path(text)
    longest = max((len(os.fsencode(part)) for part in given.parts), default=0)
    if longest > LONGEST:
        raise ConfigError(
            f"{shown(text)}: a name of {longest} bytes is too long: use at most {LONGEST}"
        )
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            given.stat()
        named = given.name not in ("", "..") and not given.is_symlink()
        real = given.resolve()
        # A pipe under /proc is there, and what its link says is not.
        found = given if named or (given.exists() and not real.exists()) else real
    except OSError as error:  # also where the folder we are in is gone
        raise ConfigError(f"{shown(text)}: {error.strerror}") from None
    if not found.name:
        raise ConfigError(f"{shown(text)} is where everything begins: name something in it")
    return found


def shown(path: str | Path) -> str:
    """Return a path as an error shows it: readable whatever its bytes are, and not too long."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    if len(text) > SHOWN:
        text = f"{text[: SHOWN // 2]}…{text[-SHOWN // 2 :]}"
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
