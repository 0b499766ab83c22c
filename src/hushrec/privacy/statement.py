"""The privacy statement of a run, as summary.json stores it, and of several runs together.

`compose` adds up the events of several runs on the same data at one delta. The composition theorems
apply because the noise of the runs is independent and its scale is fixed by each configuration. The
result is the smaller of two valid bounds: the epsilon of all events together, and the sum of the
runs' epsilons, each at an equal part of delta.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field

from hushrec.errors import ConfigError, RunError
from hushrec.io.codec import Count, Number, Positive, Stored
from hushrec.privacy.accountant import KEPT_BACK, Accountant, History, without_amplification

NO_GUARANTEE = "none"
Bound = Annotated[float, Field(ge=0)]
"""Not NaN; noise too small to be accounted for has an infinite epsilon."""
Trust = Literal["nobody", "nodes", "aggregator"]
TRUSTED: dict[Trust, str] = {
    "nobody": "nobody but the device is trusted: the server may see every upload",
    "nodes": (
        "each node with its own users' uploads, and no party with those of others: nodes add the "
        "noise, and the server sees what all of them add up to (a run in one process plays the "
        "nodes)"
    ),
    "aggregator": (
        "the party that sums is trusted with the uploads, or sums them under encryption; "
        "the guarantee is for whoever sees the models it releases"
    ),
}
TRUSTED_PARTY: dict[str, str] = {
    "nobody": "nobody but the device",
    "nodes": "each node with its own users' uploads",
    "aggregator": "the party that sums the uploads, or secure aggregation in its place",
}
ADVERSARIES: dict[Trust, str] = {
    "nobody": (
        "the server and whoever listens may see every upload and everything else; parties that "
        "depart from the protocol are not covered"
    ),
    "nodes": (
        "the server, whoever listens, and as many nodes as the mechanism names may see everything "
        "but other nodes' users and noise; parties that depart from the protocol are not covered"
    ),
    "aggregator": (
        "whoever sees the models may know everything else; the party that sums follows the "
        "protocol, and nobody listens to what it receives"
    ),
}
"""Against whom a guarantee holds: who may see what, and who must not lie."""
TIERS = ((1.0, "strong"), (10.0, "reasonable"), (math.inf, "weak"))
"""Largest epsilon of each tier of Ponomareva et al., "How to DP-fy ML" (JAIR 2023), section 5.2."""
OTHER_RUNS = (
    "options tuned on the same data, and other runs or seeds on it, of which `hushrec privacy "
    "compose` states the sum"
)
EVENTS = {"discrete gaussian", "pure"}
NEIGHBOURS = ("zero-out-one", "replace-one")
COMPOSED = ("public", "not_covered", "neighbours", "unit", "trust", "same_budgets", "noise_seed")
"""Fields of a statement that a composed statement is made from."""
RUNS_NOT_NAMED = "options tuned on the same data, and runs on it that are not among these"


class ValueRange(Stored):
    """Smallest, median and largest of one number per client."""

    min: Bound
    median: Bound
    max: Bound


class BudgetSummary(Stored):
    """Personal budgets of the clients, and what they spent of them."""

    clients: Count
    epsilon: ValueRange
    spent: ValueRange
    over_budget: Count
    uploads_paid_for: Count
    stopped: Count
    """Clients that could not pay for another upload."""
    largest_weight_over_smallest: Number | None = None
    distribution: list[dict[str, Count | Number]]
    """Bins of equal width: ``from``, ``to``, ``clients``, ``spent_median``."""


class ComposedStatement(Stored):
    """The guarantee of several runs on the same data, composed."""

    guarantee: str
    epsilon: float
    delta: Positive
    neighbours: str
    same_budgets: bool
    unit: str
    trust: str
    adversaries: str = ""
    listener_epsilon: float | None = None
    data: str
    runs: list[dict[str, Any]]
    simulated: list[str]
    public: list[str]
    not_covered: list[str]
    statement: str


class PrivacyStatement(Stored):
    """What a run promises: the object under ``privacy`` in summary.json.

    A run without a guarantee sets ``guarantee`` to "none", ``epsilon`` to None and ``statement``.
    """

    guarantee: str
    epsilon: float | None
    delta: Positive = 0.0
    neighbours: str = ""
    sampling: str = ""
    trust: str = ""
    adversaries: str = ""
    """Against whom the guarantee holds."""
    listener_epsilon: float | None = None
    """Epsilon against whoever sees the traffic, and so who was drawn; None if nobody is drawn."""
    mechanism: str = ""
    rounds: Count = 0
    unit: str = "user"
    public: list[str] = Field(default_factory=list)
    not_covered: list[str] = Field(default_factory=list)
    noise_seed: int | None = None
    same_budgets: bool = False
    statement: str
    asked_epsilon: float | None = None
    spent_epsilon: float | None = None
    account: list[dict[str, Any]] = Field(default_factory=list)
    """Accountant history of the rounds that were run."""
    claimed: list[dict[str, Any]] = Field(default_factory=list)
    """Accountant history that ``epsilon`` is the bound of: planned rounds included."""
    budgets: BudgetSummary | None = None
    together: ComposedStatement | None = None
    """Of several seeds: what all of them release together."""

    @property
    def promises(self) -> bool:
        """Whether there is a guarantee with a finite epsilon."""
        finite = self.epsilon is not None and math.isfinite(self.epsilon)
        return finite and self.guarantee != NO_GUARANTEE

    @property
    def headline(self) -> str:
        """The guarantee in one line, of several seeds that of all; empty if there is none."""
        if not self.promises:
            return ""
        claimed, unit = self.together or self, f"{self.unit}-level"
        unit = unit.capitalize() if self.noise_seed is None else f"Simulated: {unit}"
        return (
            f"{unit} (ε = {claimed.epsilon:.4g}, δ = {claimed.delta:.2g}) differential privacy of "
            "everything that training released."
        )

    @property
    def in_words(self) -> tuple[str, str, str]:
        """What an attacker learns at most, what is not covered, and what it rests on.

        Of several seeds it is said of all of them together.
        """
        if self.trust == "nodes" and not self.promises:
            return (
                self.statement,
                "Nothing bounds what somebody who sees the totals or the model learns about a "
                f"{self.unit}; hushrec audit measures what attacks find.",
                "Users have to trust their own node; a privacy mode, such as privacy.mode = "
                "distributed with privacy.epsilon = 8, adds a guarantee.",
            )
        if self.epsilon is None or not self.promises:
            return (
                self.statement,
                "Nothing bounds what somebody who sees the uploads or the model learns about a "
                f"{self.unit}; hushrec audit measures what attacks find.",
                "Users have to trust the server; a privacy mode, such as privacy.mode = central "
                "with privacy.epsilon = 8, replaces that trust by a guarantee.",
            )
        epsilon, rounds = self.epsilon, f"{self.rounds:,} round{'' if self.rounds == 1 else 's'}"
        if self.together is not None:
            epsilon, rounds = self.together.epsilon, f"all rounds of {len(self.together.runs)} runs"
        claimed = self.together or self
        facts = claimed.delta, claimed.neighbours, claimed.unit
        trusted = TRUSTED_PARTY.get(claimed.trust, "whom the statement names")
        details = (re.split(", |: ", fact)[0] for fact in claimed.not_covered)
        noise = "noise that stays secret"
        if self.noise_seed is not None:
            noise = f"noise that whoever knows privacy.noise_seed = {self.noise_seed} can remove"
        return (
            largest_certainty(epsilon, *facts, same_budgets=claimed.same_budgets),
            f"Not covered are {'; '.join(details)}: the statement says each in full.",
            f"The guarantee rests on trust in {trusted}, on {noise}, and "
            f"on the privacy accountant's composition of {rounds} (docs/guarantees.md).",
        )


def largest_certainty(
    epsilon: float, delta: float, neighbours: str, unit: str = "user", *, same_budgets: bool = False
) -> str:
    """Bound the success of a test between neighbouring data sets with even prior odds.

    Under (epsilon, delta)-DP no test is right more often than (e^epsilon + delta) / (e^epsilon + 1)
    (Kairouz, Oh and Viswanath 2015, from the two lines that bound its error rates).
    """
    right = 1 / (1 + math.exp(-epsilon)) + delta * math.exp(-epsilon) / (1 + math.exp(-epsilon))
    percent = math.ceil(min(right, 1) * 10_000) / 100
    odds = f"{math.exp(epsilon):,.0f}" if 3 < epsilon < 20 else f"{math.exp(min(epsilon, 700)):.3g}"
    tier = next(name for most, name in TIERS if epsilon <= most)
    changes = {"zero-out-one": "zeroed out", "replace-one": "replaced"}
    whose = f"one {unit}'s data was used or {changes.get(neighbours, 'changed')}"
    if same_budgets:
        whose += f", for the {unit} with the largest budget"
    failure = f", delta = {delta:.2g} included" if delta else ""
    return (
        f"Somebody who sees everything that training released, and has to tell whether {whose}, is "
        f"right with a probability of at most {percent:g} %{failure}, where a coin gives 50 %: "
        f"odds of {odds} to 1 (e^{epsilon:.4g}), a {tier} guarantee by the tiers of Ponomareva et "
        "al. 2023."
    )


def against(trust: Trust, listener_epsilon: float | None) -> str:
    """Return against whom a guarantee holds, for a statement."""
    if listener_epsilon is None:
        return ADVERSARIES[trust]
    return (
        f"{ADVERSARIES[trust]}. Sampling amplifies only against those who do not know who was "
        "drawn: against whoever sees the traffic, and so who is contacted, epsilon is "
        f"{listener_epsilon:.4g}"
    )


def changed(unit: str, neighbours: str, *, same_budgets: bool) -> str:
    """Return the difference between neighbouring data sets, for a statement."""
    how = {"zero-out-one": "zeroed out", "replace-one": "replaced by any other"}[neighbours]
    kept = " that leaves everybody's budget as it is" if same_budgets else ""
    return f"with the data of any one {unit} {how}{kept}"


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
    privacy: PrivacyStatement
    account: str
    """The accountant's history of all planned rounds: a line of JSON per event."""

    @classmethod
    def of(cls, run: str, selected_by: str, privacy: PrivacyStatement, **about: Any) -> Claim:
        """Take a run's statement; refuse one without a guarantee, or whose account differs."""
        if not privacy.promises or privacy.epsilon is None:
            raise RunError(f"{run} has no guarantee to compose: {privacy.statement}")
        if selected_by == "validation":
            raise _earlier(run, "its model was selected by validation items without noise")
        for name in ("delta", "claimed", *COMPOSED):
            if name not in privacy.model_fields_set:
                raise _earlier(run, f"its statement lacks '{name}'")
        if privacy.neighbours not in NEIGHBOURS:
            raise _earlier(run, f"its neighbour relation is '{privacy.neighbours}'")
        if privacy.trust not in TRUSTED:
            raise _earlier(run, f"its trust is '{privacy.trust}'")
        account = _account(run, privacy.claimed)
        try:
            reached = _epsilon(account, privacy.delta)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _earlier(run, f"its account cannot be read ({error!r})") from None
        if not reached >= privacy.epsilon * (1 - KEPT_BACK):
            raise RunError(
                f"{run}: the accountant gives epsilon {reached:.4g} and the statement says "
                f"{privacy.epsilon:.4g}; summary.json is damaged"
            )
        return cls(run, **about, epsilon=privacy.epsilon, privacy=privacy, account=account)

    def __str__(self) -> str:
        return f"({self.epsilon:.4g}, {self.privacy.delta:.3g})"


