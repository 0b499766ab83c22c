"""Canaries: an epsilon that the run's own mechanism provably exceeds, to hold against its claim.

A canary is a client whose clipped upload lies in one known direction, as large as clipping
allows. In half of the trials it is there, in the other half it is not (or, where neighbours replace
one another, uploads the opposite). The mechanism is the run's: its device side, the exact sum and
its server side, with its noise, cohort and number of rounds. Every entry has noise of its own, so
canaries on different entries of one sum are trials that do not disturb each other; other clients
would only shift an entry by what the attacker is allowed to know. (Local noise with clipping by
rows: the canary fills one row of many, and the bound is loose.)

The attacker sees all rounds of its entry and computes the likelihood ratio of the two worlds. With
a threshold that was chosen on one half of the trials, the other half gives true and false positive
rates with Clopper-Pearson bounds, and (epsilon, delta)-DP would need TPR <= e^epsilon FPR + delta:

    epsilon >= log((TPR_low - delta) / FPR_high)        (or the same for "not there")

Where all rounds are plain Gaussians the claim is more than one epsilon: it is a trade-off curve
with one parameter, mu. Then mu >= z(TPR_low) - z(FPR_high), and the epsilon of that mu at the run's
delta is a second, sharper bound (Dong, Roth, Su 2022).

Bounds are printed at 95 %. A claim is called contradicted only at 99.99 %: else one honest run in
twenty or so would fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta, norm

from hushrec.aggregate import ClientRows, ExactSum, Update, UploadShape
from hushrec.clients import Ragged, TrainView
from hushrec.privacy.accountant import (
    Everybody,
    FixedSize,
    Gaussian,
    Poisson,
    Pure,
    Sampling,
    epsilon_of,
    sensitivity,
)
from hushrec.privacy.budgets import PersonalNoise
from hushrec.privacy.clip import FlatClip, RowClip
from hushrec.privacy.noise import CentralGaussian, LocalNoise, round_multiplier
from hushrec.privacy.plan import Plan
from hushrec.privacy.protection import Protection
from hushrec.rng import SecretRound, SecretStreams, Streams

CONFIDENCE = 0.95
CERTAIN = 0.9999
ENTRY = "canary"
THRESHOLDS = 200
COLUMN, BLOCK = 4, 200
"""Rows that a canary fills where clipping is by rows, and canaries in one sum there."""

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Trials:
    """The attacker's statistic in each world, larger if the canary is there."""

    there: Values
    absent: Values


def canaries(
    plan: Plan,
    claimed: float,
    trials: int,
    streams: Streams,
    on_round: Callable[[int, int], None],
) -> list[dict[str, Any]]:
    """Audit the mechanism of a plan with a guarantee; one result for each claim it makes."""
    uploads = plan.uploads(range(1, plan.rounds + 1))
    noise = plan.protection.mechanisms[-1]
    if isinstance(noise, CentralGaussian):
        found = central_trials(plan, noise, uploads, trials, streams, on_round)
        unsampled = isinstance(plan.sampling, Everybody)
        return [_result("any user", found, claimed, plan.delta, len(uploads), gaussian=unsampled)]
    if isinstance(noise, PersonalNoise):
        assert plan.budgets is not None
        own, claims, results = plan.budgets, plan.budgets.claims(), []
        apart = sensitivity(_local_clip(plan).whole_bound(noise.shape), "replace-one")
        for level, who in ((0, "smallest budget"), (len(own.levels) - 1, "largest budget")):
            deviation = apart * own.multiplier[level]
            layer = replace(noise, deviations=np.full(trials, deviation))
            rounds = uploads[: own.uploads]
            found = local_trials(plan, layer, deviation, rounds, trials, streams, on_round)
            claim = float(claims[level])
            results.append(_result(f"a user with the {who}", found, claim, plan.delta, len(rounds)))
        return results
    if isinstance(noise, LocalNoise):
        found = local_trials(plan, noise, noise.scale, uploads, trials, streams, on_round)
        delta = 0.0 if isinstance(plan.event, Pure) else plan.delta
        gaussian = noise.kind == "gaussian"
        return [_result("any user", found, claimed, delta, len(uploads), gaussian=gaussian)]
    return []


