"""Canaries: an honest mechanism is never caught, one with too little noise always is."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binomtest

from hushrec.aggregation import UploadShape
from hushrec.api import train
from hushrec.audit.canary import (
    CERTAIN,
    NoisedRound,
    Trials,
    canaries,
    clopper_pearson,
    gaussian_bound,
    lower_bound,
    most_provable,
    noised_rounds,
)
from hushrec.audit.membership import guessing_bound
from hushrec.data.splitting import SplitConfig, make_split
from hushrec.data.views import CohortConfig
from hushrec.federation.experiment import ExperimentRequest
from hushrec.federation.setup import make_task, set_up
from hushrec.privacy import clipping as clip_module
from hushrec.privacy import noise as noise_module
from hushrec.privacy.accountant import Everybody, Gaussian, epsilon_of
from hushrec.privacy.calibration import make_plan
from hushrec.privacy.clipping import BIT
from hushrec.privacy.config import PrivacyConfig
from hushrec.privacy.noise import CentralGaussian
from hushrec.privacy.plan import Schedule
from hushrec.streams import SecretStreams, Streams

CENTRAL = {
    "privacy.mode": "central",
    "privacy.noise_seed": 0,
    "privacy.epsilon": 1.5,
    "privacy.delta": 1e-3,
}
LOCAL = {"privacy.clip": 0.5, "privacy.epsilon": 1.5, "privacy.delta": 1e-3}
MODES = {
    "central flat": {**CENTRAL, "privacy.clip": 0.5},
    "central adaptive": CENTRAL,
    "central row": {**CENTRAL, "privacy.clip": 0.5, "privacy.clipping": "row"},
    "central replace-one": {**CENTRAL, "privacy.neighbours": "replace-one"},
    "central poisson": {**CENTRAL, "cohort.kind": "poisson", "cohort.probability": 0.3},
    "central fixed": {**CENTRAL, "cohort.kind": "fixed", "cohort.size": 9},
    "local gaussian": {**LOCAL, "privacy.mode": "local-gaussian", "privacy.noise_seed": 0},
    "local laplace": {**LOCAL, "privacy.mode": "local-laplace", "privacy.noise_seed": 0},
    "budgets": {
        "privacy.mode": "local-gaussian",
        "privacy.noise_seed": 0,
        "privacy.clip": 0.5,
        "privacy.budgets": "activity",
        "privacy.epsilon_min": 0.5,
        "privacy.epsilon_max": 2.0,
        "privacy.delta": 1e-3,
    },
}
ROUNDS = 3


def plan_of(data, mode, method="fedmf", **options):
    settings = {"d": 4, **options, **MODES[mode]}
    if mode == "central fixed":  # for methods that keep nothing private
        method, settings = "popularity", MODES[mode]
    experiment = ExperimentRequest(
        "tiny", method, settings=settings, rounds=ROUNDS, seed=2
    ).experiment()
    return staged(experiment, make_split(data, SplitConfig(), Streams(2)))


def staged(experiment, split, shared=None):
    """Return the plan of an experiment and its rounds, with the layouts that they have."""
    plan = set_up(experiment, split).plan
    task = make_task(experiment, split, plan.protection)
    return plan, noised_rounds(task, plan, shared or task.initial)


def run_canaries(plan, stages, seed, trials=4000):
    claimed = plan.statement([], 0).epsilon if plan.budgets is None else math.nan
    return canaries(plan, stages, claimed, trials, Streams(seed), lambda done, total: None)


def weaken(monkeypatch, factor):
    """Draw less noise than was planned, everywhere."""
    planned = noise_module.steps_of
    monkeypatch.setattr(noise_module, "steps_of", lambda scale: planned(factor * scale))


@pytest.mark.parametrize("mode", MODES)
def test_an_honest_mechanism_is_not_caught(mode, tiny):
    plan, stages = plan_of(tiny, mode)
    strongest = 0.0
    for seed in range(6):
        for result in run_canaries(plan, stages, seed):
            assert not result["contradicted"], (seed, result)
            assert result["lower_bound"] <= result["claimed_epsilon"]
            assert result["rounds"] == ROUNDS
            best = max(result["lower_bound"], result["gaussian_lower_bound"] or 0)
            strongest = max(strongest, best / result["claimed_epsilon"])
    # Amplification by sampling hides far more from one attacker than its proof can claim.
    assert strongest > (0.01 if mode in ("central poisson", "central fixed") else 0.3), "blind"


@pytest.mark.parametrize("mode", MODES)
def test_too_little_noise_is_caught(mode, tiny, monkeypatch):
    plan, stages = plan_of(tiny, mode)
    weaken(monkeypatch, 0.3)
    for result in run_canaries(plan, stages, 0, trials=20_000):
        assert result["contradicted"], result
        assert result["lower_bound"] > result["claimed_epsilon"]


def test_a_schedule_is_composed_over_its_uploads(tiny):
    plan, stages = plan_of(tiny, "central flat", "fedrkg", interval=2)
    (result,) = run_canaries(plan, stages, 0)
    assert result["rounds"] == 1
    assert 0 < result["gaussian_lower_bound"] < result["claimed_epsilon"] * 1.2


def test_same_seed_same_result(tiny):
    plan, stages = plan_of(tiny, "central poisson")
    once = run_canaries(plan, stages, 3)
    assert once == run_canaries(plan, stages, 3) != run_canaries(plan, stages, 4)


# ------------------------------------------------------------ every array of the layout

LAYOUT = UploadShape(30, {"items": 3}, {"head": (4, 5), "bias": ()}, {"pairs": (25, 1)})


def laid_out(rounds=2, **asked):
    """Plan two rounds of uploads with arrays of every kind."""
    config = PrivacyConfig(**{"mode": "central", "epsilon": 1.5, "delta": 1e-3, **asked})
    shape = LAYOUT
    if config.mode != "central":
        shape = replace(LAYOUT, spaces={})
    plan = make_plan(config, CohortConfig(), Schedule(shape, rounds), 50)
    return plan, [NoisedRound(number, plan.protection) for number in range(1, rounds + 1)]


def caught(plan, stages, trials=4000):
    """Say which canaries find a larger epsilon than is claimed."""
    found = run_canaries(plan, stages, 0, trials)
    assert {one["where"] for one in found} >= {"items", "head", "bias", "all arrays"}
    return {one["where"] for one in found if one["contradicted"]}


WAYS = {"flat": {"clip": 0.5}, "adaptive": {}, "row": {"clip": 0.5, "clipping": "row"}}


@pytest.mark.parametrize("way", WAYS)
def test_honest_noise_on_every_array(way):
    assert caught(*laid_out(**WAYS[way])) == set()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "arrays"), [("dense", {"head", "bias"}), ("spaces", {"pairs"})])
def test_a_canary_finds_the_array_without_noise(way, kind, arrays, monkeypatch):
    honest = CentralGaussian.noise

    def noise(self, secret, part=1.0):
        added = honest(self, secret, part)
        kept = {
            name: steps if name == BIT else np.zeros_like(steps)
            for name, steps in getattr(added, kind).items()
        }
        return replace(added, **{kind: kept})

    monkeypatch.setattr(CentralGaussian, "noise", noise)
    assert caught(*laid_out(**WAYS[way])) - {"all arrays"} == arrays


@pytest.mark.parametrize("rounds", [2, 4])
@pytest.mark.parametrize("mode", ["central", "local-gaussian", "local-laplace"])
def test_noise_that_repeats_itself_cancels_for_the_attacker(mode, rounds, monkeypatch):
    honest = SecretStreams.words
    monkeypatch.setattr(
        SecretStreams,
        "words",
        lambda self, purpose, number, user=-1: honest(self, purpose, 1, user),
    )
    found = caught(*laid_out(rounds, mode=mode, clip=0.5))
    assert found >= {"items", "head", "bias", "all arrays"}


def test_a_dense_array_that_is_not_clipped(monkeypatch):
    """A canary asks for twice the bound; what it gets of that shows."""
    honest = clip_module._scaled
    monkeypatch.setattr(
        clip_module,
        "_scaled",
        lambda update, factors: replace(honest(update, factors), dense=update.dense),
    )
    assert {"head", "bias"} <= caught(*laid_out(clip=0.5, clipping="flat"), trials=10_000)


@pytest.mark.parametrize("method", ["fednext", "fedease", "fedals"])
def test_layouts_that_follow_from_what_was_released(method, small):
    run = train(small, method, settings=CENTRAL, seed=2)
    plan, stages = staged(run.experiment, run.split, run.model.shared)
    layouts = [stage.shape.whole for stage in stages]
    assert len(layouts) == plan.rounds
    assert layouts[0] == {"counts": (60, 1)}
    head = int(run.model.shared["head"].sum())
    assert layouts[1] == ({"items": (60, 16)} if method == "fedals" else {"pairs": (head**2, 1)})
    (result,) = run_canaries(plan, stages, 0)
    assert not result["contradicted"]


# ------------------------------------------------------------ the bounds themselves


@pytest.mark.parametrize(("hits", "n"), [(0, 50), (1, 50), (17, 50), (50, 50)])
def test_clopper_pearson(hits, n):
    exact = binomtest(hits, n).proportion_ci(0.95, method="exact")
    low, high = clopper_pearson(np.array([hits]), n, 0.95)
    assert low[0] == pytest.approx(exact.low, abs=1e-12)
    assert high[0] == pytest.approx(exact.high)


@pytest.mark.parametrize("mu", [0.5, 1.0, 2.5])
def test_bounds_hold_and_come_close(mu):
    """Two Gaussians mu apart: the true epsilon is known, and is exceeded rarely enough."""
    truth = epsilon_of(Gaussian(1 / mu, Everybody(), "replace-one"), 1, 1e-3)
    over, close = 0, []
    for seed in range(60):
        generator = np.random.default_rng(seed)
        trials = Trials(generator.normal(mu, 1, 20_000), generator.normal(0, 1, 20_000))
        over += lower_bound(trials, 1e-3, 0.95)[0] > truth
        sharper = gaussian_bound(trials, 1e-3, 0.95)
        over += sharper > truth
        close.append(sharper / truth)
        assert lower_bound(trials, 1e-3, CERTAIN)[0] <= truth
        assert gaussian_bound(trials, 1e-3, CERTAIN) <= truth
    assert over <= 9, "two bounds, sixty times: 6 at most are expected"
    assert np.mean(close) > 0.8


def test_no_trial_proves_more_than_all_of_them_can():
    sure = Trials(np.full(2000, 9.0), np.zeros(2000))
    assert lower_bound(sure, 0.0, 0.95)[0] == pytest.approx(most_provable(4000, 0.0))
    nothing = Trials(np.zeros(2000), np.zeros(2000))
    assert lower_bound(nothing, 0.0, 0.95)[0] == 0
    assert gaussian_bound(nothing, 1e-5, 0.95) == 0


@pytest.mark.parametrize(("factor", "false"), [(1.0, False), (0.3, True)])
def test_rounds_of_unequal_shares(factor, false, small, monkeypatch):
    """FedNext under noise spends little on counts and the rest on pairs."""
    run = train(small, "fednext", settings=CENTRAL, seed=2)
    plan, stages = staged(run.experiment, run.split, run.model.shared)
    weaken(monkeypatch, factor)
    (found,) = run_canaries(plan, stages, 0)
    assert found["contradicted"] == false


# ------------------------------------------------------------ guesses in one run


def test_guesses_prove_what_they_can():
    """Known from the paper's own table: all of r guesses right, without delta."""
    for guesses in (10, 100, 1000):
        # All right has probability p^r; at 95 % p is at least 0.05^(1 / r).
        p = 0.05 ** (1 / guesses)
        found = guessing_bound(guesses, guesses, guesses, 0.0, 0.95)
        assert found == pytest.approx(math.log(p / (1 - p)), abs=1e-3)
    assert guessing_bound(50, 100, 100, 0.0, 0.95) == 0
    assert guessing_bound(0, 0, 100, 1e-5, 0.95) == 0
    once, twice = (guessing_bound(90, 100, 100, 0.0, 0.95, apart) for apart in (1, 2))
    assert twice == pytest.approx(once / 2, abs=1e-3), "two steps between neighbours"
    assert guessing_bound(90, 100, 1000, 1e-4, 0.95) < guessing_bound(90, 100, 1000, 0.0, 0.95)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_the_bound_from_guesses_holds(epsilon):
    """Randomised response tells every coin with as much certainty as epsilon allows."""
    p, over = 1 / (1 + math.exp(-epsilon)), 0
    for seed in range(40):
        right = np.random.default_rng(seed).binomial(400, p)
        over += guessing_bound(right, 400, 400, 0.0, 0.95) > epsilon
        assert guessing_bound(right, 400, 400, 0.0, CERTAIN) <= epsilon
    assert over <= 6, "two are expected"
