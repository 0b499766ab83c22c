"""`train` and `Run`: the Python face of hushrec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from hushrec.backends.inprocess import THIS_MACHINE, Machine
from hushrec.checkpoint import (
    SELECTED,
    Diary,
    alike,
    load_model,
    restore,
    restore_private,
    saved_key,
)
from hushrec.clients import Protocol, Ragged, TrainView
from hushrec.config import Experiment, make_experiment
from hushrec.data import Interactions, load
from hushrec.data.features import of_newcomer
from hushrec.errors import ConfigError, InputError, RunError
from hushrec.evaluate.evaluator import Evaluator, PartRanks
from hushrec.evaluate.ranking import Ranks, top_k
from hushrec.formats import Seeds
from hushrec.methods.base import Method, Shared
from hushrec.methods.capabilities import Explains
from hushrec.paths import checked
from hushrec.prepare import Prepared, plan_privacy, population_of, prepare
from hushrec.rng import Streams
from hushrec.round import NoJournal, RoundReport, State, run_rounds
from hushrec.run_folder import FINAL, SEEDS, RunFolder
from hushrec.run_place import left_off, new_place, resumed_place
from hushrec.serve.fold_in import fold_in
from hushrec.split import Part, Split, make_split
from hushrec.store import PrivateStore
from hushrec.summary import mean_summary, summarise


@dataclass(frozen=True)
class Recommendation:
    """One line of a list."""

    item: str
    title: str
    score: float
    because: str = ""
    """Whose voice spoke for it most, where a method mixes several."""


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
        split = make_split(
            data or load(experiment.data, items=experiment.items),
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

    def evaluator(self, threads: int) -> Evaluator:
        """Return the evaluation side of this run."""
        experiment = self.experiment
        tolerant = experiment.privacy.promises
        return Evaluator(self.split, experiment.evaluation, self._streams, threads, tolerant)

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
        found = items[:, items[0] >= 0]
        voices = [""] * found.shape[1]
        if isinstance(self.method, Explains):
            (voices,) = self.method.voices(self.shared, view, found)
        return [
            Recommendation(str(data.items[item]), data.title(item), float(value), voice)
            for item, value, voice in zip(found[0], values[0], voices, strict=False)
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
            user_features=of_newcomer(self.split.train.user_features, features),
        )
        # Whoever names an item without a rating means that they like it.
        liked = np.full(len(latest_first), self.split.data.value.max(), np.float32)
        return _one_client(newcomer, np.array(latest_first[::-1], np.int32), liked)


class Conduct(TypedDict, total=False):
    """How a run is conducted, which does not change its result."""

    machine: Machine
    on_round: Callable[[RoundReport], None]
    """Called after every round."""
    should_stop: Callable[[], bool]
    """Asked after every round; the run is saved before it stops."""
    scratch: Path | None
    """Where private parameters lie that outgrow the memory; in the run's folder unless it moves."""


class TrainOptions(Conduct, total=False):
    """What `train` may be told besides data and method."""

    preset: str | None
    protocol: Protocol | None
    rounds: int | None
    seed: int | None
    settings: Mapping[str, Any] | None
    """The method's options and dotted keys of the other sections, for example
    ``{"lr": 0.05, "cohort.kind": "fixed", "cohort.size": 200}``."""
    overwrite: bool
    resume: bool


WISHES = ("preset", "protocol", "rounds", "seed", "settings")


def train(
    data: Interactions | str,
    method: str = "pfedrec",
    *,
    out: str | Path | None = None,
    **options: Unpack[TrainOptions],
) -> Run:
    """Train a method and evaluate it; with ``out``, leave a run folder behind.

    `TrainOptions` lists what else may be said.
    """
    interactions = load(data) if isinstance(data, str) else data
    place, resume = None if out is None else checked(out), options.get("resume", False)
    if resume:
        if place is None:
            raise ConfigError("resume needs the run folder in 'out'")
        for key in WISHES:
            if options.get(key):
                raise ConfigError(f"resume goes on with the run's own settings: leave out '{key}'")
        experiment = RunFolder.open(left_off(place)).experiment()
    else:
        experiment = _asked_for(interactions, method, options)
    if place is None:
        return train_experiment(experiment, interactions, **_conduct(options))
    overwrite = options.get("overwrite", False)
    with resumed_place(place) if resume else new_place(place, overwrite=overwrite) as here:
        conduct = _conduct(options, place if here != place else None)
        run = train_experiment(experiment, interactions, here, resume, **conduct)
    run.folder = RunFolder(place)
    return run


