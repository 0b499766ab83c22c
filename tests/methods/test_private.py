"""FedNext, FedEASE and FedALS under noise: bounds, twins, support, noise, guarantee, refusals."""

import math
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest
from test_item_pairs import dense, ease_weights

import hushrec
from hushrec.aggregation import ExactSum, KeyedRows, Total, Update
from hushrec.api import train
from hushrec.cli import main
from hushrec.data.splitting import SplitConfig, make_split
from hushrec.data.views import CohortConfig
from hushrec.errors import ConfigError, StoppedError
from hushrec.federation.backends import Machine
from hushrec.federation.experiment import Experiment, ExperimentRequest
from hushrec.federation.setup import set_up
from hushrec.kernels import pairs as pair_kernels
from hushrec.kernels.ragged import recent_vectors
from hushrec.methods.fedals import FedALS, PrivateFedALS
from hushrec.methods.shared.denoising import expected_powers, find_head
from hushrec.methods.statistics.fedease import FedEASE, PrivateFedEASE
from hushrec.methods.statistics.fednext import FedNext, PrivateFedNext
from hushrec.privacy.calibration import make_plan
from hushrec.privacy.clipping import FlatClip, client_norms
from hushrec.privacy.config import PrivacyConfig
from hushrec.privacy.noise import CentralGaussian
from hushrec.privacy.plan import Schedule
from hushrec.privacy.protection import Protection, UploadShape, check_shape
from hushrec.runs.folder import RunFolder
from hushrec.streams import Round, SecretRound, SecretStreams, Streams
from hushrec.testing import MethodContract, clients_of, taste_world
from test_api import StopAfter, bits

PRIVATE = (PrivateFedNext, PrivateFedEASE, PrivateFedALS)
NAMES = tuple(method.name for method in PRIVATE)
CENTRAL = {"privacy.mode": "central", "privacy.noise_seed": 0, "privacy.epsilon": 4.0}
M = 12


class TestFedNextUnderNoise(MethodContract):
    method = PrivateFedNext


class TestFedEASEUnderNoise(MethodContract):
    method = PrivateFedEASE


class TestFedALSUnderNoise(MethodContract):
    method = PrivateFedALS


def test_noise_on_sums_brings_the_private_form():
    for plain, private in ((FedNext, PrivateFedNext), (FedEASE, PrivateFedEASE)):
        assert plain.under_noise is private
        made = ExperimentRequest("demo", plain.name, settings=CENTRAL).experiment()
        assert made.rounds == 2
        assert type(made.make_method()) is private
        assert Experiment.from_toml(made.to_toml()) == made
        assert type(ExperimentRequest("demo", plain.name).experiment().make_method()) is plain
    assert FedALS.under_noise is PrivateFedALS


# ------------------------------------------------------------ the bound on an upload

histories = st.lists(st.lists(st.integers(0, M - 1), max_size=30), min_size=1, max_size=6)
heads = st.lists(st.booleans(), min_size=M, max_size=M).map(np.array)


@given(histories, heads, st.sampled_from(PRIVATE), st.integers(1, 2))
@settings(max_examples=150)
def test_no_upload_has_a_norm_above_one(rows, head, kind, number):
    """Whatever a user's history is, items that come again included; before any clipping."""
    method, view = kind(), clients_of(rows, M)
    rng = np.random.default_rng(0)
    received = {"head": head, "items": rng.standard_normal((M, 5))}
    received["tilts"] = rng.uniform(0.2, 3.0, M).astype(np.float32)
    phase, now = method.phase_of(number), Round(number, Streams(0))
    update = phase.fit(received, {}, view, now).update
    norms = client_norms(update, 2)
    assert (norms <= method.upload_norm * (1 + 1e-6)).all()
    for user, row in enumerate(rows):
        known = set(row) if number == 1 else {item for item in row if head[item]}
        assert norms[user] == pytest.approx(1 if known else 0, abs=1e-5)
    nobody = view.take(np.zeros(0, np.int64))
    shape = UploadShape.of(phase.fit(received, {}, nobody, now).update, M)
    check_shape(update, shape)  # no row or key twice, none outside the space
    if number == 2 and kind is not PrivateFedALS:
        assert shape.spaces == {"pairs": (head.sum() ** 2, 1)}


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), max_size=12), max_size=4)
)
def test_scaled_to_norm_one_is_a_sum_by_key(clients):
    indptr = np.cumsum([0, *map(len, clients)])
    entries = [entry for client in clients for entry in client]
    keys = np.array([key for key, _ in entries], np.int64)
    weights = np.array([[weight] for _, weight in entries], np.float32).reshape(-1, 1)
    out_indptr, out_keys, out = pair_kernels.scaled_to_norm_one(indptr, keys, weights)
    for user, client in enumerate(clients):
        sums = {}
        for key, weight in client:
            sums[key] = sums.get(key, 0) + weight
        norm = math.sqrt(sum(value**2 for value in sums.values()))
        mine = slice(out_indptr[user], out_indptr[user + 1])
        assert out_keys[mine].tolist() == sorted(sums)
        np.testing.assert_allclose(out[mine, 0], [sums[k] / norm for k in sorted(sums)], rtol=1e-6)


