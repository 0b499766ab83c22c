"""Groups of users: known worlds and the paper's words."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushrec.evaluation.groups import (
    gate_statistics,
    gates_by_user,
    popular_items,
    spread,
    user_groups,
)
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
