"""Run one command of the plan and say what came out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from subprocess import DEVNULL, CalledProcessError
from subprocess import run as run_program
from typing import Any

import numpy as np

import hushrec
from experiments.epsilon_tables import ROUNDS, cells
from experiments.plan import Task
from experiments.results import Record
from hushrec.analysis.item_map import item_map
from hushrec.analysis.run import guidance_effects, metrics_by_group, metrics_by_table
from hushrec.api import Execution, Run, train_request_seeds
from hushrec.data import Interactions
from hushrec.errors import DivergedError
from hushrec.evaluation.metrics import summarise, user_metric
from hushrec.federation.experiment import ExperimentRequest
from hushrec.runs.folder import RunFolder, read_ranks

ALWAYS = ("hr@5", "hr@10", "ndcg@5", "ndcg@10")
"""Kept of every run, whoever asks for it first."""
CURVE_POINTS = 100
"""Looks of a run that are kept for a picture, at most."""

Place = tuple[str, str]
"""A path and a metric that somebody looks up in a record."""


def measure(
    task: Task,
    data: Interactions,
    runs: Path,
    wanted: Sequence[Place],
    on_seed: Callable[[int], None],
    execution: Execution,
) -> Record:
    """Train what is not trained yet in the task's folder, and read off what is wanted."""
    out = runs / task.folder
    try:
        resume = (out / "seeds.json").exists()
        summary = train_request_seeds(
            request_of(task),
            data,
            range(task.seeds),
            out,
            replace(execution, resume=resume),
            on_seed,
        ).summary
    except DivergedError as error:
        planned = request_of(task).experiment().rounds
        seeds = list(range(task.seeds))
        return Record(
            seeds=seeds, version=our_version(), rounds=planned, seconds=0.0, diverged=str(error)
        )
    folders = [RunFolder.open(out / name) for name in summary.runs or []]
    means, sd = _test_figures(folders, {metric for path, metric in wanted if _of_test(path)})
    more = {path.split("/")[0] for path, _ in wanted if not _of_test(path)}
    metrics = sorted({metric for path, metric in wanted if not _of_test(path)})
    return Record(
        seeds=_listed(summary.seed),
        version=our_version(),
        rounds=folders[0].experiment().rounds,
        selected_round=_listed(summary.selected_round),
        seconds=round(summary.time.total_s * task.seeds, 1),
        epsilon=summary.privacy.epsilon,
        values={"test": means, **{name: _ANALYSES[name](folders[0], metrics) for name in more}},
        sd={"test": sd} if sd else {},
    )


def request_of(task: Task) -> ExperimentRequest:
    """Return the experiment that a task asks for."""
    return ExperimentRequest(
        task.data,
        task.method,
        preset=task.preset,
        settings=task.settings,
        protocol=task.protocol,
        rounds=task.rounds,
    )


def _of_test(path: str) -> bool:
    return path.startswith("test/")


