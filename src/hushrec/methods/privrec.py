"""PrivRec and DP-PrivRec: fast-adapting and privacy-preserving federated recommendation.

Wang et al., 2021. Users and items are represented by features only (section 2.1, equation 1): an
embedding per category, numeric features as they are, an MLP with four hidden ReLU layers. Shared:
all parameters theta. Private: nothing between rounds; before scoring, a device adapts a copy of
theta on its history for `adapt_epochs` epochs (section 3.3).

A round (algorithm 1): exactly M clients; each starts from the received theta0 and runs E2 epochs of
minibatch SGD on BCE + mu/2 |theta - theta0|² (equation 7); the server adds alpha3 times the mean
difference (Reptile, equation 6). DP-PrivRec (algorithm 2) is this method under ``--privacy
central`` with a fixed-size cohort and adaptive clipping: the preset ``dp-paper``. Noise is added to
the mean before the server's rate.

Choices where the paper is ambiguous: hidden layers are ReLU as in equation 1, where section 4.1
says sigmoid, which is the output's activation for implicit feedback (``output``: linear for
ratings); the proximal term is squared as in FedProx, where the text has no square (``proximal``).

Beyond the paper: with ``shares`` a client also uploads its items, scaled to joint norm 1, and the
server's running sum gives each item a popularity feature, log(1 + count / mean count). The counts
are part of the upload, so they are clipped, noised and charged to the privacy budget with it.

`PrivRecCEN` trains the same network on pooled data, as a baseline that is neither federated nor
private: minibatches over all users' samples in random order, one epoch a round; an unseen user
adapts a copy (section 4.1). The paper treats "each user as a task": with ``tasks`` an epoch has
equally many samples of every user, drawn with replacement.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeFloat, PositiveFloat, model_validator

from hushrec.aggregation import ClientRows, Total, Update
from hushrec.config import Count
from hushrec.data.features import encode
from hushrec.data.views import TrainView
from hushrec.errors import ConfigError
from hushrec.kernels.draws import DeviceSamples
from hushrec.kernels.feature_networks import ProximalDescent
from hushrec.methods.base import NETWORK, Array, ExportsUser, Fitted, Method, Scores, Shared, Traits
from hushrec.methods.forms import ItemNetworks, RowNetwork
from hushrec.methods.shared.denoising import COUNTS, count_items
from hushrec.methods.shared.options import FeatureNetworkConfig
from hushrec.private import Private
from hushrec.streams import Round, Streams
from hushrec.training import networks, tensors
from hushrec.training.samples import draw_device_samples
from hushrec.training.tensors import Tensor, torch

BATCH_INTERACTIONS = 512
"""Interactions in a batch of clients; small, because few clients with long training are shared by
the threads."""


class PrivRecConfig(FeatureNetworkConfig):
    """Options of PrivRec."""

    mu: NonNegativeFloat = 0.01
    """Weight of the proximal term."""
    proximal: Literal["squared", "norm"] = "squared"
    """Squared distance from the received parameters, or the distance, as the paper prints it."""
    output: Literal["sigmoid", "linear"] = "sigmoid"
    """sigmoid: predict preferences with cross-entropy; linear: predict ratings with squared error,
    sampled items having rating 0."""
    shares: bool = False
    """Whether each item's share of all interactions is an additional feature."""

    @model_validator(mode="after")
    def _ratings_have_no_threshold(self) -> Self:
        if self.output == "linear" and self.positive_above is not None:
            raise ValueError(
                "output = linear predicts ratings and has no threshold: leave out positive_above"
            )
        return self


