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
    noise = rounds[0].noise
    tests = _Tests(plan, streams, isinstance(noise, LocalNoise) and noise.kind == "laplace")
    layouts: list[UploadShape] = []
    for noised in rounds:
        if noised.shape not in layouts:
            layouts.append(noised.shape)
            tests.check_reach(noised)
    entries = max(shape.entries for shape in layouts)
    tested = rounds[: int(np.clip(DRAWS // entries, 2, MOST_ROUNDS))]
    drawn = [each for noised in tested for each in tests.draw(noised, noised.shape, 2)]
    more: list[Drawn] = []
    for noised in tested[:MOST_SMALL]:  # a small layout gives more draws of a scalar
        small = replace(noised.shape, dense={n: s and (1,) for n, s in noised.shape.dense.items()})
        more += tests.draw(noised, _with_rows(small, 1), SOURCES)
    for each in drawn:
        tests.check_amount(f"'{each.name}' in round {each.number}", each.values, each.steps)
    names = list(dict.fromkeys(each.name for each in drawn))
    for name in names:
        for some in (drawn, more):
            same = [each for each in some if each.name == name]
            values = np.concatenate([each.values[:WINDOW] for each in same])
            tests.check_amount(f"'{name}'", values, same[0].steps)
            tests.check_law(name, values)
    tests.check_independence(drawn)
    tests.check_independence(more)
    return {
        "rounds": len(tested),
        "arrays": names,
        "numbers": sum(len(each.values) for each in (*drawn, *more)),
        "tests": len(tests.unlikely),
        "problems": tests.problems(),
    }


@dataclass
class _Tests:
    plan: Plan
    streams: Streams
    laplace: bool
    unlikely: list[tuple[float, str]] = field(default_factory=list)
    """The p-value of each statistical test, and the problem if it is too small."""
    wrong: list[str] = field(default_factory=list)
    """What is certainly wrong."""

    def problems(self) -> list[str]:
        """Return everything that is wrong, or too unlikely among so many tests."""
        limit = (1 - CERTAIN) / max(1, len(self.unlikely))
        doubted = [words for chance, words in self.unlikely if chance < limit]
        return list(dict.fromkeys([*self.wrong, *doubted]))

    def check_reach(self, noised: NoisedRound) -> None:
        """Test how far an upload of one client, in each array and in all, moves what is seen."""
        shape, clip = _with_rows(noised.shape, ROWS), noised.clip
        here, names = noised.of(shape), list(shape.whole)
        view = clients(np.zeros(1, np.int32), shape.n_rows, np.ones(1))
        secret = SecretRound(noised.number, SecretStreams("audit/reach"))
        alone = [[name] for name in names]
        for chosen in [*alone, names] if len(names) > 1 else alone:
            arrays = " and ".join(chosen)
            for size in SIZES:
                entries, amount = _spread(chosen, shape, ROWS), np.array([size * clip.bound])
                try:
                    with_it, without = (
                        _seen(here, uploads(shape, entries, factor * amount), view, secret)[0]
                        for factor in (1.0, 0.0)
                    )
                except DivergedError:
                    self.wrong.append(f"clipping: an upload in {arrays} is too large to sum")
                    continue
                # Uploads travel in 32 bits, which may move them so much further; sums are exact.
                local = isinstance(here.noise, LocalNoise)
                rounding = 2.0**-23 * _norm(with_it, clip.power) if local else 0.0
                bit = abs(float(np.sum(with_it.pop(BIT, 0.0) - without.pop(BIT, 0.0))))
                norm = _norm({name: with_it[name] - without[name] for name in with_it}, clip.power)
                bound = clip.whole_bound(shape)
                if norm > bound + rounding or bit > 0.5:
                    self.wrong.append(
                        f"clipping: an upload in {arrays} moves what is seen by {norm:.4g} and its "
                        f"bit by {bit:.2g}, where {bound:.4g} and 0.5 are claimed"
                    )

    def draw(self, noised: NoisedRound, shape: UploadShape, sources: int) -> Iterator[Drawn]:
        """Yield the noise of every array of a round in this layout, as seen less as sent."""
        here, local = noised.of(shape), isinstance(noised.noise, LocalNoise)
        given = uploads(shape, _spread(shape.whole, shape, 1), np.array([2 * noised.clip.bound]))
        budgets = self.plan.budgets
        if budgets is None:
            # Under row clipping noise on a sum follows its layout; that on uploads is planned once.
            scales = np.full(sources, (noised if local else here).planned(self.plan))
        else:  # noise of clients with their own budgets, from the largest to the smallest
            apart = sensitivity(noised.clip.whole_bound(noised.shape), "replace-one")
            levels = np.linspace(0, len(budgets.levels) - 1, sources).astype(int)
            scales = apart * budgets.multiplier[levels]
        for source, scale in enumerate(scales):
            run, client = (0, source) if local else (source, 0)
            key = SecretStreams.from_key(f"audit {self.streams.seed}", "noise", str(run))
            view = clients(np.array([client], np.int32), shape.n_rows, np.array([scale]))
            seen, clear = _seen(here, given, view, SecretRound(noised.number, key))
            for name, values in seen.items():
                if not (values * STEPS_PER_UNIT == np.rint(values * STEPS_PER_UNIT)).all():
                    self.wrong.append(
                        f"grid: '{name}' holds numbers that are no whole steps of 2^-32, whose low "
                        "bits tell what noise was added to"
                    )
                own = scale
                if name == BIT and isinstance(noised.clip, AdaptiveClip):
                    own = noised.clip.bit_noise
                width, steps = shape.tables.get(name, 1), min(own * STEPS_PER_UNIT, FINEST)
                yield Drawn(name, noised.number, source, (values - clear[name]) / own, width, steps)

    def check_amount(self, words: str, values: Values, steps: float) -> None:
        """Test that every entry has noise, and no less than planned."""
        none, count = int((values == 0).sum()), len(values)
        absent = f"noise: {none} of {count} numbers of {words} carry none"
        self.unlikely.append((poisson.sf(none - 1, count / steps), absent))
        if self.laplace:
            chance, share = gamma.cdf(np.abs(values).sum(), count), np.abs(values).mean()
        else:
            chance, share = chi2.cdf((values**2).sum(), count), math.sqrt((values**2).mean())
        little = f"noise: that of {words} is {share:.3g} of what is claimed"
        self.unlikely.append((chance, little))

    def check_law(self, name: str, values: Values) -> None:
        """Test the distribution of the noise; more noise than planned does no harm."""
        size = np.abs(values).mean() if self.laplace else math.sqrt((values**2).mean())
        law, words = ("laplace", "Laplace") if self.laplace else ("norm", "Gaussian")
        chance = kstest(values[: 4 * WINDOW] / max(1.0, size), law).pvalue
        self.unlikely.append((chance, f"noise: that of '{name}' is not of the {words} law"))

    def check_independence(self, drawn: Sequence[Drawn]) -> None:
        """Test that noise neither repeats nor correlates with other noise."""
        gathered: dict[str, list[tuple[Values, Values, float]]] = {}
        for words, one, other, steps in _pairs(drawn):
            if len(one):
                gathered.setdefault(words, []).append((one, other, steps))
        for words, parts in gathered.items():
            one, other = (np.concatenate([part[k] for part in parts]) for k in (0, 1))
            same, n = int(((one == other) & (one != 0)).sum()), len(one)
            repeated = f"independence: the noise of {words} is the same in {same} of {n} numbers"
            chance = poisson.sf(same - 1, n / min(part[2] for part in parts))
            self.unlikely.append((chance, repeated))
            if n >= FEWEST and one.any() and other.any():
                r, chance = pearsonr(one, other)
                together = f"independence: the noises of {words} go together, correlation {r:.3f}"
                self.unlikely.append((chance, together))


def _pairs(drawn: Sequence[Drawn]) -> Iterator[tuple[str, Values, Values, float]]:
    """Yield pairs of noises that should be independent, with a description and the steps."""
    at = {(noise.name, noise.number, noise.source): noise for noise in drawn}
    following = dict(pairwise(dict.fromkeys(noise.number for noise in drawn)))
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


def _norm(arrays: Mapping[str, Values], power: int) -> float:
    return float(np.linalg.norm(np.concatenate(list(arrays.values())), power))


def _with_rows(shape: UploadShape, most: int) -> UploadShape:
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


def _seen(
    noised: NoisedRound, given: Update, view: TrainView, secret: SecretRound
) -> tuple[dict[str, Values], dict[str, Values]]:
    """Return what is seen of a client's upload, and what it would be without noise."""
    sent = noised.protection.protect(given, view, secret)
    if isinstance(noised.noise, CentralGaussian):
        clear, seen = sent, noised_sum(noised, sent, secret)
    else:
        clear = Protection(noised.protection.mechanisms[:-1]).protect(given, view, secret)
        seen = {name: array.reshape(-1).astype(np.float64) for name, array in sent.dense.items()}
    summed = ExactSum(noised.shape.n_rows)
    summed.add(clear)
    return seen, written_out(summed.total(), noised.shape)
