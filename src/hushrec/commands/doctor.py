"""``hushrec doctor``: what is installed, and where things are looked for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from hushrec.backends.inprocess import usable_cores
from hushrec.commands.options import json_option
from hushrec.commands.terminal import Console, print_json
from hushrec.data.folders import cache_dir
from hushrec.data.synthetic import demo
from hushrec.methods.base import method_names
from hushrec.report.html import write_report
from hushrec.report.tables import plain_table
from hushrec.run import train

EXTRAS = {
    "neural": "torch",
    "flower": "flwr",
    "tune": "optuna",
    "parquet": "pyarrow",
}


@click.command("doctor")
@click.option(
    "--compile",
    "compiles",
    is_flag=True,
    help="Compile the default method's kernels now, so that the first training does not wait.",
)
@json_option
def doctor_command(compiles: bool, as_json: bool) -> None:
    """Show versions, threads, optional parts, methods, and where data is looked for.

    \b
    hushrec doctor
    hushrec doctor --compile     # about a minute, once after an installation
    """
    if compiles:
        _compile()
    packages = ("hushrec", "numpy", "scipy", "numba", "pydantic", "safetensors")
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "threads": usable_cores(),
        "extras": {
            extra: importlib.metadata.version(module) if importlib.util.find_spec(module) else None
            for extra, module in EXTRAS.items()
        },
        "methods": method_names(),
        "data": {
            "HUSHREC_DATA": os.environ.get("HUSHREC_DATA"),
            "cache": str(cache_dir()),
        },
    }
    if as_json:
        print_json(found)
        return
    table = plain_table(show_header=False)
    table.add_column("", style="bold", no_wrap=True)
    table.add_column("", overflow="fold")
    table.add_row("python", f"{found['python']} on {found['platform']}")
    table.add_row("versions", "  ".join(f"{k} {v}" for k, v in found["versions"].items()))
    table.add_row("threads", str(found["threads"]))
    for extra, version in found["extras"].items():
        state = version or f"not installed: pip install 'hushrec[{extra}]'"
        table.add_row(f"extra {extra}", state)
    table.add_row("methods", "  ".join(found["methods"]))
    table.add_row("HUSHREC_DATA", found["data"]["HUSHREC_DATA"] or "not set")
    table.add_row("cache", found["data"]["cache"])
    Console().print(table)


def _compile() -> None:
    """Train the default method on enough people for two stacks, and write a report: that is all."""
    few = {"newton_rounds": 1, "network_rounds": 2, "evaluation.every": 1}
    with TemporaryDirectory() as place:
        write_report(train(demo(viewers=600), out=Path(place) / "run", settings=few))
