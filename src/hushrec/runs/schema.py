"""The files of a run folder, one class each: written and read through it.

============================  ======================================================
summary.json                  `Summary`
metrics.jsonl, one line       `RoundLine` (`federation.rounds`)
``privacy`` in summary.json   `PrivacyStatement` (made by the plan, `privacy.statement`)
checkpoint/*/state.json       `CheckpointHeader`
seeds.json                    `Seeds`
followed.json                 `Followed`, of a final model
adaptation.json               `AdaptationCurve`
audit.json                    `Audit`
trials.jsonl, one line        `Trial` (of a search, `hushrec.tuning`)
============================  ======================================================

`io.codec.Stored` says how they are checked: strict types, bounded numbers, and an error that names
file and key. A run of a federation has the same files; what only its nodes know is None.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from hushrec.data.text import short_name
from hushrec.errors import ConfigError, RunError
from hushrec.federation.guard import GuardState, NotApplied
from hushrec.federation.requests import FINAL_EVALUATIONS, absences
from hushrec.federation.requests import Attendance as Attendance
from hushrec.federation.requests import PhaseTraffic as PhaseTraffic
from hushrec.federation.requests import WireBytes as WireBytes
from hushrec.federation.rounds import RoundLine as RoundLine
from hushrec.io.codec import Count, Metrics, Number, Positive, Stored, Tables
from hushrec.privacy.statement import BudgetSummary as BudgetSummary
from hushrec.privacy.statement import Claim
from hushrec.privacy.statement import ComposedStatement as ComposedStatement
from hushrec.privacy.statement import PrivacyStatement as PrivacyStatement
from hushrec.runs.replayed import ReplayResult

PUBLISHED_MARK = "published protocol (leaks the held-out item)"


# ------------------------------------------------------------ summary.json


class Baselines(Stored):
    """Metrics of the baselines on the same users and candidates."""

    popularity: Tables
    chance: Tables


class Communication(Stored):
    """Bytes of all messages of the training rounds, and of what a device keeps afterwards."""

    up_bytes: Count
    """Uploaded by all clients together."""
    down_bytes: Count
    client_up_bytes: Positive | None = None
    """Uploaded by one client in all rounds: the mean over the clients that train."""
    client_down_bytes: Positive | None = None
    serving_bytes: Count | None = None
    """Held by one client to recommend: the arrays of the shared parameters that score, and its
    private ones, a mean. A bundle of `hushrec export` has fewer weights, and the catalogue."""


class Timing(Stored):
    """Seconds of the training rounds."""

    total_s: Positive
    per_round_s: Positive


class UserCounts(Stored):
    """Users, items and rows; a coordinator does not know the rows."""

    users: Count
    items: Count
    train_rows: Count | None = None
    unused_rows: Count | None = None
    training_clients: Count | None = None
    evaluated_users: Count
    """Users with test items."""
    not_evaluated_users: Count
    ranked_users: Count
    """Evaluated users whose test items were ranked: all of them, or a sample."""
    test_items_nobody_trained_on: Number | None = None


class SiloSizes(Stored):
    """Users of the smallest and of the largest silo."""

    min: Count
    max: Count


class SiloDivergence(Stored):
    """Distance of the silos' distributions from the overall one."""

    mean: Number
    measure: str


class SiloFacts(Stored):
    """Sizes and heterogeneity of simulated silos."""

    count: Count
    users: SiloSizes
    divergence: SiloDivergence


