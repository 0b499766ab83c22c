"""FedMix: its kernels against slow twins, its rounds against each other, its experts."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hushrec
import reference
from hushrec.aggregation import KeyedRows
from hushrec.config import names
from hushrec.data.splitting import SplitConfig, make_split
from hushrec.errors import ConfigError
from hushrec.federation.backends import Machine
from hushrec.federation.experiment import ExperimentRequest
from hushrec.kernels import mixture
from hushrec.kernels.mixture import PairTable
from hushrec.methods.base import Reason
from hushrec.methods.shared.options import first_trial, next_trials, rescaled
from hushrec.methods.statistics import experts, pair_tables
from hushrec.methods.statistics.embedded_experts import leading_vectors
from hushrec.methods.statistics.experts import (
    HELD_OUT,
    Counting,
    Expert,
    expert_class,
    flatten,
    joined,
    unflatten,
)
from hushrec.methods.statistics.fedmix import CANDIDATES, FedMix
from hushrec.private import PrivateStore
from hushrec.serving.bundle import export
from hushrec.serving.data import ServingData
from hushrec.serving.model import Model
from hushrec.serving.recommender import Recommender
from hushrec.streams import Streams
from hushrec.testing import MethodContract, clients_of, taste_world
from hushrec.testing.checks import Federation, check_same

QUICK = {
    "newton_rounds": 3,
    "network_rounds": 3,
    "top_candidates": 20,
    "random_candidates": 10,
}
SMALL = {**QUICK, "reranked": 12, "hidden": 4, "factors": 4}


def small(**more):
    return FedMix(FedMix.Config(**{**SMALL, **more}))


def tastes():
    return make_split(taste_world(), SplitConfig(), Streams(0)).train_view("honest")


class TestSmall(MethodContract):
    method = FedMix
    options = SMALL


# ------------------------------------------------------------------ kernels and their twins

histories = st.lists(
    st.lists(st.integers(0, 11), min_size=1, max_size=9, unique=True), min_size=1, max_size=5
)


def long_table(rng, n_items, width, low=-1.0):
    neighbours = np.argsort(rng.random((n_items, n_items)), axis=1)[:, :width].astype(np.int32)
    weights = rng.uniform(low, 1.0, (n_items, width)).astype(np.float32)
    weights[neighbours == np.arange(n_items)[:, None]] = 0
    return {"neighbours": neighbours, "weights": weights}


TABLES = [("transitions", "weights"), ("recent-transitions", "weights")]
TABLES.append(("recent-transitions", "counts"))


def dense_table(shared, expert, name):
    tree = unflatten(shared)
    return reference.unpacked(PairTable(**tree["pairs"], **tree[expert][name]))


def packed_tables(long, pairs):
    n_items = len(long[0]["weights"])
    shares = np.linspace(0.1, 2, n_items).astype(np.float32)
    index = pair_tables.empty_index(n_items, pairs)
    index, tables = pair_tables.packed(index, long, shares)
    return [PairTable(**index, **table) for table in tables], shares


@given(histories, st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_weights_by_lag(rows, seed):
    rng = np.random.default_rng(seed)
    (table,), _ = packed_tables([long_table(rng, 12, 5)], 60)
    dense = reference.unpacked(table)
    view, ends, fade = clients_of(rows, 12), [1, 3, 6], [1.0, 0.5, 0.25, 0.2]
    for last in (6, 0):
        ends[-1] = last
        out = np.zeros((len(rows), 3, 12), np.float32)
        past, by_place = view.positives, np.array(fade, np.float32)
        mixture.add_by_lag(out, past.indptr, past.values, table, np.array(ends), by_place)
        expected = [reference.by_lag(row, dense, ends, fade, 12) for row in rows]
        np.testing.assert_allclose(out, expected, atol=1e-5)


@given(
    st.integers(2, 600),
    st.integers(1, 12),
    st.integers(1, 400),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=40, deadline=None)
def test_packed_tables_keep_the_pairs_that_matter_most(n_items, width, pairs, signed, seed):
    """The common index holds the pairs of the slow reference, and weights are near their own."""
    rng = np.random.default_rng(seed)
    width = min(width, n_items)
    long = [long_table(rng, n_items, width, -1.0 if signed else 0.0) for _ in range(2)]
    tables, shares = packed_tables(long, pairs)
    wanted = reference.important_pairs(long, shares, pairs)
    for table, own in zip(tables, long, strict=True):
        dense = reference.unpacked(table)
        whole = np.zeros((n_items, n_items), np.float32)
        np.put_along_axis(whole, own["neighbours"].astype(np.int64), own["weights"], 1)
        kept = np.where(wanted, whole, 0)
        levels = 15 if (own["weights"] < 0).any() else 127
        largest = np.abs(kept).max(axis=1, keepdims=True)
        near = np.sqrt(np.abs(kept) * largest) / levels + largest / (4 * levels**2)
        assert (np.abs(dense - kept) <= near + 1e-6).all()
        rows = np.arange(n_items, dtype=np.int32)
        np.testing.assert_array_equal(pair_tables.packed_weights(rows, rows, table), dense)


@given(histories)
@settings(max_examples=40)
def test_groups_that_follow(rows):
    rng = np.random.default_rng(0)
    members = rng.random((12, 5)).astype(np.float32) * (rng.random((12, 5)) < 0.6)
    sizes, fade = np.array([2, 3]), np.array([1, 0.5], np.float32)
    past = clients_of(rows, 12).positives
    indptr, keys, sums = mixture.following_groups(past.indptr, past.values, members, sizes, fade)
    for client, row in enumerate(rows):
        found = np.zeros(25)
        found[keys[indptr[client] : indptr[client + 1]]] = sums[
            indptr[client] : indptr[client + 1], 0
        ]
        expected = reference.groups_following(row, members, sizes, fade)
        np.testing.assert_allclose(found.reshape(5, 5), expected, atol=1e-5)


def test_groups_speak_for_items():
    rng = np.random.default_rng(1)
    members = rng.random((12, 5)).astype(np.float32)
    relations = rng.normal(size=(5, 5)).astype(np.float32)
    rows = [[3, 1, 7, 2], [5]]
    past, out = clients_of(rows, 12).positives, np.zeros((2, 4, 12), np.float32)
    mixture.score_groups(
        past.indptr, past.values, members, np.array([2, 3]), relations, np.array([2, 0]), out
    )
    for client, row in enumerate(rows):
        for field, groups in enumerate((slice(0, 2), slice(2, 5))):
            for span, used in enumerate((row[-2:], row)):
                onwards = members[used][:, groups].mean(axis=0) @ relations[groups, groups]
                expected = members[:, groups] @ onwards
                np.testing.assert_allclose(out[client, 2 * field + span], expected, atol=1e-5)


@given(histories, st.integers(1, 3))
@settings(max_examples=40)
def test_the_parts_of_a_count_add_up(rows, held):
    """What is uploaded without the held items and what they add is what the whole history is."""
    view, method = clients_of(rows, 12), small(held_out=held)
    everything = Counting(0, 1, np.zeros(0, np.bool_))
    counted = everything.count(method._applicable(view), view, method._held_out_counts(view))
    for expert in method._applicable(view):
        whole, both = (np.zeros((len(rows), 144)) for _ in range(2))
        for into, stack in (
            (whole, expert.count(view)),
            (both, counted[joined(HELD_OUT, expert.name)]),
            (both, counted[expert.name]),
        ):
            owner = np.repeat(np.arange(len(rows)), np.diff(stack.indptr))
            np.add.at(into, (owner, stack.ids), stack.rows[:, 0])
        np.testing.assert_allclose(both, whole, atol=1e-6)


@pytest.mark.parametrize(("top", "others"), [(3, 4), (8, 2), (30, 30)])
def test_candidates(top, others):
    rng = np.random.default_rng(2)
    prior, seen, key = rng.normal(size=40).astype(np.float32), np.array([1, 5, 30]), Streams(0)
    drawn = np.zeros(40)
    for user in range(3000):
        found, log_weights = mixture.choose_candidates(
            prior, seen, 7, top, others, key.key("x"), user
        )
        assert found[0] == 7
        assert len(set(found)) == len(found)
        assert not set(found) & set(seen)
        drawn[found] += np.exp(log_weights)
    rest = np.setdiff1d(np.arange(40), [*seen, 7])
    if len(rest) <= top + others:
        assert set(found) == {7, *rest}
        return
    best = rest[np.argsort(-prior[rest])][:top]
    assert set(found[1 : top + 1]) == set(best)
    # What is drawn stands for what is not: every item weighs one on average.
    np.testing.assert_allclose(drawn[rest] / 3000, 1.0, atol=0.15)


def questions(clients=6, block=9, width=4, seed=3):
    """Blocks of candidates, some of them shorter, and their log weights."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(clients, block, width + 1)).astype(np.float32)
    rows[:, :, width] = 0
    rows[:, 6:, width] = np.log(3)
    rows[1, 5:, width] = mixture.NONE
    held = np.array([0, 1, 2, 2, 4, 5, 6])  # the second client has no question
    return held * block, rows.reshape(-1, width + 1), rows


