"""Clipping and noise: bounds, exact scales, twins of the kernels, and a test by statistics."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import beta, kstest

from hushrec.aggregation import ClientRows, ExactSum, KeyedRows, Update
from hushrec.errors import ConfigError
from hushrec.privacy.accountant import Everybody, Gaussian, epsilon_of
from hushrec.privacy.clipping import BIT, AdaptiveClip, FlatClip, RowClip, client_norms
from hushrec.privacy.discrete import law
from hushrec.privacy.noise import CentralGaussian, LocalNoise
from hushrec.privacy.protection import Protection, UploadShape
from hushrec.streams import SecretRound, SecretStreams
from hushrec.testing import MechanismContract, clients_of

ADD, REPLACE = "zero-out-one", "replace-one"


class TestFlatClip(MechanismContract):
    hides_support = False

    def make(self, shape):
        return FlatClip(1.0)


class TestRowClip(MechanismContract):
    hides_support = False

    def make(self, shape):
        return RowClip(0.5)


class TestCentralGaussian(MechanismContract):
    def make(self, shape):
        return CentralGaussian(FlatClip(1.0), 1.5, ADD, shape, 7.0)


class TestCentralGaussianAdaptive(MechanismContract):
    def make(self, shape):
        return CentralGaussian(AdaptiveClip(1.0, 0.5, 0.2, 3.0), 1.5, REPLACE, shape, 7.0)


class TestLocalLaplace(MechanismContract):
    covers_spaces = False

    def make(self, shape):
        return LocalNoise("laplace", 0.3, shape)


class TestLocalGaussian(MechanismContract):
    covers_spaces = False

    def make(self, shape):
        return LocalNoise("gaussian", 0.3, shape)


# ------------------------------------------------------------ clipping

NUMBERS = st.floats(-1e4, 1e4, width=32)


@st.composite
def uploads(draw_value):
    counts = draw_value(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    entries = sum(counts)
    rows = draw_value(arrays(np.float32, (entries, 3), elements=NUMBERS))
    head = draw_value(arrays(np.float32, (len(counts), 2), elements=NUMBERS))
    ids = np.concatenate([np.arange(n) for n in counts]).astype(np.int32)
    stack = ClientRows(np.cumsum([0, *counts]), ids, rows)
    return Update(len(counts), rows={"items": stack}, dense={"head": head})


def whole(update):
    """Each client's upload as one long vector."""
    stack = update.rows["items"]
    return [
        np.concatenate(
            [stack.rows[stack.indptr[c] : stack.indptr[c + 1]].ravel(), update.dense["head"][c]]
        ).astype(np.float64)
        for c in range(update.clients)
    ]


def whole_steps(values):
    """Say whether all of these are whole numbers of 2^-32."""
    return bool((values * 2.0**32 == np.rint(values * 2.0**32)).all())


@given(uploads(), st.floats(0.01, 100), st.sampled_from([1, 2]))
def test_flat_clipping(update, bound, power):
    clipped = FlatClip(bound, power).protect(update, None, None)
    for before, after in zip(whole(update), whole(clipped), strict=True):
        norm = np.linalg.norm(before, power)
        assert np.linalg.norm(after, power) <= bound, "never above the bound"
        kept = before if norm <= bound * (1 - 1e-6) else before * bound / max(norm, bound)
        # Within a step of 2^-32: cut off, never rounded up.
        np.testing.assert_allclose(after, kept, rtol=1e-5, atol=2.0**-32)
        assert whole_steps(after)


@given(uploads(), st.floats(0.01, 100), st.sampled_from([1, 2]))
def test_row_clipping(update, bound, power):
    clipped = RowClip(bound, power).protect(update, None, None)
    shape = UploadShape(4, {"items": 3}, {"head": (2,)})
    pairs = [
        (update.rows["items"].rows, clipped.rows["items"].rows),
        (update.dense["head"], clipped.dense["head"]),
    ]
    for before, after in pairs:
        for old, new in zip(before.astype(float), after.astype(float), strict=True):
            norm = np.linalg.norm(old, power)
            assert np.linalg.norm(new, power) <= bound
            kept = old if norm <= bound * (1 - 1e-6) else old * bound / max(norm, bound)
            np.testing.assert_allclose(new, kept, rtol=1e-5, atol=2.0**-32)
            assert whole_steps(new)
    largest = max(np.linalg.norm(vector, power) for vector in whole(clipped))
    assert largest <= RowClip(bound, power).whole_bound(shape)


