import numpy as np
import pytest

from hushrec.data import Interactions
from hushrec.data.interactions import Categorical, MultiCategorical, Numeric
from hushrec.errors import DataError


def make(user, item, time, **more):
    return Interactions(
        name="small",
        user=np.array(user, np.int32),
        item=np.array(item, np.int32),
        value=np.arange(len(user), dtype=np.float32),
        time=np.array(time, np.int64),
        users=np.array(["a", "b", "c"]),
        items=np.array(["x", "y", "z", "w"]),
        **more,
    )


def test_merged_keeps_the_latest_and_says_so():
    data = make([0, 0, 1, 0, 0], [1, 2, 1, 1, 1], [50, 1, 2, 10, 20])
    merged = data.merged()
    assert merged.value.tolist() == [0, 1, 2]  # rows by their number: the one at time 50 stays
    assert merged.notes == ("2 repeated (user, item) rows merged, the latest of each pair kept",)


def test_merged_breaks_ties_by_file_order():
    assert make([0, 0, 1], [1, 1, 1], [7, 7, 7]).merged().value.tolist() == [1, 2]


def test_merged_leaves_distinct_rows_alone():
    data = make([0, 1], [1, 1], [1, 1])
    assert data.merged() is data


def test_merged_against_the_obvious_way():
    rng = np.random.default_rng(0)
    user, item, time = (
        rng.integers(3, size=300),
        rng.integers(4, size=300),
        rng.integers(9, size=300),
    )
    latest: dict[tuple[int, int], int] = {}
    for row in range(300):
        pair = (user[row], item[row])
        if pair not in latest or time[row] >= time[latest[pair]]:
            latest[pair] = row
    assert make(user, item, time).merged().value.tolist() == sorted(latest.values())


def test_features_follow_their_users_items_and_rows():
    data = make(
        [2, 0, 2],
        [3, 1, 1],
        [0, 1, 2],
        titles=np.array(["X", "Y", "Z", "W"]),
        user_features={"age": Numeric(np.array([10, 20, 30], np.float32))},
        item_features={
            "genres": MultiCategorical(np.eye(4, dtype=np.bool_), np.array(["p", "q", "r", "s"]))
        },
        context={"day": Categorical(np.array([0, 1, 1], np.int32), np.array(["mon", "tue"]))},
    )
    kept = data.users_with_at_least(2)
    assert kept.users.tolist() == ["c"]
    assert kept.items.tolist() == ["y", "w"]
    assert [kept.title(k) for k in kept.item] == ["W", "Y"]
    assert kept.user_features["age"].values.tolist() == [30]
    assert kept.item_features["genres"].flags.tolist() == [
        [False, True, False, False],
        [False, False, False, True],
    ]
    assert kept.context["day"].codes.tolist() == [0, 1]


def test_user_index():
    data = make([0], [1], [2])
    assert data.user_index("b") == 1
    assert data.user_index("nobody") is None
    assert data.title(1) == "y"


def test_lengths_must_agree():
    with pytest.raises(DataError, match="differ in length"):
        make([0, 1], [1], [1, 2])