def test_newton_sums_are_derivatives():
    indptr, flat, rows = questions()
    scale = np.array([1, 2, 0.5, 1], np.float32)
    weights = np.array([0.3, -1, 0.2, 0.5], np.float32)
    has, sums = mixture.newton_sums(indptr, flat, 9, weights, scale)
    assert has.tolist() == [0, 1, 2, 2, 3, 4, 5]
    asked = [[0], [1], [2, 3], [4], [5]]
    for mine, found in zip(asked, sums, strict=True):

        def loss(w, mine=mine):
            return sum(reference.mixture_loss(torch.tensor(rows[q]), w, scale) for q in mine)

        w = torch.tensor(weights, dtype=torch.float64)
        gradient = torch.autograd.functional.jacobian(loss, w)
        hessian = torch.autograd.functional.hessian(loss, w)
        assert found[0] == len(mine)
        assert found[1] == pytest.approx(float(loss(w)), rel=1e-4)
        np.testing.assert_allclose(found[2:6], gradient, atol=1e-4)
        np.testing.assert_allclose(found[6:], hessian[np.triu_indices(4)], atol=1e-4)


def test_sums_of_the_start_are_scaled_afterwards():
    """The first sums are made before the scale is known."""
    indptr, flat, _ = questions()
    scale = np.array([1, 2, 0.5, 0.001], np.float32)
    weights = np.array([0.3, -1, 0.2, 0.5], np.float32)
    before = mixture.newton_sums(indptr, flat, 9, weights, np.ones(4, np.float32))[1]
    after = mixture.newton_sums(indptr, flat, 9, weights * scale, scale)[1]
    np.testing.assert_allclose(rescaled(before, scale), after, rtol=1e-3, atol=1e-3)


