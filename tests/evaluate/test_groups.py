"""Groups of users: known worlds, the paper's words, and what a run records of them."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hushrec
from hushrec.evaluate.analyse import groups_of, guidance_effects
from hushrec.evaluate.groups import GateSums, popular_items, spread, user_groups
from hushrec.evaluate.metrics import per_user
from hushrec.report.html import write_report
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
    parts = [GateSums.of(gates[a:b], popular) for a, b in ((0, 5), (5, 6), (6, 12))]
    said = GateSums.concat(parts).statistics(groups)
    assert said["mean"] == pytest.approx(gates.mean())
    assert said["sd"] == pytest.approx(gates.std(), rel=1e-6)
    assert said["away"] == pytest.approx((abs(gates - 0.5) > 0.01).mean())
    assert said["user_quantiles"]["0.5"] == pytest.approx(np.median(gates.mean(axis=1)))
    assert said["groups"]["cold"]["mean"] == pytest.approx(gates[:2].mean())
    assert said["groups"]["warm"]["popular"] == pytest.approx(gates[10:, :9].mean())


# ------------------------------------------------------------------ from runs


@pytest.fixture(scope="module")
def guided(small, tmp_path_factory):
    """FedRKG with a commit at the start of rounds 5, 9 and 13, looked at every third round."""
    settings = {"interval": 4, "beta": 0.5, "gate_lr": 5.0, "d": 6, "evaluation.every": 3}
    out = tmp_path_factory.mktemp("guided") / "run"
    return hushrec.train(small, "fedrkg", rounds=13, settings=settings, out=out)


def test_a_run_is_looked_at_before_and_after_guidance(guided):
    lines = guided.folder.read_metrics()
    looked = {line["round"] for line in lines if line["valid"] is not None}
    assert looked == {3, 6, 9, 12, 13} | {4, 5, 8}
    assert {line["round"] for line in lines if line.get("gates")} == {5, 9, 13}
    assert all(("groups" in line) == (line["valid"] is not None) for line in lines)


def test_extra_looks_do_not_use_up_the_patience(tiny):
    """Guidance in every round, so a look in every round; patience counts every fourth."""
    settings = {"interval": 1, "d": 4, "evaluation.every": 4, "evaluation.patience": 2}
    run = hushrec.train(tiny, "fedrkg", rounds=40, settings=settings)
    assert run.summary["rounds"] >= run.summary["selected_round"] + 5
    assert run.summary["rounds"] % 4 == 0


def test_the_effect_is_the_difference_of_two_looks(guided):
    effects = guidance_effects(guided)
    assert [effect.round for effect in effects] == [5, 9, 13]
    lines = {line["round"]: line for line in guided.folder.read_metrics()}
    for effect in effects:
        for group in ("cold", "warm", "distinct", "followers"):
            before = lines[effect.round - 1]["groups"][group]["ndcg@10"]
            assert effect.before[group] == before
            assert effect.after[group] == lines[effect.round]["groups"][group]["ndcg@10"]
        assert effect.after["all"] == lines[effect.round]["valid"]["full"]["ndcg@10"]
        assert effect.gates["away"] > 0.1  # at this rate the gates do something
    with pytest.raises(hushrec.HushrecError, match="no guidance rounds"):
        guidance_effects(hushrec.train(guided.split.data, "popularity"))


def test_recorded_groups_are_those_of_the_ranks(guided):
    """The last round's record equals what its ranks give when it was the selected one."""
    run = hushrec.train(guided.split.data, "fedmf", rounds=1, out=guided.folder.path / "one")
    members = run.evaluator(1).groups("valid")
    values = per_user(run.ranks["valid"]["full"], "ndcg@10")
    (line,) = run.folder.read_metrics()
    for name, said in line["groups"].items():
        assert said["ndcg@10"] == pytest.approx(values[members[name]].mean())
    found = groups_of(run)["hr@10"]
    assert found.mean == pytest.approx(run.metrics["full"]["hr@10"])


def test_the_report_shows_groups_and_guidance(guided):
    page = write_report(guided).read_text()
    for words in ("Cold users", "Followers", "What guidance changed", "Gates</b>", 'class="event"'):
        assert words in page
    assert json.dumps(guided.summary)  # still plain
