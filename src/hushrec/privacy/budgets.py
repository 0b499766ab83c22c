"""Personal budgets: each client has its own epsilon, its own noise, and its own account.

The mechanism is that of DPPS (Zhu et al., section 3.2), calibrated so that its claim is true.
Client i clips its upload to C and adds Gaussian noise of deviation sigma_i on the device, before
anybody sees it. Replacing its data moves the upload by 2 C at most, so one upload has the
multiplier sigma_i / 2 C, and K of them are one of multiplier sigma_i / (2 C sqrt(K)), exactly.
sigma_i is what keeps K uploads within the client's own epsilon. (The paper's sigma_i =
C / epsilon_i is no (epsilon, delta) bound, and is not composed over rounds.)

The server weighs uploads by w_i = 1 / sigma_i² over their sum: of all weights that add up to one,
these give the mean the least noise. Weighting comes after the noise, so it is post-processing: it
needs no bound and changes no client's epsilon. Weights follow from the budgets alone, which the
server knows. What the method sees is the number of uploads times the weighted mean.

More than `LEVELS` different budgets are rounded down to so many, the noises that are worked out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from hushrec.aggregation import Total, Update
from hushrec.data.interactions import Features, Numeric
from hushrec.data.views import TrainView
from hushrec.errors import ConfigError, nearest
from hushrec.privacy.accountant import Accountant, Gaussian, epsilon_of, noise_for
from hushrec.privacy.noise import LocalNoise
from hushrec.streams import SecretRound

LEVELS = 64
WEIGHT = "privacy/weight"
"""Name under which the simulation sums the weights; they do not travel, the server knows them."""
MARGIN = 1e-6
"""So much more noise than a budget needs keeps rounding from ever overdrawing it."""
BINS = 8
"""Groups of clients in the distribution that a summary shows."""

Values = NDArray[np.float64]
PUBLIC_BUDGETS = (
    "the budgets themselves, which the server knows and the deviation of the noise shows: by "
    "activity they tell the order of the clients' numbers of interactions, else what was declared",
    "that a client whose budget is used up stays away",
)


@dataclass(frozen=True, eq=False)
class Ledger:
    """What every user spent so far, and who was turned away; saved with each checkpoint."""

    spent: Values
    """Sum over a user's uploads of 1 / multiplier²."""
    turned_away: NDArray[np.bool_]

    @classmethod
    def empty(cls, n_users: int) -> Ledger:
        """Return the ledger before the first round."""
        return cls(np.zeros(n_users), np.zeros(n_users, bool))


