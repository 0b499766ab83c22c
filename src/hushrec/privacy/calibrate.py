"""`make_plan`: the mechanisms and the noise that give what is asked for, or why it is refused.

What can be refused without knowing the uploads is refused in `config`, the rest here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregate import Update, UploadShape
from hushrec.clients import CohortConfig, TrainView
from hushrec.errors import ConfigError
from hushrec.privacy.accountant import (
    Everybody,
    FixedSize,
    Gaussian,
    Neighbours,
    Poisson,
    Pure,
    Sampling,
    noise_for,
    sensitivity,
)
from hushrec.privacy.budgets import (
    Budgets,
    PersonalNoise,
    by_activity,
    by_feature,
    words,
)
from hushrec.privacy.clip import AdaptiveClip, Clip, FlatClip, RowClip
from hushrec.privacy.config import PrivacyConfig, clipping_of
from hushrec.privacy.noise import CentralGaussian, LocalNoise, round_multiplier
from hushrec.privacy.plan import Plan
from hushrec.privacy.protection import Mechanism, Protection, Silence, check_shape
from hushrec.rng import SecretRound

FIRST_BOUND = 1.0
"""Where adaptive clipping starts unless told."""
SUM_COPIES = 7
"""Memory of a whole upload, in float32 copies of it, while the exact sum takes it in."""


@dataclass(frozen=True)
class Schedule:
    """What is public of a method's uploads before the first round."""

    shape: UploadShape
    rounds: int
    silent: frozenset[int] = frozenset()
    """Rounds in which nothing is uploaded, and nothing spent."""
    shares: tuple[float, ...] = ()
    """Share of the budget that each round spends, where they differ."""
    upload_norm: float | None = None
    """The norm that the method itself keeps its uploads to, if it does."""


def make_plan(
    config: PrivacyConfig,
    cohort: CohortConfig,
    schedule: Schedule,
    population: int,
    own: NDArray[np.float64] | None = None,
) -> Plan:
    """Find the mechanisms and their noise for a configuration that was checked.

    ``own`` are the users' personal budgets, from `personal_budgets`.
    """
    shape, rounds, silent = schedule.shape, schedule.rounds, schedule.silent
    shares, upload_norm = schedule.shares, schedule.upload_norm
    if shares:
        _check_shares(config, cohort, rounds, shares)
    if upload_norm is not None and config.clipping is None and config.clip is None:
        config = config.model_copy(update={"clipping": "flat", "clip": upload_norm})
    plan = Plan(
        Protection(),
        delta=config.delta or population**-1.1,
        asked=config.epsilon,
        noise_seed=config.noise_seed,
        rounds=rounds,
        silent=silent,
        shares=shares,
    )
    if not shape.entries:
        return replace(
            plan,
            protection=Protection((NothingUploaded(shape),)),
            mechanism="nothing is uploaded, so the server learns nothing",
        )
    uploading = rounds - len(silent)
    if config.mode == "central":
        plan = _central(config, cohort, shape, population, uploading, plan)
        expected = _sampling(cohort, population)[1]
    elif shape.spaces:
        raise ConfigError(
            "a client of this method sends a number for every pair of items, and local noise on "
            "each of them drowns all: use privacy.mode = central"
        )
    elif own is not None:
        plan, expected = _personal(config, shape, uploading, plan, own), None
    else:
        plan, expected = _local(config, shape, uploading, plan), None
    plan = replace(plan, protection=replace(plan.protection, reshapes=bool(shares)))
    if not silent:
        return plan
    return replace(
        plan,
        protection=replace(plan.protection, silence=Silence(silent, expected)),
        mechanism=f"{plan.mechanism}; uploads in {uploading} of {rounds} rounds, known beforehand",
    )


