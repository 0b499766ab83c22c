"""Runs: the same seed gives the same bits, whatever the machine does; a run can be killed."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import hushrec
from conftest import blocks
from hushrec.api import Run, train
from hushrec.errors import (
    ConfigError,
    DataError,
    DivergedError,
    HushrecError,
    RunError,
    StoppedError,
)
from hushrec.evaluation.evaluator import Evaluator
from hushrec.federation.backends import Machine
from hushrec.io import codec
from hushrec.io import files as disk
from hushrec.runs import folder as run_folder
from hushrec.runs.folder import FINAL, RunFolder, ranks_to_arrays
from hushrec.testing.checks import check_same

SETTINGS = {
    "fedmf": {"d": 5, "item_rate": 1.0, "cohort.kind": "fixed", "cohort.size": 17},
    "pfedrec": {"d": 5, "item_rate": 1.0, "cohort.kind": "poisson", "cohort.probability": 0.4},
    "popularity": {},
    "negative-counter": {"evaluation.every": 2},
    "local-only": {"d": 3, "batch": 16, "item_rate": 1.0},
    "central-mf": {"d": 5},
    "fedrap": {"d": 3, "epochs": 2, "table_lr": 5.0, "cohort.kind": "fixed", "cohort.size": 17},
    "fedrkg": {"d": 3, "item_rate": 1.0, "interval": 2, "beta": 0.7, "gate_lr": 0.1},
    "fedrecon": {"d": 5, "item_rate": 1.0, "dual": True, "recon_epochs": 2},
}
ROUNDS = 5
EVERYBODY = {"cohort.kind": "all", "cohort.size": None, "cohort.probability": None}


def go(data, out, method="pfedrec", more=(), machine=None, **keywords):
    settings = {**SETTINGS[method], **dict(more)}
    return train(
        data,
        method,
        rounds=keywords.pop("rounds", ROUNDS),
        seed=3,
        settings=settings,
        out=out,
        machine=machine or Machine(threads=1),
        **keywords,
    )


def bits(folder) -> dict:
    """All that must not change: final model, per-user ranks, metrics without their clock."""
    folder = Path(folder)
    run = RunFolder(folder)
    state = run.read_checkpoint(FINAL)
    out = {}
    for file in sorted(state.files):
        for name, array in run.read_tensors(FINAL, file).items():
            out[f"{file}/{name}"] = (array.dtype, array.shape, array.tobytes())
    for name, array in codec.read_arrays(folder / "users.npz").items():
        out[f"users/{name}"] = (array.dtype, array.shape, array.tobytes())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    out["metrics"] = [{k: v for k, v in line.items() if k != "seconds"} for line in lines]
    out["selected"] = (state.selected_round, state.selected_value, state.round)
    summary = run.read_summary()
    out["test"], out["valid"] = summary.test, summary.valid
    out["communication"] = summary.communication
    return out


@pytest.fixture(scope="module")
def plain(tiny, tmp_path_factory):
    """The uninterrupted run of each method, made once, on one thread with ordinary stacks."""
    made = {}

    def get(method):
        if method not in made:
            made[method] = tmp_path_factory.mktemp("plain") / method
            go(tiny, made[method], method)
        return bits(made[method])

    return get


@pytest.mark.parametrize("method", SETTINGS)
@pytest.mark.parametrize(
    ("threads", "chunk", "store"),
    [(1, 1, "memory"), (2, 7, "memory"), (2, 1000, "file"), (2, 1, "file")],
)
def test_threads_chunks_and_stores_do_not_change_a_bit(
    method, threads, chunk, store, tiny, plain, tmp_path
):
    machine = Machine(threads=threads, chunk=chunk)
    go(tiny, tmp_path / "run", method, {"store.kind": store}, machine)
    assert bits(tmp_path / "run") == plain(method)


def test_threads_of_linear_algebra_do_not_change_a_bit():
    """On the embedded data: smaller sums are too few for two threads to share."""
    options = {"newton_rounds": 1, "network_rounds": 0, "evaluation.every": 9}
    found = []
    for threads in (1, 2):
        with threadpool_limits(threads, user_api="blas"):
            found.append(train("demo", "fedmix", settings=options).model.shared)
    check_same(*found, "shared parameters")


def test_evaluation_chunks_do_not_change_a_bit(tiny, plain, tmp_path, monkeypatch):
    monkeypatch.setattr("hushrec.serving.model.SCORES_BYTES", 4 * 40 * 3)
    go(tiny, tmp_path / "run", machine=Machine(threads=2))
    assert bits(tmp_path / "run") == plain("pfedrec")


def test_another_seed_is_another_run(tiny, plain, tmp_path):
    train(tiny, "pfedrec", rounds=ROUNDS, seed=4, settings=SETTINGS["pfedrec"], out=tmp_path / "r")
    assert bits(tmp_path / "r")["metrics"] != plain("pfedrec")["metrics"]


class OnRound(hushrec.Callback):
    """Calls a function with the record of every round."""

    def __init__(self, function):
        self.on_round_end = function


class StopAfter(hushrec.Callback):
    """Interrupts once this many rounds were reported."""

    def __init__(self, rounds):
        self.rounds, self.seen = rounds, 0

    def on_round_end(self, record):
        self.seen += 1
        if self.seen >= self.rounds:
            self.interrupt()


# ------------------------------------------------------------------ stopping and going on


@pytest.mark.parametrize("method", SETTINGS)
@pytest.mark.parametrize("store", ["memory", "file"])
def test_interrupted_and_resumed_equals_uninterrupted(method, store, tiny, plain, tmp_path):
    out = tmp_path / "run"
    for stops in (1, 2):
        stop = StopAfter(stops)
        with pytest.raises(StoppedError, match="resume"):
            watched = {"callbacks": [stop]}
            if stops == 1:
                go(tiny, out, method, {"store.kind": store}, **watched)
            else:
                train(tiny, out=out, resume=True, **watched)
        # What was reported is saved: nothing is computed twice.
        assert RunFolder(out).checkpoint_name() == f"round-{1 if stops == 1 else 3:06d}"
    train(tiny, out=out, resume=True)
    assert bits(out) == plain(method)


def test_resume_without_any_checkpoint_starts_anew(tiny, plain, tmp_path):
    def crash(report):
        if report.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(tiny, tmp_path / "run", callbacks=[OnRound(crash)])
    assert RunFolder(tmp_path / "run").checkpoint_name() is None
    train(tiny, out=tmp_path / "run", resume=True)
    assert bits(tmp_path / "run") == plain("pfedrec")


DRIVER = """
import sys
sys.path.insert(0, sys.argv[1])
from conftest import blocks
from test_api import OnRound, go
from hushrec.federation.backends import Machine

