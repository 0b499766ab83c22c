"""What a run writes: checkpoints, to resume it or to serve its model, and summary.json."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import Evaluation
from hushrec.data import Interactions
from hushrec.data import partition as silos
from hushrec.data.catalog import names
from hushrec.data.splitting import Part, Split
from hushrec.errors import ConfigError, RunError
from hushrec.evaluation.evaluator import chance_ranks, popularity_ranks
from hushrec.evaluation.groups import few_users_mark, split_marks, split_notes
from hushrec.evaluation.metrics import Coverage, PopularityBias
from hushrec.federation.backends import Backend
from hushrec.federation.client import wire_bytes
from hushrec.federation.experiment import Experiment
from hushrec.federation.guard import rounds_in_words
from hushrec.federation.requests import FINAL_EVALUATIONS, absences
from hushrec.federation.rounds import Callback, RoundRecord, ServerState, Training, TrainingResult
from hushrec.federation.setup import SimulatedTraining
from hushrec.io import peak_rss_bytes
from hushrec.io.codec import Arrays, Tables
from hushrec.io.files import remove
from hushrec.methods.base import Shared, facts_of
from hushrec.privacy.budgets import Ledger
from hushrec.privacy.statement import PrivacyStatement, compose
from hushrec.private import PerClient
from hushrec.runs import schema
from hushrec.runs.folder import FINAL, SUMMARY, RunFolder
from hushrec.runs.schema import Followed, Summary
from hushrec.serving.data import ServingData

FINAL_MARK = (
    "final model: it is trained on everything, so no figure belongs to it; figures are those of "
    "the run that it follows"
)


def summarise(
    training: SimulatedTraining,
    split: Split,
    state: ServerState,
    data: Interactions,
    final_of: Followed | None = None,
) -> Summary:
    """Return the summary of a run whose clients are all here; ``data`` is what was split.

    ``final_of`` is the run that a final model follows.
    """
    holders, evaluator = split.holders, training.backend.evaluator
    ranked = 0 if evaluator is None else len(evaluator.users["test"])
    figures: dict[str, Any] = {"final_of": final_of, "test": {}, "valid": {}, "marks": [FINAL_MARK]}
    store, traits = training.backend.selected, training.task.method.traits
    assert store is not None, "the last round is always evaluated"
    common = _common(training, state, store.mean_bytes(without=traits.training_only))
    shown = figures if final_of else _figures(training, split, state)
    return Summary(
        **{**common, **shown, "marks": [*shown["marks"], *common["marks"]]},
        data_digest=data_digest(data),
        users=schema.UserCounts(**split.facts(), ranked_users=ranked),
        silos=None if holders is None else schema.SiloFacts(**silos.facts(split.train, holders)),
        notes=[*split.data.notes, *split_notes(data, split.config)],
    )


def _figures(training: SimulatedTraining, split: Split, state: ServerState) -> dict[str, Any]:
    """Return metrics of a run and of the baselines, and their marks."""
    backend, method = training.backend, training.task.method
    evaluator, store, shared = backend.evaluator, backend.selected, state.selected_shared
    assert evaluator is not None and store is not None, "a round was selected"
    model = evaluator.model(method, training.serving(shared), store)
    top = evaluator.top_items(model, "test", 10)
    counts = np.bincount(split.train.positives.values, minlength=split.data.n_items)
    popularity = popularity_ranks(evaluator, "test")
    bias = PopularityBias(10).value(top, counts) if (top >= 0).any() else 0.5
    return {
        "test": evaluator.summarise(backend.ranks["test"]),
        "valid": evaluator.summarise(backend.ranks["valid"]),
        "baselines": schema.Baselines(
            popularity=evaluator.summarise(popularity),
            chance=evaluator.summarise(chance_ranks(popularity)),
        ),
        "lists": {
            "coverage@10": Coverage(10).value(top, counts),
            "popularity_bias@10": bias,
        },
        "marks": split_marks(split),
    }


def summarise_federation(
    training: Training,
    state: ServerState,
    nodes: Mapping[str, int],
    results: Mapping[Part, Evaluation],
    attendance: Sequence[schema.Attendance] = (),
) -> Summary:
    """Return the summary that a coordinator can make; ``nodes`` has the users of each node.

    Interactions and ranks stay on the nodes: there are no baselines, and nothing of single users.
    """
    users, ranked, task = sum(nodes.values()), results["test"].users, training.task
    unused = task.method.traits.training_only
    fields = task.method.private_fields(task.public, task.initial, task.streams)
    served = [spec for name, spec in fields.items() if name not in unused]
    # The number of rows that a client keeps is known to the client alone.
    sizes = [spec.initial.nbytes for spec in served if isinstance(spec, PerClient)]
    private_bytes = sum(sizes) if len(sizes) == len(served) else None
    common = _common(training, state, private_bytes)
    final = (one.users for one in attendance if one.to in FINAL_EVALUATIONS)
    counted, words = min(final, default=users), absences(attendance)
    marks, notes = few_users_mark(ranked, users), []
    if counted < users:
        marks.append(f"{counted:,} of {users:,} enrolled users are in the figures: {words}")
    elif words:
        notes.append(words)
    return Summary(
        **{**common, "marks": [*marks, *common["marks"]]},
        nodes=dict(nodes),
        attendance=list(attendance),
        test=results["test"].means(),
        valid=results["valid"].means(),
        users=schema.UserCounts(
            users=users,
            items=task.public.n_items,
            training_clients=len(training.clients),
            evaluated_users=ranked,
            not_evaluated_users=users - ranked,
            ranked_users=ranked,
        ),
        notes=notes,
    )


def _common(training: Training, state: ServerState, private_bytes: float | None) -> dict[str, Any]:
    """Return what is known to every server: settings, rounds, costs, privacy.

    ``private_bytes`` are those of the private parameters that one client scores with.
    """
    served = wire_bytes(training.serving(state.selected_shared))
    experiment, method = training.experiment, training.task.method
    learns = method.traits.learns and method.phases[-1].repeats
    chosen = training.selected_by == "validation" and state.round == experiment.rounds
    seconds, trained = state.seconds, len(training.clients)
    spent = state.account, state.round, state.ledger, state.up_bytes
    skipped = state.guard.not_applied
    marks = []
    if skipped:
        numbers = rounds_in_words(one.round for one in skipped)
        were, last = ("was", "") if len(skipped) == 1 else ("were", " the last one")
        marks.append(
            f"{len(skipped)} of {state.round} rounds {were} not applied: {numbers},{last} because "
            f"{skipped[-1].why}"
        )
    return {
        "marks": marks,
        "not_applied": skipped,
        "method": experiment.method,
        "data": experiment.data,
        "protocol": experiment.protocol,
        "protocol_mark": schema.PUBLISHED_MARK if experiment.protocol == "published" else None,
        "preset": experiment.preset,
        "options": experiment.options,
        "rounds": state.round,
        "selected_round": state.selected_round,
        "selected_by": training.selected_by,
        "improving": learns and chosen and state.selected_round == state.round,
        "seed": experiment.seed,
        "model": dict(facts_of(method, state.selected_shared)),
        "communication": schema.Communication(
            up_bytes=state.up_bytes,
            down_bytes=state.down_bytes,
            client_up_bytes=state.up_bytes / trained,
            client_down_bytes=state.down_bytes / trained,
            serving_bytes=None if private_bytes is None else served + round(private_bytes),
        ),
        "time": schema.Timing(total_s=seconds, per_round_s=seconds / max(1, state.round)),
        "peak_rss_bytes": peak_rss_bytes(),
        "privacy": training.plan.statement(*spent),
    }


def mean_summary(summaries: Sequence[Summary]) -> Summary:
    """Return the summary of several seeds: means under the same names, and standard deviations."""

    def table(part: str, reduce: Callable[[list[float]], Any]) -> Tables:
        tables = [getattr(summary, part) for summary in summaries]
        return {
            candidates: {
                name: float(reduce([table[candidates][name] for table in tables]))
                for name in tables[0][candidates]
            }
            for candidates in tables[0]
        }

    def deviation(values: list[float]) -> Any:
        return np.std(values, ddof=1) if len(values) > 1 else 0.0

    def means(part: str) -> dict[str, float]:
        parts = [dict(getattr(summary, part)) for summary in summaries]
        known = [name for name in parts[0] if all(part[name] is not None for part in parts)]
        return {name: float(np.mean([part[name] for part in parts])) for name in known}

    whole = {"up_bytes", "down_bytes", "serving_bytes"}
    sent: dict[str, Any] = {
        name: round(mean) if name in whole else mean
        for name, mean in means("communication").items()
    }
    return summaries[0].model_copy(
        update={
            "seed": [summary.seed for summary in summaries],
            "runs": [f"seed-{summary.seed}" for summary in summaries],
            "rounds": [summary.rounds for summary in summaries],
            "selected_round": [summary.selected_round for summary in summaries],
            "improving": False,
            "marks": list(dict.fromkeys(mark for summary in summaries for mark in summary.marks)),
            "not_applied": [one for summary in summaries for one in summary.not_applied],
            "test": table("test", np.mean),
            "valid": table("valid", np.mean),
            "test_sd": table("test", deviation),
            "lists": means("lists"),
            "communication": schema.Communication(**sent),
            "time": schema.Timing(**means("time")),
            "peak_rss_bytes": max(summary.peak_rss_bytes for summary in summaries),
            "privacy": _composed_privacy(summaries),
        }
    )


def _composed_privacy(summaries: Sequence[Summary]) -> PrivacyStatement:
    """Return the weakest statement of one seed, and what all seeds release together."""
    statements = [summary.privacy for summary in summaries]
    weakest = max(statements, key=lambda one: one.epsilon or 0)
    if len(statements) < 2 or not all(one.promises for one in statements):
        return weakest
    together = compose([summary.claim(f"seed-{summary.seed}") for summary in summaries])
    return weakest.model_copy(update={"statement": together.statement, "together": together})


def data_digest(data: Interactions) -> str:
    """Identify people's rows, independent of the split and of items without interactions."""
    touched = np.bincount(data.item, minlength=data.n_items) > 0
    hashed = hashlib.blake2b(digest_size=16)
    for ids in (data.users, data.items[touched]):
        hashed.update("\n".join([*ids.tolist(), ""]).encode())
    for array in (data.user, (np.cumsum(touched) - 1)[data.item], data.value, data.time):
        hashed.update(np.ascontiguousarray(array).tobytes())
    return hashed.hexdigest()