def test_newton_finds_the_minimum():
    indptr, flat, rows = questions(clients=6)
    scale = np.ones(4, np.float32)
    state = first_trial(np.zeros(4))
    for _ in range(6):
        trials = state["trials"].astype(np.float32)
        sums = [mixture.newton_sums(indptr, flat, 9, w, scale)[1].sum(axis=0) for w in trials]
        before, state = state, next_trials(state, np.array(sums, np.float64), 0.1)
        assert state["loss"] <= before["loss"]
    w = torch.tensor(state["weights"], requires_grad=True)
    loss = sum(reference.mixture_loss(torch.tensor(q), w, scale) for q in rows) / 6
    (loss + 0.05 * (w @ w)).backward()
    assert float(w.grad.abs().max()) < 1e-3


@pytest.mark.parametrize("best", [4, 9])
def test_the_network_learns_by_its_derivatives(best):
    indptr, flat, rows = questions(width=5)
    rng = np.random.default_rng(5)
    hidden, width = 3, 5
    size = width * hidden + hidden + hidden**2 + 2 * hidden + 1
    networks = rng.normal(size=(2, size)).astype(np.float32)
    center, scale = rng.normal(size=(2, width)).astype(np.float32)
    scale = np.abs(scale) + np.float32(0.5)
    weights = rng.normal(size=(2, width - 1)).astype(np.float32)
    reranker = mixture.Reranker(center, scale, networks, hidden, best)
    has, sums = mixture.network_sums(indptr, flat, 9, weights, reranker)
    found = 0
    for client, mine in enumerate([[0], [1], [], [2, 3], [4], [5]]):
        parameters = torch.tensor(networks, requires_grad=True)
        losses = [
            loss
            for q in mine
            for one in parameters
            if (loss := reference.network_loss(rows[q], weights, center, scale, one, best))
            is not None
        ]
        assert has[client + 1] - has[client] == bool(losses)
        if losses:
            sum(losses).backward()
            assert sums[found, 0] == len(losses) / 2
            expected = parameters.grad.numpy().ravel()
            np.testing.assert_allclose(sums[found, 1:], expected, atol=2e-3)
            found += 1
    assert found >= 2, "the test has questions"


