"""Rounds that upload nothing cost nothing; a killed run owes what an uninterrupted one does."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_runs import CENTRAL, MODES, POISSON, REPLACED, go, plan

from conftest import blocks
from hushrec.aggregation import ExactSum, Update
from hushrec.api import train
from hushrec.errors import ConfigError, StoppedError
from hushrec.federation.backends import Machine
from hushrec.methods.fedmf import FedMF
from hushrec.privacy.accountant import Everybody, Gaussian, Poisson, epsilon_of
from hushrec.runs.folder import FINAL, RunFolder
from hushrec.streams import SecretRound, SecretStreams
from test_api import StopAfter, bits

LOCAL = {
    "privacy.mode": "local-gaussian",
    "privacy.noise_seed": 2,
    "privacy.clip": 0.5,
    "privacy.epsilon": 5.0,
}
LAPLACE = {
    "privacy.mode": "local-laplace",
    "privacy.noise_seed": 2,
    "privacy.clip": 0.5,
    "privacy.epsilon": 5.0,
}
GUIDED = {"d": 3, "item_rate": 1.0, "interval": 2, "evaluation.every": 2}
ADD = "zero-out-one"


class NowAndThen(FedMF):
    """Uploads in even rounds only."""

    name = "now-and-then"

    def fit(self, shared, private, view, now):
        fitted = super().fit(shared, private, view, now)
        return fitted if now.number % 2 == 0 else replace(fitted, update=Update(len(view)))


class AnotherShape(FedMF):
    """Uploads a count in odd rounds, and rows in even ones."""

    name = "another-shape"

    def fit(self, shared, private, view, now):
        fitted = super().fit(shared, private, view, now)
        count = Update(len(view), dense={"count": np.ones((len(view), 1), np.float32)})
        return fitted if now.number % 2 == 0 else replace(fitted, update=count)


class SpeaksOut(NowAndThen):
    """Uploads in an odd round if somebody's data makes it."""

    name = "speaks-out"

    def fit(self, shared, private, view, now):
        loud = now.number % 2 == 0 or (view.positives.lengths > 7).any()
        return super().fit(
            shared, private, view, replace(now, number=2 * now.number if loud else 1)
        )


def use(monkeypatch, method):
    monkeypatch.setattr("hushrec.federation.experiment.method_class", lambda name: method)


@pytest.mark.parametrize("mode", [CENTRAL, {**CENTRAL, **POISSON}, LOCAL, LAPLACE], ids=str)
def test_only_rounds_that_upload_are_paid_for(mode, tiny, monkeypatch):
    use(monkeypatch, NowAndThen)
    run = go(tiny, mode, "now-and-then", rounds=7)
    said = run.summary.privacy
    assert [entry["count"] for entry in said.account] == [3], "rounds 2, 4 and 6"
    asked = mode["privacy.epsilon"]
    assert 0.99 * asked <= said.epsilon <= asked, "the noise is that of three sums, not seven"
    assert "uploads in 3 of 7 rounds" in said.statement
    clients = sum(
        len(run.experiment.cohort.draw(30, SecretStreams(2), number)) for number in (2, 4, 6)
    )
    bits_sent = 4 * clients if mode["privacy.mode"] == "central" else 0  # of adaptive clipping
    whole = clients * 40 * 4 * 4
    assert run.summary.communication.up_bytes == whole + bits_sent


def test_the_noise_of_a_schedule_is_that_of_its_uploads(tiny, monkeypatch):
    use(monkeypatch, NowAndThen)
    made = plan(tiny, {**CENTRAL, **POISSON}, "now-and-then", rounds=7)
    assert made.silent == {1, 3, 5, 7}
    assert (made.event.sampling, made.event.neighbours) == (Poisson(0.4), ADD)
    assert epsilon_of(made.event, 3, 1e-3) <= 4 < epsilon_of(made.event, 4, 1e-3)


def test_a_silent_round_is_neither_noised_nor_counted(tiny, monkeypatch):
    use(monkeypatch, NowAndThen)
    stack = plan(tiny, {**CENTRAL, **POISSON}, "now-and-then").protection

    def came():
        summed = ExactSum(40)
        summed.add(Update(17))
        return summed

    total, following = stack.finish(came(), SecretRound(3, SecretStreams(0)))
    assert not total.rows
    assert not total.dense
    assert total.clients == pytest.approx(12), "the expected cohort: 17 would tell who was there"
    assert following == stack
    loud, _ = stack.finish(came(), SecretRound(4, SecretStreams(0)))
    assert (loud.rows["items"][1] != 0).all()