def test_norms_run_over_everything_a_client_uploads():
    stack = ClientRows(np.array([0, 1, 1]), np.array([2], np.int32), np.array([[3.0]], np.float32))
    update = Update(2, rows={"a": stack, "b": stack}, dense={"c": np.array([[[1.0]], [[-2.0]]])})
    np.testing.assert_allclose(client_norms(update, 2), [math.sqrt(19), 2])
    np.testing.assert_allclose(client_norms(update, 1), [7, 2])


# ------------------------------------------------------------ adaptive clipping


def one_round(mechanism, norms, number, seed=0):
    """Let clients with these norms upload one number each."""
    summed = ExactSum(1)
    update = Update(len(norms), dense={"head": norms[:, None]})
    secret = SecretRound(number, SecretStreams(seed))
    summed.add(mechanism.protect(update, None, secret))
    return finished(mechanism, summed, secret)


def finished(mechanism, summed, secret):
    """Noise a sum and undo the server's side."""
    summed.add_steps(mechanism.noise(secret))
    return mechanism.finish(summed.total(), secret)


HEAD = UploadShape(1, {}, {"head": (1,)})


@pytest.mark.parametrize("start", [0.01, 300.0])
@pytest.mark.parametrize("quantile", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("bit_noise", [1e-6, 25.0])
def test_the_bound_converges_to_the_quantile(start, quantile, bit_noise):
    norms = np.random.default_rng(1).lognormal(1.0, 1.0, 500)
    clip = AdaptiveClip(start, quantile, 0.2, bit_noise)
    mechanism, late = CentralGaussian(clip, 1.0, ADD, HEAD, 500.0), []
    for number in range(1, 301):
        _, mechanism = one_round(mechanism, norms, number)
        if number > 200:
            late.append(mechanism.clip.bound)
    reached = np.mean(norms <= np.exp(np.mean(np.log(late))))
    assert reached == pytest.approx(quantile, abs=0.02)
    assert min(late) > 0


def test_order_and_scale_of_adaptive_clipping():
    """Bits before clipping; noise with this round's bound; only then the bound moves."""
    norms = np.array([0.5, 1.0, 2.0, 8.0])
    clip = AdaptiveClip(2.0, 0.5, 0.2, 1e-6)
    mechanism = CentralGaussian(clip, 3.0, REPLACE, HEAD, 4.0)
    sent = mechanism.protect(
        Update(4, dense={"head": norms[:, None]}), None, SecretRound(1, SecretStreams(0))
    )
    np.testing.assert_array_equal(sent.dense[BIT], [0.5, 0.5, 0.5, -0.5])
    np.testing.assert_allclose(sent.dense["head"][:, 0], [0.5, 1.0, 2.0, 2.0], rtol=1e-6)
    assert sent.nbytes == 4 * (4 + 4), "the bit travels too"
    total, following = one_round(mechanism, norms, 1)
    # Sensitivity 2 * 2.0 under replace-one, times the multiplier: 12, not what the new bound gives.
    drawn = law("gaussian", 12 * 2**32).draw(SecretStreams(0).words("privacy/sum/head", 1), 1)
    np.testing.assert_allclose(total.dense["head"], 5.5 + drawn / 2**32, rtol=1e-6)
    assert total.dense.keys() == {"head"}, "the method does not see the bits"
    assert following.clip.bound == pytest.approx(2.0 * math.exp(-0.2 * (0.75 - 0.5)))
    assert mechanism.clip.bound == 2.0


@pytest.mark.parametrize("start", [0.5, 30.0])
def test_the_bound_of_dp_privrec_converges_and_stays_positive(start):
    """Equation 9 moves the bound by differences; from above, from below, and under much noise."""
    norms = np.random.default_rng(1).lognormal(1.0, 1.0, 500)
    clip = AdaptiveClip(start, 0.7, 1.0, 25.0, arithmetic=True)
    mechanism, late = CentralGaussian(clip, 1.0, REPLACE, HEAD, 500.0), []
    for number in range(1, 301):
        _, mechanism = one_round(mechanism, norms, number)
        if number > 200:
            late.append(mechanism.clip.bound)
    assert np.mean(norms <= np.mean(late)) == pytest.approx(0.7, abs=0.02)
    falling = AdaptiveClip(0.1, 0.1, 40.0, 1e-6, arithmetic=True)
    _, following = one_round(CentralGaussian(falling, 1.0, REPLACE, HEAD, 2.0), np.full(2, 0.01), 1)
    assert following.clip.bound == 0.05  # 0.1 - 40 * (1 - 0.1) would be far below zero
    stopped = CentralGaussian(replace(falling, least=0.07), 1.0, REPLACE, HEAD, 2.0)
    assert one_round(stopped, np.full(2, 0.01), 1)[1].clip.bound == 0.07


def test_an_upload_of_zeros_adds_no_bit():
    sent = AdaptiveClip(2.0, 0.5, 0.2, 1.0).protect(
        Update(2, dense={"head": np.array([[0.0], [1.0]])}), None, None
    )
    np.testing.assert_array_equal(sent.dense[BIT], [0.0, 0.5])


def test_nobody_came_and_the_bound_still_moves_by_its_noise_alone():
    clip = AdaptiveClip(2.0, 0.5, 0.2, 4.0)
    mechanism = CentralGaussian(clip, 1.0, ADD, HEAD, 20.0)
    total, following = finished(mechanism, ExactSum(1), SecretRound(7, SecretStreams(3)))
    drawn = law("gaussian", 4 * 2**32).draw(SecretStreams(3).words("privacy/bits", 7), 1)
    noise = float(drawn[0]) / 2**32
    assert following.clip.bound == pytest.approx(2.0 * math.exp(-0.2 * noise / 20))
    assert total.clients == 20.0
    assert total.dense["head"].shape == (1,)


# ------------------------------------------------------------ central noise

SHAPE = UploadShape(400, {"items": 50}, {"head": (30, 40)})


@pytest.mark.parametrize(("neighbours", "std"), [(ADD, 1.5), (REPLACE, 3.0)])
def test_central_noise_covers_every_entry_with_the_exact_deviation(neighbours, std):
    mechanism = CentralGaussian(FlatClip(0.5), 3.0, neighbours, SHAPE, 12.5)

    def released(number):
        rows = np.full((2, 50), 1000.0, np.float32)
        summed = ExactSum(400)
        table = ClientRows(np.array([0, 1, 2]), np.array([3, 7], np.int32), rows)
        summed.add(Update(2, rows={"items": table}))
        return finished(mechanism, summed, SecretRound(number, SecretStreams(0)))

    total, _ = released(1)
    ids, rows = total.rows["items"]
    np.testing.assert_array_equal(ids, np.arange(400))
    rows = rows.copy()
    rows[[3, 7]] -= 1000.0
    assert (rows != 0).all(), "untouched rows are noised too"
    for noise in (rows.ravel(), total.dense["head"].ravel()):
        assert kstest(noise / std, "norm").pvalue > 1e-3
    assert rows.std() == pytest.approx(std, rel=0.03)  # 20,000 entries: 0.5 % is one deviation
    assert not np.allclose(rows.ravel()[:1200], total.dense["head"].ravel())
    assert total.clients == 12.5, "the real number of uploads would tell who was there"
    other, _ = released(2)
    assert not np.allclose(other.rows["items"][1], total.rows["items"][1]), "new noise every round"


def test_row_clipping_counts_every_row():
    mechanism = CentralGaussian(RowClip(0.5), 1.0, ADD, SHAPE, 5.0)
    assert mechanism.noise_std() == pytest.approx(0.5 * math.sqrt(401))


def stack_of(ids):
    rows = np.ones((len(ids), 50), np.float32)
    return ClientRows(np.array([0, len(ids)]), np.array(ids, np.int32), rows)


def keyed_of(keys):
    rows = np.ones((len(keys), 50), np.float32)
    return KeyedRows(np.array([0, len(keys)]), np.array(keys, np.int64), rows, space=400)


HEADS = np.zeros((1, 30, 40), np.float32)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (Update(1, rows={"other": stack_of([1])}, dense={"head": HEADS}), "changes its shape"),
        (Update(1, rows={"items": stack_of([1])}), "changes its shape"),
        (Update(1, rows={"items": stack_of([1])}, dense={"head": HEADS[:, :2]}), "changes its"),
        (Update(1, rows={"items": stack_of([1, 1])}, dense={"head": HEADS}), "row twice"),
        (Update(1, rows={"items": stack_of([400])}, dense={"head": HEADS}), "does not exist"),
        (Update(1, rows={"items": stack_of([-1])}, dense={"head": HEADS}), "does not exist"),
        (Update(1, rows={"items": keyed_of([1])}, dense={"head": HEADS}), "changes its shape"),
        (Update(1, rows={"head": stack_of([1])}, dense={"head": HEADS}), "different names"),
    ],
)
@pytest.mark.parametrize(
    "mechanism",
    [CentralGaussian(FlatClip(1.0), 1.0, ADD, SHAPE, 3.0), LocalNoise("laplace", 1.0, SHAPE)],
    ids=["central", "local"],
)
def test_what_could_not_be_bounded_is_refused(mechanism, update, message):
    with pytest.raises(ConfigError, match=message):
        mechanism.protect(update, clients_of([[1]]), SecretRound(1, SecretStreams(0)))


