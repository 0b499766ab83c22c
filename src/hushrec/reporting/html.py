"""How pages are rendered: escaped, words from anywhere made safe, nothing undefined.

`write_report`: one run as one self-contained page that a person likes to read.

No scripts, no fonts or pictures from elsewhere, nothing that changes from one writing to the next.
Python works out every figure and names it; ``template.html.j2`` holds the words and the looks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from hushrec.analysis.user import one_user
from hushrec.api import Run
from hushrec.errors import RunError, plain
from hushrec.reporting import baselines as contenders
from hushrec.reporting import curves as course
from hushrec.reporting import plots
from hushrec.reporting import sections as privacy
from hushrec.reporting import sections as samples
from hushrec.reporting import wording as words
from hushrec.reporting.sections import drawn_map
from hushrec.reporting.wording import figure, human_duration, human_size, percent
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
        "convergence": course.convergence(experiment, summary, lines),
        "costs": course.costs(experiment, summary, lines),
        "together": None,
        "budgets": budgets,
        "budgets_plot": budgets and privacy.budgets_plot(summary, budgets),
        "promise": privacy.promise(summary.privacy),
        "options": words.options(experiment.make_method(), summary),
        "metric_name": words.metric_name,
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
    field = contenders.Field(run)
    lines, audit = folder.read_metrics(), privacy.read_audit(folder)
    budgets = run.summary.privacy.budgets
    return {
        "summary": run.summary,
        "experiment": run.experiment,
        "mark": run.summary.protocol_mark,
        "data": run.split.data,
        "field": field,
        "headline": [contenders.headline(field, name) for name in HEADLINE],
        "metrics": contenders.metric_tables(field),
        "convergence": course.convergence(run.experiment, run.summary, lines),
        "adaptation": course.adaptation(run, folder),
        "spread": contenders.spread(field),
        "guidance": course.guidance(run, lines),
        "curve_style": plots.CURVE_STYLE,
        "costs": course.costs(
            run.experiment, run.summary, lines, pooled=run.model.method.traits.pooled
        ),
        "silos": course.silo_mixes(run),
        "together": privacy.together(folder),
        "budgets": budgets,
        "budgets_plot": budgets and privacy.budgets_plot(run.summary, budgets),
        "audit": audit,
        "audit_plot": privacy.audit_plot(run, audit),
        "rate_names": privacy.RATE_NAMES,
        "samples": samples.samples(run) if shown.samples else [],
        "map": drawn_map(run) if shown.map else None,
        "one": None if shown.user is None else one_user(run, shown.user),
        "promise": privacy.promise(run.summary.privacy),
        "options": words.options(run.model.method, run.summary),
        "split_words": words.split_words(run),
        "toml": run.experiment.to_toml(),
        "list_length": contenders.LIST_LENGTH,
        "last_seen": samples.LAST_SEEN,
    }
