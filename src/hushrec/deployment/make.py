"""Make all folders of a federation: keys, configuration and, for a rehearsal, partitioned data.

A folder is backed up into one file and made again from it.
"""

from __future__ import annotations

import re
import shutil
import tarfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from hushrec.data.interactions import Interactions
from hushrec.data.partition import Deal, deal_users
from hushrec.data.splitting import make_split
from hushrec.deployment import provisioning
from hushrec.deployment.coordinator.planning import Policy
from hushrec.deployment.coordinator.roster import Holding
from hushrec.deployment.node.database import ImportCounts, NodeDatabase, require_unused
from hushrec.deployment.provisioning import AUTHORITY, Authority, NodeConfig, ServerConfig
from hushrec.errors import ConfigError, RunError
from hushrec.federation.contract import Contract
from hushrec.federation.setup import set_up
from hushrec.io.codec import Stored, read_stored
from hushrec.io.files import (
    atomic_file,
    atomic_folder,
    is_free,
    remove,
    require_empty,
    scratch_folder,
    write_bytes,
    writing,
)
from hushrec.runs.folder import SUMMARY, RunFolder, file_digest
from hushrec.secagg.keys import Identity
from hushrec.streams import Streams

AUTHORITY_KEY = "ca.key"
HOST = re.compile(
    r"(?=.{1,253}$)([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)(\.[A-Za-z0-9-]{1,63})*"
)
NODE_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""A name that can be a folder on every system."""
LOCAL = ("localhost", "127.0.0.1", "::1")
MANIFEST = "manifest.json"
"""The list of files in a backup."""
LEFT_OUT = "run"
"""Folder with the logs of the processes on this machine."""
ANY_ADDRESS = "0.0.0.0"  # noqa: S104 - nodes on other machines must reach the server


@dataclass(frozen=True)
class ServerAddress:
    """Host names and port of the server."""

    hosts: tuple[str, ...] = ("localhost",)
    """Names and addresses of its certificate; nodes connect to the first."""
    port: int = 8443

    def __post_init__(self) -> None:
        for host in self.hosts:
            if not (HOST.fullmatch(host) or provisioning.is_address(host)):
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
        for name in self.nodes:
            if not NODE_NAME.fullmatch(name):
                raise ConfigError(
                    f"'{name}' cannot name a node: use small letters, digits and hyphens, up to 63"
                )
            if self.nodes.count(name) > 1:
                raise ConfigError(f"two nodes are called '{name}': each needs a name of its own")
        self.contract.check_nodes(len(self.nodes))


def make_federation(folder: Path, federation: FederationSpec) -> dict[str, ImportCounts | None]:
    """Make all folders atomically, in none that exists; return the data imported into each node."""
    require_empty(folder)
    # Errors of the experiment are raised before a folder exists.
    partition, silos = _partition(federation)
    data, name = federation.data, federation.name
    authority = Authority.generate(name)
    imported: dict[str, ImportCounts | None] = dict.fromkeys(federation.nodes)
    identities = {node: Identity.generate() for node in federation.nodes}
    public = {node: identity.public for node, identity in identities.items()}
    with atomic_folder(folder, secret=True) as fresh:
        server, nodes = _directory(fresh / "server"), _directory(fresh / "nodes")
        (_directory(fresh / "ca") / AUTHORITY).write_bytes(authority.pem)
        authority_key = provisioning.private_pem(authority.key)
        write_bytes(fresh / "ca" / AUTHORITY_KEY, authority_key, secret=True)
        _write_server(server, federation, authority)
        provisioning.write_identities(server, name, public)
        if partition:
            stored = provisioning.PARTITION_FILE.dump_json(partition)
            (server / provisioning.PARTITION).write_bytes(stored)
        for node, identity in identities.items():
            own = _directory(nodes / node)
            private_key, public_key = provisioning.new_node_key(node)
            write_bytes(own / "node.key", private_key, secret=True)
            (server / "nodes" / f"{node}.pub").write_bytes(public_key)
            identity_key = Ed25519PrivateKey.from_private_bytes(identity.private)
            write_bytes(own / "identity.key", provisioning.private_pem(identity_key), secret=True)
            provisioning.write_identities(own, name, public)
            (own / AUTHORITY).write_bytes(authority.pem)
            config = NodeConfig(federation=name, name=node, server=federation.address.netloc)
            config.write(own)
            with NodeDatabase.create(own / config.store, node, federation.contract) as store:
                if data is not None:
                    rows = data.select(np.isin(data.user, partition[node].users))
                    imported[node] = store.add_interactions(rows, silos)
        (fresh / "README.txt").write_text(_readme(federation), "utf-8")
    return imported


def renew_server(folder: Path) -> datetime:
    """Replace the server's certificate and key, for the same host names; return its expiry."""
    authority = Authority.read(folder / "ca" / AUTHORITY, folder / "ca" / AUTHORITY_KEY)
    server = provisioning.ServerFolder(folder / "server", ServerConfig.read(folder / "server"))
    extensions = provisioning.read_certificate(server.certificate).extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    certificate, key = authority.server([str(name.value) for name in names])
    for path, text in ((server.key, key), (server.certificate, certificate)):
        write_bytes(path, text, secret=True)
    return provisioning.read_certificate(server.certificate).not_valid_after_utc


