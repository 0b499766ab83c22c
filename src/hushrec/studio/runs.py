"""The runs in a folder, and how far each of them was trained, read from their files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from hushrec.errors import HushrecError, RunError
from hushrec.federation.experiment import Experiment
from hushrec.runs.folder import NEW, SEEDS, RunFolder, is_run
from hushrec.runs.schema import RoundLine, Seeds, Summary

MAX_DEPTH = 3
"""Levels of folders that are searched: a grid of runs with several seeds each."""
MAX_RUNS = 1_000
"""Runs that are listed at most."""

RunState = Literal["training", "finished", "stopped", "unreadable"]


@dataclass(frozen=True)
class FoundRun:
    """A run as its files describe it."""

    name: str
    """Its path below the studio's folder, which identifies it in URLs."""
    path: Path
    state: RunState
    experiment: Experiment | None = None
    lines: tuple[RoundLine, ...] = ()
    """One line of metrics per round."""
    summary: Summary | None = None
    """Of a finished run."""
    seeds: tuple[str, ...] = ()
    """Names of the runs of its seeds, if it has several."""
    problem: str = ""
    """Why it cannot be read."""

    @property
    def single(self) -> bool:
        """Whether its model can be opened here: finished, one seed, not on the nodes of others."""
        return self.summary is not None and not self.seeds and self.summary.nodes is None

    @property
    def rounds(self) -> int:
        """Completed rounds."""
        return self.lines[-1].round if self.lines else 0

    @property
    def seconds_left(self) -> float | None:
        """Estimated remaining time, from the mean of past rounds; None before the first."""
        if self.experiment is None or not self.lines:
            return None
        spent = sum(line.seconds for line in self.lines)
        return spent / len(self.lines) * (self.experiment.rounds - self.rounds)


def find_runs(folder: Path) -> dict[str, FoundRun]:
    """Return the runs below a folder by name, those in training first."""
    found = [_read(path, folder) for path in _run_paths(folder)]
    found.sort(key=lambda run: (run.state != "training", run.name))
    return {run.name: run for run in found[:MAX_RUNS]}


def _run_paths(folder: Path) -> Iterator[Path]:
    """Walk down the folder, without links and hidden folders, but with unfinished replacements."""
    if is_run(folder):
        yield folder
    for here, below, _ in os.walk(folder):
        deep = len(Path(here).relative_to(folder).parts)
        below[:] = sorted(name for name in below if _may_be_run(name)) if deep < MAX_DEPTH else []
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
    """Return modification times and sizes of a run's files."""
    stamps = []
    for file in ("config.toml", "metrics.jsonl", "summary.json", SEEDS):
        try:
            state = (path / file).stat()
        except OSError:
            stamps.append((0, 0))
        else:
            stamps.append((state.st_mtime_ns, state.st_size))
    return tuple(stamps)


@lru_cache(MAX_RUNS)
def _read_files(
    path: Path, folder: Path, locked: bool, stamp: tuple[tuple[int, int], ...]
) -> FoundRun:
    """Read a run; the stamp makes the cache read changed files again."""
    name, files = _name(path, folder), RunFolder(path)
    try:
        experiment, lines = files.experiment(), tuple(files.read_metrics())
        seeds: tuple[str, ...] = ()
        if (path / SEEDS).exists():
            numbers = files.read(SEEDS, Seeds).seeds
            seeds = tuple(_name(path / f"seed-{number}", folder) for number in numbers)
        summary = files.read_summary() if (path / "summary.json").exists() else None
    except HushrecError as error:
        return FoundRun(name, path, "unreadable", problem=str(error))
    state: RunState = "training" if locked else "finished" if summary else "stopped"
    return FoundRun(name, path, state, experiment, lines, summary, seeds)


def require(runs: dict[str, FoundRun], name: str) -> FoundRun:
    """Return the readable run of this name, or raise."""
    if name not in runs:
        raise RunError(f"there is no run '{name}' in this folder (any more)")
    if runs[name].state == "unreadable":
        raise RunError(runs[name].problem)
    return runs[name]
