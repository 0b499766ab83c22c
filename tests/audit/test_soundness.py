"""Soundness: each defect of clipping and noise is named, and what is sound is left alone."""

import math
from dataclasses import replace

import numpy as np
import pytest

from hushrec.aggregation import Steps, UploadShape
from hushrec.audit.canary import NoisedRound
from hushrec.audit.soundness import soundness
from hushrec.data.views import CohortConfig
from hushrec.privacy import clipping as clip_module
from hushrec.privacy import noise as noise_module
from hushrec.privacy.calibration import make_plan
from hushrec.privacy.clipping import BIT, AdaptiveClip
from hushrec.privacy.config import PrivacyConfig
from hushrec.privacy.noise import CentralGaussian, LocalNoise
from hushrec.privacy.plan import Schedule
from hushrec.streams import SecretRound, SecretStreams, Streams

LAYOUT = UploadShape(30, {"items": 3}, {"head": (4, 5), "bias": ()}, {"pairs": (25, 1)})
LARGE = replace(LAYOUT, n_rows=800)
ASKED = {"epsilon": 2.0, "delta": 1e-4}
MODES = {
    "flat": {"mode": "central", "clip": 0.5, **ASKED},
    "row": {"mode": "central", "clip": 0.5, "clipping": "row", **ASKED},
    "adaptive": {"mode": "central", **ASKED},
    "replace-one": {"mode": "central", "neighbours": "replace-one", **ASKED},
    "local-gaussian": {"mode": "local-gaussian", "clip": 0.5, **ASKED},
    "local-laplace": {"mode": "local-laplace", "clip": 0.5, **ASKED},
    "local-row": {"mode": "local-gaussian", "clip": 0.5, "clipping": "row", **ASKED},
    "budgets": {
        "mode": "local-gaussian",
        "clip": 0.5,
        "delta": 1e-4,
        "budgets": "activity",
        "epsilon_min": 0.5,
        "epsilon_max": 4.0,
    },
}
CENTRAL = [mode for mode in MODES if MODES[mode]["mode"] == "central"]
LOCAL = [mode for mode in MODES if mode not in CENTRAL]


def looked_at(mode, rounds=4, seed=0):
    """Look at a mechanism as it is planned for four rounds of 50 clients; return its problems."""
    shape = LAYOUT if mode in CENTRAL else replace(LAYOUT, spaces={})
    own = np.linspace(0.5, 4.0, 50) if mode == "budgets" else None
    schedule = Schedule(shape, rounds)
    plan = make_plan(PrivacyConfig(**MODES[mode]), CohortConfig(), schedule, 50, own)
    stages = [NoisedRound(number, plan.protection) for number in range(1, rounds + 1)]
    found = soundness(plan, stages, Streams(seed))
    arrays = {*shape.whole, BIT} if mode in ("adaptive", "replace-one") else set(shape.whole)
    assert set(found["arrays"]) == arrays
    return " | ".join(found["problems"])


@pytest.mark.parametrize("mode", MODES)
def test_what_is_sound_is_left_alone(mode):
    for seed in range(5):
        assert not looked_at(mode, seed=seed)


# ------------------------------------------------------------ noise that is missing, or too little


def without(monkeypatch, kind):
    """Leave one kind of array without noise."""
    honest = CentralGaussian.noise

    def noise(self, secret, part=1.0):
        added = honest(self, secret, part)
        kept = {name: np.zeros_like(steps) for name, steps in getattr(added, kind).items()}
        if BIT in kept:
            kept[BIT] = added.dense[BIT]
        return replace(added, **{kind: kept})

    monkeypatch.setattr(CentralGaussian, "noise", noise)


@pytest.mark.parametrize("mode", CENTRAL)
@pytest.mark.parametrize(
    ("kind", "arrays"),
    [("dense", ["head", "bias"]), ("spaces", ["pairs"]), ("tables", ["items"])],
)
def test_an_array_without_noise(mode, kind, arrays, monkeypatch):
    without(monkeypatch, kind)
    problems = looked_at(mode)
    for name in LAYOUT.whole:
        assert (f"numbers of '{name}' carry none" in problems) == (name in arrays)


