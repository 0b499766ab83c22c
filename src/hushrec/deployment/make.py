"""Make all folders of a federation: keys, configuration and, for a rehearsal, partitioned data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hushrec.data.interactions import Interactions
from hushrec.data.partition import Deal, deal_users
from hushrec.data.splitting import make_split
from hushrec.deployment.coordinator.session import Holding, Policy
from hushrec.deployment.node.database import ImportCounts, NodeDatabase
from hushrec.deployment.provisioning import (
    AUTHORITY,
    CONTRACT,
    Authority,
    NodeConfig,
    ServerConfig,
    ServerFolder,
    check_node_names,
    expiry,
    hosts_of,
    identity_pem,
    is_address,
    new_node_key,
    write_identities,
    write_partition,
)
from hushrec.errors import ConfigError
from hushrec.federation.contract import Contract
from hushrec.federation.setup import set_up
from hushrec.io.files import atomic_folder, require_empty, write_bytes
from hushrec.secagg.keys import Identity
from hushrec.streams import Streams

AUTHORITY_KEY = "ca.key"
HOST = re.compile(
    r"(?=.{1,253}$)([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)(\.[A-Za-z0-9-]{1,63})*"
)
LOCAL = ("localhost", "127.0.0.1", "::1")
ANY_ADDRESS = "0.0.0.0"  # noqa: S104 - nodes on other machines must reach the server


@dataclass(frozen=True)
class ServerAddress:
    """Host names and port of the server."""

    hosts: tuple[str, ...] = ("localhost",)
    """Names and addresses of its certificate; nodes connect to the first."""
    port: int = 8443

    def __post_init__(self) -> None:
        for host in self.hosts:
            if not (HOST.fullmatch(host) or is_address(host)):
                raise ConfigError(
                    f"'{host}' is not a host name or IP address: use one like "
                    "recommend.example.org or 10.0.0.5, without a port"
                )

    @property
    def listen(self) -> str:
        """Address to listen on: the loopback one if all hosts are local, else any."""
        return "127.0.0.1" if set(self.hosts) <= set(LOCAL) else ANY_ADDRESS

    @property
    def netloc(self) -> str:
        """Host and port that nodes connect to."""
        host = f"[{self.hosts[0]}]" if ":" in self.hosts[0] else self.hosts[0]
        return f"{host}:{self.port}"


@dataclass(frozen=True)
class FederationSpec:
    """What `make_federation` makes."""

    name: str
    contract: Contract
    nodes: tuple[str, ...]
    address: ServerAddress = ServerAddress()
    data: Interactions | None = None
    """Data of all users, which a rehearsal partitions over the nodes; None otherwise."""
    partition: Deal = "random"

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ConfigError("a federation needs at least one node")
        check_node_names(list(self.nodes))
        self.contract.check_nodes(len(self.nodes))


def make_federation(folder: Path, federation: FederationSpec) -> dict[str, ImportCounts | None]:
    """Make all folders atomically; return the data imported into each node, None if it has none.

    An existing folder is not overwritten.
    """
    require_empty(folder)
    # Errors of the experiment are raised before a folder exists.
    shares = _shares(federation)
    with atomic_folder(folder, secret=True) as fresh:
        return _write(fresh, federation, shares)


def renew_server(folder: Path) -> datetime:
    """Replace the server's certificate and key, for the same host names; return its expiry."""
    authority = Authority.read(folder / "ca" / AUTHORITY, folder / "ca" / AUTHORITY_KEY)
    server = ServerFolder(folder / "server", ServerConfig.read(folder / "server"))
    certificate, key = authority.server(hosts_of(server.certificate))
    for path, text in ((server.key, key), (server.certificate, certificate)):
        write_bytes(path, text, secret=True)
    return expiry(server.certificate)


@dataclass(frozen=True)
class _Shares:
    """Users and silos, partitioned over nodes."""

    node: NDArray[np.int64]
    """Index of the node of each user."""
    silos: NDArray[np.int32] | None

    def users(self, number: int) -> NDArray[np.int64]:
        """Return the indices of a node's users in the data."""
        return np.flatnonzero(self.node == number)

    def holding(self, number: int) -> Holding:
        """Return the indices of a node's users and clients, in the order of its database."""
        users = self.users(number)
        clients = users if self.silos is None else np.unique(self.silos[users]).astype(np.int64)
        return Holding(users, clients)


