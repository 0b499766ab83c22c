"""Cohorts and views."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hushrec.data.splitting import SplitConfig, make_split
from hushrec.data.views import CohortConfig, Ragged, balanced_chunks, chunks
from hushrec.errors import ConfigError
from hushrec.streams import Streams
from hushrec.testing import clients_of


@given(st.integers(1, 200), st.data())
def test_fixed_size_is_exact_and_without_repeats(population, data):
    size = data.draw(st.integers(1, population))
    cohort = CohortConfig(kind="fixed", size=size).draw(population, Streams(1), 5)
    assert len(cohort) == size
    assert (np.diff(cohort) > 0).all()  # ascending, no repeats
    assert cohort[0] >= 0
    assert cohort[-1] < population


def test_fixed_size_takes_everybody_equally_often():
    config, counts = CohortConfig(kind="fixed", size=5), Counter()
    for number in range(4000):
        counts.update(config.draw(20, Streams(0), number).tolist())
    # Each count is binomial(4000, 1/4): mean 1000, sd 27; five sd.
    assert max(abs(counts[u] - 1000) for u in range(20)) < 137


def test_poisson_counts_and_inclusion():
    config = CohortConfig(kind="poisson", probability=0.3)
    cohorts = [config.draw(50, Streams(0), number) for number in range(4000)]
    sizes = np.array([len(c) for c in cohorts])
    assert sizes.mean() == pytest.approx(15, abs=5 * np.sqrt(10.5 / 4000))
    assert sizes.var() == pytest.approx(10.5, rel=0.12)  # binomial, not fixed and not Poisson(15)
    joined = np.zeros((4000, 50), bool)
    for number, cohort in enumerate(cohorts):
        assert len(set(cohort.tolist())) == len(cohort)
        joined[number, cohort] = True
    rates = joined.mean(axis=0)
    assert np.abs(rates - 0.3).max() < 5 * np.sqrt(0.21 / 4000)
    # Independent coins: two users meet in p^2 of the rounds.
    assert (joined[:, 0] & joined[:, 1]).mean() == pytest.approx(0.09, abs=0.023)


def test_poisson_can_draw_nobody():
    config = CohortConfig(kind="poisson", probability=1e-9)
    assert len(config.draw(10, Streams(0), 1)) == 0


def test_all_and_determinism():
    assert CohortConfig().draw(4, Streams(0), 9).tolist() == [0, 1, 2, 3]
    for config in (
        CohortConfig(kind="fixed", size=6),
        CohortConfig(kind="poisson", probability=0.4),
    ):
        first = config.draw(40, Streams(3), 2).tolist()
        assert first == config.draw(40, Streams(3), 2).tolist()
        assert first != config.draw(40, Streams(3), 3).tolist()
        assert first != config.draw(40, Streams(4), 2).tolist()


def test_missing_and_too_large_sizes():
    with pytest.raises(ConfigError, match=r"needs cohort\.size"):
        CohortConfig(kind="fixed").draw(4, Streams(0), 1)
    with pytest.raises(ConfigError, match=r"cohort\.size = 5 exceeds the 4 clients"):
        CohortConfig(kind="fixed", size=5).draw(4, Streams(0), 1)
    with pytest.raises(ConfigError, match=r"needs cohort\.probability"):
        CohortConfig(kind="poisson").draw(4, Streams(0), 1)
    for wrong in ({"size": 0}, {"size": -3}, {"probability": 0}, {"probability": 1.5}):
        with pytest.raises(ValidationError):
            CohortConfig(kind="fixed", **wrong)


@given(st.integers(0, 40), st.integers(1, 50))
def test_chunks_cut_without_loss(n, size):
    parts = list(chunks(np.arange(n), size))
    assert all(0 < len(part) <= size for part in parts)
    assert [x for part in parts for x in part.tolist()] == list(range(n))


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 40), st.integers(1, 9))
def test_balanced_chunks_cut_without_loss(work, limit, most):
    parts = list(balanced_chunks(np.arange(len(work)), np.array(work, np.int64), limit, most))
    assert all(0 < len(part) <= most for part in parts)
    assert [x for part in parts for x in part.tolist()] == list(range(len(work)))
    # A stack of several clients holds less than one limit more than its first client's work.
    assert all(sum(work[x] for x in part[1:]) < limit for part in parts)


@pytest.mark.parametrize("protocol", ["honest", "published"])
def test_a_prepared_view_is_the_same_view(protocol, tiny):
    view = make_split(tiny, SplitConfig(), Streams(0)).train_view(protocol)
    prepared = view.prepared()
    assert prepared.protocol == protocol
    some = np.array([4, 1, 22])
    for plain, ready in ((view, prepared), (view.take(some), prepared.take(some))):
        np.testing.assert_array_equal(plain.excluded().indptr, ready.excluded().indptr)
        np.testing.assert_array_equal(plain.excluded().values, ready.excluded().values)
        np.testing.assert_array_equal(plain.positives.values, ready.positives.values)


def test_a_view_of_some_clients_is_those_clients(tiny):
    view = make_split(tiny, SplitConfig(), Streams(0)).train_view("published")
    some = view.take(np.array([7, 2, 7]))
    assert some.users.tolist() == [7, 2, 7]
    assert some.protocol == "published"
    for place, user in enumerate([7, 2, 7]):
        for name in ("positives", "times", "values", "never_negative"):
            np.testing.assert_array_equal(getattr(some, name)[place], getattr(view, name)[user])
        expected = {*view.positives[user].tolist(), *view.never_negative[user].tolist()}
        assert some.excluded()[place].tolist() == sorted(expected)


def test_empty_rows():
    nothing = Ragged.empty(3)
    assert len(nothing) == 3
    assert nothing.lengths.tolist() == [0, 0, 0]
    assert nothing[1].tolist() == []


def test_a_stack_holds_its_own_features_only():
    view = clients_of([[1], [2], [3], [4]])
    mine = view.take(np.array([2, 0]))
    (column,) = mine.user_features.values()
    (everybody,) = view.user_features.values()
    np.testing.assert_array_equal(column.codes, everybody.codes[[2, 0]])
