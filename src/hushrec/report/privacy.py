"""What was promised to clients, and what an attacker found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hushrec.formats import Audit
from hushrec.report import plots
from hushrec.report.plots import Bar, Dot
from hushrec.report.words import marked
from hushrec.run import Run
from hushrec.run_folder import AUDIT_FILE, RunFolder


def promise(said: Mapping[str, Any]) -> str:
    """Return what a run guarantees in a sentence; the statement has all that belongs to it."""
    if said["epsilon"] is None:
        first, _, _ = str(said["statement"]).partition(". ")
        return first.split(", and the rows")[0].rstrip(".") + "."
    unit, delta = said.get("unit", "user"), said.get("delta", 0.0)
    mark = "Simulated: " if said.get("noise_seed") is not None else ""
    budget = f"(ε = {said['epsilon']:.4g}, δ = {delta:.2g})"
    return f"{mark}{unit}-level {budget} differential privacy of everything that training released."


def budgets(run: Run) -> dict[str, Any] | None:
    """Show how personal budgets are spread, and what was spent of them."""
    said = run.summary["privacy"].get("budgets")
    if said is None:
        return None
    rows = [
        Bar(f"ε {part['from']:.3g}–{part['to']:.3g}", part["clients"] / said["clients"])
        for part in said["distribution"]
    ]
    label = marked(run, "Personal budgets, share of clients")
    return {**said, "plot": plots.bars(rows, ["clients"], label)}


def together(folder: RunFolder) -> dict[str, Any] | None:
    """Return what the seeds that a run is one of release together, if it is one of several."""
    above = RunFolder(folder.path.resolve().parent)
    if not (above.path / "seeds.json").exists() or not (above.path / "summary.json").exists():
        return None
    summary = above.read_summary()
    if folder.path.resolve().name not in summary.get("runs", []):
        return None
    said: dict[str, Any] | None = summary["privacy"].get("together")
    return said


def audit(run: Run, folder: RunFolder) -> dict[str, Any] | None:
    """Show what `hushrec audit` found, if it was asked."""
    if not (folder.path / AUDIT_FILE).exists():
        return None
    found = folder.read_json(AUDIT_FILE, Audit)
    items = found["items"]
    if "skipped" not in items:
        rows = [
            Dot(name, value["r_precision"], tuple(value["interval"]), strong=True)
            for name, value in items["evidence"].items()
        ]
        rows += [
            Dot("most popular items", items["popularity"], note="the same guess for all"),
            Dot("chance", items["chance"], note="expected"),
        ]
        label = marked(run, "Share of a client's items that are named")
        items = {**items, "plot": plots.dots(rows, label, 1.0)}
    names = {"auc": "AUC", "advantage": "Advantage (TPR − FPR)", "tpr_at_1_fpr": "TPR at 1 % FPR"}
    return {**found, "items": items, "measures": names}