# ------------------------------------------------------------ the centralised twins, noise off


def trained(method, view, chunk=None):
    shared = method.init(view, Streams(0))
    for number in range(1, method.planned_rounds + 1):
        phase = method.phase_of(number)
        summed = ExactSum(view.n_items)
        for clients in np.array_split(np.arange(len(view)), chunk or 1):
            now = Round(number, Streams(0))
            summed.add(phase.fit(phase.download(shared), {}, view.take(clients), now).update)
        shared = phase.apply(shared, summed.total(), number)
    return shared


def bounded_sums(rows, config, pairs_of):
    """Each user's pairs, tilted and scaled to norm 1, added up; and the tilt undone."""
    shares = np.zeros(M)
    for row in rows:
        shares[sorted(set(row))] += len(set(row)) ** -0.5
    levels = np.log(np.maximum(shares / shares.sum(), 1e-3 / M))
    known = shares > 0 if (shares > 0).sum() > 1 else np.arange(M) <= 1
    tilts = np.exp(config.tilt * (levels[known].mean() - levels))
    total = np.zeros((M, M))
    for row in rows:
        mine = np.zeros((M, M))
        for i, j, weight in pairs_of(row):
            mine[i, j] += weight * tilts[i] * tilts[j]
        if mine.any():
            total += mine / np.linalg.norm(mine)
    total /= np.outer(tilts, tilts)
    total[np.diag_indices(M)] /= config.counted
    return total**config.power


some = st.lists(
    st.lists(st.integers(0, M - 1), min_size=1, max_size=9, unique=True), min_size=1, max_size=8
)


@given(some, st.integers(1, 6))
@settings(max_examples=40)
def test_fednext_without_noise_equals_its_bounded_twin(rows, window):
    method = PrivateFedNext(PrivateFedNext.Config(window=window, ridge=2.0, power=0.5))
    config = method.config

    def pairs_of(row):
        for p, i in enumerate(row):
            yield i, i, config.counted
            for g, j in enumerate(row[p + 1 : p + 1 + window], start=1):
                yield i, j, g**-config.fade
                yield j, i, config.reverse * g**-config.fade

    sums = bounded_sums(rows, config, pairs_of)
    a = sums - np.diag(np.diag(sums))
    matrix = np.diag(np.diag(sums) + 2.0) + config.gram * (a + a.T)
    expected = np.linalg.solve(matrix, a)
    np.fill_diagonal(expected, 0)
    shared = trained(method, clients_of(rows, M))
    np.testing.assert_allclose(dense(shared), expected, atol=1e-5)


@given(some, st.integers(2, 9))
@settings(max_examples=40)
def test_fedease_without_noise_equals_its_bounded_twin(rows, latest):
    method = PrivateFedEASE(PrivateFedEASE.Config(latest=latest, ridge=3.0))
    config = method.config

    def pairs_of(row):
        for i in row[-latest:]:
            yield i, i, config.counted
            yield from ((i, j, 1.0) for j in row[-latest:] if i < j)

    sums = bounded_sums(rows, config, pairs_of)
    gram = sums + np.triu(sums, 1).T + 3.0 * np.eye(M)
    inverse = np.linalg.inv(gram)
    expected = -inverse / np.diag(inverse)
    np.fill_diagonal(expected, 0)
    np.testing.assert_allclose(dense(trained(method, clients_of(rows, M))), expected, atol=1e-5)


