"""The loops of clipping and of local noise; twins of them are in ``tests/privacy``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hushrec.kernels import draw

Array = NDArray[Any]


@njit(cache=True, nogil=True)
def add_powers(sums: Array, indptr: Array, rows: Array, power: int) -> None:
    """Add to each client's sum the absolute values (power 1) or squares (2) of its rows."""
    for c in range(len(sums)):
        for entry in range(indptr[c], indptr[c + 1]):
            for k in range(rows.shape[1]):
                value = np.float64(rows[entry, k])
                sums[c] += value * value if power == 2 else abs(value)


@njit(cache=True, nogil=True)
def distinct_rows(indptr: Array, ids: Array, n_rows: int) -> bool:
    """Say whether all ids are rows of the table and no client names a row twice."""
    last_client = np.full(n_rows, -1)
    for c in range(len(indptr) - 1):
        for entry in range(indptr[c], indptr[c + 1]):
            row = ids[entry]
            if row < 0 or row >= n_rows or last_client[row] == c:
                return False
            last_client[row] = c
    return True


@njit(cache=True, nogil=True)
def ascending_keys(indptr: Array, keys: Array, space: int) -> bool:
    """Say whether all keys are of the space and each client's ascend, none of them twice."""
    for c in range(len(indptr) - 1):
        last = -1
        for entry in range(indptr[c], indptr[c + 1]):
            if keys[entry] <= last or keys[entry] >= space:
                return False
            last = keys[entry]
    return True


@njit(cache=True, nogil=True, inline="always")
def uniform(word: np.uint64) -> float:
    """Map a random word to the middle of one of 2^53 cells of (0, 1)."""
    return (float(word >> np.uint64(11)) + 0.5) * 2.0**-53


@njit(cache=True, nogil=True)
def laplace_noise(key: Array, users: Array, size: int, scale: float) -> Array:
    """Draw Laplace noise, [clients, size], from each user's own stream."""
    out = np.empty((len(users), size), np.float32)
    for c in range(len(users)):
        for k in range(size):
            word = draw(key, users[c], k)
            # The lowest bit is none of the 53 that make the uniform number.
            sign = 1.0 if word & np.uint64(1) else -1.0
            out[c, k] = -sign * scale * math.log(uniform(word))
    return out


@njit(cache=True, nogil=True)
def gaussian_noise(key: Array, users: Array, size: int, scale: float) -> Array:
    """Draw Gaussian noise, [clients, size], from each user's own stream (Box and Muller)."""
    out = np.empty((len(users), size), np.float32)
    for c in range(len(users)):
        for k in range(0, size, 2):
            radius = scale * math.sqrt(-2.0 * math.log(uniform(draw(key, users[c], k))))
            angle = 2.0 * math.pi * uniform(draw(key, users[c], k + 1))
            out[c, k] = radius * math.cos(angle)
            if k + 1 < size:
                out[c, k + 1] = radius * math.sin(angle)
    return out
