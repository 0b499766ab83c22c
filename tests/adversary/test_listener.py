"""Whoever sees the traffic sees who was drawn: the statement says what holds then."""

import pytest

import hushrec
from hushrec.privacy.accountant import Everybody, Gaussian, Poisson, epsilon_of
from hushrec.privacy.statement import ADVERSARIES, TRUSTED, compose

CENTRAL = {"privacy.mode": "central", "privacy.epsilon": 1.0, "privacy.clip": 1.0}
POISSON = {"cohort.kind": "poisson", "cohort.probability": 0.1}
DISTRIBUTED = {**CENTRAL, "privacy.mode": "distributed", "privacy.nodes": 4}


def stated(**settings):
    return hushrec.train("demo", "popularity", settings=settings).summary


def test_amplification_is_claimed_only_against_those_who_do_not_listen():
    privacy = stated(**CENTRAL, **POISSON).privacy
    (event,) = privacy.claimed
    multiplier, rounds = event["multiplier"], event["count"]
    known = epsilon_of(Gaussian(multiplier, Everybody(), "zero-out-one"), rounds, privacy.delta)
    hidden = epsilon_of(Gaussian(multiplier, Poisson(0.1), "zero-out-one"), rounds, privacy.delta)
    assert privacy.epsilon == pytest.approx(hidden, rel=0.01)
    assert privacy.listener_epsilon == pytest.approx(known, rel=0.01)
    assert privacy.listener_epsilon > 2 * privacy.epsilon
    assert f"epsilon is {privacy.listener_epsilon:.4g}" in privacy.statement


def test_every_statement_says_against_whom_it_holds():
    privacy = stated(**CENTRAL).privacy
    assert privacy.listener_epsilon is None, "everybody takes part, and a listener knows that"
    assert f"Adversaries: {ADVERSARIES['aggregator']}." in privacy.statement


def test_two_distributed_runs_trust_their_nodes():
    """Their composition once said that nobody but the device is trusted."""
    summary = stated(**DISTRIBUTED)
    together = compose([summary.claim("monday"), summary.claim("tuesday")])
    assert together.trust == "nodes"
    assert TRUSTED["nodes"] in together.statement
    assert "nobody but the device" not in together.statement
    assert f"Adversaries: {ADVERSARIES['nodes']}." in together.statement