@pytest.mark.parametrize("mode", CENTRAL)
def test_noise_that_is_left_out_altogether(mode, monkeypatch):
    """Then only what was uploaded is in the sum at all."""
    monkeypatch.setattr(
        CentralGaussian, "noise", lambda self, secret, part=1.0: self.clip.noise(secret)
    )
    assert "numbers of 'pairs' carry none" in looked_at(mode)


@pytest.mark.parametrize("mode", ["adaptive", "replace-one"])
@pytest.mark.parametrize("steps", [Steps(), Steps(dense={BIT: np.zeros((), np.int64)})])
def test_a_count_without_noise(mode, steps, monkeypatch):
    monkeypatch.setattr(AdaptiveClip, "noise", lambda self, secret, part=1.0: steps)
    problems = looked_at(mode)
    assert f"numbers of '{BIT}' carry none" in problems
    assert "items" not in problems


def test_a_count_with_too_little_noise(monkeypatch):
    honest = AdaptiveClip.noise
    monkeypatch.setattr(
        AdaptiveClip,
        "noise",
        lambda self, secret, part=1.0: honest(
            replace(self, bit_noise=0.5 * self.bit_noise), secret
        ),
    )
    assert f"that of '{BIT}' is 0.5" in looked_at("adaptive").replace("0.49", "0.5")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("factor", [0.3, 0.8])
def test_too_little_noise(mode, factor, monkeypatch):
    planned = noise_module.steps_of
    monkeypatch.setattr(noise_module, "steps_of", lambda scale: planned(factor * scale))
    assert "of what is claimed" in looked_at(mode)


@pytest.mark.parametrize("mode", MODES)
def test_more_noise_is_no_harm(mode, monkeypatch):
    planned = noise_module.steps_of
    monkeypatch.setattr(noise_module, "steps_of", lambda scale: planned(1.5 * scale))
    assert not looked_at(mode)


def test_noise_of_another_law(monkeypatch):
    """As much of it, but never more than sqrt(3) deviations: where it ends, it hides nothing."""

    class Uniform:
        def __init__(self, kind, scale):
            self.scale = scale

        def draw(self, words, size):
            drawn = words.take(size).astype(np.float64) / 2.0**63 - 1
            return (math.sqrt(3) * self.scale * drawn).astype(np.int64)

    monkeypatch.setattr(noise_module, "law", Uniform)
    monkeypatch.setattr(f"{__name__}.LAYOUT", LARGE)
    assert "not of the Gaussian law" in looked_at("flat")


# ------------------------------------------------------------ clipping


@pytest.mark.parametrize("mode", MODES)
def test_unclipped_dense_arrays(mode, monkeypatch):
    honest = clip_module._scaled
    monkeypatch.setattr(
        clip_module,
        "_scaled",
        lambda update, factors: replace(honest(update, factors), dense=update.dense),
    )
    problems = looked_at(mode)
    assert "clipping: an upload in head " in problems
    assert "clipping: an upload in items moves" not in problems


@pytest.mark.parametrize("mode", ["flat", "adaptive", "local-gaussian"])
def test_a_norm_over_tables_alone(mode, monkeypatch):
    honest = clip_module.client_norms
    monkeypatch.setattr(
        clip_module,
        "client_norms",
        lambda update, power: honest(replace(update, dense={}), power),
    )
    assert "clipping: an upload in bias " in looked_at(mode)


def test_arrays_that_are_clipped_one_by_one(monkeypatch):
    """Each alone keeps to the bound; all of them together do not."""

    def one_by_one(self, update, view, secret):
        rows, dense = {}, {}
        for name, given in update.rows.items():
            alone = replace(update, rows={name: given}, dense={})
            factors = clip_module._factors(clip_module.client_norms(alone, 2), self.bound)
            rows |= clip_module._scaled(alone, factors).rows
        for name, array in update.dense.items():
            alone = replace(update, rows={}, dense={name: array})
            factors = clip_module._factors(clip_module.client_norms(alone, 2), self.bound)
            dense |= clip_module._scaled(alone, factors).dense
        return replace(update, rows=rows, dense=dense)

    monkeypatch.setattr(clip_module.FlatClip, "protect", one_by_one)
    problems = looked_at("flat")
    assert "clipping: an upload in items and pairs and head and bias moves" in problems
    assert problems.count("clipping") == 1


