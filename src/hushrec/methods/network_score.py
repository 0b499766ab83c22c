"""The family that scores an item by a network over its row: training fused, scoring in tensors.

The score is f(q_i), or f([p_u, q_i]) where the client has a vector; f has ReLU between its layers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec import kernels, neural
from hushrec.aggregate import ClientRows
from hushrec.clients import TrainView
from hushrec.errors import ConfigError
from hushrec.kernels.scores import Rates, Shape, train_clients
from hushrec.methods.inner_product import SampledConfig
from hushrec.neural import Tensor, torch
from hushrec.rng import Round, Streams

Array = NDArray[Any]

ITEM_BLOCK = 1024
"""Items scored at a time: what they leave behind fits the cache."""


def initial_network(n_in: int, hidden: tuple[int, ...], streams: Streams) -> dict[str, Array]:
    """Draw the score function that all devices start from."""
    return neural.initial_mlp([n_in, *hidden, 1], streams, "init/score-function")


def logits(params: neural.Params, rows: Tensor) -> Tensor:
    """Score rows [clients, samples, d] by each client's network: [clients, samples]."""
    if "vector" in params:
        # The vector is the same for all rows, so its share of the first layer is a bias.
        vector, weight = params["vector"], params["layer0/weight"]
        share = torch.bmm(vector[:, None], weight[:, : vector.shape[1]])[:, 0]
        params = {
            **params,
            "layer0/weight": weight[:, vector.shape[1] :],
            "layer0/bias": params["layer0/bias"] + share,
        }
    return neural.mlp(params, rows)[..., 0]


def loss(params: neural.Params, rows: neural.Params, batch: neural.Batch) -> Tensor:
    """Return each client's mean binary cross-entropy."""
    return neural.mean_bce(logits(params, rows["items"]), batch)


def train(
    rates: tuple[float, float],
    config: SampledConfig,
    view: TrainView,
    table: Array,
    params: neural.Arrays,
    now: Round,
    *,
    two_steps: bool,
    vector_rate: float = 1.0,
    clip: float | None = None,
) -> tuple[dict[str, Array], ClientRows, NDArray[np.float64]]:
    """Train a stack of clients at the given (parameter, item) rates.

    They start from ``table``, or each from its own one, [clients, items, d]. A batch takes one
    joint step or, with ``two_steps``, one on the rows after that on the parameters. The vector's
    rate is ``vector_rate`` times that of the other parameters. Returns the parameters, the touched
    rows as the clients left them, and each client's mean loss before its steps.
    """
    if max(rates) > np.finfo(np.float32).max:
        raise ConfigError(
            f"an item rate of {rates[1]:g} is too large: use a smaller lr or item_rate"
        )
    samples = neural.draw_samples(view, config.negatives, config.epochs, now)
    indptr, ids, place = kernels.places(samples.indptr, samples.items, view.n_items)
    owner = np.repeat(np.arange(len(view)), np.diff(indptr))
    rows = np.ascontiguousarray(table[ids] if table.ndim == 2 else table[owner, ids])
    order = ["vector"] if "vector" in params else []
    order += [f"layer{k}/{part}" for k in range(len(params) // 2) for part in ("weight", "bias")]
    sizes = [math.prod(params[name].shape[1:]) for name in order]
    flat = [params[name].reshape(len(view), k) for name, k in zip(order, sizes, strict=True)]
    theta = np.ascontiguousarray(np.concatenate(flat, 1))
    widths = [table.shape[-1], *(params[name].shape[1] for name in order if "bias" in name)]
    losses = train_clients(
        theta,
        rows,
        indptr,
        samples.indptr,
        place,
        samples.labels,
        samples.epochs,
        config.batch,
        Shape(params["vector"].shape[1] if "vector" in params else 0, np.array(widths)),
        Rates(rates[0] * vector_rate, *rates, np.inf if clip is None else clip),
        two_steps,
    )
    parts = np.split(theta, np.cumsum(sizes)[:-1], 1)
    trained = {
        name: part.reshape(params[name].shape) for name, part in zip(order, parts, strict=True)
    }
    return trained, ClientRows(indptr, ids, rows), losses


def score(
    params: neural.Arrays, table: Array, own: Array | ClientRows | None = None
) -> NDArray[np.float32]:
    """Score every item for every client: [clients, items].

    ``table`` is everybody's, with each client's ``own`` rows in place, or [clients, items, d].
    """
    n_clients, n_items = len(next(iter(params.values()))), table.shape[-2]
    scores = np.empty((n_clients, n_items), np.float32)
    for clients, real in neural.in_groups(n_clients):
        state = {name: torch.from_numpy(array[clients]) for name, array in params.items()}
        shape = (neural.GROUP, *table.shape[-2:])
        tables = np.array(np.broadcast_to(table, shape) if table.ndim == 2 else table[clients])
        if isinstance(own, ClientRows):
            slots = np.arange(neural.GROUP)
            kernels.put_rows(tables, slots, clients, own.indptr, own.ids, own.rows)
        for first in range(0, n_items, ITEM_BLOCK):
            block = slice(first, first + ITEM_BLOCK)
            with torch.no_grad():
                found = logits(state, torch.from_numpy(tables[:, block]))
            scores[clients[:real], block] = found[:real].numpy()
    return scores
