"""`Guarantee`: what a run promises, as fields a program can check and a sentence a person can."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hushrec.privacy.accountant import Neighbours

NO_GUARANTEE = "none"

OTHER_RUNS = (
    "options tuned on the same data, and other runs or seeds on it, of which `hushrec privacy "
    "compose` states the sum"
)
NOT_COVERED = (
    "losses and scores on held-out items that clients report beside their uploads, and metrics, "
    "ranks, cohort sizes and byte counts in the run folder, of which `hushrec release` writes the "
    "part that is covered",
    OTHER_RUNS,
    "private parameters, which stay on the device and are not noised",
)

SILO = "client (silo)"
SILOS_NOT_COVERED = "which users a silo holds: silos are made for the simulation, from the data"

Trust = Literal["nobody", "nodes", "aggregator"]
TRUSTED: dict[Trust, str] = {
    "nobody": "nobody but the device is trusted: the server may look at every upload",
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


@dataclass(frozen=True)
class Guarantee:
    """(epsilon, delta)-DP of everything that was released in the training rounds."""

    epsilon: float
    delta: float
    neighbours: Neighbours
    sampling: str
    trust: Trust
    mechanism: str
    """What was done to an upload, and to the sum."""
    rounds: int
    """At most so many, decided before the first."""
    unit: str = "user"
    """Whose data may change: all interactions of one user, or of all users of one silo."""
    public: tuple[str, ...] = ()
    """What is taken as known to everybody, because it was declared to be."""
    not_covered: tuple[str, ...] = NOT_COVERED
    noise_seed: int | None = None
    """Where the noise can be drawn again by whoever knows this number."""
    same_budgets: bool = False
    """Neighbours have the same personal budgets, for noise and weights show these."""

    @property
    def statement(self) -> str:
        """The guarantee in words."""
        change = changed(self.unit, self.neighbours, same_budgets=self.same_budgets)
        simulated = (
            f"Simulated: noise from privacy.noise_seed = {self.noise_seed}, which whoever knows it "
            "can remove. "
            if self.noise_seed is not None
            else ""
        )
        return (
            f"{simulated}{self.unit.capitalize()}-level ({self.epsilon:.4g}, {self.delta:.3g})-"
            f"differential privacy: what up to {self.rounds} rounds release is as likely, up to a "
            f"factor e^{self.epsilon:.4g} and a probability {self.delta:.3g}, {change}. "
            f"Mechanism: {self.mechanism}. Sampling: {self.sampling}. "
            f"Trust: {TRUSTED[self.trust]}. Public: {'; '.join(self.public)}. "
            f"Not covered: {'; '.join(self.not_covered)}."
        )

    def as_dict(self) -> dict[str, Any]:
        """Return what summary.json holds under ``privacy``."""
        return {
            "guarantee": f"{self.unit}-level (epsilon, delta)-DP",
            **asdict(self),
            "public": list(self.public),
            "not_covered": list(self.not_covered),
            "statement": self.statement,
        }


def changed(unit: str, neighbours: Neighbours, *, same_budgets: bool) -> str:
    """Say what differs between data sets that look alike under a guarantee."""
    how = {"zero-out-one": "emptied", "replace-one": "replaced by any other"}[neighbours]
    kept = " that leaves everybody's budget as it is" if same_budgets else ""
    return f"with the data of any one {unit} {how}{kept}"


def unprotected(*, pooled: bool, up_bytes: int, reveals: Collection[str] = ()) -> dict[str, Any]:
    """Return what summary.json holds under ``privacy`` where nothing was asked for."""
    if pooled:
        return no_guarantee("No guarantee: a centralised yardstick, everybody's data is pooled.")
    if up_bytes == 0:
        return no_guarantee(
            "No formal guarantee was asked for; this method uploads nothing at all."
        )
    return no_guarantee(
        "No formal guarantee: interactions stay on the clients, but raw updates reach the "
        "server, and the rows a client uploads name the items it drew and touched."
        + (f" This method uploads its clients' {' and '.join(sorted(reveals))}." if reveals else "")
    )


def no_guarantee(why: str) -> dict[str, Any]:
    """Return what summary.json holds under ``privacy`` where nothing is promised."""
    return {"guarantee": NO_GUARANTEE, "epsilon": None, "statement": why}
