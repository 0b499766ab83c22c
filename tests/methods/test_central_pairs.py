"""EASE, ItemKNN and the Markov chain against plain implementations of their papers' formulas."""

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import hushrec
from hushrec.aggregation import ExactSum
from hushrec.data.splitting import SplitConfig, make_split
from hushrec.federation.experiment import ExperimentRequest
from hushrec.methods.central_pairs import EASE, ItemKNN, MarkovChain
from hushrec.methods.fedals import FedALS
from hushrec.methods.statistics.fedease import FedEASE
from hushrec.streams import Round, Streams
from hushrec.testing import clients_of

M = 12
histories = st.lists(
    st.lists(st.integers(0, M - 1), min_size=1, max_size=9, unique=True), min_size=1, max_size=8
)


def trained(method, view):
    shared, summed = method.init(view, Streams(0)), ExactSum(view.n_items)
    summed.add(method.phase_of(1).fit(shared, {}, view, Round(1, Streams(0))).update)
    return method.phase_of(1).apply(shared, summed.total(), 1)


def matrix(rows, m=M):
    x = np.zeros((len(rows), m))
    for user, row in enumerate(rows):
        x[user, row] = 1
    return x


# ------------------------------------------------------------------ outside implementations


def ease(x, ridge):
    """Steck 2019, algorithm 1, on a sparse or a dense X."""
    gram = x.T @ x
    gram = np.array(gram.todense() if sp.issparse(gram) else gram)
    gram[np.diag_indices_from(gram)] += ridge
    p = np.linalg.inv(gram)
    b = p / (-np.diag(p))
    b[np.diag_indices_from(b)] = 0
    return b


def item_knn(x, neighbours, shrinkage, conditional=False):
    """Similarities of columns of X, one pair at a time; the best of each target remain."""
    columns = np.asarray(x.todense()).T if sp.issparse(x) else x.T
    together, m = columns @ columns.T, len(columns)
    w = np.zeros((m, m))
    for j in range(m):
        for i in range(m):
            lengths = np.linalg.norm(columns[i]) * np.linalg.norm(columns[j])
            size = columns[i].sum() if conditional else lengths
            if i != j and together[i, j]:
                w[i, j] = together[i, j] / (size + shrinkage)
        ranked = sorted(range(m), key=lambda i, j=j: (-round(w[i, j], 12), i))
        w[ranked[neighbours:], j] = 0
    return w


@given(histories, st.floats(0.5, 50))
@settings(max_examples=40, deadline=None)
def test_ease_is_ease(rows, ridge):
    method, view = EASE(EASE.Config(ridge=ridge)), clients_of(rows, M)
    shared, expected = trained(method, view), ease(matrix(rows), ridge)
    np.testing.assert_allclose(shared["weights"], expected, atol=1e-6)
    np.testing.assert_allclose(method.score(shared, {}, view), matrix(rows) @ expected, atol=1e-6)


