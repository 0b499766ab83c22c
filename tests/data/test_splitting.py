"""Splits: nothing lost, nothing leaked."""

from collections import Counter, defaultdict
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from conftest import interactions
from hushrec.data.interactions import Categorical
from hushrec.data.splitting import Split, SplitConfig, make_split
from hushrec.data.views import Ragged, TrainView
from hushrec.errors import ConfigError, DataError
from hushrec.evaluation.evaluator import EvaluationConfig, Evaluator, popularity_ranks
from hushrec.streams import Streams
from hushrec.testing import taste_world

KINDS = ("leave-one-out", "ratio", "time", "unseen-users")


@st.composite
def worlds(draw, min_users=2):
    """Rows with repeats, ties in time, and users of every length from 1 on."""
    n_users = draw(st.integers(min_users, 6))
    rows = []
    for user in range(n_users):
        pairs_of_user = st.tuples(st.integers(0, 7), st.integers(0, 5))
        mine = draw(st.lists(pairs_of_user, min_size=1, max_size=9))
        rows += [(user, item, time) for item, time in mine]
    rows = draw(st.permutations(rows))
    assume(max(r[1] for r in rows) > 0)
    return interactions(rows)


@st.composite
def configs(draw, orders=("time", "random")):
    """Splits of all kinds, but for settings that contradict each other."""
    given = {
        "kind": draw(st.sampled_from(KINDS)),
        "valid": draw(st.sampled_from([0.1, 0.25, 0.4])),
        "test": draw(st.sampled_from([0.1, 0.2, 0.5])),
        "order": draw(st.sampled_from(orders)),
        "ties": draw(st.sampled_from(["auto", "together", "file"])),
        "min_train": draw(st.integers(1, 3)),
        "repeats": draw(st.sampled_from(["merge", "keep"])),
    }
    try:
        return SplitConfig(**given)
    except ValueError:
        assume(False)


def split_or_skip(data, config) -> Split:
    try:
        return make_split(data, config, Streams(0))
    except DataError:  # nobody is long enough: nothing to look at
        assume(False)


def pairs(ragged) -> Counter:
    return Counter((u, int(i)) for u in range(len(ragged)) for i in ragged[u])


@given(worlds(), configs())
@settings(max_examples=200)
def test_every_row_lands_in_exactly_one_part(data, config):
    split = split_or_skip(data, config)
    rows = Counter(zip(split.data.user.tolist(), split.data.item.tolist(), strict=True))
    parts = pairs(split.train.positives) + pairs(split.valid) + pairs(split.test)
    assert not parts - rows
    unused = rows - parts
    # A repeated row of a held-out item is not a second target.
    targets = pairs(split.valid) + pairs(split.test)
    assert max(pairs(split.valid).values(), default=1) == 1
    assert max(pairs(split.test).values()) == 1
    if config.repeats == "keep":
        unused = Counter({pair: n for pair, n in unused.items() if pair not in targets})
    if config.kind in ("leave-one-out", "ratio"):
        assert not unused
    # Whoever has other unused rows is not evaluated, and is counted.
    for user, _ in unused:
        assert len(split.valid[user]) == len(split.test[user]) == 0
        assert len(split.train.positives[user]) < config.min_train
    facts = split.facts()
    trained = split.train.positives.take(split.training_users)
    assert facts["train_rows"] == len(trained.values)
    assert facts["unused_rows"] == len(split.data) - sum(parts.values())
    assert facts["evaluated_users"] == sum(len(split.test[u]) > 0 for u in range(split.n_users))
    assert facts["evaluated_users"] + facts["not_evaluated_users"] == data.n_users
    for name in ("times", "values"):
        assert (getattr(split.train, name).indptr == split.train.positives.indptr).all()


@given(worlds(), configs())
@settings(max_examples=100)
def test_training_rows_are_oldest_first_with_their_own_times(data, config):
    split = split_or_skip(data, config)
    known = Counter(
        zip(
            *(getattr(split.data, n).tolist() for n in ("user", "item", "time", "value")),
            strict=True,
        )
    )
    for user in range(split.n_users):
        times = split.train.times[user]
        assert (np.diff(times) >= 0).all()
        for row in zip(
            split.train.positives[user].tolist(),
            times.tolist(),
            split.train.values[user].tolist(),
            strict=True,
        ):
            assert known[(user, *row)]


