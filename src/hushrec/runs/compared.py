"""The result of a comparison: its rows, and the table of a paper in LaTeX, Markdown or CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, overload

from hushrec.errors import plain
from hushrec.evaluation.metrics import metric_name
from hushrec.io.codec import Rows
from hushrec.runs.progress import NO_BREAK, human_size

Test = Literal["randomisation", "wilcoxon"]
SIGNIFICANT = 0.05
MEANS_ALONE = (
    "means alone, without paired tests: the ranks of a federation's users stay on its nodes"
)


@dataclass(frozen=True)
class ComparedRun:
    """One run's value of one metric, and its difference from another run."""

    run: str
    data: str
    method: str
    protocol: str
    marks: tuple[str, ...]
    """Why the figure is not what it seems: the published protocol, few evaluated users."""
    seeds: int
    metric: str
    mean: float
    low: float | None
    """95 % interval over users; None where the ranks of single users are not known."""
    high: float | None
    seed_sd: float | None
    """Standard deviation of the mean over seeds; None for a single seed."""
    selected_round: float
    """The round whose model is compared, a mean over seeds as are the next five."""
    up_bytes: float
    """Uploaded up to that round, by all clients together."""
    down_bytes: float
    client_up_bytes: float
    """Uploaded up to that round by one client: the mean over the clients that train."""
    client_down_bytes: float
    serving_bytes: float | None
    """Held by one client to recommend; None where it is not known."""
    against: str | None = None
    """The run that the difference is from; None for a baseline."""
    difference: float | None = None
    """This run minus that one."""
    difference_low: float | None = None
    difference_high: float | None = None
    p_value: float | None = None
    """Of the paired test, Holm-corrected over all tests of the comparison."""

    @property
    def leaks(self) -> bool:
        """Whether the protocol gives training knowledge of the held-out items."""
        return self.protocol == "published"

    @property
    def is_significant(self) -> bool:
        """Whether the difference is significant at 5 %."""
        return self.p_value is not None and self.p_value < SIGNIFICANT


@dataclass(frozen=True, eq=False)
class Comparison(Sequence[ComparedRun]):
    """What `compare` returns: a row for each run, metric and run that it is tested against.

    `to_latex` and `to_markdown` write the table of a paper: a line for each method, and for each
    data set its metrics, with the best in bold, marks of significance, and a caption that names
    the test, its correction and the protocol. `to_csv` and `to_pandas` have every row.
    """

    rows: Sequence[ComparedRun]
    test: Test
    candidates: str
    all_pairs: bool

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> ComparedRun: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ComparedRun]: ...
    def __getitem__(self, index: int | slice) -> ComparedRun | Sequence[ComparedRun]:
        return self.rows[index]

    @property
    def data(self) -> list[str]:
        """Names of the data sets, in the order of the runs."""
        return list(dict.fromkeys(row.data for row in self.rows))

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics."""
        return list(dict.fromkeys(row.metric for row in self.rows))

    def to_rows(self) -> Rows:
        """Return a table with a column for each field."""
        names = [field.name for field in fields(ComparedRun)]
        entries = [{**vars(row), "marks": "; ".join(row.marks)} for row in self.rows]
        return Rows({name: [entry[name] for entry in entries] for name in names})

    def to_pandas(self) -> Any:
        """Return every row as a pandas data frame."""
        return self.to_rows().to_pandas()

    def to_csv(self) -> str:
        """Return every row as text with commas; figures that are not known are empty."""
        file, rows = io.StringIO(), self.to_rows()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(rows.columns)
        writer.writerows(row.values() for row in rows)
        return file.getvalue()

    def to_markdown(self, *, costs: bool = True) -> str:
        """Return the table of a paper in Markdown, with its caption and footnotes below."""
        table = _PaperTable(self, costs)
        several = len(self.data) > 1
        heads = [
            f"{f'{_markdown(data)} ' if several else ''}{_markdown(name)}{table.mark_of(data)}"
            for data in self.data
            for name in table.columns
        ]
        lines = [["Method", *heads], ["---", *("---:" for _ in heads)]]
        for label in table.labels:
            cells = [_markdown_cell(cell) for cell in table.cells(label)]
            lines.append([_markdown(table.named(label)), *cells])
        text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        return "\n\n".join([text + f"\n{_markdown(table.caption)}", *map(_markdown, table.notes)])

    def to_latex(self, *, costs: bool = True) -> str:
        """Return the table of a paper in LaTeX; its document loads the package booktabs."""
        table, width = _PaperTable(self, costs), 0
        over, rules = [], []
        for data in self.data:
            first, width = width + 2, width + len(table.columns)
            head = f"{_latex(data)}{_latex_mark(table.mark_of(data))}"
            over.append(f"\\multicolumn{{{len(table.columns)}}}{{c}}{{{head}}}")
            rules.append(f"\\cmidrule(lr){{{first}-{width + 1}}}")
        heads = [_latex(name) for _ in self.data for name in table.columns]
        lines = [["", *over], " ".join(rules), ["Method", *heads], "\\midrule"]
        for label in table.labels:
            cells = [_latex_cell(cell) for cell in table.cells(label)]
            lines.append([_latex(table.named(label)), *cells])
        body = "\n".join(
            line if isinstance(line, str) else f"{' & '.join(line)} \\\\" for line in lines
        )
        notes = "".join(f"\\par\\footnotesize {_latex(note)}\n" for note in table.notes)
        return (
            "% \\usepackage{booktabs}\n\\begin{table}\n\\centering\n"
            f"\\caption{{{_latex(table.caption)}}}\n"
            f"\\begin{{tabular}}{{l{'r' * width}}}\n\\toprule\n{body}\n\\bottomrule\n"
            f"\\end{{tabular}}\n{notes}\\end{{table}}\n"
        )

    def _repr_markdown_(self) -> str:
        return self.to_markdown()

    def __repr__(self) -> str:
        return self.to_markdown()


COSTS: Mapping[str, Callable[[ComparedRun], float | None]] = {
    "Up": lambda row: row.client_up_bytes,
    "Down": lambda row: row.client_down_bytes,
    "Serve": lambda row: row.serving_bytes,
}
"""Columns of a paper's table with the bytes of one client."""
SYMBOLS = "†‡§¶"


