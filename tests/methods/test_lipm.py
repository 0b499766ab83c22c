"""LIPM and DPPS: the contract for every variant, the attention, the GRU, the budgets."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import hushrec
from hushrec.aggregation import OWN_WEIGHT, ExactSum, Update
from hushrec.aggregation import ClientRows as Rows
from hushrec.data.views import TrainView
from hushrec.privacy.budgets import PersonalNoise
from hushrec.privacy.clipping import BIT, AdaptiveClip, FlatClip, RowClip, client_norms
from hushrec.privacy.protection import UploadShape
from hushrec.streams import Round, SecretRound, SecretStreams, Streams
from hushrec.testing import MethodContract, clients_of, taste_world
from hushrec.training.samples import draw_silo_samples

torch = pytest.importorskip("torch", reason="needs the 'neural' extra")
from hushrec.methods.lipm import (  # noqa: E402
    LIPM,
    LIPMConfig,
)
from hushrec.training.networks import (  # noqa: E402
    Perceptron,
    gru,
)
from hushrec.training.silo_network import unpack_flat  # noqa: E402
from hushrec.training.tensors import SampleBatch  # noqa: E402

SMALL = {"d": 8, "hidden": (8, 4), "batch": 16, "epochs": 2, "interest": 4, "lr": 0.02}


LEARNS = {**SMALL, "epochs": 20, "lr": 0.1, "decay": 0.003}


class TestBaseline(MethodContract):
    method = LIPM
    rounds = 25
    options = {**LEARNS, "lipm": False}  # noqa: RUF012


class TestGuided(MethodContract):
    method = LIPM
    options = {**SMALL, "guidance": 0.5}  # noqa: RUF012
    beats_chance = False  # without noise it is LIPM, which does


# ------------------------------------------------------------ attention


interests = arrays(
    np.float32, st.tuples(st.integers(1, 9), st.just(4)), elements=st.floats(-1, 1, width=32)
)


def attention(method: LIPM, given_interests):
    """Return the weights that the server's division makes of the uploads."""
    scores = method.interest_scores(np.array([1, -2, 0.5, 0.1], np.float32), given_interests)
    uploaded = np.exp(scores)
    return uploaded / uploaded.sum()


@settings(max_examples=50, deadline=None)
@given(interests, st.randoms())
def test_attention_sums_to_one_and_follows_its_clients(given_interests, random):
    method = LIPM(LIPMConfig(**SMALL))
    weights = attention(method, given_interests)
    assert weights.sum() == pytest.approx(1, abs=1e-6)
    order = random.sample(range(len(given_interests)), len(given_interests))
    np.testing.assert_allclose(attention(method, given_interests[order]), weights[order], atol=1e-7)
    alike = np.repeat(given_interests[:1], 5, 0)
    np.testing.assert_allclose(attention(method, alike), 0.2, atol=1e-7)


def test_the_server_applies_the_softmax():
    method = LIPM(LIPMConfig(**SMALL))
    view = clients_of([[1, 2], [3], [4, 5]])
    shared = method.init(view, Streams(0))
    scores = np.array([0.5, -1.0, 0.2], np.float32)
    deltas = np.random.default_rng(0).standard_normal((3, 1, 8)).astype(np.float32)
    network = np.random.default_rng(1).standard_normal((3, len(shared["network"])))
    weight = np.exp(scores - 1)  # the bound of scores is 1
    update = Update(
        3,
        {
            "items": Rows(
                np.arange(4),
                np.full(3, 7, np.int32),
                (weight[:, None, None] * deltas).reshape(3, 8),
            )
        },
        {OWN_WEIGHT: weight - np.float32(0.5), "network": weight[:, None] * network},
    )
    summed = ExactSum(60)
    summed.add(update)
    after = method.apply(shared, summed.total())
    softmax = torch.softmax(torch.from_numpy(scores), 0).numpy()
    expected = shared["items"][7] + (softmax[:, None] * deltas[:, 0]).sum(0)
    np.testing.assert_allclose(after["items"][7], expected, atol=1e-6)
    np.testing.assert_allclose(
        after["network"], shared["network"] + (softmax[:, None] * network).sum(0), atol=1e-5
    )


