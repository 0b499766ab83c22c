"""The privacy statement of a run, as summary.json stores it: what is guaranteed, and to whom."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import Field

from hushrec.io.stored import Count, Number, Positive, Stored

NO_GUARANTEE = "none"
Bound = Annotated[float, Field(ge=0)]
"""Not NaN; noise too small to be accounted for has an infinite epsilon."""


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
        return (
            self.guarantee != NO_GUARANTEE
            and self.epsilon is not None
            and math.isfinite(self.epsilon)
        )
