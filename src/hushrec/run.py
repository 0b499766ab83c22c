"""`train` and `Run`: the Python face of hushrec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec import silos
from hushrec.clients import Protocol, Ragged, TrainView
from hushrec.config import Experiment, make_experiment
from hushrec.data import Interactions, load
from hushrec.data.features import with_newcomer
from hushrec.device.fold_in import fold_in
from hushrec.errors import ConfigError, RunError
from hushrec.evaluate.evaluator import Evaluator, PartRanks
from hushrec.evaluate.metrics import coverage, popularity_bias
from hushrec.evaluate.ranking import Ranks, top_k
from hushrec.evaluate.yardsticks import chance_ranks, popularity_ranks
from hushrec.memory import peak_rss_bytes
from hushrec.methods.base import Method, Shared
from hushrec.methods.capabilities import facts_of
from hushrec.rng import Streams
from hushrec.round import (
    THIS_MACHINE,
    Machine,
    Outcome,
    RoundReport,
    load_model,
    plan_privacy,
    run_rounds,
)
from hushrec.run_folder import FINAL, RunFolder, replacing
from hushrec.split import Split, make_split
from hushrec.store import PrivateStore

PUBLISHED_MARK = "published protocol (leaks the held-out item)"


@dataclass(frozen=True)
class Recommendation:
    """One line of a list."""

    item: str
    title: str
    score: float


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
        split = make_split(
            data or load(experiment.data),
            experiment.split,
            Streams(experiment.seed),
            experiment.silos,
        )
        state = folder.read_checkpoint(FINAL)
        if state.get("data") != split.digest():
            raise RunError(
                f"{path}: the data '{experiment.data}' has changed since this run was trained"
            )
        method = experiment.make_method()
        view, streams = split.train_view(experiment.protocol), Streams(experiment.seed)
        shared_shapes = method.init(view, streams)
        fields = method.private_fields(view, shared_shapes, streams)
        store = PrivateStore.create(fields, len(view.clients), experiment.store, None)
        shared = load_model(folder, FINAL, "selected", state["files"], store)
        for name, array in shared_shapes.items():
            if name not in shared or shared[name].shape != array.shape:
                raise RunError(
                    f"{path}: the model does not fit the data '{experiment.data}' any more; "
                    "has the data changed since training?"
                )
        return cls(experiment, split, method, shared, store, summary, read_ranks(folder), folder)

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Test metrics: ``metrics["full"]["hr@10"]``."""
        return dict(self.summary["test"])

    def evaluator(self, threads: int) -> Evaluator:
        """Return the evaluation side of this run."""
        return Evaluator(self.split, self.experiment.evaluation, self._streams, threads)

    def recommend(
        self,
        user: str,
        k: int = 10,
        history: Sequence[str] | None = None,
        features: Mapping[str, str] | None = None,
    ) -> list[Recommendation]:
        """Return the best k items that the user has not touched.

        A user unknown to the run is folded in from ``history``, item ids oldest first: the device
        trains its private part, or its copy of the shared one, on it; the shared part and everybody
        else stay as they are. ``features`` are what such a user says of themselves.
        """
        data = self.split.data
        number = data.user_index(user)
        if history is None:
            if number is None:
                raise ConfigError(
                    f"user '{user}' is unknown to this run; give their items with --history FILE"
                )
            if features:
                raise ConfigError(f"the data has the features of user '{user}': leave them out")
            view = self._everything(number)
            # The same parameters that the evaluation looked at.
            users, evaluator = np.array([number]), self.evaluator(threads=1)
            scores = evaluator.scores(self.method, self.shared, self.store, users, view)
        else:
            view = self._from_history(history, features or {})
            private = fold_in(self.method, self.shared, view, self._streams)
            private = self.method.adapt(self.shared, private, view, self._streams)
            scores = self.method.score(self.shared, private, view)
        seen = view.positives
        items, values = top_k(scores, seen.indptr, seen.values, min(int(k), data.n_items))
        return [
            Recommendation(str(data.items[item]), data.title(item), float(value))
            for item, value in zip(items[0], values[0], strict=True)
            if item >= 0
        ]

    def _everything(self, number: int) -> TrainView:
        """Return one user's whole history, held-out items included: nobody wants those again."""
        mine = np.array([number])
        past = self.split.history("test").take(mine)
        rest = (self.split.test[number], self.split.disliked[number])
        items = np.concatenate([past.positives.values, *rest])
        values = np.ones(len(items), np.float32)
        values[: len(past.values.values)] = past.values.values
        return _one_client(past, items, values)

    def _from_history(self, history: Sequence[str], features: Mapping[str, str]) -> TrainView:
        position = {str(item): index for index, item in enumerate(self.split.data.items)}
        known = [position[item] for item in history if item in position]
        if not known:
            raise ConfigError("none of the items in the history is in the catalogue of this run")
        latest_first = list(dict.fromkeys(reversed(known)))
        newcomer = replace(
            self.split.train.take(np.zeros(1, np.int64)),
            users=np.array([self.split.n_users], np.int32),
            user_features=with_newcomer(self.split.train.user_features, features),
        )
        # Whoever names an item without a rating means that they like it.
        liked = np.full(len(latest_first), self.split.data.value.max(), np.float32)
        return _one_client(newcomer, np.array(latest_first[::-1], np.int32), liked)


