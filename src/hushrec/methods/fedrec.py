"""FedRec: federated recommendation with explicit feedback (Lin, Liang, Pan and Ming, 2020).

Matrix factorisation of ratings. Shared: item table V. Private: user vector U_u. To hide which items
were rated, a device adds ``rho`` unrated items per rated item to its samples, with virtual ratings:
the user's mean rating (*user averaging*), or from round ``predict_from`` on the device's own
prediction (*hybrid filling*), which biases the model less.

A round: predictions are r_ui = mean_u + <U_u, V_i>, so that a filled-in mean is a residual of 0; a
device takes SGD steps on the squared error, jointly on user vector and rows; the server adds the
mean change of each row over the devices that sent it, counted in the last column of the upload.

The virtual ratings hide which of the uploaded items were rated, not that all other items were
unrated, and give no formal guarantee. The method predicts ratings and does not model which items
are rated, so its rankings are weak.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat

from hushrec.aggregation import ClientRows, Total, Update
from hushrec.config import Count, Width
from hushrec.data.views import TrainView
from hushrec.kernels.draws import DeviceSamples
from hushrec.methods.base import (
    PRODUCT,
    Array,
    ExportsUser,
    Fitted,
    Method,
    MethodConfig,
    Scores,
    Shared,
    Traits,
    of_one,
)
from hushrec.methods.forms import ItemNetworks, RowNetwork
from hushrec.private import PerClient, Private, PrivateFields
from hushrec.streams import Round, Streams
from hushrec.training.samples import draw_device_samples, score_inner_product
from hushrec.training.tensors import DescentStep, DeviceBatch, Params, Tensor, torch, train_tensors


class FedRecConfig(MethodConfig):
    """Options of FedRec."""

    d: Width = 20
    """Width of user vectors and item rows."""
    lr: PositiveFloat = 0.5
    """Learning rate."""
    batch: Count = 256
    """Samples per step."""
    epochs: Count = 1
    """Epochs per round."""
    rho: Count = 1
    """Unrated items per rated item."""
    fill: Literal["average", "hybrid"] = "hybrid"
    """Virtual ratings: the user's mean, or predictions from round `predict_from` on."""
    predict_from: Count = 10
    """First round in which `hybrid` uses predictions."""
    decay: NonNegativeFloat = 1e-3
    """Weight of the squared vectors in the loss."""
    init_std: PositiveFloat = 0.1
    """Standard deviation of the initial vectors."""


class FedRec(Method, ExportsUser):
    """Federated rating prediction with virtual ratings of unrated items."""

    name = "fedrec"
    Config = FedRecConfig
    config: FedRecConfig
    traits = Traits(unexplained=PRODUCT)

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the item table."""
        c = self.config
        drawn = streams.generator("init/items").standard_normal((view.n_items, c.d))
        return {"items": (c.init_std * drawn).astype(np.float32)}

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep the user vector; all devices start from one draw."""
        c = self.config
        drawn = streams.generator("init/vector").standard_normal(c.d)
        return {"vector": PerClient((c.init_std * drawn).astype(np.float32))}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Add virtual ratings and train; upload changed rows with a count."""
        c = self.config
        vectors = np.asarray(private["vector"])
        params, tables, losses = train_tensors(
            {"vector": vectors},
            {"items": shared["items"]},
            self._loss,
            [DescentStep({"vector": c.lr, "items": c.lr})],
            self.samples(shared["items"], vectors, view, now),
            c.batch,
            view.n_items,
        )
        rows = tables["items"]
        changed = rows.rows - shared["items"][rows.ids]
        counted = np.concatenate([changed, np.ones((len(changed), 1), np.float32)], 1)
        update = Update(len(view), {"items": ClientRows(rows.indptr, rows.ids, counted)})
        return Fitted(update, {"vector": params["vector"]}, losses)

    def samples(self, table: Array, vectors: Array, view: TrainView, now: Round) -> DeviceSamples:
        """Return each device's residual ratings, real and virtual, in training order."""
        c = self.config
        means = np.repeat(mean_ratings(view), view.positives.lengths)

        def residuals(drawn: DeviceSamples) -> Array:
            owner = np.repeat(np.arange(len(view)), np.diff(drawn.indptr))
            virtual = drawn.labels == 0
            out = np.zeros(len(drawn.items), np.float32)
            out[~virtual] = view.values.values - means
            if c.fill == "hybrid" and now.number >= c.predict_from:
                out[virtual] = (vectors[owner[virtual]] * table[drawn.items[virtual]]).sum(1)
            return out

        return draw_device_samples(view, c.rho, c.epochs, now, relabel=residuals)

    def _loss(self, params: Params, rows: Params, batch: DeviceBatch) -> Tensor:
        vector, items = params["vector"][:, None], rows["items"]
        predicted, decay = (vector * items).sum(-1), self.config.decay
        errors = (predicted - batch.labels) ** 2 + decay * (vector**2 + items**2).sum(-1)
        return torch.sum(errors * batch.weights, 1)

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Add the mean change of each row over the devices that sent it."""
        summed = total.table("items", len(shared["items"]), self.config.d + 1)
        # Under noise the count is noisy and may be below 1.
        mean = summed[:, :-1] / np.maximum(1, summed[:, -1:])
        return {"items": (shared["items"] + mean).astype(np.float32)}

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Predict the residual ratings; a user's mean does not change the order of its items."""
        return score_inner_product(shared["items"], np.asarray(private["vector"]))

    def user_form(self, shared: Shared, private: Private, history: TrainView) -> ItemNetworks:
        """Return the item table and the user's vector."""
        return ItemNetworks([RowNetwork.of(shared["items"], of_one(private))])


def mean_ratings(view: TrainView) -> Array:
    """Return each user's mean rating."""
    sums = np.add.reduceat(np.append(view.values.values, 0), view.values.indptr[:-1])
    lengths = view.values.lengths
    return np.where(lengths > 0, sums / np.maximum(lengths, 1), 0).astype(np.float32)
