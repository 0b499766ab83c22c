"""Baselines: popularity, recent popularity, own frequency, negative counter, local training,
pooled factorisation.

Recent popularity is that of the last weeks (Ji et al. 2020, "A re-visit of the popularity baseline
in recommender systems", section 3): with c_b(j) the number of times that item j was touched in the
b-th part of the time that training spans,

    score(j) = sum over the parts b of 2^(-(now - b) / half_life) c_b(j),    0 <= now - b < window.

Now is the time of the user's last interaction, or the end of the training data for everybody. The
first round counts. Every round tries another choice of window, half-life and now, and the
validation items select the round, as everywhere.

The negative counter detects dishonest evaluation. It learns nothing: every device counts how often
each item was drawn as one of its negatives and ranks the least drawn first. With honest negatives
it must score at chance. A sampler that avoids the held-out item, as published code does, never
draws it, and the counter finds it.

Local-only is PFedRec without the federation. Under the honest protocol it knows nothing about items
that its user never touched, so it must score at chance on them. Under the published protocol it
scores near 1, which proves that those figures are the leak.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat

from hushrec.aggregation import ClientRows, Total, Update
from hushrec.config import Count, Width
from hushrec.data.views import Ragged, TrainView
from hushrec.io import require_memory
from hushrec.kernels.inner_product import fit_pooled
from hushrec.methods import base, forms
from hushrec.methods.base import (
    IDLE,
    Fitted,
    Method,
    MethodConfig,
    Phase,
    Reason,
    Scores,
    Shared,
    Traits,
)
from hushrec.methods.shared.options import InnerProductConfig, Negatives
from hushrec.private import PerClient, PerClientTable, Private, PrivateFields
from hushrec.streams import Round, Streams
from hushrec.training import samples as training


def distinct_items(positives: Ragged) -> Ragged:
    """Return each client's items once, ascending."""
    return positives.union(Ragged.empty(len(positives)))


def where(items: Ragged, kept: NDArray[np.bool_]) -> Ragged:
    """Return each client's items that are kept, in their order."""
    return Ragged(np.concatenate([[0], np.cumsum(kept)])[items.indptr], items.values[kept])


class Popularity(Method, base.Explains, base.Exports, base.ItemPopularity):
    """Recommend what most users touched: the baseline to beat."""

    name = "popularity"
    traits = Traits(rounds=1, learns=False)

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Start from zero counts."""
        return {"counts": np.zeros(view.n_items, np.float32)}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Upload a one for every item of the client."""
        touched = distinct_items(view.positives)
        ones = np.ones((len(touched.values), 1), np.float32)
        uploads = ClientRows(touched.indptr, touched.values, ones)
        return Fitted(Update(len(view), rows={"counts": uploads}), {})

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Replace the counts by this round's."""
        counts = total.table("counts", len(shared["counts"]), 1)
        return {"counts": counts[:, 0].astype(np.float32)}

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Score by count."""
        return np.tile(shared["counts"], (len(history), 1))

    def contributions(
        self, shared: Shared, private: Private, history: TrainView, items: NDArray[np.int32]
    ) -> list[list[Reason]]:
        """Say that an item is popular, which is all that its score says."""
        return [[base.POPULAR if item >= 0 else Reason() for item in listed] for listed in items]

    def item_popularity(self, shared: Shared) -> Scores:
        """Return the counts."""
        return np.asarray(shared["counts"])

    def device_form(self, shared: Shared, view: TrainView) -> forms.ItemCounts:
        """Return the counts."""
        return forms.ItemCounts(shared["counts"])


HAD_BEFORE = Reason("had before")


class PersonalFrequency(Popularity):
    """Recommend what the user had most often, then what most users had: the baseline of baskets."""

    name = "personal-frequency"

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Score by the user's own count; popularity, below one, decides between equal counts."""
        scores = np.tile(self._below_one(shared), (len(history), 1))
        past = history.positives
        np.add.at(scores, (np.repeat(np.arange(len(past)), past.lengths), past.values), 1)
        return scores

    def contributions(
        self, shared: Shared, private: Private, history: TrainView, items: NDArray[np.int32]
    ) -> list[list[Reason]]:
        """Compare the user's own count, at least one, with popularity, which is below one."""
        popular = super().contributions(shared, private, history, items)
        own = [set(history.positives[client].tolist()) for client in range(len(items))]
        return [
            [HAD_BEFORE if item in mine else reason for item, reason in zip(*row, strict=True)]
            for mine, *row in zip(own, items.tolist(), popular, strict=True)
        ]

    def _below_one(self, shared: Shared) -> Scores:
        counts = shared["counts"]
        return np.asarray(counts / (counts.max(initial=0) + np.float32(1)))

    def device_form(self, shared: Shared, view: TrainView) -> forms.ItemCounts:
        """Return popularity, to which every occurrence of an item adds one."""
        return forms.ItemCounts(self._below_one(shared), own=1.0)


