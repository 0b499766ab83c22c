"""Options that several methods share, and optimisers of the server on sums over clients.

Adam has decoupled weight decay; its state is part of the shared parameters. Newton's method is
damped (Levenberg 1944, Marquardt 1963): the server holds the best weights so far with their
gradient and Hessian, and clients evaluate trials, steps of several dampings from there, in one
round. The trial with the lowest loss is accepted if that is lower than before, and the next trials
are around a tenth of its damping; otherwise they are around ten times the largest one.
"""

from __future__ import annotations

from types import ModuleType
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat

from hushrec.config import Count, Width
from hushrec.kernels import layers
from hushrec.kernels.draws import Pace
from hushrec.methods.base import Array, Between, MethodConfig, SearchSpace, Shared

FIRST, SECOND, SMALL = 0.9, 0.99, 1e-8
"""Adam's decay of both moments, and what keeps its division finite."""
STATE = ("weights", "trials", "loss", "gradient", "hessian", "damping")
DAMPINGS = np.array([100.0, 1.0, 0.01])
"""Trials of one round have these multiples of the damping: a good one is rarely known before."""
WORST = 1e30
"""The loss before the first trial."""


def first_moments(network: Array) -> Shared:
    """Return the state of Adam before its first step."""
    zeros = np.zeros(network.shape)
    return {"steps": np.array([0]), "first": zeros, "second": zeros.copy()}


def adam_step(
    network: Array, state: Shared, gradient: Array, rate: float, decay: float
) -> tuple[Array, Shared]:
    """Return the network and the state of Adam after a step along the mean gradient."""
    steps = state["steps"] + 1
    (whole1,), (whole2,) = 1 - FIRST**steps, 1 - SECOND**steps
    kept = FIRST, SECOND, float(whole1), float(whole2), SMALL, 1 - rate * decay
    gradient = np.asarray(gradient, np.float64)
    moments = state["first"], state["second"]
    moved, first, second = layers.step_of_server(network, *moments, gradient, kept, rate)
    return moved, {"steps": steps, "first": first, "second": second}


def first_trial(weights: Array) -> Shared:
    """Return the state of Newton's method before the clients evaluated its first weights."""
    size = len(weights)
    return {
        "weights": weights.copy(),
        "trials": np.repeat(weights[None], len(DAMPINGS), axis=0),
        "loss": np.array([WORST]),
        "gradient": np.zeros(size),
        "hessian": np.eye(size),
        "damping": np.array([1.0]),
    }


def rescaled(sums: Array, scale: Array) -> Array:
    """Return the sums that `next_trials` takes as they were if scores were divided by a scale."""
    wide = scale.astype(np.float64)
    hessian = np.outer(wide, wide)[np.triu_indices(len(wide))]
    return np.asarray(sums / np.concatenate([np.ones(2), wide, hessian]))


def next_trials(state: Shared, sums: Array, penalty: float) -> Shared:
    """Return the state after a round of trials, from the clients' sums at their weights.

    The sums, a row for each trial, are: number of prediction tasks, loss, gradient, upper triangle
    of the Hessian. Before the first steps all trials are the start, and one row is enough.
    """
    size, trials, tasks = len(state["weights"]), state["trials"][: len(sums)], max(sums[0, 0], 1.0)
    losses = sums[:, 1] / tasks + penalty * (trials**2).sum(axis=1) / 2
    best = int(losses.argmin())
    tried = state["damping"] * (DAMPINGS if len(sums) > 1 else 1.0)
    new = {name: state[name] for name in STATE}
    if losses[best] < state["loss"][0]:
        hessian = np.zeros((size, size))
        hessian[np.triu_indices(size)] = sums[best, 2 + size :] / tasks
        hessian += np.triu(hessian, 1).T + penalty * np.eye(size)
        new |= {"weights": trials[best], "loss": losses[[best]], "hessian": hessian}
        new["gradient"] = sums[best, 2 : 2 + size] / tasks + penalty * trials[best]
        new["damping"] = tried[[best]] / 10
    else:
        new["damping"] = tried[[0]] * 10
    ridge = np.diag(np.diag(new["hessian"]))
    steps = [
        np.linalg.solve(new["hessian"] + damping * ridge, new["gradient"])
        for damping in new["damping"] * DAMPINGS
    ]
    new["trials"] = new["weights"] - np.stack(steps)
    return new


