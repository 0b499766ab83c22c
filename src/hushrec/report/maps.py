"""The items as one user sees them, on a map."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from hushrec.analyse.item_map import GRID, item_map
from hushrec.report import svg
from hushrec.report.words import marked
from hushrec.run import Run


def drawn_map(run: Run) -> dict[str, Any]:
    """Draw each item table that one user scores with."""
    found = item_map(run)
    liked, held = set(found["liked"]), set(found["held_out"])
    tables = {name: table for name, table in found.items() if isinstance(table, dict)}
    drawn = [
        {"name": name, "plot": _plot(run, name, table["places"], liked, held), **table}
        for name, table in tables.items()
    ]
    best = max(table["together"] for table in tables.values())
    return {**found, "together": best, "drawn": drawn}


def _plot(run: Run, name: str, places: list[list[int]], liked: set[int], held: set[int]) -> Markup:
    def kind(item: int) -> str:
        return "item held" if item in held else "item liked" if item in liked else "item"

    # What matters is drawn last, and so lies on top.
    order = sorted(range(len(places)), key=lambda item: (item in liked, item in held))
    dots = [
        svg.circle(kind(item), places[item][0], places[item][1], 5 if kind(item) == "item" else 10)
        for item in order
    ]
    label = marked(run, f"Map of {len(places):,} items, {name}")
    body = svg.tag("title", {}, svg.escape(label)) + "".join(dots)
    size = f"-20 -20 {GRID + 40} {GRID + 40}"
    about = {"class": "plot map", "role": "img", "aria-label": label, "viewBox": size}
    return Markup(svg.tag("svg", about, body))  # noqa: S704 - every text went through escape
