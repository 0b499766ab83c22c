"""The studio's pages: one method computes the context of each template.

The runs of a folder, and how far each of them was trained, are read from their files.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup

from hushrec.analysis.run import one_user, some_users
from hushrec.api import Run
from hushrec.data.text import short_name
from hushrec.errors import ConfigError, HushrecError, RunError
from hushrec.evaluation.metrics import metric_name
from hushrec.federation.experiment import Experiment
from hushrec.federation.rounds import RoundLine
from hushrec.io.codec import read_text
from hushrec.reporting import plots, tables
from hushrec.reporting.html import REPORT, environment, means_plot
from hushrec.reporting.sections import learning_points, loss_points, validation_points
from hushrec.reporting.tables import signed
from hushrec.runs.compared import MEANS_ALONE, ComparedRun
from hushrec.runs.comparison import compare
from hushrec.runs.folder import NEW, SEEDS, RunFolder, is_run
from hushrec.runs.schema import PUBLISHED_MARK, Seeds, Summary
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
    def data_name(self) -> str:
        """What people call its data."""
        assert self.experiment is not None, "a run that can be read"
        return short_name(self.experiment.data)

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
    """Walk down the folder, without hidden folders, but with unfinished replacements.

    Links that lead out of the folder are not followed: whoever can write there must not make the
    studio show files from elsewhere.
    """
    whole = folder.resolve()
    if is_run(folder) and _stays_within(folder, whole):
        yield folder
    for here, below, _ in os.walk(folder):
        deep = len(Path(here).relative_to(folder).parts)
        shown = (name for name in below if name[0] != "." or name.endswith(f".{NEW}"))
        below[:] = sorted(shown) if deep < MAX_DEPTH else []
        runs = (Path(here, name) for name in below if is_run(Path(here, name)))
        yield from (run for run in runs if _stays_within(run, whole))


def _stays_within(run: Path, folder: Path) -> bool:
    """Return whether neither the run nor a file in it is a link that leads out of the folder."""
    links = (path for path in (run, *run.rglob("*")) if path.is_symlink())
    return all(link.resolve().is_relative_to(folder) for link in links)


def _read(path: Path, folder: Path) -> FoundRun:
    locked = any(RunFolder(part).is_locked() for part in (path, *path.glob("seed-*")))
    return _read_files(path, folder, locked, _stamp(path))


def _name(path: Path, folder: Path) -> str:
    return path.name if path == folder else path.relative_to(folder).as_posix()


def _stamp(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Return modification times and sizes of a run's files."""
    stamps = []
    for file in ("config.toml", "metrics.jsonl", "summary.json", SEEDS):
        with suppress(OSError):
            state = (path / file).stat()
            stamps.append((file, state.st_mtime_ns, state.st_size))
    return tuple(stamps)