def tell(report):
    print(report.round, flush=True)

go(blocks(), sys.argv[2], sys.argv[3], {"store.kind": sys.argv[4]},
   Machine(threads=2, checkpoint_seconds=0), callbacks=[OnRound(tell)], rounds=int(sys.argv[5]))
"""


@pytest.mark.parametrize(
    ("method", "store", "at"), [("pfedrec", "file", 6), ("fedmf", "memory", 13)]
)
def test_killed_in_mid_round_and_resumed_equals_uninterrupted(method, store, at, tmp_path):
    rounds = 400  # far more than can finish before the signal arrives
    out = tmp_path / "run"
    arguments = [str(Path(__file__).parent), str(out), method, store, str(rounds)]
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, *arguments], stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if int(line) >= at:
            process.send_signal(signal.SIGKILL)
            break
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    name = RunFolder(out).checkpoint_name()
    assert name is not None
    assert name != FINAL
    # Go on for a few rounds more than the killed process had saved, and compare.
    total = int(name.removeprefix("round-")) + 5
    config = (out / "config.toml").read_text()
    (out / "config.toml").write_text(config.replace(f"rounds = {rounds}", f"rounds = {total}"))
    train(blocks(), out=out, resume=True, machine=Machine(threads=1))
    go(blocks(), tmp_path / "plain", method, rounds=total)
    assert bits(out) == bits(tmp_path / "plain")


def test_killed_between_the_final_checkpoint_and_the_summary(tiny, plain, tmp_path, monkeypatch):
    """The last moment at which a run can die: it must be possible to finish it."""
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(
            RunFolder, "write_arrays", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            go(tiny, out)
    with pytest.raises(RunError, match="resume"):
        Run.open(out, tiny)
    train(tiny, out=out, resume=True)
    assert bits(out) == plain("pfedrec")


def test_a_finished_run_has_nothing_to_resume(tiny, tmp_path):
    go(tiny, tmp_path / "run")
    before = bits(tmp_path / "run")
    with pytest.raises(RunError, match="nothing to resume"):
        train(tiny, out=tmp_path / "run", resume=True)
    assert bits(tmp_path / "run") == before


def test_resuming_on_other_data_is_refused(tiny, tmp_path):
    stop = StopAfter(2)
    with pytest.raises(StoppedError):
        go(tiny, tmp_path / "run", callbacks=[stop])
    for other in (blocks(50, 60, 3), blocks(seed=1)):
        with pytest.raises(RunError, match="other data"):
            train(other, out=tmp_path / "run", resume=True)


# ------------------------------------------------------------------ damage


@pytest.fixture
def stopped(tiny, tmp_path):
    """A run that was stopped after two of its rounds."""
    stop = StopAfter(2)
    with pytest.raises(StoppedError):
        go(tiny, tmp_path / "run", callbacks=[stop])
    return tmp_path / "run"


def checkpoint_files(out):
    folder = RunFolder(out)
    return out / "checkpoint" / folder.checkpoint_name()


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "empty"])
@pytest.mark.parametrize(
    "name",
    [
        "current-shared.safetensors",
        "current-private-00000.safetensors",
        "selected-shared.safetensors",
        "state.json",
    ],
)
def test_a_damaged_checkpoint_is_told_by_name(stopped, tiny, name, damage):
    file = checkpoint_files(stopped) / name
    content = bytearray(file.read_bytes())
    if damage == "flip":
        # In state.json this turns a digit of the round into another digit: still valid JSON.
        at = content.index(b'"round": 2') + 9 if name == "state.json" else len(content) - 3
        content[at] ^= 1
        file.write_bytes(content)
    elif damage == "truncate":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
    with pytest.raises(RunError, match=name.replace(".", r"\.")) as error:
        train(tiny, out=stopped, resume=True)
    assert "train the run anew" in str(error.value)


def test_other_damaged_files_are_told_by_name(tiny, tmp_path):
    out = tmp_path / "run"
    go(tiny, out)
    for name in ("users.npz", "summary.json", "config.toml"):
        content = (out / name).read_bytes()
        for damaged in (content[: len(content) // 2], content[:20], b"\xff\xfe nonsense", b""):
            (out / name).write_bytes(damaged)
            with pytest.raises(HushrecError, match=name):
                Run.open(out, tiny)
        (out / name).write_bytes(content)
    Run.open(out, tiny)


def test_opening_on_other_data_is_refused(tiny, tmp_path):
    go(tiny, tmp_path / "run")
    for other in (blocks(30, 60, 3), blocks(seed=1)):
        with pytest.raises(RunError, match="data"):
            Run.open(tmp_path / "run", other)


def test_a_line_cut_short_in_the_metrics(stopped, tiny, plain):
    with (stopped / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "lo')
    train(tiny, out=stopped, resume=True)
    assert bits(stopped) == plain("pfedrec")


# ------------------------------------------------------------------ folders


def test_an_existing_run_is_not_overwritten_unless_asked(tiny, tmp_path):
    go(tiny, tmp_path / "run", "popularity", rounds=1)
    before = (tmp_path / "run" / "config.toml").read_text()
    with pytest.raises(RunError, match="exists already"):
        go(tiny, tmp_path / "run")
    assert (tmp_path / "run" / "config.toml").read_text() == before
    go(tiny, tmp_path / "run", overwrite=True)
    assert Run.open(tmp_path / "run", tiny).model.method.name == "pfedrec"


@pytest.mark.parametrize("file", ["thesis.tex", "config.toml"])
def test_a_folder_that_is_not_a_run_is_never_overwritten(tiny, tmp_path, file):
    """Many programs have a config.toml; that alone does not make a folder ours to delete."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / file).write_text('[build]\nrustflags = "-O"\n')
    with pytest.raises(RunError, match="not a run folder"):
        go(tiny, precious, overwrite=True)
    assert (precious / file).exists()
    with pytest.raises(HushrecError):
        Run.open(precious, tiny)