def test_with_equal_interests_the_aggregation_is_the_plain_mean():
    view = clients_of([[1, 2, 3], [4, 5], [6, 7, 8, 9]])
    method = LIPM(LIPMConfig(**SMALL, temperature=1e9))
    shared = method.init(view, Streams(0))
    private = _private(method, view, shared)
    fitted = method.fit(shared, private, view, Round(1, Streams(0)))
    weights = fitted.update.dense[OWN_WEIGHT] + 0.5
    np.testing.assert_allclose(weights, np.exp(-1), atol=1e-6)


@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
@pytest.mark.parametrize(
    "clip",
    [FlatClip(0.5), FlatClip(0.5, 1), RowClip(0.5), AdaptiveClip(0.5, 0.5, 0.2, 1.0)],
    ids=["flat", "flat L1", "row", "adaptive"],
)
def test_clipping_leaves_the_attention_as_it_is(clip, size):
    """Of equal deltas, exp(-1) and exp(1) come out at a ratio of 7.4, however large they are."""
    view = clients_of([[1], [2]])
    weights = np.exp(np.array([-1, 1], np.float32) - 1)
    delta = size * np.random.default_rng(0).standard_normal(8).astype(np.float32)
    scaled = weights[:, None] * delta
    update = Update(
        2,
        {"items": Rows(np.arange(3), np.array([7, 7], np.int32), scaled)},
        {"network": scaled, OWN_WEIGHT: weights - np.float32(0.5)},
    )
    secret = SecretRound(1, SecretStreams(0))
    sent = clip.protect(update, view, secret)
    for array in (sent.rows["items"].rows, sent.dense["network"]):
        np.testing.assert_allclose(array[1] / array[0], np.exp(2), rtol=1e-3)
    # What is sent keeps to the bound, the weight included.
    shape = UploadShape.of(update, 60)
    bound = clip.whole_bound(shape)
    assert (client_norms(_without_bit(sent), clip.power) <= bound).all()
    # The server finds the sum of weights again.
    summed = ExactSum(60)
    summed.add(sent)
    total = clip.finish(summed.total(), secret)[0]
    assert 2 / 2 + total.dense[OWN_WEIGHT] == pytest.approx(weights.sum(), abs=1e-6)


def _without_bit(update):
    return replace(update, dense={n: a for n, a in update.dense.items() if n != BIT})


@settings(max_examples=50, deadline=None)
@given(
    st.floats(-(2.0**99), 2.0**99, width=32),
    st.floats(-(2.0**99), 2.0**99, width=32),
    st.sampled_from([1, 2]),
)
def test_no_weight_takes_an_upload_over_the_bound(weight, value, power):
    dense = {"network": np.full((1, 3), value, np.float32), OWN_WEIGHT: np.array([weight], "f4")}
    sent = FlatClip(0.3, power).protect(Update(1, dense=dense), None, None)
    assert client_norms(sent, power)[0] <= 0.3


# ------------------------------------------------------------ the training core


def _private(method, view, shared):
    from hushrec.private import PrivateStore

    fields = method.private_fields(view, shared, Streams(0))
    return dict(PrivateStore(fields, len(view.clients)).read(np.arange(len(view.clients))))


def silos_of(sizes: list[int], seed: int = 0) -> TrainView:
    generator = np.random.default_rng(seed)
    rows = [
        generator.permutation(60)[: generator.integers(1, 20)].tolist() for _ in range(sum(sizes))
    ]
    return replace(
        clients_of(rows), holders=np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    )


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9, unique=True))
def test_company_changes_no_bit_of_interest_or_upload(chosen):
    view = silos_of([3, 1, 70, 2, 5, 1, 4, 2, 9, 6])
    method = LIPM(LIPMConfig(**SMALL))
    shared = method.init(view, Streams(0))
    whole = method.fit(shared, _private(method, view, shared), view, Round(1, Streams(0)))
    part = view.take_clients(np.array(chosen))
    some = method.fit(shared, _private(method, part, shared), part, Round(1, Streams(0)))
    for k, c in enumerate(chosen):
        for name in ("interests", "users"):
            ours, theirs = some.private[name], whole.private[name]
            np.testing.assert_array_equal(
                ours.rows[ours.indptr[k] : ours.indptr[k + 1]],
                theirs.rows[theirs.indptr[c] : theirs.indptr[c + 1]],
            )
        for name, array in some.update.dense.items():
            np.testing.assert_array_equal(array[k], whole.update.dense[name][c])
        assert some.losses[k] == whole.losses[c]


