"""`Run`: a trained model with its experiment and results, in memory or in a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Unpack

import numpy as np

from hushrec.data import Interactions
from hushrec.data.splitting import Part, Split, make_split
from hushrec.errors import ConfigError, RunError
from hushrec.evaluation.evaluator import Evaluator, PartRanks, chance_ranks, popularity_ranks
from hushrec.evaluation.metrics import ListMetric, parse_metric
from hushrec.federation.backends import Backend
from hushrec.federation.experiment import Experiment
from hushrec.federation.rounds import RoundLine, ServerState
from hushrec.io import usable_cores
from hushrec.io.codec import Rows, Tables
from hushrec.io.files import checked_path
from hushrec.runs.comparison import ComparedRun, compare_runs
from hushrec.runs.folder import FINAL, RunFolder, new_run_folder, read_ranks
from hushrec.runs.recording import SELECTED, CheckpointCallback, load_model
from hushrec.runs.schema import Summary
from hushrec.serving.bundle import BundleForm, export
from hushrec.serving.data import ServingData
from hushrec.serving.model import Model, Recommends
from hushrec.streams import Streams


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
    split: Split
    model: Model
    summary: Summary
    ranks: Mapping[str, PartRanks]
    folder: RunFolder | None
    unsaved: Unsaved | None = None

    @classmethod
    def open(cls, path: str | Path, data: Interactions | None = None) -> Run:
        """Read a finished run; its data is loaded by name unless given."""
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
        streams = Streams(experiment.seed)
        try:
            data = data or experiment.load_data()
        except ConfigError as error:
            raise ConfigError(
                f"{error}; in Python, give a run of data in memory its data again: "
                "Run.open(path, data)"
            ) from None
        split = make_split(data, experiment.split, streams, experiment.silos)
        state = folder.read_checkpoint(FINAL)
        if state.data != split.digest():
            raise RunError(f"{path}: the data '{experiment.data}' has changed since training")
        method = experiment.make_method()
        stored = load_model(folder, FINAL, SELECTED, state.files)
        served, tolerant = ServingData.of(split), experiment.privacy.promises
        try:
            model = Model.restored(method, stored, served, streams, tolerant, experiment.store)
        except RunError as error:
            changed = f"has the data '{experiment.data}' changed since training?"
            raise RunError(f"{path}: {error}; {changed}") from None
        ranks = {} if summary.final_of else read_ranks(folder)
        return cls(experiment, split, model, summary, ranks, folder)

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
            CheckpointCallback(folder, self.unsaved.backend, self.unsaved.state).save_final()
            folder.write_results(self.ranks, self.summary)
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
        metrics: Sequence[str] = ("hr@10", "ndcg@10"),
        candidates: str = "full",
    ) -> Rows:
        """Compare with other runs user by user, this one as the baseline, metric by metric."""
        rows = compare_runs([self, *others], metrics, candidates)
        names = [field.name for field in fields(ComparedRun)]
        return Rows.of(names, [tuple(vars(row).values()) for row in rows])

    def export(self, path: str | Path, **form: Unpack[BundleForm]) -> Path:
        """Write the model for devices: a folder that numpy alone can serve."""
        return export(self.model, path, **form)

    @property
    def _recommender(self) -> Model:
        return self.model