def test_what_is_not_reranked_stays_below():
    rng = np.random.default_rng(6)
    mixed = rng.normal(size=(4, 30)).astype(np.float32)
    scores = rng.normal(size=(4, 3, 30)).astype(np.float32)
    before, hidden = mixed.copy(), 3
    networks = rng.normal(size=(2, 4 * hidden + hidden + hidden**2 + 2 * hidden + 1)) * 3
    seen = np.array([0, 1, 2, 3, 4, 5])
    ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
    reranker = mixture.Reranker(zeros, ones, networks.astype(np.float32), hidden, 8)
    mixture.rerank(mixed, scores, ones, np.array([0, 3, 3, 6, 6]), seen, reranker)
    assert not np.array_equal(mixed, before)
    for client, touched in enumerate(([0, 1, 2], [], [3, 4, 5], [])):
        rest = np.setdiff1d(np.arange(30), touched)
        best = rest[np.argsort(-before[client, rest])][:8]
        others = np.setdiff1d(rest, best)
        assert mixed[client, others].max() <= mixed[client, best].min() + 1e-5
        # Those keep their order among themselves.
        assert (np.argsort(mixed[client, others]) == np.argsort(before[client, others])).all()


def test_networks_rerank_by_their_mean():
    """The scores of several networks are the means of those of each alone; equal ones, the same."""
    rng = np.random.default_rng(8)
    mixed = rng.normal(size=(3, 20)).astype(np.float32)
    scores = rng.normal(size=(3, 3, 20)).astype(np.float32)
    networks = rng.normal(size=(3, 4 * 3 + 3 + 9 + 6 + 1)).astype(np.float32)
    ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)

    def reranked(some):
        out = mixed.copy()
        reranker = mixture.Reranker(zeros, ones, some, 3, 20)
        nobody = np.zeros(4, np.int64), np.zeros(0, np.int64)
        mixture.rerank(out, scores, ones, *nobody, reranker)
        return out

    alone = [reranked(networks[n : n + 1]) for n in range(3)]
    np.testing.assert_allclose(reranked(networks), np.mean(alone, axis=0), atol=1e-5)
    np.testing.assert_allclose(reranked(networks[[1, 1, 1]]), alone[1], atol=1e-5)
    assert np.abs(alone[0] - alone[1]).max() > 0.1


def test_networks_start_differently():
    shared = small(networks=3).init(tastes(), Streams(0))
    first, second, third = shared["networks"]
    assert not np.array_equal(first, second)
    assert not np.array_equal(second, third)
    alone = small(networks=1).init(tastes(), Streams(0))["networks"]
    assert np.array_equal(alone[0], first)


