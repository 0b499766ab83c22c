"""Run the grid of the personal-table family and write its results.

    python experiments/personal-tables/run.py                 # everything that is not done yet
    python experiments/personal-tables/run.py --list          # what there is, what is done
    python experiments/personal-tables/run.py --only pfedrec-tuned fedmf-tuned --data ml-100k

``grid.toml`` lists the cells; one with several data sets stands for a cell on each, with what its
``on`` says of that data set. A cell is one `hushrec train` command with a folder of its own; one
with a finished summary is skipped, one that was interrupted goes on. Afterwards ``results.json``,
``results.md`` and ``own-tables.svg`` are written from the folders that are done and, for cells
whose runs are elsewhere, from the ``results.json`` before: every figure with the command that gives
it, and for a cell with ``against`` the paired test between the two.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from hushrec.compare import compare_runs
from hushrec.config import preset_names
from hushrec.errors import HushrecError
from hushrec.methods.base import method_names
from hushrec.report.plots import Dot
from hushrec.report.standalone import standalone_forest
from hushrec.report.units import human_size, signed

HERE = Path(__file__).resolve().parent
METRICS = ("hr@10", "ndcg@10")
SIGNIFICANT = 0.05
REFUSED, DIVERGED = 2, 3
"""What `hushrec` exits with when it cannot go on, with the reason on standard error."""
MARK = "diverged"
"""The file that remembers, in the folder of a run, that it has no result and never will."""


class Cell(BaseModel):
    """One line of the grid."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[a-z0-9.-]+$")]
    data: str
    method: str
    preset: str | None = None
    protocol: Literal["honest", "published"] = "honest"
    rounds: int | None = None
    seeds: Annotated[int, Field(ge=1)] = 1
    set: dict[str, bool | int | float | str] = Field(default_factory=dict)
    against: str | None = None
    """The cell to test against: its global-only variant, where it has one."""

    @property
    def folder(self) -> str:
        """Where it goes, below the folder of all runs."""
        return f"{self.data.replace('/', '-')}/{self.protocol}/{self.name}"

    def arguments(self) -> list[str]:
        """Return what `hushrec` is called with, but for the folder and the threads."""
        words = ["train", "--data", self.data, "--method", self.method]
        words += ["--preset", self.preset] if self.preset else []
        words += ["--protocol", self.protocol]
        words += ["--rounds", str(self.rounds)] if self.rounds else []
        words += ["--seeds", str(self.seeds)] if self.seeds > 1 else []
        for key, value in self.set.items():
            words += [
                "--set",
                f"{key}={json.dumps(value) if not isinstance(value, str) else value}",
            ]
        return words

    @property
    def command(self) -> str:
        """Return the command to type."""
        return shlex.join(["hushrec", *self.arguments()])


def read_grid(file: Path) -> tuple[str, list[Cell]]:
    """Read title and cells; names are unique for a data set and protocol, ``against`` exists."""
    try:
        grid = tomllib.loads(file.read_text())
        title, cells = str(grid["title"]), []
        for cell in grid["cell"]:
            cells += _on_each(cell)
    except (OSError, KeyError, ValueError) as error:  # of TOML, of a cell, or our own
        raise SystemExit(f"{file}: {error}") from None
    known = [cell.folder for cell in cells]
    twice = sorted({folder for folder in known if known.count(folder) > 1})
    if twice:
        raise SystemExit(f"{file}: two cells are called {twice[0]}")
    for cell in cells:
        if cell.against and baseline(cell) not in known:
            raise SystemExit(f"{file}: {cell.folder} is against '{cell.against}', which is no cell")
    return title, cells


def _on_each(cell: dict[str, Any]) -> list[Cell]:
    """Return the cell of each data set: the common words, then those of its ``on``."""
    data = cell["data"] if isinstance(cell["data"], list) else [cell["data"]]
    on = cell.get("on", {})
    common = {key: value for key, value in cell.items() if key != "on"}
    for name in on.keys() - set(data):
        raise ValueError(f"{cell['name']}: on.{name} is none of its data sets")
    found = []
    for name in data:
        own = on.get(name, {})
        settings = {**common.get("set", {}), **own.get("set", {})}
        found.append(Cell.model_validate({**common, **own, "data": name, "set": settings}))
    return found


