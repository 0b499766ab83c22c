"""``hushrec federate``: make the folders of a federation, run its server and nodes, and train."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from rich.live import Live

from hushrec.cli.display import (
    forecast_lines,
    print_default_method,
    status_table,
    status_tables,
)
from hushrec.cli.node import backup_folder_command, restore_folder_command
from hushrec.cli.operating import operate, train_on
from hushrec.cli.options import (
    PATH,
    SEED,
    SOURCE,
    data_option,
    gather,
    json_option,
    method_option,
    preset_option,
    set_option,
)
from hushrec.cli.serving import show_recommendations
from hushrec.cli.terminal import Console, echo, echo_err, exit_if_not_applied, show
from hushrec.data import Interactions, load
from hushrec.data.partition import Deal
from hushrec.data.reading import read_items
from hushrec.deployment.coordinator import planning
from hushrec.deployment.coordinator import run as runs
from hushrec.deployment.make import FederationSpec, ServerAddress, make_federation, renew_server
from hushrec.deployment.node.database import ImportCounts, NodeDatabase
from hushrec.deployment.node.training import recommend
from hushrec.deployment.node.worker import Worker
from hushrec.deployment.provisioning import NodeFolder, ServerConfig, ServerFolder
from hushrec.errors import ConfigError, DataError, RunError
from hushrec.federation.contract import Catalogue, Contract, SecureSums
from hushrec.federation.experiment import ExperimentRequest, parse_settings
from hushrec.reporting.tables import summary_lines

WATCH_SECONDS = 2.0


@click.group("federate")
def federate_commands() -> None:
    """Set up and run a federation, whose nodes keep their users' data.

    \b
    hushrec federate init films --data ml-100k --nodes 3
    hushrec federate server films/server
    hushrec federate node films/nodes/node-1
    """


federate_commands.add_command(backup_folder_command)
federate_commands.add_command(restore_folder_command)


@dataclass(frozen=True)
class ExperimentOptions:
    """Options of the experiment that a federation trains."""

    method: str | None
    preset: str | None
    rounds: int | None
    seed: int | None
    pairs: tuple[str, ...]
    secure: bool = False

    def contract(self, data: str, catalogue: Catalogue, nodes: int) -> Contract:
        """Return the contract of a federation with so many nodes."""
        settings = parse_settings(self.pairs)
        distributed = settings.get("privacy.mode") == "distributed"
        if distributed:
            settings = {"privacy.nodes": nodes, **settings}
        request = ExperimentRequest(
            data,
            self.method,
            preset=self.preset,
            settings=settings,
            rounds=self.rounds,
            seed=self.seed,
        )
        experiment = request.experiment().resolved(None)
        print_default_method(request, experiment)
        secure = SecureSums() if self.secure or distributed else None
        return Contract(experiment, catalogue, secure)


@dataclass(frozen=True)
class DataOptions:
    """Options of the data or the public list of items."""

    data: str | None
    partition: Deal
    items: Path | None
    item_features: tuple[str, ...]

    def read(self) -> tuple[str, Catalogue, Interactions | None]:
        """Return the name of the data, its catalogue, and the interactions of a rehearsal."""
        if self.data is not None:
            if self.item_features:
                raise ConfigError("--item-feature is for nodes that import their own data")
            data = load(self.data, items=self.items)
            # Other machines do not have the path.
            name = Path(self.data).stem if Path(self.data).is_file() else self.data
            return name, Catalogue.of(data), data
        if self.items is None:
            raise ConfigError(
                "give --data for a rehearsal with one data set, or --items with the public list of "
                "items where each node imports its own data"
            )
        listed = read_items(self.items)
        if len(listed.ids) < 2:
            raise DataError(f"{self.items}: a list of items needs at least two")
        features = listed.described(self.item_features)
        return self.items.stem, Catalogue(listed.ids, listed.titles, features), None


experiment_options = gather(
    "experiment",
    ExperimentOptions,
    method_option,
    preset_option,
    click.option("--rounds", type=int, metavar="N"),
    click.option("--seed", type=SEED, metavar="S", help="Of experiment and partition.  [0]"),
    set_option,
    click.option(
        "--secure",
        is_flag=True,
        help="Secure aggregation: the server sees sums over all nodes only; implied by "
        "privacy.mode=distributed.",
    ),
)


def make_rehearsal(
    folder: Path, data: str, count: int, experiment: ExperimentOptions
) -> dict[str, ImportCounts | None]:
    """Make a federation of one data set's users, on a free port of this machine."""
    from hushrec.deployment.flower.processes import free_port

    name, catalogue, rows = DataOptions(data, "random", None, ()).read()
    contract = experiment.contract(name, catalogue, count)
    address = ServerAddress(port=free_port())
    federation = FederationSpec(folder.name, contract, _names(count, ()), address, rows)
    return make_federation(folder, federation)


