"""What is in the folder of the server, and in the folder of a node.

::

    server/                          nodes/NAME/
      config.toml                      config.toml
      agreement.hushrec                data.node          the node's store
      identities.toml                  identities.toml
      ca.crt                           ca.crt
      server.crt                       node.key           to the server's transport
      server.key                       identity.key       to the other nodes
      nodes/NAME.pub
      dealt.json         who holds which numbers of a file, in a rehearsal

Each can be copied to its machine alone. A node's identities come with its folder, from whoever made
it, and never from the server.
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

from hushrec.deployment.coordinator.policy import Rules
from hushrec.deployment.coordinator.roster import Dealt, Holding
from hushrec.deployment.node.sums import Member
from hushrec.deployment.provisioning.keys import read_identity, require_secret, require_valid
from hushrec.errors import ConfigError, nearest
from hushrec.federation.contract import Agreement, Registered
from hushrec.secagg.keys import KEY_BYTES, Identity

AGREEMENT = "agreement.hushrec"
AUTHORITY = "ca.crt"
DEALT = "dealt.json"
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
    """Its name; keys and signatures of secure sums are bound to it."""
    listen: str = "127.0.0.1"
    """Address at which nodes are awaited; 0.0.0.0 is every one of this machine."""
    port: Port = 8443
    metrics_port: Port | None = None
    """Where Prometheus finds counters, on this machine only; nowhere unless a port is given."""
    rules: Rules = Rules()
    """How many nodes a run takes, and how long it waits for them."""


class NodeConfig(_File):
    """`nodes/NAME/config.toml`."""

    federation: str
    name: str
    server: str
    """Host and port of the server; its certificate must have this name."""
    store: str = "data.node"
    """File with the node's data, from here or from the root."""


class _Identities(_File):
    NAME: ClassVar[str] = "identities.toml"

    federation: str
    nodes: dict[str, str]


@dataclass(frozen=True)
class ServerFolder:
    """The server's folder, read and found whole."""

    path: Path
    config: ServerConfig

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read it; what is missing or open to others is an error that says so."""
        folder = cls(path, ServerConfig.read(path))
        require_secret(folder.key)
        require_valid(folder.authority)
        require_valid(folder.certificate)
        if not folder.public_keys:
            raise ConfigError(f"{path / 'nodes'} has no public key of any node (NAME.pub)")
        return folder

    @property
    def runs(self) -> Path:
        """Where its runs are written down."""
        return self.path / "runs"

    @property
    def authority(self) -> Path:
        """Certificate that signed the server's."""
        return self.path / AUTHORITY

    @property
    def certificate(self) -> Path:
        """Certificate that nodes are shown."""
        return self.path / "server.crt"

    @property
    def key(self) -> Path:
        """Its key."""
        return self.path / "server.key"

    @property
    def public_keys(self) -> dict[str, Path]:
        """Public key of every node that may connect, by its name."""
        found = {file.stem: file for file in (self.path / "nodes").glob("*.pub")}
        return dict(sorted(found.items()))

    @property
    def agreement(self) -> Agreement:
        """What server and nodes agree on."""
        return Agreement.read(self.path / AGREEMENT)

    @property
    def identities(self) -> Mapping[str, bytes]:
        """Public identity of every node, for secure sums."""
        return read_identities(self.path, self.config.federation)

    @property
    def registered(self) -> Registered:
        """Who takes part in secure sums."""
        return Registered(self.config.federation, self.identities)

    @property
    def dealt(self) -> Dealt | None:
        """Which numbers of the file each node has, in a rehearsal; None where there is no file."""
        file = self.path / DEALT
        if not file.exists():
            return None
        try:
            said = json.loads(file.read_text("utf-8"))
            return {
                name: Holding(*(np.array(each[of], np.int64) for of in ("users", "clients")))
                for name, each in said.items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{file} is damaged: copy the whole folder again") from None


@dataclass(frozen=True)
class NodeFolder:
    """A node's folder, read and found whole."""

    path: Path
    config: NodeConfig

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read it; what is missing or open to others is an error that says so."""
        folder = cls(path, NodeConfig.read(path))
        require_secret(folder.key)
        require_secret(folder.store)
        require_valid(folder.authority)
        known = folder.identities.get(folder.config.name)
        if known != folder.identity.public:
            raise ConfigError(
                f"{path / _Identities.NAME} does not know '{folder.config.name}' by the key in "
                "identity.key: copy the whole folder again"
            )
        return folder

    @property
    def authority(self) -> Path:
        """Certificate that the server's must be signed by."""
        return self.path / AUTHORITY

    @property
    def key(self) -> Path:
        """Key that shows the server's transport who the node is."""
        return self.path / "node.key"

    @property
    def store(self) -> Path:
        """The node's data."""
        return self.path / self.config.store

    @property
    def identity(self) -> Identity:
        """What other nodes know this one by."""
        return read_identity(self.path / "identity.key")

    @property
    def identities(self) -> Mapping[str, bytes]:
        """Public identity of every node, this one among them."""
        return read_identities(self.path, self.config.federation)

    @property
    def member(self) -> Member:
        """Who this node and the others are in secure sums."""
        return Member(Registered(self.config.federation, self.identities), self.identity)


def check_node_names(names: list[str]) -> None:
    """Refuse names that cannot be folders everywhere, or that occur twice."""
    for name in names:
        if not NODE_NAME.fullmatch(name):
            raise ConfigError(
                f"'{name}' cannot be the name of a node: use small letters, digits and hyphens, up "
                "to 63"
            )
        if names.count(name) > 1:
            raise ConfigError(f"two nodes are called '{name}': each needs a name of its own")


def write_dealt(path: Path, dealt: Dealt) -> None:
    """Write which numbers of the file each node has into the server's folder."""
    said = {
        name: {"users": holding.users.tolist(), "clients": holding.clients.tolist()}
        for name, holding in dealt.items()
    }
    (path / DEALT).write_text(json.dumps(said), "utf-8")


def write_identities(path: Path, federation: str, identities: Mapping[str, bytes]) -> None:
    """Write everybody's public identities into a folder."""
    nodes = {name: public.hex() for name, public in identities.items()}
    _Identities(federation=federation, nodes=nodes).write(path)


def read_identities(path: Path, federation: str) -> dict[str, bytes]:
    """Read everybody's public identities from a folder."""
    said, file = _Identities.read(path), path / _Identities.NAME
    if said.federation != federation:
        raise ConfigError(f"{file} is of the federation '{said.federation}', not '{federation}'")
    found = {}
    for name, text in said.nodes.items():
        try:
            found[name] = bytes.fromhex(text)
        except ValueError:
            found[name] = b""
        if len(found[name]) != KEY_BYTES:
            raise ConfigError(f"{file}: nodes.{name} is not {KEY_BYTES} bytes in hexadecimal")
    return found
