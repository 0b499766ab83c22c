"""Privacy in whole runs: what is claimed, what is refused, and that a resumed run owes the same."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from hushrec.aggregation import ExactSum
from hushrec.api import Run, train
from hushrec.cli import main
from hushrec.data.splitting import SplitConfig, make_split
from hushrec.errors import ConfigError, StoppedError
from hushrec.federation.backends import Machine
from hushrec.federation.experiment import Experiment, ExperimentRequest
from hushrec.federation.setup import set_up
from hushrec.methods.base import Traits
from hushrec.methods.fedmf import FedMF
from hushrec.methods.pfedrec import PFedRec
from hushrec.privacy.accountant import Everybody, Gaussian, Poisson, epsilon_of
from hushrec.privacy.calibration import FixedShape, default_delta
from hushrec.privacy.clipping import AdaptiveClip, FlatClip
from hushrec.privacy.noise import LocalNoise
from hushrec.privacy.protection import Mechanism
from hushrec.runs.folder import FINAL, RunFolder
from hushrec.runs.recording import CheckpointCallback
from hushrec.streams import SecretRound, SecretStreams, Streams
from hushrec.testing import Federation, MechanismContract
from test_api import StopAfter, bits

CENTRAL = {
    "privacy.mode": "central",
    "privacy.noise_seed": 2,
    "privacy.epsilon": 4.0,
    "privacy.delta": 1e-3,
}
POISSON = {"cohort.kind": "poisson", "cohort.probability": 0.4}
FIXED = {"cohort.kind": "fixed", "cohort.size": 9}
REPLACED = {"privacy.neighbours": "replace-one"}
SMALL = {"d": 4, "item_rate": 1.0, "evaluation.every": 2}
LAPLACE = {"privacy.mode": "local-laplace", "privacy.noise_seed": 2, "privacy.scale": 0.2}


def go(data, settings, method="fedmf", rounds=6, **more):
    return train(data, method, rounds=rounds, seed=2, settings={**SMALL, **settings}, **more)


def plan(data, settings, method="fedmf", rounds=6):
    experiment = ExperimentRequest(
        "tiny", method, settings={**SMALL, **settings}, rounds=rounds, seed=2
    ).experiment()
    return set_up(experiment, make_split(data, SplitConfig(), Streams(2))).plan


# ------------------------------------------------------------ what a run claims


@pytest.mark.parametrize(
    ("cohort", "neighbours", "words"),
    [
        (POISSON, "zero-out-one", "Poisson, each client with probability 0.4"),
        ({}, "zero-out-one", "every client may take part"),
        ({"privacy.neighbours": "replace-one"}, "replace-one", "every client may take part"),
    ],
    ids=["poisson", "all", "all replace-one"],
)
def test_a_central_run_keeps_the_epsilon_it_was_asked_for(cohort, neighbours, words, tiny):
    said = go(tiny, {**CENTRAL, **cohort}).summary.privacy
    assert said.guarantee == "user-level (epsilon, delta)-DP"
    assert 0.99 * 4 <= said.epsilon <= 4
    assert (said.delta, said.neighbours, said.unit) == (1e-3, neighbours, "user")
    assert said.trust == "aggregator"
    (entry,) = said.account
    assert entry["count"] == 6
    assert words in said.sampling
    claim = f"({said.epsilon:.4g}, 0.001)"
    for part in (words, claim, "Simulated", "byte counts", "stay on the device"):
        assert part in said.statement
    said.to_json()


def test_fixed_cohorts_are_for_methods_that_keep_nothing(tiny):
    """What a client with private parameters uploads depends on the rounds that it was in."""
    asked = {**CENTRAL, **FIXED}
    said = train(tiny, "popularity", settings=asked, rounds=1).summary.privacy
    assert said.neighbours == "replace-one"
    assert "9 of 30 clients without replacement" in said.sampling
    assert 0.99 * 4 <= said.epsilon <= 4
    with pytest.raises(ConfigError, match="fedmf keeps private parameters"):
        go(tiny, asked)


def test_delta_has_a_default_below_one_in_n(tiny):
    said = go(
        tiny, {"privacy.mode": "central", "privacy.noise_seed": 2, "privacy.noise": 3.0}
    ).summary.privacy
    assert said.delta == 1e-5
    assert default_delta(1_000_000) == 1e-7, "and at most a tenth of a user over all of them"
    expected = epsilon_of(Gaussian(3.0, Everybody(), "zero-out-one"), 6, said.delta)
    assert said.epsilon == pytest.approx(expected, rel=1e-3)
    assert said.epsilon > expected, "whole steps cost a little"
    assert said.asked_epsilon is None


def test_local_noise_without_clipping_promises_nothing(tiny):
    said = go(tiny, LAPLACE).summary.privacy
    assert (said.guarantee, said.epsilon) == ("none", None)
    assert said.statement.startswith("No guarantee: discrete Laplace noise of scale 0.2")
    assert "privacy.clip" in said.statement


def test_clipped_laplace_noise_is_pure_and_adds_up(tiny):
    said = go(tiny, {**LAPLACE, "privacy.clip": 0.05}).summary.privacy
    assert said.epsilon == pytest.approx(6 * 2 * 0.05 / 0.2)
    assert (said.delta, said.trust, said.neighbours) == (0.0, "nobody", "replace-one")
    asked = {
        "privacy.mode": "local-laplace",
        "privacy.noise_seed": 2,
        "privacy.epsilon": 3.0,
        "privacy.clip": 0.05,
    }
    assert go(tiny, asked).summary.privacy.epsilon == pytest.approx(3.0)


def test_clipped_local_gaussian_noise(tiny):
    asked = {
        "privacy.mode": "local-gaussian",
        "privacy.noise_seed": 2,
        "privacy.clip": 0.5,
        "privacy.epsilon": 5.0,
    }
    said = go(tiny, {**asked, "privacy.delta": 1e-3, **POISSON}).summary.privacy
    assert 0.99 * 5 <= said.epsilon <= 5
    # The server sees who uploads: sampling amplifies nothing.
    assert said.account[0]["sampling"] == {"kind": "none"}


@pytest.mark.parametrize("method", ["local-only", "negative-counter"])
@pytest.mark.parametrize("mode", [CENTRAL, {**LAPLACE, "privacy.clip": 1.0}], ids=["central", "l"])
def test_a_method_that_uploads_nothing_gives_nothing_away(method, mode, tiny):
    settings = {**mode, **({"d": 3} if method == "local-only" else {})}
    run = train(tiny, method, rounds=2, settings=settings)
    said = run.summary.privacy
    assert (said.epsilon, said.delta, said.account) == (0.0, 0.0, [])
    assert "nothing is uploaded" in said.statement
    assert run.summary.communication.up_bytes == 0


def test_a_method_that_said_it_uploads_nothing_is_held_to_it(tiny):
    (layer,) = plan(tiny, CENTRAL, "local-only").protection.mechanisms
    assert isinstance(layer, FixedShape)
    with pytest.raises(ConfigError, match="changes its shape"):
        layer.protect(MechanismContract()._update(), None, None)


def test_private_popularity_counts(small):
    """Clipped, noised counts of everybody's items: with little noise, the same list."""
    exact = train(small, "popularity").model.shared["counts"]
    settings = {
        "privacy.mode": "central",
        "privacy.noise_seed": 2,
        "privacy.noise": 1e-3,
        "privacy.clip": 20.0,
    }
    noisy = train(small, "popularity", settings=settings)
    np.testing.assert_allclose(noisy.model.shared["counts"], exact, atol=0.1)
    assert (noisy.model.shared["counts"] != exact).all()
    private = train(small, "popularity", settings={**CENTRAL, "privacy.epsilon": 1.0})
    assert 0.99 <= private.summary.privacy.epsilon <= 1


