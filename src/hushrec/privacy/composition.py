"""`compose`: what several runs on the same data release together.

Whoever sees all of them sees every noisy sum of all of them, so their accounts are one account, at
one delta. The noises of the runs are drawn independently, and how much of it each gets was settled
by its configuration; that is all that the composition theorems ask for. Two bounds are worked out,
and the smaller one counts, as both hold: that of the whole account, and the plain sum of what each
run has at its part of delta.
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
from hushrec.privacy.guarantee import NO_GUARANTEE, OTHER_RUNS, TRUSTED, Trust, changed

EVENTS = {"discrete gaussian", "pure"}
NEIGHBOURS: tuple[Neighbours, ...] = ("zero-out-one", "replace-one")
RUNS_NOT_NAMED = "options tuned on the same data, and runs on it that are not among these"


@dataclass(frozen=True)
class Claim:
    """What one run says that it guarantees, and the account behind it."""

    run: str
    method: str
    data: str
    digest: str | None
    """Of the data; None where the run did not see it whole."""
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
    """What epsilon is of, planned rounds that were not run among it: a line of JSON an event."""

    @classmethod
    def of(cls, run: str, summary: Mapping[str, Any]) -> Claim:
        """Read the summary of a run; refuse one without a guarantee, or that cannot be read."""
        try:
            return cls._read(run, summary)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _earlier(run, f"its summary.json cannot be read ({error!r})") from None

    @classmethod
    def _read(cls, run: str, summary: Mapping[str, Any]) -> Claim:
        said, silos = summary["privacy"], summary.get("silos")
        if not promises(said):
            raise RunError(f"{run} guarantees nothing, so no sum does: {said['statement']}")
        if summary.get("selected_by", "validation") == "validation":
            raise _earlier(run, "somebody's validation items chose its model, which nothing covers")
        if said["neighbours"] not in NEIGHBOURS:
            raise _earlier(run, f"its neighbour relation is '{said['neighbours']}'")
        claim = cls(
            run=run,
            method=summary["method"],
            data=summary["data"],
            digest=summary.get("data_digest"),
            clients=silos["count"] if silos else summary["users"]["users"],
            epsilon=said["epsilon"],
            delta=said["delta"],
            neighbours=said["neighbours"],
            unit=said["unit"],
            trust=said["trust"],
            same_budgets=said["same_budgets"],
            noise_seed=said["noise_seed"],
            public=tuple(said["public"]),
            not_covered=tuple(said["not_covered"]),
            account=_account(run, said["claimed"]),
        )
        reached = _epsilon(claim.account, claim.delta)
        if not reached >= claim.epsilon * (1 - KEPT_BACK):
            raise RunError(
                f"{run}: its account comes to epsilon {reached:.4g} and its statement says "
                f"{claim.epsilon:.4g}; summary.json is damaged"
            )
        return claim

    def __str__(self) -> str:
        return f"({self.epsilon:.4g}, {self.delta:.3g})"


@dataclass(frozen=True)
class Together:
    """(epsilon, delta)-DP of everything that several runs released."""

    runs: tuple[Claim, ...]
    epsilon: float
    delta: float

    @property
    def simulated(self) -> tuple[str, ...]:
        """The runs whose noise can be drawn again."""
        return tuple(claim.run for claim in self.runs if claim.noise_seed is not None)

    @property
    def same_budgets(self) -> bool:
        """Whether neighbours are such that budgets stay as they are."""
        return any(claim.same_budgets for claim in self.runs)

    @property
    def trust(self) -> Trust:
        """Who must be trusted in at least one of the runs."""
        trusting = any(claim.trust == "aggregator" for claim in self.runs)
        return "aggregator" if trusting else "nobody"

    @property
    def public(self) -> tuple[str, ...]:
        """What one of them or another takes as known to everybody."""
        return tuple(dict.fromkeys(fact for claim in self.runs for fact in claim.public))

    @property
    def not_covered(self) -> tuple[str, ...]:
        """What one of them or another does not cover."""
        facts = [fact for claim in self.runs for fact in claim.not_covered if fact != OTHER_RUNS]
        return (*dict.fromkeys(facts), RUNS_NOT_NAMED)

    @property
    def statement(self) -> str:
        """The guarantee in words: of one, and of all."""
        largest = max(self.runs, key=lambda claim: claim.epsilon)
        unit, neighbours, number = largest.unit, largest.neighbours, len(self.runs)
        alike = len({str(claim) for claim in self.runs}) == 1
        change = changed(unit, neighbours, same_budgets=self.same_budgets)
        simulated = (
            f"Simulated: the noise of {len(self.simulated)} of {number} runs comes from "
            "privacy.noise_seed, and whoever knows it can remove it. "
            if self.simulated
            else ""
        )
        budgets = " Of personal budgets the largest count." if self.same_budgets else ""
        return (
            f"{simulated}{unit.capitalize()}-level differential privacy of {number} runs on the "
            f"same data. One of them: {'' if alike else 'at most '}{largest}; all {number} "
            f"together: ({self.epsilon:.4g}, {self.delta:.3g}): what they release is as likely, up "
            f"to a factor e^{self.epsilon:.4g} and a probability {self.delta:.3g}, {change}, in "
            f"all of them at once.{budgets} Trust: {TRUSTED[self.trust]}. "
            f"Public: {'; '.join(self.public)}. Not covered: {'; '.join(self.not_covered)}."
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the statement for programs."""
        one, shown = self.runs[0], ("run", "method", "epsilon", "delta", "noise_seed")
        return {
            "guarantee": f"{one.unit}-level (epsilon, delta)-DP",
            "epsilon": self.epsilon,
            "delta": self.delta,
            "neighbours": one.neighbours,
            "same_budgets": self.same_budgets,
            "unit": one.unit,
            "trust": self.trust,
            "data": one.data,
            "runs": [{name: getattr(claim, name) for name in shown} for claim in self.runs],
            "simulated": list(self.simulated),
            "public": list(self.public),
            "not_covered": list(self.not_covered),
            "statement": self.statement,
        }


