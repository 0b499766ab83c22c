"""Many named streams of random numbers, addressed and never passed along.

(root, purpose, round, user) always gives the same numbers, whoever asks, in whatever order, on
whatever thread or machine. That is what makes a run independent of chunk size, of the number of
threads, of the backend and of where it was resumed.

There are two kinds, and they are different types. `Streams` come from the run's seed, which
everybody knows: first parameters, samples, what is looked at. `SecretStreams` are for noise, which
protects nothing once its numbers are known, and for who takes part where that is to be hidden;
their root is drawn from the operating system for each run.

Public streams are fast: Python code takes a numpy generator (`generator`); kernels take a 128-bit
key (`key`), mix in each user's number and count upwards (`kernels.draw`). Secret streams are the
words of a stream cipher, ChaCha20, under a key for each address (`words`): whoever sees some of
them learns nothing of the others.
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
    """The words of a stream cipher, one after the other, each read once."""

    def __init__(self, key: bytes) -> None:
        self._keystream = Cipher(ChaCha20(key, bytes(16)), None).encryptor()

    def take(self, count: int) -> NDArray[np.uint64]:
        """Return the next words."""
        return np.frombuffer(self._keystream.update(bytes(8 * count)), "<u8")


@dataclass(frozen=True)
class Streams:
    """Public streams, that everybody may know: from the run's seed."""

    seed: int

    def key(self, purpose: str, round_number: int = 0) -> Key:
        """Return the 128-bit key of a purpose in a round, as two words; kernels add the user."""
        digest = _digest(f"{self.seed}/{purpose}/{round_number}", 16)
        return np.frombuffer(digest, dtype=np.uint64).copy()

    def generator(self, purpose: str, round_number: int = 0, user: int = -1) -> np.random.Generator:
        """Return a numpy generator for one address; ``user=-1`` is the server."""
        low, high = self.key(f"{purpose}/{user}", round_number)
        return np.random.Generator(np.random.Philox(key=[int(low), int(high)]))


@dataclass(frozen=True)
class SecretStreams:
    """Streams of noise and of hidden coins."""

    root: int | str
    """A key, or the number of an experiment that is to be repeatable."""

    @classmethod
    def from_key(cls, key: str, *bound_to: str) -> SecretStreams:
        """Return the streams of a key; bound to something else, it gives other numbers."""
        return cls("/".join([key, *bound_to]))

    def words(self, purpose: str, round_number: int, user: int = -1) -> Words:
        """Return the words of one address; ``user=-1`` is the server."""
        return Words(_digest(f"{self.root}/{purpose}/{round_number}/{user}", 32))


def _digest(address: str, size: int) -> bytes:
    return hashlib.blake2b(address.encode(), digest_size=size).digest()


@dataclass(frozen=True)
class SecretRound:
    """The secret streams in one round."""

    number: int
    streams: SecretStreams

    def words(self, purpose: str, user: int = -1) -> Words:
        """Return the words of a purpose in this round, for a client or the server."""
        return self.streams.words(purpose, self.number, user)

    def of(self, somebody: str) -> SecretRound:
        """Return somebody else's streams, where a simulation has to have them all."""
        return SecretRound(self.number, SecretStreams(f"{self.streams.root}/{somebody}"))


PastNoise = Callable[[str, tuple[int, ...], Any, int], NDArray[np.float32]]
"""(array of the upload, its shape, clients, round) -> the noise that these clients added then."""

Guard = Callable[[Any, Any], Any]
"""(gradients of a step as an update, clients) -> the same clipped and noised, in whole tables."""


@dataclass(frozen=True)
class Round:
    """What a client knows of the round it takes part in, besides what it received."""

    number: int
    streams: Streams
    past_noise: PastNoise | None = None
    """What a client remembers of the noise on its own uploads, where it adds any."""
    guard: Guard | None = None
    """What makes a step's gradient safe to build on, where training itself is protected."""

    def key(self, purpose: str) -> Key:
        """Return the key of a purpose in this round."""
        return self.streams.key(purpose, self.number)

    def generator(self, purpose: str) -> np.random.Generator:
        """Return the server's generator for a purpose in this round."""
        return self.streams.generator(purpose, self.number)
