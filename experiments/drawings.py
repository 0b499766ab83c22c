"""Drawings of experiments as SVG files: trends over named ticks, and forests of differences."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from hushrec.reporting.plots import (
    Dot,
    circle,
    drawing,
    drawing_file,
    emphasis,
    grid_lines,
    nice_ticks,
    percent_x,
    segment,
    short_name,
    tag,
    text,
    tick_label,
)
from hushrec.reporting.tables import figure, signed

FOREST_ROW = 18
"""Pixels from one difference to the next."""
TRENDS_HEIGHT = 260
TREND_COLOURS = ("#2f6fde", "#c2571a", "#2a8a4a", "#8a4bbf", "#b0263d", "#6b7280")


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
    ticks = nice_ticks(0, max(found), 4)
    apart = 100 / max(1, len(ticks_x) - 1)
    at = [percent_x(number * apart / 100) for number in range(len(ticks_x))]

    def down(value: float) -> float:
        return round(TRENDS_HEIGHT * (1 - value / ticks[-1]), 2)

    parts = [*grid_lines(ticks, down)]
    parts += [
        text("tick", x, TRENDS_HEIGHT + 18, name) for x, name in zip(at, ticks_x, strict=True)
    ]
    said = []
    for number, row in enumerate(rows):
        style = _trend_style(number)
        known = [(k, value) for k, value in enumerate(row.values) if value is not None]
        for (k, one), (after, other) in itertools.pairwise(known) if joined else ():
            ends = {"x1": at[k], "x2": at[after], "y1": down(one), "y2": down(other)}
            parts.append(tag("line", {"class": "curve", **ends, "style": style}))
        parts += [circle("point", at[k], down(value), 4, style=style) for k, value in known]
        said.append(f"{row.name} " + ", ".join(f"{ticks_x[k]}: {figure(v)}" for k, v in known))
    return drawing("curves", f"{label}: {'; '.join(said)}", parts, height=TRENDS_HEIGHT)


def _trend_style(number: int) -> str:
    return f"--c:{TREND_COLOURS[number % len(TREND_COLOURS)]}"


def standalone_trends(drawn: Markup, names: Sequence[str], title: str) -> str:
    """Return trends as a file of their own, with a title and a legend."""
    style = (
        "svg{overflow:visible}.grid{stroke:#d8dbe2}.curve{stroke:var(--c);stroke-width:2}"
        ".point{fill:var(--c)}text{font:12px system-ui,sans-serif;fill:#4a5060}"
        "@media(prefers-color-scheme:dark){.grid{stroke:#3a3f4b}text{fill:#b9c0cf}}"
    )
    parts = [tag("style", {}, style), text("title", "16", 22, title, "start")]
    for number, name in enumerate(names):
        parts.append(circle("point", 596, 56 + 22 * number, 5, style=_trend_style(number)))
        parts.append(text("tick", "610", 60 + 22 * number, short_name(name), "start"))
    inner = {"x": 64, "y": 44, "width": 500, "height": TRENDS_HEIGHT, "overflow": "visible"}
    parts.append(tag("svg", inner, str(drawn)))
    longest = max((len(short_name(name)) for name in names), default=0)
    return drawing_file(max(720, 626 + 7 * longest), TRENDS_HEIGHT + 80, parts)


def standalone_forest(groups: Sequence[tuple[str, Sequence[Dot]]], title: str) -> str:
    """Draw differences and their intervals around zero, in groups, as a file of its own."""
    ends = [end for _, rows in groups for row in rows for end in (row.value, *(row.interval or ()))]
    ticks = nice_ticks(min(0.0, *ends), max(0.0, *ends), 5)
    left, right, y = 180, 610, 48

    def across(value: float) -> str:
        return f"{left + (right - left) * (value - ticks[0]) / (ticks[-1] - ticks[0]):.1f}"

    marks = []
    for name, rows in groups:
        marks.append(text("name", "16", y + 4, name, "start"))
        for row in rows:
            y += FOREST_ROW
            marks.append(text("tick", "28", y + 4, row.name, "start"))
            if row.interval:
                low, high = map(across, row.interval)
                marks.append(segment(f"interval {emphasis(row)}", low, y, high, y))
            marks.append(circle(f"dot {emphasis(row)}", across(row.value), y, 4))
            marks.append(text("tick", "704", y + 4, signed(row.value), "end"))
        y += FOREST_ROW + 8
    style = (
        ".grid{stroke:#d8dbe2}.zero{stroke:#4a5060}.plain{stroke:#8a90a0;fill:#8a90a0}"
        ".strong{stroke:#c2480f;fill:#c2480f}.interval{stroke-width:2}"
        "text{font:12px system-ui,sans-serif;fill:#4a5060}.name,.title{font-weight:600}"
        "@media(prefers-color-scheme:dark){.grid{stroke:#3a3f4b}.zero{stroke:#b9c0cf}"
        "text{fill:#b9c0cf}.strong{stroke:#ff9255;fill:#ff9255}}"
    )
    parts = [tag("style", {}, style), text("title", "16", 22, title, "start")]
    for tick in ticks:
        parts.append(segment("grid" if tick else "zero", across(tick), 34, across(tick), y))
        parts.append(text("tick", across(tick), y + 16, tick_label(tick, ticks)))
    return drawing_file(720, y + 28, [*parts, *marks], role="img")
