"""PrivRec and DP-PrivRec (Wang et al., 2021, "Fast-adapting and Privacy-preserving Federated
Recommender System"): features in, one score out, meta-learned so that a few steps personalise it.

Users and items are known by their features alone (section 2.1, equation 1): an embedding per
category, numbers as they are, an MLP with four hidden layers. Every parameter is shared; what is
private is the data and the copy that a device fine-tunes for itself.

A round (Algorithm 1): exactly M clients; each starts from the received theta0 and runs E2 epochs of
minibatch SGD on BCE + mu/2 |theta - theta0|² (equation 7; the text drops the square, the FedProx it
cites has it); the server moves theta0 by alpha3 times the mean difference (Reptile, equation 6).

Before it is asked, a device runs `adapt_epochs` epochs of the same on its own past (section 3.3).

DP-PrivRec (Algorithm 2) is this method under ``--privacy central`` with a cohort of fixed size and
adaptive clipping: the preset ``dp-paper``. The noise is on the mean, before the server's rate.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec.aggregate import Total, Update
from hushrec.clients import TrainView
from hushrec.data.features import encode
from hushrec.kernels.feature_networks import ProximalDescent
from hushrec.methods.base import Fitted, Method, Private, Shared, Traits
from hushrec.methods.options import FeatureNetworkConfig
from hushrec.rng import Round, Streams
from hushrec.training import tensors
from hushrec.training.feature_network import (
    Array,
    FeatureNetwork,
    feature_network_of,
    proximal,
    train_feature_networks,
)
from hushrec.training.samples import DeviceSamples, draw_device_samples
from hushrec.training.tensors import Tensor, torch

FEATURE_STACK = 512
"""Interactions of a stack: a cohort is small and a client takes long, so that threads share few
clients each."""


class PrivRecConfig(FeatureNetworkConfig):
    """Options of PrivRec."""

    mu: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the proximal term."""
    proximal: Literal["squared", "norm"] = "squared"
    """The squared distance from the received parameters, or the distance, as the text prints it."""


class PrivRec(Method):
    """Features, never ids, through a network that a device adapts in a few steps."""

    name = "privrec"
    Config = PrivRecConfig
    config: PrivRecConfig
    traits = Traits(rounds=300, stack_interactions=FEATURE_STACK)

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw all parameters."""
        return {"theta": self.network(view).initial(streams)}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train each client's copy; upload the differences."""
        config = self.config
        samples = self.samples(view, config.epochs, now)
        trained, losses = self._trained(shared["theta"], view, samples, config.lr)
        return Fitted(Update(len(view), dense={"theta": trained - shared["theta"]}), {}, losses)

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Follow the mean difference (equation 6)."""
        step = self.config.server_rate * total.dense["theta"] / total.clients
        return {"theta": (shared["theta"] + step).astype(np.float32)}

    def adapt(self, shared: Shared, private: Private, view: TrainView, streams: Streams) -> Private:
        """Fine-tune each device's copy on its own past."""
        config = self.config
        if not config.adapt_epochs:
            return {}
        samples = self.samples(view, config.adapt_epochs, Round(0, streams))
        return {"theta": self._trained(shared["theta"], view, samples, config.adapt_rate)[0]}

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Run all items through each device's copy, each different row of features once."""
        thetas = private.get("theta")
        if thetas is None:
            thetas = np.broadcast_to(shared["theta"], (len(history), len(shared["theta"])))
        network = self.network(history)
        everybody = np.arange(len(history))
        users = torch.from_numpy(encode(history.user_features, everybody, "user").rows)
        every_item = np.arange(history.n_items)
        distinct, place = encode(history.item_features, every_item, "item").distinct()
        items = torch.from_numpy(distinct).expand(tensors.GROUP, *distinct.shape)
        scores = np.empty((len(history), history.n_items), np.float32)
        with torch.no_grad():
            for clients, real in tensors.groups_in_order(len(history)):
                params = network.unpack(torch.from_numpy(np.asarray(thetas)[clients]))
                logits = network.logits(params, users[clients][:, None], items)
                scores[clients[:real]] = logits.numpy()[:real, place]
        return scores

    def _trained(
        self, theta: Array, view: TrainView, samples: DeviceSamples, lr: float
    ) -> tuple[Array, NDArray[np.float64]]:
        """Return each client's copy of theta after its samples, and its mean loss."""
        config = self.config
        descent = ProximalDescent(lr, config.mu, config.proximal == "squared", 0.0)
        copies, _, losses = train_feature_networks(
            self.network(view), descent, theta, features(view), samples, config.batch
        )
        return copies, losses

    def network(self, view: TrainView) -> FeatureNetwork:
        """Return the network for the features of a view."""
        return feature_network_of(view, self.config.d, self.config.hidden, self.name)

    def samples(self, view: TrainView, epochs: int, now: Round) -> DeviceSamples:
        """Draw the clients' samples of a round: their rows, and items they have none of."""
        above = self.config.positive_above
        return draw_device_samples(view, self.config.negatives, epochs, now, positive_above=above)

    def _loss(self, network: FeatureNetwork, view: TrainView, received: Tensor) -> tensors.LossOf:
        """Return the same loss for autograd to differentiate, as often as it likes."""
        users, items = map(torch.from_numpy, features(view))
        mu, kind = self.config.mu, self.config.proximal

        def loss(state: tensors.Params, rows: tensors.Params, batch: tensors.Batch) -> Tensor:
            params = network.unpack(state["theta"])
            logits = network.logits(params, users[batch.clients][:, None], items[batch.items])
            entropy = tensors.mean_bce(logits, batch)
            return entropy + proximal(state["theta"], received, mu, kind) if mu else entropy

        return loss


def features(view: TrainView) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the features of the clients and of all items, a row each."""
    users = encode(view.user_features, np.arange(len(view)), "user")
    items = encode(view.item_features, np.arange(view.n_items), "item")
    return users.rows, items.rows
