"""Checkpoints: the state of a run on disk, to resume it or to serve its model."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from hushrec.errors import ConfigError, RunError
from hushrec.federation.backends.base import Backend
from hushrec.federation.callbacks import Callback, RoundRecord, TrainingResult
from hushrec.federation.experiment import Experiment
from hushrec.federation.rounds import ServerState
from hushrec.io.codec import Arrays
from hushrec.io.files import remove
from hushrec.methods.base import Shared
from hushrec.privacy.budgets import Ledger
from hushrec.runs.folder import FINAL, SUMMARY, RunFolder

LEDGER = "ledger"
"""File of a checkpoint with what each client has spent."""
CURRENT, SELECTED = "current", "selected"
NUMBERS = (
    *("data", "key", "round", "selected_round", "selected_value", "stale_evaluations", "up_bytes"),
    *("down_bytes", "seconds", "account", "protection"),
)
"""Fields of the state that are written into the header of a checkpoint."""


class CheckpointCallback(Callback):
    """Writes metrics.jsonl and checkpoints into the folder of a run."""

    def __init__(
        self, folder: RunFolder, backend: Backend, state: ServerState, seconds: float = 0.0
    ) -> None:
        """``seconds`` lie between two checkpoints at least."""
        self.folder, self.backend, self.state, self.seconds = folder, backend, state, seconds
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
        state = self.state
        files = _files(state, self.backend, (CURRENT, SELECTED))
        self.folder.save_checkpoint(f"round-{state.round:06d}", _numbers(state), files)
        self.saved_at, self.saved_round = time.monotonic(), state.round

    def reopen(self) -> None:
        """Make a complete run one that is resumed: its summary holds no more."""
        remove(self.folder.path / SUMMARY)
        self.save()

    def save_final(self) -> None:
        """Write the checkpoint of a complete run: the selected round alone."""
        if self.folder.checkpoint_name() == FINAL:  # killed after it had written this
            self.folder.drop_checkpoints(but=FINAL)
            return
        files = _files(self.state, self.backend, (SELECTED,))
        # The run draws no more noise, so its key is not kept.
        self.folder.save_checkpoint(FINAL, {**_numbers(self.state), "key": None}, files)


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
    header = folder.read_checkpoint(name) if name else None
    reached, selected = (header.round, header.selected_round) if header else (0, 0)
    if rounds <= reached:
        raise ConfigError(f"{folder.path} has {reached} rounds already: ask for more")
    if experiment.privacy.mode != "none":
        raise ConfigError(
            f"the noise of {folder.path} was found for {experiment.rounds} rounds: train anew with "
            f"--rounds {rounds}"
        )
    if not experiment.make_method().phases[-1].repeats:
        raise ConfigError(f"the rounds of {experiment.method} are planned: more add nothing")
    if name == FINAL and selected < reached:
        raise ConfigError(
            f"{folder.path} was best at round {selected} of {reached}, "
            "and nothing later is kept: train anew with more --rounds, or with a larger "
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


def _files(
    state: ServerState, backend: Backend, roles: Iterable[str]
) -> Iterator[tuple[str, Arrays]]:
    for role in roles:
        selected = role == SELECTED
        if selected and not state.selected_round:
            continue
        yield f"{role}-shared", state.selected_shared if selected else state.shared
        for number, part in enumerate(backend.save(selected=selected)):
            yield f"{role}-private-{number:05d}", part
    if state.ledger is not None:
        yield LEDGER, vars(state.ledger)


def _numbers(state: ServerState) -> dict[str, Any]:
    return {key: getattr(state, key) for key in NUMBERS}
