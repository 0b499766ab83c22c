"""`make_plan`: mechanisms and noise calibrated to the requested guarantee, or a refusal.

Requests that are invalid for any uploads are refused in `config`, the others here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import STEPS_PER_UNIT, Update, UploadShape
from hushrec.config import find
from hushrec.data.views import CohortConfig, TrainView
from hushrec.errors import ConfigError
from hushrec.methods.base import Method, NoisesGradients
from hushrec.privacy import accountant
from hushrec.privacy.accountant import Everybody, Gaussian, Grid, Neighbours, noise_for, sensitivity
from hushrec.privacy.budgets import PersonalBudgets, PersonalNoise, describe
from hushrec.privacy.clipping import AdaptiveClip, Clip, FlatClip, RowClip
from hushrec.privacy.config import ACCOUNTED_UNDER, PrivacyConfig, clipping_of
from hushrec.privacy.discrete import Kind
from hushrec.privacy.noise import (
    CentralGaussian,
    DistributedGaussian,
    LocalNoise,
    ValidationQueries,
    round_multiplier,
)
from hushrec.privacy.plan import Plan, Schedule
from hushrec.privacy.protection import Mechanism, PrivacyTarget, Protection, check_shape
from hushrec.streams import SecretRound

FIRST_BOUND = 1.0
"""Default initial bound of adaptive clipping."""
LARGEST_SUM = 2.0**29
"""Largest sum of clipped uploads that the exact sums can hold."""
MOST_NOISED = 2**26
"""Most numbers of one key space that noise is added to: half a gigabyte."""
SUM_COPIES = 7
"""Memory of a dense upload, in float32 copies of it, while it is added to the exact sum."""


def default_delta(population: int) -> float:
    """Return 1e-5, or a tenth of 1 / population if that is less."""
    return min(1e-5, 1 / (10 * population))


def make_plan(
    config: PrivacyConfig,
    cohort: CohortConfig,
    schedule: Schedule,
    population: int,
    own: NDArray[np.float64] | None = None,
) -> Plan:
    """Return the plan of what `check_privacy` accepted; ``own`` are users' personal budgets."""
    shape, rounds, shares = schedule.shape, schedule.rounds, schedule.shares
    if shares:
        _check_shares(config, cohort, rounds, shares)
    if schedule.upload_norm is not None and config.clipping is None and config.clip is None:
        config = config.model_copy(update={"clipping": "flat", "clip": schedule.upload_norm})
    plan = Plan(
        Protection((FixedShape(shape),)),
        delta=config.delta or default_delta(population),
        mechanism="nothing is uploaded, so the server learns nothing",
        requested_epsilon=config.epsilon,
        noise_seed=config.noise_seed,
        rounds=rounds,
        silent=schedule.silent,
        shares=shares,
    )
    if not shape.entries:
        if config.selection_share is not None:
            raise ConfigError(
                "nothing is uploaded, so there is no shared model to select: leave out "
                "privacy.selection_share"
            )
        return plan
    if config.mode == "mechanism":
        plan = _stated(config, cohort, schedule, plan)
    elif config.on_sums:
        for name, (keys, width) in shape.spaces.items():
            if keys * width > MOST_NOISED:
                raise ConfigError(
                    f"'{name}' has {keys:,} keys, and noise cannot cover every key of more than "
                    f"{MOST_NOISED:,}: use another method, or privacy.mode = none"
                )
        plan = _central(config, cohort, schedule, population, plan)
    elif shape.spaces:
        raise ConfigError(
            "a client of this method sends a number for every pair of items, and local noise on "
            "each of them drowns all: use privacy.mode = central"
        )
    elif own is not None:
        plan = _personal(config, schedule, plan, own)
    else:
        plan = _local(config, schedule, plan)
    protection = replace(plan.protection, reshapes=bool(shares), silent=schedule.silent)
    silence = f"; uploads in {schedule.uploading} of {rounds} rounds, known beforehand"
    mechanism = plan.mechanism + (silence if schedule.silent else "")
    return replace(plan, protection=protection, mechanism=mechanism)


