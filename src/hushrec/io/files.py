"""Atomic writes and checked paths; failed writes raise `DiskError`.

A file or folder is written under a temporary name next to its target, synced, and renamed. A failed
process removes its temporary files; the next writer removes those of a killed process. A lock keeps
two processes from writing the same target. Paths that users give pass through `checked_path`.
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

from hushrec.errors import ConfigError, DiskError, RunError

PARTIAL = ".partial"
UNFINISHED, FINISHED = ".unfinished", ".finished"
"""Subfolders of an existing empty target: its content while it is written, and once complete."""
LOCK = ".lock"
LONGEST_NAME = 200
"""Bytes of a file name; file systems allow 255, and temporary names are longer."""
SHOWN_PATH = 80
"""Characters of a path in an error message."""
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `DiskError` for a failed write."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors has the operating system's error number in its message only.
        numbers = {int(number) for number in re.findall(r"os error (\d+)", str(error))}
        if {getattr(error, "errno", None), *numbers} & FULL:
            reason = "the disk is full: free some space and try again; existing files are intact"
        else:
            reason = getattr(error, "strerror", None) or str(error)
        raise DiskError(f"cannot write {path}: {reason}") from None


@contextmanager
def atomic_file(path: Path, *, secret: bool = False) -> Iterator[Path]:
    """Yield a temporary file that replaces ``path`` at the end; a secret one has mode 0600."""
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
    """Write a file atomically."""
    with atomic_file(path, secret=secret) as partial:
        partial.write_bytes(content)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_bytes(path, text.encode())


def append_line(path: Path, line: str) -> None:
    """Append a line; an incomplete last line of a killed process is terminated first."""
    with writing(path), path.open("ab+", buffering=0) as file:
        length = file.tell()
        if length:
            file.seek(-1, os.SEEK_END)
        content = (b"\n" if length and file.read(1) != b"\n" else b"") + f"{line}\n".encode()
        try:
            if file.write(content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(length)
            raise


@contextmanager
def atomic_folder(folder: Path, *, secret: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``folder``, which must be missing or empty."""
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
def scratch_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder, removed at the end; leftovers of a killed process are removed."""
    with writing(folder):
        folder.mkdir(0o700, parents=True, exist_ok=True)
        with _alone(folder / LOCK):
            try:
                clear(folder, but=LOCK)
                yield folder
            finally:
                remove(folder)


def require_empty(folder: Path) -> None:
    """Refuse a path that exists and is not an empty folder."""
    if not is_free(folder):
        raise RunError(f"{folder} exists already and is not empty: choose another folder")


def is_free(folder: Path) -> bool:
    """Return whether a path is missing or an empty folder; interrupted writes do not count."""
    if not folder.is_dir():
        return not folder.exists()
    with writing(folder):
        _move_up(folder)
        return all(path.name == UNFINISHED for path in folder.iterdir())


def missing(folder: Path) -> list[Path]:
    """Return the folder and its parents that do not exist, innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove the empty ones of these folders."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def clear(folder: Path, *, but: str = "") -> None:
    """Remove all content of a folder, except one name."""
    for path in folder.iterdir():
        if path.name != but:
            remove(path)


def remove(path: Path) -> None:
    """Remove a file or a folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
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
    """Create or take over a file and lock it against other processes."""
    number = os.open(path, os.O_CREAT | os.O_RDWR, mode)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have removed or replaced it since it was opened.
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


def checked_path(path: str | Path) -> Path:
    """Return a usable path, or raise `ConfigError` with the reason; the file need not exist.

    A symbolic link at the end of the path, or a path such as ``.``, is resolved.
    """
    text, shown = os.fspath(path), shown_path(path)
    if not text:
        raise ConfigError("the path is empty: give the name of a file or a folder")
    if "\0" in text:
        raise ConfigError(f"{shown}: a path cannot hold a zero byte")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{shown}: the name is not UTF-8, so it could not be written down: rename it"
        ) from None
    given = Path(text)
    longest = max((len(os.fsencode(part)) for part in given.parts), default=0)
    if longest > LONGEST_NAME:
        raise ConfigError(
            f"{shown}: a name of {longest} bytes is too long: use at most {LONGEST_NAME}"
        )
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            given.stat()
        named = given.name not in ("", "..") and not given.is_symlink()
        real = given.resolve()
        # A pipe under /proc exists although the target of its link does not.
        usable = given if named or (given.exists() and not real.exists()) else real
    except OSError as error:  # also if the working folder was removed
        raise ConfigError(f"{shown}: {error.strerror}") from None
    if not usable.name:
        raise ConfigError(f"{shown} is the file system's root: name a file or folder inside it")
    return usable


def shown_path(path: str | Path) -> str:
    """Return a path for an error message: printable and shortened."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    if len(text) > SHOWN_PATH:
        text = f"{text[: SHOWN_PATH // 2]}…{text[-SHOWN_PATH // 2 :]}"
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
