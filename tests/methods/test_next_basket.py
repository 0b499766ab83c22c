"""Baskets and items that are bought again: the task, its lists, its baselines and its default."""

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

import hushrec
from hushrec.data.splitting import SplitConfig, make_split
from hushrec.data.synthetic import receipts
from hushrec.errors import ConfigError
from hushrec.evaluation.evaluator import EvaluationConfig, Evaluator, popularity_ranks
from hushrec.federation.backends import Machine
from hushrec.federation.experiment import ExperimentRequest
from hushrec.federation.setup import set_up
from hushrec.serving.recommender import Recommender
from hushrec.streams import Streams
from hushrec.testing import BackendContract, MethodContract
from hushrec.testing.checks import check_same

BASKETS = {"split.kind": "next-basket"}
FEW = {**BASKETS, "newton_rounds": 2, "network_rounds": 4, "evaluation.every": 2}


@pytest.fixture(scope="module")
def small():
    """150 customers of 80 products."""
    return receipts(customers=150, products=80)


@pytest.fixture(scope="module")
def split(small):
    return make_split(small, SplitConfig(kind="next-basket"), Streams(0))


def test_receipts_are_baskets():
    data = hushrec.load("receipts")
    assert data.has_baskets
    baskets = np.unique(np.stack([data.user, data.time]), axis=1, return_counts=True)[1]
    assert 5 < baskets.mean() < 8
    pairs = len(np.unique(data.user.astype(np.int64) * data.n_items + data.item))
    assert 0.15 < 1 - pairs / len(data) < 0.35


def test_items_of_the_history_are_candidates(split):
    evaluator = Evaluator(split, EvaluationConfig(), Streams(0), 1)
    ranks = popularity_ranks(evaluator, "test")
    assert (ranks["full"].candidates == split.data.n_items).all()
    history = split.history("test").positives
    repeated = [
        item in set(history[user])
        for row, user in enumerate(ranks["full"].users)
        for item in ranks["full"].targets[ranks["full"].indptr[row] : ranks["full"].indptr[row + 1]]
    ]
    assert 0.2 < np.mean(repeated) < 0.8
    for each in ranks.values():
        assert each.repeated.tolist() == repeated
    # A sample of a user may hold items of the history too, and no target.
    drawn = evaluator._samples["test"]
    owners = evaluator.users["test"]
    among = [np.isin(drawn[n], history[user]).any() for n, user in enumerate(owners)]
    assert np.mean(among) > 0.5
    assert not any(np.isin(drawn[n], split.test[user]).any() for n, user in enumerate(owners))


def test_a_run_records_what_was_decided_and_its_lists_hold_what_is_bought_again(small, tmp_path):
    run = hushrec.train(small, "personal-frequency", settings=BASKETS, out=tmp_path / "run")
    config = hushrec.Run.open(tmp_path / "run", small).experiment.split
    assert (config.order, config.ties, config.repeats) == ("time", "together", "keep")
    popular = hushrec.train(small, "popularity", settings=BASKETS).metrics["full"]
    assert popular["recall_new@10"] > 0
    for full in (run.metrics["full"], popular):
        assert full["recall_repeat@10"] > 0
        assert full["recall_repeat@10"] + full["recall_new@10"] == pytest.approx(full["recall@10"])
        assert 0 < full["f1@10"] < 1
    for user in (0, 1, 2):
        items, counts = np.unique(small.item[small.user == user], return_counts=True)
        (first, *_) = run.recommend(str(small.users[user]), 5)
        assert counts[items == np.flatnonzero(small.items == first.item)].item() == counts.max()


def test_own_frequency_ranks_own_items_then_popular_ones(split):
    method = hushrec.methods.baselines.PersonalFrequency()
    counts = np.array([5, 9, 1, 0, 7], np.float32)
    view = replace(split.train.take(np.array([0])), n_items=5)
    indptr, items = np.array([0, 4]), np.array([3, 2, 3, 4], np.int32)
    past = replace(view.positives, indptr=indptr, values=items)
    scores = method.score({"counts": counts}, {}, replace(view, positives=past))[0]
    assert np.argsort(-scores).tolist() == [3, 4, 2, 1, 0]


@pytest.mark.parametrize("method", ["fednext", "fedease", "negative-counter"])
def test_methods_that_cannot_rank_the_history_are_refused(method, small):
    with pytest.raises(ConfigError, match="bought again: use fedmix or personal-frequency"):
        hushrec.train(small, method, settings=BASKETS)


def test_only_next_baskets_keep_repeats_honestly():
    with pytest.raises(ConfigError, match="next-basket"):
        ExperimentRequest("receipts", settings={"split.repeats": "keep"}).experiment()
    kept = {**BASKETS, "split.repeats": "keep"}
    assert ExperimentRequest("receipts", settings=kept).experiment().protocol == "honest"