@given(histories, st.integers(1, M), st.sampled_from([0.0, 3.5]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_item_knn_is_item_knn(rows, neighbours, shrinkage, conditional):
    similarity = "conditional" if conditional else "cosine"
    options = {"neighbours": neighbours, "shrinkage": shrinkage, "similarity": similarity}
    method, view = ItemKNN(ItemKNN.Config(**options)), clients_of(rows, M)
    shared = trained(method, view)
    expected = item_knn(matrix(rows), neighbours, shrinkage, conditional)
    # Equal similarities that round apart may be cut one for the other: compare what was kept.
    np.testing.assert_allclose(
        np.sort(shared["weights"], axis=0), np.sort(expected, axis=0), atol=1e-6
    )
    if neighbours == M:
        np.testing.assert_allclose(shared["weights"], expected, atol=1e-6)
        scores = method.score(shared, {}, view)
        np.testing.assert_allclose(scores, matrix(rows) @ expected, atol=1e-5)


@given(histories, st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_the_markov_chain_counts_what_came_next(rows, window, recent):
    options = {"window": window, "recent": recent, "popularity": 0.25}
    method, view = MarkovChain(MarkovChain.Config(**options)), clients_of(rows, M)
    shared, counts = trained(method, view), matrix(rows).sum(axis=0)
    expected = np.zeros((M, M))
    for row in rows:
        for p, i in enumerate(row):
            for g, j in enumerate(row[p + 1 : p + 1 + window], start=1):
                expected[i, j] += 1 / g / counts[i]
    np.testing.assert_allclose(shared["weights"], expected, atol=1e-6)
    scores = [
        sum(expected[i] for i in row[-recent:]) + 0.25 * counts / counts.sum() for row in rows
    ]
    np.testing.assert_allclose(method.score(shared, {}, view), scores, atol=1e-6)


def test_repeated_items_count_once_in_x():
    method = EASE(EASE.Config(ridge=2.0))
    again, once = clients_of([[1, 2, 1], [2, 3]], M), clients_of([[1, 2], [2, 3]], M)
    shared = trained(method, again)
    np.testing.assert_array_equal(shared["weights"], trained(method, once)["weights"])
    np.testing.assert_array_equal(method.score(shared, {}, again), method.score(shared, {}, once))


def test_fedease_without_recency_is_the_same_model():
    rng = np.random.default_rng(0)
    rows = [rng.permutation(50)[: rng.integers(2, 40)].tolist() for _ in range(200)]
    view = clients_of(rows, 50)
    federated = FedEASE(FedEASE.Config(ridge=30.0, recency=0.0, recent=50, popularity=0.0))
    pooled = EASE(EASE.Config(ridge=30.0))
    one, other = trained(federated, view), trained(pooled, view)
    np.testing.assert_allclose(
        federated.score(one, {}, view), pooled.score(other, {}, view), atol=1e-6
    )


def test_the_preset_ials_is_that_of_fedals():
    """No second implementation: tests/methods/test_fedals.py holds it to a pooled iALS."""
    experiment = ExperimentRequest("demo", "fedals", preset="ials").experiment()
    assert type(experiment.make_method()) is FedALS


@pytest.mark.parametrize("kind", [EASE, ItemKNN])
def test_reasons_name_the_item_with_the_largest_weight(kind):
    rng = np.random.default_rng(0)
    rows = [rng.permutation(M)[:5].tolist() for _ in range(40)]
    method, view = kind(), clients_of(rows, M)
    shared, named = trained(method, view), 0
    items = np.tile(np.array([0, 7, -1], np.int32), (len(rows), 1))
    for row, reasons in zip(rows, method.contributions(shared, {}, view, items), strict=True):
        assert reasons[2].item == -1 and not reasons[2].words, "no item, no reason"
        for item, reason in zip([0, 7], reasons, strict=False):
            weights = shared["weights"][row[::-1], item]
            if weights.sum() >= 0 and weights.max() > 0:
                assert reason.item == row[::-1][weights.argmax()]
                assert reason.words == "often together with {}"
                named += 1
    assert named > 20


def test_the_markov_chain_says_after_what():
    method, view = MarkovChain(), clients_of([[1, 2], [1, 2, 3], [4, 1]], M)
    found = method.contributions(trained(method, view), {}, view, np.full((3, 1), 2, np.int32))
    assert [reasons[0].words for reasons in found] == ["popular", "popular", "often after {}"]
    assert found[2][0].item == 1


def figures(split, weights):
    """HR@10 and NDCG@10 of the test items, ranked by plain loops; none of our metrics."""
    history, hits, gains = split.history("test"), [], []
    for user in split.evaluated("test"):
        (target,) = split.test[int(user)]
        seen = history.positives[int(user)]
        scores = weights[seen].sum(axis=0)
        scores[np.setdiff1d(seen, [target])] = -np.inf
        ahead = (scores > scores[target]).sum()
        tied = (scores == scores[target]).sum() - 1
        ranks = ahead + 1 + np.arange(tied + 1)
        hits.append((ranks <= 10).mean())
        gains.append(np.where(ranks <= 10, 1 / np.log2(ranks + 1), 0).mean())
    return np.mean(hits), np.mean(gains)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ease", "itemknn"])
def test_the_same_figures_as_an_outside_implementation_on_ml_100k(name, data_dir):
    data = hushrec.load("ml-100k", data_dir=data_dir)
    run = hushrec.train(data, name)
    split = make_split(data, SplitConfig(order="time", ties="file", repeats="merge"), Streams(0))
    train = split.train.positives
    ones = np.ones(len(train.values))
    x = sp.csr_matrix((ones, train.values, train.indptr), shape=(len(train), data.n_items))
    options = run.model.method.config
    if name == "ease":
        weights = ease(x, options.ridge)
    else:
        together, norms = np.asarray((x.T @ x).todense()), np.sqrt(np.asarray(x.sum(0))[0])
        weights = together / (np.outer(norms, norms) + options.shrinkage)
        np.fill_diagonal(weights, 0)
        for j in range(len(weights)):
            order = np.lexsort((np.arange(len(weights)), -weights[:, j]))
            weights[order[options.neighbours :], j] = 0
    hits, gain = figures(split, weights)
    assert run.metrics["full"]["hr@10"] == pytest.approx(hits, abs=1e-9)
    assert run.metrics["full"]["ndcg@10"] == pytest.approx(gain, abs=1e-6)
