"""The guarantee in three sentences: true, readable, and about every mode."""

import math
import re
from pathlib import Path

import pytest
from scipy.stats import norm

import hushrec
from hushrec.privacy.accountant import Everybody, Gaussian, epsilon_of
from hushrec.privacy.statement import PrivacyStatement


def stated(epsilon, delta=0.0, **more):
    facts = {"neighbours": "zero-out-one", "trust": "aggregator", "rounds": 3, **more}
    guarantee = "user-level (epsilon, delta)-DP"
    return PrivacyStatement(
        guarantee=guarantee, epsilon=epsilon, delta=delta, statement="exactly", **facts
    )


def certainty(statement):
    """The largest probability that the first sentence names."""
    return float(statement.in_words[0].split("at most ")[1].split(" %")[0]) / 100


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_randomised_response_reaches_the_bound_and_no_more(epsilon):
    truth = 1 / (1 + math.exp(-epsilon))
    assert truth <= certainty(stated(epsilon)) < truth + 1e-4


@pytest.mark.parametrize("multiplier", [0.5, 1.0, 4.0])
def test_the_best_test_against_gaussian_noise_is_within_the_bound(multiplier):
    delta = 1e-5
    epsilon = epsilon_of(Gaussian(multiplier, Everybody(), "zero-out-one"), 1, delta)
    assert norm.cdf(1 / (2 * multiplier)) <= certainty(stated(epsilon, delta))


def test_epsilon_is_put_in_words_and_tiers():
    assert "odds of 2,981 to 1 (e^8), a reasonable guarantee" in stated(8.0).in_words[0]
    assert "odds of 1.65 to 1 (e^0.5), a strong guarantee" in stated(0.5).in_words[0]
    assert "a weak guarantee" in stated(11.0).in_words[0]
    assert "at most 100 %" in stated(900.0).in_words[0]


def test_what_it_rests_on_names_the_trusted_party_and_a_repeatable_noise():
    assert "trust in nobody but the device" in stated(1.0, trust="nobody").in_words[2]
    assert "can remove" in stated(1.0, noise_seed=3).in_words[2]
    assert "stays secret" in stated(1.0).in_words[2]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"privacy.mode": "central", "privacy.epsilon": 4.0},
        {"privacy.mode": "local-laplace", "privacy.scale": 0.5},
        {"privacy.mode": "distributed", "privacy.epsilon": 4.0, "privacy.nodes": 3},
    ],
)
def test_every_mode_has_three_sentences(tiny, settings):
    run = hushrec.train(tiny, "popularity", settings=settings)
    words = run.summary.privacy.in_words
    assert all(sentence.endswith(".") for sentence in words)
    assert sum(len(sentence.split()) for sentence in words) < 150
    assert ("No formal guarantee" in words[0]) == (not settings)


def test_delta_and_the_largest_budget_are_named():
    assert "99.97 %, delta = 1e-05 included, where" in stated(8.0, 1e-5).in_words[0]
    assert "delta" not in stated(8.0).in_words[0]
    budgets = stated(8.0, same_budgets=True).in_words[0]
    assert "for the user with the largest budget, is right" in budgets


def test_several_seeds_are_said_together(tiny):
    settings = {"privacy.mode": "central", "privacy.epsilon": 4.0}
    summary = hushrec.train(tiny, "popularity", seeds=2, settings=settings).summary
    together = summary.privacy.together
    assert f"(e^{together.epsilon:.4g})" in summary.privacy.in_words[0]
    assert together.epsilon > 4
    assert "all rounds of 2 runs" in summary.privacy.in_words[2]


def test_statements_of_other_versions_are_put_in_words_too():
    bound, _, rests = stated(8.0, neighbours="add-remove", trust="somebody").in_words
    assert "one user's data was used or changed" in bound
    assert "trust in whom the statement names" in rests


def test_the_page_shows_the_bounds_of_the_code():
    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text("utf-8")
    table = page.partition("| ε | odds e^ε to 1 |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ([\d.]+) \| ([\d.,]+) \| ([\d.]+ %) \| (\w+) \|$", table, re.M)
    assert len(rows) == 7
    for epsilon, odds, right, tier in rows:
        words = stated(float(epsilon), 1e-5).in_words[0]
        assert f"at most {right}" in words and f"a {tier} guarantee" in words
        assert f"odds of {odds} to 1" in words
