"""One seed, many named streams.

A stream is addressed, never passed along: (seed, purpose, round, user) always gives the same
numbers, whoever asks, in whatever order, on whatever thread or machine. That is what makes a run
independent of chunk size, of the number of threads and of where it was resumed.

`Streams` makes the addresses. Python code takes a numpy generator (`generator`); kernels take a
128-bit key (`key`), mix in each user's number and count upwards (`kernels.draw`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Streams:
    """All random streams of one run, addressed by purpose, round and user."""

    seed: int

    def key(
        self, purpose: str, round_number: int = 0
    ) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """Return the 128-bit key of a purpose in a round, as two words; kernels add the user."""
        address = f"{self.seed}/{purpose}/{round_number}".encode()
        digest = hashlib.blake2b(address, digest_size=16).digest()
        return np.frombuffer(digest, dtype=np.uint64).copy()

    def generator(self, purpose: str, round_number: int = 0, user: int = -1) -> np.random.Generator:
        """Return a numpy generator for one address; ``user=-1`` is the server."""
        low, high = self.key(f"{purpose}/{user}", round_number)
        return np.random.Generator(np.random.Philox(key=[int(low), int(high)]))
