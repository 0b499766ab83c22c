"""PrivRec and its rivals: batched equals one device, and nothing looks where it must not."""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from hushrec import train
from hushrec.aggregation import ExactSum
from hushrec.analysis.run import adaptation_curve, first_rows
from hushrec.cli import main
from hushrec.data.features import encode
from hushrec.data.splitting import SplitConfig, make_split
from hushrec.data.views import Ragged
from hushrec.errors import ConfigError
from hushrec.evaluation.evaluator import EvaluationConfig, Evaluator
from hushrec.federation.backends import Machine
from hushrec.kernels.draws import DeviceSamples
from hushrec.kernels.feature_networks import ProximalDescent, fit_feature_networks
from hushrec.methods.base import method_class
from hushrec.methods.fcf import FCF
from hushrec.private import PrivateStore
from hushrec.streams import Round, Streams
from hushrec.testing import MethodContract, clients_of, taste_world

torch = pytest.importorskip("torch", reason="needs the 'neural' extra")
from hushrec.methods.privrec import (  # noqa: E402
    PrivRec,
    PrivRecCEN,
    _balanced,
)
from hushrec.methods.privrec_rivals import (  # noqa: E402
    FOFLSelf,
    NNSelf,
)
from hushrec.training.networks import (  # noqa: E402
    FeatureNetwork,
    proximal,
)
from hushrec.training.samples import draw_device_samples  # noqa: E402

STREAMS = Streams(3)
SMALL = {"d": 5, "hidden": (6, 4, 3, 3), "batch": 8, "epochs": 2, "lr": 0.1}


def small(kind, **more):
    return kind(kind.Config.model_validate({**SMALL, **more}))


def odd_clients():
    view = clients_of([[7], list(range(60)), [5, 3, 9], [], [4, 40, 8, 2, 20], [59, 1]])
    values = np.arange(len(view.values.values), dtype=np.float32) % 5 + 1
    return replace(view, values=Ragged(view.values.indptr, values))


def forward(network, theta, user, items):
    """Equation 1 for one device, embedding first, in plain torch."""
    at, params = 0, {}
    for name, shape in network.shapes.items():
        size = int(np.prod(shape))
        params[name] = theta[at : at + size].reshape(shape)
        at += size
    sides = []
    for side, rows, fields in (
        ("user", user.expand(len(items), -1), network.user_fields),
        ("item", items, network.item_fields),
    ):
        start, parts = 0, []
        for k, size in enumerate(fields):
            parts.append(rows[:, start : start + size] @ params[f"{side}{k}"])
            start += size
        sides.append(torch.cat([*parts, rows[:, start:]], 1))
    whole = torch.cat([params["first/user"], params["first/item"]])
    x = torch.relu(torch.cat(sides, 1) @ whole + params["first/bias"])
    for k in range(len(network.hidden)):
        x = x @ params[f"layer{k}/weight"] + params[f"layer{k}/bias"]
        x = torch.relu(x) if k < len(network.hidden) - 1 else x
    return x[:, 0]


def device_batches(view, client, method):
    config, alone = method.config, view.take(np.array([client]))
    samples = draw_device_samples(
        alone,
        config.negatives,
        config.epochs,
        Round(1, STREAMS),
        positive_above=config.positive_above,
        ratings=getattr(config, "output", None) == "linear",
    )
    length = int(samples.lengths[0])
    for epoch in range(config.epochs):
        for first in range(0, length, config.batch):
            at = slice(epoch * length + first, epoch * length + min(first + config.batch, length))
            yield samples.items[at].astype(np.int64), torch.from_numpy(samples.labels[at])


