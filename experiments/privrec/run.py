"""Tables 1 and 2 of Wang et al., 2021 (PrivRec), and figures 3 and 4, on unseen users.

    python experiments/privrec/run.py                  # train what is missing, one cell at a time
    python experiments/privrec/run.py --only frappe --seeds 3
    python experiments/privrec/run.py --table          # results.json and results.md from the runs

A cell is (data, method, seed); a finished one is skipped, an interrupted one is resumed. Every
number is measured on the test users, at the round that the validation users selected.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from hushrec import load, train
from hushrec.backends.inprocess import Machine
from hushrec.evaluate.metrics import per_user
from hushrec.evaluate.ranking import Ranks
from hushrec.evaluate.significance import holm, paired_test
from hushrec.run import read_ranks
from hushrec.run_folder import RunFolder

HERE = Path(__file__).parent
K = (5, 10, 20, 30)
METRICS = [f"{kind}@{k}" for kind in ("hits", "ndcg", "ndcg1") for k in K]

# method, preset, and what differs from the preset; the presets were chosen on ML-1M's validation
# users, and Frappe, with 670 training users of 20 rows, takes them as they are.
CELLS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "popularity": ("popularity", None, {}),
    "fcf": ("fcf", "paper", {}),
    "privrec": ("privrec", "paper", {}),
    "privrec-cen": ("privrec-cen", "paper", {}),
    "nn-self": ("nn-self", "paper", {}),
    "fofl-self": ("fofl-self", "paper", {}),
    "dp-privrec": ("privrec", "dp-paper", {}),
}
SPLIT = {
    "split.kind": "unseen-users",
    "split.positive_above": 3.0,
    "evaluation.k": list(K),
    "evaluation.select": "hits@20",
}
ROUNDS = {
    ("ml-1m", "dp-privrec"): 400,
    ("frappe", "privrec"): 160,
    ("frappe", "dp-privrec"): 400,
    ("frappe", "privrec-cen"): 20,
    ("frappe", "fofl-self"): 240,
}
"""Rounds that are not the preset's. DP-PrivRec's 1000 were not run; a pass over Frappe is 54 times
shorter than one over ML-1M; FOFL-SELF still rose on Frappe's validation users at 80."""
OF_DATA: dict[tuple[str, str], dict[str, Any]] = {
    ("frappe", "nn-self"): {"server_rate": 0.3},
    ("frappe", "privrec"): {"server_rate": 2.0, "evaluation.every": 40},
}
"""Options that are not the preset's: with its 0.8 NN-SELF diverges on Frappe; PrivRec's were chosen
before ML-1M asked for a smaller rate."""
DATA = ("ml-1m", "frappe")
PAIRS = [("privrec", cell) for cell in CELLS if cell != "privrec"] + [
    ("fofl-self", "nn-self"),
    ("fofl-self", "fcf"),
    ("nn-self", "fcf"),
]
"""What is compared: PrivRec with all, and the rivals in the paper's order."""
PAPER = {
    ("ml-1m", "fofl-self"): ([0.118, 0.152, 0.195, 0.241], [0.101, 0.130, 0.169, 0.207]),
    ("ml-1m", "nn-self"): ([0.109, 0.148, 0.190, 0.235], [0.098, 0.124, 0.162, 0.201]),
    ("ml-1m", "fcf"): ([0.092, 0.140, 0.186, 0.228], [0.088, 0.118, 0.155, 0.195]),
    ("ml-1m", "privrec"): ([0.123, 0.160, 0.205, 0.249], [0.106, 0.137, 0.174, 0.210]),
    ("ml-1m", "privrec-cen"): ([0.127, 0.163, 0.207, 0.252], [0.109, 0.138, 0.178, 0.212]),
    ("frappe", "fofl-self"): ([0.536, 0.618, 0.655, 0.682], [0.479, 0.554, 0.600, 0.621]),
    ("frappe", "nn-self"): ([0.531, 0.613, 0.651, 0.677], [0.472, 0.550, 0.595, 0.616]),
    ("frappe", "fcf"): ([0.527, 0.506, 0.646, 0.671], [0.469, 0.544, 0.591, 0.612]),
    ("frappe", "privrec"): ([0.541, 0.624, 0.661, 0.688], [0.483, 0.560, 0.607, 0.626]),
    ("frappe", "privrec-cen"): ([0.543, 0.628, 0.665, 0.690], [0.484, 0.563, 0.608, 0.628]),
}
"""Hits@k and nDCG@k of tables 1 and 2."""


def run_cells(runs: Path, only: str, seeds: int, threads: int) -> None:
    """Train every missing cell, all cells of the first seed before those of the next."""
    for seed in range(seeds):
        for data in DATA:
            for cell, (method, preset, more) in CELLS.items():
                name = f"{data}/{cell}/seed-{seed}"
                out = runs / name
                if only not in name or (out / "summary.json").exists():
                    continue
                print(name, flush=True)
                how: dict[str, Any] = {"machine": Machine(threads), "out": out}
                if (out / "config.toml").exists():
                    train(load(data), resume=True, **how)
                    continue
                settings = {**SPLIT, **more, **OF_DATA.get((data, cell), {})}
                if preset == "dp-paper":  # an experiment's noise can be repeated
                    settings["privacy.noise_seed"] = seed
                rounds = ROUNDS.get((data, cell))
                train(
                    load(data),
                    method,
                    preset=preset,
                    seed=seed,
                    rounds=rounds,
                    settings=settings,
                    **how,
                )