def test_vectors_are_the_leading_eigenvectors():
    rng = np.random.default_rng(7)
    x = rng.random((200, 30)) < np.linspace(0.05, 0.5, 30)
    gram = x.T.astype(float) @ x
    roots = 1 / np.sqrt(np.diag(gram) + 1)
    values, vectors = np.linalg.eigh(gram * roots[:, None] * roots)
    expected = (vectors[:, -5:] * values[-5:]) @ vectors[:, -5:].T
    found = leading_vectors(gram, 5).astype(float)
    np.testing.assert_allclose(found @ found.T, expected, atol=5e-3)
    assert leading_vectors(gram[:3, :3], 5).shape == (3, 5)


# ------------------------------------------------------------------ the rounds


def test_a_tree_comes_back():
    tree = {"a": np.arange(2), "b": {"c": np.arange(3), "d": {"e": np.arange(4)}}}
    flat = flatten(tree)
    assert list(flat) == ["a", "b/c", "b/d/e"]
    check_same(unflatten(flat), tree, "a tree")


def test_every_step_is_exact_for_one_client_or_many():
    """Counting, asking, weights and network: clients one by one come to the same bits."""
    method = small()
    at_once, alone = (
        Federation(method, tastes(), machine=Machine(threads=1, chunk=chunk)) for chunk in (None, 1)
    )
    uploaded = []
    for _ in range(method.planned_rounds + 1):
        first, second = at_once.round(), alone.round()
        check_same(at_once.shared, alone.shared, f"round {at_once.number}")
        assert first.up_bytes == second.up_bytes
        uploaded.append(first.up_bytes)
    scores = method.score(at_once.shared, {}, tastes())
    single = method.score(at_once.shared, {}, tastes().take(np.array([7])))
    assert np.array_equal(single[0], scores[7])
    assert all(uploaded[:-1])
    assert uploaded[-1] == 0, "after the last step nothing is uploaded"
    assert [phase.name for phase in method.phases] == [
        "count",
        "score candidates",
        "fit weights",
        "fit network",
    ]
    kept = at_once.store.read(np.arange(60))[CANDIDATES]
    assert len(kept.rows) == 0, "questions are forgotten when they have been answered"


def test_counting_in_several_rounds_comes_to_the_same(monkeypatch):
    """Head and rest, round by round: what is served is what one round of everything gives."""
    monkeypatch.setattr(experts, "PIECE", 50)
    options = {"dense_items": 15, "neighbours": 100, "ridge": 5.0}
    at_once = Federation(small(**options), tastes())
    in_rounds = Federation(small(**options, count_rounds=5), tastes())
    at_once.round()
    for number in range(1, 6):
        assert in_rounds.task.method.phase_of(number).name.startswith("count")
        in_rounds.round()
    assert in_rounds.shared["head"].sum() == 15
    same = ["vectors", "products"]
    check_same(
        *({n: f.shared[f"cooccurrence/{n}"] for n in same} for f in (at_once, in_rounds)), "head"
    )
    for expert in ("popularity", "categories"):
        mine, theirs = (
            {n: a for n, a in f.shared.items() if n.startswith(f"{expert}/")}
            for f in (at_once, in_rounds)
        )
        check_same(mine, theirs, expert)
    for expert, name in TABLES:
        # Their index has other pairs besides, those of co-occurrence outside the head.
        mine, theirs = (dense_table(f.shared, expert, name) for f in (at_once, in_rounds))
        np.testing.assert_array_equal(mine, theirs)
        assert mine.any()
    one_by_one = Federation(
        small(**options, count_rounds=5, fit_fraction=0.5),
        tastes(),
        machine=Machine(threads=1, chunk=1),
    )
    half = Federation(small(**options, count_rounds=5, fit_fraction=0.5), tastes())
    for _ in range(9):
        one_by_one.round()
        half.round()
    check_same(one_by_one.shared, half.shared, "half of them asked")
    assert not any(name.startswith(HELD_OUT) for name in half.shared)
    asked = np.diff(half.store.read(np.arange(60))[CANDIDATES].indptr) > 0
    assert 15 < asked.sum() < 45


