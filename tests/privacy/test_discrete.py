"""Discrete noise: the exact law, its twin, whole steps, and nothing for an attack on low bits."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, norm

from hushrec.aggregation import ClientRows, Update, UploadShape
from hushrec.errors import ConfigError
from hushrec.privacy.accountant import Everybody, Gaussian, Grid, discreteness, epsilon_of
from hushrec.privacy.clipping import FlatClip
from hushrec.privacy.discrete import Law, _exp_of_minus, _Uniform, law
from hushrec.privacy.noise import LocalNoise
from hushrec.privacy.protection import Protection
from hushrec.streams import SecretRound, SecretStreams
from hushrec.testing import clients_of

KINDS = ("gaussian", "laplace")
STREAMS = SecretStreams(11)


def weight(kind, scale, k):
    return math.exp(-k * k / (2 * scale**2)) if kind == "gaussian" else math.exp(-abs(k) / scale)


# ------------------------------------------------------------ the law


@pytest.mark.parametrize("kind", KINDS)
def test_small_scales_have_the_exact_law_number_by_number(kind):
    scale, draws = 64, 1_000_000
    drawn = law(kind, scale).draw(STREAMS.words("chi-square", 1), draws)
    reach = 4 * scale if kind == "gaussian" else 8 * scale
    inside = np.bincount(drawn[np.abs(drawn) < reach] + reach, minlength=2 * reach)[1:]
    expected = np.array([weight(kind, scale, k) for k in range(-reach + 1, reach)])
    whole = math.fsum(weight(kind, scale, k) for k in range(-60 * scale, 60 * scale + 1))
    observed = np.append(inside, draws - inside.sum())
    expected = np.append(expected / whole, 1 - expected.sum() / whole) * draws
    assert chisquare(observed, expected).pvalue > 1e-3


@pytest.mark.parametrize("scale", [2**20 + 7, 2**32, 3 * 2**38 + 1])
@pytest.mark.parametrize("kind", KINDS)
def test_large_scales_have_the_law_variance_and_tails(kind, scale):
    draws = 1_000_000
    drawn = law(kind, scale).draw(STREAMS.words("large", 1), draws)
    numbers = drawn / scale
    # 200 cells of equal probability under the continuous law, from which it is 1 / scale² away.
    share = np.linspace(0, 1, 201)[1:-1]
    if kind == "gaussian":
        edges, variance, kurtosis = norm.ppf(share), 1.0, 2.0
    else:
        edges = -np.sign(share - 0.5) * np.log1p(-2 * np.abs(share - 0.5))
        variance, kurtosis = 2.0, 20.0
    counts = np.bincount(np.searchsorted(edges, numbers), minlength=200)
    assert chisquare(counts).pvalue > 1e-3
    # The variance of a sample's variance is (kurtosis) / n, and 4 deviations of it are allowed.
    assert numbers.var() == pytest.approx(variance, abs=4 * math.sqrt(kurtosis / draws))
    for reach in (3, 4, 5, 6):
        tail = 2 * norm.sf(reach) if kind == "gaussian" else math.exp(-reach)
        found, expected = int((np.abs(numbers) > reach).sum()), draws * tail
        assert abs(found - expected) <= 5 * math.sqrt(expected) + 2
    low_bits = np.bincount(drawn & 15, minlength=16)
    assert chisquare(low_bits).pvalue > 1e-3, "the lowest bits are uniform"
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 5e-3


def test_tails_go_on_beyond_the_table():
    """A uniform number next to one chooses a block that no table holds."""
    far = Law("gaussian", 2**20)
    words = iter([2**64 - 1, 2**64 - 1, 0, 7, 0])
    drawn = far.exactly(lambda: next(words))
    assert drawn > 9 * 2**20


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(KINDS), st.integers(64, 2**50), st.integers(0, 2**32))
def test_the_kernel_draws_what_the_exact_twin_draws(kind, scale, seed):
    drawn = Law(kind, scale).draw(SecretStreams(seed).words("twin", 1), 40)
    words = iter(SecretStreams(seed).words("twin", 1).take(1000).tolist())
    assert [Law(kind, scale).exactly(lambda: next(words)) for _ in range(40)] == drawn.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_where_the_kernel_cannot_decide_the_twin_does(kind, monkeypatch):
    """With a table that leaves everything in doubt, the numbers are the same."""
    expected = law(kind, 2**32).draw(STREAMS.words("doubt", 1), 30)
    doubtful = Law(kind, 2**32)
    thresholds, guide = doubtful._table
    doubtful.__dict__["_table"] = (thresholds[:0], np.zeros_like(guide))
    np.testing.assert_array_equal(doubtful.draw(STREAMS.words("doubt", 1), 30), expected)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**64 - 1), st.fractions(0, 3))
def test_comparisons_are_exact(word, exponent):
    """A uniform number that starts as exp(-x) does is told apart by its later bits."""
    low, _ = _exp_of_minus(exponent, 60)
    leading = min(int(low * 2**64), 2**64 - 1)
    for later, below in ((0, True), (2**64 - 1, False)):
        words = iter([later] * 3)
        found = _Uniform(leading, 64, lambda words=words: next(words)).is_below(
            lambda digits: _exp_of_minus(exponent, digits)
        )
        assert found is (below or not exponent), "exp(0) is one, and everything is below it"


def test_the_same_stream_gives_the_same_numbers_however_it_is_cut(monkeypatch):
    whole = law("gaussian", 2**30).draw(STREAMS.words("cut", 1), 5000)
    monkeypatch.setattr("hushrec.privacy.discrete.BATCH", 17)
    np.testing.assert_array_equal(law("gaussian", 2**30).draw(STREAMS.words("cut", 1), 5000), whole)


@pytest.mark.parametrize("scale", [63, 2**56])
def test_noise_that_does_not_fit_the_grid_is_refused(scale):
    with pytest.raises(ConfigError, match="does not fit the sums' grid"):
        Law("gaussian", scale)


# ------------------------------------------------------------ what discreteness costs


def exact_delta(scale, shift, epsilon):
    """Delta of one discrete Gaussian against its shift, number by number."""
    ks = np.arange(-12 * scale - shift, 12 * scale + shift + 1)
    one, other = (np.exp(-((ks - c) ** 2) / (2 * scale**2)) for c in (0, shift))
    return float(np.maximum(one / one.sum() - math.exp(epsilon) * other / other.sum(), 0).sum())


@pytest.mark.parametrize(("scale", "shift"), [(500, 400), (2000, 1000), (2000, 4000)])
def test_the_bound_of_discreteness_holds_and_is_small(scale, shift):
    delta = 1e-5
    event = Gaussian(scale / shift, Everybody(), "zero-out-one")
    claimed = epsilon_of(event, 1, delta * 0.999)
    claimed += discreteness([(Grid(scale, 1), 1)], claimed, delta)
    assert claimed < 1.001 * epsilon_of(event, 1, delta) + 1e-4
    assert exact_delta(scale, shift, claimed) <= delta


@given(st.integers(30, 3000), st.integers(-40_000, 40_000))
def test_rounded_and_discrete_noise_are_as_likely_as_the_lemma_says(scale, k):
    """Exp(-1 / 8 s²) <= P(rounded = k) / P(discrete = k) <= exp(k² / 8 s⁴)."""
    if abs(k) > 8 * scale:
        k %= 8 * scale
    u = (np.arange(20_000) + 0.5) / 20_000 - 0.5  # the middle of each cell of (-1/2, 1/2)
    ratio = np.exp(-(2 * k * u + u**2) / (2 * scale**2)).mean()
    assert -1 / (8 * scale**2) - 1e-12 <= math.log(ratio) <= k**2 / (8 * scale**4) + 1e-12


def test_a_grid_that_is_too_coarse_gives_no_epsilon():
    fine = Gaussian(1.0, Everybody(), "zero-out-one", Grid(2.0**30, 10**6))
    coarse = Gaussian(1.0, Everybody(), "zero-out-one", Grid(2.0**10, 10**6))
    assert epsilon_of(fine, 10, 1e-5) == pytest.approx(
        epsilon_of(Gaussian(1.0, Everybody(), "zero-out-one"), 10, 1e-5), rel=1e-3
    )
    assert math.isinf(epsilon_of(coarse, 10, 1e-5))


# ------------------------------------------------------------ the attack on low bits

UPLOADS = 10_000


def uploads(kind, value, purpose):
    """Send one number, which clipping leaves alone, from many devices."""
    clip = FlatClip(1.0, 1 if kind == "laplace" else 2)
    noise = LocalNoise(kind, 0.25 if kind == "laplace" else 2.0, UploadShape(3, {"items": 1}, {}))
    view = clients_of([[0]] * UPLOADS, 3)
    rows = np.full((UPLOADS, 1), value, np.float32)
    table = ClientRows(np.arange(UPLOADS + 1), np.zeros(UPLOADS, np.int32), rows)
    secret = SecretRound(1, SecretStreams(purpose))
    sent = Protection((clip, noise)).protect(Update(UPLOADS, {"items": table}), view, secret)
    return sent.dense["items"][:, 0, 0]


def floating(kind, value, purpose):
    """The control: floating-point noise on a floating-point number, as one would write it."""
    generator = np.random.default_rng(purpose)
    noise = (
        generator.laplace(0, 0.25, UPLOADS)
        if kind == "laplace"
        else (generator.normal(0, 2.0, UPLOADS))
    )
    return (np.float32(value) + noise.astype(np.float32)).astype(np.float32)


def oddities(sent):
    """Say for each number what only its bits show: an attacker's tests, each true or false."""
    bits = sent.view(np.uint32)
    values, counts = np.unique(sent, return_counts=True)
    tests = [counts[np.searchsorted(values, sent)] > 1]
    # Whether it is a whole multiple of 2^-n: what is added to a third has the third's lowest bit.
    tests += [np.modf(sent.astype(np.float64) * 2.0**n)[0] != 0 for n in range(16, 40)]
    tests += [(bits >> shift) & 1 == 1 for shift in range(24)]
    tests += [bits & ((1 << n) - 1) == 0 for n in range(1, 12)]
    return tests + [~test for test in tests]