def _partition(federation: FederationSpec) -> tuple[dict[str, Holding], NDArray[np.int32] | None]:
    """Return what each node holds of a rehearsal's data, in the order of its database, and silos.
    The experiment is set up once on the way, so that its errors show."""
    data, experiment = federation.data, federation.contract.experiment
    if data is None:
        return {}, None
    split = make_split(data, experiment.split, Streams(experiment.seed), experiment.silos)
    set_up(experiment, split)
    count, silos = len(federation.nodes), split.holders
    node_of = deal_users(data.n_users, count, federation.partition, experiment.seed, silos)
    partition = {}
    for number, name in enumerate(federation.nodes):
        users = np.flatnonzero(node_of == number)
        clients = users if silos is None else np.unique(silos[users]).astype(np.int64)
        partition[name] = Holding(users, clients)
    return partition, silos


def _write_server(server: Path, federation: FederationSpec, authority: Authority) -> None:
    address, count = federation.address, len(federation.nodes)
    certificate, key = authority.server(address.hosts)
    (server / "server.crt").write_bytes(certificate)
    write_bytes(server / "server.key", key, secret=True)
    (server / AUTHORITY).write_bytes(authority.pem)
    federation.contract.write(server / provisioning.CONTRACT)
    _directory(server / "nodes")
    # A run goes on while one node is away.
    policy = Policy(nodes=count, min_nodes=min(count, max(2, count - 1)))
    ServerConfig(
        federation=federation.name, listen=address.listen, port=address.port, policy=policy
    ).write(server)


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


@dataclass(frozen=True)
class BackupFacts:
    """What a backup of a folder holds."""

    kind: Literal["server", "node"]
    federation: str
    files: int
    bytes: int
    runs: tuple[str, ...]
    """Finished runs of a coordinator."""


class _Manifest(Stored):
    """The list of a backup's files."""

    kind: Literal["server", "node"]
    federation: str
    store: str | None
    """File of a node's database."""
    files: dict[str, str]
    """Digest of each file, by its path in the folder."""


def back_up_folder(folder: Path, target: Path, *, overwrite: bool = False) -> BackupFacts:
    """Write the folder of a coordinator or a node into one file, which only its owner may read.

    Logs are left out, and so are runs that are not finished: going on from an older state of a run
    would use its noise twice. The archive is read back and compared before it has its name.
    """
    if target.exists() and not overwrite:
        raise RunError(f"{target} exists already: choose another file, or add --overwrite")
    is_node = (folder / "node.key").exists()
    opened = (provisioning.NodeFolder if is_node else provisioning.ServerFolder).open(folder)
    config, store = opened.config, None
    if isinstance(config, NodeConfig):
        store = config.store
        if Path(store).is_absolute() or ".." in Path(store).parts:
            raise ConfigError(
                f"{store} is outside of {folder}: back it up with 'hushrec node backup'"
            )
    names = [name for name in _kept_files(folder) if store is None or not name.startswith(store)]
    digests: dict[str, str] = {}
    with atomic_file(target, secret=True) as partial, scratch_folder(_beside(target)) as scratch:
        with tarfile.open(partial, "w") as archive:
            for name in names:
                digests[name] = _add(archive, folder / name, name)
            if store is not None:
                with NodeDatabase.open(folder / store) as node:
                    node.backup(scratch / "data")
                digests[store] = _add(archive, scratch / "data", store)
            kind: Literal["server", "node"] = "node" if is_node else "server"
            manifest = _Manifest(
                kind=kind, federation=config.federation, store=store, files=digests
            )
            (scratch / MANIFEST).write_text(manifest.to_json(), "utf-8")
            _add(archive, scratch / MANIFEST, MANIFEST)
        return _unpack(partial, target, scratch / "again")[1]


