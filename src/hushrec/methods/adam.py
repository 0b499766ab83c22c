"""Adam with decoupled weight decay, as a server's optimiser: its state is shared parameters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hushrec.methods.base import Shared

FIRST, SECOND, SMALL = 0.9, 0.99, 1e-8


@dataclass(frozen=True)
class Adam:
    """One step of Adam on ``network``, from the mean gradient."""

    rate: float
    decay: float

    @staticmethod
    def start(network: NDArray[np.float32]) -> Shared:
        """Return the state before the first step."""
        zeros = np.zeros(len(network))
        return {"adam/steps": np.array([0]), "adam/first": zeros, "adam/second": zeros.copy()}

    def step(self, shared: Shared, gradient: NDArray[np.float64]) -> Shared:
        """Return the network and the state after a step."""
        steps = shared["adam/steps"] + 1
        first = FIRST * shared["adam/first"] + (1 - FIRST) * gradient
        second = SECOND * shared["adam/second"] + (1 - SECOND) * gradient**2
        step = first / (1 - FIRST**steps) / (np.sqrt(second / (1 - SECOND**steps)) + SMALL)
        network = shared["network"] * (1 - self.rate * self.decay) - self.rate * step
        return {
            "network": network.astype(np.float32),
            "adam/steps": steps,
            "adam/first": first,
            "adam/second": second,
        }
