"""What a backend is: the clients' side of a run, wherever the clients are.

The server's side is `federation.rounds`. It decides who takes part and what they are sent, and
takes in what comes back; it never sees a client's data or private parameters. Every backend is held
to `one_by_one`, where each client is alone and speaks through bytes, by
`hushrec.testing.BackendContract`: the same bits, whatever the backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

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
    """What the server has after a round of uploads."""

    summed: ExactSum
    loss: LossSum
    up_bytes: int
    down_bytes: int
    zeroed_out: int = 0
    """Uploads that held a number which is none, and counted as zero."""
    noised: bool = False
    """Whether nodes added their shares of the noise before anybody summed."""
    lost: bool = False
    """Whether the sum can never be opened: there is nothing to apply, and the round is over."""


class Backend(Protocol):
    """The clients of a run."""

    def train(
        self, download: Download, protection: Protection, cohort: NDArray[np.int64]
    ) -> Collected:
        """Send the download to a cohort, let it take part, and sum up what comes back.

        ``protection`` is the server's side of it: what it does with uploads as they arrive.
        """
        ...

    def evaluate(self, serving: Shared, part: Part, *, selected: bool = False) -> Evaluation:
        """Let every client rank its own held-out items, with its newest or selected parameters."""
        ...

    def keep_selected(self) -> None:
        """Let the clients remember their private parameters as those of the selected round."""
        ...

    def describe(self, shared: Shared, number: int) -> Mapping[str, Any]:
        """Return what else can be told of the last look, for the log; nothing where clients are far
        away."""
        ...

    def save(self, *, selected: bool) -> Iterator[Arrays]:
        """Yield the clients' newest or selected private parameters, in parts, for a checkpoint."""
        ...

    def load(self, parts: Iterable[Arrays], *, selected: bool) -> None:
        """Put back what `save` yielded."""
        ...


class Simulation(Backend, Protocol):
    """A backend that holds everybody, so that a run can be looked into: what `hushrec train` takes.

    It is made as ``Mine(task, view, store, evaluator, machine)``.
    """

    store: PrivateStore
    selected: PrivateStore | None
    evaluator: Evaluator | None
    ranks: dict[str, PartRanks]
