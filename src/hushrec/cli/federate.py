"""``hushrec federate``: ``init``, ``renew``, ``server`` and ``node`` of a federation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from hushrec.cli.display import say_default
from hushrec.cli.options import PATH, SEED, SOURCE, gather, json_option, method_option
from hushrec.cli.terminal import print_json, say
from hushrec.data import Interactions, load
from hushrec.data.partition import Deal
from hushrec.data.reading import read_items
from hushrec.deployment.coordinator.run import Status, newest_run, status_of
from hushrec.deployment.make import (
    FederationSpec,
    ServerAddress,
    make_federation,
    renew_server,
)
from hushrec.deployment.node.database import ImportCounts, NodeDatabase
from hushrec.deployment.node.worker import Worker
from hushrec.deployment.provisioning import NodeFolder, ServerFolder
from hushrec.errors import ConfigError, DataError
from hushrec.federation.contract import Catalogue, Contract, SecureSums
from hushrec.federation.experiment import ExperimentRequest, parse_settings


@click.group("federate")
def federate_commands() -> None:
    """Set up and run a federation: one server, and nodes that keep their users' data.

    \b
    hushrec federate init films --data ml-100k --nodes 3
    hushrec federate server films/server
    hushrec federate node films/nodes/node-1
    """


@dataclass(frozen=True)
class ExperimentOptions:
    """Options that say what the federation trains."""

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
        experiment = request.experiment()
        say_default(request, experiment)
        secure = SecureSums() if self.secure or distributed else None
        return Contract(experiment, catalogue, secure)


@dataclass(frozen=True)
class DataOptions:
    """Options that say where data or items come from."""

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
    click.option("--preset", type=SOURCE, metavar="NAME", help="A set of options that ships."),
    click.option("--rounds", type=int, metavar="N"),
    click.option(
        "--seed", type=SEED, metavar="S", help="Of the experiment and the partition.  [0]"
    ),
    click.option(
        "--set", "pairs", multiple=True, metavar="KEY=VALUE", help="An option; repeatable."
    ),
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
        show_default=True,
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
    click.option("--port", type=click.IntRange(1, 65535), default=8443, show_default=True),
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
    hushrec federate init films --data ratings.csv --nodes 2 --method pfedrec --rounds 20
    hushrec federate init clinics --items items.csv --node hospital-a --node hospital-b \\
        --host recommend.example.org --set privacy.mode=central --set privacy.epsilon=4
    hushrec federate init clinics --items items.csv --nodes 5 --secure \\
        --set privacy.mode=distributed --set privacy.epsilon=4
    """
    data_name, catalogue, data = source.read()
    nodes = _names(count, names)
    federation = FederationSpec(
        name=folder.resolve().name,
        contract=experiment.contract(data_name, catalogue, len(nodes)),
        nodes=nodes,
        address=address,
        data=data,
        partition=source.partition,
    )
    _show_federation(folder, federation, make_federation(folder, federation), as_json)


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
    if as_json:
        print_json({"folder": str(folder), "valid_until": until.isoformat()})
        return
    say(f"{folder / 'server' / 'server.crt'} is valid until {until:%Y-%m-%d}")


@federate_commands.command("server")
@click.argument("folder", metavar="SERVER", type=PATH)
def server_command(folder: Path) -> None:
    """Run the server of a federation in the foreground, until Ctrl-C or a TERM.

    Only nodes whose public keys are in SERVER/nodes may connect, over TLS. Logs are in SERVER/run.

    \b
    hushrec federate server films/server
    """
    from hushrec.deployment.flower.gateway import metrics_served
    from hushrec.deployment.flower.processes import stopped_by_signals
    from hushrec.deployment.flower.programs import server_running

    opened = ServerFolder.open(folder)

    def newest_status() -> Status | None:
        newest = newest_run(opened.runs)
        return None if newest is None else status_of(newest)

    with (
        stopped_by_signals(),
        metrics_served(opened.config.metrics_port, newest_status),
        server_running(opened) as server,
    ):
        at = f"{server.folder.config.listen}:{server.folder.config.port}"
        _say(f"listening at {at}; {len(server.node_ids)} nodes may connect; Ctrl-C stops")
        server.watch()
    _say("stopped")


@federate_commands.command("node")
@click.argument("folder", metavar="NODE", type=PATH)
def node_command(folder: Path) -> None:
    """Run a node of a federation in the foreground, until Ctrl-C or a TERM.

    The node connects to the server, and connects again after a failure. Logs are in NODE/run.

    \b
    hushrec federate node films/nodes/node-1
    """
    from hushrec.deployment.flower.processes import stopped_by_signals
    from hushrec.deployment.flower.programs import run_node

    opened = NodeFolder.open(folder)
    _say(f"{opened.config.name} connects to {opened.config.server}; Ctrl-C stops")
    with stopped_by_signals(), NodeDatabase.open(opened.store) as store:
        run_node(opened, Worker(store, tell=_say, credentials=opened.credentials).answer, _say)
    _say("stopped")


def _say(words: str) -> None:
    say(words, err=True)


def _names(count: int | None, names: tuple[str, ...]) -> tuple[str, ...]:
    if (count is None) == (not names):
        raise ConfigError("name the nodes: --nodes 3, or --node NAME for each")
    if count is None:
        return names
    # Padded with zeros, so that sorted names are in numerical order.
    return tuple(f"node-{number:0{len(str(count))}d}" for number in range(1, count + 1))


def _show_federation(
    folder: Path,
    federation: FederationSpec,
    nodes: Mapping[str, ImportCounts | None],
    as_json: bool,
) -> None:
    if as_json:
        print_json(
            {
                "folder": str(folder),
                "federation": federation.name,
                "server": federation.address.netloc,
                "method": federation.contract.experiment.method,
                "settings": federation.contract.settings_digest,
                "items": len(federation.contract.catalogue.items),
                "catalogue": federation.contract.catalogue.digest,
                "nodes": {
                    name: None if taken is None else vars(taken) for name, taken in nodes.items()
                },
            }
        )
        return
    say(f"{folder}/server")
    for name, taken in nodes.items():
        given = (
            "imports its own data"
            if taken is None
            else f"{taken.users:,} users, {taken.rows:,} interactions"
        )
        say(f"{folder}/nodes/{name}  {given}")
    say(f"{folder}/README.txt lists what to copy where, and what to run next")