EPOCHS = 1


def test_a_silo_is_trained_as_torchs_adam_would():
    """Where a step looks every row up, lazy Adam is Adam: here one step takes all samples."""
    view = silos_of([4, 2])
    method = LIPM(LIPMConfig(**{**SMALL, "batch": 512, "lipm": False, "epochs": EPOCHS}))
    shared = method.init(view, Streams(0))
    fitted = method.fit(shared, _private(method, view, shared), view, Round(1, Streams(0)))
    samples = draw_silo_samples(view, 1, EPOCHS, Round(1, Streams(0)))
    for c in range(2):
        users = torch.zeros((np.diff(view.client_indptr)[c], 8), requires_grad=True)
        items = torch.tensor(shared["items"], requires_grad=True)
        flat = torch.tensor(shared["network"][None], requires_grad=True)
        optimizer = torch.optim.Adam([users, items, flat], lr=0.02)
        length = samples.lengths[c]
        for epoch in range(EPOCHS):
            at = samples.order[c][epoch * length : (epoch + 1) * length]
            p = unpack_flat(flat, method.perceptron.shapes)
            u, v = users[samples.users[at]], items[samples.items[at].astype(np.int64)]
            h = u @ p["user"][0] + v @ p["item"][0] + (u * v) @ p["product"][0] + p["bias"][0]
            h = torch.relu(torch.relu(h) @ p["layer0/weight"][0] + p["layer0/bias"][0])
            logits = (h @ p["layer1/weight"][0] + p["layer1/bias"][0])[:, 0]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                logits, torch.from_numpy(samples.labels[at])
            )
            loss = loss + 0.05 * (u**2 + v**2).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        kept = fitted.private["users"]
        np.testing.assert_allclose(
            kept.rows[kept.indptr[c] : kept.indptr[c + 1]], users.detach().numpy(), atol=2e-5
        )
        moved = fitted.update.dense["network"][c]
        np.testing.assert_allclose(moved, flat.detach().numpy()[0] - shared["network"], atol=2e-5)
        rows = fitted.update.rows["items"]
        own = slice(rows.indptr[c], rows.indptr[c + 1])
        expected = (items.detach().numpy() - shared["items"])[rows.ids[own]]
        np.testing.assert_allclose(rows.rows[own], expected, atol=2e-5)


# ------------------------------------------------------------ DPPS


DPPS = {
    **SMALL,
    "silos.kind": "dirichlet",
    "silos.count": 6,
    "evaluation.every": 3,
    "privacy.mode": "local-gaussian",
    "privacy.noise_seed": 0,
    "privacy.clip": 1.0,
    "privacy.budgets": "activity",
    "privacy.epsilon_min": 0.5,
    "privacy.epsilon_max": 5.0,
}


def test_calibrated_noise_keeps_every_budget():
    run = hushrec.train(taste_world(), "lipm", rounds=3, settings=DPPS)
    budgets = run.summary.privacy.budgets
    assert budgets.over_budget == 0
    assert budgets.clients == 6
    assert budgets.spent.max <= budgets.epsilon.max == 5.0
    assert run.summary.privacy.unit == "client (silo)"


def test_the_papers_noise_overdraws_and_says_so():
    run = hushrec.train(
        taste_world(), "lipm", rounds=3, settings={**DPPS, "privacy.sigma": "paper"}
    )
    said = run.summary.privacy
    assert said.budgets.over_budget == 6
    assert said.epsilon > 5 * 5
    assert "does not keep" in said.statement


def test_who_cannot_pay_stops_and_the_run_goes_on():
    run = hushrec.train(
        taste_world(), "lipm", rounds=4, settings={**DPPS, "privacy.budget_uploads": 2}
    )
    budgets = run.summary.privacy.budgets
    assert run.summary.rounds == 4
    assert budgets.stopped == 6
    assert budgets.over_budget == 0


