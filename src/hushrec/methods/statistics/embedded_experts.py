"""The experts that come with `fedmix`.

`Transitions` is `fednext`'s regression of the next item, with one score for each lag.
`RecentTransitions` has a short window, and plain transition counts, which keep what the regression
smooths away: how often exactly this item followed that one.

`Cooccurrence` has EASE weights and low-rank factors from one Gram matrix: from the pairs of
clients' latest items the server solves EASE (`fedease`), and takes the leading eigenvectors of the
sums, divided by the roots of both items' counts, as item vectors. A client solves for its own
vector from its history, as in implicit ALS (`fedals`).

`PopularityExpert` scores by popularity, and `Categories` by transitions between public categories
of items, such as years or genres; an item has a share in each of its own.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import FixedPoint, KeyedRows
from hushrec.data.features import category_columns, category_shares
from hushrec.data.views import TrainView
from hushrec.kernels import baskets, mixture, ragged
from hushrec.kernels import pairs as pair_kernels
from hushrec.kernels.mixture import PairTable
from hushrec.methods.base import Array, Scores, Shared
from hushrec.methods.baselines import distinct_items
from hushrec.methods.forms import Part
from hushrec.methods.statistics import pair_tables, pair_weights
from hushrec.methods.statistics.experts import Expert, Model, extended_table, rest
from hushrec.methods.statistics.pair_weights import Head, Keys, Sums, fading, strongest

LAGS = np.array([1, 2, 3, 4, 6, 10, 20, 50, 200])
"""The g-th last items up to which one score reaches; the next one begins after it."""
FLOOR = 0.001
"""Added before the logarithm."""
EQUALLY = np.ones(0, np.float32)
"""Weights of the last items that are all 1."""


ONES = FixedPoint(bits=0)
"""Of counts that are 0 or 1 for each client."""


class PairExpert(Expert):
    """Base of the experts with a table of item-to-item weights."""

    tables: ClassVar[tuple[str, ...]] = ("weights",)

    def init(self, view: TrainView) -> Shared:
        """Start from nothing but the table."""
        return {}

    def head(self, keys: Keys, sums: Sums, model: Model) -> Head:
        """Return the sums of the head apart from the others."""
        n_items = len(model["weights"]["neighbours"])
        return Head.of(keys, sums, n_items, self.config.dense_items)

    def influence(self, model: Model, past: Array, items: Array) -> Scores:
        """Return the weights of the table."""
        past = np.ascontiguousarray(past)  # one form of the kernel
        return np.asarray(pair_tables.packed_weights(past, items, model["weights"]))

    def neighbours(self, model: Model, item: int) -> Scores:
        """Return the weights of the table."""
        return pair_tables.weights_of(model["weights"], item)


class Transitions(PairExpert):
    """Scores the next item from the last item, the one before, and so on, and from all of them."""

    name = "transitions"
    counted = "head and rest"
    because = "often after {}"
    start: ClassVar[dict[str, float]] = {"log of all": 1.0}

    def is_applicable(self, view: TrainView) -> bool:
        """Need an order of items; within a basket there is none."""
        return not view.repeats

    @property
    def regression(self) -> tuple[int, float, float, float]:
        """Window, power of the sums, share of correlation, and ridge."""
        config = self.config
        return config.window, config.power, config.gram, config.ridge

    def scores(self, model: Model) -> tuple[str, ...]:
        """One for each run of lags, and the logarithm of their sum."""
        return *(f"up to {lag} back" for lag in LAGS), "log of all"

    def count(self, view: TrainView) -> KeyedRows:
        """Count transitions within the window, 1/steps each, and the items themselves."""
        past, grid = view.positives, FixedPoint(bits=self.config.count_bits)
        by_gap = np.trim_zeros(grid.round(fading(self.regression[0])), "b")
        pairs = pair_kernels.following_pairs(past.indptr, past.values, view.n_items, by_gap)
        # A client that has an item several times may count it, and its pairs, as often.
        return KeyedRows(*pairs, space=view.n_items**2, grid=grid if view.merged else None)

    def learn(self, model: Model, keys: Keys, sums: Sums) -> Model:
        """Regress the next item on the recent history; outside the head, each pair by itself."""
        head, (_, power, gram, ridge) = self.head(keys, sums, model), self.regression
        # Single precision is enough here and solves twice as fast.
        powered = (np.maximum(head.blocks[0], 0.0) ** power).astype(np.float32)
        weights = pair_weights.transition_weights(powered, gram, ridge)
        pairs, values = head.outside
        counts = head.counts[pairs // len(head.counts)]
        alone = pair_weights.weights_alone(values, counts, power, ridge)
        return {"weights": strongest(model["weights"], pairs, alone, head.items, weights)}

    def extend(self, model: Model, keys: Keys, sums: Sums) -> Model:
        """Weigh pairs that are not both in the head by their own sums."""
        pairs, values, counts = rest(keys, sums[:, 0], len(model["weights"]["neighbours"]))
        _, power, _, ridge = self.regression
        alone = pair_weights.weights_alone(values, counts, power, ridge)
        return {**model, "weights": extended_table(model["weights"], pairs, alone)}

    def influence(self, model: Model, past: Array, items: Array) -> Scores:
        """Return the weights of the table, less for items further back."""
        out = super().influence(model, past, items) * fading(len(past))[:, None]
        out[LAGS[-1] :] = 0
        return out

    def score(self, model: Model, view: TrainView, out: Scores) -> None:
        """Add up the weights from the client's last items, by lag."""
        _add_by_lag(out[:, :-1], view, model["weights"], LAGS, fading(int(LAGS[-1])))
        mixture.log_of_sum(out[:, :-1], FLOOR, out[:, -1])

    def parts(self, model: Model) -> tuple[Part, ...]:
        """Return the same scores for bundles."""
        return (_lags(LAGS, FLOOR, "sum", model["weights"], recency=1.0),)


