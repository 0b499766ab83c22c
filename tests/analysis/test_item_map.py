"""Items on a map: the tables shown are those that are scored with."""

import numpy as np
import pytest

import hushrec
from hushrec.analysis import item_map as maps
from hushrec.errors import ConfigError, RunError


def scored(run, user, table):
    """Score by hand with a table."""
    private = run.model.private.read(np.array([user]))
    bias = np.asarray(private["bias"]).ravel() if "bias" in private else 0
    return table @ np.asarray(private["vector"])[0] + bias


@pytest.mark.parametrize(
    ("method", "settings", "shown"),
    [
        ("pfedrec", {"d": 3, "own_share": 0.5}, "own"),
        ("fedmf", {"d": 3, "dual": True}, "own"),
        ("fedmf", {"d": 3}, "shared"),
        ("fedrap", {"d": 3, "epochs": 1, "table_lr": 20.0}, "added"),
    ],
)
def test_the_tables_are_those_that_are_scored_with(tiny, method, settings, shown):
    run = hushrec.train(tiny, method, rounds=2, settings=settings)
    user = 7
    private = run.model.private.read(np.array([user]))
    tables = run.model.method.item_tables(run.model.shared, private)
    history = run.split.history("test").take(np.array([user]))
    expected = run.model.method.score(run.model.shared, private, history)[0]
    np.testing.assert_allclose(scored(run, user, tables[shown]), expected, rtol=1e-4, atol=1e-5)
    if method == "fedrap":
        np.testing.assert_array_equal(tables["common"] + tables["personal"], tables["added"])


def test_a_map_of_one_user(tiny, monkeypatch):
    run = hushrec.train(tiny, "fedrap", rounds=2, settings={"d": 3, "epochs": 1})
    with pytest.raises(RunError, match="no user has 20 training items"):
        maps.item_map(run)
    monkeypatch.setattr(maps, "LIKED", 5)
    found = maps.item_map(run)
    user = run.data.user_index(found["user"])
    assert found["liked"] == sorted(run.split.train.positives[user])
    assert found["held_out"] == list(run.split.test[user])
    for table in ("common", "personal", "added"):
        places = np.array(found[table]["places"])
        assert places.shape == (40, 2)
        assert (places.min(), places.max()) == (0, maps.GRID)
        assert 0 <= found[table]["together"] <= 1
    assert maps.item_map(run) == found
    popular = hushrec.train(tiny, "popularity")
    with pytest.raises(ConfigError, match="no item vectors"):
        maps.item_map(popular)


def test_what_lies_near_liked_items():
    rng = np.random.default_rng(0)
    table = rng.normal(size=(60, 4))
    liked = np.arange(12)
    table[liked] += 50
    assert maps.liked_nearby(table, liked) == 1
    mixed = maps.liked_nearby(rng.normal(size=(60, 4)), liked)
    assert 0.05 < mixed < 0.4, "by chance 11 of 59"