def test_ease_is_its_own_limit():
    """One item pair per user, so that all norms are alike: plain EASE up to the scale."""
    rows = [[k % 5, k % 5 + 1 + k % 3] for k in range(40)]
    method = PrivateFedEASE(PrivateFedEASE.Config(power=1.0, counted=1.0, ridge=2 / math.sqrt(3)))
    expected = ease_weights(rows, M, 2.0)
    np.testing.assert_allclose(dense(trained(method, clients_of(rows, M))), expected, atol=1e-5)


def test_fedals_without_noise_is_the_power_iteration():
    rng = np.random.default_rng(3)
    rows = [rng.permutation(M)[: rng.integers(1, 9)].tolist() for _ in range(60)]
    method = PrivateFedALS(PrivateFedALS.Config(d=4))
    view = clients_of(rows, M)
    x = np.zeros((len(rows), M))
    for user, row in enumerate(rows):
        x[user, row] = 1
    items = np.linalg.qr(method.init(view, Streams(0))["items"])[0]
    for _ in range(3):
        p = x @ items
        p /= np.linalg.norm(p, axis=1, keepdims=True)
        items = np.linalg.qr((x / np.sqrt(x.sum(axis=1, keepdims=True))).T @ p)[0]
    shared = trained(method, view)
    np.testing.assert_allclose(shared["items"] @ shared["items"].T, items @ items.T, atol=1e-5)
    weights = [sum((g + 1) ** -0.9 * items[i] for g, i in enumerate(reversed(row))) for row in rows]
    np.testing.assert_allclose(
        method.score(shared, {}, view), np.array(weights) @ items.T, atol=1e-5
    )


@pytest.mark.parametrize("kind", PRIVATE)
def test_every_stack_size_gives_the_same_bits(kind):
    rng = np.random.default_rng(0)
    view = clients_of([rng.permutation(50)[: rng.integers(2, 40)].tolist() for _ in range(80)], 50)
    one, other = trained(kind(), view), trained(kind(), view, chunk=11)
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


def test_recent_vectors_stops_where_weights_end():
    items = np.arange(8.0).reshape(4, 2)
    got = recent_vectors(
        np.array([0, 3, 3]), np.array([3, 1, 2], np.int32), items, np.array([1, 0.5])
    )
    np.testing.assert_array_equal(got, [items[2] + 0.5 * items[1], [0, 0]])


# ------------------------------------------------------------ the head


def test_an_item_is_in_the_head_if_it_is_worth_its_price():
    counts = np.array([50.0, 3.0, 20.0, -4.0, 10.0])
    total = Total(20, {"counts": (np.arange(5), counts[:, None])}, {}, noise_std=9.0)
    # A price of 0.5 · 2 / 20 = 0.05 an item; the third gains log(80 / 70), the next log(83 / 80).
    found = find_head(total, 5, 2.0, 0.5, 4)
    assert found["head"].tolist() == [True, False, True, False, True]
    np.testing.assert_allclose(found["shares"], np.array([50, 3, 20, 0, 10]) / 83)
    assert find_head(total, 5, 2.0, 0.3, 4)["head"].tolist() == [True, True, True, False, True]
    assert find_head(total, 5, 2.0, 0.5, 2)["head"].tolist() == [True, False, True, False, False]
    assert find_head(total, 5, 1e6, 0.5, 4)["head"].sum() == 2
    many = Total(10**6, total.rows, {}, noise_std=9.0)
    assert find_head(many, 5, 2.0, 0.5, 5)["head"].sum() == 4, "nobody met the fifth"


# ------------------------------------------------------------ what the noise covers


def keyed_upload(rng, clients, space):
    keys = [np.sort(rng.permutation(space)[:n]) for n in clients]
    values = rng.standard_normal((sum(clients), 1)).astype(np.float32)
    ids = np.concatenate([*keys, np.zeros(0)]).astype(np.int64)
    stack = KeyedRows(np.cumsum([0, *clients]), ids, values, space=space)
    return Update(len(clients), rows={"pairs": stack})