def test_rows_decide_nothing_where_privacy_is_promised(small):
    def decided(**settings):
        request = ExperimentRequest("receipts", "popularity", settings=settings)
        return request.experiment().resolved(small).split

    private = {"privacy.mode": "central", "privacy.epsilon": 8.0}
    assert decided().ties == "together"
    assert decided(**private).ties == "file"
    assert decided(**private, **BASKETS).ties == "together"
    timeless = replace(small, has_time=False)
    request = ExperimentRequest("receipts", "popularity", settings=private)
    assert request.experiment().resolved(timeless).split.order == "random"
    # A federation and the papers take rows as they are.
    assert request.experiment().resolved(None).split.order == "time"
    published = replace(request, protocol="published", settings={}).experiment()
    assert published.resolved(timeless).split.order == "time"


class Baskets(BackendContract):
    """A comparison with clients one by one, on receipts."""

    __test__ = False
    rounds: ClassVar[int] = 8

    def __init__(self, machine):
        self.machine = machine

    def _setup(self, method, settings):
        request = ExperimentRequest("receipts", method, settings={**FEW, **settings})
        experiment = request.experiment().model_copy(update={"rounds": self.rounds})
        data = receipts(customers=30, products=40)
        experiment = experiment.resolved(data)
        return set_up(experiment, make_split(data, experiment.split, Streams(0)))


@pytest.mark.parametrize("machine", [Machine(threads=1), Machine(threads=2, chunk=7)])
def test_the_default_gives_the_same_bits_for_clients_one_by_one(machine):
    Baskets(machine).compare("fedmix", {})


def test_the_order_of_lines_does_not_change_a_model(small):
    data = receipts(customers=40, products=40)
    shuffled = data.select(np.random.default_rng(0).permutation(len(data)))
    runs = [hushrec.train(each, "fedmix", settings=FEW) for each in (data, shuffled)]
    check_same(*(run.model.shared for run in runs), "the shared parameters")
    assert runs[0].metrics == runs[1].metrics


def test_histories_of_lists_keep_their_baskets(small, split, tmp_path):
    """As the evaluation sees them, and the same in a model that is opened again."""
    run = hushrec.train(small, "fedmix", settings=FEW, out=tmp_path / "run")
    data = run.model.data
    users = np.arange(5)
    for user, past in zip(users, data.history(users).times.indptr, strict=False):
        view = data.history(np.array([user]))
        rows = np.lexsort((small.time, small.user))
        mine = small.time[rows][small.user[rows] == user]
        sizes = np.unique(mine, return_counts=True)[1]
        assert np.unique(view.times[0], return_counts=True)[1].tolist() == sizes.tolist(), past
    user = str(small.users[0])
    assert hushrec.Run.open(tmp_path / "run", small).recommend(user, 8) == run.recommend(user, 8)
    new = data.new_user([small.items[k] for k in (3, 5, 3, 7, 5)], {})
    assert new.times[0].tolist() == [0, 0, 1, 1, 1]
    assert len(new.positives[0]) == 5


def test_a_bundle_lists_what_the_model_lists_for_a_history(small, tmp_path):
    run = hushrec.train(small, "fedmix", settings=FEW)
    run.export(tmp_path / "bundle", precision="single")
    rng, again = np.random.default_rng(0), 0
    for _ in range(10):
        history = small.items[rng.integers(12, size=rng.integers(1, 30))].tolist()
        device = Recommender.load(tmp_path / "bundle", history)
        expected = run.recommend("somebody", 10, history=history)
        listed = device.recommend(10)
        assert [line.item for line in listed] == [line.item for line in expected]
        np.testing.assert_allclose(
            [line.score for line in listed], [line.score for line in expected], rtol=1e-3, atol=1e-3
        )
        again += any(line.item in history for line in listed)
    assert again > 5


class TestPersonalFrequencyOfBaskets(MethodContract):
    method = hushrec.methods.baselines.PersonalFrequency

    def _split(self):
        data = receipts(customers=60, products=60)
        return make_split(data, SplitConfig(kind="next-basket"), Streams(0))


@pytest.mark.slow
def test_the_default_is_above_own_frequency_and_that_above_popularity():
    data = hushrec.load("receipts")
    popular, own, default = (
        hushrec.train(data, method, settings=BASKETS).metrics["full"]
        for method in ("popularity", "personal-frequency", "fedmix")
    )
    for metric in ("recall@10", "ndcg@10"):
        assert own[metric] > 1.3 * popular[metric]
        assert default[metric] > 1.05 * own[metric]
