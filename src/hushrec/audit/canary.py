"""What trials prove: lower bounds of epsilon, with a confidence.

With a threshold that was chosen on one half of the trials, the other half gives true and false
positive rates with Clopper-Pearson bounds, and (epsilon, delta)-DP would need
TPR <= e^epsilon FPR + delta:

    epsilon >= log((TPR_low - delta) / FPR_high)        (or the same for "not there")

Where all rounds are plain Gaussians the claim is more than one epsilon: it is a trade-off curve
with one parameter, mu. Then mu >= z(TPR_low) - z(FPR_high), and the epsilon of that mu at the run's
delta is a second, sharper bound (Dong, Roth, Su 2022).

Bounds are printed at 95 %. A claim is called contradicted only at 99.99 %, shared out among all
that is asked at once: else one honest run in twenty or so would fail.

Canaries: an epsilon that the run's own mechanism provably exceeds, to hold against its claim.

A canary is a client whose clipped upload lies in a place that the attacker knows, as large as
clipping allows: in each array of the run's layout in turn, and in all of them at once. In half of
the trials it is there, in the other half it is not (or, where neighbours replace one another,
another one uploads the opposite). The mechanism is the run's, from `Protection.protect` over the
exact sum to `Protection.finish`, with its noise, cohort and rounds, and with secret streams of its
own. Only the arrays' sizes are the audit's: one entry for each canary, as noise and bounds of flat
clipping are the same for all sizes. (What holds at the real sizes, `soundness` looks at.) Other
clients would only shift an entry by what the attacker is allowed to know.

Canaries change their sign from round to round. Noise that repeats itself cancels for the attacker
then, and not for the canary.

The attacker computes the likelihood ratio of the two worlds over all rounds. What that proves is
`trials`' affair. Neighbours are the worst ones: where a cohort has a fixed size, everybody else
uploads the opposite, so that whoever takes the canary's place makes the difference larger.

Clipping by rows bounds every row by itself, so there a canary fills rows of a small table. Local
noise with clipping by rows has a scale that is made for all rows: there the bound is loose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import beta, binom, norm

from hushrec.aggregation import UploadShape
from hushrec.audit.layout import (
    NoisedRound,
    Places,
    Values,
    clients,
    noised_sum,
    uploads,
    written_out,
)
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
from hushrec.privacy.clipping import RowClip
from hushrec.privacy.noise import LocalNoise
from hushrec.privacy.plan import Plan
from hushrec.streams import SecretRound, SecretStreams, Streams

CONFIDENCE = 0.95
CERTAIN = 0.9999
THRESHOLDS = 200
MOST_GUESSED = 30.0
"""Epsilon beyond which no number of guesses is asked about."""


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
    low, high = clopper_pearson(np.array([trials // 4, 0]), trials // 4, CONFIDENCE)
    return math.log(max(low[0] - delta, 1e-300) / high[1])


def guessing_bound(
    right: int, guesses: int, coins: int, delta: float, confidence: float, apart: int = 1
) -> float:
    """Return the epsilon that so many right guesses of coins in one run prove.

    Coins are fair and independent, each decides between two data sets that are ``apart`` neighbours
    from each other, and what is guessed is what one run released. Then right guesses are hardly
    more than those of coins that fall right with probability e^epsilon / (1 + e^epsilon), however
    they depend on each other (Steinke, Nasr, Jagielski 2023, theorem 5.2).
    """
    most = np.arange(1, coins + 1)

    def chance(epsilon: float) -> float:
        between = apart * epsilon
        # Steps of a path between data sets: their deltas add up, each times what comes after it.
        slack = delta * sum(math.exp(step * epsilon) for step in range(apart))
        likely = binom(guesses, 1 / (1 + math.exp(-between)))
        beyond = float(likely.sf(right - 1))
        more = float(((likely.sf(right - 1 - most) - beyond) / most).max())
        return beyond + 2 * coins * min(slack, 1.0) * more

    if not guesses or chance(0.0) >= 1 - confidence:
        return 0.0
    if chance(MOST_GUESSED) < 1 - confidence:
        return MOST_GUESSED
    return float(brentq(lambda eps: chance(eps) - (1 - confidence), 0.0, MOST_GUESSED, xtol=1e-4))


def judged(
    trials: Trials,
    claimed: float,
    delta: float,
    *,
    gaussian: bool = True,
    certain: float = CERTAIN,
) -> dict[str, Any]:
    """Hold a claim against trials; ``gaussian`` says that all of it is plain Gaussian noise."""
    lower, true, false = lower_bound(trials, delta, CONFIDENCE)
    surely = lower_bound(trials, delta, certain)[0]
    sharper = None
    if gaussian and delta > 0:
        sharper = gaussian_bound(trials, delta, CONFIDENCE)
        surely = max(surely, gaussian_bound(trials, delta, certain))
    count = len(trials.there) + len(trials.absent)
    return {
        "claimed_epsilon": claimed,
        "delta": delta,
        "lower_bound": lower,
        "gaussian_lower_bound": sharper,
        "most_provable": most_provable(count, delta),
        "tpr": true,
        "fpr": false,
        "trials": count,
        "certain_lower_bound": surely,
        "contradicted": surely > claimed,
    }


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
        clopper_pearson(true, len(hit), confidence)[0],
        clopper_pearson(false, len(miss), confidence)[1],
    )


def clopper_pearson(hits: NDArray[Any], n: int, confidence: float) -> tuple[Values, Values]:
    """Return bounds of a probability; both rates together hold with this confidence."""
    tail = (1 - confidence) / 2
    low = np.where(hits > 0, beta.ppf(tail, np.maximum(hits, 1), n - hits + 1), 0.0)
    high = np.where(hits < n, beta.ppf(1 - tail, hits + 1, np.maximum(n - hits, 1)), 1.0)
    return np.clip(low, 1e-300, 1), np.clip(high, 1e-300, 1)


COLUMN, BLOCK = 4, 200
"""Rows that a canary fills where clipping is by rows; and canaries in one sum, there and in dense
arrays, which every upload holds whole."""
LOCAL_STREAMS = 200_000
"""Streams of local noise that may be opened, one for each client, array and round: then there are
fewer trials, but never fewer than so many."""
FEWEST = 1000

Group = tuple[tuple[str, ...], ...]
"""The arrays that a kind of canary lies in, round by round."""
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Question:
    """One claim, held against one kind of canary."""

    who: str
    where: str
    claimed: float
    stages: Sequence[NoisedRound]
    group: Group
    scale: float | None = None
    """Of the noise on each upload, where it is local."""

    @property
    def by_rows(self) -> bool:
        """Whether clipping is by rows."""
        return isinstance(self.stages[0].clip, RowClip)

    def secret(self, stage: NoisedRound, block: int, streams: Streams) -> SecretRound:
        """Return secret streams that are nobody else's."""
        key = f"audit {streams.seed}", self.who, self.where, str(block)
        return SecretRound(stage.number, SecretStreams.from_key(*key))