def _shares(federation: FederationSpec) -> _Shares | None:
    data, experiment = federation.data, federation.contract.experiment
    if data is None:
        return None
    split = make_split(data, experiment.split, Streams(experiment.seed), experiment.silos)
    set_up(experiment, split)
    count, holders = len(federation.nodes), split.holders
    node = deal_users(data.n_users, count, federation.partition, experiment.seed, holders)
    return _Shares(node, holders)


def _write(
    folder: Path, federation: FederationSpec, shares: _Shares | None
) -> dict[str, ImportCounts | None]:
    authority = Authority.generate(federation.name)
    identities = {name: Identity.generate() for name in federation.nodes}
    public = {name: identity.public for name, identity in identities.items()}
    (_directory(folder / "ca") / AUTHORITY).write_bytes(authority.pem)
    write_bytes(folder / "ca" / AUTHORITY_KEY, authority.key_pem, secret=True)
    server = _directory(folder / "server")
    _write_server(server, federation, authority)
    write_identities(server, federation.name, public)
    if shares is not None:
        names = enumerate(federation.nodes)
        write_partition(server, {name: shares.holding(number) for number, name in names})
    _directory(folder / "nodes")
    imported = {}
    for number, (name, identity) in enumerate(identities.items()):
        own = _directory(folder / "nodes" / name)
        private, public_key = new_node_key(name)
        write_bytes(own / "node.key", private, secret=True)
        (server / "nodes" / f"{name}.pub").write_bytes(public_key)
        write_bytes(own / "identity.key", identity_pem(identity), secret=True)
        write_identities(own, federation.name, public)
        (own / AUTHORITY).write_bytes(authority.pem)
        server_address = federation.address.netloc
        config = NodeConfig(federation=federation.name, name=name, server=server_address)
        config.write(own)
        with NodeDatabase.create(own / config.store, name, federation.contract) as store:
            imported[name] = _import(store, number, federation.data, shares)
    (folder / "README.txt").write_text(_readme(federation), "utf-8")
    return imported


def _write_server(server: Path, federation: FederationSpec, authority: Authority) -> None:
    certificate, key = authority.server(federation.address.hosts)
    (server / "server.crt").write_bytes(certificate)
    write_bytes(server / "server.key", key, secret=True)
    (server / AUTHORITY).write_bytes(authority.pem)
    federation.contract.write(server / CONTRACT)
    _directory(server / "nodes")
    count = len(federation.nodes)
    ServerConfig(
        federation=federation.name,
        listen=federation.address.listen,
        port=federation.address.port,
        # A run goes on while one node is away.
        policy=Policy(nodes=count, min_nodes=min(count, max(2, count - 1))),
    ).write(server)


def _import(
    store: NodeDatabase, number: int, data: Interactions | None, shares: _Shares | None
) -> ImportCounts | None:
    """Import the interactions of a node's users into its database."""
    if data is None or shares is None:
        return None
    return store.add_interactions(
        data.select(np.isin(data.user, shares.users(number))), shares.silos
    )


def _directory(path: Path) -> Path:
    path.mkdir(mode=0o700)
    return path


def _readme(federation: FederationSpec) -> str:
    first = federation.nodes[0]
    fill = (
        "The databases of the nodes already hold the data of their users."
        if federation.data
        else f"Each node then imports its own data:\n\n"
        f"    hushrec node import {first}/data.node interactions.csv"
    )
    return f"""The federation '{federation.name}'
{"=" * (len(federation.name) + 17)}

Copy each folder as a whole to one machine, over a channel that nobody else can read:

    server/            to the server, which nodes connect to at {federation.address.netloc}
    nodes/NAME/        to the node of that name: {", ".join(federation.nodes)}
    ca/                to no machine. It signs the server's certificate: keep it off the server.

A node's folder holds its secret keys and its users' data. The party that made this folder has seen
all keys: delete nodes/ here once the folders are copied. The server must not have the folder of any
node: secure aggregation hides a node from the server only while the server does not know its keys.

{fill}

Then, with hushrec and its extra "flower" on each machine (pip install 'hushrec[flower]'):

    hushrec federate server server          on the server
    hushrec federate node {first}{" " * max(1, 18 - len(first))}on that node, and so on

Both run in the foreground until they are stopped. 'hushrec federate renew' renews the server's
certificate from this folder; docs/deployment.md of hushrec describes more.
"""