def test_noise_covers_every_key_and_has_the_right_size():
    """Whoever uploads what: every key of the space is there, with noise of the round's share."""
    space, shape = 40_000, UploadShape(M, {}, {}, {"pairs": (40_000, 1)})
    layer = CentralGaussian(FlatClip(2.0), 1.5, "zero-out-one", shape, 3.0, shares=(0.25, 0.75))
    rng = np.random.default_rng(0)
    for number, share in ((1, 0.25), (2, 0.75)):
        std = 2.0 * 1.5 / math.sqrt(share)
        found = {}
        for name, clients in (("nobody", []), ("some", [400, 1, 0]), ("others", [7, 7, 7])):
            exact, summed = ExactSum(M), ExactSum(M)
            update = keyed_upload(rng, clients, space)
            clipped = layer.protect(update, None, SecretRound(number, SecretStreams(0)))
            assert clipped.nbytes == len(clients) * 4 * space, "the size of a message tells nothing"
            summed.add(clipped)
            exact.add(FlatClip(2.0).protect(update, None, SecretRound(number, SecretStreams(0))))
            secret = SecretRound(number, SecretStreams(0))
            total, _ = Protection((layer,)).finish(summed, secret)
            assert total.noise_std == pytest.approx(std)
            keys, noisy = total.rows["pairs"]
            np.testing.assert_array_equal(keys, np.arange(space))
            ids, sums = exact.total().rows["pairs"]
            noisy[ids] -= sums
            found[name] = noisy[:, 0]
        np.testing.assert_allclose(found["nobody"], found["some"], atol=1e-9)
        np.testing.assert_allclose(found["nobody"], found["others"], atol=1e-9)
        assert kstest(found["nobody"] / std, "norm").pvalue > 1e-3


@pytest.mark.parametrize("keys", [[3, 3], [5, 2], [-1, 2], [2, 9]])
def test_keys_that_repeat_or_do_not_exist_are_refused(keys):
    stack = KeyedRows(np.array([0, 2]), np.array(keys), np.ones((2, 1), np.float32), space=9)
    shape = UploadShape(M, {}, {}, {"pairs": (9, 1)})
    with pytest.raises(ConfigError, match="a row twice"):
        check_shape(Update(1, rows={"pairs": stack}), shape)
    with pytest.raises(ConfigError, match="changes its shape"):
        check_shape(Update(1, rows={"pairs": replace(stack, space=10)}), shape)


@pytest.mark.parametrize("method", ["fednext", "fedease"])
def test_uploads_are_as_long_as_the_head_is(method, small):
    run = train(small, method, settings=CENTRAL)
    users, items, head = len(small.users), small.n_items, int(run.model.shared["head"].sum())
    assert 2 <= head <= items
    assert run.summary.communication.up_bytes == users * 4 * (items + head**2)


# ------------------------------------------------------------ what is claimed


@pytest.mark.parametrize("method", NAMES)
def test_the_guarantee_is_that_of_all_rounds_together(method, small):
    said = train(small, method, settings=CENTRAL).summary.privacy
    assert said.guarantee == "user-level (epsilon, delta)-DP"
    assert said.delta == 1e-5
    assert 0.99 * 4 <= said.epsilon <= 4
    assert said.spent_epsilon == said.epsilon
    information = sum(entry["count"] / entry["multiplier"] ** 2 for entry in said.account)
    assert said.epsilon == pytest.approx(
        get_epsilon_gaussian(information**-0.5, said.delta), rel=1e-3
    )
    assert said.account[0]["multiplier"] > 2 * said.account[1]["multiplier"]
    assert "in round 1" in said.statement


def test_replaced_users_cost_twice_the_noise(small):
    split = make_split(small, SplitConfig(), Streams(0))
    layers = []
    for neighbours in ("zero-out-one", "replace-one"):
        made = ExperimentRequest(
            "small", "fednext", settings={**CENTRAL, "privacy.neighbours": neighbours}
        ).experiment()
        layers.append(set_up(made, split).plan.protection.mechanisms[0])
    assert layers[0].clip == FlatClip(1.0)
    for number in (1, 2):
        assert layers[1].noise_std(number) == pytest.approx(2 * layers[0].noise_std(number))


