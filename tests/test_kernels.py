"""The fused loops against `reference`: same numbers, only faster."""

from dataclasses import replace

import numpy as np
import pytest
from hushrec.methods.inner_product import NO_TABLE, apply_mean, deltas
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

import reference
from hushrec import kernels
from hushrec.aggregate import ClientRows, ExactSum, Update
from hushrec.clients import Ragged, TrainView
from hushrec.rng import Round, Streams

N_ITEMS, D = 25, 6


def ragged(rows, dtype=np.int32):
    flat = [value for row in rows for value in row]
    return Ragged(np.cumsum([0, *map(len, rows)]), np.array(flat, dtype))


def population(repeats=False):
    """Seven devices: one positive, every item, all but one, and ordinary ones."""
    rng = np.random.default_rng(5)
    rows = [
        [3],
        list(range(N_ITEMS)),
        [i for i in range(N_ITEMS) if i != 11],
        *(rng.permutation(N_ITEMS)[:n].tolist() for n in (2, 5, 9, 14)),
    ]
    if repeats:
        rows[4] = rows[4] + rows[4][:3] + rows[4][:1]
        rows[0] = [3, 3, 3]
    pos = ragged(rows)
    return TrainView(
        users=np.array([0, 4, 5, 6, 17, 900, 2**31 - 1], np.int32),
        n_items=N_ITEMS,
        positives=pos,
        times=Ragged(pos.indptr, np.arange(len(pos.values))),
        values=Ragged(pos.indptr, np.ones(len(pos.values), np.float32)),
    )


def relative(ours, theirs):
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


def three_rounds(view, dtype, own_tables=False, with_bias=True, rounds=3, **options):
    """Run both ways; return pairs (ours, theirs) by name, after kernel, exact sum and apply."""
    rng = np.random.default_rng(3)
    n = len(view)
    table = rng.standard_normal((N_ITEMS, D)).astype(dtype)
    own = np.repeat(table[None], n, axis=0) if own_tables else NO_TABLE.astype(dtype)
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
        indptr, ids, rows, losses = kernels.fit_inner_product(
            key,
            view.users,
            view.positives.indptr,
            view.positives.values,
            excluded.indptr,
            excluded.values,
            table,
            own,
            vectors,
            biases,
            options["negatives"],
            options["epochs"],
            options["batch"],
            rates["rate"],
            rates["item_rate"],
            with_bias,
            options["two_steps"],
        )
        for old, new in zip(
            before, (view.users, view.positives.values, excluded.values), strict=True
        ):
            np.testing.assert_array_equal(old, new)
        np.testing.assert_array_equal(received, table)  # the received table is not written to
        trained = ClientRows(indptr, ids, rows)

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
    view = population().take(np.array([], np.int64))
    excluded = view.excluded()
    indptr, ids, rows, losses = kernels.fit_inner_product(
        Streams(0).key("fit", 1),
        view.users,
        view.positives.indptr,
        view.positives.values,
        excluded.indptr,
        excluded.values,
        np.ones((N_ITEMS, D), np.float32),
        NO_TABLE,
        np.ones((0, D), np.float32),
        np.ones(0, np.float32),
        *(4, 1, 256, np.float32(0.1), np.float32(1), True, True),
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
        loss = kernels.fit_pooled(
            key,
            view.users,
            view.positives.indptr,
            view.positives.values,
            excluded.indptr,
            excluded.values,
            table,
            vectors,
            negatives,
            0.05,
            decay,
        )
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


# ------------------------------------------------------------------ draws


words = st.integers(0, 2**64 - 1)
keys = st.tuples(words, words).map(lambda pair: np.array(pair, np.uint64))


@given(keys, st.integers(-1, 2**31 - 1), st.integers(0, 2**20))
def test_draw_is_the_published_formula(key, user, position):
    assert int(kernels.draw(key, user, position)) == reference.draw(key, user, position)


@given(words, st.integers(1, 2**31 - 1))
def test_below_stays_below(word, bound):
    value = kernels.below(np.uint64(word), bound)
    assert 0 <= value < bound
    assert value == reference.below(word, bound)


@given(st.integers(1, 60), st.data())
def test_nth_outside(n_items, data):
    excluded = sorted(data.draw(st.sets(st.integers(0, n_items - 1))))
    outside = np.setdiff1d(np.arange(n_items), excluded)
    got = [kernels.nth_outside(np.array(excluded, np.int32), n) for n in range(len(outside))]
    assert got == outside.tolist()
    listed = np.full(n_items, -1, np.int32)
    kernels.list_outside(np.array(excluded, np.int32), n_items, listed)
    assert listed[: len(outside)].tolist() == got


exclusions = st.integers(1, 40).flatmap(
    lambda n: st.tuples(
        st.just(n), st.lists(st.sets(st.integers(0, n - 1)).map(sorted), min_size=1, max_size=4)
    )
)


@given(exclusions, keys, st.integers(0, 30))
def test_draw_outside(world, key, count):
    n_items, rows = world
    out = ragged(rows)
    users = np.arange(len(rows), dtype=np.int32) * 7
    counts = np.full(len(rows), count)
    drawn = Ragged(*kernels.draw_outside(key, users, out.indptr, out.values, n_items, counts))
    for c, row in enumerate(rows):
        expected = reference.negatives(reference.Stream(key, users[c]), row, n_items, count)
        assert drawn[c].tolist() == expected
        assert not set(drawn[c].tolist()) & set(row)


@given(exclusions, keys, st.integers(1, 45))
def test_draw_distinct_outside(world, key, count):
    n_items, rows = world
    out = ragged(rows)
    users = np.arange(len(rows), dtype=np.int32)
    drawn = Ragged(
        *kernels.draw_distinct_outside(key, users, out.indptr, out.values, n_items, count)
    )
    for c, row in enumerate(rows):
        pool = set(range(n_items)) - set(row)
        got = drawn[c].tolist()
        assert len(got) == len(set(got)) == min(count, len(pool))
        assert set(got) <= pool


@pytest.mark.parametrize("distinct", [False, True])
def test_draws_are_uniform(distinct):
    """One client per stream: independent draws, so a chi-square of the counts must be ordinary."""
    n_items, row, n_users = 30, [0, 4, 5, 6, 29], 20_000
    out = Ragged(np.arange(n_users + 1) * len(row), np.tile(np.array(row, np.int32), n_users))
    users = np.arange(n_users, dtype=np.int32)
    key = Streams(0).key("uniform")
    if distinct:
        # The first of several distinct draws, and the last one.
        _, items = kernels.draw_distinct_outside(key, users, out.indptr, out.values, n_items, 5)
        looked_at = [items.reshape(-1, 5)[:, 0], items.reshape(-1, 5)[:, 4]]
    else:
        count = np.full(n_users, 3)
        _, items = kernels.draw_outside(key, users, out.indptr, out.values, n_items, count)
        looked_at = [items.reshape(-1, 3)[:, k] for k in range(3)]
        pairs = items.reshape(-1, 3)[:, 0].astype(np.int64) * n_items + items.reshape(-1, 3)[:, 1]
        counts = np.unique(pairs, return_counts=True)[1]
        assert len(counts) == 25**2  # every pair occurs: draws of one user do not follow each other
        assert chisquare(counts).pvalue > 1e-3
    for column in looked_at:
        counts = np.bincount(column, minlength=n_items)
        assert (counts[row] == 0).all()
        assert chisquare(np.delete(counts, row)).pvalue > 1e-3


# ------------------------------------------------------------------ ragged stacks and scores


@given(exclusions, st.data())
def test_take_and_sorted_union(world, data):
    n_items, rows = world
    first = ragged([data.draw(st.permutations(row)) + list(row) for row in rows])
    second = ragged([data.draw(st.lists(st.integers(0, n_items - 1), max_size=5)) for _ in rows])
    union = Ragged(*kernels.sorted_union(first.indptr, first.values, second.indptr, second.values))
    for c in range(len(rows)):
        assert union[c].tolist() == sorted({*first[c].tolist(), *second[c].tolist()})
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6))
    taken = first.take(np.array(order, np.int64))
    assert len(taken) == len(order)
    assert [taken[k].tolist() for k in range(len(order))] == [first[c].tolist() for c in order]