def restore_folder(source: Path, folder: Path, *, overwrite: bool = False) -> BackupFacts:
    """Make the folder of a coordinator or a node from a backup, checked before it is there."""
    if not source.is_file():
        raise RunError(f"{source}: no such backup; 'hushrec federate backup' makes one")
    if not overwrite and not is_free(folder):
        raise RunError(f"{folder} exists already: choose another folder, or add --overwrite")
    _require_stopped(folder)
    fresh, old = folder.with_name(f".{folder.name}.restored"), _beside(folder)
    remove(fresh)
    try:
        with atomic_folder(fresh, secret=True) as made:
            manifest, facts = _unpack(source, source, made)
            (made / MANIFEST).unlink()
            if manifest.store is not None:
                packed = made / "backup"
                (made / manifest.store).rename(packed)
                NodeDatabase.restore(packed, made / manifest.store)
                packed.unlink()
        with writing(folder):
            remove(old)
            if folder.exists():
                folder.rename(old)
            fresh.rename(folder)
    finally:
        remove(fresh)
    remove(old)
    return facts


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.backup")


def _kept_files(folder: Path) -> list[str]:
    """Return the files of a folder that a backup holds, by their paths in it."""
    unfinished = {run for run in (folder / "runs").glob("*") if not (run / SUMMARY).exists()}
    found = []
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in inside.parts) or inside.parts[0] == LEFT_OUT
        if path.is_file() and not hidden and not unfinished & set(path.parents):
            found.append(inside.as_posix())
    return found


def _add(archive: tarfile.TarFile, path: Path, name: str) -> str:
    """Add a file to an archive; return its digest."""
    archive.add(path, name, recursive=False)
    return file_digest(path)


def _unpack(archive: Path, shown: Path, folder: Path) -> tuple[_Manifest, BackupFacts]:
    """Unpack a backup into a folder, and check every file against the list."""
    names = []
    try:
        with tarfile.open(archive, "r:") as packed:
            for member in packed:
                content, target = packed.extractfile(member), folder / member.name
                if content is None or not target.resolve().is_relative_to(folder.resolve()):
                    raise RunError(f"{shown} is no backup of a folder: it holds '{member.name}'")
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with target.open("xb") as file:
                    shutil.copyfileobj(content, file)
                target.chmod(0o600)
                names.append(member.name)
    except (tarfile.TarError, ValueError, EOFError, FileExistsError) as error:
        raise RunError(f"{shown} is damaged, or is no backup of a folder: {error}") from None
    if MANIFEST not in names:
        raise RunError(f"{shown} is damaged, or is no backup of a folder: it has no {MANIFEST}")
    manifest = read_stored(_Manifest, folder / MANIFEST)
    if sorted(names) != sorted([*manifest.files, MANIFEST]):
        raise RunError(f"{shown} is damaged: it does not hold the files that it lists")
    for name, digest in manifest.files.items():
        if file_digest(folder / name) != digest:
            raise RunError(f"{shown} is damaged: '{name}' in it does not have its digest")
    runs = sorted({name.split("/")[1] for name in manifest.files if name.startswith("runs/")})
    size = sum((folder / name).stat().st_size for name in manifest.files)
    count, federation = len(manifest.files), manifest.federation
    return manifest, BackupFacts(manifest.kind, federation, count, size, tuple(runs))


def _require_stopped(folder: Path) -> None:
    """Refuse to replace a folder that a process works in."""
    for run in (folder / "runs").glob("run-*"):
        if RunFolder(run).is_locked():
            raise RunError(f"{folder} is in use: stop 'hushrec federate run' and the server first")
    for store in folder.glob("*.node"):
        require_unused(store)
