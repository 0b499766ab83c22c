"""``hushrec federate``: a federation on real machines, from its keys to its processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from hushrec.cli.options import PLACE, SEED, SOURCE, gather, json_option
from hushrec.cli.terminal import print_json, say
from hushrec.data import Interactions, load
from hushrec.data.partition import Deal
from hushrec.data.reading import read_items
from hushrec.deployment.coordinator.run import newest_run
from hushrec.deployment.coordinator.status import Status, status_of
from hushrec.deployment.node.database import NodeStore
from hushrec.deployment.node.worker import Worker
from hushrec.deployment.provisioning.folders import NodeFolder, ServerFolder
from hushrec.deployment.provisioning.make import (
    Federation,
    Made,
    Place,
    make_federation,
    renew_server,
)
from hushrec.errors import ConfigError, DataError
from hushrec.federation.contract import Agreement, Catalogue, SecureSums
from hushrec.federation.experiment import make_experiment, parse_settings


@click.group("federate")
def federate_commands() -> None:
    """Set up and run a federation: one server, and nodes that keep their users' data.

    \b
    hushrec federate init films --data ml-100k --nodes 3
    hushrec federate server films/server
    hushrec federate node films/nodes/node-1
    """


@dataclass(frozen=True)
class Trained:
    """What the federation trains."""

    method: str
    preset: str | None
    rounds: int | None
    seed: int | None
    pairs: tuple[str, ...]
    secure: bool = False

    def agreement(self, data: str, catalogue: Catalogue, nodes: int) -> Agreement:
        """Return it as every one of so many nodes will have it."""
        settings = parse_settings(self.pairs)
        distributed = settings.get("privacy.mode") == "distributed"
        if distributed:
            settings = {"privacy.nodes": nodes, **settings}
        experiment = make_experiment(
            data,
            self.method,
            preset=self.preset,
            settings=settings,
            rounds=self.rounds,
            seed=self.seed,
        )
        secure = SecureSums() if self.secure or distributed else None
        return Agreement(experiment, catalogue, secure)


@dataclass(frozen=True)
class Brought:
    """Where data or items come from."""

    data: str | None
    deal: Deal
    items: Path | None
    item_features: tuple[str, ...]

    def read(self) -> tuple[str, Catalogue, Interactions | None]:
        """Return the name of the data, what is public of it, and a rehearsal's rows."""
        if self.data is not None:
            if self.item_features:
                raise ConfigError("--item-feature is for nodes that bring their own data")
            data = load(self.data, items=self.items)
            # A path of this machine is nothing to the others.
            name = Path(self.data).stem if Path(self.data).is_file() else self.data
            return name, Catalogue.of(data), data
        if self.items is None:
            raise ConfigError(
                "say where the items come from: --data for a rehearsal with one file, or --items "
                "with the public list of them, where each node brings its own data"
            )
        listed = read_items(self.items)
        if len(listed.ids) < 2:
            raise DataError(f"{self.items}: a list of items needs two or more")
        features = listed.described(self.item_features)
        return self.items.stem, Catalogue(listed.ids, listed.titles, features), None


trained_options = gather(
    "trained",
    Trained,
    click.option("--method", default="fednext", show_default=True, metavar="NAME"),
    click.option("--preset", type=SOURCE, metavar="NAME", help="A set of options that ships."),
    click.option("--rounds", type=int, metavar="N"),
    click.option(
        "--seed", type=SEED, metavar="S", help="Of the experiment and of the dealing.  [0]"
    ),
    click.option(
        "--set", "pairs", multiple=True, metavar="KEY=VALUE", help="An option; repeatable."
    ),
    click.option(
        "--secure",
        is_flag=True,
        help="Let the server see sums over all nodes only; privacy.mode=distributed implies it.",
    ),
)


def make_rehearsal(folder: Path, data: str, count: int, trained: Trained) -> Made:
    """Make a federation of one data set's users, on a free port of this machine."""
    from hushrec.deployment.flower.processes import free_port

    name, catalogue, rows = Brought(data, "random", None, ()).read()
    agreement, place = trained.agreement(name, catalogue, count), Place(port=free_port())
    federation = Federation(folder.name, agreement, _names(count, ()), place, rows)
    return make_federation(folder, federation)


