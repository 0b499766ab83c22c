"""PrivRec and DP-PrivRec (Wang et al., 2021, "Fast-adapting and Privacy-preserving Federated
Recommender System"): features in, one score out, meta-learned so that a few steps personalise it.

Users and items are known by their features alone (section 2.1, equation 1): an embedding per
category, numbers as they are, an MLP with four hidden layers of ReLUs, as equation 1 has it
(section 4.1 says Sigmoid, which is f, the output's, for implicit feedback; for ratings f is linear:
``output``). Every parameter is shared; what is private is the data and the copy that a device
fine-tunes for itself.

A round (Algorithm 1): exactly M clients; each starts from the received theta0 and runs E2 epochs of
minibatch SGD on BCE + mu/2 |theta - theta0|² (equation 7; the text drops the square, the FedProx it
cites has it); the server moves theta0 by alpha3 times the mean difference (Reptile, equation 6).

With ``shares`` a client also uploads its items, scaled to norm 1 together, and the server's sum of
them so far says how popular an item is: one more feature of it, log(1 + count / mean count). It is
part of the upload, so clipped, noised and accounted for with the rest.

Before it is asked, a device runs `adapt_epochs` epochs of the same on its own past (section 3.3).

DP-PrivRec (Algorithm 2) is this method under ``--privacy central`` with a cohort of fixed size and
adaptive clipping: the preset ``dp-paper``. The noise is on the mean, before the server's rate.

PrivRec-CEN: PrivRec's network on pooled data, what federation is measured against.

Not federated and not private: one network, minibatches over everybody's samples in random order,
a round is one pass. As in the paper (section 4.1), an unseen user still adapts a copy. The paper
treats "each user as a task": with ``tasks`` a pass has as many samples of every user, drawn with
replacement, so that users count alike; without, samples do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from hushrec.aggregation import ClientRows, Total, Update
from hushrec.data.features import encode
from hushrec.data.views import TrainView
from hushrec.kernels.feature_networks import ProximalDescent
from hushrec.methods.base import Fitted, Method, Private, Shared, Traits
from hushrec.methods.shared.denoising import COUNTS, count_items
from hushrec.methods.shared.options import FeatureNetworkConfig
from hushrec.streams import Round, Streams
from hushrec.training import tensors
from hushrec.training.networks import (
    Array,
    FeatureNetwork,
    feature_network_of,
    proximal,
    train_feature_networks,
    train_pooled_network,
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
    output: Literal["sigmoid", "linear"] = "sigmoid"
    """Whether what is predicted is a preference under cross-entropy, or a rating under the squared
    error, a drawn item counting 0."""
    shares: bool = False
    """Whether each item's share of the interactions so far is one more feature of it."""

    @model_validator(mode="after")
    def _ratings_have_no_threshold(self) -> Self:
        if self.output == "linear" and self.positive_above is not None:
            raise ValueError(
                "output = linear predicts ratings as they are: leave out positive_above"
            )
        return self


