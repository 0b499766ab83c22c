"""The items as one user sees them, on a map.

What was promised to clients, and what an attacker found.

Some users' lists, made with the model of the run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from markupsafe import Markup

from hushrec.analysis.item_map import GRID, item_map
from hushrec.api import Run
from hushrec.data.interactions import Interactions, MultiCategorical
from hushrec.evaluation.ranking import Ranks
from hushrec.kernels.ragged import top_k
from hushrec.reporting import plots, svg
from hushrec.reporting.baselines import LIST_LENGTH
from hushrec.reporting.plots import Bar, Dot
from hushrec.reporting.wording import marked
from hushrec.runs.folder import AUDIT_FILE, RunFolder
from hushrec.runs.schema import (
    Audit,
    BudgetSummary,
    ComposedStatement,
    PrivacyStatement,
    Skipped,
    Summary,
)


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
    label = marked(run.summary, f"Map of {len(places):,} items, {name}")
    body = svg.tag("title", {}, svg.escape(label)) + "".join(dots)
    size = f"-20 -20 {GRID + 40} {GRID + 40}"
    about = {"class": "plot map", "role": "img", "aria-label": label, "viewBox": size}
    return Markup(svg.tag("svg", about, body))  # noqa: S704 - every text went through escape


def promise(said: PrivacyStatement) -> str:
    """Return what a run guarantees in a sentence; the statement has all that belongs to it."""
    if said.epsilon is None:
        first, _, _ = said.statement.partition(". ")
        return first.split(", and the rows")[0].rstrip(".") + "."
    mark = "Simulated: " if said.noise_seed is not None else ""
    budget = f"(ε = {said.epsilon:.4g}, δ = {said.delta:.2g})"
    promised = "differential privacy of everything that training released"
    return f"{mark}{said.unit}-level {budget} {promised}."


def budgets_plot(summary: Summary, budgets: BudgetSummary) -> Markup:
    """Draw the distribution of the personal budgets."""
    rows = [
        Bar(f"ε {part['from']:.3g}–{part['to']:.3g}", part["clients"] / budgets.clients)
        for part in budgets.distribution
    ]
    label = marked(summary, "Personal budgets, share of clients")
    return plots.bars(rows, ["clients"], label)


def together(folder: RunFolder) -> ComposedStatement | None:
    """Return what the seeds that a run is one of release together, if it is one of several."""
    above = RunFolder(folder.path.resolve().parent)
    if not (above.path / "seeds.json").exists() or not (above.path / "summary.json").exists():
        return None
    summary = above.read_summary()
    if folder.path.resolve().name not in (summary.runs or []):
        return None
    return summary.privacy.together


RATE_NAMES = {
    "auc": "AUC",
    "advantage": "Advantage (TPR − FPR)",
    "tpr_at_1_fpr": "TPR at 1 % FPR",
}


def read_audit(folder: RunFolder) -> Audit | None:
    """Return the result of `hushrec audit`, where there is one."""
    return folder.read(AUDIT_FILE, Audit) if (folder.path / AUDIT_FILE).exists() else None


def audit_plot(run: Run, audit: Audit | None) -> Markup | None:
    """Draw the share of a client's items that an attacker names."""
    if audit is None or isinstance(audit.items, Skipped):
        return None
    rows = [
        Dot(name, value.r_precision, (value.interval[0], value.interval[1]), strong=True)
        for name, value in audit.items.evidence.items()
    ]
    rows += [
        Dot("most popular items", audit.items.popularity, note="the same guess for all"),
        Dot("chance", audit.items.chance, note="expected"),
    ]
    return plots.dots(rows, marked(run.summary, "Share of a client's items that are named"), 1.0)


LAST_SEEN = 5
SAMPLE_USERS = 6


def samples(run: Run) -> list[dict[str, Any]]:
    """Show some users' lists, from the least to the most active."""
    ranks = run.ranks["test"]["full"]
    trained = run.split.train.positives.lengths[ranks.users]
    order = np.argsort(trained, kind="stable")
    wanted = np.linspace(0, len(order) - 1, SAMPLE_USERS + 2)[1:-1].round().astype(int)
    return [_sample(run, ranks, int(order[place])) for place in dict.fromkeys(wanted.tolist())]


def _sample(run: Run, ranks: Ranks, row: int) -> dict[str, Any]:
    data, split = run.split.data, run.split
    user = int(ranks.users[row])
    alone = np.array([user])
    view = split.history("test").take(alone)
    scores = run.model.scores(alone, view)
    seen = view.positives
    best = top_k(scores, seen.indptr, seen.values, LIST_LENGTH)[0][0]
    rows = slice(int(ranks.indptr[row]), int(ranks.indptr[row + 1]))
    found = set(ranks.targets[rows].tolist()) & set(best.tolist())
    heldout = [
        {
            **_item(data, target),
            "hit": target in found,
            "listed": best.tolist().index(target) + 1 if target in found else None,
            "place": int(ahead) + 1,
            "tied": int(tied),
        }
        for target, ahead, tied in sorted(
            zip(
                ranks.targets[rows].tolist(),
                ranks.ahead[rows].tolist(),
                ranks.tied[rows].tolist(),
                strict=True,
            ),
            key=lambda entry: (entry[1], entry[0]),
        )
    ]
    return {
        "user": str(data.users[user]),
        "trained": int(split.train.positives.lengths[user]),
        "last": [_item(data, int(item)) for item in seen.values[: -LAST_SEEN - 1 : -1]],
        "list": [
            {**_item(data, int(item)), "hit": int(item) in found} for item in best if item >= 0
        ],
        "heldout": heldout[:3],
        "more_heldout": max(0, len(heldout) - 3),
        "n_heldout": len(heldout),
        "hits": len(found),
        "candidates": int(ranks.candidates[row]),
    }


def _item(data: Interactions, item: int) -> dict[str, str]:
    kinds = [c for c in data.item_features.values() if isinstance(c, MultiCategorical)]
    names = kinds[0].names[kinds[0].flags[item]] if kinds else []
    return {"title": data.title(item), "kinds": ", ".join(str(name) for name in names[:3])}