class Summary(Stored):
    """The result of a run, of several seeds (means), or of a federation."""

    method: str
    data: str
    data_digest: str | None = None
    """Identifies the interactions; None where no party sees all of them."""
    protocol: Literal["honest", "published"]
    protocol_mark: str | None
    marks: list[str] = Field(default_factory=list)
    """Why a figure is not what it seems: few evaluated users, no times, tied times."""
    preset: str | None = None
    options: dict[str, Any]
    rounds: Count | list[Count]
    selected_round: Count | list[Count]
    selected_by: str = "validation"
    improving: bool = False
    """Whether validation was best at the last round, of a method that more rounds would help."""
    seed: Count | list[Count]
    runs: list[Annotated[str, StringConstraints(pattern=r"^seed-\d+$")]] | None = None
    """Folders of the single seeds, of a summary over several."""
    nodes: dict[str, Count] | None = None
    """Users of each node, of a federation."""
    traffic: dict[str, dict[str, PhaseTraffic]] | None = None
    """Messages of each node by phase, of a federation."""
    wire: WireBytes | None = None
    """Bytes as they were sent, of a federation; `communication` counts every client as a device of
    its own."""
    attendance: list[Attendance] | None = None
    """Who was in each round and evaluation, of a federation."""
    not_applied: list[NotApplied] = Field(default_factory=list)
    """Rounds whose total was not applied: the guard refused it, or its secure sum was lost."""
    final_of: Followed | None = None
    """The run whose options a final model was trained with, on all interactions."""
    test: Tables
    """Test metrics by candidate set; empty for a final model, which has no figures of its own."""
    valid: Tables
    test_sd: Tables | None = None
    """Standard deviation over the seeds."""
    baselines: Baselines | None = None
    model: Metrics = Field(default_factory=dict)
    """Figures of the method about its own parameters."""
    lists: Metrics = Field(default_factory=dict)
    """Coverage and popularity bias of the recommended lists."""
    users: UserCounts
    silos: SiloFacts | None = None
    notes: list[str]
    communication: Communication
    time: Timing
    peak_rss_bytes: Count
    privacy: PrivacyStatement

    @property
    def leaks(self) -> bool:
        """Whether the protocol gives training knowledge of the held-out items."""
        return self.protocol == "published"

    @property
    def data_name(self) -> str:
        """What people call the data: its name, or the stem of its file."""
        return short_name(self.data)

    @property
    def all_marks(self) -> list[str]:
        """The mark of the protocol, if any, and the other marks."""
        return [*([self.protocol_mark] if self.protocol_mark else []), *self.marks]

    @property
    def short_marks(self) -> list[str]:
        """The marks beside a figure: the protocol's, and of the others what comes before a colon.

        The whole sentences are shown once, in a caption or a banner.
        """
        return [mark.partition(":")[0] for mark in self.all_marks]

    @property
    def counted_users(self) -> int:
        """Users of the nodes that are in the final figures; all users where no node is missing."""
        final = [one.users for one in self.attendance or () if one.to in FINAL_EVALUATIONS]
        return min(final, default=self.users.users)

    @property
    def attendance_words(self) -> str:
        """Who was there, in a sentence; empty for a run without nodes."""
        if self.nodes is None:
            return ""
        words = absences(self.attendance or ()) or "no node was missing in a round or an evaluation"
        whole = f"{self.users.users:,} enrolled users"
        if self.counted_users < self.users.users:
            return f"evaluated {self.counted_users:,} of {whole}; {words}"
        return f"evaluated {whole}; {words}"

    @property
    def figures(self) -> Summary:
        """The summary whose figures are shown: of a final model, that of the run it follows."""
        return self if self.final_of is None else self.final_of.summary

    def require_figures(self, name: str, verb: str) -> None:
        """Refuse a final model where figures of its own are needed."""
        if self.final_of is not None:
            raise ConfigError(
                f"{name} is a final model, trained on everything: nothing is held out to {verb} it "
                f"on; {verb} the run that it follows, {self.final_of.run}"
            )

    @property
    def shipped_round(self) -> int:
        """The selected round of a single run."""
        assert isinstance(self.selected_round, int), "of one seed"
        return self.selected_round

    def claim(self, run: str) -> Claim:
        """Return the run's guarantee for composition; refuse a run without one."""
        return Claim.of(
            run,
            self.selected_by,
            self.privacy,
            method=self.method,
            data=self.data,
            digest=self.data_digest,
            clients=self.silos.count if self.silos else self.users.users,
        )

    @model_validator(mode="after")
    def _check_tables(self) -> Summary:
        if isinstance(self.seed, list) != bool(self.runs):
            raise ValueError("'seed' and 'runs' do not fit together")
        if self.final_of is not None:
            if self.test or self.valid or self.baselines:
                raise ValueError("a final model has no figures of its own")
            return self
        if self.nodes is None and self.baselines is None:
            raise ValueError("it lacks 'baselines'")
        if not self.test.get("full"):
            raise ValueError("'test' lacks 'full'")
        others = {"valid": self.valid}
        if self.baselines is not None:
            others["baselines.popularity"] = self.baselines.popularity
            others["baselines.chance"] = self.baselines.chance
        if self.test_sd is not None:
            others["test_sd"] = self.test_sd
        for name, tables in others.items():
            for candidates, metrics in self.test.items():
                if not metrics.keys() <= tables.get(candidates, {}).keys():
                    raise ValueError(f"'{name}' lacks what 'test' has for '{candidates}'")
        return self


class Followed(Stored):
    """The run that a final model follows: options and number of rounds are those it chose."""

    run: str
    """Its folder, or what it is if it was in memory."""
    digest: str
    """SHA-256 of its summary."""
    summary: Summary

    @property
    def name(self) -> str:
        """Its folder's name, for pages that are handed over."""
        return Path(self.run).name

    @classmethod
    def of(cls, run: str, summary: Summary) -> Followed:
        """Return what a final model keeps of a run; refuse one that has chosen nothing."""
        if summary.runs is not None:
            raise RunError(f"{run} holds several seeds: name one, such as {run}/{summary.runs[0]}")
        if summary.nodes is not None:
            raise RunError(f"{run} was trained by a federation, whose nodes hold the interactions")
        if summary.final_of is not None:
            raise ConfigError(f"{run} is a final model already; it follows {summary.final_of.run}")
        digest = hashlib.sha256(summary.to_json().encode()).hexdigest()
        return cls(run=run, digest=digest, summary=summary)


# ------------------------------------------------------------ checkpoints and seeds


class AccountEntry(Stored):
    """An entry of the accountant's history."""

    event: Literal["pure", "gaussian", "discrete gaussian"]
    count: Count
    epsilon: Positive = 0.0
    multiplier: Positive = 0.0