@federate_commands.command("init")
@click.argument("folder", metavar="DIR", type=PLACE)
@trained_options
@gather(
    "brought",
    Brought,
    click.option(
        "--data",
        type=SOURCE,
        metavar="NAME|FILE",
        help="Rehearsal: deal the users of one file out over nodes.",
    ),
    click.option(
        "--deal",
        type=click.Choice(["random", "in-order"]),
        default="random",
        show_default=True,
        help="Who goes where in a rehearsal: drawn by the seed, or as they come in the file.",
    ),
    click.option(
        "--items",
        type=PLACE,
        metavar="FILE",
        help="Public list of items: of the nodes' own data, or of the file in --data.",
    ),
    click.option(
        "--item-feature",
        "item_features",
        multiple=True,
        metavar="COLUMN",
        help="Column of --items; repeatable.",
    ),
)
@click.option("--nodes", "count", type=click.IntRange(1, 1000), help="How many: node-1, node-2, …")
@click.option("--node", "names", multiple=True, metavar="NAME", help="Or each by name; repeatable.")
@gather(
    "place",
    Place,
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
    trained: Trained,
    brought: Brought,
    count: int | None,
    names: tuple[str, ...],
    place: Place,
    as_json: bool,
) -> None:
    """Make a folder with everything for one server and its nodes: keys, certificates, stores.

    Each folder in it goes to one machine; README.txt says which. Columns of --items are declared as
    for `hushrec data import`; sections for --set are those of `hushrec train`, privacy among them.

    \b
    hushrec federate init films --data ml-100k --nodes 3
    hushrec federate init films --data ratings.csv --nodes 2 --method pfedrec --rounds 20
    hushrec federate init clinics --items items.csv --node hospital-a --node hospital-b \\
        --host recommend.example.org --set privacy.mode=central --set privacy.epsilon=4
    hushrec federate init clinics --items items.csv --nodes 5 --secure \\
        --set privacy.mode=distributed --set privacy.epsilon=4
    """
    data_name, catalogue, data = brought.read()
    nodes = _names(count, names)
    federation = Federation(
        name=folder.resolve().name,
        agreement=trained.agreement(data_name, catalogue, len(nodes)),
        nodes=nodes,
        place=place,
        data=data,
        deal=brought.deal,
    )
    _show_made(make_federation(folder, federation), federation, as_json)


@federate_commands.command("renew")
@click.argument("folder", metavar="DIR", type=PLACE)
@json_option
def renew_command(folder: Path, as_json: bool) -> None:
    """Make a new certificate for the server, with the authority's key in DIR/ca.

    Copy DIR/server/server.crt and server.key to the server and start it again; nodes need nothing.

    \b
    hushrec federate renew films
    """
    until = renew_server(folder)
    if as_json:
        print_json({"folder": str(folder), "valid_until": until.isoformat()})
        return
    say(f"{folder / 'server' / 'server.crt'} holds until {until:%Y-%m-%d}")


@federate_commands.command("server")
@click.argument("folder", metavar="SERVER", type=PLACE)
def server_command(folder: Path) -> None:
    """Run the server of a federation in the foreground, until Ctrl-C or a TERM.

    Nodes whose public keys are in SERVER/nodes may connect, over TLS, and nobody else. Logs are in
    SERVER/run.

    \b
    hushrec federate server films/server
    """
    from hushrec.deployment.flower.processes import stopped_by_signals
    from hushrec.deployment.flower.programs import server_running
    from hushrec.deployment.flower.prometheus import metrics_served

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
@click.argument("folder", metavar="NODE", type=PLACE)
def node_command(folder: Path) -> None:
    """Run a node of a federation in the foreground, until Ctrl-C or a TERM.

    It looks for the server until it finds it, and again when the server was away. Logs are in
    NODE/run.

    \b
    hushrec federate node films/nodes/node-1
    """
    from hushrec.deployment.flower.processes import stopped_by_signals
    from hushrec.deployment.flower.programs import run_node

    opened = NodeFolder.open(folder)
    _say(f"{opened.config.name} connects to {opened.config.server}; Ctrl-C stops")
    with stopped_by_signals(), NodeStore.open(opened.store) as store:
        run_node(opened, Worker(store, tell=_say, member=opened.member).answer, _say)
    _say("stopped")


def _say(words: str) -> None:
    say(words, err=True)


def _names(count: int | None, names: tuple[str, ...]) -> tuple[str, ...]:
    if (count is None) == (not names):
        raise ConfigError("say which nodes there are: --nodes 3, or --node NAME for each")
    if count is None:
        return names
    # In the order of their numbers also where names are sorted.
    return tuple(f"node-{number:0{len(str(count))}d}" for number in range(1, count + 1))


def _show_made(made: Made, federation: Federation, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "folder": str(made.folder),
                "federation": federation.name,
                "server": federation.place.address,
                "method": federation.agreement.experiment.method,
                "settings": federation.agreement.settings_digest,
                "items": len(federation.agreement.catalogue.items),
                "catalogue": federation.agreement.catalogue.digest,
                "nodes": {
                    name: None if taken is None else vars(taken)
                    for name, taken in made.nodes.items()
                },
            }
        )
        return
    say(f"{made.folder}/server")
    for name, taken in made.nodes.items():
        given = (
            "brings its own data"
            if taken is None
            else f"{taken.users:,} users, {taken.rows:,} interactions"
        )
        say(f"{made.folder}/nodes/{name}  {given}")
    say(f"{made.folder}/README.txt says what to copy where, and what to run next")
