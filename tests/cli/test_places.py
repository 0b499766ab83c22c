"""Where commands write: links, the folder one is in, what is read-only, and being stopped there."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from test_main import _is_clear_error, _spawn, ratings

from hushrec.cli import main
from hushrec.runs.folder import RunFolder

NOBODY = 65534


def hushrec(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table, a run that can be exported, and that run's command."""
    top = tmp_path_factory.mktemp("made")
    table = top / "ratings.csv"
    table.write_text("\n".join(["user,item,rating,timestamp", *ratings()]) + "\n")
    words = ["--data", table, "--method", "fedease", "--out", top / "run"]
    assert hushrec("train", *words).exit_code == 0
    # What is imported late is imported now: somebody else may not be able to.
    assert hushrec("report", top / "run").exit_code == 0
    assert hushrec("export", top / "run", top / "bundle").exit_code == 0
    return top


def train(made: Path, *words: object) -> Result:
    return hushrec("train", "--data", made / "ratings.csv", "--method", "popularity", *words)


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


# ---------------------------------------------------------------- links and "."


def test_a_link_to_an_empty_folder_stays_a_link(made: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for more in ([], ["--overwrite"], ["--overwrite"]):
        result = train(made, "--out", tmp_path / "link", *more)
        assert result.exit_code == 0, result.output
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "real" / "report.html").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_a_bundle_goes_where_a_link_leads(made: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("not-yet")
    assert hushrec("export", made / "run", tmp_path / "link").exit_code == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "not-yet" / "manifest.json").exists()


def test_the_folder_one_is_in(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert train(made, "--out", ".").exit_code == 0
    before = files(tmp_path)
    _is_clear_error(train(made, "--out", ".", "--overwrite"), "the folder you are in")
    assert files(tmp_path) == before
    (tmp_path / "bundle").mkdir()
    monkeypatch.chdir(tmp_path / "bundle")
    assert hushrec("export", made / "run", ".").exit_code == 0
    assert sorted(os.listdir()) == ["manifest.json", "model.safetensors"]  # noqa: PTH208


# ---------------------------------------------------------------- what cannot be written


def as_somebody_else(act: Callable[[], Result], *private: Path) -> Result:
    """Do it as a user who may not write everywhere, whoever runs the tests."""
    if os.geteuid() != 0:
        return act()
    for path in private:
        os.chown(path, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        return act()
    finally:
        os.seteuid(0)


@pytest.fixture
def read_only(made: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A run in a folder that nobody may change; of one that is to go on the end is missing."""
    top = tmp_path / "read-only"
    assert train(made, "--out", top / "run").exit_code == 0
    if request.node.callspec.params["command"] == "resume":
        (top / "run" / "summary.json").unlink()
    for path in (*top.rglob("*"), top):
        path.chmod(0o555 if path.is_dir() else 0o444)
    for path in (made, *made.rglob("*"), *made.parents, *top.parents):
        if "pytest-of" in str(path):  # else its user's alone
            path.chmod(0o755 if path.is_dir() else 0o644)
    return top / "run"


@pytest.mark.parametrize("command", ["overwrite", "resume", "report", "export", "import", "tune"])
def test_what_is_read_only_is_a_sentence_and_stays(
    command: str, made: Path, read_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, data = read_only / "inside", made / "ratings.csv"
    monkeypatch.setenv("XDG_CACHE_HOME", str(read_only))
    words: dict[str, list[object]] = {
        "overwrite": ["train", "--data", data, "--out", read_only, "--overwrite"],
        "resume": ["train", "--resume", "--out", read_only],
        "report": ["report", read_only],
        "export": ["export", made / "run", inside],
        "import": ["data", "import", data, "--name", "mine"],
        "tune": ["tune", "--data", data, "--method", "fedmf", "--out", inside],
    }
    before = files(read_only.parent)
    result = as_somebody_else(lambda: hushrec(*words[command]))
    _is_clear_error(result)
    last = result.stderr.splitlines()[-1]  # a display may have begun before
    assert last.startswith("hushrec: ")
    assert "cannot write" in last or "cannot be made" in last
    assert files(read_only.parent) == before


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Refuse what makes a file larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_federation_finds_no_room(made: Path, tmp_path: Path) -> None:
    init = ["federate", "init", tmp_path / "f", "--data", made / "ratings.csv", "--nodes", "1"]
    for size in (0, 600, 5_000, 30_000):
        with room_for(size):
            _is_clear_error(hushrec(*init), "cannot write")
        assert list(tmp_path.iterdir()) == []
    assert hushrec(*init).exit_code == 0


def test_a_node_finds_no_room(made: Path, tmp_path: Path) -> None:
    init = ["federate", "init", tmp_path / "f", "--data", made / "ratings.csv", "--nodes", "1"]
    assert hushrec(*init).exit_code == 0
    contract = tmp_path / "f" / "server" / "contract.hushrec"
    node = tmp_path / "own" / "shop.node"
    node.parent.mkdir()
    new = ["node", "init", node, "--contract", contract, "--name", "shop"]
    for size in (0, 5_000, 30_000):
        with room_for(size):
            _is_clear_error(hushrec(*new), "cannot write")
        assert list(node.parent.iterdir()) == []
    assert hushrec(*new).exit_code == 0
    before = hushrec("node", "status", node, "--json").stdout
    with room_for(33_000):  # enough to open it
        _is_clear_error(hushrec("node", "import", node, made / "ratings.csv"), "cannot write")
    assert hushrec("node", "status", node, "--json").stdout == before
    assert hushrec("node", "import", node, made / "ratings.csv").exit_code == 0


# ---------------------------------------------------------------- being stopped


def test_a_run_that_was_stopped_before_its_report_gets_it(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert train(made, "--out", out).exit_code == 0
    summary = (out / "summary.json").read_bytes()
    (out / "report.html").unlink()
    result = hushrec("train", "--resume", "--out", out)
    assert result.exit_code == 0, result.output
    assert (out / "report.html").exists()
    assert (out / "summary.json").read_bytes() == summary
    _is_clear_error(hushrec("train", "--resume", "--out", out), "nothing to resume")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_replacement_that_is_stopped_leaves_the_old_run_and_can_be_resumed(
    number: signal.Signals, made: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert train(made, "--out", out).exit_code == 0
    before = files(out)
    endless = ["--method", "fedmf", "--rounds", "100000", "--set", "evaluation.patience=0"]
    words = ["train", "--data", made / "ratings.csv", *endless, "--out", out, "--overwrite"]
    running = _spawn(*map(str, words))
    new = tmp_path / ".run.new"
    deadline = time.monotonic() + 120
    while not (new / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(number)
    _, said = running.communicate(timeout=120)
    assert running.returncode == 130, said
    assert f"go on with: --resume --out {out}" in said
    assert "Traceback" not in said
    assert files(out) == before
    assert hushrec("evaluate", out).exit_code == 0
    reached = int((RunFolder(new).checkpoint_name() or "").removeprefix("round-"))
    config = new / "config.toml"
    config.write_text(config.read_text().replace("rounds = 100000", f"rounds = {reached + 1}"))
    result = hushrec("train", "--resume", "--out", out)
    assert result.exit_code == 0, result.output
    assert RunFolder.open(out).read_summary().method == "fedmf"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
