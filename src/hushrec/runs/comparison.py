"""Compare runs user by user: means with intervals, paired differences, corrected p-values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hushrec.errors import ConfigError, InputError, RunError, nearest
from hushrec.evaluation.evaluator import PartRanks
from hushrec.evaluation.groups import bootstrap_interval, holm, paired_test
from hushrec.evaluation.metrics import Ranks, per_user
from hushrec.federation.rounds import RoundLine
from hushrec.runs.folder import RunFolder, read_ranks
from hushrec.runs.schema import Summary


@dataclass(frozen=True)
class ComparedRun:
    """One run's value of one metric, and its difference from the first run."""

    run: str
    method: str
    protocol: str
    seeds: int
    metric: str
    mean: float
    low: float | None
    """95 % interval over users; None where the ranks of single users are not known."""
    high: float | None
    seed_sd: float | None
    """Standard deviation of the mean over seeds; None for a single seed."""
    selected_round: float
    """The round whose model is compared, a mean over seeds as are the next two."""
    up_bytes: float
    """Uploaded up to that round, by all clients together."""
    down_bytes: float
    difference: float | None = None
    """This run minus the first one; None for the first."""
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
    """Compare finished runs on the test items of the same users, the first run as the baseline.

    Where one of them is a run of a federation, whose ranks stay on its nodes, only the means are
    compared: there are no paired tests.
    """
    if len(given) < 2:
        raise ConfigError("compare needs at least two run folders")
    runs = [
        _Stored.read(Path(run), candidates)
        if isinstance(run, str | Path)
        else _Stored.of(run, candidates, f"{number}: ")
        for number, run in enumerate(given, 1)
    ]
    baseline, *others = runs
    paired = all(run.ranks for run in runs)
    for run in others:
        same = run.summary.data == baseline.summary.data
        if not same or (paired and not same_question(run.ranks[0], baseline.ranks[0])):
            raise InputError(
                f"{run.name} and {baseline.name} have different held-out items or users; "
                "compare needs the same --data and split"
            )
    rows: list[ComparedRun] = []
    for metric in metrics:
        first = baseline.measured(metric)
        rows.append(first)
        for run in others:
            row = run.measured(metric)
            if not paired:
                rows.append(replace(row, difference=row.mean - first.mean))
                continue
            values, expected = (one.values(metric).mean(axis=0) for one in (run, baseline))
            result = paired_test(values, expected, method=test)
            row = replace(row, difference=result.difference, p_value=result.p_value)
            rows.append(replace(row, difference_low=result.low, difference_high=result.high))
    tested = [index for index, row in enumerate(rows) if row.p_value is not None]
    corrected = holm([rows[index].p_value or 0.0 for index in tested])
    for index, p_value in zip(tested, corrected, strict=True):
        rows[index] = replace(rows[index], p_value=float(p_value))
    return rows


def same_question(one: Ranks, other: Ranks) -> bool:
    """Return whether two runs have the same held-out items of the same users."""
    names = ("users", "indptr", "targets")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


@dataclass(frozen=True)
class _Stored:
    """A run to compare: its ranks, one `Ranks` per seed; a federation keeps them on its nodes."""

    name: str
    summary: Summary
    candidates: str
    ranks: list[Ranks]
    costs: dict[str, float]

    @classmethod
    def of(cls, run: Ranked, candidates: str, number: str) -> _Stored:
        summary = run.summary
        name = f"{number}{summary.method}" if run.folder is None else str(run.folder.path)
        summary.require_figures(name, "compare")
        ranks = [_chosen(run.ranks["test"], candidates, name)]
        return cls(name, summary, candidates, ranks, _costs(summary, run.lines, name))

    @classmethod
    def read(cls, path: Path, candidates: str) -> _Stored:
        folder = RunFolder.open(path)
        summary = folder.read_summary()
        summary.require_figures(str(path), "compare")
        if summary.nodes is not None:
            costs = _costs(summary, folder.read_metrics(), str(path))
            return cls(str(path), summary, candidates, [], costs)
        ranks, all_costs = [], []
        for name in summary.runs or [""]:
            one = RunFolder.open(path / name)
            all_costs.append(_costs(one.read_summary(), one.read_metrics(), str(one.path)))
            ranks.append(_chosen(read_ranks(one)["test"], candidates, str(one.path)))
        if not all(same_question(r, ranks[0]) for r in ranks):
            raise RunError(
                f"{path}: its seeds hold out different items, so they cannot be averaged user by "
                "user; compare single seeds, or use a split without chance"
            )
        mean = {key: float(np.mean([cost[key] for cost in all_costs])) for key in all_costs[0]}
        return cls(str(path), summary, candidates, ranks, mean)

    def values(self, metric: str) -> NDArray[np.float64]:
        """Return the metric of every user for every seed, [seeds, users]."""
        return np.stack([per_user(ranks, metric) for ranks in self.ranks])

    def measured(self, metric: str) -> ComparedRun:
        """Return the metric's mean, and its interval over users where their ranks are known."""
        low = high = seed_sd = None
        if self.ranks:
            values = self.values(metric)
            mean, (low, high) = float(values.mean()), bootstrap_interval(values.mean(axis=0))
            seed_sd = float(values.mean(axis=1).std(ddof=1)) if len(values) > 1 else None
        else:
            reported = _chosen(self.summary.test, self.candidates, self.name)
            if metric not in reported:
                raise ConfigError(
                    f"{self.name} is a run of a federation, whose nodes reported no '{metric}'"
                    f"{nearest(metric, reported)}"
                )
            mean = reported[metric]
        return ComparedRun(
            run=self.name,
            method=self.summary.method,
            protocol=self.summary.protocol,
            seeds=max(1, len(self.ranks)),
            metric=metric,
            mean=mean,
            low=low,
            high=high,
            seed_sd=seed_sd,
            **self.costs,
        )


Chosen = TypeVar("Chosen")


def _chosen(stored: Mapping[str, Chosen], candidates: str, name: str) -> Chosen:
    if candidates not in stored:
        raise ConfigError(f"{name}: no candidate set '{candidates}'{nearest(candidates, stored)}")
    return stored[candidates]


def _costs(summary: Summary, lines: Sequence[RoundLine], name: str) -> dict[str, float]:
    """Return what a run had cost when it reached the model that is compared."""
    for line in lines:
        if line.round == summary.selected_round:
            sent = {"up_bytes": line.up_bytes, "down_bytes": line.down_bytes}
            return {"selected_round": line.round, **sent}
    raise RunError(f"{name}: metrics.jsonl lacks the selected round {summary.selected_round}")