RECENT_LAGS = np.array([1, 2, 5])
RECENT_FLOOR = 0.003
COUNTED = np.array([1, 2, 3])
"""Lags of the scores by counts."""
COUNT_FLOOR = 0.1
"""Added to a count before its logarithm: between no transition and one."""


class RecentTransitions(Transitions):
    """Scores what came right after the last items, by regression and by counts."""

    name = "recent-transitions"
    because = "often right after {}"
    start: ClassVar[dict[str, float]] = {}
    regression = (3, 0.5, 0.2, 20.0)
    tables = ("weights", "counts")

    def scores(self, model: Model) -> tuple[str, ...]:
        """Weights by lag, the logarithm of their sum, and logarithms of counts by lag."""
        counted = (f"log count, {lag} back" for lag in COUNTED)
        return *(f"up to {lag} back" for lag in RECENT_LAGS), "log of all", *counted

    def learn(self, model: Model, keys: Keys, sums: Sums) -> Model:
        """Regress the next item, and keep the counts themselves."""
        n_items, empty = len(model["counts"]["neighbours"]), model["counts"]
        others = keys // n_items != keys % n_items
        counts = np.maximum(sums[others, 0], 0.0)
        no_head = np.zeros(0, np.int64), np.zeros((0, 0))
        counted = strongest(empty, keys[others], counts, *no_head)
        return {**super().learn(model, keys, sums), "counts": counted}

    def extend(self, model: Model, keys: Keys, sums: Sums) -> Model:
        """Weigh pairs that are not both in the head by their own sums."""
        pairs, values, _ = rest(keys, sums[:, 0], len(model["counts"]["neighbours"]))
        counted = extended_table(model["counts"], pairs, np.maximum(values, 0.0))
        return {**super().extend(model, keys, sums), "counts": counted}

    def influence(self, model: Model, past: Array, items: Array) -> Scores:
        """Return the weights of the table from the last items, all alike."""
        out = PairExpert.influence(self, model, past, items)
        out[RECENT_LAGS[-1] :] = 0
        return out

    def score(self, model: Model, view: TrainView, out: Scores) -> None:
        """Add up the weights, and look up the counts."""
        end = len(RECENT_LAGS)
        _add_by_lag(out[:, :end], view, model["weights"], RECENT_LAGS)
        mixture.log_of_sum(out[:, :end], RECENT_FLOOR, out[:, end])
        counted = out[:, end + 1 :]
        _add_by_lag(counted, view, model["counts"], COUNTED)
        for lag in range(len(COUNTED)):
            mixture.log_of_sum(counted[:, lag : lag + 1], COUNT_FLOOR, counted[:, lag])

    def parts(self, model: Model) -> tuple[Part, ...]:
        """Return the same scores for bundles."""
        by_weight = _lags(RECENT_LAGS, RECENT_FLOOR, "sum", model["weights"])
        return by_weight, _lags(COUNTED, COUNT_FLOOR, "each", model["counts"])


