"""`train`: the Python interface of hushrec, which the command line calls too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from hushrec.config import find
from hushrec.data import Interactions, load
from hushrec.data.splitting import make_split
from hushrec.data.views import Protocol
from hushrec.errors import ConfigError, nearest
from hushrec.federation import rounds
from hushrec.federation.backends import THIS_MACHINE, Machine
from hushrec.federation.experiment import Experiment, ExperimentRequest
from hushrec.federation.rounds import Callback
from hushrec.federation.setup import set_up
from hushrec.io.files import checked_path
from hushrec.runs import recording
from hushrec.runs.folder import (
    SEEDS,
    SUMMARY,
    RunFolder,
    new_run_folder,
    resumable,
    resumed_run_folder,
)
from hushrec.runs.run import Run, Unsaved
from hushrec.runs.schema import Seeds, Summary
from hushrec.serving.data import ServingData
from hushrec.serving.model import Model
from hushrec.streams import Streams

__all__ = ["Execution", "Run", "TrainOptions", "train", "train_seeds"]


@dataclass(frozen=True)
class Execution:
    """How a run is executed, which does not change its result."""

    machine: Machine = THIS_MACHINE
    callbacks: Sequence[Callback] = ()
    overwrite: bool = False
    """Whether a run that is already in the folder is replaced."""
    resume: bool = False
    """Whether the run in the folder goes on."""


class TrainOptions(TypedDict, total=False):
    """Keyword arguments of `train` besides data, method and ``out``."""

    preset: str | None
    protocol: Protocol | None
    rounds: int | None
    seed: int | None
    settings: Mapping[str, Any] | None
    """The method's options and dotted keys of the other sections, for example
    ``{"lr": 0.05, "cohort.kind": "fixed", "cohort.size": 200}``."""
    overwrite: bool
    resume: bool
    machine: Machine
    callbacks: Sequence[Callback | str]
    """Callbacks, or names of the entry point group ``hushrec.callbacks``."""


def train(
    data: Interactions | str,
    method: str | None = None,
    *,
    out: str | Path | None = None,
    **options: Unpack[TrainOptions],
) -> Run:
    """Train a method and evaluate it; with ``out``, write a run folder.

    Without a method the default one is trained. `TrainOptions` lists the other keyword arguments.
    """
    loaded = load(data) if isinstance(data, str) else data
    request, execution = _from_options(loaded, method, options)
    return train_request(request, loaded, None if out is None else Path(out), execution)


def train_seeds(
    data: Interactions | str,
    method: str | None,
    seeds: Sequence[int],
    out: str | Path,
    **options: Unpack[TrainOptions],
) -> Summary:
    """Train once per seed, each in ``out/seed-N``; return and store the mean over the seeds."""
    loaded = load(data) if isinstance(data, str) else data
    request, execution = _from_options(loaded, method, options)
    return train_request_seeds(request, loaded, seeds, Path(out), execution)


def train_request(
    request: ExperimentRequest,
    data: Interactions,
    out: Path | None = None,
    execution: Execution = Execution(),
) -> Run:
    """Train what a request asks for, or go on with the run in ``out``."""
    request = replace(request, data=data.name, items=data.items_file)
    if out is None:
        if execution.resume:
            raise ConfigError("resume needs the run folder in 'out'")
        return train_experiment(request.experiment(), data, None, execution)
    folder = checked_path(out)
    if execution.resume:
        for key in ("preset", "protocol", "seed", "settings"):
            if getattr(request, key):
                raise ConfigError(f"resume goes on with the run's own settings: leave out '{key}'")
        experiment = recording.prolonged(RunFolder.open(resumable(folder)), request.rounds)
    else:
        experiment = request.experiment()
    with _run_folder(folder, execution) as (here, scratch):
        run = train_experiment(experiment, data, here, execution, scratch)
    run.folder = RunFolder(folder)
    return run


def train_request_seeds(
    request: ExperimentRequest,
    data: Interactions,
    seeds: Sequence[int],
    out: Path,
    execution: Execution = Execution(),
    on_seed: Callable[[int], None] = lambda seed: None,
) -> Summary:
    """Train what a request asks for once per seed; return and store the mean over the seeds."""
    top, resume = checked_path(out), execution.resume
    if resume:
        folder = RunFolder.open(resumable(top))
        seeds, first = folder.read(SEEDS, Seeds).seeds, folder.experiment()
        if request.rounds not in (None, first.rounds):
            raise ConfigError("several seeds cannot be prolonged: train anew with more rounds")
    else:
        named = replace(request, data=data.name, items=data.items_file, seed=seeds[0])
        first = named.experiment()
    with _run_folder(top, execution) as (here, scratch):
        folder = RunFolder(here) if resume else RunFolder.create(here, first, seeds)
        summaries = []
        for seed in seeds:
            part = here / f"seed-{seed}"
            on_seed(seed)
            if (part / SUMMARY).exists():
                summaries.append(RunFolder.open(part).read_summary())
                continue
            started = replace(execution, resume=(part / "config.toml").exists())
            run = train_experiment(_with_seed(first, seed), data, part, started, scratch)
            summaries.append(run.summary)
        summary = recording.mean_summary(summaries)
        folder.write(SUMMARY, summary)
    return summary


def train_experiment(
    experiment: Experiment,
    data: Interactions,
    out: Path | None = None,
    execution: Execution = Execution(),
    scratch: Path | None = None,
) -> Run:
    """Train and evaluate a complete experiment; `train` makes one from its arguments.

    ``scratch`` is a folder for private parameters that outgrow the memory; by default ``out``.
    """
    resume, machine = execution.resume, execution.machine
    folder = RunFolder.open(out) if resume and out is not None else None
    split = make_split(data, experiment.split, Streams(experiment.seed), experiment.silos)
    setup = set_up(experiment, split)  # refusals come before anything is written
    if out is not None and folder is None:
        folder = RunFolder.create(out, experiment)
    with folder.locked() if folder else nullcontext():
        key = recording.saved_key(folder) if folder and resume else None
        training, state = setup.start(machine, scratch or (folder.path if folder else None), key)
        backend, method, history = training.backend, training.task.method, rounds.History()
        callbacks: list[Callback] = [rounds.SimulationMetrics(backend, method)]
        if folder is None:
            callbacks.append(history)
        else:
            saves = recording.CheckpointCallback(folder, backend, state, machine.checkpoint_seconds)
            if resume and recording.restore(state, backend, folder, experiment.rounds):
                saves.reopen()
            callbacks.append(saves)
        callbacks += execution.callbacks
        rounds.run_rounds(training, state, callbacks)
        rounds.finish(training, state, callbacks)
        summary = recording.summarise(training, split, state, data)
        if folder:
            folder.write_results(backend.ranks, summary)
    assert backend.selected is not None, "the last round is always evaluated"
    model = Model(
        method,
        state.selected_shared,
        backend.selected,
        ServingData.of(split),
        training.task.streams,
        experiment.privacy.promises,
    )
    unsaved = None if folder else Unsaved(state, backend, history.records)
    return Run(experiment, split, model, summary, backend.ranks, folder, unsaved)


def find_callbacks(callbacks: Sequence[Callback | str]) -> list[Callback]:
    """Return the callbacks, with those that are named made by their entry points."""
    made = [find("callbacks", each)() if isinstance(each, str) else each for each in callbacks]
    for callback in made:
        if not isinstance(callback, Callback):
            raise ConfigError(f"{callback!r} is not a hushrec Callback")
    return made


@contextmanager
def _run_folder(path: Path, execution: Execution) -> Iterator[tuple[Path, Path | None]]:
    """Yield where to write a run, and the scratch folder where that is another one."""
    new, overwrite = not execution.resume, execution.overwrite
    opened = new_run_folder(path, overwrite=overwrite) if new else resumed_run_folder(path)
    with opened as here:
        yield here, path if here != path else None


def _from_options(
    data: Interactions, method: str | None, options: TrainOptions
) -> tuple[ExperimentRequest, Execution]:
    """Sort keyword arguments into what is trained and how; refuse unknown ones."""
    for name in options:
        if name not in TrainOptions.__annotations__:
            hint = nearest(name, ("out", *TrainOptions.__annotations__))
            raise TypeError(f"train() got an unexpected keyword argument '{name}'{hint}")
    what: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    how = {field.name: what.pop(field.name) for field in fields(Execution) if field.name in what}
    how["callbacks"] = find_callbacks(how.get("callbacks", ()))
    return ExperimentRequest(data.name, method, **what), Execution(**how)


def _with_seed(first: Experiment, seed: int) -> Experiment:
    """Return the experiment with another seed; where noise is repeatable, with other noise too."""
    privacy = first.privacy
    if privacy.noise_seed is not None:
        later = privacy.noise_seed + seed - first.seed
        privacy = privacy.model_copy(update={"noise_seed": later})
    return first.model_copy(update={"seed": seed, "privacy": privacy})
