"""Compare runs user by user: means with intervals, paired differences, corrected p-values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from hushrec.errors import ConfigError, InputError, RunError, nearest
from hushrec.evaluation.evaluator import PartRanks
from hushrec.evaluation.metrics import per_user
from hushrec.evaluation.ranking import Ranks
from hushrec.evaluation.significance import bootstrap_interval, holm, paired_test
from hushrec.runs.folder import RunFolder, read_ranks
from hushrec.runs.schema import RoundLine, Summary


@dataclass(frozen=True)
class ComparedRun:
    """One run's value of one metric, and its difference from the first run."""

    run: str
    method: str
    protocol: str
    seeds: int
    metric: str
    mean: float
    low: float
    high: float
    seed_sd: float | None
    """Standard deviation of the mean over seeds; None for a single seed."""
    selected_round: float
    """The round whose model is compared, a mean over seeds as are the next two."""
    up_bytes: float
    """Uploaded up to that round, by all clients together."""
    down_bytes: float
    difference: float | None = None
    """This run minus the first one, user by user; None for the first."""
    difference_low: float | None = None
    difference_high: float | None = None
    p_value: float | None = None
    """Of the paired test, Holm-corrected over all comparisons in the table."""


class Ranked(Protocol):
    """A run that is open: what of it is compared."""

    summary: Summary
    ranks: Mapping[str, PartRanks]
    folder: RunFolder | None

    @property
    def lines(self) -> list[RoundLine]:
        """A line for each round."""
        ...


def compare_runs(
    given: Sequence[str | Path | Ranked],
    metrics: Sequence[str] = ("hr@10", "ndcg@10"),
    candidates: str = "full",
    test: Literal["randomisation", "wilcoxon"] = "randomisation",
) -> list[ComparedRun]:
    """Compare finished runs on the test items of the users they share, the first as baseline."""
    if len(given) < 2:
        raise ConfigError("compare needs at least two run folders")
    runs = [
        _Stored.read(Path(run), candidates)
        if isinstance(run, str | Path)
        else _Stored.of(run, candidates, f"{number}: ")
        for number, run in enumerate(given, 1)
    ]
    for run in runs[1:]:
        if run.data != runs[0].data or not same_question(run.ranks[0], runs[0].ranks[0]):
            raise InputError(
                f"{run.name} and {runs[0].name} do not look for the same held-out items of the "
                "same users; compare needs the same --data and split"
            )
    rows: list[ComparedRun] = []
    for metric in metrics:
        baseline = runs[0].values(metric)
        for run in runs:
            values = run.values(metric)
            low, high = bootstrap_interval(values.mean(axis=0))
            seeds = len(values)
            row = ComparedRun(
                run=run.name,
                method=run.method,
                protocol=run.protocol,
                seeds=seeds,
                metric=metric,
                mean=float(values.mean()),
                low=low,
                high=high,
                seed_sd=float(values.mean(axis=1).std(ddof=1)) if seeds > 1 else None,
                **run.costs,
            )
            if run is not runs[0]:
                found = paired_test(values.mean(axis=0), baseline.mean(axis=0), method=test)
                row = replace(
                    row,
                    difference=found.difference,
                    difference_low=found.low,
                    difference_high=found.high,
                    p_value=found.p_value,
                )
            rows.append(row)
    tested = [place for place, row in enumerate(rows) if row.p_value is not None]
    corrected = holm([rows[place].p_value or 0.0 for place in tested])
    for place, p_value in zip(tested, corrected, strict=True):
        rows[place] = replace(rows[place], p_value=float(p_value))
    return rows


def same_question(one: Ranks, other: Ranks) -> bool:
    """Say whether two runs look for the same items of the same users."""
    names = ("users", "indptr", "targets")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


@dataclass(frozen=True)
class _Stored:
    """The stored ranks of a run, one set for each seed."""

    name: str
    method: str
    data: str
    protocol: str
    ranks: list[Ranks]
    costs: dict[str, float]

    @classmethod
    def of(cls, run: Ranked, candidates: str, number: str) -> _Stored:
        """Take what is compared of a run that is open; one without a folder has a number."""
        said = run.summary
        name = f"{number}{said.method}" if run.folder is None else str(run.folder.path)
        ranks = [_chosen(run.ranks["test"], candidates, name)]
        return cls(
            name, said.method, said.data, said.protocol, ranks, _costs(said, run.lines, name)
        )

    @classmethod
    def read(cls, path: Path, candidates: str) -> _Stored:
        folder = RunFolder.open(path)
        summary = folder.read_summary()
        parts = [path / name for name in summary.runs or []] or [path]
        ranks, costs = [], []
        for part in parts:
            one = RunFolder.open(part)
            costs.append(_costs(one.read_summary(), one.read_metrics(), str(part)))
            ranks.append(_chosen(read_ranks(one)["test"], candidates, str(part)))
        if not all(same_question(r, ranks[0]) for r in ranks):
            raise RunError(
                f"{path}: its seeds hold out different items, so they cannot be averaged user by "
                "user; compare single seeds, or use a split without chance"
            )
        mean = {name: float(np.mean([cost[name] for cost in costs])) for name in costs[0]}
        return cls(str(path), summary.method, summary.data, summary.protocol, ranks, mean)

    def values(self, metric: str) -> NDArray[np.float64]:
        """Return the metric of every user for every seed, [seeds, users]."""
        return np.stack([per_user(ranks, metric) for ranks in self.ranks])


def _chosen(stored: PartRanks, candidates: str, name: str) -> Ranks:
    if candidates not in stored:
        raise ConfigError(
            f"{name} has no candidate set '{candidates}'{nearest(candidates, stored)}"
        )
    return stored[candidates]


def _costs(summary: Summary, lines: Sequence[RoundLine], name: str) -> dict[str, float]:
    """Return what a run had cost when it reached the model that is compared."""
    for line in lines:
        if line.round == summary.selected_round:
            return {
                "selected_round": line.round,
                "up_bytes": line.up_bytes,
                "down_bytes": line.down_bytes,
            }
    raise RunError(
        f"{name}: metrics.jsonl has no line of the selected round {summary.selected_round}"
    )
