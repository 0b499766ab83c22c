"""The sections of a report page: curves, costs, silos, privacy, audit, sample lists, item map.

`write_convergence` writes the validation curves of several runs as a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from hushrec.analysis.item_map import GRID, item_map
from hushrec.analysis.run import evenly_spread, guidance_effects, targets_of, top_items
from hushrec.api import Run
from hushrec.data import partition as silos
from hushrec.data.interactions import Interactions, MultiCategorical
from hushrec.errors import ConfigError
from hushrec.evaluation.groups import AWAY
from hushrec.evaluation.metrics import Ranks, metric_name
from hushrec.federation.experiment import Experiment
from hushrec.federation.guard import rounds_in_words
from hushrec.federation.requests import FINAL_EVALUATIONS
from hushrec.federation.rounds import RoundLine
from hushrec.io.files import write_text
from hushrec.methods.base import Guided
from hushrec.methods.statistics.pair_weights import SELECT_SCALARS
from hushrec.privacy.statement import ComposedStatement
from hushrec.reporting import plots
from hushrec.reporting.baselines import LIST_LENGTH
from hushrec.reporting.plots import Bar, Dot
from hushrec.reporting.tables import marked, signed
from hushrec.runs.folder import AUDIT_FILE, SEEDS, RunFolder
from hushrec.runs.schema import AdaptationCurve, Attendance, Audit, Skipped, Summary

ADAPTATION = "adaptation.json"
SHOWN_EFFECTS, SAMPLE_USERS, LAST_SEEN = 12, 6, 5
RATE_NAMES = {"auc": "AUC", "advantage": "Advantage (TPR − FPR)", "tpr_at_1_fpr": "TPR at 1 % FPR"}


def convergence(
    experiment: Experiment, summary: Summary, lines: Sequence[RoundLine]
) -> dict[str, Any]:
    """Show loss and validation over the rounds, and the round that was selected."""
    config, selected = experiment.evaluation, summary.shipped_round
    losses = loss_points(lines)
    evaluations = validation_points(lines, config.select, config.candidates)
    ranking = "full ranking" if config.candidates == "full" else f"{config.sampled} sampled items"
    panels, single = [], []
    for points, name, what, from_zero in (
        (losses, "Training loss", "mean over the clients of a round", False),
        (evaluations, f"Validation {metric_name(config.select)}", ranking, True),
    ):
        if len(points) > 1:
            label = marked(summary, name)
            plot = plots.line(points, label, selected=selected, from_zero=from_zero)
            panels.append({"name": name, "what": what, "plot": plot})
        elif points:
            single.append({"name": name, "what": what, "only": points[0]})
    return {
        "panels": panels,
        "single": single,
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
    labels = [metric_name(name) for name in curve.metrics]
    shown = [(round(point["interactions"]), point[curve.metrics[0]]) for point in curve.points]
    label = marked(run.summary, f"{labels[0]} of unseen users")
    return {
        "users": curve.users,
        "points": curve.points,
        "names": curve.metrics,
        "labels": labels,
        "plot": plots.line(shown, label, from_zero=True, unit="interaction"),
    }


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
    # Where guidance comes every round, a few of them are enough.
    shown = evenly_spread(len(effects), SHOWN_EFFECTS)
    return {
        "plot": plots.curves(rows, marked(run.summary, "Validation NDCG@10 by group"), marks=marks),
        "names": names,
        "effects": [
            {
                "round": effect.round,
                "changes": [signed(effect.after[n] - effect.before[n]) for n in names],
                "gates": effect.gates,
            }
            for effect in (effects[index] for index in shown)
        ],
        "count": len(effects),
        "away": AWAY,
    }


def costs(
    experiment: Experiment, summary: Summary, lines: Sequence[RoundLine], *, pooled: bool = False
) -> dict[str, Any]:
    """Show the communication per client and round, and the time of a round."""
    visits = sum(line.clients for line in lines)
    n_clients = max(1, summary.users.training_clients or summary.users.users)
    cohort = experiment.cohort
    words = {
        "all": "every client, every round",
        "fixed": f"{cohort.size or 0:,} clients drawn per round",
        "poisson": f"each client with probability {cohort.probability or 0:g} per round",
    }
    sent = summary.communication
    totals = {"Down, to the client": sent.down_bytes, "Up, to the server": sent.up_bytes}
    return {
        "traffic": [
            (name, total / max(1, visits), total / n_clients, total)
            for name, total in totals.items()
        ],
        "pooled": pooled,
        "travels": any(totals.values()),
        "cohort": words[cohort.kind],
        "clients": n_clients,
        "mean_clients": visits / max(1, len(lines)),
    }


SUMS = {"train": "Training", "evaluate valid": "Validation", "final valid": "Final validation"}
"""What the sums of a federation are for; the last one is the final test."""


def attendance(summary: Summary) -> list[tuple[str, str, int, int, str]]:
    """Return who was in the sums of a federation: what, rounds, users, nodes and missing nodes.

    Sums of one kind with the same nodes are one row.
    """

    def kind(one: Attendance) -> tuple[bool, str, tuple[str, ...]]:
        final = one.to in FINAL_EVALUATIONS
        return final, "" if one.to == "train" else one.to, tuple(one.missing)

    rows, count = [], len(summary.nodes or ())
    for (_, _, missing), group in groupby(sorted(summary.attendance or (), key=kind), key=kind):
        found = list(group)
        numbers = rounds_in_words(one.round for one in found)
        names = ", ".join(missing) or "–"
        what = SUMS.get(found[0].to, "Final test")
        rows.append((what, numbers, found[0].users, count - len(missing), names))
    return rows


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
    plot = plots.heat(mixes[order].T.tolist(), found.names, label)
    return {**facts, "over": found.over, "plot": plot}


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
    dots = []
    # Liked and held-out items are drawn last, on top of the others.
    for item in sorted(range(len(places)), key=lambda item: (item in liked, item in held)):
        kind = "item held" if item in held else "item liked" if item in liked else "item"
        x, y = places[item]
        dots.append(plots.circle(kind, x, y, 5 if kind == "item" else 10))
    label = marked(run.summary, f"Map of {len(places):,} items, {name}")
    return plots.drawing("map", label, dots, viewBox=f"-20 -20 {GRID + 40} {GRID + 40}")


def budgets_plot(summary: Summary) -> Markup | None:
    """Draw the distribution of the personal budgets, where clients have their own."""
    budgets = summary.privacy.budgets
    if budgets is None:
        return None
    rows = [
        Bar(f"ε {part['from']:.3g}–{part['to']:.3g}", part["clients"] / budgets.clients)
        for part in budgets.distribution
    ]
    return plots.bars(rows, ["clients"], marked(summary, "Personal budgets, share of clients"))


def together(folder: RunFolder) -> ComposedStatement | None:
    """Return the joint guarantee of all seeds, if the run is one of several."""
    path = folder.path.resolve()
    if not all((path.parent / file).exists() for file in (SEEDS, "summary.json")):
        return None
    summary = RunFolder(path.parent).read_summary()
    return summary.privacy.together if path.name in (summary.runs or []) else None


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


def samples(run: Run) -> list[dict[str, Any]]:
    """Show some users' lists, from the least to the most active."""
    ranks = run.ranks["test"]["full"]
    order = np.argsort(run.split.train.positives.lengths[ranks.users], kind="stable")
    wanted = np.linspace(0, len(order) - 1, SAMPLE_USERS + 2)[1:-1].round().astype(int)
    return [_sample(run, ranks, int(order[index])) for index in dict.fromkeys(wanted.tolist())]


