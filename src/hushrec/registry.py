"""Parts that other packages bring are found by entry points: methods, experts, and so on.

A package declares, in its own ``pyproject.toml``, a name in one of the groups ``hushrec.methods``,
``hushrec.experts``, ``hushrec.mechanisms`` and ``hushrec.backends``; ours are declared alike.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from hushrec.errors import ConfigError, nearest

DEFAULT_METHOD = "fedmix"
"""What is trained where no method is named: on the command line and in Python."""


def names(group: str) -> list[str]:
    """Return the installed names of a group, ``methods`` for one."""
    return sorted(point.name for point in entry_points(group=f"hushrec.{group}"))


def find(group: str, name: str) -> Any:
    """Return what a name stands for."""
    for point in entry_points(group=f"hushrec.{group}"):
        if point.name == name:
            return point.load()
    what = group.removesuffix("s")
    known = names(group)
    hint = nearest(name, known) if known else f"; no {what} is installed"
    raise ConfigError(f"unknown {what} '{name}'{hint}")
