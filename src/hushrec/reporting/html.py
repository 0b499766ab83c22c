"""HTML pages: `write_report` of one run, `write_comparison` of several, and their renderer.

A page is one file: no scripts, no fonts or images from elsewhere, and the same run gives the same
page. Python computes every figure; the templates (``*.html.j2``) hold words and style. Jinja
escapes all text, and undefined names are errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from hushrec.analysis.run import one_user
from hushrec.api import Run
from hushrec.errors import ConfigError, RunError, plain
from hushrec.io.files import write_text
from hushrec.methods.statistics.pair_weights import SELECT_SCALARS
from hushrec.reporting import baselines, plots, sections, tables
from hushrec.reporting.plots import curve_of
from hushrec.reporting.tables import (
    MEANS_ALONE,
    figure,
    human_duration,
    human_size,
    metric_name,
    percent,
    short_names,
    signed,
)
from hushrec.runs.comparison import ComparedRun, compare_runs
from hushrec.runs.folder import RunFolder


def environment(*packages: str) -> Environment:
    """Return what renders the templates that lie in these packages."""
    made = Environment(
        loader=ChoiceLoader([PackageLoader(package, ".") for package in packages]),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "figure": figure,
        "percent": percent,
        "size": human_size,
        "duration": human_duration,
        "count": "{:,}".format,
    }
    return made


def _shown(value: object) -> object:
    """Make words from anywhere safe; what is drawn already is."""
    return plain(value) if type(value) is str else value


REPORT = "report.html"
HEADLINE = ("hr@10", "ndcg@10")


@dataclass(frozen=True)
class Shown:
    """What a page has besides its figures."""

    samples: bool = True
    """Whether some users' histories and lists are in it."""
    map: bool = False
    """Whether the items are drawn on a map, which takes a while."""
    user: str | None = None
    """Whose lists are shown beside each other: the own, with other tables, by popularity."""


USUAL = Shown()


def write_report(run: Run, shown: Shown = USUAL) -> Path:
    """Write ``report.html`` into the run's folder and return its path."""
    if run.folder is None:
        raise RunError("a report is written into the run's folder: train with out=FOLDER")
    run.folder.write_text(REPORT, render(run, run.folder, shown))
    return run.folder.path / REPORT


def write_federated_report(folder: RunFolder) -> Path:
    """Write ``report.html`` of a federated run, from what the coordinator knows."""
    folder.write_text(REPORT, filled("federated.html.j2", federated_page(folder)))
    return folder.path / REPORT


def federated_page(folder: RunFolder) -> dict[str, Any]:
    """Return everything that ``federated.html.j2`` shows."""
    experiment, summary = folder.experiment(), folder.read_summary()
    lines, budgets = folder.read_metrics(), summary.privacy.budgets
    return {
        "summary": summary,
        "experiment": experiment,
        "mark": summary.protocol_mark,
        "convergence": sections.convergence(experiment, summary, lines),
        "costs": sections.costs(experiment, summary, lines),
        "together": None,
        "budgets": budgets,
        "budgets_plot": budgets and sections.budgets_plot(summary, budgets),
        "promise": sections.promise(summary.privacy),
        "options": tables.options(experiment.make_method(), summary),
        "metric_name": tables.metric_name,
        "curve_style": plots.CURVE_STYLE,
        "toml": experiment.to_toml(),
    }


def render(run: Run, folder: RunFolder, shown: Shown = USUAL) -> str:
    """Return the page."""
    return filled("template.html.j2", page(run, folder, shown))


def filled(template: str, values: Mapping[str, Any]) -> str:
    """Return a page: a template with what it shows."""
    made = environment("hushrec.reporting").get_template(template)
    return labelled(made.render(values))


def labelled(markup: str) -> str:
    """Let each figure of a table carry the name of its column, for screens too narrow for columns.

    Only for tables of ours with one line of heads; text in them is escaped, so tags are tags.
    """

    def stacked(table: re.Match[str]) -> str:
        heads = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", table[1])[1:]

        def row(found: re.Match[str]) -> str:
            names = iter(heads)
            return re.sub("<td", lambda _: f'<td data-label="{next(names, "")}"', found[0])

        body = re.sub(r"<tr>.*?</tr>", row, table[2], flags=re.DOTALL)
        return table[0].replace(table[2], body).replace("<table>", '<table class="stacks">', 1)

    tables = r"<table>.*?<thead>(.*?)</thead>(.*?)</table>"
    return re.sub(tables, stacked, markup, flags=re.DOTALL)


def page(run: Run, folder: RunFolder, shown: Shown = USUAL) -> dict[str, Any]:
    """Return everything the template shows."""
    compared = baselines.MethodAndBaselines(run)
    lines, audit = folder.read_metrics(), sections.read_audit(folder)
    budgets = run.summary.privacy.budgets
    return {
        "summary": run.summary,
        "experiment": run.experiment,
        "mark": run.summary.protocol_mark,
        "data": run.split.data,
        "compared": compared,
        "headline": [baselines.headline(compared, name) for name in HEADLINE],
        "metrics": baselines.metric_tables(compared),
        "convergence": sections.convergence(run.experiment, run.summary, lines),
        "adaptation": sections.adaptation(run, folder),
        "spread": baselines.spread(compared),
        "guidance": sections.guidance(run, lines),
        "curve_style": plots.CURVE_STYLE,
        "costs": sections.costs(
            run.experiment, run.summary, lines, pooled=run.model.method.traits.pooled
        ),
        "silos": sections.silo_mixes(run),
        "together": sections.together(folder),
        "budgets": budgets,
        "budgets_plot": budgets and sections.budgets_plot(run.summary, budgets),
        "audit": audit,
        "audit_plot": sections.audit_plot(run, audit),
        "rate_names": sections.RATE_NAMES,
        "samples": sections.samples(run) if shown.samples else [],
        "map": sections.drawn_map(run) if shown.map else None,
        "one": None if shown.user is None else one_user(run, shown.user),
        "promise": sections.promise(run.summary.privacy),
        "options": tables.options(run.model.method, run.summary),
        "split_words": tables.split_words(run),
        "toml": run.experiment.to_toml(),
        "list_length": baselines.LIST_LENGTH,
        "last_seen": sections.LAST_SEEN,
    }


# ------------------------------------------------------------ several runs

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
    """Plot validation over the rounds, of the runs with more than one evaluation."""
    panels = []
    for metric in HEADLINE:
        found = []
        for path in paths:
            try:
                curve = curve_of(path, metric, CANDIDATES)
            except ConfigError:  # it measured other things
                continue
            # Rounds that try settings are no points of a learning curve.
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
    return {line.round for line in lines if line.phase == SELECT_SCALARS}
