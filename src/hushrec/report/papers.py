"""The page of all papers: every table and figure, as printed and as measured here.

It is written from the plan and the results alone, so the page that is committed can be written
again and compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from hushrec.disk import write_text, writing
from hushrec.report.exhibits import pictures
from hushrec.report.units import signed
from hushrec.reproduce.plan import EPSILONS, Cell, Exhibit, Paper
from hushrec.reproduce.results import Results
from hushrec.reproduce.states import Figure, counted, figures, state_of

PAGE = Path("docs/papers.md")
COLUMNS = {"published": "published protocol", "honest": "honest"}
OPENING = """\
# The papers, table by table

<!-- Written by `hushrec reproduce page`: change experiments, not this file. -->

Every table and figure of the five papers, in up to three columns: what the paper prints; what
comes out here under its own protocol, which for PFedRec, FedRAP and FedRKG leaks the held-out item;
and what is left under the honest one, with the same settings. `hushrec reproduce NAME` prints one
of them and runs what is not run yet; `hushrec reproduce list` shows them all. A file under
[experiments](../experiments) declares each; results lie in its folder `results`, filed under the
command that gave them, with seeds and version. The folded list under a table has these commands.

*not run* waits for machine time, *not built* for a method or data set that hushrec does not have;
*unobtainable* cannot be had by anybody. ± is the spread over seeds.
"""


def write_page(papers: Sequence[Paper], results: Results, experiments: Path) -> Path:
    """Write the page and the pictures of all exhibits; return where the page is."""
    page = experiments.parent / PAGE
    for paper in papers:
        for exhibit in paper.exhibits:
            for name, drawing in pictures(exhibit, results).items():
                write_text(experiments / paper.key / name, drawing)
    with writing(page.parent):
        page.parent.mkdir(parents=True, exist_ok=True)
    write_text(page, page_of(papers, results))
    return page


def page_of(papers: Sequence[Paper], results: Results) -> str:
    """Return the page."""
    lines = [OPENING, "| | | state | cells |", "|---|---|---|---:|"]
    for paper in papers:
        for exhibit in paper.exhibits:
            state = state_of(exhibit, results)
            link = f"[{_called(exhibit.name)}](#{_anchor(exhibit)})"
            count = f"{state.done} of {state.cells}"
            lines.append(f"| {paper.system} | {link} | {state.word} | {count} |")
        for name, what in paper.nothing_to_run.items():
            lines.append(f"| {paper.system} | {_called(name)} | {what} | – |")
    lines.append("")
    for paper in papers:
        lines += [f"## {paper.system}", "", paper.cited + ".", "", paper.note.strip(), ""]
        for exhibit in paper.exhibits:
            lines += [f'<a id="{_anchor(exhibit)}"></a>', *exhibit_section(exhibit, results)]
            lines += [*_drawings(exhibit, results), *_commands(exhibit, results)]
    return "\n".join(lines).replace("\n\n\n", "\n\n")


def _called(name: str) -> str:
    """Write pfedrec/table-d1 as "table D1"."""
    kind, _, number = name.rpartition("/")[2].partition("-")
    return f"{kind} {number.upper()}"


def _anchor(exhibit: Exhibit) -> str:
    return exhibit.name.replace("/", "-")


def exhibit_section(exhibit: Exhibit, results: Results, data: Collection[str] = ()) -> list[str]:
    """Return the lines of a table or figure, in full or on some data sets."""
    state = state_of(exhibit, results)
    lines = [
        f"### {_called(exhibit.name).capitalize()}: {exhibit.title}",
        "",
        f"`hushrec reproduce {exhibit.name}`: {state.word}, {state.done} of {state.cells} cells."
        + (f" {exhibit.note.strip()}" if exhibit.note else ""),
        "",
    ]
    if exhibit.kind == "epsilon":
        return [*lines, *_epsilons(exhibit, results)]
    for label in exhibit.data or [""]:
        here = [cell for cell in exhibit.cells if cell.label == label]
        if label and all(cell.missing for cell in here):
            word = "unobtainable" if here[0].unobtainable else "not built"
            lines += [f"**{label}**: {word}; {here[0].missing}.", ""]
        elif not data or here[0].data in data:
            lines += _table(exhibit, label, here, results)
    return lines


def _drawings(exhibit: Exhibit, results: Results) -> Iterator[str]:
    for name in pictures(exhibit, results):
        place = f"../experiments/{exhibit.name.partition('/')[0]}/{name}"
        said = "honest" if "-honest" in name else "published protocol"
        yield from [f"![{exhibit.title}, {said}]({place})", ""]


def _table(exhibit: Exhibit, label: str, here: Sequence[Cell], results: Results) -> list[str]:
    printed = any(cell.paper for cell in here)
    measured: Sequence[str] = exhibit.protocols or ("here",)
    columns = [*(["paper"] if printed else []), *measured]
    words = [COLUMNS.get(column, column) for column in columns]
    if exhibit.protocols == ["honest"]:
        words[-1] = "here"
    heads = [f"{head}: {words[0]}" for head in exhibit.shown]
    row = [cell for head in heads for cell in (head, *words[1:])]
    lines = [f"**{label}** (`{here[0].data}`)", ""] if label else []
    lines += [f"| | {' | '.join(row)} |", f"|---|{'---:|' * len(row)}"]
    open_ = False
    for cell in here:
        by_column = {name: _column(exhibit, cell, name, results) for name in columns}
        open_ |= any("not run" in column for column in by_column.values())
        figures_ = [by_column[name][k] for k in range(len(exhibit.metrics)) for name in columns]
        lines.append(f"| {cell.row.name} | {' | '.join(figures_)} |")
    lines += _tests(exhibit, here, results)
    reasons = {cell.missing: None for cell in here if cell.missing}
    if reasons:
        said = "; ".join(reasons)
        lines += ["", f"{said[0].upper()}{said[1:]}."]
    if open_:
        which = f" --data {here[0].data}" if label else ""
        lines += ["", f"Not run yet: `hushrec reproduce {exhibit.name}{which}`."]
    return [*lines, ""]


def _tests(exhibit: Exhibit, here: Sequence[Cell], results: Results) -> list[str]:
    """Return what is known of differences between rows, a line each."""
    metric, lines = exhibit.tested or exhibit.metrics[-1], []
    for cell in here:
        for name, task, other in exhibit.pairs(cell):
            record = results.get(task.command)
            found = record.against.get(other.command, {}).get(metric) if record else None
            if found:
                difference, low, high, p = found
                said = "< 0.001" if p < 0.001 else f"= {p:.3f}"
                mark = f" ({COLUMNS[task.protocol]})" if len(exhibit.protocols) > 1 else ""
                lines.append(
                    f"- {cell.row.name} − {name}{mark}: {signed(difference)} "
                    f"[{signed(low)}, {signed(high)}], p {said}"
                )
    if not lines:
        return []
    return [
        "",
        f"{metric.upper()}, one minus the other, user by user, with its 95 % interval:",
        "",
        *lines,
    ]


def _column(exhibit: Exhibit, cell: Cell, name: str, results: Results) -> list[str]:
    """Return a column's entries, a text for each metric."""
    if name == "paper":
        printed = cell.paper or (None,) * len(exhibit.metrics)
        return ["–" if value is None else number(value, exhibit) for value in printed]
    if exhibit.kind == "counts":
        return [entry(figure, exhibit) for figure in counted(cell, exhibit.metrics)]
    return [entry(figure, exhibit) for figure in figures(exhibit, cell, name, results)]


