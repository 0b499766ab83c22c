"""Exact sums: the same bits in whatever order."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hushrec.aggregation import (
    ClientRows,
    ExactSum,
    FixedPoint,
    KeyedRows,
    Total,
    Update,
    UploadShape,
)
from hushrec.errors import ConfigError, DivergedError

N_ROWS, WIDTH = 9, 3
numbers = st.floats(-1e4, 1e4, width=32)


@st.composite
def clients(draw):
    """One client's upload: some rows (an id may repeat) and a dense array."""
    ids = draw(st.lists(st.integers(0, N_ROWS - 1), max_size=5))
    rows = draw(hnp.arrays(np.float32, (len(ids), WIDTH), elements=numbers))
    dense = draw(hnp.arrays(np.float32, (1, 2), elements=numbers))
    stack = ClientRows(np.array([0, len(ids)]), np.array(ids, np.int32), rows)
    return Update(1, {"items": stack}, {"head": dense})


def joined(updates):
    """The same clients in one stack."""
    stacks = [u.rows["items"] for u in updates]
    return Update(
        len(updates),
        {
            "items": replace(
                stacks[0],
                indptr=np.cumsum([0, *(len(s.ids) for s in stacks)]),
                ids=np.concatenate([s.ids for s in stacks]),
                rows=np.concatenate([s.rows for s in stacks]),
            )
        },
        {"head": np.concatenate([u.dense["head"] for u in updates])},
    )


def total_of(*groups):
    """Add each group in its own sum, then merge."""
    out = ExactSum(N_ROWS)
    for group in groups:
        part = ExactSum(N_ROWS)
        for update in group:
            part.add(update)
        out.merge(part)
    return out


