"""Ask before allocating: the kernel would grant the memory and kill the process later."""

from __future__ import annotations

import os
from pathlib import Path

from hushrec.errors import ConfigError


def require_memory(size: int, what: str, instead: str) -> None:
    """Refuse before allocating what the machine does not have."""
    available = _available_memory()
    if size > available:
        raise ConfigError(
            f"{what} would take {size / 2**30:.1f} GB and {available / 2**30:.1f} GB of memory "
            f"are available; use {instead}"
        )


def _available_memory() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
