"""`compose`: the joint guarantee of several runs on the same data.

The events of all runs are composed at one delta. The composition theorems apply because the noise
of the runs is independent and its scale is fixed by each configuration. The result is the smaller
of two valid bounds: the epsilon of all events together, and the sum of the runs' epsilons, each at
an equal part of delta.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hushrec.errors import ConfigError, RunError
from hushrec.privacy.accountant import KEPT_BACK, Accountant, Neighbours
from hushrec.privacy.plan import OTHER_RUNS, TRUSTED, Trust, changed
from hushrec.privacy.statement import ComposedStatement, PrivacyStatement

EVENTS = {"discrete gaussian", "pure"}
NEIGHBOURS: tuple[Neighbours, ...] = ("zero-out-one", "replace-one")
COPIED = ("public", "not_covered", "neighbours", "unit", "trust", "same_budgets", "noise_seed")
"""Fields of a statement that a claim repeats."""
RUNS_NOT_NAMED = "options tuned on the same data, and runs on it that are not among these"


@dataclass(frozen=True)
class Claim:
    """The guarantee of one run, and the accountant's history behind it."""

    run: str
    method: str
    data: str
    digest: str | None
    """Digest of the data; None if no party of the run has all data."""
    clients: int
    epsilon: float
    delta: float
    neighbours: Neighbours
    unit: str
    trust: Trust
    same_budgets: bool
    noise_seed: int | None
    public: tuple[str, ...]
    not_covered: tuple[str, ...]
    account: str
    """The accountant's history of all planned rounds: a line of JSON per event."""

    @classmethod
    def of(cls, run: str, selected_by: str, privacy: PrivacyStatement, **about: Any) -> Claim:
        """Take a run's statement; refuse one without a guarantee, or whose account differs.

        ``about`` are method, data, digest of the data and number of clients.
        """
        if not privacy.promises or privacy.epsilon is None:
            raise RunError(f"{run} has no guarantee to compose: {privacy.statement}")
        if selected_by == "validation":
            raise _earlier(run, "its model was selected by validation items without noise")
        for name in ("delta", "claimed", *COPIED):
            if name not in privacy.model_fields_set:
                raise _earlier(run, f"its statement lacks '{name}'")
        if privacy.neighbours not in NEIGHBOURS:
            raise _earlier(run, f"its neighbour relation is '{privacy.neighbours}'")
        if privacy.trust not in TRUSTED:
            raise _earlier(run, f"its trust is '{privacy.trust}'")
        claim = cls(
            run=run,
            **about,
            epsilon=privacy.epsilon,
            delta=privacy.delta,
            public=tuple(privacy.public),
            not_covered=tuple(privacy.not_covered),
            account=_account(run, privacy.claimed),
            **{name: getattr(privacy, name) for name in COPIED[2:]},
        )
        try:
            reached = _epsilon(claim.account, claim.delta)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _earlier(run, f"its account cannot be read ({error!r})") from None
        if not reached >= claim.epsilon * (1 - KEPT_BACK):
            raise RunError(
                f"{run}: the accountant gives epsilon {reached:.4g} and the statement says "
                f"{claim.epsilon:.4g}; summary.json is damaged"
            )
        return claim

    def __str__(self) -> str:
        return f"({self.epsilon:.4g}, {self.delta:.3g})"


@dataclass(frozen=True)
class ComposedGuarantee:
    """(epsilon, delta)-DP of everything that several runs release."""

    runs: tuple[Claim, ...]
    epsilon: float
    delta: float

    @property
    def simulated(self) -> tuple[str, ...]:
        """Runs with a noise seed, whose noise is reproducible."""
        return tuple(claim.run for claim in self.runs if claim.noise_seed is not None)

    @property
    def same_budgets(self) -> bool:
        """Whether neighbours have the same personal budgets."""
        return any(claim.same_budgets for claim in self.runs)

    @property
    def trust(self) -> Trust:
        """The party that must be trusted in at least one of the runs."""
        trusting = any(claim.trust == "aggregator" for claim in self.runs)
        return "aggregator" if trusting else "nobody"

    @property
    def public(self) -> tuple[str, ...]:
        """Data that at least one of the runs declares public."""
        return tuple(dict.fromkeys(fact for claim in self.runs for fact in claim.public))

    @property
    def not_covered(self) -> tuple[str, ...]:
        """What at least one of the runs does not cover."""
        facts = [fact for claim in self.runs for fact in claim.not_covered if fact != OTHER_RUNS]
        return (*dict.fromkeys(facts), RUNS_NOT_NAMED)

    @property
    def statement(self) -> str:
        """The guarantee of one run and of all runs, as text."""
        largest = max(self.runs, key=lambda claim: claim.epsilon)
        unit, neighbours, number = largest.unit, largest.neighbours, len(self.runs)
        same = len({str(claim) for claim in self.runs}) == 1
        change = changed(unit, neighbours, same_budgets=self.same_budgets)
        simulated = (
            f"Simulated: the noise of {len(self.simulated)} of {number} runs comes from "
            "privacy.noise_seed, and whoever knows it can remove it. "
            if self.simulated
            else ""
        )
        budgets = " Personal budgets count with the largest." if self.same_budgets else ""
        return (
            f"{simulated}{unit.capitalize()}-level differential privacy of {number} runs on the "
            f"same data. One of them: {'' if same else 'at most '}{largest}; all {number} "
            f"together: ({self.epsilon:.4g}, {self.delta:.3g}): what they release is as likely, up "
            f"to a factor e^{self.epsilon:.4g} and a probability {self.delta:.3g}, {change}, in "
            f"all of them at once.{budgets} Trust: {TRUSTED[self.trust]}. "
            f"Public: {'; '.join(self.public)}. Not covered: {'; '.join(self.not_covered)}."
        )

    def stated(self) -> ComposedStatement:
        """Return the guarantee as it is stored."""
        one, shown = self.runs[0], ("run", "method", "epsilon", "delta", "noise_seed")
        return ComposedStatement(
            guarantee=f"{one.unit}-level (epsilon, delta)-DP",
            epsilon=self.epsilon,
            delta=self.delta,
            neighbours=one.neighbours,
            same_budgets=self.same_budgets,
            unit=one.unit,
            trust=self.trust,
            data=one.data,
            runs=[{name: getattr(claim, name) for name in shown} for claim in self.runs],
            simulated=list(self.simulated),
            public=list(self.public),
            not_covered=list(self.not_covered),
            statement=self.statement,
        )