@pytest.mark.parametrize("kind", ["squared", "norm"])
@pytest.mark.parametrize("mu", [0.0, 0.7])
@pytest.mark.parametrize("above", [None, 3.0, "ratings"])
def test_privrec_trains_as_one_device_would(kind, mu, above):
    linear = above == "ratings"
    asked = {"output": "linear", "lr": 0.01} if linear else {"positive_above": above}
    method = small(PrivRec, mu=mu, proximal=kind, **asked)
    view = odd_clients()
    shared = method.init(view, STREAMS)
    fitted = method.fit(shared, {}, view, Round(1, STREAMS))
    network = method.network(view)
    users = torch.from_numpy(encode(view.user_features, view.users, "user").rows)
    items = torch.from_numpy(encode(view.item_features, np.arange(60), "item").rows)
    for client in range(len(view)):
        received = torch.tensor(shared["theta"])
        theta = received.clone().requires_grad_()
        for chosen, labels in device_batches(view, client, method):
            logits = forward(network, theta, users[client], items[chosen])
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
            if linear:
                loss = ((logits - labels) ** 2).mean() / 2
            squares = ((theta - received) ** 2).sum()
            away = squares if kind == "squared" else (squares + 1e-12).sqrt()
            (gradient,) = torch.autograd.grad(loss + mu / 2 * away, theta)
            theta = (theta - method.config.lr * gradient).detach().requires_grad_()
        expected = (theta - received).detach().numpy()
        np.testing.assert_allclose(fitted.update.dense["theta"][client], expected, atol=2e-5)


class TestShares(MethodContract):
    method = PrivRec
    options = {**SMALL, "shares": True}  # noqa: RUF012
    beats_chance = False  # two epochs of a small network


def test_shares_are_one_more_feature_of_items():
    method, view = small(PrivRec, shares=True), odd_clients()
    shared = method.init(view, STREAMS)
    plain = small(PrivRec).network(view)
    assert method.network(view).item_numbers == plain.item_numbers + 1
    assert (method.inputs(shared, view)[1][:, -1] == 0).all()  # nobody has said anything yet
    for number in (1, 2):
        summed = ExactSum(60)
        summed.add(method.fit(shared, {}, view, Round(number, STREAMS)).update)
        shared = method.apply(shared, summed.total())
    counts = np.zeros(60)
    for items in map(np.unique, view.positives):
        counts[items] += 2 / np.sqrt(max(1, len(items)))
    np.testing.assert_allclose(shared["counts"], counts, atol=1e-5)
    expected = np.log1p(counts / counts.mean())
    np.testing.assert_allclose(method.inputs(shared, view)[1][:, -1], expected, atol=1e-5)
    scores = method.score(shared, method.adapt(shared, {}, view, STREAMS), view)
    assert len(np.unique(scores[1])) > len(
        np.unique(small(PrivRec).inputs(shared, view)[1], axis=0)
    )


def test_shares_are_part_of_the_clipped_and_noised_upload():
    """Under noise counts are noised too: every item has one, touched or not."""
    settings = {**SMALL, "shares": True, "privacy.mode": "central", "privacy.epsilon": 8.0}
    more = {"privacy.clip": 1.0, "privacy.noise_seed": 0, "evaluation.every": 2}
    run = train(taste_world(), "privrec", rounds=2, settings={**settings, **more})
    assert (run.model.shared["counts"] != 0).all()
    assert run.summary.privacy.epsilon <= 8.0


def test_pooled_users_may_count_alike():
    view = odd_clients()
    samples = draw_device_samples(view, 1, 1, Round(1, STREAMS))
    drawn = _balanced(samples, np.random.default_rng(0))
    owner = np.repeat(np.arange(len(view)), samples.lengths)[drawn]
    counts = np.bincount(owner, minlength=len(view))
    assert (counts[samples.lengths > 0] == counts.max()).all()
    assert counts[3] == 0  # has no rows
    for tasks in (False, True):
        method = small(PrivRecCEN, tasks=tasks, shares=True)
        shared = method.init(view, STREAMS)
        fitted = method.fit(shared, {}, view, Round(1, STREAMS))
        assert np.isfinite(fitted.update.dense["theta"]).all()
        summed = fitted.update.rows["counts"].rows[:, 0].sum()
        assert summed == pytest.approx(sum(np.sqrt(len(np.unique(p))) for p in view.positives))


def test_ratings_have_no_threshold():
    with pytest.raises(ValueError, match="leave out positive_above"):
        small(PrivRec, output="linear", positive_above=3.0)


