"""Options and arguments that commands have in common."""

from __future__ import annotations

from pathlib import Path

import click

run_argument = click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON on standard output and nothing else."
)
threads_option = click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Threads to use; the result does not depend on it.",
)