def _test_figures(
    folders: Sequence[RunFolder], metrics: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the test metrics at full and sampled ranking: their means and spread over seeds."""
    names = [*dict.fromkeys([*ALWAYS, *sorted(metrics)])]
    seen = [read_ranks(folder)["test"] for folder in folders]
    tables = [{c: summarise(ranks, names) for c, ranks in by.items()} for by in seen]

    def over_seeds(reduce: Callable[[list[float]], Any]) -> dict[str, dict[str, float]]:
        return {
            c: {name: float(reduce([table[c][name] for table in tables])) for name in names}
            for c in tables[0]
        }

    spread = over_seeds(lambda values: np.std(values, ddof=1)) if len(tables) > 1 else {}
    return over_seeds(np.mean), spread


def _listed(value: int | list[int]) -> list[int]:
    return [value] if isinstance(value, int) else value


def _curve(folder: RunFolder, metrics: Sequence[str]) -> dict[str, Any]:
    """Return loss and validation metrics by round, thinned out."""
    lines = folder.read_metrics()
    evaluated = [(line.round, line.valid) for line in lines if line.valid]
    curve: dict[str, Any] = {
        candidates: {
            name: _thin([(number, valid[candidates][name]) for number, valid in evaluated])
            for name in metrics
            if name in table
        }
        for candidates, table in (evaluated[0][1] if evaluated else {}).items()
    }
    losses = [(line.round, line.loss) for line in lines if line.loss is not None]
    return {**curve, "train": {"loss": _thin(losses)}}


def _thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Keep every n-th point, and the last one."""
    step = -(-len(points) // CURVE_POINTS)
    return points if step <= 1 else [*points[:-1:step], points[-1]]


def _tables(folder: RunFolder, metrics: Sequence[str]) -> dict[str, Any]:
    return metrics_by_table(Run.open(folder.path))


def _groups(folder: RunFolder, metrics: Sequence[str]) -> dict[str, Any]:
    names = [name for name in metrics if _is_metric(name)]
    found = metrics_by_group(Run.open(folder.path), names=names)
    groups = next(iter(found.values())).groups
    return {group: {name: found[name].groups[group] for name in names} for group in groups}


def _is_metric(name: str) -> bool:
    try:
        user_metric(name)
    except hushrec.HushrecError:
        return False
    return True


def _guidance(folder: RunFolder, metrics: Sequence[str]) -> dict[str, Any]:
    """Return what the last guidance round changed in each group, and gates between groups: in %."""
    run = Run.open(folder.path)
    effects = {m: guidance_effects(run, m) for m in metrics if _is_metric(m)}
    found: dict[str, Any] = {}
    for metric, each in effects.items():
        for group, before in each[-1].before.items() if each else ():
            change = _change(before, each[-1].after[group])
            found.setdefault(group, {})[metric] = change
    for last in guidance_effects(run)[-1:]:
        moved = last.moved or {}
        shares = {name: 100 * moved[name] for name in ("improved", "declined") if name in moved}
        found = {group: {**values, **shares} for group, values in found.items()}
        found |= _gates(last.gates["groups"]) if last.gates else {}
    return found


def _gates(groups: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return how gates differ between groups."""
    found = {}
    for more, less, value, logit in _GATES:
        found[f"{more}-{less}"] = {
            name: {"change": _change(groups[less][field], groups[more][field])}
            for name, field in (("value", value), ("logit", logit))
        }
    return found


_GATES = (("followers", "distinct", "popular", "popular_logit"), ("warm", "cold", "mean", "logit"))
"""Tables D.3 and D.4 of FedRKG: two groups, and where the means of their gates stand."""


def _change(before: float, after: float) -> float | None:
    return 100 * (after - before) / before if before else None


def _map(folder: RunFolder, metrics: Sequence[str]) -> dict[str, Any]:
    return item_map(Run.open(folder.path))


_ANALYSES: dict[str, Callable[[RunFolder, Sequence[str]], dict[str, Any]]] = {
    "curve": _curve,
    "tables": _tables,
    "groups": _groups,
    "guidance": _guidance,
    "map": _map,
}
"""What can be read off a run besides its test metrics, on seed 0: the first word of a path."""


def epsilons() -> Record:
    """Compute the tables of epsilon in DP-PrivRec: as printed, as computed there, and as right."""
    begun, values = time.monotonic(), dict[str, Any]()
    for cell in cells():
        row = values.setdefault(cell.table, {}).setdefault(f"{cell.cohort} / {cell.population}", {})
        row[f"{cell.delta:.0e}"] = [
            *(cell.printed, cell.paper_tables, cell.rounds, cell.rounds_replace_one)
        ]
    seconds = round(time.monotonic() - begun, 1)
    return Record(seeds=[], version=our_version(), rounds=ROUNDS, seconds=seconds, values=values)


def our_version() -> str:
    """Return hushrec's version, with the commit where it runs from a checkout."""
    checkout = Path(hushrec.__file__).parents[2]
    words = ["git", "-C", str(checkout), "rev-parse", "--short=10", "HEAD"]
    try:
        done = run_program(words, capture_output=True, text=True, check=True, stdin=DEVNULL)
    except (OSError, CalledProcessError):
        return version("hushrec")
    return f"{version('hushrec')}+g{done.stdout.strip()}"
