"""Matrix factorisation on pooled data: a baseline that is neither federated nor private.

Binary cross-entropy with sampled negatives, one SGD step per sample on user vector and item row, L2
weight decay (Koren et al., 2009, with the implicit loss of He et al., 2017).
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec.aggregation import Total, Update
from hushrec.config import Width
from hushrec.data.views import TrainView
from hushrec.io.memory import require_memory
from hushrec.kernels.inner_product import fit_pooled
from hushrec.methods.base import (
    Between,
    Fitted,
    Method,
    MethodConfig,
    PerClient,
    Private,
    PrivateFields,
    SearchSpace,
    Shared,
    Traits,
    Tunable,
)
from hushrec.streams import Round, Streams
from hushrec.training.inner_product import first_vector, score_inner_product
from hushrec.training.samples import PURPOSE, client_data


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
