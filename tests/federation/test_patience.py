"""Early stopping: what a method declares, what an option says, and what privacy forbids."""

from dataclasses import replace

import pytest

from hushrec import train
from hushrec.errors import DivergedError
from hushrec.methods.fedmf import FedMF
from hushrec.testing.checks import check_same

FALLING = {"networks": 1, "lr": 8.0, "progress": False}
"""A learning rate of one network of fedmix at which validation falls from the first round on."""
UNGUARDED = {"guard.active": False}
"""The guard would end such a training before the patience does."""


@pytest.fixture(scope="module")
def whole(tiny):
    run = train(tiny, "fedmix", settings={**UNGUARDED, "evaluation.patience": 0}, **FALLING)
    assert (run.summary.selected_round, run.summary.rounds) == (4, 24)
    return run


def test_the_default_stops_where_validation_falls_and_selects_the_same_model(whole, tiny):
    """Two evaluations, 8 rounds of the network, in place of 75 evaluations."""
    run = train(tiny, "fedmix", settings=UNGUARDED, **FALLING)
    assert (run.summary.selected_round, run.summary.rounds) == (4, 12)
    check_same(whole.model.shared, run.model.shared, "shared parameters")
    assert run.metrics == whole.metrics
    assert run.summary.communication.up_bytes < whole.summary.communication.up_bytes


@pytest.mark.parametrize(("patience", "rounds"), [(1, 8), (3, 16)])
def test_an_option_wins(patience, rounds, tiny):
    run = train(tiny, "fedmix", settings={**UNGUARDED, "evaluation.patience": patience}, **FALLING)
    assert run.summary.rounds == rounds


def test_it_is_a_number_of_rounds_however_often_they_are_evaluated(tiny):
    run = train(tiny, "fedmix", settings={**UNGUARDED, "evaluation.every": 1}, **FALLING)
    assert run.summary.rounds == max(run.summary.selected_round, 5) + 8
    seldom = train(tiny, "fedmix", settings={**UNGUARDED, "evaluation.every": 8}, **FALLING)
    assert seldom.summary.rounds == 24  # the second stale evaluation is the last one


def test_phases_before_the_last_do_not_count(tiny):
    """Counting in 30 rounds improves nothing before weights are fitted."""
    settings = {**UNGUARDED, "evaluation.every": 2}
    run = train(tiny, "fedmix", count_rounds=30, settings=settings, **FALLING)
    assert run.summary.selected_round == 36  # the first evaluation of the network
    assert run.summary.rounds == 44  # the fifth


def test_the_guard_ends_what_the_patience_would_wait_for(tiny):
    with pytest.raises(DivergedError, match=r"its norm is .*guard\.active = false"):
        train(tiny, "fedmix", **FALLING)


def test_under_privacy_all_rounds_are_run(tiny, monkeypatch):
    given = {"rounds": 8, "d": 4, "item_rate": 500.0, "settings": {"privacy.noise_seed": 0}}
    monkeypatch.setattr(FedMF, "traits", replace(FedMF.traits, patience=1))
    private = train(tiny, "fedmf", privacy="central", epsilon=0.5, delta=1e-3, **given)
    assert private.summary.rounds == 8
    open_ = train(tiny, "fedmf", rounds=40, d=4, item_rate=500.0)
    assert open_.summary.rounds < 40
