"""The sections of a report page: curves, costs, silos, privacy, audit, sample lists, item map."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from markupsafe import Markup

from hushrec.analysis.item_map import GRID, item_map
from hushrec.analysis.run import guidance_effects
from hushrec.api import Run
from hushrec.data import partition as silos
from hushrec.data.interactions import Interactions, MultiCategorical
from hushrec.evaluation.groups import AWAY
from hushrec.evaluation.metrics import Ranks
from hushrec.federation.experiment import Experiment
from hushrec.kernels.ragged import top_k
from hushrec.methods.base import Guided
from hushrec.methods.statistics.pair_weights import SELECT_SCALARS
from hushrec.reporting import plots, svg
from hushrec.reporting.baselines import LIST_LENGTH
from hushrec.reporting.plots import Bar, Dot
from hushrec.reporting.tables import marked, metric_name, signed
from hushrec.runs.folder import AUDIT_FILE, RunFolder
from hushrec.runs.schema import (
    AdaptationCurve,
    Audit,
    BudgetSummary,
    ComposedStatement,
    PrivacyStatement,
    RoundLine,
    Skipped,
    Summary,
)

ADAPTATION = "adaptation.json"
SHOWN_EFFECTS = 12


def convergence(
    experiment: Experiment, summary: Summary, lines: Sequence[RoundLine]
) -> dict[str, Any]:
    """Show loss and validation over the rounds, and the round that was selected."""
    config = experiment.evaluation
    candidates = config.candidates
    losses = [(line.round, line.loss) for line in lines if line.loss is not None]
    evaluations = [
        (line.round, line.valid[candidates][config.select])
        for line in lines
        if line.valid is not None and config.select in line.valid[candidates]
    ]
    selected = summary.shipped_round
    ranking = "full ranking" if candidates == "full" else f"{config.sampled} sampled items"
    panels: list[dict[str, Any]] = []
    for points, name, what, from_zero in (
        (losses, "Training loss", "mean over the clients of a round", False),
        (evaluations, f"Validation {metric_name(config.select)}", ranking, True),
    ):
        panel: dict[str, Any] = {"name": name, "what": what, "plot": None, "only": None}
        if len(points) > 1:
            label = marked(summary, name)
            panel["plot"] = plots.line(points, label, selected=selected, from_zero=from_zero)
        elif points:
            panel["only"] = points[0]
        else:
            continue
        panels.append(panel)
    return {
        "panels": [panel for panel in panels if panel["plot"]],
        "single": [panel for panel in panels if panel["only"]],
        "has_loss": bool(losses),
        "rounds": len(lines),
        "select": metric_name(config.select),
        "ranking": ranking,
        "every": config.every,
        "stopped": len(lines) < experiment.rounds,
        "phases": _phases(lines),
        "tries": any(line.phase == SELECT_SCALARS for line in lines),
    }


def _phases(lines: Sequence[RoundLine]) -> list[str]:
    """Return the rounds of each phase, of a method with several."""
    phases = []
    for phase, group in groupby(lines, key=lambda line: line.phase):
        rounds = [line.round for line in group]
        span = f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
        if phase:
            phases.append(f"{span} {phase}")
    return phases


def adaptation(run: Run, folder: RunFolder) -> dict[str, Any] | None:
    """Return the adaptation curve, where `hushrec evaluate --adaptation` has measured one."""
    if not (folder.path / ADAPTATION).exists():
        return None
    curve = folder.read(ADAPTATION, AdaptationCurve)
    points, names = curve.points, curve.metrics
    shown = names[0]
    drawn = plots.line(
        [(round(point["interactions"]), point[shown]) for point in points],
        marked(run.summary, f"{metric_name(shown)} of unseen users"),
        from_zero=True,
        unit="interaction",
    )
    labels = [metric_name(name) for name in names]
    return {"users": curve.users, "points": points, "names": names, "labels": labels, "plot": drawn}


def guidance(run: Run, lines: Sequence[RoundLine]) -> dict[str, Any] | None:
    """Show what guidance did to each group, and the gates; None for methods without guidance."""
    if not isinstance(run.model.method, Guided):
        return None
    effects = guidance_effects(run, lines=lines)
    if not effects:
        return None
    names = list(effects[0].before)
    by_round = [
        (line.round, {"all": line.valid["full"], **line.groups})
        for line in lines
        if line.valid and line.groups
    ]
    rows = [
        plots.Curve(name, [(number, groups[name]["ndcg@10"]) for number, groups in by_round])
        for name in names
    ]
    marks = [effect.round for effect in effects]
    return {
        "plot": plots.curves(rows, marked(run.summary, "Validation NDCG@10 by group"), marks=marks),
        "names": names,
        # Where guidance comes every round, a few of them say it all.
        "effects": [
            {
                "round": effect.round,
                "changes": [signed(effect.after[n] - effect.before[n]) for n in names],
                "gates": effect.gates,
            }
            for effect in _some(effects, SHOWN_EFFECTS)
        ],
        "count": len(effects),
        "away": AWAY,
    }


def _some(rows: Sequence[Any], most: int) -> list[Any]:
    """Return at most this many, evenly spread, the first and the last among them."""
    wanted = np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(int)
    return [rows[index] for index in dict.fromkeys(wanted.tolist())]


def costs(
    experiment: Experiment, summary: Summary, lines: Sequence[RoundLine], *, pooled: bool = False
) -> dict[str, Any]:
    """Show the communication per client and round, and the time of a round."""
    taking_part = [line.clients for line in lines]
    visits = max(1, sum(taking_part))
    n_clients = max(1, summary.users.training_clients or summary.users.users)
    cohort = experiment.cohort
    words = {
        "all": "every client, every round",
        "fixed": f"{cohort.size or 0:,} clients drawn per round",
        "poisson": f"each client with probability {cohort.probability or 0:g} per round",
    }
    traffic = [
        (name, total / visits, total / n_clients, total)
        for name, total in (
            ("Down, to the client", summary.communication.down_bytes),
            ("Up, to the server", summary.communication.up_bytes),
        )
    ]
    return {
        "traffic": traffic,
        "pooled": pooled,
        "travels": any(total for *_, total in traffic),
        "cohort": words[cohort.kind],
        "clients": n_clients,
        "mean_clients": sum(taking_part) / max(1, len(lines)),
    }


def silo_mixes(run: Run) -> dict[str, Any] | None:
    """Show the distribution of each silo, similar silos side by side."""
    split = run.split
    if split.holders is None:
        return None
    found = silos.tastes(split.train)
    mixes = silos.mixes_of(found, split.holders)
    # The silos' first principal direction brings those of one taste together.
    centred = mixes - mixes.mean(0)
    order = np.argsort(np.linalg.svd(centred, full_matrices=False)[0][:, 0], kind="stable")
    facts = silos.facts(split.train, split.holders)
    label = f"Mix over {found.over} in {facts['count']} silos"
    return {
        **facts,
        "over": found.over,
        "plot": plots.heat(mixes[order].T.tolist(), found.names, label),
    }


# ------------------------------------------------------------ item map, privacy, audit, lists


def drawn_map(run: Run) -> dict[str, Any]:
    """Plot each item table that one user scores with."""
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

    # Liked and held-out items are drawn last, on top of the others.
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
    """Return the guarantee in one sentence; the statement has the details."""
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
    """Return the joint guarantee of all seeds, if the run is one of several."""
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
    return [_sample(run, ranks, int(order[index])) for index in dict.fromkeys(wanted.tolist())]


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
            "rank": int(ahead) + 1,
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
