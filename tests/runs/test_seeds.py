"""Several seeds: one folder each, and their mean."""

import json

import numpy as np
import pytest

from hushrec.api import Run, train
from hushrec.errors import ConfigError, RunError, StoppedError
from test_api import StopAfter, bits

OPTIONS = {"rounds": 4, "protocol": "published", "settings": {"d": 3, "item_rate": 1.0}}


def test_mean_and_spread_over_seeds(tiny, tmp_path):
    runs = train(tiny, "fedmf", seeds=[0, 5, 2], out=tmp_path / "runs", **OPTIONS)
    summary = runs.summary
    parts = [
        json.loads((tmp_path / "runs" / f"seed-{s}" / "summary.json").read_text())
        for s in (0, 5, 2)
    ]
    values = [part["test"]["full"]["auc"] for part in parts]
    assert len(set(values)) == 3
    assert summary.test["full"]["auc"] == pytest.approx(np.mean(values))
    assert summary.test_sd["full"]["auc"] == pytest.approx(np.std(values, ddof=1))
    assert summary.seed == [0, 5, 2]
    assert summary.protocol_mark
    assert json.loads((tmp_path / "runs" / "summary.json").read_text()) == summary.as_dict()
    train(tiny, "fedmf", seed=5, out=tmp_path / "one", **OPTIONS)
    assert bits(tmp_path / "one") == bits(tmp_path / "runs" / "seed-5")
    with pytest.raises(RunError, match="several seeds"):
        Run.open(tmp_path / "runs", tiny)
    with pytest.raises(RunError, match="exists already"):
        train(tiny, "fedmf", seeds=[0], out=tmp_path / "runs", **OPTIONS)


@pytest.mark.parametrize("after", [2, 4, 6])
def test_resuming_needs_the_folder_alone(after, tiny, tmp_path):
    """Seeds that had not begun are trained with the settings of the folder, not the defaults."""
    stop = StopAfter(after)
    more = {"callbacks": [stop]}
    with pytest.raises(StoppedError):
        train(tiny, "fedmf", seeds=[0, 5, 2], out=tmp_path / "runs", **OPTIONS, **more)
    with pytest.raises(RunError, match="holds the seeds '0', '5', '2': resume it with the same"):
        train(tiny, out=tmp_path / "runs", resume=True)
    train(tiny, seeds=[0, 5, 2], out=tmp_path / "runs", resume=True)
    train(tiny, "fedmf", seeds=[0, 5, 2], out=tmp_path / "plain", **OPTIONS)
    for seed in (0, 5, 2):
        part = f"seed-{seed}"
        assert bits(tmp_path / "runs" / part) == bits(tmp_path / "plain" / part)
        config = (tmp_path / "runs" / part / "config.toml").read_text()
        assert config == (tmp_path / "plain" / part / "config.toml").read_text()


def test_a_file_given_by_its_path_is_found_again(tmp_path):
    rows = [f"u{u},i{(u * 3 + k) % 9},{k}" for u in range(8) for k in range(6)]
    (tmp_path / "my.csv").write_text("user,item,time\n" + "\n".join(rows) + "\n")
    path = str(tmp_path / "my.csv")
    train(path, "popularity", out=tmp_path / "one")
    assert Run.open(tmp_path / "one").experiment.data == path
    train(path, "popularity", seeds=2, out=tmp_path / "runs")
    assert Run.open(tmp_path / "runs" / "seed-1").experiment.data == path


def test_seeds_without_a_folder_are_in_memory(tiny, tmp_path):
    runs = train(tiny, "fedmf", seeds=[0, 5, 2], **OPTIONS)
    stored = train(tiny, "fedmf", seeds=[0, 5, 2], out=tmp_path / "runs", **OPTIONS)
    assert [run.experiment for run in runs] == [run.experiment for run in stored]
    assert [run.metrics for run in runs] == [run.metrics for run in stored]
    assert runs.metrics == stored.metrics and runs.summary.test_sd == stored.summary.test_sd
    assert len(runs) == 3 and runs[-1].summary.seed == 2 and "seeds [0, 5, 2]" in repr(runs)


def test_so_many_seeds_follow_the_first(tiny):
    runs = train(tiny, "popularity", seed=4, seeds=2)
    assert runs.summary.seed == [4, 5]
    for wrong in (0, [], [1, 1]):
        with pytest.raises(ConfigError, match="seeds = "):
            train(tiny, "popularity", seeds=wrong)