def test_guidance_takes_back_the_clients_own_noise():
    view = replace(silos_of([2, 3]), noise=np.array([0.5, 2.0]))
    plain, guided = (LIPM(LIPMConfig(**SMALL, guidance=g)) for g in (0.0, 0.25))
    shared = plain.init(view, Streams(0))
    private = {**_private(guided, view, shared), "last_round": np.array([3, 0], np.int32)}
    width = shared["network"].shape
    added = PersonalNoise("gaussian", 1.0, UploadShape(60, {}, {"network": width}), view.noise)
    secret = SecretStreams(0)
    now = Round(5, Streams(0), added.past_noise(secret))
    ours = guided.fit(shared, private, view, now)
    theirs = plain.fit(shared, private, view, now)
    noise = now.past_noise("network", width, view, 3)
    assert noise[1].std() == pytest.approx(2.0, rel=0.2)
    np.testing.assert_allclose(
        ours.update.dense["network"][0],
        theirs.update.dense["network"][0] - 0.25 * noise[0],
        atol=1e-5,
    )
    # The second client has uploaded nothing yet.
    np.testing.assert_array_equal(
        ours.update.dense["network"][1], theirs.update.dense["network"][1]
    )
    np.testing.assert_array_equal(ours.private["last_round"], [5, 5])


def test_the_noise_that_is_taken_back_is_the_noise_that_was_added():
    view = replace(silos_of([2, 3]), noise=np.array([0.5, 0.5]))
    shape, secret = UploadShape(60, {}, {"network": (9,)}), SecretStreams(0)
    added = PersonalNoise("gaussian", 1.0, shape, view.noise)
    nothing = Update(2, dense={"network": np.zeros((2, 9), np.float32)})
    sent = added.protect(nothing, view, SecretRound(4, secret))
    again = added.past_noise(secret)("network", (9,), view, 4)
    np.testing.assert_allclose(sent.dense["network"], again, atol=1e-6)


def test_guidance_reaches_a_run_from_its_second_round_on():
    plain, guided = (
        [
            hushrec.train(taste_world(), "lipm", rounds=r, settings={**DPPS, "guidance": g})
            for r in (1, 2)
        ]
        for g in (0.0, 0.5)
    )
    # The noise depends on how many rounds a budget is for, so runs of one length are compared.
    networks = [[run.model.shared["network"] for run in runs] for runs in (plain, guided)]
    np.testing.assert_array_equal(networks[0][0], networks[1][0])
    assert not np.array_equal(networks[0][1], networks[1][1])


# ------------------------------------------------------------ an average of its own for each silo


class TestAverages(MethodContract):
    method = LIPM
    options = {**SMALL, "averages": 3, "temperature": 0.05, "matching": 0.5}  # noqa: RUF012
    beats_chance = False  # few rounds of small steps; that each silo gets its own is tested below


# ------------------------------------------------------------ where the interest enters the score


class TestMeetsItems(MethodContract):
    method = LIPM
    options = {**SMALL, "meets_items": True}  # noqa: RUF012
    beats_chance = False  # few rounds of small steps


@pytest.mark.parametrize("meets_items", [False, True])
def test_a_user_is_scored_as_samples_are(meets_items):
    perceptron = Perceptron(3, (4,), 2, meets_items=meets_items)
    p = unpack_flat(torch.from_numpy(perceptron.initial(Streams(0))[None]), perceptron.shapes)
    draw = torch.Generator().manual_seed(0)
    table, user = torch.randn(5, 3, generator=draw), torch.randn(3, generator=draw)
    fixed = {"behaviour": torch.randn(1, 5, 3, generator=draw), "interest": torch.zeros(1, 5, 2)}
    fixed["behaviour"][:] = fixed["behaviour"][:, :1]  # five samples of one user
    interest = gru(p, fixed["behaviour"], fixed["interest"])[0, 0]
    samples = perceptron.logits(p, user.expand(1, 5, 3), table[None], fixed)[0]
    np.testing.assert_allclose(perceptron.score_user(p, table, user, interest), samples, atol=1e-6)
    assert not np.allclose(perceptron.score_user(p, table, user, interest + 9), samples)


