"""Callbacks: what they receive and when, and what they may ask for."""

import numpy as np
import pytest

import hushrec
from hushrec.errors import ConfigError, StoppedError
from hushrec.runs.folder import RunFolder

SETTINGS = {"d": 4, "evaluation.every": 2}
CENTRAL = {"privacy.mode": "central", "privacy.epsilon": 8.0, "d": 4}


class Spy(hushrec.Callback):
    """Keeps every call in order."""

    def __init__(self):
        self.calls = []

    def on_begin(self, experiment):
        self.calls.append(("begin", experiment))

    def on_evaluation(self, evaluation):
        self.calls.append(("evaluation", evaluation))

    def on_round_end(self, record):
        self.calls.append(("round", record))

    def on_interrupt(self):
        self.calls.append(("interrupt", None))

    def on_end(self, result):
        self.calls.append(("end", result))

    def of(self, hook):
        return [value for name, value in self.calls if name == hook]


class AtRound(hushrec.Callback):
    """Asks for something at the end of a round."""

    def __init__(self, what, at):
        self.what, self.at = what, at

    def on_round_end(self, record):
        if record.round == self.at:
            getattr(self, self.what)()


def test_what_is_called_when_and_with_what(tiny):
    spy = Spy()
    run = hushrec.train(tiny, "fedmf", rounds=3, settings=SETTINGS, callbacks=[spy])
    names = [name for name, _ in spy.calls]
    assert names == ["begin", "round", "evaluation", "round", "evaluation", "round", "end"]
    (experiment,), (result,) = spy.of("begin"), spy.of("end")
    assert experiment == run.experiment
    first, second, third = spy.of("round")
    assert first.valid is None
    assert [record.rounds for record in (first, second, third)] == [3, 3, 3]
    assert third.up_bytes > second.up_bytes > first.up_bytes > 0
    assert [value.valid for value in spy.of("evaluation")] == [second.valid, third.valid]
    summary = run.summary
    assert (result.rounds, result.selected_round) == (3, summary.selected_round)
    assert (result.test, result.valid) == (summary.test, summary.valid)
    assert result.up_bytes == third.up_bytes == summary.communication.up_bytes


def test_callbacks_change_no_bit(tiny):
    plain = hushrec.train(tiny, "fedmf", rounds=3, settings=SETTINGS)
    spied = hushrec.train(tiny, "fedmf", rounds=3, settings=SETTINGS, callbacks=[Spy()])
    for name, array in plain.model.shared.items():
        np.testing.assert_array_equal(array, spied.model.shared[name])
    assert plain.summary.test == spied.summary.test


@pytest.mark.parametrize("at", [1, 3])
def test_stop_ends_training_with_the_best_evaluated_round(at, tiny, tmp_path):
    """Also before the first evaluation, which the round at which it stops then has."""
    spy, out = Spy(), tmp_path / "run"
    callbacks = [AtRound("stop", at), spy]
    run = hushrec.train(tiny, "fedmf", rounds=9, settings=SETTINGS, out=out, callbacks=callbacks)
    assert run.summary.rounds == at
    assert run.summary.selected_round == {1: 1, 3: 2}[at]
    assert len(spy.of("end")) == 1
    assert RunFolder.open(out).read_summary().test == run.summary.test
    again = hushrec.Run.open(out, tiny)
    assert again.recommend("0" if "0" in tiny.users else str(tiny.users[0]), 3)


def test_interrupt_saves_and_raises(tiny, tmp_path):
    spy, out = Spy(), tmp_path / "run"
    with pytest.raises(StoppedError):
        callbacks = [AtRound("interrupt", 3), spy]
        hushrec.train(tiny, "fedmf", rounds=5, settings=SETTINGS, out=out, callbacks=callbacks)
    assert [name for name, _ in spy.calls][-1] == "interrupt"
    assert RunFolder(out).checkpoint_name() == "round-000003"
    resumed = hushrec.train(tiny, out=out, resume=True, callbacks=[spy])
    plain = hushrec.train(tiny, "fedmf", rounds=5, settings=SETTINGS)
    assert resumed.summary.test == plain.summary.test


def test_an_interruption_after_the_last_round_is_none(tiny):
    run = hushrec.train(
        tiny, "fedmf", rounds=2, settings=SETTINGS, callbacks=[AtRound("interrupt", 2)]
    )
    assert run.summary.rounds == 2


def test_a_callback_can_be_used_again(tiny):
    callback = AtRound("stop", 2)
    for _ in range(2):
        run = hushrec.train(tiny, "fedmf", rounds=4, settings=SETTINGS, callbacks=[callback])
        assert run.summary.rounds == 2


def test_no_callback_ends_a_run_with_a_guarantee(tiny):
    """When a run ends would tell of people's data; an interruption can be resumed, and does not."""
    stop = {"rounds": 4, "settings": CENTRAL, "callbacks": [AtRound("stop", 2)]}
    with pytest.raises(ConfigError, match="AtRound stops the run"):
        hushrec.train(tiny, "fedmf", **stop)
    with pytest.raises(StoppedError):
        hushrec.train(tiny, "fedmf", **{**stop, "callbacks": [AtRound("interrupt", 2)]})


def test_what_an_evaluation_returns_is_in_the_record(tiny, tmp_path):
    class Norm(hushrec.Callback):
        def on_evaluation(self, evaluation):
            return {"norm": float(np.linalg.norm(evaluation.shared["items"]))}

    out = tmp_path / "run"
    run = hushrec.train(tiny, "fedmf", rounds=2, settings=SETTINGS, out=out, callbacks=[Norm()])
    first, last = (line.as_dict() for line in run.lines)
    assert "norm" not in first
    assert last["norm"] > 0
    assert last["groups"]["all"] if "all" in last["groups"] else last["groups"]


def test_an_unknown_callback_is_refused_by_name(tiny):
    with pytest.raises(ConfigError, match="unknown callback 'mlflow'; no callback is installed"):
        hushrec.train(tiny, "fedmf", rounds=2, callbacks=["mlflow"])
    with pytest.raises(ConfigError, match="is not a hushrec Callback"):
        hushrec.train(tiny, "fedmf", rounds=2, callbacks=[print])
