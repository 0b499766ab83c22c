"""`MetricContract`: what every metric of ranks must do."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Any, ClassVar

import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from hushrec.evaluation.metrics import ROUNDING, Metric
from hushrec.evaluation.ranking import Ranks, rank_full

SCORES = ((3, 1, 1, 1, 0), (2, 2, 2, 2, 2), (5, 4, 3, 2, 1), (1, 1, 0, 0, 0), (0, 0, 0, 1, 1))
"""Scores of five items, with ties."""
TARGETS = ((1,), (0, 3), (4,), (0, 2, 4), (1, 2))
"""The held-out items of one user each."""


class MetricContract:
    """What every metric of ranks must do: inherit, name the class, run pytest.

    ::

        class TestMine(MetricContract):
            metric = MyMetric
    """

    metric: ClassVar[type[Metric]]

    def test_values_lie_between_0_and_1(self) -> None:
        """Each user has one value, of which exact sums can be made; nobody has none."""
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
    """Rank targets among all items."""
    rows = len(scores)
    return rank_full(
        scores.astype(np.float32),
        np.arange(rows, dtype=np.int32),
        np.zeros(rows + 1, np.int64),
        np.zeros(0, np.int32),
        np.cumsum([0, *map(len, targets)]),
        np.concatenate([np.array(own, np.int32) for own in targets]),
    )
