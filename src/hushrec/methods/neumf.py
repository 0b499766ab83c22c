"""NeuMF: neural matrix factorisation on pooled data (He et al., 2017).

A baseline that is neither federated nor private. Two branches with separate tables (He et al.,
section 3.4): GMF multiplies user vector and item row entry by entry (eq. 9), MLP is a network over
both (eq. 10), and one output layer weights both branches (eq. 12). Binary cross-entropy (eq. 7)
with sampled negatives. Without ``products`` only the MLP branch remains: the three-layer NCF that
PFedRec is compared with (Zhang et al., 2023, section 6.2).

Deviation from the paper: SGD on mini-batches, without pre-training of the branches. Rows take the
sum of the gradients of their samples, because a row is in few batches, and the layers their mean.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field, PositiveFloat

from hushrec.aggregation import Update
from hushrec.config import Count, Width
from hushrec.data.views import TrainView
from hushrec.io import require_memory
from hushrec.kernels.row_networks import NeuMFModel, fit_neumf
from hushrec.methods.base import (
    NETWORK,
    Between,
    Fitted,
    Scores,
    SearchSpace,
    Shared,
    Traits,
    of_one,
)
from hushrec.methods.baselines import CentralMF, CentralMFConfig
from hushrec.methods.forms import ItemNetworks, RowNetwork
from hushrec.private import PerClient, Private, PrivateFields
from hushrec.streams import Round, Streams
from hushrec.training import tensors
from hushrec.training.samples import draw_device_samples, first_vector
from hushrec.training.tensors import torch


class NeuMFConfig(CentralMFConfig):
    """Options of NeuMF; a round is one epoch.

    Both branches have vectors and rows of width d. Weight decay applies per sample.
    """

    products: bool = True
    """Whether there is a GMF branch; without it the method is NCF."""
    hidden: Annotated[tuple[Width, ...], Field(min_length=1)] = (32, 16, 8)
    """Widths of the hidden layers of the MLP branch, after its 2d inputs."""
    lr: PositiveFloat = 0.1
    """Learning rate of the layers."""
    row_lr: PositiveFloat = 0.05
    """Learning rate of vectors and rows, per sample."""
    batch: Count = 256
    """Samples per step."""


class NeuMF(CentralMF):
    """Neural matrix factorisation on pooled data."""

    name = "neumf"
    Config = NeuMFConfig
    config: NeuMFConfig
    traits = Traits(pooled=True, unexplained=NETWORK)
    search: ClassVar[SearchSpace] = {
        "lr": Between(0.01, 1.0),
        "row_lr": Between(0.005, 0.2),
        "decay": Between(1e-4, 0.1),
        "init_std": Between(0.01, 1.0),
    }

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the item rows of both branches, concatenated, and the layers."""
        config, shape = self.config, (view.n_items, 2 * self.config.d)
        need = 24 * shape[0] * shape[1]
        require_memory(need, f"item tables of width d={config.d}", "a smaller d")
        drawn = streams.generator("init/items").standard_normal(shape, np.float32)
        layers = tensors.initial_mlp([2 * config.d, *config.hidden], streams, "init/mlp")
        final = tensors.initial_mlp([config.d + config.hidden[-1], 1], streams, "init/final")
        drawn[:, : config.d] *= config.products  # zero rows and vectors have zero gradients
        return {
            "items": drawn * np.float32(config.init_std),
            **layers,
            **{name.replace("layer0", "final"): array for name, array in final.items()},
        }

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep the user vectors of both branches."""
        both = first_vector(2 * self.config.d, self.config.init_std, streams)
        both[: self.config.d] *= self.config.products
        return {"vector": PerClient(both)}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train for one epoch on pooled samples in random order."""
        config = self.config
        samples = draw_device_samples(view, config.negatives, 1, now)
        clients = np.repeat(np.arange(len(view)), samples.lengths)
        order = now.generator("order").permutation(len(clients))
        users, items = np.array(private["vector"]), shared["items"].copy()
        final = shared["final/weight"][:, 0]
        products = final[: config.d].copy()
        below = list(tensors.mlp_shapes([2 * config.d, *config.hidden]))
        network = [shared[n] for n in below] + [final[config.d :], shared["final/bias"]]
        theta = np.concatenate([array.ravel() for array in network])
        shuffled = clients[order], samples.items[order], samples.labels[order]
        widths = np.array([2 * config.d, *config.hidden, 1])
        rates = (config.lr, config.row_lr, config.decay)
        model = NeuMFModel(users, items, products, theta)
        loss = fit_neumf(model, *shuffled, config.batch, widths, rates)
        ends = np.cumsum([array.size for array in network])[:-1]
        *layers, top, bias = np.split(theta, ends)
        trained = {
            "items": items,
            **dict(zip(below, layers, strict=True)),
            "final/weight": np.concatenate([products, top]),
            "final/bias": bias,
        }
        change = {n: (a.reshape(shared[n].shape) - shared[n])[None] for n, a in trained.items()}
        return Fitted(Update(1, dense=change), {"vector": users}, np.full(len(view), loss))

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Score all items, user by user."""
        vectors = torch.from_numpy(np.array(private["vector"]))
        layers = {name: torch.from_numpy(array)[None] for name, array in shared.items()}
        items, weight, bias = (layers.pop(n) for n in ("items", "final/weight", "final/bias"))
        d, scores = self.config.d, np.empty((len(vectors), items.shape[1]), np.float32)
        with torch.no_grad():
            for c, vector in enumerate(vectors):
                user = vector.expand_as(items)
                mlp = tensors.mlp(layers, torch.cat([user[..., d:], items[..., d:]], -1))
                both = torch.cat([user[..., :d] * items[..., :d], torch.relu(mlp)], -1)
                scores[c] = (both @ weight[0] + bias)[0, :, 0].numpy()
        return scores

    def user_form(self, shared: Shared, private: Private, history: TrainView) -> ItemNetworks:
        """Return the branches as a sum: the output layer, which is linear, ends each of them."""
        d, items, vector = self.config.d, shared["items"], of_one(private)["vector"]
        final, layers = shared["final/weight"], {n: a for n, a in shared.items() if "layer" in n}
        top = f"layer{len(self.config.hidden)}"
        layers |= {f"{top}/weight": final[d:], f"{top}/bias": shared["final/bias"]}
        products = RowNetwork.of(items[:, :d], {"vector": vector[:d] * final[:d, 0]})
        return ItemNetworks(
            [products, RowNetwork.of(items[:, d:], {"vector": vector[d:], **layers})]
        )