def canaries(
    plan: Plan,
    stages: Sequence[NoisedRound],
    claimed: float,
    trials: int,
    streams: Streams,
    on_done: Progress,
) -> list[dict[str, Any]]:
    """Audit a mechanism with a guarantee; one result for each claim and each kind of canary."""
    asked = questions(plan, stages, claimed)
    pure, sampled = isinstance(plan.event, Pure), not isinstance(plan.sampling, Everybody)
    results = []
    for done, question in enumerate(asked, 1):
        if question.scale is None:
            made = central_trials(plan, question, trials, streams)
        else:
            opened = sum(len(stage.shape.whole) for stage in question.stages) * len(asked)
            count = min(trials, max(FEWEST, LOCAL_STREAMS // opened))
            made = local_trials(plan, question, count, streams)
        found = judged(
            made,
            question.claimed,
            0.0 if pure else plan.delta,
            gaussian=not pure and not sampled,
            certain=certain_among(len(asked)),
        )
        said = {"who": question.who, "where": question.where, "rounds": len(question.stages)}
        results.append({**said, **found})
        on_done(done, len(asked))
    return results


def questions(plan: Plan, stages: Sequence[NoisedRound], claimed: float) -> list[Question]:
    """Return every claim with every kind of canary."""
    first = stages[0]
    scale = first.planned(plan) if isinstance(first.noise, LocalNoise) and plan.event else None
    claims: list[tuple[str, float, Sequence[NoisedRound], float | None]]
    claims = [("any user", claimed, stages, scale)]
    if isinstance(first.noise, PersonalNoise):
        assert plan.budgets is not None, "who has noise of its own has a budget"
        own = plan.budgets
        apart = sensitivity(first.clip.whole_bound(first.shape), "replace-one")
        levels = (0, "smallest"), (len(own.levels) - 1, "largest")
        claims = [
            (
                f"a user with the {which} budget",
                float(own.claims()[level]),
                stages[: own.uploads],
                float(apart * own.multiplier[level]),
            )
            for level, which in levels
        ]
    return [
        Question(who, where, claim, some, group, noise)
        for who, claim, some, noise in claims
        for where, group in groups_of(some)
    ]


def groups_of(stages: Sequence[NoisedRound]) -> list[tuple[str, Group]]:
    """Return the kinds of canaries: in one array of each round, each in turn, and in all."""
    layouts = [tuple(stage.shape.whole) for stage in stages]
    most = max(map(len, layouts))
    found: list[tuple[str, Group]] = []
    for turn in range(most):
        group = tuple((names[turn % len(names)],) for names in layouts)
        found.append((", ".join(dict.fromkeys(name for (name,) in group)), group))
    return [*found, ("all arrays", tuple(layouts))] if most > 1 else found


# ------------------------------------------------------------ noise on the sum


def central_trials(plan: Plan, question: Question, trials: int, streams: Streams) -> Trials:
    """Let canaries in and out of noised sums, each with entries of its own."""
    dense = any(
        name in stage.shape.dense
        for stage, names in zip(question.stages, question.group, strict=True)
        for name in names
    )
    block = BLOCK if question.by_rows or dense else trials
    parts = [
        _sum_trials(plan, question, start, min(block, trials - start), streams)
        for start in range(0, trials, block)
    ]
    return Trials(*(np.concatenate(worlds) for worlds in zip(*parts, strict=True)))


def _sum_trials(
    plan: Plan, question: Question, start: int, count: int, streams: Streams
) -> tuple[Values, Values]:
    """Put ``count`` canaries into the same sums; return the evidence for each, by world."""
    generator = streams.generator(f"audit/canaries/{question.where}", start)
    there, evidence = generator.permutation(count) < count // 2, np.zeros(count)
    share, replaced = _participation(plan.sampling), plan.neighbours == "replace-one"
    for turn, (stage, names) in enumerate(zip(question.stages, question.group, strict=True)):
        shape, places = _trial_layout(stage.shape, names, count, by_rows=question.by_rows)
        here, bound = stage.of(shape), stage.clip.bound
        taking_part = there & (generator.random(count) < share)
        who = np.arange(count) if replaced else np.flatnonzero(taking_part)
        sign = -1.0 if turn % 2 else 1.0
        amounts = 2 * bound * sign * np.where(taking_part, 1, -1)[who]
        secret = question.secret(stage, start, streams)
        given = uploads(shape, {name: entries[who] for name, entries in places.items()}, amounts)
        sent = here.protection.protect(given, clients(who.astype(np.int32), shape.n_rows), secret)
        total = written_out(noised_sum(here, sent, secret), shape)
        # Its projection on the canary's direction, in units of the canary.
        entries = sum(of.shape[1] for of in places.values())
        norm = bound * (math.sqrt(entries) if question.by_rows else 1)
        along = np.sum([total[name][of].sum(1) for name, of in places.items()], axis=0)
        seen = sign * along / (math.sqrt(entries) * norm)
        deviation = here.planned(plan) / norm
        ratio = (2 * seen if replaced else seen - 0.5) / deviation**2
        evidence += _mixed(ratio, share)
    return evidence[there], evidence[~there]


def _trial_layout(
    shape: UploadShape, names: Sequence[str], count: int, *, by_rows: bool
) -> tuple[UploadShape, Places]:
    """Return the layout with an entry of the named arrays for each canary, and where they lie."""
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


def _mixed(ratio: Values, share: float) -> Values:
    """Return the log-likelihood ratio of a canary that takes part now and then, against none."""
    if share >= 1:
        return ratio
    return np.asarray(np.logaddexp(math.log1p(-share), math.log(share) + ratio))


def _participation(sampling: Sampling) -> float:
    """Return how often one client takes part; from round to round that is independent."""
    if isinstance(sampling, Poisson):
        return sampling.probability
    return sampling.size / sampling.population if isinstance(sampling, FixedSize) else 1.0


# ------------------------------------------------------------ noise on every upload


def local_trials(plan: Plan, question: Question, count: int, streams: Streams) -> Trials:
    """Let canaries upload one thing or its opposite; the server sees each upload by itself."""
    assert question.scale is not None, "local noise has a scale"
    scale, first = question.scale, question.stages[0]
    generator = streams.generator(f"audit/canaries/{question.where}")
    there, evidence = generator.permutation(count) < count // 2, np.zeros(count)
    shape = UploadShape(
        1, dict.fromkeys(first.shape.tables, 1), dict.fromkeys(first.shape.dense, (1,))
    )
    view = clients(np.arange(count, dtype=np.int32), 1, np.full(count, scale))
    for turn, (stage, names) in enumerate(zip(question.stages, question.group, strict=True)):
        clip, sign = stage.clip, -1.0 if turn % 2 else 1.0
        places: Places = dict.fromkeys(names, np.zeros((count, 1), np.int64))
        amounts = 2 * clip.bound * sign * np.where(there, 1, -1)
        given = uploads(shape, places, amounts)
        secret = question.secret(stage, 0, streams)
        sent = stage.of(shape).protection.protect(given, view, secret).dense
        seen = sign * np.stack([sent[name].reshape(count) for name in names]).astype(np.float64)
        # What clipping leaves of the canary in each array.
        left = clip.bound / (1 if question.by_rows else len(names) ** (1 / clip.power))
        if isinstance(plan.event, Pure):  # Laplace noise
            evidence += (np.abs(seen + left) - np.abs(seen - left)).sum(0) / scale
        else:
            evidence += 2 * left * seen.sum(0) / scale**2
    return Trials(evidence[there], evidence[~there])
