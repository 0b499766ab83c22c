"""All folders of a federation, made at once: keys, configuration, and for a rehearsal the data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hushrec.data.interactions import Interactions
from hushrec.data.partition import Deal, deal_users
from hushrec.data.splitting import make_split
from hushrec.deployment.coordinator.policy import Rules
from hushrec.deployment.coordinator.roster import Holding
from hushrec.deployment.node.database import NodeStore, Taken
from hushrec.deployment.provisioning.folders import (
    AGREEMENT,
    AUTHORITY,
    NodeConfig,
    ServerConfig,
    ServerFolder,
    check_node_names,
    write_dealt,
    write_identities,
)
from hushrec.deployment.provisioning.keys import (
    Authority,
    expiry,
    hosts_of,
    identity_pem,
    is_address,
    new_node_key,
)
from hushrec.errors import ConfigError
from hushrec.federation.contract import Agreement
from hushrec.federation.setup import plan_privacy
from hushrec.io.files import atomic_folder, require_empty, write_bytes
from hushrec.secagg.keys import Identity
from hushrec.streams import Streams

AUTHORITY_KEY = "ca.key"
HOST = re.compile(
    r"(?=.{1,253}$)([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)(\.[A-Za-z0-9-]{1,63})*"
)
LOCAL = ("localhost", "127.0.0.1", "::1")
ANYWHERE = "0.0.0.0"  # noqa: S104 - a server that others are told of awaits them


@dataclass(frozen=True)
class Place:
    """Where the server is."""

    hosts: tuple[str, ...] = ("localhost",)
    """Names and addresses it is known by; nodes are told the first."""
    port: int = 8443

    def __post_init__(self) -> None:
        for host in self.hosts:
            if not (HOST.fullmatch(host) or is_address(host)):
                raise ConfigError(
                    f"'{host}' is no name or address of a machine: use one like "
                    "recommend.example.org or 10.0.0.5, without a port"
                )

    @property
    def listen(self) -> str:
        """The address to await nodes at: none but this machine's own unless it has others."""
        return "127.0.0.1" if set(self.hosts) <= set(LOCAL) else ANYWHERE

    @property
    def address(self) -> str:
        """What nodes connect to."""
        host = f"[{self.hosts[0]}]" if ":" in self.hosts[0] else self.hosts[0]
        return f"{host}:{self.port}"


@dataclass(frozen=True)
class Federation:
    """What is to be made."""

    name: str
    agreement: Agreement
    nodes: tuple[str, ...]
    place: Place = Place()
    data: Interactions | None = None
    """Of a rehearsal: everybody's, to be dealt out."""
    deal: Deal = "random"

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ConfigError("a federation needs a node or more")
        check_node_names(list(self.nodes))
        self.agreement.check_nodes(len(self.nodes))


@dataclass(frozen=True)
class Made:
    """What was made."""

    folder: Path
    nodes: Mapping[str, Taken | None]
    """What each node was given of the data; None where it brings its own."""


def make_federation(folder: Path, federation: Federation) -> Made:
    """Make all folders; they appear together or not at all, and nothing is overwritten."""
    require_empty(folder)
    # What can be refused is refused before there is a folder.
    shares = _shares(federation)
    with atomic_folder(folder, secret=True) as fresh:
        given = _write(fresh, federation, shares)
    return Made(folder, given)


def renew_server(folder: Path) -> datetime:
    """Give the server a new certificate with a new key, for the names of the old one."""
    authority = Authority.read(folder / "ca" / AUTHORITY, folder / "ca" / AUTHORITY_KEY)
    server = ServerFolder(folder / "server", ServerConfig.read(folder / "server"))
    certificate, key = authority.server(hosts_of(server.certificate))
    for path, text in ((server.key, key), (server.certificate, certificate)):
        write_bytes(path, text, secret=True)
    return expiry(server.certificate)


