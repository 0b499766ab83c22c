"""Keys, certificates and folders of a federation.

Each federation has a certificate authority, the only one that nodes trust; it signs the server's
certificate. A node authenticates to the server with an ECDSA key (as made by
`ssh-keygen -t ecdsa -b 384`), and to other nodes, in secure aggregation, with an Ed25519 identity.
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

import re
import stat
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, ClassVar, Self

import tomli_w
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from hushrec.deployment.coordinator.planning import Policy
from hushrec.deployment.coordinator.roster import Partition
from hushrec.deployment.node.worker import NodeCredentials
from hushrec.errors import ConfigError, nearest
from hushrec.federation.contract import Contract, NodeRegistry
from hushrec.secagg.keys import KEY_BYTES, Identity

AUTHORITY_DAYS = 3650
SERVER_DAYS = 825
"""Validity of the server's certificate; some systems refuse a longer one."""
NOTICE_DAYS = 30
"""The end of a certificate is said so many days before."""
LOCAL_NAMES = ("localhost", "127.0.0.1")
"""Names that every server's certificate is valid for."""
CONTRACT, AUTHORITY, PARTITION = "contract.hushrec", "ca.crt", "partition.json"
PARTITION_FILE = TypeAdapter(Partition)
Port = Annotated[int, Field(ge=1, le=65535)]


@dataclass(frozen=True)
class Authority:
    """The certificate authority of a federation."""

    key: ec.EllipticCurvePrivateKey = field(repr=False)
    certificate: x509.Certificate

    @classmethod
    def generate(cls, federation: str) -> Authority:
        """Generate a key and its self-signed certificate."""
        key = ec.generate_private_key(ec.SECP384R1())
        name = _name(f"hushrec federation {federation}")
        certificate = (
            _certificate(name, name, key.public_key(), AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
            .sign(key, hashes.SHA384())
        )
        return cls(key, certificate)

    @classmethod
    def read(cls, certificate: Path, key: Path) -> Authority:
        """Read certificate and private key from files."""
        private = _read_key(key)
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{key} is not an ECDSA key in PEM format")
        return cls(private, read_certificate(certificate))

    def server(self, hosts: Sequence[str]) -> tuple[bytes, bytes]:
        """Issue a server's certificate for these host names; return it and its key, in PEM."""
        key = ec.generate_private_key(ec.SECP384R1())
        names = dict.fromkeys([*hosts, *LOCAL_NAMES])
        issued_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        certificate = (
            _certificate(_name(hosts[0]), self.certificate.subject, key.public_key(), SERVER_DAYS)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName(map(_alternative, names)), critical=False)
            .add_extension(issued_by, critical=False)
            .sign(self.key, hashes.SHA384())
        )
        return certificate.public_bytes(serialization.Encoding.PEM), private_pem(key)

    @property
    def pem(self) -> bytes:
        """The certificate, in PEM, for all nodes."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)


def new_node_key(name: str) -> tuple[bytes, bytes]:
    """Generate a node's key for the server; return private and public key in OpenSSH format."""
    key = ec.generate_private_key(ec.SECP384R1())
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    public = key.public_key().public_bytes(*form)
    private = private_pem(key, serialization.PrivateFormat.OpenSSH)
    return private, public + f" {name}\n".encode()


