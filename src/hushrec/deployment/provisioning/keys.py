"""Certificates and keys of a federation, and the files they are kept in.

Each federation has a certificate authority, the only one that nodes trust; it signs the server's
certificate. A node authenticates to the server with an ECDSA key (as made by
`ssh-keygen -t ecdsa -b 384`), and to other nodes, in secure aggregation, with an Ed25519 identity.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hushrec.errors import ConfigError
from hushrec.secagg.keys import Identity

AUTHORITY_DAYS = 3650
SERVER_DAYS = 825
"""Validity of the server's certificate; some systems refuse a longer one."""
LOCAL_NAMES = ("localhost", "127.0.0.1")
"""Names that every server's certificate is valid for."""


@dataclass(frozen=True)
class Authority:
    """The certificate authority of a federation."""

    key: ec.EllipticCurvePrivateKey = field(repr=False)
    certificate: x509.Certificate

    @classmethod
    def generate(cls, federation: str) -> Authority:
        """Generate a key and its self-signed certificate."""
        key = ec.generate_private_key(ec.SECP384R1())
        name = _name(f"hushrec federation {federation}"[:64])
        usage = _usage(key_cert_sign=True, crl_sign=True)
        certificate = (
            _certificate(name, name, key.public_key(), AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, hashes.SHA384())
        )
        return cls(key, certificate)

    @classmethod
    def read(cls, certificate: Path, key: Path) -> Authority:
        """Read certificate and private key from files."""
        try:
            private = load_pem_private_key(read_secret(key), None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            private = None
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{key} is not an ECDSA key in PEM format")
        return cls(private, read_certificate(certificate))

    def server(self, hosts: Sequence[str]) -> tuple[bytes, bytes]:
        """Issue a server's certificate for these host names; return it and its key, in PEM."""
        key = ec.generate_private_key(ec.SECP384R1())
        names = dict.fromkeys([*hosts, *LOCAL_NAMES])
        issued_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        certificate = (
            _certificate(
                _name(hosts[0][:64]), self.certificate.subject, key.public_key(), SERVER_DAYS
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName(map(_alternative, names)), critical=False)
            .add_extension(issued_by, critical=False)
            .sign(self.key, hashes.SHA384())
        )
        return certificate.public_bytes(Encoding.PEM), _pem(key)

    @property
    def pem(self) -> bytes:
        """The certificate, in PEM, for all nodes."""
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        """The private key, in PEM, which stays with the authority."""
        return _pem(self.key)


def new_node_key(name: str) -> tuple[bytes, bytes]:
    """Generate a node's key for the server; return private and public key in OpenSSH format."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return private, public + f" {name}\n".encode()


def identity_pem(identity: Identity) -> bytes:
    """Return a node's identity in PEM."""
    key = Ed25519PrivateKey.from_private_bytes(identity.private)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def read_identity(path: Path) -> Identity:
    """Read a node's identity from a file that only its owner may read."""
    try:
        key = load_pem_private_key(read_secret(path), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} is not an Ed25519 key in PEM format")
    return Identity(key.private_bytes_raw())


def read_certificate(path: Path) -> x509.Certificate:
    """Read a certificate."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path} is not a certificate in PEM format") from None


def expiry(path: Path) -> datetime:
    """Return until when a certificate is valid."""
    return read_certificate(path).not_valid_after_utc


def hosts_of(path: Path) -> list[str]:
    """Return the host names and addresses of a certificate, in its order."""
    extensions = read_certificate(path).extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def require_valid(path: Path) -> None:
    """Raise if a certificate has expired."""
    until = expiry(path)
    if until < datetime.now(UTC):
        raise ConfigError(
            f"{path} expired on {until:%Y-%m-%d}, so no node will connect; make a new one with "
            "'hushrec federate renew'"
        )


def is_address(host: str) -> bool:
    """Return whether a host is an IP address."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


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
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(host: str) -> x509.GeneralName:
    return x509.IPAddress(ip_address(host)) if is_address(host) else x509.DNSName(host)


def _usage(**allowed: bool) -> x509.KeyUsage:
    every = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
        *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(**{name: allowed.get(name, False) for name in every})


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
