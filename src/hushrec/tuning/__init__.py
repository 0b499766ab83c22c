"""`tune`: a small search for a method's options, on validation items, under the honest protocol.

The method declares the space (`Tunable.search`). Trial 0 has the method's defaults, or the options
of a preset; optuna's tree-structured Parzen estimator proposes the others. A trial trains like
`hushrec train`, and its value is the best of its validation evaluations; a trial whose value so far
is in the lowest quarter at its round is stopped. Test items are never scored.

A folder holds the search: ``tune.json`` declares it, ``trials.jsonl`` has a line per trial, and
``tuned-honest.toml`` is the best trial so far, as a preset. Called again with the same folder, the
search is resumed, with the result of an uninterrupted one: a proposal depends on the seed and the
finished trials alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w

from hushrec.data import Interactions
from hushrec.data.splitting import make_split
from hushrec.errors import ConfigError, DivergedError, MissingExtraError, RunError, StoppedError
from hushrec.federation.backends import THIS_MACHINE, Machine
from hushrec.federation.experiment import Experiment, ExperimentRequest
from hushrec.federation.rounds import Callback, RoundRecord, run_rounds
from hushrec.federation.setup import set_up
from hushrec.io.codec import parse, read_json, read_text
from hushrec.io.files import append_line, atomic_folder, is_free, write_text
from hushrec.methods.base import Between, OneOf, SearchSpace, Tunable
from hushrec.runs.schema import Trial
from hushrec.streams import Streams

PRESET = "tuned-honest"
KEPT = 75.0
"""Percentage of the trials that go on; slow learners often win, so only the lowest are stopped."""
STARTUP = 5
"""Random trials before proposals use earlier ones, and before any trial is stopped."""
WARM_UP = 0.2
"""Share of the rounds before which no trial is stopped."""


@dataclass(frozen=True)
class Search:
    """A search as it stands."""

    about: Mapping[str, Any]
    trials: list[Trial]
    folder: Path

    @property
    def best(self) -> Trial:
        """The trial with the highest validation value; the earlier one of equals."""
        done = [trial for trial in self.trials if trial.state == "done"]
        if not done:
            raise RunError(f"{self.folder}: no trial came to its end; search smaller rates")
        return max(done, key=lambda trial: (trial.value or 0.0, -trial.number))


def base_experiment(request: ExperimentRequest) -> Experiment:
    """Return what trial 0 trains; refuse what cannot be searched."""
    base = request.experiment()
    if not search_space(base, request):
        raise ConfigError(f"{base.method} declares no options to search for (Tunable.search)")
    if not base.split.hold_out:
        raise ConfigError("a search needs validation items: leave out split.hold_out = false")
    if base.protocol != "honest":
        raise ConfigError("a search under the published protocol would tune the leak: use honest")
    if base.privacy.mode != "none":
        raise ConfigError(
            "every trial of a search would release another model, and all of them are charged to "
            f"the privacy budget: leave out privacy.mode = {base.privacy.mode}, search on public "
            "data, and train once with what it finds"
        )
    return base


def search_space(base: Experiment, request: ExperimentRequest) -> SearchSpace:
    """Return the options that the method declares, but for those that the request fixes."""
    method = base.make_method()
    declared = method.search if isinstance(method, Tunable) else {}
    return {name: where for name, where in declared.items() if name not in request.settings}


def tune(
    data: Interactions,
    request: ExperimentRequest,
    out: Path,
    *,
    trials: int = 20,
    machine: Machine = THIS_MACHINE,
    command: str | None = None,
    on_trial: Callable[[int], None] = lambda number: None,
    callbacks: Sequence[Callback] = (),
) -> Search:
    """Search until the folder holds this many trials; ``on_trial`` announces each by its number."""
    base = base_experiment(request.of(data)).resolved(data)
    space = search_space(base, request)
    search = _open(out, base, space)
    write_preset(search, base, command)  # the search may have been stopped just before this
    split = make_split(data, base.split, Streams(base.seed), base.silos)
    while len(search.trials) < trials:
        number = len(search.trials)
        proposal = _Proposal(search.trials, space, base)
        on_trial(number)
        training, begun = set_up(_with_options(base, proposal.options), split).start(machine)
        state: Literal["done", "stopped", "diverged"]
        try:
            run_rounds(training, begun, (proposal, *callbacks))
            state = "stopped" if proposal.requested else "done"
        except DivergedError:
            state = "diverged"
        except StoppedError:
            raise StoppedError(
                f"stopped in trial {number}, which will start anew; go on with the same command"
            ) from None
        trial = Trial(
            number=number,
            options=proposal.options,
            state=state,
            value=proposal.value,
            selected_round=proposal.round,
            evaluations=proposal.evaluations,
        )
        search.trials.append(trial)
        append_line(out / "trials.jsonl", trial.to_json())
        write_preset(search, base, command)
    return search


def write_preset(search: Search, base: Experiment, command: str | None) -> None:
    """Write the best finished trial, if any, as a preset with a comment on its origin."""
    if all(trial.state != "done" for trial in search.trials):
        return
    best = search.best
    metric = f"{base.evaluation.select_on} {base.evaluation.select}"
    words = [
        f"{base.method} on {base.data}: the best of {len(search.trials)} trials on the validation "
        "items, honest protocol,",
        f"seed {base.seed}: {metric} {best.value:.4f} at round {best.selected_round}. "
        "The test items were not evaluated.",
    ]
    if command:
        words.append(f"Found by: {command}")
    kept = {
        "rounds": base.rounds,
        "options": _with_options(base, best.options).options,
        "evaluation": base.evaluation.model_dump(
            include={"every", "select", "select_on", "patience"}, exclude_none=True
        ),
    }
    comment = "".join(f"# {line}\n" for line in words)
    write_text(search.folder / f"{PRESET}.toml", comment + tomli_w.dumps(kept))


class _Proposal(Callback):
    """The next trial, proposed by optuna after the others, and stopped where optuna prunes it."""

    def __init__(self, trials: list[Trial], space: SearchSpace, base: Experiment) -> None:
        optuna, number = _optuna(), len(trials)
        # A sampler of its own for every trial: nothing to remember when a search is interrupted.
        drawn = int(Streams(base.seed).generator("tune", number).integers(2**31))
        study = optuna.create_study(
            direction="maximize",
            sampler=optuna.samplers.TPESampler(seed=drawn, n_startup_trials=STARTUP),
            pruner=optuna.pruners.PercentilePruner(KEPT, STARTUP, int(WARM_UP * base.rounds)),
        )
        distributions = {name: _distribution(where) for name, where in space.items()}
        states = optuna.trial.TrialState
        for trial in trials:
            if trial.value is not None and _is_inside(trial, space):
                finished = optuna.trial.create_trial(
                    state=states.COMPLETE if trial.state == "done" else states.PRUNED,
                    value=trial.value,
                    params=dict(trial.options),
                    distributions=distributions,
                    intermediate_values=dict(trial.evaluations),
                )
                study.add_trial(finished)
        self.trial = study.ask(distributions)
        proposed = {  # three digits: a preset that people read
            name: float(f"{value:.3g}") if isinstance(value, float) else value
            for name, value in self.trial.params.items()
        }
        self.options = proposed if number else {name: base.options[name] for name in space}
        self.evaluations: dict[int, float] = {}
        self.value: float | None = None
        self.round: int | None = None

    def on_round_end(self, record: RoundRecord) -> None:
        """Report the best value so far to the pruner."""
        if record.valid is not None:
            self.evaluations[record.round] = record.selected_value
            self.value, self.round = record.selected_value, record.selected_round
            self.trial.report(record.selected_value, record.round)
            if self.trial.should_prune():
                self.stop()


def _is_inside(trial: Trial, space: SearchSpace) -> bool:
    """Return whether a trial is in the space; the first one, of the base's options, may not be."""

    def fits(value: Any, where: Between | OneOf) -> bool:
        if isinstance(where, Between):
            return bool(where.low <= value <= where.high)
        return value in where.values

    return all(fits(trial.options[name], where) for name, where in space.items())