def compose(claims: Sequence[Claim], delta: float | None = None) -> Together:
    """State what runs on the same data guarantee together; by default at the delta they have."""
    _check_fit(claims)
    common = _common_delta(claims, delta)
    # In one order, so that rounding does not depend on which run was named first.
    events = sorted(line for claim in claims for line in claim.account.splitlines())
    whole = _epsilon("\n".join(events), common)
    apart = sum(sorted(_epsilon(claim.account, common / len(claims)) for claim in claims))
    return Together(tuple(claims), min(whole, apart), common)


def promises(said: Mapping[str, Any]) -> bool:
    """Say whether what summary.json holds under ``privacy`` is a guarantee with an epsilon."""
    return said["guarantee"] != NO_GUARANTEE and math.isfinite(said["epsilon"])


def _check_fit(claims: Sequence[Claim]) -> None:
    """Refuse runs of which no sum is defined, or none is needed."""
    if len(claims) < 2:
        raise ConfigError("one run states its guarantee itself: name another on the same data")
    first = claims[0]
    for other in claims[1:]:
        if not _same_data(first, other):
            raise RunError(
                f"{first.run} and {other.run} are on different data ('{first.data}' and "
                f"'{other.data}'{', which changed' if first.data == other.data else ''}). For "
                "people who are in one of them alone no sum is needed, its own statement holds; "
                "for people who are in both, add up the epsilons and the deltas"
            )
        if other.unit != first.unit:
            raise RunError(
                f"{first.run} protects each {first.unit} and {other.run} each {other.unit}: no sum "
                "is defined"
            )
        if other.neighbours != first.neighbours:
            raise RunError(
                f"{first.run} is accounted for under {first.neighbours} and {other.run} under "
                f"{other.neighbours}, which do not add up: train both with the same "
                "privacy.neighbours"
            )


def _same_data(one: Claim, other: Claim) -> bool:
    if one.digest is None or other.digest is None:
        return one.data == other.data
    return one.digest == other.digest


def _common_delta(claims: Sequence[Claim], asked: float | None) -> float:
    own = sorted({claim.delta for claim in claims} - {0.0})
    if asked is None:
        if len(own) > 1:
            raise ConfigError(
                f"the runs have deltas from {own[0]:.3g} to {own[-1]:.3g}: say at which one to "
                "state the sum, with --delta"
            )
        return own[0] if own else 0.0
    if not own:
        raise ConfigError("none of these runs needs a delta: leave out --delta")
    least = 1 / max(claim.clients for claim in claims)
    if not 0 < asked < least:
        raise ConfigError(
            f"delta = {asked:g} must lie between 0 and 1 / clients = {least:.3g}: a larger one "
            "allows giving a user away entirely"
        )
    return asked


def _account(run: str, history: Sequence[Mapping[str, Any]]) -> str:
    for entry in history:
        if entry["event"] not in EVENTS:
            raise _earlier(run, f"its account has an event '{entry['event']}'")
        if entry.get("neighbours", NEIGHBOURS[0]) not in NEIGHBOURS:
            raise _earlier(run, f"its account is under '{entry['neighbours']}'")
    return "\n".join(json.dumps(entry, sort_keys=True) for entry in history)


@lru_cache(maxsize=64)
def _epsilon(account: str, delta: float) -> float:
    """Return the epsilon of an account; seeds of one run have the same, and it takes a while."""
    history = [json.loads(line) for line in account.splitlines()]
    if delta == 0:
        return math.fsum(entry["epsilon"] * entry["count"] for entry in history)
    return Accountant(history).epsilon(delta)


def _earlier(run: str, why: str) -> RunError:
    return RunError(f"{run} was made by an earlier version, or is damaged: {why}; train it again")