LEDGER = "ledger"
"""File of a checkpoint with what each client has spent."""
CURRENT, SELECTED = "current", "selected"
SERVING = "serving"
"""File of the final checkpoint with what serving needs: catalogue, users and histories."""
SOURCE = "source"
"""Array of that file: size and time of change of the data file."""
NUMBERS = schema.CheckpointHeader.model_fields.keys() - {"settings", "files"}
"""Fields of the state that are written into the header of a checkpoint."""


class CheckpointCallback(Callback):
    """Writes metrics.jsonl and checkpoints into the folder of a run."""

    def __init__(
        self,
        folder: RunFolder,
        backend: Backend,
        state: ServerState,
        seconds: float = 0.0,
        data: ServingData | None = None,
    ) -> None:
        """``seconds`` lie between two checkpoints at least; ``data`` is kept with the last one."""
        self.folder, self.backend, self.state, self.seconds = folder, backend, state, seconds
        self.data = data
        self.saved_at, self.saved_round = time.monotonic(), -1

    def on_round_end(self, record: RoundRecord) -> None:
        """Add the round to metrics.jsonl, and write a checkpoint if it is time."""
        self.folder.append_metrics(record)
        if time.monotonic() - self.saved_at >= self.seconds:
            self.save()

    def on_interrupt(self) -> None:
        """Write a checkpoint, unless this round has one."""
        if self.saved_round != self.state.round:
            self.save()

    def on_end(self, result: TrainingResult) -> None:
        """Write the final checkpoint."""
        self.save_final()

    def save(self) -> None:
        """Write a checkpoint from which the run can be resumed."""
        self._save(f"round-{self.state.round:06d}", (CURRENT, SELECTED), self.state.key)
        self.saved_at, self.saved_round = time.monotonic(), self.state.round

    def reopen(self) -> None:
        """Make a complete run one that is resumed: its summary holds no more."""
        remove(self.folder.path / SUMMARY)
        self.save()

    def save_final(self) -> None:
        """Write the checkpoint of a complete run: the selected round alone."""
        if self.folder.checkpoint_name() == FINAL:  # killed after it had written this
            self.folder.drop_checkpoints(but=FINAL)
            return
        # The run draws no more noise, so its key is not kept.
        self._save(FINAL, (SELECTED,), key=None)

    def _save(self, name: str, roles: Iterable[str], key: str | None) -> None:
        numbers = {number: getattr(self.state, number) for number in NUMBERS}
        self.folder.save_checkpoint(name, {**numbers, "key": key}, self._files(roles))

    def _files(self, roles: Iterable[str]) -> Iterator[tuple[str, Arrays]]:
        state = self.state
        for role in roles:
            selected = role == SELECTED
            if selected and not state.selected_round:
                continue
            yield f"{role}-shared", state.selected_shared if selected else state.shared
            for number, part in enumerate(self.backend.save(selected=selected)):
                yield f"{role}-private-{number:05d}", part
        if state.ledger is not None:
            yield LEDGER, vars(state.ledger)
        if self.data is not None and CURRENT not in roles:
            source = file_stamp(self.folder.experiment().data)
            yield SERVING, {**self.data.to_arrays(), SOURCE: source}


