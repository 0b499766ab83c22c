"""Vectors of 64-bit words that are summed securely, and the keystreams that mask them.

A node's whole upload is one vector, counts, losses and metrics included, so that all of it is
masked. Its layout is public, and the parties compare its digest.

An entry of an array is a word: a whole number modulo 2^64, read with its sign. Sums of losses and
metrics (`hushrec.aggregation`) are whole numbers of some hundred bits. If their words were
summed separately, the carries would leak more than the sum. So a wide number is five words that add
up as one number modulo 2^320.

A mask is the keystream of ChaCha20 under a key that is used for one mask only, added word by word.
Without the key, a masked vector is uniform. Vectors are masked in stretches that fit the cache, all
masks at a time, so that no second vector is allocated.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

from hushrec.errors import ConfigError, DivergedError
from hushrec.secagg import keys

WORD = np.dtype("<u8")
WIDE = 5
"""Words of a wide number: 2^303 with its sign, summed over 2^16 nodes."""
LONGEST = 2**32
"""Words of the longest vector: far below the 2^35 after which a keystream would repeat."""
TOO_LARGE = (
    "'{name}' is too large to be summed over {nodes} nodes: training diverged; "
    "use a smaller learning rate"
)
Words = NDArray[np.uint64]


@dataclass(frozen=True)
class VectorLayout:
    """Names and shapes of the summed arrays, in order."""

    arrays: Mapping[str, tuple[int, ...]]
    wide: tuple[str, ...] = ()
    """Names of wide numbers, which come after the arrays."""

    def __post_init__(self) -> None:
        names = [*self.arrays, *self.wide]
        for name in names:
            if not name or names.count(name) > 1:
                raise ConfigError(f"a layout needs different names: '{name}' will not do")
        for name, shape in self.arrays.items():
            if any(size < 0 for size in shape):
                raise ConfigError(f"'{name}' cannot have shape {shape}")
        if not 0 < self.length <= LONGEST:
            raise ConfigError(f"a vector of {self.length:,} words cannot be summed securely")

    @property
    def words(self) -> int:
        """Words of the arrays."""
        return sum(prod(shape) for shape in self.arrays.values())

    @property
    def length(self) -> int:
        """Words of the whole vector."""
        return self.words + WIDE * len(self.wide)

    @cached_property
    def digest(self) -> bytes:
        """Digest that the parties of a sum compare."""
        return hashlib.sha256(self.to_json().encode()).digest()

    def to_json(self) -> str:
        """Encode the layout for the node's own store."""
        arrays = [[name, list(shape)] for name, shape in self.arrays.items()]
        return json.dumps([arrays, list(self.wide)])

    @classmethod
    def from_json(cls, text: str) -> VectorLayout:
        """Decode what `to_json` wrote."""
        arrays, wide = json.loads(text)
        return cls({name: tuple(shape) for name, shape in arrays}, tuple(wide))

    def pack(
        self, arrays: Mapping[str, NDArray[np.int64]], wide: Mapping[str, int], nodes: int
    ) -> NDArray[np.int64]:
        """Return the vector; entries that could overflow in a sum of so many nodes are refused."""
        for name in sorted({*arrays, *wide} ^ {*self.arrays, *self.wide}):
            raise ConfigError(f"'{name}' is in the layout or among the arrays, but not in both")
        vector = np.empty(self.length, np.int64)
        most, start = (2**63 - 1) // nodes, 0
        for name, shape in self.arrays.items():
            array = arrays[name]
            if array.dtype != np.int64 or array.shape != shape:
                raise ConfigError(f"'{name}' is {array.dtype}{array.shape}, not int64{shape}")
            if array.size and not -most <= array.min() <= array.max() <= most:
                raise DivergedError(TOO_LARGE.format(name=name, nodes=nodes))
            vector[start : start + array.size] = array.ravel()
            start += array.size
        most = (2 ** (64 * WIDE - 1) - 1) // nodes
        for name in self.wide:
            if abs(wide[name]) > most:
                raise DivergedError(TOO_LARGE.format(name=name, nodes=nodes))
            number = wide[name].to_bytes(8 * WIDE, "little", signed=True)
            vector[start : start + WIDE] = np.frombuffer(number, WORD).view("<i8")
            start += WIDE
        return vector

    def unpack(
        self, vector: NDArray[np.int64]
    ) -> tuple[dict[str, NDArray[np.int64]], dict[str, int]]:
        """Return arrays (as views) and wide numbers of a vector."""
        arrays, start = {}, 0
        for name, shape in self.arrays.items():
            arrays[name] = vector[start : start + prod(shape)].reshape(shape)
            start += prod(shape)
        numbers = vector[start:].astype("<i8").reshape(-1, WIDE)
        wide = {
            name: int.from_bytes(number.tobytes(), "little", signed=True)
            for name, number in zip(self.wide, numbers, strict=True)
        }
        return arrays, wide


