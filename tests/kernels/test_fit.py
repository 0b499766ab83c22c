"""The fused loops against `reference`: same numbers, only faster."""

import numpy as np
import pytest

import reference
from hushrec.aggregation import ClientRows, ExactSum, Update
from hushrec.kernels import inner_product
from hushrec.kernels.draws import Pace
from hushrec.kernels.inner_product import InnerProductModel, Rates, fit_pooled, sigmoid
from hushrec.streams import Streams
from hushrec.training.samples import apply_mean, client_data, deltas, with_rows
from odd_clients import N_ITEMS, population, ragged

D = 6


def relative(ours, theirs):
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


def three_rounds(view, dtype, own_tables=False, with_bias=True, rounds=3, **options):
    """Run both ways; return pairs (ours, theirs) by name, after kernel, exact sum and apply."""
    rng = np.random.default_rng(3)
    n = len(view)
    table = rng.standard_normal((N_ITEMS, D)).astype(dtype)
    own = np.repeat(table[None], n, axis=0) if own_tables else None
    start = rng.uniform(-0.4, 0.4, D).astype(dtype)
    vectors = np.repeat(start[None], n, axis=0)
    biases = np.full(n, 0.1 if with_bias else 0.0, dtype)
    excluded = view.excluded()
    rates = {name: dtype(options.pop(name)) for name in ("rate", "item_rate")}

    ref_table, ref_own = table.copy(), [table.copy() for _ in range(n)]
    ref_vectors, ref_biases = list(vectors.copy()), list(biases.copy())
    for number in range(1, rounds + 1):
        key = Streams(1).key("fit", number)
        received = table.copy()
        before = [a.copy() for a in (view.users, view.positives.values, excluded.values)]
        indptr, ids, rows, losses = inner_product.fit_inner_product(
            key,
            client_data(view),
            InnerProductModel(table, vectors, biases, with_bias),
            Pace(*(options[name] for name in ("negatives", "epochs", "batch"))),
            Rates(rates["rate"], rates["item_rate"], dtype(1)),
            options["two_steps"],
            own,
        )
        for old, new in zip(
            before, (view.users, view.positives.values, excluded.values), strict=True
        ):
            np.testing.assert_array_equal(old, new)
        np.testing.assert_array_equal(received, table)  # the received table is not written to
        trained = ClientRows(indptr, ids, rows)
        own = with_rows(own, trained) if own_tables else None

        ref_tables, ref_losses, last_touched = [], [], []
        for c in range(n):
            out, w, b, touched, loss = reference.fit_device(
                key,
                view.users[c],
                view.positives[c],
                excluded[c],
                ref_own[c] if own_tables else ref_table,
                ref_vectors[c],
                ref_biases[c],
                **options,
                **rates,
                with_bias=with_bias,
            )
            ref_vectors[c], ref_biases[c], ref_own[c] = w, b, out
            ref_tables.append(out)
            ref_losses.append(loss)
            last_touched.append(touched)
            np.testing.assert_array_equal(ids[indptr[c] : indptr[c + 1]], touched)
        if not own_tables:
            total = ExactSum(N_ITEMS)
            total.add(Update(n, rows={"items": deltas(trained, table)}))
            table = apply_mean(table, total.total(), "items")
            ref_table = reference.server_mean(ref_table, ref_tables)

    theirs = [ref_tables[c][last_touched[c]] for c in range(n)]
    return {
        "table": (table, ref_table),
        "vectors": (vectors, ref_vectors),
        "biases": (biases, ref_biases) if with_bias else (np.ones(1), np.ones(1)),
        "rows": (rows, np.concatenate(theirs)),
        "own tables": (own, ref_own) if own_tables else (np.ones(1), np.ones(1)),
        "losses": (losses, ref_losses),
    }


BASE = {"negatives": 4, "epochs": 1, "batch": 256, "two_steps": True, "rate": 0.1}
OPTIONS = {
    "pfedrec": {"item_rate": 2.0},
    "fedmf": {"item_rate": 2.0, "two_steps": False, "with_bias": False},
    "joint with bias": {"item_rate": 2.0, "two_steps": False},
    "two steps without bias": {"item_rate": 2.0, "with_bias": False},
    "own tables": {"item_rate": 2.0, "own_tables": True},
    "own tables, joint": {"item_rate": 2.0, "own_tables": True, "two_steps": False},
    "three epochs": {"item_rate": 2.0, "epochs": 3},
    "three epochs, joint, small batch": {
        "item_rate": 0.5,
        "epochs": 3,
        "two_steps": False,
        "batch": 7,
    },
    "small batch": {"item_rate": 2.0, "batch": 7},
    "batch of one": {"item_rate": 0.1, "batch": 1},
    "one negative": {"item_rate": 2.0, "negatives": 1},
    "nine negatives": {"item_rate": 2.0, "negatives": 9},
    "small rates": {"item_rate": 0.01, "rate": 0.001},
    "paper rates": {"item_rate": 0.1 * N_ITEMS * 80},
    "paper rates, joint": {"item_rate": 0.1 * N_ITEMS * 80, "two_steps": False},
    "all samples in one batch": {"item_rate": 2.0, "batch": 10**15},
    "frozen items": {"item_rate": 0.0},
}


