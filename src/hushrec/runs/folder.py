"""The folder of a run: files are written atomically and read back through `runs.schema`.

::

    config.toml            the experiment
    metrics.jsonl          one line per round
    summary.json           the result
    users.npz              ranks of every user's held-out items
    checkpoint/            round-000017/ while running, final/ when done
    model-card.md          what the model is, for those who are given it
    report.html
    audit.json             the result of `hushrec audit`

A checkpoint is written to a temporary folder, which is then renamed; it has a digest of every file.
No pickle: arrays are safetensors or plain npz.

A run that replaces another is trained in a hidden folder beside it. The older run stays until the
new one is finished; then both are renamed, in two steps. What a process leaves that is killed
between the steps is repaired by the next one (`undo_replacement`): either the old or the new run is
at the path, and ``--resume`` continues.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from hushrec.errors import DiskError, InputError, RunError, StoppedError, listed
from hushrec.evaluation.evaluator import PartRanks
from hushrec.evaluation.metrics import Ranks
from hushrec.federation.experiment import Experiment
from hushrec.federation.rounds import RoundLine
from hushrec.io import codec, files
from hushrec.io.codec import Stored, StoredT
from hushrec.private import WORKSPACE
from hushrec.runs.card import CARD, run_card
from hushrec.runs.schema import CheckpointHeader, Seeds, Summary

Arrays = Mapping[str, NDArray[Any]]
SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
FINAL = "final"
AUDIT_FILE = "audit.json"
SEEDS = "seeds.json"
FOLLOWED = "followed.json"
NEW, OLD = "new", "replaced"
"""Suffixes of the hidden folders of a run that replaces another, and of one that is replaced."""
FEDERATED = "roster.json"
"""File that only run folders of a coordinator have."""


class RunFolder:
    """Reads and writes one run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, experiment: Experiment, seeds: Sequence[int] = ()) -> RunFolder:
        """Start a run folder, with several ``seeds`` or the experiment's, where nothing is yet."""
        with files.atomic_folder(path) as folder:
            (folder / "config.toml").write_text(experiment.to_toml(), "utf-8")
            if seeds:
                (folder / SEEDS).write_text(Seeds(seeds=list(seeds)).to_json(), "utf-8")
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open an existing run folder."""
        path = files.checked_path(path)
        undo_replacement(path)
        if not path.is_dir():
            raise RunError(f"{path}: no such run folder")
        if not is_run(path):
            raise RunError(f"{path} is not a run folder: its config.toml is missing or damaged")
        return cls(path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let one process at a time train in this folder, and clear what a killed one left."""
        with files.writing(self.path):
            lock = (self.path / files.LOCK).open("w")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(f"another process is training in {self.path}") from None
            for left in (*self.path.glob(f"{WORKSPACE}*"), *self.path.glob(f".*{files.PARTIAL}")):
                files.remove(left)
            yield

    def is_locked(self) -> bool:
        """Say whether a process trains in this folder now."""
        return is_held(self.path / files.LOCK)

    def experiment(self) -> Experiment:
        """Read the configuration."""
        file = self.path / "config.toml"
        return Experiment.from_toml(codec.read_text(file), str(file))

    # ------------------------------------------------------------ small files

    def write_text(self, name: str, text: str) -> None:
        """Write a text file."""
        files.write_text(self.path / name, text)

    def write(self, name: str, value: Stored) -> None:
        """Write a JSON file."""
        self.write_text(name, value.to_json(indent=2) + "\n")

    def read(self, name: str, kind: type[StoredT]) -> StoredT:
        """Read a JSON file as ``kind``."""
        file = self.path / name
        if not file.exists():
            if (self.path / "statement.json").exists():
                raise RunError(
                    f"{self.path} is a release: it has neither results nor users; use the run that "
                    "it was made from, or 'hushrec recommend' with --history FILE or --new"
                )
            why = f"{file} is missing: the run is not finished; go on with"
            raise RunError(f"{why} resume=True", command=f"{why} --resume")
        return codec.read_stored(kind, file)

    def require_seeds(self, seeds: Sequence[int] | None) -> None:
        """Refuse to go on with other seeds than those of this folder; None is for a single run."""
        several = (self.path / SEEDS).exists()
        begun = self.read(SEEDS, Seeds).seeds if several else None
        if begun != (None if seeds is None else list(seeds)):
            what = "a single run" if begun is None else f"the seeds {listed(list(map(str, begun)))}"
            raise RunError(f"{self.path} holds {what}: resume it with the same 'seeds'")

    def read_summary(self) -> Summary:
        """Read summary.json."""
        return self.read(SUMMARY, Summary)

    def append_metrics(self, line: RoundLine) -> None:
        """Add a round to metrics.jsonl."""
        files.append_line(self.path / METRICS, line.to_json())

    def read_metrics(self, up_to: int | None = None) -> list[RoundLine]:
        """Read metrics.jsonl; a last line cut short by a crash is left out."""
        file = self.path / METRICS
        texts = codec.read_text(file).split("\n")[:-1] if file.exists() else []
        numbered = enumerate(texts, 1)
        lines = [codec.parse(RoundLine, text, f"{file}, line {n},") for n, text in numbered]
        return [line for line in lines if up_to is None or line.round <= up_to]

    def write_metrics(self, lines: Iterable[RoundLine]) -> None:
        """Write metrics.jsonl anew."""
        self.write_text(METRICS, "".join(f"{line.to_json()}\n" for line in lines))

    def rewind_metrics(self, round_number: int) -> None:
        """Drop the lines of rounds after a checkpoint; they will be computed again."""
        self.write_metrics(self.read_metrics(round_number))

    def write_arrays(self, name: str, arrays: Arrays) -> None:
        """Write an npz file, for its owner only: it is as private as the data."""
        with (
            files.atomic_file(self.path / name, secret=True) as partial,
            partial.open("wb") as file,
        ):
            payload: dict[str, Any] = dict(arrays)
            np.savez_compressed(file, **payload)

    def write_results(self, summary: Summary, ranks: Mapping[str, PartRanks] | None = None) -> None:
        """Write the results and the model card; a run with a summary is finished.

        Ranks of users are those of one run whose clients are all here.
        """
        if ranks is not None:
            self.write_arrays("users.npz", ranks_to_arrays(ranks))
        self.write_text(CARD, run_card(self.experiment(), summary, ranks))
        self.write(SUMMARY, summary)

    # ------------------------------------------------------------ checkpoints

    def save_checkpoint(
        self, name: str, state: Mapping[str, Any], tensors: Iterable[tuple[str, Arrays]]
    ) -> None:
        """Write a checkpoint that appears whole or not at all, then drop the older ones."""
        with files.atomic_folder(self.path / "checkpoint" / name, secret=True) as folder:
            digests = {}
            for file, arrays in tensors:
                target = folder / f"{file}.safetensors"
                save_file({key: np.ascontiguousarray(a) for key, a in arrays.items()}, target)
                target.chmod(0o600)  # as private as the data
                digests[target.name] = file_digest(target)
            header = CheckpointHeader(**state, settings=self._settings(), files=digests)
            record = header.as_dict()
            record["digest"] = record_digest(record)
            (folder / "state.json").touch(0o600)  # it holds the key of the noise
            (folder / "state.json").write_text(json.dumps(record, indent=2))
        self.drop_checkpoints(but=name)

    def drop_checkpoints(self, *, but: str) -> None:
        """Remove all checkpoints but one, and what a killed process left of others."""
        files.clear(self.path / "checkpoint", but=but)

    def checkpoint_name(self) -> str | None:
        """Return the newest complete checkpoint."""
        folder = self.path / "checkpoint"
        names = sorted(p.name for p in folder.glob("[!.]*")) if folder.is_dir() else []
        return FINAL if FINAL in names else names[-1] if names else None

    def read_checkpoint(self, name: str) -> CheckpointHeader:
        """Read a checkpoint's header after checking every file against its digest."""
        folder = self.path / "checkpoint" / name
        state = folder / "state.json"
        try:
            record = codec.read_json(state)
        except RunError:
            raise _damaged(state) from None
        if record.pop("digest", None) != record_digest(record):
            raise _damaged(state)
        header = codec.parse(CheckpointHeader, json.dumps(record), str(state))
        for file, digest in header.files.items():
            if not (folder / file).is_file() or file_digest(folder / file) != digest:
                raise _damaged(folder / file)
        if header.settings != self._settings():
            raise RunError(
                f"{self.path / 'config.toml'} was changed since this run was trained; "
                "put it back, or train anew"
            )
        return header

    def read_tensors(self, name: str, file: str) -> dict[str, NDArray[Any]]:
        """Read one file of a checkpoint."""
        path = self.path / "checkpoint" / name / file
        try:
            return dict(load_file(path))
        except (SafetensorError, OSError):
            raise _damaged(path) from None

    def _settings(self) -> str:
        """Return a digest of config.toml without the number of rounds."""
        config = codec.read_toml(self.path / "config.toml")
        return record_digest({key: value for key, value in config.items() if key != "rounds"})