def test_a_file_is_not_a_folder(tiny, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="is a file"):
        go(tiny, tmp_path / "file", overwrite=True)
    assert (tmp_path / "file").read_text() == "x"
    with pytest.raises(RunError, match="no such run folder"):
        Run.open(tmp_path / "nowhere")
    with pytest.raises(RunError):
        train(tiny, out=tmp_path / "nowhere", resume=True)
    with pytest.raises(ConfigError, match="out"):
        train(tiny, resume=True)


def test_an_empty_folder_is_used(tiny, tmp_path):
    (tmp_path / "run").mkdir()
    go(tiny, tmp_path / "run", "popularity", rounds=1)


def test_a_wrong_cohort_leaves_no_folder_behind(tiny, tmp_path):
    with pytest.raises(ConfigError, match=r"cohort\.size"):
        go(tiny, tmp_path / "run", "fedmf", {"cohort.size": 31})
    assert not (tmp_path / "run").exists()


def test_a_run_that_somebody_began_meanwhile_is_theirs(tiny, tmp_path, monkeypatch):
    """Between the look at the folder and the first file in it, another process may be faster."""
    out, create = tmp_path / "run", RunFolder.create

    def be_faster(path, experiment, *more):
        monkeypatch.setattr(RunFolder, "create", create)
        create(path, experiment)
        return create(path, experiment)

    monkeypatch.setattr(RunFolder, "create", be_faster)
    with pytest.raises(RunError, match="exists already"):
        go(tiny, out, "popularity", rounds=1)
    assert [path.name for path in out.iterdir()] == ["config.toml"]


