"""Noisy validation queries: what they cost, what they hide, and that they alone select."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_shipped import with_other_validation_items

from hushrec.aggregation import RANK_BINS, Tally, exact_sum
from hushrec.api import Run, train
from hushrec.data.splitting import SplitConfig, make_split
from hushrec.errors import ConfigError, StoppedError
from hushrec.federation.experiment import ExperimentRequest
from hushrec.federation.setup import set_up
from hushrec.privacy.accountant import Accountant
from hushrec.privacy.noise import ValidationQueries, centred_sum
from hushrec.runs.folder import RunFolder
from hushrec.streams import SecretRound, SecretStreams, Streams
from test_api import StopAfter, bits

SEEDED = {"privacy.noise_seed": 2}
CENTRAL = {"privacy.mode": "central", "privacy.epsilon": 4.0, "privacy.delta": 1e-3}
PAID = {**CENTRAL, **SEEDED, "privacy.selection_share": 0.25}
POISSON = {"cohort.kind": "poisson", "cohort.probability": 0.4}
FIXED = {"cohort.kind": "fixed", "cohort.size": 9}
FEDMF = {"d": 4, "item_rate": 1.0}


def go(data, settings, method="fedmf", rounds=6, **more):
    small = {**(FEDMF if method == "fedmf" else {}), **settings}
    return train(data, method, rounds=rounds, seed=2, settings=small, **more)


def plan(data, settings, method="fedmf", rounds=6):
    small = {**(FEDMF if method == "fedmf" else {}), **settings}
    experiment = ExperimentRequest(
        "tiny", method, settings=small, rounds=rounds, seed=2
    ).experiment()
    return set_up(experiment, make_split(data, SplitConfig(), Streams(2))).plan


def log(out, key):
    return {
        line.round: getattr(line, key)
        for line in RunFolder(out).read_metrics()
        if key in line.model_fields_set
    }


# ------------------------------------------------------------ what they cost


@pytest.mark.parametrize(
    ("method", "settings", "rounds"),
    [
        ("fedmf", {}, 6),
        ("fedmf", {"privacy.neighbours": "replace-one"}, 6),
        ("fedmf", {**POISSON, "evaluation.every": 4}, 6),
        ("popularity", FIXED, 3),
        ("fednext", {}, None),
        ("fedrkg", {"d": 4, "interval": 2}, 6),
    ],
    ids=["all", "replace-one", "poisson", "fixed", "shares", "silent rounds"],
)
def test_rounds_and_looks_together_cost_what_was_asked_for(method, settings, rounds, tiny):
    made = plan(tiny, {**PAID, **settings}, method, rounds)
    history = []
    for number in range(1, made.rounds + 1):
        history = made.charged(history, [number]).history()
    said = made.statement(history, made.rounds)
    assert 0.99 * 4 <= said.epsilon <= 4
    assert said.spent_epsilon == said.epsilon
    looks = [
        e
        for e in history
        if math.isclose(e["multiplier"], made.validation_queries.event.multiplier)
    ]
    assert [entry["count"] for entry in looks] == [len(made.validation_queries.rounds)]
    assert looks[0]["sampling"] == {"kind": "none"}, "everybody is asked, nothing is amplified"
    by_themselves = Accountant(looks).epsilon(1e-3)
    assert 0.99 <= by_themselves <= 1, "a quarter of epsilon"
    # The rest of the account is what the rounds cost alone: less than all, more noise than before.
    rest = [entry for entry in history if entry not in looks]
    assert by_themselves < Accountant(rest).epsilon(1e-3) < said.epsilon
    without = plan(tiny, {**CENTRAL, **SEEDED, **settings}, method, rounds)
    assert made.event.multiplier > 1.01 * without.event.multiplier
    assert str(made.validation_queries) in said.statement


def test_where_everybody_takes_part_gaussians_add_up(tiny):
    """An account of one's own: the noises' inverse squares add up, whatever they are noise on."""
    from scipy.optimize import brentq
    from scipy.stats import norm

    made = plan(tiny, PAID)
    information = sum(
        count / multiplier**2
        for multiplier, count in (
            (made.event.multiplier, 6),
            (made.validation_queries.event.multiplier, 6),
        )
    )
    mu = math.sqrt(information)

    def delta(epsilon):
        shift = epsilon / mu
        return norm.cdf(mu / 2 - shift) - math.exp(epsilon) * norm.cdf(-mu / 2 - shift)

    assert brentq(lambda e: delta(e) - 1e-3, 0.1, 20) == pytest.approx(4, rel=2e-3)


# ------------------------------------------------------------ what they hide


def tally_of(scores):
    scores = np.array(scores, float)
    rank_counts = np.zeros(RANK_BINS, np.int64)
    rank_counts[0] = len(scores)
    return Tally(len(scores), {"ndcg@10": exact_sum(scores)} if len(scores) else {}, rank_counts)


score = st.floats(0, 1)


@given(st.lists(score, max_size=20), score, score)
def test_nobody_moves_the_sum_by_more_than_is_claimed(others, mine, another):
    whole = centred_sum(tally_of([*others, mine]), "ndcg@10")
    emptied = centred_sum(tally_of(others), "ndcg@10")
    replaced = centred_sum(tally_of([*others, another]), "ndcg@10")
    assert abs(whole - emptied) <= 2**31, "a half, in whole steps of 2^-32"
    assert abs(whole - replaced) <= 2**32


@pytest.mark.parametrize("neighbours", ["zero-out-one", "replace-one"])
def test_the_noise_has_the_variance_that_is_accounted_for(neighbours):
    looks = ValidationQueries.within(1.0, 1e-5, frozenset({2, 4, 5}), neighbours, 100.0)
    claimed = looks.event.multiplier * (0.5 if neighbours == "zero-out-one" else 1.0)
    assert looks.noise_std == claimed
    tally, streams = tally_of(np.linspace(0, 1, 80) ** 2), SecretStreams("a key")
    drawn = [looks.value(tally, "ndcg@10", SecretRound(n, streams)) for n in range(4000)]
    exact = 0.5 + (np.linspace(0, 1, 80) ** 2 - 0.5).sum() / 100
    deviation = claimed / 100
    assert np.mean(drawn) == pytest.approx(exact, abs=4 * deviation / math.sqrt(4000))
    assert np.std(drawn) == pytest.approx(deviation, rel=0.05)
    assert len(set(drawn)) == 4000, "every look has noise of its own"
    steps = (np.array(drawn) - 0.5) * 100 * 2**32
    np.testing.assert_allclose(steps, np.rint(steps), atol=1e-3)


def test_one_validation_item_moves_every_look_by_little(tiny, tmp_path):
    """With the same noise: no look moves further than its noise is made for, and no model does."""
    go(tiny, PAID, out=tmp_path / "one")
    usual, moved = log(tmp_path / "one", "noised"), 0.0
    for n, other in zip(range(4), with_other_validation_items(tiny), strict=False):
        go(other, PAID, out=tmp_path / str(n))
        looks = log(tmp_path / str(n), "noised")
        apart = max(abs(looks[number] - usual[number]) for number in usual)
        assert apart <= 1 / 30 + 1e-9
        moved = max(moved, apart)
    assert moved > 0, "the items do matter to the looks"


# ------------------------------------------------------------ they alone select


def test_looks_without_noise_to_speak_of_find_the_best_round(tiny, tmp_path):
    settings = {**PAID, "privacy.epsilon": 1e4, "privacy.clip": 1.0}
    run = go(tiny, settings, rounds=12, out=tmp_path / "run")
    raw = [valid["full"]["ndcg@10"] for valid in log(tmp_path / "run", "valid").values()]
    assert run.summary.selected_round == 1 + int(np.argmax(raw)) < 12
    assert run.summary.selected_by == "noised validation"
    np.testing.assert_allclose(list(log(tmp_path / "run", "noised").values()), raw, atol=0.01)


def test_noised_values_select_and_nothing_else(tiny, tmp_path):
    run = go(tiny, PAID, rounds=12, out=tmp_path / "run")
    noised = log(tmp_path / "run", "noised")
    raw = {n: valid["full"]["ndcg@10"] for n, valid in log(tmp_path / "run", "valid").items()}
    assert run.summary.selected_round == max(noised, key=noised.get)
    assert max(noised, key=noised.get) != max(raw, key=raw.get), "the noise decides here"
    assert Run.open(tmp_path / "run", tiny).model.shared["items"].shape == (40, 4)


def test_looks_that_a_method_marks_are_not_paid_for_and_select_nothing(tiny, tmp_path):
    settings = {**PAID, "d": 4, "interval": 2, "evaluation.every": 5}
    run = go(tiny, settings, "fedrkg", rounds=11, out=tmp_path / "run")
    valid = [number for number, seen in log(tmp_path / "run", "valid").items() if seen]
    assert set(log(tmp_path / "run", "noised")) == {5, 10, 11} < set(valid)
    assert run.summary.selected_round in (5, 10, 11)


def test_whoever_may_stop_early_claims_for_all_rounds_and_looks(tiny):
    run = go(tiny, {**PAID, "evaluation.patience": 1}, rounds=60)
    said, stopped = run.summary.privacy, run.summary.rounds
    assert stopped < 60, "it did stop early"
    assert [entry["count"] for entry in said.account] == [stopped, stopped]
    assert said.spent_epsilon == Accountant(said.account).epsilon(1e-3)
    assert said.spent_epsilon < 0.9 * said.epsilon
    assert 0.99 * 4 <= said.epsilon <= 4
    assert said.rounds == 60


@pytest.mark.parametrize("cohort", [{}, POISSON], ids=["all", "poisson"])
def test_a_resumed_run_selects_the_same_and_owes_the_same(cohort, tiny, tmp_path):
    settings = {**PAID, **cohort, "evaluation.every": 2, "evaluation.patience": 3}
    go(tiny, settings, rounds=9, out=tmp_path / "whole")
    stop = StopAfter(4)
    with pytest.raises(StoppedError):
        go(tiny, settings, rounds=9, out=tmp_path / "cut", callbacks=[stop])
    half = RunFolder(tmp_path / "cut").read_checkpoint("round-000004")
    assert [entry.count for entry in half.account] == [4, 2]
    assert half.selected_value == max(log(tmp_path / "cut", "noised").values())
    train(tiny, out=tmp_path / "cut", resume=True)
    assert bits(tmp_path / "cut") == bits(tmp_path / "whole")
    one, other = (RunFolder(tmp_path / name).read_summary() for name in ("cut", "whole"))
    assert one.privacy == other.privacy
    one.privacy.to_json()


# ------------------------------------------------------------ refusals

LOCAL = {"privacy.mode": "local-gaussian", "privacy.clip": 1.0, "privacy.epsilon": 4.0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"privacy.selection_share": 0.1}, "does nothing without a mode"),
        ({**LOCAL, "privacy.selection_share": 0.1}, "trusted with all users' scores"),
        (
            {"privacy.mode": "central", "privacy.noise": 1.0, "privacy.selection_share": 0.1},
            "share",
        ),
        ({**PAID, "privacy.selection_share": 1.0}, r"privacy\.selection_share"),
        ({**PAID, "evaluation.users": 10}, "who is drawn depends"),
    ],
)
def test_looks_that_cannot_be_paid_for_are_refused(settings, message, tiny, tmp_path):
    with pytest.raises(ConfigError, match=message):
        go(tiny, settings, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_nothing_to_select_and_silos_are_refused(tiny):
    with pytest.raises(ConfigError, match="no shared model to select"):
        go(tiny, {**PAID, "d": 4}, "local-only")
    silos = {"silos.kind": "dirichlet", "silos.count": 5, "d": 4, "hidden": [4]}
    with pytest.raises(ConfigError, match="scores of all its users"):
        go(tiny, {**PAID, **silos, "lipm": False}, "lipm")
