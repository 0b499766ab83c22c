"""`write_convergence`: the validation curves of several runs in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hushrec.disk import write_text
from hushrec.errors import ConfigError
from hushrec.report.plots import Curve, curves, curves_height
from hushrec.report.standalone import standalone
from hushrec.run_folder import RunFolder


def write_convergence(
    paths: Sequence[Path], file: Path, metrics: Sequence[str], candidates: str
) -> None:
    """Draw each metric over the rounds, a curve a run; of several seeds the first."""
    panels = []
    for metric in metrics:
        rows = [curve_of(path, metric, candidates) for path in paths]
        if len({number for row in rows for number, _ in row.points}) < 2:
            raise ConfigError("--plot needs runs with at least two looks at validation")
        label = f"Validation {metric.upper()}, {candidates}, by round"
        panels.append((label, curves(rows, label)))
    write_text(file, standalone(panels, curves_height(len(paths))))


def curve_of(path: Path, metric: str, candidates: str) -> Curve:
    """Return what a run recorded of a metric; of several seeds the first."""
    summary = RunFolder.open(path).read_summary()
    several = "runs" in summary
    folder = RunFolder.open(path / summary["runs"][0]) if several else RunFolder.open(path)
    mark = " (leaks)" if summary["protocol"] == "published" else ""
    seed = f", {summary['runs'][0]}" if several else ""
    points = [
        (line["round"], line["valid"][candidates][metric])
        for line in folder.read_metrics()
        if line["valid"] and metric in line["valid"].get(candidates, {})
    ]
    if not points:
        raise ConfigError(
            f"{path} did not record {metric} ({candidates}) during training; see its metrics.jsonl "
            "for what it did"
        )
    return Curve(f"{path}{seed}{mark}", points)
