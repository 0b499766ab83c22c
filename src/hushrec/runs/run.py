"""`Run`: a trained model with its experiment and results, in memory or in a folder."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from hushrec.data import Interactions
from hushrec.data.splitting import Part, Split
from hushrec.data.views import Ragged, TrainView
from hushrec.errors import ConfigError, HushrecError, RunError
from hushrec.evaluation.evaluator import Evaluator, PartRanks, chance_ranks, popularity_ranks
from hushrec.evaluation.metrics import ListMetric, parse_metric
from hushrec.federation.backends import Backend
from hushrec.federation.experiment import Experiment
from hushrec.federation.rounds import RoundLine, ServerState
from hushrec.io import usable_cores
from hushrec.io.codec import Rows, Tables, imported
from hushrec.io.files import atomic_file, checked_path
from hushrec.runs.compared import Comparison
from hushrec.runs.comparison import METRICS, compare
from hushrec.runs.folder import FINAL, RunFolder, new_run_folder, read_ranks
from hushrec.runs.recording import (
    SELECTED,
    SERVING,
    SOURCE,
    CheckpointCallback,
    file_stamp,
    load_model,
)
from hushrec.runs.schema import Summary
from hushrec.serving.bundle import BundleForm, export
from hushrec.serving.data import (
    LIST_COLUMNS,
    Filter,
    FilterOptions,
    ServingData,
    UserIndices,
    list_rows,
)
from hushrec.serving.model import Model, Recommends
from hushrec.streams import Streams

SERVING_FILE = f"{SERVING}.safetensors"


@dataclass(frozen=True)
class Unsaved:
    """State of a run in memory that its folder would hold besides the results."""

    state: ServerState
    backend: Backend
    lines: Sequence[RoundLine]


@dataclass(eq=False)
class Run(Recommends):
    """A trained model with its results; from `train`, or read back with `Run.open`."""

    experiment: Experiment
    _split: Split | None
    """The split of the data; None until it is needed."""
    model: Model
    summary: Summary
    ranks: Mapping[str, PartRanks]
    folder: RunFolder | None
    unsaved: Unsaved | None = None

    @classmethod
    def open(cls, path: str | Path, data: Interactions | None = None) -> Run:
        """Read a finished run.

        The run folder has what recommending needs. The data is loaded by name, unless it is given,
        when something needs its split, such as `evaluate`; then it must be as it was.
        """
        folder = RunFolder.open(Path(path))
        summary = folder.read_summary()
        if summary.runs:
            raise RunError(
                f"{path} holds several seeds: name one of its folders, for example "
                f"{Path(path) / summary.runs[0]}"
            )
        if summary.nodes is not None:
            raise RunError(
                f"{path} was trained by a federation: histories and private parameters are on its "
                "nodes, and this folder has the shared parameters alone; recommend on a node, "
                "with 'hushrec node recommend'"
            )
        experiment = folder.experiment()
        state, split = folder.read_checkpoint(FINAL), None
        if data is not None or SERVING_FILE not in state.files:
            split = _same_split(folder, experiment, data)
            served = ServingData.of(split)
        else:
            served = ServingData.from_arrays(folder.read_tensors(FINAL, SERVING_FILE))
        method, streams = experiment.make_method(), Streams(experiment.seed)
        stored = load_model(folder, FINAL, SELECTED, state.files)
        promises = experiment.privacy.promises
        try:
            model = Model.restored(method, stored, served, streams, promises, experiment.store)
        except RunError as error:
            changed = f"has the data '{experiment.data}' changed since training?"
            raise RunError(f"{path}: {error}; {changed}") from None
        ranks = {} if summary.final_of else read_ranks(folder)
        return cls(experiment, split, model, summary, ranks, folder)

    @property
    def split(self) -> Split:
        """The split of the data, which is loaded when it is first needed."""
        if self._split is None:
            assert self.folder is not None, "a run is in memory or in a folder"
            self._split = _same_split(self.folder, self.experiment, None)
        return self._split

    def data_changes(self) -> str | None:
        """Return in a sentence how the data file has changed since training; None if it has not.

        Lists are made from the histories in the run folder, whatever happened to the file.
        """
        if self.folder is None or self._split is not None:
            return None
        experiment, name = self.experiment, self.experiment.data
        stamp = self.folder.read_tensors(FINAL, SERVING_FILE)[SOURCE]
        if not stamp.any() or np.array_equal(stamp, file_stamp(name)):
            return None
        try:
            split = experiment.split_data(experiment.load_data())
        except HushrecError as error:
            return f"{name} cannot be read now ({error}): lists use the histories of the run"
        if split.digest() == self.folder.read_checkpoint(FINAL).data:
            return None
        more = ServingData.of(split).n_rows - self.model.data.n_rows
        if more > 0:
            rows = "row" if more == 1 else "rows"
            return f"{more:,} new {rows} of {name} since training: not in the histories"
        return f"{name} has changed since training: lists use the histories of the run"

    @property
    def data(self) -> Interactions:
        """The interactions that the run was trained on."""
        return self.split.data

    @property
    def metrics(self) -> Tables:
        """Test metrics: ``metrics["full"]["hr@10"]``."""
        return self.summary.test

    @property
    def lines(self) -> list[RoundLine]:
        """The log of each round, as in metrics.jsonl."""
        if self.unsaved is not None:
            return list(self.unsaved.lines)
        assert self.folder is not None, "a run is in memory or in a folder"
        return self.folder.read_metrics()

    def __repr__(self) -> str:
        summary, figures = self.summary, self.summary.test.get("full", {})
        shown = [name for name in ("hr@10", "ndcg@10") if name in figures] or list(figures)[:2]
        values = ", ".join(f"{name} {figures[name]:.4f}" for name in shown)
        results = f"test {values} at round {summary.selected_round} of {summary.rounds}"
        if summary.final_of is not None:
            results = f"{summary.rounds} rounds on everything, as {summary.final_of.run}"
        mark = "".join(f"; {mark}" for mark in summary.short_marks)
        where = "in memory" if self.folder is None else str(self.folder.path)
        about = f"{summary.method} on {summary.data_name}, seed {summary.seed}"
        return f"<Run {about}: {results}{mark}; {where}>"

    # ------------------------------------------------------------ results and files

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write a run that is only in memory into a folder, as ``train(out=…)`` would have."""
        if self.unsaved is None:
            where = "" if self.folder is None else f" in {self.folder.path}"
            raise RunError(f"this run is saved already{where}: copy that folder")
        target = checked_path(path)
        with new_run_folder(target, overwrite=overwrite) as fresh:
            folder = RunFolder.create(fresh, self.experiment)
            folder.write_metrics(self.unsaved.lines)
            kept = self.unsaved
            CheckpointCallback(folder, kept.backend, kept.state, data=self.model.data).save_final()
            folder.write_results(self.summary, self.ranks)
        self.folder, self.unsaved = RunFolder(target), None
        return target

    def evaluator(self, threads: int) -> Evaluator:
        """Return an evaluator of this run's split and evaluation options."""
        model, config = self.model, self.experiment.evaluation
        return Evaluator(self.split, config, model.streams, threads, model.promises)

    def evaluate(self, *metrics: str, part: Part = "test", threads: int | None = None) -> Rows:
        """Rank the held-out items again: a row for each metric of the model and of each baseline.

        ``run.evaluate("hr@50", "coverage@20")``; without names, the metrics that a run reports.
        """
        own, baselines = self.measure(metrics, part, threads or usable_cores())
        return Rows.of(
            ("scorer", "candidates", "metric", "value"),
            [
                (scorer, candidates, name, value)
                for scorer, by_candidates in (baselines | {self.model.method.name: own}).items()
                for candidates, values in by_candidates.items()
                for name, value in values.items()
            ],
        )

    def measure(
        self, metrics: Sequence[str], part: Part, threads: int
    ) -> tuple[Tables, dict[str, Tables]]:
        """Return the model's metrics by candidates and name, and those of each baseline.

        Metrics of lists, such as coverage, are under full, and only for the model.
        """
        self.summary.require_figures("this run", "evaluate")
        evaluator = self.evaluator(threads)
        parsed = {name: parse_metric(name) for name in metrics}
        of_lists = {n: metric for n, metric in parsed.items() if isinstance(metric, ListMetric)}
        names = [name for name in parsed if name not in of_lists]
        popularity = popularity_ranks(evaluator, part)
        own = evaluator.summarise(evaluator.rank(self.model, part), names)
        counts = np.bincount(self.split.train.positives.values, minlength=self.data.n_items)
        for name, metric in of_lists.items():
            length = min(metric.k, self.data.n_items)
            top = evaluator.top_items(self.model, part, length)
            own["full"][name] = metric.value(top, counts)
        ranked = {"popularity": popularity, "chance": chance_ranks(popularity)}
        return own, {name: evaluator.summarise(ranks, names) for name, ranks in ranked.items()}

    def compare(
        self,
        *others: Run | str | Path,
        metrics: Sequence[str] = METRICS,
        candidates: str = "full",
    ) -> Comparison:
        """Compare with other runs user by user, this one as the baseline, metric by metric."""
        return compare([self, *others], metrics, candidates=candidates)

    def export(self, path: str | Path, **form: Unpack[BundleForm]) -> Path:
        """Write the model for devices: a folder that numpy alone can serve."""
        return export(self.model, path, **form)

    # ------------------------------------------------------------ lists in files

    def write_lists(
        self,
        path: str | Path,
        k: int = 10,
        *,
        part: Part | None = None,
        threads: int | None = None,
        progress: Callable[[float], None] = lambda share: None,
        **chosen: Unpack[FilterOptions],
    ) -> Path:
        """Write everybody's lists into a file: .csv, .jsonl, .parquet, or .trec for evaluators.

        With a ``part`` the lists are those of the evaluation: of the evaluated users, from their
        histories before the validation or test items. `write_qrels` writes these items.
        """
        target, model = checked_path(path), self.model
        if target.suffix not in LIST_WRITERS:
            known = ", ".join(LIST_WRITERS)
            raise ConfigError(f"{target}: the name of a file of lists ends in one of {known}")
        filtered, threads = Filter.of(model.data, chosen), threads or usable_cores()
        users, past = np.arange(len(model.data.users)), None
        if part is not None:
            self.summary.require_figures("this run", "evaluate")
            evaluator, histories = self.evaluator(threads), self.split.history(part)
            users, past = evaluator.users[part], partial(_past, evaluator, histories)

        def rows() -> ListRows:
            lists = model.lists(users, k, filtered, threads, past)
            for done, (user, lines) in enumerate(zip(users, lists, strict=True), 1):
                yield from list_rows(str(model.data.users[user]), lines)
                progress(done / len(users))

        with atomic_file(target) as written:
            LIST_WRITERS[target.suffix](written, rows(), model.method.name)
        return target

    def write_qrels(self, path: str | Path, part: Part = "test") -> Path:
        """Write the held-out items of the evaluated users as TREC relevance judgements."""
        self.summary.require_figures("this run", "evaluate")
        target, data = checked_path(path), self.model.data
        users, heldout = self.evaluator(1).users[part], self.split.heldout(part)
        with atomic_file(target) as written, written.open("w", encoding="utf-8") as file:
            for user in users.tolist():
                for item in heldout[user].tolist():
                    file.write(trec_line(data.users[user], 0, data.items[item], 1))
        return target

    @property
    def _recommender(self) -> Model:
        return self.model