def central_trials(
    plan: Plan,
    noise: CentralGaussian,
    uploads: list[int],
    trials: int,
    streams: Streams,
    on_round: Callable[[int, int], None],
) -> Trials:
    """Let canaries in and out of noised sums, each with an entry of its own.

    The layout of the sum is changed to one entry for each canary; all else is the run's. Clipping
    by rows bounds every row by itself, so there a canary fills a column of a few rows.
    """
    by_rows = isinstance(noise.clip, RowClip)
    rows, block = (COLUMN, BLOCK) if by_rows else (1, trials)
    parts = []
    for start in range(0, trials, block):
        size = min(block, trials - start)
        shape = UploadShape(*((rows, {ENTRY: size}) if by_rows else (size, {ENTRY: 1})), {})
        layer = replace(noise, shape=shape)
        seed = Streams(streams.seed + start)  # other noise for every block
        parts.append(_sum_trials(layer, plan.sampling, uploads, size, rows, seed))
        on_round(start + size, trials)
    return Trials(*(np.concatenate(worlds) for worlds in zip(*parts, strict=True)))


def _sum_trials(
    layer: CentralGaussian,
    sampling: Sampling,
    uploads: list[int],
    trials: int,
    rows: int,
    streams: Streams,
) -> tuple[Values, Values]:
    protection, bound, replaced = (
        Protection((layer,)),
        layer.clip.bound,
        layer.neighbours == "replace-one",
    )
    generator, share = streams.generator("audit/canaries"), _participation(sampling)
    there, evidence = generator.permutation(trials) < trials // 2, np.zeros(trials)
    n_rows, width = layer.shape.n_rows, layer.shape.tables[ENTRY]
    for number in uploads:
        secret = SecretRound(number, SecretStreams(streams.seed))
        # In units of the canary, whose norm is that of the bound of a whole upload.
        own = round_multiplier(layer.multiplier, layer.shares, number)
        deviation = own * sensitivity(1.0, layer.neighbours)
        taking_part = (there | replaced) & (generator.random(trials) < share)
        upload = np.flatnonzero(taking_part)
        values = np.zeros((len(upload), rows, width), np.float32)
        column = upload if rows > 1 else np.zeros_like(upload)
        values[np.arange(len(upload)), :, column] = (np.where(there, 2, -2)[upload] * bound)[
            :, None
        ]
        ids = np.tile(np.arange(rows), len(upload)) if rows > 1 else upload
        table = ClientRows(
            rows * np.arange(len(upload) + 1), ids.astype(np.int32), values.reshape(-1, width)
        )
        summed = ExactSum(n_rows)
        sent = Update(len(upload), {ENTRY: table})
        summed.add(protection.protect(sent, _clients(upload, n_rows), secret))
        total = protection.finish(summed.total(), secret)[0].rows[ENTRY][1]
        # Its projection on the canary's direction.
        seen = (total.sum(0) / math.sqrt(rows) if rows > 1 else total[:, 0]) / (
            bound * math.sqrt(rows)
        )
        evidence += _mixed(seen, deviation, share)
        if replaced:
            evidence -= _mixed(-seen, deviation, share)
    return evidence[there], evidence[~there]


def local_trials(
    plan: Plan,
    noise: LocalNoise,
    scale: float,
    uploads: list[int],
    trials: int,
    streams: Streams,
    on_round: Callable[[int, int], None],
) -> Trials:
    """Let canaries upload one thing or its opposite; the server sees each upload by itself."""
    layers = (
        *plan.protection.mechanisms[:-1],
        replace(noise, shape=UploadShape(1, {}, {ENTRY: (1,)})),
    )
    protection, bound = Protection(layers), _local_clip(plan).bound
    there = streams.generator("audit/canaries").permutation(trials) < trials // 2
    view, evidence = _clients(np.arange(trials), 1), np.zeros(trials)
    view = replace(view, noise=np.full(trials, scale))
    upload = Update(trials, dense={ENTRY: np.where(there, 2 * bound, -2 * bound)[:, None]})
    for done, number in enumerate(uploads, 1):
        seen = (
            protection.protect(
                upload, view, SecretRound(number, SecretStreams(streams.seed))
            ).dense[ENTRY][:, 0]
            / bound
        )
        if noise.kind == "laplace":
            evidence += (np.abs(seen + 1) - np.abs(seen - 1)) * bound / scale
        else:
            evidence += 2 * seen * (bound / scale) ** 2
        on_round(done, len(uploads))
    return Trials(evidence[there], evidence[~there])


def lower_bound(trials: Trials, delta: float, confidence: float) -> tuple[float, float, float]:
    """Return a lower bound of epsilon, and the TPR and FPR it rests on."""
    return _bounded(
        trials, confidence, lambda low, high: np.log(np.maximum(low - delta, 1e-300) / high)
    )


def gaussian_bound(trials: Trials, delta: float, confidence: float) -> float:
    """Return the epsilon at delta of the smallest Gaussian trade-off that fits the trials."""
    mu, _, _ = _bounded(trials, confidence, lambda low, high: norm.ppf(low) - norm.ppf(high))
    if mu <= 0:
        return 0.0
    return epsilon_of(Gaussian(1 / mu, Everybody(), "replace-one"), 1, delta)