def train(
    data: Interactions | str,
    method: str = "pfedrec",
    *,
    preset: str | None = None,
    protocol: Protocol | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    machine: Machine = THIS_MACHINE,
    on_round: Callable[[RoundReport], None] = lambda report: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Run:
    """Train a method and evaluate it; with ``out``, leave a run folder behind.

    ``settings`` are the method's options and dotted keys of the other sections, for example
    ``{"lr": 0.05, "cohort.kind": "fixed", "cohort.size": 200}``.
    """
    interactions = load(data) if isinstance(data, str) else data
    if resume:
        if out is None:
            raise ConfigError("resume needs the run folder in 'out'")
        given = {"preset": preset, "protocol": protocol, "rounds": rounds, "seed": seed}
        for key, value in {**given, "settings": settings or None}.items():
            if value is not None:
                raise ConfigError(f"resume goes on with the run's own settings: leave out '{key}'")
        experiment = RunFolder.open(Path(out)).experiment()
    else:
        experiment = make_experiment(
            interactions.name,
            method,
            preset=preset,
            settings=settings,
            protocol=protocol,
            rounds=rounds,
            seed=seed,
        )
    place = None if out is None else Path(out)
    with replacing(place, overwrite=overwrite) if place and not resume else nullcontext():
        return train_experiment(
            experiment,
            interactions,
            out=place,
            resume=resume,
            machine=machine,
            on_round=on_round,
            should_stop=should_stop,
        )


def train_experiment(
    experiment: Experiment,
    interactions: Interactions,
    *,
    out: Path | None = None,
    resume: bool = False,
    machine: Machine = THIS_MACHINE,
    on_round: Callable[[RoundReport], None] = lambda report: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Run:
    """Train and evaluate what a complete experiment says; `train` makes one from its arguments."""
    folder = RunFolder.open(out) if resume and out is not None else None
    experiment.make_method()  # refused before anything is split
    streams = Streams(experiment.seed)
    split = make_split(interactions, experiment.split, streams, experiment.silos)
    # What cannot be drawn or cannot be guaranteed is refused before anything is written.
    experiment.cohort.draw(len(split.training_clients), streams, 1)
    plan = plan_privacy(experiment, split)
    if out is not None and folder is None:
        folder = RunFolder.create(out, experiment)
    with folder.locked() if folder else nullcontext():
        outcome = run_rounds(
            experiment,
            split,
            plan,
            machine=machine,
            folder=folder,
            resume=resume,
            on_round=on_round,
            should_stop=should_stop,
        )
        summary = summarise(experiment, split, outcome)
        if folder:
            folder.write_arrays("users.npz", ranks_to_arrays(outcome.ranks))
            folder.write_json("summary.json", summary)
    return Run(
        experiment,
        split,
        outcome.method,
        outcome.shared,
        outcome.store,
        summary,
        outcome.ranks,
        folder,
    )


def train_seeds(
    data: Interactions | str,
    method: str,
    seeds: Sequence[int],
    out: str | Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    on_seed: Callable[[int], None] = lambda seed: None,
    **options: Any,
) -> dict[str, Any]:
    """Train once per seed, each in ``out/seed-N``; return and store the mean over the seeds."""
    top = Path(out)
    interactions = load(data) if isinstance(data, str) else data
    if resume:
        folder = RunFolder.open(top)
        seeds, first = folder.read_json("seeds.json")["seeds"], folder.experiment()
    else:
        names = ("preset", "settings", "protocol", "rounds")
        given = {name: options.get(name) for name in names}
        first = make_experiment(interactions.name, method, seed=seeds[0], **given)
    how = {k: options[k] for k in ("machine", "on_round", "should_stop") if k in options}
    with nullcontext() if resume else replacing(top, overwrite=overwrite):
        if not resume:
            folder = RunFolder.create(top, first)
            folder.write_json("seeds.json", {"seeds": list(seeds)})
        summaries = []
        for seed in seeds:
            part = top / f"seed-{seed}"
            on_seed(seed)
            if (part / "summary.json").exists():
                summaries.append(RunFolder.open(part).read_summary())
                continue
            started = (part / "config.toml").exists()
            experiment = first.model_copy(update={"seed": seed})
            run = train_experiment(experiment, interactions, out=part, resume=started, **how)
            summaries.append(dict(run.summary))
        summary = mean_summary(summaries)
        folder.write_json("summary.json", summary)
    return summary


def mean_summary(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the summary of several seeds: means under the same names, and their spread."""

    def table(part: str, reduce: Callable[[list[float]], Any]) -> dict[str, dict[str, float]]:
        first = summaries[0][part]
        return {
            candidates: {
                name: float(reduce([summary[part][candidates][name] for summary in summaries]))
                for name in first[candidates]
            }
            for candidates in first
        }

    def mean(*path: str) -> float:
        values: list[Any] = list(summaries)
        for key in path:
            values = [value[key] for value in values]
        return float(np.mean(values))

    return {
        **summaries[0],
        "seed": [summary["seed"] for summary in summaries],
        "runs": [f"seed-{summary['seed']}" for summary in summaries],
        "rounds": [summary["rounds"] for summary in summaries],
        "selected_round": [summary["selected_round"] for summary in summaries],
        "test": table("test", np.mean),
        "valid": table("valid", np.mean),
        "test_sd": table("test", lambda values: np.std(values, ddof=1) if len(values) > 1 else 0),
        "lists": {name: mean("lists", name) for name in summaries[0]["lists"]},
        "communication": {
            key: round(mean("communication", key)) for key in ("up_bytes", "down_bytes")
        },
        "time": {key: mean("time", key) for key in ("total_s", "per_round_s")},
        "peak_rss_bytes": max(summary["peak_rss_bytes"] for summary in summaries),
        # Of one run; the weakest, where seeds stopped at different rounds.
        "privacy": max(
            (summary["privacy"] for summary in summaries), key=lambda said: said["epsilon"] or 0
        ),
    }


def summarise(experiment: Experiment, split: Split, outcome: Outcome) -> dict[str, Any]:
    """Return what summary.json holds; these names are a contract."""
    evaluator, state = outcome.evaluator, outcome.state
    chosen = (outcome.method, outcome.shared, outcome.store)
    top = evaluator.top_items(*chosen, "test", 10)
    counts = np.bincount(split.train.positives.values, minlength=split.data.n_items)
    n_test = len(evaluator.evaluated_users("test"))
    popularity = popularity_ranks(evaluator, "test")
    return {
        "method": experiment.method,
        "data": experiment.data,
        "protocol": experiment.protocol,
        "protocol_mark": PUBLISHED_MARK if experiment.protocol == "published" else None,
        "preset": experiment.preset,
        "options": experiment.options,
        "rounds": state.round,
        "selected_round": state.selected_round,
        "seed": experiment.seed,
        "test": evaluator.summarise(outcome.ranks["test"]),
        "valid": evaluator.summarise(outcome.ranks["valid"]),
        "yardsticks": {
            "popularity": evaluator.summarise(popularity),
            "chance": evaluator.summarise(chance_ranks(popularity)),
        },
        "model": dict(facts_of(outcome.method, outcome.shared)),
        "lists": {
            "coverage@10": coverage(top, split.data.n_items),
            "popularity_bias@10": popularity_bias(top, counts),
        },
        "users": {**split.facts(), "looked_at": n_test},
        "silos": None if split.holders is None else silos.facts(split.train, split.holders),
        "notes": list(split.data.notes),
        "communication": {"up_bytes": state.up_bytes, "down_bytes": state.down_bytes},
        "time": {"total_s": state.seconds, "per_round_s": state.seconds / max(1, state.round)},
        "peak_rss_bytes": peak_rss_bytes(),
        "privacy": dict(outcome.privacy),
    }


def ranks_to_arrays(ranks: Mapping[str, PartRanks]) -> dict[str, NDArray[Any]]:
    """Flatten the ranks of all parts and candidate sets for users.npz."""
    out: dict[str, NDArray[Any]] = {}
    for part, by_candidates in ranks.items():
        for candidates, value in by_candidates.items():
            out |= value.to_arrays(f"{part}/{candidates}/")
    return out


def read_ranks(folder: RunFolder) -> dict[str, dict[str, Ranks]]:
    """Read users.npz back."""
    arrays = folder.read_arrays("users.npz")
    ranks: dict[str, dict[str, Ranks]] = {}
    for part, candidates in sorted({tuple(name.split("/")[:2]) for name in arrays}):
        prefix = f"{part}/{candidates}/"
        ranks.setdefault(part, {})[candidates] = Ranks.from_arrays(arrays, prefix)
    return ranks


def _one_client(client: TrainView, items: NDArray[Any], values: NDArray[np.float32]) -> TrainView:
    """Return the client with this history in place of its own."""
    indptr = np.array([0, len(items)])
    return replace(
        client,
        positives=Ragged(indptr, items.astype(np.int32)),
        times=Ragged(indptr, np.arange(len(items))),
        values=Ragged(indptr, values),
        never_negative=None,
    )
