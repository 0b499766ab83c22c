"""Many named streams of random numbers, addressed and never passed along.

(root, purpose, round, user) always gives the same numbers, whoever asks, in whatever order, on
whatever thread or machine. That is what makes a run independent of chunk size, of the number of
threads, of the backend and of where it was resumed.

There are two kinds, and they are different types. `Streams` come from the run's seed, which
everybody knows: first parameters, samples, what is looked at. `SecretStreams` are for noise, which
protects nothing once its numbers are known, and for who takes part where that is to be hidden;
their root is drawn from the operating system for each run.

Python code takes a numpy generator (`generator`); kernels take a 128-bit key (`key`), mix in each
user's number and count upwards (`kernels.draw`).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Key = NDArray[np.uint64]


def new_key() -> str:
    """Draw 256 bits from the operating system."""
    return secrets.token_hex(32)


@dataclass(frozen=True)
class _Addressed:
    """Random streams under one root, addressed by purpose, round and user."""

    seed: int | str

    def key(self, purpose: str, round_number: int = 0) -> Key:
        """Return the 128-bit key of a purpose in a round, as two words; kernels add the user."""
        address = f"{self.seed}/{purpose}/{round_number}".encode()
        digest = hashlib.blake2b(address, digest_size=16).digest()
        return np.frombuffer(digest, dtype=np.uint64).copy()

    def generator(self, purpose: str, round_number: int = 0, user: int = -1) -> np.random.Generator:
        """Return a numpy generator for one address; ``user=-1`` is the server."""
        low, high = self.key(f"{purpose}/{user}", round_number)
        return np.random.Generator(np.random.Philox(key=[int(low), int(high)]))


@dataclass(frozen=True)
class Streams(_Addressed):
    """Public streams, that everybody may know: from the run's seed."""

    seed: int


@dataclass(frozen=True)
class SecretStreams(_Addressed):
    """Streams of noise and of hidden coins."""

    @classmethod
    def from_key(cls, key: str, *bound_to: str) -> SecretStreams:
        """Return the streams of a key; bound to something else, it gives other numbers."""
        return cls("/".join([key, *bound_to]))


@dataclass(frozen=True)
class SecretRound:
    """The secret streams in one round."""

    number: int
    streams: SecretStreams

    def key(self, purpose: str) -> Key:
        """Return the key of a purpose in this round."""
        return self.streams.key(purpose, self.number)

    def generator(self, purpose: str) -> np.random.Generator:
        """Return the server's generator for a purpose in this round."""
        return self.streams.generator(purpose, self.number)


PastNoise = Callable[[str, tuple[int, ...], Any, int], NDArray[np.float32]]
"""(array of the upload, its shape, clients, round) -> the noise that these clients added then."""


@dataclass(frozen=True)
class Round:
    """What a client knows of the round it takes part in, besides what it received."""

    number: int
    streams: Streams
    past_noise: PastNoise | None = None
    """What a client remembers of the noise on its own uploads, where it adds any."""

    def key(self, purpose: str) -> Key:
        """Return the key of a purpose in this round."""
        return self.streams.key(purpose, self.number)

    def generator(self, purpose: str) -> np.random.Generator:
        """Return the server's generator for a purpose in this round."""
        return self.streams.generator(purpose, self.number)