def _check_shares(
    config: PrivacyConfig, cohort: CohortConfig, rounds: int, shares: tuple[float, ...]
) -> None:
    """Refuse settings under which rounds cannot have different shares of the budget."""
    if rounds != len(shares):
        raise ConfigError(
            f"rounds = {rounds}: under noise this method has {len(shares)} rounds, which share its "
            f"budget: leave out rounds, or use {len(shares)}"
        )
    if not math.isclose(sum(shares), 1.0) or min(shares) <= 0:
        raise ConfigError(f"shares of the budget must be positive and add up to 1, not {shares}")
    if not config.on_sums or cohort.kind != "all":
        raise ConfigError(
            "rounds that spend unequal shares of the budget are accounted for where everybody "
            "takes part: use privacy.mode = central and cohort.kind = all"
        )
    if config.clipping == "adaptive":
        raise ConfigError("this method bounds its uploads itself: leave out privacy.clipping")


@dataclass(frozen=True)
class FixedShape(Mechanism):
    """Refuses uploads of another shape than the one that a guarantee covers."""

    shape: UploadShape

    def protect(self, update: Update, view: TrainView, secret: SecretRound) -> Update:
        """Check the shape; change nothing."""
        check_shape(update, self.shape)
        return update


def _stated(config: PrivacyConfig, cohort: CohortConfig, schedule: Schedule, plan: Plan) -> Plan:
    """Plan a mechanism of another package by the event that it states; the accountant adds up."""
    name = config.mechanism
    assert name is not None and config.epsilon is not None, "checked"
    target = PrivacyTarget(config.epsilon, plan.delta, schedule.uploading, config.clip)
    mechanism = find("mechanisms", name)(schedule.shape).calibrated(target)
    stated = mechanism.release()
    if stated is None:
        raise ConfigError(
            f"mechanism '{name}' states no guarantee, so no epsilon can be given: use it in "
            "privacy.layers, where the guarantee is that of the mode"
        )
    event = stated.event
    if isinstance(event, Gaussian):
        matches = event.sampling == Everybody() and event.neighbours == stated.neighbours
        if not matches or event.grid is None:
            raise ConfigError(
                f"mechanism '{name}': state a Gaussian event without sampling, for the stated "
                "neighbours, and with the grid of its discrete noise"
            )
    if stated.on_sum and cohort.kind != "all":
        raise ConfigError(
            f"mechanism '{name}' randomises sums, which is accounted for without sampling: use "
            "cohort.kind = all"
        )
    if not stated.on_sum and stated.neighbours != "replace-one":
        raise ConfigError(
            f"mechanism '{name}' randomises uploads, and the server sees who uploads: it must "
            "state its guarantee for replace-one neighbours"
        )
    spent = accountant.epsilon_of(event, schedule.uploading, plan.delta)
    if spent > config.epsilon * (1 + 1e-9):
        raise ConfigError(
            f"mechanism '{name}' spends epsilon {spent:.4g} in {schedule.uploading} uploads, more "
            f"than privacy.epsilon = {config.epsilon:g}"
        )
    upload_bytes = 0 if stated.on_sum else SUM_COPIES * schedule.shape.nbytes
    return replace(
        plan,
        protection=Protection((FixedShape(schedule.shape), mechanism), upload_bytes),
        event=event,
        neighbours=stated.neighbours,
        trust="aggregator" if stated.on_sum else "nobody",
        mechanism=f"{stated.description} (mechanism '{name}', which states this itself)",
    )