@federate_commands.command("init")
@click.argument("folder", metavar="DIR", type=PATH)
@experiment_options
@gather(
    "source",
    DataOptions,
    click.option(
        "--data",
        type=SOURCE,
        metavar="NAME|FILE",
        help="Rehearsal: partition the users of one data set over the nodes.",
    ),
    click.option(
        "--partition",
        type=click.Choice(["random", "in-order"]),
        default="random",
        help="Users of a node in a rehearsal: drawn by the seed, or in the order of the file.",
    ),
    click.option(
        "--items",
        type=PATH,
        metavar="FILE",
        help="Public list of items: of the nodes' own data, or of the data in --data.",
    ),
    click.option(
        "--item-feature",
        "item_features",
        multiple=True,
        metavar="COLUMN",
        help="Column of --items; repeatable.",
    ),
)
@click.option(
    "--nodes", "count", type=click.IntRange(1, 1000), help="Number of nodes: node-1, node-2, …"
)
@click.option(
    "--node",
    "names",
    multiple=True,
    metavar="NAME",
    help="Name of a node, in place of --nodes; repeatable.",
)
@gather(
    "address",
    ServerAddress,
    click.option(
        "--host",
        "hosts",
        multiple=True,
        default=("localhost",),
        show_default="localhost",
        metavar="HOST",
        help="Name or address of the server; nodes connect to the first. Repeatable.",
    ),
    click.option("--port", type=click.IntRange(1, 65535), default=8443),
)
@json_option
def init_command(
    folder: Path,
    experiment: ExperimentOptions,
    source: DataOptions,
    count: int | None,
    names: tuple[str, ...],
    address: ServerAddress,
    as_json: bool,
) -> None:
    """Make the folders of a server and its nodes: keys, certificates, databases.

    Each folder is copied to one machine; README.txt lists which. Columns of --items are declared
    as for `hushrec data import`; --set takes the keys of `hushrec train`, privacy included.

    \b
    hushrec federate init films --data ml-100k --nodes 3
    hushrec federate init clinics --items items.csv --node hospital-a --node hospital-b \\
        --host recommend.example.org --set privacy.mode=central --set privacy.epsilon=4
    hushrec federate init clinics --items items.csv --nodes 5 --secure \\
        --set privacy.mode=distributed --set privacy.epsilon=4
    """
    data_name, catalogue, data = source.read()
    nodes = _names(count, names)
    contract = experiment.contract(data_name, catalogue, len(nodes))
    name = folder.resolve().name
    federation = FederationSpec(name, contract, nodes, address, data, source.partition)
    imported = make_federation(folder, federation)
    made = {
        "folder": str(folder),
        "federation": name,
        "server": address.netloc,
        "method": contract.experiment.method,
        "settings": contract.settings_digest,
        "items": len(catalogue.items),
        "catalogue": catalogue.digest,
        "nodes": {node: rows and asdict(rows) for node, rows in imported.items()},
    }
    lines = [f"{folder}/server"]
    for node, rows in imported.items():
        given = f"{rows.users:,} users, {rows.rows:,} interactions" if rows else None
        lines.append(f"{folder}/nodes/{node}  {given or 'imports its own data'}")
    lines.append(f"{folder}/README.txt lists what to copy where, and what to run next")
    show(as_json, made, *lines)


@federate_commands.command("renew")
@click.argument("folder", metavar="DIR", type=PATH)
@json_option
def renew_command(folder: Path, as_json: bool) -> None:
    """Make a new certificate for the server, with the authority's key in DIR/ca.

    Copy DIR/server/server.crt and server.key to the server and restart it. Nodes need no change.

    \b
    hushrec federate renew films
    """
    until = renew_server(folder)
    text = f"{folder / 'server' / 'server.crt'} is valid until {until:%Y-%m-%d}"
    show(as_json, {"folder": str(folder), "valid_until": until.isoformat()}, text)


@federate_commands.command("plan")
@click.argument("folder", metavar="SERVER", type=PATH)
@click.option("--users", type=click.IntRange(1), help="Of all nodes.  [those of a rehearsal]")
@gather(
    "rates",
    planning.LinkRates,
    click.option(
        "--exchange-seconds",
        type=click.FloatRange(0),
        default=planning.LinkRates.exchange_seconds,
        help="Of an empty request and its reply.",
    ),
    click.option(
        "--megabytes-per-second",
        type=click.FloatRange(0, min_open=True),
        default=planning.LinkRates.megabytes_per_second,
        help="Of the coordinator's connection, which all nodes share.",
    ),
)
@json_option
def plan_command(folder: Path, users: int | None, rates: planning.LinkRates, as_json: bool) -> None:
    """Forecast a run before it: rounds, exchanges, bytes, memory and time of the messages.

    It follows from the contract and the list of items; nothing is sent and no node is asked.
    Bytes from nodes are an upper bound where sums are in the clear.

    \b
    hushrec federate plan films/server
    hushrec federate plan films/server --users 6000 --megabytes-per-second 2 --json
    """
    server = ServerFolder.open(folder)
    partition = server.partition
    if users is None and partition is not None:
        users = sum(len(holding.users) for holding in partition.values())
    if users is None:
        raise ConfigError("say how many users the nodes hold together: --users N")
    found = planning.forecast(server.contract, len(server.public_keys), users, rates)
    show(as_json, asdict(found), *forecast_lines(found, rates))


