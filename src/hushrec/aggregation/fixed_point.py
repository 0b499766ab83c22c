"""Fixed point of exact sums: their step, and what a key space may declare of its entries."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hushrec.errors import ConfigError

STEPS_PER_UNIT = 2.0**32


@dataclass(frozen=True)
class FixedPoint:
    """Fixed point of the rows of a key space: a secure sum then needs narrower words.

    Rows are multiples of 2^-bits, and a client's rows of one key add up to ``largest`` at most, in
    size. The declaration is public. `ExactSum` refuses an upload that does not keep to it, so the
    exact sum and the secure sum are the same number.
    """

    bits: int
    largest: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.bits <= 32 and 1 <= self.largest < 2**30):
            raise ConfigError(
                f"a grid of {self.bits} bits up to {self.largest} cannot be summed: use 0 to 32 "
                "bits, and a largest value from 1 on and below 2^30"
            )

    @property
    def unit(self) -> int:
        """Steps of the exact sum between two points of the grid."""
        return int(STEPS_PER_UNIT) >> self.bits

    @property
    def most(self) -> int:
        """Steps of the exact sum in ``largest``."""
        return int(STEPS_PER_UNIT) * self.largest

    def round(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the nearest points of the grid."""
        scale = 2.0**self.bits
        return (np.rint(values.astype(np.float64) * scale) / scale).astype(np.float32)
