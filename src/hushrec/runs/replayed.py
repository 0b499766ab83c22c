"""What `hushrec audit` stores of a replay."""

from __future__ import annotations

from hushrec.io.codec import Count, Stored


class ReplayResult(Stored):
    """Whether the run's own loop, played again and watched, does what the claim assumes."""

    rounds: Count
    clients: Count
    uploads: Count
    """Uploads of single clients that were compared with those without data."""
    problems: list[str]