class CheckpointHeader(Stored):
    """state.json of a checkpoint: numbers of the server's state, and digests of the array files."""

    data: str | None
    key: str | None
    round: Count
    selected_round: Count
    selected_value: float | None
    stale_evaluations: Count
    up_bytes: Count
    down_bytes: Count
    seconds: Positive
    account: list[AccountEntry]
    protection: dict[str, Any]
    guard: GuardState = Field(default_factory=GuardState)
    settings: str
    """Digest of config.toml without the number of rounds."""
    files: dict[Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]+\.safetensors$")], str]


class Seeds(Stored):
    """The seeds of a folder with one run per seed."""

    seeds: Annotated[list[Count], Field(min_length=1)]


# ------------------------------------------------------------ adaptation and search


class AdaptationCurve(Stored):
    """Metrics of unseen users after so many interactions of their own."""

    users: Count
    points: Annotated[list[dict[str, Count | Number]], Field(min_length=1)]
    """Metrics by name, and ``interactions``."""

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics."""
        return [name for name in self.points[0] if name != "interactions"]

    @model_validator(mode="after")
    def _check_points(self) -> AdaptationCurve:
        names = self.points[0].keys()
        if "interactions" not in names or any(point.keys() != names for point in self.points):
            raise ValueError("'points' differ in their metrics")
        return self


class Trial(Stored):
    """One setting of a search and how it fared."""

    model_config = ConfigDict(extra="forbid")

    number: Count
    options: dict[str, bool | int | Number | str]
    state: Literal["done", "stopped", "diverged"]
    value: Number | None
    """The best validation value; None where training diverged before the first evaluation."""
    selected_round: Count | None
    evaluations: dict[Count, Number]
    """The best validation value so far, by round."""


# ------------------------------------------------------------ audit.json

Interval = Annotated[list[Number], Field(min_length=2, max_length=2)]


class AttackRates(Stored):
    """How well scores tell members from non-members; None where there are too few."""

    auc: Number | None
    advantage: Number | None
    tpr_at_1_fpr: Number | None


class AttackBaseline(AttackRates):
    """The same rates of a baseline that knows nothing of the model."""

    name: str


class AttackIntervals(Stored):
    """95 % intervals of the rates."""

    auc: Interval | None
    advantage: Interval | None
    tpr_at_1_fpr: Interval | None


class Guesses(Stored):
    """Lower bound on epsilon from the number of correct guesses."""

    right: Count
    guesses: Count
    pairs: Count
    lower_bound: Number
    certain_lower_bound: Number | None = None
    claimed_epsilon: Number
    delta: Number
    contradicted: bool = False


class MembershipResult(AttackRates):
    """The membership attack."""

    skipped: None = None
    baseline: AttackBaseline
    chance: AttackRates
    intervals: AttackIntervals
    members: Count
    others: Count
    compared: str
    threat: str
    guesses: Guesses | None


class ItemEvidence(Stored):
    """What one view of the uploads reveals about a client's items."""

    seen_by: str
    reading: str = ""
    """How items are scored: by direction, by size, or by the number of rounds that touch them."""
    r_precision: Number
    interval: Interval
    support_rows: Number
    support_precision: Number


class ItemResult(Stored):
    """The attack that names a client's items from its uploads."""

    skipped: None = None
    evidence: dict[str, ItemEvidence]
    popularity: Number
    chance: Number
    clients: Count
    items_per_client: Number
    replayed: str
    phase: str = ""
    """The kind of round that gives most away, whose figures these are."""
    phases: dict[str, Number | str] = Field(default_factory=dict)
    """R-precision of the attack on every kind of round, or why it was not attacked."""


class CanaryResult(Stored):
    """Lower bound on epsilon from a canary in one array of the uploads."""

    who: str
    where: str
    claimed_epsilon: Number
    lower_bound: Number
    certain_lower_bound: Number | None = None
    gaussian_lower_bound: Number | None
    most_provable: Number
    delta: Number
    contradicted: bool
    trials: Count
    rounds: Count


class SoundnessResult(Stored):
    """Whether clipping and noise are as the claim assumes."""

    numbers: Count
    arrays: list[Any] | dict[str, Any]
    rounds: Count
    tests: Count
    problems: list[str]


class Skipped(Stored):
    """Why an attack was not made."""

    skipped: str


class AuditedClaim(Stored):
    """The claim that the attacks are held against."""

    guarantee: str | None = None
    epsilon: float | None = None
    delta: Number | None = None
    neighbours: str | None = None


class Audit(Stored):
    """The result of `hushrec audit`."""

    claim: AuditedClaim = Field(default_factory=AuditedClaim)
    verdict: str
    verdict_words: str
    reasons: list[str]
    membership: Skipped | MembershipResult
    items: Skipped | ItemResult
    canaries: list[CanaryResult]
    soundness: SoundnessResult | None
    replay: ReplayResult | None = None
    out_of_sight: list[str] = Field(default_factory=list)
