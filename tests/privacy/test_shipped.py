"""What is shipped is covered: nobody's validation item decides which round it is."""

from dataclasses import replace

import numpy as np
import pytest

from hushrec.api import Run, train
from hushrec.errors import ConfigError, StoppedError
from hushrec.runs.folder import RunFolder
from test_api import StopAfter, bits

CENTRAL = {"privacy.mode": "central", "privacy.epsilon": 1e4, "privacy.noise_seed": 2}
LOCAL = {"privacy.mode": "local-gaussian", "privacy.scale": 1e-3, "privacy.noise_seed": 2}
ROUNDS = 5


def go(data, settings, **more):
    small = {"d": 4, "item_rate": 1.0, **settings}
    return train(data, "fedmf", rounds=more.pop("rounds", ROUNDS), seed=2, settings=small, **more)


def with_other_validation_items(data):
    """Yield neighbours of the data: in each, one user's validation item is another one."""
    for user in range(data.n_users):
        mine = np.flatnonzero(data.user == user)
        validates = mine[np.argsort(data.time[mine], kind="stable")[-2]]
        others = np.setdiff1d(np.arange(data.n_items), data.item[mine])
        for other in others[:: max(1, len(others) // 8)]:
            items = data.item.copy()
            items[validates] = other
            yield replace(data, item=items)


def best_look(out):
    """Return the round that raw validation values would have chosen."""
    looks = [line.valid["full"]["ndcg@10"] for line in RunFolder(out).read_metrics()]
    return 1 + int(np.argmax(looks))


def a_neighbour_that_sways(data):
    """Find data in which one validation item makes a run without privacy ship another round."""
    usual = go(data, {})
    for other in with_other_validation_items(data):
        swayed = go(other, {})
        if swayed.summary.selected_round != usual.summary.selected_round:
            assert not np.array_equal(swayed.model.shared["items"], usual.model.shared["items"])
            return other
    raise AssertionError("the attack finds nobody: it proves nothing")


@pytest.fixture(scope="module")
def neighbour(tiny):
    return a_neighbour_that_sways(tiny)


@pytest.mark.parametrize("mode", [CENTRAL, LOCAL], ids=["central", "local"])
def test_one_validation_item_changes_nothing_that_is_shipped(mode, tiny, neighbour, tmp_path):
    """Without privacy the same item changes the shipped model: the fixture found it so."""
    runs = [
        go(data, mode, out=tmp_path / name) for name, data in (("one", tiny), ("other", neighbour))
    ]
    for run in runs:
        assert run.summary.selected_round == run.summary.rounds == ROUNDS
        assert run.summary.selected_by == "last round"
    np.testing.assert_array_equal(runs[0].model.shared["items"], runs[1].model.shared["items"])
    np.testing.assert_array_equal(
        np.asarray(runs[0].model.private.read(np.arange(30))["vector"]),
        np.asarray(runs[1].model.private.read(np.arange(30))["vector"]),
    )


def test_the_last_round_ships_although_a_look_was_better(tiny, tmp_path):
    """Enormous noise makes rounds differ at random: some look before the last one is the best."""
    wild = {**CENTRAL, "privacy.epsilon": 0.5}
    run = go(tiny, wild, rounds=21, out=tmp_path / "run")
    assert best_look(tmp_path / "run") < 21
    assert run.summary.selected_round == 21
    np.testing.assert_array_equal(
        Run.open(tmp_path / "run", tiny).model.shared["items"], run.model.shared["items"]
    )


def test_a_resumed_run_ships_the_same(tiny, tmp_path):
    go(tiny, CENTRAL, out=tmp_path / "whole")
    stop = StopAfter(3)
    with pytest.raises(StoppedError):
        go(tiny, CENTRAL, out=tmp_path / "cut", callbacks=[stop])
    half = RunFolder(tmp_path / "cut").read_checkpoint("round-000003")
    assert half.selected_round == 0
    assert not any(name.startswith("selected") for name in half.files)
    train(tiny, out=tmp_path / "cut", resume=True)
    assert bits(tmp_path / "cut") == bits(tmp_path / "whole")


def test_nobodys_validation_items_end_a_protected_run(tiny, tmp_path):
    with pytest.raises(ConfigError, match=r"evaluation\.patience = 1 would let users' validation"):
        go(tiny, {**CENTRAL, "evaluation.patience": 1}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    # More rounds than the default patience, and noise that nothing improves through.
    wild = {**CENTRAL, "privacy.epsilon": 0.5}
    assert go(tiny, wild, rounds=120).summary.rounds == 120
    assert go(tiny, {**wild, "evaluation.patience": 0}, rounds=9).summary.rounds == 9
    assert go(tiny, {}, rounds=120).summary.rounds < 120, "it would have stopped"
