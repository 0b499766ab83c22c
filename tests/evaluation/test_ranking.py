"""Ranks are counts: the kernels agree with the plainest possible reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

from hushrec.data.views import Ragged
from hushrec.errors import DivergedError, InputError, RunError
from hushrec.evaluation.metrics import Ranks, rank_full, rank_sampled
from hushrec.kernels.ragged import top_k

Lists = Sequence[Sequence[int]]


def csr(lists: Lists) -> Ragged:
    indptr = np.cumsum([0, *map(len, lists)], dtype=np.int64)
    return Ragged(indptr, np.array([item for row in lists for item in row], np.int32))


def best_items(scores: NDArray[np.float32], seen: Lists, count: int) -> tuple[Any, Any]:
    lists = csr(seen)
    return top_k(scores, lists.indptr, lists.values, count)


def reference(
    scores: NDArray[np.float32], candidates_of: Callable[[int], set[int]], targets: Lists
) -> list[tuple[int, int, int, int, int]]:
    """(row, target, ahead, tied, candidates) for every target."""
    found = []
    for row, row_targets in enumerate(targets):
        candidates = sorted(candidates_of(row) | set(row_targets))
        for target in row_targets:
            others = scores[row, [item for item in candidates if item != target]]
            own = scores[row, target]
            higher, equal = int(np.sum(others > own)), int(np.sum(others == own))
            found.append((row, target, higher, equal, len(candidates)))
    return found


def as_tuples(ranks: Ranks) -> list[tuple[int, int, int, int, int]]:
    row = np.repeat(np.arange(len(ranks.users)), np.diff(ranks.indptr))
    columns = ranks.users[row], ranks.targets, ranks.ahead, ranks.tied, ranks.candidates[row]
    return list(zip(*(column.tolist() for column in columns), strict=True))


@st.composite
def problems(draw: st.DrawFn) -> tuple[NDArray[np.float32], Lists, Lists]:
    """Scores with many ties, listed items with repeats, zero to several targets per user."""
    n_items = draw(st.integers(1, 9))
    rows = draw(st.integers(0, 5))
    item = st.integers(0, n_items - 1)
    levels = st.sampled_from([-1.5, 0.0, 0.25, 3.0])
    scores = [draw(st.lists(levels, min_size=n_items, max_size=n_items)) for _ in range(rows)]
    listed = [draw(st.lists(item, max_size=2 * n_items)) for _ in range(rows)]
    targets = [draw(st.lists(item, unique=True, max_size=4)) for _ in range(rows)]
    return np.array(scores, np.float32).reshape(rows, n_items), listed, targets


@settings(deadline=None, max_examples=300)
@given(problems())
def test_full_ranking_is_the_reference(problem: tuple[NDArray[np.float32], Lists, Lists]) -> None:
    scores, seen, targets = problem
    before = scores.copy()
    rows, n_items = scores.shape
    ranks = rank_full(scores, np.arange(rows, dtype=np.int32), csr(seen), csr(targets))
    everything = set(range(n_items))
    assert as_tuples(ranks) == reference(scores, lambda row: everything - set(seen[row]), targets)
    assert_array_equal(scores, before)


@settings(deadline=None, max_examples=300)
@given(problems())
def test_sampled_ranking_is_the_reference(
    problem: tuple[NDArray[np.float32], Lists, Lists],
) -> None:
    scores, sample, targets = problem
    users = np.arange(len(scores), dtype=np.int32)
    ranks = rank_sampled(scores, users, csr(sample), csr(targets))
    assert as_tuples(ranks) == reference(scores, lambda row: set(sample[row]), targets)


@settings(deadline=None, max_examples=300)
@given(problems(), st.integers(1, 11))
def test_top_k_is_a_stable_sort(
    problem: tuple[NDArray[np.float32], Lists, Lists], count: int
) -> None:
    scores, seen, _ = problem
    items, best = best_items(scores, seen, count)
    assert items.shape == best.shape == (len(scores), count)
    for row in range(len(scores)):
        unseen = [item for item in range(scores.shape[1]) if item not in seen[row]]
        expected = sorted(unseen, key=lambda item: (-scores[row, item], item))[:count]
        empty = count - len(expected)
        assert items[row].tolist() == expected + [-1] * empty
        assert best[row].tolist() == scores[row, expected].tolist() + [-np.inf] * empty


def test_sampling_everything_unseen_is_full_ranking() -> None:
    rng = np.random.default_rng(1)
    scores = rng.integers(0, 50, (40, 300)).astype(np.float32)
    targets = [rng.choice(300, size=3, replace=False).tolist() for _ in range(40)]
    seen = [rng.integers(0, 300, 60).tolist() for _ in range(40)]
    unseen = [sorted(set(range(300)) - set(row)) for row in seen]
    users = np.arange(40, dtype=np.int32)
    full = rank_full(scores, users, csr(seen), csr(targets))
    sampled = rank_sampled(scores, users, csr(unseen), csr(targets))
    assert as_tuples(full) == as_tuples(sampled)


def test_users_without_a_target_are_left_out() -> None:
    scores = np.zeros((3, 4), np.float32)
    scores[1] = np.nan  # nobody asks for this user's ranks
    users = np.array([70, 80, 90], np.int32)
    ranks = rank_full(scores, users, csr([[], [], []]), csr([[1], [], [0, 2]]))
    assert ranks.users.tolist() == [70, 90]
    assert ranks.indptr.tolist() == [0, 1, 3]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_no_number_names_the_user(bad: float) -> None:
    scores = np.zeros((2, 5), np.float32)
    scores[1, 3] = bad
    users = np.array([7, 42], np.int32)
    targets = csr([[0], [0]])
    with pytest.raises(DivergedError, match="user 42"):
        rank_full(scores, users, csr([[], []]), targets)
    with pytest.raises(DivergedError, match="user 42"):
        rank_sampled(scores, users, csr([[1], [2, 3]]), targets)
    with pytest.raises(DivergedError, match="row 1"):
        best_items(scores, [[], []], 2)
    # A seen or unsampled item is no candidate, whatever its score.
    rank_full(scores, users, csr([[], [3]]), targets)
    rank_sampled(scores, users, csr([[1], [2]]), targets)
    best_items(scores, [[], [3]], 2)


def test_lists_that_do_not_fit_are_refused() -> None:
    scores = np.zeros((1, 3), np.float32)
    users = np.zeros(1, np.int32)
    with pytest.raises(InputError, match="from 0 to 2"):
        rank_full(scores, users, csr([[]]), csr([[3]]))
    with pytest.raises(InputError, match="from 0 to 2"):
        rank_full(scores, users, csr([[-1]]), csr([[0]]))
    with pytest.raises(InputError, match="seen_indptr"):
        rank_full(scores, users, csr([[], []]), csr([[0]]))
    with pytest.raises(InputError, match="sample_indptr"):
        rank_sampled(scores, users, csr([[], []]), csr([[0]]))
    with pytest.raises(InputError, match="differ"):
        rank_full(scores, users, csr([[]]), csr([[1, 1]]))
    with pytest.raises(InputError, match="2 users"):
        rank_full(scores, np.zeros(2, np.int32), csr([[]]), csr([[1]]))
    with pytest.raises(InputError, match="at least 1"):
        best_items(scores, [[]], 0)


def some_ranks(seed: int, rows: int = 6) -> Ranks:
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 4, (rows, 12)).astype(np.float32)
    targets = [rng.choice(12, size=rng.integers(0, 4), replace=False).tolist() for _ in range(rows)]
    users = np.arange(rows, dtype=np.int32) + 100 * seed
    return rank_full(scores, users, csr([[0, 1]] * rows), csr(targets))


def test_concat_joins_chunks_in_order() -> None:
    parts = [some_ranks(1), some_ranks(2), some_ranks(3)]
    joined = Ranks.concat(parts)
    assert as_tuples(joined) == [entry for part in parts for entry in as_tuples(part)]
    assert len(Ranks.concat([]).users) == 0


def test_arrays_round_trip(tmp_path: Path) -> None:
    ranks = some_ranks(4)
    np.savez(tmp_path / "ranks.npz", **ranks.to_arrays("test."))  # type: ignore[arg-type]
    with np.load(tmp_path / "ranks.npz", allow_pickle=False) as stored:
        again = Ranks.from_arrays(stored, "test.")
        with pytest.raises(RunError, match=r"valid\.users"):
            Ranks.from_arrays(stored, "valid.")
    assert as_tuples(again) == as_tuples(ranks)
    for name, array in ranks.to_arrays().items():
        assert getattr(again, name).dtype == array.dtype


def test_arrays_that_do_not_fit_together_are_refused() -> None:
    arrays = some_ranks(5).to_arrays()
    for name in arrays:
        with pytest.raises(InputError, match="fit together"):
            Ranks.from_arrays({**arrays, name: arrays[name][:-1]})