@dataclass(frozen=True)
class _Shares:
    """Who goes where."""

    node: NDArray[np.int64]
    """Of each user."""
    silos: NDArray[np.int32] | None

    def users(self, number: int) -> NDArray[np.int64]:
        """Return the users of a node, as they are numbered in the file."""
        return np.flatnonzero(self.node == number)

    def holding(self, number: int) -> Holding:
        """Return the numbers of its users and clients, in the order its store has them."""
        users = self.users(number)
        clients = users if self.silos is None else np.unique(self.silos[users]).astype(np.int64)
        return Holding(users, clients)


def _shares(federation: Federation) -> _Shares | None:
    data, experiment = federation.data, federation.agreement.experiment
    if data is None:
        return None
    split = make_split(data, experiment.split, Streams(experiment.seed), experiment.silos)
    plan_privacy(experiment, split)
    count, holders = len(federation.nodes), split.holders
    node = deal_users(data.n_users, count, federation.deal, experiment.seed, holders)
    return _Shares(node, holders)


def _write(folder: Path, federation: Federation, shares: _Shares | None) -> dict[str, Taken | None]:
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
        write_dealt(server, {name: shares.holding(number) for number, name in names})
    _directory(folder / "nodes")
    given = {}
    for number, (name, identity) in enumerate(identities.items()):
        own = _directory(folder / "nodes" / name)
        private, public_key = new_node_key(name)
        write_bytes(own / "node.key", private, secret=True)
        (server / "nodes" / f"{name}.pub").write_bytes(public_key)
        write_bytes(own / "identity.key", identity_pem(identity), secret=True)
        write_identities(own, federation.name, public)
        (own / AUTHORITY).write_bytes(authority.pem)
        address = federation.place.address
        config = NodeConfig(federation=federation.name, name=name, server=address)
        config.write(own)
        with NodeStore.create(own / config.store, name, federation.agreement) as store:
            given[name] = _give(store, number, federation.data, shares)
    (folder / "README.txt").write_text(_readme(federation), "utf-8")
    return given


def _write_server(server: Path, federation: Federation, authority: Authority) -> None:
    certificate, key = authority.server(federation.place.hosts)
    (server / "server.crt").write_bytes(certificate)
    write_bytes(server / "server.key", key, secret=True)
    (server / AUTHORITY).write_bytes(authority.pem)
    federation.agreement.write(server / AGREEMENT)
    _directory(server / "nodes")
    count = len(federation.nodes)
    ServerConfig(
        federation=federation.name,
        listen=federation.place.listen,
        port=federation.place.port,
        # One may be away.
        rules=Rules(nodes=count, min_nodes=min(count, max(2, count - 1))),
    ).write(server)


def _give(
    store: NodeStore, number: int, data: Interactions | None, shares: _Shares | None
) -> Taken | None:
    """Put a node's users into its store, and nobody else."""
    if data is None or shares is None:
        return None
    return store.take_in(data.select(np.isin(data.user, shares.users(number))), shares.silos)


def _directory(path: Path) -> Path:
    path.mkdir(mode=0o700)
    return path


def _readme(federation: Federation) -> str:
    first = federation.nodes[0]
    fill = (
        "The stores of the nodes are filled already, each with its own users."
        if federation.data
        else f"Each node then takes in its own data:\n\n"
        f"    hushrec node import {first}/data.node interactions.csv"
    )
    return f"""The federation '{federation.name}'
{"=" * (len(federation.name) + 17)}

What to copy where; each folder whole, to one machine, by a way that nobody else can read:

    server/            to the server, which nodes reach at {federation.place.address}
    nodes/NAME/        to the node of that name: {", ".join(federation.nodes)}
    ca/                nowhere. It signs the server's certificate: keep it off the server.

A node's folder has its secret keys and its people's data. Whoever made this folder has seen all
keys: delete nodes/ here once they are copied. The server must not have any node's folder, for
secure sums hide a node from the server only as long as the server does not know its keys.

{fill}

Then, with hushrec and its Flower part on each machine (pip install 'hushrec[flower]'):

    hushrec federate server server          on the server
    hushrec federate node {first}{" " * max(1, 18 - len(first))}on that node, and so on

Both stay in the foreground until they are told to stop. The server's certificate can be renewed
from here ('hushrec federate renew'); docs/deployment.md of hushrec says more.
"""