def _add_by_lag(
    out: Scores, view: TrainView, table: PairTable, lags: Array, by_lag: Array = EQUALLY
) -> None:
    past = view.positives
    mixture.add_by_lag(out, past.indptr, past.values, table, lags, by_lag)


def _lags(ends: Array, floor: float, logs: str, table: PairTable, recency: float = 0.0) -> Part:
    options = {"ends": ends.tolist(), "recency": recency, "floor": floor, "logs": logs}
    return Part("lags", options, table._asdict())


ENDS = np.array([10, 50, 0])
"""The last items of the scores by weights; the last score has no end."""
PAIR_FLOOR = 0.02
"""Added before logarithms."""
UNSEEN, OWN_RIDGE = 0.1, 0.0003
"""Of a client's own vector: weight of untouched items, and regularisation, as in FedALS."""
RECENT = 20
"""Items whose vectors are added up for the score of recent factors."""
SWEEPS = 12
"""Steps of the subspace iteration that finds the eigenvectors."""


class Cooccurrence(PairExpert):
    """Scores items by co-occurrence with the last items, and by item and user vectors."""

    name = "cooccurrence"
    counted = "head"
    because = "often together with {}"
    start: ClassVar[dict[str, float]] = {"log of the factors": 0.3}

    def init(self, view: TrainView) -> Shared:
        """Start from no vectors."""
        count = self.config.factors
        vectors, units = np.zeros((view.n_items, count), np.int8), np.zeros(count, np.float32)
        return {"vectors": vectors, "units": units, "products": np.zeros((count, count))}

    def scores(self, model: Model) -> tuple[str, ...]:
        """Weights by lag, their logarithm, and the factors."""
        weights = "last 10", "11 to 50 back", "further back", "log of all"
        return *weights, "factors", "log of the factors", "recent factors"

    def count(self, view: TrainView) -> KeyedRows:
        """Count the pairs of each client's latest items, and the items themselves."""
        items = distinct_items(pair_weights.latest(view.positives, self.config.latest))
        pairs = pair_kernels.common_pairs(items.indptr, items.values, view.n_items)
        return KeyedRows(*pairs, space=view.n_items**2, grid=ONES)

    def learn(self, model: Model, keys: Keys, sums: Sums) -> Model:
        """Solve EASE, and find the vectors."""
        head, ridge = self.head(keys, sums, model), self.config.cooccurrence_ridge
        block = head.blocks[0] + np.triu(head.blocks[0], 1).T
        vectors = np.zeros(model["vectors"].shape, np.float32)
        vectors[head.items] = leading_vectors(block, self.config.factors)
        units = np.abs(vectors).max(axis=0) / np.float32(127)
        vectors = np.rint(vectors / np.where(units > 0, units, 1)).astype(np.int8)
        pairs, values = pair_weights.both_ways(*head.outside, len(head.counts))
        alone = values / (head.counts[pairs // len(head.counts)] + ridge)
        solved = pair_weights.ease_weights(block, ridge)
        table = strongest(model["weights"], pairs, alone, head.items, solved)
        products = pair_weights.gram(vectors * units)
        return {"weights": table, "vectors": vectors, "units": units, "products": products}

    def score(self, model: Model, view: TrainView, out: Scores) -> None:
        """Add up weights from the history, and solve for the client's vector."""
        past, vectors = view.positives, model["vectors"] * model["units"]
        _add_by_lag(out[:, :3], view, model["weights"], ENDS)
        mixture.log_of_sum(out[:, :3], PAIR_FLOOR, out[:, 3])
        touched = distinct_items(past)
        ridge = OWN_RIDGE * (touched.lengths + UNSEEN * view.n_items)
        everything = UNSEEN * model["products"]
        own = pair_weights.solve_users(vectors, everything, touched.indptr, touched.values, ridge)
        columns = np.ascontiguousarray(vectors.T)
        mixture.score_vectors(own.astype(np.float32), columns, out[:, 4])
        mixture.log_of_sum(out[:, 4:5], PAIR_FLOOR, out[:, 5])
        recent = ragged.recent_vectors(past.indptr, past.values, vectors, fading(RECENT))
        mixture.score_vectors(recent, columns, out[:, 6])

    def parts(self, model: Model) -> tuple[Part, ...]:
        """Return the same scores for bundles."""
        factors = {"unseen": UNSEEN, "ridge": OWN_RIDGE, "floor": PAIR_FLOOR, "recent": RECENT}
        arrays = {name: model[name] for name in ("vectors", "units")}
        by_weight = _lags(ENDS, PAIR_FLOOR, "sum", model["weights"])
        return by_weight, Part("factors", factors, arrays)


def leading_vectors(gram: NDArray[np.float64], count: int) -> NDArray[np.float32]:
    """Return items' vectors whose products are nearest to the sums over the roots of the counts."""
    size = len(gram)
    out = np.zeros((size, count), np.float32)
    if size == 0:
        return out
    roots = 1 / np.sqrt(np.diag(gram) + 1.0)
    scaled = gram * roots[:, None] * roots
    # The start is any fixed one; a few spare columns make the wanted ones converge.
    wide = min(size, count + 16)
    basis: Any = np.cos(np.outer(np.arange(1, size + 1), np.arange(1, wide + 1)) * 0.7)
    for _ in range(SWEEPS):
        basis = _orthonormal(scaled @ basis)
    values, turns = np.linalg.eigh(basis.T @ scaled @ basis)
    kept = min(count, len(values))
    leading = basis @ turns[:, ::-1][:, :kept]
    out[:, :kept] = leading * np.sqrt(np.maximum(values[::-1][:kept], 0.0))
    return out


def _orthonormal(columns: Any) -> Any:
    """Return an orthonormal basis of what columns span; much faster than QR for few columns."""
    columns = columns / np.maximum(np.sqrt((columns**2).sum(axis=0)), 1e-300)
    values, turns = np.linalg.eigh(columns.T @ columns)
    kept = values > 1e-12 * values[-1]
    return columns @ (turns[:, kept] / np.sqrt(values[kept]))


POPULARITY_FLOOR = 0.03
"""Added to an item's share, in those of a mean item, before the logarithm."""


class PopularityExpert(Expert):
    """An item's share of all interactions, and its logarithm."""

    name = "popularity"
    because = "popular"
    start: ClassVar[dict[str, float]] = {"log share": 0.1}

    def init(self, view: TrainView) -> Shared:
        """Start from nothing."""
        return {"shares": np.zeros(view.n_items, np.float32)}

    def scores(self, model: Model) -> tuple[str, ...]:
        """The share and its logarithm."""
        return "share", "log share"

    def count(self, view: TrainView) -> KeyedRows:
        """Upload a one for every item of the client."""
        items = distinct_items(view.positives)
        keys, ones = items.values.astype(np.int64), np.ones((len(items.values), 1), np.float32)
        return KeyedRows(items.indptr, keys, ones, space=view.n_items, grid=ONES)

    def learn(self, model: Model, keys: Keys, sums: Sums) -> Model:
        """Divide by the mean."""
        shares = np.zeros_like(model["shares"])
        counts = np.maximum(sums[:, 0], 0.0)
        shares[keys] = counts / max(counts.sum(), 1e-12) * len(shares)
        return {"shares": shares}

    def score(self, model: Model, view: TrainView, out: Scores) -> None:
        """Score every client alike: by shares over the largest share, and by logarithms."""
        out[:, 0] = model["shares"] / max(model["shares"].max(), np.float32(1))
        out[:, 1] = np.log(model["shares"] + np.float32(POPULARITY_FLOOR))

    def parts(self, model: Model) -> tuple[Part, ...]:
        """Return the same scores for bundles."""
        return (Part("shares", {"floor": POPULARITY_FLOOR}, model),)


CATEGORY_WINDOW = 5
"""Steps within which a category follows another, at 1/steps."""
CATEGORY_LATEST = (1, 5, 0)
"""Scores are means over the last item, the last five and all."""
CATEGORY_SMOOTHING = 0.5
"""Added to every sum."""


class Categories(Expert):
    """Scores how much more often an item's categories follow those of the past than by chance."""

    name = "categories"
    because = "of categories that follow those of {}"

    def is_applicable(self, view: TrainView) -> bool:
        """Need at least one categorical feature of items."""
        return bool(category_columns(view))

    def init(self, view: TrainView) -> Shared:
        """Start from no relations between categories."""
        members, sizes = category_shares(view)
        groups = members.shape[1]
        return {"sizes": sizes, "relations": np.zeros((groups, groups), np.float32)}

    def public(self, view: TrainView) -> Shared:
        """Return each item's shares of all categories."""
        return {"members": category_shares(view)[0]}

    def scores(self, model: Model) -> tuple[str, ...]:
        """One for each feature and stretch of the past."""
        spans = "last", "last five", "all"
        return tuple(f"feature {n}, {span}" for n in range(len(model["sizes"])) for span in spans)

    def count(self, view: TrainView) -> KeyedRows:
        """Count transitions between categories."""
        past, (members, sizes) = view.positives, category_shares(view)
        pairs = mixture.following_groups(
            past.indptr, past.values, members, sizes, fading(CATEGORY_WINDOW)
        )
        return KeyedRows(*pairs, space=members.shape[1] ** 2)

    def learn(self, model: Model, keys: Keys, sums: Sums) -> Model:
        """Take the logarithm of counts over their expectation by chance."""
        groups, start = len(model["relations"]), 0
        counted, relations = np.zeros(groups**2), np.zeros_like(model["relations"])
        counted[keys] = np.maximum(sums[:, 0], 0.0)
        for size in model["sizes"]:
            mine = slice(start, start + size)
            found = counted.reshape(groups, groups)[mine, mine] + CATEGORY_SMOOTHING
            chance = found.sum(1, keepdims=True) * found.sum(0, keepdims=True) / found.sum()
            relations[mine, mine] = np.log(found / chance)
            start += size
        return {**model, "relations": relations}

    def influence(self, model: Model, past: Array, items: Array) -> Scores:
        """Return the affinity of each past item's categories."""
        # Summed for each pair alone, so that items of equal categories tie.
        members = model["members"]
        affinity = (members[items][:, None] * model["relations"]).sum(axis=2)
        return np.asarray((members[past][:, None] * affinity).sum(axis=2))

    def score(self, model: Model, view: TrainView, out: Scores) -> None:
        """Average over the past items and over an item's categories."""
        past, learnt = view.positives, (model["members"], model["sizes"], model["relations"])
        mixture.score_groups(past.indptr, past.values, *learnt, np.array(CATEGORY_LATEST), out)

    def parts(self, model: Model) -> tuple[Part, ...]:
        """Return the same scores for bundles."""
        options = {"sizes": model["sizes"].tolist(), "latest": list(CATEGORY_LATEST)}
        return (Part("groups", options, {n: model[n] for n in ("members", "relations")}),)


RATE_SMOOTHING = 20.0
"""Baskets at the mean rate that are added to those of every item, and of every state."""
STATE_COUNTS, STATE_AGOS = np.array([1, 2, 3, 5, 8]), np.array([1, 2, 3, 5, 9, 16])
"""Ends of all buckets but the last: in how many baskets an item is, and how many baskets ago."""


class PersonalFrequencyExpert(Expert):
    """Scores what the client bought before: how often, how recently, and how regularly.

    The model holds how often items are bought again: by item, and by the state of an item, that is
    how often and how recently a client bought it. Both are logarithms of rates over the mean rate.
    """

    name = "personal-frequency"
    because = "often bought before"
    start: ClassVar[dict[str, float]] = {
        "bought before": 3.0,
        "rate of the state": 1.0,
        "log share of last baskets": 0.5,
    }

    def is_applicable(self, view: TrainView) -> bool:
        """Need lists that may hold items of the history."""
        return view.repeats

    def init(self, view: TrainView) -> Shared:
        """Start from equal rates and no baskets."""
        n_states = (len(STATE_COUNTS) + 1) * (len(STATE_AGOS) + 1)
        sizes = {"rates": view.n_items, "latest": view.n_items, "states": n_states}
        return {name: np.zeros(size, np.float32) for name, size in sizes.items()}

    def scores(self, model: Model) -> tuple[str, ...]:
        """Of items in the history: counts, recency and rates; of all: share of last baskets."""
        own = "bought before", "log count", "log recent count", "log baskets ago"
        more = "log share of baskets", "log intervals ago", "rate of the item", "rate of the state"
        return *own, *more, "log share of repeats", "log share of last baskets"

    def count(self, view: TrainView) -> KeyedRows:
        """Count how often own items came again, by item and by state."""
        past, ends = view.positives, (STATE_COUNTS, STATE_AGOS)
        found = baskets.count_repeats(
            past.indptr, past.values, view.times.values, view.n_items, *ends
        )
        n_states = (len(STATE_COUNTS) + 1) * (len(STATE_AGOS) + 1)
        return KeyedRows(*found, space=view.n_items + n_states)

    def learn(self, model: Model, keys: Keys, sums: Sums) -> Model:
        """Divide the sums: rates are smoothed towards the mean, shares are those of a mean item."""
        n_items = len(model["rates"])
        dense = np.zeros((n_items + len(model["states"]), 3))
        dense[keys] = np.maximum(sums, 0.0)
        items, states = dense[:n_items], dense[n_items:]
        mean = (states[:, 1].sum() + 1e-3) / (states[:, 0].sum() + 1.0)
        by_item, by_state = (
            np.log((again + RATE_SMOOTHING * mean) / (chances + RATE_SMOOTHING) / mean)
            for chances, again in (items.T[:2], states.T[:2])
        )
        shares = items[:, 2] / max(items[:, 2].sum(), 1e-12) * n_items
        learnt = {"rates": by_item, "states": by_state, "latest": shares}
        return {name: array.astype(np.float32) for name, array in learnt.items()}

    def score(self, model: Model, view: TrainView, out: Scores) -> None:
        """Score the items of the history, and all items by last baskets."""
        past, rates = view.positives, (model["rates"], model["states"], STATE_COUNTS, STATE_AGOS)
        baskets.score_own_items(past.indptr, past.values, view.times.values, *rates, out)
        out[:, -1] = np.log(model["latest"] + np.float32(POPULARITY_FLOOR))

    def parts(self, model: Model) -> tuple[Part, ...]:
        """Return the same scores for bundles."""
        ends = {"counts": STATE_COUNTS.tolist(), "agos": STATE_AGOS.tolist()}
        return (Part("own", {**ends, "floor": POPULARITY_FLOOR}, model),)
