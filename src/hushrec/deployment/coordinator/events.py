"""The server's log: one line of JSON an event, and nothing of any user in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from hushrec.io.files import append_line

Event = Mapping[str, Any]


class Events(Protocol):
    """Where events are told."""

    def tell(self, event: str, **facts: Any) -> None:
        """Tell one."""
        ...


class NoEvents:
    """Tells nobody."""

    def tell(self, event: str, **facts: Any) -> None:
        """Forget it."""


class EventLog:
    """A file of events that grows line by line."""

    def __init__(self, path: Path, aloud: Callable[[Event], None] = lambda event: None) -> None:
        """``aloud`` is told every event as well."""
        self.path = path
        self.aloud = aloud

    def tell(self, event: str, **facts: Any) -> None:
        """Write a line: when, what, and the facts."""
        line: Event = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "event": event,
            **facts,
        }
        append_line(self.path, json.dumps(line))
        self.aloud(line)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Read the lines back; a last one cut short by a crash is left out."""
    found = []
    for text in path.read_text("utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found
