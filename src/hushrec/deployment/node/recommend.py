"""Recommending on a node: the model it received last, its users' own parameters and histories."""

from __future__ import annotations

from dataclasses import replace

from hushrec.api import Recommendation, Run
from hushrec.deployment.node.database import NodeStore
from hushrec.deployment.node.runs import NodeRuns
from hushrec.deployment.node.setup import Engines, split_of
from hushrec.errors import ConfigError, RunError
from hushrec.federation.backends.simulation import THIS_MACHINE
from hushrec.federation.requests import LookRequest


def recommend(store: NodeStore, user: str, k: int = 10) -> list[Recommendation]:
    """Return the best k items that a user of this node has not touched.

    Interactions that came in since the run count at once. Who came to the node since is folded in.
    """
    runs, number = NodeRuns(store), store.number_of(user)
    if number is None:
        raise ConfigError(f"{store.path} has no user '{user}': add what they touched first")
    served = runs.newest_model()
    if served is None:
        raise RunError(f"{store.path} has no model yet: it comes with the end of a run")
    run, request = served[0], LookRequest.from_bytes(served[1])
    now = replace(run, upto=store.latest())
    engine = Engines(store, THIS_MACHINE).of(now, request.terms)
    runs.load(run, engine.kept, engine.backend.store, selected=True)
    trained = Run(
        experiment=store.agreement.experiment,
        split=split_of(store, now, request.terms),
        method=engine.backend.task.method,
        shared=request.serving.common,
        store=engine.backend.store,
        summary={},
        ranks={},
        folder=None,
    )
    history = None if number in run.members else store.items_of(number)
    return trained.recommend(user, k, history)
