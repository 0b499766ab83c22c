"""`guarded_plan`: noise on the gradients of training's steps, in place of what is uploaded."""

from __future__ import annotations

from dataclasses import replace

from hushrec.data.views import CohortConfig, TrainView
from hushrec.errors import ConfigError
from hushrec.methods.base import Method, NoisesGradients
from hushrec.privacy.calibration import Schedule, make_plan
from hushrec.privacy.clipping import FlatClip
from hushrec.privacy.config import PrivacyConfig
from hushrec.privacy.plan import Plan
from hushrec.privacy.protection import Protection


def guarded_plan(
    config: PrivacyConfig,
    cohort: CohortConfig,
    method: Method,
    nobody: TrainView,
    rounds: int,
    population: int,
) -> Plan:
    """Find the noise on the gradients of a method's steps, one in every round.

    All that a client uploads is made of those gradients, as they are clipped and noised, and of
    what the server sent: so they are what is accounted for, uploaded or not.
    """
    if not isinstance(method, NoisesGradients):
        raise ConfigError(
            f"{method.name} takes no steps that are noised one by one: use --privacy "
            "local-gaussian, which noises what it uploads"
        )
    leak = method.uncovered()
    if leak is not None and config.epsilon is not None:
        raise ConfigError(f"{leak}; or use --scale to have the noise without a guarantee")
    schedule = Schedule(method.gradient_shape(nobody), rounds)
    if leak is not None:
        return _without_guarantee(config, cohort, schedule, population, leak)
    plan = make_plan(config, cohort, schedule, population)
    done = plan.mechanism.replace("upload", "gradient")
    words = (
        "what is protected is the gradient of each round's one step on the item table, and tables "
        f"that are uploaded are made of nothing else: {done}"
    )
    return replace(plan, protection=_on_steps(plan.protection), mechanism=words)


def _without_guarantee(
    config: PrivacyConfig, cohort: CohortConfig, schedule: Schedule, population: int, leak: str
) -> Plan:
    """Clip and noise gradients as asked for, and say why that is no guarantee."""
    free = config.model_copy(update={"clip": None, "clipping": None})
    plan = make_plan(free, cohort, schedule, population)
    clip = () if config.clip is None else (FlatClip(config.clip),)
    noised = replace(plan.protection, mechanisms=(*clip, *plan.protection.mechanisms))
    return replace(plan, protection=_on_steps(noised), why_none=f"No guarantee: {leak}.")


def _on_steps(protection: Protection) -> Protection:
    return Protection(client_bytes=protection.client_bytes, steps=protection)
