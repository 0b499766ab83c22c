"""The backend whose clients are on remote nodes.

Each node sums its clients' uploads exactly, and the coordinator adds up the nodes' sums, to the
same bits as one process with all clients. A node that is away, too slow, or sends an invalid reply
is left out of the round: the log names it, and the round continues with the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation.statistics import Evaluation
from hushrec.data.splitting import Part
from hushrec.deployment.coordinator.roster import Roster
from hushrec.deployment.coordinator.session import Session
from hushrec.deployment.coordinator.summing import PlainSumming, Summing
from hushrec.errors import FederationError
from hushrec.federation.backends.base import Collected
from hushrec.federation.client import Task
from hushrec.federation.experiment import Experiment
from hushrec.federation.messages import Download
from hushrec.federation.requests import EvaluationRequest, TrainRequest
from hushrec.federation.sums import ExpectedSum, round_shape
from hushrec.io.codec import Arrays
from hushrec.methods.base import Shared
from hushrec.privacy.protection import Protection


class RemoteBackend:
    """The nodes of a federation, as a backend of the training loop."""

    def __init__(
        self,
        task: Task,
        experiment: Experiment,
        roster: Roster,
        session: Session,
        selected: int = 0,
        summing: Summing | None = None,
    ) -> None:
        """``selected`` is the selected round of a run that continues; ``summing`` adds up the
        nodes' sums, by default in the clear."""
        self.task = task
        self.experiment = experiment
        self.roster = roster
        self.session = session
        self.summing: Summing = PlainSumming(session) if summing is None else summing
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
            self._check_can_skip()
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
        """Merge the nodes' evaluations of their own users' held-out items."""
        shared = Download(self.round, serving).to_bytes()
        requests = {
            name: EvaluationRequest(assignment, self.round, part, self.selected, selected, shared)
            for name, assignment in self.assignments.items()
        }
        return self.summing.evaluate(requests, self.experiment.evaluation.reported)

    def keep_selected(self) -> None:
        """Let the nodes keep this round's private parameters: the next request says so."""
        self.selected = self.round

    def save(self, *, selected: bool) -> Iterator[Arrays]:
        """Yield nothing: nodes keep what is theirs."""
        return iter(())

    def load(self, parts: Iterable[Arrays], *, selected: bool) -> None:
        """Put nothing back."""

    def _expected(self, download: Download, protection: Protection) -> ExpectedSum:
        """Return the shape and the bounds of a sum of this round."""
        shape = round_shape(self.task, protection, download)
        norm = protection.norm_of(download.round)
        largest = self.session.policy.largest_norm if norm is None else norm
        most_steps = 2**62 // max(1, len(self.assignments)) - 1
        return ExpectedSum(self.roster.run, download.round, 0, shape, largest, most_steps)

    def _check_can_skip(self) -> None:
        """Refuse to continue without a round that later ones need."""
        method = self.task.method
        alone = min(self.experiment.rounds, method.phase_of(self.round).rounds) == 1
        if alone or method.budget_shares:
            raise FederationError(
                f"round {self.round} can be summed no more, and {method.name} cannot do without "
                "it: begin a new run"
            )
