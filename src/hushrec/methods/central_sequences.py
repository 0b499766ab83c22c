"""Baselines of sequences on pooled data: GRU4Rec and SASRec, trained with the full softmax.

The server holds everybody's data, so neither is federated or private. A network reads the last
``length`` items of a history, oldest first, and its state h_t after each of them scores every item
j as the next one by h_t · e_j, with e the item table that the network also reads from. The loss is
the cross-entropy over all items,

    mean over positions t of -log( exp(h_t · e_next) / sum over all items j of exp(h_t · e_j) ),

without sampled negatives: with it SASRec is a stronger baseline than with the loss of its paper
(Klenitskiy and Vasilev 2023, "Turning dross into gold loss: is BERT4Rec really better than
SASRec?", section 3). Defaults are theirs.

**SASRec** (Kang and McAuley 2018, "Self-attentive sequential recommendation"). The input at
position t is sqrt(d) e + p_t (eq. 1). A block is causal self-attention (eq. 2 and 3) with queries
from the normalised input, then two dense layers with a ReLU (eq. 4), each with a residual
connection and dropout (section 3.3); layers are normalised before each and after the last.

**GRU4Rec** (Hidasi et al. 2016, "Session-based recommendations with recurrent neural networks",
eq. 1 to 4): gated recurrent units over the item vectors. It is not reset between sessions, and it
reads a user's whole sequence in one batch in place of session-parallel batches.

A round is one epoch of Adam over everybody's sequences, in random order. Adam's state is kept with
the shared parameters, so that a resumed run ends with the same bits. One user is scored at a time,
so that scores do not depend on who else is in a batch.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat, model_validator

from hushrec.aggregation import Total, Update
from hushrec.config import Count, Width
from hushrec.data.views import Ragged, TrainView, chunks
from hushrec.io import require_memory
from hushrec.methods.base import (
    NETWORK,
    Between,
    ExportsUser,
    Fitted,
    Method,
    MethodConfig,
    OneOf,
    Scores,
    SearchSpace,
    Shared,
    Traits,
    Tunable,
)
from hushrec.methods.forms import ItemCounts
from hushrec.methods.statistics.pair_weights import latest
from hushrec.private import Private
from hushrec.streams import Round, Streams
from hushrec.training.tensors import Params, Tensor, torch

BETAS, EPSILON = (0.9, 0.999), 1e-8
"""Of Adam (Kingma and Ba 2015)."""
MEAN, SPREAD = "adam/mean/", "adam/spread/"
"""Prefixes of Adam's state: mean gradients, and roots of mean squared gradients."""
ADAM_STEP = 2.0**-16
"""Adam's state is divided by it in the exact sums, whose step is too coarse for gradients."""
SCORES_AT_ONCE = 2**20
"""Scores that are in memory together: they fit the cache of a processor."""
SORTED_BATCHES = 16
"""Batches among which users are put together by length: less padding, still random."""
DropoutShare = Annotated[float, Field(ge=0, lt=1)]


