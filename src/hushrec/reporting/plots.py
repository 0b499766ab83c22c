"""Drawings in SVG: dots with intervals, lines over rounds, curves, bars, a heat map.

A drawing has no width of its own: across, everything is placed in percent of the drawing area, and
down in pixels, so text keeps its size from a telephone to a wide screen. Axis labels stand in the
margin around the SVG element, which the style sheet makes (``svg.line``, ``svg.bars``). Colours
come from the style sheet too, through classes.

`standalone` makes a file of line drawings, with their style.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from hushrec.errors import plain
from hushrec.reporting.tables import figure, percent

ROW, BAR, HEAT_ROW = 46, 26, 16
"""Pixels from one dot, bar or row of a heat map to the next."""
LINE_HEIGHT = 150
LEGEND_GAP, LEGEND_ROW = 44, 18
COLOURS = 6
CURVE_STYLE = (
    "svg .c0{stroke:#0b6a66}svg .c1{stroke:#c2480f}svg .c2{stroke:#3c62c4}svg .c3{stroke:#9a6b00}"
    "svg .c4{stroke:#8a3fa0;stroke-dasharray:5 3}svg .c5{stroke:#5a6166;stroke-dasharray:2 3}"
    "svg .event{stroke:#8a8f94;stroke-dasharray:2 4}"
    "@media(prefers-color-scheme:dark){svg .c0{stroke:#67cdc3}svg .c1{stroke:#ff9255}"
    "svg .c2{stroke:#8fb0ff}svg .c3{stroke:#e0b350}svg .c4{stroke:#d79be8}svg .c5{stroke:#a2a9ad}}"
)
"""Colours of several curves, for light and dark paper."""
NAME_LENGTH = 20
"""Characters of a name that fit beside its figures on a telephone."""

Points = Sequence[tuple[int, float]]
"""A value per round."""


# ------------------------------------------------------------ elements


def escape(words: str) -> str:
    """Escape text for HTML and SVG, control characters included."""
    return html.escape(plain(words))


def tag(name: str, attributes: dict[str, Any], body: str = "") -> str:
    """Return an element; attributes are escaped, the body is not."""
    written = "".join(f' {key}="{escape(str(value))}"' for key, value in attributes.items())
    return f"<{name}{written}>{body}</{name}>"


def drawing(kind: str, label: str, parts: Iterable[str], **size: Any) -> Markup:
    """Return a drawing with a label for those who do not see it."""
    attributes = {"class": f"plot {kind}", "role": "img", "aria-label": label, **size}
    body = tag("title", {}, escape(label)) + "".join(parts)
    return Markup(tag("svg", attributes, body))  # noqa: S704 - every text went through escape


def drawing_file(width: int, height: int, parts: Iterable[str], **more: str) -> str:
    """Return a drawing that is a file of its own."""
    size = {"xmlns": "http://www.w3.org/2000/svg", "width": width, "height": height}
    return tag("svg", {**size, **more}, "".join(parts))


def segment(kind: str, x1: str, y1: float, x2: str, y2: float) -> str:
    """Return a straight line."""
    return tag("line", {"class": kind, "x1": x1, "y1": y1, "x2": x2, "y2": y2})


def circle(kind: str, x: str | float, y: float, radius: int, **more: str) -> str:
    """Return a dot."""
    return tag("circle", {"class": kind, "cx": x, "cy": y, "r": radius, **more})


def text(kind: str, x: str, y: float, words: str, anchor: str = "middle", **more: int) -> str:
    """Write words; they are escaped."""
    attributes = {"class": kind, "x": x, "y": round(y, 2), "text-anchor": anchor, **more}
    return tag("text", attributes, escape(words))


def percent_x(share: float) -> str:
    """Write a horizontal position, a share of the width, in per cent."""
    return f"{100 * share:.2f}%"


def short_name(name: str) -> str:
    """Cut a name that is longer than fits."""
    return name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1] + "…"


def tick_label(value: float, ticks: Sequence[float]) -> str:
    """Write a tick with as many digits as its neighbours need."""
    digits = max(len(f"{round(tick, 10):g}".partition(".")[2]) for tick in ticks)
    return "0" if value == 0 else f"{value:,.{digits}f}"


def nice_ticks(low: float, high: float, steps: int) -> list[float]:
    """Return equidistant round numbers that enclose low and high, in about ``steps`` steps."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / steps
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.9999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def round_ticks(first: int, last: int) -> list[int]:
    """Return the first and the last round, and a few round numbers between, none too close."""
    apart = (last - first) / 8
    between = [round(tick) for tick in nice_ticks(first, last, 4)]
    kept = [n for n in dict.fromkeys(between) if first + apart <= n <= last - apart]
    return [first, *kept, last]


