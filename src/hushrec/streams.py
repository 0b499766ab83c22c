"""Addressed random streams: an address (root, purpose, round, user) always gives the same numbers.

The numbers do not depend on the order of the draws, the thread or the machine. A run is therefore
independent of batch size, number of threads and backend, and it can be resumed.

Public and secret streams are different types. `Streams` derive from the run's public seed: initial
parameters, training samples, candidates of an evaluation. `SecretStreams` are for privacy noise,
which protects nothing once it is known, and for secret cohorts; their root is drawn from the
operating system for each run.

Public streams are fast: Python code uses a numpy generator (`generator`); kernels use a 128-bit key
(`key`), mix in the user's number and count upwards (`kernels.draw`). Secret streams are keystreams
of ChaCha20 with one key per address (`words`): a part of one reveals nothing about the others.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

Key = NDArray[np.uint64]


def new_key() -> str:
    """Draw 256 bits from the operating system."""
    return secrets.token_hex(32)


class Words:
    """A keystream of ChaCha20, read once, 64 bits at a time."""

    def __init__(self, key: bytes) -> None:
        self._keystream = Cipher(ChaCha20(key, bytes(16)), None).encryptor()

    def take(self, count: int) -> NDArray[np.uint64]:
        """Return the next words."""
        return np.frombuffer(self._keystream.update(bytes(8 * count)), "<u8")


@dataclass(frozen=True)
class Streams:
    """Public random streams, derived from the run's seed."""

    seed: int

    def key(self, purpose: str, round_number: int = 0) -> Key:
        """Return the 128-bit key of a purpose in a round as two words; kernels mix in the user."""
        digest = _digest(f"{self.seed}/{purpose}/{round_number}", 16)
        return np.frombuffer(digest, dtype=np.uint64).copy()

    def generator(self, purpose: str, round_number: int = 0, user: int = -1) -> np.random.Generator:
        """Return a numpy generator for one address; ``user=-1`` is the server."""
        low, high = self.key(f"{purpose}/{user}", round_number)
        return np.random.Generator(np.random.Philox(key=[int(low), int(high)]))


@dataclass(frozen=True)
class SecretStreams:
    """Secret random streams, for privacy noise and secret cohorts."""

    root: int | str
    """A secret key, or a seed for a reproducible experiment."""

    @classmethod
    def from_key(cls, key: str, *bound_to: str) -> SecretStreams:
        """Return the streams of a key and a context; another context gives other streams."""
        return cls("/".join([key, *bound_to]))

    def words(self, purpose: str, round_number: int, user: int = -1) -> Words:
        """Return the keystream of one address; ``user=-1`` is the server."""
        return Words(_digest(f"{self.root}/{purpose}/{round_number}/{user}", 32))


def _digest(address: str, size: int) -> bytes:
    return hashlib.blake2b(address.encode(), digest_size=size).digest()


@dataclass(frozen=True)
class SecretRound:
    """The secret streams of one round."""

    number: int
    streams: SecretStreams

    def words(self, purpose: str, user: int = -1) -> Words:
        """Return the keystream of a purpose in this round, for a client or the server."""
        return self.streams.words(purpose, self.number, user)

    def of(self, party: str) -> SecretRound:
        """Return the streams of another party, which a simulation plays."""
        return SecretRound(self.number, SecretStreams(f"{self.streams.root}/{party}"))


PastNoise = Callable[[str, tuple[int, ...], Any, int], NDArray[np.float32]]
"""(name in the upload, shape, view of the clients, round) -> the noise that they added."""

GradientNoise = Callable[[Any, Any], Any]
"""(gradients of a step as an update, view of the clients) -> clipped and noised dense tables."""


@dataclass(frozen=True)
class Round:
    """The round in which clients train: its number, public streams and local noise."""

    number: int
    streams: Streams
    past_noise: PastNoise | None = None
    """The noise on a client's own earlier uploads, under local noise."""
    gradient_noise: GradientNoise | None = None
    """Clips and noises the gradient of a step, under `privacy.mode = local-gradients`."""

    def key(self, purpose: str) -> Key:
        """Return the key of a purpose in this round."""
        return self.streams.key(purpose, self.number)

    def generator(self, purpose: str) -> np.random.Generator:
        """Return the server's generator for a purpose in this round."""
        return self.streams.generator(purpose, self.number)
