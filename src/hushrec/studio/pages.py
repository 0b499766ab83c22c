"""The studio's pages: one method computes the context of each template.

The runs of a folder, and how far each of them was trained, are read from their files.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from hushrec.analysis.run import one_user, some_users
from hushrec.api import Run
from hushrec.errors import ConfigError, HushrecError, RunError
from hushrec.federation.experiment import Experiment
from hushrec.io.stored import read_text
from hushrec.reporting import plots
from hushrec.reporting.html import REPORT, environment
from hushrec.reporting.tables import MEANS_ALONE, metric_name, signed
from hushrec.runs.comparison import ComparedRun, compare_runs
from hushrec.runs.folder import NEW, SEEDS, RunFolder, is_run
from hushrec.runs.schema import PUBLISHED_MARK, RoundLine, Seeds, Summary
from hushrec.studio import demos

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


OPEN_RUNS = 3
"""Runs that are kept in memory, the most recently shown."""
METRICS = ("hr@10", "ndcg@10")
SUGGESTED_USERS = 300
"""User ids that the input field suggests."""

Query = Mapping[str, str]
Context = dict[str, Any]


class Studio:
    """The pages over one folder of runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._working = threading.Lock()  # kernels and stores serve one thread at a time
        self.leak = demos.LeakDemo(self._working)
        self._opened: OrderedDict[tuple[str, int], Run] = OrderedDict()
        self._templates = environment("hushrec.studio", "hushrec.reporting")
        self._pages: dict[str, Callable[[Query], Context]] = {
            "runs": self._runs,
            "run": self._run,
            "user": self._user,
            "compare": self._compare,
            "privacy": self._privacy,
            "leak": self._leak,
        }

    def page(self, name: str, query: Query) -> str | None:
        """Return a page, or its live block if the query has ``part``; None for an unknown name."""
        if name not in self._pages:
            return None
        template = self._templates.get_template(f"{name}.html.j2")
        context = {"page": name, "folder": self.folder.name, **self._pages[name](query)}
        if "part" in query and "live" in template.blocks:
            return "".join(template.blocks["live"](template.new_context(context)))
        return template.render(context)

    def error_page(self, status: int, message: str) -> str:
        """Return the page of an error."""
        template = self._templates.get_template("refused.html.j2")
        return template.render(page="", folder=self.folder.name, status=status, message=message)

    def style(self) -> str:
        """Return the style sheet of all pages."""
        template = self._templates.get_template("studio.css.j2")
        return template.render(curve_style=plots.CURVE_STYLE)

    def report(self, query: Query) -> str:
        """Return the stored report of a run."""
        run = require(find_runs(self.folder), _required(query, "run"))
        if not (run.path / REPORT).exists():
            raise RunError(f"{run.name} has no report yet: hushrec report {run.path}")
        return read_text(run.path / REPORT)

    # ------------------------------------------------------------ pages

    def _runs(self, query: Query) -> Context:
        runs = list(find_runs(self.folder).values())
        return {"runs": runs, "going_on": any(run.state == "training" for run in runs)}

    def _run(self, query: Query) -> Context:
        run = require(find_runs(self.folder), _required(query, "run"))
        return {"run": run, "curves": _run_curves(run), "metric_name": metric_name}

    def _user(self, query: Query) -> Context:
        runs = find_runs(self.folder)
        choices = [run.name for run in runs.values() if run.single]
        name = query.get("run") or next(iter(choices), "")
        context: Context = {"choices": choices, "name": name, "shown": None, "problem": ""}
        context |= {"some": [], "suggested": [], "user": query.get("user", ""), "mark": None}
        if not name:
            return context
        with self._working:
            run = self._open(require(runs, name))
            context |= {"some": some_users(run), "mark": run.summary.protocol_mark}
            context["suggested"] = run.split.data.users[:SUGGESTED_USERS].tolist()
            user = query.get("user") or context["some"][len(context["some"]) // 2]
            context["user"] = user
            try:
                context["shown"] = one_user(run, user)
            except ConfigError as error:
                context["problem"] = str(error)
        return context

    def _compare(self, query: Query) -> Context:
        runs = find_runs(self.folder)
        choices = [run for run in runs.values() if run.state == "finished"]
        names = [run.name for run in choices]
        chosen = [query.get(key) or "" for key in ("first", "second")]
        context: Context = {"names": names, "chosen": chosen, "metrics": [], "costs": []}
        context |= {"drawing": None, "mark": None, "problem": ""}
        if not all(chosen):
            context["chosen"] = names[:2] if len(names) > 1 else ["", ""]
            return context
        pair = [require(runs, name) for name in chosen]
        try:
            rows = compare_runs([run.path for run in pair], METRICS)
        except HushrecError as error:
            return {**context, "problem": str(error)}
        by_path = {str(run.path): run.name for run in pair}
        leaks = [run.name for run in pair if run.summary and run.summary.leaks]
        return {
            **context,
            "metrics": [
                _compared([row for row in rows if row.metric == metric], by_path)
                for metric in METRICS
            ],
            "costs": [(by_path[row.run], row) for row in rows if row.metric == METRICS[0]],
            "drawing": _validation_curves(pair),
            "mark": f"{', '.join(leaks)}: {PUBLISHED_MARK}" if leaks else None,
        }

    def _privacy(self, query: Query) -> Context:
        positions = demos.slider_positions(query)
        guarantee = demos.slider_guarantee(**positions)
        return {"sliders": demos.SLIDERS, "positions": positions, "guarantee": guarantee}

    def _leak(self, query: Query) -> Context:
        state = self.leak.state
        curves = [
            plots.Curve(protocol, result.points)
            for protocol, result in state.results.items()
            if result.points
        ]
        several = len({number for curve in curves for number, _ in curve.points}) > 1
        return {
            "state": state,
            "drawing": plots.curves(curves, "Validation HR@10 by round") if several else None,
            "rounds": demos.ROUNDS,
            "negatives": demos.NEGATIVES,
            "protocols": demos.PROTOCOLS,
        }

    def _open(self, listed: FoundRun) -> Run:
        """Return a finished run, from memory or from its folder."""
        key = (listed.name, (listed.path / "config.toml").stat().st_mtime_ns)
        if key not in self._opened:
            self._opened[key] = Run.open(listed.path)
        self._opened.move_to_end(key)
        while len(self._opened) > OPEN_RUNS:
            self._opened.popitem(last=False)
        return self._opened[key]


def _required(query: Query, key: str) -> str:
    if not query.get(key):
        raise ConfigError(f"the address lacks '{key}='")
    return query[key]


def _compared(rows: Sequence[ComparedRun], names: Mapping[str, str]) -> Context:
    """Compare two runs by one metric."""
    first, second = rows
    dots = [
        plots.Dot(
            names[row.run],
            row.mean,
            None if row.low is None or row.high is None else (row.low, row.high),
            strong=row is second,
        )
        for row in rows
    ]
    label = metric_name(first.metric)
    context = {"name": label, "drawing": plots.dots(dots, f"{label}, all items")}
    low, high, p_value = second.difference_low, second.difference_high, second.p_value
    assert second.difference is not None
    if low is None or high is None or p_value is None:
        verdict = "above" if second.difference > 0 else "not above"
        return {
            **context,
            "verdict": verdict,
            "words": f"{signed(second.difference)}; {MEANS_ALONE}",
        }
    verdict = "above" if low > 0 else "below" if high < 0 else "not clearly different from"
    p = "below 0.001" if p_value < 0.001 else f"{p_value:.3f}"
    words = (
        f"{signed(second.difference)} (95 % interval {signed(low)} to {signed(high)}, user by "
        f"user; p {p}, Holm-corrected)"
    )
    return {**context, "verdict": verdict, "words": words}


def _run_curves(run: FoundRun) -> list[Context]:
    """Return the validation and the loss curve of a run, as far as it was trained."""
    assert run.experiment is not None
    select = run.experiment.evaluation.select
    losses = [(line.round, line.loss) for line in run.lines if line.loss is not None]
    curves = []
    for name, points, from_zero in (
        (f"Validation {metric_name(select)}", _evaluations(run), True),
        ("Training loss", losses, False),
    ):
        if points:
            drawing = plots.line(points, name, from_zero=from_zero) if len(points) > 1 else None
            curves.append({"name": name, "last": points[-1], "drawing": drawing})
    return curves


def _evaluations(run: FoundRun) -> list[tuple[int, float]]:
    """Return the round and the value of each validation."""
    assert run.experiment is not None
    config = run.experiment.evaluation
    return [
        (line.round, line.valid[config.candidates][config.select])
        for line in run.lines
        if line.valid and config.select in line.valid.get(config.candidates, {})
    ]


def _validation_curves(runs: list[FoundRun]) -> Any:
    """Draw the validation curves of runs that are selected by the same metric."""
    rows = [plots.Curve(run.name, points) for run in runs if len(points := _evaluations(run)) > 1]
    selects = {run.experiment.evaluation.select for run in runs if run.experiment}
    if len(selects) > 1 or not rows:
        return None
    return plots.curves(rows, f"Validation {metric_name(selects.pop())} by round")