@given(worlds(), st.integers(1, 3), st.sampled_from(["merge", "keep"]))
@settings(max_examples=200)
def test_leave_one_out_takes_the_latest_by_time_then_file_order(data, min_train, repeats):
    config = SplitConfig(ties="file", min_train=min_train, repeats=repeats)
    split = split_or_skip(data, config)
    rows = defaultdict(list)
    for place, (u, i, t) in enumerate(
        zip(data.user.tolist(), data.item.tolist(), data.time.tolist(), strict=True)
    ):
        rows[u].append((t, place, i))
    for user in range(data.n_users):
        mine = sorted(rows[user])
        if repeats == "merge":
            latest = {i: (t, place) for t, place, i in mine}
            mine = sorted((t, place, i) for i, (t, place) in latest.items())
        items = [i for _, _, i in mine]
        if len(items) < 2 + min_train:
            assert split.train.positives[user].tolist() == items
            assert len(split.valid[user]) == len(split.test[user]) == 0
        else:
            assert split.train.positives[user].tolist() == items[:-2]
            assert split.valid[user].tolist() == [items[-2]]
            assert split.test[user].tolist() == [items[-1]]


@given(worlds(), configs())
@settings(max_examples=100)
def test_merged_heldout_items_are_never_training_items(data, config):
    config = config.model_copy(update={"repeats": "merge"})
    split = split_or_skip(data, config)
    assert not pairs(split.train.positives) & pairs(split.test)
    assert not pairs(split.train.positives) & pairs(split.valid)
    assert not pairs(split.valid) & pairs(split.test)


def reachable(thing, seen):
    """Walk everything that can be reached from an object by attributes, items and containers."""
    if id(thing) in seen or isinstance(thing, (str, bytes, int, float, type, type(None))):
        return
    seen[id(thing)] = thing
    yield thing
    if isinstance(thing, np.ndarray):
        yield from reachable(thing.base, seen)
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from reachable(value, seen)
    elif isinstance(thing, (list, tuple, set, frozenset)):
        for value in thing:
            yield from reachable(value, seen)
    elif is_dataclass(thing):
        for f in fields(thing):
            yield from reachable(getattr(thing, f.name), seen)
    elif isinstance(thing, BaseModel):
        yield from reachable(dict(thing), seen)
    if hasattr(thing, "__dict__"):
        yield from reachable(vars(thing), seen)
    for name in getattr(type(thing), "__slots__", ()):
        yield from reachable(getattr(thing, name, None), seen)


@pytest.mark.parametrize("kind", KINDS)
def test_heldout_items_cannot_be_reached_from_what_training_sees(kind, small):
    data = replace(small, time=np.random.default_rng(0).integers(0, 50, len(small)))
    split = make_split(data, SplitConfig(kind=kind), Streams(0))
    view = split.train_view("honest")
    heldout = pairs(split.valid) + pairs(split.test)
    assert heldout
    found = list(reachable(view, {}))
    raggeds = [thing for thing in found if isinstance(thing, Ragged)]
    assert len(raggeds) == 3  # positives, times, values
    assert not pairs(view.positives) & heldout
    assert not any(isinstance(thing, (Split, type(data))) for thing in found)
    # No hidden array is long enough to hold all rows, not even as the base of a view.
    n_train = len(view.positives.values)
    arrays = [thing for thing in found if isinstance(thing, np.ndarray)]
    assert max(a.size for a in arrays) <= max(n_train, split.n_users + 1)
    # The walk does find the leak where there is one.
    leaking = [t for t in reachable(split.train_view("published"), {}) if isinstance(t, Ragged)]
    assert any(heldout == pairs(r) for r in leaking)