def test_matching_is_the_cross_entropy_of_interest_and_item_alone():
    plain, matching = (Perceptron(3, (4,), 2, weight) for weight in (0.0, 0.7))
    flat = torch.from_numpy(matching.initial(Streams(0))[None])
    draw = torch.Generator().manual_seed(0)
    rows = {name: torch.randn(1, 5, 3, generator=draw) for name in ("users", "items")}
    fixed = {"behaviour": torch.randn(1, 5, 3, generator=draw), "interest": torch.zeros(1, 5, 2)}
    step = SampleBatch(torch.tensor([[1.0, 0, 1, 0, 1]]), torch.full((1, 5), 0.2))
    p = unpack_flat(flat, matching.shapes)
    interest = gru(p, fixed["behaviour"], fixed["interest"])[0]
    degree = ((interest @ p["match"][0]) * rows["items"][0]).sum(1)
    alone = torch.nn.functional.binary_cross_entropy_with_logits(degree, step.labels[0])
    both = matching.loss(p, rows, fixed, step)
    assert both.item() == pytest.approx(
        plain.loss(p, rows, fixed, step).item() + 0.7 * alone.item()
    )


def test_each_silo_gets_an_attention_weighted_average_of_the_others():
    """Against the plain formula: silo j counts for silo i with sum_k s_k(i) s_k(j) / S_k."""
    view = silos_of([3, 2, 4])
    method = LIPM(LIPMConfig(**SMALL, averages=3, temperature=0.05))
    shared = method.init(view, Streams(0))
    private = _private(method, view, shared)
    fitted = method.fit(shared, private, view, Round(1, Streams(0)))
    summed = ExactSum(60)
    summed.add(fitted.update)
    after = method.apply(shared, summed.total())
    shares = fitted.update.dense["shares"]
    assert np.ptp(shares, axis=0).max() > 0.05  # silos differ
    np.testing.assert_allclose(shares.sum(1), 1, atol=1e-6)
    moved = fitted.update.dense["network"].sum(1)  # shares add up to one: the silos' own deltas
    attention = shares @ (shares / shares.sum(0)).T
    np.testing.assert_allclose(attention.sum(1), 1, atol=1e-6)
    ours = method._shares(after, fitted.private, view)
    np.testing.assert_array_equal(ours, shares)
    mixed = np.einsum("ik,kp->ip", shares, after["network"])
    np.testing.assert_allclose(mixed, shared["network"][0] + attention @ moved, atol=1e-5)
    # And of equal shares it is plain averaging.
    alike = LIPM(LIPMConfig(**SMALL, averages=3, temperature=1e9))
    same = alike.fit(shared, private, view, Round(1, Streams(0))).update.dense["shares"]
    np.testing.assert_allclose(same, 1 / 3, atol=1e-6)


@pytest.mark.parametrize("wrong", [{"lipm": False}, {"guidance": 0.5}])
def test_averages_refuse_what_they_cannot(wrong):
    with pytest.raises(ValueError, match=r"averages (= |> )"):
        LIPMConfig(**SMALL, averages=2, **wrong)


def test_the_baseline_may_be_tuned_alike():
    view = silos_of([3, 2, 4])
    options = {**SMALL, "lipm": False}
    plain, still, tuned = (
        LIPM(LIPMConfig(**options, **more))
        for more in ({}, {"tuned_baseline": True, "tune_steps": 0}, {"tuned_baseline": True})
    )
    shared, now = plain.init(view, Streams(0)), Round(1, Streams(0))
    found = {}
    for name, method in (("plain", plain), ("still", still), ("tuned", tuned)):
        fitted = method.fit(shared, _private(method, view, shared), view, now)
        found[name] = fitted.update.dense["network"], method.score(shared, fitted.private, view)
    for one, other in zip(found["plain"], found["still"], strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(found["plain"], found["tuned"], strict=True):
        assert not np.allclose(one, other)
    assert "tune_rate" in tuned.search
    assert "tune_rate" not in plain.search