def test_two_readers_of_one_run_do_not_disturb_each_other(tiny, tmp_path):
    out = tmp_path / "run"
    go(tiny, out, "fedmf", {"store.kind": "file"})
    first = Run.open(out, tiny)
    before = [r.item for r in first.recommend("u003")]
    vectors = first.model.private.read(np.arange(30))["vector"].copy()
    second = Run.open(out, tiny)
    np.testing.assert_array_equal(first.model.private.read(np.arange(30))["vector"], vectors)
    np.testing.assert_array_equal(second.model.private.read(np.arange(30))["vector"], vectors)
    assert [r.item for r in first.recommend("u003")] == before


# ------------------------------------------------------------------ a full disk


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("what", ["save_file", "fsync"])
def test_a_full_disk_leaves_the_earlier_checkpoint(stopped, tiny, plain, monkeypatch, what):
    saved = {f.name: f.read_bytes() for f in checkpoint_files(stopped).iterdir()}
    with monkeypatch.context() as patch:
        owner = run_folder if what == "save_file" else disk.os
        patch.setattr(owner, what, full)
        with pytest.raises(RunError, match="disk is full") as error:
            train(tiny, out=stopped, resume=True, machine=Machine(checkpoint_seconds=0))
        assert "resume" in str(error.value)
    assert {f.name: f.read_bytes() for f in checkpoint_files(stopped).iterdir()} == saved
    train(tiny, out=stopped, resume=True)
    assert bits(stopped) == plain("pfedrec")


