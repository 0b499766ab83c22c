"""FOFL-SELF (Jalalirad et al., 2019, "A Simple and Efficient Federated Recommender System"):
Reptile like PrivRec, but with ids in place of features.

An item is known by a row of a shared table [m, d], a user by one vector that every device starts
from and fine-tunes: no user id leaves a device. Both go through PrivRec's network. No proximal
term. A device uploads the differences of its network and of the rows it touched, so its upload
names its items.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec import neural
from hushrec.aggregate import ClientRows, Total, Update
from hushrec.clients import TrainView
from hushrec.kernels.networks import Descent
from hushrec.methods.base import Fitted, Method, Private, Shared
from hushrec.methods.feature_network import (
    STACK_INTERACTIONS,
    Network,
    NetworkConfig,
    draw_samples,
    train_copies,
)
from hushrec.methods.inner_product import apply_mean, initial_table
from hushrec.neural import torch
from hushrec.rng import Round, Streams


class FOFLSelfConfig(NetworkConfig):
    """Options of FOFL-SELF."""

    item_lr: Annotated[float, Field(gt=0)] = 0.5
    """Rate of a step on the item rows; a row is in few samples of a batch, so it may be larger."""
    init_std: Annotated[float, Field(gt=0)] = 0.1
    """Standard deviation of the item rows before training."""
    item_server_rate: Annotated[float, Field(gt=0)] = 1.0
    """The same for item rows: of a cohort only a few clients touch a row."""


class FOFLSelf(Method):
    """Reptile over item ids: a shared item table and network that a device adapts."""

    name = "fofl-self"
    Config = FOFLSelfConfig
    default_rounds = 300
    adapts = True
    stack_interactions = STACK_INTERACTIONS

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the item table, the first user vector and the network."""
        table = initial_table(self.config.d, self.config.init_std, view.n_items, streams)
        return {"items": table, "theta": self._network().initial(streams)}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train each client's copy; upload the differences."""
        config = self.config
        samples = draw_samples(config, view, config.epochs, now)
        theta, rows, losses = self._trained(shared, samples, config.lr, config.item_lr)
        update = Update(
            len(view),
            rows={"items": replace(rows, base=shared["items"])},
            dense={"theta": theta - shared["theta"]},
        )
        return Fitted(update, {}, losses)

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Follow the mean difference."""
        config = self.config
        step = config.server_rate * total.dense["theta"] / total.clients
        slower = replace(total, clients=total.clients / config.item_server_rate)
        return {
            "items": apply_mean(shared["items"], slower, "items"),
            "theta": (shared["theta"] + step).astype(np.float32),
        }

    def adapt(self, shared: Shared, private: Private, view: TrainView, streams: Streams) -> Private:
        """Fine-tune each device's copy on its own past."""
        config = self.config
        if not config.adapt_epochs:
            return {}
        samples = draw_samples(config, view, config.adapt_epochs, Round(0, streams))
        item_lr = config.item_lr * config.adapt_rate / config.lr
        theta, rows, _ = self._trained(shared, samples, config.adapt_rate, item_lr)
        return {"theta": theta, "items": rows}

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Run all items through each device's copy."""
        network, table = self._network(), shared["items"]
        thetas, own = private.get("theta"), private.get("items")
        if thetas is None:
            thetas = np.broadcast_to(shared["theta"], (len(history), len(shared["theta"])))
        scores = np.empty((len(history), history.n_items), np.float32)
        with torch.no_grad():
            for clients, real in neural.in_groups(len(history)):
                items = np.broadcast_to(table, (neural.GROUP, *table.shape)).copy()
                if isinstance(own, ClientRows):
                    for place, client in enumerate(clients):
                        mine = slice(own.indptr[client], own.indptr[client + 1])
                        items[place, own.ids[mine]] = own.rows[mine]
                params = network.unpack(torch.from_numpy(np.asarray(thetas)[clients]))
                itself = torch.ones(neural.GROUP, 1, 1)
                logits = network.logits(params, itself, torch.from_numpy(items))
                scores[clients[:real]] = logits.numpy()[:real]
        return scores

    def _network(self) -> Network:
        """Return a network whose one user field is the user vector, and whose items are rows."""
        return Network((1,), 0, (), self.config.d, self.config.d, self.config.hidden)

    def _trained(
        self, shared: Shared, samples: neural.Samples, lr: float, item_lr: float
    ) -> tuple[NDArray[np.float32], ClientRows, NDArray[np.float64]]:
        """Return each client's copy of the network and of its rows, and its mean loss."""
        return train_copies(
            self._network(),
            Descent(lr, 0.0, True, item_lr),
            shared["theta"],
            np.ones((len(samples.lengths), 1), np.float32),
            shared["items"],
            samples,
            self.config.batch,
        )
