"""Four small drawings as inline SVG: dots with intervals, a line over rounds, bars, a heat map.

A drawing has no width of its own: across, everything is placed in percent of the drawing area, and
down in pixels, so text keeps its size from a telephone to a wide screen. Axis labels stand in the
margin around the SVG element, which the style sheet makes (``svg.line``, ``svg.bars``). Colours
come from the style sheet too, through classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from markupsafe import Markup

ROW = 46
"""Pixels from one dot to the next."""
LINE_HEIGHT = 150
BAR = 26
"""Pixels from one bar to the next."""
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
    points: Sequence[tuple[int, float]], label: str, *, selected: int, from_zero: bool = False
) -> Markup:
    """Draw a value per round and mark the selected round; at least two points."""
    rounds, values = [number for number, _ in points], [value for _, value in points]
    first, last = rounds[0], rounds[-1]
    ticks = nice_ticks(0 if from_zero else min(values), max(values), 3)
    low, high = ticks[0], ticks[-1]

    def across(number: int) -> float:
        return (number - first) / (last - first)

    def down(value: float) -> float:
        return LINE_HEIGHT * (high - value) / (high - low)

    parts = []
    for tick in ticks:
        y = round(down(tick), 2)
        parts.append(_line("grid", "0", y, "100%", y))
        parts.append(_text("tick", "-8", y + 4, _tick(tick, ticks), "end"))
    parts += [
        _text("tick", _percent(across(number)), LINE_HEIGHT + 18, f"{number}")
        for number in round_ticks(first, last)
    ]
    path = " ".join(f"{100 * across(n):.2f},{down(v):.2f}" for n, v in points)
    parts.append(
        _tag(
            "svg",
            {
                "width": "100%",
                "height": LINE_HEIGHT,
                "viewBox": f"0 0 100 {LINE_HEIGHT}",
                "preserveAspectRatio": "none",
                "overflow": "visible",
                "aria-hidden": "true",
            },
            _tag("polyline", {"class": "curve", "points": path}),
        )
    )
    found = dict(points).get(selected)
    if found is not None:
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
        f"{label}: {figure(values[0])} at round {first}, {figure(values[-1])} at round {last}"
        + ("" if found is None else f", {figure(found)} at the selected round {selected}")
    )
    return _svg("line", LINE_HEIGHT, said, parts)


def standalone(drawing: Markup, title: str) -> str:
    """Return a line drawing as a file of its own, with its title, margins and colours."""
    style = (
        "svg{overflow:visible}.grid{stroke:#d8dbe2}.curve{fill:none;stroke:#2f6fde;stroke-width:2;"
        "vector-effect:non-scaling-stroke}text{font:12px system-ui,sans-serif;fill:#4a5060}"
        "@media(prefers-color-scheme:dark){.grid{stroke:#3a3f4b}text{fill:#b9c0cf}}"
    )
    inner = {"x": 64, "y": 40, "width": 620, "height": LINE_HEIGHT + 30, "overflow": "visible"}
    body = (
        _tag("style", {}, style)
        + _text("title", "16", 22, title, "start")
        + _tag("svg", inner, str(drawing))
    )
    size = {"width": 720, "height": LINE_HEIGHT + 80}
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