def grid_lines(ticks: Sequence[float], down: Callable[[float], float]) -> Iterator[str]:
    """Draw a line across for each tick, with its number on the left."""
    for tick in ticks:
        y = round(down(tick), 2)
        yield segment("grid", "0", y, "100%", y)
        yield text("tick", "-8", y + 4, tick_label(tick, ticks), "end")


# ------------------------------------------------------------ drawings of the pages


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
    """A share, and another one to compare it with."""

    name: str
    share: float
    other: float | None = None
    strong: bool = False


def emphasis(row: Dot | Bar) -> str:
    """Return the class that the style sheet draws a row by."""
    return "strong" if row.strong else "plain"


def dots(rows: Sequence[Dot], label: str, top: float | None = None) -> Markup:
    """Draw one dot a row on a common axis from zero; ``top`` makes two drawings comparable."""
    ticks = nice_ticks(0, top if top is not None else dots_top(rows), 4)
    end, foot = ticks[-1], ROW * len(rows)
    parts, described = [], []
    for tick in ticks:
        x, anchor = percent_x(tick / end), {0: "start", end: "end"}.get(tick, "middle")
        parts.append(segment("grid", x, 0, x, foot))
        parts.append(text("tick", x, foot + 16, tick_label(tick, ticks), anchor))
    for number, row in enumerate(rows):
        top_line, middle, kind = number * ROW + 15, number * ROW + 30, emphasis(row)
        beside = row.note
        if row.interval is not None:
            beside = "–".join(map(figure, row.interval))
            low, high = (percent_x(bound / end) for bound in row.interval)
            parts.append(segment(f"interval {kind}", low, middle, high, middle))
        value = {"class": f"value {kind}", "x": "100%", "y": top_line, "text-anchor": "end"}
        parts += [
            circle(f"dot {kind}", percent_x(row.value / end), middle, 5),
            text(f"name {kind}", "0", top_line, short_name(row.name), "start"),
            tag("text", value, figure(row.value) + tag("tspan", {"dx": 8}, escape(beside))),
        ]
        described.append(f"{row.name} {figure(row.value)}{f' ({beside})' if beside else ''}")
    return drawing("dots", f"{label}: {'; '.join(described)}", parts, height=foot + 22)


def dots_top(rows: Iterable[Dot]) -> float:
    """Return the highest value that `dots` has to show."""
    return max(max(row.value, row.interval[1] if row.interval else 0) for row in rows)


def line(
    points: Points,
    label: str,
    *,
    selected: int | None = None,
    from_zero: bool = False,
    unit: str = "round",
) -> Markup:
    """Draw a value per round, or other unit, and mark the selected one; at least two points."""
    frame = _Frame([points], from_zero=from_zero)
    parts = [*frame.axes(), frame.polylines(["curve"])]
    (first, start), (last, end) = points[0], points[-1]
    described = f"{label}: {figure(start)} at {unit} {first}, {figure(end)} at {unit} {last}"
    found = None if selected is None else dict(points).get(selected)
    if selected is not None and found is not None:
        share = frame.across(selected)
        x, anchor = percent_x(share), "start" if share < 0.3 else "end" if share > 0.7 else "middle"
        parts += [
            segment("mark", x, -4, x, LINE_HEIGHT),
            circle("dot strong", x, round(frame.down(found), 2), 5),
            text("name strong", x, -10, f"round {selected} selected · {figure(found)}", anchor),
        ]
        described += f", {figure(found)} at the selected round {selected}"
    return drawing("line", described, parts, height=LINE_HEIGHT)