def test_the_held_items_are_not_in_what_is_asked():
    """The experts that weights are fitted with have never counted a held item."""
    rows = [[(start + k) % 12 for k in range(6)] for start in range(12)]
    marked = [[*row[:4], 50, 51] for row in rows]
    federation = Federation(small(held_out=2), clients_of(marked))
    federation.round()
    shared = federation.shared
    assert shared[joined(HELD_OUT, "popularity", "shares")][[50, 51]].sum() == 0
    assert shared["popularity/shares"][[50, 51]].sum() > 0
    held_out = {n.removeprefix(f"{HELD_OUT}/"): a for n, a in shared.items() if HELD_OUT in n}
    assert not dense_table(held_out, "transitions", "weights")[50].any()
    assert dense_table(shared, "transitions", "weights")[50].any()
    federation.round()
    kept = federation.store.read(np.arange(12))[CANDIDATES]
    assert np.diff(kept.indptr).tolist() == [2 * federation.task.method._block(60)] * 12


def test_experts_that_have_nothing_to_go_by_stay_out():
    with_features = small().init(tastes(), Streams(0))
    without = small().init(replace(tastes(), item_features={}), Streams(0))
    assert any(name.startswith("categories/") for name in with_features)
    assert not any("categories/" in name for name in without)
    assert len(without["weights"]) < len(with_features["weights"])


def test_a_client_of_one_item_asks_nothing():
    federation = Federation(small(), clients_of([[3], [4, 5, 6], [7, 8]]))
    for _ in range(3):
        federation.round()
    kept = federation.store.read(np.arange(3))[CANDIDATES]
    block = federation.task.method._block(60)
    assert np.diff(kept.indptr).tolist() == [0, 2 * block, block]
    for _ in range(6):
        federation.round()
    assert all(np.isfinite(array).all() for array in federation.shared.values())


def test_questions_may_be_asked_from_further_back():
    """Fewer items are known, and those in between are no candidates."""
    rows = [[*range(9)], [20, 21], [30, 31, 32, 33]]
    asked = Federation(small(gap=3, held_out=2), clients_of(rows))
    asked.round()
    asked.round()
    kept = asked.store.read(np.arange(3))[CANDIDATES]
    block = asked.task.method._block(60)
    known = np.exp(kept.rows[::block, -2]).round()
    # The last item, then the one before it; at least one item is known.
    assert known.tolist() == [5, 4, 1, 1, 1]
    for question, untouched in enumerate([51, 52, 58, 56, 57]):
        mine = kept.rows[question * block : (question + 1) * block, -1]
        standing_for = np.exp(mine[1:], dtype=np.float64).sum()
        assert standing_for == pytest.approx(untouched, rel=1e-3)


PHONES = {"hold_out": "clients", "fit_fraction": 0.3, "count_rounds": 2, "dense_items": 15}


