"""Intervals cover, tests keep their level, and Holm's steps are right."""

from __future__ import annotations

from itertools import product
from math import comb
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy.stats import norm, rankdata

from hushrec.errors import ConfigError, InputError
from hushrec.evaluation.groups import bootstrap_interval, holm, paired_test

Method = Literal["randomisation", "wilcoxon"]
both = pytest.mark.parametrize("method", ["randomisation", "wilcoxon"])


def test_the_interval_is_that_of_the_normal_theory() -> None:
    values = np.random.default_rng(0).exponential(size=2000)
    low, high = bootstrap_interval(values, resamples=20_000)
    half = 1.95996 * values.std() / np.sqrt(len(values))
    # A 2.5 % quantile of 20,000 resamples has a standard error of about 2 % of sigma.
    assert_allclose([low, high], [values.mean() - half, values.mean() + half], atol=0.06 * half)


def test_the_interval_covers_the_true_mean() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for seed in range(400):
        low, high = bootstrap_interval(rng.random(100), level=0.9, resamples=400, seed=seed)
        covered += low <= 0.5 <= high
    # 360 expected, standard deviation 6.
    assert 335 <= covered <= 385


def test_the_interval_is_deterministic_and_widens_with_the_level() -> None:
    values = np.random.default_rng(2).random(50)
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)
    assert bootstrap_interval(values, seed=3) != bootstrap_interval(values, seed=4)
    narrow, wide = bootstrap_interval(values, level=0.5), bootstrap_interval(values, level=0.99)
    assert wide[0] < narrow[0] < values.mean() < narrow[1] < wide[1]
    assert bootstrap_interval(np.array([0.25])) == (0.25, 0.25)


def test_chunking_covers_every_resample() -> None:
    """More users than a chunk has room for, and a number of resamples that no chunk divides."""
    values = np.random.default_rng(5).random(700_000)
    low, high = bootstrap_interval(values, resamples=7)
    assert abs(low - values.mean()) < 0.003
    assert abs(high - values.mean()) < 0.003


def test_sign_flips_agree_with_the_exact_enumeration() -> None:
    difference = np.array([0.1, 0.2, 0.3, -0.1, 0.0, 0.4, 0.2, 0.1, -0.3, 0.5])
    signs = np.array(list(product([-1, 1], repeat=len(difference))))
    exact = np.mean(np.abs(signs @ difference) >= abs(difference.sum()) - 1e-9)
    found = paired_test(difference, np.zeros(10), resamples=40_000)
    # Four standard errors.
    assert abs(found.p_value - exact) < 4 * np.sqrt(exact * (1 - exact) / 40_000)
    assert found.difference == pytest.approx(0.14)
    assert found.low < 0.14 < found.high
    assert found.n == 10


@both
def test_p_values_are_uniform_where_nothing_differs(method: Method) -> None:
    rng = np.random.default_rng(3)
    pairs = rng.random((400, 2, 40))
    p_values = np.array(
        [
            paired_test(a, b, method=method, resamples=400, seed=i).p_value
            for i, (a, b) in enumerate(pairs)
        ]
    )
    for level in (0.05, 0.25, 0.5, 0.75):
        # Four standard errors, and the steps of 1 / 401 in which p-values come.
        margin = 4 * np.sqrt(level * (1 - level) / len(pairs)) + 0.005
        assert abs(np.mean(p_values <= level) - level) < margin


@both
def test_a_real_shift_is_found_and_has_a_direction(method: Method) -> None:
    rng = np.random.default_rng(4)
    b = rng.random(300)
    a = b + rng.normal(0.05, 0.1, 300)
    better = paired_test(a, b, method=method)
    worse = paired_test(b, a, method=method)
    assert better.p_value < 0.001
    assert worse.p_value < 0.001
    assert 0 < better.low < better.difference < better.high
    assert worse.difference == pytest.approx(-better.difference)


@both
def test_equal_values_are_no_evidence(method: Method) -> None:
    values = np.random.default_rng(6).random(20)
    found = paired_test(values, values, method=method)
    assert (found.difference, found.low, found.high, found.p_value) == (0, 0, 0, 1)


def test_zeros_in_wilcoxon_follow_pratt() -> None:
    """Users without a difference take the lowest ranks, which then are dropped."""
    difference = np.zeros(200)
    difference[:60] = np.random.default_rng(7).normal(0.3, 1, 60)
    kept = np.where(difference == 0, 0, rankdata(np.abs(difference)))
    z = np.sum(np.sign(difference) * kept) / np.sqrt(np.sum(kept**2))
    found = paired_test(difference, np.zeros(200), method="wilcoxon")
    assert found.p_value == pytest.approx(2 * norm.sf(abs(z)))


def test_a_p_value_is_never_zero() -> None:
    assert paired_test(np.ones(500), np.zeros(500), resamples=99).p_value == 1 / 100


def test_sums_equal_on_paper_count_as_equal() -> None:
    """One of ten signs differs: assignments with at most one odd sign are as extreme."""
    ten = np.full(10, 0.1)
    ten[0] = -0.1
    exact = 2 * (comb(10, 0) + comb(10, 1)) / 2**10
    found = paired_test(ten, np.zeros(10), resamples=40_000).p_value
    assert abs(found - exact) < 4 * np.sqrt(exact / 40_000)


def test_input_that_cannot_be_compared_is_refused() -> None:
    with pytest.raises(InputError, match="same users: 3 against 2"):
        paired_test(np.zeros(3), np.zeros(2))
    with pytest.raises(InputError, match="finite"):
        paired_test(np.array([np.nan]), np.zeros(1))
    with pytest.raises(InputError, match="at least one user"):
        bootstrap_interval(np.zeros(0))
    with pytest.raises(ConfigError, match="known: randomisation, wilcoxon"):
        paired_test(np.zeros(2), np.zeros(2), method="t")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="level"):
        bootstrap_interval(np.zeros(2), level=95)
    with pytest.raises(ConfigError, match="resample"):
        bootstrap_interval(np.zeros(2), resamples=0)
    with pytest.raises(InputError, match="between 0 and 1"):
        holm([0.5, float("nan")])


def test_holm_by_hand() -> None:
    # Sorted: 0.005 × 4, 0.01 × 3, 0.03 × 2, 0.04 × 1; the last is lifted to the one before it.
    assert_allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    # 5 × 0.01, 4 × 0.02, 3 × 0.03; the products after that fall, so the largest so far stays.
    assert_allclose(holm([0.01, 0.02, 0.03, 0.04, 0.05]), [0.05, 0.08, 0.09, 0.09, 0.09])
    assert_allclose(holm([0.6, 0.7]), [1, 1])
    assert holm([]).shape == (0,)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_lies_between_nothing_and_bonferroni(p_values: list[float]) -> None:
    p, adjusted = np.array(p_values), holm(p_values)
    assert np.all(adjusted >= p)
    assert np.all(adjusted <= np.minimum(p * len(p), 1))
    assert np.all(np.diff(adjusted[np.argsort(p, kind="stable")]) >= 0)
