"""MetaMF: a meta network that generates each user's item table and MLP (Lin et al., SIGIR 2020).

From a user vector e_u a hypernetwork Theta generates a whole recommender Phi_u:

    c = e_u M                                       the collaborative vector; M is the memory
    h_k = relu(c W_k + b_k), k = 0, 1, 2            one hidden state for each generated part
    L = mat(U_L h_0), T = mat(U_T h_0)              factors [m, k] and [k, d] of the item table
    f_u: d -> 8 -> 1 with ReLU                      its layers from h_1 and h_2
    score of item i: f_u(L_i T)

Shared: Theta, of which U_L is a table with a row of k (hidden + 1) numbers for each item. Private:
e_u, with its Adam moments. A round on a device: one batch, the gradient of its binary cross-entropy
through Phi_u; a step of Adam on e_u; the device uploads the gradient of Theta. Server: one step of
Adam along the mean, whose moments stay on the server. So a round is one step, and cohorts are
small; 100 epochs of the paper are 100 n / cohort rounds.

In the paper the server holds Theta and every e_u, generates Phi_u and receives its gradient. The
chain rule is the same on either side and the sum over devices of their gradients of Theta is what
the paper's server computes, so this is the paper's step. What differs is who sees what: in the
paper's form the server knows Phi_u, reads from the gradient of its table which items a batch has,
and their labels from the signs. Here e_u never leaves the device, and of an upload only the sum
over the cohort is needed. A raw upload still names the items of the batch by its rows of U_L.

Deviations from the paper and its code: binary cross-entropy on sampled negatives in place of
squared errors of ratings, as for ranking; all devices start from one drawn e_u; the gradient's norm
is not bounded on the server, as Adam divides by its size; decay is decoupled. As in the authors'
code, L and T share one hidden state. A device downloads all of Theta: 30 MB on ML-100K.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat

from hushrec.aggregation import ClientRows, Total, Update
from hushrec.config import Count, Width
from hushrec.data.views import TrainView
from hushrec.io import require_memory
from hushrec.methods import base, forms
from hushrec.methods.base import Array, Between, Fitted, Scores, SearchSpace, Shared
from hushrec.methods.shared.options import Negatives, adam_step, first_moments
from hushrec.private import PerClient, Private, PrivateFields
from hushrec.streams import Round, Streams
from hushrec.training.samples import draw_device_samples, first_vector
from hushrec.training.tensors import Params, Tensor, torch

ROWS = "items"
"""U_L, a row of each item, in the shared parameters and in an upload."""
MOMENTS = ("steps", "first", "second")
"""State of Adam: that of Theta stays on the server, that of e_u on the device."""
TOP = 8
"""Hidden units of the generated MLP, as in the paper."""


class MetaMFConfig(base.MethodConfig):
    """Options of MetaMF; a round is one step of Adam."""

    d: Width = 32
    """Width of the user vector and of generated item rows."""
    memory: Width = 128
    """Width of the collaborative vector."""
    hidden: Width = 512
    """Width of the hidden states."""
    rank: Annotated[int, Field(ge=1, le=64)] = 8
    """Rank of a generated item table."""
    negatives: Negatives = 4
    """Negatives per positive, drawn again in every round."""
    batch: Count = 256
    """Samples of a client per round, drawn from its positives and negatives."""
    lr: PositiveFloat = 1e-3
    """Learning rate of the server's Adam."""
    vector_lr: PositiveFloat = 0.03
    """Learning rate of the device's Adam on the user vector, which takes few steps."""
    decay: NonNegativeFloat = 0.0
    """Weight decay of both, decoupled."""


