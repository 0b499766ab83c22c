"""``hushrec federate run``, ``status`` and ``rehearse``."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from rich.live import Live
from rich.table import Table

from hushrec.cli.display import polite_stop, training_display
from hushrec.cli.federate import (
    ExperimentOptions,
    experiment_options,
    federate_commands,
    make_rehearsal,
)
from hushrec.cli.options import PATH, data_option, json_option
from hushrec.cli.runs import show_recommendations
from hushrec.cli.terminal import Console, print_json, say
from hushrec.deployment.coordinator.run import (
    EVENTS,
    FederatedRun,
    Status,
    is_finished,
    newest_run,
    status_of,
)
from hushrec.deployment.coordinator.session import Event, EventLog
from hushrec.deployment.node.database import NodeDatabase
from hushrec.deployment.node.training import recommend
from hushrec.deployment.provisioning import ServerConfig, ServerFolder
from hushrec.errors import RunError, StoppedError
from hushrec.reporting.tables import facts, human_size, result_table
from hushrec.runs.schema import Summary

WATCH_SECONDS = 2.0
TASK_SECONDS = 60.0
"""Seconds that the SuperLink may take to hand out the task of a new run."""


@federate_commands.command("run")
@click.argument("folder", metavar="SERVER", type=PATH)
@click.option("--resume", is_flag=True, help="Continue the newest run after an interruption.")
@json_option
def run_command(folder: Path, resume: bool, as_json: bool) -> None:
    """Train with the nodes that are connected to a running server.

    Waits for the number of nodes in SERVER/config.toml. Every round is saved under SERVER/runs;
    'hushrec federate status' shows the progress.

    \b
    hushrec federate run films/server
    hushrec federate run films/server --resume
    """
    summary, path = train_on(ServerFolder.open(folder), resume=resume, quiet=as_json)
    if as_json:
        print_json(summary)
        return
    show_summary(summary)
    say(f"model and log: {path}")


def train_on(server: ServerFolder, *, resume: bool, quiet: bool) -> tuple[Summary, Path]:
    """Train with the nodes of a running server; return the summary and the run folder."""
    from hushrec.deployment.flower.programs import begin_run
    from hushrec.deployment.flower.transport import run_on_grid

    policy = server.config.policy
    run = FederatedRun.open(
        server.runs, server.contract, policy, server.partition, server.registered, resume=resume
    )
    started = begin_run(server)
    run = replace(run, node_ids=started.node_ids)
    if not quiet:
        run = replace(run, events=EventLog(run.folder.path / EVENTS, _say_event))
    _say(f"waiting for {policy.nodes} nodes", quiet=quiet)
    summaries: list[Summary] = []
    try:
        with training_display(quiet) as display, polite_stop() as stop:
            run_on_grid(
                started.endpoint,
                started.number,
                TASK_SECONDS,
                lambda link: summaries.append(run.train(link, (display, stop))),
            )
    except StoppedError as stopped:
        command = f"hushrec federate run {server.path} --resume"
        raise StoppedError(f"{stopped}; continue with: {command}") from None
    return summaries[0], run.folder.path


def _say_event(event: Event) -> None:
    """Print enrolments and failures; answers are not printed."""
    what, node = event["event"], event.get("node", "a node")
    if what == "enrolled":
        _say(f"{node} takes part with {event['users']:,} users")
    elif what in ("no answer", "refused", "declined"):
        _say(f"{node}, {event['to']}: {what}: {event['why']}")
    elif what in ("sat out", "excluded"):
        _say(f"{node}, {event['to']}, round {event['round']}: {what}")
    elif what == "lost":
        _say(f"round {event['round']} is lost: {event['why']}")


def show_summary(summary: Summary) -> None:
    """Print the result of a run."""
    console = Console()
    console.print(result_table(summary))
    for line in facts(summary):
        console.print(line, style="dim", highlight=False)


@federate_commands.command("status")
@click.argument("folder", metavar="SERVER", type=PATH)
@click.option("--watch", is_flag=True, help="Refresh every two seconds, until Ctrl-C.")
@json_option
def status_command(folder: Path, watch: bool, as_json: bool) -> None:
    """Show the progress of a server's newest run: rounds, nodes, dropouts, epsilon spent.

    It reads the run's event log, so it works in another terminal, and after the run.

    \b
    hushrec federate status films/server
    hushrec federate status films/server --watch
    hushrec federate status films/server --json
    """
    config = ServerConfig.read(folder)
    newest = newest_run(folder / "runs")
    if newest is None:
        raise RunError(f"{folder} has no run yet: 'hushrec federate run {folder}'")
    if as_json:
        told = {"federation": config.federation, **asdict(status_of(newest))}
        print_json({**told, "summary": newest.read_summary()} if is_finished(newest) else told)
        return
    if not watch:
        Console().print(_table(status_of(newest)))
        if is_finished(newest):
            show_summary(newest.read_summary())
        return
    with Live(console=Console(), auto_refresh=False) as live, suppress(KeyboardInterrupt):
        while True:
            status = status_of(newest)
            live.update(_table(status), refresh=True)
            if status.stage != "training":
                return
            time.sleep(WATCH_SECONDS)


def _table(status: Status) -> Table:
    spent = "" if status.epsilon is None else f", epsilon {status.epsilon:.3g} so far"
    title = f"{status.run}: {status.stage}, round {status.round} of {status.rounds}{spent}"
    caption = (
        f"messages: {human_size(status.up_bytes)} up, {human_size(status.down_bytes)} down; "
        f"{status.strangers} nodes rejected, {status.lost_rounds} rounds lost"
    )
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for name in ("node", "users", "answered", "lost", "sat out", "refused", "last seen"):
        table.add_column(name, justify="left" if name in ("node", "last seen") else "right")
    for name, node in sorted(status.nodes.items()):
        counts = (node.users, node.answered, node.lost, node.sat_out, node.refused)
        seen = "excluded" if node.excluded else (node.last_seen or "")[:19].replace("T", " ")
        table.add_row(name, *(f"{count:,}" for count in counts), seen)
    return table


@federate_commands.command("rehearse")
@click.argument("folder", metavar="[DIR]", required=False, type=PATH)
@click.option("--nodes", "count", type=click.IntRange(2, 50), default=3, show_default=True)
@data_option
@experiment_options
@json_option
def rehearse_command(
    folder: Path | None, count: int, data: str, experiment: ExperimentOptions, as_json: bool
) -> None:
    """Run a whole federation on this machine: server, nodes, TLS, keys; train and recommend.

    The users of one data set are partitioned over nodes, each a process. All files are removed at
    the end, unless DIR is given.

    \b
    hushrec federate rehearse
    hushrec federate rehearse films --nodes 5 --data ml-100k --method pfedrec --rounds 10
    hushrec federate rehearse --nodes 4 --set privacy.mode=distributed --set privacy.epsilon=8
    """
    from hushrec.deployment.flower.processes import stopped_by_signals
    from hushrec.deployment.flower.programs import federation_running

    with stopped_by_signals(), ExitStack() as stack:
        top = folder or Path(stack.enter_context(TemporaryDirectory(prefix="hushrec-"))) / "demo"
        nodes = make_rehearsal(top, data, count, experiment)
        _say(f"{len(nodes)} nodes made; starting them and the server")
        with federation_running(top) as (server, _):
            summary, path = train_on(server.folder, resume=False, quiet=as_json)
        _say("all nodes and the server have ended")
        name = next(iter(nodes))
        with NodeDatabase.open(top / "nodes" / name / "data.node") as store:
            user = store.one("SELECT name FROM users ORDER BY id")
            found = recommend(store, user, 5)
    if as_json:
        print_json({**summary.as_dict(), "user": user, "recommendations": found})
        return
    show_summary(summary)
    say(f"on {name}, for its user {user}:")
    show_recommendations(user, found, as_json=False)
    if folder is not None:
        say(f"model and log: {path}")


def _say(words: str, *, quiet: bool = False) -> None:
    if not quiet:
        say(words, err=True)
