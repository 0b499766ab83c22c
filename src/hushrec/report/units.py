"""Figures as people read them; the space before a unit does not break."""

from __future__ import annotations

NO_BREAK = "\N{NO-BREAK SPACE}"


def human_size(size: float) -> str:
    """Write a number of bytes for people, in units of 1,000."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while abs(size) >= 999.5 and len(units) > 1:
        size /= 1000
        units.pop(0)
    digits = 0 if units[0] == "bytes" or size >= 100 else 1
    return f"{size:.{digits}f}{NO_BREAK}{units[0]}"


def human_duration(seconds: float) -> str:
    """Write a duration for people."""
    if seconds < 1:
        return f"{1000 * seconds:.0f}{NO_BREAK}ms"
    if seconds < 90:
        return f"{seconds:.1f}{NO_BREAK}s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f}{NO_BREAK}min"
    return f"{seconds / 3600:.1f}{NO_BREAK}h"


def figure(value: float) -> str:
    """Write a metric or a loss: four digits behind the point, fewer before it is large."""
    return f"{value:.4f}" if abs(value) < 10 else f"{value:,.1f}"


def signed(difference: float) -> str:
    """Write a difference of two metrics, with a real minus; nothing is +0.0000."""
    return f"{round(difference, 4) + 0.0:+.4f}".replace("-", "−")


def percent(share: float) -> str:
    """Write a share in per cent."""
    return f"{100 * share:.1f} %"
