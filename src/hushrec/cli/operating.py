"""What ``hushrec federate server`` and ``run`` do while they run."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hushrec.cli.display import EventPrinter, interrupt_callback, training_display
from hushrec.cli.terminal import echo_err
from hushrec.deployment.coordinator import run as runs
from hushrec.deployment.coordinator.session import EventLog
from hushrec.deployment.provisioning import ServerFolder
from hushrec.errors import (
    FederationError,
    HushrecError,
    RunError,
    ServerLostError,
    StoppedError,
)
from hushrec.runs.schema import Summary

if TYPE_CHECKING:
    from hushrec.deployment.flower.programs import RunningServer
    from hushrec.deployment.flower.transport import RuntimeEndpoint

RESTARTS = 5
"""Times that a run goes on after its server was started anew."""
RESTART_SECONDS = 5.0
"""Seconds until a run tries again to go on with a server that was lost and does not answer yet."""
DELIVERY_SECONDS = 15.0
"""Seconds between two looks for nodes that have not got the model of the last run."""
CONNECTED_SECONDS = 10.0
"""A node whose last request is younger is connected: a SuperNode asks every 3 s."""


def train_on(server: ServerFolder, *, resume: bool, quiet: bool) -> tuple[Summary, Path]:
    """Train with the nodes of a running server; return the summary and the run folder.

    When the server's supervisor starts its SuperLink anew, the run goes on from its last round.
    """
    from hushrec.deployment.flower.programs import begin_run, wait_for_restart

    restarts = 0
    while True:
        run = _newest(server, resume=resume)
        try:
            token, endpoint, node_ids = begin_run(server)
        except (FederationError, RunError):
            restarts += 1
            if not 1 < restarts <= RESTARTS:  # the first try of a run, or too many
                raise
            time.sleep(RESTART_SECONDS)
            continue
        run = replace(run, node_ids=node_ids)
        if not quiet:
            run = replace(run, events=EventLog(run.folder.path / runs.EVENTS, EventPrinter()))
            echo_err(f"waiting for {server.config.policy.nodes} nodes")
        try:
            return _train(run, endpoint, token, quiet=quiet), run.folder.path
        except StoppedError as stopped:
            command = f"hushrec federate run {server.path} --resume"
            raise StoppedError(f"{stopped}; continue with: {command}") from None
        except ServerLostError:
            restarts += 1
            if restarts > RESTARTS or not wait_for_restart(endpoint, server):
                raise
            echo_err("the server was started anew; the run goes on from its last round")
            resume = True


def _newest(server: ServerFolder, *, resume: bool) -> runs.FederatedRun:
    about = server.contract, server.config.policy, server.partition, server.registered
    return runs.FederatedRun.open(server.runs, *about, resume=resume)


def _train(
    run: runs.FederatedRun, endpoint: RuntimeEndpoint, token: str, *, quiet: bool
) -> Summary:
    from hushrec.deployment.flower.processes import handling
    from hushrec.deployment.flower.transport import run_on_grid

    def end(number: int, frame: object) -> None:
        # No need to finish the round: nodes answer the same request with the same bytes.
        raise StoppedError("stopped; completed rounds are saved")

    with (
        training_display(quiet) as display,
        interrupt_callback() as stop,
        handling((signal.SIGTERM,), end),
    ):
        return run_on_grid(endpoint, token, lambda link: run.train(link, (display, stop)))


def operate(server: RunningServer) -> NoReturn:
    """Keep a server running, and deliver the model of the newest run to nodes that come back."""
    looked = time.monotonic()

    def tick() -> None:
        nonlocal looked
        if time.monotonic() - looked < DELIVERY_SECONDS:
            return
        looked = time.monotonic()
        try:
            _deliver(server)
        except HushrecError as error:
            echo_err(f"the model was not delivered: {error}")

    server.watch(echo_err, tick)


def _deliver(server: RunningServer) -> None:
    """Deliver the model of the newest run to nodes that have not got it and are connected."""
    from hushrec.deployment.flower.programs import begin_run
    from hushrec.deployment.flower.transport import run_on_grid

    newest = runs.newest_run(server.folder.runs)
    if newest is None or not (newest.path / runs.MODEL).exists() or newest.is_locked():
        return
    recent = time.monotonic() - CONNECTED_SECONDS
    back = [
        name for name in runs.without_model(newest) if server.traffic.seen.get(name, 0.0) > recent
    ]
    if not back:
        return
    about = server.folder.contract, server.folder.config.policy, EventLog(newest.path / runs.EVENTS)
    token, endpoint, node_ids = begin_run(server.folder)
    run = runs.FederatedRun(newest, *about, node_ids=node_ids)
    run_on_grid(endpoint, token, lambda link: run.deliver(link, back))
    echo_err(f"{', '.join(back)} came back, and got the model of {newest.path.name}")