def file_stamp(source: str) -> NDArray[np.int64]:
    """Return size and time of change of a data file; zeros for a data set by name."""
    path = Path(source)
    if source in names() or not path.is_file():
        return np.zeros(2, np.int64)
    found = path.stat()
    return np.array([found.st_size, found.st_mtime_ns])


def saved_key(folder: RunFolder) -> str | None:
    """Return the key of the noise of a run that is to go on; None where it begins anew."""
    name = folder.checkpoint_name()
    return None if name is None else folder.read_checkpoint(name).key


def prolonged(folder: RunFolder, rounds: int | None) -> Experiment:
    """Return what a run goes on with, for this many rounds in all where they are given.

    A finished run holds the selected round alone, so it can go on where that was the last one.
    """
    experiment, name = folder.experiment(), folder.checkpoint_name()
    if rounds is None or rounds == experiment.rounds:
        return experiment
    if not experiment.split.hold_out:
        raise ConfigError(
            f"{folder.path} is a final model, of as many rounds as the run it follows: leave out "
            "the number of rounds"
        )
    header = folder.read_checkpoint(name) if name else None
    reached, selected = (header.round, header.selected_round) if header else (0, 0)
    if rounds <= reached:
        raise ConfigError(f"{folder.path} has {reached} rounds already: ask for more")
    if experiment.privacy.mode != "none":
        raise ConfigError(
            f"the noise of {folder.path} was found for {experiment.rounds} rounds: train anew with "
            f"rounds = {rounds}"
        )
    if not experiment.make_method().phases[-1].repeats:
        raise ConfigError(f"the rounds of {experiment.method} are planned: more add nothing")
    if name == FINAL and selected < reached:
        raise ConfigError(
            f"{folder.path} was best at round {selected} of {reached}, "
            "and nothing later is kept: train anew with more rounds, or with a larger "
            "evaluation.patience"
        )
    longer = experiment.model_copy(update={"rounds": rounds})
    folder.write_text("config.toml", longer.to_toml())
    return longer


