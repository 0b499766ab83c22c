"""Run the cells of cells.toml, skip those that are done, and write tables and pictures.

    python experiments/lipm/run.py --data ml-1m --silos 100 --rounds 50
    python experiments/lipm/run.py --data ml-100k --silos 16 --rounds 15 --only baseline,lipm
    python experiments/lipm/run.py --data ml-100k --tables

Runs live in --runs (runs/lipm-experiments by default) and are resumed where they were left.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

import hushrec
from hushrec.backends.inprocess import Machine
from hushrec.evaluate.metrics import per_user
from hushrec.evaluate.significance import bootstrap_interval, holm, paired_test
from hushrec.methods.base import method_class, method_names
from hushrec.report import plots, standalone
from hushrec.run import train
from hushrec.run_folder import RunFolder, read_ranks

HERE = Path(__file__).parent
METRICS = ("ndcg@10", "recall@10", "precision@10", "auc")
TABLES = {
    "Table 3: ablation": [
        "baseline",
        "lipm",
        "dpps",
        "lipm-dpps",
        "lipm-dpps-paper-sigma",
    ],
    "Table 2: rivals": ["fedrec", "fedmf", "fedncf", "dp-fedavg", "pfedme", "lipm-dpps"],
    "Figure 4: how much silos differ": [
        "baseline-low",
        "baseline",
        "baseline-high",
        "lipm-low",
        "lipm",
        "lipm-high",
    ],
    "Figure 6: noise": ["lipm", "noise-0_001", "noise-0_01", "noise-0_1", "noise-0_1-guided"],
}


def settings_of(
    cell: dict[str, Any], plan: dict[str, Any], silos: int, seed: int
) -> dict[str, Any]:
    """Put a cell's settings together, its own last; noise can be repeated: it's an experiment."""
    settings = dict(plan["common"])
    if method_class(cell["method"]).traits.silos:
        settings |= {**plan["silos"], "silos.count": silos}
    if cell.get("dpps"):
        settings |= plan["dpps"]
    settings |= cell.get("set", {})
    if "privacy.mode" in settings:
        settings["privacy.noise_seed"] = seed
    return settings


def run_cells(args: argparse.Namespace, plan: dict[str, Any]) -> None:
    """Train what is not done yet."""
    data = hushrec.load(args.data)
    for seed in args.seeds:
        for name, cell in plan["cell"].items():
            if (args.only and name not in args.only) or cell["method"] not in method_names():
                continue
            folder = args.runs / args.data / f"seed-{seed}" / name
            if (folder / "summary.json").exists():
                continue
            started = (folder / "config.toml").exists()
            given: dict[str, Any] = (
                {}
                if started
                else {
                    "rounds": cell.get("rounds", args.rounds),
                    "seed": seed,
                    "settings": settings_of(cell, plan, args.silos, seed),
                }
            )
            run = train(
                data,
                cell["method"],
                out=folder,
                resume=started,
                machine=Machine(threads=args.threads),
                **given,
            )
            full = run.metrics["full"]
            print(name, seed, {metric: round(full[metric], 4) for metric in METRICS}, flush=True)
            write(args, plan)


def collect(args: argparse.Namespace, plan: dict[str, Any]) -> dict[str, Any]:
    """Read every finished cell: means over its seeds, an interval over users of the first one."""
    found: dict[str, Any] = {}
    for name in plan["cell"]:
        folders = sorted((args.runs / args.data).glob(f"seed-*/{name}/summary.json"))
        if not folders:
            continue
        summaries = [json.loads(path.read_text()) for path in folders]
        values = {
            m: np.mean(
                [
                    per_user(read_ranks(RunFolder.open(p.parent))["test"]["full"], m)
                    for p in folders
                ],
                0,
            )
            for m in METRICS
        }
        first = summaries[0]
        found[name] = {
            "seeds": [summary["seed"] for summary in summaries],
            "rounds": first["rounds"],
            "selected_round": first["selected_round"],
            "test": {m: float(v.mean()) for m, v in values.items()},
            "interval": {m: bootstrap_interval(v) for m, v in values.items()},
            "valid": {
                m: float(np.mean([s["valid"]["full"][m] for s in summaries])) for m in METRICS
            },
            "popularity": {m: first["yardsticks"]["popularity"]["full"][m] for m in METRICS},
            "divergence": first["silos"] and first["silos"]["divergence"]["mean"],
            "epsilon": first["privacy"]["epsilon"],
            "budgets": first["privacy"].get("budgets"),
            "seconds": first["time"]["total_s"],
            "_values": values["ndcg@10"],
        }
    base = found.get("baseline")
    others = [name for name in found if base and name != "baseline"]
    if base and others:
        tests = [paired_test(found[name]["_values"], base["_values"]).p_value for name in others]
        for name, p in zip(others, holm(tests), strict=True):
            found[name]["p_against_baseline"] = float(p)
    for cell in found.values():
        del cell["_values"]
    return found


def write(args: argparse.Namespace, plan: dict[str, Any]) -> None:
    """Write results.json, results.md and the pictures of a data set."""
    found, place = collect(args, plan), args.out or HERE / args.data
    place.mkdir(parents=True, exist_ok=True)
    (place / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    lines = [f"# LIPM and DPPS on {args.data}", ""]
    lines += ["Written by `experiments/lipm/run.py`. Honest protocol, full ranking, test items; in"]
    lines += [
        "brackets the 95 % interval over users, whose values are means over seeds. p: paired test"
    ]
    lines += ["of NDCG@10 against the baseline, Holm-corrected over all cells.", ""]
    for title, names in TABLES.items():
        rows = [(name, found[name]) for name in names if name in found]
        if not rows:
            continue
        lines += [f"## {title}", ""]
        lines += ["| cell | seeds | NDCG@10 | Recall@10 | Precision@10 | AUC | ε | p |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        for name, cell in rows:
            low, high = cell["interval"]["ndcg@10"]
            figures = [f"{cell['test'][m]:.4f}" for m in METRICS]
            figures[0] += f" [{low:.4f}, {high:.4f}]"
            epsilon = "–" if cell["epsilon"] is None else f"{cell['epsilon']:.3g}"
            p = f"{cell['p_against_baseline']:.2g}" if "p_against_baseline" in cell else "–"
            seeds = len(cell["seeds"])
            lines.append(f"| {name} | {seeds} | {' | '.join(figures)} | {epsilon} | {p} |")
        popular = rows[0][1]["popularity"]
        lines += [
            f"| popularity | – | {' | '.join(f'{popular[m]:.4f}' for m in METRICS)} | – | – |",
            "",
        ]
    (place / "results.md").write_text("\n".join(lines))
    pictures(args, found, place)


def pictures(args: argparse.Namespace, found: dict[str, Any], place: Path) -> None:
    """Draw figure 5 (rounds) and 7 (loss) of LIPM's first seed, 4 (silos) and 6 (noise)."""
    if "lipm" not in found:
        return
    folder = next(iter(sorted((args.runs / args.data).glob("seed-*/lipm"))))
    lines = RunFolder.open(folder).read_metrics()
    selected = found["lipm"]["selected_round"]
    looks = [(x["round"], x["valid"]["full"]["ndcg@10"]) for x in lines if x["valid"]]
    losses = [(x["round"], x["loss"]) for x in lines]
    for name, points, title in (
        ("rounds", looks, "NDCG@10 on validation items by round"),
        ("loss", losses, "training loss by round"),
    ):
        if len(points) > 1:
            drawing = plots.line(points, title, selected=selected)
            (place / f"{name}.svg").write_text(
                standalone.standalone([(f"LIPM on {args.data}: {title}", drawing)])
            )
    degrees = {name: (f"{name}-low", name, f"{name}-high") for name in ("baseline", "lipm")}
    noises = {"lipm": ("lipm", "noise-0_001", "noise-0_01", "noise-0_1")}
    for name, cells, places, title in (
        ("degree", degrees, ("low", "medium", "high"), "how much silos differ"),
        ("noise", noises, ("none", "0.001", "0.01", "0.1"), "noise"),
    ):
        rows = [
            standalone.Trend(line, tuple(found[c]["test"]["ndcg@10"] for c in names))
            for line, names in cells.items()
            if all(c in found for c in names)
        ]
        if rows:
            said = f"NDCG@10 on test items by {title}, {args.data}"
            drawing = standalone.trends(rows, places, said)
            (place / f"{name}.svg").write_text(
                standalone.standalone_trends(drawing, [row.name for row in rows], said)
            )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="ml-1m")
    parser.add_argument("--silos", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seeds", type=lambda text: [int(s) for s in text.split(",")], default=[0])
    parser.add_argument("--only", type=lambda text: text.split(","), default=None)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--runs", type=Path, default=Path("runs/lipm-experiments"))
    parser.add_argument("--out", type=Path, help="folder of the tables; that of the data set")
    parser.add_argument("--tables", action="store_true", help="only write what is done")
    args = parser.parse_args()
    plan = tomllib.loads((HERE / "cells.toml").read_text())
    if not args.tables:
        run_cells(args, plan)
    write(args, plan)


if __name__ == "__main__":
    main()
