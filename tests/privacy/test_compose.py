"""What several runs release together: the sum is true, said wherever seeds are, or refused."""

import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from hushrec.api import Run, train
from hushrec.cli import main
from hushrec.data import load
from hushrec.errors import ConfigError, RunError
from hushrec.io.codec import parse
from hushrec.privacy.accountant import (
    Accountant,
    Everybody,
    FixedSize,
    Gaussian,
    Grid,
    Poisson,
    Pure,
)
from hushrec.privacy.statement import Claim, PrivacyStatement, compose
from hushrec.reporting.html import write_report
from hushrec.runs.recording import data_digest
from hushrec.runs.schema import Summary

CENTRAL = {"privacy.mode": "central", "privacy.epsilon": 1.0}
LAPLACE = {"privacy.mode": "local-laplace", "privacy.epsilon": 2.0, "privacy.clip": 1.0}
BUDGETS = {
    "privacy.mode": "local-gaussian",
    "privacy.clip": 1.0,
    "privacy.budgets": "activity",
    "privacy.epsilon_min": 1.0,
    "privacy.epsilon_max": 4.0,
}
GRID = Grid(1e12, 1000)


@pytest.fixture(scope="module")
def summaries():
    """Two releases of the most popular films, each at epsilon 1."""
    data = load("demo")
    return [train(data, "popularity", settings=CENTRAL).summary.as_dict() for _ in range(2)]


@pytest.fixture
def summary(summaries):
    return copy.deepcopy(summaries[0])


def claims(summaries):
    return [
        parse(Summary, json.dumps(summary), f"run-{number}").claim(f"run-{number}")
        for number, summary in enumerate(summaries)
    ]


def history(*events):
    accountant = Accountant()
    for event, count in events:
        accountant.record(event, count)
    return accountant.history()


def gaussian_delta(mu, epsilon):
    """Balle and Wang 2018, theorem 8, by hand."""
    return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


# ------------------------------------------------------------ the sum is true


def test_two_runs_at_epsilon_1_come_to_less_than_2(summaries):
    together = compose(claims(summaries))
    events = [entry for summary in summaries for entry in summary["privacy"]["account"]]
    assert together.epsilon == Accountant(events).epsilon(1e-5)
    assert 1 < together.epsilon < 2
    assert together.delta == 1e-5
    for part in ("One of them: (1, 1e-05)", f"all 2 together: ({together.epsilon:.4g}, 1e-05)"):
        assert part in together.statement
    assert "Simulated" not in together.statement
    assert "Public: the list of" in together.statement


def test_one_runs_epsilon_is_false_of_both_and_the_sum_is_true(summaries):
    """Whoever takes the mean of two releases has half the noise's variance."""
    one = [1 / summary["privacy"]["account"][0]["multiplier"] for summary in summaries]
    together = compose(claims(summaries))
    assert gaussian_delta(one[0], 1.0) <= 1e-5, "of one release its own epsilon is true"
    mean = math.hypot(*one)
    assert gaussian_delta(mean, 1.0) > 50 * 1e-5
    assert 0.99e-5 < gaussian_delta(mean, together.epsilon) <= 1e-5


def test_laplace_noise_adds_up_and_needs_no_delta(tiny):
    runs = [train(tiny, "popularity", settings=LAPLACE).summary.as_dict() for _ in range(3)]
    together = compose(claims(runs))
    assert together.epsilon == pytest.approx(6.0)
    assert together.delta == 0
    assert together.trust == "nobody"
    with pytest.raises(ConfigError, match="leave out --delta"):
        compose(claims(runs), 1e-6)


def test_whoever_one_of_the_runs_trusts_is_trusted(tiny):
    """Runs whose nodes add the noise do not become runs that trust the device alone."""
    runs = [train(tiny, "popularity", settings=LAPLACE).summary.as_dict() for _ in range(2)]
    alone, nodes = claims(runs)
    nodes = replace(nodes, privacy=nodes.privacy.model_copy(update={"trust": "nodes"}))
    assert compose([alone, nodes]).trust == "nodes"
    assert "each node with its own users' uploads" in compose([nodes, alone]).statement


