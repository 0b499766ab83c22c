"""The public surface, pinned: whoever changes it changes this file, and knows it."""

import inspect
import subprocess
import sys

import hushrec
from hushrec import errors
from hushrec.cli.train import train_command
from hushrec.cli.tune import tune_command
from hushrec.methods.base import method_names


def test_the_public_names():
    assert sorted(hushrec.__all__) == [
        "HushrecError",
        "Interactions",
        "Method",
        "Model",
        "Recommendation",
        "Run",
        "TrainView",
        "load",
        "train",
    ]
    for name in hushrec.__all__:
        assert getattr(hushrec, name).__doc__


def test_the_exception_tree():
    tree = {
        name: kind.__base__.__name__
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, Exception)
    }
    assert tree == {
        "HushrecError": "Exception",
        "InputError": "HushrecError",
        "DataError": "InputError",
        "ConfigError": "InputError",
        "RunError": "InputError",
        "DiskError": "RunError",
        "DivergedError": "HushrecError",
        "MessageError": "HushrecError",
        "TooFewError": "HushrecError",
        "FederationError": "HushrecError",
        "StoppedError": "HushrecError",
        "MissingExtraError": "HushrecError",
    }
    assert all(name in errors.__doc__ for name in tree)
    assert "pip install 'hushrec[neural]'" in str(errors.MissingExtraError("VAE", "neural"))


def test_importing_stays_light():
    """No torch and no pytest behind a plain import; testing is asked for by name."""
    heavy = "{'torch', 'pytest', 'flwr', 'fastapi', 'optuna', 'pyarrow', 'matplotlib'}"
    code = f"import sys, hushrec; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_python_and_the_command_line_train_the_same_method_by_default():
    default = inspect.signature(hushrec.train).parameters["method"].default
    assert default in method_names()
    for command in (train_command, tune_command):
        said = {option.name: option.default for option in command.params}
        assert said["method"] == default