def test_a_full_disk_at_the_metrics(stopped, tiny, plain, monkeypatch):
    original = Path.open

    def half(self, mode="r", *rest, **more):
        if self.name == "metrics.jsonl" and mode == "ab+":
            with original(self, "a") as file:
                file.write('{"round": ')
            full()
        return original(self, mode, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", half)
        with pytest.raises(RunError, match="disk is full"):
            train(tiny, out=stopped, resume=True)
    train(tiny, out=stopped, resume=True)
    assert bits(stopped) == plain("pfedrec")


def test_a_folder_that_cannot_be_written(tiny, tmp_path):
    with pytest.raises(RunError, match="cannot write"):
        go(tiny, Path("/proc/hushrec/run"))


# ------------------------------------------------------------------ selection


def test_the_test_items_are_ranked_once_after_training(tiny, monkeypatch):
    calls, original = [], Evaluator.rank

    def spy(self, model, part):
        # Popularity is ranked beside every result, as its baseline.
        calls.append(part if model.method.name == "pfedrec" else "baseline")
        return original(self, model, part)

    monkeypatch.setattr(Evaluator, "rank", spy)
    go(tiny, None, callbacks=[OnRound(lambda record: calls.append("round"))])
    assert calls.count("test") == 1
    assert calls.index("test") > max(k for k, c in enumerate(calls) if c == "round")


def test_the_round_is_selected_by_validation_alone(tiny, monkeypatch):
    """Feed made-up validation values; the model of the best one must be the result."""
    values, shared = iter([0.1, 0.4, 0.4, 0.2, 0.3]), {}
    monkeypatch.setattr("hushrec.federation.rounds.selection_value", lambda *looked: next(values))
    original = Evaluator.rank

    def spy(self, model, part):
        shared.setdefault(len(shared) + 1, model.shared)
        return original(self, model, part)

    monkeypatch.setattr(Evaluator, "rank", spy)
    run = go(tiny, None, "fedmf")
    assert run.summary.selected_round == 2
    assert run.summary.rounds == 5
    np.testing.assert_array_equal(run.model.shared["items"], shared[2]["items"])


def test_early_stopping(tiny, monkeypatch, tmp_path):
    values = iter([0.3, 0.2, 0.4, 0.1, 0.4, 0.9])
    monkeypatch.setattr("hushrec.federation.rounds.selection_value", lambda *looked: next(values))
    run = go(tiny, tmp_path / "r", more={"evaluation.patience": 2}, rounds=50)
    assert run.summary.rounds == 5
    assert run.summary.selected_round == 3
    assert len((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()) == 5


def test_patience_survives_an_interruption(tiny, monkeypatch, tmp_path):
    values, stop = iter([0.3, 0.2, 0.25, 0.9]), StopAfter(2)
    monkeypatch.setattr("hushrec.federation.rounds.selection_value", lambda *looked: next(values))
    more = {"evaluation.patience": 2}
    with pytest.raises(StoppedError):
        go(tiny, tmp_path / "r", more=more, rounds=50, callbacks=[stop])
    run = train(tiny, out=tmp_path / "r", resume=True)
    assert (run.summary.rounds, run.summary.selected_round) == (3, 1)


def test_looks_every_few_rounds_and_at_the_last(tiny, tmp_path):
    go(tiny, tmp_path / "r", more={"evaluation.every": 2})
    lines = RunFolder(tmp_path / "r").read_metrics()
    assert [line.valid is not None for line in lines] == [False, True, False, True, True]


@pytest.mark.parametrize("method", SETTINGS)
def test_stored_metrics_can_be_recomputed(method, tiny, tmp_path):
    made = go(tiny, tmp_path / "run", method)
    run = Run.open(tmp_path / "run", tiny)
    assert run.summary == made.summary
    evaluator = run.evaluator(2)
    for part in ("valid", "test"):
        ranks = evaluator.rank(run.model, part)
        assert evaluator.summarise(ranks) == getattr(run.summary, part)
        ours, stored = ranks_to_arrays({part: ranks}), ranks_to_arrays({part: run.ranks[part]})
        assert ours.keys() == stored.keys()
        for name in ours:
            np.testing.assert_array_equal(ours[name], stored[name])
    assert [r.item for r in made.recommend("u003")] == [r.item for r in run.recommend("u003")]


def test_a_split_without_validation_items_is_told(tiny):
    """Users of 8 to 10 rows have no tenth of them to validate on."""
    more = {"split.kind": "ratio", "split.valid": 0.05}
    with pytest.raises(DataError, match="validate on"):
        go(tiny, None, more=more)


@pytest.mark.parametrize("kind", ["ratio", "time", "unseen-users", "leave-one-out"])
@pytest.mark.parametrize("method", ["fedmf", "pfedrec", "local-only", "popularity"])
def test_every_split_with_kept_repeats_runs(kind, method, tiny):
    """Rows repeat a pair: a held-out item can then be listed twice, and be a training item too."""
    rng = np.random.default_rng(0)
    again = np.concatenate([np.arange(len(tiny)), rng.integers(0, len(tiny), len(tiny) // 2)])
    data = tiny.select(again)
    more = {"split.kind": kind, "split.repeats": "keep", **EVERYBODY}
    with pytest.raises(ConfigError, match="published"):
        go(data, None, method, more, rounds=2)
    run = go(data, None, method, more, rounds=2, protocol="published")
    assert 0 <= run.metrics["full"]["hr@10"] <= 1


def test_unseen_users_are_folded_in_before_they_are_ranked(small):
    more = {"split.kind": "unseen-users", "evaluation.every": 100}
    run = train(small, "fedmf", rounds=100, settings=more)
    assert not run.model.private.visited[run.ranks["test"]["full"].users].any()
    # The vector every device starts from knows no block; a folded-in one does.
    assert run.metrics["full"]["auc"] > 0.8


def test_divergence_is_told(tiny):
    with pytest.raises(DivergedError, match="smaller"):
        go(tiny, None, "fedmf", {"lr": 1e10, "item_rate": 1e10}, rounds=20)


def test_a_round_of_nobody_changes_nothing(tiny, tmp_path):
    run = go(tiny, tmp_path / "r", more={"cohort.probability": 1e-12}, rounds=2)
    lines = RunFolder(tmp_path / "r").read_metrics()
    assert [line.clients for line in lines] == [0, 0]
    assert [line.loss for line in lines] == [None, None]
    sent = run.summary.communication
    assert sent.up_bytes == sent.down_bytes == sent.client_up_bytes == sent.client_down_bytes == 0


def test_bytes_are_counted(tiny, tmp_path):
    run = go(tiny, tmp_path / "r", "popularity", rounds=1)
    n_rows = run.summary.users.train_rows
    assert run.summary.communication.up_bytes == n_rows * 8
    assert run.summary.communication.down_bytes == 30 * 40 * 4
    pooled = go(tiny, None, "central-mf", rounds=1)
    sent = pooled.summary.communication
    assert sent.up_bytes == sent.down_bytes == sent.client_up_bytes == sent.client_down_bytes == 0
    fedmf = go(tiny, None, "fedmf", rounds=2)
    assert fedmf.summary.communication.down_bytes == 2 * 17 * 40 * 5 * 4
    pfedrec = go(tiny, None, "pfedrec", EVERYBODY, rounds=2)
    assert pfedrec.summary.communication.down_bytes == 2 * 30 * 40 * 5 * 4
    twice = go(tiny, None, "popularity", {"evaluation.every": 1}, rounds=2)
    assert twice.summary.communication.up_bytes == 2 * n_rows * 8


def test_pooled_methods_need_everybody(tiny):
    with pytest.raises(ConfigError, match="must be 'all'"):
        go(tiny, None, "central-mf", {"cohort.kind": "fixed", "cohort.size": 3})


# ------------------------------------------------------------------ recommending


def test_recommend_known_and_new_users(tiny):
    run = train(tiny, "fedmf", rounds=150, settings={"evaluation.every": 150})
    touched = {str(tiny.items[i]) for i in tiny.item[tiny.user == 3]}
    listed = [r.item for r in run.recommend("u003", k=7)]
    assert len(listed) == len(set(listed)) == 7
    assert not touched & set(listed)
    assert run.recommend("u003", k=7) == run.recommend("u003", k=7)
    scores = [r.score for r in run.recommend("u003", k=7)]
    assert scores == sorted(scores, reverse=True)

    before = {k: v.tobytes() for k, v in run.model.shared.items()}, run.model.private.visited.copy()
    history = [f"i{k:03d}" for k in range(8)] + ["no such item"]
    new = [r.item for r in run.recommend("somebody", k=5, history=history)]
    assert not set(history) & set(new)
    # Someone who liked the first block gets the first block.
    assert sum(int(item[1:]) < 20 for item in new) >= 4
    assert {k: v.tobytes() for k, v in run.model.shared.items()} == before[0]
    np.testing.assert_array_equal(run.model.private.visited, before[1])
    with pytest.raises(ConfigError, match="give their items, oldest first, as history="):
        run.recommend("somebody")
    assert len(run.recommend("u003", k=1000)) == 40 - len(touched)


def test_a_run_without_a_folder_leaves_nothing_behind(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    run = go(tiny, None, "fedmf", {"store.kind": "file"})
    assert run.recommend("u001")  # its files are still readable
    shutil.rmtree(tmp_path / "tmp")
    assert run.recommend("u001")
    assert list(tmp_path.iterdir()) == []
    assert hushrec.Run is Run


def test_resume_refuses_other_settings(tiny, tmp_path):
    go(tiny, tmp_path / "run", rounds=1)
    for other in (
        {"seed": 9},
        {"preset": "paper"},
        {"protocol": "published"},
        {"settings": {"d": 9}},
    ):
        (key,) = other
        with pytest.raises(ConfigError, match=f"leave out '{key}'"):
            train(tiny, out=tmp_path / "run", resume=True, **other)


@pytest.mark.parametrize("machine", [{"threads": 0}, {"threads": -1}, {"chunk": 0}])
def test_a_machine_has_at_least_one_of_each(machine):
    with pytest.raises(ConfigError, match="at least 1"):
        Machine(**machine)
