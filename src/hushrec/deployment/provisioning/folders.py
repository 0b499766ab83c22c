"""Contents of the server's folder and of a node's folder.

::

    server/                          nodes/NAME/
      config.toml                      config.toml
      contract.hushrec                 data.node          the node's database
      identities.toml                  identities.toml
      ca.crt                           ca.crt
      server.crt                       node.key           authenticates to the server
      server.key                       identity.key       authenticates to other nodes
      nodes/NAME.pub
      partition.json     users and clients of each node, in a rehearsal

Each folder is copied to its machine. The public identities of all nodes come with a node's folder,
from the party that provisioned it, and never from the server.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Self

import numpy as np
import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hushrec.deployment.coordinator.roster import Holding, Partition
from hushrec.deployment.coordinator.session import Policy
from hushrec.deployment.node.sums import NodeCredentials
from hushrec.deployment.provisioning.keys import read_identity, require_secret, require_valid
from hushrec.errors import ConfigError, nearest
from hushrec.federation.contract import Contract, NodeRegistry
from hushrec.secagg.keys import KEY_BYTES, Identity

CONTRACT = "contract.hushrec"
AUTHORITY = "ca.crt"
PARTITION = "partition.json"
NODE_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
Port = Annotated[int, Field(ge=1, le=65535)]


class _File(BaseModel):
    """A TOML file of a folder; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    NAME: ClassVar[str] = "config.toml"

    def write(self, folder: Path) -> None:
        """Write it into a folder."""
        (folder / self.NAME).write_text(tomli_w.dumps(self.model_dump(exclude_none=True)), "utf-8")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read it from a folder; an error names the file, the key and what is wrong."""
        file = folder / cls.NAME
        try:
            values = tomllib.loads(file.read_text("utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{file}: no such file; 'hushrec federate init' makes it") from None
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: not valid TOML: {error}") from None
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            if first["type"] == "extra_forbidden":
                hint = nearest(key, cls.model_fields)
                raise ConfigError(f"{file}: unknown key '{key}'{hint}") from None
            raise ConfigError(f"{file}: '{key}': {first['msg']}") from None


class ServerConfig(_File):
    """`server/config.toml`."""

    federation: str
    """Name of the federation; keys and signatures of secure aggregation are bound to it."""
    listen: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every address of this machine."""
    port: Port = 8443
    metrics_port: Port | None = None
    """Port of the loopback address with metrics for Prometheus; None serves none."""
    policy: Policy = Policy()
    """How many nodes a run needs, and how long it waits for them."""


class NodeConfig(_File):
    """`nodes/NAME/config.toml`."""

    federation: str
    name: str
    server: str
    """Host and port of the server; its certificate must be for this host."""
    store: str = "data.node"
    """File of the node's database: a path relative to the folder, or absolute."""


class _Identities(_File):
    NAME: ClassVar[str] = "identities.toml"

    federation: str
    nodes: dict[str, str]


