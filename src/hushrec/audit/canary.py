"""Canaries: lower bounds of epsilon that the run's own mechanism proves (docs/privacy.md).

A canary is a client whose clipped upload has known entries, as large as clipping allows: in each
array of the run's layout in turn, and in all of them at once. In half of the trials it takes part,
in the other half it is absent (or, under replace-one, another client uploads the opposite). The
mechanism is the run's, from `Protection.protect` over the exact sum to `Protection.finish`, with
its noise, cohort and rounds, and with secret streams of its own. Only the arrays' sizes are the
audit's, one entry for each canary: noise and bounds of flat clipping are the same for all sizes,
and `soundness` tests the real ones. A client's weight (`OWN_WEIGHT`) is one number, which cannot
have an entry for each canary: it is left to `soundness`, and a canary without one has the whole
bound. Under row clipping a canary fills rows of a small table; local noise is then scaled for all
rows, and the bound is loose.

Other clients would only shift an entry by what the attacker may know. In a cohort of fixed size
they all upload the opposite, so that whoever replaces the canary makes the difference larger. A
canary changes its sign from round to round, so that noise which repeats itself cancels.

The attacker computes the likelihood ratio of the two worlds over all rounds. A threshold chosen on
one half of the trials gives, on the other half, true and false positive rates with Clopper-Pearson
bounds, and (epsilon, delta)-DP would need TPR <= e^epsilon FPR + delta:

    epsilon >= log((TPR_low - delta) / FPR_high)        (or the same for "absent")

Where all rounds are plain Gaussians, the claim is a trade-off curve with one parameter, mu. Then
mu >= z(TPR_low) - z(FPR_high), and the epsilon of that mu at the run's delta is a second, sharper
bound (Dong, Roth, Su 2022).

Bounds are printed at 95 %. A claim is contradicted only at 99.99 % over all tests together: else
one honest run in twenty or so would fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta, norm

from hushrec.aggregation import (
    OWN_WEIGHT,
    ClientRows,
    ExactSum,
    KeyedRows,
    Total,
    Update,
    UploadShape,
)
from hushrec.data.views import Ragged, TrainView
from hushrec.federation.client import Task
from hushrec.methods.base import Shared
from hushrec.privacy import accountant
from hushrec.privacy.accountant import Everybody, Pure, Values, sensitivity
from hushrec.privacy.budgets import PersonalNoise
from hushrec.privacy.clipping import AdaptiveClip, Clip, FlatClip, RowClip
from hushrec.privacy.noise import CentralGaussian, LocalNoise
from hushrec.privacy.plan import SILO, Plan
from hushrec.privacy.protection import Protection
from hushrec.streams import SecretRound, SecretStreams, Streams

CONFIDENCE = 0.95
CERTAIN = 0.9999
THRESHOLDS = 200
COLUMN, BLOCK = 4, 200
"""Rows that a canary fills under row clipping; and canaries in one sum, under row clipping and in
dense arrays, which every upload holds whole."""
LOCAL_STREAMS, FEWEST_TRIALS = 200_000, 1000
"""Streams of local noise that may be opened, one for each client, array and round, which limits the
number of trials; and the smallest number of trials all the same."""

Entries = Mapping[str, NDArray[np.int64]]
"""Entries of each array that a canary fills, [canaries, entries of one], each in its own row."""


# ------------------------------------------------------------ lower bounds


@dataclass(frozen=True)
class Trials:
    """The attacker's statistic in each world, larger if the canary is there."""

    there: Values
    absent: Values


def certain_among(tests: int) -> float:
    """Return the confidence of each of so many tests, so that all together are certain."""
    return 1 - (1 - CERTAIN) / max(1, tests)


def lower_bound(trials: Trials, delta: float, confidence: float) -> tuple[float, float, float]:
    """Return a lower bound of epsilon, and the TPR and FPR it rests on."""
    return _bounded(trials, confidence, lambda low, high: np.log((low - delta).clip(1e-300) / high))


def gaussian_bound(trials: Trials, delta: float, confidence: float) -> float:
    """Return the epsilon at delta of the smallest Gaussian trade-off that fits the trials."""
    mu, _, _ = _bounded(trials, confidence, lambda low, high: norm.ppf(low) - norm.ppf(high))
    if mu <= 0:
        return 0.0
    event = accountant.Gaussian(1 / mu, Everybody(), "replace-one")
    return accountant.epsilon_of(event, 1, delta)


