"""FOFL-SELF: a simple and efficient federated recommender system (Jalalirad et al., 2019).

Reptile, as PrivRec, with ids in place of features. Shared: item table [m, d], an initial user
vector, and PrivRec's network over both. Private: nothing between rounds; before scoring, a device
adapts a copy of the shared parameters.

A round: each device trains a copy, without a proximal term, and uploads the differences of the
network and of the rows that it touched, so the upload reveals its items. The server adds
``server_rate`` times the mean difference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec.aggregation import ClientRows, Total, Update
from hushrec.data.views import TrainView
from hushrec.kernels.feature_networks import ProximalDescent
from hushrec.methods.base import Fitted, Method, Private, Shared, Traits
from hushrec.methods.privrec import FEATURE_STACK
from hushrec.methods.shared.options import FeatureNetworkConfig
from hushrec.streams import Round, Streams
from hushrec.training import tensors
from hushrec.training.inner_product import apply_mean, deltas, initial_table
from hushrec.training.networks import FeatureNetwork, train_feature_networks
from hushrec.training.samples import DeviceSamples, draw_device_samples
from hushrec.training.tensors import torch


class FOFLSelfConfig(FeatureNetworkConfig):
    """Options of FOFL-SELF."""

    item_lr: Annotated[float, Field(gt=0)] = 0.5
    """Learning rate of item rows; larger, because a row is in few samples of a batch."""
    init_std: Annotated[float, Field(gt=0)] = 0.1
    """Standard deviation of the initial item rows."""
    item_server_rate: Annotated[float, Field(gt=0)] = 1.0
    """``server_rate`` of item rows; only a few clients of a cohort touch a row."""


class FOFLSelf(Method):
    """Reptile with item ids: a shared item table and network that devices adapt."""

    name = "fofl-self"
    Config = FOFLSelfConfig
    config: FOFLSelfConfig
    traits = Traits(rounds=300, batch_interactions=FEATURE_STACK)

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the item table, the initial user vector and the network."""
        table = initial_table(self.config.d, self.config.init_std, view.n_items, streams)
        return {"items": table, "theta": self._network().initial(streams)}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train each client's copy; upload the differences."""
        config = self.config
        samples = self._samples(view, config.epochs, now)
        theta, rows, losses = self._trained(shared, samples, config.lr, config.item_lr)
        update = Update(
            len(view),
            rows={"items": deltas(rows, shared["items"])},
            dense={"theta": theta - shared["theta"]},
        )
        return Fitted(update, {}, losses)

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Add the mean difference, times the server rates."""
        config = self.config
        step = config.server_rate * total.dense["theta"] / total.clients
        slower = replace(total, clients=total.clients / config.item_server_rate)
        return {
            "items": apply_mean(shared["items"], slower, "items"),
            "theta": (shared["theta"] + step).astype(np.float32),
        }

    def adapt(self, shared: Shared, private: Private, view: TrainView, streams: Streams) -> Private:
        """Fine-tune each device's copy on its history."""
        config = self.config
        if not config.adapt_epochs:
            return {}
        samples = self._samples(view, config.adapt_epochs, Round(0, streams))
        item_lr = config.item_lr * config.adapt_rate / config.lr
        theta, rows, _ = self._trained(shared, samples, config.adapt_rate, item_lr)
        return {"theta": theta, "items": rows}

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Score all items with each device's copy."""
        network, table = self._network(), shared["items"]
        thetas, own = private.get("theta"), private.get("items")
        if thetas is None:
            thetas = np.broadcast_to(shared["theta"], (len(history), len(shared["theta"])))
        scores = np.empty((len(history), history.n_items), np.float32)
        with torch.no_grad():
            for clients, real in tensors.groups_in_order(len(history)):
                items = np.broadcast_to(table, (tensors.GROUP, *table.shape)).copy()
                if isinstance(own, ClientRows):
                    for number, client in enumerate(clients):
                        mine = slice(own.indptr[client], own.indptr[client + 1])
                        items[number, own.ids[mine]] = own.rows[mine]
                params = network.unpack(torch.from_numpy(np.asarray(thetas)[clients]))
                itself = torch.ones(tensors.GROUP, 1, 1)
                logits = network.logits(params, itself, torch.from_numpy(items))
                scores[clients[:real]] = logits.numpy()[:real]
        return scores

    def _network(self) -> FeatureNetwork:
        """Return a network with the user vector as one user field, and items as numeric rows."""
        return FeatureNetwork((1,), 0, (), self.config.d, self.config.d, self.config.hidden)

    def _samples(self, view: TrainView, epochs: int, now: Round) -> DeviceSamples:
        above = self.config.positive_above
        return draw_device_samples(view, self.config.negatives, epochs, now, positive_above=above)

    def _trained(
        self, shared: Shared, samples: DeviceSamples, lr: float, item_lr: float
    ) -> tuple[NDArray[np.float32], ClientRows, NDArray[np.float64]]:
        """Return each client's copy of the network and of its rows, and its mean loss."""
        itself = np.ones((len(samples.lengths), 1), np.float32)
        return train_feature_networks(
            self._network(),
            ProximalDescent(lr, 0.0, True, item_lr),
            shared["theta"],
            (itself, shared["items"]),
            samples,
            self.config.batch,
        )