EVENTS = st.one_of(
    st.builds(Pure, st.floats(0.0, 2.0)),
    st.builds(
        lambda z: Gaussian(z, Everybody(), "replace-one", GRID), st.floats(0.5, 50.0, width=32)
    ),
    st.builds(
        lambda z, size: Gaussian(z, FixedSize(size, 500), "replace-one", GRID),
        st.sampled_from([1.0, 2.0, 5.0]),
        st.sampled_from([5, 50]),
    ),
)
ACCOUNTS = st.lists(st.tuples(EVENTS, st.integers(1, 20)), min_size=1, max_size=3)


def of_account(account, delta=1e-5, neighbours="replace-one"):
    """A claim with this account."""
    lines = "\n".join(json.dumps(entry, sort_keys=True) for entry in account)
    epsilon = Accountant(account).epsilon(delta)
    privacy = PrivacyStatement(
        guarantee="user-level (epsilon, delta)-DP",
        epsilon=epsilon,
        delta=delta,
        neighbours=neighbours,
        trust="nobody",
        statement="",
    )
    return Claim("r", "m", "d", None, 500, epsilon, privacy, lines)


@settings(max_examples=60)
@given(st.lists(ACCOUNTS, min_size=3, max_size=4), st.randoms(use_true_random=False))
def test_order_tells_nothing_more_costs_more_and_never_above_the_plain_sum(accounts, random):
    runs = [of_account(history(*account)) for account in accounts]
    epsilon = compose(runs).epsilon
    shuffled = random.sample(runs, len(runs))
    assert compose(shuffled).epsilon == epsilon
    assert compose(runs[:-1]).epsilon <= epsilon * (1 + 1e-9)
    assert max(run.epsilon for run in runs) <= epsilon * (1 + 1e-9)
    each = [Accountant(map(json.loads, run.account.splitlines())) for run in runs]
    assert epsilon <= sum(one.epsilon(1e-5 / len(runs)) for one in each) * (1 + 1e-9)


def test_cohorts_by_coins_and_everybody_in_one_account():
    sampled = history((Gaussian(1.0, Poisson(0.01), "zero-out-one", GRID), 200))
    everybody = history((Gaussian(8.0, Everybody(), "zero-out-one", GRID), 3))
    runs = [of_account(account, neighbours="zero-out-one") for account in (sampled, everybody)]
    epsilon = compose(runs).epsilon
    assert epsilon == Accountant([*sampled, *everybody]).epsilon(1e-5)
    assert max(run.epsilon for run in runs) < epsilon < sum(run.epsilon for run in runs)
    assert compose(runs[::-1]).epsilon == epsilon


def test_a_grid_too_coarse_for_all_runs_leaves_the_plain_sum():
    """Whole steps may cost a thousandth at most; so many runs cost more, and each alone less."""
    coarse = Gaussian(4.0, Everybody(), "replace-one", Grid(2e3, 10))
    runs = [of_account(history((coarse, 1)))] * 30
    assert math.isinf(Accountant(history((coarse, 30))).epsilon(1e-5))
    expected = 30 * Accountant(history((coarse, 1))).epsilon(1e-5 / 30)
    assert compose(runs).epsilon == pytest.approx(expected)


# ------------------------------------------------------------ seeds say it too


def test_several_seeds_say_what_one_and_what_all_of_them_cost(small, tmp_path):
    said = train(
        small, "popularity", seeds=[0, 1, 2], out=tmp_path / "runs", settings=CENTRAL
    ).summary
    privacy = said.privacy
    delta = privacy.delta
    expected = Accountant(3 * privacy.account).epsilon(delta)
    assert privacy.together.epsilon == expected > privacy.epsilon
    assert [run["run"] for run in privacy.together.runs] == said.runs
    both = f"One of them: (1, {delta:.3g}); all 3 together: ({expected:.4g}, {delta:.3g})"
    assert both in privacy.statement
    assert json.loads((tmp_path / "runs" / "summary.json").read_text()) == said.as_dict()
    page = write_report(Run.open(tmp_path / "runs" / "seed-1", small)).read_text()
    assert "one of 3 seeds" in page
    assert both in page
    train(small, "popularity", settings=CENTRAL, out=tmp_path / "alone")
    page = write_report(Run.open(tmp_path / "alone", small)).read_text()
    assert "seeds. What publishing" not in page