WINDOWS = HALF_LIVES = (1 / 128, 1 / 32, 1 / 8, 1 / 2, 4.0)
NOWS: tuple[Literal["user", "end"], ...] = ("user", "end")
"""What is tried where an option leaves it open; 4 times the whole span is nearly no limit."""
TIME_STEP = 2.0**20
"""Times are divided by it in the exact sums, whose numbers stay below 2^30."""
SpanShare = Annotated[float, Field(gt=0)]
"""A length of time, as a share of the time that training spans."""
RECENTLY_POPULAR = Reason("popular lately")


class RecentPopularityConfig(MethodConfig):
    """Options of recent popularity; lengths of time are shares of what the training data spans."""

    window: SpanShare | None = None
    """How far back interactions count.  [1/128, 1/32, 1/8, 1/2 or 4, chosen on validation items]"""
    half_life: SpanShare | None = None
    """After how long an interaction counts half.  [as window]"""
    now: Literal["user", "end"] | None = None
    """When a user is scored: at the user's last interaction, or at the end of the training data.
    [chosen on validation items]"""
    parts: Count = 256
    """Equal parts of the time that training spans, in which interactions are counted."""


class RecentPopularity(Method, base.Explains, base.ExportsUser, base.ItemPopularity):
    """What was touched most lately; pooled: the server holds everybody's data."""

    name = "recent-popularity"
    Config = RecentPopularityConfig
    config: RecentPopularityConfig
    traits = Traits(rounds=1, learns=False, pooled=True, reads_times=True)

    def choices(self) -> list[tuple[float, float, bool]]:
        """Return windows, half-lives and whether now is the user's, in the order of trial."""
        window, half_life, now = self.config.window, self.config.half_life, self.config.now
        windows = WINDOWS if window is None else [window]
        half_lives = HALF_LIVES if half_life is None else [half_life]
        nows = [each == "user" for each in (NOWS if now is None else [now])]
        return list(product(windows, half_lives, nows))

    @property
    def phases(self) -> tuple[Phase, ...]:
        """One round counts and tries the first choice; every other choice takes one round."""
        sends, others = "everybody's items and times, counted", len(self.choices()) - 1
        count = Phase("count", 1, sends, self.fit, self._counted)
        idle = Phase("select", others, IDLE.uploads, self._fit_nothing, self._next_choice)
        return (count, replace(idle, download=IDLE.download)) if others else (count,)

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Start from zero counts."""
        shape = self.config.parts, view.n_items
        need = 4 * 8 * shape[0] * shape[1]
        require_memory(need, f"counts in parts={shape[0]} parts of the time", "fewer parts")
        return {
            "counts": np.zeros(shape, np.float32),
            "popular": np.zeros(shape, np.float32),
            "span": np.array([0.0, 1.0]),
            "choice": np.array(self.choices()[0]),
        }

    def serving(self, shared: Shared) -> Shared:
        """Leave out the counts, from which popularity was worked out."""
        return {name: array for name, array in shared.items() if name != "counts"}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Count items by time."""
        times = view.times.values.astype(np.float64)
        first, last = (times.min(), times.max()) if len(times) else (0.0, 0.0)
        span = np.array([first, max(last - first, 1.0)])
        part = self._part_of(times, span)
        shape = shared["counts"].shape
        counts = np.bincount(part * view.n_items + view.positives.values, minlength=np.prod(shape))
        dense = {"counts": counts.reshape(1, *shape), "span": span[None] / TIME_STEP}
        return Fitted(Update(1, dense=dense), {})

    def _part_of(self, times: NDArray[np.float64], span: base.Array) -> NDArray[np.int64]:
        """Return the part of the training time that each time falls in, or the nearest one."""
        parts = self.config.parts
        part = np.floor((times - span[0]) / span[1] * parts)
        return np.asarray(np.clip(part, 0, parts - 1), np.int64)

    def _fit_nothing(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        return Fitted(Update(1), {})

    def _counted(self, shared: Shared, total: Total, number: int) -> Shared:
        counts = total.dense["counts"].astype(np.float32)
        span = total.dense["span"] * TIME_STEP
        return self._next_choice({**shared, "counts": counts, "span": span}, total, number)

    def _next_choice(self, shared: Shared, total: Total, number: int) -> Shared:
        window, half_life, of_user = self.choices()[number - 1]
        counts, parts = shared["counts"].astype(np.float64), self.config.parts
        popular = np.zeros_like(counts)
        for lag in range(min(parts, max(1, round(window * parts)))):
            popular[lag:] += 2.0 ** (-lag / (half_life * parts)) * counts[: parts - lag]
        choice = np.array([window, half_life, of_user])
        return {**shared, "popular": popular.astype(np.float32), "choice": choice}

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Score by the popularity at the user's time, or at the end."""
        part = np.full(len(history), self.config.parts - 1)
        some = history.times.lengths > 0
        if shared["choice"][2]:
            latest = history.times.values[history.times.indptr[1:][some] - 1]
            part[some] = self._part_of(latest.astype(np.float64), shared["span"])
        return np.asarray(shared["popular"][part])

    def contributions(
        self, shared: Shared, private: Private, history: TrainView, items: NDArray[np.int32]
    ) -> list[list[Reason]]:
        """Say that an item is popular lately, which is all that its score says."""
        return [[RECENTLY_POPULAR if i >= 0 else Reason() for i in listed] for listed in items]

    def item_popularity(self, shared: Shared) -> Scores:
        """Return the popularity at the end of the training data."""
        return np.asarray(shared["popular"][-1])

    def user_form(self, shared: Shared, private: Private, history: TrainView) -> forms.ItemCounts:
        """Return the popularity at the user's time."""
        return forms.ItemCounts(self.score(shared, private, history)[0])


class SharesNothing(Method):
    """Base of methods without shared parameters."""

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Share nothing."""
        return {}

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Change nothing."""
        return shared


class NegativeCounterConfig(MethodConfig):
    """How many negatives are drawn."""

    negatives: Negatives = 4
    """Drawn per positive and round."""


class NegativeCounter(SharesNothing, base.ExportsUser):
    """Rank the items that were drawn least often as negatives."""

    name = "negative-counter"
    Config = NegativeCounterConfig
    config: NegativeCounterConfig
    traits = Traits(
        learns=False,
        repeats=False,
        unexplained="its score counts random draws, which say nothing about the user",
    )

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep a count per item on the device."""
        return {"drawn": PerClient(np.zeros(view.n_items, np.float32))}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Draw this round's negatives and count them."""
        before = np.asarray(private["drawn"])
        negatives = training.draw_negatives(view, self.config.negatives, now)
        client = np.repeat(np.arange(len(view)), negatives.lengths)
        cell = client * view.n_items + negatives.values
        drawn = np.bincount(cell, minlength=before.size).reshape(before.shape)
        return Fitted(Update(len(view)), {"drawn": before + drawn.astype(np.float32)})

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Score by how rarely an item was drawn."""
        return -np.asarray(private["drawn"])

    def user_form(self, shared: Shared, private: Private, history: TrainView) -> forms.ItemCounts:
        """Return the user's counts."""
        return forms.ItemCounts(-np.asarray(private["drawn"])[0])


class LocalOnly(SharesNothing, base.ExportsUser):
    """A private item table and score function on every device; nothing is uploaded."""

    name = "local-only"
    Config = InnerProductConfig
    config: InnerProductConfig
    traits = Traits(unexplained=base.PRODUCT)

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep a whole table and a score function; all devices start from the same draw."""
        vector, bias = training.first_score_function(self.config.d, streams)
        table = training.initial_table(self.config.d, self.config.init_std, view.n_items, streams)
        own = {"vector": PerClient(vector), "bias": PerClient(bias)}
        return {"table": PerClientTable(table), **own}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train the own table and score function."""
        vectors, biases = np.array(private["vector"]), np.array(private["bias"])
        descent = training.Descent(*self.config.rates(view.n_items), two_steps=True)
        rows, losses = training.train_inner_product(
            view, now, np.asarray(private["table"]), vectors, biases, self.config.pace, descent
        )
        kept: Private = {"table": rows, "vector": vectors, "bias": biases}
        return Fitted(Update(len(view)), kept, losses)

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Score with the own table."""
        tables, vectors = np.asarray(private["table"]), np.asarray(private["vector"])
        return training.score_inner_product(tables, vectors, np.asarray(private["bias"]))

    def user_form(self, shared: Shared, private: Private, history: TrainView) -> forms.ItemNetworks:
        """Return the own table and score function."""
        own = base.of_one(private)
        return forms.ItemNetworks([forms.RowNetwork.of(own["table"], own)])


class CentralMFConfig(MethodConfig):
    """Options of centralised matrix factorisation; a round is one epoch."""

    d: Width = 32
    """Width of user vectors and item rows."""
    lr: PositiveFloat = 0.05
    """Learning rate of vectors and rows."""
    decay: NonNegativeFloat = 0.01
    """L2 decay of vectors and rows."""
    negatives: Negatives = 4
    """Negatives per positive, drawn again in every epoch."""
    init_std: PositiveFloat = 0.1
    """Standard deviation of the initial vectors and rows."""


class CentralMF(Method, base.ExportsUser, base.Tunable):
    """Matrix factorisation on pooled data."""

    name = "central-mf"
    Config = CentralMFConfig
    config: CentralMFConfig
    traits = Traits(pooled=True, unexplained=base.PRODUCT)
    search: ClassVar[base.SearchSpace] = {
        "lr": base.Between(0.005, 0.2),
        "decay": base.Between(1e-4, 0.1),
        "init_std": base.Between(0.01, 1.0),
    }

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the item table."""
        d, std = self.config.d, self.config.init_std
        return {"items": training.initial_table(d, std, view.n_items, streams)}

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep one vector per user."""
        d, std = self.config.d, self.config.init_std
        return {"vector": PerClient(training.first_vector(d, std, streams))}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train for one epoch on pooled samples in random order."""
        table, vectors = shared["items"].copy(), np.array(private["vector"])
        config, key = self.config, now.key(training.PURPOSE)
        rates = np.float32(config.lr), np.float32(config.decay)
        data = training.client_data(view)
        loss = fit_pooled(key, data, table, vectors, config.negatives, *rates)
        update = Update(1, dense={"items": (table - shared["items"])[None]})
        return Fitted(update, {"vector": vectors}, np.full(len(view), loss))

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Add the changes of the parameters."""
        return {
            name: (array + total.dense.get(name, 0.0)).astype(np.float32)
            for name, array in shared.items()
        }

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Score by the inner product."""
        return training.score_inner_product(shared["items"], np.asarray(private["vector"]))

    def user_form(self, shared: Shared, private: Private, history: TrainView) -> forms.ItemNetworks:
        """Return the item table and the user's vector."""
        return forms.ItemNetworks([forms.RowNetwork.of(shared["items"], base.of_one(private))])
