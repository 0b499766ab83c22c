"""Adam with decoupled weight decay, as a server's optimiser: its state is shared parameters.

Newton's method on sums over clients, damped where a step would not go down.

The server holds the best weights so far with their gradient and Hessian, and asks clients about a
trial: weights a step further. If the trial is better it is taken and the damping falls tenfold,
otherwise the damping rises tenfold (Levenberg 1944, Marquardt 1963). A round is one question.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hushrec.methods.base import Shared

FIRST, SECOND, SMALL = 0.9, 0.99, 1e-8


@dataclass(frozen=True)
class Adam:
    """One step of Adam on ``network``, from the mean gradient."""

    rate: float
    decay: float

    @staticmethod
    def start(network: NDArray[np.float32]) -> Shared:
        """Return the state before the first step."""
        zeros = np.zeros(len(network))
        return {"steps": np.array([0]), "first": zeros, "second": zeros.copy()}

    def step(
        self, network: NDArray[np.float32], state: Shared, gradient: NDArray[np.float64]
    ) -> tuple[NDArray[np.float32], Shared]:
        """Return the network and the state after a step."""
        steps = state["steps"] + 1
        first = FIRST * state["first"] + (1 - FIRST) * gradient
        second = SECOND * state["second"] + (1 - SECOND) * gradient**2
        step = first / (1 - FIRST**steps) / (np.sqrt(second / (1 - SECOND**steps)) + SMALL)
        moved = network * (1 - self.rate * self.decay) - self.rate * step
        return moved.astype(np.float32), {"steps": steps, "first": first, "second": second}


Vector = NDArray[np.float64]
STATE = ("weights", "trial", "loss", "gradient", "hessian", "damping")
WORST = 1e30
"""The loss before anything was asked."""


def first_trial(weights: Vector) -> Shared:
    """Return the state that asks about these weights."""
    size = len(weights)
    return {
        "weights": weights.copy(),
        "trial": weights.copy(),
        "loss": np.array([WORST]),
        "gradient": np.zeros(size),
        "hessian": np.eye(size),
        "damping": np.array([1.0]),
    }


def next_trial(state: Shared, answers: Vector, penalty: float) -> Shared:
    """Take the clients' sums: questions, loss, gradient, and upper triangle of the Hessian."""
    size = len(state["weights"])
    questions = max(answers[0], 1.0)
    trial = state["trial"]
    loss = answers[1] / questions + penalty * (trial @ trial) / 2
    new = {name: state[name] for name in STATE}
    if loss < state["loss"][0]:
        hessian = np.zeros((size, size))
        hessian[np.triu_indices(size)] = answers[2 + size :] / questions
        hessian += np.triu(hessian, 1).T + penalty * np.eye(size)
        new |= {"weights": trial, "loss": np.array([loss]), "hessian": hessian}
        new["gradient"] = answers[2 : 2 + size] / questions + penalty * trial
        new["damping"] = state["damping"] / 10
    else:
        new["damping"] = state["damping"] * 10
    hessian = new["hessian"] + np.diag(new["damping"] * np.diag(new["hessian"]))
    new["trial"] = new["weights"] - np.linalg.solve(hessian, new["gradient"])
    return new
