"""FedALS against a plain numpy iALS on pooled data."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushrec.aggregation import ExactSum
from hushrec.methods.fedals import FedALS
from hushrec.streams import Round, Streams
from hushrec.testing import MethodContract, clients_of


def users_of(x, items, c):
    """Solve the users' side, one dense system each."""
    n, m = x.shape
    out = np.zeros((n, items.shape[1]))
    for u in range(n):
        ridge = c.ridge * (x[u].sum() + c.unseen * m) ** c.frequency
        matrix = items.T @ np.diag(x[u] + c.unseen) @ items + ridge * np.eye(items.shape[1])
        out[u] = np.linalg.solve(matrix, items.T @ x[u])
    return out


def ials(x, items, rounds, c):
    """Textbook iALS: users, then items, a few times."""
    for _ in range(rounds):
        items = users_of(x.T, users_of(x, items, c), c)
    return items


def federated(method, view, shared, rounds, stacks=1):
    for number in range(1, rounds + 1):
        summed = ExactSum(view.n_items)
        for clients in np.array_split(np.arange(len(view)), stacks):
            got = method.download(shared)
            summed.add(method.fit(got, {}, view.take(clients), Round(number, Streams(0))).update)
        shared = method.apply(shared, summed.total())
    return shared


def pooled(rows, m):
    x = np.zeros((len(rows), m))
    for user, row in enumerate(rows):
        x[user, row] = 1
    return x


histories = st.lists(
    st.lists(st.integers(0, 11), min_size=1, max_size=9, unique=True), min_size=2, max_size=8
)


@given(histories, st.integers(1, 4), st.sampled_from([0.0, 0.5, 1.0]), st.integers(1, 3))
@settings(max_examples=40)
def test_it_is_centralised_ials(rows, d, frequency, rounds):
    method = FedALS(FedALS.Config(d=d, frequency=frequency, ridge=0.5, init_std=1.0))
    view = clients_of(rows, 12)
    shared = method.init(view, Streams(0))
    x = pooled(rows, 12)
    expected = ials(x, shared["items"], rounds, method.config)
    got = federated(method, view, shared, rounds)
    np.testing.assert_allclose(got["items"], expected, atol=1e-6)
    scores = users_of(x, expected, method.config) @ expected.T
    np.testing.assert_allclose(method.score(got, {}, view), scores, atol=1e-6)


def test_ten_rounds_on_a_population_in_any_stacks():
    rng = np.random.default_rng(0)
    rows = [rng.permutation(50)[: rng.integers(2, 40)].tolist() for _ in range(200)]
    view, method = clients_of(rows, 50), FedALS(FedALS.Config(d=8))
    start = method.init(view, Streams(0))
    got = federated(method, view, start, 10)
    again = federated(method, view, start, 10, stacks=23)
    np.testing.assert_array_equal(got["items"], again["items"])
    expected = ials(pooled(rows, 50), start["items"], 10, method.config)
    scores = users_of(pooled(rows, 50), expected, method.config) @ expected.T
    np.testing.assert_allclose(method.score(got, {}, view), scores, atol=1e-6)


def test_the_loss_never_rises():
    rng = np.random.default_rng(3)
    rows = [rng.permutation(30)[: rng.integers(2, 12)].tolist() for _ in range(40)]
    view, method = clients_of(rows, 30), FedALS(FedALS.Config(d=4))
    x, c = pooled(rows, 30), method.config

    def loss(users, items):
        ridge = [c.ridge * (x.sum(1) + c.unseen * 30), c.ridge * (x.sum(0) + c.unseen * 40)]
        s = users @ items.T
        return (
            (x * (1 - s) ** 2).sum()
            + c.unseen * (s**2).sum()
            + (ridge[0] @ (users**2)).sum()
            + (ridge[1] @ (items**2)).sum()
        )

    shared = method.init(view, Streams(0))
    losses = []
    for _ in range(6):
        users = users_of(x, shared["items"], c)
        losses.append(loss(users, shared["items"]))
        shared = federated(method, view, shared, 1)
        losses.append(loss(users, shared["items"]))
    assert (np.diff(losses) < 1e-4).all()
    assert losses[-1] < 0.9 * losses[0]


class TestWithOptions(MethodContract):
    method = FedALS
    options = {"d": 5, "frequency": 0.5, "unseen": 0.02}  # noqa: RUF012


def test_an_item_nobody_touched_scores_zero():
    view = clients_of([[0, 1], [1, 2]], 5)
    method = FedALS(FedALS.Config(d=3))
    shared = federated(method, view, method.init(view, Streams(0)), 2)
    assert not shared["items"][3:].any()
    assert method.score(shared, {}, view)[:, 3:] == pytest.approx(0)
