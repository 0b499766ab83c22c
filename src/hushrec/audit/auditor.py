"""`audit`: attack a finished run in three ways and hold its claim against what is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from hushrec.audit.canary import canaries
from hushrec.audit.inference import item_inference
from hushrec.audit.membership import membership
from hushrec.errors import RunError
from hushrec.prepare import plan_privacy
from hushrec.privacy.plan import NoPlan
from hushrec.rng import Streams
from hushrec.run import Run
from hushrec.run_folder import AUDIT_FILE, FINAL

Verdict = Literal["kept", "contradicted", "no claim", "not tested"]
VERDICTS: dict[Verdict, str] = {
    "kept": "The canaries do not contradict the claim. That is no proof of it: a lower bound says "
    "what an attacker certainly learns, the claim what none can.",
    "contradicted": "The claim is false: canaries show a larger epsilon than it, with 99.99 % "
    "confidence. Do not rely on this run's guarantee.",
    "no claim": "The run gives no guarantee, so there is none to contradict; the attacks above "
    "show what that means.",
    "not tested": "The claim was not tested: nothing is uploaded, or there is no canary for its "
    "mechanism.",
}

Progress = Callable[[str, int, int], None]


def audit(
    run: Run,
    *,
    users: int = 500,
    trials: int = 10_000,
    seed: int = 0,
    on_progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Attack a run, write ``audit.json`` into its folder, and return what it holds."""
    if run.folder is None:
        raise RunError("an audit is written into the run's folder: train with out=FOLDER")
    if run.split.holders is not None:
        raise RunError(
            f"{run.folder.path}: its clients are silos, and attacks are on clients of one user; "
            "audit a run with silos.kind = none"
        )
    streams = Streams(seed)
    plan = plan_privacy(run.experiment, run.split)
    if not isinstance(plan, NoPlan):
        # Uploads are replayed with the clipping bound that the run ended with.
        state = run.folder.read_checkpoint(FINAL)["protection"]
        plan = replace(plan, protection=plan.protection.with_state(state))
    said = run.summary["privacy"]
    found: dict[str, Any] = {
        "method": run.experiment.method,
        "data": run.experiment.data,
        "mode": run.experiment.privacy.mode,
        "users": users,
        "trials": trials,
        "seed": seed,
        "claim": {key: said.get(key) for key in ("guarantee", "epsilon", "delta", "neighbours")},
        "membership": membership(
            run, users, streams, lambda done, total: on_progress("membership", done, total)
        ),
        "items": item_inference(
            run, plan, users, streams, lambda done, total: on_progress("items", done, total)
        ),
        "canaries": [],
    }
    verdict: Verdict = "no claim" if said["epsilon"] is None else "not tested"
    if not isinstance(plan, NoPlan) and said["epsilon"]:
        found["canaries"] = canaries(
            plan,
            said["epsilon"],
            trials,
            streams,
            lambda done, total: on_progress("canaries", done, total),
        )
        if found["canaries"]:
            wrong = any(result["contradicted"] for result in found["canaries"])
            verdict = "contradicted" if wrong else "kept"
    found |= {"verdict": verdict, "verdict_words": VERDICTS[verdict]}
    run.folder.write_json(AUDIT_FILE, found)
    return found
