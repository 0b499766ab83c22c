"""Personal privacy budgets: each client has its own epsilon, noise and ledger entry.

The mechanism is DPPS (Zhu et al., section 3.2) with calibrated noise. Client i clips its upload to
C and adds Gaussian noise of deviation sigma_i on the device. Replacing its data changes the upload
by at most 2 C, so one upload has the noise multiplier sigma_i / 2 C, and K uploads compose exactly
to one of multiplier sigma_i / (2 C sqrt(K)). sigma_i is calibrated to keep K uploads within the
client's epsilon. Deviation from the paper: its sigma_i = C / epsilon_i gives no (epsilon, delta)
bound and is not composed over rounds (``paper`` of `PersonalBudgets.of`).

The server weights uploads by w_i ~ 1 / sigma_i², which minimises the noise of the weighted mean.
Weighting is post-processing: it depends on the budgets only, which the server knows, and does not
change epsilon. The method receives the number of uploads times the weighted mean.

More than `LEVELS` different budgets are rounded down to `LEVELS` values, for calibration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from hushrec.aggregation import Total, Update
from hushrec.data.interactions import Features, Numeric
from hushrec.data.views import TrainView
from hushrec.errors import ConfigError, nearest
from hushrec.privacy.accountant import Accountant, EventAt, Values, epsilon_of, noise_for
from hushrec.privacy.config import PrivacyConfig
from hushrec.privacy.noise import LocalNoise
from hushrec.privacy.statement import BudgetSummary, ValueRange
from hushrec.streams import SecretRound

LEVELS = 64
WEIGHT = "privacy/weight"
"""Name of the sum of weights in a simulation; they are not sent, because the server knows them."""
MARGIN = 1e-6
"""Relative extra noise, so that rounding never exceeds a budget."""
BINS = 8
"""Bins of the histogram of budgets in a summary."""

PUBLIC_BUDGETS = (
    "the budgets themselves, which the server knows and the deviation of the noise shows: by "
    "activity they tell the order of the clients' numbers of interactions, else what was declared",
    "that a client whose budget is used up stays away",
)


@dataclass(frozen=True, eq=False)
class Ledger:
    """Spent budget of every user, and who was turned away; saved with each checkpoint."""

    spent: Values
    """Sum over a user's uploads of 1 / multiplier²."""
    turned_away: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class PersonalBudgets:
    """Each user's epsilon, and the cost of one upload."""

    epsilon: Values
    """Each user's budget; 0 for users that do not train."""
    level: NDArray[np.int64]
    """Index of each user's budget, rounded down, in `levels`."""
    levels: Values
    limit: Values
    """Largest spending of each level, as a sum of 1 / multiplier² over uploads."""
    uploads: int
    """Number of uploads that a budget allows."""
    delta: float
    event_at: EventAt
    """Privacy cost of one upload as a function of the noise multiplier."""
    keeps: bool = True
    """Whether uploads stay within the budgets; False for the paper's noise."""

    @classmethod
    def of(
        cls, epsilon: Values, delta: float, uploads: int, event_at: EventAt, *, paper: bool = False
    ) -> PersonalBudgets:
        """Calibrate the noise of each level to its budget.

        ``paper``: use the paper's sigma_i = C / epsilon_i, which is a noise multiplier of
        1 / (2 epsilon_i) for the sensitivity 2 C, and report the true cost of ``uploads``.
        """
        levels, level = levels_of(epsilon)
        if paper:
            limit = uploads * (2 * levels) ** 2
        else:
            noises = [noise_for(level_epsilon, delta, 1, event_at) for level_epsilon in levels]
            limit = (np.array(noises) * (1 + MARGIN)) ** -2.0
        return cls(epsilon, level, levels, limit, uploads, delta, event_at, keeps=not paper)

    @property
    def multiplier(self) -> Values:
        """Noise multiplier of one upload, for each level."""
        return np.sqrt(self.uploads / self.limit)

    def deviations(self, apart: float) -> Values:
        """Return the noise deviation of each user for uploads of sensitivity ``apart``."""
        return np.asarray(apart * self.multiplier[self.level])

    def admitted(
        self, ledger: Ledger, cohort: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], Ledger]:
        """Return the clients that can afford an upload, and the ledger after it is charged."""
        limit = self.limit[self.level[cohort]]
        can_pay = ledger.spent[cohort] + limit / self.uploads <= limit * (1 + MARGIN / 10)
        spent, turned_away = ledger.spent.copy(), ledger.turned_away.copy()
        spent[cohort[can_pay]] += limit[can_pay] / self.uploads
        turned_away[cohort[~can_pay]] = True
        return cohort[can_pay], Ledger(spent, turned_away)

    def epsilons(self, spent: Values) -> Values:
        """Return the epsilon of each spending, a sum of 1 / multiplier² over uploads."""
        distinct, index = np.unique(spent, return_inverse=True)
        # Several uploads compose to one with less noise, on a correspondingly coarser grid.
        own = [epsilon_of(self.event_at(v**-0.5), 1, self.delta) if v else 0.0 for v in distinct]
        return np.array(own)[index]

    def claims(self) -> Values:
        """Return the epsilon of each level after all its uploads."""
        return self.epsilons(self.limit)

    def largest_account(self) -> list[dict[str, Any]]:
        """Return the accountant's history of a client with the largest budget, all uploads made."""
        most = float(self.multiplier[self.claims().argmax()])
        return Accountant().record(self.event_at(most), self.uploads).history()

    def summary(self, ledger: Ledger) -> BudgetSummary:
        """Return the distribution of the clients' budgets and spending."""
        trains = self.epsilon > 0
        own, paid = self.epsilon[trains], self.epsilons(ledger.spent[trains])
        edges = np.linspace(own.min(), own.max(), BINS + 1)
        group = np.clip(np.searchsorted(edges, own, side="right") - 1, 0, BINS - 1)
        distribution = [
            {
                "from": float(edges[number]),
                "to": float(edges[number + 1]),
                "clients": int((group == number).sum()),
                "spent_median": float(np.median(paid[group == number])),
            }
            for number in np.unique(group)
        ]
        weights = _weights(self.multiplier)
        return BudgetSummary(
            clients=int(trains.sum()),
            epsilon=_range(own),
            spent=_range(paid),
            over_budget=int((paid > own).sum()),
            uploads_paid_for=self.uploads,
            stopped=int(ledger.turned_away.sum()),
            largest_weight_over_smallest=float(weights.max() / weights.min()),
            distribution=distribution,
        )