def train_experiment(
    experiment: Experiment,
    interactions: Interactions,
    out: Path | None = None,
    resume: bool = False,
    **conduct: Unpack[Conduct],
) -> Run:
    """Train and evaluate what a complete experiment says; `train` makes one from its arguments."""
    folder = RunFolder.open(out) if resume and out is not None else None
    experiment.make_method()  # refused before anything is split
    streams = Streams(experiment.seed)
    split = make_split(interactions, experiment.split, streams, experiment.silos)
    # What cannot be drawn or cannot be guaranteed is refused before anything is written.
    experiment.cohort.draw(len(population_of(experiment, split)), streams, 1)
    plan = plan_privacy(experiment, split)
    if out is not None and folder is None:
        folder = RunFolder.create(out, experiment)
    machine = conduct.get("machine", THIS_MACHINE)
    with folder.locked() if folder else nullcontext():
        key = saved_key(folder) if folder and resume else None
        scratch = conduct.get("scratch") or (folder.path if folder else None)
        server, state = prepare(experiment, split, plan, machine, scratch, key)
        if folder and resume:
            restore(state, server.backend, folder)
        journal = Diary(folder, server.backend, machine.checkpoint_seconds) if folder else None
        told, stop = conduct.get("on_round", _say_nothing), conduct.get("should_stop", _go_on)
        run_rounds(server, state, journal or NoJournal(), told, stop)
        parts: tuple[Part, ...] = ("valid", "test")
        for part in parts:
            serving = server.serving(state.selected_shared)
            server.backend.evaluate(serving, part, selected=True)
        if journal:
            journal.finish(state)
        summary = summarise(server, split, state, interactions)
        if folder:
            folder.write_arrays("users.npz", ranks_to_arrays(server.backend.ranks))
            folder.write_json("summary.json", summary)
    return Run.of(server, split, state, summary, folder)


def train_seeds(
    data: Interactions | str,
    method: str,
    seeds: Sequence[int],
    out: str | Path,
    on_seed: Callable[[int], None] = lambda seed: None,
    **options: Unpack[TrainOptions],
) -> dict[str, Any]:
    """Train once per seed, each in ``out/seed-N``; return and store the mean over the seeds."""
    place, resume = checked(out), options.get("resume", False)
    interactions = load(data) if isinstance(data, str) else data
    if resume:
        folder = RunFolder.open(left_off(place))
        seeds, first = folder.read_json(SEEDS, Seeds)["seeds"], folder.experiment()
    else:
        options["seed"] = seeds[0]
        first = _asked_for(interactions, method, options)
    overwrite = options.get("overwrite", False)
    with resumed_place(place) if resume else new_place(place, overwrite=overwrite) as top:
        folder = RunFolder(top) if resume else RunFolder.create(top, first, seeds)
        conduct, summaries = _conduct(options, place if top != place else None), []
        for seed in seeds:
            part = top / f"seed-{seed}"
            on_seed(seed)
            if (part / "summary.json").exists():
                summaries.append(RunFolder.open(part).read_summary())
                continue
            started = (part / "config.toml").exists()
            experiment = _of_seed(first, seed)
            run = train_experiment(experiment, interactions, part, started, **conduct)
            summaries.append(dict(run.summary))
        summary = mean_summary(summaries)
        folder.write_json("summary.json", summary)
    return summary


def _of_seed(first: Experiment, seed: int) -> Experiment:
    """Return the experiment with another seed; where noise is repeatable, with other noise too."""
    privacy = first.privacy
    if privacy.noise_seed is not None:
        later = privacy.noise_seed + seed - first.seed
        privacy = privacy.model_copy(update={"noise_seed": later})
    return first.model_copy(update={"seed": seed, "privacy": privacy})


def _say_nothing(report: RoundReport) -> None:
    """Report to nobody."""


def _go_on() -> bool:
    """Never stop early."""
    return False


def _asked_for(data: Interactions, method: str, options: TrainOptions) -> Experiment:
    return make_experiment(
        data.name,
        method,
        items=data.items_file,
        preset=options.get("preset"),
        settings=options.get("settings"),
        protocol=options.get("protocol"),
        rounds=options.get("rounds"),
        seed=options.get("seed"),
    )


def _conduct(options: TrainOptions, scratch: Path | None = None) -> Conduct:
    conduct: Conduct = {"scratch": scratch}
    if "machine" in options:
        conduct["machine"] = options["machine"]
    if "on_round" in options:
        conduct["on_round"] = options["on_round"]
    if "should_stop" in options:
        conduct["should_stop"] = options["should_stop"]
    return conduct


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
    try:
        for part, candidates in sorted({tuple(name.split("/")[:2]) for name in arrays}):
            prefix = f"{part}/{candidates}/"
            ranks.setdefault(part, {})[candidates] = Ranks.from_arrays(arrays, prefix)
        ranks["valid"]["full"], ranks["test"]["full"]
    except (InputError, ValueError, KeyError) as error:
        raise RunError(f"{folder.path / 'users.npz'} is damaged: {error}") from None
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