@pytest.mark.parametrize("method", ["fedmf", "pfedrec"])
@pytest.mark.parametrize("mode", ["central", "local-laplace", "local-gaussian"])
def test_the_byte_counter_counts_whole_uploads(method, mode, tiny):
    noise = "noise" if mode == "central" else "scale"
    settings = {"privacy.mode": mode, "privacy.noise_seed": 2, "privacy.clip": 1.0}
    settings[f"privacy.{noise}"] = 1.0
    sent = go(tiny, settings, method).summary.communication.up_bytes
    assert sent == 6 * 30 * 40 * 4 * 4  # rounds, clients, items, width, bytes


def test_a_mean_divides_by_the_expected_cohort(tiny):
    """So a model tells neither who came nor how many; an empty cohort still gets its noise."""
    settings = {**CENTRAL, "cohort.kind": "poisson", "cohort.probability": 0.02}
    made = plan(tiny, settings)
    (layer,) = made.protection.mechanisms
    assert layer.clients == pytest.approx(0.02 * 30)
    assert (made.event.sampling, made.event.neighbours) == (Poisson(0.02), "zero-out-one")
    method, view = FedMF(FedMF.Config(d=4)), make_split(tiny, SplitConfig(), Streams(2)).train
    before = method.init(view, Streams(2))
    total, _ = made.protection.finish(ExactSum(40), SecretRound(1, SecretStreams(2)))
    after = method.apply(before, total)
    assert (after["items"] != before["items"]).all()
    go(tiny, settings)


