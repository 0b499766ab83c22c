"""`njit`: numba compilation with an on-disk cache that may be missing, full or damaged.

Without a usable cache every process compiles its kernels again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numpy.typing import NDArray

Array = NDArray[Any]
Kernel = TypeVar("Kernel", bound=Callable[..., Any])
UNCACHED: set[str] = set()
"""Modules whose kernels are not cached."""
on_compiling: Callable[[], None] | None = None
"""Called once, before the first compilation of a kernel that is then cached."""


def njit(**options: Any) -> Callable[[Kernel], Kernel]:
    """Compile a kernel as `numba.njit` does, with a cache if possible."""

    def compiled(kernel: Kernel) -> Kernel:
        if _has_home():
            with suppress(RuntimeError):  # numba found no folder for its cache
                return cast(Kernel, _forgiving(numba.njit(**options)(kernel)))
        UNCACHED.add(kernel.__module__)
        return cast(Kernel, numba.njit(**{**options, "cache": False})(kernel))

    return compiled


def _has_home() -> bool:
    """Return whether there is a home folder; without one numba would create a folder ``~``."""
    with suppress(RuntimeError):
        return bool({"NUMBA_CACHE_DIR", "XDG_CACHE_HOME"} & os.environ.keys() or Path.home())
    return False


def _forgiving(kernel: Any) -> Any:
    """Ignore errors of the cache: a kernel that cannot be loaded is compiled."""
    cache = kernel._cache
    load, save = cache.load_overload, cache.save_overload

    def load_overload(*about: Any) -> Any:
        global on_compiling
        loaded = None
        try:
            loaded = load(*about)
        except Exception:  # reading a damaged file of the cache may raise anything
            with suppress(Exception):
                cache.flush()
        if loaded is None and on_compiling is not None:
            tell, on_compiling = on_compiling, None
            tell()
        return loaded

    def save_overload(*about: Any) -> None:
        with suppress(Exception):
            save(*about)

    cache.load_overload, cache.save_overload = load_overload, save_overload
    return kernel
