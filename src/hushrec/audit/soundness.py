"""Soundness: direct tests of what a claim, and the canaries, take for granted of the mechanism.

A claim rests on three properties, each tested in the layout of the run's uploads:

* **reach**: one upload, however large, in whatever array, moves a sum by no more than the bound.
  With the same noise twice, the difference of two sums shows it exactly;
* **noise**: every entry of every array, the count of adaptive clipping included, gets at least the
  noise that was charged to the budget, of the distribution that was charged;
* **independence**: noise neither repeats nor correlates with other noise: between neighbouring
  entries and rows, arrays, rounds, and runs or clients.

Also, what is summed or sent is a whole number of the grid's steps, so that no low bit reveals what
noise was added to. All statistical tests together err with probability 1 in 10,000.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.stats import chi2, gamma, kstest, pearsonr, poisson

from hushrec.aggregation import STEPS_PER_UNIT, ExactSum, Update, UploadShape
from hushrec.audit.canary import (
    CERTAIN,
    Entries,
    NoisedRound,
    clients,
    noised_sum,
    uploads,
    written_out,
)
from hushrec.data.views import TrainView
from hushrec.errors import DivergedError
from hushrec.privacy.accountant import Values, sensitivity
from hushrec.privacy.clipping import BIT, AdaptiveClip
from hushrec.privacy.noise import CentralGaussian, LocalNoise
from hushrec.privacy.plan import Plan
from hushrec.privacy.protection import Protection
from hushrec.streams import SecretRound, SecretStreams, Streams

SIZES = (2.0, 1e30)
"""Norms of uploads in multiples of the bound; clipping must act on each."""
ROWS = 4
"""Rows of each array that an upload fills to test its reach."""
DRAWS = 2**22
"""Numbers to draw from each source, or those of two rounds if they are more."""
MOST_ROUNDS = 40
MOST_SMALL, SOURCES = 4, 50
"""Rounds, and runs or clients, for which arrays are drawn again in a small layout."""
WINDOW = 2**14
"""Neighbouring entries of an array that are compared with others."""
FEWEST = 100
"""Fewest numbers for which a correlation is computed."""
FINEST = 2.0**22
"""Most steps of a deviation that 32-bit numbers resolve."""


@dataclass
class Findings:
    """Statistical tests with their p-values, and what is certainly wrong."""

    unlikely: list[tuple[float, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def test(self, chance: float, words: str) -> None:
        """Add a test: its p-value, and the problem if it is too small."""
        self.unlikely.append((chance, words))

    @property
    def problems(self) -> list[str]:
        """Everything that is wrong, or too unlikely among so many tests."""
        limit = (1 - CERTAIN) / max(1, len(self.unlikely))
        doubted = [words for chance, words in self.unlikely if chance < limit]
        return list(dict.fromkeys([*self.wrong, *doubted]))


@dataclass(frozen=True)
class Drawn:
    """The noise of one array, in one round, from one source: a run, or a client."""

    name: str
    number: int
    source: int
    values: Values
    """In units of the planned scale."""
    width: int
    steps: float
    """Steps of the grid in the planned scale, at most `FINEST`."""


def soundness(plan: Plan, rounds: Sequence[NoisedRound], streams: Streams) -> dict[str, Any]:
    """Test clipping and noise of a run, and return the problems."""
    findings, layouts = Findings(), list[UploadShape]()
    for noised in rounds:
        if noised.shape not in layouts:
            layouts.append(noised.shape)
            _check_reach(noised, findings)
    entries = max(shape.entries for shape in layouts)
    tested = rounds[: int(np.clip(DRAWS // entries, 2, MOST_ROUNDS))]
    drawn, more = list[Drawn](), list[Drawn]()
    for noised in tested:
        drawn += _noises(plan, noised, noised.shape, 2, streams, findings)
    for noised in tested[:MOST_SMALL]:  # a small layout gives more draws of a scalar
        more += _noises(plan, noised, _small(noised.shape), SOURCES, streams, findings)
    laplace = isinstance(rounds[0].noise, LocalNoise) and rounds[0].noise.kind == "laplace"
    for noise in drawn:
        words = f"'{noise.name}' in round {noise.number}"
        _check_amount(words, noise.values, noise.steps, findings, laplace=laplace)
    for name in dict.fromkeys(noise.name for noise in drawn):
        for some in (drawn, more):
            same = [noise for noise in some if noise.name == name]
            values = np.concatenate([noise.values[:WINDOW] for noise in same])
            _check_amount(f"'{name}'", values, same[0].steps, findings, laplace=laplace)
            _check_law(name, values, findings, laplace=laplace)
    for pairs in (_pairs(drawn), _pairs(more)):
        _check_independence(pairs, findings)
    return {
        "rounds": len(tested),
        "arrays": list(dict.fromkeys(noise.name for noise in drawn)),
        "numbers": sum(len(noise.values) for noise in (*drawn, *more)),
        "tests": len(findings.unlikely),
        "problems": findings.problems,
    }


# ------------------------------------------------------------ reach


def _check_reach(noised: NoisedRound, findings: Findings) -> None:
    """Test how far an upload of one client, in each array and in all, moves what is seen."""
    shape = _with_rows(noised.shape, ROWS)
    here, names = noised.of(shape), list(shape.whole)
    view = clients(np.zeros(1, np.int32), shape.n_rows, np.ones(1))
    secret = SecretRound(noised.number, SecretStreams("audit/reach"))
    alone = [[name] for name in names]
    for chosen in [*alone, names] if len(names) > 1 else alone:
        for size in SIZES:
            entries, amount = _spread(chosen, shape, ROWS), np.array([size * noised.clip.bound])
            try:
                with_it, without = (
                    _seen(here, uploads(shape, entries, factor * amount), view, secret)[0]
                    for factor in (1.0, 0.0)
                )
            except DivergedError:
                findings.wrong.append(
                    f"clipping: an upload in {' and '.join(chosen)} is too large to sum"
                )
                continue
            # Uploads travel in 32 bits, which may take them so much further apart; sums are exact.
            local = isinstance(here.noise, LocalNoise)
            rounding = 2.0**-23 * _norm(with_it, noised) if local else 0.0
            bit = abs(float(np.sum(with_it.pop(BIT, 0.0) - without.pop(BIT, 0.0))))
            norm = _norm({name: with_it[name] - without[name] for name in with_it}, noised)
            bound = noised.clip.whole_bound(shape)
            if norm > bound + rounding or bit > 0.5:
                findings.wrong.append(
                    f"clipping: an upload in {' and '.join(chosen)} moves what is seen by "
                    f"{norm:.4g} and its bit by {bit:.2g}, where {bound:.4g} and 0.5 are claimed"
                )


def _norm(arrays: Mapping[str, Values], noised: NoisedRound) -> float:
    return float(np.linalg.norm(np.concatenate(list(arrays.values())), noised.clip.power))


def _with_rows(shape: UploadShape, most: int) -> UploadShape:
    """Return the layout with fewer rows, and nothing else changed."""
    keys = {name: (min(most, n), width) for name, (n, width) in shape.spaces.items()}
    return replace(shape, n_rows=min(most, shape.n_rows), spaces=keys)


def _spread(names: Iterable[str], shape: UploadShape, most: int) -> Entries:
    """Return the entries of one canary, the first of up to ``most`` rows of the named arrays."""
    entries = {}
    for name in names:
        width = shape.sparse[name][1] if name in shape.sparse else 1
        rows = min(most, math.prod(shape.whole[name]) // width)
        entries[name] = width * np.arange(rows)[None]
    return entries


def _small(shape: UploadShape) -> UploadShape:
    """Return the layout with a row of each table, and a number of each dense array."""
    return replace(_with_rows(shape, 1), dense=dict.fromkeys(shape.dense, (1,)))


# ------------------------------------------------------------ noise


def _seen(
    noised: NoisedRound, given: Update, view: TrainView, secret: SecretRound
) -> tuple[dict[str, Values], dict[str, Values]]:
    """Return what is seen of a client's upload, and what it would be without noise."""
    shape, layers = noised.shape, noised.protection.mechanisms
    sent = noised.protection.protect(given, view, secret)
    if isinstance(noised.noise, CentralGaussian):
        clear, seen = sent, noised_sum(noised, sent, secret)
    else:
        clear = Protection(layers[:-1]).protect(given, view, secret)
        seen = {name: array.reshape(-1).astype(np.float64) for name, array in sent.dense.items()}
    summed = ExactSum(shape.n_rows)
    summed.add(clear)
    return seen, written_out(summed.total(), shape)


