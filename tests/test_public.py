"""The public surface, pinned: whoever changes it changes this file, and knows it."""

import inspect
import re
import subprocess
import sys
from importlib import import_module

import hushrec
from documented import REPO, titled
from hushrec import errors, extend, testing
from hushrec.cli.federate import init_command, rehearse_command
from hushrec.cli.train import train_command, tune_command
from hushrec.config import DEFAULT_METHOD
from hushrec.federation.experiment import ExperimentRequest
from hushrec.methods.base import method_names
from surface import SECTIONS, names_of, page


def test_the_public_names():
    """`tests/surface.py` has them by section."""
    for module in (hushrec, extend, testing):
        assert set(module.__all__) == names_of(module.__name__)
        assert module.__all__ == sorted(module.__all__)
    for section in SECTIONS:
        for name in section.names:
            assert getattr(import_module(section.module), name).__doc__


def test_the_page_of_the_surface_is_what_is_pinned():
    text = (REPO / "docs" / "api.md").read_text("utf-8")
    assert text == page(), "python tests/surface.py > docs/api.md"


def test_an_extension_needs_one_import():
    """The example packages and docs/extend.md import from public modules only."""
    public = {section.module for section in SECTIONS}
    sources = [path.read_text("utf-8") for path in (REPO / "examples").rglob("*.py")]
    sources += [
        text for title, text in titled(REPO / "docs" / "extend.md").items() if ".py" in title
    ]
    assert len(sources) > 8
    for source in sources:
        for module in re.findall(r"^(?:from|import) (hushrec[\w.]*)", source, re.M):
            # Networks are trained with hushrec's own tools, which are not part of the surface.
            assert module in public or module.startswith(("hushrec_", "hushrec.training")), module


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
        "StartingError": "RunError",
        "DiskError": "RunError",
        "DivergedError": "HushrecError",
        "MessageError": "HushrecError",
        "TooFewError": "HushrecError",
        "ServerLostError": "FederationError",
        "FederationError": "HushrecError",
        "StoppedError": "HushrecError",
        "MissingExtraError": "HushrecError",
    }
    assert all(name in errors.__doc__ for name in tree)
    hint = str(errors.MissingExtraError("VAE", "neural"))
    assert "pip install torch==2.13.0 'hushrec[neural]'" in hint


def test_importing_stays_light():
    """No torch and no pytest behind a plain import; testing is asked for by name."""
    heavy = "{'torch', 'pytest', 'flwr', 'fastapi', 'optuna', 'pyarrow', 'matplotlib'}"
    code = f"import sys, hushrec; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_python_and_the_command_line_train_the_same_method_by_default():
    assert inspect.signature(hushrec.train).parameters["method"].default is None
    default = ExperimentRequest("demo").experiment().method
    assert default in method_names()
    assert default == DEFAULT_METHOD
    commands = train_command, tune_command, init_command, rehearse_command
    for command in commands:
        (option,) = (option for option in command.params if option.name == "method")
        assert option.default is None
