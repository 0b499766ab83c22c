"""The loggers of examples/callbacks, played as they stand; the libraries are stand-ins."""

import runpy
import sys
from types import ModuleType

import pytest

import hushrec
from documented import REPO
from test_api import StopAfter

EXAMPLES = REPO / "examples" / "callbacks"
OPTIONS = {"rounds": 3, "settings": {"d": 4, "evaluation.every": 2}}


class Recorded(ModuleType):
    """A module whose functions and classes keep how they were called."""

    def __init__(self, name, calls):
        super().__init__(name)
        self.calls = calls

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def called(*args, **named):
            self.calls.append((name, *args, *named.values()))
            return self

        return called


@pytest.fixture
def calls(monkeypatch):
    calls = []
    for name in ("mlflow", "torch", "torch.utils", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, Recorded(name, calls))
    return calls


def of(calls, name):
    return [call[1:] for call in calls if call[0] == name]


def test_mlflow(calls, tiny):
    logger = runpy.run_path(EXAMPLES / "mlflow_logger.py")["MLflowLogger"]
    run = hushrec.train(tiny, "fedmf", **OPTIONS, callbacks=[logger()])
    assert of(calls, "start_run") == [(f"fedmf on {tiny.name}",)]
    ((params,),) = of(calls, "log_params")
    assert params["d"] == 4
    metrics = of(calls, "log_metrics")
    assert [step for _, step in metrics] == [1, 2, 3]
    assert [metric["loss"] for metric, _ in metrics] == [line.loss for line in run.lines]
    assert ["valid ndcg" in metric for metric, _ in metrics] == [False, True, True]
    assert of(calls, "log_metric") == [("test ndcg", run.metrics["full"]["ndcg@10"])]
    assert of(calls, "end_run") == [()]


def test_mlflow_hears_of_an_interruption(calls, tiny):
    logger = runpy.run_path(EXAMPLES / "mlflow_logger.py")["MLflowLogger"]
    with pytest.raises(hushrec.HushrecError):
        hushrec.train(tiny, "fedmf", **OPTIONS, callbacks=[logger(), StopAfter(2)])
    assert of(calls, "end_run") == [("KILLED",)]


def test_tensorboard(calls, tiny):
    logger = runpy.run_path(EXAMPLES / "tensorboard_logger.py")["TensorBoardLogger"]
    run = hushrec.train(tiny, "fedmf", **OPTIONS, callbacks=[logger("logs")])
    scalars = of(calls, "add_scalar")
    assert [(value, step) for name, value, step in scalars if name == "loss"] == [
        (line.loss, line.round) for line in run.lines
    ]
    assert sum(name == "valid/ndcg@10" for name, *_ in scalars) == 2
    assert of(calls, "close") == [()]