def _central(
    config: PrivacyConfig, cohort: CohortConfig, schedule: Schedule, population: int, plan: Plan
) -> Plan:
    sampling, expected = _sampling(cohort, population)
    neighbours = config.neighbours or ACCOUNTED_UNDER.get(cohort.kind, "zero-out-one")
    adaptive = clipping_of(config) == "adaptive"
    unit = 1.0 if adaptive else _fixed_clip(config).whole_bound(schedule.shape)
    apart = sensitivity(unit, neighbours)
    # An adaptive bound falls at most to where the grid of the sums is just fine enough.
    coarsest = schedule.least_deviation

    def event_at(multiplier: float) -> Gaussian:
        deviation = coarsest if adaptive else multiplier * apart * STEPS_PER_UNIT
        return Gaussian(multiplier, sampling, neighbours, Grid(deviation, schedule.noised))

    queries, multiplier = None, config.noise
    if multiplier is None:
        assert config.epsilon is not None, "checked"
        if config.selection_share is not None:
            part = config.selection_share * config.epsilon
            queries = ValidationQueries.within(
                part, plan.delta, schedule.validation_rounds, neighbours, population
            )
        beside = () if queries is None else queries.history()
        # Rounds with shares of the budget are one event together.
        events = 1 if plan.shares else schedule.uploading
        multiplier = noise_for(config.epsilon, plan.delta, events, event_at, beside)
    event = event_at(multiplier)
    clip: Clip
    if adaptive:
        clip, multiplier = _adaptive(config, multiplier, neighbours, expected)
        clip = replace(clip, least=coarsest / STEPS_PER_UNIT / (multiplier * apart))
    else:
        clip = _fixed_clip(config)
        _check_grid(multiplier * apart, unit, schedule)
    if expected * unit >= LARGEST_SUM:
        raise ConfigError(
            f"uploads of norm {unit:g} from {expected:g} clients do not fit exact sums: use a "
            f"smaller privacy.clip, below {LARGEST_SUM / expected:.3g}"
        )
    noise = CentralGaussian(clip, multiplier, neighbours, schedule.shape, expected, plan.shares)
    nodes, shared = config.nodes, ""
    if nodes is not None:
        noise = DistributedGaussian(**vars(noise), nodes=nodes, tolerated=config.most_tolerated)
        shared = (
            f", a share from each of {noise.nodes} nodes, of which {noise.tolerated} may drop out "
            "or reveal theirs"
        )
    each = ", ".join(
        f"{round_multiplier(multiplier, plan.shares, number):.4g} in round {number}"
        for number in range(1, len(plan.shares) + 1)
    )
    together = f" for all rounds together ({each})" if plan.shares else ""
    return replace(
        plan,
        protection=Protection((noise,), clients=expected),
        event=event,
        neighbours=neighbours,
        sampling=sampling,
        trust="aggregator" if nodes is None else "nodes",
        validation_queries=queries,
        mechanism=(
            f"{clip}; discrete Gaussian noise on every entry of the sum, multiplier "
            f"{event.multiplier:.4g}{together} of the sensitivity under {neighbours}{shared}; mean "
            f"over {expected:g} expected clients" + ("" if queries is None else f"; {queries}")
        ),
    )


def _check_grid(deviation: float, bound: float, schedule: Schedule) -> None:
    """Refuse noise for which the grid of the exact sums is too coarse."""
    least = schedule.least_deviation / STEPS_PER_UNIT
    if deviation < least:
        raise ConfigError(
            f"privacy.clip = {bound:g} needs noise of deviation {deviation:.3g}, for which the "
            f"sums' grid of 2^-32 is too coarse: use a clip of {bound * least / deviation:.2g} or "
            "more, with a learning rate to match"
        )


def _adaptive(
    config: PrivacyConfig, multiplier: float, neighbours: Neighbours, expected: float
) -> tuple[AdaptiveClip, float]:
    """Split the noise over the sums of updates and of bits, at the cost of one sum."""
    bit_sensitivity = sensitivity(0.5, neighbours)  # a bit is +1/2 or -1/2
    # By default the bits cost at most a quarter of the budget.
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