def _check_shares(
    config: PrivacyConfig, cohort: CohortConfig, rounds: int, shares: tuple[float, ...]
) -> None:
    """Refuse what would break the way a method shares its budget out over its rounds."""
    if rounds != len(shares):
        raise ConfigError(
            f"rounds = {rounds}: under noise this method takes {len(shares)} rounds, which share "
            f"its budget: leave out --rounds, or use {len(shares)}"
        )
    if not math.isclose(sum(shares), 1.0) or min(shares) <= 0:
        raise ConfigError(f"shares of the budget must be positive and add up to 1, not {shares}")
    if config.mode != "central" or cohort.kind != "all":
        raise ConfigError(
            "rounds that spend unequal shares of the budget are accounted for where everybody "
            "takes part: use privacy.mode = central and cohort.kind = all"
        )
    if config.clipping == "adaptive":
        raise ConfigError(
            "this method bounds its uploads itself: leave out privacy.clipping = adaptive"
        )


@dataclass(frozen=True)
class NothingUploaded(Mechanism):
    """Holds a method that uploads nothing to it."""

    shape: UploadShape

    def protect(self, update: Update, view: TrainView, secret: SecretRound) -> Update:
        """Refuse any upload."""
        check_shape(update, self.shape)
        return update


def _central(
    config: PrivacyConfig,
    cohort: CohortConfig,
    shape: UploadShape,
    population: int,
    rounds: int,
    plan: Plan,
) -> Plan:
    sampling, expected = _sampling(cohort, population)
    natural: Neighbours = "replace-one" if cohort.kind == "fixed" else "add-or-remove-one"
    neighbours = config.neighbours or natural
    multiplier = config.noise
    if multiplier is None:
        assert config.epsilon is not None, "checked"
        alike = 1 if plan.shares else rounds
        multiplier = noise_for(config.epsilon, plan.delta, alike, sampling, neighbours)
    event = Gaussian(multiplier, sampling, neighbours)
    clip: Clip
    if clipping_of(config) == "adaptive":
        clip, multiplier = _adaptive(config, multiplier, neighbours, expected)
    else:
        clip = _fixed_clip(config)
    noise = CentralGaussian(clip, multiplier, neighbours, shape, expected, plan.shares)
    each = "".join(
        f"{', ' if number > 1 else ' ('}{round_multiplier(multiplier, plan.shares, number):.4g} in "
        f"round {number}"
        for number in range(1, len(plan.shares) + 1)
    )
    together = f" for all rounds together{each})" if plan.shares else ""
    return replace(
        plan,
        protection=Protection((noise,)),
        event=event,
        neighbours=neighbours,
        sampling=sampling,
        trust="aggregator",
        mechanism=(
            f"{clip}; Gaussian noise on every entry of the sum, multiplier {event.multiplier:.4g}"
            f"{together} of the sensitivity under {neighbours}; mean over {expected:g} expected "
            "clients"
        ),
    )


def _adaptive(
    config: PrivacyConfig, multiplier: float, neighbours: Neighbours, expected: float
) -> tuple[AdaptiveClip, float]:
    """Split the noise: two sums, of updates and of bits, that cost as much as one at multiplier."""
    # A bit is plus or minus a half, so a client moves their sum by a half, or by one if replaced.
    bit_sensitivity = sensitivity(0.5, neighbours)
    # By default at least so much noise that the count costs at most a quarter of the budget.
    bit_noise = config.bit_noise or max(expected / 20, 2 * multiplier * bit_sensitivity)
    if config.bit_share is not None:
        bit_noise = multiplier * bit_sensitivity / math.sqrt(config.bit_share)
    bit_multiplier = bit_noise / bit_sensitivity
    if bit_multiplier <= multiplier:
        raise ConfigError(
            f"privacy.bit_noise = {bit_noise:g} spends the whole budget on the clipping bound: use "
            f"more than {multiplier * bit_sensitivity:.4g}"
        )
    clip = AdaptiveClip(
        config.clip or FIRST_BOUND,
        config.quantile or 0.5,
        config.clip_rate or 0.2,
        bit_noise,
        arithmetic=config.clip_steps == "arithmetic",
    )
    return clip, (multiplier**-2 - bit_multiplier**-2) ** -0.5


