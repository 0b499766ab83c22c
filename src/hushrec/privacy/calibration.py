"""`make_plan`: the mechanisms and the noise that give what is asked for, or why it is refused.

What can be refused without knowing the uploads is refused in `config`, the rest here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import Update, UploadShape
from hushrec.aggregation.exact_sum import STEPS_PER_UNIT
from hushrec.data.views import CohortConfig, TrainView
from hushrec.errors import ConfigError
from hushrec.privacy.accountant import (
    Event,
    Everybody,
    FixedSize,
    Gaussian,
    Grid,
    Neighbours,
    Poisson,
    Pure,
    Sampling,
    noise_for,
    sensitivity,
)
from hushrec.privacy.budgets import Budgets, PersonalNoise, by_activity, by_feature, words
from hushrec.privacy.clipping import AdaptiveClip, Clip, FlatClip, RowClip
from hushrec.privacy.config import PrivacyConfig, clipping_of
from hushrec.privacy.discrete import Kind
from hushrec.privacy.noise import CentralGaussian, DistributedGaussian, LocalNoise, round_multiplier
from hushrec.privacy.plan import Plan
from hushrec.privacy.protection import Mechanism, Protection, Silence, check_shape
from hushrec.privacy.validation_queries import Looks
from hushrec.streams import SecretRound

FIRST_BOUND = 1.0
"""Where adaptive clipping starts unless told."""
COARSEST = 1e-6
"""The most that entries with noise, over all rounds, over the square of its deviation in steps of
the sums' grid may come to: then whole steps cost nothing that shows (`accountant.discreteness`)."""
LARGEST_SUM = 2.0**29
"""What clients can add up to without leaving the grid."""
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
    entries: int = 0
    """The most numbers that an upload can have in any round, where shapes differ."""
    looks: frozenset[int] = frozenset()
    """Rounds after which validation items are looked at."""

    @property
    def uploading(self) -> int:
        """Rounds in which something is uploaded."""
        return self.rounds - len(self.silent)

    @property
    def alike(self) -> int:
        """Rounds of the same cost; those that share a budget out are one together."""
        return 1 if self.shares else self.uploading

    @property
    def noised(self) -> int:
        """The most numbers that can get noise in a round, adaptive clipping's bit among them."""
        return max(self.entries, self.shape.entries) + 1

    @property
    def least_deviation(self) -> float:
        """The least noise, in steps, for which the sums' grid is fine enough."""
        return math.sqrt(self.noised * self.uploading / COARSEST)


def default_delta(population: int) -> float:
    """Return a delta that is small by itself, and over the whole population together."""
    return min(1e-5, 1 / (10 * population))


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
        delta=config.delta or default_delta(population),
        asked=config.epsilon,
        noise_seed=config.noise_seed,
        rounds=rounds,
        silent=silent,
        shares=shares,
    )
    if not shape.entries:
        if config.selection_share is not None:
            raise ConfigError(
                "nothing is uploaded, so there is no shared model to select: leave out "
                "privacy.selection_share"
            )
        return replace(
            plan,
            protection=Protection((NothingUploaded(shape),)),
            mechanism="nothing is uploaded, so the server learns nothing",
        )
    if config.on_sums:
        plan = _central(config, cohort, schedule, population, plan)
        expected = _sampling(cohort, population)[1]
    elif shape.spaces:
        raise ConfigError(
            "a client of this method sends a number for every pair of items, and local noise on "
            "each of them drowns all: use privacy.mode = central"
        )
    elif own is not None:
        plan, expected = _personal(config, schedule, plan, own), None
    else:
        plan, expected = _local(config, schedule, plan), None
    plan = replace(plan, protection=replace(plan.protection, reshapes=bool(shares)))
    if not silent:
        return plan
    return replace(
        plan,
        protection=replace(plan.protection, silence=Silence(silent, expected)),
        mechanism=(
            f"{plan.mechanism}; uploads in {schedule.uploading} of {rounds} rounds, known "
            "beforehand"
        ),
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
    if not config.on_sums or cohort.kind != "all":
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
    schedule: Schedule,
    population: int,
    plan: Plan,
) -> Plan:
    sampling, expected = _sampling(cohort, population)
    natural: Neighbours = "replace-one" if cohort.kind == "fixed" else "zero-out-one"
    neighbours = config.neighbours or natural
    adaptive = clipping_of(config) == "adaptive"
    unit = 1.0 if adaptive else _fixed_clip(config).whole_bound(schedule.shape)
    apart = sensitivity(unit, neighbours)
    # An adaptive bound stops where the grid is as coarse as it may be.
    coarsest = schedule.least_deviation

    def event_at(multiplier: float) -> Gaussian:
        deviation = coarsest if adaptive else multiplier * apart * STEPS_PER_UNIT
        return Gaussian(multiplier, sampling, neighbours, Grid(deviation, schedule.noised))

    looks, multiplier = None, config.noise
    if multiplier is None:
        assert config.epsilon is not None, "checked"
        if config.selection_share is not None:
            part = config.selection_share * config.epsilon
            looks = Looks.within(part, plan.delta, schedule.looks, neighbours, population)
        beside = () if looks is None else looks.history()
        multiplier = noise_for(config.epsilon, plan.delta, schedule.alike, event_at, beside)
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
    shared = ""
    if config.nodes is not None:
        noise = DistributedGaussian(
            **vars(noise), nodes=config.nodes, tolerated=config.most_tolerated
        )
        shared = (
            f", a share from each of {noise.nodes} nodes, of which {noise.tolerated} may drop out "
            "or tell others theirs"
        )
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
        trust="aggregator" if config.nodes is None else "nodes",
        looks=looks,
        mechanism=(
            f"{clip}; discrete Gaussian noise on every entry of the sum, multiplier "
            f"{event.multiplier:.4g}{together} of the sensitivity under {neighbours}{shared}; mean "
            f"over {expected:g} expected clients" + ("" if looks is None else f"; {looks}")
        ),
    )


