"""Canaries: an honest mechanism is never caught, one with too little noise always is."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from hushrec.audit.canary import (
    CERTAIN,
    Trials,
    _clopper_pearson,
    canaries,
    gaussian_bound,
    lower_bound,
    most_provable,
)
from hushrec.config import make_experiment
from hushrec.prepare import plan_privacy
from hushrec.privacy import noise as noise_module
from hushrec.privacy.accountant import Everybody, Gaussian, epsilon_of
from hushrec.privacy.noise import CentralGaussian
from hushrec.rng import Streams
from hushrec.split import SplitConfig, make_split

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
    experiment = make_experiment("tiny", method, settings=settings, rounds=ROUNDS, seed=2)
    return plan_privacy(experiment, make_split(data, SplitConfig(), Streams(2)))


def run_canaries(plan, seed, trials=4000):
    claimed = plan.statement([], 0)["epsilon"] if plan.budgets is None else math.nan
    return canaries(plan, claimed, trials, Streams(seed), lambda done, total: None)


def weaken(monkeypatch, factor):
    """Draw less noise than was planned, everywhere."""
    deviation = CentralGaussian.noise_std
    monkeypatch.setattr(
        CentralGaussian, "noise_std", lambda self, number=1: factor * deviation(self, number)
    )
    for name in ("laplace_noise", "gaussian_noise"):
        draw = getattr(noise_module, name)
        weaker = lambda *a, draw=draw: np.float32(factor) * draw(*a)  # noqa: E731
        monkeypatch.setattr(noise_module, name, weaker)


@pytest.mark.parametrize("mode", MODES)
def test_an_honest_mechanism_is_not_caught(mode, tiny):
    plan = plan_of(tiny, mode)
    strongest = 0.0
    for seed in range(6):
        for result in run_canaries(plan, seed):
            assert not result["contradicted"], (seed, result)
            assert result["lower_bound"] <= result["claimed_epsilon"]
            assert result["rounds"] == ROUNDS
            best = max(result["lower_bound"], result["gaussian_lower_bound"] or 0)
            strongest = max(strongest, best / result["claimed_epsilon"])
    # Amplification by sampling hides far more from one attacker than its proof can claim.
    assert strongest > (0.01 if mode in ("central poisson", "central fixed") else 0.3), "blind"


@pytest.mark.parametrize("mode", MODES)
def test_too_little_noise_is_caught(mode, tiny, monkeypatch):
    plan = plan_of(tiny, mode)
    # With 0.3 of its noise a fixed-size cohort is NOT caught: bound 1.43, claim 1.50. The
    # likely cause, not studied, is that its Rényi analysis is loose.
    weaken(monkeypatch, 0.2 if mode == "central fixed" else 0.3)
    for result in run_canaries(plan, 0, trials=20_000):
        assert result["contradicted"], result
        assert result["lower_bound"] > result["claimed_epsilon"]


def test_a_schedule_is_composed_over_its_uploads(tiny):
    plan = plan_of(tiny, "central flat", "fedrkg", interval=2)
    (result,) = run_canaries(plan, 0)
    assert result["rounds"] == 1
    assert 0 < result["gaussian_lower_bound"] < result["claimed_epsilon"] * 1.2


def test_same_seed_same_result(tiny):
    plan = plan_of(tiny, "central poisson")
    assert run_canaries(plan, 3) == run_canaries(plan, 3) != run_canaries(plan, 4)


# ------------------------------------------------------------ the bounds themselves


@pytest.mark.parametrize(("hits", "n"), [(0, 50), (1, 50), (17, 50), (50, 50)])
def test_clopper_pearson(hits, n):
    exact = binomtest(hits, n).proportion_ci(0.95, method="exact")
    low, high = _clopper_pearson(np.array([hits]), n, 0.95)
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


@pytest.mark.parametrize(("factor", "caught"), [(1.0, False), (0.3, True)])
def test_rounds_of_unequal_shares(factor, caught, small, monkeypatch):
    """FedNext under noise spends little on counts and the rest on pairs."""
    experiment = make_experiment("small", "fednext", settings=CENTRAL, seed=2)
    plan = plan_privacy(experiment, make_split(small, SplitConfig(), Streams(2)))
    weaken(monkeypatch, factor)
    (found,) = run_canaries(plan, 0)
    assert found["contradicted"] == caught
