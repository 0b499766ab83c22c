"""Who shares a machine, or a folder of runs, sees no more than is theirs."""

import os
import shutil
import stat

import pytest

import hushrec
from hushrec.data.catalog import import_file
from hushrec.studio.pages import find_runs


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A private run, made where new files are readable by everybody."""
    before = os.umask(0o022)
    folder = tmp_path_factory.mktemp("runs") / "mine"
    settings = {"privacy.mode": "central", "privacy.epsilon": 8.0}
    try:
        hushrec.train("demo", "popularity", settings=settings, out=folder)
    finally:
        os.umask(before)
    return folder


def test_the_key_and_the_ranks_are_the_owners(run):
    assert mode(run / "users.npz") == 0o600
    states = list(run.glob("checkpoint/*/state.json"))
    assert states
    for state in states:
        assert mode(state) == 0o600
        assert mode(state.parent) == 0o700


def test_imported_data_is_the_owners(cache, tmp_path):
    source = tmp_path / "ratings.csv"
    source.write_text("user,item\n" + "".join(f"u{k % 5},i{k % 7}\n" for k in range(35)))
    before = os.umask(0o022)
    try:
        import_file(source, "mine")
    finally:
        os.umask(before)
    (kept,) = cache.rglob("mine.npz")
    assert mode(kept) == 0o600
    assert mode(kept.parent) == 0o700


def test_the_studio_follows_no_link_out_of_its_folder(run, tmp_path):
    shown = tmp_path / "shown"
    shown.mkdir()
    shutil.copytree(run, shown / "copied")
    shutil.copytree(run, shown / "patched")
    (shown / "linked").symlink_to(run)
    (shown / "patched" / "report.html").unlink(missing_ok=True)
    (shown / "patched" / "report.html").symlink_to("/etc/passwd")
    (shown / "again").symlink_to(shown / "copied")
    assert set(find_runs(shown)) == {"copied", "again"}