class SequencesConfig(MethodConfig):
    """Options of both methods; a round is one epoch."""

    d: Width = 64
    """Width of item vectors and of the state."""
    length: Count = 200
    """How many of a user's last items are read."""
    dropout: DropoutShare = 0.2
    """Share of the entries that are left out at random while training."""
    lr: PositiveFloat = 0.001
    """Learning rate of Adam."""
    batch: Count = 128
    """Users per step."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""


class CentralSequences(Method, ExportsUser, Tunable):
    """Base of both: batches, loss, Adam and scores; a network is `states`."""

    Config: ClassVar[type[MethodConfig]] = SequencesConfig
    config: SequencesConfig
    traits = Traits(rounds=200, patience=10, pooled=True, unexplained=NETWORK)
    search: ClassVar[SearchSpace] = {
        "d": OneOf((32, 64, 128)),
        "dropout": Between(0.05, 0.6, log=False),
        "lr": Between(3e-4, 3e-3),
    }

    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every parameter of the network, without the item table."""

    @abstractmethod
    def states(self, params: Params, items: Tensor, drop: Dropout) -> Tensor:
        """Return the state after every item: [users, items, d] from [users, items]."""

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the weights; biases are 0, scales of normalised layers 1."""
        d = self.config.d
        require_memory(4 * 12 * view.n_items * d, f"item tables of width d={d}", "a smaller d")
        shapes = {"items": (view.n_items, d), **self.shapes()}
        params = {}
        for name, shape in shapes.items():
            if name.endswith("bias"):
                params[name] = np.zeros(shape, np.float32)
            elif name.endswith("scale"):
                params[name] = np.ones(shape, np.float32)
            else:
                drawn = streams.generator(f"init/{name}").standard_normal(shape, np.float32)
                params[name] = drawn * np.float32(self.config.init_std)
        zeros = {n + name: np.zeros_like(a) for n in (MEAN, SPREAD) for name, a in params.items()}
        return {**params, **zeros}

    def serving(self, shared: Shared) -> Shared:
        """Leave out Adam's state."""
        return {name: array for name, array in shared.items() if not name.startswith("adam/")}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train for one epoch on everybody's sequences in random order."""
        config = self.config
        trained = {name: torch.from_numpy(array.copy()) for name, array in shared.items()}
        params = {n: t.requires_grad_() for n, t in trained.items() if not n.startswith("adam/")}
        past = latest(view.positives, config.length + 1)
        batches = shuffled(past.lengths, config.batch, now.generator("order"))
        drop, total, positions = Dropout(config.dropout, now), 0.0, 0
        for step, users in enumerate(batches, start=(now.number - 1) * len(batches) + 1):
            inputs, targets = padded(past.take(users))
            known = targets >= 0
            states = self.states(params, inputs, drop)[known]
            loss, to_states, to_items = full_softmax(states, params["items"], targets[known])
            through = torch.autograd.grad(states, list(params.values()), to_states)
            gradients = dict(zip(params, through, strict=True))
            gradients["items"] += to_items  # which scores as well as it is read
            _step_of_adam(trained, gradients, config.lr, step)
            total, positions = total + loss * len(states), positions + len(states)
        uploads = {
            name: tensor.detach().double().numpy()[None] / _unit(name)
            for name, tensor in trained.items()
        }
        losses = np.full(len(view), total / max(1, positions))
        return Fitted(Update(1, dense=uploads), {}, losses)

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Take the trained parameters."""
        return {n: (total.dense[n] * _unit(n)).astype(a.dtype) for n, a in shared.items()}

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Score all items as the next one, user by user; without a history all alike."""
        params = {name: torch.from_numpy(np.array(a)) for name, a in self.serving(shared).items()}
        past = latest(history.positives, self.config.length)
        scores, nothing = np.zeros((len(history), history.n_items), np.float32), Dropout(0.0)
        with torch.no_grad():
            for client in np.flatnonzero(past.lengths).tolist():
                items = torch.from_numpy(past[client].astype(np.int64))[None]
                state = self.states(params, items, nothing)[0, -1]
                scores[client] = (params["items"] @ state).numpy()
        return scores

    def user_form(self, shared: Shared, private: Private, history: TrainView) -> ItemCounts:
        """Return the user's scores as of this history: a device does not run the network."""
        return ItemCounts(self.score(shared, private, history)[0])


def _unit(name: str) -> float:
    return ADAM_STEP if name.startswith("adam/") else 1.0


