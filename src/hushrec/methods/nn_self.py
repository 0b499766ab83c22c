"""NN-SELF: federated meta-learning for recommendation (Chen et al., 2018, SELF setting).

PrivRec's network, meta-learned by MAML with second-order gradients. Shared: all parameters.
Private: nothing.

A round on a device (equations 3 to 5 of the PrivRec paper): split the samples at random into a
support and a query set; take SGD steps on the support set; upload the gradient of the query loss
after these steps with respect to the received parameters, second derivatives included. The server
takes one step along the mean gradient. No proximal term. Deviation from the paper: it prints a sum;
a mean does not depend on the cohort size.

Before scoring, a device adapts its copy on all of its history.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec.data.views import TrainView
from hushrec.methods.base import Fitted, Private, Shared, Traits
from hushrec.methods.privrec import PrivRec, PrivRecConfig
from hushrec.streams import Round
from hushrec.training import tensors
from hushrec.training.samples import DeviceSamples, halves
from hushrec.training.tensors import Tensor, torch


class NNSelfConfig(PrivRecConfig):
    """Options of NN-SELF: those of PrivRec, without a proximal term by default."""

    epochs: Annotated[int, Field(ge=1)] = 1
    """Epochs over the support set; the autograd graph of every step is kept in memory."""
    mu: Annotated[float, Field(ge=0)] = 0.0
    """Weight of PrivRec's proximal term."""
    server_rate: Annotated[float, Field(gt=0)] = 0.5
    """Learning rate of the server's step along the mean gradient (alpha2)."""


class NNSelf(PrivRec):
    """PrivRec's network, meta-learned by second-order MAML."""

    name = "nn-self"
    Config = NNSelfConfig
    config: NNSelfConfig
    traits = Traits(rounds=300)

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Upload the negative meta-gradient of each client, whose mean `apply` adds (eq. 5)."""
        config = self.config
        support, query = halves(self.samples(view, 1, now), config.epochs)
        received = torch.from_numpy(shared["theta"])
        loss = self._loss(shared, view)
        gradients, losses = meta_gradients(received, loss, support, query, config.lr, config.batch)
        return Fitted(self.upload(-gradients, view), {}, losses)


def meta_gradients(
    received: Tensor,
    loss_of: tensors.LossOf,
    support: DeviceSamples,
    query: DeviceSamples,
    lr: float,
    batch: int,
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
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
