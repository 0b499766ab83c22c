"""`train`: the Python interface of hushrec, which the command line calls too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, overload

from hushrec.config import find
from hushrec.data import Interactions, load
from hushrec.data.views import Protocol
from hushrec.errors import ConfigError, cut
from hushrec.federation.backends import THIS_MACHINE, Machine
from hushrec.federation.experiment import (
    NAMED,
    Experiment,
    ExperimentRequest,
    merged,
    option_hint,
    with_named,
)
from hushrec.federation.rounds import Callback, History, SimulationMetrics, finish, run_rounds
from hushrec.federation.setup import set_up
from hushrec.io.codec import Tables
from hushrec.io.files import checked_path
from hushrec.runs import recording
from hushrec.runs.folder import (
    FOLLOWED,
    SEEDS,
    SUMMARY,
    RunFolder,
    new_run_folder,
    resumable,
    resumed_run_folder,
)
from hushrec.runs.progress import python_display
from hushrec.runs.run import Run, Unsaved
from hushrec.runs.schema import Followed, Seeds, Summary
from hushrec.serving.data import ServingData
from hushrec.serving.model import Model

__all__ = ["Execution", "Run", "SeedRuns", "train"]


@dataclass(frozen=True)
class Execution:
    """How a run is executed, which does not change its result."""

    machine: Machine = THIS_MACHINE
    callbacks: Sequence[Callback] = ()
    overwrite: bool = False
    """Whether a run that is already in the folder is replaced."""
    resume: bool = False
    """Whether the run in the folder goes on."""


@dataclass(frozen=True, eq=False)
class SeedRuns(Sequence[Run]):
    """The runs of several seeds, in the order of the seeds, and the mean of their results.

    Runs in a folder are read when they are asked for, so that one of them is in memory at a time.
    """

    summary: Summary
    """Means over the seeds under the names of a single run, and standard deviations."""
    openers: Sequence[Callable[[], Run]]

    @property
    def metrics(self) -> Tables:
        """Mean test metrics: ``metrics["full"]["hr@10"]``."""
        return self.summary.test

    def __len__(self) -> int:
        return len(self.openers)

    def __getitem__(self, index: Any) -> Any:
        chosen = self.openers[index]
        return [each() for each in chosen] if isinstance(index, slice) else chosen()

    def __repr__(self) -> str:
        summary, means, spread = self.summary, self.metrics["full"], self.summary.test_sd or {}
        shown = [name for name in ("hr@10", "ndcg@10") if name in means] or list(means)[:2]
        values = ", ".join(
            f"{name} {means[name]:.4f} ± {spread['full'][name]:.4f}" for name in shown
        )
        return f"<SeedRuns {summary.method} on {summary.data}, seeds {summary.seed}: test {values}>"


@overload
def train(
    data: object = None, method: str | None = None, *, seeds: None = None, **options: Any
) -> Run: ...
@overload
def train(
    data: object = None, method: str | None = None, *, seeds: int | Sequence[int], **options: Any
) -> SeedRuns: ...
def train(
    data: object = None,
    method: str | None = None,
    *,
    out: str | Path | None = None,
    preset: str | None = None,
    protocol: Protocol | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    seeds: int | Sequence[int] | None = None,
    privacy: str | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    scale: float | None = None,
    clip: float | None = None,
    budgets: str | None = None,
    epsilon_min: float | None = None,
    epsilon_max: float | None = None,
    settings: Mapping[str, Any] | None = None,
    final: Run | str | Path | None = None,
    items: object = None,
    user: str | int | None = None,
    item: str | int | None = None,
    value: str | int | None = None,
    time: str | int | None = None,
    title: str | int | None = None,
    delimiter: str | None = None,
    threads: int | None = None,
    machine: Machine | None = None,
    callbacks: Sequence[Callback | str] = (),
    progress: bool | None = None,
    overwrite: bool = False,
    resume: bool = False,
    **options: Any,
) -> Run | SeedRuns:
    """Train a method and evaluate it; with ``out``, write a run folder.

    The keywords are the words of ``hushrec train``. Any other keyword is an option of the method:
    ``train(data, "fednext", neighbours=300)``.

    - ``data``: `Interactions`, or what `load` takes: a name, a file, a data frame, a matrix.
      ``items``, ``user``, ``item``, ``value``, ``time``, ``title`` and ``delimiter`` are then those
      of `load`. A run that is resumed, or followed, finds its data again.
    - ``method``: a name that ``hushrec methods`` lists; without one the default is trained.
    - ``seeds``: how many seeds are trained, from ``seed`` on, or a list of seeds. The result is
      `SeedRuns`; with ``out``, each run is in ``out/seed-N``.
    - ``privacy``, a mode such as ``"central"``, ``epsilon``, ``delta``, ``scale``, ``clip``,
      ``budgets``, ``epsilon_min`` and ``epsilon_max``: the guarantee.
    - ``settings``: options of the method, and dotted keys of the other sections:
      ``{"cohort.kind": "fixed", "cohort.size": 200}``.
    - ``preset``, ``protocol``, ``rounds``: as on the command line.
    - ``final``: a run, or its folder, whose options and selected number of rounds train a model on
      all interactions, those of ``data`` or else of the run. No figure belongs to that model.
    - ``threads``, or a whole ``machine``: they do not change the result.
    - ``progress``: by default a bar in a terminal or a notebook; True: elsewhere lines on standard
      error; False: nothing.
    - ``callbacks``: callbacks, or names of the entry point group ``hushrec.callbacks``.
    - ``overwrite`` replaces the run in ``out``; ``resume`` goes on with it.
    """
    named = {"privacy": privacy, "epsilon": epsilon, "delta": delta, "scale": scale, "clip": clip}
    named |= {"budgets": budgets, "epsilon_min": epsilon_min, "epsilon_max": epsilon_max}
    columns = {"user": user, "item": item, "value": value, "time": time, "title": title}
    reading = {"items": items, **columns, "delimiter": delimiter}
    what: dict[str, Any] = {"preset": preset, "protocol": protocol, "seed": seed}
    what |= {"settings": settings or None, **named, **options}
    folder = None if out is None else Path(out)
    followed: Followed | None = None
    if final is not None:
        _refuse_with(
            "final", what, method=method, rounds=rounds, seeds=seeds, resume=resume or None
        )
        followed, experiment = final_experiment(final)
        if data is None:
            data = final.data if isinstance(final, Run) else experiment.load_data()
    elif resume:
        _refuse_with("resume", what)
        if folder is None:
            raise ConfigError("resume needs the run folder in 'out'")
        begun = RunFolder.open(resumable(checked_path(folder)))
        begun.require_seeds(None if seeds is None else _numbers(seeds, seed))
        data = begun.experiment().load_data() if data is None else data
    request = ExperimentRequest(
        "",
        method,
        preset=preset,
        protocol=protocol,
        rounds=rounds,
        seed=seed,
        settings=merged(with_named(settings or {}, named), options),
    )
    if final is None and not resume:
        _refuse_unknown(request, options, named)
    numbers = None if seeds is None else _numbers(seeds, seed)
    loaded = _loaded(data, {name: given for name, given in reading.items() if given is not None})
    with python_display(progress) as display:
        called = [*display, *find_callbacks(callbacks)]
        execution = Execution(_machine(machine, threads), called, overwrite, resume)
        if followed is not None:
            return train_final(followed, experiment, loaded, folder, execution)
        if numbers is not None:
            return train_request_seeds(request, loaded, numbers, folder, execution)
        return train_request(request, loaded, folder, execution)


def train_request(
    request: ExperimentRequest,
    data: Interactions,
    out: Path | None = None,
    execution: Execution = Execution(),
) -> Run:
    """Train what a request asks for, or go on with the run in ``out``."""
    experiment = None
    if execution.resume:
        assert out is not None, "of the run that goes on"
        begun = RunFolder.open(resumable(checked_path(out)))
        experiment = recording.prolonged(begun, request.rounds)
        if request.method not in (None, experiment.method):
            raise ConfigError(f"{out} trains {experiment.method}: leave out {request.method}")
    experiment = experiment or request.of(data).experiment()
    return _train_in(out, experiment, data, execution)


def train_final(
    followed: Followed,
    experiment: Experiment,
    data: Interactions,
    out: Path | None = None,
    execution: Execution = Execution(),
) -> Run:
    """Train the experiment of `final_experiment` on all interactions of the data."""
    named = {"data": data.name, "items": data.items_file, "columns": data.columns or None}
    return _train_in(out, experiment.model_copy(update=named), data, execution, followed)


def final_experiment(run: Run | str | Path) -> tuple[Followed, Experiment]:
    """Return what a final model keeps of the run that it follows, and the experiment it trains."""
    if isinstance(run, Run):
        summary, experiment = run.summary, run.experiment
        name = f"{summary.method}, seed {summary.seed}"
        name = name if run.folder is None else str(run.folder.path)
    else:
        folder, name = RunFolder.open(Path(run)), str(run)
        summary, experiment = folder.read_summary(), folder.experiment()
    followed = Followed.of(name, summary)
    everything = experiment.split.model_copy(update={"hold_out": False})
    # Validation queries have selected the number of rounds; nothing is left to query.
    privacy = experiment.privacy.model_copy(update={"selection_share": None})
    changed = {"rounds": summary.shipped_round, "split": everything, "privacy": privacy}
    return followed, experiment.model_copy(update=changed)


def train_request_seeds(
    request: ExperimentRequest,
    data: Interactions,
    seeds: Sequence[int],
    out: Path | None,
    execution: Execution = Execution(),
    on_seed: Callable[[int], None] = lambda seed: None,
) -> SeedRuns:
    """Train what a request asks for once per seed, with ``out`` each in ``out/seed-N``."""
    if out is None:
        first = replace(request, seed=seeds[0]).of(data).experiment()
        runs = []
        for seed in seeds:
            on_seed(seed)
            runs.append(train_experiment(_with_seed(first, seed), data, None, execution))
        summary = recording.mean_summary([run.summary for run in runs])
        return SeedRuns(summary, [partial(_itself, run) for run in runs])
    top, resume = checked_path(out), execution.resume
    if resume:
        folder = RunFolder.open(resumable(top))
        seeds, first = folder.read(SEEDS, Seeds).seeds, folder.experiment()
        if request.rounds not in (None, first.rounds):
            raise ConfigError("several seeds cannot be prolonged: train anew with more rounds")
    else:
        first = replace(request, seed=seeds[0]).of(data).experiment().resolved(data)
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
        folder.write_results(summary)
    return SeedRuns(summary, [partial(Run.open, top / f"seed-{seed}", data) for seed in seeds])


def _train_in(
    out: Path | None,
    experiment: Experiment,
    data: Interactions,
    execution: Execution,
    final_of: Followed | None = None,
) -> Run:
    """Train an experiment in memory, or in a folder that appears when it is finished."""
    if out is None:
        return train_experiment(experiment, data, None, execution, final_of=final_of)
    folder = checked_path(out)
    with _run_folder(folder, execution) as (here, scratch):
        run = train_experiment(experiment, data, here, execution, scratch, final_of)
    run.folder = RunFolder(folder)
    return run


def train_experiment(
    experiment: Experiment,
    data: Interactions,
    out: Path | None = None,
    execution: Execution = Execution(),
    scratch: Path | None = None,
    final_of: Followed | None = None,
) -> Run:
    """Train and evaluate a complete experiment; `train` makes one from its arguments.

    ``scratch`` is a folder for private parameters that outgrow the memory; by default ``out``.
    ``final_of`` is the run that a final model follows.
    """
    resume, machine = execution.resume, execution.machine
    experiment = experiment.resolved(data)
    folder = RunFolder.open(out) if resume and out is not None else None
    if folder is not None and not experiment.split.hold_out:
        final_of = folder.read(FOLLOWED, Followed)
    if (final_of is None) != experiment.split.hold_out:
        raise ConfigError(
            "split.hold_out = false leaves nothing to evaluate on: train with a split, then train "
            "the final model with final=RUN",
            command="split.hold_out = false leaves nothing to evaluate on: train with a split, "
            "then train the final model with --final RUN",
        )
    split = experiment.split_data(data)
    served = ServingData.of(split)
    setup = set_up(experiment, split)  # refusals come before anything is written
    if out is not None and folder is None:
        folder = RunFolder.create(out, experiment)
        if final_of is not None:
            folder.write(FOLLOWED, final_of)
    with folder.locked() if folder else nullcontext():
        key = recording.saved_key(folder) if folder and resume else None
        training, state = setup.start(machine, scratch or (folder.path if folder else None), key)
        backend, method, history = training.backend, training.task.method, History()
        callbacks: list[Callback] = [SimulationMetrics(backend, method)]
        if folder is None:
            callbacks.append(history)
        else:
            every = machine.checkpoint_seconds
            saves = recording.CheckpointCallback(folder, backend, state, every, served)
            if resume and recording.restore(state, backend, folder, experiment.rounds):
                saves.reopen()
            callbacks.append(saves)
        callbacks += execution.callbacks
        run_rounds(training, state, callbacks)
        finish(training, state, callbacks)
        summary = recording.summarise(training, split, state, data, final_of)
        if folder:
            folder.write_results(summary, backend.ranks)
    assert backend.selected is not None, "the last round is always evaluated"
    model = Model(
        method,
        state.selected_shared,
        backend.selected,
        served,
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


def _refuse_with(word: str, given: Mapping[str, Any], **more: Any) -> None:
    """Refuse keywords beside one that takes all settings from a run."""
    for name, value in {**given, **more}.items():
        if value is not None:
            raise ConfigError(
                f"{word} goes on with the run's own settings: leave out '{cut(name)}'"
            )


def _refuse_unknown(
    request: ExperimentRequest, options: Mapping[str, Any], named: Mapping[str, Any]
) -> None:
    """Refuse keywords that are neither those of `train` nor options of the method."""
    method, found, _ = request.chosen()
    own, known = found.Config.model_fields, [*signature(train).parameters][:-1]
    for name in options:
        if name not in own:
            hint = option_hint(name, [*known, *own])
            raise TypeError(
                f"train() got an unexpected keyword argument '{cut(name)}', which is no option of "
                f"{method} either{hint}"
            )
    for name, value in named.items():
        if value is not None and name in own:
            raise ConfigError(
                f"{name} is an option of {method}, and of privacy: use settings={{'{name}': …}} or "
                f"settings={{'{NAMED[name]}': …}}"
            )


def _loaded(data: object, reading: Mapping[str, Any]) -> Interactions:
    """Return the data of a training, read by `load` unless it is read already."""
    if data is None:
        raise TypeError("train() needs data: a name, a file, a data frame or what load() returns")
    if not isinstance(data, Interactions):
        return load(data, **reading)
    for name in reading:
        raise ConfigError(f"the data is loaded already: give {name}= to load()")
    return data


def _numbers(seeds: int | Sequence[int], first: int | None) -> Sequence[int]:
    """Return the seeds to train: so many from the first one on, or those that are listed."""
    if isinstance(seeds, int):
        if seeds < 1:
            raise ConfigError(f"seeds = {seeds}: train at least one")
        return range(first or 0, (first or 0) + seeds)
    if first is not None:
        raise ConfigError("seed and a list of seeds say the same thing: leave one out")
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError("seeds = [] or with a seed twice: list every seed once")
    return seeds


def _machine(machine: Machine | None, threads: int | None) -> Machine:
    """Return the machine with so many threads; refuse another number in both."""
    if machine is None or threads is None:
        return machine or Machine(threads)
    if machine.threads not in (None, threads):
        raise ConfigError(
            f"threads is given twice, as {threads} and as {machine.threads}: leave one out"
        )
    return replace(machine, threads=threads)


def _itself(run: Run) -> Run:
    return run


def _with_seed(first: Experiment, seed: int) -> Experiment:
    """Return the experiment with another seed; where noise is repeatable, with other noise too."""
    privacy = first.privacy
    if privacy.noise_seed is not None:
        later = privacy.noise_seed + seed - first.seed
        privacy = privacy.model_copy(update={"noise_seed": later})
    return first.model_copy(update={"seed": seed, "privacy": privacy})
