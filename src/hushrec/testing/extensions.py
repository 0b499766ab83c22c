"""`ExpertContract` and `MetricContract`: what every expert and every metric of ranks must do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from hushrec.aggregation import KeyedRows, Total, Update
from hushrec.data.views import Ragged, TrainView
from hushrec.evaluation.metrics import ROUNDING, Metric, Ranks, rank_full
from hushrec.methods.forms import Part
from hushrec.methods.statistics import experts, pair_tables
from hushrec.methods.statistics.experts import Counting, Expert, ExpertsConfig, Model
from hushrec.testing.checks import (
    N_ITEMS,
    check_batch,
    check_rows,
    check_shared,
    clients_of,
    digest,
    sum_of,
)


class ExpertContract:
    """What every expert must do: inherit, set ``expert``, run pytest."""

    expert: ClassVar[type[Expert]]
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of `ExpertsConfig` for all these tests."""

    def test_it_is_an_expert(self) -> None:
        """The class has a name, and scores with different names and known starting weights."""
        expert, view = self._make(), self._view()
        assert isinstance(expert, Expert), "an expert inherits Expert"
        assert expert.name, "an expert has a name"
        assert expert.counted in ("once", "head", "head and rest"), "counted is one of three"
        scores = expert.scores(expert.init(view))
        assert scores, "an expert gives at least one score"
        assert len(set(scores)) == len(scores), "scores have different names"
        assert expert.start.keys() <= set(scores), "start names scores that do not exist"

    def test_public_facts_alone_decide_its_shape(self) -> None:
        """Applicability, model and key space are the same without any client."""
        expert, view = self._make(), self._view()
        public = view.take(np.zeros(0, np.int64))
        assert expert.is_applicable(view) == expert.is_applicable(public), (
            "is_applicable depends on the clients' data: the catalogue alone may decide"
        )
        model = expert.init(view)
        check_shared(model)
        assert digest(model) == digest(expert.init(public)), "init depends on the clients' data"
        counted, alone = expert.count(view), expert.count(public)
        assert (counted.space, counted.grid) == (alone.space, alone.grid), (
            "the key space of count depends on the clients' data: it must follow from the catalogue"
        )

    def test_keys_lie_in_the_declared_space(self) -> None:
        """Counts are keyed rows, one client after the other, of one width."""
        expert = self._make()
        for view in (self._view(), self._odd_view()):
            counted = expert.count(view)
            assert isinstance(counted, KeyedRows), "count returns KeyedRows"
            check_rows(counted, len(view), expert.name)
            assert (counted.ids >= 0).all(), "keys start at 0"
            assert (counted.ids < counted.space).all(), "a key lies beyond the declared space"

    def test_sums_do_not_depend_on_the_partition(self) -> None:
        """Clients one by one, in any order, add up to the same bits as a batch of all."""
        view = self._odd_view()
        alone = [view.take(np.array([client])) for client in reversed(range(len(view)))]
        check_batch(self._sum(alone), self._sum([view]), "sums of what is counted")

    def test_held_out_counts_and_what_they_add_are_the_whole_counts(self) -> None:
        """A history without its last items, and what those add, sum to the whole history."""
        expert, view = self._make(), self._view()
        held_out = np.minimum(2, view.positives.lengths - 1)
        counting = Counting(0, 1, np.zeros(0, np.bool_))
        rows = counting.count([expert], view, held_out)
        assert rows.keys() == {experts.joined(experts.HELD_OUT, expert.name), expert.name}
        added = sum_of(Update(len(view), {"sums": part}) for part in rows.values())
        whole, both = self._sum([view]).rows["sums"], added.rows["sums"]
        sums = np.zeros((2, expert.count(view).space, whole[1].shape[1]))
        for out, (keys, values) in zip(sums, (whole, both), strict=True):
            out[keys] = values
        assert_allclose(sums[0], sums[1], rtol=1e-6, atol=1e-6)

    def test_learning_keeps_names_shapes_and_dtypes(self) -> None:
        """Sums change the values of a model only, and the model that is given stays as it is."""
        expert, view = self._make(), self._view()
        model, tables = expert.init(view), pair_tables.long_tables(expert, view.n_items)
        before = digest(model), digest(experts.flatten(tables))
        learnt = expert.learn({**model, **tables}, *self._sum([view]).rows["sums"])
        for name in expert.tables:
            check_shared(learnt[name])
        learnt = {name: array for name, array in learnt.items() if name not in expert.tables}
        check_shared(learnt)
        assert (digest(model), digest(experts.flatten(tables))) == before, (
            "learn writes to the model that it is given: copy it first"
        )
        assert learnt.keys() == model.keys(), (
            f"learn returns {sorted(learnt)}, and init {sorted(model)}: they must be the same"
        )
        for name, array in model.items():
            kind = learnt[name].shape, learnt[name].dtype
            assert kind == (array.shape, array.dtype), (
                f"'{name}' has another shape or dtype from learn than from init"
            )

    def test_scores_are_finite_and_the_same_for_any_batch(self) -> None:
        """Every client scores every item from its own history, before learning and after."""
        expert, view = self._make(), self._odd_view()
        for model in (self._ready(expert, view), self._learnt(expert, self._view())):
            scores = self._scores(expert, model, view)
            assert np.isfinite(scores).all(), "some scores are NaN or infinite"
            for client in range(len(view)):
                alone = self._scores(expert, model, view.take(np.array([client])))
                check_batch(alone[0], scores[client], f"scores of client {client}")

    def test_reasons_are_of_the_history(self) -> None:
        """Influence has a number for each item of a history and each item of a list."""
        expert, view = self._make(), self._view()
        model, past = self._learnt(expert, view), view.positives[0][::-1]
        assert expert.because.count("{}") <= 1, "because names one item of the history at most"
        listed = np.array([view.n_items - 1, 0], np.int32)
        for history in (past, past[:0]):
            influence = expert.influence(model, history, listed)
            assert influence.shape == (len(history), 2), "influence is [history, items]"
            assert np.isfinite(influence).all(), "influence is finite"
        neighbours = expert.neighbours(model, 0)
        assert neighbours is None or neighbours.shape == (view.n_items,), "a weight for each item"

    def test_parts_are_for_bundles(self) -> None:
        """What a bundle holds are parts of named arrays, or nothing."""
        expert = self._make()
        parts = expert.parts(self._learnt(expert, self._view()))
        if parts is None:
            pytest.skip("declared: it cannot be exported")
        for part in parts:
            assert isinstance(part, Part), "parts returns Part"
            check_shared(part.arrays)

    # ------------------------------------------------------------ what the tests share

    def _make(self) -> Expert:
        return self.expert(ExpertsConfig.model_validate(dict(self.options)))

    def _view(self) -> TrainView:
        generator = np.random.default_rng(0)
        return clients_of([generator.permutation(N_ITEMS)[: 3 + n].tolist() for n in range(20)])

    def _odd_view(self) -> TrainView:
        """One item, every item, a repeated one, and an ordinary client."""
        return clients_of([[7], list(range(N_ITEMS)), [5, 5, 9, 5], [4, 40, 8, 2, 20]])

    def _sum(self, views: list[TrainView]) -> Total:
        return sum_of(Update(len(view), {"sums": self._make().count(view)}) for view in views)

    def _ready(self, expert: Expert, view: TrainView, sums: tuple[Any, Any] | None = None) -> Model:
        """Return a model to score with, of no sums or of these."""
        tree = pair_tables.empty_models([expert], view, view.n_items)
        before = pair_tables.long_models([expert], tree)
        learnt = {} if sums is None else {expert.name: expert.learn(before[0][1], *sums)}
        tree = pair_tables.counted_models(before, learnt, tree, last=True)
        return pair_tables.ready_models([expert], tree, view)[0][1]

    def _learnt(self, expert: Expert, view: TrainView) -> Model:
        return self._ready(expert, view, self._sum([view]).rows["sums"])

    def _scores(self, expert: Expert, model: Model, view: TrainView) -> Any:
        out = np.zeros((len(view), len(expert.scores(model)), view.n_items), np.float32)
        expert.score(model, view, out)
        return out