def restore(state: ServerState, backend: Backend, folder: RunFolder, rounds: int) -> bool:
    """Go back to the newest checkpoint, or to the start if there is none.

    Say whether the run was finished and now goes on to more rounds, up to ``rounds``.
    """
    name = folder.checkpoint_name()
    if name is None:
        folder.rewind_metrics(0)
        return False
    header = folder.read_checkpoint(name)
    reopened = name == FINAL and header.selected_round == header.round < rounds
    if name == FINAL and not reopened and (folder.path / SUMMARY).exists():
        raise RunError(f"{folder.path} is finished; there is nothing to resume")
    if header.data != state.data:
        raise RunError(f"{folder.path} was trained on other data than is given now")
    for key in NUMBERS:
        setattr(state, key, getattr(header, key))
    state.account = [entry.as_dict() for entry in header.account]
    if state.ledger is not None:
        state.ledger = Ledger(**folder.read_tensors(name, f"{LEDGER}.safetensors"))
    if name != FINAL or reopened:  # else it died just before its summary: only the test is left
        role = SELECTED if reopened else CURRENT
        state.shared, parts = load_model(folder, name, role, header.files)
        backend.load(parts, selected=False)
    if state.selected_round:
        state.selected_shared, parts = load_model(folder, name, SELECTED, header.files)
        backend.load(parts, selected=True)
    folder.rewind_metrics(state.round)
    return reopened


def load_model(
    folder: RunFolder, name: str, role: str, files: Iterable[str]
) -> tuple[Shared, Iterator[Arrays]]:
    """Read the shared parameters of a checkpoint, and the private ones part by part."""
    private = [file for file in sorted(files) if file.startswith(f"{role}-private-")]
    parts = (folder.read_tensors(name, file) for file in private)
    return folder.read_tensors(name, f"{role}-shared.safetensors"), parts