# ------------------------------------------------------------ the same whatever the machine does

MODES = {
    "central adaptive": {**CENTRAL, **POISSON},
    "central flat": {**CENTRAL, **REPLACED, "privacy.clip": 0.5},
    "central row": {**CENTRAL, "privacy.clipping": "row", "privacy.clip": 0.1},
    "laplace": LAPLACE,
    "gaussian": {
        "privacy.mode": "local-gaussian",
        "privacy.noise_seed": 2,
        "privacy.clip": 0.5,
        "privacy.scale": 0.3,
    },
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", ["fedmf", "pfedrec"])
def test_threads_chunks_and_interruptions_change_nothing(mode, method, tiny, tmp_path):
    plain, other, stopped = (tmp_path / name for name in ("plain", "other", "stopped"))
    go(tiny, MODES[mode], method, out=plain, machine=Machine(threads=1))
    go(tiny, MODES[mode], method, out=other, machine=Machine(threads=2, chunk=3))
    stop = StopAfter(3)
    with pytest.raises(StoppedError):
        go(tiny, MODES[mode], method, out=stopped, callbacks=[stop])
    half = RunFolder(stopped).read_checkpoint("round-000003")
    assert sum(entry.count for entry in half.account) == (0 if mode == "laplace" else 3)
    assert ("clip_bound" in half.protection) == (mode == "central adaptive")
    train(tiny, out=stopped, resume=True)
    for folder in (other, stopped):
        assert bits(folder) == bits(plain)
        assert RunFolder(folder).read_summary().privacy == RunFolder(plain).read_summary().privacy
        final = RunFolder(folder).read_checkpoint(FINAL)
        for key in ("account", "protection"):
            assert getattr(final, key) == getattr(RunFolder(plain).read_checkpoint(FINAL), key)


def test_a_killed_run_owes_the_same(tiny, tmp_path, monkeypatch):
    """Its last round was run but not saved: it is run again with the same noise, and paid once."""
    save = CheckpointCallback.save

    def die(self):
        if self.state.round == 4:
            raise KeyboardInterrupt
        save(self)

    plain, killed = tmp_path / "plain", tmp_path / "killed"
    settings = MODES["central adaptive"]
    go(tiny, settings, out=plain)
    monkeypatch.setattr(CheckpointCallback, "save", die)
    with pytest.raises(KeyboardInterrupt):
        go(tiny, settings, out=killed, machine=Machine(checkpoint_seconds=0))
    monkeypatch.undo()
    assert RunFolder(killed).checkpoint_name() == "round-000003"
    train(tiny, out=killed, resume=True)
    assert bits(killed) == bits(plain)
    said, expected = (RunFolder(folder).read_summary().privacy for folder in (killed, plain))
    assert said == expected
    assert said.account[0]["count"] == 6


def test_large_tables_are_uploaded_a_few_clients_at_a_time(tiny, monkeypatch):
    sizes, protect = [], LocalNoise.protect

    def spy(self, update, view, secret):
        sizes.append(len(view))
        return protect(self, update, view, secret)

    monkeypatch.setattr(LocalNoise, "protect", spy)
    monkeypatch.setattr("hushrec.federation.backends.BATCH_BYTES", 3 * 7 * 40 * 4 * 4)
    go(tiny, LAPLACE, rounds=1)
    assert max(sizes) <= 3


@pytest.mark.parametrize("method", [FedMF, PFedRec])
@pytest.mark.parametrize("mode", MODES)
def test_private_never_travels(method, mode, tiny):
    """No private array, and no change of one, is in what the protected uploads add up to."""
    view = make_split(tiny, SplitConfig(), Streams(2)).train
    made, sent = plan(tiny, {**MODES[mode], "d": 4}, method.name), []

    class Listen(Mechanism):
        def receive(self, update, clients):
            sent.append(update)
            return update

    layers = (*made.protection.mechanisms, Listen())
    protection = replace(made.protection, mechanisms=layers)
    noise = made.deviations
    federation = Federation(
        method(method.Config(d=4)),
        replace(view, noise=noise),
        protection=protection,
        machine=Machine(1, 7),
        seed=2,
    )
    store, everybody = federation.store, np.arange(len(view))
    before = store.read(everybody)
    before = {name: before[name] for name in before}
    federation.round()
    content = b"".join(
        np.ascontiguousarray(array, np.float32).tobytes()
        for update in sent
        for array in [*update.dense.values(), *(stack.rows for stack in update.rows.values())]
    )
    after = store.read(everybody)
    vectors = np.asarray(after["vector"])
    secrets = [*vectors, *(vectors - np.asarray(before["vector"]))]
    if "rows" in after:
        secrets += list(after["rows"].rows)
    assert content
    for secret in secrets:
        assert np.ascontiguousarray(secret, np.float32).tobytes() not in content


# ------------------------------------------------------------ the split of the noise


@pytest.mark.parametrize(("cohort", "factor"), [(POISSON, 1), (REPLACED, 2)])
def test_adaptive_clipping_costs_as_much_as_one_sum(cohort, factor, tiny):
    """z_update = (z^-2 - (2 sigma_b)^-2)^(-1/2), and sensitivities twice as large if replaced."""
    settings = {
        "privacy.mode": "central",
        "privacy.noise_seed": 2,
        "privacy.noise": 1.2,
        "privacy.bit_noise": 5.0,
    }
    made = plan(tiny, {**settings, **cohort})
    (layer,) = made.protection.mechanisms
    assert made.event.multiplier == 1.2
    assert layer.multiplier == pytest.approx((1.2**-2 - (2 * 5.0 / factor) ** -2) ** -0.5)
    assert layer.noise_std() == pytest.approx(factor * layer.multiplier * layer.clip.bound)
    assert isinstance(layer.clip, AdaptiveClip)


@pytest.mark.parametrize(("cohort", "factor"), [(POISSON, 1), (REPLACED, 2)])
def test_the_share_of_the_count_splits_the_noise(cohort, factor, tiny):
    """The h of DP-PrivRec: z / sqrt(1 - h) on the updates and z / sqrt(h) on the bits cost z."""
    settings = {
        "privacy.mode": "central",
        "privacy.noise_seed": 2,
        "privacy.noise": 1.2,
        "privacy.bit_share": 0.7,
    }
    (layer,) = plan(tiny, {**settings, **cohort}).protection.mechanisms
    assert layer.multiplier == pytest.approx(1.2 / math.sqrt(1 - 0.7))
    of_bits = layer.clip.bit_noise / (factor * 0.5)
    assert of_bits == pytest.approx(1.2 / math.sqrt(0.7))
    assert layer.multiplier**-2 + of_bits**-2 == pytest.approx(1.2**-2)
    with pytest.raises(ConfigError, match="say the same thing"):
        plan(tiny, {**settings, **cohort, "privacy.bit_noise": 3.0})


def test_a_bound_that_is_given_is_flat(tiny):
    (layer,) = plan(tiny, {**CENTRAL, "privacy.clip": 0.7}).protection.mechanisms
    assert layer.clip == FlatClip(0.7)


# ------------------------------------------------------------ refusals


class Weighted(FedMF):
    """Weighs clients by their data."""

    name = "weighted"
    traits = Traits(data_weighted=True)


MODE = {"privacy.mode": "central", "privacy.noise_seed": 2}
LOCAL = {"privacy.mode": "local-gaussian", "privacy.noise_seed": 2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"privacy.epsilon": 3.0}, "does nothing without a mode"),
        ({"privacy.clip": 3.0}, "does nothing without a mode"),
        ({**CENTRAL, "privacy.clipping": "none"}, "without clipping.*privacy.clip"),
        ({**CENTRAL, "privacy.delta": 1 / 30}, "delta below 0.0333"),
        ({**CENTRAL, **FIXED, "privacy.neighbours": "zero-out-one"}, "poisson"),
        ({**CENTRAL, **POISSON, "privacy.neighbours": "replace-one"}, "cohort.kind = fixed"),
        ({**CENTRAL, "privacy.sampling": "poisson"}, "amplification.*privacy.sampling = none"),
        ({**CENTRAL, **POISSON, "privacy.sampling": "fixed"}, "privacy.sampling = poisson"),
        ({**CENTRAL, "privacy.noise": 1.0}, "one of the two"),
        (MODE, "one of the two"),
        ({**CENTRAL, "privacy.scale": 1.0}, "privacy.scale is for local"),
        ({**CENTRAL, "privacy.clipping": "flat"}, "needs a bound"),
        ({**CENTRAL, "privacy.clipping": "row"}, "needs a bound"),
        ({**CENTRAL, "privacy.clipping": "none", "privacy.clip": 1.0}, "contradict"),
        ({**CENTRAL, "privacy.clip": 1.0, "privacy.quantile": 0.5}, "clipping = adaptive"),
        ({**MODE, "privacy.noise": 2.0, "privacy.bit_noise": 0.5}, "spends the whole budget"),
        (LOCAL, "one of the two"),
        ({**LOCAL, "privacy.epsilon": 1.0}, "without clipping.*privacy.clip"),
        ({**LOCAL, "privacy.epsilon": 1.0, "privacy.scale": 1.0}, "one of the two"),
        ({**LOCAL, "privacy.noise": 1.0}, "use privacy.scale"),
        ({**LOCAL, "privacy.scale": 1.0, "privacy.clipping": "adaptive"}, "clipping = flat"),
        (
            {**LOCAL, "privacy.scale": 1.0, "privacy.neighbours": "zero-out-one"},
            "neighbours = replace-one",
        ),
        ({**LOCAL, "privacy.scale": 1.0, "privacy.sampling": "poisson"}, "sampling = none"),
        ({**CENTRAL, "privacy.epsilon": -1.0}, "privacy.epsilon"),
        ({**CENTRAL, "privacy.epsilon": math.inf}, "privacy.epsilon"),
        ({**CENTRAL, "privacy.delta": 0.0}, "privacy.delta"),
        ({**CENTRAL, "privacy.quantile": 1.0}, "privacy.quantile"),
        ({**CENTRAL, "privacy.clipp": 1.0}, "did you mean 'clip"),
        ({**CENTRAL, "privacy.mode": "global"}, "privacy.mode"),
    ],
    ids=str,
)
def test_what_cannot_be_given_is_refused(settings, message, tiny, tmp_path):
    with pytest.raises(ConfigError, match=message):
        go(tiny, settings, out=tmp_path / "run")
    assert not (tmp_path / "run").exists(), "refused before anything is written"