@dataclass(frozen=True, eq=False)
class Budgets:
    """Who may spend how much, and what one upload costs."""

    epsilon: Values
    """Each user's own budget; of users that do not train, 0."""
    level: NDArray[np.int64]
    """Position of each user's budget, rounded down, in `levels`."""
    levels: Values
    limit: Values
    """Of each level: the most a client may spend, as 1 / multiplier², which adds up exactly."""
    uploads: int
    """Uploads that a budget pays for."""
    delta: float
    event_at: Callable[[float], Gaussian]
    """What one upload with a noise multiplier adds to an account."""
    keeps: bool = True
    """False for the paper's noise, which keeps no budget."""

    @classmethod
    def of(
        cls, epsilon: Values, delta: float, uploads: int, event_at: Callable[[float], Gaussian]
    ) -> Budgets:
        """Find the levels, and what they allow to spend."""
        levels, level = levels_of(epsilon)
        noises = [noise_for(e, delta, 1, event_at) for e in levels]
        limit = (np.array(noises) * (1 + MARGIN)) ** -2.0
        return cls(epsilon, level, levels, limit, uploads, delta, event_at)

    @classmethod
    def as_published(
        cls, epsilon: Values, delta: float, uploads: int, event_at: Callable[[float], Gaussian]
    ) -> Budgets:
        """Take the paper's sigma_i = C / epsilon_i: what ``uploads`` cost is the limit, and true.

        C / epsilon_i is 1 / (2 epsilon_i) of the 2 C that two uploads can be apart.
        """
        found = cls.of(epsilon, delta, uploads, event_at)
        return replace(found, limit=uploads * (2 * found.levels) ** 2, keeps=False)

    @property
    def multiplier(self) -> Values:
        """Noise of one upload over its sensitivity, for each level."""
        return np.sqrt(self.uploads / self.limit)

    def deviations(self, apart: float) -> Values:
        """Return each user's noise, where two uploads are at most ``apart``."""
        return np.asarray(apart * self.multiplier[self.level])

    def admitted(
        self, ledger: Ledger, cohort: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], Ledger]:
        """Return who of a cohort can pay for an upload, and the ledger once they have."""
        limit = self.limit[self.level[cohort]]
        can_pay = ledger.spent[cohort] + limit / self.uploads <= limit * (1 + MARGIN / 10)
        spent, turned_away = ledger.spent.copy(), ledger.turned_away.copy()
        spent[cohort[can_pay]] += limit[can_pay] / self.uploads
        turned_away[cohort[~can_pay]] = True
        return cohort[can_pay], Ledger(spent, turned_away)

    def epsilons(self, spent: Values) -> Values:
        """Return the epsilon that was spent, client by client."""
        distinct, place = np.unique(spent, return_inverse=True)
        return np.array([self._epsilon(value) for value in distinct])[place]

    def _epsilon(self, spent: float) -> float:
        if spent == 0:
            return 0.0
        # Several uploads of some noise are one of less, on a grid that is as much coarser.
        return epsilon_of(self.event_at(spent**-0.5), 1, self.delta)

    def claims(self) -> Values:
        """Return the epsilon of each level once all its uploads are made."""
        return np.array([self._epsilon(limit) for limit in self.limit])

    def largest_account(self) -> list[dict[str, Any]]:
        """Return the account of a client with the largest budget once all its uploads are made."""
        accountant = Accountant()
        most = self.multiplier[self.claims().argmax()]
        accountant.record(self.event_at(float(most)), self.uploads)
        return accountant.history()

    def summary(self, spent: Values, turned_away: NDArray[np.bool_]) -> dict[str, Any]:
        """Return what summary.json says of the clients' budgets and of what they spent."""
        trains = self.epsilon > 0
        own, paid = self.epsilon[trains], self.epsilons(spent[trains])
        edges = np.linspace(own.min(), own.max(), BINS + 1)
        group = np.clip(np.searchsorted(edges, own, side="right") - 1, 0, BINS - 1)
        distribution = [
            {
                "from": float(edges[number]),
                "to": float(edges[number + 1]),
                "clients": int((group == number).sum()),
                "spent_median": float(np.median(paid[group == number])),
            }
            for number in range(BINS)
            if (group == number).any()
        ]
        weights = _weights(self.multiplier)
        return {
            "clients": int(trains.sum()),
            "epsilon": _three(own),
            "spent": _three(paid),
            "over_budget": int((paid > own).sum()),
            "uploads_paid_for": self.uploads,
            "stopped": int(turned_away.sum()),
            "largest_weight_over_smallest": float(weights.max() / weights.min()),
            "distribution": distribution,
        }


