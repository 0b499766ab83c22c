"""Personal budgets: nobody overdraws, weights are optimal, a resumed run owes the same."""

from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import kstest
from test_runs import FIXED, LOCAL, POISSON, go, plan
from test_schedule import GUIDED

from hushrec.aggregation import ExactSum, Update
from hushrec.api import Run, train
from hushrec.cli import main
from hushrec.data.interactions import Numeric
from hushrec.errors import ConfigError, StoppedError
from hushrec.federation.backends import Machine
from hushrec.federation.experiment import Experiment, ExperimentRequest
from hushrec.privacy.accountant import Everybody, Gaussian, epsilon_of, sensitivity
from hushrec.privacy.budgets import (
    LEVELS,
    WEIGHT,
    Ledger,
    PersonalBudgets,
    PersonalNoise,
    by_activity,
)
from hushrec.privacy.protection import UploadShape
from hushrec.runs.folder import FINAL, RunFolder
from hushrec.streams import SecretRound, SecretStreams
from hushrec.testing import MechanismContract, clients_of
from test_api import StopAfter, bits

BUDGETS = {
    "privacy.mode": "local-gaussian",
    "privacy.noise_seed": 2,
    "privacy.budgets": "activity",
    "privacy.epsilon_min": 1.0,
    "privacy.epsilon_max": 8.0,
    "privacy.clip": 0.5,
    "privacy.delta": 1e-3,
}
FEW = {**BUDGETS, **POISSON, "privacy.budget_uploads": 2}
DEVIATIONS = np.array([0.3, 0.5, 0.4, 2.0])


class TestPersonalNoise(MechanismContract):
    covers_spaces = False

    def make(self, shape):
        return PersonalNoise("gaussian", 1.0, shape, DEVIATIONS)


# ------------------------------------------------------------ the mechanism

SECRET = SecretRound(1, SecretStreams(0))


def with_noise(deviations):
    """Clients that know the deviation of their own noise."""
    return replace(clients_of([[1]] * len(deviations)), noise=deviations)


HEAD = UploadShape(1, {}, {"head": (5000,)})


def test_each_client_has_its_own_noise():
    noise = PersonalNoise("gaussian", 1.0, HEAD, DEVIATIONS)
    view = with_noise(DEVIATIONS).take(np.array([3, 0, 2]))
    sent = noise.on_device().protect(
        Update(3, dense={"head": np.zeros((3, 5000), np.float32)}), view, SECRET
    )
    for row, user in enumerate([3, 0, 2]):
        own = sent.dense["head"][row]
        assert kstest(own / DEVIATIONS[user], "norm").pvalue > 1e-3
    assert sent.nbytes == 3 * HEAD.nbytes, "weights do not travel"


@settings(max_examples=50)
@given(arrays(float, st.integers(1, 6), elements=st.floats(0.1, 10)))
def test_weights_are_the_optimum(deviations):
    """Least squares: the unit-sum weights of least variance solve a small linear system."""
    n = len(deviations)
    # Minimise sum w² s² subject to sum w = 1: Lagrange's conditions, solved as they stand.
    system = np.block(
        [[np.diag(2 * deviations**2), np.ones((n, 1))], [np.ones((1, n)), np.zeros((1, 1))]]
    )
    best = np.linalg.solve(system, [*np.zeros(n), 1.0])[:n]
    shape = UploadShape(1, {}, {"head": (1,)})
    noise = PersonalNoise("gaussian", 1.0, shape, deviations)
    update = Update(n, dense={"head": np.zeros((n, 1))})
    weights = noise.receive(update, np.arange(n)).dense[WEIGHT]
    np.testing.assert_allclose(weights / weights.sum(), best, rtol=1e-6, atol=1e-9)