def test_a_method_that_changes_its_shape_is_refused(tiny, monkeypatch):
    use(monkeypatch, AnotherShape)
    with pytest.raises(ConfigError, match="in some rounds than in others"):
        go(tiny, CENTRAL, "another-shape")


def test_a_method_is_held_to_its_silence(tiny, monkeypatch):
    use(monkeypatch, SpeaksOut)
    with pytest.raises(ConfigError, match="declared to be without uploads"):
        go(tiny, CENTRAL, "speaks-out")


@pytest.mark.parametrize(
    "mode", [CENTRAL, {**CENTRAL, **REPLACED, "privacy.clip": 5.0}, LOCAL, LAPLACE], ids=str
)
def test_fedrkg_runs_under_every_mode(mode, tiny, tmp_path):
    plain, stopped = tmp_path / "plain", tmp_path / "stopped"
    settings = {**GUIDED, **mode}
    run = train(tiny, "fedrkg", rounds=7, seed=2, settings=settings, out=plain)
    said = run.summary.privacy
    assert said.epsilon == pytest.approx(mode["privacy.epsilon"], rel=0.01)
    assert [entry["count"] for entry in said.account] == [3]
    assert (run.model.shared["guidance"] != 0).all()
    stop = StopAfter(3)
    with pytest.raises(StoppedError):
        watched = {"callbacks": [stop]}
        train(tiny, "fedrkg", rounds=7, seed=2, settings=settings, out=stopped, **watched)
    half = RunFolder(stopped).read_checkpoint("round-000003")
    assert [entry.count for entry in half.account] == [1]
    train(tiny, out=stopped, resume=True, machine=Machine(threads=2, chunk=3))
    assert bits(stopped) == bits(plain)
    assert RunFolder(stopped).read_summary().privacy == said


def test_fedrkg_that_never_guides_uploads_nothing(tiny):
    settings = {**GUIDED, **CENTRAL, "interval": 50}
    said = train(tiny, "fedrkg", rounds=3, settings=settings).summary.privacy
    assert (said.epsilon, said.account) == (0.0, [])


# ------------------------------------------------------------ killed

DRIVER = """
import sys
sys.path[:0] = sys.argv[1:3]
from conftest import blocks
from hushrec.federation.backends import Machine
from test_api import OnRound
from test_runs import MODES, go

def tell(report):
    print(report.round, flush=True)

go(blocks(), MODES[sys.argv[4]], out=sys.argv[3], rounds=400, callbacks=[OnRound(tell)],
   machine=Machine(threads=2, checkpoint_seconds=0))
"""


@pytest.mark.parametrize(("mode", "at"), [("central adaptive", 7), ("gaussian", 12)])
def test_killed_with_sigkill_and_resumed_owes_the_same(mode, at, tmp_path):
    """A real process dies in mid-run: account, epsilon, clipping bound and model are as if not."""
    out, here = tmp_path / "run", Path(__file__).parent
    arguments = [str(here), str(here.parent), str(out), mode]
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, *arguments], stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if int(line) >= at:
            process.send_signal(signal.SIGKILL)
            break
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    name = RunFolder(out).checkpoint_name()
    assert name not in (None, FINAL)
    saved = RunFolder(out).read_checkpoint(name)
    assert sum(entry.count for entry in saved.account) == saved.round < 400
    train(blocks(), out=out, resume=True, machine=Machine(threads=1))
    go(blocks(), MODES[mode], out=tmp_path / "plain", rounds=400)
    assert bits(out) == bits(tmp_path / "plain")
    killed, plain = (RunFolder(folder) for folder in (out, tmp_path / "plain"))
    assert killed.read_summary().privacy == plain.read_summary().privacy
    for key in ("account", "protection"):
        assert getattr(killed.read_checkpoint(FINAL), key) == getattr(
            plain.read_checkpoint(FINAL), key
        )
    said = killed.read_summary().privacy
    assert said.account[0]["count"] == killed.read_summary().rounds
    if mode == "gaussian":
        event = Gaussian(0.3, Everybody(), "replace-one")  # noise 0.3 over twice the clip of 0.5
        assert said.epsilon == pytest.approx(epsilon_of(event, 400, said.delta), rel=1e-4)
