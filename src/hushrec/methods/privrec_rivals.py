"""Rivals of PrivRec with its network: NN-SELF and FOFL-SELF.

NN-SELF: federated meta-learning for recommendation (Chen et al., 2018, SELF setting): PrivRec's
network, meta-learned by MAML with second-order gradients. Shared: all parameters. Private: nothing.
A round on a device (equations 3 to 5 of the PrivRec paper): split the samples at random into a
support and a query set; take SGD steps on the support set; upload the gradient of the query loss
after these steps with respect to the received parameters, second derivatives included. The server
takes one step along the mean gradient. No proximal term. Deviation from the paper: it prints a sum;
a mean does not depend on the cohort size. Before scoring, a device adapts its copy on all of its
history.

FOFL-SELF: a simple and efficient federated recommender system (Jalalirad et al., 2019): Reptile, as
PrivRec, with ids in place of features. Shared: item table [m, d], an initial user vector, and
PrivRec's network over both. Private: nothing between rounds; before scoring, a device adapts a copy
of the shared parameters. A round: each device trains a copy, without a proximal term, and uploads
the differences of the network and of the rows that it touched, so the upload reveals its items. The
server adds ``server_rate`` times the mean difference.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeFloat, PositiveFloat

from hushrec.aggregation import ClientRows, Total, Update
from hushrec.config import Count
from hushrec.data.views import TrainView
from hushrec.kernels.draws import DeviceSamples
from hushrec.kernels.feature_networks import ProximalDescent
from hushrec.kernels.ragged import put_rows
from hushrec.methods.base import NETWORK, Array, ExportsUser, Fitted, Method, Scores, Shared, Traits
from hushrec.methods.forms import ItemNetworks, RowNetwork
from hushrec.methods.privrec import BATCH_INTERACTIONS, PrivRec, PrivRecConfig, thetas_of
from hushrec.methods.shared.options import FeatureNetworkConfig
from hushrec.private import Private
from hushrec.streams import Round, Streams
from hushrec.training import samples as training
from hushrec.training import tensors
from hushrec.training.networks import FeatureNetwork, train_feature_networks
from hushrec.training.tensors import Tensor, torch


class NNSelfConfig(PrivRecConfig):
    """Options of NN-SELF: those of PrivRec, without a proximal term by default."""

    epochs: Count = 1
    """Epochs over the support set; the autograd graph of every step is kept in memory."""
    mu: NonNegativeFloat = 0.0
    """Weight of PrivRec's proximal term."""
    server_rate: PositiveFloat = 0.5
    """Learning rate of the server's step along the mean gradient (alpha2)."""