def test_pooled_and_weighted_methods_are_refused(tiny, monkeypatch):
    with pytest.raises(ConfigError, match="pools everybody's data"):
        train(tiny, "central-mf", rounds=2, settings=CENTRAL)
    monkeypatch.setattr("hushrec.federation.experiment.method_class", lambda name: Weighted)
    with pytest.raises(ConfigError, match="weights clients by their data"):
        train(tiny, "weighted", rounds=2, settings=CENTRAL)


class StartsFromData(FedMF):
    """Its first table counts everybody's items."""

    name = "starts-from-data"

    def init(self, view, streams):
        table = super().init(view, streams)["items"].copy()
        table[:, 0] = np.bincount(view.positives.values, minlength=view.n_items)
        return {"items": table}


def test_a_start_that_depends_on_the_data_is_refused(tiny, monkeypatch):
    monkeypatch.setattr("hushrec.federation.experiment.method_class", lambda name: StartsFromData)
    with pytest.raises(ConfigError, match="starts from shared parameters that depend"):
        train(tiny, "starts-from-data", rounds=2, settings={**SMALL, **CENTRAL})


# ------------------------------------------------------------ configuration and command line


def test_privacy_settings_survive_toml():
    experiment = ExperimentRequest(
        "demo", "fedmf", settings={**CENTRAL, "privacy.quantile": 0.7}
    ).experiment()
    assert Experiment.from_toml(experiment.to_toml()) == experiment
    assert experiment.privacy.quantile == 0.7


