"""A run's state on disk: written from time to time, read back to go on or to serve."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from hushrec.errors import ConfigError, RunError
from hushrec.federation.backends.base import Backend
from hushrec.federation.experiment import Experiment
from hushrec.federation.rounds import RoundLine, ServerState
from hushrec.io.codec import Arrays
from hushrec.io.files import remove
from hushrec.methods.base import Shared, Staged
from hushrec.privacy.budgets import Ledger
from hushrec.runs.folder import FINAL, RunFolder

LEDGER = "ledger"
"""File of a checkpoint with what each client spent."""
CURRENT, SELECTED = "current", "selected"
NUMBERS = (
    *("data", "key", "round", "selected_round", "selected_value", "stale_looks", "up_bytes"),
    *("down_bytes", "seconds", "account", "protection"),
)
"""What of the state are numbers and words."""


class Diary:
    """The journal of a run that has a folder."""

    def __init__(self, folder: RunFolder, backend: Backend, seconds: float) -> None:
        self.folder, self.backend, self.seconds = folder, backend, seconds
        self.saved_at = time.monotonic()

    def record(self, line: RoundLine) -> None:
        """Add a line to metrics.jsonl."""
        self.folder.append_metrics(line)

    def save(self, state: ServerState, *, now: bool) -> None:
        """Write a checkpoint now, or if the last one is old."""
        if now or time.monotonic() - self.saved_at > self.seconds:
            files = _files(state, self.backend, (CURRENT, SELECTED))
            self.folder.save_checkpoint(f"round-{state.round:06d}", _numbers(state), files)
            self.saved_at = time.monotonic()

    def reopen(self, state: ServerState) -> None:
        """Let a finished run go on: what it came to is no result any more."""
        remove(self.folder.path / "summary.json")
        self.save(state, now=True)

    def finish(self, state: ServerState) -> None:
        """Write what the run came to: the selected round alone."""
        if self.folder.checkpoint_name() == FINAL:  # it died after it had written this
            self.folder.drop_checkpoints(but=FINAL)
            return
        files = _files(state, self.backend, (SELECTED,))
        # No more noise will be drawn, and nobody is to draw this run's again.
        self.folder.save_checkpoint(FINAL, {**_numbers(state), "key": None}, files)


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
    if isinstance(experiment.make_method(), Staged):
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
    if name == FINAL and not reopened and (folder.path / "summary.json").exists():
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
