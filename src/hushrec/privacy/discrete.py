"""Exact samples of the discrete Gaussian and the discrete Laplace distribution.

    P(k) ~ exp(-k² / 2 s²)        or        P(k) ~ exp(-|k| / s)        (Canonne et al. 2020)

The low bits of floating-point noise depend on the number it is added to, and can reveal uploads
that the noise seems to hide (Mironov 2012). Here noise and data are whole numbers of steps of the
exact sums.

Sampling. Magnitudes are divided into blocks of t = 2^b, about a fiftieth of the scale:

1. A uniform number from [0, 1) selects block j with probability ~ exp(-E(j t)), where E is the
   exponent of the distribution, by comparison with cumulative probabilities.
2. b random bits select k = j t + u, one more the sign; minus zero is rejected.
3. A second uniform number accepts k if it is below exp(-(E(k) - E(j t))).

So k has probability ~ exp(-E(k)) without any error: a comparison reads as many bits of the uniform
number, and computes as many digits of the bound, as it needs (`Law.exactly`). The kernel does the
same comparisons in 64-bit arithmetic with a margin for rounding, and falls back to `exactly` where
the margin does not decide, about once in 10^14 samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal, localcontext
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from itertools import accumulate, chain, count
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hushrec.errors import ConfigError
from hushrec.kernels.ragged import draw_whole
from hushrec.streams import Words

Kind = Literal["gaussian", "laplace"]
LEAST_SCALE, LARGEST_SCALE = 2**6, 2**56
WORD = 2**64
BATCH = 2**15
"""Samples per kernel call, few enough for the processor cache."""
DIGITS = 60
"""Decimal digits of the table of probabilities; thresholds need 20."""
REACH: dict[Kind, int] = {"gaussian": 10, "laplace": 45}
"""Multiples of the scale that the table covers; `exactly` draws larger magnitudes."""
GUIDE_BITS = 10


@dataclass(frozen=True)
class Law:
    """A discrete Gaussian or Laplace distribution on the integers."""

    kind: Kind
    scale: int
    """s: nearly the standard deviation of a Gaussian, b of a Laplace distribution."""

    def __post_init__(self) -> None:
        if not LEAST_SCALE <= self.scale < LARGEST_SCALE:
            raise ConfigError(
                f"noise of {self.scale / 2**32:.3g} does not fit the sums' grid of 2^-32: use a "
                "clip between 1e-4 and 1e4"
            )

    @property
    def block_bits(self) -> int:
        """Binary logarithm of the block size t."""
        return self.scale.bit_length() - 6

    def draw(self, words: Words, size: int) -> NDArray[np.int64]:
        """Draw ``size`` samples; they depend on the stream only, not on how draws are batched."""
        out, done = np.empty(size, np.int64), 0
        left = np.empty(0, np.uint64)
        while done < size:
            wanted = min(size - done, BATCH)
            # Two words per sample, and about one sample in twenty is rejected.
            more = words.take(max(2 * wanted + wanted // 8 + 32 - len(left), 0))
            left = np.concatenate([left, more])
            about = *self._table, self.block_bits, float(self.scale), self.kind == "gaussian"
            done, used, doubt = draw_whole(out, done, done + wanted, left, *about)
            left = left[used:]
            if doubt:
                ahead = iter(left.tolist())
                following = chain(ahead, iter(lambda: int(words.take(1)[0]), None))
                out[done] = self.exactly(partial(next, following))
                left = np.array(list(ahead), np.uint64)
                done += 1
        return out

    def exactly(self, word: Callable[[], int]) -> int:
        """Draw one sample from a source of 64-bit words, without any error."""
        bits = self.block_bits
        while True:
            first = _Uniform(word(), 64, word)
            block = next(k for k in count() if first.is_below(partial(self._share, k)))
            second = word()
            magnitude = (block << bits) + (second & ((1 << bits) - 1))
            negative = bool(second >> 63)
            spare = 63 - bits
            acceptance = _Uniform((second >> bits) & ((1 << spare) - 1), spare, word)
            exponent = self._exponent(magnitude) - self._exponent(block << bits)
            accepted = acceptance.is_below(partial(_exp_of_minus, exponent))
            if accepted and not (negative and magnitude == 0):
                return -magnitude if negative else magnitude

    def _exponent(self, magnitude: int) -> Fraction:
        if self.kind == "laplace":
            return Fraction(magnitude, self.scale)
        return Fraction(magnitude**2, 2 * self.scale**2)

    def _share(self, block: int, digits: int) -> tuple[Fraction, Fraction]:
        """Return bounds of the cumulative probability up to this block."""
        shares = _shares(self, digits)
        if block >= len(shares):  # the rest is less than the error
            return 1 - Fraction(1, 10**digits), Fraction(1)
        return _around(Fraction(shares[block]), digits)

    @cached_property
    def _table(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Floors of 2^64 times the cumulative probabilities, and an index for their search."""
        blocks = (REACH[self.kind] * self.scale >> self.block_bits) + 1
        with localcontext(prec=2 * DIGITS):
            scaled = [share * WORD for share in _shares(self, DIGITS)[:blocks]]
            floors = [threshold.to_integral_value(ROUND_FLOOR) for threshold in scaled]
            close = Decimal(10) ** -(DIGITS // 2)
            assert all(close < t - f < 1 - close for t, f in zip(scaled, floors, strict=True))
        thresholds = np.array([int(floor) for floor in floors], np.uint64)
        starts = np.arange(2**GUIDE_BITS, dtype=np.uint64) << np.uint64(64 - GUIDE_BITS)
        return thresholds, np.searchsorted(thresholds, starts).astype(np.int64)


@lru_cache(maxsize=64)
def _shares(of: Law, digits: int) -> list[Decimal]:
    """Return the cumulative probabilities of the blocks to this number of digits."""
    with localcontext(prec=digits + 20):
        width = Decimal(1 << of.block_bits) / of.scale
        # The weight falls by a factor from block to block; a Gaussian's factor falls as well.
        factor = (-width if of.kind == "laplace" else -width * width / 2).exp()
        falls = Decimal(1) if of.kind == "laplace" else factor * factor
        weights, weight = [], Decimal(1)
        while weight > Decimal(10) ** -(digits + 5):
            weights.append(weight)
            weight, factor = weight * factor, factor * falls
        whole = sum(weights)
        return [share / whole for share in accumulate(weights)]


@lru_cache(maxsize=256)
def law(kind: Kind, scale: int) -> Law:
    """Return a cached distribution, whose table is computed once."""
    return Law(kind, scale)


class _Uniform:
    """A uniform number from [0, 1) with lazily read bits."""

    def __init__(self, leading: int, bits: int, word: Callable[[], int]) -> None:
        self.leading, self.bits, self.word = leading, bits, word

    def is_below(self, bounds: Callable[[int], tuple[Fraction, Fraction]]) -> bool:
        """Return whether it is below a number given by bounds of any precision."""
        digits = 40
        while True:
            low, high = bounds(digits)
            least = Fraction(self.leading, 2**self.bits)
            most = Fraction(self.leading + 1, 2**self.bits)
            if most <= low:
                return True
            if least >= high:
                return False
            if least > low or most < high:
                digits *= 2  # the bounds are too wide to decide
            else:
                self.leading, self.bits = self.leading * WORD + self.word(), self.bits + 64


def _exp_of_minus(exponent: Fraction, digits: int) -> tuple[Fraction, Fraction]:
    """Return bounds of exp(-exponent) for an exponent below 100."""
    if exponent == 0:  # the only rational value, which no number of digits would separate
        return Fraction(1), Fraction(1)
    with localcontext(prec=digits + 10):
        value = (-Decimal(exponent.numerator) / Decimal(exponent.denominator)).exp()
    return _around(Fraction(value), digits)


def _around(value: Fraction, digits: int) -> tuple[Fraction, Fraction]:
    error = Fraction(1, 10**digits)
    return value - error, value + error
