"""Columns are named by the same words wherever data is read, and a run finds its data again."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner, Result

import hushrec
from hushrec.cli import main
from hushrec.errors import ConfigError
from hushrec.federation.experiment import Experiment
from hushrec.runs.folder import RunFolder

NAMED = {"user": "who", "item": "what", "time": "when"}
FLAGS = [word for role, column in NAMED.items() for word in (f"--{role}", column)]
QUICK = ["--method", "fedmf", "--set", "d=4", "--set", "item_rate=1", "--rounds", "2"]


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    """Columns whose names are not the usual ones, beside one that misleads."""
    rows = [(u, (u * 7 + n * n) % 23, n, n % 4) for u in range(20) for n in range(9)]
    return pd.DataFrame(rows, columns=["who", "what", "when", "id"]).drop_duplicates(
        ["who", "what"]
    )


@pytest.fixture(scope="module")
def table(frame: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "log.csv"
    frame.to_csv(path, index=False)
    return path


def says(*words: object) -> Result:
    return CliRunner().invoke(main, list(map(str, words)))


def test_train_names_columns_and_a_run_finds_them_again(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = says("train", "--data", table, *FLAGS, *QUICK, "--out", out, "-q")
    assert done.exit_code == 0, done.stderr
    stored = RunFolder.open(out).experiment()
    assert stored.columns == NAMED
    assert Experiment.from_toml(stored.to_toml()) == stored
    run = hushrec.Run.open(out)
    assert run.data.n_users == 20 and run.data.has_time
    assert says("evaluate", out).exit_code == 0
    assert says("recommend", out, "--user", "3", "-k", "2").exit_code == 0
    again = says("train", "--config", out / "config.toml", "--out", tmp_path / "again", "-q")
    assert again.exit_code == 0, again.stderr
    assert RunFolder.open(tmp_path / "again").experiment() == stored
    final = says("train", "--final", out, "--out", tmp_path / "final", "-q")
    assert final.exit_code == 0, final.stderr


def test_tune_names_columns_too(table: Path, tmp_path: Path) -> None:
    words = ("tune", "--data", table, *FLAGS, *QUICK, "--trials", "1", "--out", tmp_path / "t")
    done = says(*words, "-q")
    assert done.exit_code == 0, done.stderr
    about = json.loads((tmp_path / "t" / "tune.json").read_text())
    assert about["experiment"]["columns"] == NAMED
    assert "--user who --item what --time when" in (tmp_path / "t/tuned-honest.toml").read_text()


def test_python_has_the_same_words(frame: pd.DataFrame, table: Path) -> None:
    run = hushrec.train(table, "popularity", **NAMED)
    assert run.experiment.columns == NAMED
    assert run.metrics == hushrec.train(frame, "popularity", **NAMED).metrics
    assert run.metrics == hushrec.train(hushrec.load(frame, **NAMED), "popularity").metrics


def test_train_takes_what_load_takes(frame: pd.DataFrame, table: Path) -> None:
    expected = hushrec.train(hushrec.load(frame, **NAMED), "popularity").metrics
    columns = {name: frame[name].to_numpy() for name in frame}
    polars = pytest.importorskip("polars").from_pandas(frame)
    arrow = pytest.importorskip("pyarrow").Table.from_pandas(frame)
    for data in (frame, columns, polars, arrow, table, str(table)):
        assert hushrec.train(data, "popularity", **NAMED).metrics == expected


def test_columns_of_known_data_are_refused_in_the_words_of_the_caller() -> None:
    with pytest.raises(ConfigError, match=r"the columns of 'demo' are known: leave out user=$"):
        hushrec.train("demo", user="who")
    told = says("train", "--data", "demo", "--user", "who")
    assert told.exit_code == 2 and "are known: leave out --user" in told.stderr
    with pytest.raises(ConfigError, match="items= is for data that is a file"):
        hushrec.train("demo", items="items.csv")
    told = says("train", "--data", "demo", "--items", "items.csv")
    assert told.exit_code == 2 and "--items is for data that is a file" in told.stderr


def test_a_role_that_does_not_exist_is_refused() -> None:
    text = 'data = "x.csv"\nmethod = "fedmf"\n[columns]\nusr = "who"\n'
    with pytest.raises(ConfigError, match="unknown column 'usr'; did you mean 'user'"):
        Experiment.from_toml(text)
