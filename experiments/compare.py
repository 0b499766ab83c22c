"""Tests between the cells of an exhibit, user by user, from the runs that are at hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.plan import Exhibit
from experiments.results import Results
from hushrec.errors import RunError
from hushrec.evaluation.groups import PairedTest, holm, paired_test
from hushrec.evaluation.metrics import Ranks, per_user
from hushrec.runs.comparison import same_question
from hushrec.runs.folder import RunFolder, read_ranks


def compare_cells(exhibits: Sequence[Exhibit], results: Results, runs: Path) -> None:
    """Test every row against those it names, where both runs are there and it isn't done."""
    for exhibit in exhibits:
        for cell in exhibit.cells:
            for _, task, other in exhibit.pairs(cell):
                record = results.get(task.command)
                mine, theirs = runs / task.folder, runs / other.folder
                if (
                    record is None
                    or record.tests(other.command, cell.read, exhibit.compared)
                    or not all((run / "summary.json").exists() for run in (mine, theirs))
                ):
                    continue
                known = record.against.get(other.command, {})
                tests = {**known, **_tests(mine, theirs, cell.read, exhibit.compared)}
                against = {**record.against, other.command: tests}
                results.put(task.data, task.command, record.model_copy(update={"against": against}))


def _tests(mine: Path, other: Path, path: str, metrics: Sequence[str]) -> dict[str, list[float]]:
    """Test two runs in some metrics, and correct p for their number."""
    tests = [paired(mine, other, path.partition("/")[2], metric) for metric in metrics]
    corrected = holm([test.p_value for test in tests])
    return {
        f"{path}/{metric}": [test.difference, test.low, test.high, float(p)]
        for metric, test, p in zip(metrics, tests, corrected, strict=True)
    }


def paired(mine: Path, other: Path, candidates: str, metric: str) -> PairedTest:
    """Test two runs of one or more seeds.

    Where all seeds ask for the same items, a user's value is the mean over seeds; where seeds draw
    other test users, users of all seeds stand side by side.
    """
    ours, theirs = (_ranks(folder, candidates) for folder in (mine, other))
    values = [[per_user(ranks, metric) for ranks in seeds] for seeds in (ours, theirs)]
    if all(same_question(ranks, ours[0]) for ranks in [*ours, *theirs]):
        return paired_test(*(np.mean(seeds, axis=0) for seeds in values))
    if not all(map(same_question, ours, theirs)) or len(ours) != len(theirs):
        raise RunError(f"{mine} and {other} have different held-out items or users")
    return paired_test(*(np.concatenate(seeds) for seeds in values))


def _ranks(folder: Path, candidates: str) -> list[Ranks]:
    names = RunFolder.open(folder).read_summary().runs or []
    return [read_ranks(RunFolder.open(folder / name))["test"][candidates] for name in names]
