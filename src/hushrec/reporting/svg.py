"""The parts of a drawing: elements of SVG, and ticks that are round numbers."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

from markupsafe import Markup

from hushrec.errors import plain

NAME_LENGTH = 20
"""Characters of a name that fit beside its figures on a telephone."""


def escape(words: str) -> str:
    """Write words as part of a page or a drawing, whatever is in them."""
    return html.escape(plain(words))


def drawing(kind: str, height: int, label: str, parts: Iterable[str]) -> Markup:
    """Return a drawing with a label for those who do not see it."""
    said = escape(label)
    body = f"<title>{said}</title>" + "".join(parts)
    attributes = {"class": f"plot {kind}", "role": "img", "aria-label": label, "height": height}
    return Markup(tag("svg", attributes, body))  # noqa: S704 - every text went through escape


def tag(name: str, attributes: dict[str, Any], body: str = "") -> str:
    """Return an element; attributes are escaped, the body is not."""
    written = "".join(f' {key}="{escape(str(value))}"' for key, value in attributes.items())
    return f"<{name}{written}>{body}</{name}>"


def line(kind: str, x1: str, y1: float, x2: str, y2: float) -> str:
    """Return a straight line."""
    return tag("line", {"class": kind, "x1": x1, "y1": y1, "x2": x2, "y2": y2})


def circle(kind: str, x: str | float, y: float, radius: int, **more: str) -> str:
    """Return a dot."""
    return tag("circle", {"class": kind, "cx": x, "cy": y, "r": radius, **more})


def text(kind: str, x: str, y: float, words: str, anchor: str = "middle") -> str:
    """Write words; they are escaped."""
    attributes = {"class": kind, "x": x, "y": round(y, 2), "text-anchor": anchor}
    return tag("text", attributes, escape(words))


def column(kind: str, dx: int, y: int, words: str) -> str:
    """Write at a fixed distance right of the drawing area."""
    attributes = {"class": kind, "x": "100%", "dx": dx, "y": y, "text-anchor": "end"}
    return tag("text", attributes, escape(words))


def across(share: float) -> str:
    """Write a horizontal position, a share of the width, in per cent."""
    return f"{100 * share:.2f}%"


def short(name: str) -> str:
    """Cut a long name."""
    return name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1] + "…"


def tick(value: float, ticks: Sequence[float]) -> str:
    """Write a tick with as many digits as its neighbours need."""
    digits = max(len(f"{round(tick, 10):g}".partition(".")[2]) for tick in ticks)
    return "0" if value == 0 else f"{value:,.{digits}f}"


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
