"""The family that scores an item by a network over its row: training fused, scoring in tensors.

The score is f(q_i), or f([p_u, q_i]) where the client has a vector; f has ReLU between its layers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec import kernels
from hushrec.aggregation import ClientRows
from hushrec.data.views import TrainView
from hushrec.kernels.draws import Pace
from hushrec.kernels.row_networks import NetworkRates, RowSamples, Shape, fit_row_networks
from hushrec.streams import Round, Streams
from hushrec.training import tensors
from hushrec.training.inner_product import Descent
from hushrec.training.samples import draw_device_samples
from hushrec.training.tensors import Tensor, torch

Array = NDArray[Any]

ITEM_BLOCK = 1024
"""Items scored at a time: what they leave behind fits the cache."""


def initial_row_network(n_in: int, hidden: tuple[int, ...], streams: Streams) -> dict[str, Array]:
    """Draw the score function that all devices start from."""
    return tensors.initial_mlp([n_in, *hidden, 1], streams, "init/score-function")


def row_logits(params: tensors.Params, rows: Tensor) -> Tensor:
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
    return tensors.mlp(params, rows)[..., 0]


def row_loss(params: tensors.Params, rows: tensors.Params, batch: tensors.Batch) -> Tensor:
    """Return each client's mean binary cross-entropy."""
    return tensors.mean_bce(row_logits(params, rows["items"]), batch)


def train_row_networks(
    view: TrainView,
    now: Round,
    table: Array,
    params: tensors.Arrays,
    pace: Pace,
    descent: Descent,
    vector_rate: float = 1.0,
) -> tuple[dict[str, Array], ClientRows, NDArray[np.float64]]:
    """Train a stack of clients.

    They start from ``table``, or each from its own one, [clients, items, d]. The vector's rate is
    ``vector_rate`` times that of the other parameters. Returns the parameters, the touched rows as
    the clients left them, and each client's mean loss before its steps.
    """
    descent.check(np.dtype(np.float32))
    samples = draw_device_samples(view, pace.negatives, pace.epochs, now)
    indptr, ids, places = kernels.number_by_first_use(samples.indptr, samples.items, view.n_items)
    owner = np.repeat(np.arange(len(view)), np.diff(indptr))
    rows = np.ascontiguousarray(table[ids] if table.ndim == 2 else table[owner, ids])
    order = ["vector"] if "vector" in params else []
    order += [f"layer{k}/{part}" for k in range(len(params) // 2) for part in ("weight", "bias")]
    sizes = [math.prod(params[name].shape[1:]) for name in order]
    flat = [params[name].reshape(len(view), k) for name, k in zip(order, sizes, strict=True)]
    theta = np.ascontiguousarray(np.concatenate(flat, 1))
    widths = [table.shape[-1], *(params[name].shape[1] for name in order if "bias" in name)]
    clip = np.inf if descent.clip is None else descent.clip
    losses = fit_row_networks(
        theta,
        rows,
        indptr,
        RowSamples(samples.indptr, places, samples.labels, samples.epochs),
        pace.batch,
        Shape(params["vector"].shape[1] if "vector" in params else 0, np.array(widths)),
        NetworkRates(descent.own * vector_rate, descent.own, descent.item, clip),
        descent.two_steps,
    )
    parts = np.split(theta, np.cumsum(sizes)[:-1], 1)
    trained = {
        name: part.reshape(params[name].shape) for name, part in zip(order, parts, strict=True)
    }
    return trained, ClientRows(indptr, ids, rows), losses


def score_row_networks(
    params: tensors.Arrays, table: Array, own: Array | ClientRows | None = None
) -> NDArray[np.float32]:
    """Score every item for every client: [clients, items].

    ``table`` is everybody's, with each client's ``own`` rows in place, or [clients, items, d].
    """
    n_clients, n_items = len(next(iter(params.values()))), table.shape[-2]
    scores = np.empty((n_clients, n_items), np.float32)
    for clients, real in tensors.groups_in_order(n_clients):
        state = {name: torch.from_numpy(array[clients]) for name, array in params.items()}
        shape = (tensors.GROUP, *table.shape[-2:])
        tables = np.array(np.broadcast_to(table, shape) if table.ndim == 2 else table[clients])
        if isinstance(own, ClientRows):
            slots = np.arange(tensors.GROUP)
            kernels.put_rows(tables, slots, clients, own.indptr, own.ids, own.rows)
        for first in range(0, n_items, ITEM_BLOCK):
            block = slice(first, first + ITEM_BLOCK)
            with torch.no_grad():
                found = row_logits(state, torch.from_numpy(tables[:, block]))
            scores[clients[:real], block] = found[:real].numpy()
    return scores


# ---------------------------------------------------------------- FedRKG's gate over such a network


def gated_loss(loss_of: tensors.LossOf, beta: float) -> tensors.LossOf:
    """Wrap a loss: the same on the fused rows ``beta P + 2 (1 - beta) g P_g`` (FedRKG, eq. 6)."""

    def loss(params: tensors.Params, rows: tensors.Params, batch: tensors.Batch) -> Tensor:
        own, mean = rows["items"], rows["guidance"]
        logit = torch.cat([own, mean, own - mean], -1) @ params["gate"][..., None]
        opened = torch.sigmoid(logit + params["gate_bias"][:, None, None])
        return loss_of(params, {"items": beta * own + 2 * (1 - beta) * opened * mean}, batch)

    return loss