@lru_cache(MAX_RUNS)
def _read_files(path: Path, folder: Path, locked: bool, stamp: Hashable) -> FoundRun:
    """Read a run; the stamp makes the cache read changed files again."""
    name, files = _name(path, folder), RunFolder(path)
    try:
        experiment, lines = files.experiment(), tuple(files.read_metrics())
        numbers = files.read(SEEDS, Seeds).seeds if (path / SEEDS).exists() else []
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
        run = self._named(query)
        if not (run.path / REPORT).exists():
            raise RunError(f"{run.name} has no report yet: hushrec report {run.path}")
        return read_text(run.path / REPORT)

    def _named(self, query: Query) -> FoundRun:
        """Return the run that the address names."""
        if not query.get("run"):
            raise ConfigError("the address lacks 'run='")
        return require(find_runs(self.folder), query["run"])

    # ------------------------------------------------------------ pages

    def _runs(self, query: Query) -> Context:
        runs = list(find_runs(self.folder).values())
        return {"runs": runs, "going_on": any(run.state == "training" for run in runs)}

    def _run(self, query: Query) -> Context:
        run = self._named(query)
        return {"run": run, "curves": _run_curves(run), "metric_name": metric_name}

    def _user(self, query: Query) -> Context:
        runs = find_runs(self.folder)
        choices = [run.name for run in runs.values() if run.single]
        name = query.get("run") or next(iter(choices), "")
        context: Context = {"choices": choices, "name": name, "user": query.get("user", "")}
        if not name:
            return context
        with self._working:
            run = self._open(require(runs, name))
            some = some_users(run)
            user = query.get("user") or some[len(some) // 2]
            context |= {"some": some, "user": user, "mark": run.summary.protocol_mark}
            context |= {"suggested": run.model.data.users[:SUGGESTED_USERS].tolist()}
            context |= {"summary": run.summary}
            try:
                changes = run.data_changes() or ""
                return {**context, "shown": one_user(run, user), "problem": changes}
            except ConfigError as error:
                return {**context, "shown": None, "problem": str(error)}

    def _compare(self, query: Query) -> Context:
        runs = find_runs(self.folder)
        names = [run.name for run in runs.values() if run.state == "finished"]
        chosen = [query.get(key) or "" for key in ("first", "second")]
        context: Context = {
            "names": names,
            "chosen": chosen,
            "metrics": [],
            "mark": None,
            "marks": [],
        }
        if not all(chosen):
            return {**context, "chosen": names[:2], "problem": ""}
        pair = [require(runs, name) for name in chosen]
        try:
            rows = compare([run.path for run in pair], METRICS)
        except HushrecError as error:
            return {**context, "problem": str(error)}
        by_path = {str(run.path): run.name for run in pair}
        leaks = [run.name for run in pair if run.summary and run.summary.leaks]
        by_metric = [[row for row in rows if row.metric == metric] for metric in METRICS]
        return {
            **context,
            "problem": "",
            "metrics": [_compared(two, by_path) for two in by_metric],
            "costs": [(by_path[row.run], row) for row in by_metric[0]],
            "drawing": _validation_curves(pair),
            "mark": f"{', '.join(leaks)}: {PUBLISHED_MARK}" if leaks else None,
            "marks": tables.shared_marks(
                {run.name: run.summary.marks for run in pair if run.summary}
            ),
        }

    def _privacy(self, query: Query) -> Context:
        positions = demos.slider_positions(query)
        guarantee = demos.slider_guarantee(**positions)
        return {"sliders": demos.SLIDERS, "positions": positions, "guarantee": guarantee}

    def _leak(self, query: Query) -> Context:
        state = self.leak.state
        results = state.results.items()
        curves = [plots.Curve(name, result.points) for name, result in results if result.points]
        several = any(len(curve.points) > 1 for curve in curves)
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


def _compared(rows: Sequence[ComparedRun], names: Mapping[str, str]) -> Context:
    """Compare two runs by one metric."""
    second = rows[1]
    low, high, p_value = second.difference_low, second.difference_high, second.p_value
    assert second.difference is not None
    if low is None or high is None or p_value is None:
        verdict = "above" if second.difference > 0 else "not above"
        words = f"; {MEANS_ALONE}"
    else:
        verdict = tables.verdict(low, high)
        p = "below 0.001" if p_value < 0.001 else f"{p_value:.3f}"
        interval = tables.signed_interval(low, high)
        words = f" (95 % interval {interval}, user by user; p {p}, Holm-corrected)"
    return {
        "name": metric_name(second.metric),
        "drawing": means_plot(rows, names, [second], "all items"),
        "verdict": verdict,
        "words": f"{signed(second.difference)}{words}",
    }


def _run_curves(run: FoundRun) -> list[Context]:
    """Return the validation and the loss curve of a run, as far as it was trained."""
    curves = []
    for name, points, from_zero in (
        (*_validation(run), True),
        ("Training loss", loss_points(run.lines), False),
    ):
        if points:
            drawing = plots.line(points, name, from_zero=from_zero) if len(points) > 1 else None
            curves.append({"name": name, "last": points[-1], "drawing": drawing})
    return curves


def _validation(run: FoundRun) -> tuple[str, list[tuple[int, float]]]:
    """Return the name of the metric that selects, and its value at each evaluation."""
    assert run.experiment is not None, "a run that can be read"
    config = run.experiment.evaluation
    name = f"Validation {metric_name(config.select)}"
    return name, validation_points(run.lines, config.select, config.candidates)


def _validation_curves(runs: list[FoundRun]) -> Markup | None:
    """Draw the validation curves of finished runs that are selected by the same metric."""
    rows, names = [], set()
    for run in runs:
        assert run.experiment is not None and run.summary is not None, "a finished run"
        config = run.experiment.evaluation
        names.add(f"Validation {metric_name(config.select)}")
        given = run.lines, config.select, config.candidates
        # Of several seeds there are no lines.
        if run.lines and (points := learning_points(*given, run.summary.shipped_round)):
            rows.append(plots.Curve(run.name, points))
    several = len({number for row in rows for number, _ in row.points}) > 1
    return plots.curves(rows, f"{names.pop()} by round") if several and len(names) == 1 else None
