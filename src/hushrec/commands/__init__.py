"""The command line. Results go to standard output, everything else to standard error.

A module for each group of commands; `options` has what they share, `display` what training shows.
Nothing else in hushrec knows click.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from hushrec.commands.audit import audit_command
from hushrec.commands.data import data_commands
from hushrec.commands.doctor import doctor_command
from hushrec.commands.evaluate import analyse_command, compare_command, evaluate_command
from hushrec.commands.federate import federate_commands
from hushrec.commands.federated import rehearse_command, run_command, status_command
from hushrec.commands.guard import guarded
from hushrec.commands.methods import methods_command
from hushrec.commands.node import node_commands
from hushrec.commands.privacy import privacy_commands
from hushrec.commands.recommend import export_command, recommend_command
from hushrec.commands.release import release_command
from hushrec.commands.report import report_command
from hushrec.commands.reproduce import reproduce_command
from hushrec.commands.studio import studio_command
from hushrec.commands.terminal import complain, safe_usage, say
from hushrec.commands.train import train_command
from hushrec.commands.tune import tune_command
from hushrec.errors import DivergedError, HushrecError, StoppedError


class _Commands(click.Group):
    """Turns every error meant for the user into one line on standard error and its exit code."""

    def make_context(self, *given: Any, **more: Any) -> click.Context:
        with safe_usage():
            return super().make_context(*given, **more)

    def invoke(self, context: click.Context) -> Any:
        try:
            with safe_usage(), guarded():
                return super().invoke(context)
        except StoppedError as stopped:
            say(str(stopped), err=True)
            sys.exit(130)
        except HushrecError as error:
            complain(error)
            sys.exit(3 if isinstance(error, DivergedError) else 2)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hushrec")
def main() -> None:
    """Personalised, private, federated recommendation.

    \b
    hushrec train --data demo --out runs/first
    hushrec recommend runs/first --user viewer-0001
    hushrec compare runs/first runs/second
    hushrec audit runs/first
    """


for command in (run_command, status_command, rehearse_command):
    federate_commands.add_command(command)
for command in (
    data_commands,
    privacy_commands,
    node_commands,
    federate_commands,
    audit_command,
    evaluate_command,
    analyse_command,
    compare_command,
    recommend_command,
    export_command,
    release_command,
    train_command,
    report_command,
    studio_command,
    methods_command,
    tune_command,
    reproduce_command,
    doctor_command,
):
    main.add_command(command)
