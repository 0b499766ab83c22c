"""FedRec: federated recommendation with explicit feedback (Lin, Liang, Pan and Ming, 2020).

Matrix factorisation of ratings. Shared: item table V. Private: user vector U_u. So that the rows of
an upload do not name what was rated, a device adds unrated items, ``rho`` for each rated one, with
made-up ratings. *User averaging* takes the user's mean rating. *Hybrid filling* does so at first
and takes the device's own prediction from round ``predict_from`` on, which pulls less at the model.

Predictions are r_ui = mean_u + <U_u, V_i>, so that a filled-in mean is a residual of zero. A device
takes its steps on the squared error, user vector and rows together; the server adds to each row the
mean change over the devices that sent it, whose number each upload's last column counts.

The fill hides which of the uploaded items were rated, not that all others were not; it is no
formal guarantee. Rating prediction is not ranking: what people rate is itself the signal, and this
method looks away from it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec.aggregation import ClientRows, Total, Update
from hushrec.config import Width
from hushrec.data.views import TrainView
from hushrec.methods.base import (
    Fitted,
    Method,
    MethodConfig,
    PerClient,
    Private,
    PrivateFields,
    Shared,
)
from hushrec.streams import Round, Streams
from hushrec.training.inner_product import score_inner_product
from hushrec.training.samples import DeviceSamples, draw_unshuffled
from hushrec.training.tensors import DescentStep, DeviceBatch, Params, Tensor, torch, train_tensors


class FedRecConfig(MethodConfig):
    """Options of FedRec."""

    d: Width = 20
    """Embedding dimensions."""
    lr: Annotated[float, Field(gt=0)] = 0.5
    """Rate of a step."""
    batch: Annotated[int, Field(ge=1)] = 256
    """Samples per step."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over a client's samples in a round."""
    rho: Annotated[int, Field(ge=1)] = 1
    """Unrated items that hide each rated one."""
    fill: Literal["average", "hybrid"] = "hybrid"
    """What they are rated with."""
    predict_from: Annotated[int, Field(ge=1)] = 10
    """The first round in which `hybrid` fills in predictions."""
    decay: Annotated[float, Field(ge=0)] = 1e-3
    """Weight of the squared vectors in the loss."""
    init_std: Annotated[float, Field(gt=0)] = 0.1
    """Deviation of the first vectors."""


class FedRec(Method):
    """Federated rating prediction, with made-up ratings among the real ones."""

    name = "fedrec"
    Config = FedRecConfig
    config: FedRecConfig

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw V."""
        c = self.config
        drawn = streams.generator("init/items").standard_normal((view.n_items, c.d))
        return {"items": (c.init_std * drawn).astype(np.float32)}

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep the user vector; all devices start from one."""
        c = self.config
        drawn = streams.generator("init/vector").standard_normal(c.d)
        return {"vector": PerClient((c.init_std * drawn).astype(np.float32))}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Fill in, and take the steps of a round."""
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

    def samples(
        self, table: NDArray[np.float32], vectors: NDArray[np.float32], view: TrainView, now: Round
    ) -> DeviceSamples:
        """Return each device's residual ratings, real and made up, in the order of its steps."""
        c = self.config
        drawn = draw_unshuffled(view, c.rho, now)
        owner = np.repeat(np.arange(len(view)), np.diff(drawn.indptr))
        made_up = drawn.labels == 0
        residuals = np.zeros(len(drawn.items), np.float32)
        means = np.repeat(mean_ratings(view), view.positives.lengths)
        residuals[~made_up] = view.values.values - means
        if c.fill == "hybrid" and now.number >= c.predict_from:
            predicted = (vectors[owner[made_up]] * table[drawn.items[made_up]]).sum(1)
            residuals[made_up] = predicted
        return replace(drawn, labels=residuals).in_epochs(c.epochs)

    def _loss(self, params: Params, rows: Params, batch: DeviceBatch) -> Tensor:
        vector, items = params["vector"][:, None], rows["items"]
        predicted = (vector * items).sum(-1)
        decay = self.config.decay
        errors = (predicted - batch.labels) ** 2 + decay * (vector**2 + items**2).sum(-1)
        return torch.sum(errors * batch.weights, 1)

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Add to every row the mean change over the devices that sent it."""
        ids, summed = total.rows["items"]
        items = shared["items"].astype(np.float64)
        # Under noise the count is noisy too, and may be anything.
        items[ids] += summed[:, :-1] / np.maximum(1, summed[:, -1:])
        return {"items": items.astype(np.float32)}

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Predict the residual ratings; a user's mean does not change the order of its items."""
        return score_inner_product(shared["items"], np.asarray(private["vector"]))


def mean_ratings(view: TrainView) -> NDArray[np.float32]:
    """Return each user's mean rating."""
    sums = np.add.reduceat(np.append(view.values.values, 0), view.values.indptr[:-1])
    lengths = view.values.lengths
    return np.where(lengths > 0, sums / np.maximum(lengths, 1), 0).astype(np.float32)