Negatives = Annotated[int, Field(ge=1, le=1000)]


class SampledConfig(MethodConfig):
    """Samples and epochs of local training."""

    d: Width = 32
    """Width of an item row."""
    negatives: Negatives = 4
    """Negatives per positive, drawn again in every round."""
    epochs: Count = 1
    """Epochs per round."""
    batch: Count = 256
    """Batch size; the loss is a mean over the batch."""

    @property
    def pace(self) -> Pace:
        """Negatives, epochs and batch size, for the kernels."""
        return Pace(self.negatives, self.epochs, self.batch)


class InnerProductConfig(SampledConfig):
    """Options of methods that train one item table and a client vector."""

    lr: PositiveFloat = 0.1
    """Learning rate of the client's own parameters."""
    item_rate: NonNegativeFloat = 80.0
    """Learning rate of item rows: lr * (number of items) * item_rate. Useful rates are large,
    because the loss is a mean over the batch and the server divides by the number of clients."""
    init_std: PositiveFloat = 1.0
    """Standard deviation of the initial item rows."""

    def rates(self, n_items: int) -> tuple[float, float]:
        """Return the learning rates of (own parameters, item rows)."""
        return self.lr, self.lr * n_items * self.item_rate


SEARCH: SearchSpace = {
    "lr": Between(0.02, 1.0),
    "item_rate": Between(1.0, 100.0),
    "init_std": Between(0.03, 1.0),
}
"""Search space of `hushrec tune`; low item rates keep devices close to the shared table."""


class FeatureNetworkConfig(MethodConfig):
    """Options of methods with a feature network."""

    d: Width = 64
    """Embedding width."""
    hidden: Annotated[tuple[Width, ...], Field(min_length=1)] = (64, 32, 16, 8)
    """Widths of the hidden layers."""
    lr: PositiveFloat = 0.05
    """Learning rate on the device (alpha1)."""
    epochs: Count = 5
    """Epochs per round (E2)."""
    batch: Count = 32
    """Batch size; the loss is a mean over the batch."""
    positive_above: float | None = None
    """Training rows with a value above this are positives, others negatives.  [all positive]"""
    negatives: Annotated[int, Field(ge=0, le=1000)] = 4
    """Negatives per training row, from items without one, drawn again in every round."""
    server_rate: PositiveFloat = 1.0
    """Factor on the mean difference that the server adds (alpha3)."""
    adapt_epochs: Annotated[int, Field(ge=0)] = 5
    """Epochs for which a device adapts its copy before scoring."""
    adapt_lr: PositiveFloat | None = None
    """Learning rate of the adaptation.  [lr]"""

    @property
    def adapt_rate(self) -> float:
        """Learning rate of the adaptation."""
        return self.lr if self.adapt_lr is None else self.adapt_lr


class PerceptronConfig(MethodConfig):
    """Options of the MLP of LIPM and pFedMe, and of its local training."""

    d: Width = 64
    """Embedding width."""
    hidden: tuple[Width, ...] = (64, 32)
    """Widths of the hidden layers."""
    lr: PositiveFloat = 5e-3
    """Learning rate of Adam."""
    batch: Count = 128
    """Batch size."""
    epochs: Count = 5
    """Epochs per round."""
    negatives: Count = 1
    """Negatives per positive, drawn again in every epoch."""
    decay: NonNegativeFloat = 0.05
    """Weight of the squared norm of embeddings in the loss, against overfitting of silos."""
    init_std: PositiveFloat = 0.1
    """Standard deviation of the initial item table."""


def networks() -> ModuleType:
    """Import the training of networks, which needs torch; inner products do not."""
    from hushrec.training import networks

    return networks