def _distribution(where: Between | OneOf) -> Any:
    found = _optuna().distributions
    if isinstance(where, Between):
        return found.FloatDistribution(where.low, where.high, log=where.log)
    return found.CategoricalDistribution(where.values)


def _with_options(base: Experiment, options: Mapping[str, Any]) -> Experiment:
    return base.model_copy(update={"options": {**base.options, **options}})


def _open(folder: Path, base: Experiment, space: SearchSpace) -> Search:
    """Begin a search in an empty folder, or go on with the same one."""
    declared = {name: asdict(where) for name, where in space.items()}
    experiment = base.model_dump(mode="json", exclude_none=True)
    about = json.loads(json.dumps({"experiment": experiment, "space": declared}))
    file = folder / "tune.json"
    if not file.exists():
        if not is_free(folder):
            raise RunError(f"{folder} is not empty and holds no search; choose another folder")
        with atomic_folder(folder) as fresh:
            (fresh / file.name).write_text(json.dumps(about, indent=2) + "\n", "utf-8")
    if read_json(file) != about:
        raise RunError(
            f"{folder} holds another search (see tune.json); go on with its own settings, or "
            "choose another folder"
        )
    return Search(about, _read_trials(folder / "trials.jsonl", space), folder)


def _read_trials(file: Path, space: SearchSpace) -> list[Trial]:
    """Read the trials; a last line cut short by a crash is dropped, other damage is an error."""
    lines = read_text(file).splitlines(keepends=True) if file.exists() else []
    if lines and not lines[-1].endswith("\n"):
        lines = lines[:-1]
        write_text(file, "".join(lines))
    trials = []
    for number, text in enumerate(lines):
        where = f"{file}, line {number + 1}"
        trial = parse(Trial, text, where)
        if trial.number != number or set(trial.options) != set(space):
            raise RunError(f"{where} is damaged: not the next trial of this search")
        trials.append(trial)
    return trials


def _optuna() -> Any:
    """Import optuna, which is an extra."""
    try:
        import optuna
    except ModuleNotFoundError:
        raise MissingExtraError("tune", "tune") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
