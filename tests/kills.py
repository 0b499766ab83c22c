"""Kill a command at every one of its writes, go on, and compare with one that was left alone.

``python tests/kills.py FOLDER [SCENARIO ...]`` prints a line a scenario and every difference found.
Everything is forked from one process whose kernels are compiled, so a kill costs little more than
the command. Python tells of every file that is opened for writing, renamed, removed or made,
whoever does it: a write that went round `io.files` would be a point like any other. A line that
is added to a file is also cut in its middle. Then, for a full disk, the size of a file is limited
to one byte less than each of those that the command writes.
"""

from __future__ import annotations

import gc
import io
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import numpy as np

from hushrec import config as registry
from hushrec.cli import main
from hushrec.reporting import html
from hushrec.runs.folder import RunFolder
from hushrec.runs.recording import CheckpointCallback
from test_api import bits

WRITES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod"}
ROUNDS = ["--rounds", "2", "--set", "evaluation.every=1", "--threads", "1", "--json"]
FULL = "the disk is full"


class Fault:
    """Counts the writes below a folder, and kills this process at one of them."""

    root, at, count = "", 0, 0

    @classmethod
    def point(cls) -> bool:
        """Count a write, and say whether it is the last that shall be begun."""
        cls.count += 1
        return cls.count == cls.at

    @classmethod
    def hear(cls, event: str, about: tuple[Any, ...]) -> None:
        if not cls.root or event not in WRITES:
            return
        if event == "open" and not about[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        inside = isinstance(about[0], int) or str(about[0]).startswith(cls.root)
        relative = event != "open" and about[-1] != -1  # to a folder that is being removed
        if (inside or relative) and cls.point():
            os.kill(os.getpid(), signal.SIGKILL)


class CutShort(io.FileIO):
    """A file whose writes can end in the middle."""

    def write(self, content: Any) -> int:
        if Fault.point():
            super().write(content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write(content)


def open_path(path: Path, mode: str = "r", *more: Any, **others: Any) -> Any:
    """Stand in for `Path.open`."""
    return CutShort(path, "ab+") if mode == "ab+" else OPEN(path, mode, *more, **others)


OPEN = Path.open


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    """As the system has it: negative after a signal."""
    said: str
    writes: int


def command(root: Path, *words: object, at: int = 0, limit: int | None = None) -> Outcome:
    """Run a command in a process of its own."""
    heard, told = os.pipe()
    counted = root.with_name("count")
    process = os.fork()
    if process == 0:
        code = 99
        try:
            os.close(heard)
            os.dup2(told, 1)
            os.dup2(told, 2)
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            Path.open = open_path  # type: ignore[method-assign, assignment]
            Fault.at, Fault.count, Fault.root = at, 0, str(root)
            try:
                main([str(word) for word in words])
            except SystemExit as ended:
                code = int(ended.code or 0)
            Fault.root = ""
            counted.write_text(str(Fault.count))
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    os.close(told)
    with os.fdopen(heard, "rb") as stream:
        said = stream.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return Outcome(code, said, int(counted.read_text()) if code >= 0 else at)


def here(words: list[object]) -> None:
    """Run a command in this process."""
    with redirect_stdout(io.StringIO()):
        main([str(word) for word in words], standalone_mode=False)


def listed(root: Path) -> list[str]:
    """Return all files and folders, hidden ones too."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file in a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def arrays(file: Path) -> dict[str, Any]:
    """Return an npz file's arrays, so that they can be compared."""
    with np.load(file) as stored:
        return {name: (a.dtype.str, a.shape, a.tobytes()) for name, a in stored.items()}


Words = Callable[[Path], list[object]]
Ways = Callable[[Path], list[list[object]]]


@dataclass(frozen=True)
class Scenario:
    """A command, where it writes, and how what it leaves is looked at."""

    words: Words
    look: Callable[[Path], object]
    """What must be the same in the end."""
    go_on: Ways
    """What to try after a kill, until something works; what says that all is done is right too."""
    before: Path | None = None
    """What is there at the beginning."""

    def kill_everywhere(self, root: Path) -> Iterator[str]:
        """Yield what went wrong."""
        whole = self._fresh(root)
        done = command(whole, *self.words(whole))
        assert done.code == 0, done.said
        wanted, names = self.look(whole), listed(whole)
        old = None if self.before is None else self.look(self.before)
        for at in range(1, done.writes + 1):
            here = self._fresh(root)
            killed = command(here, *self.words(here), at=at)
            if killed.code != -signal.SIGKILL:
                yield f"kill {at}: ended with {killed.code}: {killed.said}"
                continue
            if old and self._seen(here) not in (old, wanted):
                yield f"kill {at}: neither the old nor the new is there: {listed(here)}"
            again = self._again(here)
            if again.code not in (0, 2) or self._seen(here) != wanted:
                yield f"kill {at}: going on ended with {again.code}: {again.said}"
            elif listed(here) != names:
                yield f"kill {at}: {set(listed(here)) ^ set(names)} differ"
        print(f"  {done.writes} kills")

    def fill_everywhere(self, root: Path) -> Iterator[str]:
        """Yield what went wrong where a file found no room."""
        whole = self._fresh(root)
        assert command(whole, *self.words(whole)).code == 0
        wanted = self.look(whole)
        sizes = {path.stat().st_size for path in whole.rglob("*") if path.is_file()}
        for size in sorted(sizes - {0}):
            here = self._fresh(root)
            limit = size - 1 - size // 50  # times have more digits in some runs than in others
            full = command(here, *self.words(here), limit=limit)
            if full.code != 2 or FULL not in full.said or "Traceback" in full.said:
                yield f"limit {limit}: ended with {full.code}: {full.said}"
            if any(part in name for name in listed(here) for part in ("partial", "unfinished")):
                yield f"limit {limit}: left {listed(here)}"
            if self.before is not None:
                if contents(here) != contents(self.before):
                    yield f"limit {limit}: {listed(here)} is not what was there before"
                if "--resume" in full.said:
                    yield f"limit {limit}: nothing to resume, but: {full.said}"
            again = self._again(here)
            if again.code or self._seen(here) != wanted:
                yield f"limit {limit}: going on ended with {again.code}: {again.said}"
        print(f"  {len(sizes)} limits")

    def _seen(self, here: Path) -> object:
        """Look at a copy: whoever opens a run may put it right."""
        copy = here.with_name("copy")
        rmtree(copy, ignore_errors=True)
        try:
            return self.look(copytree(here, copy))
        except Exception as error:
            return repr(error)

    def _again(self, here: Path) -> Outcome:
        for words in self.go_on(here):
            ended = command(here, *words)
            if ended.code == 0:
                break
        return ended

    def _fresh(self, root: Path) -> Path:
        here = root / "here"
        rmtree(here, ignore_errors=True)
        if self.before is None:
            here.mkdir()
        else:
            copytree(self.before, here)
        return here


def scenarios(root: Path) -> dict[str, Scenario]:
    """Return what is tried, with the runs and files it begins from."""
    tables = [root / f"table-{number}.csv" for number in (1, 2)]
    for number, file in enumerate(tables):
        rng = np.random.default_rng(number)
        pairs = rng.permutation(12 * 10)[:80]
        rows = [f"u{p % 12},i{p // 12},{when}" for when, p in enumerate(pairs)]
        file.write_text("\n".join(["user,item,time", *rows]))

    def train(method: str, seed: int, out: Path, *more: object) -> list[object]:
        asked = ["train", "--data", tables[0], "--method", method, *ROUNDS, "--seed", seed]
        small = ["--set", "d=2"] if method == "fedmf" else []
        return [*asked, *small, "--out", out, *more]

    def resume(words: Words) -> Ways:
        return lambda here: [["train", "--resume", "--json", "--out", here / "run"], words(here)]

    def again(words: Words) -> Ways:
        return lambda here: [words(here)]

    def fresh(here: Path) -> list[object]:
        return train("fedmf", 2, here / "run")

    def replaced(here: Path) -> list[object]:
        return train("fedmf", 2, here / "run", "--overwrite")

    def several(here: Path) -> list[object]:
        return train("fedmf", 2, here / "run", "--seeds", "2")

    def seeds_of(here: Path) -> object:
        runs = [here / "run" / f"seed-{seed}" for seed in (2, 3)]
        mean = RunFolder(here / "run").read_summary()
        return [bits(run) for run in runs], mean.test

    def run_of(here: Path) -> object:
        return bits(RunFolder.open(here / "run").path)

    def imported(here: Path, table: int = 1) -> list[object]:
        os.environ["XDG_CACHE_HOME"] = str(here)
        return ["data", "import", tables[table], "--name", "mine", "--overwrite", "--json"]

    def exported(here: Path) -> list[object]:
        return ["export", pairs_run, here / "bundle", "--json"]

    def tuned(here: Path) -> list[object]:
        asked = ["tune", "--data", tables[0], "--method", "fedmf", "--set", "d=2", "--rounds", "1"]
        return [*asked, "--trials", "2", "--threads", "1", "--json", "--out", here / "search"]

    # In this process: what is forked from it finds everything compiled and loaded.
    pairs_run = root / "pairs"
    here(train("fedmf", 1, root / "old" / "run"))
    here(train("fedease", 1, pairs_run))
    here(exported(root / "warm"))
    here(tuned(root / "warm"))
    here(imported(root / "cache", 0))
    (root / "empty" / "bundle").mkdir(parents=True)

    def mine(here: Path) -> object:
        return arrays(here / "hushrec" / "imported" / "mine.npz")

    def bundle(here: Path) -> object:
        return contents(here / "bundle")

    return {
        "train": Scenario(fresh, run_of, resume(fresh)),
        "overwrite": Scenario(replaced, run_of, resume(replaced), root / "old"),
        "import": Scenario(imported, mine, again(imported), root / "cache"),
        "export": Scenario(exported, bundle, again(exported)),
        "export into an empty folder": Scenario(exported, bundle, again(exported), root / "empty"),
        "tune": Scenario(tuned, lambda here: contents(here / "search"), again(tuned)),
        "seeds": Scenario(several, seeds_of, resume(several)),
    }


def go(root: Path, chosen: list[str]) -> int:
    """Try them all; return how many differences were found."""
    on_round_end = CheckpointCallback.on_round_end

    def save_every_round(self, record):
        self.seconds = 0.0
        on_round_end(self, record)

    CheckpointCallback.on_round_end = save_every_round
    sys.addaudithook(Fault.hear)
    # A kill takes nothing from the system that was written; and what a page says is not asked here.
    os.fsync = lambda number: None
    html.report_page = lambda run, folder: {}
    html.sections.samples = lambda run: []
    html.render = lambda template, values: "a page"
    registry.entry_points = cache(registry.entry_points)
    tried, found = scenarios(root), 0
    gc.freeze()  # a forked process then copies less
    gc.disable()
    for name, scenario in tried.items():
        if chosen and name not in chosen:
            continue
        print(name, flush=True)
        for wrong in (*scenario.kill_everywhere(root), *scenario.fill_everywhere(root)):
            found += 1
            print(f"  WRONG {wrong}", flush=True)
    print(f"{found} differences")
    return found


if __name__ == "__main__":
    sys.exit(go(Path(sys.argv[1]).resolve(), sys.argv[2:]) > 0)
