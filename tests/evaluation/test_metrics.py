"""Metrics against an independent library, ties included, and against what must hold anyway."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, permutations, product

import ir_measures
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_measures import RR, Accuracy, P, R, Success, nDCG
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray
from scipy.stats import hypergeom

from hushrec.data.views import Ragged
from hushrec.errors import ConfigError, InputError
from hushrec.evaluation.metrics import (
    AUC,
    F1,
    NDCG,
    Coverage,
    HitRate,
    Metric,
    NewRecall,
    PopularityBias,
    Ranks,
    ReciprocalRank,
    RepeatRecall,
    SingleTargetNDCG,
    parse_metric,
    per_user,
    rank_full,
    summarise,
    tally,
    user_metric,
)
from hushrec.testing import MetricContract

KS = (1, 2, 3, 5, 10)
AT_K = {"hr": Success, "ndcg": nDCG, "recall": R, "precision": P, "mrr": RR}
MEASURES = {f"{name}@{k}": measure @ k for name, measure in AT_K.items() for k in KS}
MEASURES["auc"] = Accuracy()
NAMES = list(MEASURES)


def ranked(scores: NDArray[np.generic], targets: list[list[int]]) -> Ranks:
    """Full ranking with nothing seen."""
    rows = len(scores)
    return rank_full(
        scores.astype(np.float32),
        np.arange(rows, dtype=np.int32),
        Ragged.empty(rows),
        Ragged(
            np.cumsum([0, *map(len, targets)]),
            np.array(list(chain.from_iterable(targets)), np.int32),
        ),
    )


def oracle(orders: list[list[int]], targets: list[list[int]]) -> dict[str, NDArray[np.float64]]:
    """What ir_measures says about rankings without ties, one per query."""
    qrels = [
        ir_measures.Qrel(str(query), str(item), 1)
        for query, row in enumerate(targets)
        for item in row
    ]
    run = [
        ir_measures.ScoredDoc(str(query), str(item), float(-rank))
        for query, order in enumerate(orders)
        for rank, item in enumerate(order)
    ]
    values = {name: np.full(len(orders), np.nan) for name in MEASURES}
    name_of = {measure: name for name, measure in MEASURES.items()}
    for found in ir_measures.iter_calc(list(MEASURES.values()), qrels, run):
        values[name_of[found.measure]][int(found.query_id)] = found.value
    return values


@pytest.mark.parametrize("n_items", [4, 30])
def test_rankings_without_ties_match_ir_measures(n_items: int) -> None:
    rng = np.random.default_rng(n_items)
    orders = [rng.permutation(n_items).tolist() for _ in range(150)]
    targets = [
        rng.choice(n_items, size=rng.integers(1, n_items), replace=False).tolist() for _ in orders
    ]
    scores = -np.argsort(np.array(orders), axis=1)
    expected = oracle(orders, targets)
    ranks = ranked(scores, targets)
    for name, values in expected.items():
        assert_allclose(per_user(ranks, name), values, atol=1e-12, err_msg=name)


def orders_of(scores: list[int]) -> list[list[int]]:
    """Every ranking that breaks the ties of ``scores`` in some way."""
    groups = [
        [item for item, score in enumerate(scores) if score == level]
        for level in sorted(set(scores), reverse=True)
    ]
    return [list(chain.from_iterable(way)) for way in product(*map(permutations, groups))]


@pytest.mark.parametrize(
    ("scores", "targets"),
    [
        ([0, 0, 0, 0, 0, 0], [2]),
        ([0, 0, 0, 0, 0, 0], [1, 3]),
        ([0, 0, 0, 0, 0, 0], [0, 1, 4, 5]),
        ([9, 5, 5, 5, 5, 1], [1]),
        ([9, 5, 5, 5, 5, 1], [1, 2, 5]),
        ([9, 8, 5, 5, 5, 5, 5], [3, 4, 6]),
        ([5, 5, 5, 2, 2, 2, 0], [0, 3, 4]),
        ([5, 5, 5, 2, 2, 2, 0], [3, 4, 5, 6]),
        ([7, 7, 3, 3, 3, 3], [0, 1, 2]),
        ([7, 7, 3, 3, 3, 3], [2, 3, 4, 5]),
    ],
)
def test_ties_are_the_mean_over_every_way_to_break_them(
    scores: list[int], targets: list[int]
) -> None:
    orders = orders_of(scores)
    expected = oracle(orders, [targets] * len(orders))
    ranks = ranked(np.array([scores]), [targets])
    for name, values in expected.items():
        assert_allclose(per_user(ranks, name), [values.mean()], atol=1e-12, err_msg=name)


@settings(deadline=None)
@given(st.data(), st.integers(1, 6))
def test_each_target_alone_is_the_target_without_the_others(data: st.DataObject, k: int) -> None:
    """hits@k and ndcg1@k: take the other targets out of the candidates, rank, average."""
    n_items = data.draw(st.integers(2, 10))
    scores = np.array(data.draw(st.lists(st.integers(0, 3), min_size=n_items, max_size=n_items)))
    targets = data.draw(st.lists(st.integers(0, n_items - 1), unique=True, min_size=1))
    ranks = ranked(scores[None], [targets])
    alone = []
    for target in targets:
        kept = [i for i in range(n_items) if i == target or i not in targets]
        alone.append(ranked(scores[None, kept], [[kept.index(target)]]))
    for name, single in ((f"hits@{k}", f"hr@{k}"), (f"ndcg1@{k}", f"ndcg@{k}")):
        expected = np.mean([per_user(one, single)[0] for one in alone])
        assert_allclose(per_user(ranks, name), [expected], atol=1e-12)


@pytest.mark.parametrize("n_items", [10, 11, 100, 3706])
def test_constant_scores_are_exactly_chance(n_items: int) -> None:
    ranks = ranked(np.ones((1, n_items)), [[3]])
    found = summarise(ranks, ["hr@10", "recall@10", "precision@10", "ndcg@10", "mrr@10", "auc"])
    assert found["hr@10"] == found["recall@10"] == 10 / n_items
    assert found["precision@10"] == 10 / n_items / 10
    assert found["auc"] == 0.5
    ranks = np.arange(1, 11)
    assert found["ndcg@10"] == pytest.approx(np.sum(1 / np.log2(ranks + 1)) / n_items, rel=1e-13)
    assert found["mrr@10"] == pytest.approx(np.sum(1 / ranks) / n_items, rel=1e-13)


def test_several_targets_in_a_large_tied_group() -> None:
    """The chance that 10 of 100 ranks miss all 5 targets, by the hypergeometric formula."""
    ranks = ranked(np.zeros((1, 100)), [[1, 2, 3, 5, 8]])
    miss = hypergeom(100, 5, 10).pmf(0)
    assert_allclose(per_user(ranks, "hr@10"), [1 - miss], rtol=1e-12)
    first = [hypergeom(100, 5, rank).pmf(0) for rank in range(11)]
    mrr = sum((first[rank - 1] - first[rank]) / rank for rank in range(1, 11))
    assert_allclose(per_user(ranks, "mrr@10"), [mrr], rtol=1e-12)


def test_auc_without_anything_to_beat_is_a_half() -> None:
    assert per_user(ranked(np.array([[1, 2]]), [[0, 1]]), "auc").tolist() == [0.5]


@st.composite
def tied_ranks(draw: st.DrawFn, one_target: bool = False) -> Ranks:
    n_items = draw(st.integers(2, 12))
    rows = draw(st.integers(1, 5))
    level = st.integers(0, draw(st.integers(0, 5)))
    scores = [draw(st.lists(level, min_size=n_items, max_size=n_items)) for _ in range(rows)]
    most = 1 if one_target else n_items
    item_lists = st.lists(st.integers(0, n_items - 1), unique=True, min_size=1, max_size=most)
    return ranked(np.array(scores), [draw(item_lists) for _ in range(rows)])


@settings(deadline=None)
@given(tied_ranks(), st.sampled_from(NAMES))
def test_every_value_lies_between_zero_and_one(ranks: Ranks, name: str) -> None:
    values = per_user(ranks, name)
    assert values.shape == ranks.users.shape
    assert values.dtype == np.float64
    assert np.all((values >= 0) & (values <= 1 + 1e-12))


@settings(deadline=None)
@given(tied_ranks(), st.sampled_from(["hr", "recall", "mrr"]), st.integers(1, 13))
def test_a_longer_list_is_never_worse(ranks: Ranks, kind: str, k: int) -> None:
    shorter, longer = per_user(ranks, f"{kind}@{k}"), per_user(ranks, f"{kind}@{k + 1}")
    assert np.all(shorter <= longer + 1e-12)


@settings(deadline=None)
@given(tied_ranks(one_target=True), st.integers(1, 13))
def test_with_one_target_a_hit_is_recall(ranks: Ranks, k: int) -> None:
    assert_array_equal(per_user(ranks, f"hr@{k}"), per_user(ranks, f"recall@{k}"))
    assert_allclose(per_user(ranks, f"precision@{k}") * k, per_user(ranks, f"recall@{k}"))


@settings(deadline=None)
@given(tied_ranks())
def test_a_list_of_everything_always_hits(ranks: Ranks) -> None:
    for name in ("hr@99", "recall@99"):
        assert_allclose(per_user(ranks, name), 1)
    assert_array_equal(per_user(ranks, f"mrr@{10**30}"), per_user(ranks, "mrr@12"))


@settings(deadline=None)
@given(st.lists(tied_ranks(), min_size=2, max_size=4), st.sampled_from(NAMES))
def test_users_do_not_influence_each_other(parts: list[Ranks], name: str) -> None:
    separate = [per_user(part, name) for part in parts]
    assert_array_equal(per_user(Ranks.concat(parts), name), np.concatenate(separate))
    backwards = np.concatenate(separate[::-1])
    assert_array_equal(per_user(Ranks.concat(parts[::-1]), name), backwards)
    merged = tally(Ranks.concat([]), [name])
    for part in parts:
        merged = merged.merge(tally(part, [name]))
    whole = tally(Ranks.concat(parts[::-1]), [name])
    assert (merged.users, merged.sums) == (whole.users, whole.sums), "sums are exact in any order"
    assert_array_equal(merged.rank_counts, whole.rank_counts)
    assert merged.mean(name) == pytest.approx(np.concatenate(separate).mean(), abs=1e-9)


def test_nobody_changes_nothing_and_has_no_mean() -> None:
    nobody = Ranks.concat([])
    for name in NAMES:
        assert per_user(nobody, name).shape == (0,)
        with pytest.raises(InputError, match="no user could be evaluated"):
            summarise(nobody, [name])


def test_names() -> None:
    assert parse_metric("ndcg@20") == NDCG(20)
    assert parse_metric("auc") == AUC()
    with pytest.raises(ConfigError, match="did you mean 'ndcg'"):
        parse_metric("ndgc@10")
    for name in ("hr", "hr@", "hr@0", "hr@-1", "hr@1.5", "hr@ten", "hr@010", "hr@10 "):
        with pytest.raises(ConfigError, match="whole number from 1"):
            parse_metric(name)
    with pytest.raises(ConfigError, match="write 'auc'"):
        parse_metric("auc@10")


def test_metrics_of_lists_have_no_value_of_a_user() -> None:
    assert parse_metric("coverage@20") == Coverage(20)
    with pytest.raises(ConfigError, match="one of lists, no user has a value"):
        user_metric("coverage@20")


def test_coverage_counts_items_in_any_list() -> None:
    catalogue = np.zeros(8, np.int64)
    assert Coverage(2).value(np.array([[0, 1], [1, -1]], np.int32), catalogue) == 0.25
    assert Coverage(2).value(np.full((2, 2), -1, np.int32), catalogue) == 0
    with pytest.raises(InputError):
        Coverage(2).value(np.zeros((0, 2), np.int32), catalogue[:0])


def test_popularity_bias_by_hand() -> None:
    counts = np.array([50, 2, 2, 0])  # percentiles 7/8, 4/8, 4/8, 1/8
    popularity_bias = PopularityBias(2).value
    assert popularity_bias(np.array([[0, 1], [0, -1]], np.int32), counts) == pytest.approx(0.75)
    assert popularity_bias(np.array([[3]], np.int32), counts) == 0.125
    assert popularity_bias(np.arange(4, dtype=np.int32)[None], counts) == 0.5
    with pytest.raises(InputError):
        popularity_bias(np.full((1, 2), -1, np.int32), counts)


class TestHitRate(MetricContract):
    metric = HitRate


class TestReciprocalRank(MetricContract):
    metric = ReciprocalRank


class TestNDCG(MetricContract):
    metric = NDCG


class TestSingleTargetNDCG(MetricContract):
    metric = SingleTargetNDCG


class TestF1(MetricContract):
    metric = F1


class TestRepeatRecall(MetricContract):
    metric = RepeatRecall


class TestNewRecall(MetricContract):
    metric = NewRecall


def test_f1_is_the_harmonic_mean_and_recall_splits_into_repeated_and_new_targets():
    scores = np.array([[9, 8, 7, 6, 5, 4], [1, 2, 3, 4, 5, 6]], np.float32)
    targets = Ragged(np.array([0, 3, 5]), np.array([0, 2, 5, 4, 0], np.int32))
    ranks = rank_full(scores, np.arange(2, dtype=np.int32), Ragged.empty(2), targets)
    ranks = replace(ranks, repeated=np.array([1, 0, 1, 0, 1], np.int8))
    recall, precision = per_user(ranks, "recall@3"), per_user(ranks, "precision@3")
    harmonic = 2 * recall * precision / (recall + precision)
    np.testing.assert_allclose(per_user(ranks, "f1@3"), harmonic)
    assert per_user(ranks, "recall_repeat@3").tolist() == [1 / 3, 0]
    assert per_user(ranks, "recall_new@3").tolist() == [1 / 3, 1 / 2]
    # They are kept with the ranks, and there are none where the history is no candidate.
    assert Ranks.from_arrays(ranks.to_arrays()).repeated.tolist() == [1, 0, 1, 0, 1]
    assert Ranks.concat([ranks, ranks]).repeated.tolist() == [1, 0, 1, 0, 1] * 2
    plain = replace(ranks, repeated=None)
    assert "repeated" not in plain.to_arrays()
    assert per_user(plain, "recall_repeat@3").tolist() == [0, 0]
    np.testing.assert_array_equal(per_user(plain, "recall_new@3"), recall)


class TestAUC(MetricContract):
    metric = AUC


class FirstPlaces(Metric):
    """Not an expectation: the best rank of a tied group counts, and values leave [0, 1]."""

    def values(self, ranks: Ranks) -> NDArray[np.float64]:
        return np.asarray((ranks.ahead[ranks.indptr[:-1]] < self.k) * 2.0)


def test_the_contract_bites() -> None:
    contract = type("Contract", (MetricContract,), {"metric": FirstPlaces})()
    with pytest.raises(AssertionError, match="larger than 1"):
        contract.test_values_lie_between_0_and_1()
    with pytest.raises(AssertionError):
        contract.test_a_tie_is_the_mean_over_all_orders()


def test_a_metric_outside_its_range_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hushrec.evaluation.metrics.find", lambda group, name: FirstPlaces)
    with pytest.raises(ConfigError, match="one value between 0 and 1"):
        summarise(ranked(np.array([[1, 0]]), [[0]]), ["first@1"])
    monkeypatch.setattr("hushrec.evaluation.metrics.find", lambda group, name: len)
    with pytest.raises(ConfigError, match=r"entry point 'first' of hushrec\.metrics"):
        parse_metric("first@1")
