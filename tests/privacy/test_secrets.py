"""The attacks that a known seed allowed, and what else one user could do: they find nothing now."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

import hushrec
from conftest import blocks, interactions
from hushrec.aggregation import ClientRows, Update
from hushrec.data.splitting import SplitConfig, make_split
from hushrec.errors import ConfigError, StoppedError
from hushrec.federation.experiment import ExperimentRequest
from hushrec.federation.setup import make_task
from hushrec.privacy.discrete import law
from hushrec.privacy.protection import finite_or_zero
from hushrec.streams import SecretStreams, Streams
from hushrec.testing import taste_world
from hushrec.tuning import tune
from test_api import StopAfter

CENTRAL = {"privacy.mode": "central", "privacy.epsilon": 1.0, "privacy.clip": 1.0}


def counts(data, **settings):
    """What `popularity` releases, under noise unless told."""
    run = hushrec.train(data, "popularity", settings={**CENTRAL, **settings})
    return run.model.shared["counts"].astype(np.float64)


@pytest.fixture(scope="module")
def world():
    return blocks(200, 400, 2, length=9, seed=3)


def test_two_releases_share_no_noise(world):
    """Were the noise at two epsilons one draw, scaled, a weighted difference would cancel it."""
    exact = hushrec.train(world, "popularity").model.shared["counts"]
    clipped = exact * (counts(world, **{"privacy.epsilon": 1e6}) @ exact / (exact @ exact))
    noises = [counts(world, **{"privacy.epsilon": e}) - clipped for e in (1.0, 1.0, 2.0)]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        # 400 entries: the correlation of independent noises has a deviation of 0.05.
        assert abs(np.corrcoef(noises[one], noises[other])[0, 1]) < 0.25


def named_by_difference(world, **settings):
    """Name as many items as user 7 has from a release with them and one without."""
    before = counts(world, **settings)
    left = world.user == 7
    after = counts(replace(world, value=np.where(left, 0, world.value)), **settings)
    named = np.argsort(after - before)[: left.sum()]
    return len(np.intersect1d(named, world.item[left])), left.sum()


def test_who_left_cannot_be_read_from_two_releases(world):
    fixed = {"privacy.delta": 1e-5, "split.drop_below": 0.5}
    # The attack works where the noise is the same: all items that train, all but the held-out two.
    named, items = named_by_difference(world, **fixed, **{"privacy.noise_seed": 0})
    assert named >= items - 2
    named, items = named_by_difference(world, **fixed)
    assert named <= 3, f"{named} of {items} items of the user that left are named"
    assert not np.array_equal(counts(world), counts(world)), "a release is never made twice"


def test_a_seed_for_noise_repeats_it_and_is_confessed(world):
    seeded = {**CENTRAL, "privacy.noise_seed": 5}
    runs = [hushrec.train(world, "popularity", settings=seeded) for _ in range(2)]
    np.testing.assert_array_equal(runs[0].model.shared["counts"], runs[1].model.shared["counts"])
    said = runs[0].summary.privacy.statement
    assert said.startswith("Simulated: noise from privacy.noise_seed = 5")
    secret = hushrec.train(world, "popularity", settings=CENTRAL).summary.privacy.statement
    assert secret.startswith("User-level (")


def likeness(world, guess, **settings):
    """Correlate what a release holds beside the counts with the noise of a guessed seed."""
    exact = hushrec.train(world, "popularity").model.shared["counts"]
    clipped = exact * (counts(world, **{"privacy.epsilon": 1e6}) @ exact / (exact @ exact))
    run = hushrec.train(world, "popularity", settings={**CENTRAL, **settings})
    residual = run.model.shared["counts"].astype(np.float64) - clipped
    words = SecretStreams(guess).words("privacy/sum/counts", 1)
    scale = math.ceil(run.summary.privacy.account[0]["multiplier"] * 2**32)  # of a clip of 1
    noise = law("gaussian", scale).draw(words, len(exact))
    return abs(np.corrcoef(residual, noise)[0, 1])


def test_small_seeds_do_not_give_the_noise(world):
    assert likeness(world, 7, **{"privacy.noise_seed": 7}) > 0.95, "a known seed gives it away"
    assert max(likeness(world, guess) for guess in range(10)) < 0.3


def test_a_key_is_good_for_one_experiment_and_one_data_set(world):
    def noise(settings, data=world):
        experiment = ExperimentRequest("w", "popularity", settings=settings).experiment()
        split = make_split(data, experiment.split, Streams(0))
        task = make_task(experiment, split, key="the same key")
        return task.secret.words("privacy/sum/counts", 1).take(4).tolist()

    again, other = noise(CENTRAL), noise({**CENTRAL, "privacy.epsilon": 2.0})
    assert again == noise(CENTRAL)
    assert again != other
    assert again != noise(CENTRAL, world.select(world.user != 7))


KEYS = ["ab" * 32, "cd" * 32]


def test_the_key_is_in_the_checkpoint_alone_and_goes_with_it(world, monkeypatch, tmp_path):
    settings = {**CENTRAL, "cohort.kind": "poisson", "cohort.probability": 0.5}

    def go(out, key, **more):
        monkeypatch.setattr("hushrec.federation.setup.new_key", lambda: key)
        return hushrec.train(world, out=out, **more)

    asked = {"method": "fedmf", "rounds": 4, "settings": {**settings, "d": 4}}
    whole = go(tmp_path / "whole", KEYS[0], **asked)
    with pytest.raises(StoppedError):
        go(tmp_path / "cut", KEYS[0], **asked, callbacks=[StopAfter(2)])
    holding = [
        path.relative_to(tmp_path / "cut").as_posix()
        for path in (tmp_path / "cut").rglob("*")
        if path.is_file() and KEYS[0].encode() in path.read_bytes()
    ]
    assert holding == ["checkpoint/round-000002/state.json"]
    resumed = go(tmp_path / "cut", KEYS[1], resume=True)
    np.testing.assert_array_equal(whole.model.shared["items"], resumed.model.shared["items"])
    for folder in ("whole", "cut"):
        for path in (tmp_path / folder).rglob("*"):
            assert not path.is_file() or not any(k.encode() in path.read_bytes() for k in KEYS)


# ------------------------------------------------------------ nobody can stop or skew a run


def test_what_is_no_number_counts_as_zero():
    rows = np.ones((3, 2), np.float32)
    rows[2, 1] = np.inf
    stack = ClientRows(np.array([0, 2, 3]), np.array([1, 4, 1], np.int32), rows)
    update = Update(2, {"items": stack}, {"head": np.array([[1.0, 2.0], [3.0, 4.0]])})
    found = finite_or_zero(update)
    assert found.zeroed_out == 1
    assert found.rows["items"].rows.tolist() == [[1, 1], [1, 1], [0, 0]]
    assert found.dense["head"].tolist() == [[1, 2], [0, 0]]
    nan = replace(update, rows={}, dense={"head": np.array([[np.nan, 2.0], [3.0, 4.0]])})
    assert finite_or_zero(nan).dense["head"].tolist() == [[0, 0], [3, 4]]
    whole = replace(update, rows={})
    assert finite_or_zero(whole) is whole


@pytest.mark.parametrize("mode", ["central", "local-gaussian"])
def test_ratings_beyond_all_numbers_do_not_stop_a_run(mode, tmp_path):
    """One user's ratings of 3e38 make its upload infinite; the others train on."""
    world = taste_world()
    value = world.value.copy()
    value[world.user == 3] = 3e38 * (-1.0) ** np.arange((world.user == 3).sum())
    settings = {"privacy.mode": mode, "privacy.clip": 1.0, "privacy.epsilon": 8.0}
    wild = replace(world, value=value)
    run = hushrec.train(wild, "fedrec", rounds=3, settings=settings, out=tmp_path / "run")
    assert np.isfinite(run.model.shared["items"]).all()
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {line.get("zeroed_out") for line in lines} == {1}


