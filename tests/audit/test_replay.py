"""The loop of a run is played again: what lies around the mechanism is caught, honest runs pass."""

from dataclasses import replace

import numpy as np
import pytest

import hushrec
from hushrec.audit import OUT_OF_SIGHT, audit
from hushrec.audit.replay import replay
from hushrec.data.splitting import make_split
from hushrec.data.views import CohortConfig
from hushrec.federation import backends, rounds
from hushrec.federation import setup as setting_up
from hushrec.federation.experiment import ExperimentRequest
from hushrec.methods.base import method_class, method_names
from hushrec.methods.relations import Relates
from hushrec.methods.statistics.private_pairs import PrivatePairs
from hushrec.privacy.noise import ValidationQueries
from hushrec.streams import SecretRound, Streams
from hushrec.testing import taste_world
from hushrec.testing.backend import SILOS, SMALLER

CENTRAL = {"privacy.mode": "central", "privacy.epsilon": 2.0}
LOCAL = {"privacy.mode": "local-gaussian", "privacy.clip": 1.0, "privacy.epsilon": 2.0}
POISSON = {"cohort.kind": "poisson", "cohort.probability": 0.3}
TRAITS = {name: method_class(name).traits for name in method_names()}
PROTECTED = [
    name
    for name, has in TRAITS.items()
    if not has.pooled
    and not issubclass(method_class(name), Relates)
    and not (has.exact_sums and method_class(name).under_noise is None)
]


def played(method, settings, number=3):
    """Replay a run of so many rounds; return the problems."""
    asked = {**settings, **SMALLER.get(method, {})}
    if TRAITS[method].silos:
        asked |= SILOS
    planned = method_class(method).under_noise is not None and settings is CENTRAL
    request = ExperimentRequest(
        "tastes", method, rounds=None if planned else number, settings=asked
    )
    experiment = request.experiment()
    split = make_split(taste_world(), experiment.split, Streams(0), experiment.silos)
    return replay(experiment, split, Streams(0))["problems"]


@pytest.mark.parametrize("method", PROTECTED)
def test_honest_runs_pass(method):
    assert played(method, CENTRAL) == []


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedmf", LOCAL),
        ("fedmf", {**LOCAL, "privacy.mode": "local-laplace"}),
        ("fedmf", {**CENTRAL, **POISSON}),
        ("popularity", {**CENTRAL, "cohort.kind": "fixed", "cohort.size": 10}),
        ("fedmf", {**CENTRAL, "privacy.clipping": "row", "privacy.clip": 0.1}),
        ("fedmf", {**CENTRAL, "privacy.selection_share": 0.1}),
        ("fedmf", {**CENTRAL, "privacy.mode": "distributed", "privacy.nodes": 4}),
        (
            "fedmf",
            {
                "privacy.mode": "local-gaussian",
                "privacy.clip": 1.0,
                "privacy.budgets": "activity",
                "privacy.epsilon_min": 1.0,
                "privacy.epsilon_max": 4.0,
            },
        ),
        (
            "fedrkg",
            {**LOCAL, "privacy.mode": "local-gradients", "privacy.clip": 0.1, "guidance": "fixed"},
        ),
    ],
)
def test_honest_modes_pass(method, settings):
    assert played(method, settings) == []


# ------------------------------------------------------------ planted defects


def heavier(monkeypatch):
    """Weight what was clipped by the length of the history, in the client."""
    honest = backends.take_part

    def planted(task, protection, download, view, private):
        upload, kept = honest(task, protection, download, view, private)
        lengths = np.diff(view.positives.indptr[view.client_indptr]).astype(np.float32)
        update = upload.update
        rows = {
            name: replace(of, rows=of.rows * np.repeat(lengths, np.diff(of.indptr))[:, None])
            for name, of in update.rows.items()
        }
        each = {n: lengths.reshape(-1, *[1] * (of.ndim - 1)) for n, of in update.dense.items()}
        dense = {name: of * each[name] for name, of in update.dense.items()}
        return replace(upload, update=replace(update, rows=rows, dense=dense)), kept

    monkeypatch.setattr(backends, "take_part", planted)


def first_noise_in_the_last_round(monkeypatch):
    """Begin the streams of round 1 again in round 3."""
    monkeypatch.setattr(
        rounds, "SecretRound", lambda number, streams: SecretRound(1 + (number - 1) % 2, streams)
    )


