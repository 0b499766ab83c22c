"""What happened on the way: convergence, adaptation, guidance, what travelled, who held what."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from hushrec.analysis.run import guidance_effects
from hushrec.api import Run
from hushrec.data import partition as silos
from hushrec.evaluation.groups import AWAY
from hushrec.federation.experiment import Experiment
from hushrec.methods.base import Guided
from hushrec.reporting import plots
from hushrec.reporting.wording import marked, metric_name, signed
from hushrec.runs.folder import RunFolder
from hushrec.runs.schema import AdaptationCurve, RoundLine, Summary

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
        "tries": any("trying" in line.phase for line in lines),
    }


def _phases(lines: Sequence[RoundLine]) -> list[str]:
    """Return the rounds of each phase, of a method with several."""
    phases = []
    for phase, group in groupby(lines, key=lambda line: line.phase.partition(":")[0]):
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
    return [rows[place] for place in dict.fromkeys(wanted.tolist())]


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
    """Show what silos hold, those with the most similar mixes side by side."""
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
