"""Groups of users, and the marks of a split: known worlds and the paper's words."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import interactions
from hushrec.data import load
from hushrec.data.splitting import SplitConfig, make_split
from hushrec.evaluation.groups import (
    gate_statistics,
    gates_by_user,
    popular_items,
    split_marks,
    split_notes,
    spread,
    user_groups,
)
from hushrec.streams import Streams
from hushrec.testing import clients_of


def test_ten_users_whose_groups_are_known():
    # Items 0, 1, 2 are popular; user n has n + 1 items, user 0 only the unpopular item 9.
    rows = [[9], *([*range(3), *range(3, n)][: n + 1] for n in range(1, 10))]
    view = clients_of(rows, 10)
    assert popular_items(view).nonzero()[0].tolist() == [0, 1, 2]
    groups = user_groups(view, np.arange(10))
    assert groups["cold"].tolist() == [0, 1, 2]
    assert groups["warm"].tolist() == [7, 8, 9]
    assert groups["distinct"].tolist() == [0, 8, 9]
    share = [np.isin(row, [0, 1, 2]).mean() for row in rows]
    assert sorted(share)[-3:] == [share[u] for u in groups["followers"]]
    # Positions are among those looked at.
    some = np.array([9, 4, 0])
    assert user_groups(view, some)["warm"].tolist() == [0]
    assert user_groups(view, some)["cold"].tolist() == [2]


@given(
    st.lists(st.lists(st.integers(0, 11), max_size=9, unique=True), min_size=4, max_size=40),
)
def test_groups_are_thirty_per_cent_and_do_not_overlap(rows):
    view = clients_of(rows, 12)
    groups = user_groups(view, np.arange(len(rows)))
    size, lengths = max(1, int(0.3 * len(rows))), view.positives.lengths
    assert {len(members) for members in groups.values()} == {size}
    assert not set(groups["cold"]) & set(groups["warm"])
    assert not set(groups["distinct"]) & set(groups["followers"])
    assert lengths[groups["cold"]].max() <= lengths[groups["warm"]].min()
    assert popular_items(view).sum() == 3


def test_spread_by_hand():
    values = np.arange(20) / 10
    said = spread(values, {"cold": np.array([0, 1]), "warm": np.array([19])})
    assert said.mean == pytest.approx(0.95)
    assert said.worst_tenth == pytest.approx(0.05)
    assert said.sd == pytest.approx(values.std())
    assert said.groups == pytest.approx({"cold": 0.05, "warm": 1.9})


def test_gate_statistics_do_not_depend_on_chunks():
    rng = np.random.default_rng(0)
    gates = rng.uniform(0, 1, (12, 30)).astype(np.float32)
    gates[0] = 0.5
    popular = np.arange(30) < 9
    groups = {"cold": np.array([0, 1]), "warm": np.array([10, 11])}
    parts = [gates_by_user(gates[a:b], popular) for a, b in ((0, 5), (5, 6), (6, 12))]
    logits = np.log(gates / (1 - gates.astype(np.float64)))
    np.testing.assert_allclose(parts[1]["logit"], logits[5:6].mean(axis=1), rtol=1e-6)
    said = gate_statistics(parts, groups)
    assert said["mean"] == pytest.approx(gates.mean())
    assert said["sd"] == pytest.approx(gates.std(), rel=1e-6)
    assert said["away"] == pytest.approx((abs(gates - 0.5) > 0.01).mean())
    assert said["user_quantiles"]["0.5"] == pytest.approx(np.median(gates.mean(axis=1)))
    assert said["groups"]["cold"]["mean"] == pytest.approx(gates[:2].mean())
    assert said["groups"]["warm"]["popular"] == pytest.approx(gates[10:, :9].mean())


# ------------------------------------------------------------ marks


def world(n_users=120, ties=0, length=5, **more):
    """Users with distinct times; the last two rows of some users have the same one."""
    rows = [
        (user, (user + place) % 9, place - (user < ties and place == length - 1))
        for user in range(n_users)
        for place in range(length)
    ]
    return interactions(rows, **more)


def marks(data, **config):
    return split_marks(make_split(data, SplitConfig(**config), Streams(0)))


def test_figures_that_can_be_trusted_have_no_mark():
    assert marks(world()) == []
    assert marks(world(ties=5)) == []  # 4 % of the users


def test_tied_ends_are_marked_unless_ties_stay_together_or_the_order_is_drawn():
    data = world(ties=30)
    words = (
        "25 % of users have ties at the end: the order of lines in the file decides what is held "
        "out"
    )
    assert marks(data) == [words]
    assert marks(data, kind="ratio", valid=0.2) == [words]
    assert marks(data, ties="together") == []
    assert marks(data, order="random") == []
    # One date for everybody ties nobody.
    assert marks(data, kind="time", valid_from=2, test_from=3) == []


def test_a_tie_below_the_cut_changes_nothing():
    """Rows of one time that all train, or all test, are held out whatever the order of lines."""
    rows = [(user, item, time) for user in range(120) for item, time in enumerate([1, 1, 1, 4, 5])]
    assert marks(interactions(rows)) == []
    rows = [(user, item, time) for user in range(120) for item, time in enumerate([1, 2, 3, 7, 7])]
    assert marks(interactions(rows), kind="ratio", test=0.4, valid=0.2) == []
    assert len(marks(interactions(rows))) == 1


def test_an_item_had_again_is_no_tie():
    """The row that tests is the latest of its pair; its earlier rows train."""
    rows = [(u, item, time) for u in range(120) for item, time in [(0, 1), (1, 1), (2, 2), (0, 5)]]
    assert marks(interactions(rows), repeats="keep") == []


def test_few_evaluated_users_are_marked():
    assert marks(world(99)) == ["99 of 99 users are evaluated"]
    # 150 late users of 2,000: enough for a mean, but not for what it is said to be of.
    rows = [(user, item, 100 * (user >= 1850) + item) for user in range(2000) for item in range(2)]
    rows += [(user, item, 148 + item) for user in range(1850, 2000) for item in range(2, 6)]
    config = {"kind": "time", "test_from": 152, "valid_from": 150}
    assert marks(interactions(rows), **config) == ["150 of 2,000 users are evaluated"]
    # Whole users that are drawn stand for the others, however small their share.
    assert marks(world(2000), kind="unseen-users", test=0.06) == []


def test_missing_times_are_marked():
    data = world(has_time=False)
    assert marks(data) == ["the file has no times: the holdout is drawn"]
    by_file = "the file has no times: the order of its lines decides the holdout"
    assert marks(data, order="time") == [by_file]
    assert marks(world(has_time=False, rows_in_order=True)) == []


def test_movielens_is_marked(data_dir):
    (mark,) = marks(load("ml-100k"))
    assert mark.startswith("44 % of users have ties at the end: ")


@pytest.mark.parametrize(
    ("values", "note"),
    [
        ([0.5, 5, 3, 4], "values from 0.5 to 5 among them: split.drop_below = 4 keeps those of 4"),
        ([0, 1, 0, 1], "values from 0 to 1 among them: split.drop_below = 1 keeps those of 1"),
        ([-3, -1, -2, -1], "values from -3 to -1 among them: split.drop_below = -1 keeps"),
        ([1, 1, 1, 1], None),
        ([1, 352_698, 3, 40], None),  # counts of plays
    ],
)
def test_low_ratings_that_count_as_liked_are_noted(values, note):
    rows = [(user, item, item) for user in range(4) for item in range(4)]
    data = replace(interactions(rows), value=np.tile(np.array(values, np.float32), 4))
    found = split_notes(data, SplitConfig())
    assert len(found) == (note is not None)
    if note is not None:
        assert found[0].startswith("all 16 rows count as liked, ") and note in found[0]
    for config in (SplitConfig(drop_below=-9), SplitConfig(positive_above=-9)):
        assert split_notes(data, config) == []