def test_seeds_without_a_guarantee_have_no_sum(tiny, tmp_path):
    said = train(tiny, "popularity", seeds=[0, 1], out=tmp_path / "runs").summary.privacy
    assert said.statement.startswith("No formal guarantee")
    assert said.together is None
    one = train(
        tiny, "popularity", seeds=[0], out=tmp_path / "one", settings=CENTRAL
    ).summary.privacy
    assert one.together is None


def test_of_personal_budgets_the_largest_count(small, tmp_path):
    said = train(
        small, "popularity", seeds=[0, 1], out=tmp_path / "runs", settings=BUDGETS
    ).summary.privacy
    (entry,) = said.claimed
    assert Accountant([entry]).epsilon(said.delta) == pytest.approx(said.epsilon, rel=1e-3)
    together = said.together
    assert together.epsilon == Accountant([entry, entry]).epsilon(said.delta)
    assert 4 < together.epsilon < 8
    assert together.same_budgets
    for part in ("count with the largest", "that leaves everybody's budget as it is"):
        assert part in said.statement


def test_rounds_that_were_planned_and_not_run_are_claimed_too(tiny, tmp_path):
    """Looks may end a run; whoever may stop at any round claims for all, in the sum as alone."""
    looks = {"privacy.selection_share": 0.25, "evaluation.patience": 1, "privacy.noise_seed": 2}
    settings = {**CENTRAL, **looks, "privacy.delta": 1e-3, "d": 2}
    said = train(
        tiny, "fedmf", seeds=[0, 1], out=tmp_path / "runs", rounds=40, settings=settings
    ).summary
    privacy = said.privacy
    assert max(said.rounds) < 40
    assert privacy.spent_epsilon < privacy.epsilon
    expected = Accountant(2 * privacy.claimed).epsilon(1e-3)
    assert privacy.together.epsilon == pytest.approx(expected, rel=1e-9)
    assert privacy.statement.startswith("Simulated: the noise of 2 of 2 runs")


# ------------------------------------------------------------ what has no sum


def other(summary, **changes):
    """The same run with other words under ``privacy``."""
    return {**summary, "privacy": {**summary["privacy"], **changes}}


def an_event(summary, **changes):
    (entry,) = summary["privacy"]["claimed"]
    return other(summary, claimed=[{**entry, **changes}])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: {**s, "data": "ml-1m", "data_digest": "0"},
            r"'ml-1m'\)\. The statement of a run",
        ),
        (lambda s: {**s, "data_digest": "0"}, "which changed"),
        (lambda s: {**s, "data": "ml-1m", "data_digest": None}, "different data"),
        (lambda s: other(s, neighbours="replace-one"), "same privacy.neighbours"),
        (lambda s: other(s, unit="client (silo)"), "each user and run-1 each client"),
        (lambda s: other(s, guarantee="none", epsilon=None), "run-1 has no guarantee"),
        (lambda s: other(s, epsilon=math.inf), "run-1 has no guarantee"),
        (lambda s: other(s, neighbours="add-or-remove-one"), "run-1 was made by an earlier"),
        (lambda s: an_event(s, neighbours="add-or-remove-one"), "under 'add-or-remove-one'"),
        (lambda s: an_event(s, event="gaussian"), "an event 'gaussian'"),
        (lambda s: an_event(s, multiplier="x"), "run-1 was made by an earlier .* or is damaged"),
        (lambda s: an_event(s, sampling={"kind": "coins"}), "cannot be read"),
        (lambda s: an_event(s, count=0), "gives epsilon 0 and the statement says 1; .* damaged"),
        (lambda s: other(s, delta=0.0), "cannot be read"),
        (lambda s: {**s, "selected_by": "validation"}, "selected by validation items"),
        (lambda s: {**s, "privacy": []}, "run-1 is damaged: 'privacy'"),
        (lambda s: other(s, delta=1e-6, epsilon=0.5), "choose the delta .* --delta"),
    ],
)
def test_what_has_no_sum_is_refused(change, message, summary):
    with pytest.raises((RunError, ConfigError), match=message):
        compose(claims([summary, change(summary)]))