@pytest.mark.parametrize("repeats", [False, True], ids=["distinct", "repeats"])
@pytest.mark.parametrize("name", OPTIONS)
def test_fit_equals_autograd(name, repeats):
    for what, (ours, theirs) in three_rounds(
        population(repeats), np.float32, **{**BASE, **OPTIONS[name]}
    ).items():
        assert relative(ours, theirs) < 1e-5, what


@pytest.mark.parametrize("name", OPTIONS)
def test_fit_equals_autograd_in_double_precision(name):
    """Where float32 runs out of digits this one does not: any difference would be a mistake."""
    for what, (ours, theirs) in three_rounds(
        population(True), np.float64, **{**BASE, **OPTIONS[name]}
    ).items():
        # The exact sum keeps steps of 2^-32, so double precision ends there.
        assert relative(ours, theirs) < 1e-7, what


def test_a_client_is_trained_alike_alone_and_in_a_stack():
    view = population(True)
    whole = three_rounds(view, np.float32, **BASE, item_rate=2.0, rounds=1)
    for c in range(len(view)):
        alone = three_rounds(view.take(np.array([c])), np.float32, **BASE, item_rate=2.0, rounds=1)
        np.testing.assert_array_equal(alone["vectors"][0][0], whole["vectors"][0][c])
        np.testing.assert_array_equal(alone["biases"][0][0], whole["biases"][0][c])
        np.testing.assert_array_equal(alone["losses"][0][0], whole["losses"][0][c])


def test_fit_of_nobody():
    view, table = population().take(np.array([], np.int64)), np.ones((N_ITEMS, D), np.float32)
    indptr, ids, rows, losses = inner_product.fit_inner_product(
        Streams(0).key("fit", 1),
        client_data(view),
        InnerProductModel(table, np.ones((0, D), np.float32), np.ones(0, np.float32), True),
        Pace(4, 1, 256),
        Rates(np.float32(0.1), np.float32(1), np.float32(1)),
        True,
    )
    assert indptr.tolist() == [0]
    assert len(ids) == len(rows) == len(losses) == 0


@pytest.mark.parametrize(("negatives", "decay"), [(4, 0.01), (1, 0.0)])
def test_fit_pooled_equals_the_plain_loop(negatives, decay):
    view, rng = population(True), np.random.default_rng(8)
    excluded = view.excluded()
    table = rng.standard_normal((N_ITEMS, D)) * 0.3
    vectors = rng.standard_normal((len(view), D)) * 0.3
    ref_table, ref_vectors = table.copy(), vectors.copy()
    for number in (1, 2, 3):
        key = Streams(2).key("fit", number)
        loss = fit_pooled(key, client_data(view), table, vectors, negatives, 0.05, decay)
        ref_table, ref_vectors, ref_loss = reference.fit_pooled(
            key,
            view.users,
            [view.positives[c] for c in range(len(view))],
            [excluded[c] for c in range(len(view))],
            ref_table,
            ref_vectors,
            negatives=negatives,
            rate=0.05,
            decay=decay,
        )
        assert loss == pytest.approx(ref_loss, rel=1e-12)
    assert relative(table, ref_table) < 1e-12
    assert relative(vectors, ref_vectors) < 1e-12


# ------------------------------------------------------------------ scores


def test_scores_with_own_rows_equal_own_tables():
    rng = np.random.default_rng(0)
    table = rng.standard_normal((N_ITEMS, D)).astype(np.float32)
    vectors = rng.standard_normal((3, D)).astype(np.float32)
    biases = rng.standard_normal(3).astype(np.float32)
    own = ragged([[2, 0], [], [24, 7, 1]])
    rows = rng.standard_normal((5, D)).astype(np.float32)
    scores = inner_product.inner_products(table, vectors, biases)
    inner_product.rescore_own_rows(scores, own.indptr, own.values, rows, vectors, biases)
    for c in range(3):
        mine = rows[own.indptr[c] : own.indptr[c + 1]]
        expected = reference.own_table_scores(table, own[c], mine, vectors[c], biases[c])
        np.testing.assert_allclose(scores[c], expected, rtol=1e-5, atol=1e-6)


def test_a_score_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(0)
    table = rng.standard_normal((97, 32)).astype(np.float32)
    vectors = rng.standard_normal((13, 32)).astype(np.float32)
    biases = rng.standard_normal(13).astype(np.float32)
    whole = inner_product.inner_products(table, vectors, biases)
    for c in range(13):
        one = slice(c, c + 1)
        np.testing.assert_array_equal(
            inner_product.inner_products(table, vectors[one], biases[one])[0], whole[c]
        )
    np.testing.assert_array_equal(
        inner_product.inner_products(table[5:60], vectors, biases), whole[:, 5:60]
    )


@pytest.mark.parametrize("logit", [-1e4, -100.0, -1.0, 0.0, 1e-8, 3.0, 200.0, 1e4])
def test_sigmoid_never_overflows(logit):
    probability, grown = sigmoid(logit)
    assert probability == pytest.approx(np.exp(-np.logaddexp(0, -logit)), rel=1e-12, abs=1e-300)
    assert np.log(grown) == pytest.approx(np.logaddexp(0, -abs(logit)), rel=1e-12, abs=1e-15)