def test_clients_that_fit_do_not_count():
    """What is learnt is what the others' pairs within the head say, summed one by one."""
    view, names = tastes(), ("transitions", "popularity")
    method = small(**PHONES, count_bits=2, window=7, ridge=5.0, experts=names)
    at_once = Federation(method, view)
    alone = Federation(method, view, machine=Machine(threads=1, chunk=1))
    fits = method._fits(view, Streams(0))
    assert 5 < fits.sum() < 40
    counting = [view.positives[client].tolist() for client in np.flatnonzero(~fits)]
    met, sums, units = reference.pairs_on_a_grid(counting, 15, view.n_items, window=7, bits=2)
    for federation in (at_once, alone):
        federation.round()
        federation.round()
        assert set(np.flatnonzero(federation.shared["head"])) == met
    check_same(at_once.shared, alone.shared, "counted")
    assert not any(name.startswith(HELD_OUT) for name in at_once.shared)
    keys = np.array(sorted(sums))
    expert, pairs = expert_class("transitions")(method.config), unflatten(at_once.shared)["pairs"]
    tree = unflatten(at_once.shared)
    before = pair_tables.long_models([expert], tree)
    learnt = expert.learn(before[0][1], keys, np.array([[sums[key] / units] for key in keys]))
    popular = expert_class("popularity")(method.config)
    before = [*before, (popular, tree["popularity"])]
    expected = pair_tables.counted_models(before, {"transitions": learnt}, tree, last=True)
    check_same(flatten(tree["transitions"]), flatten(expected["transitions"]), "the slow twin")
    check_same(pairs, expected["pairs"], "the slow twin's index")
    for _ in range(method.planned_rounds - 3):
        at_once.round()
        alone.round()
    check_same(at_once.shared, alone.shared, "fitted")
    kept = at_once.store.read(np.arange(60))[CANDIDATES]
    assert ((np.diff(kept.indptr) > 0) == fits).all(), "only they have prediction tasks"
    with pytest.raises(ConfigError, match=r"hold_out = clients: .* give a smaller fit_fraction"):
        hushrec.train("demo", "fedmix", hold_out="clients")


class Constant(Expert):
    """Somebody else's expert: it likes one item, whatever happens."""

    name = "constant"
    start = {"item 9": 50.0}  # noqa: RUF012

    def init(self, view):
        return {"liked": np.arange(view.n_items) == 9}

    def scores(self, model):
        return ("item 9",)

    def count(self, view):
        nothing = np.zeros(0, np.int64), np.zeros((0, 1), np.float32)
        return KeyedRows(np.zeros(len(view) + 1, np.int64), *nothing, space=1)

    def learn(self, model, keys, sums):
        return model

    def score(self, model, view, out):
        out[:, 0] = model["liked"]


def test_other_peoples_experts_plug_in(monkeypatch, tmp_path):
    assert {"transitions", "recent-transitions", "cooccurrence", "popularity", "categories"} <= set(
        names("experts")
    )
    find = experts.find
    monkeypatch.setattr(
        experts, "find", lambda group, name: Constant if name == "constant" else find(group, name)
    )
    method, view = small(experts=("popularity", "constant")), tastes()
    scores = method.score(method.init(view, Streams(0)), {}, view)
    assert (scores.argmax(axis=1) == 9).all()
    contributions = method.contributions(
        method.init(view, Streams(0)), {}, view, np.full((len(view), 1), 9)
    )
    assert contributions == [[Reason("constant", "constant")]] * len(view)
    federation = Federation(method, view)
    for _ in range(method.planned_rounds):
        federation.round()
    assert federation.shared["weights"].shape == (3,), "two of popularity, one of theirs"
    data = ServingData.of(make_split(taste_world(), SplitConfig(), Streams(0)))
    trained = Model(method, federation.shared, PrivateStore({}, 0), data, Streams(0))
    with pytest.raises(ConfigError, match="'constant' cannot be exported"):
        export(trained, tmp_path / "bundle")
    with pytest.raises(
        ConfigError, match="unknown expert 'transition'; did you mean 'transitions'"
    ):
        expert_class("transition")


def test_a_run_explains_and_comes_back(tmp_path):
    run = hushrec.train(
        taste_world(), "fedmix", settings={**SMALL, "evaluation.every": 4}, out=tmp_path / "run"
    )
    lines = run.recommend("user-00", 5)
    past = set(run.data.items[run.data.item[run.data.user == 0]].tolist())
    for line in lines:
        words, _, title = line.because.rpartition(" ")
        assert title in past, line
        assert words in {
            expert.because.removesuffix(" {}") for expert in run.model.method._experts()
        }
    again = hushrec.Run.open(tmp_path / "run", taste_world())
    assert again.recommend("user-00", 5) == lines
    newcomer = again.recommend("nobody", 5, history=["item-03", "item-05"])
    assert len(newcomer) == 5


