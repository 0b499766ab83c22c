"""`hushrec train` said again: from a file, for more rounds, aloud, in a file, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hushrec.cli import display, main
from hushrec.runs.folder import RunFolder

NOISED = [
    *("--method", "fedmf", "--privacy", "local-laplace", "--scale", "1"),
    *("--set", "privacy.undeclared=true"),
]
QUICK = ["--method", "fedmf", "--set", "d=4", "--set", "item_rate=1"]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "ratings.csv"
    rows = [f"{u},{(u * 7 + n * n) % 23},{n}" for u in range(20) for n in range(9)]
    path.write_text("\n".join(["user,item,timestamp", *dict.fromkeys(rows)]))
    return path


def train(*words: object) -> Result:
    return CliRunner().invoke(main, ["train", *map(str, words)])


def flat(result: Result) -> str:
    return " ".join(result.stdout.split())


def settings(folder: Path) -> object:
    return RunFolder.open(folder).experiment()


def test_a_runs_config_runs_again(table: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    more = ["--seed", 3, "--rounds", 2, "--set", "cohort.kind=fixed", "--set", "cohort.size=7"]
    assert train("--data", table, *QUICK, *more, "--out", first).exit_code == 0
    again = train("--config", first / "config.toml", "--out", tmp_path / "again", "--json")
    assert again.exit_code == 0, again.stderr
    assert settings(tmp_path / "again") == settings(first)
    both = [json.loads((tmp_path / n / "summary.json").read_text()) for n in ("first", "again")]
    assert both[0]["test"] == both[1]["test"]


def test_low_ratings_that_count_as_liked_are_said_before_training(tmp_path: Path) -> None:
    rated = tmp_path / "rated.csv"
    rows = [f"{u},{n},{0.5 + n % 10 / 2},{n}" for u in range(20) for n in range(20)]
    rated.write_text("\n".join(["user,item,rating,timestamp", *rows]))
    words = "all 400 rows count as liked, values from 0.5 to 5 among them: split.drop_below = 4"
    common = ["--data", rated, *QUICK, "--rounds", 1]
    said = train(*common, "--out", tmp_path / "all")
    assert words in said.stderr.partition("round 1")[0]
    assert words in flat(said) and words in (tmp_path / "all" / "report.html").read_text()
    liked = train(*common, "--set", "split.drop_below=4", "--out", tmp_path / "liked")
    assert (liked.exit_code, "count as liked" in liked.output) == (0, False)


def test_the_command_line_goes_before_the_file(table: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'data = "{table}"\nmethod = "fedmf"\nrounds = 1\n[options]\nd = 4\n')
    out = tmp_path / "run"
    result = train("--config", file, "--seed", 4, "--set", "d=3", "--out", out)
    assert result.exit_code == 0, result.stderr
    found = RunFolder.open(out).experiment()
    assert (found.seed, found.rounds, found.options["d"]) == (4, 1, 3)


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("metod = 'fedmf'", [], "unknown key 'metod'; did you mean 'method'?"),
        ("rounds = 'many'", [], "mine.toml 'rounds' = 'many'"),
        ("method = 'fedmf'\n[options]\nd = 4", ["--method", "pfedrec"], "leave out --method"),
        ("options = 3", [], "'options' must be a section, [options]"),
        ("data = [", [], "not valid TOML"),
    ],
)
def test_a_bad_file_is_refused(text: str, words: list[str], said: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    result = train("--config", file, *words, "--out", tmp_path / "run")
    assert (result.exit_code, said in result.stderr) == (2, True), result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["train", "tune"])
def test_a_typo_is_said_before_data_is_read(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display, "load", lambda *_, **__: pytest.fail("data was read"))
    for pair, said in (("rigde=3", "did you mean 'ridge'"), ("split.knd=x", "mean 'kind'")):
        words = [command, "--method", "fednext", "--set", pair, "--out", str(tmp_path / "run")]
        result = CliRunner().invoke(main, words)
        assert (result.exit_code, said in result.stderr) == (2, True), result.stderr


# ------------------------------------------------------------------------------- more rounds


def test_a_run_that_was_still_improving_goes_on(table: Path, tmp_path: Path) -> None:
    short, whole = tmp_path / "short", tmp_path / "whole"
    given = ["--data", table, *QUICK]
    first = train(*given, "--rounds", 2, "--out", short)
    assert "still improving at the last round: go on with --resume --rounds 4" in flat(first)
    report = (short / "report.html").read_text()
    assert "still improving at the last round" in report
    longer = train("--resume", "--rounds", 5, "--out", short, "--json")
    assert longer.exit_code == 0, longer.stderr
    assert train(*given, "--rounds", 5, "--out", whole).exit_code == 0
    assert settings(short) == settings(whole)
    for name in ("users.npz", "checkpoint/final/selected-shared.safetensors"):
        assert (short / name).read_bytes() == (whole / name).read_bytes(), name
    lines = RunFolder.open(short).read_metrics()
    assert [line.round for line in lines] == [1, 2, 3, 4, 5]
    assert (short / "report.html").read_text() != report


@pytest.mark.parametrize(
    ("given", "rounds", "said"),
    [
        (["--method", "fedmf", "--set", "d=4"], 1, "has 2 rounds already: ask for more"),
        (["--method", "fednext"], 9, "the rounds of fednext are planned"),
        (["--method", "fedmf", "--seeds", "2"], 9, "several seeds cannot be prolonged"),
        (NOISED, 9, "the noise of "),
    ],
)
def test_what_cannot_go_on_says_why(
    given: list[str], rounds: int, said: str, table: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    made = train("--data", table, *given, "--rounds", 2, "--out", out)
    assert made.exit_code == 0, made.stderr
    kept = (out / "config.toml").read_bytes()
    result = train("--resume", "--rounds", rounds, "--out", out)
    assert (result.exit_code, said in result.stderr) == (2, True), result.stderr
    assert (out / "config.toml").read_bytes() == kept and (out / "summary.json").exists()


# ----------------------------------------------------------------------------- what is said


def test_without_a_terminal_lines_say_how_far_it_is(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--data", table, *QUICK, "--rounds", 4]
    said = train(*given, "--out", tmp_path / "a").stderr.splitlines()
    told = [line for line in said if line.startswith("training: round ")]
    assert [line.split(":")[1] for line in told] == [" round 1 of 4", " round 4 of 4"]
    assert "loss 0." in told[0] and "valid ndcg@10 0." in told[0] and "left" in told[0]
    loud = train(*given, "-v", "--out", tmp_path / "b").stderr
    assert loud.count("training: round ") == 4
    assert "training: round" not in train(*given, "--json", "--out", tmp_path / "c").stderr


def test_quiet_says_the_result_and_a_log_keeps_the_rest(table: Path, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    given = ["--data", table, *QUICK, "--rounds", 2, "--quiet", "--log", log]
    result = train(*given, "--out", tmp_path / "a")
    assert result.exit_code == 0 and result.stderr == ""
    assert "fedmf on" in result.stdout
    assert log.read_text().startswith("training: round 1 of 2: ")
    assert train(*given, "--out", tmp_path / "b").exit_code == 0
    assert log.read_text().count("round 2 of 2") == 2  # lines are added


def test_rounds_that_only_try_settings_say_so(table: Path, tmp_path: Path) -> None:
    result = train("--data", table, "--method", "fednext", "-v", "--out", tmp_path / "run")
    told = [line for line in result.stderr.splitlines() if line.startswith("training: round")]
    assert ", count, " in told[0]
    assert told[1:] and all(", select scalars, " in line for line in told[1:])
    assert "still improving" not in result.stdout
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Rounds: 1 count; 2 to 6 select scalars." in page


def test_only_clients_that_train_are_said_to_upload(table: Path, tmp_path: Path) -> None:
    given = ["--data", table, *QUICK, "--rounds", 1, "--set", "split.kind=unseen-users"]
    result = train(*given, "--out", tmp_path / "run")
    users = json.loads((tmp_path / "run" / "summary.json").read_text())["users"]
    assert users["training_clients"] < users["users"] == 20
    assert f"by {users['training_clients']} clients that train" in flat(result)