def _damaged(file: Path) -> RunError:
    return RunError(
        f"{file} is missing or damaged: this checkpoint cannot be used; train the run anew"
    )


def ranks_to_arrays(ranks: Mapping[str, PartRanks]) -> dict[str, NDArray[Any]]:
    """Flatten the ranks of all parts and candidate sets for users.npz."""
    return {
        name: array
        for part, by_candidates in ranks.items()
        for candidates, value in by_candidates.items()
        for name, array in value.to_arrays(f"{part}/{candidates}/").items()
    }


def read_ranks(folder: RunFolder) -> dict[str, dict[str, Ranks]]:
    """Read users.npz back."""
    file = folder.path / "users.npz"
    if not file.exists():
        raise RunError(f"{file} is missing: train the run anew")
    arrays = codec.read_arrays(file)
    ranks: dict[str, dict[str, Ranks]] = {}
    try:
        for part, candidates in sorted({tuple(name.split("/")[:2]) for name in arrays}):
            prefix = f"{part}/{candidates}/"
            ranks.setdefault(part, {})[candidates] = Ranks.from_arrays(arrays, prefix)
        ranks["valid"]["full"], ranks["test"]["full"]
    except (InputError, ValueError, KeyError) as error:
        raise RunError(f"{file} is damaged: {error}") from None
    return ranks


