"""What the studio's pages show: each is worked out here, and named for its template."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hushrec.analysis.user import one_user, some_users
from hushrec.api import Run
from hushrec.errors import ConfigError, HushrecError, RunError
from hushrec.io.stored import read_text
from hushrec.reporting import plots
from hushrec.reporting.html import REPORT, environment
from hushrec.reporting.wording import metric_name, signed
from hushrec.runs.comparison import ComparedRun, compare_runs
from hushrec.runs.summary import PUBLISHED_MARK
from hushrec.studio import leak, sliders
from hushrec.studio.runs import FoundRun, find_runs, require

KEPT = 3
"""Runs that stay open, for the next question about them."""
METRICS = ("hr@10", "ndcg@10")
OFFERED = 300
"""User ids that the field for one proposes."""

Given = Mapping[str, str]
Context = dict[str, Any]


class Studio:
    """The pages over one folder of runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._working = threading.Lock()  # compiled kernels and stores serve one at a time
        self._demonstration = leak.Demonstration(self._working)
        self._opened: OrderedDict[tuple[str, int], Run] = OrderedDict()
        self._templates = environment("hushrec.studio", "hushrec.reporting")
        self._shown: dict[str, Callable[[Given], Context]] = {
            "runs": self._runs,
            "run": self._run,
            "user": self._user,
            "compare": self._compare,
            "privacy": self._privacy,
            "leak": self._leak,
        }

    def page(self, name: str, given: Given) -> str | None:
        """Return a page, or the part of it that changes; None where there is none of that name."""
        if name not in self._shown:
            return None
        template = self._templates.get_template(f"{name}.html.j2")
        context = {"page": name, "folder": self.folder.name, **self._shown[name](given)}
        if "part" in given and "live" in template.blocks:
            return "".join(template.blocks["live"](template.new_context(context)))
        return template.render(context)

    def refusal(self, status: int, words: str) -> str:
        """Return the page that says why there is none."""
        template = self._templates.get_template("refused.html.j2")
        return template.render(page="", folder=self.folder.name, status=status, words=words)

    def style(self) -> str:
        """Return the style sheet of all pages."""
        template = self._templates.get_template("studio.css.j2")
        return template.render(curve_style=plots.CURVE_STYLE)

    def report(self, given: Given) -> str:
        """Return a run's report as it was written."""
        found = require(find_runs(self.folder), _said(given, "run"))
        if not (found.path / REPORT).exists():
            raise RunError(f"{found.name} has no report yet: hushrec report {found.path}")
        return read_text(found.path / REPORT)

    def start_leak(self) -> None:
        """Begin the demonstration, unless it is going on."""
        self._demonstration.start()

    # ------------------------------------------------------------ pages

    def _runs(self, given: Given) -> Context:
        runs = list(find_runs(self.folder).values())
        return {"runs": runs, "going_on": any(run.state == "training" for run in runs)}

    def _run(self, given: Given) -> Context:
        found = require(find_runs(self.folder), _said(given, "run"))
        return {"run": found, "course": _course(found), "metric_name": metric_name}

    def _user(self, given: Given) -> Context:
        runs = find_runs(self.folder)
        choices = [run.name for run in runs.values() if run.single]
        name = given.get("run") or next(iter(choices), "")
        context: Context = {"choices": choices, "name": name, "shown": None, "problem": ""}
        context |= {"some": [], "offered": [], "asked_for": given.get("user", ""), "mark": None}
        if not name:
            return context
        with self._working:
            run = self._open(require(runs, name))
            context |= {"some": some_users(run), "mark": run.summary["protocol_mark"]}
            context["offered"] = run.split.data.users[:OFFERED].tolist()
            user = given.get("user") or context["some"][len(context["some"]) // 2]
            context["asked_for"] = user
            try:
                context["shown"] = one_user(run, user)
            except ConfigError as error:
                context["problem"] = str(error)
        return context

    def _compare(self, given: Given) -> Context:
        runs = find_runs(self.folder)
        choices = [run for run in runs.values() if run.state == "finished"]
        names = [run.name for run in choices]
        chosen = [given.get(key) or "" for key in ("first", "second")]
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
        leaks = [run.name for run in pair if run.summary and run.summary["protocol_mark"]]
        return {
            **context,
            "metrics": [
                _compared([row for row in rows if row.metric == metric], by_path)
                for metric in METRICS
            ],
            "costs": [(by_path[row.run], row) for row in rows if row.metric == METRICS[0]],
            "drawing": _curves(pair),
            "mark": f"{', '.join(leaks)}: {PUBLISHED_MARK}" if leaks else None,
        }

    def _privacy(self, given: Given) -> Context:
        where = sliders.places(given)
        return {"scales": sliders.SCALES, "where": where, "answer": sliders.answer(**where)}

    def _leak(self, given: Given) -> Context:
        scene = self._demonstration.scene
        rows = [
            plots.Curve(protocol, played.points)
            for protocol, played in scene.played.items()
            if played.points
        ]
        several = len({number for row in rows for number, _ in row.points}) > 1
        drawing = plots.curves(rows, "Validation HR@10 by round") if several else None
        done = max((row.points[-1][0] for row in rows), default=0)
        return {
            "scene": scene,
            "drawing": drawing,
            "rounds": leak.ROUNDS,
            "negatives": leak.NEGATIVES,
            "done": done,
            "protocols": leak.PROTOCOLS,
            "mark": PUBLISHED_MARK,
        }

    def _open(self, found: FoundRun) -> Run:
        """Return a finished run, opened before or now."""
        key = (found.name, (found.path / "config.toml").stat().st_mtime_ns)
        if key not in self._opened:
            self._opened[key] = Run.open(found.path)
        self._opened.move_to_end(key)
        while len(self._opened) > KEPT:
            self._opened.popitem(last=False)
        return self._opened[key]


def _said(given: Given, key: str) -> str:
    if not given.get(key):
        raise ConfigError(f"the address lacks '{key}='")
    return given[key]


def _compared(rows: Sequence[ComparedRun], names: Mapping[str, str]) -> Context:
    """Show one metric of two runs, and say which is ahead."""
    first, second = rows
    dots = [
        plots.Dot(names[row.run], row.mean, (row.low, row.high), strong=row is second)
        for row in rows
    ]
    assert second.difference is not None and second.p_value is not None
    assert second.difference_low is not None and second.difference_high is not None
    low, high = second.difference_low, second.difference_high
    verdict = "above" if low > 0 else "below" if high < 0 else "not clearly different from"
    label = metric_name(first.metric)
    return {
        "name": label,
        "drawing": plots.dots(dots, f"{label}, all items"),
        "verdict": verdict,
        "difference": signed(second.difference),
        "interval": f"{signed(low)} to {signed(high)}",
        "p": "below 0.001" if second.p_value < 0.001 else f"{second.p_value:.3f}",
    }


def _course(run: FoundRun) -> list[Context]:
    """Return the curves of a run as far as it is: what selects the round, and the loss."""
    assert run.experiment is not None
    config = run.experiment.evaluation
    looks = _looks(run)
    losses = [(line["round"], line["loss"]) for line in run.lines if line["loss"] is not None]
    found = []
    for name, points, from_zero in (
        (f"Validation {metric_name(config.select)}", looks, True),
        ("Training loss", losses, False),
    ):
        if points:
            drawn = plots.line(points, name, from_zero=from_zero) if len(points) > 1 else None
            found.append({"name": name, "last": points[-1], "drawing": drawn})
    return found


def _looks(run: FoundRun) -> list[tuple[int, float]]:
    assert run.experiment is not None
    config = run.experiment.evaluation
    return [
        (line["round"], line["valid"][config.candidates][config.select])
        for line in run.lines
        if line["valid"] and config.select in line["valid"].get(config.candidates, {})
    ]


def _curves(runs: list[FoundRun]) -> Any:
    """Draw how the runs went, where there is something to draw."""
    rows = [plots.Curve(run.name, points) for run in runs if len(points := _looks(run)) > 1]
    selects = {run.experiment.evaluation.select for run in runs if run.experiment}
    if len(selects) > 1 or not rows:
        return None
    return plots.curves(rows, f"Validation {metric_name(selects.pop())} by round")
