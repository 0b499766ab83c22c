"""Features as numbers: what goes in can be read back, and what is unknown stays unknown."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushrec.data.features import MOST_CATEGORIES, encode, of_newcomer, usual
from hushrec.data.interactions import Categorical, MultiCategorical, Numeric
from hushrec.errors import ConfigError, DataError

COLOURS = np.array(["red", "green", "blue"])
COLUMNS = {
    "colour": Categorical(np.array([2, -1, 0, 0], np.int32), COLOURS),
    "tags": MultiCategorical(np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]], bool), COLOURS),
    "age": Numeric(np.array([0, 50, 100, np.nan], np.float32), 0.0, 100.0),
}


def test_rows_are_weights_of_vocabularies_then_numbers():
    found = encode(COLUMNS, np.arange(4), "user")
    assert found.fields == (4, 4)
    assert found.numbers == 1
    third = np.float32(1 / 3)
    assert found.rows.tolist() == [
        [0, 0, 0, 1, 0, 0.5, 0, 0.5, -1],
        [1, 0, 0, 0, 1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 1, 0, 1],
        [0, 1, 0, 0, 0, third, third, third, 0],
    ]


@given(st.lists(st.integers(-1, 2), min_size=1, max_size=20))
def test_categories_can_be_read_back(codes):
    column = Categorical(np.array(codes, np.int32), COLOURS)
    rows = encode({"colour": column}, np.arange(len(codes)), "item").rows
    assert (rows.argmax(1) - 1).tolist() == codes
    assert (rows.sum(1) == 1).all()


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=20))
def test_sets_can_be_read_back(flags):
    column = MultiCategorical(np.array(flags, bool), COLOURS)
    rows = encode({"tags": column}, np.arange(len(flags)), "item").rows
    assert ((rows[:, 1:] > 0) == np.array(flags)).all()
    np.testing.assert_allclose(rows.sum(1), 1, rtol=1e-6)


def test_somebody_the_data_does_not_know_is_unknown_in_every_field():
    row = encode(COLUMNS, np.array([1_000]), "user").rows[0]
    assert row.tolist() == [1, 0, 0, 0, 1, 0, 0, 0, 0]


def test_a_newcomer_is_one_row():
    more = of_newcomer(COLUMNS, {"colour": "green", "tags": "red|blue", "age": "25"})
    row = encode(more, np.array([0]), "user").rows[0]
    assert row.tolist() == [0, 0, 1, 0, 0, 0.5, 0, 0.5, -0.5]
    silent = encode(of_newcomer(COLUMNS, {}), np.array([0]), "user").rows[0]
    assert silent.tolist() == [1, 0, 0, 0, 1, 0, 0, 0, 0]
    assert {len(column) for column in more.values()} == {1}, "nobody else's row is in it"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"height": "2"}, "no user feature 'height'"),
        ({"colour": "mauve"}, "no value 'mauve'"),
        ({"colour": "red|blue"}, "takes one value"),
        ({"age": "old"}, "expected a number"),
    ],
)
def test_what_a_newcomer_cannot_be(said, words):
    with pytest.raises(ConfigError, match=words):
        of_newcomer(COLUMNS, said)


def test_numbers_beyond_their_range_are_cut():
    ages = Numeric(np.array([-20, 300], np.float32), 0.0, 100.0)
    assert encode({"age": ages}, np.arange(2), "user").rows.tolist() == [[-1], [1]]


def test_a_range_is_taken_from_the_catalogue_but_never_from_people():
    years = {"year": Numeric(np.array([1990, 2000, 2010], np.float32))}
    assert encode(years, np.arange(3), "item").rows.tolist() == [[-1], [0], [1]]
    with pytest.raises(DataError, match="without a range"):
        encode(years, np.arange(3), "user")


def test_an_id_is_no_feature():
    names = np.array([str(k) for k in range(MOST_CATEGORIES)])
    column = Categorical(np.zeros(2, np.int32), names)
    with pytest.raises(DataError, match="looks like an id"):
        encode({"name": column}, np.arange(2), "item")


def test_the_usual_context_is_the_most_frequent_one():
    owner = np.array([0, 0, 0, 1, 1, 3], np.int32)
    codes = np.array([2, 1, 2, 1, 0, -1], np.int32)
    found = usual(Categorical(codes, COLOURS), owner, 4)
    assert found.codes.tolist() == [2, 0, -1, -1]  # a tie goes to the lower code
