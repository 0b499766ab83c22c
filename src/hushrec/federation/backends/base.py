"""The interface of a backend: the clients' side of a run, wherever the clients are.

The server's side is `federation.rounds`. It draws cohorts, makes downloads and sums uploads, and
never sees a client's data or private parameters. `hushrec.testing.BackendContract` holds every
backend to the bits of the reference backend, which trains each client alone and through bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import ExactSum
from hushrec.aggregation.statistics import Evaluation, LossSum
from hushrec.data.splitting import Part
from hushrec.evaluation.evaluator import Evaluator, PartRanks
from hushrec.federation.messages import Download
from hushrec.io.codec import Arrays
from hushrec.methods.base import Shared
from hushrec.privacy.protection import Protection
from hushrec.private.store import PrivateStore


@dataclass(frozen=True)
class Collected:
    """The uploads of a round, summed."""

    summed: ExactSum
    loss: LossSum
    up_bytes: int
    down_bytes: int
    zeroed_out: int = 0
    """Uploads that held a number which is none, and counted as zero."""
    noised: bool = False
    """Whether nodes added their shares of the noise before the sum."""
    lost: bool = False
    """Whether the secure sum can never be opened; the round then changes nothing."""


class Backend(Protocol):
    """The clients of a run."""

    def train(
        self, download: Download, protection: Protection, cohort: NDArray[np.int64]
    ) -> Collected:
        """Send the download to a cohort, train its clients, and sum their uploads.

        ``protection`` is the server's side: how it treats uploads as they arrive.
        """
        ...

    def evaluate(self, serving: Shared, part: Part, *, selected: bool = False) -> Evaluation:
        """Rank the held-out items of all clients, with their newest or selected parameters."""
        ...

    def keep_selected(self) -> None:
        """Keep the clients' private parameters as those of the selected round."""
        ...

    def save(self, *, selected: bool) -> Iterator[Arrays]:
        """Yield the clients' newest or selected private parameters, in parts, for a checkpoint."""
        ...

    def load(self, parts: Iterable[Arrays], *, selected: bool) -> None:
        """Put back what `save` yielded."""
        ...


class Simulation(Backend, Protocol):
    """A backend that holds all clients, with ranks and private parameters: for `hushrec train`.

    It is made as ``Mine(task, view, store, evaluator, machine)``.
    """

    store: PrivateStore
    selected: PrivateStore | None
    evaluator: Evaluator | None
    ranks: dict[str, PartRanks]
