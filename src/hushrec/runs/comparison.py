"""Compare runs user by user: means with intervals, paired differences, corrected p-values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hushrec.errors import ConfigError, InputError, RunError, cut, nearest
from hushrec.evaluation.evaluator import PartRanks
from hushrec.evaluation.groups import bootstrap_interval, holm, paired_test
from hushrec.evaluation.metrics import Ranks, per_user, user_metric
from hushrec.federation.rounds import RoundLine
from hushrec.runs.compared import ComparedRun, Comparison, Test
from hushrec.runs.folder import RunFolder, read_ranks
from hushrec.runs.schema import Summary

METRICS = ("hr@10", "ndcg@10")


class Ranked(Protocol):
    """A run that is open: what of it is compared."""

    summary: Summary
    ranks: Mapping[str, PartRanks]
    folder: RunFolder | None

    @property
    def lines(self) -> list[RoundLine]:
        """A line for each round."""
        ...


Given = str | Path | Ranked | Sequence[Ranked]
"""A run to compare: its folder, the run itself, or runs of several seeds."""


def compare(
    runs: Sequence[Given],
    metrics: Sequence[str] = METRICS,
    *,
    candidates: str = "full",
    test: Test = "randomisation",
    against: Given | None = None,
    all_pairs: bool = False,
) -> Comparison:
    """Compare finished runs on the test items of the same users, data set by data set.

    - ``runs``: folders, runs, or `SeedRuns`. Those of one data set need the same split.
    - ``against``: the baseline, a run, or the name of a method, whose run is then the baseline on
      every data set. By default the first run of each data set.
    - ``all_pairs`` tests any two runs of a data set in place of each run and the baseline.
    - ``candidates``: "full", or a set of sampled items such as "sampled99".
    - ``test``: "randomisation" or "wilcoxon", paired over users, Holm-corrected over all tests.

    Where one run of a data set is of a federation, whose ranks stay on its nodes, only the means
    are compared: there are no paired tests.
    """
    if all_pairs and against is not None:
        raise ConfigError("all pairs have no baseline: leave out 'against'")
    for metric in metrics:
        user_metric(metric)
    runs = [runs] if isinstance(runs, str | Path) else list(runs)
    named = isinstance(against, str) and not Path(against).is_dir()
    if against is not None and not named and not any(_is_same(against, run) for run in runs):
        runs.insert(0, against)
    if len(runs) < 2:
        raise ConfigError("compare needs at least two run folders")
    stored = [_Stored.of(run, candidates, number) for number, run in enumerate(runs, 1)]
    groups = _by_data(stored)
    if max(map(len, groups)) < 2:
        raise InputError(
            f"{stored[0].name} and {stored[1].name} have different held-out items or users: they "
            f"are of the data sets {', '.join(group[0].summary.data_name for group in groups)}, "
            "and compare needs two runs of one"
        )
    if against is not None and not named:
        chosen = next(one for one, run in zip(stored, runs, strict=True) if _is_same(against, run))
        against = chosen.name
    rows: list[ComparedRun] = []
    for group, data in zip(groups, _data_names(groups), strict=True):
        baseline = None if all_pairs else _baseline(group, against)
        for metric in metrics:
            for number, one in enumerate(group):
                others = group[:number] if baseline is None else [baseline]
                others = [] if one is baseline else others
                rows += [replace(row, data=data) for row in _tested(one, others, metric, test)]
    return Comparison(_corrected(rows), test, candidates, all_pairs)


def _is_same(one: Given, other: Given) -> bool:
    if isinstance(one, str | Path) and isinstance(other, str | Path):
        return Path(one).resolve() == Path(other).resolve()
    return one is other


def _by_data(runs: Sequence[_Stored]) -> list[list[_Stored]]:
    """Return the runs of each data set; refuse runs of one data set with different splits."""
    groups: list[list[_Stored]] = []
    for run in runs:
        own = next((group for group in groups if run.is_of_data(group[0])), None)
        if own is None:
            groups.append([run])
            continue
        own.append(run)
        if run.ranks and own[0].ranks and not same_question(run.ranks[0], own[0].ranks[0]):
            raise InputError(
                f"{run.name} and {own[0].name} have different held-out items or users; compare "
                "needs the same --data and split: compare each split in a call of its own"
            )
    return groups


def _data_names(groups: Sequence[Sequence[_Stored]]) -> list[str]:
    """Return the name of each data set; files of one name in different folders are numbered."""
    names = [group[0].summary.data_name for group in groups]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: number + 1].count(name)})"
        for number, name in enumerate(names)
    ]


def _baseline(group: Sequence[_Stored], against: object) -> _Stored:
    """Return the run that others are tested against: the named one, by default the first."""
    if against is None:
        return group[0]
    named = [run for run in group if run.name == against]
    named = named or [run for run in group if run.summary.method == against]
    if len(named) == 1:
        return named[0]
    data, name = group[0].summary.data_name, cut(str(against))
    if named:
        raise ConfigError(f"several runs on {data} are of {name}: name the folder of one of them")
    known = [run.summary.method for run in group]
    raise ConfigError(
        f"no run on {data} is '{name}', which is no folder either{nearest(name, known)}"
    )


def _tested(run: _Stored, others: Sequence[_Stored], metric: str, test: Test) -> list[ComparedRun]:
    """Return a row for each of the others, with the difference from it; one without any."""
    row, rows = run.measured(metric), []
    for other in others:
        if not (run.ranks and other.ranks):
            difference = row.mean - other.measured(metric).mean
            rows.append(replace(row, against=other.name, difference=difference))
            continue
        values, expected = (one.values(metric).mean(axis=0) for one in (run, other))
        found = paired_test(values, expected, method=test)
        interval = replace(row, difference_low=found.low, difference_high=found.high)
        tested = replace(interval, difference=found.difference, p_value=found.p_value)
        rows.append(replace(tested, against=other.name))
    return rows or [row]


def _corrected(rows: list[ComparedRun]) -> list[ComparedRun]:
    """Return the rows with p-values corrected over all tests."""
    tested = [index for index, row in enumerate(rows) if row.p_value is not None]
    for index, p_value in zip(tested, holm([rows[n].p_value or 0.0 for n in tested]), strict=True):
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
    costs: dict[str, float | None]

    @classmethod
    def of(cls, run: Given, candidates: str, number: int) -> _Stored:
        """Read a run of the list; those that are only in memory are named by their number."""
        if isinstance(run, str | Path):
            return cls._read(Path(run), candidates)
        several = isinstance(run, Sequence)
        seeds: list[Ranked] = [*run] if isinstance(run, Sequence) else [run]
        summary, folder = seeds[0].summary, seeds[0].folder
        name = f"{number}: {summary.method}"
        if folder is not None:
            name = str(folder.path.parent if several else folder.path)
        ranks, costs = [], []
        for one in seeds:
            one.summary.require_figures(name, "compare")
            if (one.summary.method, one.summary.data) != (summary.method, summary.data):
                raise ConfigError(f"{name}: seeds are of one method and one data set")
            ranks.append(_chosen(one.ranks["test"], candidates, name))
            costs.append(_costs(one.summary, one.lines, name))
        return cls._of_seeds(name, summary, candidates, ranks, costs)

    @classmethod
    def _read(cls, path: Path, candidates: str) -> _Stored:
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
        return cls._of_seeds(str(path), summary, candidates, ranks, all_costs)

    @classmethod
    def _of_seeds(
        cls,
        name: str,
        summary: Summary,
        candidates: str,
        ranks: list[Ranks],
        costs: Sequence[Mapping[str, float | None]],
    ) -> _Stored:
        if not all(same_question(r, ranks[0]) for r in ranks):
            raise RunError(
                f"{name}: its seeds hold out different items, so they cannot be averaged user by "
                "user; compare single seeds, or use a split without chance"
            )
        mean: dict[str, float | None] = {}
        for key in costs[0]:
            values = [value for cost in costs if (value := cost[key]) is not None]
            mean[key] = float(np.mean(values)) if len(values) == len(costs) else None
        return cls(name, summary, candidates, ranks, mean)

    def is_of_data(self, other: _Stored) -> bool:
        """Return whether both runs are of the same data; refuse a data set that has changed."""
        own, others = self.summary, other.summary
        if own.data_digest is None or others.data_digest is None:
            return own.data == others.data
        if own.data == others.data and own.data_digest != others.data_digest:
            raise InputError(
                f"{self.name} and {other.name} have different held-out items or users: the rows of "
                f"'{cut(own.data_name)}' were not the same; train both on the same data"
            )
        return own.data_digest == others.data_digest

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
        costs: dict[str, Any] = self.costs
        return ComparedRun(
            run=self.name,
            data=self.summary.data_name,
            method=self.summary.method,
            protocol=self.summary.protocol,
            marks=tuple(self.summary.all_marks),
            seeds=max(1, len(self.ranks)),
            metric=metric,
            mean=mean,
            low=low,
            high=high,
            seed_sd=seed_sd,
            **costs,
        )


Chosen = TypeVar("Chosen")


def _chosen(stored: Mapping[str, Chosen], candidates: str, name: str) -> Chosen:
    if candidates not in stored:
        raise ConfigError(f"{name}: no candidate set '{candidates}'{nearest(candidates, stored)}")
    return stored[candidates]


def _costs(summary: Summary, lines: Sequence[RoundLine], name: str) -> dict[str, float | None]:
    """Return what a run had cost when it reached the model that is compared."""
    clients = summary.users.training_clients or summary.users.users
    for line in lines:
        if line.round == summary.selected_round:
            return {
                "selected_round": line.round,
                "up_bytes": line.up_bytes,
                "down_bytes": line.down_bytes,
                "client_up_bytes": line.up_bytes / clients,
                "client_down_bytes": line.down_bytes / clients,
                "serving_bytes": summary.communication.serving_bytes,
            }
    raise RunError(f"{name}: metrics.jsonl lacks the selected round {summary.selected_round}")
