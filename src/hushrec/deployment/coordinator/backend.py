"""`Nodes`: the backend whose clients are on nodes, wherever those are.

Nodes sum what their clients upload, exactly, and the server adds up the nodes' sums: the same bits
as everybody in one process. A node that is away, too slow, or answers what cannot be used sits the
round out: it is named in the log, and the round goes on with the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation.statistics import Evaluation
from hushrec.data.splitting import Part
from hushrec.deployment.coordinator.roster import Roster
from hushrec.deployment.coordinator.session import Desk
from hushrec.deployment.coordinator.summing import InTheClear, Summing
from hushrec.deployment.sums import ExpectedSum, round_shape
from hushrec.errors import FederationError
from hushrec.federation.backends.base import Collected
from hushrec.federation.client import Task
from hushrec.federation.experiment import Experiment
from hushrec.federation.messages import Download
from hushrec.federation.requests import EvaluationRequest, TrainRequest
from hushrec.io.codec import Arrays
from hushrec.methods.base import Shared, SharesBudget
from hushrec.privacy.protection import Protection


class Nodes:
    """The nodes of a federation, as the loop sees them."""

    def __init__(
        self,
        task: Task,
        experiment: Experiment,
        roster: Roster,
        desk: Desk,
        selected: int = 0,
        summing: Summing | None = None,
    ) -> None:
        """``selected`` is the selected round of a run that goes on; ``summing`` says how nodes'
        sums come together, where that is not in the clear."""
        self.task = task
        self.experiment = experiment
        self.roster = roster
        self.desk = desk
        self.summing: Summing = InTheClear(desk) if summing is None else summing
        self.assignments = roster.assignments(promised=experiment.privacy.promises)
        self.round = self.selected = selected

    def train(
        self, download: Download, protection: Protection, cohort: NDArray[np.int64]
    ) -> Collected:
        """Send every node what its clients of the cohort receive, and add up what comes back."""
        self.round = download.round
        shared = replace(download, own={}).to_bytes()
        requests = {}
        for name, assignment in self.assignments.items():
            own = np.flatnonzero(np.isin(cohort, assignment.clients))
            requests[name] = TrainRequest(
                assignment, self.selected, cohort[own], shared, download.to(own).own
            )
        gathered = self.summing.train(requests, self._expected(download, protection))
        if gathered.lost:
            self._check_can_do_without()
        found, sent = gathered.sum, (requests[name] for name in gathered.nodes)
        down_bytes = sum(replace(download, own=r.own).nbytes(len(r.clients)) for r in sent)
        return Collected(
            found.summed,
            found.loss,
            found.up_bytes,
            down_bytes,
            found.zeroed_out,
            gathered.noised,
            gathered.lost,
        )

    def evaluate(self, serving: Shared, part: Part, *, selected: bool = False) -> Evaluation:
        """Merge what the nodes say of their own users' held-out items."""
        shared = Download(self.round, serving).to_bytes()
        requests = {
            name: EvaluationRequest(assignment, self.round, part, self.selected, selected, shared)
            for name, assignment in self.assignments.items()
        }
        return self.summing.look(requests, self.experiment.evaluation.reported)

    def keep_selected(self) -> None:
        """Let the nodes keep this round's private parameters: they are told with what comes next.

        Nothing is trained before they are.
        """
        self.selected = self.round

    def describe(self, shared: Shared, number: int) -> Mapping[str, Any]:
        """Tell nothing: only the nodes know."""
        return {}

    def save(self, *, selected: bool) -> Iterator[Arrays]:
        """Yield nothing: nodes keep what is theirs."""
        return iter(())

    def load(self, parts: Iterable[Arrays], *, selected: bool) -> None:
        """Put nothing back."""

    def _expected(self, download: Download, protection: Protection) -> ExpectedSum:
        """Return what a sum of this round looks like."""
        shape = round_shape(self.task, protection, download)
        norm = protection.norm_of(download.round)
        largest = self.desk.rules.largest_norm if norm is None else norm
        most_steps = 2**62 // max(1, len(self.assignments)) - 1
        return ExpectedSum(self.roster.run, download.round, 0, shape, largest, most_steps)

    def _check_can_do_without(self) -> None:
        """Refuse to go on without a round that others build on."""
        method = self.task.method
        if isinstance(method, SharesBudget) or self.experiment.rounds == 1:
            raise FederationError(
                f"round {self.round} can be summed no more, and {method.name} cannot do without "
                "it: begin a new run"
            )
