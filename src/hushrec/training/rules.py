"""How a batch moves the networks and rows of silos: Adam, plain descent, and a Moreau envelope.

Moments start anew in every round, so nothing of them is at rest. Rows of tables move only in the
steps that look them up ("lazy" Adam): a step costs what its batch holds, not the catalogue.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hushrec.kernels.silo_steps import (
    adam_network,
    adam_rows,
    descend_network,
    descend_rows,
    follow_rows,
)

Array = NDArray[Any]


class Held:
    """A group's networks, or the rows of its tables, and what a rule remembers of them."""

    def __init__(self, values: Array, rule: Rule, *, moves: bool, shared: bool) -> None:
        self.values = values
        self.anchors = values.copy() if rule.anchored and shared else values
        """What an envelope draws them back to; what nobody else has is in no envelope."""
        shape = values.shape if moves else (0, 0)
        self.first, self.second = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.summed = np.zeros((shape[0], shape[1] + 1), np.float32)
        """Room for the sums of the gradients of rows, and a mark; 0 between steps."""


@dataclass(frozen=True)
class Rule(ABC):
    """What a step does with a gradient; ``number`` counts steps from 1."""

    anchored: ClassVar[bool] = False
    """Whether parameters that are shared have anchors, which follow them."""

    @property
    def repeats(self) -> int:
        """Steps on one batch."""
        return 1

    @abstractmethod
    def move_network(
        self, held: Held, gradient: Array, start: int, active: Array, number: int
    ) -> None:
        """Step on the parameter that begins at ``start``; who is not active stays."""

    @abstractmethod
    def move_rows(self, held: Held, gradient: Array, index: Array, number: int) -> None:
        """Step on the rows of ``index``, each once, with the sum of its gradients."""

    def move_anchors(self, network: Held, items: Held, active: Array, index: Array) -> None:
        """Let anchors follow after a batch; without any, nothing."""
        return


@dataclass(frozen=True)
class PlainDescent(Rule):
    """Plain gradient steps."""

    rate: float

    def move_network(
        self, held: Held, gradient: Array, start: int, active: Array, number: int
    ) -> None:
        """Go against the gradient."""
        descend_network(held.values, gradient, start, active, self.rate)

    def move_rows(self, held: Held, gradient: Array, index: Array, number: int) -> None:
        """Go against the gradient."""
        descend_rows(held.values, held.summed, index, gradient, self.rate)


@dataclass(frozen=True)
class Adam(Rule):
    """Kingma and Ba's rule; on table rows, only in the steps that look them up."""

    rate: float
    first: float = 0.9
    second: float = 0.999
    tiny: float = 1e-8

    @property
    def pull(self) -> float:
        """Weight of half the squared distance from the anchors in the loss; without any, 0."""
        return 0.0

    def factors(self, number: int) -> tuple[float, float, float, float, float]:
        """Return (decays, corrected rate, correction of the squares, tiny) of a step."""
        rate, spread = self.rate / (1 - self.first**number), 1 / (1 - self.second**number)
        return self.first, self.second, rate, spread, self.tiny

    def move_network(
        self, held: Held, gradient: Array, start: int, active: Array, number: int
    ) -> None:
        """Take the moments' step."""
        factors, moments = self.factors(number), (held.first, held.second)
        adam_network(
            held.values, *moments, gradient, start, active, factors, held.anchors, self.pull
        )

    def move_rows(self, held: Held, gradient: Array, index: Array, number: int) -> None:
        """Take the moments' step."""
        factors, moments = self.factors(number), (held.first, held.second)
        pull = self.pull if held.anchors is not held.values else 0.0
        adam_rows(held.values, *moments, held.summed, index, gradient, factors, held.anchors, pull)


@dataclass(frozen=True)
class Moreau(Adam):
    """Steps of Adam on every batch, drawn back to anchors that then follow (see `pfedme`)."""

    anchored: ClassVar[bool] = True
    steps: int = 1
    """Steps on a batch."""
    weight: float = 0.0
    """Of half the squared distance from the anchors in the loss."""
    share: float = 1.0
    """Share of the way that the anchors follow after a batch."""

    @property
    def repeats(self) -> int:
        """Steps on one batch."""
        return self.steps

    @property
    def pull(self) -> float:
        """Weight of half the squared distance from the anchors in the loss."""
        return self.weight

    def move_anchors(self, network: Held, items: Held, active: Array, index: Array) -> None:
        """Let the anchors of the active networks and of the rows of ``index`` follow."""
        for c in np.flatnonzero(active):
            network.anchors[c] += np.float32(self.share) * (network.values[c] - network.anchors[c])
        follow_rows(items.anchors, items.values, items.summed, index, self.share)
