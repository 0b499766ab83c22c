"""An audit bites: each planted defect is called a contradiction, and what is honest is not."""

from dataclasses import replace

import numpy as np
import pytest

import hushrec
from conftest import interactions
from hushrec.aggregation import Steps
from hushrec.audit import audit
from hushrec.privacy import clipping as clip_module
from hushrec.privacy import noise as noise_module
from hushrec.privacy.clipping import BIT, AdaptiveClip
from hushrec.privacy.noise import CentralGaussian
from hushrec.streams import SecretStreams
from hushrec.testing import taste_world
from hushrec.testing.backend import SILOS, SMALLER

CENTRAL = {"privacy.mode": "central", "privacy.epsilon": 2.0}
RUNS = {
    "tables, dense arrays, adaptive": ("fedrap", {**CENTRAL, "d": 3}, 2),
    "pairs": ("fednext", CENTRAL, None),
    "uploads": (
        "fcf",
        {"privacy.mode": "local-gaussian", "privacy.clip": 1.0, "d": 3, **{"privacy.epsilon": 2.0}},
        2,
    ),
    # A client is a silo, and uploads a weight of its own beside its update.
    "silos": ("lipm", {**CENTRAL, **SMALLER["lipm"], **SILOS}, 2),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, (method, settings, rounds) in RUNS.items():
        hushrec.train(
            taste_world(), method, rounds=rounds, settings=settings, out=folder / name, seed=1
        )
    return {name: folder / name for name in RUNS}


def audited(folder, data=None, seed=0):
    """Audit a run anew; return its verdict and the reasons for it."""
    run = hushrec.Run.open(folder, data or taste_world())
    found = audit(run, users=10, trials=1000, seed=seed)
    return found.verdict, " | ".join(found.reasons)


@pytest.mark.parametrize("name", RUNS)
def test_an_honest_run_is_left_alone(name, runs):
    for seed in range(3):
        assert audited(runs[name], seed=seed) == ("kept", "")


def silent(kind):
    """Leave one kind of array without noise."""

    def plant(monkeypatch):
        honest = CentralGaussian.noise

        def noise(self, secret, part=1.0):
            added = honest(self, secret, part)
            kept = {
                name: steps if name == BIT else np.zeros_like(steps)
                for name, steps in getattr(added, kind).items()
            }
            return replace(added, **{kind: kept})

        monkeypatch.setattr(CentralGaussian, "noise", noise)

    return plant


def unclipped(monkeypatch):
    """Clip tables alone."""
    honest = clip_module._scaled
    monkeypatch.setattr(
        clip_module,
        "_scaled",
        lambda update, factors: replace(honest(update, factors), dense=update.dense),
    )


def uncovered_count(monkeypatch):
    """Add nothing to the count of adaptive clipping."""
    monkeypatch.setattr(AdaptiveClip, "noise", lambda self, secret, part=1.0: Steps())


def repeated(monkeypatch):
    """Draw the same noise in every round."""
    honest = SecretStreams.words
    monkeypatch.setattr(
        SecretStreams, "words", lambda self, what, number, user=-1: honest(self, what, 1, user)
    )


def too_little(monkeypatch):
    """Draw less noise than was planned."""
    planned = noise_module.steps_of
    monkeypatch.setattr(noise_module, "steps_of", lambda scale: planned(0.3 * scale))


@pytest.mark.parametrize(
    ("name", "plant", "words"),
    [
        ("tables, dense arrays, adaptive", silent("dense"), "'threshold' carry none"),
        ("pairs", silent("spaces"), "'pairs' carry none"),
        ("tables, dense arrays, adaptive", unclipped, "an upload in factor"),
        ("uploads", unclipped, "an upload in squares"),
        ("tables, dense arrays, adaptive", uncovered_count, f"'{BIT}' carry none"),
        ("tables, dense arrays, adaptive", repeated, "two rounds of 'common' is the same"),
        ("uploads", repeated, "two rounds of 'items' is the same"),
        ("pairs", too_little, "of what is claimed"),
        ("uploads", too_little, "of what is claimed"),
    ],
)
def test_a_planted_defect_is_called_a_contradiction(name, plant, words, runs, monkeypatch):
    plant(monkeypatch)
    verdict, reasons = audited(runs[name])
    assert verdict == "contradicted"
    assert words in reasons


def test_noise_that_can_be_drawn_again_is_confessed(tiny, tmp_path):
    settings = {**CENTRAL, "privacy.noise_seed": 5}
    run = hushrec.train(tiny, "popularity", settings=settings, out=tmp_path / "run")
    found = audit(run, users=10, trials=1000)
    assert found.verdict == "kept"
    assert "privacy.noise_seed = 5: whoever knows that number removes it" in found.verdict_words


# ------------------------------------------------------------ what canaries cannot see


def strangers(n_users=160, n_items=400, length=20):
    """No taste at all: whatever the model knows of a user it has from that user."""
    generator = np.random.default_rng(0)
    rows = [
        (user, item, time)
        for user in range(n_users)
        for time, item in enumerate(generator.permutation(n_items)[:length])
    ]
    return interactions(rows, name="strangers")


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "kept"), (1e-8, "contradicted")])
def test_noise_that_was_off_while_training_is_seen_in_the_model(
    factor, verdict, tmp_path, monkeypatch
):
    """Nothing is wrong with the mechanism any more; but the model remembers."""
    data = strangers()
    settings = {
        **CENTRAL,
        "privacy.epsilon": 0.5,
        "privacy.noise_seed": 0,
        "split.kind": "unseen-users",
        "split.test": 0.3,
        "split.valid": 0.2,
        "price": 1e-3,
        "ridge": 0.1,
        "popularity": 0.0,
    }
    with monkeypatch.context() as training:
        planned = noise_module.steps_of
        training.setattr(noise_module, "steps_of", lambda scale: planned(factor * scale))
        hushrec.train(data, "fedease", settings=settings, out=tmp_path / "run", seed=1)
    run = hushrec.Run.open(tmp_path / "run", data)
    found = audit(run, users=500, trials=1000)
    assert found.verdict == verdict
    assert found.soundness.problems == []
    assert [reason.split(":")[0] for reason in found.reasons] == (
        ["membership"] if verdict == "contradicted" else []
    )


def test_the_items_of_a_silo_are_those_of_its_users(runs):
    run = hushrec.Run.open(runs["silos"], taste_world())
    found, split = audit(run, users=10, trials=1000), run.split
    items = [
        len(np.unique(split.train.positives.take(np.flatnonzero(split.holders == silo)).values))
        for silo in range(7)
    ]
    assert (found.items.clients, found.items.items_per_client) == (7, np.mean(items))
    assert {row.who for row in found.canaries} == {"any silo"}
    assert "weight" in found.soundness.arrays, "its noise is tested by itself"
    assert found.membership.members == 10, "a person is attacked, not a silo"
