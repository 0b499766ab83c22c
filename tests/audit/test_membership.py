"""Membership: what a model remembers is seen, and nothing is seen where there is nothing."""

import numpy as np
import pytest

from conftest import interactions
from hushrec.api import train
from hushrec.audit.membership import _pairs, _people, guesses, membership, rates
from hushrec.data.splitting import SplitConfig, make_split
from hushrec.methods.base import method_class, method_names
from hushrec.privacy.statement import PrivacyStatement
from hushrec.streams import Streams
from hushrec.testing import taste_world


def random_world(n_users=160, n_items=400, length=20, seed=0):
    """No taste at all: whatever the model knows of a user it has from that user."""
    generator = np.random.default_rng(seed)
    rows = [
        (user, item, time)
        for user in range(n_users)
        for time, item in enumerate(generator.permutation(n_items)[:length])
    ]
    return interactions(rows, name="random")


def attack(data, method, settings, rounds=1, cases=500):
    run = train(data, method, rounds=rounds, seed=1, settings=settings)
    return membership(run, cases, Streams(0), lambda done, total: None)


UNSEEN = {"split.kind": "unseen-users", "split.test": 0.3, "split.valid": 0.2}
MEMORY = {"ridge": 0.1, "popularity": 0.0}


def test_a_model_that_remembers_gives_its_users_away():
    found = attack(random_world(), "fedease", {**UNSEEN, **MEMORY})
    assert found["members"] == found["others"] == 80
    assert found["auc"] > 0.95
    assert found["advantage"] > 0.8 > 4 * found["chance"]["advantage"]
    low, high = found["intervals"]["auc"]
    assert 0.9 < low <= found["auc"] <= high
    assert abs(found["baseline"]["auc"] - 0.5) < 0.15, "nothing but the model tells them apart"
    assert found["tpr_at_1_fpr"] is None, "fewer than a hundred others say nothing about 1 %"


def test_noise_hides_it():
    noise = {"privacy.mode": "central", "privacy.noise_seed": 0, "privacy.epsilon": 0.5}
    found = attack(random_world(), "popularity", {**UNSEEN, **noise})
    assert found["intervals"]["auc"][0] < 0.5 < found["intervals"]["auc"][1]


def test_pairs_of_a_user_that_were_trained_on_rank_higher():
    settings = {"split.kind": "ratio", "split.order": "random", **MEMORY}
    found = attack(random_world(), "fedease", settings)
    assert "validation" in found["compared"]
    assert found["auc"] > 0.95
    assert abs(found["baseline"]["auc"] - 0.5) < 0.1
    assert found["tpr_at_1_fpr"] > 0.5


@pytest.mark.parametrize("split", ["leave-one-out", "unseen-users"])
def test_every_installed_method_can_be_asked(split):
    for method in method_names():
        options = {"split.kind": split, "split.test": 0.3}
        if "epochs" in method_class(method).Config.model_fields:
            options["epochs"] = 1
        found = attack(taste_world(), method, options, rounds=2, cases=50)
        assert "skipped" in found or 0 <= found["auc"] <= 1


def test_methods_that_release_nothing(tiny):
    found = attack(tiny, "local-only", {"d": 3}, rounds=2)
    assert "nothing" in found["skipped"]


@pytest.mark.parametrize("order", ["time", "random"])
def test_people_are_comparable(order, small):
    split = make_split(small, SplitConfig(kind="unseen-users", order=order), Streams(1))
    cases = list(_people(split, 30, np.random.default_rng(0)))
    members = [case for case in cases if case.member]
    assert 2 * len(members) == len(cases)
    trains = set(split.training_users.tolist())
    whole = np.bincount(split.data.user)
    for case in cases:
        assert (case.user in trains) == case.member
        assert len(case.known) == (whole[case.user] + 1) // 2, "the first half of everybody's rows"
        assert sorted([*case.past, *case.targets]) == sorted(case.known)


def test_pairs_never_look_at_test_items(small):
    split = make_split(small, SplitConfig(), Streams(1))
    for case in _pairs(split, 30, np.random.default_rng(0)):
        assert not np.isin(split.test[case.user], [*case.known, *case.targets]).any()
        expected = split.train.positives[case.user][-1:] if case.member else split.valid[case.user]
        np.testing.assert_array_equal(case.targets, expected)
        assert not np.isin(case.targets, case.past).any()


def test_guesses_count_where_chance_decided_who_trained(small):
    private = {"privacy.mode": "central", "privacy.noise_seed": 0, "privacy.epsilon": 1.0}
    kinds = {
        "unseen-users": True,
        "leave-one-out": False,
        "ratio": False,
    }
    for kind, counts in kinds.items():
        found = attack(small, "popularity", {**private, "split.kind": kind})
        assert (found["guesses"] is not None) == counts, kind
    at_random = {**private, "split.kind": "ratio", "split.order": "random"}
    guessed = attack(small, "popularity", at_random)["guesses"]
    assert 0 < guessed["guesses"] <= guessed["pairs"] == 80
    assert not guessed["contradicted"]
    assert guessed["delta"] == 1e-7, "the account says what is claimed there"
    assert guessed["claimed_epsilon"] > 1.0
    assert attack(small, "popularity", UNSEEN)["guesses"] is None, "there is no claim"


def test_what_guesses_contradict():
    claim = PrivacyStatement(
        guarantee="central", epsilon=1.0, delta=1e-7, neighbours="replace-one", statement=""
    )
    generator = np.random.default_rng(0)
    nothing, all_right = generator.normal(0, 1, 300), np.abs(generator.normal(0, 1, 300))
    assert not guesses(nothing, claim)["contradicted"]
    sure = guesses(all_right, claim)
    assert sure["contradicted"]
    assert sure["right"] == sure["guesses"] == sure["pairs"] == 300
    # A few that are told apart among many that are not: whoever is bold finds them.
    few = np.concatenate([nothing, np.full(60, 9.0)])
    bold = guesses(few, claim)
    assert bold["contradicted"]
    assert bold["guesses"] < 100
    zeroed_out = guesses(few, claim.model_copy(update={"neighbours": "zero-out-one"}))
    assert zeroed_out["certain_lower_bound"] < 0.6 * bold["certain_lower_bound"]


def test_known_answers():
    assert rates(np.array([3.0, 4.0]), np.array([1.0, 2.0])) == {
        "auc": 1.0,
        "advantage": 1.0,
        "tpr_at_1_fpr": None,
    }
    ties = rates(np.zeros(100), np.zeros(100))
    assert (ties["auc"], ties["advantage"], ties["tpr_at_1_fpr"]) == (0.5, 0.0, 0.0)
    others = np.arange(100.0)
    assert rates(np.full(4, 98.5), others)["tpr_at_1_fpr"] == 1.0
    half = rates(np.array([-1.0, 200.0]), others)
    assert (half["auc"], half["advantage"], half["tpr_at_1_fpr"]) == (0.5, 0.5, 0.5)
