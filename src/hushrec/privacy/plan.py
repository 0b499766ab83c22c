"""`Plan`: mechanisms, privacy accounting and the privacy statement of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import UploadShape
from hushrec.methods.relations import SEEN_SINGLY
from hushrec.privacy.accountant import (
    Accountant,
    Event,
    Everybody,
    Gaussian,
    History,
    Neighbours,
    Sampling,
    Values,
    without_amplification,
)
from hushrec.privacy.budgets import PUBLIC_BUDGETS, Ledger, PersonalBudgets
from hushrec.privacy.noise import ValidationQueries, round_multiplier
from hushrec.privacy.protection import Protection
from hushrec.privacy.statement import (
    NO_GUARANTEE,
    OTHER_RUNS,
    TRUSTED,
    PrivacyStatement,
    Trust,
    against,
    changed,
)

COARSEST = 1e-6
"""Largest ratio of noised entries, over all rounds, to the squared noise deviation in steps of the
exact sums; the cost of discrete noise is then negligible (`accountant.discreteness`)."""
NOT_COVERED = (
    "losses and scores on held-out items that clients report beside their uploads, and metrics, "
    "ranks, cohort sizes and byte counts in the run folder, of which `hushrec release` writes the "
    "part that is covered",
    OTHER_RUNS,
    "private parameters, which stay on the device and are not noised",
)

SILO = "client (silo)"
SILOS_NOT_COVERED = "which users a silo holds: silos are made for the simulation, from the data"


def no_guarantee(why: str, trust: Trust | None = None) -> PrivacyStatement:
    """Return the statement of a run without a guarantee."""
    stated = PrivacyStatement(guarantee=NO_GUARANTEE, epsilon=None, statement=why)
    return stated if trust is None else stated.model_copy(update={"trust": trust})


@dataclass(frozen=True)
class Schedule:
    """Public facts about a method's uploads, known before the first round."""

    shape: UploadShape
    rounds: int
    silent: frozenset[int] = frozenset()
    """Rounds without uploads, which cost nothing."""
    shares: tuple[float, ...] = ()
    """Share of the budget of each round, if rounds differ."""
    upload_norm: float | None = None
    """Bound of the norm of uploads, if the method itself keeps one."""
    entries: int = 0
    """Largest number of entries of an upload in any round, if shapes differ."""
    validation_rounds: frozenset[int] = frozenset()
    """Rounds after which the validation metric is evaluated."""

    @property
    def uploading(self) -> int:
        """Number of rounds with uploads."""
        return self.rounds - len(self.silent)

    @property
    def noised(self) -> int:
        """Largest number of noised entries in a round, including the bit of adaptive clipping."""
        return max(self.entries, self.shape.entries) + 1

    @property
    def least_deviation(self) -> float:
        """Smallest noise deviation, in steps, for which the grid of the sums is fine enough."""
        return math.sqrt(self.noised * self.uploading / COARSEST)


