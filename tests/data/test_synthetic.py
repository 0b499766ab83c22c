from itertools import pairwise

import numpy as np
import pytest

from hushrec.data.interactions import Categorical, MultiCategorical
from hushrec.data.synthetic import crowd, demo, population


@pytest.fixture(scope="module")
def world():
    return demo()


def test_demo_is_seeded():
    one = demo(seed=3)
    two, other = demo(seed=3), demo(seed=4)
    assert np.array_equal(one.item, two.item)
    assert np.array_equal(one.time, two.time)
    assert not np.array_equal(one.item[:100], other.item[:100])


def test_demo_has_everything(world):
    assert world.n_users == 1_000
    assert 1_450 <= world.n_items <= 1_500
    assert len(set(world.titles)) == world.n_items
    assert np.bincount(world.user).min() >= 10
    assert len(world.merged()) == len(world)
    assert isinstance(world.item_features["genres"], MultiCategorical)
    assert world.item_features["genres"].flags.any(axis=1).all()
    for name in ("age group", "region", "device"):
        column = world.user_features[name]
        assert isinstance(column, Categorical)
        assert len(column.codes) == world.n_users
        assert set(column.codes) == set(range(len(column.names)))
    assert world.has_time
    same_user = world.user[1:] == world.user[:-1]
    assert (np.diff(world.time)[same_user] > 0).all()


def test_demo_has_a_long_tail(world):
    counts = np.sort(np.bincount(world.item))[::-1]
    assert counts[: len(counts) // 10].sum() > 0.3 * counts.sum()
    assert np.median(counts) < 0.6 * counts.mean()


def test_demo_drifts(world):
    """The genres of a user's first ten films and of the last ten are not the same."""
    genres = world.item_features["genres"].flags.astype(float)
    starts = np.flatnonzero(np.append(True, world.user[1:] != world.user[:-1]))
    ends = np.append(starts[1:], len(world))
    long = (ends - starts) >= 40

    def likeness(first, second):
        tables = [
            np.array([genres[world.item[rows]].mean(axis=0) for rows in part])
            for part in (first, second)
        ]
        one, two = (table / np.linalg.norm(table, axis=1, keepdims=True) for table in tables)
        return float((one * two).sum(axis=1).mean())

    spans = list(zip(starts[long], ends[long], strict=True))
    far = likeness([slice(a, a + 10) for a, _ in spans], [slice(b - 10, b) for _, b in spans])
    near = likeness([slice(a, a + 10) for a, _ in spans], [slice(a + 10, a + 20) for a, _ in spans])
    assert far < near - 0.05


@pytest.mark.parametrize("seed", [0, 1])
def test_demo_rewards_better_methods(seed):
    """HR@10, full ranking, last film held out: chance < popularity < EASE < transitions."""
    data = demo(seed)
    order = np.lexsort((data.time, data.user))
    user, item = data.user[order], data.item[order]
    is_last = np.append(user[1:] != user[:-1], True)
    target = item[is_last]
    user, item = user[~is_last], item[~is_last]
    seen = np.zeros((data.n_users, data.n_items), np.float32)
    seen[user, item] = 1

    def hit_rate(scores):
        scores = np.where(seen > 0, -np.inf, scores)
        of_target = scores[np.arange(len(target)), target][:, None]
        ties = (scores == of_target).sum(axis=1) - 1
        return float(((scores > of_target).sum(axis=1) + ties / 2 < 10).mean())

    def ease(ridge=100.0):
        inverse = np.linalg.inv(seen.T @ seen + ridge * np.eye(data.n_items, dtype=np.float32))
        weights = -inverse / np.diag(inverse)
        np.fill_diagonal(weights, 0)
        return seen @ weights

    def transitions():
        counts = np.zeros((data.n_items, data.n_items), np.float32)
        follows = user[1:] == user[:-1]
        np.add.at(counts, (item[:-1][follows], item[1:][follows]), 1)
        counts /= np.maximum(counts.sum(axis=1, keepdims=True), 1)
        ends = np.flatnonzero(np.append(user[1:] != user[:-1], True))
        return sum(0.5**back * counts[item[ends - back]] for back in range(3))

    chance = hit_rate(np.random.default_rng(0).random(seen.shape))
    popularity = hit_rate(np.broadcast_to(seen.sum(axis=0), seen.shape))
    collaborative = hit_rate(ease())
    sequential = hit_rate(transitions())
    assert chance < 0.02
    assert popularity > chance + 0.04
    assert collaborative > popularity + 0.12
    assert sequential > collaborative + 0.25
    assert sequential < 0.9  # there is noise too


@pytest.mark.parametrize(("n_users", "n_items", "mean"), [(500, 1_000, 20), (50, 8, 6), (3, 1, 1)])
def test_population_rows_are_distinct_and_sorted(n_users, n_items, mean):
    indptr, items = population(n_users, n_items, mean, seed=1)
    assert indptr.dtype == np.int64
    assert items.dtype == np.int32
    assert indptr[0] == 0
    assert indptr[-1] == len(items)
    assert len(indptr) == n_users + 1
    assert items.min() >= 0
    assert items.max() < n_items
    for start, end in pairwise(indptr):
        assert end > start
        assert (np.diff(items[start:end]) > 0).all()


def test_population_is_long_tailed_and_seeded():
    _, items = population(100_000, 10_000)
    assert 18 < len(items) / 100_000 < 22
    counts = np.sort(np.bincount(items, minlength=10_000))[::-1]
    assert counts[:100].sum() > 0.15 * counts.sum()
    assert np.array_equal(items, population(100_000, 10_000)[1])
    assert not np.array_equal(items[:50], population(100_000, 10_000, seed=1)[1][:50])


def test_a_crowd_walks_along_trails():
    made = crowd(500, 2_000, length=10, seed=1)
    assert np.array_equal(made.item, crowd(500, 2_000, length=10, seed=1).item)
    assert not np.array_equal(made.item, crowd(500, 2_000, length=10, seed=2).item)
    walks = made.item.reshape(500, 10)
    assert all(len(set(walk)) == 10 for walk in walks), "each item once"
    assert 0 <= walks.min() <= walks.max() < 2_000
    on = np.isin(np.diff(walks, axis=1), (1, 2)).mean()
    assert 0.6 < on < 0.85, "mostly a step or two along a trail"