@dataclass(frozen=True)
class Curve:
    """A named series of values by round."""

    name: str
    points: Points


def curves(rows: Sequence[Curve], label: str, *, marks: Sequence[int] = ()) -> Markup:
    """Draw several curves on the same axes with their names below; ``marks`` are rounds to see.

    Every curve has at least one point, and together they have two different rounds. A curve of one
    point is a dot on a level line.
    """
    frame = _Frame([row.points for row in rows], from_zero=True)
    kinds = [f"curve c{number % COLOURS}" for number in range(len(rows))]
    shown = [percent_x(frame.across(n)) for n in marks if frame.first <= n <= frame.last]
    events = [segment("event", x, 0, x, LINE_HEIGHT) for x in shown]
    parts, described = [*frame.axes(), *events, frame.polylines(kinds)], []
    for number, (row, kind) in enumerate(zip(rows, kinds, strict=True)):
        y = LINE_HEIGHT + LEGEND_GAP + LEGEND_ROW * number
        parts.append(segment(kind, "0", y - 4, "24", y - 4))
        parts.append(text("name plain", "32", y, row.name, "start"))
        last, value = row.points[-1]
        if len(row.points) == 1:
            dot = percent_x(frame.across(last)), round(frame.down(value), 2)
            parts.append(circle(kind, *dot, 4))
        described.append(f"{row.name} {figure(value)} at round {last}")
    label = f"{label}: {'; '.join(described)}"
    return drawing("line", label, parts, height=curves_height(len(rows)))


def curves_height(count: int) -> int:
    """Return how high a drawing of this many curves is."""
    return LINE_HEIGHT + LEGEND_GAP + LEGEND_ROW * (count - 1)


class _Frame:
    """The axes around the lines of a drawing."""

    def __init__(self, lines: Sequence[Points], *, from_zero: bool) -> None:
        self.lines = lines
        rounds = [number for points in lines for number, _ in points]
        values = [value for points in lines for _, value in points]
        self.first, self.last = min(rounds), max(rounds)
        self.ticks = nice_ticks(0 if from_zero else min(values), max(values), 3)

    def across(self, number: int) -> float:
        """Return where a round is, as a share of the width."""
        return (number - self.first) / (self.last - self.first)

    def down(self, value: float) -> float:
        """Return where a value is, in pixels from the top."""
        low, high = self.ticks[0], self.ticks[-1]
        return LINE_HEIGHT * (high - value) / (high - low)

    def axes(self) -> Iterator[str]:
        """Draw grid and ticks."""
        yield from grid_lines(self.ticks, self.down)
        for number in round_ticks(self.first, self.last):
            yield text("tick", percent_x(self.across(number)), LINE_HEIGHT + 18, f"{number}")

    def polylines(self, kinds: Sequence[str]) -> str:
        """Draw each line with its class, stretched over the whole width."""
        drawn = ""
        for kind, points in zip(kinds, self.lines, strict=True):
            shares = [(self.across(number), value) for number, value in points]
            if len(points) == 1:
                shares = [(0.0, points[0][1]), (1.0, points[0][1])]
            path = " ".join(f"{100 * x:.2f},{self.down(value):.2f}" for x, value in shares)
            drawn += tag("polyline", {"class": kind, "points": path})
        size = {"width": "100%", "height": LINE_HEIGHT, "viewBox": f"0 0 100 {LINE_HEIGHT}"}
        more = {"preserveAspectRatio": "none", "overflow": "visible", "aria-hidden": "true"}
        return tag("svg", {**size, **more}, drawn)