class MetaMF(base.Method, base.ExportsUser, base.ItemTables, base.ModelFacts, base.Tunable):
    """A shared hypernetwork generates item table and MLP; raw uploads name a batch's items."""

    name = "metamf"
    Config = MetaMFConfig
    config: MetaMFConfig
    traits = base.Traits(
        rounds=3000,
        every=30,
        patience=600,
        batch_interactions=1024,
        unexplained=base.NETWORK,
        training_only=frozenset(MOMENTS),
    )
    search: ClassVar[SearchSpace] = {
        "lr": Between(1e-4, 1e-2),
        "vector_lr": Between(3e-3, 0.3),
        "decay": Between(1e-3, 1.0),
    }

    @property
    def phases(self) -> tuple[base.Phase, ...]:
        """One phase, which says what the server reads from a raw upload."""
        uploads = (
            "gradients of the hypernetwork; its rows name the items of the batch to the server, "
            "unless sums are secure or noise is added"
        )
        (train,) = super().phases
        return (replace(train, uploads=uploads),)

    # ------------------------------------------------------------ parameters

    def _generated(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Return the hidden state and the shape of each generated part, item rows aside."""
        d = self.config.d
        return {
            "factor": (0, (self.config.rank, d)),
            "layer0/weight": (1, (d, TOP)),
            "layer0/bias": (1, (TOP,)),
            "layer1/weight": (2, (TOP, 1)),
            "layer1/bias": (2, (1,)),
        }

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of Theta but for U_L; a bias is the last row of a layer."""
        config = self.config
        hidden = {f"hidden{k}": (config.memory + 1, config.hidden) for k in range(3)}
        generators = {
            name: (config.hidden + 1, math.prod(shape))
            for name, (_, shape) in self._generated().items()
        }
        return {"memory": (config.d, config.memory), **hidden, **generators}

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw Theta from U(-b, b), b = sqrt(6 / (inputs + outputs)) (Glorot)."""
        config, m = self.config, view.n_items
        width = config.rank * (config.hidden + 1)
        need = (4 + 8 + 8) * 3 * m * width
        require_memory(need, f"a hypernetwork for {m} items", "a smaller hidden or rank")
        generator, drawn = streams.generator("init/network"), {}
        for name, shape in self._shapes().items():
            n_in = shape[0] - (name != "memory")
            bound = math.sqrt(6 / (n_in + shape[1]))
            drawn[name] = generator.uniform(-bound, bound, shape).astype(np.float32)
            drawn[name][n_in:] = 0
        bound = math.sqrt(6 / (config.hidden + m * config.rank))
        rows = generator.random((m, config.rank, config.hidden + 1), np.float32)
        rows = (2 * rows - 1) * np.float32(bound)
        rows[:, :, -1] = 0
        shared = {ROWS: rows.reshape(m, width), **drawn}
        return {**shared, **first_moments(_flat(shared, list(shared)))}

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep the user vector and its moments."""
        d = self.config.d
        vector = first_vector(d, 1 / math.sqrt(d), streams)
        moments = {name: PerClient(np.zeros(d)) for name in ("first", "second")}
        return {"vector": PerClient(vector), "steps": PerClient(np.zeros(1, np.int64)), **moments}

    # ------------------------------------------------------------ a round

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Take the gradient of one batch; move the user vector, upload the gradient of Theta."""
        config, names = self.config, list(self._shapes())
        samples = draw_device_samples(view, config.negatives, 1, now)
        kept = {name: np.array(private[name]) for name in ("vector", *MOMENTS)}
        theta = {name: torch.from_numpy(shared[name]).requires_grad_() for name in names}
        dense = {n: np.zeros((len(view), *shared[n].shape), np.float32) for n in names}
        touched, rows, losses = [], [], np.zeros(len(view))
        for c in range(len(view)):
            own = slice(
                samples.indptr[c], min(samples.indptr[c] + config.batch, samples.indptr[c + 1])
            )
            items, slots = np.unique(samples.items[own], return_inverse=True)
            table = torch.from_numpy(shared[ROWS][items]).requires_grad_()
            vector = torch.from_numpy(kept["vector"][c]).requires_grad_()
            generated = self._generate(theta, vector, table)
            logits = _scores(generated)[torch.from_numpy(slots)]
            labels = torch.from_numpy(samples.labels[own])
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
            if not len(items):
                loss = logits.sum()
            moving = [vector, table, *theta.values()]
            of_vector, of_table, *gradients = torch.autograd.grad(loss, moving)
            for name, gradient in zip(names, gradients, strict=True):
                dense[name][c] = gradient.numpy()
            touched.append(items.astype(np.int32))
            rows.append(of_table.numpy())
            losses[c] = float(loss.detach())
            state = {name: kept[name][c] for name in MOMENTS}
            moved = adam_step(
                kept["vector"][c], state, of_vector.numpy(), config.vector_lr, config.decay
            )
            kept["vector"][c] = moved[0]
            for name, array in moved[1].items():
                kept[name][c] = array
        indptr = np.concatenate([[0], np.cumsum([len(ids) for ids in touched], dtype=np.int64)])
        width = shared[ROWS].shape[1]
        sent = ClientRows(
            indptr.astype(np.int64),
            np.concatenate([np.zeros(0, np.int32), *touched]),
            np.concatenate([np.zeros((0, width), np.float32), *rows]),
        )
        return Fitted(Update(len(view), {ROWS: sent}, dense), kept, losses)

    def _generate(self, theta: Params, vector: Tensor, table: Tensor) -> dict[str, Tensor]:
        """Generate a user's item rows, from rows of U_L, and MLP."""
        config, context = self.config, _with_one(vector @ theta["memory"])
        states = [_with_one(torch.relu(context @ theta[f"hidden{k}"])) for k in range(3)]
        parts = {
            name: (states[k] @ theta[name]).reshape(shape)
            for name, (k, shape) in self._generated().items()
        }
        left = table.reshape(-1, config.hidden + 1) @ states[0]
        return {"rows": left.reshape(-1, config.rank) @ parts.pop("factor"), **parts}

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Take one step of Adam along the mean of the gradients."""
        config, names = self.config, [ROWS, *self._shapes()]
        summed = {ROWS: total.table(ROWS, *shared[ROWS].shape), **total.dense}
        mean = _flat(summed, names) / total.clients
        moved, moments = adam_step(_flat(shared, names), shared, mean, config.lr, config.decay)
        ends = np.cumsum([shared[name].size for name in names])[:-1]
        parts = zip(names, np.split(moved, ends), strict=True)
        return {**{n: p.reshape(shared[n].shape) for n, p in parts}, **moments}

    def download(self, shared: Shared) -> Shared:
        """Send Theta; Adam's moments stay on the server."""
        return {name: array for name, array in shared.items() if name not in MOMENTS}

    serving = download

    # ------------------------------------------------------------ scoring

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Generate every client's item table and MLP, and score all items."""
        scores = np.empty((len(history), history.n_items), np.float32)
        for c, vector in enumerate(np.asarray(private["vector"])):
            scores[c] = _scores(self._served(shared, vector)).numpy()
        return scores

    def _served(self, shared: Shared, vector: Array) -> dict[str, Tensor]:
        theta = {name: torch.from_numpy(shared[name]) for name in self._shapes()}
        with torch.no_grad():
            return self._generate(theta, torch.from_numpy(vector), torch.from_numpy(shared[ROWS]))

    def item_tables(self, shared: Shared, private: Private) -> dict[str, Array]:
        """Return the item table that is generated for a single client."""
        return {"generated": self._served(shared, base.of_one(private)["vector"])["rows"].numpy()}

    def user_form(self, shared: Shared, private: Private, history: TrainView) -> forms.ItemNetworks:
        """Return the generated item table and MLP."""
        parts = self._served(shared, base.of_one(private)["vector"])
        arrays = {name: tensor.numpy() for name, tensor in parts.items()}
        return forms.ItemNetworks([forms.RowNetwork.of(arrays.pop("rows"), arrays)])

    def facts(self, shared: Shared) -> Mapping[str, float]:
        """Return the size of the hypernetwork, which every device downloads in every round."""
        size = sum(array.nbytes for array in self.download(shared).values())
        return {"MB that a device downloads per round": size / 1e6}


def _scores(generated: Params) -> Tensor:
    """Run the generated MLP on the generated item rows."""
    first = generated["rows"] @ generated["layer0/weight"] + generated["layer0/bias"]
    return (torch.relu(first) @ generated["layer1/weight"] + generated["layer1/bias"])[:, 0]


def _with_one(state: Tensor) -> Tensor:
    """Append a 1, whose weights are the biases of the next layer."""
    return torch.cat([state, torch.ones(1)])


def _flat(arrays: Mapping[str, Array], names: list[str]) -> Array:
    return np.concatenate([np.asarray(arrays[name]).ravel() for name in names])
