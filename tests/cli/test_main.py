"""The command line as a user meets it: results on stdout, one clear line on errors, exit code 2."""

from __future__ import annotations

import fcntl
import gzip
import json
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from hushrec.api import Run, train
from hushrec.cli import main
from hushrec.data import load
from hushrec.serving.recommender import Recommender
from hushrec.studio.pages import Studio

QUICK = ["--set", "d=4", "--rounds", "2"]


def hushrec(*arguments: str) -> Result:
    words = [str(a) for a in arguments]
    if words[0] == "train" and not {"--method", "--resume"} & set(words):
        words += ["--method", "fedmf"]  # what most tests train, though it is not the default
    return CliRunner().invoke(main, words)


def test_the_default_method_is_the_one_that_wins(table: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["train", "--data", str(table), "--out", str(tmp_path / "r")])
    assert result.exit_code == 0, result.stderr
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["method"] == "fedmix"


def ratings(rows: int = 600, users: int = 25, items: int = 40) -> list[str]:
    generator = np.random.default_rng(7)
    pairs = generator.permutation(users * items)[:rows]
    return [f"u{p % users},i{p // users},{1 + p % 5},{1000 + n}" for n, p in enumerate(pairs)]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "ratings.csv"
    path.write_text("\n".join(["user,item,rating,timestamp", *ratings()]) + "\n")
    return path


@pytest.fixture(scope="module")
def demo_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for method in ("popularity", "fedmf"):
        out = str(folder / method)
        result = hushrec("train", "--method", method, "--rounds", "3", "--out", out)
        assert result.exit_code == 0, result.stderr
    return folder


# ---------------------------------------------------------------- what works


