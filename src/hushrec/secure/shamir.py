"""Shamir's secret sharing: a secret in shares of which any t recover it and t - 1 tell nothing.

The secret is a polynomial's value at 0, a share its value elsewhere; the other t - 1 coefficients
are random numbers of the field. The field's prime is the smallest above 2^256, so that any 32 bytes
are a secret. Shares are numbers of the field; `SHARE_BYTES` hold one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
