"""`write_comparison`: several runs on one page, with intervals, paired tests, curves and costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hushrec.errors import ConfigError
from hushrec.io.files import write_text
from hushrec.reporting import plots
from hushrec.reporting.html import HEADLINE, filled
from hushrec.reporting.standalone import curve_of
from hushrec.reporting.tables import MEANS_ALONE, short_names
from hushrec.reporting.wording import metric_name, signed
from hushrec.runs.comparison import ComparedRun, compare_runs
from hushrec.runs.folder import RunFolder

CANDIDATES = "full"


def write_comparison(paths: Sequence[Path], file: Path) -> Path:
    """Write a page that compares finished runs, the first as the baseline; return its path."""
    rows = compare_runs(paths, HEADLINE, CANDIDATES)
    names = short_names(rows)
    summaries = [RunFolder.open(path).read_summary() for path in paths]
    marks = {summary.protocol_mark for summary in summaries} - {None}
    page = {
        "data": summaries[0].data,
        "mark": next(iter(marks), None),
        "first": names[str(paths[0])],
        "count": len(paths),
        "headline": [_headline(metric, rows, names) for metric in HEADLINE],
        "curves": _curves(paths, names),
        "curve_style": plots.CURVE_STYLE,
        "means_alone": MEANS_ALONE if any(row.low is None for row in rows) else "",
        "runs": [
            {"name": names[str(path)], "summary": summary, "cost": _row(rows, path)}
            for path, summary in zip(paths, summaries, strict=True)
        ],
    }
    write_text(file, filled("compare.html.j2", page))
    return file


def _row(rows: Sequence[ComparedRun], path: Path) -> ComparedRun:
    return next(row for row in rows if row.run == str(path))


def _headline(metric: str, rows: Sequence[ComparedRun], names: dict[str, str]) -> dict[str, Any]:
    mine = [row for row in rows if row.metric == metric]
    best = max(row.mean for row in mine)
    dots = [
        plots.Dot(
            names[row.run],
            row.mean,
            None if row.low is None or row.high is None else (row.low, row.high),
            strong=row.mean == best,
        )
        for row in mine
    ]
    return {
        "name": metric_name(metric),
        "plot": plots.dots(dots, f"{metric_name(metric)}, full ranking"),
        "rows": [
            {
                "name": names[row.run],
                "leaks": row.protocol == "published",
                "row": row,
                "difference": _difference(row),
                "p": _p_value(row.p_value),
            }
            for row in mine
        ],
    }


def _difference(row: ComparedRun) -> tuple[str, str]:
    """Return the difference from the first run, and its interval."""
    if row.difference is None:
        return "first", "–"
    if row.difference_low is None or row.difference_high is None:
        return signed(row.difference), "–"
    return signed(row.difference), f"{signed(row.difference_low)} to {signed(row.difference_high)}"


def _p_value(value: float | None) -> str:
    return "–" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def _curves(paths: Sequence[Path], names: dict[str, str]) -> list[dict[str, Any]]:
    """Draw validation over the rounds, of the runs that looked more than once."""
    panels = []
    for metric in HEADLINE:
        found = []
        for path in paths:
            try:
                curve = curve_of(path, metric, CANDIDATES)
            except ConfigError:  # it measured other things
                continue
            # Rounds that try settings are no course of training.
            tried = _tried(path)
            points = [point for point in curve.points if point[0] not in tried]
            if len(points) > 1:
                found.append(plots.Curve(names[str(path)], points))
        if found:
            label = f"Validation {metric_name(metric)}"
            panels.append({"name": label, "plot": plots.curves(found, label)})
    return panels


def _tried(path: Path) -> set[int]:
    """Return the rounds of a run that only tried settings; of several seeds none is known."""
    lines = RunFolder.open(path).read_metrics()
    return {line.round for line in lines if line.phase.startswith("trying")}