def test_train_leaves_a_whole_run_folder_and_a_table(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = hushrec("train", "--data", table, "--method", "fedmf", *QUICK, "--out", out)
    assert result.exit_code == 0, result.stderr
    names = {"config.toml", "metrics.jsonl", "summary.json", "users.npz", "report.html"}
    assert names <= {p.name for p in out.iterdir()}
    assert (out / "checkpoint" / "final" / "selected-shared.safetensors").exists()
    assert "popularity" in result.stdout
    assert "chance" in result.stdout


def test_the_report_is_made_from_the_run_in_memory(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Run, "open", lambda *_: pytest.fail("the model was read a second time"))
        assert hushrec("train", "--data", table, *QUICK, "--out", out).exit_code == 0
    page = (out / "report.html").read_bytes()
    assert hushrec("report", out).stdout == f"{out / 'report.html'}\n"
    assert (out / "report.html").read_bytes() == page


def test_json_is_the_summary_and_nothing_else(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    method = ["--method", "pfedrec"]
    result = hushrec("train", "--data", table, *method, *QUICK, "--out", out, "--json")
    summary = json.loads(result.stdout)
    assert summary == json.loads((out / "summary.json").read_text())
    contract = {
        "method", "data", "protocol", "rounds", "selected_round", "seed", "test", "valid",
        "communication", "time", "peak_rss_bytes", "privacy",
    }  # fmt: skip
    assert contract <= set(summary)
    for part in ("test", "valid"):
        assert set(summary[part]) == {"full", "sampled99"}
        for kind in ("hr", "ndcg", "recall", "precision", "mrr"):
            assert 0 <= summary[part]["full"][f"{kind}@10"] <= 1
        assert 0 <= summary[part]["full"]["auc"] <= 1
    sent = summary["communication"]
    assert sent["client_up_bytes"] == sent["up_bytes"] / 25
    assert sent["client_down_bytes"] == sent["down_bytes"] / 25
    # The table and the vector; besides, the client's own rows.
    assert sent["serving_bytes"] > 40 * 4 * 4 + 4 * 4
    assert set(summary["time"]) == {"total_s", "per_round_s"}
    # d = 4 floats and an id for every uploaded row; the table for each of 25 clients and 2 rounds.
    assert summary["communication"]["down_bytes"] == 2 * 25 * 40 * 4 * 4
    assert summary["communication"]["up_bytes"] % (4 * 4 + 4) == 0


def test_several_seeds_give_a_mean_and_a_spread(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = hushrec(
        "train", "--data", table, *QUICK, "--seed", "3", "--seeds", "3", "--out", out, "--json"
    )
    summary = json.loads(result.stdout)
    assert summary["seed"] == [3, 4, 5]
    each = [
        json.loads((out / f"seed-{s}" / "summary.json").read_text())["test"]["full"]["auc"]
        for s in (3, 4, 5)
    ]
    assert summary["test"]["full"]["auc"] == pytest.approx(np.mean(each))
    assert summary["test_sd"]["full"]["auc"] == pytest.approx(np.std(each, ddof=1))
    compared = hushrec("compare", out, out / "seed-3", "--json")
    assert json.loads(compared.stdout)[0]["seeds"] == 3


def test_published_is_marked_everywhere(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = hushrec("train", "--data", table, *QUICK, "--protocol", "published", "--out", out)
    mark = "leaks the held-out item"
    assert mark in result.stdout
    assert mark in json.loads((out / "summary.json").read_text())["protocol_mark"]
    assert mark in (out / "report.html").read_text()
    assert mark in hushrec("evaluate", out).stdout
    assert "leaks" in hushrec("compare", out, out).stdout


def test_figures_that_are_not_what_they_seem_are_marked_everywhere(tmp_path: Path) -> None:
    """Few users and no times: in the table, JSON, report, Python and the studio."""
    table, out = tmp_path / "ratings.csv", tmp_path / "runs" / "run"
    rows = [row.rsplit(",", 1)[0] for row in ratings()]
    table.write_text("\n".join(["user,item,rating", *rows]) + "\n")
    result = hushrec("train", "--data", table, *QUICK, "--out", out)
    marks = ["25 of 25 users are evaluated", "the file has no times: the holdout is drawn"]
    assert json.loads((out / "summary.json").read_text())["marks"] == marks
    assert json.loads(hushrec("evaluate", out, "--json").stdout)["marks"] == marks
    report, pages = (out / "report.html").read_text(), Studio(tmp_path / "runs")
    for text in (result.stdout, hushrec("evaluate", out).stdout, pages.page("run", {"run": "run"})):
        assert all(mark in text for mark in marks)
    for text in (report, repr(Run.open(out)), pages.page("runs", {})):
        assert all(mark.partition(":")[0] in text for mark in marks)
    assert "The file has no times: the holdout is drawn." in report
    compared = hushrec("compare", out, out).stdout
    assert all(mark in " ".join(compared.split()) for mark in marks)
    # The whole path is for finding the file, not for reading.
    assert "fedmf on ratings, test items" in result.stdout
    assert repr(load(table)).startswith("<Interactions ratings: ")
    assert "fedmf on ratings<" in pages.page("runs", {}).replace(" <", "<")


def test_evaluate_gives_back_the_stored_figures(demo_runs: Path) -> None:
    run = demo_runs / "fedmf"
    stored = json.loads((run / "summary.json").read_text())
    again = json.loads(hushrec("evaluate", run, "--json").stdout)
    assert again["test"] == stored["test"]
    other = hushrec("evaluate", run, "--metric", "hr@50", "--part", "valid", "--json")
    assert set(json.loads(other.stdout)["valid"]["full"]) == {"hr@50"}


def test_recommend_known_and_folded_in_users(demo_runs: Path, tmp_path: Path) -> None:
    run = demo_runs / "fedmf"
    known = json.loads(hushrec("recommend", run, "--user", "viewer-0007", "--json").stdout)
    assert len(known["recommendations"]) == 10
    assert all(line["title"] for line in known["recommendations"])
    history = tmp_path / "history.txt"
    history.write_text("film-0001\nfilm-0002\nfilm-0003\nnot-in-the-catalogue\n")
    arguments = ("recommend", run, "--user", "anna", "--history", history, "-k", "5", "--json")
    folded = json.loads(hushrec(*arguments).stdout)["recommendations"]
    assert len(folded) == 5
    assert not {"film-0001", "film-0002", "film-0003"} & {line["item"] for line in folded}
    unknown = hushrec("recommend", run, "--user", "anna")
    assert unknown.exit_code == 2
    assert "--history" in unknown.stderr


def test_compare_prints_what_the_models_cost(demo_runs: Path) -> None:
    result = hushrec("compare", demo_runs / "popularity", demo_runs / "fedmf", "--json")
    rows = {row["method"]: row for row in json.loads(result.stdout)}
    for method, row in rows.items():
        lines = (demo_runs / method / "metrics.jsonl").read_text().splitlines()
        line = json.loads(lines[int(row["selected_round"]) - 1])
        assert (row["up_bytes"], row["down_bytes"]) == (line["up_bytes"], line["down_bytes"])
    assert rows["popularity"]["selected_round"] == 1
    shown = hushrec("compare", demo_runs / "popularity", demo_runs / "fedmf").stdout
    assert "uploaded" in shown


def test_export_writes_a_bundle_that_recommends(table: Path, tmp_path: Path) -> None:
    run, bundle = tmp_path / "run", tmp_path / "bundle"
    assert hushrec("train", "--data", table, "--method", "fednext", "--out", run).exit_code == 0
    result = hushrec("export", run, bundle, "--json")
    assert result.exit_code == 0, result.stderr
    assert set(json.loads(result.stdout)["bytes"]) == {"manifest.json", "model.safetensors"}
    assert len(Recommender.load(bundle, ["i1", "i2"]).recommend(5)) == 5
    again = hushrec("export", run, bundle)
    assert again.exit_code == 2
    assert "replace it with --overwrite" in again.stderr
    half = hushrec("export", run, bundle, "--precision", "single", "--overwrite")
    assert half.exit_code == 0, half.stderr
    assert len(Recommender.load(bundle, ["i1", "i2"]).recommend(5)) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "ratings.csv", "run"]
    (bundle / "thesis.txt").write_text("mine")
    kept = hushrec("export", run, bundle, "--overwrite")
    assert kept.exit_code == 2 and "not empty" in kept.stderr


def test_compare_prints_intervals_and_p(demo_runs: Path) -> None:
    both = (demo_runs / "popularity", demo_runs / "fedmf")
    rows = json.loads(hushrec("compare", *both, "--json").stdout)
    assert [row["method"] for row in rows] == ["popularity", "fedmf"] * 2
    assert all(row["low"] <= row["mean"] <= row["high"] for row in rows)
    assert 0 < rows[1]["p_value"] <= 1
    shown = hushrec("compare", *both).stdout
    assert "difference" in shown
    # Named by what tells them apart: the folder that both lie in would take the room.
    assert re.search(r"^popularity +0\.", shown, re.MULTILINE)
    assert re.search(r"^fedmf +0\.", shown, re.MULTILINE)
    alone = hushrec("compare", demo_runs / "fedmf")
    assert alone.exit_code == 2


def test_doctor_and_methods(tmp_path: Path) -> None:
    found = json.loads(hushrec("doctor", "--json").stdout)
    assert {"versions", "threads", "extras", "data"} <= set(found)
    listed = {entry["name"] for entry in json.loads(hushrec("methods", "--json").stdout)}
    names = {"fedmf", "pfedrec", "popularity", "negative-counter", "local-only", "central-mf"}
    assert names <= listed


@pytest.mark.parametrize(
    "arguments",
    [[], ["train"], ["evaluate"], ["recommend"], ["compare"], ["report"], ["methods"], ["doctor"]],
    ids=lambda a: " ".join(a) or "hushrec",
)
def test_help_shows_an_example(arguments: list[str]) -> None:
    result = hushrec(*arguments, "--help")
    assert result.exit_code == 0
    assert "\n  hushrec " in result.stdout


# ---------------------------------------------------------------- what is harmless


def test_harmless_things_are_handled_and_said(tmp_path: Path) -> None:
    rows = ratings()
    lines = ["user,item,rating,timestamp", *rows, rows[0], rows[1]]  # two repeated pairs
    lines += ['"Übel, Zoë",i1,4,5000', '"Übel, Zoë",a b  c,4,5001']  # a user too short to test
    path = tmp_path / "odd.csv.gz"
    path.write_bytes(gzip.compress(("\ufeff" + "\r\n".join(lines) + "\r\n").encode()))
    out = tmp_path / "run"
    result = hushrec("train", "--data", path, *QUICK, "--out", out)
    assert result.exit_code == 0, result.stderr
    assert "2 repeated (user, item) rows merged" in result.stdout
    assert "1 of 26 users are not evaluated" in result.stdout
    summary = json.loads((out / "summary.json").read_text())
    assert summary["users"]["not_evaluated_users"] == 1
    listed = hushrec("recommend", out, "--user", "Übel, Zoë", "-k", "3")
    assert listed.exit_code == 0, listed.stderr


# ---------------------------------------------------------------- what is refused


HEADER = "user,item,rating,timestamp\n"
BODY = "\n".join(ratings())

BAD_FILES = {
    "empty": ("", "empty"),
    "header only": (HEADER, "header"),
    "wrong delimiter": ((HEADER + BODY).replace(",", "|").replace("|", " | x"), ""),
    "missing column": ((HEADER + BODY).replace("item", "thing", 1), "thing"),
    "time is no number": (HEADER + BODY + "\nu1,i1,3,yesterday\n", "line 602"),
    "value is NaN": (HEADER + BODY + "\nu1,i1,nan,5\n", "line 602"),
    "one user": (HEADER + "\n".join(f"u1,i{k},1,{k}" for k in range(9)), "one user"),
    "one item": (HEADER + "\n".join(f"u{k},i1,1,{k}" for k in range(9)), "one item"),
    "enormous line": (HEADER + "u1," + "x" * 3_000_000 + ",1,1\n", "line 2"),
    "short row": (HEADER + BODY + "\nu1,i1\n", "line 602"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_refused(name: str, tmp_path: Path) -> None:
    content, part = BAD_FILES[name]
    path = tmp_path / "bad.csv"
    path.write_text(content)
    result = hushrec("train", "--data", path, "--out", tmp_path / "run")
    _is_clear_error(result, "bad.csv", part)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--data", "no-such-file.csv"], "no-such-file.csv"),
        (["--data", "ml-10k"], "ml-100k"),
        (["--method", "fedfm"], "did you mean 'fedmf'"),
        (["--preset", "papper", "--method", "pfedrec"], "did you mean 'paper'"),
        (["--preset", "paper", "--method", "popularity"], "no presets"),
        (["--set", "lrr=0.1"], "did you mean 'lr'"),
        (["--set", "cohort.sizes=3"], "did you mean 'size'"),
        (["--set", "chohort.size=3"], "did you mean 'cohort'"),
        (["--set", "lr"], "key=value"),
        (["--set", "lr=fast"], "lr"),
        (["--set", "d=-4"], "'d' = -4"),
        (["--set", "batch=0"], "batch"),
        (["--set", "d=100000000"], "smaller d"),
        (["--set", "d=100000000", "--method", "central-mf"], "smaller d"),
        (["--rounds", "0"], "rounds"),
        (["--rounds", "-3"], "rounds"),
        (["--seed", "-1"], "seed"),
        (["--threads", "0"], "threads"),
        (["--set", "cohort.kind=fixed"], "cohort.size"),
        (["--set", "cohort.size=9"], "use cohort.kind = fixed"),
        (["--set", "cohort.probability=0.1"], "use cohort.kind = poisson"),
        (["--set", "cohort.kind=fixed", "--set", "cohort.size=5000"], "1000 clients"),
        (["--method", "central-mf", "--set", "cohort.kind=poisson"], "cohort.kind"),
        (["--set", "evaluation.select=hr@0"], "hr@0"),
        (["--set", "evaluation.select=ndgc@10"], "ndcg"),
        (["--set", "split.repeats=keep"], "published"),
        (["--set", "evaluation.k=[]"], "evaluation.k"),
        (["--set", "negatives=100000000"], "negatives"),
        (["--set", "d=3\nlr=4"], "one value"),
        (["--method", "FEDMF"], "did you mean 'fedmf'"),
        (["--resume"], "--out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_settings_are_refused(
    arguments: list[str], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = hushrec("train", *arguments)
    _is_clear_error(result, part)


def test_an_existing_folder_is_never_lost(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    common = ["train", "--data", table, *QUICK, "--out", out]
    assert hushrec(*common).exit_code == 0
    before = (out / "summary.json").read_bytes()
    _is_clear_error(hushrec(*common), "--resume", "--overwrite")
    assert (out / "summary.json").read_bytes() == before
    _is_clear_error(hushrec("train", "--resume", "--out", out), "finished")
    _is_clear_error(hushrec("train", "--resume", "--out", out, "--rounds", "1"), "ask for more")
    assert hushrec(*common, "--overwrite").exit_code == 0
    precious = tmp_path / "thesis"
    precious.mkdir()
    (precious / "chapter-1.txt").write_text("years of work")
    _is_clear_error(
        hushrec("train", "--data", table, *QUICK, "--out", precious, "--overwrite"), "not a run"
    )
    assert (precious / "chapter-1.txt").exists()


@pytest.mark.parametrize("command", ["evaluate", "report", "recommend"])
def test_what_is_no_run_is_refused(command: str, tmp_path: Path) -> None:
    more = ["--user", "1"] if command == "recommend" else []
    _is_clear_error(hushrec(command, tmp_path / "nowhere", *more), "nowhere")
    _is_clear_error(hushrec(command, tmp_path, *more), "not a run folder")


def test_a_damaged_checkpoint_is_named(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert hushrec("train", "--data", table, *QUICK, "--out", out).exit_code == 0
    file = out / "checkpoint" / "final" / "selected-shared.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    result = hushrec("evaluate", out)
    _is_clear_error(result, "selected-shared.safetensors", "damaged")


def test_divergence_is_an_error_with_advice_and_a_code_of_its_own(
    table: Path, tmp_path: Path
) -> None:
    result = hushrec("train", "--data", table, "--set", "item_rate=1e12", "--out", tmp_path / "run")
    _is_clear_error(result, "learning rate", exit_code=3)


# ---------------------------------------------------------------- real processes


def _spawn(*arguments: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hushrec", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def test_ctrl_c_saves_and_resume_finishes_alike(table: Path, tmp_path: Path) -> None:
    common = ["--data", str(table), "--method", "pfedrec", "--set", "evaluation.patience=0"]
    out = tmp_path / "run"
    running = _spawn("train", *common, "--rounds", "100000", "--out", str(out))
    deadline = time.monotonic() + 120
    while not (out / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=120)
    assert running.returncode == 130
    assert f"--resume --out {out}" in stderr
    assert "Traceback" not in stderr
    (checkpoint,) = [p for p in (out / "checkpoint").iterdir() if not p.name.startswith(".")]
    reached = int(checkpoint.name.removeprefix("round-"))
    # Let both runs end at the same round, a few rounds later.
    config = out / "config.toml"
    config.write_text(config.read_text().replace("rounds = 100000", f"rounds = {reached + 3}"))
    assert hushrec("train", "--resume", "--out", out).exit_code == 0
    whole = tmp_path / "whole"
    assert hushrec("train", *common, "--rounds", str(reached + 3), "--out", whole).exit_code == 0
    resumed, direct = (np.load(folder / "users.npz") for folder in (out, whole))
    assert all(np.array_equal(resumed[name], direct[name]) for name in direct.files)


def test_a_full_disk_loses_nothing(table: Path, tmp_path: Path) -> None:
    """A limit on file sizes makes the operating system refuse the write for real."""
    out = tmp_path / "run"
    common = ["train", "--data", table, "--method", "pfedrec", "--rounds", "3", "--out"]
    assert hushrec(*common, tmp_path / "first").exit_code == 0  # leaves compiled kernels behind

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    running = _spawn(*common, out, preexec_fn=limit)
    _, stderr = running.communicate(timeout=180)
    assert running.returncode == 2, stderr
    assert "disk is full" in stderr
    assert "Traceback" not in stderr
    assert hushrec("train", "--resume", "--out", out).exit_code == 0


def _is_clear_error(result: Result, *parts: str, exit_code: int = 2) -> None:
    assert result.exit_code == exit_code, (result.exit_code, result.stdout, result.stderr)
    assert "Traceback" not in result.stderr
    assert result.exception is None or isinstance(result.exception, SystemExit)
    for part in parts:
        assert part in result.stderr, result.stderr


def test_one_process_at_a_time_trains_in_a_folder(table: Path, tmp_path: Path) -> None:
    common = ["train", "--data", table, *QUICK, "--out", tmp_path / "run"]
    assert hushrec(*common).exit_code == 0
    with (tmp_path / "run" / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        _is_clear_error(hushrec(*common, "--overwrite"), "another process")
    assert hushrec(*common, "--overwrite").exit_code == 0


@pytest.mark.parametrize(
    ("bad", "exit_code"), [("d=99999999", 2), ("lr=1e35", 2), ("item_rate=1e12", 3)]
)
def test_overwrite_keeps_the_old_run_until_the_new_one_is_done(
    bad: str, exit_code: int, table: Path, tmp_path: Path
) -> None:
    common = ["train", "--data", table, "--out", tmp_path / "run"]
    assert hushrec(*common, *QUICK).exit_code == 0
    before = sorted((p.name, p.read_bytes()) for p in (tmp_path / "run").glob("*.*"))
    assert hushrec(*common, "--set", bad, "--overwrite").exit_code == exit_code
    assert sorted((p.name, p.read_bytes()) for p in (tmp_path / "run").glob("*.*")) == before
    assert hushrec("evaluate", tmp_path / "run").exit_code == 0
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_runs_with_other_held_out_items_are_not_compared(table: Path, tmp_path: Path) -> None:
    common = ["train", "--data", table, *QUICK]
    ratio = ["--set", "split.kind=ratio", "--set", "split.order=random"]
    assert hushrec(*common, "--out", tmp_path / "loo").exit_code == 0
    assert hushrec(*common, *ratio, "--out", tmp_path / "ratio").exit_code == 0
    assert hushrec(*common, *ratio, "--seeds", "2", "--out", tmp_path / "two").exit_code == 0
    _is_clear_error(hushrec("compare", tmp_path / "loo", tmp_path / "ratio"), "different held-out")
    _is_clear_error(hushrec("compare", tmp_path / "two", tmp_path / "ratio"), "different items")


@pytest.mark.parametrize("k", ["[5]", "[100000]", "[3, 7]"])
def test_any_length_of_list_can_be_shown(k: str, table: Path, tmp_path: Path) -> None:
    arguments = ["--set", f"evaluation.k={k}", "--out", tmp_path / "run"]
    result = hushrec("train", "--data", table, *QUICK, *arguments)
    assert result.exit_code == 0, result.stderr
    assert f"HR@{json.loads(k)[0]}" in result.stdout


@pytest.mark.parametrize(
    ("file", "content", "part"),
    [
        ("summary.json", "{}", "lacks"),
        ("summary.json", "[1]", "not an object"),
        ("summary.json", "null", "not an object"),
        ("config.toml", None, "config.toml was changed"),
    ],
)
def test_damaged_run_folders_are_told(
    file: str, content: str | None, part: str, table: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert hushrec("train", "--data", table, *QUICK, "--out", run).exit_code == 0
    text = (run / file).read_text()
    (run / file).write_text(text.replace("d = 4", "d = 8") if content is None else content)
    for command in (["evaluate"], ["report"], ["recommend", "--user", "u1"]):
        _is_clear_error(hushrec(command[0], run, *command[1:]), part)


def test_a_line_of_metrics_that_was_cut_short_is_left_out_and_another_refused(
    table: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert hushrec("train", "--data", table, *QUICK, "--out", run).exit_code == 0
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"round": 9, "lo')
    assert hushrec("report", run).exit_code == 0
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n")
    _is_clear_error(hushrec("report", run), "metrics.jsonl, line")


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    rows = [row.replace(",i3,", ",i [bold]3[/bold],") for row in ratings()]
    path = tmp_path / "ratings.csv"
    path.write_text(HEADER + "\n".join(rows))
    assert hushrec("train", "--data", path, *QUICK, "--out", tmp_path / "run").exit_code == 0
    history = tmp_path / "history.txt"
    history.write_text("i1\nnowhere\n")
    arguments = ["--user", "new", "--history", history, "-k", "1000000000"]
    result = hushrec("recommend", tmp_path / "run", *arguments)
    assert "i [bold]3[/bold]" in result.stdout
    assert "1 of 2 items are not in the catalogue" in result.stderr


def test_a_run_finds_its_file_again_from_anywhere(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(table.parent)
    train("ratings.csv", "popularity", out=tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert Run.open(tmp_path / "run").recommend("u1", k=10**9)