@dataclass(frozen=True)
class _Cell:
    """A figure of a paper's table."""

    text: str = "–"
    best: bool = False
    raised: str = ""
    """Marks behind the figure: significance, and footnotes of one run."""


class _PaperTable:
    """The cells of a paper's table, before they are written."""

    def __init__(self, compared: Comparison, costs: bool) -> None:
        self.compared, self.rows, self.costs = compared, compared.rows, costs
        self.label_of = _labels(self.rows)
        self.labels = list(dict.fromkeys(self.label_of.values()))
        self.columns = [*map(metric_name, compared.metrics), *(COSTS if costs else ())]
        self.marks = list(dict.fromkeys(mark for row in self.rows for mark in row.marks))

    def rows_of(self, data: str, metric: str) -> list[ComparedRun]:
        """Return the rows of a metric on a data set, a run after the other."""
        return [row for row in self.rows if (row.data, row.metric) == (data, metric)]

    def symbol(self, mark: str) -> str:
        """Return the symbol of a footnote: ††, where those of one sign are used up."""
        number = self.marks.index(mark)
        return SYMBOLS[number % len(SYMBOLS)] * (1 + number // len(SYMBOLS))

    def common_marks(self, data: str) -> list[str]:
        """Return the marks that all runs on a data set have."""
        rows = [row for row in self.rows if row.data == data]
        return [mark for mark in self.marks if all(mark in row.marks for row in rows)]

    def mark_of(self, data: str) -> str:
        """Return the symbols behind the name of a data set."""
        return "".join(map(self.symbol, self.common_marks(data)))

    def letter(self, label: str) -> str:
        """Return the letter that a line has where all pairs are tested."""
        number = self.labels.index(label)
        return chr(ord("a") + number) if len(self.labels) <= 26 else str(number + 1)

    def named(self, label: str) -> str:
        """Return the name of a line."""
        return f"{label} ({self.letter(label)})" if self.compared.all_pairs else label

    def cells(self, label: str) -> list[_Cell]:
        """Return the figures of a line: metrics, then costs, data set by data set."""
        found = []
        for data in self.compared.data:
            own: ComparedRun | None = None
            for metric in self.compared.metrics:
                rows = self.rows_of(data, metric)
                own = next((row for row in rows if self.label_of[row.run] == label), None)
                found.append(_Cell() if own is None else self._figure(own, rows))
            for cost in COSTS.values() if self.costs else ():
                size = None if own is None else cost(own)
                found.append(_Cell() if size is None else _Cell(human_size(size)))
        return found

    def _figure(self, own: ComparedRun, rows: Sequence[ComparedRun]) -> _Cell:
        spread = "" if own.seed_sd is None else f" ± {own.seed_sd:.4f}"
        # A figure that leaks is not the best of honest ones; those that print alike are all best.
        rivals = [row for row in rows if row.leaks == all(each.leaks for each in rows)]
        best = own in rivals and f"{own.mean:.4f}" == f"{max(row.mean for row in rivals):.4f}"
        best = best and len({row.run for row in rows}) > 1
        common = self.common_marks(own.data)
        raised = "".join(self.symbol(mark) for mark in own.marks if mark not in common)
        return _Cell(f"{own.mean:.4f}{spread}", best, self._significance(own, rows) + raised)

    def _significance(self, own: ComparedRun, rows: Sequence[ComparedRun]) -> str:
        found = [row for row in rows if row.is_significant and own.run in (row.run, row.against)]
        if not self.compared.all_pairs:
            return "*" if any(row.run == own.run for row in found) else ""
        below = [
            row.against if row.run == own.run else row.run
            for row in found
            if ((row.difference or 0) > 0) == (row.run == own.run)
        ]
        return "".join(sorted(self.letter(self.label_of[run]) for run in below if run))

    @property
    def caption(self) -> str:
        """What the figures are, how they were tested, and under which protocol."""
        rows, compared = self.rows, self.compared
        full = compared.candidates == "full"
        ranked = "all items ranked" if full else f"candidates {compared.candidates}"
        metrics = " and ".join(map(metric_name, compared.metrics))
        seeds = any(row.seed_sd is not None for row in rows)
        spread = " and seeds ± standard deviation over seeds" if seeds else ""
        on = " and ".join(compared.data)
        said = [f"Test {metrics} on {on}, {ranked}: means over users{spread}."]
        leaking = {row.leaks for row in rows}
        said.append("Best in bold" + (", without runs that leak." if len(leaking) > 1 else "."))
        tests = sum(row.p_value is not None for row in rows)
        if tests:
            name = {"randomisation": "paired randomisation", "wilcoxon": "Wilcoxon signed-rank"}
            said.append(
                f"{self._meaning()} (p < {SIGNIFICANT}; two-sided {name[compared.test]} test over "
                f"users, Holm-corrected over {tests} tests)."
            )
        if any(row.difference is not None and row.p_value is None for row in rows):
            said.append(f"{MEANS_ALONE[0].upper()}{MEANS_ALONE[1:]}.")
        if leaking == {False}:
            said.append("Honest protocol: training does not see held-out items.")
        else:
            where = " where marked" if len(leaking) > 1 else ""
            said.append(f"Published protocol{where}, which leaks the held-out items.")
        if self.costs:
            said.append(
                "Up, Down: bytes of one client until the selected round; Serve: bytes that it "
                "holds to recommend."
            )
        return " ".join(said)

    def _meaning(self) -> str:
        """Say what the marks of significance mean."""
        if self.compared.all_pairs:
            return "Letters name the lines that a figure is significantly above"
        baselines = {
            row.data: self.label_of[row.against] for row in self.rows if row.against is not None
        }
        names = list(dict.fromkeys(baselines.values()))
        if len(names) > 1:
            names = [f"{name} on {data}" for data, name in baselines.items()]
        return f"* significantly different from {' and '.join(names)}"

    @property
    def notes(self) -> list[str]:
        """The footnotes: marks of runs, each behind its symbol."""
        return [f"{self.symbol(mark)} {mark}." for mark in self.marks]


def _labels(rows: Sequence[ComparedRun]) -> dict[str, str]:
    """Return the name of each run's line: its method, and what tells it from runs of the same.

    Lines of different data sets with one name are one line.
    """
    runs = {row.run: row for row in rows}
    methods = {run: row.method for run, row in runs.items()}
    protocols = {run: row.method + " (leaks)" * row.leaks for run, row in runs.items()}
    folders = {run: f"{row.method} ({Path(run).name})" for run, row in runs.items()}
    labels = {}
    for run, row in runs.items():
        beside = [other for other, its in runs.items() if its.data == row.data and other != run]
        found = (
            names[run]
            for names in (methods, protocols, folders)
            if names[run] not in {names[other] for other in beside}
        )
        labels[run] = next(found, run)
    return labels


def _markdown(text: str) -> str:
    return re.sub(r"([\\|*_<>`\[\]])", r"\\\1", text)


def _markdown_cell(cell: _Cell) -> str:
    text = f"**{cell.text}**" if cell.best else cell.text
    return f"{text}<sup>{_markdown(cell.raised)}</sup>" if cell.raised else text


LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    **{sign: f"${sign}$" for sign in "<>|*"},
    **{"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}"},
    **{"±": "$\\pm$", "–": "--", "—": "---", "−": "$-$", "ε": "$\\varepsilon$", "δ": "$\\delta$"},
    **{"†": "$\\dagger$", "‡": "$\\ddagger$", "§": "\\S{}", "¶": "\\P{}"},
    **{"’": "'", "…": "\\dots{}", NO_BREAK: "~"},
}
"""What LaTeX needs in place of characters."""


def _latex(text: str) -> str:
    return "".join(LATEX.get(sign, sign) for sign in plain(text))


def _latex_mark(raised: str) -> str:
    return f"\\textsuperscript{{{_latex(raised)}}}" if raised else ""


def _latex_cell(cell: _Cell) -> str:
    text = _latex(cell.text)
    return (f"\\textbf{{{text}}}" if cell.best else text) + _latex_mark(cell.raised)