def _noises(
    plan: Plan,
    noised: NoisedRound,
    shape: UploadShape,
    sources: int,
    streams: Streams,
    findings: Findings,
) -> Iterator[Drawn]:
    """Yield the noise of every array of a round in a layout: what is seen minus what was sent."""
    here, local = noised.of(shape), isinstance(noised.noise, LocalNoise)
    given = uploads(shape, _spread(shape.whole, shape, 1), np.array([2 * noised.clip.bound]))
    if plan.budgets is None:
        # Under row clipping noise on a sum follows its layout; noise on uploads was planned once.
        scales = np.full(sources, (noised if local else here).planned(plan))
    else:  # noise of clients with their own budgets, from the largest to the smallest
        apart = sensitivity(noised.clip.whole_bound(noised.shape), "replace-one")
        levels = np.linspace(0, len(plan.budgets.levels) - 1, sources).astype(int)
        scales = apart * plan.budgets.multiplier[levels]
    for source, scale in enumerate(scales):
        run, client = (0, source) if local else (source, 0)
        key = SecretStreams.from_key(f"audit {streams.seed}", "noise", str(run))
        view = clients(np.array([client], np.int32), shape.n_rows, np.array([scale]))
        seen, clear = _seen(here, given, view, SecretRound(noised.number, key))
        for name, values in seen.items():
            if not (values * STEPS_PER_UNIT == np.rint(values * STEPS_PER_UNIT)).all():
                findings.wrong.append(
                    f"grid: '{name}' holds numbers that are no whole steps of 2^-32, whose low "
                    "bits tell what noise was added to"
                )
            own = scale
            if name == BIT and isinstance(noised.clip, AdaptiveClip):
                own = noised.clip.bit_noise
            width, steps = shape.tables.get(name, 1), min(own * STEPS_PER_UNIT, FINEST)
            yield Drawn(name, noised.number, source, (values - clear[name]) / own, width, steps)