def shuffled(
    lengths: NDArray[np.int64], batch: int, generator: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Return batches of the users with a next item, at random, those of a batch alike in length."""
    order = generator.permutation(np.flatnonzero(lengths > 1))
    found: list[NDArray[np.int64]] = []
    for some in chunks(order, batch * SORTED_BATCHES):
        found += chunks(some[np.argsort(lengths[some], kind="stable")], batch)
    return [found[k] for k in generator.permutation(len(found))]


def padded(past: Ragged) -> tuple[Tensor, Tensor]:
    """Return items and the next ones, [users, items]; later places are item 0, and -1 is next."""
    lengths = past.lengths - 1
    inside = np.arange(lengths.max(initial=0)) < lengths[:, None]
    at = past.indptr[:-1, None] + np.arange(inside.shape[1])
    at = np.where(inside, at, 0)
    values = past.values.astype(np.int64)
    inputs = np.where(inside, values[at], 0)
    targets = np.where(inside, values[np.where(inside, at + 1, 0)], -1)
    return torch.from_numpy(inputs), torch.from_numpy(targets)


class Dropout:
    """Leaves out a share of the entries; what it draws follows from the round."""

    def __init__(self, share: float, now: Round | None = None) -> None:
        self.share = share if now is not None else 0.0
        self.generator = torch.Generator()
        if now is not None:
            self.generator.manual_seed(int(now.key("dropout")[0] >> np.uint64(1)))

    def __call__(self, inputs: Tensor) -> Tensor:
        """Leave out entries, and scale the others up."""
        if not self.share:
            return inputs
        kept = torch.empty_like(inputs).bernoulli_(1 - self.share, generator=self.generator)
        return inputs * kept / (1 - self.share)


@torch.no_grad()
def full_softmax(states: Tensor, items: Tensor, targets: Tensor) -> tuple[float, Tensor, Tensor]:
    """Return the mean cross-entropy over all items, and its gradients by states and by items.

    Some positions at a time, so that scores of all items by all of them are never in memory.
    """
    total, count = 0.0, max(1, len(states))
    to_states, to_items = torch.zeros_like(states), torch.zeros_like(items)
    at_once = max(1, SCORES_AT_ONCE // len(items))
    for start in range(0, len(states), at_once):
        part, wanted = states[start : start + at_once], targets[start : start + at_once]
        scores, rows = part @ items.T, torch.arange(len(part))
        scores -= scores.amax(dim=1, keepdim=True)
        total -= float(scores[rows, wanted].double().sum())
        sums = scores.exp_().sum(dim=1, keepdim=True)
        total += float(sums.double().log().sum())
        scores /= sums
        scores[rows, wanted] -= 1.0
        to_states[start : start + at_once] = scores @ items
        to_items += scores.T @ part
    return total / count, to_states / count, to_items / count


def _step_of_adam(
    trained: Mapping[str, Tensor], gradients: Mapping[str, Tensor], lr: float, taken: int
) -> None:
    """Change parameters and Adam's state in place; ``taken`` counts steps from 1."""
    first, second = (1 - beta**taken for beta in BETAS)
    with torch.no_grad():
        for name, gradient in gradients.items():
            mean, spread = trained[MEAN + name], trained[SPREAD + name]
            mean.mul_(BETAS[0]).add_(gradient, alpha=1 - BETAS[0])
            spread.square_().mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1]).sqrt_()
            change = mean / (spread / math.sqrt(second) + EPSILON)
            trained[name].sub_(change, alpha=lr / first)


class SASRecConfig(SequencesConfig):
    """Options of SASRec."""

    blocks: Count = 2
    """Blocks of self-attention and dense layers."""
    heads: Count = 1
    """Heads of self-attention; d is a multiple."""

    @model_validator(mode="after")
    def _heads_divide(self) -> SASRecConfig:
        if self.d % self.heads:
            raise ValueError(f"d = {self.d} is not a multiple of heads = {self.heads}")
        return self