SCORES = ((3, 1, 1, 1, 0), (2, 2, 2, 2, 2), (5, 4, 3, 2, 1), (1, 1, 0, 0, 0), (0, 0, 0, 1, 1))
"""Scores of five items, with ties."""
TARGETS = ((1,), (0, 3), (4,), (0, 2, 4), (1, 2))
"""The held-out items of one user each."""


class MetricContract:
    """What every metric of ranks must do: inherit, set ``metric``, run pytest."""

    metric: ClassVar[type[Metric]]

    def test_values_lie_between_0_and_1(self) -> None:
        """Each user has one value, of which exact sums can be made; no users have none."""
        for metric in self._metrics():
            values = metric.values(_ranks(np.array(SCORES), TARGETS))
            assert values.shape == (len(SCORES),), "one value for each user"
            assert (values >= -ROUNDING).all(), "a value is negative"
            assert (values <= 1 + ROUNDING).all(), "a value is larger than 1"
            assert metric.values(Ranks.concat([])).shape == (0,), "no users have no values"

    def test_users_do_not_influence_each_other(self) -> None:
        """A user's value is the same alone and among others, so that nodes can evaluate theirs."""
        for metric in self._metrics():
            together = metric.values(_ranks(np.array(SCORES), TARGETS))
            parts = zip(np.array(SCORES), TARGETS, strict=True)
            alone = [metric.values(_ranks(scores[None], [own])) for scores, own in parts]
            assert_array_equal(together, np.concatenate(alone))

    def test_a_tie_is_the_mean_over_all_orders(self) -> None:
        """The value under ties is the mean of the values of every way to break them."""
        breaks = np.array(list(permutations(range(5)))) / 10
        for metric in self._metrics():
            for scores, targets in zip(np.array(SCORES), TARGETS, strict=True):
                tied = metric.values(_ranks(scores[None], [targets]))
                broken = metric.values(_ranks(scores + breaks, [targets] * len(breaks)))
                assert_allclose(tied, [broken.mean()], rtol=0, atol=1e-12)

    def _metrics(self) -> Iterator[Metric]:
        for k in (1, 2, 10) if self.metric.has_cutoff else (0,):
            yield self.metric(k)


def _ranks(scores: NDArray[Any], targets: Any) -> Ranks:
    rows = len(scores)
    return rank_full(
        scores.astype(np.float32),
        np.arange(rows, dtype=np.int32),
        Ragged.empty(rows),
        Ragged(np.cumsum([0, *map(len, targets)]), np.concatenate(targets).astype(np.int32)),
    )
