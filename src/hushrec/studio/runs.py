"""Which runs lie in a folder, and how far each of them is: read from its files, nothing is kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from hushrec.errors import HushrecError, RunError
from hushrec.federation.experiment import Experiment
from hushrec.runs.folder import NEW, SEEDS, RunFolder, is_run
from hushrec.runs.formats import Seeds

DEEPEST = 3
"""Folders below the one that is looked at: a grid of runs with several seeds each."""
MOST = 1_000
"""Runs that are listed; whoever has more looks at one of their folders."""

State = Literal["training", "finished", "stopped", "unreadable"]


@dataclass(frozen=True)
class FoundRun:
    """A run as far as its files tell."""

    name: str
    """Its path below the folder that is looked at; by it, it is asked for."""
    path: Path
    state: State
    experiment: Experiment | None = None
    lines: tuple[dict[str, Any], ...] = ()
    """A line a round."""
    summary: dict[str, Any] | None = None
    """Of a finished one."""
    seeds: tuple[str, ...] = ()
    """Names of the runs it consists of, where it is several seeds."""
    problem: str = ""
    """Why it cannot be read."""

    @property
    def single(self) -> bool:
        """Whether there is a model to ask: one seed, finished."""
        return self.state == "finished" and not self.seeds

    @property
    def rounds(self) -> int:
        """Rounds that are done."""
        return self.lines[-1]["round"] if self.lines else 0

    @property
    def seconds_left(self) -> float | None:
        """How long it takes if rounds go on as they did; None before there was one."""
        if self.experiment is None or not self.lines:
            return None
        spent = float(sum(line["seconds"] for line in self.lines))
        return spent / len(self.lines) * (self.experiment.rounds - self.rounds)


def find_runs(folder: Path) -> dict[str, FoundRun]:
    """Return the runs below a folder by name, those that are trained now first."""
    found = [_read(path, folder) for path in _places(folder)]
    found.sort(key=lambda run: (run.state != "training", run.name))
    return {run.name: run for run in found[:MOST]}


def _places(folder: Path) -> Iterator[Path]:
    """Walk down; links are not followed, what is hidden is not looked at but for replacements."""
    if is_run(folder):
        yield folder
    for here, below, _ in os.walk(folder):
        deep = len(Path(here).relative_to(folder).parts)
        below[:] = sorted(name for name in below if _may_be_run(name)) if deep < DEEPEST else []
        yield from (Path(here, name) for name in below if is_run(Path(here, name)))


def _may_be_run(name: str) -> bool:
    return not name.startswith(".") or name.endswith(f".{NEW}")


def _read(path: Path, folder: Path) -> FoundRun:
    locked = RunFolder(path).is_locked() or any(
        RunFolder(part).is_locked() for part in path.glob("seed-*")
    )
    return _read_files(path, folder, locked, _stamp(path))


def _name(path: Path, folder: Path) -> str:
    return path.name if path == folder else path.relative_to(folder).as_posix()


def _stamp(path: Path) -> tuple[tuple[int, int], ...]:
    """Return what changes when a run's files do."""
    said = []
    for file in ("config.toml", "metrics.jsonl", "summary.json", SEEDS):
        try:
            state = (path / file).stat()
        except OSError:
            said.append((0, 0))
        else:
            said.append((state.st_mtime_ns, state.st_size))
    return tuple(said)


@lru_cache(MOST)
def _read_files(
    path: Path, folder: Path, locked: bool, stamp: tuple[tuple[int, int], ...]
) -> FoundRun:
    """Read a run; as long as its stamp stays there is nothing new to read."""
    name, files = _name(path, folder), RunFolder(path)
    try:
        experiment, lines = files.experiment(), tuple(files.read_metrics())
        seeds: tuple[str, ...] = ()
        if (path / SEEDS).exists():
            numbers = files.read_json(SEEDS, Seeds)["seeds"]
            seeds = tuple(_name(path / f"seed-{number}", folder) for number in numbers)
        summary = files.read_summary() if (path / "summary.json").exists() else None
    except HushrecError as error:
        return FoundRun(name, path, "unreadable", problem=str(error))
    state: State = "training" if locked else "finished" if summary else "stopped"
    return FoundRun(name, path, state, experiment, lines, summary, seeds)


def require(runs: dict[str, FoundRun], name: str) -> FoundRun:
    """Return the run of this name that can be read, or say what there is instead."""
    if name not in runs:
        raise RunError(f"there is no run '{name}' in this folder (any more)")
    if runs[name].state == "unreadable":
        raise RunError(runs[name].problem)
    return runs[name]
