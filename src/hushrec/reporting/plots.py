"""Drawings in SVG: dots with intervals, lines over rounds, curves, bars, a heat map.

A drawing has no width of its own: across, everything is placed in percent of the drawing area, and
down in pixels, so text keeps its size from a telephone to a wide screen. Axis labels stand in the
margin around the SVG element, which the style sheet makes (``svg.line``, ``svg.bars``). Colours
come from the style sheet too, through classes.

Drawings that are files of their own bring their style along: trends over named ticks, forests of
differences, and the validation curves of several runs (`write_convergence`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from hushrec.errors import ConfigError
from hushrec.io.files import write_text
from hushrec.reporting import svg
from hushrec.reporting.tables import figure, percent, signed
from hushrec.runs.folder import RunFolder

ROW = 46
"""Pixels from one dot to the next."""
LINE_HEIGHT = 150
BAR = 26
"""Pixels from one bar to the next."""
COLOURS = 6
LEGEND_GAP = 44
LEGEND_ROW = 18
CURVE_STYLE = (
    "svg .c0{stroke:#0b6a66}svg .c1{stroke:#c2480f}svg .c2{stroke:#3c62c4}svg .c3{stroke:#9a6b00}"
    "svg .c4{stroke:#8a3fa0;stroke-dasharray:5 3}svg .c5{stroke:#5a6166;stroke-dasharray:2 3}"
    "svg .event{stroke:#8a8f94;stroke-dasharray:2 4}"
    "@media(prefers-color-scheme:dark){svg .c0{stroke:#67cdc3}svg .c1{stroke:#ff9255}"
    "svg .c2{stroke:#8fb0ff}svg .c3{stroke:#e0b350}svg .c4{stroke:#d79be8}svg .c5{stroke:#a2a9ad}}"
)
"""Colours of several curves, for light and dark paper."""
HEAT_ROW = 16
"""Pixels from one row of a heat map to the next."""


@dataclass(frozen=True)
class Dot:
    """A value with its interval, if it has one."""

    name: str
    value: float
    interval: tuple[float, float] | None = None
    note: str = ""
    """Stands where the interval would."""
    strong: bool = False
    """Drawn in the accent colour."""


@dataclass(frozen=True)
class Bar:
    """A share, with another one to hold it against."""

    name: str
    share: float
    other: float | None = None
    strong: bool = False


def dots(rows: Sequence[Dot], label: str, top: float | None = None) -> Markup:
    """Draw one dot a row on a common axis from zero; ``top`` makes two drawings comparable."""
    ticks = svg.nice_ticks(0, top if top is not None else dots_top(rows), 4)
    end, foot = ticks[-1], ROW * len(rows)

    def across(value: float) -> str:
        return svg.across(value / end)

    parts, said = [], []
    for tick in ticks:
        anchor = "start" if tick == 0 else "end" if tick == end else "middle"
        parts.append(svg.line("grid", across(tick), 0, across(tick), foot))
        parts.append(svg.text("tick", across(tick), foot + 16, svg.tick(tick, ticks), anchor))
    for number, row in enumerate(rows):
        text, middle = number * ROW + 15, number * ROW + 30
        kind = "strong" if row.strong else "plain"
        beside = row.note
        if row.interval is not None:
            low, high = row.interval
            beside = f"{figure(low)}–{figure(high)}"
            parts.append(svg.line(f"interval {kind}", across(low), middle, across(high), middle))
        parts += [
            svg.circle(f"dot {kind}", across(row.value), middle, 5),
            svg.text(f"name {kind}", "0", text, svg.short(row.name), "start"),
            svg.tag(
                "text",
                {"class": f"value {kind}", "x": "100%", "y": text, "text-anchor": "end"},
                svg.escape(figure(row.value)) + svg.tag("tspan", {"dx": 8}, svg.escape(beside)),
            ),
        ]
        said.append(f"{row.name} {figure(row.value)}{f' ({beside})' if beside else ''}")
    return svg.drawing("dots", foot + 22, f"{label}: {'; '.join(said)}", parts)


def dots_top(rows: Iterable[Dot]) -> float:
    """Return the highest value that `dots` has to show."""
    return max(max(row.value, row.interval[1] if row.interval else 0) for row in rows)


def line(
    points: Sequence[tuple[int, float]],
    label: str,
    *,
    selected: int | None = None,
    from_zero: bool = False,
    unit: str = "round",
) -> Markup:
    """Draw a value per round, or other unit, and mark the selected one; at least two points."""
    rounds, values = [number for number, _ in points], [value for _, value in points]
    first, last = rounds[0], rounds[-1]
    frame = _Frame.around(rounds, values, from_zero=from_zero)
    parts = [*frame.axes(), frame.polylines([("curve", points)])]
    across, down = frame.across, frame.down
    found = None if selected is None else dict(points).get(selected)
    if selected is not None and found is not None:
        x = across(selected)
        anchor = "start" if x < 0.3 else "end" if x > 0.7 else "middle"
        words = f"round {selected} selected · {figure(found)}"
        parts += [
            svg.line("mark", svg.across(x), -4, svg.across(x), LINE_HEIGHT),
            svg.circle("dot strong", svg.across(x), round(down(found), 2), 5),
            svg.text("name strong", svg.across(x), -10, words, anchor),
        ]
    said = (
        f"{label}: {figure(values[0])} at {unit} {first}, {figure(values[-1])} at {unit} {last}"
        + ("" if found is None else f", {figure(found)} at the selected round {selected}")
    )
    return svg.drawing("line", LINE_HEIGHT, said, parts)


@dataclass(frozen=True)
class Curve:
    """A value per round, and whose."""

    name: str
    points: Sequence[tuple[int, float]]


def curves(
    rows: Sequence[Curve], label: str, *, marks: Sequence[int] = (), from_zero: bool = True
) -> Markup:
    """Draw several curves on the same axes with their names below; ``marks`` are rounds to see.

    Every curve has at least one point, and together they have two different rounds.
    """
    rounds = sorted({number for row in rows for number, _ in row.points})
    values = [value for row in rows for _, value in row.points]
    frame = _Frame.around(rounds, values, from_zero=from_zero)
    shown = [svg.across(frame.across(n)) for n in marks if rounds[0] <= n <= rounds[-1]]
    parts = [
        *frame.axes(),
        *(svg.line("event", x, 0, x, LINE_HEIGHT) for x in shown),
        frame.polylines([(_kind(n), row.points) for n, row in enumerate(rows)]),
    ]
    said = []
    for number, row in enumerate(rows):
        y = LINE_HEIGHT + LEGEND_GAP + LEGEND_ROW * number
        last = f"{figure(row.points[-1][1])} at round {row.points[-1][0]}"
        parts += [
            svg.line(_kind(number), "0", y - 4, "24", y - 4),
            svg.text("name plain", "32", y, row.name, "start"),
        ]
        said.append(f"{row.name} {last}")
    return svg.drawing("line", curves_height(len(rows)), f"{label}: {'; '.join(said)}", parts)


def curves_height(count: int) -> int:
    """Return how high a drawing of this many curves is."""
    return LINE_HEIGHT + LEGEND_GAP + LEGEND_ROW * (count - 1)


def _kind(number: int) -> str:
    return f"curve c{number % COLOURS}"


@dataclass(frozen=True)
class _Frame:
    """The axes of a line drawing."""

    first: int
    last: int
    ticks: list[float]

    @classmethod
    def around(cls, rounds: Sequence[int], values: Sequence[float], *, from_zero: bool) -> _Frame:
        """Enclose these values; rounds are ascending."""
        ticks = svg.nice_ticks(0 if from_zero else min(values), max(values), 3)
        return cls(rounds[0], rounds[-1], ticks)

    def across(self, number: int) -> float:
        """Return where a round is, as a share of the width."""
        return (number - self.first) / (self.last - self.first)

    def down(self, value: float) -> float:
        """Return where a value is, in pixels from the top."""
        low, high = self.ticks[0], self.ticks[-1]
        return LINE_HEIGHT * (high - value) / (high - low)

    def axes(self) -> Iterator[str]:
        """Draw grid and ticks."""
        for tick in self.ticks:
            y = round(self.down(tick), 2)
            yield svg.line("grid", "0", y, "100%", y)
            yield svg.text("tick", "-8", y + 4, svg.tick(tick, self.ticks), "end")
        for number in svg.round_ticks(self.first, self.last):
            yield svg.text("tick", svg.across(self.across(number)), LINE_HEIGHT + 18, f"{number}")

    def polylines(self, lines: Sequence[tuple[str, Sequence[tuple[int, float]]]]) -> str:
        """Draw (class, points) each as a line, stretched over the whole width."""
        drawn = ""
        for kind, points in lines:
            path = " ".join(f"{100 * self.across(n):.2f},{self.down(v):.2f}" for n, v in points)
            drawn += svg.tag("polyline", {"class": kind, "points": path})
        size = {"width": "100%", "height": LINE_HEIGHT, "viewBox": f"0 0 100 {LINE_HEIGHT}"}
        more = {"preserveAspectRatio": "none", "overflow": "visible", "aria-hidden": "true"}
        return svg.tag("svg", {**size, **more}, drawn)


def bars(rows: Sequence[Bar], names: Sequence[str], label: str) -> Markup:
    """Draw shares as bars across, the other share as a mark on the same row.

    ``names`` says whose shares they are; their figures stand in columns on the right, in
    the margin of the style sheet (148 px, or 68 px where the second column is hidden).
    """
    top = max(max(row.share, row.other or 0) for row in rows) or 1
    columns = [("value mine", 68), ("value theirs", 148)][: len(names)]
    head = [("name strong", 68), ("name theirs", 148)]
    parts = [
        svg.column(kind, dx, 12, svg.short(name))
        for (kind, dx), name in zip(head[: len(names)], names, strict=True)
    ]
    said = []
    for number, row in enumerate(rows):
        y = (number + 1) * BAR
        kind = "strong" if row.strong else "plain"
        size = {"x": 0, "y": y + 4, "width": svg.across(row.share / top), "height": BAR - 8}
        parts += [
            svg.text("tick", "-10", y + 17, row.name, "end"),
            svg.tag("rect", {"class": f"bar {kind}", **size}),
        ]
        shares = [row.share] if row.other is None else [row.share, row.other]
        if row.other is not None:
            x = svg.across(row.other / top)
            parts.append(svg.line("other", x, y + 1, x, y + BAR - 1))
        for (kind, dx), share in zip(columns, shares, strict=True):
            parts.append(svg.column(kind, dx, y + 17, percent(share)))
        said.append(f"{row.name}: {' against '.join(percent(share) for share in shares)}")
    parts.append(svg.line("axis", "0", BAR, "0", BAR * (len(rows) + 1)))
    return svg.drawing("bars", BAR * (len(rows) + 1), f"{label}: {'; '.join(said)}", parts)


def heat(shares: Sequence[Sequence[float]], names: Sequence[str], label: str) -> Markup:
    """Draw a row per name and a column per thing; the larger a share, the stronger its cell.

    Strength counts from the smallest share of a row to its largest, which stands at the end.
    """
    parts = []
    for number, (name, row) in enumerate(zip(names, shares, strict=True)):
        y, low, high = number * HEAT_ROW, min(row), max(row)
        parts.append(svg.text("tick", "-10", y + HEAT_ROW - 4, name, "end"))
        parts.append(svg.column("value mine", 68, y + HEAT_ROW - 4, percent(high)))
        for column, share in enumerate(row):
            strength = (share - low) / (high - low) if high > low else 0.0
            cell = {"x": svg.across(column / len(row)), "y": y, "width": svg.across(1 / len(row))}
            shade = {"height": HEAT_ROW - 1, "fill-opacity": round(0.06 + 0.94 * strength, 3)}
            parts.append(svg.tag("rect", {"class": "bar strong", **cell, **shade}))
    return svg.drawing("bars", HEAT_ROW * len(names), label, parts)


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