STRETCH = 2**15
"""Words that are masked at a time: 256 KiB."""
Mask = tuple[bytes, bool]
"""A key, and whether its keystream is added or subtracted."""


def keystream(key: bytes) -> CipherContext:
    """Return the cipher that encrypts zeros to the keystream of a key."""
    return Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()


def own_mask(mask_seed: bytes, added: bool) -> Mask:
    """Return a node's own mask."""
    return keys.derive(mask_seed, "own mask"), added


def pair_mask(digest: bytes, private: bytes, pair: tuple[int, int], public: bytes) -> Mask:
    """Return the pairwise mask that the first of two nodes adds; ``digest`` is of the terms."""
    shared = keys.agree(private, public)
    assert shared is not None, "announced keys were checked"
    key = keys.derive(shared, "pair mask", digest, struct.pack("<2H", *sorted(pair)))
    return key, pair[0] < pair[1]


def masked(vector: Words, layout: VectorLayout, masks: Iterable[Mask]) -> Iterator[Words]:
    """Yield a masked vector in stretches; each is overwritten by the next."""
    streams = [(keystream(key), added) for key, added in masks]
    words, length = layout.words, layout.length
    longest = max(min(STRETCH, words), length - words)
    zeros, mask, stretch = bytes(8 * longest), np.empty(longest, WORD), np.empty(longest, WORD)
    spans = [(start, min(start + STRETCH, words)) for start in range(0, words, STRETCH)]
    spans += [(words, length)] if layout.wide else []
    for start, end in spans:
        size = end - start
        here, noise = stretch[:size], mask[:size]
        here[:] = vector[start:end]
        for cipher, added in streams:
            cipher.update_into(memoryview(zeros)[: 8 * size], noise.data.cast("B"))
            _combine(here, noise, added, wide=start >= words)
        yield here


def add_masks(vector: Words, layout: VectorLayout, masks: Iterable[Mask]) -> Words:
    """Return a vector with masks added; adding a mask with the other sign removes it."""
    whole, start = np.empty_like(vector), 0
    for stretch in masked(vector, layout, masks):
        whole[start : start + len(stretch)] = stretch
        start += len(stretch)
    return whole


def add(total: Words, vector: Words, layout: VectorLayout) -> None:
    """Add a vector to a running total, in place."""
    words = layout.words
    _combine(total[:words], vector[:words], added=True, wide=False)
    _combine(total[words:], vector[words:], added=True, wide=True)


def _combine(total: Words, other: Words, added: bool, wide: bool) -> None:
    if not wide:
        (np.add if added else np.subtract)(total, other, out=total)
        return
    # Least word first. Taking away is adding the complement and one.
    mine = total.reshape(-1, WIDE)
    theirs = (other if added else ~other).reshape(-1, WIDE)
    carry = np.full(len(mine), not added, WORD)
    for word in range(WIDE):
        plain = mine[:, word] + theirs[:, word]
        carried = plain + carry
        carry = ((plain < theirs[:, word]) | (carried < plain)).astype(WORD)
        mine[:, word] = carried