@dataclass(frozen=True)
class Plan:
    """The protection of a run, the privacy cost of each round, and the resulting statement."""

    protection: Protection
    event: Event | None = None
    """Privacy cost of one round; None without a guarantee or without uploads."""
    delta: float = 0.0
    neighbours: Neighbours = "replace-one"
    sampling: Sampling = Everybody()  # noqa: RUF009 - a frozen value
    trust: Trust = "nobody"
    mechanism: str = ""
    why_none: str | None = None
    """Reason why there is no guarantee; None if there is one."""
    requested_epsilon: float | None = None
    rounds: int = 0
    """Planned number of rounds."""
    silent: frozenset[int] = frozenset()
    """Rounds without uploads, which cost nothing."""
    deviations: Values | None = None
    """Standard deviation of each client's noise, where they differ."""
    noise_seed: int | None = None
    """Seed of reproducible noise."""
    unit: str = "user"
    """Protected unit: the data of a user or of a silo."""
    public: tuple[str, ...] = ()
    """Declared public data."""
    undeclared: tuple[str, ...] = ()
    """Undeclared data that is released without protection (`privacy.undeclared`)."""
    budgets: PersonalBudgets | None = None
    """Personal budgets; clients are then charged individually, and `event` is not used."""
    shares: tuple[float, ...] = ()
    """Share of the budget of each round, where rounds differ; `event` then covers all rounds."""
    validation_queries: ValidationQueries | None = None
    """Noisy validation queries that select the round; without them the last round is released."""

    def event_of(self, round_number: int) -> Event:
        """Return the privacy cost of one round."""
        assert self.event is not None, "a plan without a guarantee has no event"
        if not self.shares:
            return self.event
        assert isinstance(self.event, Gaussian), "only Gaussian noise has shares"
        own = round_multiplier(self.event.multiplier, self.shares, round_number)
        return self.event.at(own)

    def uploads(self, rounds: Iterable[int]) -> list[int]:
        """Return the rounds with uploads among these."""
        return [number for number in rounds if number not in self.silent]

    def first_ledger(self, clients: int) -> Ledger | None:
        """Return the ledger before the first round; None without personal budgets."""
        return Ledger(np.zeros(clients), np.zeros(clients, bool)) if self.budgets else None

    def admit(
        self, cohort: NDArray[np.int64], ledger: Ledger | None, number: int
    ) -> tuple[NDArray[np.int64], Ledger | None]:
        """Return the clients that can afford the round, and the ledger after it is charged."""
        if self.budgets is None or ledger is None or number in self.silent:
            return cohort, ledger
        return self.budgets.admitted(ledger, cohort)

    def charged(self, history: History, rounds: Iterable[int]) -> Accountant:
        """Return the accountant after these rounds and their validation queries, if any."""
        accountant, queries = Accountant(history), self.validation_queries
        for number in rounds:
            if self.event is not None and number not in self.silent:
                accountant.record(self.event_of(number))
            if queries is not None and number in queries.rounds:
                accountant.record(queries.event)
        return accountant

    def statement(
        self, history: History, run: int, ledger: Ledger | None = None, up_bytes: int = 0
    ) -> PrivacyStatement:
        """Return the ``privacy`` entry of summary.json after ``run`` rounds."""
        if self.why_none is not None:
            return no_guarantee(self.why_none)
        if self.budgets is not None:
            assert ledger is not None, "personal budgets need a ledger"
            summary = self.budgets.summary(ledger)
            return self._stated(
                float(self.budgets.claims().max()),
                self.delta,
                run,
                asked_epsilon=None,
                spent_epsilon=summary.spent.max,
                account=[],
                claimed=self.budgets.largest_account(),
                budgets=summary,
            )
        # A run may stop at any round, depending on its models: the claim covers all planned rounds.
        planned = self.charged(history, range(run + 1, self.rounds + 1))
        return self._stated(
            planned.epsilon(self.delta),
            # Laplace noise, and no uploads, are pure DP.
            self.delta if isinstance(self.event, Gaussian) else 0.0,
            run,
            asked_epsilon=self.requested_epsilon,
            spent_epsilon=Accountant(history).epsilon(self.delta),
            account=[dict(entry) for entry in history],
            claimed=planned.history(),
        )

    def _stated(self, epsilon: float, delta: float, run: int, **account: Any) -> PrivacyStatement:
        """State (epsilon, delta)-DP of everything that the training rounds release."""
        personal, rounds = self.budgets is not None, max(self.rounds, run)
        not_covered = (
            *self.undeclared,
            *(PUBLIC_BUDGETS if personal else ()),
            *((SILOS_NOT_COVERED,) if self.unit == SILO else ()),
            *NOT_COVERED,
        )
        simulated = (
            f"Simulated: noise from privacy.noise_seed = {self.noise_seed}, which whoever knows it "
            "can remove. "
            if self.noise_seed is not None
            else ""
        )
        seen = without_amplification(account["claimed"])
        listener = None if seen is None else Accountant(seen).epsilon(delta)
        adversaries = against(self.trust, listener)
        change = changed(self.unit, self.neighbours, same_budgets=personal)
        return PrivacyStatement(
            guarantee=f"{self.unit}-level (epsilon, delta)-DP",
            epsilon=epsilon,
            delta=delta,
            neighbours=self.neighbours,
            sampling=str(self.sampling),
            trust=self.trust,
            adversaries=adversaries,
            listener_epsilon=listener,
            mechanism=self.mechanism,
            rounds=rounds,
            unit=self.unit,
            public=list(self.public),
            not_covered=list(not_covered),
            noise_seed=self.noise_seed,
            same_budgets=personal,
            statement=(
                f"{simulated}{self.unit.capitalize()}-level ({epsilon:.4g}, {delta:.3g})-"
                f"differential privacy: what up to {rounds} rounds release is as likely, up to a "
                f"factor e^{epsilon:.4g} and a probability {delta:.3g}, {change}. "
                f"Mechanism: {self.mechanism}. Sampling: {self.sampling}. "
                f"Trust: {TRUSTED[self.trust]}. Adversaries: {adversaries}. "
                f"Public: {'; '.join(self.public)}. "
                f"Not covered: {'; '.join(not_covered)}."
            ),
            **account,
        )


@dataclass(frozen=True)
class NoPlan(Plan):
    """The plan of a run without a privacy mode."""

    pooled: bool = False
    reveals: frozenset[str] = frozenset()
    secure: bool = False
    """Whether nodes send their sums to a secure sum, so that the server sees the total only."""
    seen_singly: bool = False
    """Whether the server relates clients by their single uploads."""

    def statement(
        self, history: History, run: int, ledger: Ledger | None = None, up_bytes: int = 0
    ) -> PrivacyStatement:
        """Return a statement that nothing is guaranteed."""
        if self.pooled:
            return no_guarantee("No guarantee: a centralised baseline, everybody's data is pooled.")
        if up_bytes == 0:
            return no_guarantee("No formal guarantee was asked for; this method uploads nothing.")
        revealed = f" This method uploads its clients' {' and '.join(sorted(self.reveals))}."
        if self.secure:
            return no_guarantee(
                "No formal guarantee: interactions stay on the nodes, and the server sees what "
                "the updates of all nodes add up to, and no update of a node or a client; nothing "
                "bounds what these totals, or the model, tell."
                + (revealed if self.reveals else ""),
                trust="nodes",
            )
        return no_guarantee(
            "No formal guarantee: interactions stay on the clients, but raw updates reach the "
            "server, and the rows a client uploads name the items it drew and touched."
            + (revealed if self.reveals else "")
            + (f" It relates clients, so {SEEN_SINGLY}." if self.seen_singly else "")
        )