def compose(claims: Sequence[Claim], delta: float | None = None) -> ComposedStatement:
    """Return the joint guarantee of runs on the same data, by default at their common delta."""
    _check_fit(claims)
    common = _common_delta(claims, delta)
    # Sorted, so that rounding does not depend on the order of the runs.
    events = sorted(line for claim in claims for line in claim.account.splitlines())
    whole = _epsilon("\n".join(events), common)
    apart = sum(sorted(_epsilon(claim.account, common / len(claims)) for claim in claims))
    return _stated(claims, min(whole, apart), common)


def _stated(claims: Sequence[Claim], epsilon: float, delta: float) -> ComposedStatement:
    """State that everything that the runs release is (epsilon, delta)-DP."""
    number, largest = len(claims), max(claims, key=lambda claim: claim.epsilon)
    statements = [claim.privacy for claim in claims]
    first = statements[0]
    simulated = [claim.run for claim in claims if claim.privacy.noise_seed is not None]
    same_budgets = any(one.same_budgets for one in statements)
    trust = next(one for one in reversed(TRUSTED) if one in {each.trust for each in statements})
    events = [json.loads(line) for claim in claims for line in claim.account.splitlines()]
    seen = without_amplification(events)
    listener = None if seen is None else Accountant(seen).epsilon(delta)
    adversaries = against(trust, listener)
    public = list(dict.fromkeys(fact for one in statements for fact in one.public))
    facts = [fact for one in statements for fact in one.not_covered if fact != OTHER_RUNS]
    not_covered = [*dict.fromkeys(facts), RUNS_NOT_NAMED]
    seeds = (
        f"Simulated: the noise of {len(simulated)} of {number} runs comes from "
        "privacy.noise_seed, and whoever knows it can remove it. "
        if simulated
        else ""
    )
    same = len({str(claim) for claim in claims}) == 1
    change = changed(first.unit, first.neighbours, same_budgets=same_budgets)
    budgets = " Personal budgets count with the largest." if same_budgets else ""
    return ComposedStatement(
        guarantee=f"{first.unit}-level (epsilon, delta)-DP",
        epsilon=epsilon,
        delta=delta,
        neighbours=first.neighbours,
        same_budgets=same_budgets,
        unit=first.unit,
        trust=trust,
        adversaries=adversaries,
        listener_epsilon=listener,
        data=claims[0].data,
        runs=[
            {"run": claim.run, "method": claim.method, "epsilon": claim.epsilon}
            | {"delta": claim.privacy.delta, "noise_seed": claim.privacy.noise_seed}
            for claim in claims
        ],
        simulated=simulated,
        public=public,
        not_covered=not_covered,
        statement=(
            f"{seeds}{first.unit.capitalize()}-level differential privacy of {number} runs on the "
            f"same data. One of them: {'' if same else 'at most '}{largest}; all {number} "
            f"together: ({epsilon:.4g}, {delta:.3g}): what they release is as likely, up to a "
            f"factor e^{epsilon:.4g} and a probability {delta:.3g}, {change}, in all of them at "
            f"once.{budgets} Trust: {TRUSTED[trust]}. Adversaries: {adversaries}. "
            f"Public: {'; '.join(public)}. "
            f"Not covered: {'; '.join(not_covered)}."
        ),
    )


