"""A command that is killed at any write, or finds the disk full, loses nothing (`kills`)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("optuna", reason="needs the 'tune' extra")
FEWEST = {
    "train": 50,
    "overwrite": 60,
    "import": 4,
    "export": 6,
    "export into an empty folder": 8,
    "tune": 15,
    "seeds": 100,
}
"""Points at which each is killed: fewer would mean that writes are no longer seen."""


def kill(folder: Path, *scenarios: str) -> None:
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": str(here), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(here / "kills.py"), str(folder), *scenarios]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    kills = re.findall(r"^(\w.*)\n  (\d+) kills\n  (\d+) limits$", done.stdout, re.MULTILINE)
    assert {name for name, _, _ in kills} == set(scenarios)
    for name, points, limits in kills:
        assert int(points) >= FEWEST[name]
        assert int(limits) >= 1


@pytest.mark.slow
def test_a_kill_at_any_write_and_a_full_disk_at_any_file_lose_nothing(tmp_path):
    kill(tmp_path, *(name for name in FEWEST if name != "seeds"))


@pytest.mark.slow
def test_so_it_is_with_several_seeds(tmp_path):
    kill(tmp_path, "seeds")
