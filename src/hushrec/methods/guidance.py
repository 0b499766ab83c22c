"""FedRKG's gate over any backbone in tensors (Lim et al., 2025, eq. 5 to 8)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec import neural
from hushrec.neural import Tensor, torch

Array = NDArray[Any]


def fused_loss(loss_of: neural.LossOf, beta: float) -> neural.LossOf:
    """Wrap a backbone's loss: the same on the fused rows ``beta P + 2 (1 - beta) g P_g``."""

    def loss(params: neural.Params, rows: neural.Params, batch: neural.Batch) -> Tensor:
        own, mean = rows["items"], rows["guidance"]
        logit = torch.cat([own, mean, own - mean], -1) @ params["gate"][..., None]
        opened = torch.sigmoid(logit + params["gate_bias"][:, None, None])
        return loss_of(params, {"items": beta * own + 2 * (1 - beta) * opened * mean}, batch)

    return loss


def train_gates(
    loss_of: neural.LossOf,
    frozen: neural.Arrays,
    tables: Array,
    guidance: Array,
    gates: tuple[Array, Array],
    samples: neural.Samples,
    batch: int,
    *,
    rate: float,
    beta: float,
    clip: float | None,
) -> tuple[Array, Array]:
    """Return the gates (weights, biases) after SGD on the fused rows, all else frozen."""
    trained, _, _ = neural.train(
        {**frozen, "gate": gates[0], "gate_bias": gates[1]},
        {"items": tables, "guidance": guidance},
        fused_loss(loss_of, beta),
        [{"gate": rate, "gate_bias": rate}],
        samples,
        batch,
        len(guidance),
        clip,
    )
    return trained["gate"], np.asarray(trained["gate_bias"])
