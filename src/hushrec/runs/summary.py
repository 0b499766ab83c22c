"""How summary.json is made: of a run, of several seeds, of a federation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hushrec.aggregation.statistics import Evaluation
from hushrec.data import Interactions
from hushrec.data import partition as silos
from hushrec.data.splitting import Part, Split
from hushrec.evaluation.evaluator import chance_ranks, popularity_ranks
from hushrec.evaluation.metrics import Coverage, PopularityBias
from hushrec.federation.rounds import ServerState, Training
from hushrec.federation.setup import SimulatedTraining
from hushrec.io.memory import peak_rss_bytes
from hushrec.io.stored import Tables
from hushrec.methods.base import facts_of
from hushrec.privacy.composition import compose
from hushrec.privacy.statement import PrivacyStatement
from hushrec.runs.schema import (
    PUBLISHED_MARK,
    Baselines,
    Communication,
    SiloFacts,
    Summary,
    Timing,
    UserCounts,
)


def summarise(
    training: SimulatedTraining, split: Split, state: ServerState, data: Interactions
) -> Summary:
    """Return the summary of a run whose clients are all here; ``data`` is what was split."""
    backend, method = training.backend, training.task.method
    evaluator, store, shared = backend.evaluator, backend.selected, state.selected_shared
    assert evaluator is not None and store is not None, "a round was selected"
    model = evaluator.model(method, training.serving(shared), store)
    top = evaluator.top_items(model, "test", 10)
    counts = np.bincount(split.train.positives.values, minlength=split.data.n_items)
    popularity = popularity_ranks(evaluator, "test")
    holders = split.holders
    return Summary(
        **_common(training, state),
        data_digest=data_digest(data),
        test=evaluator.summarise(backend.ranks["test"]),
        valid=evaluator.summarise(backend.ranks["valid"]),
        baselines=Baselines(
            popularity=evaluator.summarise(popularity),
            chance=evaluator.summarise(chance_ranks(popularity)),
        ),
        lists={
            "coverage@10": Coverage(10).value(top, counts),
            "popularity_bias@10": PopularityBias(10).value(top, counts),
        },
        users=UserCounts(**split.facts(), ranked_users=len(evaluator.evaluated_users("test"))),
        silos=None if holders is None else SiloFacts(**silos.facts(split.train, holders)),
        notes=list(split.data.notes),
    )


def summarise_federation(
    training: Training,
    state: ServerState,
    nodes: Mapping[str, int],
    results: Mapping[Part, Evaluation],
) -> Summary:
    """Return the summary that a coordinator can make; ``nodes`` has the users of each node.

    Interactions and ranks stay on the nodes: there are no baselines, and nothing of single users.
    """
    users, ranked = sum(nodes.values()), results["test"].users
    return Summary(
        **_common(training, state),
        nodes=dict(nodes),
        test=results["test"].means(),
        valid=results["valid"].means(),
        users=UserCounts(
            users=users,
            items=training.task.public.n_items,
            training_clients=len(training.clients),
            evaluated_users=ranked,
            not_evaluated_users=users - ranked,
            ranked_users=ranked,
        ),
        notes=[],
    )


def _common(training: Training, state: ServerState) -> dict[str, Any]:
    """Return what is known to every server: settings, rounds, costs, privacy."""
    experiment, sent = training.experiment, (state.up_bytes, state.down_bytes)
    return {
        "method": experiment.method,
        "data": experiment.data,
        "protocol": experiment.protocol,
        "protocol_mark": PUBLISHED_MARK if experiment.protocol == "published" else None,
        "preset": experiment.preset,
        "options": experiment.options,
        "rounds": state.round,
        "selected_round": state.selected_round,
        "selected_by": training.selected_by,
        "improving": _is_improving(training, state),
        "seed": experiment.seed,
        "model": dict(facts_of(training.task.method, state.selected_shared)),
        "communication": Communication(up_bytes=sent[0], down_bytes=sent[1]),
        "time": Timing(total_s=state.seconds, per_round_s=state.seconds / max(1, state.round)),
        "peak_rss_bytes": peak_rss_bytes(),
        "privacy": training.plan.statement(
            state.account, state.round, state.ledger, state.up_bytes
        ),
    }


def _is_improving(training: Training, state: ServerState) -> bool:
    """Say whether more rounds would probably help: see `Summary.improving`."""
    method = training.task.method
    learns = method.traits.learns and method.phases[-1].repeats
    chosen = training.selected_by == "validation" and state.round == training.experiment.rounds
    return learns and chosen and state.selected_round == state.round


def mean_summary(summaries: Sequence[Summary]) -> Summary:
    """Return the summary of several seeds: means under the same names, and standard deviations."""

    def table(part: str, reduce: Callable[[list[float]], Any]) -> Tables:
        tables = [getattr(summary, part) for summary in summaries]
        return {
            candidates: {
                name: float(reduce([table[candidates][name] for table in tables]))
                for name in tables[0][candidates]
            }
            for candidates in tables[0]
        }

    def deviation(values: list[float]) -> Any:
        return np.std(values, ddof=1) if len(values) > 1 else 0.0

    def mean(value: Callable[[Summary], float]) -> float:
        return float(np.mean([value(summary) for summary in summaries]))

    return summaries[0].model_copy(
        update={
            "seed": [summary.seed for summary in summaries],
            "runs": [f"seed-{summary.seed}" for summary in summaries],
            "rounds": [summary.rounds for summary in summaries],
            "selected_round": [summary.selected_round for summary in summaries],
            "improving": False,
            "test": table("test", np.mean),
            "valid": table("valid", np.mean),
            "test_sd": table("test", deviation),
            "lists": {
                name: float(np.mean([summary.lists[name] for summary in summaries]))
                for name in summaries[0].lists
            },
            "communication": Communication(
                up_bytes=round(mean(lambda s: s.communication.up_bytes)),
                down_bytes=round(mean(lambda s: s.communication.down_bytes)),
            ),
            "time": Timing(
                total_s=mean(lambda s: s.time.total_s),
                per_round_s=mean(lambda s: s.time.per_round_s),
            ),
            "peak_rss_bytes": max(summary.peak_rss_bytes for summary in summaries),
            "privacy": _composed_privacy(summaries),
        }
    )


def _composed_privacy(summaries: Sequence[Summary]) -> PrivacyStatement:
    """Return the weakest statement of one seed, and what all seeds release together."""
    statements = [summary.privacy for summary in summaries]
    weakest = max(statements, key=lambda one: one.epsilon or 0)
    if len(statements) < 2 or not all(one.promises for one in statements):
        return weakest
    together = compose([summary.claim(f"seed-{summary.seed}") for summary in summaries]).stated()
    return weakest.model_copy(update={"statement": together.statement, "together": together})


def data_digest(data: Interactions) -> str:
    """Identify people's rows, independent of the split and of items without interactions."""
    touched = np.bincount(data.item, minlength=data.n_items) > 0
    hashed = hashlib.blake2b(digest_size=16)
    for ids in (data.users, data.items[touched]):
        hashed.update("\n".join([*ids.tolist(), ""]).encode())
    for array in (data.user, (np.cumsum(touched) - 1)[data.item], data.value, data.time):
        hashed.update(np.ascontiguousarray(array).tobytes())
    return hashed.hexdigest()
