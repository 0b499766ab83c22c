"""Kernels run whatever becomes of numba's cache."""

import importlib.util
import os
import shutil
import subprocess
import sys

import numba
import pytest

from hushrec.cli.terminal import NO_CACHE

SOURCE = """
from hushrec.kernels.jit import njit

@njit(cache=True)
def twice(number):
    return 2 * number
"""


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Load a kernel as a new process would; its cache is in a folder of its own."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "twice.py").write_text(SOURCE)

    def load():
        spec = importlib.util.spec_from_file_location("twice", tmp_path / "twice.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.twice

    return load


def test_a_kernel_is_kept(kernel):
    assert kernel()(4) == 8
    again = kernel()
    assert again(4) == 8
    assert sum(again.stats.cache_hits.values()) == 1


@pytest.mark.parametrize("content", [b"", b"\x80nonsense", b"\x00" * 5000])
def test_a_damaged_cache_is_written_anew(kernel, tmp_path, content):
    assert kernel()(4) == 8
    for file in (tmp_path / "cache").rglob("*.nb?"):
        file.write_bytes(content)
    assert kernel()(4) == 8
    again = kernel()
    assert again(4) == 8
    assert sum(again.stats.cache_hits.values()) == 1


def test_a_cache_that_went_away_is_not_missed(kernel, tmp_path):
    found = kernel()
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("in the way")
    assert found(4) == 8


NOWHERE = """
import sys
from numba.core import caching
caching.CacheImpl._locator_classes = []
from hushrec.cli import main
main(sys.argv[1:])
"""


def test_without_a_place_for_a_cache_it_is_said_once_and_all_works():
    """As in a package that is installed read-only, for a user who has no home."""
    words = [sys.executable, "-c", NOWHERE]
    done = subprocess.run([*words, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "hushrec" in done.stdout or "version" in done.stdout
    done = subprocess.run([*words, "methods", "--json"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, f"{NO_CACHE}\n")


def test_a_user_without_a_home_can_do_without_one(tmp_path):
    code = (
        "import pwd\n"
        "pwd.getpwuid = lambda number: (_ for _ in ()).throw(KeyError(number))\n"
        "from hushrec.cli import main\n"
        "main(['data', 'list', '--json'])\n"
    )
    unset = {"HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "HUSHREC_DATA"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert (done.returncode, done.stderr) == (0, f"{NO_CACHE}\n")
    assert '"demo"' in done.stdout
    assert list(tmp_path.iterdir()) == []
