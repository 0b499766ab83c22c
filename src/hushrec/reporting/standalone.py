"""Drawings as files of their own: they bring their style along.

Lines and curves as the page has them, and two more that only stand alone: trends over named ticks,
and forests of differences.

`write_convergence`: the validation curves of several runs in one picture.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from hushrec.errors import ConfigError
from hushrec.io.files import write_text
from hushrec.reporting import svg
from hushrec.reporting.plots import CURVE_STYLE, LINE_HEIGHT, Curve, Dot, curves, curves_height
from hushrec.reporting.wording import figure, signed
from hushrec.runs.folder import RunFolder

TREND_COLOURS = ("#2f6fde", "#c2571a", "#2a8a4a", "#8a4bbf", "#b0263d", "#6b7280")
TRENDS_HEIGHT = 260
FOREST_ROW = 18
"""Pixels from one difference to the next."""


def standalone(panels: Sequence[tuple[str, Markup]], height: int = LINE_HEIGHT) -> str:
    """Return line drawings as a file of its own: (title, drawing) each, one below the other."""
    style = (
        "svg{overflow:visible}.grid{stroke:#d8dbe2}.curve{fill:none;stroke:#2f6fde;stroke-width:2;"
        "vector-effect:non-scaling-stroke}text{font:12px system-ui,sans-serif;fill:#4a5060}"
        "@media(prefers-color-scheme:dark){.grid{stroke:#3a3f4b}text{fill:#b9c0cf}}" + CURVE_STYLE
    )
    body, y = svg.tag("style", {}, style), 0
    for title, drawing in panels:
        inner = {"x": 64, "y": y + 56, "width": 620, "height": height + 30, "overflow": "visible"}
        body += svg.text("title", "16", y + 22, title, "start") + svg.tag(
            "svg", inner, str(drawing)
        )
        y += height + 96
    return svg.tag("svg", {"xmlns": "http://www.w3.org/2000/svg", "width": 720, "height": y}, body)


@dataclass(frozen=True)
class Trend:
    """One value per tick of the axis; None where it is missing."""

    name: str
    values: tuple[float | None, ...]


def trends(
    rows: Sequence[Trend], ticks_x: Sequence[str], label: str, *, joined: bool = True
) -> Markup:
    """Draw several curves over the same named ticks, at equal distances.

    Ticks that have no order are not ``joined``: dots alone.
    """
    found = [value for row in rows for value in row.values if value is not None]
    ticks = svg.nice_ticks(0, max(found), 4)
    apart = 100 / max(1, len(ticks_x) - 1)

    def down(value: float) -> float:
        return round(TRENDS_HEIGHT * (1 - value / ticks[-1]), 2)

    parts = []
    for tick in ticks:
        parts.append(svg.line("grid", "0", down(tick), "100%", down(tick)))
        parts.append(svg.text("tick", "-8", down(tick) + 4, svg.tick(tick, ticks), "end"))
    for k, name in enumerate(ticks_x):
        parts.append(svg.text("tick", svg.across(k * apart / 100), TRENDS_HEIGHT + 18, name))
    said = []
    for number, row in enumerate(rows):
        style = f"--c:{TREND_COLOURS[number % len(TREND_COLOURS)]}"
        known = [(k, value) for k, value in enumerate(row.values) if value is not None]
        for (k, one), (after, other) in itertools.pairwise(known) if joined else ():
            ends = {"x1": svg.across(k * apart / 100), "x2": svg.across(after * apart / 100)}
            rise = {"y1": down(one), "y2": down(other), "style": style}
            parts.append(svg.tag("line", {"class": "curve", **ends, **rise}))
        for k, value in known:
            x = svg.across(k * apart / 100)
            parts.append(svg.circle("point", x, down(value), 4, style=style))
        said.append(f"{row.name} " + ", ".join(f"{ticks_x[k]}: {figure(v)}" for k, v in known))
    return svg.drawing("curves", TRENDS_HEIGHT, f"{label}: {'; '.join(said)}", parts)


def standalone_trends(drawing: Markup, names: Sequence[str], title: str) -> str:
    """Return trends as a file of their own, with a title and a legend."""
    style = (
        "svg{overflow:visible}.grid{stroke:#d8dbe2}.curve{stroke:var(--c);stroke-width:2}"
        ".point{fill:var(--c)}text{font:12px system-ui,sans-serif;fill:#4a5060}"
        "@media(prefers-color-scheme:dark){.grid{stroke:#3a3f4b}text{fill:#b9c0cf}}"
    )
    parts = [svg.tag("style", {}, style), svg.text("title", "16", 22, title, "start")]
    for number, name in enumerate(names):
        colour = f"--c:{TREND_COLOURS[number % len(TREND_COLOURS)]}"
        parts.append(svg.circle("point", 596, 56 + 22 * number, 5, style=colour))
        parts.append(svg.text("tick", "610", 60 + 22 * number, svg.short(name), "start"))
    inner = {"x": 64, "y": 44, "width": 500, "height": TRENDS_HEIGHT, "overflow": "visible"}
    parts.append(svg.tag("svg", inner, str(drawing)))
    longest = max((len(svg.short(name)) for name in names), default=0)
    size = {"width": max(720, 626 + 7 * longest), "height": TRENDS_HEIGHT + 80}
    return svg.tag("svg", {"xmlns": "http://www.w3.org/2000/svg", **size}, "".join(parts))


def standalone_forest(groups: Sequence[tuple[str, Sequence[Dot]]], title: str) -> str:
    """Draw differences and their intervals around zero, in groups, as a file of its own."""
    ends = [end for _, rows in groups for row in rows for end in (row.value, *(row.interval or ()))]
    ticks = svg.nice_ticks(min(0.0, *ends), max(0.0, *ends), 5)
    left, right, y = 180, 610, 48

    def across(value: float) -> str:
        return f"{left + (right - left) * (value - ticks[0]) / (ticks[-1] - ticks[0]):.1f}"

    marks = []
    for name, rows in groups:
        marks.append(svg.text("name", "16", y + 4, name, "start"))
        for row in rows:
            y += FOREST_ROW
            kind = "strong" if row.strong else "plain"
            marks.append(svg.text("tick", "28", y + 4, row.name, "start"))
            if row.interval:
                low, high = row.interval
                marks.append(svg.line(f"interval {kind}", across(low), y, across(high), y))
            marks += [
                svg.circle(f"dot {kind}", across(row.value), y, 4),
                svg.text("tick", "704", y + 4, signed(row.value), "end"),
            ]
        y += FOREST_ROW + 8
    style = (
        ".grid{stroke:#d8dbe2}.zero{stroke:#4a5060}.plain{stroke:#8a90a0;fill:#8a90a0}"
        ".strong{stroke:#c2480f;fill:#c2480f}.interval{stroke-width:2}"
        "text{font:12px system-ui,sans-serif;fill:#4a5060}.name,.title{font-weight:600}"
        "@media(prefers-color-scheme:dark){.grid{stroke:#3a3f4b}.zero{stroke:#b9c0cf}"
        "text{fill:#b9c0cf}.strong{stroke:#ff9255;fill:#ff9255}}"
    )
    parts = [svg.tag("style", {}, style), svg.text("title", "16", 22, title, "start")]
    for tick in ticks:
        kind = "grid" if tick else "zero"
        parts.append(svg.line(kind, across(tick), 34, across(tick), y))
        parts.append(svg.text("tick", across(tick), y + 16, svg.tick(tick, ticks)))
    size = {"width": 720, "height": y + 28, "role": "img"}
    body = "".join([*parts, *marks])
    return svg.tag("svg", {"xmlns": "http://www.w3.org/2000/svg", **size}, body)


def write_convergence(
    paths: Sequence[Path], file: Path, metrics: Sequence[str], candidates: str
) -> None:
    """Draw each metric over the rounds, a curve a run; of several seeds the first."""
    panels = []
    for metric in metrics:
        rows = [curve_of(path, metric, candidates) for path in paths]
        if len({number for row in rows for number, _ in row.points}) < 2:
            raise ConfigError("--plot needs runs with at least two evaluations")
        label = f"Validation {metric.upper()}, {candidates}, by round"
        panels.append((label, curves(rows, label)))
    write_text(file, standalone(panels, curves_height(len(paths))))


def curve_of(path: Path, metric: str, candidates: str) -> Curve:
    """Return what a run recorded of a metric; of several seeds the first."""
    summary = RunFolder.open(path).read_summary()
    first = summary.runs[0] if summary.runs else ""
    mark = " (leaks)" if summary.leaks else ""
    seed = f", {first}" if first else ""
    points = [
        (line.round, line.valid[candidates][metric])
        for line in RunFolder.open(path / first).read_metrics()
        if line.valid and metric in line.valid.get(candidates, {})
    ]
    if not points:
        raise ConfigError(
            f"{path} did not record {metric} ({candidates}) during training; see its metrics.jsonl "
            "for what it did"
        )
    return Curve(f"{path}{seed}{mark}", points)