def private_pem(
    key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey,
    form: serialization.PrivateFormat = serialization.PrivateFormat.PKCS8,
) -> bytes:
    """Return a private key in PEM."""
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _read_key(path: Path) -> object:
    """Read a private key of any kind from a file that only its owner may read; None if damaged."""
    try:
        return serialization.load_pem_private_key(read_secret(path), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None


def read_certificate(path: Path) -> x509.Certificate:
    """Read a certificate."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path} is not a certificate in PEM format") from None


def require_valid(path: Path) -> None:
    """Raise if a certificate has expired."""
    until = read_certificate(path).not_valid_after_utc
    if until < datetime.now(UTC):
        raise ConfigError(
            f"{path} expired on {until:%Y-%m-%d}, so no node will connect; make a new one with "
            "'hushrec federate renew'"
        )


def _expiring(path: Path, what_to_do: str) -> list[str]:
    """Say when a certificate ends, if that is within `NOTICE_DAYS`."""
    if not path.exists():
        return []  # a status can be read where no server runs
    until = read_certificate(path).not_valid_after_utc
    if until > datetime.now(UTC) + timedelta(days=NOTICE_DAYS):
        return []
    return [f"{path} ends on {until:%Y-%m-%d}: {what_to_do}"]


def is_address(host: str) -> bool:
    """Return whether a host is an IP address."""
    with suppress(ValueError):
        return bool(ip_address(host))
    return False


def read_secret(path: Path) -> bytes:
    """Read a file with a secret; raise if others may read it."""
    require_secret(path)
    return path.read_bytes()


def require_secret(path: Path) -> None:
    """Raise if a file with a secret is missing, or others may read it."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; copy the whole folder again")
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ConfigError(f"{path} is a secret and can be read by others: use 'chmod 600 {path}'")


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # Clocks of nodes may be slow.
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _alternative(host: str) -> x509.GeneralName:
    return x509.IPAddress(ip_address(host)) if is_address(host) else x509.DNSName(host)


def _usage(**allowed: bool) -> x509.KeyUsage:
    every = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
        *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(**{name: allowed.get(name, False) for name in every})


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
class _Folder:
    """A folder of the server or of a node."""

    path: Path
    config: ServerConfig | NodeConfig

    @property
    def authority(self) -> Path:
        """Certificate of the authority that signs the server's."""
        return self.path / AUTHORITY

    @property
    def expiring(self) -> list[str]:
        """Sentences on certificates that end soon."""
        return _expiring(self.authority, "make a new federation before, with 'federate init'")

    @property
    def identities(self) -> Mapping[str, bytes]:
        """Public identities of all nodes, for secure aggregation."""
        stored, file, own = _Identities.read(self.path), self.path / _Identities.NAME, self.config
        if stored.federation != own.federation:
            which = f"the federation '{stored.federation}', not '{own.federation}'"
            raise ConfigError(f"{file} is of {which}")
        for name, text in stored.nodes.items():
            if not re.fullmatch(f"[0-9a-fA-F]{{{2 * KEY_BYTES}}}", text):
                raise ConfigError(f"{file}: nodes.{name} is not {KEY_BYTES} bytes in hexadecimal")
        return {name: bytes.fromhex(text) for name, text in stored.nodes.items()}

    @property
    def registered(self) -> NodeRegistry:
        """The nodes that are registered for secure aggregation."""
        return NodeRegistry(self.config.federation, self.identities)


@dataclass(frozen=True)
class ServerFolder(_Folder):
    """The server's folder, checked."""

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
    def expiring(self) -> list[str]:
        """Sentences on certificates that end soon."""
        renew = "make a new one with 'hushrec federate renew', and restart the server"
        return [*super().expiring, *_expiring(self.certificate, renew)]

    @property
    def runs(self) -> Path:
        """Folder of its runs."""
        return self.path / "runs"

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
    def partition(self) -> Partition | None:
        """Users and clients of each node in a rehearsal; None outside of one."""
        file = self.path / PARTITION
        if not file.exists():
            return None
        try:
            return PARTITION_FILE.validate_json(file.read_bytes())
        except (OSError, ValidationError):
            raise ConfigError(f"{file} is damaged: copy the whole folder again") from None


@dataclass(frozen=True)
class NodeFolder(_Folder):
    """A node's folder, checked."""

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
        key = _read_key(self.path / "identity.key")
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError(f"{self.path / 'identity.key'} is not an Ed25519 key in PEM format")
        return Identity(key.private_bytes_raw())

    @property
    def credentials(self) -> NodeCredentials:
        """This node's credentials in secure aggregation."""
        return NodeCredentials(self.registered, self.identity)


def write_identities(path: Path, federation: str, identities: Mapping[str, bytes]) -> None:
    """Write the public identities of all nodes into a folder."""
    nodes = {name: public.hex() for name, public in identities.items()}
    _Identities(federation=federation, nodes=nodes).write(path)
