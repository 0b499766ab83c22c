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

from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec import neural
from hushrec.aggregate import Total, Update
from hushrec.clients import TrainView
from hushrec.data.features import encode
from hushrec.kernels.networks import Descent
from hushrec.methods.base import Fitted, Method, Private, Shared
from hushrec.methods.feature_network import (
    STACK_INTERACTIONS,
    Array,
    Network,
    NetworkConfig,
    draw_samples,
    network_of,
    proximal,
    train_copies,
)
from hushrec.neural import Tensor, torch
from hushrec.rng import Round, Streams


class PrivRecConfig(NetworkConfig):
    """Options of PrivRec."""

    mu: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the proximal term."""
    proximal: Literal["squared", "norm"] = "squared"
    """The squared distance from the received parameters, or the distance, as the text prints it."""


class PrivRec(Method):
    """Features, never ids, through a network that a device adapts in a few steps."""

    name = "privrec"
    Config = PrivRecConfig
    default_rounds = 300
    adapts = True
    stack_interactions: ClassVar[int | None] = STACK_INTERACTIONS

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw all parameters."""
        return {"theta": network_of(self.config, view, self.name).initial(streams)}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train each client's copy; upload the differences."""
        config = self.config
        samples = draw_samples(config, view, config.epochs, now)
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
        samples = draw_samples(config, view, config.adapt_epochs, Round(0, streams))
        return {"theta": self._trained(shared["theta"], view, samples, config.adapt_rate)[0]}

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Run all items through each device's copy, each different row of features once."""
        thetas = private.get("theta")
        if thetas is None:
            thetas = np.broadcast_to(shared["theta"], (len(history), len(shared["theta"])))
        network = network_of(self.config, history, self.name)
        users = torch.from_numpy(encode(history.user_features, history.users, "user").rows)
        every_item = np.arange(history.n_items)
        distinct, place = encode(history.item_features, every_item, "item").distinct()
        items = torch.from_numpy(distinct).expand(neural.GROUP, *distinct.shape)
        scores = np.empty((len(history), history.n_items), np.float32)
        with torch.no_grad():
            for clients, real in neural.in_groups(len(history)):
                params = network.unpack(torch.from_numpy(np.asarray(thetas)[clients]))
                logits = network.logits(params, users[clients][:, None], items)
                scores[clients[:real]] = logits.numpy()[:real, place]
        return scores

    def _trained(
        self, theta: Array, view: TrainView, samples: neural.Samples, lr: float
    ) -> tuple[Array, NDArray[np.float64]]:
        """Return each client's copy of theta after its samples, and its mean loss."""
        config = self.config
        network = network_of(config, view, self.name)
        descent = Descent(lr, config.mu, config.proximal == "squared", 0.0)
        copies, _, losses = train_copies(
            network, descent, theta, *features(view), samples, config.batch
        )
        return copies, losses

    def _loss(self, network: Network, view: TrainView, received: Tensor) -> neural.LossOf:
        """Return the same loss for autograd to differentiate, as often as it likes."""
        users, items = map(torch.from_numpy, features(view))
        mu, kind = self.config.mu, self.config.proximal

        def loss(state: neural.Params, rows: neural.Params, batch: neural.Batch) -> Tensor:
            params = network.unpack(state["theta"])
            logits = network.logits(params, users[batch.clients][:, None], items[batch.items])
            entropy = neural.mean_bce(logits, batch)
            return entropy + proximal(state["theta"], received, mu, kind) if mu else entropy

        return loss


def features(view: TrainView) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the features of the clients and of all items, a row each."""
    users = encode(view.user_features, view.users, "user")
    items = encode(view.item_features, np.arange(view.n_items), "item")
    return users.rows, items.rows