def _check_fit(claims: Sequence[Claim]) -> None:
    """Refuse runs whose guarantees cannot be composed."""
    if len(claims) < 2:
        raise ConfigError("one run states its guarantee itself: name another run on the same data")
    first = claims[0]
    for other in claims[1:]:
        known_by = "data" if None in (first.digest, other.digest) else "digest"
        if getattr(first, known_by) != getattr(other, known_by):
            raise RunError(
                f"{first.run} and {other.run} are on different data ('{first.data}' and "
                f"'{other.data}'{', which changed' if first.data == other.data else ''}). The "
                "statement of a run holds for users who are only in its data; for users who are in "
                "both, add up the epsilons and the deltas"
            )
        one, two = first.privacy, other.privacy
        if one.unit != two.unit:
            raise RunError(
                f"{first.run} protects each {one.unit} and {other.run} each {two.unit}: their "
                "guarantees cannot be composed"
            )
        if one.neighbours != two.neighbours:
            raise RunError(
                f"{first.run} is accounted for under {one.neighbours} and {other.run} under "
                f"{two.neighbours}, which cannot be composed: train both with the same "
                "privacy.neighbours"
            )


def _common_delta(claims: Sequence[Claim], requested: float | None) -> float:
    own = sorted({claim.privacy.delta for claim in claims} - {0.0})
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


def _account(run: str, history: History) -> str:
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