class PrivRec(Method):
    """Features, never ids, through a network that a device adapts in a few steps."""

    name = "privrec"
    Config = PrivRecConfig
    config: PrivRecConfig
    traits = Traits(rounds=300, stack_interactions=FEATURE_STACK)

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw all parameters."""
        counts = {"counts": np.zeros(view.n_items, np.float32)} if self.config.shares else {}
        return {"theta": self.network(view).initial(streams), **counts}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train each client's copy; upload the differences."""
        config = self.config
        samples = self.samples(view, config.epochs, now)
        trained, losses = self._trained(shared, view, samples, config.lr)
        return Fitted(self.upload(trained - shared["theta"], view), {}, losses)

    def upload(self, moved: NDArray[np.float32], view: TrainView) -> Update:
        """Return what clients send: how their copies moved and, with shares, their items."""
        counts = count_items(view).rows if self.config.shares else {}
        return Update(len(view), rows=counts, dense={"theta": moved})

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Follow the mean difference (equation 6)."""
        step = self.config.server_rate * total.dense["theta"] / total.clients
        return {"theta": (shared["theta"] + step).astype(np.float32), **self.counted(shared, total)}

    def counted(self, shared: Shared, total: Total) -> dict[str, Array]:
        """Return the sum of what clients had so far, with this round's."""
        if not self.config.shares:
            return {}
        counts = shared["counts"].astype(np.float64)
        if COUNTS in total.rows:
            ids, summed = total.rows[COUNTS]
            counts[ids] += summed[:, 0]
        return {"counts": counts.astype(np.float32)}

    def adapt(self, shared: Shared, private: Private, view: TrainView, streams: Streams) -> Private:
        """Fine-tune each device's copy on its own past."""
        config = self.config
        if not config.adapt_epochs:
            return {}
        samples = self.samples(view, config.adapt_epochs, Round(0, streams))
        return {"theta": self._trained(shared, view, samples, config.adapt_rate)[0]}

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Run all items through each device's copy, each different row of features once."""
        thetas = private.get("theta")
        if thetas is None:
            thetas = np.broadcast_to(shared["theta"], (len(history), len(shared["theta"])))
        network = self.network(history)
        user_rows, item_rows = self.inputs(shared, history)
        users = torch.from_numpy(user_rows)
        distinct, place = np.unique(item_rows, axis=0, return_inverse=True)
        place = place.reshape(-1)
        items = torch.from_numpy(distinct).expand(tensors.GROUP, *distinct.shape)
        scores = np.empty((len(history), history.n_items), np.float32)
        with torch.no_grad():
            for clients, real in tensors.groups_in_order(len(history)):
                params = network.unpack(torch.from_numpy(np.asarray(thetas)[clients]))
                logits = network.logits(params, users[clients][:, None], items)
                scores[clients[:real]] = logits.numpy()[:real, place]
        return scores

    def _trained(
        self, shared: Shared, view: TrainView, samples: DeviceSamples, lr: float
    ) -> tuple[Array, NDArray[np.float64]]:
        """Return each client's copy of theta after its samples, and its mean loss."""
        config = self.config
        copies, _, losses = train_feature_networks(
            self.network(view),
            self.descent(lr, config.mu),
            shared["theta"],
            self.inputs(shared, view),
            samples,
            config.batch,
        )
        return copies, losses

    def descent(self, lr: float, mu: float) -> ProximalDescent:
        """Return how a step goes."""
        config = self.config
        return ProximalDescent(lr, mu, config.proximal == "squared", 0.0, config.output == "linear")

    def inputs(self, shared: Shared, view: TrainView) -> tuple[Array, Array]:
        """Return the features of the clients and of all items, shares among them."""
        users, items = features(view)
        if not self.config.shares:
            return users, items
        counts = np.maximum(shared["counts"], 0)  # noise may leave less than nothing
        popular = np.log1p(counts / max(float(counts.mean()), 1e-12)).astype(np.float32)
        return users, np.concatenate([items, popular[:, None]], 1)

    def network(self, view: TrainView) -> FeatureNetwork:
        """Return the network for the features of a view."""
        network = feature_network_of(view, self.config.d, self.config.hidden, self.name)
        more = int(self.config.shares)
        return replace(network, item_numbers=network.item_numbers + more) if more else network

    def samples(self, view: TrainView, epochs: int, now: Round) -> DeviceSamples:
        """Draw the clients' samples of a round: their rows, and items they have none of."""
        above, ratings = self.config.positive_above, self.config.output == "linear"
        return draw_device_samples(
            view, self.config.negatives, epochs, now, positive_above=above, ratings=ratings
        )

    def _loss(self, shared: Shared, view: TrainView) -> tensors.LossOf:
        """Return the same loss for autograd to differentiate, as often as it likes."""
        network, received = self.network(view), torch.from_numpy(shared["theta"])
        users, items = map(torch.from_numpy, self.inputs(shared, view))
        mu, kind, linear = self.config.mu, self.config.proximal, self.config.output == "linear"

        def loss(state: tensors.Params, rows: tensors.Params, batch: tensors.DeviceBatch) -> Tensor:
            params = network.unpack(state["theta"])
            logits = network.logits(params, users[batch.clients][:, None], items[batch.items])
            if linear:
                missed = (((logits - batch.labels) ** 2 / 2) * batch.weights).sum(1)
            else:
                missed = tensors.mean_bce(logits, batch)
            return missed + proximal(state["theta"], received, mu, kind) if mu else missed

        return loss


def features(view: TrainView) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the features of the clients and of all items, a row each."""
    users = encode(view.user_features, np.arange(len(view)), "user")
    items = encode(view.item_features, np.arange(view.n_items), "item")
    return users.rows, items.rows


class PrivRecCENConfig(PrivRecConfig):
    """Options of PrivRec-CEN: those of PrivRec, and of the pooled passes."""

    pooled_batch: Annotated[int, Field(ge=1)] = 256
    """Samples of a pooled step, of all users together."""
    pooled_lr: Annotated[float, Field(gt=0)] = 0.1
    """Rate of a pooled step."""
    tasks: bool = False
    """Whether every user counts alike in a pass, or every sample."""


class PrivRecCEN(PrivRec):
    """PrivRec's network trained on pooled data."""

    name = "privrec-cen"
    Config = PrivRecCENConfig
    config: PrivRecCENConfig
    traits = Traits(rounds=20, pooled=True, stack_interactions=FEATURE_STACK)

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Pass once over all samples in random order."""
        samples = self.samples(view, 1, now)
        generator = now.generator("fit/order")
        order = generator.permutation(len(samples.items))
        if self.config.tasks:
            order = generator.permutation(_alike(samples, generator))
        theta, loss = train_pooled_network(
            self.network(view),
            self.descent(self.config.pooled_lr, 0.0),
            shared["theta"],
            self.inputs(shared, view),
            samples,
            order,
            self.config.pooled_batch,
        )
        update = Update(1, self._pooled_counts(view), {"theta": theta - shared["theta"]})
        return Fitted(update, {}, np.repeat(loss, len(view)))

    def _pooled_counts(self, view: TrainView) -> dict[str, ClientRows]:
        """Return everybody's items as one upload, where shares are a feature."""
        if not self.config.shares:
            return {}
        mine = count_items(view).rows[COUNTS]
        counts = np.bincount(mine.ids, mine.rows[:, 0], view.n_items).astype(np.float32)
        ids = np.arange(view.n_items, dtype=np.int32)
        return {COUNTS: ClientRows(np.array([0, view.n_items]), ids, counts[:, None])}

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Take the trained network."""
        moved = (shared["theta"] + total.dense["theta"]).astype(np.float32)
        return {"theta": moved, **self.counted(shared, total)}


def _alike(samples: DeviceSamples, generator: np.random.Generator) -> NDArray[np.int64]:
    """Draw places of samples, as many of every user that has any, with replacement."""
    starts, lengths = samples.indptr[:-1], samples.lengths
    who = np.flatnonzero(lengths > 0)
    each = -(-len(samples.items) // max(1, len(who)))
    drawn = generator.integers(0, lengths[who][:, None], (len(who), each))
    return np.asarray(starts[who][:, None] + drawn).ravel()