def test_the_proximal_term_keeps_copies_close():
    view = odd_clients()
    moved = []
    for mu in (0.0, 0.5, 5.0):
        method = small(PrivRec, mu=mu)
        update = method.fit(method.init(view, STREAMS), {}, view, Round(1, STREAMS)).update
        moved.append(np.linalg.norm(update.dense["theta"][1]))
    assert moved[0] > 1.2 * moved[1] > 1.2 * moved[2]


def test_the_meta_gradient_is_that_of_a_plain_second_order_reference():
    method = small(NNSelf, epochs=3, lr=0.2)
    view = odd_clients()
    shared = method.init(view, STREAMS)
    update = method.fit(shared, {}, view, Round(1, STREAMS)).update
    network = method.network(view)
    users = torch.from_numpy(encode(view.user_features, view.users, "user").rows).double()
    items = torch.from_numpy(encode(view.item_features, np.arange(60), "item").rows).double()
    first_order_differs = False
    for client in range(len(view)):
        samples = draw_device_samples(view.take(np.array([client])), 4, 1, Round(1, STREAMS))
        chosen, labels = samples.items.astype(np.int64), torch.from_numpy(samples.labels).double()
        half = (len(chosen) + 1) // 2

        def loss(theta, at, user=users[client], chosen=chosen, labels=labels):
            logits = forward(network, theta, user, items[chosen[at]])
            return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels[at])

        start = torch.tensor(shared["theta"]).double().requires_grad_()
        theta = start
        for _ in range(3):
            for first in range(0, half, 8):
                inner = loss(theta, slice(first, min(first + 8, half)))
                (gradient,) = torch.autograd.grad(inner, theta, create_graph=True)
                theta = theta - 0.2 * gradient
        if len(chosen) == half:  # no query set
            expected = first_order = np.zeros(len(start))
        else:
            outer = loss(theta, slice(half, len(chosen)))
            first_order = torch.autograd.grad(outer, theta, retain_graph=True)[0].numpy()
            expected = torch.autograd.grad(outer, start)[0].numpy()
        np.testing.assert_allclose(-update.dense["theta"][client], expected, atol=2e-5)
        first_order_differs |= np.abs(first_order - expected).max() > 1e-3
    assert first_order_differs, "the test would not see a first-order gradient"


def test_fofl_trains_as_one_device_would():
    method = small(FOFLSelf, item_lr=0.3)
    view = odd_clients()
    shared = method.init(view, STREAMS)
    fitted = method.fit(shared, {}, view, Round(1, STREAMS))
    network = method._network()
    sent = fitted.update.rows["items"].differences()
    for client in range(len(view)):
        received = torch.tensor(shared["theta"])
        theta, table = received.clone().requires_grad_(), torch.tensor(shared["items"])
        for chosen, labels in device_batches(view, client, method):
            table.requires_grad_()
            logits = forward(network, theta, torch.ones(1, 1), table[chosen])
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
            g_theta, g_table = torch.autograd.grad(loss, [theta, table])
            theta = (theta - 0.1 * g_theta).detach().requires_grad_()
            table = (table - 0.3 * g_table).detach()
        expected = (theta - received).detach().numpy()
        np.testing.assert_allclose(fitted.update.dense["theta"][client], expected, atol=2e-5)
        moved = table.detach().numpy() - shared["items"]
        mine = slice(sent.indptr[client], sent.indptr[client + 1])
        np.testing.assert_allclose(sent.rows[mine], moved[sent.ids[mine]], atol=2e-5)
        untouched = np.delete(moved, sent.ids[mine], axis=0)
        assert not untouched.any()