@pytest.mark.parametrize("kind", KINDS)
def test_low_bits_do_not_tell_neighbours_apart(kind):
    """Two uploads, one of many bits and one of few: tests of bits see no more than is claimed.

    The claim for uploads a third apart: epsilon 4/3 with Laplace noise of scale 1/4; with Gaussian
    noise of deviation 2, epsilon 1 at a delta of 10^-12.
    """
    allowed = math.exp(4 / 3 if kind == "laplace" else 1.0)

    def worst(send):
        """Return by how many deviations a test exceeds the claim."""
        found = -math.inf
        for one, other in ((0.0, 1 / 3), (1e-9, 0.3)):
            samples = [send(kind, value, number) for number, value in enumerate((one, other))]
            for a, b in zip(*map(oddities, samples), strict=True):
                for p, q in ((a.mean(), b.mean()), (b.mean(), a.mean())):
                    variance = p * (1 - p) + allowed**2 * q * (1 - q) + 1 / UPLOADS
                    found = max(found, (p - allowed * q) / math.sqrt(variance / UPLOADS))
        return found

    assert worst(floating) > 10, "the attack works on floating-point noise"
    assert worst(uploads) < 4


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent_is_a_whole_number_of_steps(kind):
    for value in (0.0, 1e-9, 1 / 3, -0.77):
        steps = uploads(kind, value, 5).astype(np.float64) * 2.0**32
        np.testing.assert_array_equal(steps, np.rint(steps))


def test_fractions_are_what_the_table_rounds():
    """The thresholds are the floors of the exact cumulative shares."""
    thresholds, _ = law("gaussian", 1000)._table
    for block in (0, 1, 5, 30):
        low, high = law("gaussian", 1000)._share(block, 50)
        assert Fraction(int(thresholds[block]), 2**64) <= low
        assert high < Fraction(int(thresholds[block]) + 1, 2**64)