def test_scores_with_own_rows_equal_own_tables():
    rng = np.random.default_rng(0)
    table = rng.standard_normal((N_ITEMS, D)).astype(np.float32)
    vectors = rng.standard_normal((3, D)).astype(np.float32)
    biases = rng.standard_normal(3).astype(np.float32)
    own = ragged([[2, 0], [], [24, 7, 1]])
    rows = rng.standard_normal((5, D)).astype(np.float32)
    scores = kernels.inner_products(table, vectors, biases)
    kernels.rescore_own_rows(scores, own.indptr, own.values, rows, vectors, biases)
    for c in range(3):
        mine = rows[own.indptr[c] : own.indptr[c + 1]]
        expected = reference.own_table_scores(table, own[c], mine, vectors[c], biases[c])
        np.testing.assert_allclose(scores[c], expected, rtol=1e-5, atol=1e-6)


def test_a_score_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(0)
    table = rng.standard_normal((97, 32)).astype(np.float32)
    vectors = rng.standard_normal((13, 32)).astype(np.float32)
    biases = rng.standard_normal(13).astype(np.float32)
    whole = kernels.inner_products(table, vectors, biases)
    for c in range(13):
        one = slice(c, c + 1)
        np.testing.assert_array_equal(
            kernels.inner_products(table, vectors[one], biases[one])[0], whole[c]
        )
    np.testing.assert_array_equal(
        kernels.inner_products(table[5:60], vectors, biases), whole[:, 5:60]
    )


@pytest.mark.parametrize("logit", [-1e4, -100.0, -1.0, 0.0, 1e-8, 3.0, 200.0, 1e4])
def test_sigmoid_never_overflows(logit):
    probability, grown = kernels.sigmoid(logit)
    assert probability == pytest.approx(np.exp(-np.logaddexp(0, -logit)), rel=1e-12, abs=1e-300)
    assert np.log(grown) == pytest.approx(np.logaddexp(0, -abs(logit)), rel=1e-12, abs=1e-15)


def test_negatives_know_the_future_under_the_published_protocol_only():
    from hushrec.negatives import draw_negatives

    view = population()
    heldout = [
        [k] if k not in view.positives[c] else [] for c, k in enumerate([9, 0, 11, 1, 2, 3, 4])
    ]
    published = replace(view, never_negative=ragged(heldout))
    honest_hits = published_hits = 0
    for number in range(60):
        for kind in (view, published):
            drawn = draw_negatives(kind, 4, Round(number, Streams(0)))
            hits = sum(int(np.isin(heldout[c], drawn[c]).sum()) for c in range(len(view)))
            for c in range(len(view)):
                assert not np.isin(drawn[c], view.positives[c]).any()
            if kind is view:
                honest_hits += hits
            else:
                published_hits += hits
    assert published_hits == 0
    assert honest_hits > 100
    assert (view.protocol, published.protocol) == ("honest", "published")
    # Device 2 has all items but one; when that one is held out it has no negative at all.
    assert len(draw_negatives(published, 4, Round(1, Streams(0)))[2]) == 0