def test_the_method_sees_uploads_times_the_weighted_mean():
    noise = PersonalNoise("gaussian", 1.0, HEAD, 1e-6 * DEVIATIONS)
    values = np.array([1.0, 2.0, 3.0, 4.0])
    update = Update(4, dense={"head": np.tile(values[:, None], 5000)})
    summed = ExactSum(1)
    sent = noise.protect(update, with_noise(1e-6 * DEVIATIONS), SECRET)
    summed.add(noise.receive(sent, np.arange(4)))
    total, following = noise.finish(summed.total(), SECRET)
    mean = np.average(values, weights=DEVIATIONS**-2.0)
    np.testing.assert_allclose(total.dense["head"], 4 * mean, rtol=1e-5)
    assert total.clients == 4
    assert following is noise
    nobody, _ = noise.finish(ExactSum(1).total(), SECRET)
    assert nobody.clients == 0


def test_least_noise_in_the_mean():
    """The variance of the weighted mean is 1 / sum of inverse variances: less than unweighted."""
    noise = PersonalNoise("gaussian", 1.0, HEAD, DEVIATIONS)
    summed = ExactSum(1)
    silent = Update(4, dense={"head": np.zeros((4, 5000))})
    sent = noise.protect(silent, with_noise(DEVIATIONS), SECRET)
    summed.add(noise.receive(sent, np.arange(4)))
    mean = noise.finish(summed.total(), SECRET)[0].dense["head"] / 4
    assert mean.std() == pytest.approx((DEVIATIONS**-2.0).sum() ** -0.5, rel=0.03)
    assert mean.std() < 0.5 * np.sqrt((DEVIATIONS**2).sum()) / 4


# ------------------------------------------------------------ who gets what, and who spends what


def test_budgets_follow_the_rank_of_activity():
    counts = np.array([5, 100, 7, 5, 9, 0])
    epsilon = by_activity(counts, np.arange(5), 1.0, 8.0)
    assert epsilon[5] == 0, "does not train"
    assert epsilon[0] == epsilon[3] < epsilon[2] < epsilon[4] < epsilon[1] == 8.0
    assert epsilon[0] == 1.0
    many = by_activity(np.arange(5000), np.arange(5000), 0.5, 3.0)
    assert len(np.unique(many)) == LEVELS
    assert (np.diff(many) >= 0).all()


@settings(max_examples=30)
@given(
    arrays(float, st.integers(1, 200), elements=st.floats(0.05, 50)),
    st.integers(1, 40),
    st.integers(0, 1000),
)
def test_no_client_ever_exceeds_its_budget(epsilon, uploads, seed):
    """Whoever is drawn, however often: accounts stay within budgets, and come close to them."""
    budgets = PersonalBudgets.of(
        epsilon, 1e-5, uploads, lambda z: Gaussian(z, Everybody(), "replace-one")
    )
    assert len(budgets.levels) <= LEVELS
    assert (budgets.levels[budgets.level] <= epsilon).all(), "rounded down"
    ledger = Ledger(np.zeros(len(epsilon)), np.zeros(len(epsilon), bool))
    generator = np.random.default_rng(seed)
    made = np.zeros(len(epsilon), int)
    for _ in range(uploads + 5):
        cohort = np.flatnonzero(generator.random(len(epsilon)) < 0.9)
        admitted, ledger = budgets.admitted(ledger, cohort)
        made[admitted] += 1
    paid = budgets.epsilons(ledger.spent)
    assert (paid <= epsilon).all()
    assert made.max() <= uploads
    assert (made[ledger.turned_away] == uploads).all(), "nobody is turned away too early"
    for client in np.flatnonzero(made)[:5]:
        z = budgets.multiplier[budgets.level[client]]
        event = Gaussian(z, Everybody(), "replace-one")
        assert paid[client] == pytest.approx(epsilon_of(event, made[client], 1e-5), rel=1e-9)
    full = made == uploads
    assert (paid[full] > 0.99 * budgets.levels[budgets.level[full]]).all(), "none is wasted"


def test_a_run_keeps_everybody_within_its_budget(tiny):
    said = go(tiny, BUDGETS).summary.privacy
    own = said.budgets
    assert own.epsilon.min == 1
    assert own.epsilon.max == 8
    assert own.spent.max <= own.epsilon.max
    assert own.over_budget == own.stopped == 0
    assert own.spent.median == pytest.approx(own.epsilon.median, rel=0.01)
    assert sum(part["clients"] for part in own.distribution) == 30
    assert 0.99 * own.epsilon.max <= said.epsilon <= own.epsilon.max
    for part in ("budget", "inverse", "which the server knows", "order of the clients' numbers"):
        assert part in said.statement
    said.to_json()


