"""Popularity: the same list for everybody, by how many users touched an item.

The counts are a sum over users, so one round of uploads gives them; nothing is private.

The negative counter: the smoke alarm of honest evaluation.

It learns nothing. Every device counts how often each item was drawn as one of its negatives and
ranks the least drawn first. With honest negatives every untouched item is drawn alike, so it must
score at chance. If the sampler knows the held-out item and avoids it, as published code does, the
held-out item is the one that was never drawn, and the counter finds it.

Local only: PFedRec with the federation switched off.

Every device keeps its own item table between rounds and trains it alone. Under the honest protocol
it can know nothing about items its user never touched, so it must score at chance on them; under
the published protocol it scores near 1, which is the proof that those figures are the leak.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec.aggregation import ClientRows, Total, Update
from hushrec.config import Width
from hushrec.data.views import Ragged, TrainView
from hushrec.io import require_memory
from hushrec.kernels import ragged
from hushrec.kernels.inner_product import fit_pooled
from hushrec.methods.base import (
    Between,
    Fitted,
    Method,
    MethodConfig,
    PerClient,
    PerClientTable,
    Private,
    PrivateFields,
    SearchSpace,
    Shared,
    Traits,
    Tunable,
)
from hushrec.methods.shared.options import InnerProductConfig
from hushrec.streams import Round, Streams
from hushrec.training.samples import (
    PURPOSE,
    Descent,
    client_data,
    draw_negatives,
    first_score_function,
    first_vector,
    initial_table,
    score_inner_product,
    score_own_tables,
    train_inner_product,
)


def distinct_items(positives: Ragged) -> Ragged:
    """Return each client's items once, ascending."""
    none = Ragged.empty(len(positives))
    pair = (positives.indptr, positives.values, none.indptr, none.values)
    return Ragged(*ragged.sorted_union(*pair))


class Popularity(Method):
    """Recommend what most users touched: the yardstick to beat."""

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
        counts = np.zeros_like(shared["counts"])
        if "counts" in total.rows:
            ids, summed = total.rows["counts"]
            counts[ids] = summed[:, 0]
        return {"counts": counts}

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Score by count."""
        return np.tile(shared["counts"], (len(history), 1))


class NegativeCounterConfig(MethodConfig):
    """How many negatives are drawn."""

    negatives: Annotated[int, Field(ge=1, le=1000)] = 4
    """Drawn per positive and round."""


class NegativeCounter(Method):
    """Rank the items that were drawn least often as negatives."""

    name = "negative-counter"
    Config = NegativeCounterConfig
    config: NegativeCounterConfig
    traits = Traits(learns=False)

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Share nothing."""
        return {}

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep a count per item on the device."""
        return {"drawn": PerClient(np.zeros(view.n_items, np.float32))}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Draw this round's negatives and count them."""
        before = np.asarray(private["drawn"])
        negatives = draw_negatives(view, self.config.negatives, now)
        client = np.repeat(np.arange(len(view)), negatives.lengths)
        cell = client * view.n_items + negatives.values
        drawn = np.bincount(cell, minlength=before.size).reshape(before.shape)
        return Fitted(Update(len(view)), {"drawn": before + drawn.astype(np.float32)})

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Change nothing."""
        return shared

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Score by how rarely an item was drawn."""
        return -np.asarray(private["drawn"])


class LocalOnly(Method):
    """A private item table and score function on every device; nothing is uploaded."""

    name = "local-only"
    Config = InnerProductConfig
    config: InnerProductConfig

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Share nothing."""
        return {}

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep a whole table and a score function; all devices start from the same draw."""
        vector, bias = first_score_function(self.config.d, streams)
        table = initial_table(self.config.d, self.config.init_std, view.n_items, streams)
        return {
            "table": PerClientTable(table),
            "vector": PerClient(vector),
            "bias": PerClient(bias),
        }

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train the own table and score function."""
        vectors, biases = np.array(private["vector"]), np.array(private["bias"])
        descent = Descent(*self.config.rates(view.n_items), two_steps=True)
        rows, losses = train_inner_product(
            view, now, np.asarray(private["table"]), vectors, biases, self.config.pace, descent
        )
        kept: Private = {"table": rows, "vector": vectors, "bias": biases}
        return Fitted(Update(len(view)), kept, losses)

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Change nothing."""
        return shared

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Score with the own table."""
        tables, vectors = np.asarray(private["table"]), np.asarray(private["vector"])
        return score_own_tables(tables, vectors, np.asarray(private["bias"]))


class CentralMFConfig(MethodConfig):
    """Options of centralised matrix factorisation; a round is one epoch."""

    d: Width = 32
    """Width of user vectors and item rows."""
    lr: Annotated[float, Field(gt=0)] = 0.05
    """Learning rate of vectors and rows."""
    decay: Annotated[float, Field(ge=0)] = 0.01
    """L2 decay of vectors and rows."""
    negatives: Annotated[int, Field(ge=1, le=1000)] = 4
    """Negatives per positive, drawn again in every epoch."""
    init_std: Annotated[float, Field(gt=0)] = 0.1
    """Standard deviation of the initial vectors and rows."""


class CentralMF(Method, Tunable):
    """Matrix factorisation on pooled data."""

    name = "central-mf"
    Config = CentralMFConfig
    config: CentralMFConfig
    traits = Traits(pooled=True)
    search: ClassVar[SearchSpace] = {
        "lr": Between(0.005, 0.2),
        "decay": Between(1e-4, 0.1),
        "init_std": Between(0.01, 1.0),
    }

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the item table."""
        shape = (view.n_items, self.config.d)
        need = 24 * view.n_items * self.config.d
        require_memory(need, f"an item table of width d={self.config.d}", "a smaller d")
        drawn = streams.generator("init/items").standard_normal(shape, np.float32)
        return {"items": drawn * np.float32(self.config.init_std)}

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep one vector per user."""
        return {"vector": PerClient(first_vector(self.config.d, self.config.init_std, streams))}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train for one epoch on pooled samples in random order."""
        table, vectors = shared["items"].copy(), np.array(private["vector"])
        loss = fit_pooled(
            now.key(PURPOSE),
            client_data(view),
            table,
            vectors,
            self.config.negatives,
            np.float32(self.config.lr),
            np.float32(self.config.decay),
        )
        update = Update(1, dense={"items": (table - shared["items"])[None]})
        return Fitted(update, {"vector": vectors}, np.full(len(view), loss))

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Add the change of the table."""
        change = total.dense["items"] if "items" in total.dense else np.float64(0)
        return {"items": (shared["items"] + change).astype(np.float32)}

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Score by the inner product."""
        return score_inner_product(shared["items"], np.asarray(private["vector"]))
