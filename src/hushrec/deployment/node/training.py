"""What a node does for a run: its clients train, or are looked at. Nothing is written down here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import UploadShape
from hushrec.aggregation.statistics import Evaluation
from hushrec.deployment.node.runs import NodeRun, NodeRuns
from hushrec.deployment.node.setup import Engine, Engines
from hushrec.deployment.sums import NodeSum, round_shape
from hushrec.errors import MessageError
from hushrec.federation.backends.simulation import Machine
from hushrec.federation.requests import EvaluationRequest, TrainRequest
from hushrec.io.codec import Arrays
from hushrec.privacy.plan import Plan
from hushrec.privacy.protection import Protection
from hushrec.private.store import PrivateStore
from hushrec.streams import SecretStreams


@dataclass(frozen=True, eq=False)
class TrainedRound:
    """A round, trained."""

    sum: NodeSum
    private: PrivateStore
    clients: Mapping[int, int]
    """Who took part, and where they are among the private parameters."""
    charged: bool
    """Whether it costs them privacy."""
    protection: Protection
    secret: SecretStreams


class NodeTrainer:
    """The node's clients at work."""

    def __init__(self, runs: NodeRuns, machine: Machine) -> None:
        self.runs = runs
        self.store = runs.store
        self.engines = Engines(runs.store, machine)

    def shape(self, request: TrainRequest) -> UploadShape:
        """Return what a sum of this round looks like; it takes nobody's data."""
        task = self.engines.setup(request.assignment).task
        check_received(task.method.download(task.initial), request.download.common)
        common = request.download.to(np.zeros(0, np.int64))
        return round_shape(task, task.protection_of(common), request.download)

    def train(self, run: NodeRun, request: TrainRequest) -> TrainedRound:
        """Let the clients that are asked for, and can pay, take part in a round."""
        engine = self.engines.of(run, request.assignment)
        backend, task, number = engine.backend, engine.backend.task, request.download.round
        check_received(task.method.download(task.initial), request.download.common)
        if self.store.contract.secure is not None:
            _check_everybody(engine, request)
        asked = self._who_can(run, engine, request)
        # The backend knows its clients by their places, and takes them in that order.
        places = np.array([engine.places[c] for c in request.clients[asked].tolist()], np.int64)
        order = np.argsort(places)
        download = request.download.to(asked[order])
        here = set(places.tolist())
        clients = {client: place for client, place in engine.kept.items() if place in here}
        self.runs.load(run, clients, backend.store)
        protection = task.protection_of(download.to(asked[:0]))
        collected = backend.train(download, protection, places[order])
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

    def look(self, run: NodeRun, request: EvaluationRequest) -> Evaluation:
        """Look at the node's users, with the newest or the selected private parameters."""
        run = self.runs.select(run, request.selected)
        engine = self.engines.of(run, request.assignment)
        backend, serving = engine.backend, request.serving
        check_received(backend.task.method.serving(backend.task.initial), serving)
        self.runs.load(run, engine.kept, backend.store, selected=request.with_selected)
        looked = backend.evaluate(serving, request.part)
        if request.with_selected:
            self.runs.keep_model(run, request.to_bytes())
        return looked

    def _who_can(self, run: NodeRun, engine: Engine, request: TrainRequest) -> NDArray[np.int64]:
        """Return which of the clients asked for are here and can pay, by the node's own ledger."""
        budgets, number = engine.plan.budgets, request.download.round
        spent: Mapping[int, int] = {}
        if budgets is not None and _costs(engine.plan, number):
            by_place = {place: client for client, place in engine.kept.items()}
            paid = self.runs.spent(run, number)
            spent = {place: paid.get(client, 0) for place, client in by_place.items()}
        places = [engine.places.get(client) for client in request.clients.tolist()]
        return np.array(
            [
                k
                for k, place in enumerate(places)
                if place is not None and (budgets is None or spent.get(place, 0) < budgets.uploads)
            ],
            np.int64,
        )


def check_received(known: Arrays, received: Arrays) -> None:
    """Refuse parameters that do not look like those the method starts from."""
    for name, array in known.items():
        if name not in received:
            raise MessageError(f"the server sent no '{name}'")
        came = received[name]
        if (came.dtype, came.shape) != (array.dtype, array.shape):
            raise MessageError(
                f"'{name}' is {came.dtype}{came.shape}, not {array.dtype}{array.shape}"
            )


def _check_everybody(engine: Engine, request: TrainRequest) -> None:
    """Refuse to train some clients only: a sum is no secret where others are told to add nothing.

    Who has a budget of its own may have used it up, and adds noise of its own.
    """
    if engine.plan.budgets is None and not np.isin(engine.training, request.clients).all():
        raise MessageError("the server asks for some of this node's clients, and it is all or none")


def _costs(plan: Plan, number: int) -> bool:
    """Say whether an upload of this round costs its clients privacy."""
    accounted = plan.event is not None or plan.budgets is not None
    return accounted and number not in plan.silent