def read_cells(runs: Path) -> dict[tuple[str, str], dict[int, tuple[dict[str, Any], Ranks]]]:
    """Return the summary and the test ranks of every finished run, by (data, cell) and seed."""
    found: dict[tuple[str, str], dict[int, tuple[dict[str, Any], Ranks]]] = {}
    for data in DATA:
        for cell in CELLS:
            for path in sorted(runs.glob(f"{data}/{cell}/seed-*")):
                if (path / "summary.json").exists():
                    folder = RunFolder.open(path)
                    ranks = read_ranks(folder)["test"]["full"]
                    seed = int(path.name.removeprefix("seed-"))
                    found.setdefault((data, cell), {})[seed] = (folder.read_summary(), ranks)
    return found


def results(runs: Path) -> dict[str, Any]:
    """Return means over seeds, and the pairs that the paper puts in an order, user by user."""
    cells = read_cells(runs)
    rows, tests = [], []
    for (data, cell), by_seed in cells.items():
        values = {
            name: [float(per_user(ranks, name).mean()) for _, ranks in by_seed.values()]
            for name in METRICS
        }
        summary = next(iter(by_seed.values()))[0]
        rows.append(
            {
                "data": data,
                "method": cell,
                "seeds": sorted(by_seed),
                "rounds": summary["rounds"],
                "selected_round": [s["selected_round"] for s, _ in by_seed.values()],
                "test": {name: float(np.mean(v)) for name, v in values.items()},
                "sd": {
                    name: float(np.std(v, ddof=1)) if len(v) > 1 else None
                    for name, v in values.items()
                },
                "epsilon": summary["privacy"].get("epsilon"),
                "delta": summary["privacy"].get("delta"),
            }
        )
    for data in DATA:
        for first, second in PAIRS:
            mine, others = cells.get((data, first), {}), cells.get((data, second), {})
            both = sorted(mine.keys() & others.keys())
            if both:
                test = paired_test(
                    *(
                        np.concatenate([per_user(of[seed][1], "hits@20") for seed in both])
                        for of in (mine, others)
                    )
                )
                tests.append(
                    {"data": data, "of": first, "against": second, "seeds": both,
                     "difference": test.difference, "low": test.low, "high": test.high,
                     "p": test.p_value}
                )  # fmt: skip
    for test_row, p in zip(tests, holm([t["p"] for t in tests]), strict=True):
        test_row["p_holm"] = float(p)
    return {"rows": rows, "differences_hits@20": tests}


def markdown(found: dict[str, Any]) -> str:
    """Return the tables of results.md."""
    lines = ["<!-- written by run.py --table -->", ""]
    for data in DATA:
        lines += [
            f"## {data}",
            "",
            "| method | seeds | rounds | " + " | ".join(f"Hits@{k}" for k in K) + " | "
            + " | ".join(f"nDCG@{k}" for k in K) + " | paper: Hits | paper: nDCG |",
            "|---|---:|---:|" + "---:|" * 8 + "---|---|",
        ]  # fmt: skip
        for row in found["rows"]:
            if row["data"] != data:
                continue
            numbers = [f"{row['test'][f'{kind}@{k}']:.3f}" for kind in ("hits", "ndcg") for k in K]
            paper = PAPER.get((data, row["method"]))
            said = [" ".join(f"{v:.3f}" for v in part) for part in paper or ()] or ["–", "–"]
            epsilon = (
                ""
                if row["epsilon"] is None
                else f" (epsilon {row['epsilon']:.2f} at delta {row['delta']:g})"
            )
            lines.append(
                f"| {row['method']}{epsilon} | {len(row['seeds'])} | {row['rounds']} | "
                + " | ".join([*numbers, *said]) + " |"
            )  # fmt: skip
        lines += [
            "",
            "Hits@20, one minus the other, user by user (95 % interval, p after Holm):",
            "",
        ]
        for test in found["differences_hits@20"]:
            if test["data"] == data:
                lines.append(
                    f"- {test['of']} - {test['against']}, {len(test['seeds'])} seeds: "
                    f"{test['difference']:+.4f} "
                    f"[{test['low']:+.4f}, {test['high']:+.4f}], p = {test['p_holm']:.4f}"
                )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/privrec"), help="where runs are kept"
    )
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="write the tables, train nothing")
    given = parser.parse_args()
    if not given.table:
        run_cells(given.runs, given.only, given.seeds, given.threads)
        return
    found = results(given.runs)
    (HERE / "results.json").write_text(json.dumps(found, indent=2) + "\n")
    (HERE / "results.md").write_text(markdown(found))
    print(markdown(found))


if __name__ == "__main__":
    main()
