"""What commands gave, kept in files that are committed: a record for each, filed under its command.

``experiments/results/DATA.json`` holds the records of a data set, a line each, so that two
people's records merge. Figures are looked up by path, such as ``test/full`` and ``hr@10``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hushrec.errors import RunError
from hushrec.io.files import write_text, writing

Points = list[tuple[int, float]]
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Difference:
    """A metric of one command minus that of another, over the same users."""

    value: float
    low: float
    high: float
    """Ends of the 95 % interval."""
    p: float

    @property
    def significant(self) -> bool:
        """Whether the two can be told apart."""
        return self.p < SIGNIFICANT


class Record(BaseModel):
    """What one command gave."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seeds: list[int]
    version: str
    """Of hushrec, with the commit where it ran from a checkout."""
    rounds: int
    """Planned, all seeds alike."""
    selected_round: list[int] = Field(default_factory=list)
    seconds: float
    """Of all seeds together, on whatever machine."""
    epsilon: float | None = None
    """What the run really guarantees, where it guarantees anything."""
    diverged: str | None = None
    """Why there are no figures."""
    values: dict[str, Any] = Field(default_factory=dict)
    """Means over seeds below ``test``; what is measured on seed 0 alone below other names."""
    sd: dict[str, Any] = Field(default_factory=dict)
    """Spread over seeds of what is below ``test``."""

    against: dict[str, dict[str, list[float]]] = Field(default_factory=dict)
    """By another command, and by path and metric such as test/full/ndcg@10: the difference from
    that one, the ends of its 95 % interval, and p, Holm-corrected over metrics tested together."""

    def find(self, path: str, metric: str) -> Any:
        """Return a figure, or None."""
        return _at(self.values, path, metric)

    def spread(self, path: str, metric: str) -> float | None:
        """Return the standard deviation of a figure over seeds, if there are several."""
        found = _at(self.sd, path, metric)
        return None if found is None else float(found)

    def tests(self, other: str, path: str, metrics: Sequence[str]) -> list[Difference]:
        """Return the differences from another command, none where some are not known."""
        known = self.against.get(other, {})
        places = [f"{path}/{metric}" for metric in metrics]
        return [Difference(*known[p]) for p in places] if known.keys() >= set(places) else []


def _at(tree: Any, path: str, metric: str) -> Any:
    for part in (*path.split("/"), metric):
        if not isinstance(tree, dict) or part not in tree:
            return None
        tree = tree[part]
    return tree


class Results:
    """All records, and the files they lie in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._by_file = {file.stem: _read(file) for file in sorted(folder.glob("*.json"))}

    def get(self, command: str) -> Record | None:
        """Return the record of a command, if there is one."""
        return next((found[command] for found in self._by_file.values() if command in found), None)

    def records(self) -> Iterator[tuple[str, Record]]:
        """Return every record with its command."""
        for found in self._by_file.values():
            yield from found.items()

    def forget_tests(self, command: str) -> None:
        """Drop what others were tested against, a command that has other figures now."""
        for name, found in self._by_file.items():
            for other, record in found.items():
                if command in record.against:
                    kept = {key: test for key, test in record.against.items() if key != command}
                    self.put(name, other, record.model_copy(update={"against": kept}))

    def put(self, data: str, command: str, record: Record) -> None:
        """File a record and write its file, whole or not at all."""
        name = data.replace("/", "-")
        found = self._by_file.setdefault(name, {})
        found[command] = record
        lines = [
            f"{json.dumps(key)}: {json.dumps(found[key].model_dump(exclude_defaults=True))}"
            for key in sorted(found)
        ]
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / f"{name}.json", "{\n" + ",\n".join(lines) + "\n}\n")


def _read(file: Path) -> dict[str, Record]:
    try:
        found = json.loads(file.read_text("utf-8"))
        return {command: Record.model_validate(record) for command, record in found.items()}
    except (OSError, ValueError, AttributeError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise RunError(f"{file} is damaged: {reason}; restore it, for example from git") from None


def missing_parts(record: Record | None, wanted: Sequence[tuple[str, str]]) -> bool:
    """Say whether a result lacks some of the figures that are looked up in it."""
    if record is None:
        return True
    return not record.diverged and any(record.find(*place) is None for place in wanted)