def entry(figure: Figure, exhibit: Exhibit) -> str:
    """Write a figure, or why there is none."""
    if figure.value is None:
        return figure.state
    spread = f" ± {number(figure.sd, exhibit)}" if figure.sd is not None else ""
    return number(figure.value, exhibit) + spread


def number(value: float, exhibit: Exhibit) -> str:
    """Write a number with the exhibit's digits; sizes are whole."""
    if exhibit.kind == "counts":
        return f"{value:,.0f}" if value == int(value) else f"{value:.2f}"
    return f"{value:.{exhibit.digits}f}"


def _commands(exhibit: Exhibit, results: Results) -> Iterator[str]:
    """Return the commands behind an exhibit, folded."""
    tasks = {task.command: task for cell in exhibit.cells for task in cell.tasks.values()}
    lines = []
    for command in tasks:
        record = results.get(command)
        if record is not None:
            seeds = f"{len(record.seeds)} seeds" if len(record.seeds) > 1 else "1 seed"
            spent = "" if record.epsilon is None else f", epsilon {record.epsilon:.3g}"
            lines.append(f"- `{command}` ({seeds}, {record.version}{spent})")
    if lines:
        yield from ["<details><summary>Commands</summary>", "", *lines, "", "</details>", ""]


def _epsilons(exhibit: Exhibit, results: Results) -> list[str]:
    """Return one of DP-PrivRec's tables of epsilon: as printed, as it was computed, and right."""
    record = results.get(EPSILONS)
    if record is None:
        return [f"Not run yet: `hushrec reproduce {exhibit.name}`.", ""]
    columns = ["printed", "1000 M compositions", "1000", "1000, multiplier 1/2"]
    heads = [f"{head}: {columns[0]}" for head in exhibit.shown]
    row = [cell for head in heads for cell in (head, *columns[1:])]
    lines = [f"| q | {' | '.join(row)} |", f"|---|{'---:|' * len(row)}"]
    for name, by_delta in record.values[exhibit.read].items():
        values = [value for delta in exhibit.metrics for value in by_delta[delta]]
        lines.append(f"| {name} | {' | '.join(number(value, exhibit) for value in values)} |")
    return [*lines, "", f"`{EPSILONS}` prints the same ({record.version}).", ""]