# ------------------------------------------------------------ public facts are not read from data


def test_one_date_for_everybody_must_be_given(small):
    dated = {**CENTRAL, "split.kind": "time"}
    with pytest.raises(ConfigError, match="give split"):
        hushrec.train(small, "popularity", settings=dated)
    given = {**dated, "split.valid_from": 6, "split.test_from": 8}
    run = hushrec.train(small, "popularity", settings=given)
    assert (run.split.train.times.values < 6).all()
    assert run.summary.privacy.epsilon == pytest.approx(1.0, rel=1e-3)


def test_a_search_would_have_to_pay_for_every_trial(tiny, tmp_path):
    with pytest.raises(ConfigError, match="all of them are charged to the privacy budget"):
        tune(
            tiny,
            ExperimentRequest(tiny.name, "fedmf", rounds=1, settings=CENTRAL),
            tmp_path / "search",
            trials=1,
        )
    assert not (tmp_path / "search").exists()


def test_another_data_set_is_another_one_down_to_values_times_and_features():
    rows = [(user, item, item) for user in range(4) for item in range(5)]
    data = interactions(rows)
    digests = {
        make_split(changed, SplitConfig(), Streams(0)).digest()
        for changed in (
            data,
            replace(data, value=data.value + np.float32(1)),
            replace(data, time=data.time * 2),
            replace(data, user_features=taste_world().user_features),
        )
    }
    assert len(digests) == 4
