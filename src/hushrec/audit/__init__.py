"""Attacks on a finished run: what its privacy is worth, measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from hushrec.api import Run
from hushrec.audit.canary import canaries, noised_rounds
from hushrec.audit.inference import item_inference
from hushrec.audit.membership import membership
from hushrec.audit.replay import MOST_ROUNDS, MOST_USERS, replay
from hushrec.audit.soundness import soundness
from hushrec.errors import RunError
from hushrec.federation.setup import make_task, set_up
from hushrec.privacy.noise import CentralGaussian, LocalNoise
from hushrec.privacy.plan import NoPlan
from hushrec.runs.folder import AUDIT_FILE, FINAL
from hushrec.runs.schema import Audit
from hushrec.streams import Streams

Verdict = Literal["kept", "contradicted", "no claim", "not tested"]
VERDICTS: dict[Verdict, str] = {
    "kept": "Nothing contradicts the claim. That is no proof of it: a lower bound says what an "
    "attacker certainly learns, the claim what none can.",
    "contradicted": "The claim is false, with 99.99 % confidence. Do not rely on this run's "
    "guarantee.",
    "no claim": "The run gives no guarantee, so there is none to contradict; the attacks show "
    "what that means.",
    "not tested": "The claim was not tested: nothing is uploaded, or there is no canary for its "
    "mechanism.",
}
SIMULATED = (
    "The noise is simulated, from privacy.noise_seed = {seed}: whoever knows that number removes "
    "it, whatever the verdict."
)

OUT_OF_SIGHT = [
    f"what happens only beyond the {MOST_ROUNDS} rounds or {MOST_USERS} users of the replay, or "
    "happened only while the run was trained",
    "a key that can be guessed: that two runs differ does not show where their keys come from",
    "noise that repeats between this run and one with another configuration or other data",
    "a way by which features of users, not their rows, reach the model",
    "what reaches the model through gradients that carry their noise (local-gradients)",
    "files beside the model: publish what `hushrec release` writes",
    "the nodes and messages of a federation: the replay is in one process",
]
"""Kinds of defects that no part of an audit would see; the report lists them."""

Progress = Callable[[str, int, int], None]


def audit(
    run: Run,
    *,
    users: int = 500,
    trials: int = 10_000,
    seed: int = 0,
    on_progress: Progress = lambda what, done, total: None,
) -> Audit:
    """Attack a run in five ways, write ``audit.json`` into its folder, and return it."""
    if run.folder is None:
        raise RunError("an audit is written into the run's folder: train with out=FOLDER")
    streams = Streams(seed)
    plan = set_up(run.experiment, run.split).plan
    if not isinstance(plan, NoPlan):
        # Uploads are replayed with the clipping bound that the run ended with.
        state = run.folder.read_checkpoint(FINAL).protection
        plan = replace(plan, protection=plan.protection.with_state(state))
    found: dict[str, Any] = {
        "method": run.experiment.method,
        "data": run.experiment.data,
        "mode": run.experiment.privacy.mode,
        "users": users,
        "trials": trials,
        "seed": seed,
        "claim": run.summary.privacy.model_dump(
            include={"guarantee", "epsilon", "delta", "neighbours"}, exclude_unset=True
        ),
        "membership": membership(run, users, streams, partial(on_progress, "membership")),
        "items": item_inference(run, plan, users, streams, partial(on_progress, "items")),
        "canaries": [],
        "soundness": None,
        "replay": None,
    }
    claimed, layers = run.summary.privacy.epsilon, plan.protection.noising.mechanisms
    known = bool(layers) and isinstance(layers[-1], CentralGaussian | LocalNoise)
    if claimed and known and not isinstance(plan, NoPlan):  # test the mechanism itself
        task = make_task(run.experiment, run.split, plan.protection)
        rounds = noised_rounds(task, plan, run.model.shared)
        on_done = partial(on_progress, "canaries")
        found["canaries"] = canaries(plan, rounds, claimed, trials, streams, on_done)
        found["soundness"] = soundness(plan, rounds, streams)
    if (claimed and plan.event is not None) or plan.budgets is not None:
        found["replay"] = replay(run.experiment, run.split, streams)
    found["out_of_sight"] = OUT_OF_SIGHT
    result = Audit(**found, **_verdict(found, run.experiment.privacy.noise_seed))
    run.folder.write(AUDIT_FILE, result)
    return result


def _verdict(found: dict[str, Any], noise_seed: int | None) -> dict[str, Any]:
    """Return whether a result contradicts the claim, and the reasons."""
    reasons = [
        f"canaries: {result['who']}, canary in {result['where']}: epsilon is at least "
        f"{result['certain_lower_bound']:.3g}, and {result['claimed_epsilon']:.3g} is claimed"
        for result in found["canaries"]
        if result["contradicted"]
    ]
    for part in ("soundness", "replay"):
        reasons += (found[part] or {}).get("problems", [])
    guessed = found["membership"].get("guesses")
    if guessed is not None and guessed["contradicted"]:
        reasons.append(
            f"membership: {guessed['right']} of {guessed['guesses']} guesses are right, so epsilon "
            f"is at least {guessed['certain_lower_bound']:.3g}, and "
            f"{guessed['claimed_epsilon']:.3g} is claimed at delta {guessed['delta']:.2g}"
        )
    verdict: Verdict = "no claim" if found["claim"]["epsilon"] is None else "not tested"
    if found["canaries"] or reasons:
        verdict = "contradicted" if reasons else "kept"
    words = VERDICTS[verdict]
    if noise_seed is not None and verdict != "no claim":
        words += " " + SIMULATED.format(seed=noise_seed)
    return {"verdict": verdict, "reasons": reasons, "verdict_words": words}