@dataclass(frozen=True)
class ServerFolder:
    """The server's folder, checked."""

    path: Path
    config: ServerConfig

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read the folder; raise if a file is missing, or a secret readable by others."""
        folder = cls(path, ServerConfig.read(path))
        require_secret(folder.key)
        require_valid(folder.authority)
        require_valid(folder.certificate)
        if not folder.public_keys:
            raise ConfigError(f"{path / 'nodes'} has no public key of any node (NAME.pub)")
        return folder

    @property
    def runs(self) -> Path:
        """Folder of its runs."""
        return self.path / "runs"

    @property
    def authority(self) -> Path:
        """Certificate of the authority that signed the server's."""
        return self.path / AUTHORITY

    @property
    def certificate(self) -> Path:
        """Certificate of the server."""
        return self.path / "server.crt"

    @property
    def key(self) -> Path:
        """Private key of the certificate."""
        return self.path / "server.key"

    @property
    def public_keys(self) -> dict[str, Path]:
        """Public key files of the nodes that may connect, by name."""
        return {file.stem: file for file in sorted((self.path / "nodes").glob("*.pub"))}

    @property
    def contract(self) -> Contract:
        """The contract between server and nodes."""
        return Contract.read(self.path / CONTRACT)

    @property
    def identities(self) -> Mapping[str, bytes]:
        """Public identities of all nodes, for secure aggregation."""
        return read_identities(self.path, self.config.federation)

    @property
    def registered(self) -> NodeRegistry:
        """The nodes that are registered for secure aggregation."""
        return NodeRegistry(self.config.federation, self.identities)

    @property
    def partition(self) -> Partition | None:
        """Users and clients of each node in a rehearsal; None outside of one."""
        file = self.path / PARTITION
        if not file.exists():
            return None
        try:
            stored = json.loads(file.read_text("utf-8"))
            return {
                name: Holding(*(np.array(each[of], np.int64) for of in ("users", "clients")))
                for name, each in stored.items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{file} is damaged: copy the whole folder again") from None


@dataclass(frozen=True)
class NodeFolder:
    """A node's folder, checked."""

    path: Path
    config: NodeConfig

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read the folder; raise if a file is missing, or a secret readable by others."""
        folder = cls(path, NodeConfig.read(path))
        require_secret(folder.key)
        require_secret(folder.store)
        require_valid(folder.authority)
        if folder.identities.get(folder.config.name) != folder.identity.public:
            raise ConfigError(
                f"{path / _Identities.NAME} does not know '{folder.config.name}' by the key in "
                "identity.key: copy the whole folder again"
            )
        return folder

    @property
    def authority(self) -> Path:
        """Certificate of the authority that the server's must be signed by."""
        return self.path / AUTHORITY

    @property
    def key(self) -> Path:
        """Private key that authenticates the node to the server."""
        return self.path / "node.key"

    @property
    def store(self) -> Path:
        """File of the node's database."""
        return self.path / self.config.store

    @property
    def identity(self) -> Identity:
        """The node's identity towards other nodes."""
        return read_identity(self.path / "identity.key")

    @property
    def identities(self) -> Mapping[str, bytes]:
        """Public identities of all nodes, this one included."""
        return read_identities(self.path, self.config.federation)

    @property
    def credentials(self) -> NodeCredentials:
        """This node's credentials in secure aggregation."""
        return NodeCredentials(NodeRegistry(self.config.federation, self.identities), self.identity)


def check_node_names(names: list[str]) -> None:
    """Raise if a name cannot be a folder on every system, or occurs twice."""
    for name in names:
        if not NODE_NAME.fullmatch(name):
            raise ConfigError(
                f"'{name}' cannot be the name of a node: use small letters, digits and hyphens, up "
                "to 63"
            )
        if names.count(name) > 1:
            raise ConfigError(f"two nodes are called '{name}': each needs a name of its own")


def write_partition(path: Path, partition: Partition) -> None:
    """Write the users and clients of each node into the server's folder."""
    stored = {
        name: {"users": holding.users.tolist(), "clients": holding.clients.tolist()}
        for name, holding in partition.items()
    }
    (path / PARTITION).write_text(json.dumps(stored), "utf-8")


def write_identities(path: Path, federation: str, identities: Mapping[str, bytes]) -> None:
    """Write the public identities of all nodes into a folder."""
    nodes = {name: public.hex() for name, public in identities.items()}
    _Identities(federation=federation, nodes=nodes).write(path)


def read_identities(path: Path, federation: str) -> dict[str, bytes]:
    """Read the public identities of all nodes from a folder."""
    stored, file = _Identities.read(path), path / _Identities.NAME
    if stored.federation != federation:
        raise ConfigError(f"{file} is of the federation '{stored.federation}', not '{federation}'")
    identities = {}
    for name, text in stored.nodes.items():
        try:
            identities[name] = bytes.fromhex(text)
        except ValueError:
            identities[name] = b""
        if len(identities[name]) != KEY_BYTES:
            raise ConfigError(f"{file}: nodes.{name} is not {KEY_BYTES} bytes in hexadecimal")
    return identities
