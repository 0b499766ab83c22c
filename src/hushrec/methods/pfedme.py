"""pFedMe: personalised federated learning with Moreau envelopes (T Dinh, Tran and Nguyen, 2020).

The perceptron of `hushrec.methods.lipm`, without interests, over silos or single users. Shared: the
item table and the network, w. Private: user embeddings, and the client's own model theta_i.

A round on a client (algorithm 1): w_i starts at w. On every batch theta_i takes ``steps`` steps on
f_i(theta) + lambda/2 ||theta - w_i||², then w_i follows: w_i <- w_i - eta lambda (w_i - theta_i).
The upload is w_i - w. Server: w <- (1 - beta) w + beta mean(w_i). A client scores with theta_i;
items it did not touch score with w's rows.

The steps are Adam's: the paper leaves the solver open, and plain descent needs thousands of steps
for the rows of a table that a batch rarely holds. For the same reason only rows in the batch
follow. eta lambda is one option, ``follow``. lambda is smaller than the paper's 15, which suits
parameters that every sample moves. User embeddings are in no envelope: they are nobody else's.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec import silo_networks as networks
from hushrec.aggregate import ClientRows, Total, Update
from hushrec.clients import TrainView
from hushrec.methods.base import (
    Fitted,
    Method,
    PerClient,
    PerClientRows,
    Private,
    PrivateFields,
    Shared,
)
from hushrec.methods.lipm import LIPM, LIPMConfig, PerceptronConfig, score_user
from hushrec.neural import torch
from hushrec.rng import Round, Streams


class PFedMeConfig(PerceptronConfig):
    """Options of pFedMe."""

    epochs: Annotated[int, Field(ge=1)] = 2
    """Passes over a client's samples in a round."""
    decay: Annotated[float, Field(ge=0)] = 3e-3
    """Weight of the squared embeddings in the loss."""
    steps: Annotated[int, Field(ge=1)] = 3
    """K: steps of theta on every batch."""
    pull: Annotated[float, Field(gt=0)] = 0.01
    """Lambda: weight of the distance between theta and w."""
    follow: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Eta lambda: share of the way that w goes to theta after a batch."""
    server_rate: Annotated[float, Field(gt=0)] = 1.0
    """Beta."""


class PFedMe(Method):
    """Each client's own model, held near a shared one by a Moreau envelope."""

    name = "pfedme"
    Config = PFedMeConfig
    default_rounds = 50
    silos = True

    @property
    def perceptron(self) -> LIPM:
        """Return the network that is trained."""
        own = self.config.model_dump(include=set(PerceptronConfig.model_fields))
        return LIPM(LIPMConfig(lipm=False, **own))

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the item table and the network."""
        return self.perceptron.init(view, streams)

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep user embeddings and the own model, of the item table the touched rows."""
        c: PFedMeConfig = self.config
        positives = np.diff(view.positives.indptr[view.client_indptr])
        touched = np.minimum(view.n_items, positives * (1 + c.negatives * c.epochs))
        return {
            "users": PerClientRows(np.diff(view.client_indptr), c.d),
            "network": PerClient(shared["network"].copy()),
            "rows": PerClientRows(touched, c.d),
        }

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train theta and let w follow (algorithm 1)."""
        c: PFedMeConfig = self.config
        perceptron = self.perceptron
        samples = networks.draw_samples(view, c.negatives, c.epochs, now)
        received = np.repeat(shared["network"][None], len(view.clients), 0)
        items = shared["items"][samples.touched.values]
        kept = private["users"]
        assert isinstance(kept, ClientRows)
        trained = networks.train(
            networks.Problem(
                perceptron.shapes,
                perceptron.loss,
                samples,
                c.batch,
                {},
                view.client_indptr,
                c.decay,
            ),
            received,
            networks.rows_of_users(kept, view),
            items,
            networks.Moreau(networks.Adam(c.lr), c.steps, c.pull, c.follow),
        )
        network, rows = trained.anchors
        touched = samples.touched
        update = Update(
            len(view.clients),
            {"items": ClientRows(touched.indptr, touched.values, rows - items)},
            {"network": network - received},
        )
        own: Private = {
            "users": ClientRows(view.client_indptr, view.users, trained.users),
            "network": trained.network,
            "rows": ClientRows(touched.indptr, touched.values, trained.items),
        }
        return Fitted(update, own, trained.losses)

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Go beta of the way to the mean of the w_i."""
        rate = self.config.server_rate / total.clients
        ids, summed = total.rows["items"]
        items = shared["items"].astype(np.float64)
        items[ids] += rate * summed
        network = shared["network"] + rate * total.dense["network"]
        return {"items": items.astype(np.float32), "network": network.astype(np.float32)}

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Score with the client's own model."""
        scores = np.zeros((len(history), history.n_items), np.float32)
        kept, rows, indptr = private["users"], private["rows"], history.client_indptr
        assert isinstance(kept, ClientRows)
        assert isinstance(rows, ClientRows)
        users, flats = networks.rows_of_users(kept, history), np.asarray(private["network"])
        for client in range(len(indptr) - 1):
            own = slice(rows.indptr[client], rows.indptr[client + 1])
            table = shared["items"].copy()
            table[rows.ids[own]] = rows.rows[own]
            flat = torch.from_numpy(flats[client : client + 1])
            p = networks.unpack(flat, self.perceptron.shapes)
            for k in range(indptr[client], indptr[client + 1]):
                user = torch.from_numpy(users[k])
                scores[k] = score_user(p, torch.from_numpy(table), user, None, self.config.hidden)
        return scores
