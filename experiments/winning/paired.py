"""FedMix against what it has to beat: three seeds, the same users, paired tests.

    python experiments/winning/paired.py --runs runs/paired                   # all data sets
    python experiments/winning/paired.py --runs runs/paired --data ml-100k

Finished runs are not run again. Figures, differences (rival minus FedMix) and Holm-corrected
p-values are added to ``paired.json``, as `hushrec compare` gives them; ``paired.md`` has tables.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from hushrec.runs.comparison import compare

HERE = Path(__file__).parent
RESULTS = HERE / "paired.json"
DATA = ("filmtrust", "ml-100k", "amazon-video/fedrkg", "lastfm-2k/tags-5", "ml-1m")
METHODS: dict[str, list[str]] = {
    "fedmix": ["--seeds", "3"],
    "fednext": [],
    "fedals": ["--seeds", "3"],
    "popularity": [],
    "pfedrec": ["--seeds", "3", "--preset", "paper"],
}
"""What is trained, FedMix first; nothing in FedNext and popularity is random."""
AS_PUBLISHED = {"lastfm-2k/tags-5": ["--set", "split.ties=file"]}
"""Months as times: ties are in the order of the file, as papers have them."""
DRAWN = {"filmtrust"}
"""Data without times: each seed draws another holdout, so users can be paired within one only."""
ONCE = {
    ("ml-1m", "pfedrec"),
    ("ml-1m", "fedals"),
    *((data, name) for data in DRAWN for name in METHODS),
}
"""Cells of one seed; those of ml-1m take long, and are far behind."""
HEAD = """# FedMix and its rivals, user by user

Written by `python experiments/winning/paired.py`. Leave-one-out, honest, all items; ± over seeds;
p of the paired test against FedMix, Holm-corrected over a data set.

"""


def options(data: str, method: str) -> list[str]:
    """Return the options of `hushrec train` for a cell."""
    chosen = METHODS[method][2:] if (data, method) in ONCE else METHODS[method]
    return ["--data", data, "--method", method, *chosen, *AS_PUBLISHED.get(data, [])]


def trained(data: str, method: str, runs: Path) -> Path:
    """Train a cell, unless that was done, and return its folder."""
    out = runs / data.replace("/", "-") / method
    if not (out / "summary.json").exists():
        again = ["--resume"] if out.exists() else options(data, method)
        command = [sys.executable, "-m", "hushrec", "train", *again, "--out", str(out), "--json"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return out


def table(data: str, rows: list[dict[str, Any]]) -> str:
    """Return a data set's rows as a table, a line for each method."""
    lines = [f"## {data}", "", "| | HR@10 | NDCG@10 | seeds | p, HR@10 | p, NDCG@10 |"]
    lines += ["|---|---|---|---|---|---|"]
    hits, gains = ([r for r in rows if r["metric"] == m] for m in ("hr@10", "ndcg@10"))
    for hit, gain in zip(hits, gains, strict=True):
        cells = [hit["method"], *(_with_spread(row) for row in (hit, gain)), str(hit["seeds"])]
        cells += ["" if row["p_value"] is None else _p(row["p_value"]) for row in (hit, gain)]
        lines.append(f"| {' | '.join(cells)} |")
    commands = [f"- `hushrec train {' '.join(options(data, method))}`" for method in METHODS]
    return "\n".join([*lines, "", *commands, ""])


def _with_spread(row: dict[str, Any]) -> str:
    spread = "" if row["seed_sd"] is None else f" ± {row['seed_sd']:.4f}"
    return f"{row['mean']:.4f}{spread}"


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


@click.command()
@click.option("--runs", type=click.Path(path_type=Path), required=True, help="Where runs are kept.")
@click.option("--data", "names", multiple=True, type=click.Choice(DATA), default=DATA)
def main(runs: Path, names: tuple[str, ...]) -> None:
    """Train what is missing, compare, write and print the tables."""
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    for data in names:
        rows = compare([trained(data, method, runs) for method in METHODS])
        results[data] = [asdict(row) | {"run": row.method} for row in rows]
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    page = HEAD
    page += "\n".join(table(data, results[data]) for data in DATA if data in results)
    (HERE / "paired.md").write_text(page, "utf-8")
    click.echo(page)


if __name__ == "__main__":
    main()
