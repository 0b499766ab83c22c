"""Silos: every user in one, alike to the degree asked for, and nothing that depends on stacking."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hushrec
from hushrec.data.partition import SilosConfig, divergences, facts, hold, tastes
from hushrec.data.splitting import SplitConfig, make_split
from hushrec.errors import ConfigError, StoppedError
from hushrec.federation.backends import Machine
from hushrec.federation.experiment import ExperimentRequest
from hushrec.streams import Streams
from hushrec.testing import Federation, taste_world

pytest.importorskip("torch", reason="needs the 'neural' extra")
from hushrec.methods.lipm import LIPM, LIPMConfig
from test_api import StopAfter

SMALL = {"d": 8, "hidden": (8, 4), "batch": 16, "epochs": 2, "interest": 4, "lr": 0.02}


@pytest.fixture(scope="module")
def demo():
    return make_split(hushrec.load("demo"), SplitConfig(), Streams(0)).train


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(1, 60),
    alpha=st.floats(1e-3, 1e3),
    seed=st.integers(0, 1000),
)
def test_every_user_is_in_one_silo_and_silos_are_of_one_size(count, alpha, seed):
    view = make_split(taste_world(), SplitConfig(), Streams(0)).train
    config = SilosConfig(kind="dirichlet", count=count, alpha=alpha)
    holders = hold(view, config, Streams(seed))
    sizes = np.bincount(holders, minlength=count)
    assert holders.shape == (len(view),)
    assert sizes.sum() == len(view)
    assert len(sizes) == count
    assert sizes.max() - sizes.min() <= 1
    np.testing.assert_array_equal(holders, hold(view, config, Streams(seed)))


@pytest.mark.parametrize("seed", range(5))
def test_silos_differ_to_the_degree_asked_for(demo, seed):
    found = tastes(demo)
    assert found.over == "genres"
    means = [
        divergences(
            found,
            hold(demo, SilosConfig(kind="dirichlet", count=20, degree=degree), Streams(seed)),
        ).mean()
        for degree in ("low", "medium", "high")
    ]
    assert means[0] < means[1] < means[2]


def test_the_divergence_is_that_of_jensen_and_shannon(demo):
    from scipy.spatial.distance import jensenshannon

    found, holders = tastes(demo), np.arange(len(demo), dtype=np.int32) % 7
    overall = found.counts.sum(0)
    expected = [jensenshannon(found.counts[holders == s].sum(0), overall, 2) ** 2 for s in range(7)]
    np.testing.assert_allclose(divergences(found, holders), expected, atol=1e-12)
    assert facts(demo, holders)["divergence"]["mean"] == pytest.approx(np.mean(expected))


def test_without_genres_popularity_is_the_taste(demo):
    plain = tastes(replace(demo, item_features={}))
    assert plain.over == "popularity of items"
    np.testing.assert_allclose(plain.counts.sum(1), demo.positives.lengths)
    # The groups hold about as many interactions each, or one very popular item.
    assert plain.counts.sum(0).max() < 0.2 * plain.counts.sum()


def test_the_view_of_training_has_each_silo_together():
    silos = SilosConfig(kind="dirichlet", count=7)
    split = make_split(taste_world(), SplitConfig(), Streams(0), silos)
    view = split.train_view("honest")
    np.testing.assert_array_equal(view.clients, np.arange(7))
    np.testing.assert_array_equal(np.sort(view.users), np.arange(len(view)))
    stack = view.take_clients(np.array([5, 2]))
    np.testing.assert_array_equal(stack.clients, [5, 2])
    mine = stack.users[stack.client_indptr[1] : stack.client_indptr[2]]
    np.testing.assert_array_equal(mine, np.flatnonzero(split.holders == 2))
    for k, user in enumerate(stack.users):
        np.testing.assert_array_equal(stack.positives[k], split.train.positives[user])


def test_methods_for_devices_refuse_silos():
    with pytest.raises(ConfigError, match="trains one user per client"):
        hushrec.train(taste_world(), "fedmf", rounds=1, settings={"silos.kind": "dirichlet"})
    with pytest.raises(ConfigError, match="unseen-users"):
        hushrec.train(
            taste_world(),
            "lipm",
            rounds=1,
            settings={"silos.kind": "dirichlet", "silos.count": 5, "split.kind": "unseen-users"},
        )
    with pytest.raises(ConfigError, match="exceeds the 60 users"):
        hushrec.train(taste_world(), "lipm", rounds=1, settings={"silos.kind": "dirichlet"})


def rounds_of(chunk: int | None, threads: int, options: dict, number: int = 2):
    silos = SilosConfig(kind="dirichlet", count=11)
    split = make_split(taste_world(), SplitConfig(), Streams(3), silos)
    view, method = split.train_view("honest"), LIPM(LIPMConfig(**SMALL, **options))
    federation = Federation(method, view, machine=Machine(threads, chunk), seed=3)
    for _ in range(number):
        done = federation.round(split.training_clients)
    return federation.shared, dict(federation.store.read(np.arange(11))), done.loss


@pytest.mark.parametrize("lipm", [False, True])
@pytest.mark.parametrize(("chunk", "threads"), [(1, 1), (3, 2), (11, 1)])
def test_stacks_and_threads_change_no_bit(lipm, chunk, threads):
    ours, theirs = rounds_of(None, 1, {"lipm": lipm}), rounds_of(chunk, threads, {"lipm": lipm})
    for name, array in ours[0].items():
        np.testing.assert_array_equal(array, theirs[0][name])
    for name, value in ours[1].items():
        for part in ("rows", "ids") if hasattr(value, "rows") else ("real",):
            np.testing.assert_array_equal(getattr(value, part), getattr(theirs[1][name], part))
    assert ours[2] == theirs[2]


SETTINGS = {**SMALL, "silos.kind": "dirichlet", "silos.count": 6, "evaluation.every": 2}


def test_a_run_on_silos_resumes_to_the_bit(tmp_path):
    whole = hushrec.train(taste_world(), "lipm", rounds=4, settings=SETTINGS, out=tmp_path / "a")
    with pytest.raises(StoppedError):
        hushrec.train(
            taste_world(),
            "lipm",
            rounds=4,
            settings=SETTINGS,
            out=tmp_path / "b",
            callbacks=[StopAfter(1)],
        )
    other = hushrec.train(
        taste_world(), "lipm", out=tmp_path / "b", resume=True, machine=Machine(threads=2, chunk=2)
    )
    for name, array in whole.model.shared.items():
        np.testing.assert_array_equal(array, other.model.shared[name])
    assert whole.metrics == other.metrics
    summary = json.loads((tmp_path / "b" / "summary.json").read_text())
    assert summary["silos"]["count"] == 6
    again = hushrec.Run.open(tmp_path / "b", taste_world())
    assert [r.item for r in again.recommend("user-07")] == [
        r.item for r in whole.recommend("user-07")
    ]
    assert len(again.recommend("anna", history=["item-01", "item-02"])) == 10


def test_a_user_is_scored_with_its_own_silo():
    run = hushrec.train(taste_world(), "lipm", rounds=1, settings=SETTINGS)
    users = np.array([41, 3, 22])
    view = run.split.history("test").take(users)
    together = run.model.scores(users, view)
    for k, user in enumerate(users):
        alone = run.split.history("test").take(np.array([user]))
        alone = replace(alone, holders=run.split.holders[[user]])
        private = run.model.private.read(run.split.holders[[user]])
        np.testing.assert_array_equal(
            run.model.method.score(run.model.shared, private, alone)[0], together[k]
        )


def test_the_guarantee_is_for_a_silo():
    run = hushrec.train(
        taste_world(),
        "lipm",
        rounds=1,
        settings={
            **SETTINGS,
            "privacy.mode": "central",
            "privacy.noise_seed": 0,
            "privacy.epsilon": 5,
            "privacy.clip": 1,
        },
    )
    said = run.summary.privacy
    assert said.unit == "client (silo)"
    assert "any one client (silo)" in said.statement
    assert said.delta == 1e-5


def test_silos_are_part_of_the_configuration():
    experiment = ExperimentRequest(
        "demo", "lipm", settings={"silos.kind": "dirichlet"}
    ).experiment()
    assert type(experiment).from_toml(experiment.to_toml()) == experiment


def test_the_report_draws_the_silos(tmp_path):
    from hushrec.reporting.html import write_report

    run = hushrec.train(taste_world(), "lipm", rounds=2, settings=SETTINGS, out=tmp_path / "run")
    page = write_report(run).read_text()
    assert "Mix of each silo over popularity of items" in page
    # Ten rows of six silos, one cell each.
    assert page.count("fill-opacity") == 60