@dataclass(frozen=True, eq=False)
class PersonalNoise(LocalNoise):
    """Local Gaussian noise with a deviation for each client, and inverse-variance weights.

    A client has its own deviation in its view; the server knows all of them.
    """

    deviations: Values

    def on_device(self) -> PersonalNoise:
        """Return the mechanism without the deviations of other clients."""
        return replace(self, deviations=np.zeros(0))

    def receive(self, update: Update, clients: NDArray[np.int32]) -> Update:
        """Weight arriving uploads by the inverse variance of their noise."""
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
        """Return the deviations of these clients."""
        assert view.noise is not None, "the view has the deviation of a client's noise"
        return view.noise


def levels_of(epsilon: Values) -> tuple[Values, NDArray[np.int64]]:
    """Return at most `LEVELS` distinct budgets, and each user's index; others are rounded down."""
    levels = np.unique(epsilon[epsilon > 0])
    if len(levels) > LEVELS:
        levels = np.geomspace(levels[0], levels[-1], LEVELS).clip(levels[0], levels[-1])
    return levels, np.maximum(np.searchsorted(levels, epsilon, side="right") - 1, 0)


def by_activity(
    counts: NDArray[np.int64], users: NDArray[np.int64], low: float, high: float
) -> Values:
    """Return budgets of ``users`` from low to high, by the rank of their interaction counts."""
    epsilon = np.zeros(len(counts))
    rank = rankdata(counts[users], "min")  # ties get the smaller budget
    share = (rank - 1) / max(1, rank.max() - 1)
    # At most `LEVELS` different budgets, so that none is rounded down later.
    epsilon[users] = np.linspace(low, high, LEVELS)[np.floor(share * (LEVELS - 1)).astype(int)]
    return epsilon


def by_feature(features: Features, name: str, names: Any, users: NDArray[np.int64]) -> Values:
    """Return the budgets that ``users`` declared in a numeric feature."""
    column = features.get(name)
    if not isinstance(column, Numeric):
        numeric = [key for key, values in features.items() if isinstance(values, Numeric)]
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


def personal_budgets(
    config: PrivacyConfig, view: TrainView, names: NDArray[Any], clients: NDArray[np.int64]
) -> Values | None:
    """Return the budgets of the clients that train, as configured; None without any."""
    if config.budgets == "declared":
        if view.holders is not None:
            raise ConfigError("silos declare no budgets: use privacy.budgets = activity")
        assert config.budget_feature is not None, "checked"
        return by_feature(view.user_features, config.budget_feature, names, clients)
    if config.budgets == "activity":
        assert config.epsilon_min and config.epsilon_max, "checked"
        counts = np.diff(view.positives.indptr[view.client_indptr])
        return by_activity(counts, clients, config.epsilon_min, config.epsilon_max)
    return None


def describe(budgets: PersonalBudgets, apart: float) -> str:
    """Return a description of the mechanism for the guarantee."""
    own = budgets.epsilon[budgets.epsilon > 0]
    noise = apart * budgets.multiplier
    why = "that keeps" if budgets.keeps else "of the paper's clip / epsilon, which does not keep"
    return (
        "discrete Gaussian noise on every entry of every upload, of a deviation "
        f"({noise.min():.4g} to {noise.max():.4g}) {why} the client's own budget, epsilon "
        f"{own.min():.4g} to {own.max():.4g} with median {np.median(own):.4g}, over "
        f"{budgets.uploads} uploads; a client whose budget is used up stops; uploads are weighted "
        "by the inverse of their noise variance"
    )


def _weights(deviations: Values) -> Values:
    """Return inverse variances, scaled to a maximum of 1; the scale cancels in the mean."""
    real = deviations[deviations > 0]
    return np.where(deviations > 0, (real.min(initial=math.inf) / deviations) ** 2, 0.0)


def _range(values: Values) -> ValueRange:
    low, median, high = (float(of(values)) for of in (np.min, np.median, np.max))
    return ValueRange(min=low, median=median, max=high)