def _local(config: PrivacyConfig, schedule: Schedule, plan: Plan) -> Plan:
    kind: Kind = "laplace" if config.mode == "local-laplace" else "gaussian"
    clip = None if clipping_of(config) == "none" else _fixed_clip(config)
    scale = config.scale or math.nan
    event: accountant.Event | None = None
    if clip is not None:
        apart = sensitivity(clip.whole_bound(schedule.shape), "replace-one")
        if kind == "laplace":
            if config.epsilon is not None:
                scale = apart * schedule.uploading / config.epsilon
            event = accountant.Pure(apart / scale)
        else:
            event_at = accountant.discrete_gaussian(apart, "replace-one", schedule.noised)
            if config.epsilon is not None:
                scale = apart * noise_for(config.epsilon, plan.delta, schedule.uploading, event_at)
            _check_grid(scale, config.clip or 0.0, schedule)
            event = event_at(scale / apart)
    noise = LocalNoise(kind, scale, schedule.shape)
    mechanisms = (noise,) if clip is None else (clip, noise)
    description = (
        f"discrete {kind.capitalize()} noise of scale {scale:.4g} on every entry of every upload"
    )
    why_none = (
        f"No guarantee: {description}, but uploads are not clipped, so one user's data can "
        "outweigh any noise. Give a bound with privacy.clip for a guarantee."
    )
    return replace(
        plan,
        protection=Protection(mechanisms, SUM_COPIES * schedule.shape.nbytes),
        event=event,
        mechanism=f"{clip}; {description}",
        why_none=why_none if clip is None else None,
    )


def _personal(
    config: PrivacyConfig, schedule: Schedule, plan: Plan, own: NDArray[np.float64]
) -> Plan:
    clip = _fixed_clip(config)
    apart = sensitivity(clip.whole_bound(schedule.shape), "replace-one")
    uploads = config.budget_uploads or schedule.uploading
    event_at = accountant.discrete_gaussian(apart, "replace-one", schedule.noised)
    paper = config.sigma == "paper"
    budgets = PersonalBudgets.of(own, plan.delta, uploads, event_at, paper=paper)
    deviations = budgets.deviations(apart)
    _check_grid(float(deviations.min()), config.clip or 0.0, schedule)
    noise = PersonalNoise("gaussian", 1.0, schedule.shape, deviations)
    return replace(
        plan,
        protection=Protection((clip, noise), SUM_COPIES * schedule.shape.nbytes),
        deviations=deviations,
        budgets=budgets,
        mechanism=f"{clip}; {describe(budgets, apart)}",
    )


def _sampling(cohort: CohortConfig, population: int) -> tuple[accountant.Sampling, float]:
    if cohort.kind == "poisson" and cohort.probability is not None:
        return accountant.Poisson(cohort.probability), cohort.probability * population
    if cohort.kind == "fixed" and cohort.size is not None:
        return accountant.FixedSize(cohort.size, population), cohort.size
    return Everybody(), population


def _fixed_clip(config: PrivacyConfig) -> FlatClip | RowClip:
    assert config.clip is not None, "checked"
    kind = RowClip if clipping_of(config) == "row" else FlatClip
    return kind(config.clip, 1 if config.mode == "local-laplace" else 2)


def gradient_noise_plan(
    config: PrivacyConfig,
    cohort: CohortConfig,
    method: Method,
    public: TrainView,
    rounds: int,
    population: int,
) -> Plan:
    """Return a plan with noise on the gradient of each round's one step, not on the upload.

    A client's upload is computed from its noised gradients and from what the server sent, so the
    gradients are charged to the privacy budget, whether they are uploaded or not.
    """
    if not isinstance(method, NoisesGradients):
        raise ConfigError(
            f"{method.name} does not support noise on gradients: use privacy.mode = "
            "local-gaussian, which adds noise to its uploads"
        )
    leak = method.uncovered()
    if leak is not None and config.epsilon is not None:
        raise ConfigError(f"{leak}; or use privacy.scale for noise without a guarantee")
    schedule = Schedule(method.gradient_shape(public), rounds)
    if leak is not None:
        free = config.model_copy(update={"clip": None, "clipping": None})
        plan = make_plan(free, cohort, schedule, population)
        clip = [] if config.clip is None else [FlatClip(config.clip)]
        noised = _on_steps(plan.protection.after(clip))
        return replace(plan, protection=noised, why_none=f"No guarantee: {leak}.")
    plan = make_plan(config, cohort, schedule, population)
    mechanism = (
        "noise on the gradient of each round's one step on the item table, from which uploaded "
        f"tables are computed: {plan.mechanism.replace('upload', 'gradient')}"
    )
    return replace(plan, protection=_on_steps(plan.protection), mechanism=mechanism)


def _on_steps(protection: Protection) -> Protection:
    return Protection(client_bytes=protection.client_bytes, steps=protection)
