"""Recommendations on a node: the newest shared model, with its users' parameters and histories."""

from __future__ import annotations

from dataclasses import replace

from hushrec.deployment.node.database import NodeDatabase
from hushrec.deployment.node.runs import NodeRuns
from hushrec.deployment.node.setup import Engines
from hushrec.errors import ConfigError, RunError
from hushrec.federation.backends.simulation import THIS_MACHINE
from hushrec.federation.requests import EvaluationRequest
from hushrec.serving.model import Recommendation


def recommend(store: NodeDatabase, user: str, k: int = 10) -> list[Recommendation]:
    """Return the best k items that a user of this node has not touched.

    Interactions since the run count immediately. Users that came to the node since are folded in.
    """
    runs, number = NodeRuns(store), store.number_of(user)
    if number is None:
        raise ConfigError(f"{store.path} has no user '{user}': add what they touched first")
    served = runs.newest_model()
    if served is None:
        raise RunError(f"{store.path} has no model yet: it comes with the end of a run")
    run, request = served[0], EvaluationRequest.from_bytes(served[1])
    now = replace(run, upto=store.latest())
    engine = Engines(store, THIS_MACHINE).of(now, request.assignment)
    runs.load(run, engine.kept, engine.backend.store, selected=True)
    evaluator = engine.backend.evaluator
    assert evaluator is not None, "a node's backend has an evaluator"
    private = engine.backend.store
    model = evaluator.model(engine.backend.task.method, request.serving, private)
    history = None if number in run.members else store.items_of(number)
    return model.recommend(user, k, history)