def _sample(run: Run, ranks: Ranks, row: int) -> dict[str, Any]:
    data, split, user = run.split.data, run.split, int(ranks.users[row])
    alone = np.array([user])
    view = split.history("test").take(alone)
    listed = top_items(run.model.scores(alone, view), view, LIST_LENGTH).tolist()
    held_out = [
        {
            **_item(data, item),
            "listed": listed.index(item) + 1 if item in listed else None,
            "rank": ahead + 1,
            "tied": tied,
        }
        for ahead, item, tied in sorted(targets_of(ranks, row))
    ]
    hits = set(listed) & {item for _, item, _ in targets_of(ranks, row)}
    return {
        "user": str(data.users[user]),
        "trained": int(split.train.positives.lengths[user]),
        "last": [_item(data, item) for item in view.positives[0][::-1][:LAST_SEEN].tolist()],
        "list": [{**_item(data, item), "hit": item in hits} for item in listed],
        "held_out": held_out,
        "hits": len(hits),
        "candidates": int(ranks.candidates[row]),
    }


def _item(data: Interactions, item: int) -> dict[str, str]:
    kinds = [c for c in data.item_features.values() if isinstance(c, MultiCategorical)]
    names = kinds[0].names[kinds[0].flags[item]] if kinds else []
    return {"title": data.title(item), "kinds": ", ".join(str(name) for name in names[:3])}


# ------------------------------------------------------------ curves of runs


def validation_points(
    lines: Iterable[RoundLine], metric: str, candidates: str
) -> list[tuple[int, float]]:
    """Return the round and the value of each validation that measured this metric."""
    return [
        (line.round, line.valid[candidates][metric])
        for line in lines
        if line.valid and metric in line.valid.get(candidates, {})
    ]


def learning_points(
    lines: Sequence[RoundLine], metric: str, candidates: str, selected: int
) -> list[tuple[int, float]]:
    """Return the validations of a learning curve.

    Rounds that try settings are no points of it: of a run with such rounds, the value of the
    selected round stands for all.
    """
    points = validation_points(lines, metric, candidates)
    if any(line.phase == SELECT_SCALARS for line in lines):
        points = [point for point in points if point[0] == selected]
    return points


def loss_points(lines: Iterable[RoundLine]) -> list[tuple[int, float]]:
    """Return the round and the loss of each round that has one."""
    return [(line.round, line.loss) for line in lines if line.loss is not None]


def curve_of(path: Path, metric: str, candidates: str) -> plots.Curve:
    """Return what a run recorded of a metric; of several seeds the first."""
    summary = RunFolder.open(path).read_summary()
    first = summary.runs[0] if summary.runs else ""
    folder = RunFolder.open(path / first)
    lines, selected = folder.read_metrics(), folder.read_summary().shipped_round
    points = learning_points(lines, metric, candidates, selected)
    if not points:
        raise ConfigError(
            f"{path} did not record {metric} ({candidates}) during training; see its metrics.jsonl "
            "for what it did"
        )
    seed, mark = f", {first}" if first else "", " (leaks)" if summary.leaks else ""
    return plots.Curve(f"{path}{seed}{mark}", points)


def write_convergence(
    paths: Sequence[Path], file: Path, metrics: Sequence[str], candidates: str
) -> None:
    """Draw each metric over the rounds, a curve a run; of several seeds the first."""
    panels = []
    for metric in metrics:
        rows = [curve_of(path, metric, candidates) for path in paths]
        if len({number for row in rows for number, _ in row.points}) < 2:
            raise ConfigError("--plot needs runs with at least two evaluations")
        label = f"Validation {metric.upper()}, {candidates}, by round"
        panels.append((label, plots.curves(rows, label)))
    write_text(file, plots.standalone(panels, plots.curves_height(len(paths))))