class SASRec(CentralSequences):
    """Self-attention over a sequence; pooled: the server holds everybody's data."""

    name = "sasrec"
    Config = SASRecConfig
    config: SASRecConfig

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return positions, and of every block queries, keys, values, output, dense layers."""
        d, found = self.config.d, dict[str, tuple[int, ...]]()
        found["positions"] = (self.config.length, d)
        for block in range(self.config.blocks):
            for name in ("queries", "keys", "values", "output", "dense0", "dense1"):
                found[f"block{block}/{name}/weight"] = (d, d)
                found[f"block{block}/{name}/bias"] = (d,)
        norms = [f"block{k}/{name}" for k in range(self.config.blocks) for name in ("in", "middle")]
        for norm in (*norms, "last"):
            found |= {f"{norm}/scale": (d,), f"{norm}/bias": (d,)}
        return found

    def states(self, params: Params, items: Tensor, drop: Dropout) -> Tensor:
        """Run the blocks; padding comes last, so no state before it attends to it."""
        d, length = self.config.d, items.shape[1]
        x = params["items"][items] * math.sqrt(d) + params["positions"][:length]
        x = drop(x)
        later = torch.full((length, length), -torch.inf).triu(1)
        for k in range(self.config.blocks):
            block = {
                name.removeprefix(f"block{k}/"): tensor
                for name, tensor in params.items()
                if name.startswith(f"block{k}/")
            }
            normal = _normalised(block, "in", x)
            x = normal + self._attend(block, normal, x, later, drop)
            normal = _normalised(block, "middle", x)
            inner = drop(torch.relu(_dense(block, "dense0", normal)))
            x = normal + drop(_dense(block, "dense1", inner))
        return _normalised(params, "last", x)

    def _attend(
        self, block: Params, normal: Tensor, x: Tensor, later: Tensor, drop: Dropout
    ) -> Tensor:
        """Return causal self-attention of the inputs, queries from the normalised ones."""
        heads = self.config.heads

        def split(inputs: Tensor) -> Tensor:
            return inputs.reshape(*inputs.shape[:2], heads, -1).transpose(1, 2)

        queries = split(_dense(block, "queries", normal)) / math.sqrt(self.config.d // heads)
        keys, values = split(_dense(block, "keys", x)), split(_dense(block, "values", x))
        weights = torch.softmax(queries @ keys.transpose(-1, -2) + later, dim=-1)
        mixed = (drop(weights) @ values).transpose(1, 2).flatten(2)
        return _dense(block, "output", mixed)


def _dense(params: Params, name: str, inputs: Tensor) -> Tensor:
    return inputs @ params[f"{name}/weight"] + params[f"{name}/bias"]


def _normalised(params: Params, name: str, inputs: Tensor) -> Tensor:
    scale, bias = params[f"{name}/scale"], params[f"{name}/bias"]
    return torch.nn.functional.layer_norm(inputs, scale.shape, scale, bias, 1e-8)


class GRU4RecConfig(SequencesConfig):
    """Options of GRU4Rec."""

    layers: Count = 1
    """Layers of gated recurrent units."""


class GRU4Rec(CentralSequences):
    """Gated recurrent units over a sequence; pooled: the server holds everybody's data."""

    name = "gru4rec"
    Config = GRU4RecConfig
    config: GRU4RecConfig

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the weights of reset gate, update gate and candidate of every layer."""
        d, found = self.config.d, dict[str, tuple[int, ...]]()
        for layer in range(self.config.layers):
            for side in ("input", "state"):
                found[f"layer{layer}/{side}/weight"] = (3 * d, d)
                found[f"layer{layer}/{side}/bias"] = (3 * d,)
        return found

    def states(self, params: Params, items: Tensor, drop: Dropout) -> Tensor:
        """Run the layers one after the other, with dropout on the input of each."""
        x = params["items"][items]
        for layer in range(self.config.layers):
            x = drop(x)
            names = ("input/weight", "state/weight", "input/bias", "state/bias")
            weights = [params[f"layer{layer}/{name}"] for name in names]
            first = x.new_zeros(1, len(x), self.config.d)
            # One layer with biases, no dropout of its own, one direction, users first.
            x, _ = torch.gru(x, first, weights, True, 1, 0.0, False, False, True)
        return x