@given(worlds(), st.sampled_from(["time", "random"]))
@settings(max_examples=100)
def test_ratio_shares(data, order):
    config = SplitConfig(kind="ratio", valid=0.25, test=0.5, order=order, ties="file")
    split = split_or_skip(data, config)
    merged = data.merged()
    for user in range(data.n_users):
        n = int((merged.user == user).sum())
        got = [len(split.train.positives[user]), len(split.valid[user]), len(split.test[user])]
        assert got == [n - n // 4 - n // 2, n // 4, n // 2]


def test_ratio_by_time_tests_the_latest_and_random_does_not():
    data = interactions([(u, i, i) for u in range(20) for i in range(20)])
    by_time = make_split(data, SplitConfig(kind="ratio"), Streams(0))
    for user in range(20):
        assert by_time.test[user].tolist() == [16, 17, 18, 19]
        assert by_time.valid[user].tolist() == [14, 15]
    shuffled = make_split(data, SplitConfig(kind="ratio", order="random"), Streams(0))
    assert len({tuple(shuffled.test[u].tolist()) for u in range(20)}) > 15
    again = make_split(data, SplitConfig(kind="ratio", order="random"), Streams(0))
    np.testing.assert_array_equal(shuffled.test.values, again.test.values)
    other = make_split(data, SplitConfig(kind="ratio", order="random"), Streams(1))
    assert (shuffled.test.values != other.test.values).any()


@given(worlds())
@settings(max_examples=100)
def test_time_split_trains_on_nothing_from_after_the_cut(data):
    split = split_or_skip(data, SplitConfig(kind="time", valid=0.25, test=0.25))
    when = {}
    for u, i, t in zip(split.data.user, split.data.item, split.data.time, strict=True):
        when[int(u), int(i)] = int(t)
    latest_train = max((when[p] for p in pairs(split.train.positives)), default=-1)
    valid = [when[p] for p in pairs(split.valid)]
    test = [when[p] for p in pairs(split.test)]
    assert latest_train < min(valid + test)
    if valid:
        assert max(valid) < min(test)


def test_time_split_takes_its_shares_from_everybody_together():
    data = interactions([(u, i, 10 * i + u) for u in range(10) for i in range(10)])
    split = make_split(data, SplitConfig(kind="time"), Streams(0))
    # Times 0 to 99, each once: a fifth tests, a tenth validates.
    assert pairs(split.test) == Counter({(u, i): 1 for u in range(10) for i in (8, 9)})
    assert pairs(split.valid) == Counter({(u, 7): 1 for u in range(10)})


def test_time_split_needs_times():
    data = interactions([(u, i, i) for u in range(3) for i in range(5)], has_time=False)
    with pytest.raises(ConfigError, match="no timestamps"):
        make_split(data, SplitConfig(kind="time"), Streams(0))


@given(worlds(min_users=5), st.sampled_from(["time", "random"]))
@settings(max_examples=100)
def test_unseen_users_never_train_a_cohort(data, order):
    config = SplitConfig(kind="unseen-users", valid=0.25, test=0.4, order=order, ties="file")
    split = split_or_skip(data, config)
    heldout = {u for u, _ in [*pairs(split.valid), *pairs(split.test)]}
    assert not heldout & set(split.training_users.tolist())
    merged = data.merged()
    for user in heldout:
        n = int((merged.user == user).sum())
        assert len(split.train.positives[user]) == (n + 1) // 2
        assert len(split.valid[user]) == 0 or len(split.test[user]) == 0
    for user in split.training_users:
        assert len(split.train.positives[user]) == (merged.user == user).sum()


@given(worlds(), configs())
@settings(max_examples=100)
def test_history_at_test_time_is_training_then_validation(data, config):
    split = split_or_skip(data, config)
    assert split.history("valid") is split.train
    history = split.history("test")
    assert isinstance(history, TrainView)
    assert history.protocol == "honest"
    for user in range(split.n_users):
        expected = split.train.positives[user].tolist() + split.valid[user].tolist()
        assert history.positives[user].tolist() == expected
        assert (np.diff(history.times[user]) >= 0).all()
        assert len(history.values[user]) == len(expected)


def test_repeats_merge_or_keep():
    rows = [(u, i, t) for u in (0, 1) for t, i in enumerate([0, 1, 2, 1, 3, 1])]
    data = interactions(rows)
    merged = make_split(data, SplitConfig(), Streams(0))
    assert merged.train.positives[0].tolist() == [0, 2]
    assert merged.test[0].tolist() == [1]
    assert any("repeated" in note for note in merged.data.notes)
    kept = make_split(data, SplitConfig(repeats="keep"), Streams(0))
    assert kept.train.positives[0].tolist() == [0, 1, 2, 1]
    assert kept.test[0].tolist() == [1]
    assert kept.train.excluded()[0].tolist() == [0, 1, 2]


@given(worlds(), configs(orders=("time",)))
@settings(max_examples=200, suppress_health_check=[HealthCheck.filter_too_much])
def test_rows_of_one_user_and_time_stay_on_one_side(data, config):
    """Whatever the kind of split, where ties are kept together."""
    split = split_or_skip(data, config.model_copy(update={"ties": "together", "repeats": "merge"}))
    part_of = {}
    for name, part in (("train", split.train.positives), ("valid", split.valid)):
        part_of |= dict.fromkeys(pairs(part), name)
    part_of |= dict.fromkeys(pairs(split.test), "test")
    parts = defaultdict(set)
    for user, item, time in zip(split.data.user, split.data.item, split.data.time, strict=True):
        parts[user, time].add(part_of.get((int(user), int(item))))
    assert max(map(len, parts.values())) == 1


def test_the_last_moment_tests_and_the_one_before_validates():
    moments = [[0, 1], [2], [3, 4, 5], [6, 7]]
    rows = [(u, i, t) for u in (0, 1) for t, items in enumerate(moments) for i in items]
    split = make_split(interactions(rows), SplitConfig(ties="together"), Streams(0))
    assert set(split.test[0]) == {6, 7}
    assert set(split.valid[0]) == {3, 4, 5}
    assert set(split.train.positives[0]) == {0, 1, 2}


def receipts(n_users=12, n_baskets=6, seed=0):
    """Baskets of three items, each in half of a customer's baskets."""
    rng = np.random.default_rng(seed)
    rows = []
    for user in range(n_users):
        own = rng.choice(20, 6, replace=False)
        rows += [
            (user, item, 10 * basket)
            for basket in range(n_baskets)
            for item in rng.choice(own, 3, replace=False)
        ]
    return interactions(rows, name="receipts")


def test_the_next_basket_is_held_out_as_a_whole_and_repeats_stay():
    data = receipts()
    split = make_split(data, SplitConfig(kind="next-basket"), Streams(0))
    assert split.config.repeats == "keep" and split.train.repeats
    for user in range(data.n_users):
        mine = {t: set(data.item[(data.user == user) & (data.time == t)]) for t in range(0, 60, 10)}
        assert set(split.test[user]) == mine[50]
        assert set(split.valid[user]) == mine[40]
        assert len(split.train.positives[user]) == 12
        for time in (0, 10, 20, 30):
            held = split.train.positives[user][split.train.times[user] == time]
            assert set(held) == mine[time]
        # The validation basket is a basket of its own in the history of the test.
        history = split.history("test")
        last = history.times[user] == history.times[user][-1]
        assert set(history.positives[user][last]) == mine[40]
    assert pairs(split.train.positives) & pairs(split.test)


def test_nothing_of_a_held_out_basket_can_be_reached_from_what_training_sees():
    """Targets may be training items; the rows of held-out baskets are nowhere in the view."""
    data = receipts()
    split = make_split(data, SplitConfig(kind="next-basket"), Streams(0))
    # The same training rows with other held-out baskets make the same view.
    other = replace(data, item=np.where(data.time >= 40, (data.item + 7) % 20, data.item))
    changed = make_split(other, SplitConfig(kind="next-basket"), Streams(0))
    assert (changed.test.values != split.test.values).any()
    for one, two in zip(
        reachable(split.train_view("honest"), {}),
        reachable(changed.train_view("honest"), {}),
        strict=True,
    ):
        if isinstance(one, np.ndarray):
            np.testing.assert_array_equal(one, two)
    found = list(reachable(split.train_view("honest"), {}))
    assert not any(isinstance(thing, (Split, type(data))) for thing in found)


@pytest.mark.parametrize("timed", [True, False])
def test_no_split_depends_on_the_order_of_lines(timed):
    """Baskets by their times, and data without times: shuffled lines give the same split."""
    data = receipts() if timed else replace(receipts().merged(), has_time=False)
    kinds = ("leave-one-out", "next-basket" if timed else "ratio")
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(data))
        for kind in kinds:
            # Without times, the time of a row is its place in the file.
            shuffled = data.select(order)
            if not timed:
                shuffled = replace(shuffled, time=np.arange(len(data)))
            splits = [
                make_split(each, SplitConfig(kind=kind, valid=0.2, test=0.3), Streams(1))
                for each in (data, shuffled)
            ]
            for part in ("valid", "test"):
                values = [split.heldout(part).values for split in splits]
                np.testing.assert_array_equal(*values)
            np.testing.assert_array_equal(*(split.train.positives.values for split in splits))


