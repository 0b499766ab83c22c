"""Types of the files of a run, for whoever reads them back (`hushrec.io.stored`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from hushrec.io.stored import Stored

Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(allow_inf_nan=False, ge=-1e300, le=1e300)]
Positive = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1e300)]
Metrics = dict[str, Number]
Tables = dict[str, Metrics]
"""Metrics by candidate set."""


class Yardsticks(Stored):
    """What a model is compared with."""

    popularity: Tables
    chance: Tables


class Communication(Stored):
    """What travelled."""

    up_bytes: Count
    down_bytes: Count


class Time(Stored):
    """How long it took."""

    total_s: Positive
    per_round_s: Positive


class Users(Stored):
    """How many there were."""

    users: Count
    items: Count
    train_rows: Count
    unused_rows: Count
    training_clients: Count | None = None
    evaluated_users: Count
    not_evaluated_users: Count
    looked_at: Count
    test_items_nobody_trained_on: Number | None


class Spread(Stored):
    """Of one number per client."""

    min: Number
    median: Number
    max: Number


class Budgets(Stored):
    """Personal budgets."""

    epsilon: Spread
    spent: Spread
    clients: Annotated[Count, Field(ge=1)]
    over_budget: Count
    stopped: Count
    uploads_paid_for: Count
    distribution: list[dict[str, Number]]


class Together(Stored):
    """What several seeds guarantee."""

    statement: str
    runs: list[Any]


class Privacy(Stored):
    """What is promised."""

    guarantee: str
    epsilon: float | None
    statement: str
    budgets: Budgets | None = None
    together: Together | None = None


class SiloSizes(Stored):
    """Users of the smallest and the largest silo."""

    min: Count
    max: Count


class Divergence(Stored):
    """How silos differ from everybody."""

    mean: Number
    measure: str


class Silos(Stored):
    """Who held what."""

    count: Count
    users: SiloSizes
    divergence: Divergence


class Summary(Stored):
    """summary.json: of a run, or of several seeds together."""

    method: str
    data: str
    protocol: Literal["honest", "published"]
    protocol_mark: str | None
    options: dict[str, Any]
    rounds: Count | list[Count]
    selected_round: Count | list[Count]
    seed: Count | list[Count]
    test: Tables
    valid: Tables
    test_sd: Tables | None = None
    yardsticks: Yardsticks
    lists: dict[str, Number]
    users: Users
    notes: list[str]
    communication: Communication
    time: Time
    peak_rss_bytes: Count
    privacy: Privacy
    runs: list[Annotated[str, StringConstraints(pattern=r"^seed-\d+$")]] | None = None
    model: dict[str, Number] = Field(default_factory=dict)
    silos: Silos | None = None
    selected_by: str = "validation"
    improving: bool = False
    preset: str | None = None
    data_digest: str | None = None

    @model_validator(mode="after")
    def _tables_fit(self) -> Summary:
        if isinstance(self.seed, list) != bool(self.runs):
            raise ValueError("'seed' and 'runs' do not fit together")
        wanted = {name: metrics.keys() for name, metrics in self.test.items()}
        others = {
            "valid": self.valid,
            "yardsticks.popularity": self.yardsticks.popularity,
            "yardsticks.chance": self.yardsticks.chance,
            "test_sd": self.test if self.test_sd is None else self.test_sd,
        }
        if not wanted.get("full"):
            raise ValueError("'test' lacks 'full'")
        for name, tables in others.items():
            for candidates, metrics in wanted.items():
                if not metrics <= tables.get(candidates, {}).keys():
                    raise ValueError(f"'{name}' lacks what 'test' has for '{candidates}'")
        return self


class Line(Stored):
    """A line of metrics.jsonl."""

    round: Count
    loss: Number | None
    valid: Tables | None
    clients: Count = 0
    seconds: Positive = 0.0
    up_bytes: Count = 0
    down_bytes: Count = 0
    groups: Tables | None = None
    gates: dict[str, Any] | None = None
    stage: str = ""


class Entry(Stored):
    """An entry of an account."""

    event: Literal["pure", "gaussian", "discrete gaussian"]
    count: Count
    epsilon: Positive = 0.0
    multiplier: Positive = 0.0


class State(Stored):
    """state.json of a checkpoint."""

    data: str | None
    key: str | None
    round: Count
    selected_round: Count
    selected_value: float | None
    stale_looks: Count
    up_bytes: Count
    down_bytes: Count
    seconds: Positive
    account: list[Entry]
    protection: dict[str, Any]
    settings: str
    files: dict[Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]+\.safetensors$")], str]


class Seeds(Stored):
    """seeds.json."""

    seeds: Annotated[list[Count], Field(min_length=1)]


class Adaptation(Stored):
    """adaptation.json."""

    users: Count
    points: Annotated[list[dict[str, Number]], Field(min_length=1)]

    @model_validator(mode="after")
    def _alike(self) -> Adaptation:
        names = self.points[0].keys()
        if "interactions" not in names or any(point.keys() != names for point in self.points):
            raise ValueError("'points' differ in what they tell")
        return self


Interval = Annotated[list[Number], Field(min_length=2, max_length=2)]


class Guess(Stored):
    """How well an attack tells members from others; or what a yardstick does."""

    auc: Number | None
    advantage: Number | None
    tpr_at_1_fpr: Number | None


class Yardstick(Guess):
    """What popularity does instead."""

    name: str


class Chance(Stored):
    """What guessing blindly does."""

    auc: Number
    advantage: Number
    tpr_at_1_fpr: Number


class Intervals(Stored):
    """Where the truth lies, 95 times of 100."""

    auc: Interval | None
    advantage: Interval | None
    tpr_at_1_fpr: Interval | None


class Guesses(Stored):
    """What guesses prove."""

    right: Count
    guesses: Count
    pairs: Count
    lower_bound: Number
    claimed_epsilon: Number
    delta: Number


class Membership(Guess):
    """What an attack on membership found."""

    yardstick: Yardstick
    chance: Chance
    intervals: Intervals
    members: Count
    others: Count
    compared: str
    threat: str
    guesses: Guesses | None


class Evidence(Stored):
    """What one kind of evidence gives away."""

    seen_by: str
    r_precision: Number
    interval: Interval
    support_rows: Number
    support_precision: Number


class Items(Stored):
    """What an attack on uploads found."""

    evidence: dict[str, Evidence]
    popularity: Number
    chance: Number
    clients: Count
    items_per_client: Number
    replayed: str


class Canary(Stored):
    """What a canary proves."""

    who: str
    where: str
    claimed_epsilon: Number
    lower_bound: Number
    gaussian_lower_bound: Number | None
    most_provable: Number
    delta: Number
    contradicted: bool
    trials: Count
    rounds: Count


class Soundness(Stored):
    """Whether clipping and noise are as claimed."""

    numbers: Count
    arrays: list[Any] | dict[str, Any]
    rounds: Count
    tests: Count
    problems: list[Any]


class Skipped(Stored):
    """What was not attacked, and why."""

    skipped: str


class Audit(Stored):
    """audit.json."""

    verdict: str
    verdict_words: str
    reasons: list[str]
    membership: Skipped | Membership
    items: Skipped | Items
    canaries: list[Canary]
    soundness: Soundness | None


class TrialLine(Stored):
    """A line of trials.jsonl."""

    model_config = ConfigDict(extra="forbid")

    number: Count
    options: dict[str, bool | int | Number | str]
    state: Literal["done", "stopped", "diverged"]
    value: Number | None
    selected_round: Count | None
    looks: dict[Annotated[str, StringConstraints(pattern=r"^\d{1,18}$")], Number]