def baseline(cell: Cell) -> str:
    """Return the folder of the cell it is tested against."""
    return f"{cell.data.replace('/', '-')}/{cell.protocol}/{cell.against}"


def run_cell(cell: Cell, runs: Path, threads: int | None) -> None:
    """Train a cell that is not done: from the start, or from where it stopped."""
    out = runs / cell.folder
    started = (out / "config.toml").exists()
    words = ["train", "--resume"] if started else cell.arguments()
    words += ["--out", str(out)] + (["--threads", str(threads)] if threads else [])
    subprocess.run([sys.executable, "-m", "hushrec", *words], check=True)


def is_done(cell: Cell, runs: Path) -> bool:
    """Say whether a cell has its result."""
    return (runs / cell.folder / "summary.json").exists()


def is_diverged(cell: Cell, runs: Path) -> bool:
    """Say whether a cell was run and can have none."""
    return (runs / cell.folder / MARK).exists()


def result(cell: Cell, runs: Path) -> dict[str, Any]:
    """Return what results.json says of a finished cell."""
    summary = json.loads((runs / cell.folder / "summary.json").read_text())
    found = {
        "name": cell.name,
        "command": cell.command,
        "data": cell.data,
        "method": cell.method,
        "protocol": cell.protocol,
        "split": cell.set.get("split.kind", "leave-one-out"),
        "protocol_mark": summary["protocol_mark"],
        "seeds": cell.seeds,
        "selected_round": summary["selected_round"],
        "valid": {c: {m: values[m] for m in METRICS} for c, values in summary["valid"].items()},
        "test": {c: {m: values[m] for m in METRICS} for c, values in summary["test"].items()},
        "test_sd": {
            c: {m: values[m] for m in METRICS} for c, values in summary.get("test_sd", {}).items()
        },
        "model": summary["model"],
        "up_bytes": summary["communication"]["up_bytes"],
        "seconds_per_round": summary["time"]["per_round_s"],
        "against": None,
    }
    if cell.against and (runs / baseline(cell) / "summary.json").exists():
        rows = compare_runs([runs / baseline(cell), runs / cell.folder], METRICS)
        tested = [row for row in rows if row.p_value is not None]
        found["against"] = {
            "name": cell.against,
            **{
                row.metric: {
                    "difference": row.difference,
                    "interval": [row.difference_low, row.difference_high],
                    "p": row.p_value,
                    "significant": row.p_value < SIGNIFICANT,
                }
                for row in tested
            },
        }
    return found


def overview(
    results: Sequence[dict[str, Any]], diverged: Collection[tuple[str, str]] = ()
) -> list[str]:
    """Put the honest cells of all data sets side by side, if there are several.

    ``diverged`` are the names and data sets of cells that can have no result.
    """
    honest = [r for r in results if (r["protocol"], r["split"]) == ("honest", "leave-one-out")]
    data = list(dict.fromkeys(r["data"] for r in honest))
    if len(data) < 2:
        return []
    lines = [
        "## All data sets, honest",
        "",
        "HR@10 / NDCG@10, full ranking, test items. ▲ or ▼: NDCG@10 is above or below that of the "
        f"cell it is tested against (p < {SIGNIFICANT}); =: no difference can be told.",
        "",
        f"| cell | against | {' | '.join(data)} |",
        f"|---|---|{'---|' * len(data)}",
    ]
    for name in dict.fromkeys(r["name"] for r in honest):
        of_data = {r["data"]: r for r in honest if r["name"] == name}
        against = next((r["against"]["name"] for r in of_data.values() if r["against"]), "")
        without = {d: "diverged" if (name, d) in diverged else "not run" for d in data}
        figures = [_short(of_data[d]) if d in of_data else without[d] for d in data]
        lines.append(f"| {name} | {against} | {' | '.join(figures)} |")
    return [*lines, ""]


