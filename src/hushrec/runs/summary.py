"""What summary.json says of a run, or of several seeds together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hushrec.data import Interactions
from hushrec.data import partition as silos
from hushrec.data.splitting import Split
from hushrec.evaluation.evaluator import chance_ranks, popularity_ranks
from hushrec.evaluation.metrics import Coverage, PopularityBias
from hushrec.federation.rounds import ServerState
from hushrec.federation.setup import SimulatedTraining
from hushrec.io.memory import peak_rss_bytes
from hushrec.methods.base import Staged, facts_of
from hushrec.privacy.composition import Claim, compose, promises

PUBLISHED_MARK = "published protocol (leaks the held-out item)"


def mean_summary(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the summary of several seeds: means under the same names, and their spread."""

    def table(part: str, reduce: Callable[[list[float]], Any]) -> dict[str, dict[str, float]]:
        first = summaries[0][part]
        return {
            candidates: {
                name: float(reduce([summary[part][candidates][name] for summary in summaries]))
                for name in first[candidates]
            }
            for candidates in first
        }

    def mean(*path: str) -> float:
        values: list[Any] = list(summaries)
        for key in path:
            values = [value[key] for value in values]
        return float(np.mean(values))

    return {
        **summaries[0],
        "seed": [summary["seed"] for summary in summaries],
        "runs": [f"seed-{summary['seed']}" for summary in summaries],
        "rounds": [summary["rounds"] for summary in summaries],
        "selected_round": [summary["selected_round"] for summary in summaries],
        "improving": False,
        "test": table("test", np.mean),
        "valid": table("valid", np.mean),
        "test_sd": table("test", lambda values: np.std(values, ddof=1) if len(values) > 1 else 0),
        "lists": {name: mean("lists", name) for name in summaries[0]["lists"]},
        "communication": {
            key: round(mean("communication", key)) for key in ("up_bytes", "down_bytes")
        },
        "time": {key: mean("time", key) for key in ("total_s", "per_round_s")},
        "peak_rss_bytes": max(summary["peak_rss_bytes"] for summary in summaries),
        "privacy": _privacy_of_seeds(summaries),
    }


def _privacy_of_seeds(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what is said of one run, the weakest, and of all together: each may be published."""
    said = [summary["privacy"] for summary in summaries]
    weakest = max(said, key=lambda one: one["epsilon"] or 0)
    if len(said) < 2 or not all(map(promises, said)):
        return dict(weakest)
    together = compose([Claim.of(f"seed-{s['seed']}", s) for s in summaries])
    return {**weakest, "statement": together.statement, "together": together.as_dict()}


def _improves_still(training: SimulatedTraining, state: ServerState) -> bool:
    """Say whether validation was best at the last round, of a method that more would help."""
    method = training.task.method
    learns = method.traits.learns and not isinstance(method, Staged)
    chosen = training.selected_by == "validation" and state.round == training.experiment.rounds
    return learns and chosen and state.selected_round == state.round


def data_digest(data: Interactions) -> str:
    """Identify people's rows, whatever is made of them and whichever list of items they are on."""
    touched = np.bincount(data.item, minlength=data.n_items) > 0
    hashed = hashlib.blake2b(digest_size=16)
    for ids in (data.users, data.items[touched]):
        hashed.update("\n".join([*ids.tolist(), ""]).encode())
    for array in (data.user, (np.cumsum(touched) - 1)[data.item], data.value, data.time):
        hashed.update(np.ascontiguousarray(array).tobytes())
    return hashed.hexdigest()


def summarise(
    training: SimulatedTraining, split: Split, state: ServerState, data: Interactions
) -> dict[str, Any]:
    """Return what summary.json holds; these names are a contract. ``data`` was split."""
    experiment, backend, method = training.experiment, training.backend, training.task.method
    evaluator, store, shared = backend.evaluator, backend.selected, state.selected_shared
    assert evaluator is not None and store is not None, "a round was selected"
    model = evaluator.model(method, training.serving(shared), store)
    top = evaluator.top_items(model, "test", 10)
    counts = np.bincount(split.train.positives.values, minlength=split.data.n_items)
    n_test = len(evaluator.evaluated_users("test"))
    popularity = popularity_ranks(evaluator, "test")
    return {
        "method": experiment.method,
        "data": experiment.data,
        "data_digest": data_digest(data),
        "protocol": experiment.protocol,
        "protocol_mark": PUBLISHED_MARK if experiment.protocol == "published" else None,
        "preset": experiment.preset,
        "options": experiment.options,
        "rounds": state.round,
        "selected_round": state.selected_round,
        "selected_by": training.selected_by,
        "improving": _improves_still(training, state),
        "seed": experiment.seed,
        "test": evaluator.summarise(backend.ranks["test"]),
        "valid": evaluator.summarise(backend.ranks["valid"]),
        "yardsticks": {
            "popularity": evaluator.summarise(popularity),
            "chance": evaluator.summarise(chance_ranks(popularity)),
        },
        "model": dict(facts_of(method, shared)),
        "lists": {
            "coverage@10": Coverage(10).value(top, counts),
            "popularity_bias@10": PopularityBias(10).value(top, counts),
        },
        "users": {**split.facts(), "looked_at": n_test},
        "silos": None if split.holders is None else silos.facts(split.train, split.holders),
        "notes": list(split.data.notes),
        "communication": {"up_bytes": state.up_bytes, "down_bytes": state.down_bytes},
        "time": {"total_s": state.seconds, "per_round_s": state.seconds / max(1, state.round)},
        "peak_rss_bytes": peak_rss_bytes(),
        "privacy": training.plan.statement(
            state.account, state.round, state.ledger, state.up_bytes
        ),
    }
