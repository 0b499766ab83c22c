"""Shamir's secret sharing: a secret in shares of which any t recover it and t - 1 tell nothing.

The secret is a polynomial's value at 0, a share its value elsewhere; the other t - 1 coefficients
are random numbers of the field. The field's prime is the smallest above 2^256, so that any 32 bytes
are a secret. Shares are numbers of the field; `SHARE_BYTES` hold one.

Who a node is, what two nodes share, and what only one of them can read.

The primitives are those of `cryptography`: Ed25519 for signatures, X25519 for agreement, HKDF with
SHA-256 for every key that is made from another, ChaCha20-Poly1305 for what a node reads. Keys are
plain bytes here, so that they can be shared, kept and compared.
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
    """A node's long-lived signing key. Others know its public half from their own configuration."""

    private: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> Identity:
        """Draw a new one from the operating system."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @property
    def public(self) -> bytes:
        """What other nodes are given beforehand."""
        return Ed25519PrivateKey.from_private_bytes(self.private).public_key().public_bytes_raw()

    def sign(self, purpose: str, said: bytes) -> bytes:
        """Sign words for one purpose; they are worth nothing for another."""
        key = Ed25519PrivateKey.from_private_bytes(self.private)
        return key.sign(_for_purpose(purpose, said))


def is_signed(public: bytes, signature: bytes, purpose: str, said: bytes) -> bool:
    """Whether the owner of a public identity signed these words for this purpose."""
    try:
        key = Ed25519PublicKey.from_public_bytes(public)
        key.verify(signature, _for_purpose(purpose, said))
    except (InvalidSignature, ValueError):
        return False
    return True


def derive(secret: bytes, purpose: str, *context: bytes) -> bytes:
    """Return a key made from a secret for one purpose and one context."""
    info = b"".join(len(part).to_bytes(4, "big") + part for part in context)
    kdf = HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=_for_purpose(purpose, info))
    return kdf.derive(secret)


def public_half(private: bytes) -> bytes:
    """Return the public half of an agreement key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes) -> bytes | None:
    """Return what two owners of agreement keys share; None for a key that agrees with everybody."""
    try:
        key = X25519PublicKey.from_public_bytes(public)
        return X25519PrivateKey.from_private_bytes(private).exchange(key)
    except ValueError:  # a point of small order
        return None


def seal(key: bytes, text: bytes, about: bytes) -> bytes:
    """Encrypt a text, and bind it to what it is about. A key seals one text only."""
    return ChaCha20Poly1305(key).encrypt(bytes(12), text, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes | None:
    """Return the text; None if it was sealed with another key, about something else, or changed."""
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), sealed, about)
    except InvalidTag:
        return None


def _for_purpose(purpose: str, said: bytes) -> bytes:
    return f"hushrec/secure-1/{purpose}".encode() + b"\0" + said
