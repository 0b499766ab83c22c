"""`write_report`: one run as one self-contained page that a person likes to read.

No scripts, no fonts or pictures from elsewhere, nothing that changes from one writing to the next.
Python works out every figure and names it; ``template.html.j2`` holds the words and the looks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from numpy.typing import NDArray

from hushrec import silos
from hushrec.backends.inprocess import usable_cores
from hushrec.data.interactions import Interactions, MultiCategorical
from hushrec.errors import RunError
from hushrec.evaluate.analyse import guidance_effects
from hushrec.evaluate.groups import AWAY
from hushrec.evaluate.metrics import per_user, summarise
from hushrec.evaluate.ranking import Ranks, top_k
from hushrec.evaluate.significance import bootstrap_interval
from hushrec.evaluate.yardsticks import chance_ranks, popularity_ranks
from hushrec.methods.capabilities import Guided
from hushrec.methods.popularity import Popularity
from hushrec.report import plots
from hushrec.report.plots import Bar, Dot, signed
from hushrec.report.units import human_duration, human_size
from hushrec.run_folder import AUDIT_FILE, RunFolder

if TYPE_CHECKING:
    from hushrec.run import Run

HEADLINE = ("hr@10", "ndcg@10")
ADAPTATION = "adaptation.json"
LIST_LENGTH = 10
LAST_SEEN = 5
SAMPLE_USERS = 6
SMALLEST_GROUP = 5
"""Users that a group must have to be shown."""
SHOWN_EFFECTS = 12
GROUPS = {
    "cold": "the 30 % of the users with the fewest training items",
    "warm": "the 30 % of the users with the most training items",
    "distinct": "the 30 % with the smallest share of their training items among popular ones",
    "followers": "the 30 % with the largest share of their training items among popular ones",
}
RESAMPLES = 2_000
RESAMPLED_VALUES = 50_000_000
"""Values drawn for one interval at most; beyond 25,000 users fewer resamples do."""
LAST_PLACES = (1, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
"""Last place of each bin of the histogram; one more bin takes the rest."""
EXPLAINED = {
    "hr@10": "how often a held-out item is among the first ten",
    "ndcg@10": "the same, worth more the closer to the top it is",
}


def write_report(run: Run) -> Path:
    """Write ``report.html`` into the run's folder and return its path."""
    if run.folder is None:
        raise RunError("a report is written into the run's folder: train with out=FOLDER")
    run.folder.write_text("report.html", render(run, run.folder))
    return run.folder.path / "report.html"