# ------------------------------------------------------------ local noise


def test_a_local_upload_is_whole_and_sums_to_the_updates_plus_noise():
    shape = UploadShape(60, {"items": 3}, {"head": (2, 2)})
    case = TestLocalLaplace()
    update, view, noise = case._update(), case._clients(), LocalNoise("laplace", 0.1, shape)
    sent = noise.protect(update, view, SecretRound(1, SecretStreams(0)))
    assert sent.dense["items"].shape == (4, 60, 3)
    assert sent.nbytes == 4 * shape.nbytes
    silent = replace(case._update(quiet=True), dense={"head": np.zeros((4, 2, 2), np.float32)})
    alone = noise.protect(silent, view, SecretRound(1, SecretStreams(0)))
    expected = np.zeros((60, 3))
    stack = update.rows["items"]
    np.add.at(expected, stack.ids, stack.rows)
    difference = sent.dense["items"].sum(0, float) - alone.dense["items"].sum(0, float)
    np.testing.assert_allclose(difference, expected, atol=1e-5)


# ------------------------------------------------------------ a test by statistics

DRAWS = 100_000
DELTA = 1e-5


def empirical_epsilon(one, other):
    """Return a lower bound of epsilon from samples of two neighbours (Clopper and Pearson).

    The thresholds are chosen on the first half and tested on the second: 99.9 % confidence each.
    """
    half = len(one) // 2
    best = (-math.inf, 0.0)
    for threshold in np.quantile(np.concatenate([one, other]), np.linspace(0.005, 0.995, 100)):
        p, q = np.mean(one[:half] > threshold), np.mean(other[:half] > threshold)
        best = max(best, (math.log(max(p - DELTA, 1e-9) / max(q, 20 / half)), threshold))
    hits, misses = (int(np.sum(part[half:] > best[1])) for part in (one, other))
    low = beta.ppf(0.001, hits, half - hits + 1) if hits else 0.0
    high = beta.ppf(0.999, misses + 1, half - misses) if misses < half else 1.0
    return math.log(max(low - DELTA, 1e-12) / high)