def bars(rows: Sequence[Bar], names: Sequence[str], label: str) -> Markup:
    """Draw shares as bars across, the other share as a mark on the same row.

    ``names`` says whose shares they are; their figures stand in columns on the right, in
    the margin of the style sheet (148 px, or 68 px where the second column is hidden).
    """
    top = max(max(row.share, row.other or 0) for row in rows) or 1
    heads = zip(("name strong", "name theirs"), (68, 148), names, strict=False)
    parts = [text(kind, "100%", 12, short_name(name), "end", dx=dx) for kind, dx, name in heads]
    described = []
    for number, row in enumerate(rows):
        y = (number + 1) * BAR
        size = {"x": 0, "y": y + 4, "width": percent_x(row.share / top), "height": BAR - 8}
        parts += [
            text("tick", "-10", y + 17, row.name, "end"),
            tag("rect", {"class": f"bar {emphasis(row)}", **size}),
        ]
        shares = [percent(row.share)]
        if row.other is not None:
            shares.append(percent(row.other))
            x = percent_x(row.other / top)
            parts.append(segment("other", x, y + 1, x, y + BAR - 1))
        columns = zip(("value mine", "value theirs"), (68, 148), shares, strict=False)
        parts += [text(kind, "100%", y + 17, share, "end", dx=dx) for kind, dx, share in columns]
        described.append(f"{row.name}: {' against '.join(shares)}")
    foot = BAR * (len(rows) + 1)
    parts.append(segment("axis", "0", BAR, "0", foot))
    return drawing("bars", f"{label}: {'; '.join(described)}", parts, height=foot)


def heat(shares: Sequence[Sequence[float]], names: Sequence[str], label: str) -> Markup:
    """Draw a row per name and a column per thing; the larger a share, the stronger its cell.

    Strength counts from the smallest share of a row to its largest, which stands at the end.
    """
    parts = []
    for number, (name, row) in enumerate(zip(names, shares, strict=True)):
        y, low, high = number * HEAT_ROW, min(row), max(row)
        parts.append(text("tick", "-10", y + HEAT_ROW - 4, name, "end"))
        parts.append(text("value mine", "100%", y + HEAT_ROW - 4, percent(high), "end", dx=68))
        for column, share in enumerate(row):
            strength = (share - low) / (high - low) if high > low else 0.0
            cell = {"x": percent_x(column / len(row)), "y": y, "width": percent_x(1 / len(row))}
            shade = {"height": HEAT_ROW - 1, "fill-opacity": round(0.06 + 0.94 * strength, 3)}
            parts.append(tag("rect", {"class": "bar strong", **cell, **shade}))
    return drawing("bars", label, parts, height=HEAT_ROW * len(names))


# ------------------------------------------------------------ files


def standalone(panels: Sequence[tuple[str, Markup]], height: int = LINE_HEIGHT) -> str:
    """Return an SVG file of several line drawings with their titles, one below the other."""
    style = (
        "svg{overflow:visible}.grid{stroke:#d8dbe2}.curve{fill:none;stroke:#2f6fde;stroke-width:2;"
        "vector-effect:non-scaling-stroke}text{font:12px system-ui,sans-serif;fill:#4a5060}"
        "@media(prefers-color-scheme:dark){.grid{stroke:#3a3f4b}text{fill:#b9c0cf}}" + CURVE_STYLE
    )
    parts, y = [tag("style", {}, style)], 0
    for title, drawn in panels:
        inner = {"x": 64, "y": y + 56, "width": 620, "height": height + 30, "overflow": "visible"}
        parts += [text("title", "16", y + 22, title, "start"), tag("svg", inner, str(drawn))]
        y += height + 96
    return drawing_file(720, y, parts)