def _check_amount(
    words: str, values: Values, steps: float, findings: Findings, *, laplace: bool
) -> None:
    """Test that every entry has noise, and no less than planned."""
    none = int((values == 0).sum())
    findings.test(
        poisson.sf(none - 1, len(values) / steps),
        f"noise: {none} of {len(values)} numbers of {words} carry none",
    )
    if laplace:
        chance, share = gamma.cdf(np.abs(values).sum(), len(values)), np.abs(values).mean()
    else:
        chance = chi2.cdf((values**2).sum(), len(values))
        share = math.sqrt((values**2).mean())
    findings.test(chance, f"noise: that of {words} is {share:.3g} of what is claimed")


def _check_law(name: str, values: Values, findings: Findings, *, laplace: bool) -> None:
    """Test the distribution of the noise; more noise than planned does no harm."""
    size = np.abs(values).mean() if laplace else math.sqrt((values**2).mean())
    found = kstest(values[: 4 * WINDOW] / max(1.0, size), "laplace" if laplace else "norm")
    findings.test(
        found.pvalue,
        f"noise: that of '{name}' is not of the {'Laplace' if laplace else 'Gaussian'} law",
    )


# ------------------------------------------------------------ independence

Pairs = Iterable[tuple[str, Values, Values, float]]


def _pairs(drawn: Sequence[Drawn]) -> Pairs:
    """Yield pairs of noises that should be independent, with a description and the steps."""
    at = {(noise.name, noise.number, noise.source): noise for noise in drawn}
    numbers = list(dict.fromkeys(noise.number for noise in drawn))
    following = dict(pairwise(numbers))
    for (name, number, source), noise in at.items():
        values = noise.values[:WINDOW]
        for apart, what in ((1, "neighbouring entries"), (noise.width, "neighbouring rows")):
            yield f"{what} of '{name}'", values[:-apart], values[apart:], noise.steps
        later = at.get((name, following.get(number, -1), source))
        other = at.get((name, number, source + 1))
        for beside, what in ((later, "rounds"), (other, "clients, or runs,")):
            if beside is not None and len(beside.values) == len(noise.values):
                yield f"two {what} of '{name}'", values, beside.values[:WINDOW], noise.steps
        names = [key for key in at if key[1:] == (number, source)]
        for beside in (at[key] for key in names if key[0] > name):
            both = min(len(values), len(beside.values))
            words = f"'{name}' and '{beside.name}'"
            yield words, values[:both], beside.values[:both], min(noise.steps, beside.steps)


def _check_independence(pairs: Pairs, findings: Findings) -> None:
    """Test that noise neither repeats nor correlates with other noise."""
    gathered: dict[str, list[tuple[Values, Values, float]]] = {}
    for words, one, other, steps in pairs:
        if len(one):
            gathered.setdefault(words, []).append((one, other, steps))
    for words, parts in gathered.items():
        one, other = (np.concatenate([part[k] for part in parts]) for k in (0, 1))
        same = int(((one == other) & (one != 0)).sum())
        findings.test(
            poisson.sf(same - 1, len(one) / min(part[2] for part in parts)),
            f"independence: the noise of {words} is the same in {same} of {len(one)} numbers",
        )
        if len(one) >= FEWEST and one.any() and other.any():
            found = pearsonr(one, other)
            findings.test(
                found.pvalue,
                f"independence: the noises of {words} go together, correlation "
                f"{found.statistic:.3f}",
            )
