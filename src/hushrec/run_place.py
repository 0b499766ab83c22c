"""Where a run is trained: in its place, or beside an older one until it can take that place.

A run that is to be replaced stays where it is, whole, until the new one is done. Then the two
change names, in two steps; whoever finds that only the first was done undoes it (`bring_back`). A
process may be killed at any moment: the old run or the new one is in its place, and ``--resume``
goes on with what is left to do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from hushrec.disk import LOCK, clear, is_free, missing, remove, remove_empty, sync, writing
from hushrec.errors import DiskError, RunError, StoppedError
from hushrec.run_folder import NEW, OLD, RunFolder, beside, bring_back, is_held, is_run


@contextmanager
def new_place(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give the folder for a new run, which is at ``path`` when it is done.

    One that fails leaves what was there; of itself nothing, unless it has come to a first round.
    """
    require_free(path, overwrite=overwrite)
    replaces, made = is_run(path), missing(path)
    here = beside(path, NEW) if replaces else path
    with RunFolder(path).locked() if replaces else nullcontext():
        if replaces:
            remove(here)
        try:
            yield here
        except StoppedError as stopped:
            raise StoppedError(f"{stopped}; {_again(path)}") from None
        except Exception as error:
            kept = not replaces and any(path.rglob("metrics.jsonl"))
            # Somebody else may have begun a run there meanwhile; then it is refused, and theirs.
            refused = isinstance(error, RunError) and not isinstance(error, DiskError)
            theirs = not replaces and (refused or RunFolder(path).is_locked())
            if not (kept or theirs) and here.exists():
                clear(here)
                remove_empty([here] if replaces else made)
            if isinstance(error, DiskError) and (kept or replaces):
                left = _again(path) if kept else f"the run in {path} is as it was"
                raise DiskError(f"{error}; {left}") from None
            raise
        if replaces:
            _replace(path, here)


@contextmanager
def resumed_place(path: Path) -> Iterator[Path]:
    """Give the folder of the run that was interrupted, which is at ``path`` when it is done."""
    here = left_off(path)
    with RunFolder(path).locked() if here != path and path.exists() else nullcontext():
        try:
            yield here
        except (StoppedError, DiskError) as error:
            raise type(error)(f"{error}; {_again(path)}") from None
        if here != path:
            _replace(path, here)


def left_off(path: Path) -> Path:
    """Return where there is something to go on with: a run, or the one that is to replace it.

    One that is done and was killed before it had taken its place takes it now.
    """
    bring_back(path)
    new, old = beside(path, NEW), beside(path, OLD)
    if is_run(new):
        if not (new / "summary.json").exists():
            return new
        with RunFolder(path).locked() if path.exists() else nullcontext():
            _replace(path, new)
    if is_run(path) and old.exists() and not is_held(old / LOCK):
        remove(old)
    return RunFolder.open(path).path


def require_free(path: Path, *, overwrite: bool) -> None:
    """Refuse a place where a new run would destroy something it was not asked to."""
    bring_back(path)
    if is_free(path):
        return
    if not path.is_dir():
        raise RunError(f"{path} is a file; choose another --out")
    if not overwrite:
        raise RunError(
            f"{path} exists already; add --resume to go on with it, --overwrite to start "
            "anew, or choose another --out"
        )
    if not is_run(path):
        raise RunError(f"{path} is not a run folder: refusing to overwrite it")
    real = path.resolve()
    if real in (Path.cwd(), *Path.cwd().parents):
        raise RunError(f"{path} is the folder you are in: go elsewhere to overwrite it")
    if os.path.ismount(real) or not all(os.access(each, os.W_OK) for each in (real, real.parent)):
        raise RunError(f"{path} cannot be replaced: it, or what it lies in, cannot be changed")
    with RunFolder(path).locked():
        pass  # nobody is training in it


def _replace(path: Path, new: Path) -> None:
    old = beside(path, OLD)
    with writing(path):
        remove(old)
        if path.exists():
            path.rename(old)
        new.rename(path)
        sync(path.parent)
    remove(old)


def _again(path: Path) -> str:
    return f"go on with: --resume --out {path}"