def same(first: ExactSum, second: ExactSum) -> None:
    assert first.clients == second.clients
    a, b = first.total(), second.total()
    for x, y in zip(a.rows["items"], b.rows["items"], strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(a.dense["head"], b.dense["head"])


@given(st.lists(clients(), min_size=1, max_size=7), st.randoms(use_true_random=False), st.data())
@settings(max_examples=60)
def test_order_chunks_and_merges_do_not_matter(updates, random, data):
    plain = ExactSum(N_ROWS)
    for update in updates:
        plain.add(update)
    assert plain.clients == len(updates)
    same(plain, total_of(updates))
    shuffled = random.sample(updates, len(updates))
    same(plain, total_of(shuffled))
    same(plain, total_of(*([u] for u in shuffled)))
    cut = data.draw(st.integers(0, len(updates)))
    parts = [joined(part) for part in (shuffled[:cut], shuffled[cut:]) if part]
    same(plain, total_of(parts))

    expected = np.zeros((N_ROWS, WIDTH))
    for update in updates:
        np.add.at(expected, update.rows["items"].ids, update.rows["items"].rows)
    ids, sums = plain.total().rows["items"]
    touched = sorted({int(i) for u in updates for i in u.rows["items"].ids})
    assert ids.tolist() == touched
    # Each entry is rounded once, by half a step of 2^-32 at most.
    bound = 2.0**-33 * sum(len(u.rows["items"].ids) for u in updates) + 1e-9
    np.testing.assert_allclose(sums, expected[ids], rtol=1e-12, atol=bound)
    head = sum(u.dense["head"][0].astype(np.float64) for u in updates)
    np.testing.assert_allclose(
        plain.total().dense["head"], head, rtol=1e-12, atol=2.0**-33 * len(updates)
    )


def test_bytes_on_the_wire():
    update = Update(
        2,
        {
            "items": ClientRows(
                np.array([0, 2, 3]), np.zeros(3, np.int32), np.zeros((3, 5), np.float32)
            )
        },
        {"head": np.zeros((2, 7), np.float32)},
    )
    assert update.nbytes == 3 * 4 + 3 * 5 * 4 + 2 * 7 * 4


def test_a_dense_table_has_zeros_where_nobody_touched_it():
    total = Total(2, {"items": (np.array([0, 3]), np.array([[1.0, 2.0], [3.0, -4.0]]))}, {})
    assert total.table("items", 4, 2).tolist() == [[1, 2], [0, 0], [0, 0], [3, -4]]
    assert total.table("others", 2, 1).tolist() == [[0], [0]], "no client sent any"


def test_nothing_at_all():
    total = ExactSum(4).total()
    assert total.clients == 0
    assert not total.rows
    assert not total.dense


def rows_of(*values):
    rows = np.array(values, np.float32)[:, None]
    return Update(
        1, rows={"t": ClientRows(np.array([0, len(rows)]), np.zeros(len(rows), np.int32), rows)}
    )


def keyed_rows_of(*values):
    rows = np.array(values, np.float32)[:, None]
    keys = np.full(len(rows), 2**50, np.int64)
    keyed = KeyedRows(np.array([0, len(rows)]), keys, rows, space=2**51)
    return Update(1, rows={"t": keyed})


def dense_of(*values):
    return Update(len(values), dense={"t": np.array(values, np.float32)[:, None]})


@pytest.mark.parametrize("kind", [rows_of, keyed_rows_of, dense_of])
@pytest.mark.parametrize(
    "values",
    [
        [np.nan],
        [np.inf],
        [-np.inf],
        [1e10],
        [-1e10],
        [1e38],
        [6e8, 6e8],  # each fits, the sum does not
        [1e12, -1e12],  # neither fits; that they cancel does not make them numbers
        [2e9, -2e9],
    ],
)
def test_what_does_not_fit_is_divergence(kind, values):
    with pytest.raises(DivergedError, match=r"'t'.*smaller learning rate"):
        ExactSum(1).add(kind(*values))


@pytest.mark.parametrize("kind", [rows_of, keyed_rows_of, dense_of])
def test_overflow_over_several_uploads_and_merges(kind):
    summed = ExactSum(1)
    summed.add(kind(6e8))
    with pytest.raises(DivergedError):
        summed.add(kind(6e8))
    total = ExactSum(1)
    with pytest.raises(DivergedError):
        for _ in range(4):
            part = ExactSum(1)
            part.add(kind(6e8))
            total.merge(part)


# ------------------------------------------------------------------ keys too many for a table


def test_keys_without_a_declared_space_are_a_type_error():
    indptr, keys, rows = np.array([0, 1]), np.array([3]), np.ones((1, 1), np.float32)
    with pytest.raises(TypeError, match="space"):
        KeyedRows(indptr, keys, rows)
    with pytest.raises(TypeError, match="declared space"):
        ClientRows(indptr, keys, rows)
    with pytest.raises(TypeError, match="int64"):
        KeyedRows(indptr, keys.astype(np.int32), rows, space=9)


def test_a_shape_counts_every_declared_part():
    indptr, rows = np.array([0, 1]), np.ones((1, 2), np.float32)
    update = Update(
        1,
        {
            "items": ClientRows(indptr, np.array([3], np.int32), rows),
            "pairs": KeyedRows(indptr, np.array([3]), rows, space=49),
        },
        {"bias": np.ones((1, 4)), "scalar": np.ones(1)},
    )
    shape = UploadShape.of(update, 7)
    assert shape == UploadShape(7, {"items": 2}, {"bias": (4,), "scalar": ()}, {"pairs": (49, 2)})
    assert shape.whole == {"items": (7, 2), "pairs": (49, 2), "bias": (4,), "scalar": ()}
    assert (shape.entries, shape.parts) == (14 + 98 + 4 + 1, 7 + 49 + 2)


def keyed(update, stride):
    """The same rows under 64-bit keys that no table could hold."""
    stack = update.rows["items"]
    keys = stack.ids.astype(np.int64) * stride
    rows = KeyedRows(stack.indptr, keys, stack.rows, space=2**62)
    return Update(update.clients, {"items": rows}, update.dense)


@given(
    st.lists(clients(), min_size=1, max_size=7),
    st.sampled_from([1, 2**20 + 1, 2**55]),
    st.randoms(use_true_random=False),
    st.data(),
)
@settings(max_examples=60)
def test_keys_sum_as_rows_do(updates, stride, random, data):
    table, keys = total_of(updates), total_of([keyed(u, stride) for u in updates])
    ids, sums = table.total().rows["items"]
    got_ids, got = keys.total().rows["items"]
    np.testing.assert_array_equal(got_ids, ids * stride)
    np.testing.assert_array_equal(got, sums)
    shuffled = [keyed(u, stride) for u in random.sample(updates, len(updates))]
    same(keys, total_of(*([u] for u in shuffled)))
    cut = data.draw(st.integers(0, len(updates)))
    same(keys, total_of([joined(part) for part in (shuffled[:cut], shuffled[cut:]) if part]))
    # A key costs twice the bytes of a row number.
    more = 4 * sum(len(u.rows["items"].ids) for u in updates)
    sizes = [sum(u.nbytes for u in given) for given in (updates, shuffled)]
    assert sizes[1] == sizes[0] + more


def test_many_runs_of_keys():
    """Enough uploads for runs to be merged at every size."""
    rng = np.random.default_rng(0)
    expected, summed, parts = {}, ExactSum(1), [ExactSum(1) for _ in range(3)]
    for number in range(60):
        keys = rng.integers(0, 500, rng.integers(0, 200)) ** 3
        values = rng.integers(-8, 8, len(keys)) / 4
        for key, value in zip(keys.tolist(), values.tolist(), strict=True):
            expected[key] = expected.get(key, 0) + value
        rows = values[:, None].astype(np.float32)
        keyed = KeyedRows(np.array([0, len(keys)]), keys, rows, space=500**3)
        update = Update(1, {"t": keyed})
        summed.add(update)
        parts[number % 3].add(update)
    for part in parts[1:]:
        parts[0].merge(part)
    for total in (summed.total(), parts[0].total()):
        ids, sums = total.rows["t"]
        assert ids.tolist() == sorted(expected)
        assert sums[:, 0].tolist() == [expected[key] for key in sorted(expected)]


QUARTERS = FixedPoint(2, 2)


def on_grid(values, keys, indptr=(0, 1, 3), grid=QUARTERS):
    rows = np.array(values, np.float32).reshape(-1, 1)
    return KeyedRows(np.array(indptr), np.array(keys, np.int64), rows, space=9, grid=grid)


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        ([0.3, 0, 0], [0, 1, 2]),  # off the grid
        ([2.25, 0, 0], [0, 1, 2]),  # too large
        ([0, -2.25, 0], [0, 1, 2]),
        ([0, 1.25, 1], [0, 5, 5]),  # too large together
        ([0, np.nan, 0], [0, 1, 2]),
    ],
)
def test_what_is_not_on_its_declared_grid_is_refused(values, keys):
    with pytest.raises(ConfigError, match=r"'pairs' is not what .* multiples of 2\^-2 up to 2"):
        ExactSum(9).add(Update(2, {"pairs": on_grid(values, keys)}))


def test_a_grid_is_declared_and_changes_no_sum():
    values, keys = [0.25, 1.25, -2], [5, 5, 1]
    declared, plain = ExactSum(9), ExactSum(9)
    declared.add(Update(2, {"pairs": on_grid(values, keys)}))
    plain.add(Update(2, {"pairs": on_grid(values, keys, grid=None)}))
    for name, array in plain.to_arrays().items():
        np.testing.assert_array_equal(declared.to_arrays()[name], array)
    shape = UploadShape.of(Update(2, {"pairs": on_grid(values, keys)}), 9)
    assert shape.grids == {"pairs": FixedPoint(2, 2)}
    assert FixedPoint(2).round(np.float32([0.3, 0.4, -1.1])).tolist() == [0.25, 0.5, -1.0]
    for bad in ((33, 1), (-1, 1), (2, 0)):
        with pytest.raises(ConfigError, match="cannot be summed"):
            FixedPoint(*bad)
