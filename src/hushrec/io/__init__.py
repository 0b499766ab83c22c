"""Files, bytes and memory: atomic writes, checked paths, bounded reading, one codec for arrays.

Large allocations are checked first: Linux grants memory that it lacks and kills the process later.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from hushrec.errors import ConfigError


def require_memory(size: int, what: str, instead: str) -> None:
    """Raise `ConfigError` if ``size`` bytes are not available; ``instead`` is the advice."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = _kilobytes("/proc/meminfo", "MemAvailable:") or physical
    if size > available:
        raise ConfigError(
            f"{what} would take {size / 2**30:.1f} GB and {available / 2**30:.1f} GB of memory "
            f"are available; use {instead}"
        )


def peak_rss_bytes() -> int:
    """Return the peak resident set size of this process."""
    # getrusage counts from before exec: a child would start with the size of its parent.
    own = _kilobytes("/proc/self/status", "VmHWM:")
    if own is not None:
        return own
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def usable_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _kilobytes(file: str, key: str) -> int | None:
    """Read a line like ``VmHWM:  1234 kB`` of Linux's process files, in bytes; None elsewhere."""
    path = Path(file)
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    return None