@pytest.mark.parametrize("method", NAMES)
def test_threads_chunks_and_interruptions_change_nothing(method, small, tmp_path):
    plain, other, stopped = (tmp_path / name for name in ("plain", "other", "stopped"))
    train(small, method, settings=CENTRAL, out=plain, machine=Machine(threads=1))
    train(small, method, settings=CENTRAL, out=other, machine=Machine(threads=2, chunk=7))
    stop = StopAfter(1)
    with pytest.raises(StoppedError):
        train(small, method, settings=CENTRAL, out=stopped, callbacks=[stop])
    train(small, out=stopped, resume=True)
    for folder in (other, stopped):
        assert bits(folder) == bits(plain)
        one, two = (RunFolder(f).read_summary().privacy for f in (folder, plain))
        assert one == two


def test_the_command_line_works_by_itself(tmp_path):
    out = tmp_path / "run"
    arguments = ["train", "--data", "demo", "--method", "fednext", "--out", str(out)]
    done = CliRunner().invoke(main, [*arguments, "--privacy", "central", "--epsilon", "8"])
    assert done.exit_code == 0, done.output
    assert "User-level (ε = 8," in " ".join(done.output.split())
    run = hushrec.Run.open(out)
    assert run.recommend("viewer-0001")


# ------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("more", "rounds", "message"),
    [
        ({}, 1, "has 2 rounds"),
        ({}, 3, "has 2 rounds"),
        ({"cohort.kind": "poisson", "cohort.probability": 0.5}, None, "cohort.kind = all"),
        ({"cohort.kind": "fixed", "cohort.size": 9}, None, "cohort.kind = all"),
        ({"privacy.clipping": "adaptive"}, None, "bounds its uploads itself"),
        ({"counting": 1.0}, None, "counting"),
        (
            {"privacy.mode": "local-gaussian", "privacy.noise_seed": 0, "privacy.clip": 1.0},
            None,
            "noise cannot cover every pair: use privacy.mode = central",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_given_is_refused(more, rounds, message, tiny, tmp_path):
    with pytest.raises(ConfigError, match=message):
        train(tiny, "fednext", rounds=rounds, settings={**CENTRAL, **more}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", [FedNext, FedEASE])
def test_exact_sums_are_refused_under_noise(tiny, method, monkeypatch):
    monkeypatch.setattr(method, "under_noise", None)
    with pytest.raises(ConfigError, match="noise cannot cover every pair: use another method"):
        train(tiny, method.name, settings=CENTRAL)


def test_too_large_a_space_and_local_noise_on_a_space_are_refused():
    large = UploadShape(10**4, {}, {}, {"pairs": (10**8, 1)})
    with pytest.raises(ConfigError, match="noise cannot cover every key"):
        make_plan(
            PrivacyConfig(mode="central", epsilon=1.0), CohortConfig(), Schedule(large, 1), 100
        )
    shape = UploadShape(M, {}, {}, {"pairs": (9, 1)})
    local = PrivacyConfig(mode="local-gaussian", scale=1.0, clip=1.0)
    with pytest.raises(ConfigError, match="every pair of items"):
        make_plan(local, CohortConfig(), Schedule(shape, 1), 100)
    central = PrivacyConfig(mode="central", epsilon=1.0)
    with pytest.raises(ConfigError, match="add up to 1"):
        schedule = Schedule(shape, 2, shares=(0.5, 0.6), upload_norm=1.0)
        make_plan(central, CohortConfig(), schedule, 100)


# ------------------------------------------------------------ reading noisy sums


def test_without_noise_sums_are_what_they_are():
    noisy = np.array([-1.0, 0.0, 4.0])
    np.testing.assert_array_equal(
        expected_powers(noisy, 0.0, np.zeros(3, np.int64), 0.5), [0.0, 0.0, 2.0]
    )
    assert len(expected_powers(np.zeros(0), 1.0, np.zeros(0, np.int64), 0.5)) == 0


def test_the_posterior_mean_is_that_of_a_known_prior():
    """One in ten sums is 9, the rest 0: what Bayes' rule says, with the prior known."""
    rng = np.random.default_rng(0)
    truth = np.where(rng.random(200_000) < 0.1, 9.0, 0.0)
    noisy = truth + 3.0 * rng.standard_normal(len(truth))
    one = 0.1 * np.exp(-0.5 * ((noisy - 9) / 3) ** 2)
    zero = 0.9 * np.exp(-0.5 * (noisy / 3) ** 2)
    exact = 9.0 * one / (one + zero)
    found = expected_powers(noisy, 3.0, np.zeros(len(noisy), np.int64), 1.0)
    # The prior is estimated, and by few steps: nearly as good as if it were known, never better.
    best, error = np.mean((exact - truth) ** 2), np.mean((found - truth) ** 2)
    assert best <= error < 1.05 * best
    assert error < 0.5 * np.mean((np.maximum(noisy, 0) - truth) ** 2)


@given(
    st.lists(st.tuples(st.floats(-50, 200), st.integers(0, 3)), min_size=1, max_size=40),
    st.sampled_from([0.35, 0.5, 1.0]),
    st.floats(0.1, 20),
)
def test_expected_powers_stay_where_sums_can_be(entries, power, noise_std):
    noisy = np.array([value for value, _ in entries])
    groups = np.array([group for _, group in entries])
    found = expected_powers(noisy, noise_std, groups, power)
    assert (found >= 0).all()
    assert (found <= max(noisy.max(), noise_std) ** power * (1 + 1e-9)).all()
    order = np.argsort(noisy)  # one group, as there are few: larger sums mean more
    assert (np.diff(found[order]) >= -1e-9).all()


def test_groups_have_priors_of_their_own():
    """The same noisy value is believed where its group is full, and not where it is empty."""
    rng = np.random.default_rng(1)
    groups = np.repeat([0, 1], 5_000)
    truth = np.where(groups == 0, 0.0, 4.0)
    noisy = truth + rng.standard_normal(10_000)
    noisy[[0, 5_000]] = 2.5
    found = expected_powers(noisy, 1.0, groups, 1.0)
    assert found[0] < 0.5 < 3 < found[5_000]


# ------------------------------------------------------------ it is of use


def test_many_users_are_served_well_under_noise():
    """A cycle to be learned, 4,000 users, epsilon 1."""
    rng = np.random.default_rng(0)
    starts = rng.integers(20, size=4_000)
    rows = [[(s + k) % 20 for k in range(8)] for s in starts]
    view = clients_of(rows, 20)
    method = PrivateFedNext()
    config = PrivacyConfig(mode="central", epsilon=1.0)
    shared = method.init(view, Streams(0))
    for number in (1, 2):
        phase = method.phase_of(number)
        update = phase.fit(phase.download(shared), {}, view, Round(number, Streams(0))).update
        shape = UploadShape.of(update, 20)
        schedule = Schedule(shape, 2, shares=method.budget_shares, upload_norm=1.0)
        plan = make_plan(config, CohortConfig(), schedule, 4_000)
        summed = ExactSum(20)
        summed.add(plan.protection.protect(update, view, SecretRound(number, SecretStreams(0))))
        total, _ = plan.protection.finish(summed, SecretRound(number, SecretStreams(0)))
        shared = phase.apply(shared, total, number)
    scores = method.score(shared, {}, view.take(np.arange(40)))
    for row, score in zip(rows, scores, strict=False):
        score[row] = -np.inf
        assert score.argmax() == (row[-1] + 1) % 20


def test_the_taste_world_has_a_guarantee_and_finite_scores():
    run = train(taste_world(), "fedals", settings={**CENTRAL, "d": 4})
    assert np.isfinite(run.model.shared["items"]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "hr"), [(8.0, 0.21), (2.0, 0.15)])
def test_accuracy_on_real_data(data_dir, epsilon, hr):
    run = train("ml-1m", "fednext", settings={**CENTRAL, "privacy.epsilon": epsilon})
    assert run.metrics["full"]["hr@10"] >= hr
    assert run.summary.privacy.epsilon <= epsilon