def replaced(data, user, rows):
    """The data with other interactions of one user: the first ``rows`` items of the list."""
    kept = data.user != user
    new = {"user": np.full(rows, user), "item": np.arange(rows), "time": np.arange(rows)}
    new["value"] = np.ones(rows)
    columns = {
        name: np.append(getattr(data, name)[kept], added.astype(getattr(data, name).dtype))
        for name, added in new.items()
    }
    return replace(data, **columns)


def test_neighbours_are_those_that_leave_the_budgets_as_they_are(tiny):
    """The deviation of the noise shows the rank of a client's activity; so nothing else is said."""
    rows = int((tiny.user == 3).sum())
    noise, alike, longer = (
        plan(data, BUDGETS).deviations
        for data in (tiny, replaced(tiny, 3, rows), replaced(tiny, 3, 4 * rows))
    )
    np.testing.assert_array_equal(alike, noise)
    assert (longer != noise).any(), "so a guarantee for every replacement would be false"
    said = go(tiny, BUDGETS).summary.privacy
    assert said.same_budgets
    assert "replaced by any other that leaves everybody's budget as it is." in said.statement
    one_for_all = {**LOCAL, "privacy.epsilon": 8.0, "privacy.clip": 1.0}
    said = go(tiny, one_for_all).summary.privacy
    assert not said.same_budgets
    assert "replaced by any other." in said.statement


def test_who_cannot_pay_stops_and_the_run_goes_on(tiny, tmp_path):
    run = go(tiny, FEW, rounds=12, out=tmp_path / "run")
    own = run.summary.privacy.budgets
    assert run.summary.rounds == 12
    assert 0 < own.stopped <= 30
    assert own.over_budget == 0
    # Poisson with 0.4 over 12 rounds, two uploads each: the same counted by hand.
    drawn = [run.experiment.cohort.draw(30, SecretStreams(2), number) for number in range(1, 13)]
    made = np.zeros(30, int)
    for line, cohort in zip(run.folder.read_metrics(), drawn, strict=True):
        able = cohort[made[cohort] < 2]
        made[able] += 1
        assert line.clients == len(able)
    assert own.stopped == (np.bincount(np.concatenate(drawn), minlength=30) > 2).sum()


def test_everybody_may_stop(tiny):
    run = go(tiny, {**BUDGETS, "privacy.budget_uploads": 1}, rounds=4)
    own = run.summary.privacy.budgets
    assert own.stopped == 30
    assert run.summary.rounds == 4
    assert run.summary.communication.up_bytes == 30 * 40 * 4 * 4


@pytest.mark.parametrize("mode", [BUDGETS, FEW], ids=["all", "few"])
@pytest.mark.parametrize("method", ["fedmf", "fedrkg"])
def test_threads_chunks_and_interruptions_change_nothing(mode, method, tiny, tmp_path):
    plain, other, stopped = (tmp_path / name for name in ("plain", "other", "stopped"))
    settings = {**mode, **(GUIDED if method == "fedrkg" else {})}
    go(tiny, settings, method, rounds=8, out=plain, machine=Machine(threads=1))
    go(tiny, settings, method, rounds=8, out=other, machine=Machine(threads=2, chunk=3))
    stop = StopAfter(5)
    with pytest.raises(StoppedError):
        watched = {"callbacks": [stop]}
        go(tiny, settings, method, rounds=8, out=stopped, **watched)
    half = RunFolder(stopped).read_tensors("round-000005", "ledger.safetensors")
    assert (half["spent"] > 0).any()
    train(tiny, out=stopped, resume=True)
    for folder in (other, stopped):
        assert bits(folder) == bits(plain)
        said, expected = (RunFolder(f).read_summary().privacy for f in (folder, plain))
        assert said == expected
        ledgers = [RunFolder(f).read_tensors(FINAL, "ledger.safetensors") for f in (folder, plain)]
        for name in ("spent", "turned_away"):
            np.testing.assert_array_equal(ledgers[0][name], ledgers[1][name])
    Run.open(plain, tiny)


