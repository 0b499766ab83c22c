"""Who a node is, what two nodes share, and what only one of them can read.

The primitives are those of `cryptography`: Ed25519 for signatures, X25519 for agreement, HKDF with
SHA-256 for every key that is made from another, ChaCha20-Poly1305 for what a node reads. Keys are
plain bytes here, so that they can be shared, kept and compared.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

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
