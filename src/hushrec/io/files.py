"""The one place that writes: a file or a folder appears whole or not at all, or it is a sentence.

What is written lies beside its place under a name of its own, is brought to the disk, and takes its
place in one step. A process that fails clears it away; what a killed one left is cleared by whoever
writes there next. Nobody writes the same thing twice at a time.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from hushrec.errors import DiskError, RunError

PARTIAL = ".partial"
UNFINISHED, FINISHED = ".unfinished", ".finished"
"""Inside a folder that was there already: what is to be in it, before and after it is whole."""
LOCK = ".lock"
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failed write into a sentence; what was complete before stays as it was."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors wraps the operating system's error in a text.
        numbers = {
            getattr(error, "errno", None),
            *map(int, re.findall(r"os error (\d+)", str(error))),
        }
        if numbers & FULL:
            reason = "the disk is full: free some space and try again; what was there is intact"
        else:
            reason = getattr(error, "strerror", None) or str(error)
        raise DiskError(f"cannot write {path}: {reason}") from None


@contextmanager
def fresh_file(path: Path, *, secret: bool = False) -> Iterator[Path]:
    """Give a file to fill that takes the place of ``path``; a secret one only we may read."""
    partial = path.with_name(f".{path.name}{PARTIAL}")
    with writing(path), _alone(partial, 0o600 if secret else 0o666):
        try:
            yield partial
            sync(partial)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        sync(path.parent)


def write_bytes(path: Path, content: bytes, *, secret: bool = False) -> None:
    """Write a file."""
    with fresh_file(path, secret=secret) as partial:
        partial.write_bytes(content)


def write_text(path: Path, text: str) -> None:
    """Write a file of text."""
    write_bytes(path, text.encode())


def append_line(path: Path, line: str) -> None:
    """Add a line to a file that grows; one that a killed process cut short is ended first."""
    with writing(path), path.open("ab+", buffering=0) as file:
        length = file.tell()
        if length:
            file.seek(-1, os.SEEK_END)
        content = ("\n" if length and file.read(1) != b"\n" else "") + f"{line}\n"
        try:
            if file.write(content.encode()) < len(content.encode()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(length)
            raise


@contextmanager
def filling(folder: Path, *, secret: bool = False) -> Iterator[Path]:
    """Give a folder to fill whose content ``folder`` gets, which is missing or empty till then."""
    require_empty(folder)
    inside, made = folder.is_dir(), missing(folder)
    partial = folder / UNFINISHED if inside else folder.with_name(f".{folder.name}{PARTIAL}")
    with writing(folder):
        partial.mkdir(0o700 if secret else 0o777, parents=True, exist_ok=True)
        with _alone(partial / LOCK):
            try:
                clear(partial, but=LOCK)
                yield partial
                for each in partial.rglob("*"):
                    sync(each)
                (partial / LOCK).unlink()
                partial.rename(folder / FINISHED if inside else folder)
            except BaseException:
                remove(partial)
                remove_empty(made)
                raise
        _move_up(folder)
        sync(folder if inside else folder.parent)


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """Give an empty folder for as long as it is needed; what a killed process left goes first."""
    with writing(folder):
        folder.mkdir(0o700, parents=True, exist_ok=True)
        with _alone(folder / LOCK):
            try:
                clear(folder, but=LOCK)
                yield folder
            finally:
                remove(folder)


def require_empty(folder: Path) -> None:
    """Refuse a place where something is."""
    if not is_free(folder):
        raise RunError(f"{folder} exists already and is not empty: choose another place")


def is_free(folder: Path) -> bool:
    """Say whether nothing is there; what is left of an interrupted filling does not count."""
    if not folder.is_dir():
        return not folder.exists()
    with writing(folder):
        _move_up(folder)
        return all(path.name == UNFINISHED for path in folder.iterdir())


def missing(folder: Path) -> list[Path]:
    """Return the folders that have to be made for this one to be there, itself first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove those of these folders that are empty."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def clear(folder: Path, *, but: str = "") -> None:
    """Empty a folder."""
    for path in folder.iterdir():
        if path.name != but:
            remove(path)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _move_up(folder: Path) -> None:
    finished = folder / FINISHED
    if finished.is_dir():
        for path in finished.iterdir():
            path.rename(folder / path.name)
        finished.rmdir()


@contextmanager
def _alone(path: Path, mode: int = 0o600) -> Iterator[None]:
    """Make a file, or take over what a killed process left of it, and let nobody else have it."""
    number = os.open(path, os.O_CREAT | os.O_RDWR, mode)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Somebody may have finished with it after we opened it.
            mine = path.exists() and os.path.samestat(os.fstat(number), path.stat())
        except BlockingIOError:
            mine = False
        if not mine:
            raise DiskError(f"{path}: another process is writing it; wait until it is done")
        if mode == 0o600:
            os.fchmod(number, mode)
        os.ftruncate(number, 0)
        yield
    finally:
        os.close(number)
