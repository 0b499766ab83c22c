"""`write_report`: one run as one self-contained page that a person likes to read.

No scripts, no fonts or pictures from elsewhere, nothing that changes from one writing to the next.
Python works out every figure and names it; ``template.html.j2`` holds the words and the looks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hushrec.errors import RunError
from hushrec.report import contenders, course, plots, privacy, samples, words
from hushrec.report.page import environment
from hushrec.run import Run
from hushrec.run_folder import RunFolder

REPORT = "report.html"
HEADLINE = ("hr@10", "ndcg@10")


def write_report(run: Run) -> Path:
    """Write ``report.html`` into the run's folder and return its path."""
    if run.folder is None:
        raise RunError("a report is written into the run's folder: train with out=FOLDER")
    run.folder.write_text(REPORT, render(run, run.folder))
    return run.folder.path / REPORT


def render(run: Run, folder: RunFolder) -> str:
    """Return the page."""
    template = environment("hushrec.report").get_template("template.html.j2")
    return template.render(page(run, folder))


def page(run: Run, folder: RunFolder) -> dict[str, Any]:
    """Return everything the template shows."""
    field = contenders.Field(run)
    lines = folder.read_metrics()
    return {
        "summary": run.summary,
        "experiment": run.experiment,
        "mark": run.summary["protocol_mark"],
        "data": run.split.data,
        "field": field,
        "headline": [contenders.headline(field, name) for name in HEADLINE],
        "metrics": contenders.metric_tables(field),
        "convergence": course.convergence(run, lines),
        "adaptation": course.adaptation(run, folder),
        "spread": contenders.spread(field),
        "guidance": course.guidance(run, lines),
        "curve_style": plots.CURVE_STYLE,
        "costs": course.costs(run, lines),
        "silos": course.silo_mixes(run),
        "together": privacy.together(folder),
        "budgets": privacy.budgets(run),
        "audit": privacy.audit(run, folder),
        "samples": samples.samples(run),
        "options": words.options(run),
        "split_words": words.split_words(run),
        "toml": run.experiment.to_toml(),
        "list_length": contenders.LIST_LENGTH,
        "last_seen": samples.LAST_SEEN,
    }
