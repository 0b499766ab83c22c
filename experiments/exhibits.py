"""Pictures of exhibits: forests of differences, trends over places, curves over rounds, maps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from experiments.drawings import (
    TRENDS_HEIGHT,
    Trend,
    standalone_forest,
    standalone_trends,
    trends,
)
from experiments.plan import Cell, Exhibit
from experiments.results import SIGNIFICANT, Record, Results
from experiments.states import differences, figures
from hushrec.reporting.plots import Curve, Dot, curves, curves_height, drawing_file, tag, text
from hushrec.reporting.plots import standalone as stacked_lines

MAP_SIZE = 320
MAP_STYLE = (
    "path{fill:none;stroke-linecap:round}.other{stroke:#b3b8c2;stroke-width:3}"
    ".liked{stroke:#2f6fde;stroke-width:5}.held{stroke:#c2571a;stroke-width:9}"
    ".frame{fill:none;stroke:#d8dbe2}text{font:12px system-ui,sans-serif;fill:#4a5060}"
    "@media(prefers-color-scheme:dark){.other{stroke:#565d6b}.liked{stroke:#8fb0ff}"
    ".held{stroke:#ff9255}.frame{stroke:#3a3f4b}text{fill:#b9c0cf}}"
)


def pictures(exhibit: Exhibit, results: Results) -> dict[str, str]:
    """Return the files of an exhibit that has enough results to be drawn, by name."""
    makers = {
        "overview": _forest, "trends": _trends, "dots": _trends, "curves": _curves, "map": _map
    }  # fmt: skip
    if exhibit.kind not in makers:
        return {}
    stem, found = exhibit.name.partition("/")[2], {}
    for protocol in exhibit.protocols:
        drawing = makers[exhibit.kind](exhibit, protocol, results)
        if drawing:
            found[f"{stem}-{protocol}.svg"] = drawing
    return found


def _marked(protocol: str) -> str:
    return " (published protocol, leaks)" if protocol == "published" else ""


def _by_label(exhibit: Exhibit) -> Iterator[tuple[str, list[Cell]]]:
    for label in exhibit.data or [""]:
        yield label, [cell for cell in exhibit.cells if cell.label == label]


# ------------------------------------------------------------------------------------- forests


def _forest(exhibit: Exhibit, protocol: str, results: Results) -> str:
    """Draw how rows that have a line differ from those they were tested against."""
    groups: dict[str, list[Dot]] = {}
    for cell in exhibit.cells:
        for _, task, (*_, last) in differences(exhibit, cell, results):
            if cell.row.line and task.protocol == protocol:
                dot = Dot(cell.label, last.value, (last.low, last.high), strong=last.significant)
                groups.setdefault(cell.row.line, []).append(dot)
    metric, mark = exhibit.compared[-1].upper(), _marked(protocol)
    title = f"{metric} of one less that of the other (colour: p < {SIGNIFICANT}){mark}"
    return standalone_forest([*groups.items()], title) + "\n" if groups else ""


# ------------------------------------------------------------------------------------- trends


def _trends(exhibit: Exhibit, protocol: str, results: Results) -> str:
    panels = []
    for label, here in _by_label(exhibit):
        values = {
            cell.row.name: [f.value for f in figures(exhibit, cell, protocol, results)]
            for cell in here
        }
        for places, rows in _lines(exhibit, here, values):
            least = 1 if exhibit.kind == "dots" else 2
            drawn = [row for row in rows if sum(v is not None for v in row.values) >= least]
            if drawn:
                what = f": {exhibit.shown[0]}" if len(exhibit.metrics) == 1 else ""
                title = f"{label}{_marked(protocol)}{what}"
                drawing = trends(drawn, places, title, joined=exhibit.kind == "trends")
                panels.append(standalone_trends(drawing, [row.name for row in drawn], title))
    return _stacked(panels, TRENDS_HEIGHT + 80)


def _lines(
    exhibit: Exhibit, here: Sequence[Cell], values: Mapping[str, Sequence[float | None]]
) -> Iterator[tuple[list[str], list[Trend]]]:
    """Return the lines of one or more drawings: lines along the same places share one."""
    if exhibit.kind == "dots" and not any(cell.row.at for cell in here):
        named = [cell.row.name for cell in here]
        by_metric = zip(exhibit.shown, zip(*values.values(), strict=True), strict=True)
        yield named, [Trend(head, points) for head, points in by_metric]
        return
    if not any(cell.row.at for cell in here):
        yield exhibit.shown, [Trend(cell.row.name, tuple(values[cell.row.name])) for cell in here]
        return
    drawings: dict[tuple[str, ...], list[Trend]] = {}
    for line in dict.fromkeys(cell.row.line for cell in here):
        mine = [cell.row for cell in here if cell.row.line == line]
        places = tuple(row.at or row.name for row in mine)
        for k, head in enumerate(exhibit.shown):
            name = ", ".join(
                word for word in (line, head if len(exhibit.shown) > 1 else "") if word
            )
            points = tuple(values[row.name][k] for row in mine)
            drawings.setdefault(places, []).append(Trend(name or head, points))
    for places, rows in drawings.items():
        yield list(places), rows


def _stacked(panels: Sequence[str], height: int) -> str:
    """Put whole drawings one below the other."""
    if not panels:
        return ""
    body = [tag("svg", {"y": number * height}, panel) for number, panel in enumerate(panels)]
    widths = (re.search(r'width="(\d+)"', panel) for panel in panels)
    widest = max([720, *(int(found[1]) for found in widths if found)])
    return drawing_file(widest, height * len(panels), body, role="img") + "\n"


# ------------------------------------------------------------------------------------- curves


def _curves(exhibit: Exhibit, protocol: str, results: Results) -> str:
    panels, most = [], 0
    for label, here in _by_label(exhibit):
        rows = []
        for cell in here:
            record = _record(cell, protocol, results)
            points = record.find(cell.read, exhibit.metrics[0]) if record else None
            if points:
                rows.append(Curve(cell.row.name, [(int(n), float(v)) for n, v in points]))
        if rows and len({n for row in rows for n, _ in row.points}) > 1:
            title = f"{label}{_marked(protocol)}: {exhibit.shown[0]} by round"
            panels.append((title, curves(rows, title)))
            most = max(most, len(rows))
    return stacked_lines(panels, curves_height(most)) + "\n" if panels else ""


def _record(cell: Cell, protocol: str, results: Results) -> Record | None:
    task = cell.tasks.get(protocol)
    return results.get(task.command) if task else None


# --------------------------------------------------------------------------------------- maps


def _map(exhibit: Exhibit, protocol: str, results: Results) -> str:
    panels = []
    for cell in exhibit.cells:
        record = _record(cell, protocol, results)
        found = record.values.get("map") if record else None
        if found:
            table = cell.read.partition("/")[2]
            panels.append((cell.row.name, found[table]["places"], found))
    if not panels:
        return ""
    parts = [tag("style", {}, MAP_STYLE)]
    step = MAP_SIZE + 32
    for number, (name, places, found) in enumerate(panels):
        x, y = 16 + step * (number % 2), 56 + (step + 16) * (number // 2)
        parts += [
            text("title", str(x), y - 8, name, "start"),
            tag("rect", {"class": "frame", **_box(x, y)}),
            tag("svg", {**_box(x, y), "viewBox": "-20 -20 1040 1040"}, _dots(places, found)),
        ]
    share = "items liked in training, blue; held out, orange; all others, grey"
    title = f"{exhibit.title}{_marked(protocol)}"
    parts += [text("title", "16", 20, title, "start"), tag("title", {}, escape(share))]
    height = 56 + (step + 16) * -(-len(panels) // 2)
    parts.append(text("tick", "16", height - 6, share, "start"))
    return drawing_file(2 * step, height, parts, role="img") + "\n"


def _box(x: int, y: int) -> dict[str, int]:
    return {"x": x, "y": y, "width": MAP_SIZE, "height": MAP_SIZE}


def _dots(places: Sequence[Sequence[int]], found: Mapping[str, Sequence[int]]) -> str:
    """Draw every item as a dot; a path of points with round ends is short."""
    liked, held = set(found["liked"]), set(found["held_out"])
    kinds = {
        "other": [k for k in range(len(places)) if k not in liked | held],
        "liked": sorted(liked),
        "held": sorted(held),
    }
    return "".join(
        tag(
            "path",
            {
                "class": kind,
                "vector-effect": "non-scaling-stroke",
                "d": "".join(f"M{places[k][0]} {places[k][1]}h0" for k in items),
            },
        )
        for kind, items in kinds.items()
    )