@federate_commands.command("server")
@click.argument("folder", metavar="SERVER", type=PATH)
def server_command(folder: Path) -> None:
    """Run the server of a federation in the foreground, until Ctrl-C or a TERM.

    Only nodes whose public keys are in SERVER/nodes may connect, over TLS. The SuperLink is started
    anew when it does nothing. A node that was away at the end of the newest run gets the model when
    it is back. Logs are in SERVER/run.

    \b
    hushrec federate server films/server
    """
    from hushrec.deployment.flower.gateway import metrics_served
    from hushrec.deployment.flower.processes import stopped_by_signals
    from hushrec.deployment.flower.programs import server_running

    opened = ServerFolder.open(folder)
    for sentence in opened.expiring:
        echo_err(sentence)

    def newest_status() -> runs.Status | None:
        newest = runs.newest_run(opened.runs)
        return None if newest is None else runs.status_of(newest)

    with (
        stopped_by_signals(),
        metrics_served(opened.config.metrics_port, newest_status),
        server_running(opened) as server,
    ):
        at = f"{server.folder.config.listen}:{server.folder.config.port}"
        echo_err(f"listening at {at}; {len(server.node_ids)} nodes may connect; Ctrl-C stops")
        operate(server)
    echo_err("stopped")


@federate_commands.command("node")
@click.argument("folder", metavar="NODE", type=PATH)
def node_command(folder: Path) -> None:
    """Run a node of a federation in the foreground, until Ctrl-C or a TERM.

    The node connects to the server, and connects again after a failure; its SuperNode is started
    anew when it does nothing. Logs are in NODE/run.

    \b
    hushrec federate node films/nodes/node-1
    """
    from hushrec.deployment.flower.processes import stopped_by_signals
    from hushrec.deployment.flower.programs import run_node

    opened = NodeFolder.open(folder)
    for sentence in opened.expiring:
        echo_err(sentence)
    echo_err(f"{opened.config.name} connects to {opened.config.server}; Ctrl-C stops")
    with stopped_by_signals(), NodeDatabase.open(opened.store) as store:
        store.connection.require_sound()
        run_node(
            opened, Worker(store, tell=echo_err, credentials=opened.credentials).answer, echo_err
        )
    echo_err("stopped")


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
    show(as_json, summary, *summary_lines(summary), f"model and log: {path}")
    exit_if_not_applied(summary)


@federate_commands.command("status")
@click.argument("folder", metavar="SERVER", type=PATH)
@click.option("--watch", is_flag=True, help="Refresh every two seconds, until Ctrl-C.")
@json_option
def status_command(folder: Path, watch: bool, as_json: bool) -> None:
    """Show the progress of a server's newest run: rounds, nodes, dropouts, epsilon spent.

    It reads the run's event log, so it works in another terminal, and after the run.

    \b
    hushrec federate status films/server --watch
    """
    config = ServerConfig.read(folder)
    newest = runs.newest_run(folder / "runs")
    if newest is None:
        raise RunError(f"{folder} has no run yet: 'hushrec federate run {folder}'")
    if as_json or not watch:
        status = runs.status_of(newest)
        expiring = ServerFolder(folder, config).expiring
        for sentence in expiring:
            echo_err(sentence)
        known = {"federation": config.federation, "expiring": expiring, **asdict(status)}
        summary = newest.read_summary() if runs.is_finished(newest) else None
        if summary is None:
            show(as_json, known, *status_tables(status))
        else:
            shown = (*status_tables(status), *summary_lines(summary))
            show(as_json, {**known, "summary": summary}, *shown)
        return
    with Live(console=Console(), auto_refresh=False) as live, suppress(KeyboardInterrupt):
        while True:
            status = runs.status_of(newest)
            live.update(status_table(status), refresh=True)
            if status.stage != "training":
                return
            time.sleep(WATCH_SECONDS)


@federate_commands.command("rehearse")
@click.argument("folder", metavar="[DIR]", required=False, type=PATH)
@click.option("--nodes", "count", type=click.IntRange(2, 50), default=3)
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
        echo_err(f"{len(nodes)} nodes made; starting them and the server")
        with federation_running(top) as (server, _):
            summary, path = train_on(server.folder, resume=False, quiet=as_json)
        echo_err("all nodes and the server have ended")
        name = next(iter(nodes))
        with NodeDatabase.open(top / "nodes" / name / "data.node") as store:
            user = store.one("SELECT name FROM users ORDER BY id")
            found = recommend(store, user, 5)
    whole = {**summary.as_dict(), "user": user, "recommendations": found}
    show(as_json, whole, *summary_lines(summary), f"on {name}, for its user {user}:")
    if not as_json:
        show_recommendations(user, found, as_json=False)
        echo("" if folder is None else f"model and log: {path}")
    exit_if_not_applied(summary)


def _names(count: int | None, names: tuple[str, ...]) -> tuple[str, ...]:
    if (count is None) == (not names):
        raise ConfigError("name the nodes: --nodes 3, or --node NAME for each")
    if count is None:
        return names
    # Padded with zeros, so that sorted names are in numerical order.
    return tuple(f"node-{number:0{len(str(count))}d}" for number in range(1, count + 1))