def central_draws(multiplier, value, neighbours):
    """Release the sum of three others and one client, many times."""
    others = np.array([0.3, -0.2, 5.0])
    norms = others if value is None else np.append(others, value)
    mechanism = CentralGaussian(FlatClip(1.0), multiplier, neighbours, HEAD, 4.0)
    update = Update(len(norms), dense={"head": norms[:, None]})
    sent = mechanism.protect(update, None, SecretRound(1, SecretStreams(0)))
    seed, drawn = 0 if value is None else 1, np.empty(DRAWS)
    for number in range(DRAWS):
        summed = ExactSum(1)
        summed.add(sent)
        secret = SecretRound(number, SecretStreams(seed))
        drawn[number] = finished(mechanism, summed, secret)[0].dense["head"][0]
    return drawn


@pytest.mark.slow
@pytest.mark.parametrize(("neighbours", "one", "other"), [(ADD, 7.0, None), (REPLACE, 7.0, -7.0)])
def test_central_noise_keeps_its_claim_and_less_noise_is_caught(neighbours, one, other):
    claim = epsilon_of(Gaussian(1.0, Everybody(), neighbours), 1, DELTA)
    kept = empirical_epsilon(
        central_draws(1.0, one, neighbours), central_draws(1.0, other, neighbours)
    )
    assert 0.5 < kept <= claim, "the test sees something, and no more than the claim"
    broken = empirical_epsilon(
        central_draws(0.3, one, neighbours), central_draws(0.3, other, neighbours)
    )
    assert broken > claim, "noise x 0.3 must be caught"


@pytest.mark.parametrize(("kind", "power"), [("laplace", 1), ("gaussian", 2)])
def test_local_noise_keeps_its_claim_and_less_noise_is_caught(kind, power):
    apart = 2.0  # two uploads of norm 1, opposite
    if kind == "laplace":
        scale, claim = 1.0, apart / 1.0
    else:
        scale = 2.0
        claim = epsilon_of(Gaussian(scale / apart, Everybody(), REPLACE), 1, DELTA)

    def draws(value, factor, number):
        clip, noise = FlatClip(1.0, power), LocalNoise(kind, factor * scale, HEAD)
        view = clients_of([[0]] * DRAWS, 1)
        update = Update(DRAWS, dense={"head": np.full((DRAWS, 1), value)})
        return (
            Protection((clip, noise))
            .protect(update, view, SecretRound(number, SecretStreams(0)))
            .dense["head"][:, 0]
        )

    assert 0.5 < empirical_epsilon(draws(9.0, 1, 1), draws(-9.0, 1, 2)) <= claim
    assert empirical_epsilon(draws(9.0, 0.3, 1), draws(-9.0, 0.3, 2)) > claim