def test_what_devices_say_of_scores_stays_small():
    """Or sums over a million of them would not fit: popularity is steep in large catalogues."""
    popular = expert_class("popularity")(FedMix().config)
    view = replace(tastes(), n_items=100_000)
    model = popular.learn(popular.init(view), np.array([7]), np.array([[1e6]]))
    scores = np.zeros((len(view), 2, 100_000), np.float32)
    popular.score(model, view, scores)
    assert scores[:, 0].max() == 1
    rows = np.ones((2 * 50, 4), np.float32)
    has, moments = mixture.score_moments(np.array([0, 50, 50, 100]), rows, 50)
    assert has.tolist() == [0, 1, 1, 2]
    np.testing.assert_array_equal(moments, np.ones((2, 7)))


def test_under_noise_on_sums_the_default_is_fednext():
    """The name and the options are those of what is trained; fedmix by name is refused."""
    settings = {"privacy.mode": "central", "privacy.epsilon": 8.0, "privacy.noise_seed": 0}
    default, named = (
        hushrec.train(taste_world(), name, settings=settings) for name in (None, "fednext")
    )
    check_same(default.model.shared, named.model.shared, "a model under noise")
    assert default.experiment == named.experiment
    assert default.summary.method == "fednext"
    for mode in ("central", "distributed"):
        noise = {**settings, "privacy.mode": mode}
        assert ExperimentRequest("tastes", settings=noise).experiment().method == "fednext"
        with pytest.raises(ConfigError, match=f"mode = {mode} adds noise .*: use the method fed"):
            hushrec.train(taste_world(), "fedmix", settings=noise)
    local = {"privacy.mode": "local-gaussian", "privacy.epsilon": 8.0, "privacy.clip": 1.0}
    with pytest.raises(ConfigError, match="cover every pair: use another method"):
        hushrec.train(taste_world(), "fedmix", settings=local)


# ------------------------------------------------------------------ what it is for


@pytest.mark.slow
def test_a_mixture_does_not_lose_to_its_parts():
    """Each expert alone, with weights of its own, and FedNext, on the demo data."""
    whole = hushrec.train("demo", "fedmix").summary.valid["full"]["ndcg@10"]
    *others, baskets = FedMix().config.experts
    with pytest.raises(ConfigError, match=f"no expert of fedmix applies to this data: {baskets}"):
        hushrec.train("demo", "fedmix", experts=[baskets])
    for name in others:
        settings = {"experts": [name], "network_rounds": 0}
        part = hushrec.train("demo", "fedmix", settings=settings)
        assert whole >= part.summary.valid["full"]["ndcg@10"], name
    assert whole >= hushrec.train("demo", "fednext").summary.valid["full"]["ndcg@10"]


@pytest.mark.slow
def test_accuracy_bytes_and_bundle_on_ml_1m(data_dir, tmp_path):
    """Honest protocol, full ranking; a look at validation items, not at test items."""
    looks = {"evaluation.every": 20, "evaluation.users": 2_000}
    run = hushrec.train("ml-1m", "fedmix", settings=looks)
    found = run.summary.valid["full"]
    assert found["hr@10"] >= 0.325
    assert found["ndcg@10"] >= 0.19
    sent = run.summary.communication
    assert sent.client_up_bytes < 400_000
    assert sent.client_down_bytes + sent.serving_bytes < 10e6
    assert run.summary.rounds <= 24

    place = run.export(tmp_path / "b")
    assert sum(file.stat().st_size for file in place.iterdir()) < 20e6
    same, spent, items = [], [], run.split.data.items
    past = run.split.history("test").positives
    for user in range(0, 6040, 100):
        history = [str(item) for item in items[past[user]]]
        device = Recommender.load(place, history)
        began = time.thread_time()
        mine = device.recommend(10)
        spent.append(time.thread_time() - began)
        whole = run.recommend("new", 10, history)
        same.append(len({x.item for x in mine} & {x.item for x in whole}) / 10)
    assert np.median(spent) < 0.010
    assert np.mean(same) > 0.99
