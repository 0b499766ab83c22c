"""Fixed-size samples: epsilon is never below that of an exact case, and as small as pairs allow."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm

from hushrec.privacy.accountant import FixedSize, Gaussian, epsilon_of, renyi_epsilon
from hushrec.privacy.fixed_size import _losses

RULE = "replace-one"


def delta_of(uploads, other, size, noise, rounds, epsilon):
    """Integrate the hockey-stick divergence of the sums of a sample, round after round."""
    x = np.linspace(-size - 9 * noise, size + 9 * noise, 400_001 if rounds == 1 else 501)

    def density(numbers):
        sums = [sum(chosen) for chosen in itertools.combinations(numbers, size)]
        return np.mean([norm.pdf(x, at, noise) for at in sums], axis=0)

    here, there = density(uploads), density(other)
    if rounds == 2:
        here, there = np.outer(here, here), np.outer(there, there)
    cell = (x[1] - x[0]) ** rounds
    return float(np.maximum(here - math.exp(epsilon) * there, 0).sum() * cell)


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_no_exact_case_exceeds_it(seed, rounds):
    """Users and replacements of norm 1 at most, drawn at random, and the extreme ones."""
    rng = np.random.default_rng(seed)
    population = int(rng.integers(2, 6))
    size, noise, delta = int(rng.integers(1, population)), float(rng.uniform(2, 5)), 1e-3
    claimed = epsilon_of(Gaussian(noise / 2, FixedSize(size, population), RULE), rounds, delta)
    for extreme in (True, False):
        others = [-1.0] * (population - 1) if extreme else rng.uniform(-1, 1, population - 1)
        mine, replaced = (1.0, -1.0) if extreme else rng.uniform(-1, 1, 2)
        worlds = [mine, *others], [replaced, *others]
        for one, two in (worlds, worlds[::-1]):
            assert delta_of(one, two, size, noise, rounds, claimed) <= delta * (1 + 1e-6)


def test_one_round_is_exact_where_all_others_are_opposite():
    """Nothing smaller would hold: there are data sets that reach it."""
    size, population, noise, delta = 2, 5, 3.0, 1e-3
    claimed = epsilon_of(Gaussian(noise / 2, FixedSize(size, population), RULE), 1, delta)
    one, two = [1.0, -1.0, -1.0, -1.0, -1.0], [-1.0] * 5
    assert delta_of(one, two, size, noise, 1, 0.995 * claimed) > delta


@pytest.mark.parametrize(("multiplier", "share"), [(1.0, 0.01), (0.5, 0.3), (3.0, 1.0)])
def test_the_losses_are_a_pair_of_distributions_with_the_profile_of_the_theorem(multiplier, share):
    """Amplification by sampling: H(1 + share (a - 1)) = share times that of the Gaussian at a."""
    losses = _losses(multiplier, share, 1e-3)
    values = losses._discretization * (losses._lower_loss + np.arange(losses.size))
    assert losses._probs.sum() + losses._infinity_mass == pytest.approx(1, abs=1e-12)
    assert (losses._probs * np.exp(-values)).sum() <= 1 + 1e-9, "so much as the second one has"
    for epsilon in (0.05, 0.2, 1.0):
        inner = 1 + math.expm1(epsilon) / share
        half, at = 0.5 / multiplier, multiplier * math.log(inner)
        exact = share * (norm.cdf(half - at) - inner * norm.cdf(-half - at))
        found = losses.get_delta_for_epsilon(epsilon)
        assert exact * (1 - 1e-9) <= found <= exact * 1.02 + 1e-9
        mirrored = losses.get_delta_for_epsilon(-epsilon)
        assert mirrored == pytest.approx(
            -math.expm1(-epsilon) + math.exp(-epsilon) * found, abs=1e-6
        )


def test_it_is_tighter_than_renyi():
    """DP-PrivRec's 30 of 4800: 3.02 by Rényi DP."""
    event = Gaussian(1.0, FixedSize(30, 4800), RULE)
    tight = epsilon_of(event, 1000, 1e-8)
    assert renyi_epsilon([(event, 1000)], 1e-8) == pytest.approx(3.022, abs=1e-3)
    assert tight == pytest.approx(1.94, abs=0.01)


def test_noise_too_small_for_loss_distributions_still_has_an_epsilon():
    event = Gaussian(0.03, FixedSize(3, 90), RULE)
    assert epsilon_of(event, 10, 1e-5) == renyi_epsilon([(event, 10)], 1e-5)
