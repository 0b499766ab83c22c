"""A whole federation on one machine: the server, and every node in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hushrec.deployment.flower.processes import Processes, Program
from hushrec.deployment.flower.programs import Server, server_running
from hushrec.deployment.provisioning.folders import ServerFolder


@contextmanager
def federation_running(folder: Path) -> Iterator[tuple[Server, dict[str, Program]]]:
    """Run all parties of a federation that was made here, until the context is left."""
    work = folder / "run"
    work.mkdir(mode=0o700, exist_ok=True)
    nodes = sorted(path for path in (folder / "nodes").iterdir() if path.is_dir())
    with ExitStack() as stack:
        server = stack.enter_context(server_running(ServerFolder.open(folder / "server")))
        # A node ends what it started itself; should it be killed first, that is done here.
        for node in nodes:
            (node / "run").mkdir(mode=0o700, exist_ok=True)
            stack.enter_context(Processes(node / "run", {}))
        programs = stack.enter_context(Processes(work, {}))
        yield server, {node.name: start_node(programs, node) for node in nodes}


def start_node(programs: Processes, node: Path) -> Program:
    """Start a node as its owner would."""
    words = [sys.executable, "-m", "hushrec", "federate", "node", str(node)]
    return programs.start(node.name, words)