def _local(config: PrivacyConfig, shape: UploadShape, rounds: int, plan: Plan) -> Plan:
    kind: Literal["laplace", "gaussian"] = (
        "laplace" if config.mode == "local-laplace" else "gaussian"
    )
    clipped = clipping_of(config) != "none"
    clip = _fixed_clip(config) if clipped else None
    scale, event = config.scale or math.nan, None
    if clip is not None:
        apart = sensitivity(clip.whole_bound(shape), "replace-one")
        if config.epsilon is not None:
            if kind == "laplace":
                scale = apart * rounds / config.epsilon
            else:
                scale = apart * noise_for(
                    config.epsilon, plan.delta, rounds, Everybody(), "replace-one"
                )
        event = (
            Pure(apart / scale)
            if kind == "laplace"
            else Gaussian(scale / apart, Everybody(), "replace-one")
        )
    noise = LocalNoise(kind, scale, shape)
    words = f"{kind.capitalize()} noise of scale {scale:.4g} on every entry of every upload"
    return replace(
        plan,
        protection=Protection(
            (noise,) if clip is None else (clip, noise),
            SUM_COPIES * shape.nbytes,
        ),
        event=event,
        mechanism=f"{clip}; {words}",
        why_none=None
        if clipped
        else (
            f"No guarantee: {words}, but uploads are not clipped, so one user's data can outweigh "
            "any noise. Give a bound with --clip for a guarantee."
        ),
    )


def personal_budgets(
    config: PrivacyConfig, view: TrainView, names: NDArray[Any], clients: NDArray[np.int64]
) -> NDArray[np.float64] | None:
    """Return the budgets of the clients that train, by the configured rule; None without one."""
    if config.budgets == "declared":
        if view.holders is not None:
            raise ConfigError(
                "a silo declares no budget, its users do: use privacy.budgets = activity"
            )
        assert config.budget_feature is not None, "checked"
        return by_feature(view.user_features, config.budget_feature, names, clients)
    if config.budgets == "activity":
        assert config.epsilon_min is not None, "checked"
        assert config.epsilon_max is not None, "checked"
        counts = np.diff(view.positives.indptr[view.client_indptr])
        return by_activity(counts, clients, config.epsilon_min, config.epsilon_max)
    return None


def _personal(
    config: PrivacyConfig,
    shape: UploadShape,
    rounds: int,
    plan: Plan,
    own: NDArray[np.float64],
) -> Plan:
    clip = _fixed_clip(config)
    apart = sensitivity(clip.whole_bound(shape), "replace-one")
    uploads = config.budget_uploads or rounds
    if config.sigma == "paper":
        budgets = Budgets.as_published(own, plan.delta, uploads)
    else:
        budgets = Budgets.of(own, plan.delta, uploads)
    deviations = budgets.deviations(apart)
    noise = PersonalNoise("gaussian", 1.0, shape, deviations)
    return replace(
        plan,
        protection=Protection((clip, noise), SUM_COPIES * shape.nbytes),
        deviations=deviations,
        budgets=budgets,
        mechanism=f"{clip}; {words(budgets, apart)}",
    )


def _sampling(cohort: CohortConfig, population: int) -> tuple[Sampling, float]:
    if cohort.kind == "poisson" and cohort.probability is not None:
        return Poisson(cohort.probability), cohort.probability * population
    if cohort.kind == "fixed" and cohort.size is not None:
        return FixedSize(cohort.size, population), cohort.size
    return Everybody(), population


def _fixed_clip(config: PrivacyConfig) -> FlatClip | RowClip:
    assert config.clip is not None, "checked"
    kind = RowClip if clipping_of(config) == "row" else FlatClip
    return kind(config.clip, 1 if config.mode == "local-laplace" else 2)
