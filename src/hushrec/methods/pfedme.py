"""pFedMe: personalised federated learning with Moreau envelopes (T Dinh, Tran and Nguyen, 2020).

The network of `hushrec.methods.lipm`, without interests, on silos or single users. Shared: the item
table and the network, w. Private: user embeddings, and the client's own model theta_i.

A round on a client (algorithm 1): w_i starts at w. On every batch theta_i takes ``steps`` steps on
f_i(theta) + lambda/2 ||theta - w_i||², then w_i <- w_i - eta lambda (w_i - theta_i). The upload is
w_i - w. Server: w <- (1 - beta) w + beta mean(w_i). A client scores with theta_i; items that it did
not touch are scored with rows of w.

Deviations from the paper: the inner solver, which the paper leaves open, is Adam, because rows of a
table need thousands of SGD steps; only rows in the batch follow theta_i; eta lambda is one option,
``follow``; lambda is smaller than the paper's 15, which suits parameters that every sample updates;
user embeddings are private and have no envelope.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat

from hushrec.aggregation import ClientRows, Total, Update
from hushrec.config import Count
from hushrec.data.views import TrainView
from hushrec.methods.base import NETWORK, Array, ExportsUser, Fitted, Method, Scores, Shared, Traits
from hushrec.methods.forms import ItemNetworks, RowNetwork
from hushrec.methods.lipm import initial_model, score_silos, user_rows
from hushrec.methods.shared.options import PerceptronConfig
from hushrec.private import PerClient, PerClientRows, Private, PrivateFields, rows_in
from hushrec.streams import Round, Streams
from hushrec.training.networks import Perceptron
from hushrec.training.samples import draw_silo_samples
from hushrec.training.silo_network import Optimiser, SiloModel, SiloProblem, train_silo_networks


class PFedMeConfig(PerceptronConfig):
    """Options of pFedMe."""

    epochs: Count = 2
    """Epochs per round."""
    decay: NonNegativeFloat = 3e-3
    """Weight of the squared norm of embeddings in the loss."""
    steps: Count = 3
    """Number of steps of theta on every batch (K)."""
    pull: PositiveFloat = 0.01
    """Weight of the squared distance between theta and w (lambda)."""
    follow: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the distance by which w follows theta after a batch (eta lambda)."""
    server_rate: PositiveFloat = 1.0
    """Share of the distance by which the server moves w towards the mean (beta)."""


class PFedMe(Method, ExportsUser):
    """A personal model per client, kept near a shared model by a Moreau envelope."""

    name = "pfedme"
    Config = PFedMeConfig
    config: PFedMeConfig
    traits = Traits(rounds=50, silos=True, unexplained=NETWORK)

    @property
    def perceptron(self) -> Perceptron:
        """The network."""
        return Perceptron(self.config.d, self.config.hidden)

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the item table and the network."""
        return initial_model(self.config, self.perceptron, view, streams)

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep user embeddings, and the client's own network and touched item rows."""
        c = self.config
        positives = np.diff(view.positives.indptr[view.client_indptr])
        touched = np.minimum(view.n_items, positives * (1 + c.negatives * c.epochs))
        return {
            "users": PerClientRows(np.diff(view.client_indptr), c.d),
            "network": PerClient(shared["network"].copy()),
            "rows": PerClientRows(touched, c.d),
        }

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train theta, which w follows (algorithm 1)."""
        c, perceptron, indptr = self.config, self.perceptron, view.client_indptr
        samples = draw_silo_samples(view, c.negatives, c.epochs, now)
        touched, users = samples.touched, user_rows(private, "users", view)
        networks = np.repeat(shared["network"][None], len(view.clients), 0)
        start = SiloModel(networks, users, shared["items"][touched.values])
        trained, anchors, losses = train_silo_networks(
            SiloProblem(perceptron.shapes, perceptron.loss, samples, c.batch, {}, indptr, c.decay),
            start,
            Optimiser(c.lr, repeats=c.steps, pull=c.pull, follow=c.follow),
        )
        update = Update(
            len(view.clients),
            {"items": ClientRows(touched.indptr, touched.values, anchors.items - start.items)},
            {"network": anchors.network - start.network},
        )
        own: Private = {
            "users": ClientRows(indptr, view.users, trained.users),
            "network": trained.network,
            "rows": ClientRows(touched.indptr, touched.values, trained.items),
        }
        return Fitted(update, own, losses)

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Move w towards the mean of the w_i: w + beta (mean - w)."""
        rate = self.config.server_rate / total.clients
        items = shared["items"] + rate * total.table("items", *shared["items"].shape)
        network = shared["network"] + rate * total.dense["network"]
        return {"items": items.astype(np.float32), "network": network.astype(np.float32)}

    def serving(self, shared: Shared) -> Shared:
        """Return the item table; the network is private."""
        return {"items": shared["items"]}

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Score with the client's own model."""
        networks, users = np.asarray(private["network"]), user_rows(private, "users", history)
        rows = rows_in(private, "rows")

        def table_of(client: int) -> Array:
            return own_table(shared["items"], rows, client)

        return score_silos(self.perceptron, networks, table_of, users, history)

    def user_form(self, shared: Shared, private: Private, history: TrainView) -> ItemNetworks:
        """Return the client's own model with the user's embedding."""
        (network,), (user,) = np.asarray(private["network"]), user_rows(private, "users", history)
        table = own_table(shared["items"], rows_in(private, "rows"), 0)
        return ItemNetworks([RowNetwork(table, self.perceptron.layers_of(network, user))])


def own_table(items: Array, rows: ClientRows, client: int) -> Array:
    """Return the table of w with a client's own rows."""
    own, table = slice(*rows.indptr[client : client + 2]), items.copy()
    table[rows.ids[own]] = rows.rows[own]
    return table
