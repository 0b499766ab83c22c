"""FedRecon: federated reconstruction (Singhal et al., 2021), for matrix factorisation.

Shared: item table Q [m, d]. Private: nothing that a round inherits. As measured by Zhang et al.,
2023, section 6.2: "between every two rounds, this method does not inherit user embedding from the
previous round but trains it from scratch".

A round on a device (Singhal et al., algorithm 1): reconstruct the user vector from its first draw
with the received Q frozen; then, with the vector frozen, steps on the touched rows; upload their
deltas; the server adds the mean. Both parts see all the device's samples. The device keeps the
vector it reconstructed last, to score with.

``dual`` adds the dual personalization of PFedRec (Zhang et al., 2023, table 3): after the
reconstruction each batch takes a step on the vector, then, with the new one, on the rows; and a
device scores with its own rows on top of the table it received.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from hushrec.aggregation import Update
from hushrec.data.views import TrainView
from hushrec.methods.base import Between, Fitted, OneOf, Private, SearchSpace, Shared
from hushrec.methods.fedmf import FedMF, FedMFConfig
from hushrec.methods.shared.dual import kept_rows
from hushrec.streams import Round
from hushrec.training.inner_product import Descent, deltas, first_vector, train_inner_product


class FedReconConfig(FedMFConfig):
    """Options of FedMF, and how long a vector is reconstructed."""

    recon_epochs: Annotated[int, Field(ge=1)] = 10
    """Passes over the client's samples that reconstruct its vector, before those on the rows."""
    recon_lr: Annotated[float, Field(gt=0)] = 1.0
    """Rate of the reconstruction."""


class FedRecon(FedMF):
    """Matrix factorisation whose user vectors are reconstructed in every round."""

    name = "fedrecon"
    Config = FedReconConfig
    config: FedReconConfig

    @property
    def search(self) -> SearchSpace:
        """Look for how long to reconstruct, beside FedMF's options."""
        return {
            **super().search,
            "recon_epochs": OneOf((1, 3, 10, 20)),
            "recon_lr": Between(0.1, 5.0),
        }

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Reconstruct the vectors, then train the rows; upload the rows' deltas."""
        config, table = self.config, shared["items"]
        first = first_vector(config.d, config.init_std, now.streams)
        vectors = np.repeat(first[None], len(view), axis=0)
        reconstruct = Descent(config.recon_lr, 0.0, two_steps=False)
        longer = config.pace._replace(epochs=config.recon_epochs)
        train_inner_product(view, now, table, vectors, None, longer, reconstruct)
        own, item = config.rates(view.n_items)
        descent = Descent(own if config.dual else 0.0, item, two_steps=config.dual)
        trained, losses = train_inner_product(view, now, table, vectors, None, config.pace, descent)
        update = Update(len(view), rows={"items": deltas(trained, table)})
        rows = {"rows": kept_rows(trained, table, config.own_share)} if config.dual else {}
        return Fitted(update, {"vector": vectors, **rows}, losses)