def is_held(lock: Path) -> bool:
    """Say whether a process holds a lock file."""
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def undo_replacement(path: Path) -> None:
    """Undo what a process did that was killed between the two steps of replacing a run."""
    old = beside(path, OLD)
    if not path.exists() and is_run(old) and not is_held(old / files.LOCK):
        with files.writing(path):
            old.rename(path)


def beside(path: Path, mark: str) -> Path:
    """Return the hidden folder beside a run."""
    return path.with_name(f".{path.name}.{mark}")


def is_run(path: Path) -> bool:
    """Say whether a folder is a run: its config.toml has the keys of an experiment."""
    try:
        config = codec.read_toml(path / "config.toml")
    except RunError:
        return False
    return {"data", "method", "protocol", "rounds", "seed"} <= config.keys()


def file_digest(path: Path) -> str:
    """Return the digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def record_digest(record: Mapping[str, Any]) -> str:
    """Return the digest of a JSON object."""
    return hashlib.blake2b(json.dumps(record, sort_keys=True).encode()).hexdigest()


@contextmanager
def new_run_folder(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield the folder for a new run, which is at ``path`` when the run is finished.

    A run that fails leaves an older run as it was, and its own files only after its first round.
    """
    require_free(path, overwrite=overwrite)
    replaces, made = is_run(path), files.missing(path)
    here = beside(path, NEW) if replaces else path
    with RunFolder(path).locked() if replaces else nullcontext():
        if replaces:
            files.remove(here)
        try:
            yield here
        except StoppedError as stopped:
            raise _with_resumption(stopped, path) from None
        except Exception as error:
            kept = not replaces and any(path.rglob(METRICS))
            # Somebody else may have begun a run there meanwhile; then it is refused, and theirs.
            refused = isinstance(error, RunError) and not isinstance(error, DiskError)
            theirs = not replaces and (refused or RunFolder(path).is_locked())
            if not (kept or theirs) and here.exists():
                files.clear(here)
                files.remove_empty([here] if replaces else made)
            if isinstance(error, DiskError) and (kept or replaces):
                if kept:
                    raise _with_resumption(error, path) from None
                raise DiskError(f"{error}; the run in {path} is as it was") from None
            raise
        if replaces:
            _replace(path, here)


@contextmanager
def resumed_run_folder(path: Path) -> Iterator[Path]:
    """Yield the folder of an interrupted run, which is at ``path`` when the run is finished."""
    here = resumable(path)
    with RunFolder(path).locked() if here != path and path.exists() else nullcontext():
        try:
            yield here
        except (StoppedError, DiskError) as error:
            raise _with_resumption(error, path) from None
        if here != path:
            _replace(path, here)


def resumable(path: Path) -> Path:
    """Return the folder to resume: that of the run, or of the run that is to replace it.

    A finished run that was killed before it replaced the older one replaces it now.
    """
    undo_replacement(path)
    new, old = beside(path, NEW), beside(path, OLD)
    if is_run(new):
        if not (new / SUMMARY).exists():
            return new
        with RunFolder(path).locked() if path.exists() else nullcontext():
            _replace(path, new)
    if is_run(path) and old.exists() and not is_held(old / files.LOCK):
        files.remove(old)
    return RunFolder.open(path).path


def require_free(path: Path, *, overwrite: bool) -> None:
    """Refuse a path where a new run would overwrite other files, or a run without ``overwrite``."""
    undo_replacement(path)
    if files.is_free(path):
        return
    if not path.is_dir():
        raise RunError(f"{path} is a file; choose another folder")
    if not overwrite:
        raise RunError(
            f"{path} exists already; use resume=True to go on with it, overwrite=True to start "
            "anew, or another folder",
            command=f"{path} exists already; add --resume to go on with it, --overwrite to start "
            "anew, or choose another --out",
        )
    if not is_run(path):
        raise RunError(f"{path} is not a run folder: refusing to overwrite it")
    real = path.resolve()
    if real in (Path.cwd(), *Path.cwd().parents):
        raise RunError(f"{path} is the folder you are in: go elsewhere to overwrite it")
    if os.path.ismount(real) or not all(os.access(each, os.W_OK) for each in (real, real.parent)):
        raise RunError(f"{path} cannot be replaced: it, or its parent folder, is not writable")
    with RunFolder(path).locked():
        pass  # nobody is training in it


def _replace(path: Path, new: Path) -> None:
    old = beside(path, OLD)
    with files.writing(path):
        files.remove(old)
        if path.exists():
            path.rename(old)
        new.rename(path)
        files.sync(path.parent)
    files.remove(old)


def _with_resumption(error: StoppedError | DiskError, path: Path) -> StoppedError | DiskError:
    """Return an error that says how the run goes on, in Python and on the command line."""
    python = f"{error}; go on with train(out={str(path)!r}, resume=True)"
    return type(error)(python, command=f"{error}; go on with: --resume --out {path}")
