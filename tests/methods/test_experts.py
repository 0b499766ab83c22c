"""Our experts keep the contract that other people's are held to."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hushrec.config import names
from hushrec.data.views import Ragged, TrainView
from hushrec.kernels import baskets as kernels
from hushrec.methods.statistics.embedded_experts import (
    STATE_AGOS,
    STATE_COUNTS,
    Categories,
    Cooccurrence,
    PersonalFrequencyExpert,
    PopularityExpert,
    RecentTransitions,
    Transitions,
)
from hushrec.methods.statistics.experts import ExpertsConfig, expert_class, shortened
from hushrec.testing import ExpertContract, clients_of


class TestTransitions(ExpertContract):
    expert = Transitions


class TestRecentTransitions(ExpertContract):
    expert = RecentTransitions


class TestCooccurrence(ExpertContract):
    expert = Cooccurrence


class TestCooccurrenceWithASmallHead(ExpertContract):
    expert = Cooccurrence
    options = {"dense_items": 10, "factors": 4}  # noqa: RUF012


class TestPopularity(ExpertContract):
    expert = PopularityExpert


class TestCategories(ExpertContract):
    expert = Categories


def with_baskets(clients: list[list[list[int]]], n_items: int = 60) -> TrainView:
    """Clients of baskets, oldest first; a basket is a list of distinct items."""
    view = clients_of([[i for basket in own for i in basket] for own in clients], n_items)
    numbers = [n for own in clients for n, basket in enumerate(own) for _ in basket]
    times = Ragged(view.times.indptr, np.array(numbers, np.int64))
    return replace(view, times=times, repeats=True)


class TestPersonalFrequency(ExpertContract):
    expert = PersonalFrequencyExpert

    def _view(self) -> TrainView:
        rng = np.random.default_rng(0)
        return with_baskets(
            [
                [rng.permutation(12)[: rng.integers(1, 5)].tolist() for _ in range(2 + n % 7)]
                for n in range(20)
            ]
        )

    def _odd_view(self) -> TrainView:
        """One basket of one item, a basket of everything, always the same, and none twice."""
        same = [[5, 9]] * 30
        return with_baskets([[[7]], [list(range(60))], same, [[4], [40, 8], [2, 20]], [[1], [1]]])


def state_of(count: int, ago: int) -> int:
    """The slow twin of `baskets.bucket_of`."""
    by_count = sum(count > end for end in STATE_COUNTS)
    return by_count * (len(STATE_AGOS) + 1) + sum(ago > end for end in STATE_AGOS)


def counted_slowly(baskets: list[list[int]], n_items: int) -> dict[int, list[float]]:
    """The slow twin of `baskets.count_repeats`, for one client."""
    found: dict[int, list[float]] = {}
    for item in sorted({i for basket in baskets for i in basket}):
        has = [item in basket for basket in baskets]
        first = has.index(True)
        found[item] = [len(baskets) - 1 - first, sum(has) - 1, float(has[-1])]
        for now in range(first + 1, len(baskets)):
            before = [n for n in range(now) if has[n]]
            state = found.setdefault(n_items + state_of(len(before), now - before[-1]), [0, 0, 0])
            state[0] += 1
            state[1] += has[now]
    return dict(sorted(found.items()))


histories = st.lists(
    st.lists(
        st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True), min_size=1, max_size=20
    ),
    min_size=1,
    max_size=4,
)


@given(histories)
def test_repeats_are_counted_as_one_by_one(clients):
    view = with_baskets(clients, n_items=8)
    past, ends = view.positives, (STATE_COUNTS, STATE_AGOS)
    indptr, keys, rows = kernels.count_repeats(
        past.indptr, past.values, view.times.values, 8, *ends
    )
    for client, baskets in enumerate(clients):
        mine = slice(indptr[client], indptr[client + 1])
        slow = counted_slowly(baskets, 8)
        assert keys[mine].tolist() == list(slow)
        np.testing.assert_array_equal(rows[mine], list(slow.values()))


@given(histories)
def test_own_items_are_scored_as_one_by_one(clients):
    view = with_baskets(clients, n_items=8)
    rates, states = np.linspace(-1, 1, 8), np.linspace(-2, 2, 42)
    model = {"rates": rates.astype(np.float32), "states": states.astype(np.float32)}
    out = np.zeros((len(clients), 9, 8), np.float32)
    past, ends = view.positives, (STATE_COUNTS, STATE_AGOS)
    kernels.score_own_items(
        past.indptr, past.values, view.times.values, *model.values(), *ends, out
    )
    for client, baskets in enumerate(clients):
        rows = sum(map(len, baskets))
        distinct = len({i for basket in baskets for i in basket})
        for item in range(8):
            agos = [n for n, basket in enumerate(reversed(baskets), 1) if item in basket]
            if not agos:
                assert not out[client, :, item].any()
                continue
            n, g, h = len(agos), agos[0], agos[-1]
            expected = [
                1,
                np.log(1 + n),
                np.log(1 + sum(1 / ago for ago in agos)),
                np.log(g),
                np.log(n / h),
                np.log(g * (n - 1) / (h - g)) if n > 1 else 0,
                rates[item],
                states[state_of(n, g)],
                np.log((rows - distinct + 1) / (rows + 4)),
            ]
            np.testing.assert_allclose(out[client, :, item], expected, rtol=1e-5, atol=1e-6)


@given(histories)
def test_the_last_basket_is_the_rows_of_the_last_time(clients):
    view = with_baskets(clients)
    last = kernels.last_baskets(view.times.indptr, view.times.values)
    assert last.tolist() == [len(baskets[-1]) for baskets in clients]
    before = shortened(view, last)
    for client, baskets in enumerate(clients):
        earlier = [item for basket in baskets[:-1] for item in basket]
        assert before.positives[client].tolist() == earlier
        assert len(before.times[client]) == len(earlier)


def test_own_frequency_needs_lists_that_may_hold_the_history():
    view = with_baskets([[[1], [1]], [[2]]])
    expert = PersonalFrequencyExpert(ExpertsConfig())
    assert expert.is_applicable(view)
    assert not expert.is_applicable(replace(view, repeats=False))


def test_every_installed_expert_of_ours_is_here():
    checked = {Transitions, RecentTransitions, Cooccurrence, PopularityExpert, Categories}
    checked.add(PersonalFrequencyExpert)
    ours = [expert_class(name) for name in names("experts")]
    assert {one for one in ours if one.__module__.startswith("hushrec.")} == checked
