"""Training and evaluation of a node's clients; the caller stores the results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import UploadShape
from hushrec.aggregation.statistics import Evaluation
from hushrec.deployment.node.runs import NodeRun, NodeRuns
from hushrec.deployment.node.setup import Engine, Engines
from hushrec.errors import MessageError
from hushrec.federation.backends.simulation import Machine
from hushrec.federation.requests import EvaluationRequest, TrainRequest
from hushrec.federation.sums import NodeSum, round_shape
from hushrec.io.codec import Arrays
from hushrec.privacy.plan import Plan
from hushrec.privacy.protection import Protection
from hushrec.private.store import PrivateStore
from hushrec.streams import SecretStreams


@dataclass(frozen=True, eq=False)
class TrainedRound:
    """The results of a training round."""

    sum: NodeSum
    private: PrivateStore
    clients: Mapping[int, int]
    """Clients that took part, with their indices in the private store."""
    charged: bool
    """Whether the round is charged to their privacy budgets."""
    protection: Protection
    secret: SecretStreams


class NodeTrainer:
    """Trains and evaluates the node's clients."""

    def __init__(self, runs: NodeRuns, machine: Machine) -> None:
        self.runs = runs
        self.store = runs.store
        self.engines = Engines(runs.store, machine)

    def shape(self, request: TrainRequest) -> UploadShape:
        """Return the shape of a sum of this round, which depends on no client's data."""
        task = self.engines.setup(request.assignment).task
        phase = task.method.phase_of(request.download.round)
        check_received(phase.download(task.initial), request.download.common)
        common = request.download.to(np.zeros(0, np.int64))
        return round_shape(task, task.protection_of(common), request.download)

    def train(self, run: NodeRun, request: TrainRequest) -> TrainedRound:
        """Train the requested clients whose privacy budget allows another upload."""
        engine = self.engines.of(run, request.assignment)
        backend, task, number = engine.backend, engine.backend.task, request.download.round
        phase = task.method.phase_of(number)
        check_received(phase.download(task.initial), request.download.common)
        if self.store.contract.secure is not None:
            _check_everybody(engine, request)
        able = self._affordable(run, engine, request)
        # The backend knows its clients by index, and takes them in ascending order.
        indices = np.array([engine.places[c] for c in request.clients[able].tolist()], np.int64)
        order = np.argsort(indices)
        download = request.download.to(able[order])
        here = set(indices.tolist())
        clients = {client: index for client, index in engine.kept.items() if index in here}
        self.runs.load(run, clients, backend.store)
        protection = task.protection_of(download.to(able[:0]))
        collected = backend.train(download, protection, indices[order])
        found = NodeSum(
            run.id,
            number,
            collected.summed,
            collected.loss,
            collected.up_bytes,
            collected.zeroed_out,
        )
        charged = _costs(engine.plan, number)
        return TrainedRound(found, backend.store, clients, charged, protection, task.secret)

    def evaluate(self, run: NodeRun, request: EvaluationRequest) -> Evaluation:
        """Evaluate the node's users with the newest or the selected private parameters."""
        run = self.runs.select(run, request.selected)
        engine = self.engines.of(run, request.assignment)
        backend, serving = engine.backend, request.serving
        check_received(backend.task.method.serving(backend.task.initial), serving)
        self.runs.load(run, engine.kept, backend.store, selected=request.with_selected)
        evaluation = backend.evaluate(serving, request.part)
        if request.with_selected:
            self.runs.keep_model(run, request.to_bytes())
        return evaluation

    def _affordable(self, run: NodeRun, engine: Engine, request: TrainRequest) -> NDArray[np.int64]:
        """Return which requested clients are here and have budget left, by the ledger."""
        budgets, number = engine.plan.budgets, request.download.round
        spent: Mapping[int, int] = {}
        if budgets is not None and _costs(engine.plan, number):
            by_index = {index: client for client, index in engine.kept.items()}
            paid = self.runs.spent(run, number)
            spent = {index: paid.get(client, 0) for index, client in by_index.items()}
        indices = [engine.places.get(client) for client in request.clients.tolist()]
        return np.array(
            [
                k
                for k, index in enumerate(indices)
                if index is not None and (budgets is None or spent.get(index, 0) < budgets.uploads)
            ],
            np.int64,
        )


def check_received(known: Arrays, received: Arrays) -> None:
    """Refuse parameters with other dtypes or shapes than the initial ones."""
    for name, array in known.items():
        if name not in received:
            raise MessageError(f"the server sent no '{name}'")
        came = received[name]
        if (came.dtype, came.shape) != (array.dtype, array.shape):
            raise MessageError(
                f"'{name}' is {came.dtype}{came.shape}, not {array.dtype}{array.shape}"
            )


def _check_everybody(engine: Engine, request: TrainRequest) -> None:
    """Refuse to train some clients only: a sum over few clients would reveal their uploads.

    Clients with budgets of their own may have used them up, and add noise of their own.
    """
    if engine.plan.budgets is None and not np.isin(engine.training, request.clients).all():
        raise MessageError("the server asks for some of this node's clients, and it is all or none")


def _costs(plan: Plan, number: int) -> bool:
    """Return whether uploads of this round are charged to privacy budgets."""
    accounted = plan.event is not None or plan.budgets is not None
    return accounted and number not in plan.silent
