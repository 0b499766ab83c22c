"""`train`: the Python face of hushrec, and what the command line calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypedDict, Unpack

from hushrec.config import DEFAULT_METHOD
from hushrec.data import Interactions, load
from hushrec.data.splitting import Part, make_split
from hushrec.data.views import Protocol
from hushrec.errors import ConfigError
from hushrec.federation.backends.simulation import THIS_MACHINE, Machine
from hushrec.federation.experiment import Experiment, make_experiment
from hushrec.federation.rounds import Notes, RoundReport, run_rounds
from hushrec.federation.setup import plan_privacy, population_of, prepare
from hushrec.io.files import checked_path
from hushrec.runs.checkpoint import Diary, prolonged, restore, saved_key
from hushrec.runs.folder import SEEDS, RunFolder, left_off, new_place, resumed_place
from hushrec.runs.formats import Seeds
from hushrec.runs.run import Run, Unsaved
from hushrec.runs.summary import mean_summary, summarise
from hushrec.streams import Streams

__all__ = [
    "Conduct",
    "Run",
    "TrainOptions",
    "train",
    "train_experiment",
    "train_seeds",
]


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
    method: str = DEFAULT_METHOD,
    *,
    out: str | Path | None = None,
    **options: Unpack[TrainOptions],
) -> Run:
    """Train a method and evaluate it; with ``out``, leave a run folder behind.

    `TrainOptions` lists what else may be said.
    """
    interactions = load(data) if isinstance(data, str) else data
    place, resume = None if out is None else checked_path(out), options.get("resume", False)
    if resume:
        if place is None:
            raise ConfigError("resume needs the run folder in 'out'")
        for key in WISHES:
            if options.get(key) and key != "rounds":
                raise ConfigError(f"resume goes on with the run's own settings: leave out '{key}'")
        experiment = prolonged(RunFolder.open(left_off(place)), options.get("rounds"))
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
        diary = Diary(folder, server.backend, machine.checkpoint_seconds) if folder else None
        if diary and resume and restore(state, server.backend, diary.folder, experiment.rounds):
            diary.reopen(state)
        notes = Notes()
        told, stop = conduct.get("on_round", _say_nothing), conduct.get("should_stop", _go_on)
        run_rounds(server, state, diary or notes, told, stop)
        parts: tuple[Part, ...] = ("valid", "test")
        for part in parts:
            serving = server.serving(state.selected_shared)
            server.backend.evaluate(serving, part, selected=True)
        if diary:
            diary.finish(state)
        summary = summarise(server, split, state, interactions)
        if folder:
            folder.write_results(server.backend.ranks, summary)
    run = Run.of(server, split, state, summary, folder)
    if folder is None:
        run.unsaved = Unsaved(state, server.backend, notes.lines)
    return run


def train_seeds(
    data: Interactions | str,
    method: str,
    seeds: Sequence[int],
    out: str | Path,
    on_seed: Callable[[int], None] = lambda seed: None,
    **options: Unpack[TrainOptions],
) -> dict[str, Any]:
    """Train once per seed, each in ``out/seed-N``; return and store the mean over the seeds."""
    place, resume = checked_path(out), options.get("resume", False)
    interactions = load(data) if isinstance(data, str) else data
    if resume:
        folder = RunFolder.open(left_off(place))
        seeds, first = folder.read_json(SEEDS, Seeds)["seeds"], folder.experiment()
        if options.get("rounds") not in (None, first.rounds):
            raise ConfigError("several seeds cannot be prolonged: train anew with more rounds")
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
