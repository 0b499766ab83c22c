"""The command line. Results go to standard output, everything else to standard error.

Each group of commands is a module that is imported when it is used; `options` has shared options,
`display` the progress of training, `terminal` output and errors. No other package imports click.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import click

import hushrec
from hushrec.cli.terminal import (
    DIVERGED,
    announce_compilation,
    echo_err,
    error_guard,
    exit_with,
    safe_usage,
)
from hushrec.errors import ConfigError, DivergedError, HushrecError, StoppedError, shortened

COMMANDS: Mapping[str, tuple[str, str]] = {
    "analyse": ("runs", "Look behind the means of a finished run; nothing is trained again."),
    "audit": ("privacy", "Attack a finished run: membership, uploads, canaries, clipping, noise."),
    "compare": ("runs", "Compare finished runs user by user, the first as the baseline."),
    "data": ("data", "List, describe, fetch and import data sets."),
    "doctor": ("methods", "Show versions, threads, extras, methods, and where data is looked for."),
    "evaluate": ("runs", "Score a finished run again from its checkpoint."),
    "export": ("serving", "Write a run's model for devices: a folder that numpy alone can serve."),
    "federate": ("federate", "Set up and run a federation, whose nodes keep their users' data."),
    "methods": ("methods", "List the installed methods, or describe one and its options."),
    "node": ("node", "Manage a node of a federation: its data and the state of its runs."),
    "privacy": ("privacy", "Compute guarantees of differential privacy."),
    "recommend": ("serving", "Recommend items to one user, to somebody new, or to everybody."),
    "release": ("runs", "Write what a run's guarantee covers, and nothing else, into a folder."),
    "report": ("runs", "Write the report of a run, or one page of several, and print its path."),
    "reproduce": (
        "experiments.command",
        "Reproduce tables and figures of the papers, and of our own studies.",
    ),
    "similar": (
        "serving",
        "List the items nearest to an item, by weights from item to item or by item vectors.",
    ),
    "studio": ("methods", "Browse a folder of runs: progress, comparisons, users, privacy, leak."),
    "train": ("train", "Train a method, evaluate it, and leave a run folder with a report."),
    "tune": ("train", "Search for a method's options on validation items; write them as a preset."),
}
"""Module and summary of each command: `--help` needs no import of them."""


def module_of(module: str) -> ModuleType:
    """Import the module of a command; `experiments` is a package of the checkout, not installed."""
    if not module.startswith("experiments."):
        return import_module(f"hushrec.cli.{module}")
    checkout = Path(hushrec.__file__).parents[2]
    if not (checkout / "experiments" / "__init__.py").is_file():
        raise ConfigError(
            "the tables and figures of the papers are in the repository and are not installed: "
            "run this command in a checkout of it, with `pip install -e .`"
        )
    if str(checkout) not in sys.path:
        sys.path.append(str(checkout))
    return import_module(module)


class _Commands(click.Group):
    """Imports a command when it is used; turns errors into one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = module_of(COMMANDS[cmd_name][0])
        found = getattr(module, f"{cmd_name}_command", None)
        command: click.Command = found or getattr(module, f"{cmd_name}_commands")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in COMMANDS.items()])

    def make_context(self, *given: Any, **more: Any) -> click.Context:
        with safe_usage():
            return super().make_context(*given, **more)

    def resolve_command(self, *given: Any) -> Any:
        resolved = super().resolve_command(*given)
        announce_compilation()
        return resolved

    def invoke(self, context: click.Context) -> Any:
        try:
            with safe_usage(), error_guard():
                return super().invoke(context)
        except StoppedError as stopped:
            echo_err(stopped.command or str(stopped))
            sys.exit(130)
        except HushrecError as error:
            code = DIVERGED if isinstance(error, DivergedError) else 2
            exit_with(code, shortened(error.command or str(error)))


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@click.version_option(package_name="hushrec")
def main() -> None:
    """Personalised, private, federated recommendation.

    \b
    hushrec train --data demo --out runs/first
    hushrec train --data ratings.csv --items movies.csv
    hushrec recommend runs/first --user viewer-0001
    hushrec compare runs/first runs/second
    hushrec audit runs/first

    \b
    Exit codes: 0 done; 1 an audit contradicted a claim; 2 invalid input or request;
    3 training diverged, or left rounds out; 70 a bug in hushrec; 130 stopped, and saved.
    """
