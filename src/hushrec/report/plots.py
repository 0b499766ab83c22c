"""Small drawings as SVG: dots with intervals, lines over rounds, curves, forests, bars, a heat map.

A drawing has no width of its own: across, everything is placed in percent of the drawing area, and
down in pixels, so text keeps its size from a telephone to a wide screen. Axis labels stand in the
margin around the SVG element, which the style sheet makes (``svg.line``, ``svg.bars``). Colours
come from the style sheet too, through classes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from markupsafe import Markup

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
NAME_LENGTH = 20
"""Characters of a name that fit beside its figures on a telephone."""


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
    ticks = nice_ticks(0, top if top is not None else dots_top(rows), 4)
    end, foot = ticks[-1], ROW * len(rows)

    def across(value: float) -> str:
        return _percent(value / end)

    parts, said = [], []
    for tick in ticks:
        anchor = "start" if tick == 0 else "end" if tick == end else "middle"
        parts.append(_line("grid", across(tick), 0, across(tick), foot))
        parts.append(_text("tick", across(tick), foot + 16, _tick(tick, ticks), anchor))
    for number, row in enumerate(rows):
        text, middle = number * ROW + 15, number * ROW + 30
        kind = "strong" if row.strong else "plain"
        beside = row.note
        if row.interval is not None:
            low, high = row.interval
            beside = f"{figure(low)}–{figure(high)}"
            parts.append(_line(f"interval {kind}", across(low), middle, across(high), middle))
        parts += [
            _tag("circle", {"class": f"dot {kind}", "cx": across(row.value), "cy": middle, "r": 5}),
            _text(f"name {kind}", "0", text, _short(row.name), "start"),
            _tag(
                "text",
                {"class": f"value {kind}", "x": "100%", "y": text, "text-anchor": "end"},
                escape(figure(row.value)) + _tag("tspan", {"dx": 8}, escape(beside)),
            ),
        ]
        said.append(f"{row.name} {figure(row.value)}{f' ({beside})' if beside else ''}")
    return _svg("dots", foot + 22, f"{label}: {'; '.join(said)}", parts)


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
            _line("mark", _percent(x), -4, _percent(x), LINE_HEIGHT),
            _tag(
                "circle",
                {"class": "dot strong", "cx": _percent(x), "cy": round(down(found), 2), "r": 5},
            ),
            _text("name strong", _percent(x), -10, words, anchor),
        ]
    said = (
        f"{label}: {figure(values[0])} at {unit} {first}, {figure(values[-1])} at {unit} {last}"
        + ("" if found is None else f", {figure(found)} at the selected round {selected}")
    )
    return _svg("line", LINE_HEIGHT, said, parts)


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
    shown = [mark for mark in marks if rounds[0] <= mark <= rounds[-1]]
    parts = [
        *frame.axes(),
        *(
            _line(
                "event", _percent(frame.across(mark)), 0, _percent(frame.across(mark)), LINE_HEIGHT
            )
            for mark in shown
        ),
        frame.polylines([(_kind(n), row.points) for n, row in enumerate(rows)]),
    ]
    said = []
    for number, row in enumerate(rows):
        y = LINE_HEIGHT + LEGEND_GAP + LEGEND_ROW * number
        last = f"{figure(row.points[-1][1])} at round {row.points[-1][0]}"
        parts += [
            _line(_kind(number), "0", y - 4, "24", y - 4),
            _text("name plain", "32", y, row.name, "start"),
        ]
        said.append(f"{row.name} {last}")
    return _svg("line", curves_height(len(rows)), f"{label}: {'; '.join(said)}", parts)


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
        ticks = nice_ticks(0 if from_zero else min(values), max(values), 3)
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
            yield _line("grid", "0", y, "100%", y)
            yield _text("tick", "-8", y + 4, _tick(tick, self.ticks), "end")
        for number in round_ticks(self.first, self.last):
            yield _text("tick", _percent(self.across(number)), LINE_HEIGHT + 18, f"{number}")

    def polylines(self, lines: Sequence[tuple[str, Sequence[tuple[int, float]]]]) -> str:
        """Draw (class, points) each as a line, stretched over the whole width."""
        drawn = ""
        for kind, points in lines:
            path = " ".join(f"{100 * self.across(n):.2f},{self.down(v):.2f}" for n, v in points)
            drawn += _tag("polyline", {"class": kind, "points": path})
        size = {"width": "100%", "height": LINE_HEIGHT, "viewBox": f"0 0 100 {LINE_HEIGHT}"}
        more = {"preserveAspectRatio": "none", "overflow": "visible", "aria-hidden": "true"}
        return _tag("svg", {**size, **more}, drawn)


def standalone(panels: Sequence[tuple[str, Markup]], height: int = LINE_HEIGHT) -> str:
    """Return line drawings as a file of its own: (title, drawing) each, one below the other."""
    style = (
        "svg{overflow:visible}.grid{stroke:#d8dbe2}.curve{fill:none;stroke:#2f6fde;stroke-width:2;"
        "vector-effect:non-scaling-stroke}text{font:12px system-ui,sans-serif;fill:#4a5060}"
        "@media(prefers-color-scheme:dark){.grid{stroke:#3a3f4b}text{fill:#b9c0cf}}" + CURVE_STYLE
    )
    body, y = _tag("style", {}, style), 0
    for title, drawing in panels:
        inner = {"x": 64, "y": y + 56, "width": 620, "height": height + 30, "overflow": "visible"}
        body += _text("title", "16", y + 22, title, "start") + _tag("svg", inner, str(drawing))
        y += height + 96
    return _tag("svg", {"xmlns": "http://www.w3.org/2000/svg", "width": 720, "height": y}, body)


@dataclass(frozen=True)
class Trend:
    """One value per place on the axis; None where there is none."""

    name: str
    values: tuple[float | None, ...]


TREND_COLOURS = ("#2f6fde", "#c2571a", "#2a8a4a", "#8a4bbf", "#b0263d", "#6b7280")
TRENDS_HEIGHT = 260


def trends(rows: Sequence[Trend], places: Sequence[str], label: str) -> Markup:
    """Draw several curves over the same named places, which stand at equal distances."""
    found = [value for row in rows for value in row.values if value is not None]
    ticks = nice_ticks(0, max(found), 4)
    apart = 100 / max(1, len(places) - 1)

    def down(value: float) -> float:
        return round(TRENDS_HEIGHT * (1 - value / ticks[-1]), 2)

    parts = []
    for tick in ticks:
        parts.append(_line("grid", "0", down(tick), "100%", down(tick)))
        parts.append(_text("tick", "-8", down(tick) + 4, _tick(tick, ticks), "end"))
    for k, place in enumerate(places):
        parts.append(_text("tick", _percent(k * apart / 100), TRENDS_HEIGHT + 18, place))
    said = []
    for number, row in enumerate(rows):
        style = f"--c:{TREND_COLOURS[number % len(TREND_COLOURS)]}"
        known = [(k, value) for k, value in enumerate(row.values) if value is not None]
        for (k, one), (after, other) in itertools.pairwise(known):
            x = {"x1": _percent(k * apart / 100), "x2": _percent(after * apart / 100)}
            ends = {"y1": down(one), "y2": down(other), "style": style}
            parts.append(_tag("line", {"class": "curve", **x, **ends}))
        for k, value in known:
            at = {"cx": _percent(k * apart / 100), "cy": down(value), "r": 4, "style": style}
            parts.append(_tag("circle", {"class": "point", **at}))
        said.append(f"{row.name} " + ", ".join(f"{places[k]}: {figure(v)}" for k, v in known))
    return _svg("curves", TRENDS_HEIGHT, f"{label}: {'; '.join(said)}", parts)


def standalone_trends(drawing: Markup, names: Sequence[str], title: str) -> str:
    """Return trends as a file of their own, with a title and a legend."""
    style = (
        "svg{overflow:visible}.grid{stroke:#d8dbe2}.curve{stroke:var(--c);stroke-width:2}"
        ".point{fill:var(--c)}text{font:12px system-ui,sans-serif;fill:#4a5060}"
        "@media(prefers-color-scheme:dark){.grid{stroke:#3a3f4b}text{fill:#b9c0cf}}"
    )
    parts = [_tag("style", {}, style), _text("title", "16", 22, title, "start")]
    for number, name in enumerate(names):
        dot = {"class": "point", "cx": 596, "cy": 56 + 22 * number, "r": 5}
        colour = f"--c:{TREND_COLOURS[number % len(TREND_COLOURS)]}"
        parts.append(_tag("circle", {**dot, "style": colour}))
        parts.append(_text("tick", "610", 60 + 22 * number, _short(name), "start"))
    inner = {"x": 64, "y": 44, "width": 500, "height": TRENDS_HEIGHT, "overflow": "visible"}
    parts.append(_tag("svg", inner, str(drawing)))
    size = {"width": 720, "height": TRENDS_HEIGHT + 80}
    return _tag("svg", {"xmlns": "http://www.w3.org/2000/svg", **size}, "".join(parts))


FOREST_ROW = 18
"""Pixels from one difference to the next."""


def standalone_forest(groups: Sequence[tuple[str, Sequence[Dot]]], title: str) -> str:
    """Draw differences and their intervals around zero, in groups, as a file of its own."""
    ends = [end for _, rows in groups for row in rows for end in (row.value, *(row.interval or ()))]
    ticks = nice_ticks(min(0.0, *ends), max(0.0, *ends), 5)
    left, right, y = 180, 610, 48

    def across(value: float) -> str:
        return f"{left + (right - left) * (value - ticks[0]) / (ticks[-1] - ticks[0]):.1f}"

    marks = []
    for name, rows in groups:
        marks.append(_text("name", "16", y + 4, name, "start"))
        for row in rows:
            y += FOREST_ROW
            kind = "strong" if row.strong else "plain"
            marks.append(_text("tick", "28", y + 4, row.name, "start"))
            if row.interval:
                low, high = row.interval
                marks.append(_line(f"interval {kind}", across(low), y, across(high), y))
            at = {"class": f"dot {kind}", "cx": across(row.value), "cy": y, "r": 4}
            marks += [_tag("circle", at), _text("tick", "704", y + 4, signed(row.value), "end")]
        y += FOREST_ROW + 8
    style = (
        ".grid{stroke:#d8dbe2}.zero{stroke:#4a5060}.plain{stroke:#8a90a0;fill:#8a90a0}"
        ".strong{stroke:#c2480f;fill:#c2480f}.interval{stroke-width:2}"
        "text{font:12px system-ui,sans-serif;fill:#4a5060}.name,.title{font-weight:600}"
        "@media(prefers-color-scheme:dark){.grid{stroke:#3a3f4b}.zero{stroke:#b9c0cf}"
        "text{fill:#b9c0cf}.strong{stroke:#ff9255;fill:#ff9255}}"
    )
    parts = [_tag("style", {}, style), _text("title", "16", 22, title, "start")]
    for tick in ticks:
        kind = "grid" if tick else "zero"
        parts.append(_line(kind, across(tick), 34, across(tick), y))
        parts.append(_text("tick", across(tick), y + 16, _tick(tick, ticks)))
    size = {"width": 720, "height": y + 28, "role": "img"}
    body = "".join([*parts, *marks])
    return _tag("svg", {"xmlns": "http://www.w3.org/2000/svg", **size}, body)


def bars(rows: Sequence[Bar], names: Sequence[str], label: str) -> Markup:
    """Draw shares as bars across, the other share as a mark on the same row.

    ``names`` says whose shares they are; their figures stand in columns on the right, in
    the margin of the style sheet (148 px, or 68 px where the second column is hidden).
    """
    top = max(max(row.share, row.other or 0) for row in rows) or 1
    columns = [("value mine", 68), ("value theirs", 148)][: len(names)]
    head = [("name strong", 68), ("name theirs", 148)]
    parts = [
        _column(kind, dx, 12, _short(name))
        for (kind, dx), name in zip(head[: len(names)], names, strict=True)
    ]
    said = []
    for number, row in enumerate(rows):
        y = (number + 1) * BAR
        kind = "strong" if row.strong else "plain"
        size = {"x": 0, "y": y + 4, "width": _percent(row.share / top), "height": BAR - 8}
        parts += [
            _text("tick", "-10", y + 17, row.name, "end"),
            _tag("rect", {"class": f"bar {kind}", **size}),
        ]
        shares = [row.share] if row.other is None else [row.share, row.other]
        if row.other is not None:
            x = _percent(row.other / top)
            parts.append(_line("other", x, y + 1, x, y + BAR - 1))
        for (kind, dx), share in zip(columns, shares, strict=True):
            parts.append(_column(kind, dx, y + 17, percent(share)))
        said.append(f"{row.name}: {' against '.join(percent(share) for share in shares)}")
    parts.append(_line("axis", "0", BAR, "0", BAR * (len(rows) + 1)))
    return _svg("bars", BAR * (len(rows) + 1), f"{label}: {'; '.join(said)}", parts)


def heat(shares: Sequence[Sequence[float]], names: Sequence[str], label: str) -> Markup:
    """Draw a row per name and a column per thing; the larger a share, the stronger its cell.

    Strength counts from the smallest share of a row to its largest, which stands at the end.
    """
    parts = []
    for number, (name, row) in enumerate(zip(names, shares, strict=True)):
        y, low, high = number * HEAT_ROW, min(row), max(row)
        parts.append(_text("tick", "-10", y + HEAT_ROW - 4, name, "end"))
        parts.append(_column("value mine", 68, y + HEAT_ROW - 4, percent(high)))
        for place, share in enumerate(row):
            strength = (share - low) / (high - low) if high > low else 0.0
            cell = {"x": _percent(place / len(row)), "y": y, "width": _percent(1 / len(row))}
            look = {"height": HEAT_ROW - 1, "fill-opacity": round(0.06 + 0.94 * strength, 3)}
            parts.append(_tag("rect", {"class": "bar strong", **cell, **look}))
    return _svg("bars", HEAT_ROW * len(names), label, parts)


def nice_ticks(low: float, high: float, steps: int) -> list[float]:
    """Return round numbers that enclose low and high, about ``steps`` apart."""
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


def figure(value: float) -> str:
    """Write a metric or a loss: four digits behind the point, fewer before it is large."""
    return f"{value:.4f}" if abs(value) < 10 else f"{value:,.1f}"


def signed(difference: float) -> str:
    """Write a difference of two metrics, with a real minus; nothing is +0.0000."""
    return f"{round(difference, 4) + 0.0:+.4f}".replace("-", "−")


def percent(share: float) -> str:
    """Write a share in per cent."""
    return f"{100 * share:.1f} %"


def _svg(kind: str, height: int, label: str, parts: Iterable[str]) -> Markup:
    said = escape(label)
    body = f"<title>{said}</title>" + "".join(parts)
    attributes = {"class": f"plot {kind}", "role": "img", "aria-label": label, "height": height}
    return Markup(_tag("svg", attributes, body))  # noqa: S704 - every text went through escape


def _tag(name: str, attributes: dict[str, Any], body: str = "") -> str:
    written = "".join(f' {key}="{escape(str(value))}"' for key, value in attributes.items())
    return f"<{name}{written}>{body}</{name}>"


def _line(kind: str, x1: str, y1: float, x2: str, y2: float) -> str:
    return _tag("line", {"class": kind, "x1": x1, "y1": y1, "x2": x2, "y2": y2})


def _text(kind: str, x: str, y: float, words: str, anchor: str = "middle") -> str:
    place = {"class": kind, "x": x, "y": round(y, 2), "text-anchor": anchor}
    return _tag("text", place, escape(words))


def _column(kind: str, dx: int, y: int, words: str) -> str:
    """Write at a fixed distance right of the drawing area."""
    place = {"class": kind, "x": "100%", "dx": dx, "y": y, "text-anchor": "end"}
    return _tag("text", place, escape(words))


def _tick(value: float, ticks: Sequence[float]) -> str:
    """Write a tick with as many digits as its neighbours need."""
    digits = max(len(f"{round(tick, 10):g}".partition(".")[2]) for tick in ticks)
    return "0" if value == 0 else f"{value:,.{digits}f}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _short(name: str) -> str:
    return name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1] + "…"
