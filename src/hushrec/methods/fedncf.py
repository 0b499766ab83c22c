"""FedNCF: federated neural collaborative filtering (Perifanis and Efraimidis, 2022).

As measured by Zhang et al., 2023, section 6.2. Shared: item table Q [m, d] and score function f, an
MLP with one output. Private: user vector p_u [d]. The score is f([p_u, q_i]) (He et al., 2017, the
MLP branch).

A round on a device: SGD on the binary cross-entropy of positives and sampled negatives, one joint
step per batch on p_u, f and the touched rows; the device uploads the deltas of f and of the rows;
the server adds their means.

``dual`` adds the dual personalization of PFedRec (`shared.dual`); f is then private.
"""

from __future__ import annotations

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat

from hushrec.aggregation import Total
from hushrec.config import Width
from hushrec.data.views import TrainView
from hushrec.methods.base import NETWORK, Between, Fitted, Scores, SearchSpace, Shared, Traits
from hushrec.methods.fedmf import FedMFConfig
from hushrec.methods.shared.dual import SharedTable, without_rows
from hushrec.private import PerClient, Private, PrivateFields
from hushrec.streams import Round, Streams
from hushrec.training import tensors
from hushrec.training.networks import initial_row_network, score_row_networks, train_row_networks
from hushrec.training.samples import Descent, first_vector


class FedNCFConfig(FedMFConfig):
    """Options of FedMF, and of the network; default rates are those of the preset `paper`."""

    lr: PositiveFloat = 0.7
    """Learning rate of the network."""
    item_rate: NonNegativeFloat = 20.0
    """Learning rate of item rows: lr * (number of items) * item_rate."""
    init_std: PositiveFloat = 0.3
    """Standard deviation of the initial item rows and user vector."""
    hidden: tuple[Width, ...] = (32, 16, 8)
    """Widths of the hidden layers, between 2d inputs and one output."""
    vector_rate: PositiveFloat = 20.0
    """Learning rate of the user vector: lr * vector_rate. An untrained network passes small
    gradients to its inputs, so useful rates are large."""


class FedNCF(SharedTable):
    """An MLP over user vector and item row; table and MLP are shared, vectors private."""

    name = "fedncf"
    Config = FedNCFConfig
    config: FedNCFConfig
    traits = Traits(unexplained=NETWORK)

    @property
    def search(self) -> SearchSpace:
        """Search space of the rates, the vector's included."""
        return {**super().search, "vector_rate": Between(1.0, 100.0)}

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the item table, and the network if it is shared."""
        network = {} if self.config.dual else self._network(streams)
        return {**super().init(view, streams), **network}

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep the user vector; with ``dual`` also the network and own rows."""
        config = self.config
        vector = PerClient(first_vector(config.d, config.init_std, streams))
        if not config.dual:
            return {"vector": vector}
        network = {name: PerClient(array) for name, array in self._network(streams).items()}
        return {"vector": vector, **self.own_rows(view), **network}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train vectors, networks and rows; upload the deltas of shared parameters."""
        config, table = self.config, shared["items"]
        received = {name: shared[name] for name in shared if name.startswith("layer")}
        params, rows, losses = train_row_networks(
            view,
            now,
            table,
            {**without_rows(private), **tensors.repeat(received, len(view))},
            config.pace,
            Descent(*config.rates(view.n_items), two_steps=config.dual),
            config.vector_rate,
        )
        moved = {name: params.pop(name) - array for name, array in received.items()}
        return self.fitted(table, params, rows, losses, moved)

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Add the mean deltas."""
        network = {
            name: (shared[name] + summed / total.clients).astype(np.float32)
            for name, summed in total.dense.items()
        }
        return {**shared, **super().apply(shared, total), **network}

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Score with the new parameters, or, with ``dual``, with own network and own rows."""
        if self.config.dual:
            return score_row_networks(without_rows(private), shared["received"], private["rows"])
        network = {name: shared[name] for name in shared if name.startswith("layer")}
        params = {**without_rows(private), **tensors.repeat(network, len(history))}
        return score_row_networks(params, shared["items"])

    def _network(self, streams: Streams) -> tensors.Arrays:
        return initial_row_network(2 * self.config.d, self.config.hidden, streams)