def test_pooled_steps_are_those_of_one_network():
    """Users of one batch differ, so the kernel works out more than one of them per step."""
    method, view = small(PrivRecCEN, pooled_batch=16, pooled_lr=0.2), odd_clients()
    shared = method.init(view, STREAMS)
    moved = method.fit(shared, {}, view, Round(1, STREAMS)).update.dense["theta"][0]
    network = method.network(view)
    users = torch.from_numpy(encode(view.user_features, view.users, "user").rows)
    items = torch.from_numpy(encode(view.item_features, np.arange(60), "item").rows)
    samples = draw_device_samples(view, 4, 1, Round(1, STREAMS))
    owner = np.repeat(np.arange(len(view)), samples.lengths)
    order = STREAMS.generator("fit/order", 1).permutation(len(owner))
    theta = torch.tensor(shared["theta"], requires_grad=True)
    for start in range(0, len(order), 16):
        at = order[start : start + 16]
        rows = users[owner[at]], items[samples.items[at].astype(np.int64)]
        logits = torch.cat(
            [
                forward(network, theta, mine, theirs[None])
                for mine, theirs in zip(*rows, strict=True)
            ]
        )
        labels = torch.from_numpy(samples.labels[at])
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        (gradient,) = torch.autograd.grad(loss, theta)
        theta = (theta - 0.2 * gradient).detach().requires_grad_()
    expected = theta.detach().numpy() - shared["theta"]
    assert len(set(owner)) > 3
    np.testing.assert_allclose(moved, expected, atol=2e-5)


@given(
    st.lists(st.integers(1, 4), max_size=2),
    st.integers(0, 2),
    st.lists(st.integers(1, 4), max_size=2),
    st.integers(1, 5),
    st.integers(1, 7),
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.integers(1, 9),
    st.booleans(),
)
@settings(max_examples=40)
def test_a_step_is_that_of_autograd_for_any_sizes(
    user_fields, user_numbers, item_fields, item_numbers, d, hidden, samples, trained
):
    """Fields, numbers, widths and batches that fill no vector; inputs with zeros among them."""
    network = FeatureNetwork(
        tuple(user_fields), user_numbers, tuple(item_fields), item_numbers, d, tuple(hidden)
    )
    draw = np.random.default_rng(samples)
    rows = {
        side: draw.choice([0.0, 0.5, 1.0, -1.0], (4, sum(fields) + numbers)).astype(np.float32)
        for side, fields, numbers in (
            ("user", user_fields, user_numbers),
            ("item", item_fields, item_numbers),
        )
    }
    received = network.initial(STREAMS)
    theta = received + draw.normal(0, 0.1, len(received)).astype(np.float32)
    who, what = draw.integers(0, 4, samples), draw.integers(0, 4, samples)
    labels = draw.integers(0, 2, samples).astype(np.float32)
    copies, items = theta[None].copy(), rows["item"].copy()
    losses = fit_feature_networks(
        copies,
        received,
        rows["user"],
        items,
        np.array([0, 4]),
        who,
        DeviceSamples(np.array([0, samples]), what, labels, 1),
        samples,
        network.layout,
        ProximalDescent(0.3, 0.4, True, 0.2 if trained else 0.0),
    )
    before, table = torch.tensor(theta, requires_grad=True), torch.tensor(rows["item"])
    table.requires_grad_()
    params = network.unpack(before[None])
    logits = network.logits(params, torch.from_numpy(rows["user"])[who][None], table[what][None])
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits[0], torch.tensor(labels))
    away = proximal(before[None], torch.from_numpy(received), 0.4, "squared").sum()
    g_theta, g_table = torch.autograd.grad(loss + away, [before, table])
    assert losses[0] == pytest.approx(loss.item(), abs=1e-5)
    np.testing.assert_allclose(copies[0], theta - 0.3 * g_theta.numpy(), atol=1e-5)
    moved = 0.2 * g_table.numpy() if trained else 0.0
    np.testing.assert_allclose(items, rows["item"] - moved, atol=1e-5)


def test_scores_are_equation_1_with_the_adapted_copy():
    method, view = small(PrivRec, adapt_epochs=3), odd_clients()
    shared = method.init(view, STREAMS)
    adapted = method.adapt(shared, {}, view, STREAMS)
    scores = method.score(shared, adapted, view)
    network = method.network(view)
    users = torch.from_numpy(encode(view.user_features, view.users, "user").rows)
    items = torch.from_numpy(encode(view.item_features, np.arange(60), "item").rows)
    for client in range(len(view)):
        theta = torch.from_numpy(adapted["theta"][client])
        expected = forward(network, theta, users[client], items).numpy()
        np.testing.assert_allclose(scores[client], expected, atol=1e-5)
    assert not np.allclose(scores, method.score(shared, {}, view))


