"""FCF: federated collaborative filtering (Ammad-ud-din et al., 2019).

Implicit matrix factorisation with the loss of iALS (Hu, Koren, Volinsky 2008): the sum over (u, i)
of c_ui (p_ui - <x_u, y_i>)² with p = 1 and c = 1 + alpha on positives, p = 0 and c = 1 elsewhere,
plus ridge on both sides. Shared: item vectors y_i. Private: nothing; a device solves for its x_u
from the received item vectors and its history.

A round: the gradient of an item is a sum over users, -2 sum c_ui (p_ui - <x_u, y_i>) x_u
+ 2 ridge y_i, and the server takes one Adam step with it, as in the paper. The gradient has two
parts: y_i times the sum of x xᵀ, for all items, and a correction for positives. Deviation from the
paper: a device uploads x xᵀ and its corrections in place of m rows, and the server computes the
product, which is the same gradient with less communication.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat

from hushrec.aggregation import ClientRows, Total, Update
from hushrec.config import Width
from hushrec.data.views import Ragged, TrainView
from hushrec.methods.base import (
    Array,
    Explains,
    Exports,
    Fitted,
    Method,
    MethodConfig,
    Reason,
    Scores,
    Shared,
)
from hushrec.methods.baselines import distinct_items, where
from hushrec.methods.forms import ItemFactors
from hushrec.methods.statistics.pair_weights import gram, solve_users, solved_reasons
from hushrec.private import Private
from hushrec.streams import Round, Streams
from hushrec.training.samples import score_inner_product

EPSILON = 1e-8
"""Keeps Adam's division finite."""


class FCFConfig(MethodConfig):
    """Options of FCF."""

    d: Width = 25
    """Width of user and item vectors."""
    alpha: PositiveFloat = 4.0
    """Weight of a positive is 1 + alpha, of any other pair 1."""
    ridge: PositiveFloat = 10.0
    """L2 regularisation of user and item vectors."""
    rate: PositiveFloat = 0.02
    """Learning rate of the server's Adam step (gamma)."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Adam's decay of the mean gradient."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Adam's decay of the mean squared gradient."""
    init_std: PositiveFloat = 0.1
    """Standard deviation of the initial item vectors."""
    positive_above: float | None = None
    """Training rows with a value above this are positives, others are ignored.  [all positive]"""


class FCF(Method, Explains, Exports):
    """Federated implicit MF: devices solve for user vectors, the server updates item vectors."""

    name = "fcf"
    Config = FCFConfig
    config: FCFConfig

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the item vectors, with an initial state of Adam."""
        drawn = streams.generator("init/items").standard_normal((view.n_items, self.config.d))
        zeros, items = np.zeros_like(drawn), drawn * self.config.init_std
        return {"items": items, "mean": zeros, "square": zeros, "steps": np.zeros(1)}

    def download(self, shared: Shared) -> Shared:
        """Send the item vectors, without the state of Adam."""
        return {"items": shared["items"]}

    serving = download

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Solve for the clients' vectors; upload their terms of the item gradients."""
        items, liked = shared["items"], self.liked(view)
        vectors = self.vectors(items, liked)
        owner = np.repeat(np.arange(len(view)), liked.lengths)
        guess = np.einsum("rd,rd->r", vectors[owner], items[liked.values])
        # c (p - guess) is -guess for all items, which x xᵀ covers, plus this for positives.
        more = (1 + self.config.alpha) * (1 - guess) + guess
        terms = (more[:, None] * vectors[owner]).astype(np.float32)
        rows = ClientRows(liked.indptr, liked.values, terms)
        squares = np.einsum("ca,cb->cab", vectors, vectors).astype(np.float32)
        return Fitted(Update(len(view), rows={"items": rows}, dense={"squares": squares}), {})

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Take one Adam step with the mean gradient over the clients."""
        config, items = self.config, shared["items"]
        gradient = 2 * config.ridge * items / total.clients
        if "squares" in total.dense:
            gradient = gradient + 2 * items @ total.dense["squares"] / total.clients
        gradient = gradient - 2 * total.table("items", *items.shape) / total.clients
        steps = shared["steps"] + 1
        mean = config.beta1 * shared["mean"] + (1 - config.beta1) * gradient
        square = config.beta2 * shared["square"] + (1 - config.beta2) * gradient**2
        whole = mean / (1 - config.beta1**steps)
        spread = np.sqrt(square / (1 - config.beta2**steps)) + EPSILON
        moved = items - config.rate * whole / spread
        return {"items": moved, "mean": mean, "square": square, "steps": steps}

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Score with vectors solved from the clients' histories."""
        vectors = self.vectors(shared["items"], self.liked(history))
        return score_inner_product(shared["items"], vectors)

    def contributions(
        self, shared: Shared, private: Private, history: TrainView, items: NDArray[np.int32]
    ) -> list[list[Reason]]:
        """Find the item of the history that adds most to the score."""
        table, liked = shared["items"], self.liked(history)
        return solved_reasons(
            table, gram(table) / self.config.alpha, liked, items, self._ridge(liked)
        )

    def device_form(self, shared: Shared, view: TrainView) -> ItemFactors:
        """Return the item vectors and the system of `vectors`; items of a history are positives."""
        config = self.config
        return ItemFactors(
            shared["items"],
            ridge=config.ridge / config.alpha,
            unseen=1 / config.alpha,
            factor=(1 + config.alpha) / config.alpha,
            reads_values=config.positive_above is not None,
        )

    def liked(self, view: TrainView) -> Ragged:
        """Return the positives of each client, ascending."""
        if self.config.positive_above is None:
            return distinct_items(view.positives)
        above = view.values.values > self.config.positive_above
        return distinct_items(where(view.positives, above))

    def vectors(self, items: Array, liked: Ragged) -> Array:
        """Return the user vectors of clients with these positives."""
        # (YᵀY + alpha Y_uᵀY_u + ridge) x = (1 + alpha) Y_uᵀ 1, divided by alpha for the kernel.
        weight, ridge = self.config.alpha, self._ridge(liked)
        solved = solve_users(items, gram(items) / weight, liked.indptr, liked.values, ridge)
        return np.asarray(solved * ((1 + weight) / weight))

    def _ridge(self, liked: Ragged) -> Array:
        return np.full(len(liked), self.config.ridge / self.config.alpha)
