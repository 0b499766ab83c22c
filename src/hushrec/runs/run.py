"""`Run`: a trained model with its results, in memory or in its folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from hushrec.data import Interactions, load
from hushrec.data.features import of_newcomer
from hushrec.data.splitting import Part, Split, join, make_split
from hushrec.data.views import Ragged, TrainView, chunks
from hushrec.errors import ConfigError, RunError
from hushrec.evaluation.baselines import chance_ranks, popularity_ranks
from hushrec.evaluation.evaluator import Evaluator, PartRanks
from hushrec.evaluation.metrics import ListMetric, parse_metric, summarise
from hushrec.evaluation.ranking import top_k
from hushrec.federation.backends.base import Backend
from hushrec.federation.backends.simulation import usable_cores
from hushrec.federation.experiment import Experiment
from hushrec.federation.rounds import State
from hushrec.federation.setup import Prepared
from hushrec.io.files import checked_path
from hushrec.io.rows import Rows
from hushrec.methods.base import Explains, Method, Shared
from hushrec.private.store import PrivateStore
from hushrec.runs.checkpoint import SELECTED, Diary, alike, load_model, restore_private
from hushrec.runs.comparison import ComparedRun, compare_runs
from hushrec.runs.folder import FINAL, RunFolder, new_place, read_ranks
from hushrec.serving.bundle import BundleForm, export
from hushrec.serving.fold_in import fold_in
from hushrec.streams import Streams

Measured = dict[str, dict[str, float]]
"""Metrics by candidates and name."""


@dataclass(frozen=True)
class Recommendation:
    """One line of a list."""

    item: str
    title: str
    score: float
    because: str = ""
    """Whose voice spoke for it most, where a method mixes several."""


@dataclass(frozen=True)
class Unsaved:
    """What the folder of a run that is only in memory would have besides results."""

    state: State
    backend: Backend
    lines: Sequence[dict[str, Any]]

    def write(self, folder: RunFolder) -> None:
        """Write the rounds and the model."""
        folder.write_text("metrics.jsonl", "".join(f"{json.dumps(one)}\n" for one in self.lines))
        Diary(folder, self.backend, 0).finish(self.state)


class Run:
    """A trained model with its results; from `train`, or read back with `Run.open`."""

    def __init__(
        self,
        experiment: Experiment,
        split: Split,
        method: Method,
        shared: Shared,
        store: PrivateStore,
        summary: Mapping[str, Any],
        ranks: Mapping[str, PartRanks],
        folder: RunFolder | None,
    ) -> None:
        self.experiment = experiment
        self.split = split
        self.method = method
        self.shared = shared
        self.store = store
        self.summary = summary
        self.ranks = ranks
        self.folder = folder
        self._streams = Streams(experiment.seed)
        self.unsaved: Unsaved | None = None

    @classmethod
    def of(
        cls,
        server: Prepared,
        split: Split,
        state: State,
        summary: Mapping[str, Any],
        folder: RunFolder | None,
    ) -> Run:
        """Return the run that has just been trained."""
        store, ranks = server.backend.selected, server.backend.ranks
        assert store is not None, "the last round is always looked at"
        method, shared = server.task.method, state.selected_shared
        return cls(server.experiment, split, method, shared, store, summary, ranks, folder)

    @classmethod
    def open(cls, path: str | Path, data: Interactions | None = None) -> Run:
        """Read a finished run; its data is loaded by name unless given."""
        folder = RunFolder.open(Path(path))
        summary = folder.read_summary()
        if isinstance(summary.get("seed"), list):
            raise RunError(
                f"{path} holds several seeds: name one of its folders, for example "
                f"{Path(path) / summary['runs'][0]}"
            )
        experiment = folder.experiment()
        streams = Streams(experiment.seed)
        given = data or _found_again(experiment)
        split = make_split(given, experiment.split, streams, experiment.silos)
        state = folder.read_checkpoint(FINAL)
        if state.get("data") != split.digest():
            raise RunError(
                f"{path}: the data '{experiment.data}' has changed since this run was trained"
            )
        method = experiment.make_method()
        view = split.train_view(experiment.protocol)
        shared_shapes = method.init(view, streams)
        fields = method.private_fields(view, shared_shapes, streams)
        store = PrivateStore.create(fields, len(view.clients), experiment.store, None)
        shared, parts = load_model(folder, FINAL, SELECTED, state["files"])
        restore_private(store, parts, path)
        for name, array in method.serving(shared_shapes).items():
            if name not in shared or not alike(shared[name], array):
                raise RunError(
                    f"{path}: the model does not fit the data '{experiment.data}' any more; "
                    "has the data changed since training?"
                )
        return cls(experiment, split, method, shared, store, summary, read_ranks(folder), folder)

    @property
    def data(self) -> Interactions:
        """What it was trained on."""
        return self.split.data

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Test metrics: ``metrics["full"]["hr@10"]``."""
        return dict(self.summary["test"])

    @property
    def lines(self) -> list[dict[str, Any]]:
        """A line for each round, as in metrics.jsonl."""
        if self.unsaved is not None:
            return list(self.unsaved.lines)
        assert self.folder is not None, "a run is in memory or in a folder"
        return self.folder.read_metrics()

    def __repr__(self) -> str:
        summary, figures = self.summary, self.metrics["full"]
        shown = [name for name in ("hr@10", "ndcg@10") if name in figures] or list(figures)[:2]
        values = ", ".join(f"{name} {figures[name]:.4f}" for name in shown)
        mark = f"; {summary['protocol_mark']}" if summary["protocol_mark"] else ""
        place = "in memory" if self.folder is None else str(self.folder.path)
        return (
            f"<Run {summary['method']} on {summary['data']}, seed {summary['seed']}: test {values} "
            f"at round {summary['selected_round']} of {summary['rounds']}{mark}; {place}>"
        )

    # ------------------------------------------------------------ measured and kept

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write a run that is only in memory into a folder, as ``train(out=…)`` would have."""
        if self.unsaved is None:
            where = "" if self.folder is None else f" in {self.folder.path}"
            raise RunError(f"this run is saved already{where}: copy that folder")
        place = checked_path(path)
        with new_place(place, overwrite=overwrite) as here:
            folder = RunFolder.create(here, self.experiment)
            self.unsaved.write(folder)
            folder.write_results(self.ranks, self.summary)
        self.folder, self.unsaved = RunFolder(place), None
        return place

    def evaluator(self, threads: int) -> Evaluator:
        """Return the evaluation side of this run."""
        experiment = self.experiment
        tolerant = experiment.privacy.promises
        return Evaluator(self.split, experiment.evaluation, self._streams, threads, tolerant)

    def evaluate(self, *metrics: str, part: Part = "test", threads: int | None = None) -> Rows:
        """Score the held-out items again: a row for each metric, of the model and its yardsticks.

        ``run.evaluate("hr@50", "coverage@20")``; without names, what a run reports.
        """
        own, yardsticks = self.measure(metrics, part, threads or usable_cores())
        return Rows.of(
            ("scorer", "candidates", "metric", "value"),
            [
                (scorer, candidates, name, value)
                for scorer, by_candidates in (yardsticks | {self.method.name: own}).items()
                for candidates, values in by_candidates.items()
                for name, value in values.items()
            ],
        )

    def measure(
        self, metrics: Sequence[str], part: Part, threads: int
    ) -> tuple[Measured, dict[str, Measured]]:
        """Return the model's metrics by candidates and name, and those of each yardstick.

        Metrics of lists stand under full, and only the model has any.
        """
        evaluator = self.evaluator(threads)
        parsed = {name: parse_metric(name) for name in metrics}
        of_lists = {n: metric for n, metric in parsed.items() if isinstance(metric, ListMetric)}
        names = [n for n in parsed if n not in of_lists] or evaluator.config.metric_names()

        def table(source: PartRanks) -> Measured:
            return {candidates: summarise(value, names) for candidates, value in source.items()}

        popularity = popularity_ranks(evaluator, part)
        own = table(evaluator.rank(self.method, self.shared, self.store, part))
        counts = np.bincount(self.split.train.positives.values, minlength=self.data.n_items)
        for name, metric in of_lists.items():
            length = min(metric.k, self.data.n_items)
            top = evaluator.top_items(self.method, self.shared, self.store, part, length)
            own["full"][name] = metric.value(top, counts)
        ranked = {"popularity": popularity, "chance": chance_ranks(popularity)}
        return own, {name: table(ranks) for name, ranks in ranked.items()}

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
        return export(self, path, **form)

    # ------------------------------------------------------------ recommended

    def recommend(
        self,
        user: str | int,
        k: int = 10,
        history: Iterable[str | int] | None = None,
        features: Mapping[str, str] | None = None,
    ) -> list[Recommendation]:
        """Return the best k items that the user has not touched.

        A user unknown to the run is folded in from ``history``, item ids oldest first: the device
        trains its private part, or its copy of the shared one, on it; the shared part and everybody
        else stay as they are. ``features`` are what such a user says of themselves.
        """
        if history is None:
            if features:
                raise ConfigError(f"the data has the features of user '{user}': leave them out")
            (mine,) = self._lists(self._numbers([user]), k, threads=1)
            return mine
        view = self._from_history(history, features or {})
        private = fold_in(self.method, self.shared, view, self._streams)
        private = self.method.adapt(self.shared, private, view, self._streams)
        (mine,) = self._best(view, self.method.score(self.shared, private, view), k)
        return mine

    def recommend_table(
        self, users: Iterable[str | int] | None = None, k: int = 10, threads: int | None = None
    ) -> Rows:
        """Return the lists of many users, of everybody if none are named: a row for each place.

        ``run.recommend_table(["1", "2"]).to_pandas()``, or ``polars.DataFrame(…)`` of it.
        """
        everybody = self.data.users.tolist()
        named = everybody if users is None else [str(user) for user in users]
        lists = self._lists(self._numbers(named), k, threads or usable_cores())
        return Rows.of(
            ("user", "place", *(field.name for field in fields(Recommendation))),
            [
                (user, place, *vars(line).values())
                for user, lines in zip(named, lists, strict=True)
                for place, line in enumerate(lines, 1)
            ],
        )

    def _numbers(self, users: Sequence[str | int]) -> NDArray[np.int64]:
        position = {user: number for number, user in enumerate(self.data.users.tolist())}
        for user in users:
            if str(user) not in position:
                raise ConfigError(
                    f"user '{user}' is unknown to this run; give their items with --history FILE"
                )
        return np.array([position[str(user)] for user in users], np.int64)

    def _lists(self, users: NDArray[np.int64], k: int, threads: int) -> list[list[Recommendation]]:
        """Return the lists of users that the run knows, by what the evaluation looked at."""
        evaluator, past = self.evaluator(threads), self.split.history("test")

        def work(some: NDArray[np.int64]) -> list[list[Recommendation]]:
            view = self._everything(past, some)
            scores = evaluator.scores(self.method, self.shared, self.store, some, view)
            return self._best(view, scores, k)

        chunk = evaluator.chunk(self.method, self.shared, self.store.bytes_per_user)
        with ThreadPoolExecutor(threads) as pool:
            return [mine for some in pool.map(work, chunks(users, chunk)) for mine in some]

    def _best(
        self, view: TrainView, scores: NDArray[np.float32], k: int
    ) -> list[list[Recommendation]]:
        """Return each client's best items that are not in its history."""
        data, seen = self.data, view.positives
        items, values = top_k(scores, seen.indptr, seen.values, min(int(k), data.n_items))
        voices = [[""] * items.shape[1]] * len(items)
        if isinstance(self.method, Explains):
            voices = self.method.voices(self.shared, view, items)
        return [
            [
                Recommendation(str(data.items[item]), data.title(item), float(value), voice)
                for item, value, voice in zip(*listed, strict=True)
                if item >= 0
            ]
            for listed in zip(items, values, voices, strict=True)
        ]

    def _everything(self, past: TrainView, users: NDArray[np.int64]) -> TrainView:
        """Return users' whole histories, held-out items included: nobody wants those again."""
        mine, split = past.take(users), self.split
        rest = join(split.test.take(users), split.disliked.take(users))
        ones = Ragged(rest.indptr, np.ones(len(rest.values), np.float32))
        return _with_history(mine, join(mine.positives, rest), join(mine.values, ones))

    def _from_history(self, history: Iterable[str | int], features: Mapping[str, str]) -> TrainView:
        position = {item: index for index, item in enumerate(self.data.items.tolist())}
        known = [position[str(item)] for item in history if str(item) in position]
        if not known:
            raise ConfigError("none of the items in the history is in the catalogue of this run")
        latest_first = list(dict.fromkeys(reversed(known)))
        newcomer = replace(
            self.split.train.take(np.zeros(1, np.int64)),
            users=np.array([self.split.n_users], np.int32),
            user_features=of_newcomer(self.split.train.user_features, features),
        )
        indptr, items = np.array([0, len(latest_first)]), np.array(latest_first[::-1], np.int32)
        # Whoever names an item without a rating means that they like it.
        liked = np.full(len(latest_first), self.data.value.max(), np.float32)
        return _with_history(newcomer, Ragged(indptr, items), Ragged(indptr, liked))


def _found_again(experiment: Experiment) -> Interactions:
    try:
        return load(experiment.data, items=experiment.items)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; in Python, give a run of data in memory its data again: Run.open(path, data)"
        ) from None


def _with_history(client: TrainView, items: Ragged, values: Ragged) -> TrainView:
    """Return clients with these histories, oldest first, in place of their own."""
    since = np.arange(len(items.values)) - np.repeat(items.indptr[:-1], items.lengths)
    return replace(
        client,
        positives=items,
        times=Ragged(items.indptr, since),
        values=values,
        never_negative=None,
    )
