"""What of a node is summed, as one vector: named arrays of whole numbers, and wide numbers.

Everything that leaves a node is in the vector, counts, losses and metrics too, so that all of it is
masked alike. The layout is public and agreed on by digest.

An entry of an array is a word: a whole number modulo 2^64, read with its sign. Sums of losses and
metrics (`aggregate.statistics`) are whole numbers of some hundred bits. Cut into pieces that are
summed each for itself they would tell more than their sum: how often the pieces carried. So a wide
number is five words that add up as one number modulo 2^320, and carries stay inside.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from hushrec.errors import ConfigError, DivergedError

WORD = np.dtype("<u8")
WIDE = 5
"""Words of a wide number: 2^303 with its sign, summed over 2^16 nodes."""
LONGEST = 2**32
"""Words of the longest vector: far below the 2^35 after which a keystream would repeat."""
Words = NDArray[np.uint64]


@dataclass(frozen=True)
class Layout:
    """Names and shapes of what is summed, in order."""

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
        """What two parties compare to know that they mean the same vector."""
        return hashlib.sha256(self.to_json().encode()).digest()

    def to_json(self) -> str:
        """Write it, for a node that goes on with a sum later."""
        arrays = [[name, list(shape)] for name, shape in self.arrays.items()]
        return json.dumps([arrays, list(self.wide)])

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Read back what `to_json` wrote."""
        arrays, wide = json.loads(text)
        return cls({name: tuple(shape) for name, shape in arrays}, tuple(wide))

    def pack(
        self, arrays: Mapping[str, NDArray[np.int64]], wide: Mapping[str, int], nodes: int
    ) -> NDArray[np.int64]:
        """Return the vector; what could overflow when so many nodes are summed is refused."""
        for name in sorted({*arrays, *wide} ^ {*self.arrays, *self.wide}):
            raise ConfigError(f"'{name}' is in the layout or in what is summed, but not in both")
        vector = np.empty(self.length, np.int64)
        most, start = (2**63 - 1) // nodes, 0
        for name, shape in self.arrays.items():
            array = arrays[name]
            if array.dtype != np.int64 or array.shape != shape:
                raise ConfigError(f"'{name}' is {array.dtype}{array.shape}, not int64{shape}")
            if array.size and not -most <= array.min() <= array.max() <= most:
                raise _too_large(name, nodes)
            vector[start : start + array.size] = array.ravel()
            start += array.size
        most = (2 ** (64 * WIDE - 1) - 1) // nodes
        for name in self.wide:
            if abs(wide[name]) > most:
                raise _too_large(name, nodes)
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


def _too_large(name: str, nodes: int) -> DivergedError:
    return DivergedError(
        f"'{name}' is too large to be summed over {nodes} nodes: training diverged; "
        "use a smaller learning rate"
    )