# ------------------------------------------------------------ noise that repeats itself


def addressed(monkeypatch, change):
    """Address secret streams by something less than purpose, round and client."""
    honest = SecretStreams.words

    def words(self, purpose, round_number, user=-1):
        return honest(self, *change(purpose, round_number, user))

    monkeypatch.setattr(SecretStreams, "words", words)


@pytest.mark.parametrize("mode", MODES)
def test_the_same_noise_in_every_round(mode, monkeypatch):
    addressed(monkeypatch, lambda purpose, number, user: (purpose, 1, user))
    problems = looked_at(mode)
    for name in ("items", "bias"):
        assert f"the noise of two rounds of '{name}' is the same" in problems


@pytest.mark.parametrize("mode", MODES)
def test_the_same_noise_in_every_array(mode, monkeypatch):
    addressed(monkeypatch, lambda purpose, number, user: ("noise", number, user))
    assert "'head' and 'items'" in looked_at(mode)


@pytest.mark.parametrize("mode", LOCAL)
def test_the_same_noise_on_every_client(mode, monkeypatch):
    addressed(monkeypatch, lambda purpose, number, user: (purpose, number, 0))
    assert "two clients, or runs, of 'items'" in looked_at(mode)


@pytest.mark.parametrize("mode", CENTRAL)
def test_the_same_noise_in_every_run(mode, monkeypatch):
    monkeypatch.setattr(SecretStreams, "from_key", lambda *parts: SecretStreams(0))
    assert "two clients, or runs, of 'items'" in looked_at(mode)


@pytest.mark.parametrize("axis", ["entries", "rows"])
def test_the_same_noise_in_neighbouring(axis, monkeypatch):
    honest = CentralGaussian.noise

    def noise(self, secret, part=1.0):
        added = honest(self, secret, part)
        table = added.tables["items"]
        first = table[:, :1] if axis == "entries" else table[:1]
        return replace(added, tables={"items": np.broadcast_to(first, table.shape).copy()})

    monkeypatch.setattr(CentralGaussian, "noise", noise)
    assert f"neighbouring {axis} of 'items'" in looked_at("flat")


def test_noise_that_goes_along_with_that_of_the_round_before(monkeypatch):
    """No number is the same, but a third of the noise comes again."""
    honest = CentralGaussian.noise

    def noise(self, secret, part=1.0):
        new, old = (
            honest(self, secret),
            honest(self, SecretRound(secret.number - 1, secret.streams)),
        )
        mixed = {
            name: (math.sqrt(0.7) * steps + math.sqrt(0.3) * old.tables[name]).astype(np.int64)
            for name, steps in new.tables.items()
        }
        return replace(new, tables=mixed)

    monkeypatch.setattr(CentralGaussian, "noise", noise)
    assert "the noises of two rounds of 'items' go together" in looked_at("flat", rounds=12)


# ------------------------------------------------------------ off the grid


@pytest.mark.parametrize("mode", ["local-gaussian", "local-laplace", "budgets"])
def test_noise_of_real_numbers(mode, monkeypatch):
    honest = LocalNoise.protect

    def protect(self, update, view, secret):
        sent = honest(self, update, view, secret)
        shaken = np.random.default_rng(secret.number)
        dense = {
            name: (array + shaken.normal(0, 1e-4, array.shape)).astype(np.float32)
            for name, array in sent.dense.items()
        }
        return replace(sent, dense=dense)

    monkeypatch.setattr(LocalNoise, "protect", protect)
    # Of 32 bits, only those of numbers near zero lie off the grid.
    monkeypatch.setattr(f"{__name__}.LAYOUT", LARGE)
    assert "no whole steps of 2^-32" in looked_at(mode)
