"""The page of all papers, as printed and as measured here, and those of our own studies.

They are written from the plan and the results alone, so what is committed can be written again and
compared.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from experiments.exhibits import pictures
from experiments.plan import EPSILONS, Cell, Exhibit, Paper
from experiments.results import SIGNIFICANT, Difference, Results
from experiments.states import Figure, counted, differences, figures, state_of
from hushrec.io.files import write_text, writing
from hushrec.reporting.tables import signed

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
CONTRADICTS = (
    "† No model has these figures together: with one held-out item, (N@10 − N@5) / (R@10 − R@5) "
    "lies between 1/log2(11) and 1/log2(7)."
)
STUDY_OPENING = """\
# {title}

<!-- Written by `hushrec reproduce page`: change the TOML files beside it, not this file. -->

{note}

*not run* waits for machine time, *diverged* has no figures. ± is the spread over seeds.
"""


def write_pages(papers: Sequence[Paper], results: Results, experiments: Path) -> list[Path]:
    """Write all pages and the pictures of all exhibits; return where the pages are."""
    for paper in papers:
        for exhibit in paper.exhibits:
            for name, drawing in pictures(exhibit, results).items():
                write_text(experiments / paper.key / name, drawing)
    common = [paper for paper in papers if paper.page is None]
    pages = {experiments.parent / PAGE: papers_page(common, results)} if common else {}
    for paper in papers:
        if paper.page is not None:
            pages[experiments / paper.key / paper.page] = study_page(paper, results)
    for page, text in pages.items():
        with writing(page.parent):
            page.parent.mkdir(parents=True, exist_ok=True)
        write_text(page, text)
    return list(pages)


def study_page(study: Paper, results: Results) -> str:
    """Return the page of a study of our own."""
    lines = [STUDY_OPENING.format(title=study.system, note=study.note.strip())]
    for exhibit in study.exhibits:
        lines += exhibit_section(exhibit, results, level="##")
        lines += [*_drawings(exhibit, results, ""), *_commands(exhibit, results)]
    return "\n".join(lines).replace("\n\n\n", "\n\n")


def papers_page(papers: Sequence[Paper], results: Results) -> str:
    """Return the page of the papers."""
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
            place = f"../experiments/{paper.key}/"
            lines += [*_drawings(exhibit, results, place), *_commands(exhibit, results)]
    return "\n".join(lines).replace("\n\n\n", "\n\n")


def _called(name: str) -> str:
    """Write pfedrec/table-d1 as "table D1"."""
    kind, _, number = name.rpartition("/")[2].partition("-")
    return f"{kind} {number.upper()}"


def _anchor(exhibit: Exhibit) -> str:
    return exhibit.name.replace("/", "-")


def exhibit_section(
    exhibit: Exhibit, results: Results, data: Collection[str] = (), level: str = "###"
) -> list[str]:
    """Return the lines of a table or figure, in full or on some data sets."""
    state, called = state_of(exhibit, results), _called(exhibit.name)
    lines = [
        f"{level} {called[0].upper()}{called[1:]}: {exhibit.title}",
        "",
        f"`hushrec reproduce {exhibit.name}`: {state.word}, {state.done} of {state.cells} cells."
        + (f" {exhibit.note.strip()}" if exhibit.note else ""),
        "",
    ]
    if exhibit.kind == "epsilon":
        return [*lines, *_epsilons(exhibit, results)]
    if exhibit.kind == "overview":
        lines += _overview(exhibit, results, data)
    for label in exhibit.data or [""]:
        here = [cell for cell in exhibit.cells if cell.label == label]
        if label and all(cell.missing for cell in here):
            word = "unobtainable" if here[0].unobtainable else "not built"
            lines += [f"**{label}**: {word}; {here[0].missing}.", ""]
        elif not data or here[0].data in data:
            lines += _table(exhibit, label, here, results)
    return lines


def _overview(exhibit: Exhibit, results: Results, data: Collection[str]) -> list[str]:
    """Put the data sets side by side, if there are several, with a mark for what was tested."""
    labels = [label for label, name in exhibit.data.items() if not data or name in data]
    if len(labels) < 2:
        return []
    tested = exhibit.compared[-1].upper()
    lines = [
        f"{' / '.join(exhibit.shown)}. ▲ or ▼: {tested} is above or below that of the row it is "
        f"tested against (p < {SIGNIFICANT}); =: no difference can be told; no mark: not tested.",
        "",
    ]
    for protocol in exhibit.protocols:
        lines += [f"| {COLUMNS[protocol]} | against | {' | '.join(labels)} |"]
        lines += [f"|---|---|{'---|' * len(labels)}"]
        for row in exhibit.row:
            here = {cell.label: cell for cell in exhibit.cells if cell.row is row}
            entries = [
                _short(exhibit, here[label], protocol, results) if label in here else ""
                for label in labels
            ]
            lines.append(f"| {row.name} | {', '.join(row.against)} | {' | '.join(entries)} |")
        lines.append("")
    return lines


def _short(exhibit: Exhibit, cell: Cell, protocol: str, results: Results) -> str:
    """Write all metrics of a cell in one entry, a digit shorter, with a mark for each rival."""
    found = figures(exhibit, cell, protocol, results)
    values = [figure.value for figure in found if figure.value is not None]
    if len(values) < len(found):
        return next(figure.state for figure in found if figure.value is None)
    tests = differences(exhibit, cell, results)
    marks = [_mark(each[-1]) for _, task, each in tests if task.protocol == protocol]
    return " ".join([" / ".join(f"{v:.{exhibit.digits - 1}f}" for v in values), *marks])


def _mark(difference: Difference) -> str:
    if not difference.significant:
        return "="
    return "▲" if difference.value > 0 else "▼"


def _drawings(exhibit: Exhibit, results: Results, place: str) -> Iterator[str]:
    for name in pictures(exhibit, results):
        said = "honest" if "-honest" in name else "published protocol"
        yield from [f"![{exhibit.title}, {said}]({place}{name})", ""]


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
    if any(contradicts_itself(exhibit, cell) for cell in here):
        lines += ["", CONTRADICTS]
    lines += _tests(exhibit, here, results)
    reasons = {cell.missing: None for cell in here if cell.missing}
    if reasons:
        said = "; ".join(reasons)
        lines += ["", f"{said[0].upper()}{said[1:]}."]
    if open_:
        which = f" --data {here[0].data}" if label else ""
        lines += ["", f"Not run yet: `hushrec reproduce {exhibit.name}{which}`."]
    return [*lines, ""]


def contradicts_itself(exhibit: Exhibit, cell: Cell) -> bool:
    """Say whether no model can have the NDCG and hit rates that a paper prints of a cell.

    With one held-out item a hit on places 6 to 10 adds between 1/log2(11) and 1/log2(7) to NDCG@10,
    and nothing else does. Printed figures are exact to half of their last digit; the bound holds of
    means over seeds as well.
    """
    printed = dict(zip(exhibit.metrics, cell.paper, strict=False))
    found = [printed.get(name) for name in ("ndcg@5", "hr@5", "ndcg@10", "hr@10")]
    if not exhibit.one_held_out or None in found:
        return False
    ndcg5, hr5, ndcg10, hr10 = (value for value in found if value is not None)
    gained, hits, rounding = ndcg10 - ndcg5, hr10 - hr5, 10.0**-exhibit.digits
    least, most = 1 / math.log2(11), 1 / math.log2(7)
    too_little = gained + rounding < least * (hits - rounding)
    return too_little or gained - rounding > most * (hits + rounding)


def _tests(exhibit: Exhibit, here: Sequence[Cell], results: Results) -> list[str]:
    """Return what is known of differences between rows, a line each."""
    lines = []
    for cell in here:
        for rival, task, found in differences(exhibit, cell, results):
            mark = f" ({COLUMNS[task.protocol]})" if len(exhibit.protocols) > 1 else ""
            said = "; ".join(map(_difference, found))
            lines.append(f"- {cell.row.name} − {rival}{mark}: {said}")
    if not lines:
        return []
    metrics = " and ".join(metric.upper() for metric in exhibit.compared)
    corrected = ", p Holm-corrected over the metrics" if len(exhibit.compared) > 1 else ""
    caption = f"{metrics}, one minus the other, user by user, with its 95 % interval{corrected}:"
    return ["", caption, "", *lines]


def _difference(found: Difference) -> str:
    p = "< 0.001" if found.p < 0.001 else f"= {found.p:.3f}"
    return f"{signed(found.value)} [{signed(found.low)}, {signed(found.high)}], p {p}"


def _column(exhibit: Exhibit, cell: Cell, name: str, results: Results) -> list[str]:
    """Return a column's entries, a text for each metric."""
    if name == "paper":
        printed = cell.paper or (None,) * len(exhibit.metrics)
        mark = " †" if contradicts_itself(exhibit, cell) else ""
        return ["–" if value is None else number(value, exhibit) + mark for value in printed]
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