class PrivRec(Method, ExportsUser):
    """A meta-learned network over features that a device adapts in a few steps."""

    name = "privrec"
    Config = PrivRecConfig
    config: PrivRecConfig
    traits = Traits(
        rounds=300,
        from_features=True,
        batch_interactions=BATCH_INTERACTIONS,
        unexplained=NETWORK,
    )

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw all parameters."""
        counts = {"counts": np.zeros(view.n_items, np.float32)} if self.config.shares else {}
        return {"theta": self.network(view).initial(streams), **counts}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train each client's copy; upload the differences."""
        config = self.config
        trained, losses = self._trained(shared, view, config.epochs, config.lr, now)
        return Fitted(self.upload(trained - shared["theta"], view), {}, losses)

    def upload(self, moved: Array, view: TrainView) -> Update:
        """Return the uploads: differences of the copies and, with ``shares``, item counts."""
        counts = count_items(view).rows if self.config.shares else {}
        return Update(len(view), rows=counts, dense={"theta": moved})

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Add the mean difference, times the server rate (equation 6)."""
        step = self.config.server_rate * total.dense["theta"] / total.clients
        return {"theta": (shared["theta"] + step).astype(np.float32), **self.counted(shared, total)}

    def counted(self, shared: Shared, total: Total) -> dict[str, Array]:
        """Return the running sum of item counts, including this round's."""
        if not self.config.shares:
            return {}
        counts = shared["counts"] + total.table(COUNTS, len(shared["counts"]), 1)[:, 0]
        return {"counts": counts.astype(np.float32)}

    def adapt(self, shared: Shared, private: Private, view: TrainView, streams: Streams) -> Private:
        """Fine-tune each device's copy on its history."""
        epochs, rate = self.config.adapt_epochs, self.config.adapt_rate
        if not epochs:
            return {}
        return {"theta": self._trained(shared, view, epochs, rate, Round(0, streams))[0]}

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Score all items with each device's copy, each distinct feature row once."""
        network, thetas = self.network(history), thetas_of(shared, private, len(history))
        user_rows, item_rows = self.inputs(shared, history)
        users = torch.from_numpy(user_rows)
        distinct, inverse = np.unique(item_rows, axis=0, return_inverse=True)
        items = torch.from_numpy(distinct).expand(tensors.GROUP, *distinct.shape)
        scores = np.empty((len(history), history.n_items), np.float32)
        with torch.no_grad():
            for clients, real in tensors.groups_in_order(len(history)):
                params = network.unpack(torch.from_numpy(thetas[clients]))
                logits = network.logits(params, users[clients][:, None], items)
                scores[clients[:real]] = logits.numpy()[:real, inverse.reshape(-1)]
        return scores

    def user_form(self, shared: Shared, private: Private, history: TrainView) -> ItemNetworks:
        """Return the features of all items, and the user's copy with the user's features."""
        (theta,), (users, items) = thetas_of(shared, private, 1), self.inputs(shared, history)
        return ItemNetworks([RowNetwork(items, self.network(history).layers_of(theta, users[0]))])

    def _trained(
        self, shared: Shared, view: TrainView, epochs: int, lr: float, now: Round
    ) -> tuple[Array, NDArray[np.float64]]:
        """Return each client's copy of theta after some epochs, and its mean loss."""
        copies, _, losses = networks.train_feature_networks(
            self.network(view),
            self.descent(lr, self.config.mu),
            shared["theta"],
            self.inputs(shared, view),
            self.samples(view, epochs, now),
            self.config.batch,
        )
        return copies, losses

    def descent(self, lr: float, mu: float) -> ProximalDescent:
        """Return the rates of SGD with the proximal term."""
        config = self.config
        return ProximalDescent(lr, mu, config.proximal == "squared", 0.0, config.output == "linear")

    def inputs(self, shared: Shared, view: TrainView) -> tuple[Array, Array]:
        """Return the features of the clients and of all items, including shares."""
        users = encode(view.user_features, np.arange(len(view)), "user").rows
        items = encode(view.item_features, np.arange(view.n_items), "item").rows
        if not self.config.shares:
            return users, items
        counts = np.maximum(shared["counts"], 0)  # noisy counts may be negative
        popular = np.log1p(counts / max(float(counts.mean()), 1e-12)).astype(np.float32)
        return users, np.concatenate([items, popular[:, None]], 1)

    def network(self, view: TrainView) -> networks.FeatureNetwork:
        """Return the network for the features of a view."""
        if not view.item_features:
            raise ConfigError(
                f"{self.name} represents items by features, and this data has none: use data with "
                "item features (ml-1m, ml-100k, frappe, demo), or give yours with 'hushrec data "
                "import … --items FILE --item-feature COLUMN'"
            )
        d, hidden, none = self.config.d, self.config.hidden, np.zeros(0, np.int64)
        users = encode(view.user_features, none, "user")
        items = encode(view.item_features, none, "item")
        inputs = users.fields, users.numbers, items.fields, items.numbers + self.config.shares
        return networks.FeatureNetwork(*inputs, d, hidden)

    def samples(self, view: TrainView, epochs: int, now: Round) -> DeviceSamples:
        """Draw the clients' samples of a round: training rows and negatives."""
        above, ratings = self.config.positive_above, self.config.output == "linear"
        return draw_device_samples(
            view, self.config.negatives, epochs, now, positive_above=above, ratings=ratings
        )

    def _loss(self, shared: Shared, view: TrainView) -> tensors.LossOf:
        """Return the loss for autograd, which can differentiate it twice."""
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
            return missed + networks.proximal(state["theta"], received, mu, kind) if mu else missed

        return loss