def test_the_noise_is_what_the_budget_needs(tiny):
    made = plan(tiny, BUDGETS)
    clip, noise = made.protection.mechanisms
    for user in (0, 13, 29):
        z = noise.deviations[user] / sensitivity(clip.bound, "replace-one")
        reached = epsilon_of(Gaussian(z, Everybody(), "replace-one"), 6, 1e-3)
        assert 0.99 * made.budgets.epsilon[user] <= reached <= made.budgets.epsilon[user]


def test_declared_budgets(tiny):
    asked = np.linspace(0.5, 20, 30).astype(np.float32)
    data = replace(tiny, user_features={"wish": Numeric(asked)})
    mode = {k: v for k, v in BUDGETS.items() if "epsilon_" not in k}
    mode |= {"privacy.budgets": "declared", "privacy.budget_feature": "wish"}
    own = go(data, mode).summary.privacy.budgets
    assert own.epsilon.as_dict() == {"min": 0.5, "median": pytest.approx(10.25), "max": 20.0}
    with pytest.raises(ConfigError, match="no numeric user feature; did you mean 'wish'"):
        go(data, {**mode, "privacy.budget_feature": "wisch"})
    with pytest.raises(ConfigError, match="this data has none"):
        go(tiny, mode)
    asked[7] = -1
    with pytest.raises(ConfigError, match="user 'u007' declares a budget of -1 in 'wish'"):
        go(data, mode)


# ------------------------------------------------------------ refusals and the command line


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**LOCAL, "privacy.epsilon_min": 1.0}, "needs privacy.budgets = activity"),
        ({**LOCAL, "privacy.budget_feature": "x"}, "needs privacy.budgets = declared"),
        ({**LOCAL, "privacy.budget_uploads": 3}, "needs privacy.budgets"),
        ({**BUDGETS, "privacy.epsilon_max": None}, "needs privacy.epsilon_max"),
        ({**BUDGETS, "privacy.budgets": "declared"}, "needs privacy.budgets = activity"),
        (
            {**BUDGETS, "privacy.mode": "central", "privacy.noise_seed": 2},
            "use privacy.mode = local-gaussian",
        ),
        (
            {**BUDGETS, "privacy.mode": "local-laplace", "privacy.noise_seed": 2},
            "use privacy.mode = local-gaussian",
        ),
        ({**BUDGETS, "privacy.epsilon": 2.0}, "leave out privacy.epsilon"),
        ({**BUDGETS, "privacy.scale": 2.0}, "leave out privacy.epsilon and privacy.scale"),
        ({**BUDGETS, "privacy.clip": None}, "add privacy.clip"),
        ({**BUDGETS, "privacy.epsilon_min": 9.0}, "exchange them"),
        ({**BUDGETS, "privacy.budget_uploads": 0}, "budget_uploads"),
        ({**BUDGETS, **FIXED, "privacy.sampling": "fixed"}, "sampling = none"),
    ],
    ids=str,
)
def test_what_cannot_be_given_is_refused(settings, message, tiny):
    with pytest.raises(ConfigError, match=message):
        go(tiny, settings)


def test_settings_survive_toml():
    experiment = ExperimentRequest("demo", "fedmf", settings=FEW).experiment()
    assert Experiment.from_toml(experiment.to_toml()) == experiment


def test_the_command_line_and_the_report(tmp_path):
    out = tmp_path / "run"
    arguments = ["train", "--data", "demo", "--method", "popularity", "--out", str(out)]
    arguments += ["--privacy", "local-gaussian", "--clip", "1", "--budgets", "activity"]
    done = CliRunner().invoke(main, [*arguments, "--epsilon-min", "1", "--epsilon-max", "8"])
    assert done.exit_code == 0, done.output
    assert "personal budgets: epsilon 1 to 8" in " ".join(done.output.split())
    report = (out / "report.html").read_text()
    assert "Personal budgets" in report
    assert "0 clients stopped" in " ".join(report.split())
