"""`Plan`: how a run gives the privacy that is asked for, round by round, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.privacy.accountant import Accountant, Event, Everybody, Gaussian, Neighbours, Sampling
from hushrec.privacy.budgets import PUBLIC_BUDGETS, Budgets, Ledger
from hushrec.privacy.guarantee import (
    NOT_COVERED,
    SILO,
    SILOS_NOT_COVERED,
    Guarantee,
    Trust,
    no_guarantee,
    unprotected,
)
from hushrec.privacy.noise import round_multiplier
from hushrec.privacy.protection import Protection
from hushrec.privacy.validation_queries import Looks


@dataclass(frozen=True)
class Plan:
    """The protection of a run, what each round adds to the account, and what is said of it."""

    protection: Protection
    event: Event | None = None
    """None where nothing is promised, or nothing uploaded."""
    delta: float = 0.0
    neighbours: Neighbours = "replace-one"
    sampling: Sampling = Everybody()  # noqa: RUF009 - a frozen value
    trust: Trust = "nobody"
    mechanism: str = ""
    why_none: str | None = None
    """Why there is no guarantee, in a sentence; None if there is one."""
    asked: float | None = None
    """Epsilon that was asked for."""
    rounds: int = 0
    """Rounds that were planned."""
    silent: frozenset[int] = frozenset()
    """Those of them in which nothing is uploaded; they cost nothing."""
    deviations: NDArray[np.float64] | None = None
    """Of the noise that each client adds to its uploads, where they differ."""
    noise_seed: int | None = None
    """Where noise can be repeated."""
    unit: str = "user"
    """Whose data a client holds: a user's, or a silo's."""
    public: tuple[str, ...] = ()
    """What is taken as known to everybody."""
    undeclared: tuple[str, ...] = ()
    """What should have been declared public and was not, where that is accepted."""
    budgets: Budgets | None = None
    """Each client's own epsilon, where they have one: they are charged instead of the event."""
    shares: tuple[float, ...] = ()
    """Share of the budget that each round spends, where rounds differ; then `event` is that of all
    rounds together."""
    looks: Looks | None = None
    """What selects the round, where it is paid for; else the last one is shipped."""

    def event_of(self, round_number: int) -> Event:
        """Return what one round adds to the account."""
        assert self.event is not None, "nothing is promised, so nothing is accounted for"
        if not self.shares:
            return self.event
        assert isinstance(self.event, Gaussian), "only Gaussian noise is shared out"
        own = round_multiplier(self.event.multiplier, self.shares, round_number)
        return self.event.at(own)

    def uploads(self, rounds: Iterable[int]) -> list[int]:
        """Return those of these rounds that cost something."""
        return [number for number in rounds if number not in self.silent]

    def first_ledger(self, clients: int) -> Ledger | None:
        """Return the ledger before the first round, where clients have budgets of their own."""
        return None if self.budgets is None else Ledger.empty(clients)

    def admit(
        self, cohort: NDArray[np.int64], ledger: Ledger | None, number: int
    ) -> tuple[NDArray[np.int64], Ledger | None]:
        """Return who of a cohort may take part in a round, and the ledger once they have paid."""
        if self.budgets is None or ledger is None or number in self.silent:
            return cohort, ledger
        return self.budgets.admitted(ledger, cohort)

    def charge(
        self, history: Sequence[Mapping[str, Any]], number: int
    ) -> Sequence[Mapping[str, Any]]:
        """Return the account after a round, and after the look at its end if there is one."""
        accountant = Accountant(history)
        self._record(accountant, [number])
        return accountant.history()

    def _record(self, accountant: Accountant, rounds: Iterable[int]) -> None:
        for number in rounds:
            if self.event is not None and number not in self.silent:
                accountant.record(self.event_of(number))
            if self.looks is not None and number in self.looks.rounds:
                accountant.record(self.looks.event)

    def statement(
        self,
        history: Sequence[Mapping[str, Any]],
        run: int,
        ledger: Ledger | None = None,
        up_bytes: int = 0,
    ) -> dict[str, Any]:
        """Return what summary.json says about privacy after this many rounds were run."""
        if self.why_none is not None:
            return no_guarantee(self.why_none)
        if self.budgets is not None:
            assert ledger is not None, "who has budgets keeps a ledger"
            return self._personal_statement(self.budgets, ledger, run)
        accountant = Accountant(history)
        spent = accountant.epsilon(self.delta)
        # Whoever may stop at any round, having seen the models, claims for all of them.
        self._record(accountant, range(run + 1, self.rounds + 1))
        # Laplace noise, and saying nothing, never fail.
        delta = self.delta if isinstance(self.event, Gaussian) else 0.0
        guarantee = self._guarantee(accountant.epsilon(self.delta), delta, run)
        return {
            **guarantee.as_dict(),
            "asked_epsilon": self.asked,
            "spent_epsilon": spent,
            "account": list(history),
            "claimed": accountant.history(),
        }

    def _guarantee(
        self, epsilon: float, delta: float, run: int, known: tuple[str, ...] = ()
    ) -> Guarantee:
        silos = (SILOS_NOT_COVERED,) if self.unit == SILO else ()
        return Guarantee(
            epsilon=epsilon,
            delta=delta,
            neighbours=self.neighbours,
            sampling=str(self.sampling),
            trust=self.trust,
            mechanism=self.mechanism,
            rounds=max(self.rounds, run),
            unit=self.unit,
            public=self.public,
            not_covered=(*self.undeclared, *known, *silos, *NOT_COVERED),
            noise_seed=self.noise_seed,
            same_budgets=self.budgets is not None,
        )

    def _personal_statement(self, budgets: Budgets, ledger: Ledger, run: int) -> dict[str, Any]:
        largest = float(budgets.claims().max())
        guarantee = self._guarantee(largest, self.delta, run, PUBLIC_BUDGETS)
        said = budgets.summary(ledger.spent, ledger.turned_away)
        return {
            **guarantee.as_dict(),
            "asked_epsilon": None,
            "spent_epsilon": said["spent"]["max"],
            "account": [],
            "claimed": budgets.largest_account(),
            "budgets": said,
        }


@dataclass(frozen=True)
class NoPlan(Plan):
    """What is said of a run that asks for nothing."""

    pooled: bool = False
    reveals: frozenset[str] = frozenset()

    def statement(
        self,
        history: Sequence[Mapping[str, Any]],
        run: int,
        ledger: Ledger | None = None,
        up_bytes: int = 0,
    ) -> dict[str, Any]:
        """Say that nothing is guaranteed, and what that means."""
        return unprotected(pooled=self.pooled, up_bytes=up_bytes, reveals=self.reveals)
