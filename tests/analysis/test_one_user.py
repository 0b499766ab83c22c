"""What is told of one user: the list of the evaluation, and reasons that can be checked."""

import numpy as np
import pytest

import hushrec
from hushrec.analysis.run import one_user, some_users
from hushrec.errors import ConfigError


@pytest.fixture(scope="module", params=["fedmf", "fedease", "fedmix"])
def run(request, small):
    return hushrec.train(small, request.param, rounds=None if request.param == "fedmix" else 2)


def test_hits_and_ranks_are_those_of_the_evaluation(run):
    ranks = run.ranks["test"]["full"]
    for row in range(0, len(ranks.users), 20):
        user = run.data.users[ranks.users[row]]
        shown = one_user(run, user)
        own = shown.lists[run.experiment.method]
        rank = int(ranks.ahead[ranks.indptr[row]]) + 1
        assert [held.rank for held in shown.held_out] == [rank]
        if ranks.tied[ranks.indptr[row]] == 0:
            hits = [at for at, line in enumerate(own, 1) if line.held_out]
            assert hits == ([rank] if rank <= 10 else [])
        assert len(own) == 10
        assert [line.score for line in own] == sorted((line.score for line in own), reverse=True)


def test_the_history_is_what_the_device_knew(run):
    view = run.split.history("test")
    shown = one_user(run, "u007")
    assert shown.history == [run.data.title(item) for item in view.positives[7][::-1]]


def test_reasons_are_of_the_history(run):
    shown = one_user(run, "u007")
    own = shown.lists[run.experiment.method]
    reasons = [line.because for line in own]
    assert set(reasons) <= set(shown.history)
    assert shown.influence
    assert all(bool(line.expert) == (run.experiment.method == "fedmix") for line in own)


def test_the_reason_is_what_the_score_falls_most_without(small):
    """The slow twin: each item of the history left out by hand, through fold-in."""
    run = hushrec.train(small, "fedease", rounds=1)
    shown = one_user(run, "u007")
    items = run.split.history("test").positives[7].tolist()
    names = [run.data.title(item) for item in items]

    def scores(history):
        ids = [str(run.data.items[item]) for item in history]
        found = run.recommend("nobody", 60, history=ids)
        return {line.title: line.score for line in found}

    everything = scores(items)
    for line in shown.lists["fedease"]:
        drops = [
            everything[line.title] - scores(items[:n] + items[n + 1 :])[line.title]
            for n in range(len(items))
        ]
        assert line.because == names[int(np.argmax(drops))]


def test_own_tables_have_the_servers_beside_them(small):
    run = hushrec.train(small, "pfedrec", rounds=5)
    lists = one_user(run, "u007").lists
    others = ["with the server’s table", "with another user’s table"]
    assert list(lists) == ["pfedrec", *others, "popularity"]
    assert all(lists["pfedrec"] != lists[other] for other in others)


def test_some_users_are_tested_ones_from_quiet_to_busy(run):
    some = some_users(run, 4)
    numbers = [run.data.user_index(user) for user in some]
    lengths = run.split.train.positives.lengths[numbers].tolist()
    assert lengths == sorted(lengths)
    assert len(set(some)) == 4
    with pytest.raises(ConfigError, match="unknown to this run"):
        one_user(run, "nobody")