def render(run: Run, folder: RunFolder) -> str:
    """Return the page."""
    environment = Environment(
        loader=PackageLoader("hushrec.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "figure": plots.figure,
        "percent": plots.percent,
        "size": human_size,
        "duration": human_duration,
        "count": "{:,}".format,
    }
    return environment.get_template("template.html.j2").render(page(run, folder))


def page(run: Run, folder: RunFolder) -> dict[str, Any]:
    """Return everything the template shows."""
    field = _Field(run)
    lines = folder.read_metrics()
    return {
        "summary": run.summary,
        "experiment": run.experiment,
        "mark": run.summary["protocol_mark"],
        "data": run.split.data,
        "field": field,
        "headline": [_headline(field, name) for name in HEADLINE],
        "metrics": _metric_tables(field),
        "convergence": _convergence(run, lines),
        "adaptation": _adaptation(run, folder),
        "spread": _spread(field),
        "guidance": _guidance(run, lines),
        "curve_style": plots.CURVE_STYLE,
        "costs": _costs(run, lines),
        "silos": _silos(run),
        "budgets": _budgets(run),
        "audit": _audit(run, folder),
        "samples": _samples(run),
        "options": _options(run),
        "split_words": _split_words(run),
        "toml": run.experiment.to_toml(),
        "list_length": LIST_LENGTH,
        "last_seen": LAST_SEEN,
    }


# ------------------------------------------------------------ the method and its yardsticks


@dataclass(frozen=True)
class _Contender:
    """Who is ranked: the method itself, popularity, or chance."""

    name: str
    ranks: Mapping[str, Ranks]
    is_method: bool = False
    is_chance: bool = False


class _Field:
    """The method among the yardsticks, on the same users and the same candidates."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @cached_property
    def contenders(self) -> list[_Contender]:
        """The method first; popularity is not its own yardstick."""
        method = _Contender(self.run.experiment.method, self.run.ranks["test"], is_method=True)
        chance = chance_ranks(method.ranks)
        others = [] if self.popularity is None else [self.popularity]
        return [method, *others, _Contender("chance", chance, is_chance=True)]

    @property
    def method(self) -> _Contender:
        """What the run trained."""
        return self.contenders[0]

    @cached_property
    def popularity(self) -> _Contender | None:
        """The same list for everybody; None where that is what the run trained."""
        if isinstance(self.run.method, Popularity):
            return None
        ranks = popularity_ranks(self.run.evaluator(usable_cores()), "test")
        return _Contender("popularity", ranks)

    @property
    def one_target(self) -> bool:
        """Whether every user has exactly one item to be found."""
        full = self.method.ranks["full"]
        return len(full.targets) == len(full.users)


def _interval(values: NDArray[np.float64]) -> tuple[float, float]:
    resamples = max(200, min(RESAMPLES, RESAMPLED_VALUES // len(values)))
    return bootstrap_interval(values, resamples=resamples)


def _dot(contender: _Contender, values: NDArray[np.float64]) -> Dot:
    return Dot(
        contender.name,
        float(values.mean()),
        None if contender.is_chance else _interval(values),
        "expected" if contender.is_chance else "",
        strong=contender.is_method,
    )


# ------------------------------------------------------------ headline and tables


def _headline(field: _Field, name: str) -> dict[str, Any]:
    values = {c.name: per_user(c.ranks["full"], name) for c in field.contenders}
    rows = [_dot(contender, values[contender.name]) for contender in field.contenders]
    label = _name(name)
    return {
        "name": label,
        "explained": EXPLAINED[name],
        "method": rows[0],
        "times_chance": rows[0].value / rows[-1].value if rows[-1].value else None,
        "against": _against(values[field.method.name], values.get("popularity"))
        if field.popularity
        else None,
        "plot": plots.dots(rows, _said(field.run, f"{label} at full ranking")),
    }


def _against(mine: NDArray[np.float64], theirs: NDArray[np.float64] | None) -> dict[str, Any]:
    assert theirs is not None
    low, high = _interval(mine - theirs)
    verdict = "above" if low > 0 else "below" if high < 0 else "not clearly different from"
    return {
        "verdict": verdict,
        "difference": signed(float(np.mean(mine - theirs))),
        "interval": f"{signed(low)} to {signed(high)}",
    }


def _metric_tables(field: _Field) -> list[dict[str, Any]]:
    """Return a table for each candidate set, full ranking first."""
    cuts = field.run.experiment.evaluation.k
    kinds = ["hr", "ndcg", "mrr", "precision"] if field.one_target else None
    kinds = kinds or ["hr", "recall", "ndcg", "mrr", "precision"]
    tables = []
    for candidates in sorted(field.method.ranks, key=lambda name: name != "full"):
        names = [*(f"{kind}@{k}" for kind in kinds for k in cuts), "auc"]
        means = [summarise(c.ranks[candidates], names) for c in field.contenders]
        tables.append(
            {
                "full": candidates == "full",
                "sampled": field.run.experiment.evaluation.sampled,
                "names": [c.name for c in field.contenders],
                "cuts": cuts,
                "rows": [
                    (_name(kind), [[mean[f"{kind}@{k}"] for k in cuts] for mean in means])
                    for kind in kinds
                ],
                "auc": [mean["auc"] for mean in means],
            }
        )
    return tables


# ------------------------------------------------------------ convergence


def _convergence(run: Run, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    config = run.experiment.evaluation
    candidates = "full" if config.select_on == "full" else f"sampled{config.sampled}"
    losses = [(line["round"], line["loss"]) for line in lines if line["loss"] is not None]
    looks = [
        (line["round"], line["valid"][candidates][config.select])
        for line in lines
        if line["valid"] is not None and config.select in line["valid"][candidates]
    ]
    selected = run.summary["selected_round"]
    ranking = "full ranking" if candidates == "full" else f"{config.sampled} sampled items"
    panels: list[dict[str, Any]] = []
    for points, name, what, from_zero in (
        (losses, "Training loss", "mean over the clients of a round", False),
        (looks, f"Validation {_name(config.select)}", ranking, True),
    ):
        panel: dict[str, Any] = {"name": name, "what": what, "plot": None, "only": None}
        if len(points) > 1:
            said = _said(run, name)
            panel["plot"] = plots.line(points, said, selected=selected, from_zero=from_zero)
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
        "select": _name(config.select),
        "ranking": ranking,
        "every": config.every,
        "stopped": len(lines) < run.experiment.rounds,
    }


def _adaptation(run: Run, folder: RunFolder) -> dict[str, Any] | None:
    """Return the adaptation curve, where `hushrec evaluate --adaptation` has measured one."""
    if not (folder.path / ADAPTATION).exists():
        return None
    curve = folder.read_json(ADAPTATION)
    points = curve["points"]
    names = [name for name in points[0] if name != "interactions"]
    shown = names[0]
    drawn = plots.line(
        [(point["interactions"], point[shown]) for point in points],
        _said(run, f"{_name(shown)} of unseen users"),
        from_zero=True,
        unit="interaction",
    )
    return {**curve, "names": names, "labels": [_name(name) for name in names], "plot": drawn}


# ------------------------------------------------------------ spread


def _spread(field: _Field) -> dict[str, Any]:
    popularity = field.popularity
    places = _expected_place(field.method.ranks["full"])
    others = None if popularity is None else _expected_place(popularity.ranks["full"])
    shown = [c for c in field.contenders if not c.is_chance]
    return {
        "plot": plots.bars(
            _place_bars(places, others, int(field.method.ranks["full"].candidates.max())),
            [contender.name for contender in shown],
            _said(field.run, "Place of the held-out item, share of items"),
        ),
        "tail": [_tail(contender) for contender in shown],
        "groups": _groups(field, shown),
    }


def _expected_place(ranks: Ranks) -> NDArray[np.float64]:
    return np.asarray(ranks.ahead + ranks.tied / 2 + 1, np.float64)


def _place_bars(
    places: NDArray[np.float64], others: NDArray[np.float64] | None, longest: int
) -> list[Bar]:
    last = [place for place in LAST_PLACES if place < longest]
    mine = np.bincount(np.searchsorted(last, places), minlength=len(last) + 1) / len(places)
    theirs: Sequence[float | None] = [None] * len(mine)
    if others is not None:
        counts = np.bincount(np.searchsorted(last, others), minlength=len(last) + 1)
        theirs = [float(share) for share in counts / len(others)]
    bars = []
    for number, (share, other) in enumerate(zip(mine, theirs, strict=True)):
        low = last[number - 1] + 1 if number else 1
        high = last[number] if number < len(last) else longest
        name = f"{low:,}" if low == high else f"{low:,}–{high:,}"
        bars.append(Bar(name, float(share), other, strong=high <= LIST_LENGTH))
    return bars


def _tail(contender: _Contender) -> dict[str, Any]:
    """Say how the typical and the worst-served users fare."""
    ranks = contender.ranks["full"]
    best = np.minimum.reduceat(_expected_place(ranks), ranks.indptr[:-1])
    auc = np.sort(per_user(ranks, "auc"))
    tenth = max(1, len(auc) // 10)
    return {
        "name": contender.name,
        "median": float(np.median(best)),
        "late": float(np.quantile(best, 0.9)),
        "auc": float(auc.mean()),
        "worst_auc": float(auc[:tenth].mean()),
        "worst_users": tenth,
    }


def _groups(field: _Field, shown: Sequence[_Contender]) -> list[dict[str, Any]]:
    """Compare groups of users, two by two on the same axis."""
    groups = field.run.evaluator(1).groups("test")
    if min(map(len, groups.values())) < SMALLEST_GROUP:
        return []
    values = [per_user(c.ranks["full"], "hr@10") for c in shown]
    rows = {
        name: [_dot(c, v[members]) for c, v in zip(shown, values, strict=True)]
        for name, members in groups.items()
    }
    top = plots.dots_top(row for each in rows.values() for row in each) or 1.0
    return [
        {
            "name": name,
            "explained": GROUPS[name],
            "users": len(members),
            "plot": plots.dots(rows[name], _said(field.run, f"HR@10 of {name} users"), top),
        }
        for name, members in groups.items()
    ]


# ------------------------------------------------------------ guidance


def _guidance(run: Run, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Show what guidance did to each group, and the gates; None for methods without guidance."""
    if not isinstance(run.method, Guided):
        return None
    effects = guidance_effects(run, lines=lines)
    if not effects:
        return None
    looks = [line for line in lines if line.get("groups")]
    names = list(effects[0].before)
    rows = [
        plots.Curve(
            name,
            [
                (
                    line["round"],
                    line["valid"]["full"]["ndcg@10"]
                    if name == "all"
                    else line["groups"][name]["ndcg@10"],
                )
                for line in looks
            ],
        )
        for name in names
    ]
    marks = [effect.round for effect in effects]
    return {
        "plot": plots.curves(rows, _said(run, "Validation NDCG@10 by group"), marks=marks),
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


# ------------------------------------------------------------ costs


def _costs(run: Run, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    taking_part = [line["clients"] for line in lines]
    visits = max(1, sum(taking_part))
    n_clients = max(1, len(run.split.training_clients))
    cohort = run.experiment.cohort
    words = {
        "all": "every client, every round",
        "fixed": f"{cohort.size or 0:,} clients drawn per round",
        "poisson": f"each client with probability {cohort.probability or 0:g} per round",
    }
    traffic = [
        (name, total / visits, total / n_clients, total)
        for name, total in (
            ("Down, to the client", run.summary["communication"]["down_bytes"]),
            ("Up, to the server", run.summary["communication"]["up_bytes"]),
        )
    ]
    return {
        "traffic": traffic,
        "pooled": run.method.traits.pooled,
        "travels": any(total for *_, total in traffic),
        "cohort": words[cohort.kind],
        "clients": n_clients,
        "mean_clients": sum(taking_part) / max(1, len(lines)),
        "median_s": float(np.median([line["seconds"] for line in lines])) if lines else None,
    }


def _silos(run: Run) -> dict[str, Any] | None:
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


# ------------------------------------------------------------ privacy


def _budgets(run: Run) -> dict[str, Any] | None:
    """Show how personal budgets are spread, and what was spent of them."""
    said = run.summary["privacy"].get("budgets")
    if said is None:
        return None
    rows = [
        Bar(f"ε {part['from']:.3g}–{part['to']:.3g}", part["clients"] / said["clients"])
        for part in said["distribution"]
    ]
    label = _said(run, "Personal budgets, share of clients")
    return {**said, "plot": plots.bars(rows, ["clients"], label)}


def _audit(run: Run, folder: RunFolder) -> dict[str, Any] | None:
    """Show what `hushrec audit` found, if it was asked."""
    if not (folder.path / AUDIT_FILE).exists():
        return None
    found = folder.read_json(AUDIT_FILE)
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
        label = _said(run, "Share of a client's items that are named")
        items = {**items, "plot": plots.dots(rows, label, 1.0)}
    names = {"auc": "AUC", "advantage": "Advantage (TPR − FPR)", "tpr_at_1_fpr": "TPR at 1 % FPR"}
    return {**found, "items": items, "measures": names}


# ------------------------------------------------------------ samples


def _samples(run: Run) -> list[dict[str, Any]]:
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
    scores = run.evaluator(threads=1).scores(run.method, run.shared, run.store, alone, view)
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


# ------------------------------------------------------------ words


def _options(run: Run) -> list[tuple[str, Any, str]]:
    """Return each option of the method with its value and its meaning."""
    described = type(run.method).Config.model_fields
    return [
        (name, value, (described[name].description or "") if name in described else "")
        for name, value in run.summary["options"].items()
    ]


def _split_words(run: Run) -> str:
    """Say how the rows were divided, and by which order."""
    config, data = run.experiment.split, run.split.data
    order = (
        "time, ties by the order of the file"
        if data.has_time
        else "the order of the file (no times)"
    )
    shares = f"{100 * config.test:g} % test, {100 * config.valid:g} % validation"
    if config.order == "random" and config.kind in ("ratio", "unseen-users"):
        order = "a random order drawn from the seed"
    words = {
        "leave-one-out": f"Each user’s last item tests, the one before validates, by {order}.",
        "ratio": f"Each user’s rows: {shares}; ordered by {order}.",
        "time": f"One date for everybody: {shares}; later rows test.",
        "unseen-users": f"Whole users: {shares}. They adapt on the first half of their rows and "
        f"are tested on the second, ordered by {order}.",
    }
    repeats = {
        "merge": "Repeated (user, item) rows are merged before the split.",
        "keep": "Repeated (user, item) rows are kept: a held-out item can be a training item too.",
    }
    return f"{words[config.kind]} {repeats[config.repeats]}"


def _name(metric: str) -> str:
    """Write a metric's name as people do: HR@10."""
    return metric.upper() if metric[:2] in ("hr", "nd", "mr", "au") else metric.capitalize()


def _said(run: Run, label: str) -> str:
    """Mark the spoken label of a drawing too."""
    mark = run.summary["protocol_mark"]
    return f"{label}, {mark}" if mark else label