def compose(claims: Sequence[Claim], delta: float | None = None) -> ComposedGuarantee:
    """Return the joint guarantee of runs on the same data, by default at their common delta."""
    _check_fit(claims)
    common = _common_delta(claims, delta)
    # Sorted, so that rounding does not depend on the order of the runs.
    events = sorted(line for claim in claims for line in claim.account.splitlines())
    whole = _epsilon("\n".join(events), common)
    apart = sum(sorted(_epsilon(claim.account, common / len(claims)) for claim in claims))
    return ComposedGuarantee(tuple(claims), min(whole, apart), common)


def _check_fit(claims: Sequence[Claim]) -> None:
    """Refuse runs whose guarantees cannot be composed."""
    if len(claims) < 2:
        raise ConfigError(
            "a single run states its guarantee itself: name another run on the same data"
        )
    first = claims[0]
    for other in claims[1:]:
        if not _same_data(first, other):
            raise RunError(
                f"{first.run} and {other.run} are on different data ('{first.data}' and "
                f"'{other.data}'{', which changed' if first.data == other.data else ''}). The "
                "statement of a run holds for users who are only in its data; for users who are in "
                "both, add up the epsilons and the deltas"
            )
        if other.unit != first.unit:
            raise RunError(
                f"{first.run} protects each {first.unit} and {other.run} each {other.unit}: their "
                "guarantees cannot be composed"
            )
        if other.neighbours != first.neighbours:
            raise RunError(
                f"{first.run} is accounted for under {first.neighbours} and {other.run} under "
                f"{other.neighbours}, which cannot be composed: train both with the same "
                "privacy.neighbours"
            )


def _same_data(one: Claim, other: Claim) -> bool:
    if one.digest is None or other.digest is None:
        return one.data == other.data
    return one.digest == other.digest


def _common_delta(claims: Sequence[Claim], requested: float | None) -> float:
    own = sorted({claim.delta for claim in claims} - {0.0})
    if requested is None:
        if len(own) > 1:
            raise ConfigError(
                f"the runs have deltas from {own[0]:.3g} to {own[-1]:.3g}: choose the delta of the "
                "joint guarantee with --delta"
            )
        return own[0] if own else 0.0
    if not own:
        raise ConfigError("none of these runs needs a delta: leave out --delta")
    least = 1 / max(claim.clients for claim in claims)
    if not 0 < requested < least:
        raise ConfigError(
            f"delta = {requested:g} must lie between 0 and 1 / clients = {least:.3g}: a larger one "
            "allows publishing all data of one user"
        )
    return requested


def _account(run: str, history: Sequence[Mapping[str, Any]]) -> str:
    for entry in history:
        if entry.get("event") not in EVENTS:
            raise _earlier(run, f"its history has an event '{entry.get('event')}'")
        if entry.get("neighbours", NEIGHBOURS[0]) not in NEIGHBOURS:
            raise _earlier(run, f"its history is under '{entry['neighbours']}'")
    return "\n".join(json.dumps(entry, sort_keys=True) for entry in history)


@lru_cache(maxsize=64)
def _epsilon(account: str, delta: float) -> float:
    """Return the epsilon of a history; cached, because seeds of one run have the same history."""
    history = [json.loads(line) for line in account.splitlines()]
    if delta == 0:
        return math.fsum(entry["epsilon"] * entry["count"] for entry in history)
    return Accountant(history).epsilon(delta)


def _earlier(run: str, why: str) -> RunError:
    return RunError(f"{run} was made by an earlier version, or is damaged: {why}; train it again")
