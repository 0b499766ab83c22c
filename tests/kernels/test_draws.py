"""Random numbers by address, draws outside exclusions, and ragged arrays, against `reference`."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

import reference
from hushrec.data.views import Ragged
from hushrec.kernels import draws
from hushrec.kernels.ragged import number_by_first_use, sorted_union
from hushrec.streams import Streams
from odd_clients import ragged

words = st.integers(0, 2**64 - 1)
keys = st.tuples(words, words).map(lambda pair: np.array(pair, np.uint64))


@given(keys, st.integers(-1, 2**31 - 1), st.integers(0, 2**20))
def test_draw_is_the_published_formula(key, user, position):
    assert int(draws.draw(key, user, position)) == reference.draw(key, user, position)


@given(words, st.integers(1, 2**31 - 1))
def test_below_stays_below(word, bound):
    value = draws.below(np.uint64(word), bound)
    assert 0 <= value < bound
    assert value == reference.below(word, bound)


@given(st.integers(1, 60), st.data())
def test_nth_outside(n_items, data):
    excluded = sorted(data.draw(st.sets(st.integers(0, n_items - 1))))
    outside = np.setdiff1d(np.arange(n_items), excluded)
    got = [draws.nth_outside(np.array(excluded, np.int32), n) for n in range(len(outside))]
    assert got == outside.tolist()
    listed = np.full(n_items, -1, np.int32)
    draws.list_outside(np.array(excluded, np.int32), n_items, listed)
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
    drawn = Ragged(*draws.draw_outside(key, users, out.indptr, out.values, n_items, counts))
    for c, row in enumerate(rows):
        expected = reference.negatives(reference.Stream(key, users[c]), row, n_items, count)
        assert drawn[c].tolist() == expected
        assert not set(drawn[c].tolist()) & set(row)


@given(exclusions, keys, st.integers(1, 45))
def test_draw_distinct_outside(world, key, count):
    n_items, rows = world
    out = ragged(rows)
    users = np.arange(len(rows), dtype=np.int32)
    drawn = Ragged(*draws.draw_distinct_outside(key, users, out.indptr, out.values, n_items, count))
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
        _, items = draws.draw_distinct_outside(key, users, out.indptr, out.values, n_items, 5)
        looked_at = [items.reshape(-1, 5)[:, 0], items.reshape(-1, 5)[:, 4]]
    else:
        count = np.full(n_users, 3)
        _, items = draws.draw_outside(key, users, out.indptr, out.values, n_items, count)
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
    union = Ragged(*sorted_union(first.indptr, first.values, second.indptr, second.values))
    for c in range(len(rows)):
        assert union[c].tolist() == sorted({*first[c].tolist(), *second[c].tolist()})
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6))
    taken = first.take(np.array(order, np.int64))
    assert len(taken) == len(order)
    assert [taken[k].tolist() for k in range(len(order))] == [first[c].tolist() for c in order]


def test_items_are_numbered_by_first_use() -> None:
    indptr, items = np.array([0, 4, 4, 6]), np.array([5, 3, 5, 9, 3, 3], np.int32)
    out_indptr, ids, place = number_by_first_use(indptr, items, 10)
    assert out_indptr.tolist() == [0, 3, 3, 4]
    assert ids.tolist() == [5, 3, 9, 3]
    assert place.tolist() == [0, 1, 0, 2, 0, 0]