@dataclass(frozen=True, eq=False)
class PersonalNoise(LocalNoise):
    """Local Gaussian noise with a deviation for each client, and the weights that follow.

    A client finds its own deviation in its view; the server knows everybody's.
    """

    deviations: Values

    def on_device(self) -> PersonalNoise:
        """Leave the others' deviations out."""
        return replace(self, deviations=np.zeros(0))

    def receive(self, update: Update, clients: NDArray[np.int32]) -> Update:
        """Weigh uploads as they arrive, by the budgets, which the server knows."""
        weights = _weights(self.deviations)[clients]
        dense = {
            name: array * weights.astype(np.float32).reshape(-1, *[1] * (array.ndim - 1))
            for name, array in update.dense.items()
        }
        return Update(update.clients, dense={**dense, WEIGHT: weights})

    def finish(self, total: Total, secret: SecretRound) -> tuple[Total, PersonalNoise]:
        """Return the number of uploads times their weighted mean."""
        dense = dict(total.dense)
        summed = float(dense.pop(WEIGHT, np.zeros(())))
        if summed:
            dense = {name: array * (total.clients / summed) for name, array in dense.items()}
        return super().finish(replace(total, dense=dense), secret)[0], self

    def scales(self, view: TrainView) -> Values:
        """Return the clients' own deviations."""
        assert view.noise is not None, "a client knows the deviation of its own noise"
        return view.noise


def levels_of(epsilon: Values) -> tuple[Values, NDArray[np.int64]]:
    """Return the budgets that noise is worked out for, and which of them each user's comes to."""
    levels = np.unique(epsilon[epsilon > 0])
    if len(levels) > LEVELS:
        levels = np.geomspace(levels[0], levels[-1], LEVELS).clip(levels[0], levels[-1])
    return levels, np.maximum(np.searchsorted(levels, epsilon, side="right") - 1, 0)


def by_activity(
    counts: NDArray[np.int64], users: NDArray[np.int64], low: float, high: float
) -> Values:
    """Give ``users`` budgets from low to high, by the rank of their interaction counts."""
    epsilon = np.zeros(len(counts))
    rank = rankdata(counts[users], "min")  # of equals, all get the smaller budget
    share = (rank - 1) / max(1, rank.max() - 1)
    # No more different ones than there are levels: nobody's is rounded down later.
    epsilon[users] = np.linspace(low, high, LEVELS)[np.floor(share * (LEVELS - 1)).astype(int)]
    return epsilon


def by_feature(features: Features, name: str, names: Any, users: NDArray[np.int64]) -> Values:
    """Read budgets that ``users`` declared in a numeric feature."""
    column = features.get(name)
    if not isinstance(column, Numeric):
        numeric = [key for key, found in features.items() if isinstance(found, Numeric)]
        hint = nearest(name, numeric) if numeric else "; this data has none"
        raise ConfigError(f"privacy.budget_feature = '{name}' is no numeric user feature{hint}")
    declared = column.values.astype(np.float64)
    for user in users[~((declared[users] > 0) & np.isfinite(declared[users]))][:1]:
        raise ConfigError(
            f"user '{names[user]}' declares a budget of {declared[user]:g} in '{name}': an epsilon "
            "is positive"
        )
    epsilon = np.zeros(len(declared))
    epsilon[users] = declared[users]
    return epsilon


def words(budgets: Budgets, apart: float) -> str:
    """Say what is done, for the guarantee."""
    own = budgets.epsilon[budgets.epsilon > 0]
    noise = apart * budgets.multiplier
    why = "that keeps" if budgets.keeps else "of the paper's clip / epsilon, which does not keep"
    return (
        "discrete Gaussian noise on every entry of every upload, of a deviation "
        f"({noise.min():.4g} to {noise.max():.4g}) {why} the client's own budget, epsilon "
        f"{own.min():.4g} to {own.max():.4g} with median {np.median(own):.4g}, over "
        f"{budgets.uploads} uploads; a client that cannot pay for another one stops; uploads weigh "
        "by the inverse of their noise variance"
    )


def _weights(deviations: Values) -> Values:
    """Return inverse variances, the largest 1: bounded, and what they are relative to cancels."""
    real = deviations[deviations > 0]
    return np.where(deviations > 0, (real.min(initial=math.inf) / deviations) ** 2, 0.0)


def _three(values: Values) -> Mapping[str, float]:
    return {
        "min": float(values.min()),
        "median": float(np.median(values)),
        "max": float(values.max()),
    }