def most_provable(trials: int, delta: float) -> float:
    """Return the largest bound that so many trials can give: an attacker that never errs."""
    low, high = _clopper_pearson(np.array([trials // 4, 0]), trials // 4, CONFIDENCE)
    return math.log(max(low[0] - delta, 1e-300) / high[1])


def _bounded(
    trials: Trials, confidence: float, value: Callable[[Values, Values], Values]
) -> tuple[float, float, float]:
    """Choose threshold and side on one half of the trials; judge them on the other."""
    halves = [(trials.there[k::2], trials.absent[k::2]) for k in (0, 1)]
    (one, zero), (one_test, zero_test) = halves
    best, chosen = -math.inf, (1.0, 0.0)
    for side in (1.0, -1.0):
        # "Not there" is the same question with the worlds and the sign exchanged.
        hit, miss = (one, zero) if side > 0 else (-zero, -one)
        thresholds = np.quantile(np.concatenate([hit, miss]), np.linspace(0, 1, THRESHOLDS))
        thresholds = np.unique(np.concatenate([thresholds, np.sort(miss)[-10:]]))
        values = value(*_rates(hit, miss, thresholds, confidence))
        if values.max() > best:
            best, chosen = float(values.max()), (side, float(thresholds[values.argmax()]))
    side, threshold = chosen
    hit, miss = (one_test, zero_test) if side > 0 else (-zero_test, -one_test)
    low, high = _rates(hit, miss, np.array([threshold]), confidence)
    found = max(0.0, float(value(low, high)[0]))
    return found, float((hit > threshold).mean()), float((miss > threshold).mean())


def _rates(
    hit: Values, miss: Values, thresholds: Values, confidence: float
) -> tuple[Values, Values]:
    """Return the lower end of TPR and the upper end of FPR at each threshold."""
    true = len(hit) - np.searchsorted(np.sort(hit), thresholds, "right")
    false = len(miss) - np.searchsorted(np.sort(miss), thresholds, "right")
    return (
        _clopper_pearson(true, len(hit), confidence)[0],
        _clopper_pearson(false, len(miss), confidence)[1],
    )


def _clopper_pearson(hits: NDArray[Any], n: int, confidence: float) -> tuple[Values, Values]:
    """Return bounds of a probability; both rates together hold with this confidence."""
    tail = (1 - confidence) / 2
    low = np.where(hits > 0, beta.ppf(tail, np.maximum(hits, 1), n - hits + 1), 0.0)
    high = np.where(hits < n, beta.ppf(1 - tail, hits + 1, np.maximum(n - hits, 1)), 1.0)
    return np.clip(low, 1e-300, 1), np.clip(high, 1e-300, 1)


def _mixed(seen: Values, deviation: float, share: float) -> Values:
    """Return the log-likelihood ratio of a canary that takes part now and then, against none."""
    ratio = (seen - 0.5) / deviation**2
    if share >= 1:
        return ratio
    return np.asarray(np.logaddexp(math.log1p(-share), math.log(share) + ratio))


def _participation(sampling: Sampling) -> float:
    """Return how often one client takes part; from round to round that is independent."""
    if isinstance(sampling, Poisson):
        return sampling.probability
    return sampling.size / sampling.population if isinstance(sampling, FixedSize) else 1.0


def _local_clip(plan: Plan) -> FlatClip | RowClip:
    """Return the clipping under local noise, without which there is no claim to audit."""
    return next(m for m in plan.protection.mechanisms if isinstance(m, FlatClip | RowClip))


def _clients(users: NDArray[np.int64], n_items: int) -> TrainView:
    none = Ragged.empty(len(users))
    return TrainView(users.astype(np.int32), n_items, none, none, none)


def _result(
    who: str, trials: Trials, claimed: float, delta: float, rounds: int, *, gaussian: bool = True
) -> dict[str, Any]:
    lower, true, false = lower_bound(trials, delta, CONFIDENCE)
    certain = lower_bound(trials, delta, CERTAIN)[0]
    sharper = None
    if gaussian and delta > 0:
        sharper = gaussian_bound(trials, delta, CONFIDENCE)
        certain = max(certain, gaussian_bound(trials, delta, CERTAIN))
    count = len(trials.there) + len(trials.absent)
    return {
        "who": who,
        "claimed_epsilon": claimed,
        "delta": delta,
        "lower_bound": lower,
        "gaussian_lower_bound": sharper,
        "most_provable": most_provable(count, delta),
        "tpr": true,
        "fpr": false,
        "trials": count,
        "rounds": rounds,
        "certain_lower_bound": certain,
        "contradicted": certain > claimed,
    }