class NNSelf(PrivRec):
    """PrivRec's network, meta-learned by second-order MAML."""

    name = "nn-self"
    Config = NNSelfConfig
    config: NNSelfConfig
    traits = Traits(rounds=300, from_features=True, unexplained=NETWORK)

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Upload the negative meta-gradient of each client, whose mean `apply` adds (eq. 5)."""
        config = self.config
        halves = training.halves(self.samples(view, 1, now), config.epochs)
        received, loss = torch.from_numpy(shared["theta"]), self._loss(shared, view)
        gradients, losses = meta_gradients(received, loss, *halves, config.lr, config.batch)
        return Fitted(self.upload(-gradients, view), {}, losses)


def meta_gradients(
    received: Tensor,
    loss_of: tensors.LossOf,
    support: DeviceSamples,
    query: DeviceSamples,
    lr: float,
    batch: int,
) -> tuple[Array, NDArray[np.float64]]:
    """Return each client's gradient of the query loss after its support steps, and that loss.

    The gradient of the query loss at the final parameters is computed batch by batch, so that all
    products have the same shape, and then backpropagated through the support steps once.
    """
    n_clients = len(support.indptr) - 1
    gradients = np.zeros((n_clients, len(received)), np.float32)
    losses = np.zeros(n_clients)
    no_rows = np.zeros(max(len(support.items), len(query.items)), np.int64)
    for clients, real in tensors.groups_by_length(support.lengths):
        start = received.expand(tensors.GROUP, -1).clone().requires_grad_()
        theta = start
        for step, _ in tensors.batches(support, no_rows, clients, batch):
            loss = (loss_of({"theta": theta}, {}, step) * step.active).sum()
            (gradient,) = torch.autograd.grad(loss, theta, create_graph=True)
            theta = theta - lr * gradient
        end = theta.detach().requires_grad_()
        outer, total = torch.zeros_like(end), torch.zeros(tensors.GROUP)
        lengths = torch.from_numpy(np.maximum(query.lengths[clients], 1)).float()
        for step, _ in tensors.batches(query, no_rows, clients, batch):
            share = (step.weights > 0).sum(1) / lengths
            each = loss_of({"theta": end}, {}, step) * share
            outer += torch.autograd.grad(each.sum(), end)[0]
            total += each.detach()
        (gradient,) = torch.autograd.grad(theta, start, outer)
        gradients[clients[:real]] = gradient.numpy()[:real]
        losses[clients[:real]] = total.double().numpy()[:real]
    return gradients, losses


class FOFLSelfConfig(FeatureNetworkConfig):
    """Options of FOFL-SELF."""

    item_lr: PositiveFloat = 0.5
    """Learning rate of item rows; larger, because a row is in few samples of a batch."""
    init_std: PositiveFloat = 0.1
    """Standard deviation of the initial item rows."""
    item_server_rate: PositiveFloat = 1.0
    """``server_rate`` of item rows; only a few clients of a cohort touch a row."""


class FOFLSelf(Method, ExportsUser):
    """Reptile with item ids: a shared item table and network that devices adapt."""

    name = "fofl-self"
    Config = FOFLSelfConfig
    config: FOFLSelfConfig
    traits = Traits(rounds=300, batch_interactions=BATCH_INTERACTIONS, unexplained=NETWORK)

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the item table, the initial user vector and the network."""
        table = training.initial_table(self.config.d, self.config.init_std, view.n_items, streams)
        return {"items": table, "theta": self._network().initial(streams)}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train each client's copy; upload the differences."""
        config = self.config
        samples = self._samples(view, config.epochs, now)
        theta, rows, losses = self._trained(shared, samples, config.lr, config.item_lr)
        changed = {"items": training.deltas(rows, shared["items"])}
        return Fitted(Update(len(view), changed, {"theta": theta - shared["theta"]}), {}, losses)

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Add the mean difference, times the server rates."""
        config = self.config
        step = config.server_rate * total.dense["theta"] / total.clients
        slower = replace(total, clients=total.clients / config.item_server_rate)
        return {
            "items": training.apply_mean(shared["items"], slower, "items"),
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

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Score all items with each device's copy."""
        network, table = self._network(), shared["items"]
        thetas, own = thetas_of(shared, private, len(history)), private.get("items")
        scores = np.empty((len(history), history.n_items), np.float32)
        with torch.no_grad():
            for clients, real in tensors.groups_in_order(len(history)):
                items = np.broadcast_to(table, (tensors.GROUP, *table.shape)).copy()
                if isinstance(own, ClientRows):
                    slots = np.arange(tensors.GROUP)
                    put_rows(items, slots, clients, own.indptr, own.ids, own.rows)
                params = network.unpack(torch.from_numpy(thetas[clients]))
                itself = torch.ones(tensors.GROUP, 1, 1)
                logits = network.logits(params, itself, torch.from_numpy(items))
                scores[clients[:real]] = logits.numpy()[:real]
        return scores

    def user_form(self, shared: Shared, private: Private, history: TrainView) -> ItemNetworks:
        """Return the user's copy of the item table and of the network."""
        (theta,), own, items = thetas_of(shared, private, 1), private.get("items"), shared["items"]
        if isinstance(own, ClientRows):
            items = items.copy()
            items[own.ids] = own.rows
        itself = np.ones(1, np.float32)
        return ItemNetworks([RowNetwork(items, self._network().layers_of(theta, itself))])

    def _network(self) -> FeatureNetwork:
        """Return a network with the user vector as one user field, and items as numeric rows."""
        return FeatureNetwork((1,), 0, (), self.config.d, self.config.d, self.config.hidden)

    def _samples(self, view: TrainView, epochs: int, now: Round) -> DeviceSamples:
        config, draw = self.config, training.draw_device_samples
        return draw(view, config.negatives, epochs, now, positive_above=config.positive_above)

    def _trained(
        self, shared: Shared, samples: DeviceSamples, lr: float, item_lr: float
    ) -> tuple[Array, ClientRows, NDArray[np.float64]]:
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
