"""Cryptographic primitives: Shamir's secret sharing, signatures, key agreement, encryption.

Any t shares of a secret recover it, and t - 1 shares hold no information on it. The secret is the
value of a polynomial at 0, a share its value elsewhere; the other t - 1 coefficients are random
elements of the field. The field's prime is the smallest above 2^256, so that any 32 bytes are a
secret; `SHARE_BYTES` hold one share.

Signatures (Ed25519), key agreement (X25519), key derivation (HKDF with SHA-256) and encryption
(ChaCha20-Poly1305) come from `cryptography`. Keys are plain bytes here, so that they can be shared,
stored and compared.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

PRIME = 2**256 + 297
SHARE_BYTES = 33


def share(secret: int, coefficients: Sequence[int], point: int, prime: int = PRIME) -> int:
    """Return the share at a point (not 0) of a secret that 1 + len(coefficients) shares recover."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value + coefficient) * point % prime
    return (value + secret) % prime


def weights_at_zero(points: Sequence[int], prime: int = PRIME) -> dict[int, int]:
    """Return by how much each point's share counts in the secret (Lagrange, at 0)."""
    weights = {}
    for here in points:
        above = below = 1
        for there in points:
            if there != here:
                above = above * there % prime
                below = below * (there - here) % prime
        weights[here] = above * pow(below, -1, prime) % prime
    return weights


def recover(shares: Mapping[int, int], weights: Mapping[int, int], prime: int = PRIME) -> int:
    """Return the secret from shares by their points, with the weights of just these points."""
    return sum(weights[point] * value for point, value in shares.items()) % prime


KEY_BYTES = 32
SIGNATURE_BYTES = 64
TAG_BYTES = 16
"""By how much a sealed text is longer than the text."""


@dataclass(frozen=True)
class Identity:
    """A node's long-term signing key. Other nodes have its public half in their configuration."""

    private: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> Identity:
        """Draw a new key from the operating system."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @property
    def public(self) -> bytes:
        """The public half, which other nodes are given beforehand."""
        return Ed25519PrivateKey.from_private_bytes(self.private).public_key().public_bytes_raw()

    def sign(self, purpose: str, message: bytes) -> bytes:
        """Sign bytes for one purpose; the signature is invalid for any other."""
        key = Ed25519PrivateKey.from_private_bytes(self.private)
        return key.sign(_for_purpose(purpose, message))


def is_signed(public: bytes, signature: bytes, purpose: str, message: bytes) -> bool:
    """Whether the owner of a public identity signed these bytes for this purpose."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _for_purpose(purpose, message))
    except (InvalidSignature, ValueError):
        return False
    return True


def derive(secret: bytes, purpose: str, *context: bytes) -> bytes:
    """Derive a key from a secret for one purpose and one context."""
    info = b"".join(len(part).to_bytes(4, "big") + part for part in context)
    kdf = HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=_for_purpose(purpose, info))
    return kdf.derive(secret)


def public_half(private: bytes) -> bytes:
    """Return the public half of an agreement key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes) -> bytes | None:
    """Return the shared secret of two key pairs; None for a public key of small order."""
    try:
        key = X25519PublicKey.from_public_bytes(public)
        return X25519PrivateKey.from_private_bytes(private).exchange(key)
    except ValueError:  # a point of small order
        return None


def seal(key: bytes, text: bytes, about: bytes) -> bytes:
    """Encrypt a text with ``about`` as associated data. A key encrypts one text only."""
    return ChaCha20Poly1305(key).encrypt(bytes(12), text, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes | None:
    """Return the text; None with another key, other associated data, or changed bytes."""
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), sealed, about)
    except InvalidTag:
        return None


def _for_purpose(purpose: str, message: bytes) -> bytes:
    return f"hushrec/secure-1/{purpose}".encode() + b"\0" + message