def _check_grid(deviation: float, bound: float, schedule: Schedule) -> None:
    """Refuse noise for which the steps of the sums are too coarse."""
    least = schedule.least_deviation / STEPS_PER_UNIT
    if deviation < least:
        raise ConfigError(
            f"privacy.clip = {bound:g} calls for noise of deviation {deviation:.3g}, for which the "
            f"sums' grid of 2^-32 is too coarse: use a clip of {bound * least / deviation:.2g} or "
            "more, with a learning rate to match"
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


def _local(config: PrivacyConfig, schedule: Schedule, plan: Plan) -> Plan:
    kind: Kind = "laplace" if config.mode == "local-laplace" else "gaussian"
    clip = None if clipping_of(config) == "none" else _fixed_clip(config)
    scale = config.scale or math.nan
    event: Event | None = None
    if clip is not None:
        apart = sensitivity(clip.whole_bound(schedule.shape), "replace-one")
        if kind == "laplace":
            if config.epsilon is not None:
                scale = apart * schedule.uploading / config.epsilon
            event = Pure(apart / scale)
        else:
            event_at = _local_gaussian(apart, schedule)
            if config.epsilon is not None:
                scale = apart * noise_for(config.epsilon, plan.delta, schedule.uploading, event_at)
            _check_grid(scale, config.clip or 0.0, schedule)
            event = event_at(scale / apart)
    noise = LocalNoise(kind, scale, schedule.shape)
    words = (
        f"discrete {kind.capitalize()} noise of scale {scale:.4g} on every entry of every upload"
    )
    return replace(
        plan,
        protection=Protection(
            (noise,) if clip is None else (clip, noise), SUM_COPIES * schedule.shape.nbytes
        ),
        event=event,
        mechanism=f"{clip}; {words}",
        why_none=None
        if clip is not None
        else (
            f"No guarantee: {words}, but uploads are not clipped, so one user's data can outweigh "
            "any noise. Give a bound with --clip for a guarantee."
        ),
    )


def _local_gaussian(apart: float, schedule: Schedule) -> Callable[[float], Gaussian]:
    """Return what an upload with noise is, where two of them are at most ``apart``."""
    return lambda multiplier: Gaussian(
        multiplier,
        Everybody(),
        "replace-one",
        Grid(multiplier * apart * STEPS_PER_UNIT, schedule.noised),
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
    config: PrivacyConfig, schedule: Schedule, plan: Plan, own: NDArray[np.float64]
) -> Plan:
    clip = _fixed_clip(config)
    apart = sensitivity(clip.whole_bound(schedule.shape), "replace-one")
    uploads = config.budget_uploads or schedule.uploading
    make = Budgets.as_published if config.sigma == "paper" else Budgets.of
    budgets = make(own, plan.delta, uploads, _local_gaussian(apart, schedule))
    deviations = budgets.deviations(apart)
    _check_grid(float(deviations.min()), config.clip or 0.0, schedule)
    noise = PersonalNoise("gaussian", 1.0, schedule.shape, deviations)
    return replace(
        plan,
        protection=Protection((clip, noise), SUM_COPIES * schedule.shape.nbytes),
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