def one_key(monkeypatch):
    """Draw the noise of every run from one key."""
    monkeypatch.setattr(setting_up, "new_key", lambda: "0" * 64)


def raw_head(monkeypatch):
    """Choose the head by counts that the method kept from its clients."""
    honest, counts = PrivatePairs.phases.fget, {}

    def phases(self):
        first, *others = honest(self)

        def fit(shared, private, view, now):
            if len(view):
                found = np.bincount(view.positives.values, minlength=view.n_items)
                counts["raw"] = counts.get("raw", 0) + found
            return first.fit(shared, private, view, now)

        def apply(shared, total, number):
            after = first.apply(shared, total, number)
            raw = counts.pop("raw", np.zeros(len(after["head"])))
            head = np.zeros_like(after["head"])
            head[np.argsort(-raw, kind="stable")[: int(after["head"].sum())]] = True
            return {**after, "head": head}

        return (replace(first, fit=fit, apply=apply), *others)

    monkeypatch.setattr(PrivatePairs, "phases", property(phases))


def loud_without_data(monkeypatch):
    """Let clients without data upload something, within the bound."""
    honest = backends.take_part

    def planted(task, protection, download, view, private):
        upload, kept = honest(task, protection, download, view, private)
        empty = np.diff(view.positives.indptr[view.client_indptr]) == 0
        dense = {
            name: np.where(empty.reshape(-1, *[1] * (of.ndim - 1)), np.float32(2**-20), of)
            for name, of in upload.update.dense.items()
        }
        return replace(upload, update=replace(upload.update, dense=dense)), kept

    monkeypatch.setattr(backends, "take_part", planted)


def public_cohorts(monkeypatch):
    """Draw the cohorts from the public seed."""
    honest = CohortConfig.draw
    monkeypatch.setattr(
        CohortConfig, "draw", lambda self, n, streams, number: honest(self, n, Streams(0), number)
    )


def shipped_by_raw_validation(monkeypatch):
    """Ship the round of the best validation metric."""
    honest, best = rounds._evaluate, {}

    def planted(training, state, callbacks):
        entries = honest(training, state, callbacks)
        here = entries["valid"]["full"]["ndcg@10"], state.round, state.shared
        best[id(state)] = max(best.get(id(state), here), here, key=lambda found: found[0])
        _, state.selected_round, state.selected_shared = best[id(state)]
        return entries

    monkeypatch.setattr(rounds, "_evaluate", planted)
    # Noise that happens to prefer the last round: no test by chance.
    monkeypatch.setattr(
        ValidationQueries, "value", lambda self, tally, metric, secret: secret.number
    )


PLANTED = [
    (heavier, "fedmf", CENTRAL, "moves the sum by"),
    (heavier, "fedmf", LOCAL, "moves the sum by"),
    (first_noise_in_the_last_round, "fedmf", CENTRAL, "of round 1 is used again in round 3"),
    (one_key, "fedmf", CENTRAL, "two runs have the same noise"),
    (one_key, "fedmf", LOCAL, "two runs have the same noise"),
    (raw_head, "fednext", CENTRAL, "'head' after round 1 is not a function of the released sums"),
    (loud_without_data, "fedrap", CENTRAL, "a client without data uploads something"),
    (public_cohorts, "fedmf", {**CENTRAL, **POISSON}, "two runs have the same cohorts"),
    (shipped_by_raw_validation, "fedmf", CENTRAL, "chosen by validation items without noise"),
    (
        shipped_by_raw_validation,
        "fedmf",
        {**CENTRAL, "privacy.selection_share": 0.1},
        "which no noised validation query chose",
    ),
]


@pytest.mark.parametrize(("plant", "method", "settings", "words"), PLANTED)
def test_a_planted_defect_is_caught(plant, method, settings, words, monkeypatch):
    plant(monkeypatch)
    assert any(words in problem for problem in played(method, settings))


def test_an_audit_plays_the_loop_and_says_what_it_cannot_see(tmp_path, monkeypatch):
    out = tmp_path / "run"
    run = hushrec.train(taste_world(), "fedmf", settings={**CENTRAL, "d": 3}, rounds=3, out=out)
    honest = audit(run, users=10, trials=1000)
    assert (honest.verdict, honest.replay.problems) == ("kept", [])
    assert honest.out_of_sight == OUT_OF_SIGHT
    one_key(monkeypatch)
    found = audit(run, users=10, trials=1000)
    assert found.verdict == "contradicted"
    assert any("two runs have the same noise" in reason for reason in found.reasons)
