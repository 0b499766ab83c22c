"""Two towers: a network makes a vector of an item's row, to be compared with the user's.

Shared: item table Q [m, d] and a network f, d -> d. Private: the user vector p_u. The score is
<p_u, f(q_i)>. A round on a device: batches of positives and drawn negatives, binary cross-entropy,
one joint step on p_u, f and the touched rows; upload the differences; the server adds their means.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec.extend import (
    Fitted,
    Method,
    MethodConfig,
    PerClient,
    Private,
    PrivateFields,
    Round,
    Shared,
    Streams,
    Total,
    TrainView,
    Update,
)
from hushrec.training import tensors
from hushrec.training.samples import (
    apply_mean,
    deltas,
    draw_device_samples,
    first_vector,
    initial_table,
)
from hushrec.training.tensors import DescentStep, DeviceBatch, Params, Tensor, torch


class TwoTowerConfig(MethodConfig):
    """Options of the two towers."""

    d: Annotated[int, Field(ge=1)] = 8
    """Width of rows and vectors."""
    lr: Annotated[float, Field(gt=0)] = 0.5
    """Rate of the user vector and of the network."""
    item_lr: Annotated[float, Field(gt=0)] = 50.0
    """Rate of item rows: the server's mean moves a row by a few devices' share of a step."""
    negatives: Annotated[int, Field(ge=1)] = 4
    """Drawn per positive, afresh every round."""
    batch: Annotated[int, Field(ge=1)] = 64
    """Samples per step."""


class TwoTower(Method):
    """A shared table and network, and a private vector that is compared with their output."""

    name = "two-tower"
    Config = TwoTowerConfig
    config: TwoTowerConfig

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the table and the network."""
        d = self.config.d
        network = tensors.initial_mlp([d, 2 * d, d], streams, "init/tower")
        return {"items": initial_table(d, 0.3, view.n_items, streams), **network}

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep the user vector; all devices start from one draw."""
        return {"vector": PerClient(first_vector(self.config.d, 0.3, streams))}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train vector, network and rows; upload what changed of what is shared."""
        config, network = self.config, _network(shared)
        params, rows, losses = tensors.train_tensors(
            {"vector": np.asarray(private["vector"]), **tensors.repeat(network, len(view))},
            {"items": shared["items"]},
            loss,
            [
                DescentStep(
                    {**dict.fromkeys(["vector", *network], config.lr), "items": config.item_lr}
                )
            ],
            draw_device_samples(view, config.negatives, 1, now),
            config.batch,
            view.n_items,
        )
        moved = {name: params[name] - array for name, array in network.items()}
        changed = {"items": deltas(rows["items"], shared["items"])}
        return Fitted(Update(len(view), changed, moved), {"vector": params["vector"]}, losses)

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Add the mean differences."""
        network = {
            name: (shared[name] + total.dense[name] / total.clients).astype(np.float32)
            for name in _network(shared)
        }
        return {"items": apply_mean(shared["items"], total, "items"), **network}

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Compare each user's vector with every item's."""
        params = {name: torch.from_numpy(a[None]) for name, a in _network(shared).items()}
        with torch.no_grad():
            items = tensors.mlp(params, torch.from_numpy(shared["items"][None]))[0].numpy()
        vectors = np.asarray(private["vector"])
        # Entry by entry: how a product of matrices rounds depends on how many clients there are.
        scores = [(items * vector).sum(1) for vector in vectors]
        return np.array(scores, np.float32).reshape(len(vectors), len(items))


def loss(params: Params, rows: Params, batch: DeviceBatch) -> Tensor:
    """Return each client's mean binary cross-entropy."""
    items = tensors.mlp(params, rows["items"])
    return tensors.mean_bce((items * params["vector"][:, None]).sum(-1), batch)


def _network(shared: Shared) -> dict[str, NDArray[np.float32]]:
    return {name: array for name, array in shared.items() if name.startswith("layer")}