def most_provable(trials: int, delta: float) -> float:
    """Return the largest bound that so many trials can give: an attacker that never errs."""
    low, high = clopper_pearson(np.array([trials // 4, 0]), trials // 4, CONFIDENCE)
    return math.log(max(low[0] - delta, 1e-300) / high[1])


def _bounded(
    trials: Trials, confidence: float, value: Callable[[Values, Values], Values]
) -> tuple[float, float, float]:
    """Choose threshold and side on one half of the trials; judge them on the other."""
    best, chosen = -math.inf, (1.0, 0.0)
    for side in (1.0, -1.0):
        hit, miss = _half(trials, 0, side)
        thresholds = np.quantile(np.concatenate([hit, miss]), np.linspace(0, 1, THRESHOLDS))
        thresholds = np.unique(np.concatenate([thresholds, np.sort(miss)[-10:]]))
        values = value(*_rates(hit, miss, thresholds, confidence))
        if values.max() > best:
            best, chosen = float(values.max()), (side, float(thresholds[values.argmax()]))
    side, threshold = chosen
    hit, miss = _half(trials, 1, side)
    low, high = _rates(hit, miss, np.array([threshold]), confidence)
    found = max(0.0, float(value(low, high)[0]))
    return found, float((hit > threshold).mean()), float((miss > threshold).mean())


def _half(trials: Trials, half: int, side: float) -> tuple[Values, Values]:
    """Return every second trial; to test for "absent", worlds and sign are exchanged."""
    there, absent = trials.there[half::2], trials.absent[half::2]
    return (there, absent) if side > 0 else (-absent, -there)


def _rates(
    hit: Values, miss: Values, thresholds: Values, confidence: float
) -> tuple[Values, Values]:
    """Return the lower end of TPR and the upper end of FPR at each threshold."""
    true, false = ((world > thresholds[:, None]).sum(1) for world in (hit, miss))
    low = clopper_pearson(true, len(hit), confidence)[0]
    return low, clopper_pearson(false, len(miss), confidence)[1]


def clopper_pearson(hits: NDArray[Any], n: int, confidence: float) -> tuple[Values, Values]:
    """Return bounds of a probability; both rates together hold with this confidence."""
    tail = (1 - confidence) / 2
    low = np.where(hits > 0, beta.ppf(tail, np.maximum(hits, 1), n - hits + 1), 0.0)
    high = np.where(hits < n, beta.ppf(1 - tail, hits + 1, np.maximum(n - hits, 1)), 1.0)
    return np.clip(low, 1e-300, 1), np.clip(high, 1e-300, 1)


# ------------------------------------------------------------ the layout of uploads


@dataclass(frozen=True)
class NoisedRound:
    """A round with uploads, and the protection that the run has in it."""

    number: int
    protection: Protection

    @property
    def noise(self) -> CentralGaussian | LocalNoise:
        """The mechanism that adds noise."""
        noise = self.protection.mechanisms[-1]
        assert isinstance(noise, CentralGaussian | LocalNoise), "there are canaries for no other"
        return noise

    @property
    def clip(self) -> Clip:
        """The clipping, without which there is no claim."""
        if isinstance(self.noise, CentralGaussian):
            return self.noise.clip
        layers = self.protection.mechanisms
        return next(layer for layer in layers if isinstance(layer, FlatClip | RowClip))

    @property
    def shape(self) -> UploadShape:
        """The tables, key spaces and dense arrays of an upload."""
        return self.noise.shape

    @property
    def canary_shape(self) -> UploadShape:
        """The shape without the client's weight."""
        dense = {name: size for name, size in self.shape.dense.items() if name != OWN_WEIGHT}
        return replace(self.shape, dense=dense)

    def of(self, shape: UploadShape) -> NoisedRound:
        """Return the same round with arrays of other sizes, as the mechanisms themselves do it."""
        return replace(self, protection=self.protection.for_shape(shape))

    def planned(self, plan: Plan) -> float:
        """Return the noise scale charged to the budget, without adaptive clipping's bits."""
        apart = sensitivity(self.clip.whole_bound(self.shape), plan.neighbours)
        event = plan.event_of(self.number)
        if isinstance(event, Pure):
            return apart / event.epsilon
        if not isinstance(self.clip, AdaptiveClip):
            return apart * event.multiplier
        bits = self.clip.bit_noise / sensitivity(0.5, plan.neighbours)
        return float(apart * (event.multiplier**-2 - bits**-2) ** -0.5)


def noised_rounds(task: Task, plan: Plan, shared: Shared) -> list[NoisedRound]:
    """Return the rounds with uploads; layouts may depend on the released parameters, ``shared``."""
    state = plan.protection.state
    return [
        NoisedRound(number, task.protection_of(task.download(number, shared, state=state)).noising)
        for number in plan.uploads(range(1, plan.rounds + 1))
    ]


class WatchedSum(ExactSum):
    """A sum that remembers its noisy total, from which everything released is computed."""

    seen: Total

    def total(self) -> Total:
        """Return the sum as numbers, and remember it."""
        self.seen = super().total()
        return self.seen


def noised_sum(noised: NoisedRound, sent: Update, secret: SecretRound) -> dict[str, Values]:
    """Return the sum of a round's uploads with its noise, before the server processes it."""
    summed = WatchedSum(noised.shape.n_rows)
    summed.add(sent)
    noised.protection.finish(summed, secret)
    return written_out(summed.seen, noised.shape)


def written_out(total: Total, shape: UploadShape) -> dict[str, Values]:
    """Return every array of a sum whole and flat; entries that are not in the sum are zero."""
    out = {name: np.zeros(math.prod(size)) for name, size in shape.whole.items()}
    for name, (ids, rows) in total.rows.items():
        out[name].reshape(-1, rows.shape[1])[ids] = rows
    for name, array in total.dense.items():
        out[name] = array.reshape(-1)
    return out


def uploads(shape: UploadShape, entries: Entries, amounts: NDArray[Any]) -> Update:
    """Return uploads that are zero but for each canary's amount at each of its entries."""
    count = len(amounts)
    rows, dense = {}, {}
    for name, (_, width) in shape.sparse.items():
        filled = entries.get(name, np.zeros((count, 0), np.int64))
        each = filled.shape[1]
        values = np.zeros((filled.size, width), np.float32)
        values[np.arange(filled.size), filled.ravel() % width] = np.repeat(amounts, each)
        indptr, ids = each * np.arange(count + 1), filled.ravel() // width
        rows[name] = (
            KeyedRows(indptr, ids, values, space=shape.spaces[name][0])
            if name in shape.spaces
            else ClientRows(indptr, ids.astype(np.int32), values)
        )
    for name, size in shape.dense.items():
        array = np.zeros((count, math.prod(size)), np.float32)
        if name in entries:
            array[np.arange(count)[:, None], entries[name]] = amounts[:, None]
        dense[name] = array.reshape(count, *size)
    return Update(count, rows, dense)


def clients(numbers: NDArray[np.int32], n_items: int, noise: Values | None = None) -> TrainView:
    """Return canaries with these numbers and one item each: clients without data upload zeros."""
    one = Ragged(np.arange(len(numbers) + 1), np.zeros(len(numbers), np.int32))
    return TrainView(numbers, n_items, one, one, one, noise=noise)


# ------------------------------------------------------------ trials


@dataclass(frozen=True)
class CanaryTest:
    """One claim, tested with one kind of canary."""

    who: str
    where: str
    claimed: float
    rounds: Sequence[NoisedRound]
    arrays: Sequence[Sequence[str]]
    """The arrays that the canary fills, round by round."""
    scale: float | None = None
    """Scale of the noise on each upload, if it is local."""

    @property
    def by_rows(self) -> bool:
        """Whether clipping is by rows."""
        return isinstance(self.rounds[0].clip, RowClip)

    def secret(self, number: int, block: int, streams: Streams) -> SecretRound:
        """Return the secret streams of one block of trials, different for every test."""
        key = f"audit {streams.seed}", self.who, self.where, str(block)
        return SecretRound(number, SecretStreams.from_key(*key))


def canaries(
    plan: Plan,
    rounds: Sequence[NoisedRound],
    claimed: float,
    trials: int,
    streams: Streams,
    on_done: Callable[[int, int], None],
) -> list[dict[str, Any]]:
    """Audit a mechanism with a guarantee; one result for each claim and each kind of canary."""
    tests, results = canary_tests(plan, rounds, claimed), []
    delta = 0.0 if isinstance(plan.event, Pure) else plan.delta
    gaussian = delta > 0 and isinstance(plan.sampling, Everybody)
    certain = certain_among(len(tests))
    for done, test in enumerate(tests, 1):
        if test.scale is None:
            made = central_trials(plan, test, trials, streams)
        else:
            opened = sum(len(noised.shape.whole) for noised in test.rounds) * len(tests)
            count = min(trials, max(FEWEST_TRIALS, LOCAL_STREAMS // opened))
            made = local_trials(plan, test, count, streams)
        lower, true, false = lower_bound(made, delta, CONFIDENCE)
        surely, sharper = lower_bound(made, delta, certain)[0], None
        if gaussian:
            sharper = gaussian_bound(made, delta, CONFIDENCE)
            surely = max(surely, gaussian_bound(made, delta, certain))
        count = len(made.there) + len(made.absent)
        results.append(
            {
                "who": test.who,
                "where": test.where,
                "rounds": len(test.rounds),
                "claimed_epsilon": test.claimed,
                "delta": delta,
                "lower_bound": lower,
                "gaussian_lower_bound": sharper,
                "most_provable": most_provable(count, delta),
                "tpr": true,
                "fpr": false,
                "trials": count,
                "certain_lower_bound": surely,
                "contradicted": surely > test.claimed,
            }
        )
        on_done(done, len(tests))
    return results


def canary_tests(plan: Plan, rounds: Sequence[NoisedRound], claimed: float) -> list[CanaryTest]:
    """Return every claim with every kind of canary: in each array in turn, and in all."""
    first = rounds[0]
    scale = first.planned(plan) if isinstance(first.noise, LocalNoise) and plan.event else None
    unit = "silo" if plan.unit == SILO else "user"
    claims = [(f"any {unit}", claimed, rounds, scale)]
    if isinstance(first.noise, PersonalNoise):
        assert plan.budgets is not None, "clients with noise of their own have budgets"
        own = plan.budgets
        apart = sensitivity(first.clip.whole_bound(first.shape), "replace-one")
        claims = []
        for level, which in ((0, "smallest"), (-1, "largest")):
            budget, scale = float(own.claims()[level]), float(apart * own.multiplier[level])
            who = f"a {unit} with the {which} budget"
            claims.append((who, budget, rounds[: own.uploads], scale))
    tests = []
    for who, claim, some, noise in claims:
        layouts = [tuple(noised.canary_shape.whole) for noised in some]
        most = max(map(len, layouts))
        for turn in range(most):
            names = [layout[turn % len(layout)] for layout in layouts]
            where = ", ".join(dict.fromkeys(names))
            tests.append(CanaryTest(who, where, claim, some, [(name,) for name in names], noise))
        if most > 1:
            tests.append(CanaryTest(who, "all arrays", claim, some, layouts, noise))
    return tests


def central_trials(plan: Plan, test: CanaryTest, trials: int, streams: Streams) -> Trials:
    """Put canaries into noised sums or leave them out, each with entries of its own."""
    layouts = zip(test.rounds, test.arrays, strict=True)
    dense = any(noised.shape.dense.keys() & set(names) for noised, names in layouts)
    block = BLOCK if test.by_rows or dense else trials
    parts = [
        _sum_trials(plan, test, start, min(block, trials - start), streams)
        for start in range(0, trials, block)
    ]
    return Trials(*(np.concatenate(worlds) for worlds in zip(*parts, strict=True)))


def _sum_trials(
    plan: Plan, test: CanaryTest, start: int, count: int, streams: Streams
) -> tuple[Values, Values]:
    """Put ``count`` canaries into the same sums; return the evidence for each, by world."""
    generator = streams.generator(f"audit/canaries/{test.where}", start)
    there, evidence = generator.permutation(count) < count // 2, np.zeros(count)
    share, replaced = _participation(plan.sampling), plan.neighbours == "replace-one"
    for turn, (noised, names) in enumerate(zip(test.rounds, test.arrays, strict=True)):
        shape, entries = _trial_layout(noised.canary_shape, names, count, by_rows=test.by_rows)
        here, bound = noised.of(shape), noised.clip.bound
        taking_part = there & (generator.random(count) < share)
        who = np.arange(count) if replaced else np.flatnonzero(taking_part)
        sign = -1.0 if turn % 2 else 1.0
        amounts = 2 * bound * sign * np.where(taking_part, 1, -1)[who]
        secret = test.secret(noised.number, start, streams)
        given = uploads(shape, {name: filled[who] for name, filled in entries.items()}, amounts)
        sent = here.protection.protect(given, clients(who.astype(np.int32), shape.n_rows), secret)
        total = noised_sum(here, sent, secret)
        # Its projection on the canary's direction, in units of the canary.
        filled = sum(of.shape[1] for of in entries.values())
        length = bound * (math.sqrt(filled) if test.by_rows else 1)
        along = np.sum([total[name][of].sum(1) for name, of in entries.items()], axis=0)
        seen = sign * along / (math.sqrt(filled) * length)
        deviation = here.planned(plan) / length
        ratio = (2 * seen if replaced else seen - 0.5) / deviation**2
        if share < 1:  # a canary that takes part in some rounds, against none
            ratio = np.logaddexp(math.log1p(-share), math.log(share) + ratio)
        evidence += ratio
    return evidence[there], evidence[~there]


def _trial_layout(
    shape: UploadShape, names: Sequence[str], count: int, *, by_rows: bool
) -> tuple[UploadShape, Entries]:
    """Return the layout with an entry of the named arrays for each canary, and these entries."""
    each = np.arange(count)[:, None]
    if by_rows:  # a column of every table for each
        columns = np.arange(COLUMN)[None] * count + each
        made = UploadShape(
            COLUMN,
            dict.fromkeys(shape.tables, count),
            dict.fromkeys(shape.dense, (count,)),
            dict.fromkeys(shape.spaces, (COLUMN, count)),
        )
        return made, {name: each if name in shape.dense else columns for name in names}
    size = {name: count if name in names else 1 for name in shape.whole}
    made = UploadShape(
        max((size[name] for name in shape.tables), default=1),
        dict.fromkeys(shape.tables, 1),
        {name: (size[name],) for name in shape.dense},
        {name: (size[name], 1) for name in shape.spaces},
    )
    return made, dict.fromkeys(names, each)


def _participation(sampling: accountant.Sampling) -> float:
    """Return how often one client takes part; from round to round that is independent."""
    if isinstance(sampling, accountant.Poisson):
        return sampling.probability
    if isinstance(sampling, accountant.FixedSize):
        return sampling.size / sampling.population
    return 1.0


def local_trials(plan: Plan, test: CanaryTest, count: int, streams: Streams) -> Trials:
    """Let canaries upload one thing or its opposite; the server sees each upload by itself."""
    assert test.scale is not None, "local noise has a scale"
    scale, first = test.scale, test.rounds[0].canary_shape
    generator = streams.generator(f"audit/canaries/{test.where}")
    there, evidence = generator.permutation(count) < count // 2, np.zeros(count)
    shape = UploadShape(1, dict.fromkeys(first.tables, 1), dict.fromkeys(first.dense, (1,)))
    view = clients(np.arange(count, dtype=np.int32), 1, np.full(count, scale))
    for turn, (noised, names) in enumerate(zip(test.rounds, test.arrays, strict=True)):
        clip, sign = noised.clip, -1.0 if turn % 2 else 1.0
        entries: Entries = dict.fromkeys(names, np.zeros((count, 1), np.int64))
        given = uploads(shape, entries, 2 * clip.bound * sign * np.where(there, 1, -1))
        secret = test.secret(noised.number, 0, streams)
        sent = noised.of(shape).protection.protect(given, view, secret).dense
        seen = sign * np.stack([sent[name].reshape(count) for name in names]).astype(np.float64)
        # What clipping leaves of the canary in each array.
        left = clip.bound / (1 if test.by_rows else len(names) ** (1 / clip.power))
        if isinstance(plan.event, Pure):  # Laplace noise
            evidence += (np.abs(seen + left) - np.abs(seen - left)).sum(0) / scale
        else:
            evidence += 2 * left * seen.sum(0) / scale**2
    return Trials(evidence[there], evidence[~there])
