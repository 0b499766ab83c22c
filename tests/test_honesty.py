"""The smoke alarm: figures that only a leak can explain, and figures that must not move.

Chance on full ranking is 10 / candidates for everybody; with n users its standard deviation is
sqrt(p (1 - p) / n). Margins below are four of those or more.
"""

import numpy as np
import pytest

import hushrec


def hit_rates(run):
    chance = {
        name: float(np.mean(np.minimum(1, 10 / ranks.candidates)))
        for name, ranks in run.ranks["test"].items()
    }
    users = len(run.ranks["test"]["full"].users)
    margin = {name: 4 * np.sqrt(p * (1 - p) / users) for name, p in chance.items()}
    return {name: run.metrics[name]["hr@10"] for name in chance}, chance, margin


def assert_chance(run):
    got, chance, margin = hit_rates(run)
    for name in got:
        assert got[name] == pytest.approx(chance[name], abs=margin[name]), name


ROUNDS = {"negative-counter": 100, "local-only": 25}


@pytest.mark.parametrize("method", ROUNDS)
def test_on_made_up_users(method, small):
    given = {"rounds": ROUNDS[method], "seed": 0}
    assert_chance(hushrec.train(small, method, protocol="honest", **given))
    leaking = hushrec.train(small, method, protocol="published", **given)
    assert leaking.metrics["full"]["hr@10"] > 0.95
    assert leaking.metrics["sampled99"]["hr@10"] > 0.95
    assert "leak" in leaking.summary.protocol_mark


def test_the_counter_on_the_demo():
    given = {"rounds": 100, "seed": 0}
    assert_chance(hushrec.train("demo", "negative-counter", **given))
    leaking = hushrec.train("demo", "negative-counter", protocol="published", **given)
    assert leaking.metrics["sampled99"]["hr@10"] > 0.6
    assert leaking.metrics["full"]["hr@10"] > 10 * hit_rates(leaking)[1]["full"]


def test_the_counter_on_ml_100k(data_dir):
    data = hushrec.load("ml-100k", data_dir=data_dir)
    assert_chance(hushrec.train(data, "negative-counter", rounds=25))
    leaking = hushrec.train(data, "negative-counter", rounds=100, protocol="published")
    assert leaking.metrics["sampled99"]["hr@10"] > 0.99
    assert leaking.metrics["full"]["hr@10"] > 0.9


def test_local_only_on_ml_100k_is_at_chance(data_dir):
    data = hushrec.load("ml-100k", data_dir=data_dir)
    small = {"d": 8, "store.kind": "memory", "evaluation.every": 4}
    assert_chance(hushrec.train(data, "local-only", rounds=4, settings=small))


def test_popularity_on_ml_100k(data_dir):
    data = hushrec.load("ml-100k", data_dir=data_dir)
    run = hushrec.train(data, "popularity")
    assert run.metrics["full"]["hr@10"] == pytest.approx(0.08, abs=0.01)
    assert run.metrics["sampled99"]["hr@10"] == pytest.approx(0.41, abs=0.02)
    assert run.summary.users.evaluated_users == 943
    # The baseline that is shown beside every figure is this method.
    assert run.summary.baselines.popularity["full"] == run.metrics["full"]


def test_popularity_counts_users(tiny):
    import reference

    run = hushrec.train(tiny, "popularity")
    positives = [run.split.train.positives[u] for u in range(tiny.n_users)]
    np.testing.assert_array_equal(
        run.model.shared["counts"], reference.popularity(positives, tiny.n_items)
    )
    # And the ranks that follow, counted one by one.
    history = run.split.history("test")
    full = run.ranks["test"]["full"]
    for place, user in enumerate(full.users):
        candidates = np.setdiff1d(np.arange(tiny.n_items), history.positives[user])
        ahead, tied = reference.rank(run.model.shared["counts"], full.targets[place], candidates)
        assert (full.ahead[place], full.tied[place]) == (ahead, tied)
        assert full.candidates[place] == len(candidates)


def test_constant_scores_are_chance(small):
    run = hushrec.train(small, "negative-counter", rounds=1, settings={"negatives": 1})
    chance = run.summary.baselines.chance
    expected = hit_rates(run)[1]
    for name in expected:
        assert chance[name]["hr@10"] == pytest.approx(expected[name], rel=1e-6)
        assert chance[name]["auc"] == pytest.approx(0.5, rel=1e-6)


def mean_over_seeds(data, method, protocol):
    """Return the means of three seeds with the paper's settings, against 99 sampled items."""
    runs = [
        hushrec.train(data, method, preset="paper", protocol=protocol, seed=seed)
        for seed in (0, 1, 2)
    ]
    return {
        name: np.mean([run.metrics["sampled99"][name] for run in runs])
        for name in ("hr@10", "ndcg@10")
    }


@pytest.mark.slow
def test_pfedrec_reproduces_the_paper_under_its_protocol_only(data_dir):
    """Paper: HR@10 0.716, NDCG@10 0.434, with the leak."""
    data = hushrec.load("ml-100k", data_dir=data_dir)
    published = mean_over_seeds(data, "pfedrec", "published")
    honest = mean_over_seeds(data, "pfedrec", "honest")
    assert published["hr@10"] >= 0.70
    assert published["ndcg@10"] >= 0.42
    assert honest["hr@10"] <= published["hr@10"] - 0.08
    assert honest["ndcg@10"] <= published["ndcg@10"] - 0.05


@pytest.mark.slow
def test_tables_that_nobody_shares_reach_everything_through_the_leak(data_dir):
    """Local-only, 300 rounds, all items: what personal tables have to be held against."""
    data = hushrec.load("ml-100k", data_dir=data_dir)
    seldom = {"evaluation.every": 100, "evaluation.patience": 0}
    given = {"preset": "paper", "rounds": 300, "settings": seldom}
    leaking = hushrec.train(data, "local-only", protocol="published", **given)
    honest = hushrec.train(data, "local-only", protocol="honest", **given)
    assert leaking.metrics["full"]["hr@10"] >= 0.99
    assert honest.metrics["full"]["hr@10"] <= 0.02


@pytest.mark.slow
def test_fedmf_reproduces_the_paper_under_its_protocol(data_dir):
    """Paper: HR@10 0.652, NDCG@10 0.394, with the leak."""
    data = hushrec.load("ml-100k", data_dir=data_dir)
    published = mean_over_seeds(data, "fedmf", "published")
    assert published["hr@10"] >= 0.64
    assert published["ndcg@10"] >= 0.38