def _same_split(folder: RunFolder, experiment: Experiment, data: Interactions | None) -> Split:
    """Return the split that a run was trained on; refuse data that has changed."""
    try:
        data = data or experiment.load_data()
    except ConfigError as error:
        raise ConfigError(
            f"{error}; in Python, give a run of data in memory its data again: Run.open(path, data)"
        ) from None
    split = experiment.split_data(data)
    if folder.read_checkpoint(FINAL).data != split.digest():
        raise RunError(
            f"{folder.path}: the data '{experiment.data}' has changed since training, and this "
            "needs the rows that were held out then: put the old file back, or train again"
        )
    return split


def _past(
    evaluator: Evaluator, histories: TrainView, users: UserIndices
) -> tuple[TrainView, Ragged]:
    """Return histories as an evaluation has them, and the items that are no candidates."""
    view = histories.take(users)
    return view, evaluator.seen(users, view)


ListRows = Iterator[tuple[Any, ...]]
"""Rows of `LIST_COLUMNS`."""
PARQUET_ROWS = 2**16
"""Rows that are written to a Parquet file at a time."""


def _write_csv(path: Path, rows: ListRows, tag: str) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(LIST_COLUMNS)
        writer.writerows(rows)


def _write_jsonl(path: Path, rows: ListRows, tag: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            line = json.dumps(dict(zip(LIST_COLUMNS, row, strict=True)), ensure_ascii=False)
            file.write(f"{line}\n")


def _write_parquet(path: Path, rows: ListRows, tag: str) -> None:
    arrow = imported("pyarrow", "a Parquet file", "parquet")
    text, kinds = arrow.string(), {"rank": arrow.int64(), "score": arrow.float64()}
    schema = arrow.schema([(name, kinds.get(name, text)) for name in LIST_COLUMNS])
    parquet = imported("pyarrow.parquet", "a Parquet file", "parquet")
    with parquet.ParquetWriter(path, schema) as writer:
        while some := list(islice(rows, PARQUET_ROWS)):
            writer.write_table(Rows.of(LIST_COLUMNS, some).to_arrow().cast(schema))


def _write_trec(path: Path, rows: ListRows, tag: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        for user, rank, item, _, score, _ in rows:
            file.write(trec_line(user, "Q0", item, rank, f"{score:.9g}", tag))


def trec_line(*fields: object) -> str:
    """Return a line of a TREC file; refuse ids that its format cannot hold."""
    texts = [str(field) for field in fields]
    for text in texts:
        if text.split() != [text]:
            raise ConfigError(
                f"'{text}' is empty or has spaces, which divide the columns of a TREC file: write "
                "the lists as .csv or .jsonl"
            )
    return " ".join(texts) + "\n"


LIST_WRITERS: Mapping[str, Callable[[Path, ListRows, str], None]] = {
    ".csv": _write_csv,
    ".jsonl": _write_jsonl,
    ".parquet": _write_parquet,
    ".trec": _write_trec,
}
"""Writers of lists by the suffix of a file's name."""