def thetas_of(shared: Shared, private: Private, clients: int) -> Array:
    """Return each device's adapted copy of theta, or theta itself where devices do not adapt."""
    theta = shared["theta"]
    return np.asarray(private.get("theta", np.broadcast_to(theta, (clients, len(theta)))))


class PrivRecCENConfig(PrivRecConfig):
    """Options of PrivRec, and of training on pooled data."""

    pooled_batch: Count = 256
    """Batch size of pooled samples."""
    pooled_lr: PositiveFloat = 0.1
    """Learning rate on pooled samples."""
    tasks: bool = False
    """Whether an epoch has equally many samples of every user, not every sample once."""


class PrivRecCEN(PrivRec):
    """PrivRec's network trained on pooled data."""

    name = "privrec-cen"
    Config = PrivRecCENConfig
    config: PrivRecCENConfig
    traits = replace(PrivRec.traits, rounds=20, pooled=True)

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train for one epoch on pooled samples in random order."""
        samples = self.samples(view, 1, now)
        generator = now.generator("fit/order")
        order = generator.permutation(len(samples.items))
        if self.config.tasks:
            order = generator.permutation(_balanced(samples, generator))
        pooled = np.array([0, len(order)]), samples.items[order], samples.labels[order]
        theta, _, loss = networks.train_feature_networks(
            self.network(view),
            self.descent(self.config.pooled_lr, 0.0),
            shared["theta"],
            self.inputs(shared, view),
            DeviceSamples(*pooled, epochs=1),
            self.config.pooled_batch,
            np.repeat(np.arange(len(view)), samples.lengths)[order],
        )
        counts = {}
        if self.config.shares:
            mine, n_items = count_items(view).rows[COUNTS], view.n_items
            summed = np.bincount(mine.ids, mine.rows[:, 0], n_items).astype(np.float32)
            ids = np.arange(n_items, dtype=np.int32)
            counts[COUNTS] = ClientRows(np.array([0, n_items]), ids, summed[:, None])
        update = Update(1, counts, {"theta": theta - shared["theta"]})
        return Fitted(update, {}, np.repeat(loss, len(view)))

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Add the change of the network."""
        moved = (shared["theta"] + total.dense["theta"]).astype(np.float32)
        return {"theta": moved, **self.counted(shared, total)}


def _balanced(samples: DeviceSamples, generator: np.random.Generator) -> NDArray[np.int64]:
    """Draw equally many sample indices of every user, with replacement."""
    starts, lengths = samples.indptr[:-1], samples.lengths
    who = np.flatnonzero(lengths > 0)
    each = -(-len(samples.items) // max(1, len(who)))
    drawn = generator.integers(0, lengths[who][:, None], (len(who), each))
    return np.asarray(starts[who][:, None] + drawn).ravel()