def test_the_command_line_finds_the_noise_and_prints_the_guarantee(tmp_path):
    out = str(tmp_path / "run")
    arguments = ["train", "--data", "demo", "--method", "fedmf", "--rounds", "3", "--out", out]
    arguments += ["--privacy", "central", "--epsilon", "8", "--delta", "1e-5"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "User-level (ε = 7.99" in said or "User-level (ε = 8," in said
    assert "at most 99.97 %" in said and "Not covered are" in said and "rests on" in said
    run = Run.open(out)
    assert run.summary.privacy.statement in (tmp_path / "run/report.html").read_text()
    assert run.experiment.privacy.epsilon == 8
    with_json = CliRunner().invoke(main, [*arguments, "--overwrite", "--json"])
    assert json.loads(with_json.stdout)["privacy"]["delta"] == 1e-5


def test_the_command_line_says_no_guarantee(tmp_path):
    arguments = ["train", "--data", "demo", "--method", "fedmf", "--rounds", "1", "--set", "d=2"]
    arguments += ["--privacy", "local-laplace", "--scale", "0.2", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert "No guarantee: discrete Laplace noise" in " ".join(done.output.split())
    refused = CliRunner().invoke(main, [*arguments[:-1], str(tmp_path / "b"), "--epsilon", "1"])
    assert refused.exit_code == 2
    assert "one of the two" in refused.output
