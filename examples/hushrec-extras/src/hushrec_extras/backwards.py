"""Backwards: a backend that trains its clients from the last to the first, one at a time.

What comes out is the same to the bit: who comes when does not matter.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hushrec.extend import InProcess, Protection


class Backwards(InProcess):
    """All clients in this process, in another order."""

    def batches(self, protection: Protection, cohort: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return every client by itself, the last one first."""
        if self.task.method.traits.pooled:
            return super().batches(protection, cohort)
        return [cohort[k : k + 1] for k in reversed(range(len(cohort)))]
