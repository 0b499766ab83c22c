"""HTML pages: `write_report` of one run, `write_comparison` of several, and their renderer.

A page is one file: no scripts, no fonts or images from elsewhere, and the same run gives the same
page. Python computes every figure; the templates (``*.html.j2``) hold words and style. Jinja
escapes all text, and undefined names are errors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hushrec.analysis.run import one_user
from hushrec.api import Run
from hushrec.errors import ConfigError, RunError, plain
from hushrec.evaluation.metrics import metric_name
from hushrec.federation.experiment import Experiment
from hushrec.federation.rounds import RoundLine
from hushrec.io.files import write_text
from hushrec.methods.base import Method
from hushrec.reporting import baselines, plots, sections, tables
from hushrec.runs.compared import MEANS_ALONE, ComparedRun
from hushrec.runs.comparison import compare
from hushrec.runs.folder import RunFolder
from hushrec.runs.schema import Summary

REPORT = "report.html"
HEADLINE = ("hr@10", "ndcg@10")
CANDIDATES = "full"


def environment(*packages: str) -> Environment:
    """Return the Jinja environment of the templates in these packages."""
    made = Environment(
        loader=ChoiceLoader([PackageLoader(package, ".") for package in packages]),
        autoescape=True,
        # Control characters in strings are escaped; drawings (`Markup`) are safe already.
        finalize=lambda value: plain(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "figure": tables.figure,
        "percent": tables.percent,
        "size": tables.human_size,
        "duration": tables.human_duration,
        "count": "{:,}".format,
    }
    return made


def render(template: str, values: Mapping[str, Any]) -> str:
    """Return a page: a template with its values."""
    return add_labels(environment("hushrec.reporting").get_template(template).render(values))


def add_labels(markup: str) -> str:
    """Give each cell of a table the name of its column: narrow screens show rows as lists.

    The tables have one header row; text in them is escaped, so every tag is a tag of the template.
    """

    def stacked(table: re.Match[str]) -> str:
        heads = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", table[1])[1:]

        def row(found: re.Match[str]) -> str:
            names = iter(heads)
            return re.sub("<td", lambda _: f'<td data-label="{next(names, "")}"', found[0])

        body = re.sub(r"<tr>.*?</tr>", row, table[2], flags=re.DOTALL)
        return table[0].replace(table[2], body).replace("<table>", '<table class="stacks">', 1)

    found = r"<table>.*?<thead>(.*?)</thead>(.*?)</table>"
    return re.sub(found, stacked, markup, flags=re.DOTALL)


# ------------------------------------------------------------ one run


def write_report(
    run: Run, *, samples: bool = False, item_map: bool = False, user: str | None = None
) -> Path:
    """Write ``report.html`` into the run's folder and return its path.

    A report shows nothing of a single user unless asked: ``samples`` shows some users' histories
    and lists; ``item_map`` draws the items as one user scores them, which takes a while; ``user``
    is a user whose lists with other tables and by popularity are shown.
    """
    if run.folder is None:
        raise RunError("a report is written into the run's folder: train with out=FOLDER")
    if run.summary.final_of is not None:
        if samples or item_map or user is not None:
            raise ConfigError(
                "users' data is shown beside held-out items, and a final model has none: ask for "
                "samples, a map or a user in the report of the run that it follows"
            )
        return _write_summary_report(run.folder, "final.html.j2")
    if run.summary.users.ranked_users == 0:  # no error where privacy is promised
        return _write_summary_report(run.folder, "unevaluated.html.j2")
    page = {
        **report_page(run, run.folder),
        "samples": sections.samples(run) if samples else [],
        "map": sections.drawn_map(run) if item_map else None,
        "one": None if user is None else one_user(run, user),
    }
    run.folder.write_text(REPORT, render("template.html.j2", page))
    return run.folder.path / REPORT


def write_federated_report(folder: RunFolder) -> Path:
    """Write ``report.html`` of a federated run, from what the coordinator knows."""
    return _write_summary_report(folder, "federated.html.j2")


def _write_summary_report(folder: RunFolder, template: str) -> Path:
    """Write the report of a run without ranks of users of its own."""
    experiment, summary = folder.experiment(), folder.read_summary()
    page = _common_values(experiment, summary, folder.read_metrics(), experiment.make_method())
    page |= {"together": None, "metric_name": metric_name}
    page["attendance"] = sections.attendance(summary)
    folder.write_text(REPORT, render(template, page))
    return folder.path / REPORT


def _common_values(
    experiment: Experiment, summary: Summary, lines: Sequence[RoundLine], method: Method
) -> dict[str, Any]:
    """Return what the reports of simulated and of federated runs have in common."""
    public = experiment.without_paths()
    return {
        "summary": summary,
        "experiment": public,
        "mark": summary.protocol_mark,
        "convergence": sections.convergence(experiment, summary, lines),
        "costs": sections.costs(experiment, summary, lines, pooled=method.traits.pooled),
        "budgets_plot": sections.budgets_plot(summary),
        "options": tables.options(method, summary),
        "curve_style": plots.CURVE_STYLE,
        "toml": public.to_toml(),
    }


def report_page(run: Run, folder: RunFolder) -> dict[str, Any]:
    """Return what every report of a simulated run shows."""
    compared = baselines.MethodAndBaselines(run)
    lines, audit = folder.read_metrics(), sections.read_audit(folder)
    return {
        **_common_values(run.experiment, run.summary, lines, run.model.method),
        "data": run.split.data,
        "compared": compared,
        "headline": [baselines.headline(compared, name) for name in HEADLINE],
        "metrics": baselines.metric_tables(compared),
        "adaptation": sections.adaptation(run, folder),
        "spread": baselines.spread(compared),
        "guidance": sections.guidance(run, lines),
        "silos": sections.silo_mixes(run),
        "together": sections.together(folder),
        "audit": audit,
        "audit_plot": sections.audit_plot(run, audit),
        "rate_names": sections.RATE_NAMES,
        "split_words": tables.split_words(run.split.config, run.split.data),
        "list_length": baselines.LIST_LENGTH,
    }


# ------------------------------------------------------------ several runs


def write_comparison(paths: Sequence[Path], file: Path) -> Path:
    """Write a page that compares finished runs, the first as the baseline; return its path."""
    rows = compare(paths, HEADLINE, candidates=CANDIDATES)
    if len(rows.data) > 1:
        raise ConfigError(
            f"a page compares runs of one data set, and these are of {', '.join(rows.data)}: write "
            "a page for each"
        )
    names = tables.short_names(rows)
    summaries = [RunFolder.open(path).read_summary() for path in paths]
    marks = {summary.protocol_mark for summary in summaries} - {None}
    page = {
        "data": summaries[0].data_name,
        "mark": next(iter(marks), None),
        "marks": tables.shared_marks(
            {name: one.marks for name, one in zip(names.values(), summaries, strict=True)}
        ),
        "first": names[str(paths[0])],
        "count": len(paths),
        "headline": [_headline(metric, rows, names) for metric in HEADLINE],
        "curves": _curves(paths, names),
        "curve_style": plots.CURVE_STYLE,
        "means_alone": MEANS_ALONE if any(row.low is None for row in rows) else "",
        "runs": [
            {"name": names[row.run], "summary": summary, "cost": row}
            for row, summary in zip({row.run: row for row in rows}.values(), summaries, strict=True)
        ],
    }
    write_text(file, render("compare.html.j2", page))
    return file


def means_plot(
    rows: Sequence[ComparedRun], names: Mapping[str, str], strong: Collection[ComparedRun], of: str
) -> Markup:
    """Draw the mean of each run with its interval."""
    dots = [
        plots.Dot(
            names[row.run],
            row.mean,
            None if row.low is None or row.high is None else (row.low, row.high),
            strong=row in strong,
        )
        for row in rows
    ]
    return plots.dots(dots, f"{metric_name(rows[0].metric)}, {of}")


def _headline(metric: str, rows: Sequence[ComparedRun], names: dict[str, str]) -> dict[str, Any]:
    mine = [row for row in rows if row.metric == metric]
    best = max(row.mean for row in mine)
    strong = [row for row in mine if row.mean == best]
    return {
        "name": metric_name(metric),
        "plot": means_plot(mine, names, strong, "full ranking"),
        "rows": [
            {
                "name": names[row.run],
                "leaks": row.protocol == "published",
                "row": row,
                "difference": _difference(row),
                "p": "–" if row.p_value is None else tables.p_text(row.p_value),
            }
            for row in mine
        ],
    }


def _difference(row: ComparedRun) -> tuple[str, str]:
    """Return the difference from the first run, and its interval."""
    if row.difference is None:
        return "first", "–"
    if row.difference_low is None or row.difference_high is None:
        return tables.signed(row.difference), "–"
    interval = tables.signed_interval(row.difference_low, row.difference_high)
    return tables.signed(row.difference), interval


def _curves(paths: Sequence[Path], names: dict[str, str]) -> list[dict[str, Any]]:
    """Plot validation over the rounds; a run with one evaluation is a level line."""
    panels = []
    for metric in HEADLINE:
        found = []
        for path in paths:
            try:
                curve = sections.curve_of(path, metric, CANDIDATES)
            except ConfigError:  # it measured other things
                continue
            found.append(replace(curve, name=names[str(path)]))
        if len({number for curve in found for number, _ in curve.points}) > 1:
            label = f"Validation {metric_name(metric)}"
            panels.append({"name": label, "plot": plots.curves(found, label)})
    return panels