def test_data_is_known_by_what_it_holds(summary, small):
    moved = {**summary, "data": "elsewhere/demo.csv"}
    assert compose(claims([summary, moved])).epsilon > 1
    nameless = {**summary, "data_digest": None}
    assert compose(claims([summary, nameless])).epsilon > 1
    value = small.value.copy()
    value[-1] += 1
    assert data_digest(small) == data_digest(replace(small, name="other"))
    assert data_digest(small) != data_digest(replace(small, value=value))
    longer = small.with_public_items([*small.items, "an item that nobody touched"])
    assert data_digest(small) == data_digest(longer)
    one = train(small, "popularity", rounds=1).summary
    two = train(small, "fedmf", rounds=1, settings={"split.kind": "ratio", "d": 2}).summary
    assert one.data_digest == two.data_digest == data_digest(small)


def test_the_sum_at_another_delta(summary):
    strict = other(summary, delta=1e-6, epsilon=1.0)
    runs = claims([summary, strict])
    at = {delta: compose(runs, delta).epsilon for delta in (1e-7, 1e-6, 1e-4)}
    assert at[1e-7] > at[1e-6] > at[1e-4] > 0
    for delta in (0.0, 1.0, 0.001, -1.0, math.nan):
        with pytest.raises(ConfigError, match="1 / clients"):
            compose(runs, delta)


def test_noise_that_can_be_repeated_is_said_first(summary):
    together = compose(claims([summary, other(summary, noise_seed=0), summary]))
    assert together.statement.startswith("Simulated: the noise of 1 of 3 runs")
    assert together.simulated == ["run-1"]


# ------------------------------------------------------------ the command


def ask(*arguments, code=0):
    done = CliRunner().invoke(main, ["privacy", "compose", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place, data = tmp_path_factory.mktemp("composed"), load("demo")
    train(data, "popularity", settings=CENTRAL, out=place / "one")
    train(data, "popularity", settings={**CENTRAL, "privacy.epsilon": 2.0}, out=place / "two")
    train(data, "popularity", seeds=[0, 1], out=place / "seeds", settings=CENTRAL)
    train(data, "popularity", out=place / "open")
    return place


def test_the_command_states_the_sum(folders):
    said = json.loads(ask(folders / "one", folders / "two", "--json"))
    assert 2 < said["epsilon"] < 3
    assert [round(run["epsilon"], 2) for run in said["runs"]] == [1.0, 2.0]
    words = " ".join(ask(folders / "one", folders / "two").split())
    assert f"all together {said['epsilon']:.4f} 1e-05" in words
    assert "One of them: at most (2, 1e-05)" in words
    assert said["statement"] in words
    smaller = json.loads(ask(folders / "one", folders / "two", "--delta", "1e-7", "--json"))
    assert smaller["epsilon"] > said["epsilon"]
    assert smaller["delta"] == 1e-7


def test_a_folder_of_seeds_is_all_of_them(folders):
    said = json.loads(ask(folders / "seeds", "--json"))
    stored = json.loads((folders / "seeds" / "summary.json").read_text())["privacy"]["together"]
    assert said["epsilon"] == stored["epsilon"]
    with_one = json.loads(ask(folders / "seeds", folders / "one", "--json"))
    assert len(with_one["runs"]) == 3
    assert with_one["epsilon"] > said["epsilon"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["one"], "name another"),
        (["one", "one"], "named twice"),
        (["one", "seeds/../one"], "named twice"),
        (["seeds", "seeds/seed-1"], "named twice"),
        (["one", "open"], "open has no guarantee"),
        (["one", "nowhere"], "no such run folder"),
        ([], "Missing argument"),
    ],
)
def test_the_command_refuses(names, message, folders):
    assert message in " ".join(ask(*(folders / name for name in names), code=2).split())


def test_a_damaged_summary_is_an_error_and_no_traceback(folders, tmp_path):
    for text, message in (("{", "damaged"), ("{}", "lacks")):
        broken = tmp_path / "broken"
        broken.mkdir(exist_ok=True)
        (broken / "config.toml").write_bytes((folders / "one" / "config.toml").read_bytes())
        (broken / "summary.json").write_text(text)
        assert message in ask(folders / "one", broken, code=2)


def test_arrays_that_are_no_copy_have_a_digest(tiny):
    """Columns of a table come in strides."""
    rows = np.stack([tiny.user, tiny.item], axis=1)
    assert data_digest(replace(tiny, user=rows[:, 0])) == data_digest(tiny)