@pytest.mark.parametrize("kind", [PrivRec, FOFLSelf])
def test_adaptation_has_a_rate_of_its_own(kind):
    view = odd_clients()
    slow, same, usual = (small(kind, adapt_lr=lr) for lr in (0.01, 0.1, None))
    shared = usual.init(view, STREAMS)
    adapted = [method.adapt(shared, {}, view, STREAMS)["theta"] for method in (slow, same, usual)]
    np.testing.assert_array_equal(adapted[1], adapted[2])
    away = [np.linalg.norm(theta[1] - shared["theta"]) for theta in adapted]
    assert 0 < away[0] < away[1] / 3


def test_fcf_follows_the_gradient_of_its_loss():
    method = FCF(FCF.Config(d=4, alpha=3.0, ridge=0.5, rate=0.1, positive_above=3.0))
    view = odd_clients()
    shared = method.init(view, STREAMS)
    fitted = method.fit(method.download(shared), {}, view, Round(1, STREAMS))
    items = torch.tensor(shared["items"], requires_grad=True)
    total = torch.zeros((), dtype=torch.float64)
    for client in range(len(view)):
        wanted = np.zeros(60)
        wanted[view.positives[client][view.values[client] > 3]] = 1
        weight = 1 + 3.0 * wanted
        table = shared["items"]
        left = table.T @ (weight[:, None] * table) + 0.5 * np.eye(4)
        vector = np.linalg.solve(left, table.T @ (weight * wanted))
        apart = torch.tensor(wanted) - items @ torch.tensor(vector)
        total = total + (torch.tensor(weight) * apart**2).sum()
    (gradient,) = torch.autograd.grad((total + 0.5 * (items**2).sum()) / len(view), items)
    from hushrec.aggregation import ExactSum

    summed = ExactSum(60)
    summed.add(fitted.update)
    after = method.apply(shared, summed.total())
    # Adam's first step is the rate times the sign of the gradient.
    gradient = gradient.numpy()
    np.testing.assert_allclose(after["mean"] / 0.1, gradient, atol=1e-4)
    clear = np.abs(gradient) > 1e-3
    moved = (after["items"] - shared["items"])[clear]
    np.testing.assert_allclose(moved, -0.1 * np.sign(gradient[clear]), atol=1e-3)


# ---------------------------------------------------------------- unseen users


UNSEEN = SplitConfig(kind="unseen-users")


def unseen(split=None):
    split = split or make_split(taste_world(), UNSEEN, STREAMS)
    return Evaluator(split, EvaluationConfig(), STREAMS, 1)


@pytest.mark.parametrize("kind", ["unseen-users", "leave-one-out"])
@pytest.mark.parametrize("name", ["privrec", "nn-self", "fofl-self", "privrec-cen", "fcf"])
def test_adaptation_never_sees_what_is_held_out(name, kind):
    method = small(method_class(name)) if name != "fcf" else FCF()
    split = make_split(taste_world(), SplitConfig(kind=kind), STREAMS)
    evaluator = unseen(split)
    users = split.evaluated("test")
    shared = method.init(split.train, STREAMS)
    store = PrivateStore(method.private_fields(split.train, shared, STREAMS), split.n_users)
    before = evaluator.model(method, shared, store).private_of(users)
    # Another future: every held-out item of everybody is another one now.
    others = {
        part: Ragged(heldout.indptr, ((heldout.values + 1) % 60).astype(np.int32))
        for part, heldout in (("valid", split.valid), ("test", split.test))
    }
    changed = unseen(replace(split, **others))
    after = changed.model(method, shared, store).private_of(users)
    history = split.train.take(users)
    np.testing.assert_array_equal(
        method.score(shared, before, history), method.score(shared, after, history)
    )