def test_data_without_times_has_a_drawn_holdout_and_history():
    data = interactions([(u, i, i) for u in range(20) for i in range(20)], has_time=False)
    split = make_split(data, SplitConfig(), Streams(0))
    assert split.config.order == "random"
    assert len({int(split.test[user][0]) for user in range(20)}) > 8
    descents = [(np.diff(split.train.positives[user]) < 0).sum() for user in range(20)]
    assert min(descents) > 2
    other = make_split(data, SplitConfig(), Streams(1))
    assert (other.test.values != split.test.values).any()
    # Rows that are declared to be in order, or taken so, keep the order of the file.
    for ordered, config in (
        (replace(data, rows_in_order=True), SplitConfig()),
        (data, SplitConfig(order="time")),
    ):
        split = make_split(ordered, config, Streams(0))
        assert split.config.order == "time"
        assert split.test.values.tolist() == [19] * 20
        assert split.train.positives[0].tolist() == list(range(18))


def test_what_is_auto_is_decided_by_the_data_once():
    ratings = interactions([(u, i, i // 4) for u in range(5) for i in range(20)])
    assert not ratings.has_baskets and receipts().has_baskets
    assert make_split(ratings, SplitConfig(), Streams(0)).config.ties == "file"
    assert make_split(receipts(), SplitConfig(), Streams(0)).config.ties == "together"
    for kind in (*KINDS, "next-basket"):
        decided = SplitConfig(kind=kind).resolved(in_order=True, has_baskets=True)
        assert "auto" not in decided.model_dump().values()
        assert decided.resolved(in_order=False, has_baskets=False) == decided


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "next-basket", "order": "random"}, "needs the order of time"),
        ({"kind": "time", "order": "random"}, "needs the order of time"),
        ({"kind": "next-basket", "ties": "file"}, "held out as a whole"),
        ({"kind": "next-basket", "repeats": "merge"}, "bought again"),
        ({"order": "random", "ties": "together"}, "separates rows of one time"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        SplitConfig(**given)


def test_baskets_need_times():
    with pytest.raises(ConfigError, match="no timestamps"):
        make_split(replace(receipts(), has_time=False), SplitConfig(kind="next-basket"), Streams(0))


def test_hopeless_data_is_refused():
    with pytest.raises(DataError, match="no user is long enough"):
        make_split(interactions([(0, 0, 0), (1, 1, 0)]), SplitConfig(), Streams(0))
    with pytest.raises(DataError, match="at least two users"):
        make_split(interactions([(0, i, 0) for i in range(9)]), SplitConfig(), Streams(0))


def test_only_what_was_liked_is_to_be_found_and_the_rest_is_no_candidate():
    """PrivRec's protocol: ratings above 3 are targets, other held-out rows are touched items."""
    data = taste_world()
    rated = replace(data, value=(np.arange(len(data)) % 5 + 1).astype(np.float32))
    plain = SplitConfig(kind="unseen-users", valid=0.25, test=0.4)
    config = plain.model_copy(update={"positive_above": 3.0})
    whole, split = (make_split(rated, c, Streams(0)) for c in (plain, config))
    value = dict(
        zip(zip(rated.user.tolist(), rated.item.tolist(), strict=True), rated.value, strict=True)
    )
    for user in range(split.n_users):
        heldout = set(whole.valid[user]) | set(whole.test[user])
        targets = set(split.valid[user]) | set(split.test[user])
        assert targets == {item for item in heldout if value[user, item] > 3}
        assert set(split.disliked[user]) == heldout - targets
    np.testing.assert_array_equal(split.train.positives.values, whole.train.positives.values)
    assert split.digest() != whole.digest()
    evaluator = Evaluator(split, EvaluationConfig(), Streams(0), 1)
    popularity = popularity_ranks(evaluator, "test")
    ranks = popularity["full"]
    for row, user in enumerate(ranks.users):
        touched = len(split.train.positives[user]) + len(split.disliked[user])
        assert ranks.candidates[row] == split.data.n_items - touched


def test_context_becomes_the_usual_one_of_the_training_rows():
    data = taste_world()
    weather = Categorical((np.arange(len(data)) % 3).astype(np.int32), np.array(["a", "b", "c"]))
    split = make_split(replace(data, context={"weather": weather}), SplitConfig(), Streams(0))
    merged = split.data
    for user in range(split.n_users):
        mine = (merged.user == user) & np.isin(merged.item, split.train.positives[user])
        counts = np.bincount(merged.context["weather"].codes[mine], minlength=3)
        assert counts[split.train.user_features["weather"].codes[user]] == counts.max()


def test_rows_below_a_value_are_left_out_before_the_split():
    data = replace(taste_world(), value=np.tile([1, 4, 5, 3], 200)[: len(taste_world())] * 1.0)
    split = make_split(data, SplitConfig(drop_below=4), Streams(0))
    assert split.data.value.min() >= 4
    assert split.train.values.values.min() >= 4
    assert len(split.data) == int((data.value >= 4).sum())
    assert any("below 4 left out" in note for note in split.data.notes)
    with pytest.raises(DataError, match="drop_below = 9"):
        make_split(data, SplitConfig(drop_below=9), Streams(0))
