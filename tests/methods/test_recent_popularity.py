"""Recent popularity against a plain count, and the choice by validation items."""

from dataclasses import replace

import numpy as np
import pytest

import hushrec
from hushrec.data.views import Ragged
from hushrec.errors import ConfigError
from hushrec.methods.baselines import RecentPopularity
from hushrec.testing import clients_of, taste_world
from hushrec.testing.checks import Federation

M, DAYS = 9, 64
LONG = 4.0


def dated(rows, times):
    view = clients_of(rows, M)
    return replace(view, times=Ragged(view.positives.indptr, np.concatenate(times)))


@pytest.fixture(scope="module")
def view():
    rng = np.random.default_rng(0)
    rows = [rng.permutation(M)[: rng.integers(1, 7)].tolist() for _ in range(30)]
    times = [np.sort(rng.integers(0, DAYS + 1, len(row))) for row in rows]
    times[0][0], times[1][-1] = 0, DAYS  # the whole span
    return dated(rows, [np.sort(t) for t in times])


@pytest.mark.parametrize("now", ["user", "end"])
@pytest.mark.parametrize(("window", "half_life"), [(LONG, LONG), (1 / 8, LONG), (1 / 2, 1 / 16)])
def test_it_counts_what_was_touched_lately(view, now, window, half_life):
    options = {"window": window, "half_life": half_life, "now": now, "parts": DAYS}
    method = RecentPopularity(RecentPopularity.Config(**options))
    assert method.planned_rounds == 1, "nothing is left open"
    federation = Federation(method, view)
    federation.round()
    scores = method.score(federation.shared, {}, view)
    events = list(zip(view.positives.values, view.times.values, strict=True))
    for client in range(len(view)):
        at = DAYS if now == "end" else view.times[client][-1]
        day, expected = min(at, DAYS - 1), np.zeros(M)
        for item, time in events:
            lag = day - min(time, DAYS - 1)
            if 0 <= lag < window * DAYS:
                expected[item] += 2.0 ** (-lag / (half_life * DAYS))
        np.testing.assert_allclose(scores[client], expected, rtol=1e-5, atol=1e-6)


def world():
    """Ten items at a time are in fashion, for 20 days; a user comes for up to 60 days."""
    rng, users, each = np.random.default_rng(3), 300, 10
    first = rng.uniform(0, 60, users)[:, None]
    day = first + np.sort(rng.uniform(0, 60, (users, each)), axis=1)
    item = 10 * (day // 20).astype(int) + np.stack([rng.permutation(10)[:each] for _ in day])
    return replace(
        taste_world(),
        user=np.repeat(np.arange(users, dtype=np.int32), each),
        item=item.reshape(-1).astype(np.int32),
        value=np.ones(item.size, np.float32),
        time=(1_700_000_000 + 86_400 * day.reshape(-1)).astype(np.int64),
        users=np.array([f"user-{k:03d}" for k in range(users)]),
        user_features={},
    )


@pytest.mark.parametrize("kind", ["leave-one-out", "time"])
def test_validation_items_choose(kind):
    settings = {"split.kind": kind, "evaluation.k": [10]}
    run = hushrec.train(world(), "recent-popularity", settings=settings)
    window, half_life, _ = run.model.shared["choice"]
    assert run.summary.rounds == 50 and min(window, half_life) < LONG
    plain = hushrec.train(world(), "popularity", settings=settings)
    assert run.metrics["full"]["ndcg@10"] > 1.5 * plain.metrics["full"]["ndcg@10"]


def test_with_no_limit_it_is_popularity():
    settings = {"window": LONG, "half_life": 1e9, "now": "end"}
    data = world()
    recent = hushrec.train(data, "recent-popularity", settings=settings)
    assert recent.metrics == hushrec.train(data, "popularity").metrics


def test_data_without_times_is_refused():
    data = replace(world(), has_time=False)
    with pytest.raises(ConfigError, match="tastes has no times: use popularity, or data"):
        hushrec.train(data, "recent-popularity")
