"""How kernels are compiled: once, and kept in numba's cache where there is a place for one.

A cache is a convenience. Where its folder cannot be made, is full or holds damaged files, kernels
are compiled anew by every process, and nothing else changes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numba

Kernel = TypeVar("Kernel", bound=Callable[..., Any])
UNCACHED: set[str] = set()
"""Modules whose kernels have no place in any cache."""
on_compiling: Callable[[], None] | None = None
"""Told once when a kernel has to be compiled that later will be in the cache."""


def njit(**options: Any) -> Callable[[Kernel], Kernel]:
    """Compile a kernel as `numba.njit` does, with a cache if there can be one."""

    def compiled(kernel: Kernel) -> Kernel:
        made: Kernel
        if _has_home():
            with suppress(RuntimeError):  # numba has tried all places it knows
                made = _forgiving(numba.njit(**options)(kernel))
                return made
        UNCACHED.add(kernel.__module__)
        made = numba.njit(**{**options, "cache": False})(kernel)
        return made

    return compiled


def _has_home() -> bool:
    """Say whether there is one; without it numba would make a folder called ``~`` where we are."""
    if {"NUMBA_CACHE_DIR", "XDG_CACHE_HOME"} & os.environ.keys():
        return True
    try:
        Path.home()
    except RuntimeError:
        return False
    return True


def _tell() -> None:
    global on_compiling
    told, on_compiling = on_compiling, None
    if told is not None:
        told()


def _forgiving(kernel: Any) -> Any:
    """Let what goes wrong with the cache pass: what cannot be read or kept is compiled."""
    cache = kernel._cache
    load, save = cache.load_overload, cache.save_overload

    def load_overload(*about: Any) -> Any:
        found = None
        try:
            found = load(*about)
        except Exception:  # reading a damaged file of the cache may raise anything
            with suppress(Exception):
                cache.flush()
        if found is None:
            _tell()
        return found

    def save_overload(*about: Any) -> None:
        with suppress(Exception):
            save(*about)

    cache.load_overload, cache.save_overload = load_overload, save_overload
    return kernel