def _short(r: dict[str, Any]) -> str:
    full, ndcg = r["test"]["full"], (r["against"] or {}).get("ndcg@10")
    mark = ""
    if ndcg:
        mark = " =" if not ndcg["significant"] else " ▲" if ndcg["difference"] > 0 else " ▼"
    return f"{full['hr@10']:.3f} / {full['ndcg@10']:.3f}{mark}"


def markdown(
    results: Sequence[dict[str, Any]], title: str, diverged: Collection[tuple[str, str]] = ()
) -> str:
    """Write the results as tables, one for each data set, split and protocol."""
    lines = [
        f"# {title}",
        "",
        "Written by `experiments/personal-tables/run.py`; every row has its command.",
        "",
        *overview(results, diverged),
    ]
    for table in dict.fromkeys((r["data"], r["split"], r["protocol"]) for r in results):
        data, split, protocol = table
        rows = [r for r in results if (r["data"], r["split"], r["protocol"]) == table]
        mark = f": {rows[0]['protocol_mark']}" if rows[0]["protocol_mark"] else ""
        lines += [f"## {data}, {split}, {protocol}{mark}", ""]
        lines += [
            "| cell | HR@10 | NDCG@10 | HR@10, 99 sampled | rounds | uploaded | against "
            "| NDCG@10 difference | p |"
        ]
        lines += ["|---|---|---|---|---|---|---|---|---|"]
        for r in rows:
            tested = r["against"] or {}
            ndcg = tested.get("ndcg@10")
            difference = signed(ndcg["difference"]) if ndcg else ""
            verdict = ""
            if ndcg:
                p = "< 0.001" if ndcg["p"] < 0.001 else f"{ndcg['p']:.3f}"
                verdict = f"**{p}**" if ndcg["significant"] else p
            sampled = next(c for c in r["test"] if c != "full")
            cells = [
                r["name"],
                _figure(r, "full", "hr@10"),
                _figure(r, "full", "ndcg@10"),
                _figure(r, sampled, "hr@10"),
                str(np.mean(r["selected_round"]).round(1)).removesuffix(".0"),
                human_size(r["up_bytes"]),
                tested.get("name", ""),
                difference,
                verdict,
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", "Commands:", "", *(f"- {r['name']}: `{r['command']}`" for r in rows), ""]
    lines += [
        f"Bold: p < {SIGNIFICANT} in a paired randomisation test over users, Holm-corrected over "
        "HR@10 and NDCG@10 of the pair (`hushrec compare`). ± is the spread over seeds.",
        "",
    ]
    return "\n".join(lines)


def _figure(r: dict[str, Any], candidates: str, metric: str) -> str:
    spread = r["test_sd"].get(candidates, {}).get(metric)
    return f"{r['test'][candidates][metric]:.4f}" + (f" ± {spread:.4f}" if spread else "")


def own_tables(results: Sequence[dict[str, Any]]) -> list[tuple[str, list[Dot]]]:
    """Return NDCG@10 of each method less that of its global-only variant, by method."""
    groups: dict[str, list[Dot]] = {}
    for r in results:
        tested = r["against"] or {"name": ""}
        if r["protocol"] == "honest" and tested["name"].endswith("-global"):
            ndcg = tested["ndcg@10"]
            low, high = ndcg["interval"]
            dot = Dot(r["data"], ndcg["difference"], (low, high), strong=ndcg["significant"])
            groups.setdefault(r["name"], []).append(dot)
    return list(groups.items())


def committed(file: Path) -> dict[str, dict[str, Any]]:
    """Return what was written before, by the command that gave it."""
    if not file.exists():
        return {}
    return {r["command"]: r for r in json.loads(file.read_text())}


def all_results(
    cells: Sequence[Cell], runs: Path, before: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return what is known of every cell: from its run or, where that is elsewhere, from before.

    A test from before stands if neither of its two cells has other figures now.
    """
    now: dict[str, dict[str, Any]] = {}
    for cell in cells:
        if is_done(cell, runs):
            now[cell.folder] = result(cell, runs)
        elif is_diverged(cell, runs):
            words = {"name": cell.name, "data": cell.data, "command": cell.command}
            now[cell.folder] = {**words, "diverged": True}
        elif cell.command in before:
            now[cell.folder] = before[cell.command]

    def as_before(folder: str) -> bool:
        found = now.get(folder, {})
        return found.get("test") == before.get(found.get("command", ""), {}).get("test")

    for cell in cells:
        found, was = now.get(cell.folder, {}), before.get(cell.command, {})
        told = was.get("against") or {}
        untested = found is was or not found.get("against")
        if found and untested and told.get("name", "") == cell.against:
            stands = as_before(cell.folder) and as_before(baseline(cell))
            now[cell.folder] = {**found, "against": told if stands else None}
    return list(now.values())


def write_results(cells: Sequence[Cell], runs: Path, out: Path, title: str) -> None:
    """Write results.json, results.md and the picture."""
    out.mkdir(parents=True, exist_ok=True)
    told = all_results(cells, runs, committed(out / "results.json"))
    (out / "results.json").write_text(json.dumps(told, indent=2) + "\n")
    results = [r for r in told if not r.get("diverged")]
    diverged = {(r["name"], r["data"]) for r in told if r.get("diverged")}
    (out / "results.md").write_text(markdown(results, title, diverged))
    if groups := own_tables(results):
        words = "NDCG@10 with own tables less that of the global-only variant (colour: p < 0.05)"
        (out / "own-tables.svg").write_text(standalone_forest(groups, words))


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the grid, run what is not done, write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--grid", type=Path, default=HERE / "grid.toml")
    parser.add_argument("--runs", type=Path, default=Path("runs/personal-tables"))
    parser.add_argument("--out", type=Path, default=HERE, help="where results.json and .md go")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these cells only")
    parser.add_argument("--data", nargs="+", metavar="NAME", help="cells on these data sets only")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--list", action="store_true", help="show the cells and run nothing")
    given = parser.parse_args(arguments)
    title, cells = read_grid(given.grid)
    unknown = set(given.only or ()) - {cell.name for cell in cells}
    if unknown:
        raise SystemExit(f"{given.grid}: no cell is called '{sorted(unknown)[0]}'")
    chosen = [
        cell
        for cell in cells
        if (not given.only or cell.name in given.only)
        and (not given.data or cell.data in given.data)
    ]
    try:
        failed = run_cells(chosen, given)
    finally:  # what is done is told, whatever stopped the rest
        if not given.list:
            write_results(cells, given.runs, given.out, title)
    if failed:
        raise SystemExit(f"no result: {', '.join(failed)}")


def run_cells(cells: Sequence[Cell], given: argparse.Namespace) -> list[str]:
    """Run what is not done, or say what would be; return the cells that have no result."""
    installed, failed = method_names(), []
    for number, cell in enumerate(cells, 1):
        state = "to do"
        if is_done(cell, given.runs):
            state = "done"
        elif is_diverged(cell, given.runs):
            state = f"diverged; without its file {MARK} it would be tried again"
        elif cell.method not in installed:
            state = f"left out: the method {cell.method} is not installed"
        elif cell.preset and cell.preset not in preset_names(cell.method):
            state = f"left out: {cell.method} has no preset {cell.preset} yet"
        print(f"[{number}/{len(cells)}] {cell.folder}: {state}", file=sys.stderr)
        if given.list or state != "to do":
            continue
        try:
            run_cell(cell, given.runs, given.threads)
        except subprocess.CalledProcessError as error:
            if error.returncode not in (REFUSED, DIVERGED):
                raise
            failed.append(cell.folder)  # the others can still be run
            if error.returncode == DIVERGED:
                (given.runs / cell.folder / MARK).touch()
    return failed


if __name__ == "__main__":
    try:
        main()
    except HushrecError as error:
        sys.exit(f"{error}")
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
