"""FedRecon: federated reconstruction (Singhal et al., 2021), for matrix factorisation.

Shared: item table Q [m, d]. Private: the user vector, reconstructed in every round ("between every
two rounds, this method does not inherit user embedding from the previous round but trains it from
scratch", Zhang et al., 2023, section 6.2); a device keeps the last one for scoring.

A round on a device (Singhal et al., algorithm 1): train the user vector from its initial value with
the received Q frozen, then train the touched rows with the vector frozen; upload their deltas; the
server adds their mean. Deviation from the paper: both steps use all samples of the device, which
the paper splits into a support and a query set.

``dual`` adds the dual personalization of PFedRec (`shared.dual`) after the reconstruction.
"""

from __future__ import annotations

import numpy as np
from pydantic import PositiveFloat

from hushrec.config import Count
from hushrec.data.views import TrainView
from hushrec.methods.base import Between, Fitted, OneOf, SearchSpace, Shared
from hushrec.methods.fedmf import FedMF, FedMFConfig
from hushrec.private import Private
from hushrec.streams import Round
from hushrec.training.samples import Descent, first_vector, train_inner_product


class FedReconConfig(FedMFConfig):
    """Options of FedMF, and of the reconstruction."""

    recon_epochs: Count = 10
    """Epochs of the reconstruction of the user vector."""
    recon_lr: PositiveFloat = 1.0
    """Learning rate of the reconstruction."""


class FedRecon(FedMF):
    """Matrix factorisation with user vectors that are reconstructed in every round."""

    name = "fedrecon"
    Config = FedReconConfig
    config: FedReconConfig

    @property
    def search(self) -> SearchSpace:
        """Search space of FedMF, and of the reconstruction."""
        return {
            **super().search,
            "recon_epochs": OneOf((1, 3, 10, 20)),
            "recon_lr": Between(0.1, 5.0),
        }

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Reconstruct the vectors, then train the rows; upload the deltas of the rows."""
        config, table = self.config, shared["items"]
        first = first_vector(config.d, config.init_std, now.streams)
        vectors = np.repeat(first[None], len(view), axis=0)
        reconstruct = Descent(config.recon_lr, 0.0, two_steps=False)
        longer = config.pace._replace(epochs=config.recon_epochs)
        train_inner_product(view, now, table, vectors, None, longer, reconstruct)
        own, item = config.rates(view.n_items)
        descent = Descent(own if config.dual else 0.0, item, two_steps=config.dual)
        trained, losses = train_inner_product(view, now, table, vectors, None, config.pace, descent)
        return self.fitted(table, {"vector": vectors}, trained, losses)