def test_the_adaptation_curve_asks_the_same_question_with_more_and_more_known():
    method = small(PrivRec, adapt_epochs=10, lr=0.2)
    evaluator = unseen()
    shared = method.init(evaluator.split.train, STREAMS)
    model = evaluator.model(method, shared, PrivateStore({}, evaluator.split.n_users))
    curve = adaptation_curve(evaluator, model, "test", ["auc"], (0, 2, 4))
    assert [point["interactions"] for point in curve["points"]] == [0, 2, 4]
    assert curve["users"] == 12
    # Untrained, the network knows nothing; a user's own items name their third of the catalogue.
    assert curve["points"][2]["auc"] > curve["points"][0]["auc"] + 0.1
    whole = evaluator.split.train.take(evaluator.split.evaluated("test"))
    assert first_rows(whole, 2).positives[3].tolist() == whole.positives[3][:2].tolist()


def test_a_curve_needs_unseen_users():
    evaluator = unseen(make_split(taste_world(), SplitConfig(), STREAMS))
    method = small(PrivRec)
    shared = method.init(evaluator.split.train, STREAMS)
    model = evaluator.model(method, shared, PrivateStore({}, evaluator.split.n_users))
    with pytest.raises(ConfigError, match=r"split\.kind=unseen-users"):
        adaptation_curve(evaluator, model, "test", ["auc"])


def test_a_run_does_not_depend_on_threads_or_chunks():
    how = {
        "rounds": 3,
        "settings": {
            **SMALL,
            "split.kind": "unseen-users",
            "cohort.kind": "fixed",
            "cohort.size": 9,
        },
    }
    runs = [
        train(taste_world(), "privrec", machine=machine, **how)
        for machine in (Machine(1), Machine(2, chunk=2), Machine(1, chunk=5))
    ]
    for other in runs[1:]:
        np.testing.assert_array_equal(runs[0].model.shared["theta"], other.model.shared["theta"])
        assert runs[0].summary.test == other.summary.test


def test_a_newcomer_is_served_from_their_items_and_features():
    run = train(
        taste_world(), "privrec", rounds=20, settings={**SMALL, "split.kind": "unseen-users"}
    )
    liked = [f"item-{k:02d}" for k in range(20, 28)]
    found = run.recommend("somebody", 8, liked, {"taste": "middle"})
    assert {line.item for line in found}.isdisjoint(liked)
    assert sum(20 <= int(line.item.removeprefix("item-")) < 40 for line in found) >= 6


@pytest.mark.parametrize("name", ["privrec", "nn-self", "privrec-cen"])
def test_data_without_features_is_refused(name):
    bare = replace(taste_world(), item_features={})
    with pytest.raises(ConfigError, match="this data has none: use data with item features"):
        train(bare, name, rounds=1)


def test_dp_privrec_runs_with_the_papers_clipping():
    settings = {
        **SMALL,
        "split.kind": "unseen-users",
        "cohort.kind": "fixed",
        "cohort.size": 10,
        "privacy.mode": "central",
        "privacy.noise_seed": 0,
        "privacy.noise": 1.0,
        "privacy.clipping": "adaptive",
        "privacy.clip": 1.0,
        "privacy.bit_share": 0.7,
        "privacy.quantile": 0.9,
        "privacy.clip_steps": "arithmetic",
    }
    run = train(taste_world(), "privrec", rounds=2, settings=settings)
    assert run.summary.privacy.epsilon > 0
    assert "replace" in run.summary.privacy.statement


def test_the_curve_is_printed_kept_and_drawn(tmp_path):
    out = tmp_path / "run"
    train("demo", "popularity", settings={"split.kind": "unseen-users"}, out=out)
    result = CliRunner().invoke(main, ["evaluate", str(out), "--adaptation", "--json"])
    assert result.exit_code == 0, result.output
    curve = json.loads(result.stdout)
    assert [point["interactions"] for point in curve["points"]] == [0, 1, 2, 5, 10, 20]
    # Popularity learns nothing from a user, and is asked the same question each time.
    assert len({point["hits@20"] for point in curve["points"]}) == 1
    assert json.loads((out / "adaptation.json").read_text()) == curve
    assert 'id="adaptation"' in (out / "report.html").read_text()
    shown = CliRunner().invoke(main, ["evaluate", str(out), "--adaptation"])
    assert "users that training left out" in " ".join(shown.stdout.split())
